"""Muon and Adam against torch.optim and float64, and how parameters lie in their flat buffers."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL
from lineage_oracles import POLAR_EXPRESS
from torch import nn

import train_gpt
from train_gpt import (
    GPT,
    Adam,
    Hyperparameters,
    Muon,
    Ranks,
    build_optimizers,
    orthogonalize,
    step_optimizers,
)

FLAT = dataclasses.replace(  # rates and momentum that do not change, as torch.optim has them
    Hyperparameters(),
    **TINY_MODEL,
    train_seq_len=128,
    val_seq_len=128,
    attention_pattern="LS.L",
    value_embed_pattern="01.0",
    skip_layer=0,
    cooldown_frac=0.0,
    momentum_start=0.95,
    momentum_cooldown=0,
    muon_decay=0.0,
    adam_decay=0.0,
    device="cpu",
)
FACTORS = {"qkv_w": 2, "attn.c_proj.weight": 2, "mlp.c_fc": 2, "mlp.c_proj": 4}  # of Muon's rate
BAND = (0.85, 1.15)  # singular values of the result, for those of the input from 1/500 up
SHAPES = {"wide": (32, 128), "tall": (128, 32), "square": (64, 64)}
FP32 = {"rtol": 1e-4, "atol": 1e-6}  # some hundred fp32 operations in different orders


@pytest.fixture(autouse=True)
def last_third(monkeypatch):
    """Embedding and head are apart, and no scalar rests; test_lineage.py has all stages."""
    monkeypatch.setattr(train_gpt, "stage", lambda step, cfg: 2)


def make_model(cfg=FLAT, seed=0):
    model = GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def make_optimizers(model, cfg=FLAT):
    return build_optimizers(model, cfg, Ranks(cfg))


def random_grads(model, seed):
    """Gradients on several scales, down to that of Adam's epsilon, with zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    grads = {}
    for name, p in model.named_parameters():
        kept = torch.rand(p.shape, generator=generator) > 0.1
        size = 10.0 ** (-2 * (len(grads) % 5))
        grads[name] = size * kept * torch.randn(p.shape, generator=generator)
    return grads


