"""The oracles of the public records against what those records publish, and against torch.

Functions `figures_of_` compute of a station what stands in published.toml by the same names.
"""

import itertools
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from lineage import STATIONS
from lineage_oracles import kind_of

PUBLISHED, latest = {}, {}  # by number
for number, own in tomllib.loads(Path(__file__).with_name("published.toml").read_text()).items():
    latest = latest | own
    PUBLISHED[int(number)] = latest


def since(first):
    return pytest.mark.parametrize("number", [number for number in PUBLISHED if number >= first])


def changes_of(values):
    """(index, value) of each that is not the one before it."""
    pairs = enumerate(itertools.pairwise(values), 1)
    return [(index, after) for index, (before, after) in pairs if before != after]


def at_all_steps(station, schedule):
    return [schedule(step) for step in range(station.total_steps())]


def figures_of_rates(station, published):
    factors = at_all_steps(station, station.rate_factor)
    changes = changes_of(factors)
    falls = next(step for step, after in changes if after < factors[step - 1] - 1e-5)
    after_schedules = range(station.num_iterations, station.total_steps() + 1)
    (last_rate,) = {round(station.rate_factor(step), 12) for step in after_schedules}
    momenta = at_all_steps(station, station.muon_momentum)
    multipliers, layer = [], station.block_shapes(3)
    for name in (next(name for name in layer if "attn.q" in name), "mlp.c_fc", "mlp.c_proj"):
        multipliers.append(station.rate(f"blocks.3.{name}", layer[name]) / station.muon_lr)
    return dict(
        jumps=[step for step, after in changes if after > factors[step - 1]],
        falls=falls, last_rate=last_rate,
        plateaus=factors[:1] + [after for step, after in changes if step < falls],
        rates=[[step, factors[step]] for step, _ in published.get("rates", ())],
        momenta=[momenta[step] for step in (0, 150, 300, -49, -1)], multipliers=multipliers)


def figures_of_steps(station, published):
    """What changes from step to step but for rates, by the names of the published values."""
    total = station.total_steps()
    millions = 8 * sum(at_all_steps(station, station.seq_len)) / 1e6
    decimals = len(str(published.get("tokens")).partition(".")[2])
    long = [station.long_window(step) for step in range(total + 1)]
    shorts = dict(at_all_steps(station, station.training_windows))
    tied = at_all_steps(station, station.tied)
    fading = [[step, station.target_weights(step)[-1]] for step, _ in published.get("fading", ())]
    assert long == sorted(long) and tied == sorted(tied, reverse=True)
    adam_steps = [step for step in range(total) if station.adam_steps(step)]
    frozen = changes_of(at_all_steps(station, station.scalars_frozen))
    return dict(
        steps=total, tokens=round(millions, decimals),
        windows=[step for step, _ in changes_of(long)],
        shorts=[[long, shorts[long]] for long, _ in published["shorts"]],
        at_last=list(station.validation_windows(total)),
        fading=fading, frozen=[step for step, _ in frozen],
        tied=[sum(tied), station.copy_step()],
        adam_steps=[len(adam_steps), sum(map(station.tied, adam_steps))])


@since(18)
def test_a_station_has_the_published_figures(number):
    station, published = STATIONS[number], PUBLISHED[number]
    found = figures_of_rates(station, published) | figures_of_steps(station, published)
    for name, expected in published.items():
        assert found[name] == pytest.approx(np.array(expected), rel=1e-9, abs=5.1e-7), name


def test_a_step_of_adam_decays_as_published():
    """In #57 at the full rate, in millionths."""
    station, found = STATIONS[57], {}
    for name in station.parameter_shapes():
        kind = kind_of(name)
        found[kind] = 1e6 * station.decays.get(kind, 0.0) * station.rate(name, (1, 1)) ** 2
    published = dict(lm_head=48, embed=48, value_embeds=9000, attn_gate=0.32, value_gate=0.32,
                     smear_gate=0, skip_gate=0, x0_lambdas=0)
    assert {kind: found[kind] for kind in published} == pytest.approx(published)


@since(31)
def test_yarn_gives_the_published_frequencies_and_scales(number):
    station = STATIONS[number]
    initial, scale = station.rotary(0)
    np.testing.assert_allclose(initial, [1024 ** (-j / 31) for j in range(32)] + [0.0] * 32)
    assert scale == 0.1
    checks = [  # after each change of the window: frequencies by index, and the scale
        ({3: 0.504225, 4: 0.356011, 5: 0.254507, 6: 0.184221, 31: 4.18527e-4}, 0.116946),
        ({6: 0.171840, 7: 0.114783, 31: 2.66335e-4}, 0.127518),
        ({7: 0.111207, 31: 2.25361e-4}, 0.131778)]
    for step, (expected, expected_scale) in zip(PUBLISHED[number]["windows"], checks, strict=True):
        before, _ = station.rotary(step - 1)
        frequencies, scale = station.rotary(step)
        assert {j: frequencies[j] for j in expected} == pytest.approx(expected, rel=5e-6)
        assert all(before[j] > frequencies[j] for j in expected)
        assert frequencies[:3] == initial[:3] and frequencies[32:] == [0.0] * 32
        assert scale == pytest.approx(expected_scale, abs=5e-7)


def test_pairs_of_tokens_have_the_published_rows():
    """A row a token; to the second one the token before is always the same, and overflows."""
    def rows(*tokens):
        return STATIONS[62].rows_read(tokens)["bigram_embed"].tolist()

    tokens = 50256, 0, 1, 2, 50256, 50255, 50256, 50256, 262, 464, 11, 13, 198
    assert rows(*tokens) == [251519, 193815, 36313, 94597, 187029, 127707, 244156, 35060, 245243,
                             70649, 188566, 238680, 78264]
    seconds = [rows(7, second)[1] for second in (0, 1, 2, 198, 464, 50255)]
    assert seconds == [193815, 159838, 129737, 209144, 204580, 32011]


@pytest.mark.parametrize("shape", [(32, 64), (6, 12)])
def test_muon_of_28_is_that_of_torch(shape):
    """Whose iteration is computed in bf16: an error of 2^-8 that each iteration may make larger."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(shape, generator=generator).double()
    before, other = p.clone(), torch.nn.Parameter(p.float())
    theirs = torch.optim.Muon([other], lr=0.05, weight_decay=0.0, momentum=0.95)
    state = dict(mean=torch.zeros_like(p))
    for step in (400, 401, 402):
        grad = torch.randn(shape, generator=generator)
        STATIONS[28].muon_step(p, grad.double(), state, step, lr=0.05)
        other.grad = grad
        theirs.step()
    expected = other.detach() - before
    assert (p - before - expected).norm() < 0.03 * expected.norm()
