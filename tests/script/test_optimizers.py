"""Muon by SVD, Adam by torch.optim; tests/records hold whole steps and all rates."""

import pytest
import torch

import train_gpt

BETAS = (0.65, 0.95)
POLAR_EXPRESS = (  # as published: coefficients of X, A X and A² X in each of five iterations
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("shape", [(32, 128), (128, 32), (64, 64)], ids=["wide", "tall", "square"])
def test_muon_maps_singular_values_by_the_quintics_and_keeps_the_vectors(shape, dtype, tolerance):
    """Each matrix of a batch on its own, small ones and zeros too."""
    sizes = torch.tensor([1.0, 1e-3, 0.0]).view(3, 1, 1)
    batch = sizes * torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(batch.double(), full_matrices=False)
    values = values / (1.02 * values.norm(dim=-1, keepdim=True) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    found = train_gpt.orthogonalize(batch, dtype)
    assert found.dtype == dtype
    errors = (found.double() - left * values[:, None] @ right).norm(dim=(1, 2))
    assert errors.max() < tolerance * min(shape) ** 0.5
    assert errors[2] == 0


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
