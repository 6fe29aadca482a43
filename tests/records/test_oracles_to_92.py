"""The oracles of #90 to #92 and of what is on the way, against the published figures."""

import itertools
import math

import numpy as np
import pytest
import torch
from lineage import STATIONS, tiny_station
from stations import station_92c

TO_92 = ["92a", "92b", "92c", "92d", "92e", "92f", 92]
FIVE_STAGES = TO_92[3:]
LAST = STATIONS[92]


def test_stations_on_the_way_stand_before_the_public_one():
    assert list(STATIONS)[-9:] == [90, 91, *TO_92]
    assert all(88 < STATIONS[key].place <= 92 for key in (90, 91, *TO_92))


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


# ---- The network


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


def some_weights(station, seed=0):
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in station.parameter_shapes().items():
        size = 0.1 if len(shape) > 1 else 1.0
        weights[name] = size * torch.randn(shape, generator=generator, dtype=torch.float64)
    return weights


def tiny(key, **changes):
    station = STATIONS[key]
    station = tiny_station(
        station, station.run_length, **station.tiny | dict(streams=2) | changes)
    generator = np.random.default_rng(0)
    width = station.model_dim if key == 92 else station.bigram_width
    station.signs = torch.from_numpy(generator.choice([-1.0, 1.0], (station.sign_rows, width)))
    station.prefixes = np.arange(station.vocab_size) // 2
    station.optimizer_state({})  # which sets where the sweeps begin
    return station


def some_streams(station, step=0, seed=0):
    tokens = np.random.default_rng(seed).integers(0, 256, size=4000)
    tokens[::13] = station.eot_token
    return next(station.streams_of_steps([tokens], [step]))


@pytest.mark.parametrize("key", TO_92)
def test_dead_entries_of_the_networks_are_the_published_ones(key, in_double):
    station = tiny(key)
    weights = some_weights(station)
    _, grads = station.gradients(weights, some_streams(station), 0)
    dead = {name: [i for i, g in enumerate(grads[name]) if not g.any()]
            for name in ("lambda0", "lambda1")}
    assert dead == dict(lambda0=[4, 6, 7, 9], lambda1=[4, 6, 7, 9])
    for name, expected in dict(resid_lambdas=[[6, 10], [10]],
                               post_lambdas=[[4, 6, 7, 9, 10], [7, 10]]).items():
        assert [[i for i, g in enumerate(half) if not g] for half in grads[name].T] == expected
    K = station.head_dim
    for layer in (0, 1, 2, 3, 5, 8, 10):
        rows = grads[f"blocks.{layer}.attn.qk_w"].flatten(0, 1).view(-1, K, 48).flatten(2)
        used = K if layer in (3, 10) else K // 2
        assert rows[:, :used].any(-1).all() and not rows[:, used:].any()
        v, o = grads[f"blocks.{layer}.attn.vo_w"]
        used = K // 2 if layer in (1, 8) else K
        for x in (v, o.T):
            assert x.view(-1, K, 48)[:, :used].any(-1).all()
            assert not x.view(-1, K, 48)[:, used:].any()
    for name, g in grads.items():
        assert name == "embed.weight" or g.any(), name


@pytest.fixture
def in_double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_factor_of_a_group_moves_its_neighbouring_channels_alone(in_double):
    station = tiny("92b")
    weights, x = some_weights(station), torch.randn(5, 48)
    sources = torch.randn(10, 5, 48)
    before = station.mixed(weights, x, sources)
    for k, group in ((0, 3), (7, 11)):
        weights["mudd_w2g"][k, group] += 1.0
        after = station.mixed(weights, x, sources)
        moved = (after != before).any(0).nonzero().flatten().tolist()
        assert moved == list(range(4 * group, 4 * group + 4))
        before = after
    hidden = torch.nn.functional.gelu(x @ weights["mudd_w1"][1].T)
    of_tokens = hidden @ weights["mudd_w2"][14:].T + weights["mudd_b2"][14:]
    of_groups = torch.einsum("tz,kgz->tkg", hidden, weights["mudd_w2g"])
    factors = 0.1 * (of_tokens[:, :, None] + of_groups).repeat_interleave(4, dim=2)
    expected = x + torch.einsum("tkc,ktc->tc", factors, sources)
    torch.testing.assert_close(before, expected, rtol=1e-12, atol=1e-12)
    before = station.mixture(weights, 0, x)
    weights["mudd_gate_scale"] *= 2  # of the gates alone
    torch.testing.assert_close(station.mixed(weights, x, sources), expected)
    torch.testing.assert_close(station.mixture(weights, 0, x), before, rtol=0, atol=0)


