"""The oracles of the public records against what those records publish, and against torch."""

import dataclasses
import itertools

import lineage_oracles as oracles
import numpy as np
import pytest
import torch
from lineage_oracles import STATIONS

GROWTH = {  # the steps from which on the long window has one block more
    18: [103, 206, 309, 412, 515, 618, 721, 824, 927, 1030, 1133, 1236, 1339],
    19: [104, 207, 311, 414, 517, 621, 724, 827, 931, 1034, 1137, 1241, 1344],
    21: [132, 263, 394, 525, 656, 787, 918, 1049, 1181, 1312, 1443, 1574, 1705],
    28: [126, 252, 377, 503, 628, 754, 879, 1005, 1131, 1256, 1382, 1507, 1633]}
WINDOWS = {  # the long window of the first steps, and the steps from which on it has another
    **{number: (1, [*zip(steps, range(2, 15), strict=True)]) for number, steps in GROWTH.items()},
    31: (3, [(557, 7), (1114, 11), (1670, 13)]),
    40: (3, [(764, 7), (1528, 11), (2330, 13)]),
    43: (3, [(735, 7), (1470, 11), (2205, 13)]),
    50: (3, [(684, 7), (1367, 11), (2050, 13)]),
    53: (3, [(627, 7), (1254, 11), (1880, 13)])}


def changes_of(values):
    """(index, value) of each that is not the one before it."""
    pairs = enumerate(itertools.pairwise(values), 1)
    return [(index, after) for index, (before, after) in pairs if before != after]


def at_all_steps(schedule, station):
    return [schedule(station, step) for step in range(oracles.total_steps(station))]


@pytest.mark.parametrize(("number", "steps", "tokens"), [
    (28, 1695, 666.5), (31, 1670, 656.7), (40, 2330, 610.8), (43, 2245, 588.5),
    (50, 2090, 552.992768), (53, 1920, 508.428288)])
def test_steps_and_millions_of_tokens_are_those_published(number, steps, tokens):
    lengths = at_all_steps(oracles.seq_len, STATIONS[number])
    assert len(lengths) == steps
    assert 8 * sum(lengths) / 1e6 == pytest.approx(tokens, abs=0.05 if number < 50 else 1e-9)
    if number >= 50:
        (first, _), (second, _), _ = WINDOWS[number][1]
        assert lengths[0] == 16_384
        assert changes_of(lengths) == [(first, 32_768), (second, 49_152)]


@pytest.mark.parametrize("number", WINDOWS)
def test_windows_grow_at_the_published_steps(number):
    station, (first, changes) = STATIONS[number], WINDOWS[number]
    last = oracles.total_steps(station)
    windows = [oracles.long_window(station, step) for step in range(last + 1)]
    assert windows[0] == first
    assert changes_of(windows) == changes
    shorts = dict(at_all_steps(oracles.training_windows, station))
    if number in GROWTH:
        assert shorts[1] == 1 and shorts[14] == 7
    else:
        assert shorts == {3: 1, 7: 3, 11: 5} | ({13: 6} if number >= 43 else {})
    at_last = (14, 7) if number in GROWTH else {31: (13, 6)}.get(number, (20, 6))
    assert oracles.validation_windows(station, last) == at_last


@pytest.mark.parametrize("number", [31, 40, 43, 50, 53])
def test_yarn_gives_the_published_frequencies_and_scales(number):
    station = STATIONS[number]
    initial, scale = oracles.rotary(station, 0)
    exact = [1024 ** (-j / 31) for j in range(32)] + [0.0] * 32
    np.testing.assert_allclose(initial, exact, rtol=1e-14)
    assert initial[31] == 9.765625e-4 and scale == 0.1
    checks = [  # after each change of the window: frequencies by index, and the scale
        ({3: 0.504225, 4: 0.356011, 5: 0.254507, 6: 0.184221, 31: 4.18527e-4}, 0.116946),
        ({6: 0.171840, 7: 0.114783, 31: 2.66335e-4}, 0.127518),
        ({7: 0.111207, 31: 2.25361e-4}, 0.131778)]
    for (step, _), (expected, expected_scale) in zip(WINDOWS[number][1], checks, strict=True):
        before, _ = oracles.rotary(station, step - 1)
        frequencies, scale = oracles.rotary(station, step)
        for index, value in expected.items():
            assert frequencies[index] == pytest.approx(value, rel=5e-6)
            assert before[index] > frequencies[index]
        assert frequencies[:3] == initial[:3] and frequencies[32:] == [0.0] * 32
        assert scale == pytest.approx(expected_scale, abs=5e-7)


