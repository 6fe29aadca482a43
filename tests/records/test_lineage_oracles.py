"""The oracles of the public records against what those records publish, and against torch.

What was published of a station stands in its file, as `published`; each test takes the stations
that have what it asks for.
"""

import itertools

import numpy as np
import pytest
import torch
from lineage import STATIONS


def that_publish(key):
    chosen = [station for station in STATIONS.values() if key in station.published]
    return pytest.mark.parametrize("station", chosen, ids=[f"#{s.number}" for s in chosen])


def changes_of(values):
    """(index, value) of each that is not the one before it."""
    pairs = enumerate(itertools.pairwise(values), 1)
    return [(index, after) for index, (before, after) in pairs if before != after]


def at_all_steps(station, schedule):
    return [schedule(step) for step in range(station.total_steps())]


@that_publish("tokens")
def test_steps_and_millions_of_tokens_are_those_published(station):
    published, lengths = station.published, at_all_steps(station, station.seq_len)
    assert len(lengths) == published["steps"]
    digits = len(str(published["tokens"]).partition(".")[2])
    tolerance = 0.05 if digits == 1 else 1e-9
    assert 8 * sum(lengths) / 1e6 == pytest.approx(published["tokens"], abs=tolerance)
    borders = published.get("windows") if len(station.seq_lens) > 1 else []
    assert changes_of(lengths) == list(zip(borders, station.seq_lens[1:]))


@that_publish("windows")
def test_windows_grow_at_the_published_steps(station):
    published, last = station.published, station.total_steps()
    windows = [station.long_window(step) for step in range(last + 1)]
    grown = range(2, 15) if "shorts" not in published else station.windows[1:]
    assert windows[0] == (1 if "shorts" not in published else station.windows[0])
    assert changes_of(windows) == list(zip(published["windows"], grown, strict=True))
    shorts = dict(at_all_steps(station, station.training_windows))
    if "shorts" in published:
        assert shorts == published["shorts"]
    else:
        assert shorts[1] == 1 and shorts[14] == 7
    assert station.validation_windows(last) == published["at_last"]


@that_publish("shorts")
def test_yarn_gives_the_published_frequencies_and_scales(station):
    initial, scale = station.rotary(0)
    exact = [1024 ** (-j / 31) for j in range(32)] + [0.0] * 32
    np.testing.assert_allclose(initial, exact, rtol=1e-14)
    assert initial[31] == 9.765625e-4 and scale == 0.1
    checks = [  # after each change of the window: frequencies by index, and the scale
        ({3: 0.504225, 4: 0.356011, 5: 0.254507, 6: 0.184221, 31: 4.18527e-4}, 0.116946),
        ({6: 0.171840, 7: 0.114783, 31: 2.66335e-4}, 0.127518),
        ({7: 0.111207, 31: 2.25361e-4}, 0.131778)]
    pairs = zip(station.published["windows"], checks, strict=True)
    for step, (expected, expected_scale) in pairs:
        before, _ = station.rotary(step - 1)
        frequencies, scale = station.rotary(step)
        for index, value in expected.items():
            assert frequencies[index] == pytest.approx(value, rel=5e-6)
            assert before[index] > frequencies[index]
        assert frequencies[:3] == initial[:3] and frequencies[32:] == [0.0] * 32
        assert scale == pytest.approx(expected_scale, abs=5e-7)


@that_publish("falls")
def test_rates_jump_and_fall_at_the_published_steps(station):
    published, N = station.published, station.num_iterations
    factors = at_all_steps(station, station.rate_factor)
    jumps = [s for s, (a, b) in enumerate(itertools.pairwise(factors), 1) if b > a]
    assert jumps == published.get("jumps", [])
    falls, first = published["falls"], (jumps or [0])[0]
    assert factors[:first] == [1] * first
    np.testing.assert_allclose(factors[first:falls], published.get("peak", 1), rtol=1e-12)
    assert factors[falls] < factors[falls - 1] - 1e-5
    for step, value in published.get("rates", {}).items():
        assert factors[step] == pytest.approx(value, abs=5.1e-7), step
    at_last = published.get("last_rate", 0.1)
    np.testing.assert_allclose([*factors[N:], station.rate_factor(N)], at_last, atol=1e-12)


@that_publish("momentum_falls")
def test_momentum_has_the_published_plateaus(station):
    momenta = at_all_steps(station, station.muon_momentum)
    falls = station.published["momentum_falls"]
    assert momenta[0] == 0.85
    assert momenta[150] == pytest.approx(0.9)
    plateau = station.published.get("highest_momentum", 0.95)
    np.testing.assert_allclose(momenta[300 : falls + 1], plateau, atol=5e-7)
    if station.momentum_cooldown:
        np.testing.assert_allclose([momenta[falls + 1], momenta[-1]], [0.948, 0.852])
    assert len(momenta) - falls == (50 if station.momentum_cooldown else 1)


@that_publish("target_weights")
def test_target_weights_are_the_published_ones(station):
    weights = at_all_steps(station, station.target_weights)
    first, second, _ = station.published["windows"]
    assert weights[0] == [1.0, 0.5, 0.25]
    assert changes_of([len(of) for of in weights]) == [(first, 2), (second, 1)]
    for step, expected in station.published["target_weights"].items():
        assert weights[step] == pytest.approx(expected, abs=5.1e-7), step


def test_the_scalars_rest_and_the_head_is_tied_until_the_published_steps():
    station = STATIONS[53]
    frozen = [step for step in range(1920) if station.scalars_frozen(step)]
    assert frozen == [*range(627, 667), *range(1254, 1294), *range(1880, 1920)]
    steps = [s for s in range(1920) if station.adam_steps(s) and s not in frozen]
    assert [min(s for s in steps if s >= begin) for begin in (627, 1254)] == [667, 1295]
    assert max(steps) == 1879
    odd = type(station)(num_iterations=7)
    assert (odd.split_step(), odd.copy_step()) == (5, 3)


@that_publish("tied")
def test_the_head_is_tied_for_the_published_steps(station):
    untied, copied = station.published["tied"]
    tied = at_all_steps(station, station.tied)
    assert (tied.index(False), tied.count(True), station.copy_step()) == (untied, untied, copied)


def test_muon_of_28_is_that_of_torch():
    """Whose iteration is computed in bf16: an error of 2^-8 that each iteration may make larger."""
    station, generator = STATIONS[28], torch.Generator().manual_seed(0)
    for shape in ((32, 64), (6, 12)):
        p = torch.randn(shape, generator=generator).double()
        before, other = p.clone(), torch.nn.Parameter(p.float())
        theirs = torch.optim.Muon([other], lr=0.05, weight_decay=0.0, momentum=0.95)
        state = dict(mean=torch.zeros_like(p))
        for step in (400, 401, 402):
            grad = torch.randn(shape, generator=generator)
            station.muon_step(p, grad.double(), state, step, lr=0.05)
            other.grad = grad
            theirs.step()
        expected = other.detach() - before
        assert (p - before - expected).norm() < 0.03 * expected.norm(), shape