# ---- The schedule


@pytest.mark.parametrize("key", FIVE_STAGES)
def test_stages_and_rates_are_the_published_ones_at_all_steps(key):
    station = STATIONS[key]
    N = 1122  # from shares of it, the last 0.06 of the third of which are a stage
    shares = [share / (0.2854 + 0.3209 + 0.3931) for share in (0.2854, 0.3209, 0.3931)]
    ends = [round(sum(shares[:2]) * N) if n == 2 else round(shares[0] * N) for n in (1, 2)]
    ends += [round((1 - 0.06) * N) + 52, N + 52, N + 72]
    assert [row.end for row in station.stage_rows] == ends == [320, 681, 1107, 1174, 1194]
    steps = range(1194)
    assert station.total_steps() == 1194
    assert 8 * sum(map(station.seq_len, steps)) == 328_663_040
    begins = [0, *ends[:-1]]
    expected = [(896, 3, 1), (2048, 7, 3), (3072, 11, 5), (3072, 11, 5), (3072, 13, 6)]
    for step in steps:
        stage = max(n for n, begin in enumerate(begins) if begin <= step)
        row, done = station.stage_rows[stage], step - begins[stage]
        assert station.training_windows(step) == (row.long, row.short) == expected[stage][1:]
        assert row.max_document == expected[stage][0]
        fading = [[1, 0.5, 0.25 * (1 - done / 320)], [1, 0.5 * (1 - done / 361)], [1], [1], [1]]
        assert station.target_weights(step) == pytest.approx(fading[stage])
        quarters = sum(step >= change for change in (411, 501, 591))
        prefix = [0.25, (0.2, 0.15, 0.1, 0.05)[quarters], 0, 0, 0]
        assert station.prefix_weight(step) == pytest.approx(prefix[stage])
        beta = 0.93 if step <= 1144 else 0.93 - 0.08 * (step - 1144) / 50
        assert station.muon_momentum(step) == pytest.approx(min(beta, 0.85 + 0.08 * step / 240))
        peak = [1, 1.52, 1.73, 1.579267, 1][stage]
        fallen = min(1, max(0, step - 234) / 940)
        assert station.rate_factor(step) == pytest.approx(peak - (peak - 0.3) * fallen, rel=1e-6)
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
    for kind in (name.split(".")[0] for name in tables):
        betas, later = ((0.0 if kind == "ngram_embed" else 0.75), 0.95), station.period_from
        assert station.betas_at(kind, later - 1) == betas
        assert station.betas_at(kind, later) == pytest.approx([beta**2 for beta in betas])
        assert [station.decay_at(kind, s) for s in (later - 1, later)] == [0.025, 0.05]
        assert station.adam[kind] == 70
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
    numbers = np.array(station.documents(tokens, 700))
    station.longest = None
    cuts = np.flatnonzero(np.diff(numbers, prepend=0))
    assert cuts.tolist() == [0, 2560, 3072, 3073, 5633, 5700, 8260]
    whole = np.array(station.documents(tokens, 700))
    assert np.flatnonzero(np.diff(whole, prepend=0)).tolist() == [0, 3072, 3073, 5700]


# ---- The optimizers


