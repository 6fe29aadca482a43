"""The oracles of the public records against what those records publish, and against torch.

Functions `figures_of_` compute of a station what stands in published.toml by the same names.
"""

import itertools
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from lineage import STATIONS
from lineage_oracles import kind_of
from stations.to_92 import MAPS

PUBLISHED, latest = {}, {}  # by number
for number, own in tomllib.loads(Path(__file__).with_name("published.toml").read_text()).items():
    latest = latest | own
    PUBLISHED[int(number)] = latest
TO_92 = ["92a", "92b", "92c", "92d", "92e", "92f", 92]
FIVE_STAGES = TO_92[3:]
LAST = STATIONS[92]


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
        return STATIONS[62].rows_read(tokens).tolist()

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


# ---- From #90 on


def test_90_has_the_published_scales_and_frequencies():
    station = STATIONS[90]
    frequencies, scale = station.rotary(0)
    assert frequencies[:24] == pytest.approx([1024 ** (-j / 23) for j in range(24)])
    assert frequencies[24:] == [0.0] * 24
    found = [station.rotary(step)[1] for step in (0, 423, 847, 1270, 1314, 1315)]
    published = [0.1154700538, 0.1350375597, 0.1472445534, *[0.1521641142] * 3]
    assert found == pytest.approx(published, abs=5e-11)
    steps = range(station.total_steps())
    assert (len(steps), 8 * sum(map(station.seq_len, steps))) == (1315, 350_617_600)
    assert [station.muon_momentum(s) for s in (1265, 1314)] == pytest.approx([0.95, 0.852])
    assert (station.copy_step(), sum(map(station.adam_steps, steps))) == (847, 657)
    assert station.parameter_shapes()["blocks.0.attn.qk_w"] == (6, 192, 768)
    assert station.moments_axis(torch.ones(768, 768)) == -1  # of the stored, transposed matrix


@pytest.mark.parametrize("key", TO_92)
def test_narrow_and_wide_heads_have_a_yarn_of_their_own(key):
    """After each change: both scales, and the highest and the lowest frequency."""
    station = STATIONS[key]
    changes = [320, 681, 1174] if key in FIVE_STAGES else [423, 847, 1270]
    narrow, wide = (0.158564, 0.174764, 0.181136), (0.099404, 0.108390, 0.112011)
    for letter, first, scales in (("S", 0.13, narrow), ("P", 0.13, narrow), ("L", 0.085, wide)):
        for step, expected in zip(changes, scales, strict=True):
            assert station.rotary(step, letter)[1] == pytest.approx(expected, abs=5e-7)
            before = station.rotary(step - 1, letter)
            assert before[1] < expected - 0.001
        frequencies, scale = station.rotary(0, letter)
        assert scale == first
        assert frequencies[:32] == pytest.approx([1024 ** (-j / 31) for j in range(32)])
        assert frequencies[32:] == ([0.0] * 32 if letter == "L" else [])
        last, _ = station.rotary(station.total_steps(), letter)
        slow = 1.0 if letter == "L" else 0.749931886
        highest = [station.rotary(step, letter)[0][0] for step in changes]
        assert highest == pytest.approx([slow] * 3, rel=1e-8)
        lowest = 2.25360577e-4 if letter == "L" else 1.62760417e-4
        assert last[31] == pytest.approx(lowest, rel=1e-8)


def test_the_networks_have_the_published_parameters():
    shapes, first = LAST.parameter_shapes(), LAST.initial_distribution
    assert sum(name.endswith("qk_w") for name in shapes) == 7  # layers with attention
    assert [len(rows) for rows in LAST.gate_rows()] == [8, 8]
    assert [sum(rows for _, _, rows, _ in of) for of in LAST.gate_rows()] == [23, 13]
    assert shapes["mudd_w2g"] == (10, 12, 64) and shapes["mudd_w2"] == (14 + 10, 64)
    assert sum("mlp.c_fc" in name for name in shapes) == 11  # 7 has none, 8 has two
    assert sum("value_embeds" in name for name in shapes) == 4
    assert sum("value_gate" in name for name in shapes) == 3
    muon = [shape[-2:] for name, shape in shapes.items() if LAST.is_muon(name)
            for _ in range(math.prod(shape[:-2]))]
    assert sorted((s, muon.count(s)) for s in set(muon)) == [
        ((256, 768), 42), ((768, 768), 14), ((2816, 768), 22)]
    resid = 10 * 1.1**0.5
    biases = [0] * 6 + [20, 20, resid, 10, 0, 0.5, resid, 10] + [0, -5] + [0] * 8
    assert first("mudd_b2")[1] == pytest.approx(biases)
    gates = [0] * 12 + [2.5] * 6 + [0] * 3 + [0.5] * 2 + [2.5] * 6 + [0] * 3 + [0.5] * 3 + [5]
    assert first("mudd_gate_b2")[1] == pytest.approx(gates)
    assert first("ngram_embed.weight") == first("mudd_w2g") == ("constant", 0.0)
    for name in ("blocks.1.attn.vo_w", "blocks.8.second_mlp.c_fc"):
        assert first(name) == ("uniform", pytest.approx(0.03125))


