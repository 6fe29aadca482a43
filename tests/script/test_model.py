"""Texts of any length, the head's chunks and losses; tests/records hold the whole model."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import tiny
from torch import Tensor

from train_gpt import GPT, Batch, build_optimizers

TINY = tiny()
EOT = TINY.eot_token
# Two sums of some hundred fp32 products in different orders, on values of about one.
FP32 = {"rtol": 1e-4, "atol": 2e-5}


def make_model(cfg=TINY):
    """A model with no weight at zero, so that everything in it matters."""
    model, generator = GPT(cfg), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3, generator=generator)
    return model


@pytest.fixture
def tokens():
    """Two rows of three documents, the first of them begun before."""
    tokens = torch.randint(EOT, (2, 256), generator=torch.Generator().manual_seed(0))
    tokens[:, [60, 190]] = EOT
    return tokens


@pytest.mark.parametrize("length", [1, 127, 128, 200])
def test_a_text_of_any_length_is_seen_as_the_beginning_of_a_longer_one(tokens, length):
    model = make_model()
    with torch.no_grad():
        whole, part = (model.logits(model.hidden(x)) for x in (tokens, tokens[:, :length]))
    torch.testing.assert_close(part, whole[:, :length], **FP32)


def test_the_head_takes_chunks_that_the_backward_pass_computes_again(tokens):
    """Or all logits would be in memory at once. The records' tests hold the losses."""
    model, taken = make_model(tiny(head_chunks=2)), []
    head_loss = model.head_loss

    def noted(x, *rest):
        taken.append(len(x))
        return head_loss(x, *rest)

    model.head_loss = noted
    losses = model(Batch(tokens, tokens), 3)
    assert taken == [384, 128]
    losses.sum().backward()
    assert sorted(taken[2:]) == [128, 384]


class OnCuda(Tensor):
    """A CPU tensor that says it is on CUDA, as does all that is computed from it."""

    is_cuda = True


@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("device", [Tensor, OnCuda], ids=["cpu", "cuda"])
def test_the_losses_are_cross_entropies_in_float64(device, num_targets):
    """Both forms of it, the CPU's and that of one pass, with targets of -1 among the others.

    Raw logits of 1e4 and -1e4 are at the ends of the cap, where the sum of exponentials is largest,
    48 * exp(30), and where all of it would be lost but for the target itself.
    """
    generator = torch.Generator().manual_seed(0)
    model = make_model(dataclasses.replace(TINY, vocab_size=40, eot_token=39, vocab_multiple=16))
    raw = 20 * torch.randn(64, 48, generator=generator)
    raw[0], raw[1], raw[2, :7], raw[2, 7:] = 1e4, -1e4, 1e4, -1e4
    targets = torch.randint(40, (64, num_targets), generator=generator)
    targets[[3, 17, 63]] = targets[10:20, 1:] = -1
    weights = torch.tensor([1.0, 0.5, 0.2])[:num_targets]
    raw = raw.as_subclass(device).requires_grad_()
    model.lm_head.forward = lambda x: x
    losses = model.head_loss(raw, targets, torch.arange(48))
    (losses * weights).sum().backward()

    exact = raw.detach().as_subclass(Tensor).double().requires_grad_()
    logs = (30 * torch.sigmoid(exact / 7.5)).log_softmax(-1)
    expected = [F.nll_loss(logs, column, ignore_index=-1, reduction="sum") for column in targets.T]
    sum(w * loss for w, loss in zip(weights, expected)).backward()
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([loss.item() for loss in expected], rel=1e-6)
    grad = raw.grad.as_subclass(Tensor).double()
    torch.testing.assert_close(grad, exact.grad, rtol=1e-5, atol=2e-7)
    assert (grad[[3, 17, 63]] == 0).all()


@pytest.mark.parametrize("name, changed, said", [
    ("attention", lambda param: param.new_zeros(3, 16, 32), "its matrices have several shapes"),
    ("lambdas", lambda param: param.double(), "its parameters have several types")])
def test_a_group_whose_parameters_do_not_fit_together_is_refused(name, changed, said):
    """Its buffer would silently be cut by the first one's shape, and have its type."""
    model = GPT(TINY)
    last = [param for param in model.parameters() if param.group == name][-1]
    last.data = changed(last.data)
    ranks = SimpleNamespace(rank=0, world_size=1)
    with pytest.raises((TypeError, ValueError), match=f"group '{name}': {said}"):
        build_optimizers(model, TINY, ranks)