def test_six_maps_have_the_published_envelope(in_double):
    """Of a singular value x, by a diagonal matrix whose largest one is that of the norm."""
    def through(x):
        for a, b, c in station_92c.MAPS:
            x = a * x + b * x**3 + c * x**5
        return x

    x = np.geomspace(0.003, 1 / 1.05, 200_001)
    assert [through(x).min(), through(x).max()] == pytest.approx([0.99507, 1.00040], abs=6e-6)
    assert through(0.002) == pytest.approx(0.909, abs=5e-4)
    assert math.prod(a for a, _, _ in station_92c.MAPS) == pytest.approx(643.13, abs=0.005)
    for n, expected in enumerate((1.53, 1.40, 1.37, 1.22, 0.91, 1.0004)):
        y = np.linspace(0, 1 / 1.05, 200_001)
        for a, b, c in station_92c.MAPS[: n + 1]:
            y = a * y + b * y**3 + c * y**5
        assert y.max() == pytest.approx(expected, abs=0.006 if n < 5 else 6e-6)
    for shape in ((5, 9), (9, 5)):
        V = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        U, S, W = torch.linalg.svd(V, full_matrices=False)
        mapped = U @ torch.diag(through(S / (1.05 * V.norm() + 1e-6))) @ W
        torch.testing.assert_close(station_92c.mapped(V), mapped, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("first", [100, 512])
def test_anvil_moves_a_number_by_its_rule(first, monkeypatch, in_double):
    """A matrix of one entry: its update is the sign of what the maps are given. The slow mean's
    sign is another one at times, and the means are blended from 514 on."""
    given = []
    monkeypatch.setattr(station_92c, "mapped", lambda V: given.append(V.item()) or V.sign())
    station, p = STATIONS["92c"], torch.tensor([[[0.5]]])
    state = station.optimizer_state({"blocks.0.attn.qk_w": p})["blocks.0.attn.qk_w"]
    fast = slow = 0.0
    signs = set()
    for step, g in enumerate((1.0, -0.5, -2.0, 0.2, 3.0), first):
        beta = 0.85 + 0.08 * step / 240 if step < 240 else 0.93
        beta_fast = beta if step < 514 else 0.85
        fast, slow = fast + (1 - beta_fast) * (g - fast), slow + 0.02 * (g - slow)
        M = fast if step < 514 else 0.4385 * fast + 0.5615 * slow
        V = g + beta * (M - g)
        c, W = station.rate_factor(step), p.item()
        expected = W - 0.023 * c * (math.copysign(1, V) + 2.25 * 0.023 * c * W * (slow * W >= 0))
        station.muon_step(p, torch.tensor([[[g]]]), state, step, 0.023)
        assert given[-1] == pytest.approx(V, rel=1e-12)
        assert p.item() == pytest.approx(expected, rel=1e-12)
        signs.add(slow * V > 0)
    assert signs == {True, False}


def test_unused_rows_decay_over_a_run_as_published():
    kept = math.prod(1 - 2.25 * (0.023 * LAST.rate_factor(step)) ** 2 for step in range(1194))
    assert kept == pytest.approx(0.2798388, abs=5e-8)
    mlp = LAST.rate("blocks.0.mlp.c_fc", (2816, 768)), LAST.rate("blocks.8.second_mlp.c_proj",
                                                                 (2816, 768))
    assert mlp == pytest.approx((0.023 * 1.914854, 0.046 * 1.914854), rel=1e-6)


def test_the_table_steps_only_rows_that_were_read(in_double):
    """Its moments are kept for each row lazily, in a dict, as whoever owns many rows would."""
    station = tiny(92)
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(12, 4, generator=generator)
    state = station.optimizer_state({"ngram_embed.weight": p})["ngram_embed.weight"]
    rows = {row: p[row].clone() for row in range(12)}
    moments = {}  # row: (moment, product of all betas when it was brought to date)
    forgotten, events = 1.0, 0
    for step in range(20):
        if not station.event(step):
            continue
        events += 1
        read = torch.randint(12, (4,), generator=generator).unique().tolist()
        state["sum"] = torch.zeros_like(p)
        lr = 0.008 * 70 * station.rate_factor(step)
        beta2, decay = (0.95, 0.025) if step < station.period_from else (0.9025, 0.05)
        forgotten *= beta2
        for row in read:
            g = torch.randn(4, generator=generator)
            state["sum"][row] = g
            v, at = moments.get(row, (0.0, 1.0))
            v = v * forgotten / at + (1 - beta2) * (g**2).mean()
            moments[row] = v, forgotten
            u = lr * (1 - beta2**events) ** 0.5 * g / (v.sqrt() + 1e-10)
            old = rows[row]
            rows[row] = old - u - old * lr**2 * decay * (u * old > 0)
        station.adam_step("ngram_embed.weight", p, state, step, 0.008 * 70)
        torch.testing.assert_close(p, torch.stack([*rows.values()]), rtol=1e-12, atol=1e-12)


# ---- Averages


def test_ticks_of_the_averages_are_the_published_ones():
    found = {name: {} for name in ("ends", "late", "banks", "tables")}
    for step in range(1194):
        for name, rate in STATIONS["92e"].ticks(step).items():
            found[name][step] = rate
    assert list(found["ends"]) == [896, *range(897, 1194, 2)] and len(found["ends"]) == 150
    rates = [found["ends"][step] for step in range(897, 1192, 2)]
    assert rates == pytest.approx([0.0133331842] * 148, abs=5e-11)
    assert found["ends"][1193] == pytest.approx(0.0066889632, abs=5e-11)
    assert list(found["late"]) == list(range(945, 1194, 4)) and len(found["late"]) == 63
    assert list(found["banks"]) == sorted([*range(897, 1194, 4), 1192])
    assert len(found["banks"]) == 76
    assert list(found["tables"]) == list(range(947, 1192, 4)) and len(found["tables"]) == 62
    for name, rate in dict(late=4 / 53, banks=2 / 75, tables=4 / 53).items():
        assert set(found[name].values()) == {rate}


def test_averages_are_written_as_the_closed_formulas_say(in_double):
    """0.45 A2 + 0.55 A3 + 0.2007 (A2 - A3) of V, O and the MLPs, at the size of before."""
    station = tiny("92e")
    weights = some_weights(station)
    trained = {name: p.clone() for name, p in weights.items()}
    state, A = {"averages": {}}, {}
    for seed, average in enumerate(("ends", "late", "banks", "tables"), 1):
        A[average] = some_weights(station, seed)
        state["averages"] |= {(average, name): p for name, p in A[average].items()}
    station.finish(weights, state)
    expected = {}
    for name, W in trained.items():
        late, long = A["late"][name], A["banks"][name]
        if name.endswith(("vo_w", "c_fc", "c_proj")):
            expected[name] = 0.45 * late + 0.55 * long + 0.2007 * (late - long)
        elif name.endswith("qk_w"):
            expected[name] = 0.45 * W + 0.55 * long
        elif name in ("embed.weight", "lm_head.weight"):
            expected[name] = 0.35 * W + 0.65 * A["ends"][name]
        else:
            expected[name] = A["tables"][name] if name.startswith("value_embeds") else W
    for ending in (("vo_w",), ("c_fc", "c_proj"), ("qk_w",), ("embed.weight",), ("head.weight",)):
        names = [name for name in trained if name.endswith(ending) and "value" not in name
                 and "bigram" not in name]
        before, now = (sum((of[name] ** 2).sum() for name in names) ** 0.5
                       for of in (trained, expected))
        for name in names:
            expected[name] = expected[name] * before / now
    for name, p in weights.items():
        torch.testing.assert_close(p, expected[name], rtol=1e-12, atol=1e-13)


def test_each_average_begins_with_the_weights_after_its_first_step(in_double):
    """By weights that the optimizers leave as they are, so that they are known at each step."""
    station = tiny("92e", adam_lr=0.0, muon_lr=0.0)
    weights = some_weights(station)
    state = station.optimizer_state(weights)
    sums = {}
    for step in range(station.total_steps()):
        for p in weights.values():
            p += 1.0
        for average, rate in station.ticks(step).items():
            W = weights["lm_head.weight" if average == "ends" else "blocks.0.attn.vo_w"][0].mean()
            sums[average] = sums.get(average, W) + rate * (W - sums.get(average, W))
        grads = {name: torch.ones_like(p) for name, p in weights.items()}
        station.optimizer_step(weights, grads, state, step)
    names = dict(ends="lm_head.weight", late="blocks.0.attn.vo_w", banks="blocks.0.attn.vo_w")
    for average, name in names.items():
        assert state["averages"][average, name][0].mean() == pytest.approx(sums[average].item())
    ends = [state["averages"]["ends", name] for name in ("embed.weight", "lm_head.weight")]
    assert station.copy_step() > station.total_steps() - station.average_steps  # tied, at first
    torch.testing.assert_close(*ends)


# ---- Sampled softmax


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


def test_of_all_classes_the_sampled_loss_is_the_whole_one(in_double):
    """And of few of them the derivative is zero in those that are left out."""
    whole, sampled = tiny("92e"), tiny("92f", classes=((272,), (272,), (272,), (), ()))
    weights = some_weights(whole)
    streams = some_streams(whole)
    assert sampled.step_loss(weights, streams, 0) == pytest.approx(
        whole.step_loss(weights, streams, 0).item(), rel=1e-12)
    few = tiny("92f", vocab_size=272)
    classes = {x for r, stream in enumerate(streams)
               for x in few.candidates(stream.targets, few.offsets[r], 64)[0]}
    _, grads = few.gradients(weights, streams, 0)
    read = grads["lm_head.weight"].any(1).nonzero().flatten().tolist()
    inputs = {int(token) for stream in streams for token in stream.inputs}  # it is tied
    assert set(read) == classes | inputs and len(classes) < 128


# ---- The table


def test_tokens_read_the_published_rows_and_signs():
    for token, row in ((262, 20_632_011), (11, 13_084_038), (50_256, 40_499_699)):
        rows = LAST.rows_read([7, token])
        assert rows["pairs"] == [42_301_439, row] and rows["threes"] == [84_602_879] * 2
        assert LAST.rows_read([9, token]) == dict(rows, embed=[9, token])
    rows, signs = LAST.rows_read([1, 50_256, 262, 11]), LAST.sign_rows_read([1, 50_256, 262, 11])
    assert (rows["pairs"][3], rows["threes"][3]) == (6_990_873, 49_278_731)
    assert (signs[0][3], signs[1][3]) == (71, 1595)
    assert signs[0][0] == 0 and signs[1][:2] == [0, 0] and signs[0][1] != 0


# ---- The mask


def test_the_mask_leaves_classes_out_of_the_last_validation_alone(in_double):
    station = tiny(91)
    generator = np.random.default_rng(0)
    station.forbidden = generator.random((272, 272)) < 0.3
    weights, streams = some_weights(station), some_streams(station)
    for stream in streams:
        station.forbidden[stream.inputs, stream.targets] = False
    last, losses = station.total_steps(), []
    for stream in streams:
        z = station.stream_logits(weights, stream, station.validation_windows(last), last)
        for t, token in enumerate(stream.inputs):
            kept = z[t, ~station.forbidden[token]]
            losses.append(kept.exp().sum().log() - z[t, stream.targets[t]])
    found = station.validation_loss(weights, streams, last)
    assert found == pytest.approx(torch.stack(losses).mean().item(), rel=1e-12)
    whole = station.unmasked_loss(weights, streams, last)
    assert found < whole - 0.01
    assert station.validation_loss(weights, streams, 4) > found
