"""FP8 matmuls of attention and MLPs: their ranges, and that they multiply rounded factors.

torch multiplies FP8 on a CPU as well, so what a GPU with FP8 would compute is computed here.
"""

import golden
import pytest
import torch
from record_folders import for_each, having, load

WITH_FP8_LAYERS = having("Fp8Scales")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16_STEP = 2.0**-8  # largest relative error of rounding to bf16's 8 significant bits
FP32_SUM = 1e-5  # of a sum of some hundred fp32 products, in units of the sum of their sizes
LARGEST_INPUT = 768**0.5  # of a normed vector: 27.7


@for_each(WITH_FP8_LAYERS)
def test_ranges(record):
    """Attention clips its inputs at 8. MLPs take all that a norm can give."""
    script = load(record)

    def taken(x, scales):
        return script.to_fp8(torch.tensor([x, -x]), scales.x, E4M3).float() / scales.x

    assert taken(LARGEST_INPUT, script.QKV_SCALES).tolist() == [8, -8]
    found = taken(LARGEST_INPUT, script.MLP_IN_SCALES)
    assert found[0] == -found[1] == pytest.approx(LARGEST_INPUT, rel=2**-4)
    assert taken(500.0, script.MLP_OUT_SCALES).tolist() == [448, -448]  # ReLU² of 22
    gradient = torch.tensor([2.0, 1e3])
    for scales, largest in (
        (script.QKV_SCALES, [1, 1]),
        (script.MLP_IN_SCALES, [2, 896]),
        (script.MLP_OUT_SCALES, [2, 896]),
    ):
        cast = script.to_fp8(gradient, scales.grad, scales.grad_dtype).float()
        assert (cast / scales.grad).tolist() == largest


@for_each(WITH_FP8_LAYERS)
@pytest.mark.parametrize("name", ["QKV_SCALES", "MLP_IN_SCALES", "MLP_OUT_SCALES"])
def test_results_are_products_of_the_rounded_factors(record, name):
    """Of a weight that is stored and of one that is transposed; forward, and both gradients."""
    script = load(record)
    scales = getattr(script, name)
    generator = torch.Generator().manual_seed(0)
    x = (2 * torch.randn(2, 32, 64, generator=generator)).bfloat16()
    stored = (0.1 * torch.randn(64, 48, generator=generator)).bfloat16()
    grad = (0.1 * torch.randn(2, 32, 48, generator=generator)).bfloat16()
    for w in (stored.T, stored.T.contiguous()):
        leaves = [x.clone().requires_grad_(), w.detach().requires_grad_()]
        out = script.fp8_linear(*leaves, scales)
        grad_x, grad_w = torch.autograd.grad(out, leaves, grad)
        w_scale = 448 / w.abs().max().float()

        def rounded(x, scale, dtype=E4M3):
            return script.to_fp8(x, scale, dtype).double().flatten(0, -2) / scale

        rx, rw = rounded(x, scales.x), rounded(w, w_scale)
        rg = rounded(grad, scales.grad, scales.grad_dtype)
        for found, left, right in (
            (out.detach(), rx, rw.T), (grad_x, rg, rw), (grad_w, rg.T, rx),
        ):
            exact, size = left @ right, left.abs() @ right.abs()
            error = (found.double().flatten(0, -2) - exact).abs()
            assert found.dtype == torch.bfloat16
            assert (error <= BF16_STEP * exact.abs() + FP32_SUM * size).all()


@for_each(WITH_FP8_LAYERS)
def test_the_derivative_of_relu2_is_that_of_the_rounded_activation(record):
    """Of all hidden units in bf16. It is off by as much as the record's page says."""
    script = load(record)
    sixteen_bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    hidden = sixteen_bits.view(torch.bfloat16)
    hidden = hidden[hidden.abs() < 128].view(-1, 32)
    x = hidden.clone().requires_grad_()
    eye = torch.eye(32).bfloat16()  # so that the gradient of ReLU² is that of the product
    out = script.fp8_linear(x, eye, script.MLP_OUT_SCALES, of_relu2=True)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out))
    activation = out.detach().double()
    low = script.to_fp8(torch.relu(hidden).square(), script.MLP_OUT_SCALES.x, E4M3).double()
    assert activation.equal(low)  # four bits are few enough for bf16
    exact_slope = 2 * low.sqrt()
    error = (slope.double() - exact_slope).abs()
    assert (error <= 1.01 * BF16_STEP * exact_slope).all()

    hidden, slope = hidden.double(), slope.double()
    error = (slope - 2 * hidden).abs()
    vanishes = hidden <= 2**-5
    is_small = ~vanishes & (hidden <= 2**-3)
    is_clipped = hidden > 448**0.5
    assert not slope[vanishes].any() and slope[~vanishes].all()
    assert error[is_small].max() <= 0.026
    is_normal = ~vanishes & ~is_small & ~is_clipped
    assert (error[is_normal] / (2 * hidden[is_normal])).max() <= 0.031 + BF16_STEP
    assert slope[is_clipped].unique().tolist() == [42.25]  # 2 √448 = 42.33 in bf16


@for_each(WITH_FP8_LAYERS)
def test_no_hidden_units_are_kept_in_bf16(record, tmp_path):
    """For the backward pass an MLP keeps its inner activation as FP8 numbers, a byte each."""
    script = load(record)
    golden.write_tables(tmp_path)
    cfg = golden.tiny(script, tmp_path, mlp_dim=128)
    mlp = script.MLP(cfg)
    mlp.use_fp8 = True
    with torch.no_grad():
        for param in mlp.parameters():
            param.fill_(0.1)
    x = torch.ones(64, cfg.model_dim).bfloat16().requires_grad_()
    kept = []

    def note(tensor):
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        mlp(x)
    assert [dtype for shape, dtype in kept if shape == (64, cfg.mlp_dim)] == [E4M3]


@for_each(WITH_FP8_LAYERS)
def test_layers_differ_from_bf16_by_few_bits_while_training_alone(record, tmp_path):
    """e4m3 keeps 4 significant bits: a product is off by 2⁻⁵ of its terms' size at random signs."""
    script = load(record)
    golden.write_tables(tmp_path)
    cfg = golden.tiny(script, tmp_path, head_dim=16, mlp_dim=128)
    mlp = script.MLP(cfg)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in mlp.parameters():
            param.normal_(std=cfg.model_dim**-0.5, generator=generator)
    x = script.norm(torch.randn(4, 32, cfg.model_dim, generator=generator)).bfloat16()
    mlp.use_fp8 = True
    low = mlp(x)
    mlp.eval()
    reference = mlp(x)
    mlp.use_fp8 = False
    assert reference.equal(mlp(x)) and not low.equal(reference)
    error = (low - reference).double().norm() / reference.double().norm()
    assert error < 2**-4
