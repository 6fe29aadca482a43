"""The rotary embedding, to the bit: its halves are cast before they are joined, and not after."""

import inspect

import pytest
import torch
from record_folders import LADDERS, for_each, load, one_of_each_kind

WITH_ROTATE = one_of_each_kind(LADDERS["time"], "rotate")


def reference(x, cos, sin, first_cast):
    """The same for angles of each head, cast in the end. Early records do not cast x first, so two
    gradients of each entry are rounded before they are added."""
    first, second = (first_cast(half) for half in x.chunk(2, dim=-1))
    joined = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
    return joined.to(x.dtype)


@for_each(WITH_ROTATE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_halves_are_cast_before_they_are_joined(record, dtype):
    rotate = load(record).rotate
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 64, 4, 32, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(2, 64, 4, 32, generator=generator).to(dtype)
    angle = torch.rand(64, 2, 16, generator=generator)  # of two positions
    given, of_heads = angle[:, :1], angle[:, :1]
    if "P positions" in rotate.__doc__:
        given, of_heads = angle[:, None], angle.repeat(1, 2, 1)  # heads alternate
    first_cast = torch.Tensor.float if ".float()" in inspect.getsource(rotate) else torch.clone
    expected = reference(x, 0.3 * of_heads.cos(), 0.3 * of_heads.sin(), first_cast)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    found = rotate(x, 0.3 * given.cos(), 0.3 * given.sin())
    (found_grad,) = torch.autograd.grad(found, x, grad)
    assert found.dtype == dtype and found.equal(expected)
    assert found_grad.dtype == dtype and found_grad.equal(expected_grad)
    joined = found.grad_fn  # the view of paired heads, or what joins
    while "Cat" not in joined.name():
        assert "ToCopy" not in joined.name()  # a cast would come after
        joined = joined.next_functions[0][0]
