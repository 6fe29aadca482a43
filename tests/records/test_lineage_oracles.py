"""The oracles of the public records against what those records publish, and against torch."""

import dataclasses
import itertools

import lineage_oracles as oracles
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lineage_oracles import STATIONS, parameter_shapes, rotary, seq_len, target_weights, total_steps

EOT = 0


@pytest.fixture(params=STATIONS)
def number(request):
    return request.param


def tiny(number, **changes):
    """A station of the same layers and schedules, with blocks of 4 tokens and a width of 32."""
    station = STATIONS[number]
    changes = dict(
        streams=2, eot_token=EOT, vocab_size=24, model_dim=32, head_dim=16, mlp_ratio=2, block=4,
        seq_lens=tuple(length // 1024 for length in station.seq_lens), max_document=20,
        val_seq_len=64, val_tokens=128,
    ) | changes  # fmt: skip
    return dataclasses.replace(station, **changes)


def random_parameters(station, seed=0):
    """Weights of which none is zero, so that everything has a part in the loss."""
    generator = torch.Generator().manual_seed(seed)
    weights = oracles.initial_parameters(station, generator)
    for name, p in weights.items():
        if name == "scalars" or name == "x0_lambdas":
            p += 0.3 + 0.5 * torch.rand(p.shape, generator=generator, dtype=p.dtype)
        else:
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return weights


def changes_of(values):
    """(index, value) of each that is not the one before it."""
    pairs = enumerate(itertools.pairwise(values), 1)
    return [(index, after) for index, (before, after) in pairs if before != after]


# The published run


def test_steps_and_tokens_are_those_published():
    assert {n: total_steps(s) for n, s in STATIONS.items()} == {
        28: 1695, 31: 1670, 40: 2330, 43: 2245, 50: 2090, 53: 1920,
    }  # fmt: skip
    tokens = {n: oracles.total_tokens(s) for n, s in STATIONS.items()}
    assert [round(tokens[n] / 1e6, 1) for n in (28, 31, 40, 43)] == [666.5, 656.7, 610.8, 588.5]
    assert tokens[50] == 552_992_768
    assert tokens[53] == 508_428_288


def test_validations_are_where_losses_are_published(number):
    steps = oracles.validation_steps(STATIONS[number])
    assert steps[:2] == ([0, 125] if number <= 31 else [0, 250])
    assert steps[-2:] == {
        28: [1625, 1695], 31: [1625, 1670], 40: [2250, 2330], 43: [2000, 2245], 50: [2000, 2090],
        53: [1750, 1920],
    }[number]  # fmt: skip


def test_the_batch_grows_at_the_published_steps():
    for number, first, second in ((50, 684, 1367), (53, 627, 1254)):
        station = STATIONS[number]
        lengths = [seq_len(station, step) for step in range(total_steps(station))]
        assert lengths[0] * station.streams == 131_072
        assert changes_of(lengths) == [(first, 32_768), (second, 49_152)]
    for number, length in ((28, 49_152), (31, 49_152), (40, 32_768), (43, 32_768)):
        station = STATIONS[number]
        assert {seq_len(station, s) for s in range(total_steps(station))} == {length}


GROWTH = [126, 252, 377, 503, 628, 754, 879, 1005, 1131, 1256, 1382, 1507, 1633]
WINDOWS = {  # the long window, and the steps from which on it has another
    28: (1, [(step, blocks) for blocks, step in enumerate(GROWTH, 2)]),
    31: (3, [(557, 7), (1114, 11), (1670, 13)]),
    40: (3, [(764, 7), (1528, 11), (2330, 13)]),
    43: (3, [(735, 7), (1470, 11), (2205, 13)]),
    50: (3, [(684, 7), (1367, 11), (2050, 13)]),
    53: (3, [(627, 7), (1254, 11), (1880, 13)]),
}


def test_windows_grow_at_the_published_steps(number):
    station, (first, changes) = STATIONS[number], WINDOWS[number]
    last = total_steps(station)
    windows = [oracles.long_window(station, step) for step in range(last + 1)]
    assert windows[0] == first
    assert changes_of(windows) == changes
    shorts = dict(oracles.training_windows(station, step) for step in range(last))
    if number == 28:
        assert shorts[1] == 1 and shorts[14] == 7
    else:
        assert shorts == {3: 1, 7: 3, 11: 5} | ({13: 6} if number >= 43 else {})
    for step in range(last):
        assert oracles.validation_windows(station, step) == oracles.training_windows(station, step)
    at_last = {28: (14, 7), 31: (13, 6)}.get(number, (20, 6))
    assert oracles.validation_windows(station, last) == at_last


def test_yarn_gives_the_published_frequencies_and_scales():
    station = STATIONS[31]
    initial, scale = rotary(station, 0)
    exact = [1024 ** (-j / 31) for j in range(32)] + [0.0] * 32
    np.testing.assert_allclose(initial, exact, rtol=1e-14)
    assert initial[31] == 9.765625e-4 and scale == 0.1
    checks = {  # by step: frequencies by index, and the scale
        557: ({3: 0.504225, 4: 0.356011, 5: 0.254507, 6: 0.184221, 31: 4.18527e-4}, 0.116946),
        1114: ({6: 0.171840, 7: 0.114783, 31: 2.66335e-4}, 0.127518),
        1670: ({7: 0.111207, 31: 2.25361e-4}, 0.131778),
    }
    for step, (expected, expected_scale) in checks.items():
        before, _ = rotary(station, step - 1)
        frequencies, scale = rotary(station, step)
        for index, value in expected.items():
            assert frequencies[index] == pytest.approx(value, rel=5e-6)
            assert before[index] > frequencies[index]
        assert frequencies[:3] == initial[:3]
        assert frequencies[32:] == [0.0] * 32
        assert scale == pytest.approx(expected_scale, abs=5e-7)


def test_yarn_follows_the_long_window_alone(number):
    station = STATIONS[number]
    last = total_steps(station)
    for step, _ in WINDOWS[number][1]:
        assert (rotary(station, step) != rotary(station, step - 1)) == (number >= 31)
    expected = rotary(STATIONS[31], 1670) if number >= 31 else (rotary(station, 0)[0], 0.12)
    assert rotary(station, last) == expected


def test_rates_fall_from_the_published_steps(number):
    station = STATIONS[number]
    factors = [oracles.rate_factor(station, step) for step in range(total_steps(station))]
    begins = {28: 933, 31: 835, 40: 1260, 43: 1103, 50: 923, 53: 846}[number]
    peak = {50: 1.51, 53: 1.52}.get(number, 1.0)
    # At 1670 / 2 and 0.45 · 1880 steps the line begins at its highest.
    falls = begins + (number in (31, 53))
    assert factors[begins - 1] == pytest.approx(peak, abs=1e-12)
    assert factors[falls] < peak - 1e-5
    if number <= 43:
        assert factors[:begins] == [1.0] * begins
        assert all(b <= a for a, b in itertools.pairwise(factors))
    else:
        first, second = WINDOWS[number][1][:2]
        assert factors[: first[0]] == [1.0] * first[0]
        assert factors[first[0] : begins] == [peak] * (begins - first[0])
        jumps = [s for s, (a, b) in enumerate(itertools.pairwise(factors), 1) if b > a]
        assert jumps == [first[0], second[0]]
        x = second[0] / station.num_iterations
        left = (1 - x) / 0.55
        highest = {50: 1.93, 53: 1.73}[number]
        assert factors[second[0]] == pytest.approx(highest * left + 0.1 * (1 - left))
    at_last = {40: 0.1002, 43: 0.10018, 50: 0.1, 53: 0.1}.get(number)
    if at_last:
        np.testing.assert_allclose(factors[station.num_iterations :], [at_last] * 40, atol=1e-12)
    assert oracles.rate_factor(station, station.num_iterations) == pytest.approx(at_last or 0.1)


def test_momentum_has_the_published_plateaus(number):
    station = STATIONS[number]
    momenta = [oracles.muon_momentum(station, step) for step in range(total_steps(station))]
    assert momenta[0] == 0.85
    assert momenta[150] == pytest.approx(0.9)
    falls = {40: 2280, 43: 2195, 50: 2040, 53: 1870}.get(number, len(momenta) - 1)
    plateau = 0.949667 if number == 40 else 0.95
    np.testing.assert_allclose(momenta[300 : falls + 1], plateau, atol=5e-7)
    if number >= 40:
        np.testing.assert_allclose(momenta[falls + 1], 0.948)
        np.testing.assert_allclose(momenta[-1], 0.852)


def test_target_weights_are_the_published_ones():
    station = STATIONS[53]
    assert target_weights(station, 0) == [1.0, 0.5, 0.25]
    lengths = [len(target_weights(station, step)) for step in range(1920)]
    assert changes_of(lengths) == [(627, 2), (1254, 1)]
    assert target_weights(station, 313) == pytest.approx([1.0, 0.5, 0.25 * (1 - 939 / 1880)])
    assert target_weights(station, 627)[1] == pytest.approx(0.5, abs=1e-3)
    assert target_weights(station, 940) == pytest.approx([1.0, 0.25])
    assert 0 < target_weights(station, 1253)[1] < 1e-3
    assert target_weights(STATIONS[50], 0) == [1.0]


def test_the_scalars_rest_at_the_published_steps():
    station = STATIONS[53]
    frozen = [step for step in range(1920) if oracles.scalars_frozen(station, step)]
    assert frozen == [*range(627, 667), *range(1254, 1294), *range(1880, 1920)]
    steps = [s for s in range(1920) if oracles.adam_steps(station, s) and s not in frozen]
    assert [min(s for s in steps if s >= begin) for begin in (627, 1254)] == [667, 1295]
    assert max(steps) == 1879
    assert not any(oracles.scalars_frozen(STATIONS[50], step) for step in range(2090))


def test_adam_steps_at_all_steps_and_later_at_odd_ones(number):
    found = [oracles.adam_steps(STATIONS[number], step) for step in range(4)]
    assert found == ([True] * 4 if number <= 31 else [False, True] * 2)


def test_the_head_is_the_embedding_until_the_published_step():
    station = STATIONS[53]
    assert (oracles.split_step(station), oracles.copy_step(station)) == (1254, 1253)
    assert oracles.tied(station, 1253) and not oracles.tied(station, 1254)
    odd = dataclasses.replace(station, num_iterations=7)
    assert (oracles.split_step(odd), oracles.copy_step(odd)) == (5, 3)
    assert not oracles.tied(STATIONS[50], 0) and oracles.copy_step(STATIONS[50]) == -1


# Streams


# Masks


# Parameters


def test_parameters_have_the_published_shapes(number):
    shapes = parameter_shapes(STATIONS[number])
    V = 50_304
    assert shapes["embed.weight"] == shapes["lm_head.weight"] == (V, 768)
    assert shapes["value_embeds.2.weight"] == (V, 768)
    assert shapes["scalars"] == ({50: 48, 53: 40}.get(number, 64),)
    layers = {name: {n for n in shapes if n.endswith(name)} for name in ("qkvo_w", "c_fc")}
    assert {name: len(of) for name, of in layers.items()} == {
        "qkvo_w": 11 if number <= 31 else 10,
        "c_fc": 12 if number == 28 else 11,
    }
    hidden = (768, 3072) if number < 50 else (3072, 768)
    qkvo = {28: (4, 768, 768), 31: (4, 768, 768)}.get(number, hidden)
    assert {shapes[name] for name in layers["qkvo_w"]} == {qkvo}
    assert {shapes[name] for name in layers["c_fc"]} == {hidden}
    assert shapes["blocks.2.mlp.c_proj"] == hidden
    assert shapes[f"blocks.2.attn.{'dampen' if number == 28 else 'attn_gate'}.weight"] == (6, 12)
    assert ("smear_gate.weight" in shapes) == (number >= 40)
    assert shapes.get("x0_lambdas") == ((11,) if number == 53 else None)
    assert any(name.startswith("blocks.0.") for name in shapes) == (number not in (40, 43))


def test_scalars_begin_as_published(number):
    half = [0.5] * 24
    expected = {
        28: [1.0] * 12 + [1.0, 0.0] * 12 + half + [1.0] * 4,
        40: [-1.5] * 12 + [1.0, 0.0] * 12 + half + [0.0, 0.5, 1.0, 1.0],
        50: [1.1] * 11 + [0.0] * 11 + [0.5, 1.0] * 11 + [0.0, 0.5, -1.5, 1.0],
        53: [1.1] * 11 + [0.5, 1.0] * 11 + [0.0, 0.5, -1.5] + [1.0] * 4,
    }
    expected |= {31: expected[28], 43: expected[40]}
    assert oracles.initial_scalars(STATIONS[number]) == expected[number]


def test_matrices_begin_as_published(number):
    station = STATIONS[number]
    names = parameter_shapes(station)
    kinds = {name: oracles.initial_distribution(station, name) for name in names}
    normal = {name: std for name, (kind, std) in kinds.items() if kind == "normal"}
    tables = {f"value_embeds.{i}.weight": 1.0 for i in range(3)} if number < 50 else {}
    head = {"embed.weight": 0.005, "lm_head.weight": 0.005} if number == 53 else {"embed.weight": 1}
    assert normal == tables | head
    uniform = {name.rpartition(".")[2]: b for name, (kind, b) in kinds.items() if kind == "uniform"}
    assert uniform == pytest.approx(
        {"qkvo_w": 0.0625 if number == 53 else 0.03125, "c_fc": 0.03125}
    )
    weights = oracles.initial_parameters(tiny(number), torch.Generator().manual_seed(0))
    Q, K, V, O = oracles.matrices("qkvo_w", weights["blocks.2.attn.qkvo_w"])  # noqa: E741
    assert not O.any() and all(x.abs().min() > 0 for x in (Q, K, V))
    qkvo = weights["blocks.2.attn.qkvo_w"]
    if number >= 50:
        assert torch.equal(qkvo[32:64], K)
    if number in (40, 43):
        assert torch.equal(qkvo[1, :32], Q[4])


# The model


@pytest.mark.parametrize(("number", "layer"), [(28, 1), (50, 1), (50, 3)])
def test_attention_is_that_of_torch(number, layer):
    """One layer's, heads at once, by scaled_dot_product_attention."""
    station = tiny(number)
    weights, T = random_parameters(station), 24
    generator = torch.Generator().manual_seed(0)
    u, e = torch.randn(2, T, 32, generator=generator, dtype=torch.float64)
    mask = oracles.dense_mask(station, np.arange(T) // 10, 1)
    frequencies, scale = rotary(station, 700)
    found = oracles.attention(station, weights, layer, u, e, mask, frequencies, scale)
    indices, scalars = oracles.scalar_indices(station), weights["scalars"]
    lambda0, lambda1 = (scalars[indices[f"lambda{i}"][layer]] for i in (0, 1))
    W = weights[f"blocks.{layer}.attn.qkvo_w"].reshape(4, 32, 32)
    q, k, v = ((u @ w.T).view(T, 2, 16).transpose(0, 1) for w in W[:3])
    e = e.view(T, 2, 16).transpose(0, 1)
    v = lambda0 * v + (lambda1 * e if number == 28 else e)
    shape = (16,)
    # Since #50 the norm sees q and k a factor of lambda0 larger: its epsilon is that less.
    eps = station.norm_eps / (1 if number == 28 else lambda0.item() ** 2)
    q, k = (F.rms_norm(x, shape, eps=eps) for x in (q, k))
    q, k = (torch.stack([oracles.turned(head, frequencies) for head in x]) for x in (q, k))
    if layer == 3:  # the first of #50 with a long window
        k = torch.stack([oracles.key_offset(head) for head in k])
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    gate = weights[f"blocks.{layer}.attn.{'dampen' if number == 28 else 'attn_gate'}.weight"]
    y = y * torch.sigmoid(u[:, :12] @ gate.T).T[:, :, None]
    expected = y.transpose(0, 1).flatten(1) @ W[3].T * (1 if number == 28 else lambda1)
    torch.testing.assert_close(found, expected)


def test_the_mlp_is_that_of_torch(number):
    """Of its two matrices, each of the shape of the other, the first is (in, hidden) up to #43."""
    station = tiny(number)
    weights = random_parameters(station)
    c_fc, c_proj = (weights[f"blocks.2.mlp.{name}"] for name in ("c_fc", "c_proj"))
    u = torch.randn(5, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if number <= 43:
        assert c_fc.shape == c_proj.shape == (32, 64)
        expected = F.linear(F.relu(F.linear(u, c_fc.T)).square(), c_proj)
    else:
        assert c_fc.shape == c_proj.shape == (64, 32)
        expected = F.linear(F.relu(F.linear(u, c_fc)).square(), c_proj.T)
    torch.testing.assert_close(oracles.mlp(station, weights, 2, u), expected)


def test_a_tied_head_begins_at_its_own_published_loss():
    """10.8367, above ln 50304. What layers do is nothing as long as they project to zero.

    Logits of random targets have half of the cap as their mean, and the log of the sum of all
    is nearly the same for every token.
    """
    station = dataclasses.replace(
        STATIONS[53], attention_pattern="..", mlp_pattern="MM", value_embed_pattern="..",
        mlp_ratio=1, skips=(), backout_layer=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    small = dataclasses.replace(station, vocab_size=1)
    weights = oracles.initial_parameters(small, generator)
    head = torch.randn(station.vocab_size, station.model_dim, generator=generator)
    weights["lm_head.weight"] = 0.005 * head.double()
    tokens = torch.randint(station.vocab_size, (16,), generator=generator)
    documents = np.zeros(16, dtype=np.int64)
    frequencies, scale = rotary(station, 0)
    z = oracles.logits_of(station, weights, tokens, documents, (3, 1), frequencies, scale, True)
    assert z.logsumexp(-1).mean().item() - 15 == pytest.approx(10.8367, abs=1e-3)


# Optimizers


def only(weights, *names):
    """The weights of these names alone: an optimizer takes any of them."""
    return {name: weights[name] for name in names}


def random_grads(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator).double() for n, p in weights.items()}


def test_rates_are_those_published(number):
    station = STATIONS[number]
    shapes = parameter_shapes(station)
    rates = {name: oracles.rate(station, name, shape) for name, shape in shapes.items()}
    embed = 0.008 if number == 53 else 0.6
    assert rates["embed.weight"] == pytest.approx(embed)
    assert rates["value_embeds.1.weight"] == pytest.approx(0.6)
    assert rates["lm_head.weight"] == 0.008 and rates["scalars"] == 0.04
    muon = {28: 0.05, 31: 0.05, 40: 0.06, 43: 0.03}.get(number, 0.023)
    gate = f"blocks.2.attn.{'dampen' if number == 28 else 'attn_gate'}.weight"
    names = ("blocks.2.attn.qkvo_w", "blocks.2.mlp.c_fc", "blocks.2.mlp.c_proj", gate)
    multipliers = {43: (1, 2, 1, 1), 50: (2, 2, 4, 1), 53: (2, 2, 4, 1)}.get(number, (1, 1, 1, 1))
    assert [rates[name] / muon for name in names] == pytest.approx(multipliers)
    if number >= 40:
        expected = 0.008 * 0.01 if number == 53 else muon
        assert rates["smear_gate.weight"] == pytest.approx(expected)
        assert oracles.is_muon(station, "smear_gate.weight") == (number != 53)
    if number == 53:
        assert rates["x0_lambdas"] == 0.04


def test_adam_is_that_of_torch_but_for_its_epsilon(number):
    """With none, and no decay; since #40 each second step, by the sum of two steps' gradients."""
    station = tiny(number, adam_eps=0.0, adam_decay=0.0)
    names = ["lm_head.weight", "value_embeds.1.weight", "scalars"]
    weights, others, optimizers = only(random_parameters(station), *names), {}, []
    for name, p in weights.items():
        others[name] = torch.nn.Parameter(p.clone())
        betas = station.scalar_betas if name == "scalars" else station.adam_betas
        lr = oracles.rate(station, name, p.shape)
        optimizers.append(torch.optim.Adam([others[name]], lr=lr, betas=betas, eps=0.0))
    state = oracles.optimizer_state(station, weights)
    for step in range(6):
        grads = random_grads(weights, step)
        oracles.optimizer_step(station, weights, grads, state, step)
        for name, p in others.items():
            p.grad = grads[name] if p.grad is None else p.grad + grads[name]
        if number < 40 or step in (1, 3, 5):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, p in others.items():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-12, atol=1e-12)
    assert state["scalars"]["count"] == (6 if number < 40 else 3)


def test_muon_is_that_of_torch():
    """Whose iteration is computed in bf16: an error of 2^-8 that each iteration may make larger."""
    station = tiny(28)
    names = ["blocks.2.mlp.c_fc", "blocks.2.attn.dampen.weight"]
    weights = only(random_parameters(station), *names)
    others = {name: torch.nn.Parameter(p.float()) for name, p in weights.items()}
    before = {name: weights[name].clone() for name in names}
    lr = station.muon_lr
    theirs = torch.optim.Muon(list(others.values()), lr=lr, weight_decay=0.0, momentum=0.95)
    state = oracles.optimizer_state(station, weights)
    for step in (400, 401, 402):
        grads = random_grads(weights, step)
        oracles.optimizer_step(station, weights, grads, state, step)
        for name, p in others.items():
            p.grad = grads[name].float()
        theirs.step()
    for name in names:
        found, expected = (x - before[name] for x in (weights[name], others[name].detach()))
        assert (found - expected).norm() < 0.03 * expected.norm(), name


@pytest.mark.parametrize(("number", "low", "high"), [(28, 0.6, 1.25), (40, 0.85, 1.15)])
@pytest.mark.parametrize("shape", [(32, 32), (32, 64), (64, 32), (1, 12)])
def test_what_is_orthogonalized_is_nearly_so(number, low, high, shape):
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()
    U, s, V = torch.linalg.svd(u, full_matrices=False)
    s = torch.linspace(0.05, 1, len(s)).double()  # no direction is too small for five iterations
    found = oracles.orthogonalize(STATIONS[number], U @ torch.diag(s) @ V)
    values = torch.diag(U.T @ found @ V.T)
    assert low < values.min() and values.max() < high
    torch.testing.assert_close(U @ torch.diag(values) @ V, found)
