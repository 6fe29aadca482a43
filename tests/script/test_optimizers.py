"""Muon and Adam against torch.optim and float64, and how parameters lie in their flat buffers."""

import itertools
from dataclasses import replace

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
    schedule,
    step_optimizers,
)

CFG = replace(
    Hyperparameters(), **TINY_MODEL, seq_lens=(128,), val_seq_len=128, attention_pattern="LS.L",
    value_embed_pattern="01.0", skip_layer=0, device="cpu",
)
# Rates and momentum that do not change, as torch.optim has them; embedding and head apart.
FLAT = dict(lr_factor=1.0, momentum=0.95, tied=False, frozen=False)
FACTORS = {"qkv_w": 2, "attn.c_proj.weight": 2, "mlp.c_fc": 2, "mlp.c_proj": 4}  # of Muon's rate
SHAPES = {"wide": (32, 128), "tall": (128, 32), "square": (64, 64)}
FP32 = {"rtol": 1e-4, "atol": 1e-6}  # some hundred fp32 operations in different orders


def flat(step, **changes):
    return replace(schedule(step, CFG), **(FLAT | changes))


def make_model(cfg=CFG, seed=0):
    model = GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def make_optimizers(model, cfg=CFG, decay=0.0):
    optimizers = build_optimizers(model, cfg, Ranks(cfg))
    for optimizer in optimizers:
        optimizer.group.decay = decay
    return optimizers


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


def train_step(model, optimizers, step, now=None, divisor=1):
    """Returns the gradients of the step, by name."""
    grads = random_grads(model, step)
    for name, grad in grads.items():
        model.get_parameter(name).grad += grad * divisor
    step_optimizers(optimizers, now or flat(step), divisor)
    return grads


# Muon


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("steps", [1, 5])
def test_muon_maps_singular_values_by_the_quintics_and_keeps_the_vectors(shape, steps, monkeypatch):
    monkeypatch.setattr(train_gpt, "POLAR_EXPRESS", train_gpt.POLAR_EXPRESS[:steps])
    spectrum = torch.linspace(0.05, 3, min(shape)).double()
    values = spectrum / (1.02 * spectrum.norm() + 1e-6)
    for a, b, c in POLAR_EXPRESS[:steps]:
        values = a * values + b * values**3 + c * values**5
    (found,) = orthogonalize(matrix_with(spectrum, shape).float()[None], torch.float32)
    torch.testing.assert_close(found.double(), matrix_with(values, shape), rtol=0, atol=2e-5)


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
        {"params": [p], "lr": CFG.muon_lr * factor(name) / max(1, len(p) / p.size(1)) ** 0.5}
        for name, p in oracle.items()
    ]
    theirs = torch.optim.Muon(groups, weight_decay=0, momentum=0.95, adjust_lr_fn="original")
    optimizers = make_optimizers(model)
    for step in range(5):
        for name, grad in matrices(train_step(model, optimizers, step)):
            oracle[name].grad = grad.clone()
        theirs.step()
        for name, x in matrices(model.state_dict()):
            torch.testing.assert_close(x, oracle[name].detach(), rtol=0, atol=4e-5, msg=name)


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


def test_adam_agrees_with_torch_optim_adam_every_other_step():
    """In between it rests. Then it steps by the sum of two gradients."""
    model = make_model()
    oracle = {name: nn.Parameter(p.detach().clone()) for name, p in adam_parameters(model).items()}
    groups = [
        {"params": [p], "lr": published_rate(name, p), "betas": published_betas(name, p)}
        for name, p in oracle.items()
    ]
    theirs = torch.optim.Adam(groups)
    optimizers = make_optimizers(model)
    for step in range(12):
        grads = train_step(model, optimizers, step)
        for name in oracle:
            oracle[name].grad = grads[name] + (oracle[name].grad if step % 2 else 0)
        if step % 2:
            for group in theirs.param_groups:  # torch's is corrected for the step, ours is not
                group["eps"] = 1e-8 / (1 - group["betas"][1] ** ((step + 1) / 2)) ** 0.5
            theirs.step()
        for name, p in adam_parameters(model).items():
            torch.testing.assert_close(p.detach(), oracle[name].detach(), **FP32, msg=name)


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
    count = torch.tensor(3.0)
    numbers = dict(lr=torch.tensor(0.6), betas=(0.65, 0.95), decay=0.6**2 * 0.3)
    train_gpt.adam_update(weight, grad, mean, square, count, **numbers)
    assert count == 4
    for found, exact in ((weight, expected), (mean, m), (square, v)):
        assert found.dtype == torch.bfloat16
        bound = 2**-8 * exact.abs() + 1e-5  # one rounding to bf16, and fp32's own
        assert ((found.double() - exact).abs() <= bound).all()


# Buffers and the table


def test_every_parameter_belongs_to_one_optimizer_with_the_published_rate():
    model = make_model()
    optimizers = build_optimizers(model, CFG, Ranks(CFG))
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
            assert type(owner) is Muon
            assert (owner.group.lr, owner.group.decay) == (0.023, 1.2)
        else:
            assert type(owner) is Adam
            assert owner.group.lr == pytest.approx(published_rate(name, p))
            decays = name.endswith(("embed.weight", "lm_head.weight")) or "value" in name
            assert owner.group.decay == (0.005 if decays else 0)
    assert sum(o.numel for o in optimizers) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("change", [
    lambda model: model.register_parameter("stray", nn.Parameter(torch.zeros(4, 4))),
    lambda model: model.value_embeds.append(model.embed)], ids=["in no row", "in two rows"])
def test_the_table_has_each_parameter_once(change):
    model = make_model()
    change(model)
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
            model(inputs, inputs.long()).sum().backward()
            for name, p in model.named_parameters():
                assert (p.data_ptr(), p.grad.data_ptr()) == views[name], name
        norms = [sum(part.double().square().sum() for _, part in buffers)]
        norms.append(sum(p.grad.double().square().sum() for p in model.parameters()))
        assert norms[0] > 0
        torch.testing.assert_close(*norms)
        step_optimizers(optimizers, flat(step, adam_rests=False), 1)
        assert not any(p.grad.any() for p in model.parameters()), "zero for the next step"
    # Whatever is loaded goes into the buffers too.
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
    assert views == {n: (p.data_ptr(), p.grad.data_ptr()) for n, p in model.named_parameters()}