def matrix_with(singular_values, shape, seed=0):
    """A matrix, in float64, with the given singular values and random singular vectors."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(n, len(singular_values), generator=generator).double())[0]
        for n in shape
    )
    return left @ torch.diag(singular_values) @ right.T


def polar(G):
    """Five iterations of Polar Express on one matrix by its singular values, in float64."""
    left, values, right = torch.linalg.svd(G.double(), full_matrices=False)
    values = values / (1.02 * values.norm() + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def normuon(update, squares):
    """An update with rows made even at its old norm, by the means of their squares so far: [x]."""
    squares[0] = 0.95 * squares[0] + 0.05 * update.square().mean(1, keepdim=True)
    even = update / squares[0].sqrt()
    return even * update.norm() / even.norm()


def factor(name):
    return next((x for ending, x in FACTORS.items() if name.partition("[")[0].endswith(ending)), 1)


def train_steps(model, optimizers, num_steps, divisor=1, first=0):
    for step in range(first, first + num_steps):
        for name, grad in random_grads(model, step).items():
            model.get_parameter(name).grad += grad * divisor
        step_optimizers(optimizers, step, divisor)


# Muon


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_muon_update_has_singular_values_near_one(shape):
    spectrum = torch.logspace(-2, 0, min(shape)).double()
    (update,) = orthogonalize(matrix_with(spectrum, shape).float()[None], torch.float32)
    values = torch.linalg.svdvals(update.double())
    assert update.shape == shape
    assert values.min() > BAND[0] and values.max() < BAND[1]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("steps", [0, 1, 4, 5])
def test_muon_maps_singular_values_by_the_quintics_and_keeps_the_vectors(shape, steps, monkeypatch):
    monkeypatch.setattr(train_gpt, "POLAR_EXPRESS", train_gpt.POLAR_EXPRESS[:steps])
    spectrum = torch.linspace(0.05, 3, min(shape)).double()
    values = spectrum / (1.02 * spectrum.norm() + 1e-6)
    for a, b, c in POLAR_EXPRESS[:steps]:
        values = a * values + b * values**3 + c * values**5
    (found,) = orthogonalize(matrix_with(spectrum, shape).float()[None], torch.float32)
    torch.testing.assert_close(found.double(), matrix_with(values, shape), rtol=0, atol=2e-5)


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3])
def test_small_gradients_are_weakened_by_the_epsilon_of_their_norm(size):
    grad = size * torch.randn(8, 24, generator=torch.Generator().manual_seed(0))
    (found,) = orthogonalize(grad[None], torch.float32)
    expected = polar(grad)
    assert ((found - expected).norm() / expected.norm()).item() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_batch_is_orthogonalised_as_one_by_one(shape, dtype):
    batch = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    batch[1] *= 1e-3
    together = orthogonalize(batch, dtype)
    alone = torch.cat([orthogonalize(matrix[None], dtype) for matrix in batch])
    assert together.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.03  # some steps of bf16 at about one
    torch.testing.assert_close(together, alone, rtol=0, atol=tolerance)


def test_a_zero_gradient_gives_a_zero_update():
    assert not orthogonalize(torch.zeros(2, 16, 32), torch.float32).any()


def matrices(state):
    """Each matrix of the blocks on its own, stacks taken apart."""
    for name, x in state.items():
        if name.startswith("blocks.") and x.ndim >= 2:
            for index, matrix in enumerate(x.reshape(-1, *x.shape[-2:])):
                yield f"{name}[{index}]", matrix


def test_muon_agrees_with_torch_optim_muon_over_steps(monkeypatch):
    """torch's own has other coefficients and rounds to bf16, and leaves rows as they are: what it
    orthogonalises with is replaced. It also has a longer step for a tall matrix."""
    model = make_model()
    oracle = {name: nn.Parameter(x.clone()) for name, x in matrices(model.state_dict())}
    squares, order = {name: [0.0] for name in oracle}, itertools.cycle(oracle)
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz",
                        lambda G, *_: normuon(polar(G), squares[next(order)]).float())  # fmt: skip
    groups = [
        {"params": [p], "lr": FLAT.muon_lr * factor(name) / max(1, len(p) / p.size(1)) ** 0.5}
        for name, p in oracle.items()
    ]
    theirs = torch.optim.Muon(groups, weight_decay=0, momentum=0.95, adjust_lr_fn="original")
    optimizers = make_optimizers(model)
    for step in range(5):
        grads = random_grads(model, step)
        for name, grad in matrices(grads):
            oracle[name].grad = grad.clone()
        for name, grad in grads.items():
            model.get_parameter(name).grad.copy_(grad)
        theirs.step()
        step_optimizers(optimizers, step, 1)
        for name, x in matrices(model.state_dict()):
            torch.testing.assert_close(x, oracle[name].detach(), rtol=0, atol=4e-5, msg=name)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_first_step_has_even_rows_and_the_norm_of_muons(shape):
    generator = torch.Generator().manual_seed(0)
    weight, mean, square = (
        torch.zeros(2, *shape),
        torch.zeros(2, *shape),
        torch.zeros(2, shape[0], 1),
    )
    grad = torch.randn(2, *shape, generator=generator) * torch.rand(
        2, shape[0], 1, generator=generator
    )
    factors = torch.tensor([1.0, 3.0])[:, None, None]
    train_gpt.muon_update(weight, grad, mean, square, factors, 0.1, 0.95, 1.2, torch.float32)
    for step, g, times in zip(weight, grad, (1, 3), strict=True):
        norm = 0.1 * times * polar((1 - 0.95**2) * g).norm().item()
        assert step.norm().item() == pytest.approx(norm, rel=1e-4)
        rows = step.norm(dim=1)
        torch.testing.assert_close(rows, rows.mean().expand_as(rows), rtol=1e-3, atol=0)


def test_weights_that_a_step_of_muon_shrinks_decay_by_the_square_of_the_rate():
    generator = torch.Generator().manual_seed(0)
    weight, grad = torch.randn(2, 3, 32, 64, generator=generator).unbind()
    mean, square, factors = (
        torch.zeros(3, 32, 64),
        torch.zeros(3, 32, 1),
        torch.full((3, 1, 1), 2.0),
    )
    plain, before = weight.clone(), weight.clone()
    for x, decay in ((plain, 0.0), (weight, 1.2)):
        train_gpt.muon_update(
            x, grad, mean.clone(), square.clone(), factors, 0.1, 0.95, decay, torch.float32
        )
    shrunk = (before - plain) * before >= 0
    assert 0.3 < shrunk.float().mean() < 0.7
    expected = plain - torch.where(shrunk, 2 * 0.1**2 * 1.2 * before, 0)
    torch.testing.assert_close(weight, expected, **FP32)


@pytest.mark.parametrize("name", ["blocks.0.mlp.c_fc", "blocks.1.attn.attn_gate.weight"])
def test_muon_momentum_and_rates_follow_the_schedules(name):
    """One matrix by the published formulas in float64, over a run with all its phases."""
    cfg = dataclasses.replace(
        FLAT,
        num_iterations=10,
        extension_steps=2,
        cooldown_frac=0.4,
        momentum_start=0.85,
        momentum_warmup=6,
        momentum_cooldown=3,
        muon_lr=0.1,
    )
    model = make_model(cfg)
    optimizers = make_optimizers(model, cfg)
    weight = model.get_parameter(name).detach().double()
    mean, squares = torch.zeros_like(weight), [0.0]
    for step in range(10):
        grad = random_grads(model, step)[name].double()
        momentum = 0.85 + 0.1 * (min(step, 6) / 6 if step < 8 else (10 - step) / 3)
        left = 1 - min(1, step / 8)
        rate = factor(name) * 0.1 * min(1, 0.1 + 0.9 * left / 0.4)
        mean = momentum * mean + (1 - momentum) * grad
        weight -= rate * normuon(polar(momentum * mean + (1 - momentum) * grad), squares)
        for key, value in random_grads(model, step).items():
            model.get_parameter(key).grad.copy_(value)
        step_optimizers(optimizers, step, 1)
        torch.testing.assert_close(
            model.get_parameter(name).detach().double(), weight, rtol=0, atol=1e-4
        )


# Adam


def adam_parameters(model):
    by_muon = dict(matrices({name: p.detach() for name, p in model.named_parameters()}))
    muon_names = {name.partition("[")[0] for name in by_muon}
    return {name: p for name, p in model.named_parameters() if name not in muon_names}


def published_rate(name, p):
    if p.ndim < 2:
        return 0.04
    if name == "smear_gate.weight":
        return 8e-5
    return 0.6 if name.startswith("value_embeds") else 0.008


def published_betas(name, p):
    return (0.9, 0.99) if p.ndim < 2 and "x0" not in name else (0.65, 0.95)


def test_adam_agrees_with_torch_optim_adam_over_steps():
    model = make_model()
    oracle = {name: nn.Parameter(p.detach().clone()) for name, p in adam_parameters(model).items()}
    groups = [
        {"params": [p], "lr": published_rate(name, p), "betas": published_betas(name, p)}
        for name, p in oracle.items()
    ]
    theirs = torch.optim.Adam(groups)
    optimizers = make_optimizers(model)
    for step in range(12):
        for name, grad in random_grads(model, step).items():
            model.get_parameter(name).grad.copy_(grad)
            if name in oracle:
                oracle[name].grad = grad + (oracle[name].grad if step % 2 else 0)
        if step % 2:  # by the sum of two steps' gradients
            for group in theirs.param_groups:  # torch's is corrected for the step, ours is not
                group["eps"] = 1e-8 / (1 - group["betas"][1] ** ((step + 1) / 2)) ** 0.5
            theirs.step()
        step_optimizers(optimizers, step, 1)
        for name, p in adam_parameters(model).items():
            torch.testing.assert_close(p.detach(), oracle[name].detach(), **FP32, msg=name)


@pytest.mark.parametrize("adam_every", [1, 2, 3])
def test_adam_takes_the_sum_of_the_gradients_since_its_last_step(adam_every):
    cfg = dataclasses.replace(FLAT, adam_every=adam_every)
    model = make_model(cfg)
    optimizers, sums = make_optimizers(model, cfg), {}
    once = make_model()
    others = make_optimizers(once, dataclasses.replace(FLAT, adam_every=1))
    for step in range(6):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, grad in random_grads(model, step).items():
            model.get_parameter(name).grad.copy_(grad)
            sums[name] = sums.get(name, 0) + grad
        step_optimizers(optimizers, step, 1)
        steps = (step + 1) % adam_every == 0
        if steps:
            for name, total in sums.items():
                once.get_parameter(name).grad.copy_(total)
            step_optimizers(others, step, 1)
            sums = {}
        for name, p in adam_parameters(model).items():
            assert torch.equal(p, once.get_parameter(name)), name
            assert steps or torch.equal(p, before[name]), name
        name = "blocks.0.attn.qkv_w"
        assert not torch.equal(model.get_parameter(name), before[name]), "by Muon"


def test_adam_on_bf16_weights_computes_in_fp32_and_rounds_once():
    generator = torch.Generator().manual_seed(0)
    weight, grad, mean = (torch.randn(500, generator=generator).bfloat16() for _ in range(3))
    square = torch.rand(500, generator=generator).bfloat16()
    m = 0.65 * mean.double() + 0.35 * grad.double()
    v = 0.95 * square.double() + 0.05 * grad.double() ** 2
    rate = 0.6 * (1 - 0.95**4) ** 0.5 / (1 - 0.65**4)
    change = rate * m / (v.sqrt() + 1e-8)
    shrunk = change * weight.double() > 0
    expected = weight.double() - change - torch.where(shrunk, 0.6**2 * 0.3 * weight.double(), 0)
    step = torch.tensor(3.0)
    train_gpt.adam_update(
        weight, grad, mean, square, step, torch.tensor(0.6), 0.65, 0.95, 1e-8, 0.3
    )
    assert step == 4
    for found, exact in ((weight, expected), (mean, m), (square, v)):
        assert found.dtype == torch.bfloat16
        bound = 2**-8 * exact.abs() + 1e-5  # one rounding to bf16, and fp32's own
        assert ((found.double() - exact).abs() <= bound).all()


# Buffers and the table


def test_every_parameter_belongs_to_one_optimizer_with_the_published_rate():
    model = make_model()
    optimizers = make_optimizers(model)
    owners = {name: [] for name, _ in model.named_parameters()}
    for optimizer in optimizers:
        start = optimizer.weights.data_ptr()
        end = start + optimizer.weights.numel() * optimizer.weights.element_size()
        for name, p in model.named_parameters():
            if start <= p.data_ptr() < end:
                owners[name].append(optimizer)
    for name, p in model.named_parameters():
        (owner,) = owners[name]
        if name not in adam_parameters(model):
            assert type(owner) is Muon and owner.base_lr == 0.023
        else:
            assert type(owner) is Adam and owner.base_lr == published_rate(name, p)
    assert sum(o.numel for o in optimizers) == sum(p.numel() for p in model.parameters())


def test_a_parameter_that_the_table_leaves_out_is_an_error():
    model = make_model()
    model.stray = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(AssertionError, match="one row"):
        make_optimizers(model)


def test_a_parameter_that_the_table_has_twice_is_an_error():
    model = make_model()
    model.value_embeds.append(model.embed)
    with pytest.raises(AssertionError, match="one row"):
        make_optimizers(model)


def test_gradients_stay_views_of_the_flat_buffers():
    model = make_model()
    optimizers = make_optimizers(model)
    views = {name: (p.data_ptr(), p.grad.data_ptr()) for name, p in model.named_parameters()}
    buffers = [(o.weights, o.grads) for o in optimizers]
    inputs = torch.zeros(1, 128, dtype=torch.int32)
    for step in range(3):
        for _ in range(2):
            model(inputs, inputs.long()).backward()
            for name, p in model.named_parameters():
                assert (p.data_ptr(), p.grad.data_ptr()) == views[name], name
        norms = [sum(part.double().square().sum() for _, part in buffers)]
        norms.append(sum(p.grad.double().square().sum() for p in model.parameters()))
        assert norms[0] > 0
        torch.testing.assert_close(*norms)
        step_optimizers(optimizers, step, 1)
        assert not any(p.grad.any() for p in model.parameters()), "zero for the next step"
    # Whatever is loaded goes into the buffers too.
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
    assert views == {n: (p.data_ptr(), p.grad.data_ptr()) for n, p in model.named_parameters()}


def test_building_optimizers_changes_no_weight():
    model, untouched = make_model(), make_model()
    make_optimizers(model)
    for name, x in untouched.state_dict().items():
        assert torch.equal(model.state_dict()[name], x), name


def test_gradients_are_divided_by_the_divisor():
    models = make_model(), make_model()
    for model, divisor in zip(models, (1, 4), strict=True):
        train_steps(model, make_optimizers(model), 3, divisor)
    for name, x in models[0].state_dict().items():
        assert torch.equal(x, models[1].state_dict()[name]), name  # a power of two is exact


def test_state_goes_through_full_state_and_back():
    model = make_model()
    optimizers = make_optimizers(model)
    train_steps(model, optimizers, 3)
    saved = [o.full_state() for o in optimizers]
    assert all(len(full["mean"]) == o.numel for o, full in zip(optimizers, saved, strict=True))
    waiting = [full["sum"] for full in saved if "sum" in full]
    assert len(waiting) == 6 and all(x.any() for x in waiting), "Adam's sum between its steps"
    other = make_model()
    other.load_state_dict(model.state_dict())
    others = make_optimizers(other)
    for optimizer, full in zip(others, saved, strict=True):
        optimizer.load_full_state(full)
    train_steps(model, optimizers, 2, first=3)
    train_steps(other, others, 2, first=3)
    for name, x in model.state_dict().items():
        assert torch.equal(x, other.state_dict()[name]), name


def test_the_quintics_end_in_the_band_from_one_five_hundredth_up():
    """The band itself, of the scalar iteration that the matrices follow."""
    x = np.linspace(0.002, 1, 100_000) / 1.02
    for a, b, c in POLAR_EXPRESS:
        x = a * x + b * x**3 + c * x**5
    assert BAND[0] < x.min() and x.max() < BAND[1]
