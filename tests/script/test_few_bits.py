"""What golden numbers in float64 leave out: the FP8 head, and Adam on bf16 weights."""

import math

import torch

from train_gpt import FP8Product, adam_update

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = (448 / 100, 448 / 1.5, 448 / 0.75)  # of x, w and the gradient, as published
BF16_STEP = 2.0**-8  # largest relative error of rounding to bf16's 8 significant bits
FP32_SUM = 1e-5  # of a sum of some hundred fp32 products, in units of the sum of their sizes


def rounded(x, scale, dtype):
    """x · scale in fp32, then the nearest value of the format, as float64."""
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype).double()


def test_head_and_gradients_are_products_of_the_rounded_factors(monkeypatch):
    """Row-major times column-major, as the hardware takes them: a CPU takes anything.

    Activations of norm one, small weights, and output gradients as a sum over tokens has. What is
    out of a format's range becomes its largest number.
    """
    layouts, scaled_mm = [], torch._scaled_mm

    def recorded(a, b, *args, **kwargs):
        layouts.append((a.stride(1), b.stride(0), a.size(1) % 16, b.size(1) % 16))
        return scaled_mm(a, b, *args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    S, D, V = 32, 64, 48
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(S, D, generator=generator).bfloat16()
    w = (0.1 * torch.randn(V, D, generator=generator)).bfloat16()
    g = (torch.randn(S, V, generator=generator) / 16).bfloat16()
    x[0, 0], w[0, 0], g[0, 0] = 1e5, -9, math.inf
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    out = FP8Product.apply(*leaves)
    assert [saved.dtype for saved in out.grad_fn.saved_tensors] == [E4M3, E4M3]  # a byte each
    grad_x, grad_w = torch.autograd.grad(out, leaves, g)
    assert layouts == [(1, 1, 0, 0)] * 3
    rx = rounded(x, SCALES[0], E4M3)
    rw = rounded(w, SCALES[1], E4M3)
    rg = rounded(g, SCALES[2], E5M2)
    for found, left, right, scales in (
        (out.detach(), rx, rw.T, SCALES[:2]),
        (grad_x, rg, rw, SCALES[1:]),
        (grad_w, rg.T, rx, SCALES[::2]),
    ):
        unscale = 1 / math.prod(scales)
        exact, size = unscale * left @ right, unscale * left.abs() @ right.abs()
        assert found.dtype == torch.bfloat16
        assert ((found.double() - exact).abs() <= BF16_STEP * exact.abs() + FP32_SUM * size).all()


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
    numbers = dict(lr=torch.tensor(0.6), betas=(0.65, 0.95), decay=0.6**2 * 0.3)
    adam_update(weight, grad, mean, square, torch.tensor(3.0), **numbers)
    for found, exact in ((weight, expected), (mean, m), (square, v)):
        bound = BF16_STEP * exact.abs() + 1e-5  # one rounding to bf16, and fp32's own
        assert ((found.double() - exact).abs() <= bound).all()