@pytest.mark.parametrize("key", FIVE_STAGES)
def test_stages_and_rates_are_the_published_ones(key):
    station, steps = STATIONS[key], range(1194)
    assert [row.end for row in station.stage_rows] == [320, 681, 1107, 1174, 1194]
    assert [row.max_document for row in station.stage_rows] == [896, 2048, 3072, 3072, 3072]
    assert station.total_steps() == 1194
    assert 8 * sum(map(station.seq_len, steps)) == 328_663_040
    windows = [station.training_windows(step) for step in (0, 320, 681, 1107, 1174)]
    assert windows == [(3, 1), (7, 3), (11, 5), (11, 5), (13, 6)]
    assert station.validation_windows(1194) == (20, 6)
    rates = {234: 1, 235: 0.999255, 319: 0.936702, 320: 1.408383, 513: 1.157894, 514: 1.156596,
             680: 0.941149, 681: 1.049989, 1106: 0.403447, 1107: 0.391182, 1173: 0.301361,
             1174: 0.3, 1193: 0.3}
    found = {step: station.rate_factor(step) for step in rates}
    assert found == pytest.approx(rates, abs=5.1e-7)
    assert station.muon_momentum(1145) == pytest.approx(0.9284)
    assert station.muon_momentum(1193) == pytest.approx(0.8516)


@pytest.mark.parametrize("key", FIVE_STAGES)
def test_events_and_split_are_the_published_ones(key):
    station, steps = STATIONS[key], range(1194)
    events = [step for step in steps if station.event(step)]
    assert events == [*range(1, 336, 2), *range(339, 1192, 4)]
    assert len(events) == 382 and len(range(1, 336, 2)) == 168
    tables = "value_embeds.0.weight", "ngram_embed.weight" if key == 92 else "bigram_embed.weight"
    for name in tables:
        assert [step for step in steps if station.due(name, step)] == events
    adam = [step for step in steps if station.due("lm_head.weight", step)]
    assert adam == list(range(1, 1194, 2)) and len(adam) == 597
    assert station.decay_at("value_embeds", station.period_from - 1) == 0.025
    assert station.decay_at("value_embeds", station.period_from) == 0.05
    assert station.betas_at("lm_head", 400) == (0.5, 0.95)
    assert station.copy_step() == 1175
    assert [step for step in adam if station.tied(step)] == list(range(1, 1176, 2))
    assert [step for step in adam if not station.tied(step)] == list(range(1177, 1194, 2))
    # Gradients wait but for one step in four
    assert [step for step in steps if station.complete(step) and step >= 336] == list(
        range(336, 1194, 4))


def test_attention_is_cut_within_documents_in_training_alone():
    station = STATIONS["92d"]
    tokens = np.zeros(9000, int)
    tokens[[0, 3072, 3073, 5700]] = station.eot_token
    station.longest = station.attention_cut
    numbers = station.documents(tokens)
    station.longest = None
    cuts = np.flatnonzero(np.diff(numbers, prepend=0))
    assert cuts.tolist() == [0, 2560, 3072, 3073, 5633, 5700, 8260]
    whole = station.documents(tokens)
    assert np.flatnonzero(np.diff(whole, prepend=0)).tolist() == [0, 3072, 3073, 5700]


def test_six_maps_have_the_published_envelope():
    """Of a singular value x, by a diagonal matrix whose largest one is that of the norm."""
    x = np.array([0.002, *np.geomspace(0.003, 1 / 1.05, 200_001)])
    largest = []
    for a, b, c in MAPS:
        x = a * x + b * x**3 + c * x**5
        largest.append(x.max())
    assert largest[:5] == pytest.approx([1.53, 1.40, 1.37, 1.22, 0.91], abs=0.006)
    assert x[1:].min() == pytest.approx(0.99507, abs=6e-6)
    assert x[1:].max() == pytest.approx(1.00040, abs=6e-6)
    assert x[0] == pytest.approx(0.909, abs=5e-4)
    assert math.prod(a for a, _, _ in MAPS) == pytest.approx(643.13, abs=0.005)


