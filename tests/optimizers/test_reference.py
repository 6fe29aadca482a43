"""The reference itself: numbers that the specifications give, and properties of its pieces."""

import math

import pytest
import reference
import reference_branches as branches
import reference_initial as first_weights
import reference_line as line
import reference_parts as parts
import reference_schedules as schedules
import torch
from reference_model import MATRIX_KINDS, group, logits, loss, matrix_kind, rows_of, shapes

HEAD_DIM = 8
SMALL = shapes(layers=2, width=16, vocabulary=37)
SQUARE, TALL, WIDE = (16, 16), (64, 16), (16, 64)
ROUNDING = 1e-12


def normal(*shape, seed=0):
    """Standard normal draws."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def drawn(name, law, shape):
    """Draws of an initial parameter."""
    generator = torch.Generator().manual_seed(len(name) * 1000 + shape[0])
    if law == "normal":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1


def first_of(label, layers=2):
    """The weights of a small model that a result begins with."""
    signs = [normal(16, seed=layer).sign() for layer in range(layers)]
    return first_weights.initial_weights(
        reference.RESULTS[label].initial, shapes(layers, 16, 37), drawn, signs)


def batches(count):
    """Random tokens: `count` steps of four rows of eight."""
    generator = torch.Generator().manual_seed(5)
    return [rows_of(torch.randint(37, (33,), generator=generator), 8) for _ in range(count)]


def draw(name, what, shape, step):
    """Draws of an update."""
    return normal(*shape, seed=step * 100 + len(what))


def train(label, steps, **settings):
    return reference.run(label, first_of(label), batches(steps), steps, HEAD_DIM, draw=draw,
                         **settings)


# ---- Model ----


def test_loss_is_the_sum_over_tokens():
    weights = first_of("o36")
    inputs, targets = batches(1)[0]
    whole = loss(weights, inputs, targets, HEAD_DIM)
    parts_of_it = sum(loss(weights, inputs[row:row + 1], targets[row:row + 1], HEAD_DIM)
                      for row in range(4))
    assert whole.item() == pytest.approx(32 * math.log(37))  # the head begins at zero
    assert parts_of_it.item() == pytest.approx(whole.item(), rel=ROUNDING)


def test_later_tokens_and_other_rows_do_not_matter():
    weights = first_of("o37")
    inputs, _ = batches(1)[0]
    changed = inputs.clone()
    changed[0, 5:] = 36 - changed[0, 5:]
    changed[1] = 36 - changed[1]
    before, after = (logits(weights, x, HEAD_DIM) for x in (inputs, changed))
    assert torch.equal(before[0, :5], after[0, :5])
    assert torch.equal(before[2:], after[2:])
    assert not torch.equal(before[0, 5:], after[0, 5:])


def test_attention_depends_on_distance_through_half_of_the_frequencies():
    x = normal(1, 9, 1, HEAD_DIM)
    x = x[:, :1].expand_as(x)
    turned = parts_of_rotation(x)
    near = (turned[0, 0] * turned[0, 2]).sum()
    far = (turned[0, 5] * turned[0, 7]).sum()
    assert near.item() == pytest.approx(far.item(), rel=ROUNDING)
    unmoved = [2, 3, 6, 7]  # the pairs whose frequency is zero
    assert torch.equal(turned[..., unmoved], x[..., unmoved])


def parts_of_rotation(x):
    from reference_model import rotate
    return rotate(x)


def test_logits_are_capped():
    weights = first_of("o37") | {"head.bias": torch.full((37,), 1e6, dtype=torch.float64)}
    found = logits(weights, batches(1)[0][0], HEAD_DIM)
    assert (found <= 15).all() and (found > 14.99).all()


# ---- Groups and first weights ----


def test_the_published_model_has_its_parameters():
    published = shapes(layers=12, width=768, vocabulary=50304)
    kinds = [matrix_kind(name) for name in published]
    gains = [name for name in published if group(name) == "gains"]
    assert sorted(filter(None, kinds)) == sorted(12 * MATRIX_KINDS)
    assert len(gains) == 26
    assert published["blocks.3.mlp.fc.weight"] == (3072, 768)


def test_old_first_weights_have_biases_and_zero_projections():
    laws = first_weights.laws("old", shapes(12, 768, 50304))
    assert laws["blocks.0.attn.q.bias"] == ("uniform", 1 / 768 ** 0.5)
    assert laws["blocks.11.mlp.fc.bias"] == ("uniform", 1 / 768 ** 0.5)
    assert laws["blocks.11.mlp.proj.bias"] == laws["head.bias"] == ("constant", 0)
    assert laws["blocks.0.attn.proj.weight"] == ("constant", 0)
    assert laws["norm1"] == laws["blocks.5.norm2"] == ("constant", 1)


@pytest.mark.parametrize("initial, name, law", [
    ("new", "blocks.1.attn.k.weight", ("normal", 0.33 ** 0.5 / 768 ** 0.5)),
    ("new", "blocks.1.attn.k.bias", ("constant", 0)),
    ("new", "head.weight", ("constant", 0)),
    ("hyperball", "blocks.1.mlp.proj.weight", ("uniform", 3 / 3072 ** 0.5)),
    ("hyperball", "blocks.1.attn.proj.weight", ("uniform", 1.25 / 768 ** 0.5)),
    ("hyperball", "blocks.1.mlp.fc.bias", ("uniform", 1 / 768 ** 0.5)),
    ("hyperball", "blocks.1.attn.proj.bias", ("constant", 0)),
    ("hyperball", "head.weight", ("constant", 0)),
    ("hyperball_normal", "head.weight", ("normal", (0.33 / 768) ** 0.5)),
    ("hyperball_normal", "blocks.1.mlp.fc.bias", ("constant", 0)),
    ("hyperball_normal", "blocks.1.mlp.fc.weight", ("normal", 1.5 * (0.33 / 768) ** 0.5)),
    ("psgd", "head.bias", ("uniform", 768 ** -0.5)),
    ("psgd", "blocks.1.mlp.proj.bias", ("uniform", 3072 ** -0.5)),
    ("psgd", "blocks.1.mlp.proj.weight", ("normal", 3 / (3 * 3072) ** 0.5)),
    ("line30", "blocks.0.mlp.fc.weight", ("uniform", 1 / 768 ** 0.5)),
    ("line44", "blocks.11.mlp.fc.weight", ("uniform", 0.7 / 768 ** 0.5)),
    ("line44", "blocks.11.mlp.fc.bias", ("uniform", 1 / 768 ** 0.5)),
])
def test_first_weights(initial, name, law):
    kind, scale = first_weights.laws(initial, shapes(12, 768, 50304))[name]
    assert (kind, scale) == (law[0], pytest.approx(law[1], rel=ROUNDING))


def test_gains_of_the_two_norms_mirror_each_other():
    weights = first_of("o44")
    for layer in range(2):
        first, second = weights[f"blocks.{layer}.norm1"], weights[f"blocks.{layer}.norm2"]
        torch.testing.assert_close(first + second, torch.full((16,), 2.0).double())
        torch.testing.assert_close((first - 1).abs(), torch.full((16,), 0.125).double())
    assert torch.equal(weights["norm1"], torch.ones(16).double())


@pytest.mark.parametrize("ones, plus", [(64, 64), (60, 62), (61, 62), (63, 64), (67, 66), (0, 32)])
def test_signs_of_a_pair_cancel_in_each_slice(ones, plus):
    """A count goes half-way to 64, and a half to the even number."""
    bits = (torch.arange(128) < ones).long()[None]
    orders = torch.stack([torch.randperm(128), torch.randperm(128)])[None]
    first, second = first_weights.antithetic_pair(bits, orders)
    assert first.sum() == plus - (128 - plus)
    assert first.sum() + second.sum() == 0
    assert torch.equal(first, torch.where(torch.arange(128) < plus, 1.0, -1.0)[orders[0, 0]])


def test_seeds_of_pairs():
    found = [first_weights.pair_seed(0, block) for block in (6, 8, 10)]
    assert found == [2836911888, 2836930240, 2836948592]


# ---- Schedules ----


@pytest.mark.parametrize("label, step, name, expected", [
    ("o29", 2000, "embed", 0.223349710623),
    ("o29", 2000, "head", 0.00232655948566),
    ("o29", 2000, "vector", 0.00744499035411),
    ("o29", 2000, "attn.q", 0.0148858662639),
    ("o29", 3019, "mlp.fc", 0.000695244434204),
    ("o30", 2000, "embed", 0.210076667456),
    ("o30", 2000, "attn.v", 0.0140012412293),
    ("o30", 3019, "attn.v", 2.04349421177e-4),
    ("o40", 2000, "embed", 0.193384628872),
    ("o40", 2000, "mlp.proj", 0.0128887461499),
    ("o40", 2899, "mlp.proj", 6.47025507329e-4),
    ("o44", 2000, "embed", 0.174598967771),
    ("o44", 2000, "attn.k", 0.0116367148039),
    ("o44", 2899, "attn.k", 3.3169534699576625e-06),
    ("o45", 2719, "embed", 0.0254779775352),
    ("o45", 2719, "head", 2.65395599325e-4),
    ("o45", 2719, "vector", 8.4926591784e-4),
    ("o45", 2719, "attn.proj", 1.69806249225e-3),
])
def test_rates_of_the_line(label, step, name, expected):
    assert reference.rates(label, step)[name] == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("label, name, last_flat", [
    ("o20", "embed", 1692), ("o29", "embed", 1692), ("o29", "attn.q", 718),
    ("o30", "embed", 1637), ("o30", "attn.q", 663), ("o40", "vector", 1567),
    ("o40", "attn.q", 593), ("o44", "head", 1487), ("o44", "attn.q", 513),
    ("o12", "embed", 1005), ("o36", "attn.q", 975), ("o24", "attn.q", 635),
    ("o24", "embed", 1905), ("o5", "embed", 1995), ("o5", "attn.q", 0), ("o33", "head", 1700),
])
def test_where_rates_begin_to_fall(label, name, last_flat):
    """Linear schedules reach their first value at the boundary itself."""
    first = reference.rates(label, 0)[name]
    assert reference.rates(label, last_flat)[name] == pytest.approx(first, rel=ROUNDING)
    assert reference.rates(label, last_flat + 1)[name] < first * (1 - 1e-9)


def test_power_factors_follow_from_first_rates():
    for name, first in schedules.FIRST_RATE.items():
        gap = 2386.4 if name == "matrix" else 1413.0
        assert first / gap ** 1.2 == pytest.approx(schedules.POWER_FACTOR[name], rel=1e-4)


@pytest.mark.parametrize("label, step, momentum", [
    ("o29", 0, 0.95), ("o30", 0, 0.85), ("o30", 150, 0.90), ("o30", 300, 0.95),
    ("o30", 2920, 0.95), ("o30", 2921, 0.949), ("o30", 3019, 0.851),
    ("o40", 2800, 0.95), ("o40", 2899, 0.851),
    ("o44", 2700, 0.95), ("o44", 2701, 0.9495), ("o44", 2899, 0.8505), ("o45", 2719, 0.9405),
    ("o22", 0, 0.0),
])
def test_momentum(label, step, momentum):
    assert reference.RESULTS[label].momentum(step) == pytest.approx(momentum, rel=ROUNDING)


@pytest.mark.parametrize("label, step, expected", [
    ("o40", 299, 0), ("o40", 300, 0.3), ("o40", 1568, 0.3), ("o40", 1569, 0.3 * 0.999150803214),
    ("o40", 1949, 0.3 * 0.685875109488), ("o40", 1950, 0), ("o44", 1488, 0.3),
    ("o44", 1489, 0.3 * 0.999150803214), ("o46", 1949, 0.3 * 0.622577962531),
    ("o39", 499, 0), ("o39", 500, 0.6), ("o39", 2400, 0), ("o36", 1000, 0),
    ("o39", 2399, 0.6 * (1 - 2398 / 3150) / 0.7),
])
def test_look_ahead(label, step, expected):
    assert reference.look_ahead_strength(label, step) == pytest.approx(expected, rel=1e-11)


def test_shares_that_change():
    assert schedules.contra_share(0, 2000) == -0.2
    assert schedules.contra_share(1000, 2000) == -0.1
    assert schedules.contra_share(2000, 2000) == schedules.contra_share(2500, 2500) == 0
    assert schedules.soft_share(2500) == 0
    assert schedules.soft_share(2907) < 0.8 == schedules.soft_share(2908)
    assert schedules.gate_bounds(1374) == (0.45, 0.85)
    assert schedules.gate_bounds(1500) == (0.225, 0.85)
    assert schedules.gate_bounds(1624) == (pytest.approx(0.0018), 0.85)
    assert schedules.gate_bounds(1625) == (0, 1)


@pytest.mark.parametrize("step, power", [(0, 0.115529), (128, 0.0), (640, -0.2410)])
def test_power_of_dynamic_muon(step, power):
    assert schedules.dynamic_power(step, 3200) == pytest.approx(power, abs=5e-5)


@pytest.mark.parametrize("label, step, name, expected", [
    ("o2", 0, "embed", 0.3 / 250), ("o2", 249, "attn.q", 0.0015),
    ("o4", 0, "attn.q", 0.0), ("o4", 249, "attn.q", 0.018 * 249 / 250),
    ("o4", 250, "attn.q", 0.018 * (1 - 250 / 4875)), ("o4", 0, "embed", 0.3),
    ("o23", 3089, "attn.q", 0.00325 * 0.0480626), ("o27", 3124, "attn.q", 0.018 * 0.0093235),
    ("o33", 2550, "embed", 0.3 * 0.55), ("o33", 850, "attn.q", 0.025 * 0.75),
    ("o25", 0, "attn.q", 0.018), ("o25", 1875, "embed", 0.3),
    ("o25", 2500, "embed", 0.3 * (0.04 + 0.96 * 0.5 ** 1.5)),
    ("o25", 2500, "attn.q", 0.018 * (0.017 + 0.983 * 0.2 ** 1.5)),
])
def test_rates_of_branches(label, step, name, expected):
    assert reference.rates(label, step)[name] == pytest.approx(expected, rel=1e-5)


# ---- Pieces ----


@pytest.mark.parametrize("shape", [SQUARE, TALL, WIDE])
@pytest.mark.parametrize("polar", [parts.polar, parts.polar_schatten, branches.muown_polar])
def test_singular_values_come_near_one(shape, polar):
    singular = torch.linalg.svdvals(polar(normal(*shape)))
    assert (singular - 1).abs().max() < 0.02


def test_the_polar_factor_has_the_matrix_s_singular_vectors():
    u = normal(*TALL)
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    assert (parts.polar(u) - left @ right).abs().max() < 1e-6


def test_schatten_norm_is_of_the_singular_values():
    for shape in (SQUARE, TALL, WIDE):
        u = normal(*shape)
        expected = (torch.linalg.svdvals(u) ** 4).sum() ** 0.25
        assert parts.schatten4(u).item() == pytest.approx(expected.item(), rel=ROUNDING)


@pytest.mark.parametrize("shape, along", [(SQUARE, 1), (TALL, 1), (WIDE, 0)])
def test_normuon_evens_rows_at_the_norm_of_before(shape, along):
    u = normal(*shape) * torch.linspace(1, 9, shape[1 - along]).unsqueeze(along)
    evened = parts.normuon({}, u)  # of the first call, in proportion to the mean square itself
    sizes = evened.square().mean(dim=along)
    assert (sizes / sizes.mean() - 1).abs().max() < ROUNDING
    assert evened.norm().item() == pytest.approx(u.norm().item(), rel=ROUNDING)


def test_normuon_that_never_moves_is_an_identity():
    u = normal(*TALL)
    torch.testing.assert_close(parts.normuon_schatten({}, u, beta=1.0), u)


def test_full_blend_is_an_identity():
    u, found = normal(*WIDE), normal(*WIDE, seed=1)
    found = found * parts.schatten4(u) / parts.schatten4(found)
    torch.testing.assert_close(parts.blended(u, found, 1.0), found)
    torch.testing.assert_close(parts.blended(u, found, 0.0), u)


def test_trust_is_whole_in_agreement_and_bounded():
    u = normal(*SQUARE)
    assert parts.trust(u, 3 * u, 2 * u, (0.0, 1.0)).item() == pytest.approx(1)
    assert parts.trust(u, 3 * u, 2 * u, (0.45, 0.85)) == 0.85
    assert parts.trust(u, -u, u, (0.45, 0.85)) == 0.45
    assert parts.trust(u, -u, u, (0.0, 1.0)) == 0


def test_contra_keeps_the_norm():
    u = normal(*TALL)
    direction = parts.polar(u)
    assert parts.contra(direction, u).norm().item() == pytest.approx(direction.norm().item())


def test_power_iterations_come_near_the_spectral_norm():
    u = torch.outer(normal(16), normal(16, seed=1)) + 0.01 * normal(*SQUARE)
    assert torch.linalg.svdvals(parts.over_spectral_norm(u))[0].item() == pytest.approx(1, 1e-6)


def test_floors_only_lengthen():
    weight, u = normal(*SQUARE), normal(*SQUARE, seed=1)
    long, short = 10 * u, 1e-3 * u
    assert parts.floored(long, weight, 0.35) is long
    ratio = parts.floored(short, weight, 0.35).norm() / weight.norm()
    assert ratio.item() == pytest.approx(0.35, rel=ROUNDING)
    short[3] = long[3]
    rows = parts.floored_rows(short, weight, 0.35)
    ratios = rows.norm(dim=1) / weight.norm(dim=1)
    assert torch.equal(rows[3], long[3])
    assert (ratios[[0, 1, 2, 4]] - 0.35).abs().max() < ROUNDING


def test_brake_halves_what_lengthens():
    weight = normal(*SQUARE)
    across = normal(*SQUARE, seed=1)
    across -= parts.inner(across, weight) / parts.inner(weight, weight) * weight
    torch.testing.assert_close(parts.brake(across - weight, weight), across - 0.5 * weight)
    torch.testing.assert_close(parts.brake(across + weight, weight), across + weight)


def test_radius_is_that_of_the_radial_part():
    weight, u = normal(*TALL), normal(*TALL, seed=1)
    moved = parts.step_and_radius(weight, u, 0.1)
    expected = weight.norm() - 0.1 * parts.inner(u, weight) / weight.norm()
    assert moved.norm().item() == pytest.approx(expected.item(), rel=ROUNDING)


def test_a_zero_matrix_gets_the_least_radius():
    """The direction of the first update is kept, and its length lost."""
    u = normal(*WIDE)
    moved = parts.step_and_radius(torch.zeros_like(u), u, 0.0375)
    assert moved.norm().item() == pytest.approx(1e-8, rel=ROUNDING)
    assert parts.cosine(moved * 1e8, -u).item() == pytest.approx(1, rel=ROUNDING)


def test_aurora_evens_rows():
    """More rounds, with the larger exponent, come nearer to rows of one length."""
    u = normal(*TALL) * torch.linspace(0.1, 3, 64)[:, None]

    def spread(found):
        lengths = found.norm(dim=1)
        return (lengths.std() / lengths.mean()).item()

    found = parts.even_rows_polar(u, parts.polar, 2, 0.5)
    assert spread(found) < 0.5 * spread(parts.polar(u))
    assert torch.equal(parts.even_rows_polar(u.T, parts.polar, 2, 0.5), found.T)


def test_soap_bases_are_first_used_one_step_late():
    state = {}
    u = normal(*TALL)
    assert torch.equal(parts.soap_direction(state, u), u)
    parts.soap_statistics(state, u, 0, every=10)
    found = parts.soap_direction(state, u)
    assert not torch.equal(found, u)
    assert parts.schatten4(found).item() == pytest.approx(parts.schatten4(u).item())


def test_soap_refreshes_at_multiples_of_its_frequency():
    state, changed = {}, []
    for step in range(25):
        before = state.get("left_basis")
        parts.soap_statistics(state, normal(*SQUARE, seed=step), step, every=10)
        if before is not None and not torch.equal(before, state["left_basis"]):
            changed.append(step)
    assert changed == [10, 20]


def test_soap_carries_the_second_moment_with_its_columns():
    """After a refresh of Gram matrices that did not move, only the order of columns is another."""
    gradient = normal(*SQUARE)
    state = {}
    for step in range(3):
        parts.soap_statistics(state, gradient, step, every=1)
    # Spoil the order of both bases; the second moment belongs to the columns.
    order = torch.arange(16).flip(0)
    state["second"] = normal(*SQUARE, seed=3).square()
    expected = parts.soap_direction(dict(state), gradient)
    spoilt = state | {
        "left_basis": state["left_basis"][:, order], "right_basis": state["right_basis"][:, order],
        "second": state["second"][order][:, order],
    }
    torch.testing.assert_close(parts.soap_direction(dict(spoilt), gradient), expected)
    parts.soap_statistics(spoilt, gradient, 3, every=1)
    torch.testing.assert_close(parts.soap_direction(dict(spoilt), gradient), expected)


@pytest.mark.parametrize("label", ["o14", "o20", "o29", "o30", "o41", "o44", "o46"])
def test_zero_matrices_make_no_nan(label):
    found = train(label, 4)
    for weights in found.weights:
        assert all(weight.isfinite().all() for weight in weights.values())
    assert found.losses[-1] < found.losses[0]


def test_the_first_bases_of_zero_gradients_are_reversed_identities():
    found = train("o44", 1)
    basis = found.states["blocks.0.attn.q.weight"]["left_basis"]
    assert torch.equal(basis.abs(), torch.eye(16).double().flip(1))
    found = train("o44", 2)  # and a QR of zero puts the identity in its place
    basis = found.states["blocks.0.attn.q.weight"]["left_basis"]
    assert torch.equal(basis.abs(), torch.eye(16).double())


def test_soft_weights_sum_to_one():
    assert sum(line.SOFT_WEIGHTS) == pytest.approx(1, abs=1e-9)


# ---- Runs ----


def test_zero_projections_hold_gradients_back():
    """Only the head moves in the first step, projections in the second, all in the third."""
    found = train("o36", 3)
    moved = [{name for name, gradient in gradients.items() if gradient.abs().max() > 0}
             for gradients in found.gradients]
    assert moved[0] == {"head.weight", "head.bias"}
    assert "blocks.0.attn.q.weight" not in moved[1]
    assert {"embed", "norm1", "norm2", "blocks.1.mlp.proj.bias"} <= moved[1]
    assert moved[2] == set(SMALL)


@pytest.mark.parametrize("label", sorted(reference.RESULTS))
def test_every_result_learns(label):
    """A few steps on one batch lower its loss, and no weight becomes NaN."""
    batch = batches(1)
    found = reference.run(label, first_of(label, layers=1), 4 * batch, 4, HEAD_DIM, draw=draw)
    assert found.losses[-1] < found.losses[0]
    for weight in found.weights[-1].values():
        assert weight.isfinite().all()


@pytest.mark.parametrize("label", ["o4", "o5", "o8", "o19", "o25", "o27", "o33", "o37"])
def test_the_ball_keeps_norms(label):
    found = train(label, 5)
    for name, weight in found.weights[-1].items():
        if matrix_kind(name):
            before = found.weights[0][name].norm().item()
            assert weight.norm().item() == pytest.approx(before, rel=1e-8)  # 33 adds 1e-10


def test_a_run_goes_on_from_its_states():
    whole = train("o46", 5)
    begun = train("o46", 3)
    rest = reference.run("o46", begun.weights[-1], batches(5)[3:], 2, HEAD_DIM, first_step=3,
                         states=begun.states)
    for name, weight in whole.weights[-1].items():
        assert torch.equal(weight, rest.weights[-1][name]), name


def test_constant_moves_are_lengthened_by_the_look_ahead():
    """Moves of a constant step grow towards step / (1 − strength): what was moved is not undone."""
    result = reference.RESULTS["o39"]
    running = reference.Run("o39", {"embed": torch.zeros(1)}, HEAD_DIM, first_step=500)
    for _ in range(600):
        before = running.weights["embed"]
        running.move_ahead()
        running.weights = {"embed": running.weights["embed"] + 1.0}
        running.note_moves()
        running.step = 600  # where rates still are the first ones
    way = (running.weights["embed"] - before).item()
    assert way == pytest.approx(1 / (1 - result.look_ahead.strength), rel=0.1)


def test_outer_steps_are_every_thirty():
    """p = S − 0.25·u − 1.05·Δ, with u = 0 at first and S the weights after the outer step."""
    running = reference.Run("o13", {"embed": torch.tensor([8.0])}, HEAD_DIM)
    found = []
    for step in range(60):
        running.step = step
        running.weights = {"embed": running.weights["embed"] - 0.1}
        running.outer_step()
        found.append(running.weights["embed"].item())
    first = 8 - 1.05 * 3
    assert found[28] == pytest.approx(8 - 2.9)
    assert found[29] == pytest.approx(first)
    assert found[58] == pytest.approx(first - 2.9)
    assert found[59] == pytest.approx(first - 0.25 * 0.7 * 3 - 1.05 * 3)


def test_averages_are_read_where_they_are_claimed():
    early = train("o46", 3, first_step=2398)
    assert early.read[1] is early.weights[1]
    torch.testing.assert_close(early.read[2]["norm2"], early.weights[2]["norm2"])  # its first
    mean = early.weights[2]["norm2"].lerp(early.weights[3]["norm2"], 1 / 150)
    expected = 0.4 * early.weights[3]["norm2"] + 0.6 * mean
    torch.testing.assert_close(early.read[3]["norm2"], expected)
    assert torch.equal(early.read[3]["embed"], early.weights[3]["embed"])

    late = train("o46", 3, first_step=2897)
    kept = late.states["run"]["average"]["norm2"]
    expected = late.weights[1]["norm2"].lerp(late.weights[2]["norm2"], 1 / 150)
    assert torch.equal(kept, expected)  # the last weights are not in it

    once = train("o45", 3, first_step=2717)
    assert all(read is weights for read, weights in zip(once.read, once.weights))
    plain = train("o44", 3, first_step=2717).weights
    mean = plain[1]["norm2"]
    for index in (2, 3):
        mean = mean.lerp(plain[index]["norm2"], 1 / 150)
    assert torch.equal(once.weights[2]["norm2"], plain[2]["norm2"])
    torch.testing.assert_close(once.weights[3]["norm2"], 0.4 * plain[3]["norm2"] + 0.6 * mean)


def test_the_first_call_of_kl_soap_moves_no_matrix():
    first = first_of("o19") | {"head.weight": 0.1 * normal(37, 16)}
    found = reference.run("o19", first, batches(2), 2, HEAD_DIM)
    for name in SMALL:
        moved = not torch.equal(found.weights[1][name], found.weights[0][name])
        assert moved == (matrix_kind(name) is None), name
    assert not torch.equal(found.weights[2]["blocks.0.attn.q.weight"],
                           found.weights[1]["blocks.0.attn.q.weight"])


def test_rows_of_zero_jump_to_their_radius():
    found = train("o23", 2)
    proj = [weights["blocks.0.mlp.proj.weight"] for weights in found.weights]
    assert proj[0].norm() == proj[1].norm() == 0
    assert (proj[2].norm(dim=1) - 0.33 ** 0.5).abs().max() < 0.01


def test_virtual_lengths_come_one_step_late_and_hold_directions():
    assert schedules.virtual_share(0) == schedules.virtual_share(1) == 0
    assert schedules.virtual_share(2) == (1 / 3164) ** 1.2
    weight, gradient = normal(*SQUARE), normal(*SQUARE, seed=1)
    hyper = reference.Run("o23", first_of("o23"), HEAD_DIM).hyper("blocks.0.attn.q.weight")

    def turned(step, lr):
        hyper.lr = lr
        moved = branches.muown({}, weight / weight.norm(dim=1, keepdim=True), gradient, hyper, step)
        return (moved / moved.norm(dim=1, keepdim=True) - weight / weight.norm(dim=1, keepdim=True))

    early, late = turned(1, 1e-5).norm(), turned(3165, 1e-5).norm()
    assert (late / early).item() == pytest.approx(1 / 2.496, rel=1e-3)


def test_shampoo_is_adam_before_its_first_refresh():
    """For four steps; and its refreshed direction has Adam's norm."""
    weight, state, plain = normal(*SQUARE), {}, {}
    hyper = reference.Run("o21", first_of("o21"), HEAD_DIM).hyper("blocks.0.attn.q.weight")
    for step in range(5):
        gradient = normal(*SQUARE, seed=step)
        found = branches.shampoo(state, weight, gradient, hyper, step)
        expected = parts.adam_direction(plain, gradient, 0.9, 0.95, 1e-10)
        found = (weight - found) / hyper.lr - 0.2 * weight
        if step < 4:
            torch.testing.assert_close(found, expected)
        else:
            assert parts.cosine(found, expected) < 0.99
            assert found.norm().item() == pytest.approx(expected.norm().item())


