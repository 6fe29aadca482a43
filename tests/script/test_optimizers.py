"""Adam on bf16 weights; golden numbers hold whole steps and all rates in float64."""

import torch

import train_gpt

BETAS = (0.65, 0.95)


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
    numbers = dict(lr=torch.tensor(0.6), betas=BETAS, decay=0.6**2 * 0.3)
    train_gpt.adam_update(weight, grad, mean, square, torch.tensor(3.0), **numbers)
    for found, exact in ((weight, expected), (mean, m), (square, v)):
        bound = 2**-8 * exact.abs() + 1e-5  # one rounding to bf16, and fp32's own
        assert ((found.double() - exact).abs() <= bound).all()
