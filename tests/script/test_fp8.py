"""The FP8 head against float64, its factors rounded on a grid made from the formats' bits."""

import math

import numpy as np
import pytest
import torch

from train_gpt import CastedLinear, FP8Product, to_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = (448 / 100, 448 / 1.5, 448 / 0.75)  # of x, w and the gradient, as published
BF16_STEP = 2.0**-8  # largest relative error of rounding to bf16's 8 significant bits
FP32_SUM = 1e-5  # of a sum of some hundred fp32 products, in units of the sum of their sizes
# Relative rounding errors of the two factors, 4 and 3 significant bits, at most 2^-4 and 2^-3;
# they are independent, so that over a sum they add up like noise, and this is ample.
E4M3_PRODUCT, E5M2_PRODUCT = 2.0**-4, 2.0**-3


def grid(exponent_bits, mantissa_bits, largest):
    """All finite non-negative values of a format, by the formula of its bits."""
    bias = 2 ** (exponent_bits - 1) - 1
    steps = 2**mantissa_bits
    values = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    for exponent in range(1, 2**exponent_bits):
        values += [(1 + m / steps) * 2.0 ** (exponent - bias) for m in range(steps)]
    return np.array([value for value in values if value <= largest])


GRIDS = {E4M3: grid(4, 3, 448.0), E5M2: grid(5, 2, 57344.0)}


def rounded(x, scale, dtype):
    """x · scale, an fp32, rounded to the nearest value of the grid, ties to even, as float64."""
    values = GRIDS[dtype]
    scaled = x.float().numpy() * np.float32(scale)
    size = np.minimum(np.abs(scaled.astype(np.float64)), values[-1])
    right = np.searchsorted(values, size).clip(1, len(values) - 1)
    low, high = values[right - 1], values[right]
    up = (size - low > high - size) | ((size - low == high - size) & (right % 2 == 0))
    return torch.from_numpy(np.where(up, high, low) * np.sign(x.double().numpy()))


def head_inputs(S=64, D=48, V=96, seed=0):
    """Activations of norm one, small weights, and output gradients as a sum over tokens has."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(S, D, generator=generator).bfloat16()
    w = 0.1 * torch.randn(V, D, generator=generator)
    g = (torch.randn(S, V, generator=generator) / 16).bfloat16()
    return x, w, g


def relative_error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 2.0, 2.0**9])
def test_the_cast_rounds_to_the_nearest_value_of_the_format(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, generator=generator) * torch.logspace(-9, 2, 4000)
    assert torch.equal(to_fp8(x, scale, dtype).double(), rounded(x, scale, dtype))


@pytest.mark.parametrize(("dtype", "largest"), [(E4M3, 448), (E5M2, 57344)])
def test_the_cast_saturates(dtype, largest):
    x = torch.tensor([1e9, -1e9, math.inf, -math.inf, largest, 1.05 * largest, 3e38])
    signs = torch.tensor([1, -1, 1, -1, 1, 1, 1.0])
    for given in (x, x.bfloat16()):
        assert torch.equal(to_fp8(given, 2.0, dtype).float(), largest * signs)
    assert to_fp8(torch.tensor([math.nan]), 2.0, dtype).isnan().all()


@pytest.mark.parametrize("shape", [(64, 48, 96), (128, 768, 384)])
def test_forward_is_the_product_of_the_rounded_factors(shape):
    x, w, _ = head_inputs(*shape)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    out = FP8Product.apply(*leaves)
    x_f8, w_f8 = out.grad_fn.saved_tensors
    assert (out.dtype, x_f8.dtype, w_f8.dtype) == (torch.bfloat16, E4M3, E4M3)
    rx, rw = rounded(x, SCALES[0], E4M3), rounded(w, SCALES[1], E4M3)
    assert torch.equal(x_f8.double(), rx) and torch.equal(w_f8.double(), rw)
    out = out.detach()
    unscale = 1 / (SCALES[0] * SCALES[1])
    exact, size = unscale * rx @ rw.T, unscale * rx.abs() @ rw.abs().T
    assert ((out.double() - exact).abs() <= BF16_STEP * exact.abs() + FP32_SUM * size).all()
    assert 0 < relative_error(out, x.double() @ w.double().T) < E4M3_PRODUCT


@pytest.mark.parametrize("shape", [(64, 48, 96), (128, 768, 384)])
def test_backward_is_the_products_of_the_rounded_factors(shape):
    x, w, g = head_inputs(*shape)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    out = FP8Product.apply(*leaves)
    grad_x, grad_w = torch.autograd.grad(out, leaves, g)
    assert (grad_x.dtype, grad_w.dtype) == (torch.bfloat16, torch.float32)
    rx, rw, rg = (rounded(*a) for a in zip((x, w, g), SCALES, (E4M3, E4M3, E5M2), strict=True))
    for found, left, right, scales, step in (
        (grad_x, rg, rw, SCALES[1:], BF16_STEP),
        (grad_w, rg.T, rx, (SCALES[0], SCALES[2]), 0),
    ):
        unscale = 1 / math.prod(scales)
        exact, size = unscale * left @ right, unscale * left.abs() @ right.abs()
        assert ((found.double() - exact).abs() <= step * exact.abs() + FP32_SUM * size).all()
    assert 0 < relative_error(grad_x, g.double() @ w.double()) < E5M2_PRODUCT
    assert 0 < relative_error(grad_w, g.double().T @ x.double()) < E5M2_PRODUCT


def test_products_are_laid_out_as_the_hardware_takes_them(monkeypatch):
    """Row-major times column-major, rows of multiples of 16 bytes: a CPU takes anything."""
    layouts, scaled_mm = [], torch._scaled_mm

    def recorded(a, b, *args, **kwargs):
        layouts.append((a.stride(1), b.stride(0), a.size(1) % 16, b.size(1) % 16))
        return scaled_mm(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    x, w, g = head_inputs(64, 48, 96)
    FP8Product.apply(x.requires_grad_(), w.requires_grad_()).backward(g)
    assert layouts == [(1, 1, 0, 0)] * 3


def test_casted_linear_uses_fp8_in_training_alone():
    x, w, _ = head_inputs()
    linear = CastedLinear(48, 96)
    with torch.no_grad():
        linear.weight.copy_(w)
    plain = (x.double() @ w.bfloat16().double().T).bfloat16()
    assert relative_error(linear(x), plain.double()) < BF16_STEP
    linear.use_fp8 = True
    batched = linear(x.view(2, 32, 48))
    assert torch.equal(batched.flatten(0, 1), FP8Product.apply(x, w))
    linear.eval()
    assert relative_error(linear(x), plain.double()) < BF16_STEP