def test_sinkhorn_balances_energies():
    balanced = branches.balance(normal(*WIDE) * torch.linspace(1, 5, 64))
    energies = balanced.square().sum(dim=1)
    assert (energies * 16 - 1).abs().max() < 0.05


def test_newton_muon_preconditions_from_its_first_refresh():
    """From the step of the refresh on; before it, it is Muon."""
    plain = {step: first_of("o15")["blocks.0.attn.q.weight"] for step in (62, 63)}
    hyper = reference.Run("o15", first_of("o15"), HEAD_DIM).hyper("blocks.0.attn.q.weight")
    hyper.inputs = normal(40, 16) * torch.linspace(0.1, 3, 16)
    hyper.tokens = 40
    gradient = normal(*SQUARE)
    for step in plain:
        state = {}
        found = branches.newton_muon(state, plain[step], gradient, hyper, step)
        muon = line.muon({}, plain[step], gradient, hyper, step)
        assert torch.equal(found, muon) == (step == 62)
        assert ("inverses" in state) == (step == 63)


def test_psgd_factors_whiten():
    """Fitted to gradients of one spectrum, the preconditioned ones become whiter.

    Not white: each step forgets much, as the rate is one.
    """
    scale = torch.linspace(0.2, 3, 16).double()
    weight, state = normal(*SQUARE), {}
    hyper = reference.Run("o33", first_of("o33"), HEAD_DIM).hyper("blocks.0.attn.q.weight")
    for step in range(200):
        hyper.draw = lambda what, shape, step=step: draw("", what, shape, step)
        state["mean"] = torch.zeros_like(weight)
        state["calls"] = 0
        gradient = scale[:, None] * normal(*SQUARE, seed=1000 + step)
        branches.psgd(state, weight, gradient, hyper, step)
    white = torch.linalg.svdvals(state["left"].T @ state["left"] @ scale.diag())
    assert white[0] / white[-1] < scale.max() / scale.min() / 3
