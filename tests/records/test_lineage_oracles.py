"""The oracles of the public records against what those records publish, and against torch.

What was published of a station stands in its file, as `published`; each test takes the stations
that have what it asks for.
"""

import itertools

import numpy as np
import pytest
import torch
from lineage import STATIONS
from lineage_oracles import Stream, kind_of


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


@that_publish("adam_steps")
def test_adam_steps_as_often_as_published(station):
    steps = [step for step in range(station.total_steps()) if station.adam_steps(step)]
    assert (len(steps), sum(map(station.tied, steps))) == station.published["adam_steps"]


@that_publish("scalars")
def test_there_are_as_many_scalars_as_published(station):
    assert station.parameter_shapes()["scalars"] == (station.published["scalars"],)


@that_publish("multipliers")
def test_muons_rates_have_the_published_factors(station):
    """Of attention, and of both matrices of the MLP."""
    found = []
    shapes = station.block_shapes(0)
    attention = next(name for name in shapes if name.startswith("attn.q"))
    for name in (attention, "mlp.c_fc", "mlp.c_proj"):
        found.append(station.rate(f"blocks.0.{name}", shapes[name]) / station.muon_lr)
    assert found == pytest.approx(station.published["multipliers"])


@that_publish("decays")
def test_a_step_of_adam_decays_as_published(station):
    """By so much at the full rate."""
    for kind, expected in station.published["decays"].items():
        name = next(name for name in station.parameter_shapes() if kind_of(name) == kind)
        found = station.rate(name, ()) ** 2 * station.decays.get(kind, 0.0)
        assert found == pytest.approx(expected), kind


def test_heads_of_58_share_a_softmax_with_those_three_further_on():
    """Each output as a sum over what it sees, by complex numbers that turn."""
    heads, tokens, K = 6, 9, 16
    station = type(STATIONS[58])(model_dim=heads * K, head_dim=K, block=4)
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, heads, tokens, K, generator=generator).double()
    documents = np.arange(tokens) // 5  # the second one begins at token 5
    seen = station.masks(documents, (2, 1))["P"]
    found = station.heads(0, q, k, v, seen, step=0)
    frequencies, scale = station.rotary(0)

    def turning(x, head, token):
        """The pairs of channels, turned: odd heads are half a token ahead."""
        normed = x[head, token] / (x[head, token].square().mean() + 2.0**-23).sqrt()
        angles = torch.tensor(frequencies, dtype=torch.float64) * (2 * token + head % 2)
        return torch.complex(normed[: K // 2], normed[K // 2 :]) * torch.exp(-1j * angles)

    for head, token in itertools.product(range(heads), range(tokens)):
        weights, total = 0.0, 0.0
        place = 2 * token + (head >= 3)
        for other, earlier in itertools.product({head, (head + 3) % 6}, range(token + 1)):
            distance = place - 2 * earlier - (other >= 3)
            if 0 <= distance <= 4 and documents[token] == documents[earlier]:
                product = turning(q, head, token) * turning(k, other, earlier).conj()
                weight = (scale * product.real.sum()).exp()
                weights, total = weights + weight, total + weight * v[other, earlier]
        torch.testing.assert_close(found[head][token], total / weights, rtol=1e-12, atol=1e-12)


def test_the_keys_of_58_are_offset_in_other_channels_than_before_and_after():
    k, offset = torch.arange(256.0).view(2, 128), {}
    for number in (57, 58, 62):
        changed = STATIONS[number].keys(3, k)
        assert changed[0].equal(k[0])
        offset[number] = (changed[1] == k[0]).nonzero().flatten().tolist()
    assert offset[57] == offset[62] == [*range(32, 64), *range(96, 128)]
    assert offset[58] == [*range(16, 32), *range(48, 64), *range(80, 96), *range(112, 128)]


def test_pairs_of_tokens_have_the_published_rows():
    """A row a token; to the second one the token before is always the same, and overflows."""
    def rows(*tokens):
        return STATIONS[62].rows_read(tokens)["bigram_embed"].tolist()

    tokens = 50256, 0, 1, 2, 50256, 50255, 50256, 50256, 262, 464, 11, 13, 198
    assert rows(*tokens) == [251519, 193815, 36313, 94597, 187029, 127707, 244156, 35060, 245243,
                             70649, 188566, 238680, 78264]
    seconds = [rows(7, second)[1] for second in (0, 1, 2, 198, 464, 50255)]
    assert seconds == [193815, 159838, 129737, 209144, 204580, 32011]


def test_scalars_of_70_that_nothing_reads_have_no_gradient():
    """Those of the layer without attention, and the padding."""
    station = type(STATIONS[70])(
        model_dim=96, head_dim=16, block=4, vocab_size=40, table_rows=40, bigram_rows=50,
        eot_token=39, seq_lens=(12,))
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, shape in station.parameter_shapes().items():
        weights[name] = torch.randn(shape, generator=generator).double()
    tokens = np.arange(13) * 7 % 40
    stream = Stream(tokens[:-1], tokens[1:])
    grad = station.gradients(weights, [stream], step=3)["scalars"]
    assert (grad == 0).nonzero().flatten().tolist() == [23, 24, 47, 48, 49, 50]


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