def test_unused_rows_decay_over_a_run_as_published():
    kept = math.prod(1 - 2.25 * (0.023 * LAST.rate_factor(step)) ** 2 for step in range(1194))
    assert kept == pytest.approx(0.2798388, abs=5e-8)
    mlp = LAST.rate("blocks.0.mlp.c_fc", (2816, 768)), LAST.rate("blocks.8.second_mlp.c_proj",
                                                                 (2816, 768))
    assert mlp == pytest.approx((0.023 * 1.914854, 0.046 * 1.914854), rel=1e-6)


def test_ticks_of_the_averages_are_the_published_ones():
    found = {name: {} for name in ("ends", "late", "banks", "tables")}
    for step in range(1194):
        for name, rate in STATIONS["92e"].ticks(step).items():
            found[name][step] = rate
    assert list(found["ends"]) == [896, *range(897, 1194, 2)]
    assert len(found["ends"]) == 150
    rates = [found["ends"][step] for step in range(897, 1192, 2)]
    assert rates == pytest.approx([0.0133331842] * 148, abs=5e-11)
    assert found["ends"][1193] == pytest.approx(0.0066889632, abs=5e-11)
    assert list(found["late"]) == list(range(945, 1194, 4)) and len(found["late"]) == 63
    assert list(found["banks"]) == sorted([*range(897, 1194, 4), 1192])
    assert len(found["banks"]) == 76
    assert list(found["tables"]) == list(range(947, 1192, 4)) and len(found["tables"]) == 62
    for name, rate in dict(late=4 / 53, banks=2 / 75, tables=4 / 53).items():
        assert set(found[name].values()) == {rate}


def test_each_stream_has_the_published_candidates():
    targets = range(3000)
    C, offset = LAST.candidates(targets, 0, 10_240)
    assert (sum(C), C[3000:3004], offset) == (197_471_229, [3006, 3014, 3017, 3025], 12_564)
    C, offset = LAST.candidates(targets, offset, 10_240)
    assert (sum(C), offset) == (197_431_846, 25_128)
    C, offset = LAST.candidates(targets, 50_304 * 7 // 8, 10_240)
    assert (sum(C), offset) == (197_494_251, 6276)
    C, offset = LAST.candidates(targets, offset, 10_240)
    assert (sum(C), offset) == (197_484_384, 18_840)
    swept = [20_011 * k % 50_304 for k in range(30_000)]  # all that the window will have
    C, offset = LAST.candidates(swept, 0, 32_768)
    assert (sum(C), len(C), offset) == (821_036_818, 32_768, 4961)
    assert LAST.candidates(range(7), 5, 7) == (list(range(7)), 5)
    with pytest.raises(AssertionError):
        LAST.candidates(range(8), 5, 7)
    LAST.optimizer_state({})
    assert LAST.offsets == [6288 * r for r in range(8)]


@pytest.mark.parametrize("key", ["92f", 92])
def test_numbers_of_classes_are_the_published_ones_at_all_steps(key):
    counts = [STATIONS[key].num_classes(step) for step in range(1194)]
    changes = [(step, after) for step, (before, after) in enumerate(itertools.pairwise(counts), 1)
               if before != after]
    assert counts[0] == 10_240
    assert changes == [(681, 14_336), (965, 24_576), (1107, None)]


def test_tokens_read_the_published_rows_and_signs():
    for token, row in ((262, 20_632_011), (11, 13_084_038), (50_256, 40_499_699)):
        rows = LAST.rows_read([7, token])
        assert rows["pairs"] == [42_301_439, row] and rows["threes"] == [84_602_879] * 2
        assert LAST.rows_read([9, token]) == rows
    tokens = [1, 50_256, 262, 11]
    rows = LAST.rows_read(tokens)
    assert rows["pairs"][3] == 6_990_873
    assert rows["threes"][3] == 49_278_731
    of_pairs, of_threes = LAST.sign_rows_read(tokens)
    assert (of_pairs[3], of_threes[3]) == (71, 1595)
    assert (of_pairs[0], of_threes[:2]) == (0, [0, 0])
    assert of_pairs[1] != 0