@pytest.mark.parametrize(("number", "begins", "peaks"), [
    (28, 933, (1, 1)), (31, 835, (1, 1)), (40, 1260, (1, 1)), (43, 1103, (1, 1)),
    (50, 923, (1.51, 1.93)), (53, 846, (1.52, 1.73))])
def test_rates_fall_from_the_published_steps(number, begins, peaks):
    station, N = STATIONS[number], STATIONS[number].num_iterations
    factors = at_all_steps(oracles.rate_factor, station)
    first, second = (step for step, _ in WINDOWS[number][1][:2])
    assert factors[:first] == [1] * first
    np.testing.assert_allclose(factors[first:begins], peaks[0], rtol=1e-12)
    # At 1670 / 2 and 0.45 · 1880 steps the line begins at its highest.
    assert factors[begins + (number in (31, 53))] < peaks[0] - 1e-5
    jumps = [s for s, (a, b) in enumerate(itertools.pairwise(factors), 1) if b > a]
    assert jumps == ([first, second] if number >= 50 else [])
    if number >= 50:
        left = (1 - second / N) / 0.55
        assert factors[second] == pytest.approx(peaks[1] * left + 0.1 * (1 - left))
    at_last = {40: 0.1002, 43: 0.10018}.get(number, 0.1)
    np.testing.assert_allclose([*factors[N:], oracles.rate_factor(station, N)], at_last, atol=1e-12)


@pytest.mark.parametrize("number", [28, 31, 40, 43, 50, 53])
def test_momentum_has_the_published_plateaus(number):
    momenta = at_all_steps(oracles.muon_momentum, STATIONS[number])
    assert momenta[0] == 0.85
    assert momenta[150] == pytest.approx(0.9)
    falls = {40: 2280, 43: 2195, 50: 2040, 53: 1870}.get(number, len(momenta) - 1)
    plateau = 0.949667 if number == 40 else 0.95
    np.testing.assert_allclose(momenta[300 : falls + 1], plateau, atol=5e-7)
    if number >= 40:
        np.testing.assert_allclose([momenta[falls + 1], momenta[-1]], [0.948, 0.852])



def test_target_weights_are_the_published_ones():
    weights = at_all_steps(oracles.target_weights, STATIONS[53])
    assert weights[0] == [1.0, 0.5, 0.25]
    assert changes_of([len(of) for of in weights]) == [(627, 2), (1254, 1)]
    assert weights[313] == pytest.approx([1.0, 0.5, 0.25 * (1 - 939 / 1880)])
    assert weights[627][1] == pytest.approx(0.5, abs=1e-3)
    assert weights[940] == pytest.approx([1.0, 0.25])
    assert 0 < weights[1253][1] < 1e-3


def test_the_scalars_rest_and_the_head_is_tied_until_the_published_steps():
    station = STATIONS[53]
    frozen = [step for step in range(1920) if oracles.scalars_frozen(station, step)]
    assert frozen == [*range(627, 667), *range(1254, 1294), *range(1880, 1920)]
    steps = [s for s in range(1920) if oracles.adam_steps(station, s) and s not in frozen]
    assert [min(s for s in steps if s >= begin) for begin in (627, 1254)] == [667, 1295]
    assert max(steps) == 1879
    assert (oracles.split_step(station), oracles.copy_step(station)) == (1254, 1253)
    odd = dataclasses.replace(station, num_iterations=7)
    assert (oracles.split_step(odd), oracles.copy_step(odd)) == (5, 3)


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
            oracles.muon_step(station, p, grad.double(), state, step, lr=0.05)
            other.grad = grad
            theirs.step()
        expected = other.detach() - before
        assert (p - before - expected).norm() < 0.03 * expected.norm(), shape
