"""Masks, attention and losses against float64; tests/records hold the whole model and its steps."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_runs import tiny
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

import train_gpt
from train_gpt import BLOCK, GPT, Hyperparameters

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


def random_tokens(rows, length, seed, document_tokens=60):
    """(rows, length) tokens of documents of random length, the first of them begun before."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, EOT, size=(rows, length))
    tokens[generator.random(tokens.shape) < 1 / document_tokens] = EOT
    return torch.from_numpy(tokens.astype(np.int32))


def as_the_kernel_sees(mask):
    """The same mask, its blocks' lists part of the predicate: a CPU asks it about every pair of
    tokens, the kernel only within the partial blocks; of a full one it sees all."""

    def listed(count, indices):
        blocks = torch.arange(indices.size(-1))
        first = torch.where(blocks < count[0, 0, :, None], indices[0, 0].long(), len(blocks))
        chosen = torch.zeros(len(blocks), len(blocks) + 1, dtype=torch.bool)
        return chosen.scatter(1, first, True)

    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)

    def seen(b, h, q, k):
        block = q // BLOCK, k // BLOCK
        return full[block] | (partial[block] & mask.mask_mod(b, h, q, k))

    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        BLOCK_SIZE=BLOCK, mask_mod=seen)


@pytest.mark.parametrize("reach, document_tokens",
                         [(50, 300), (128, 300), (256, 20), (300, math.inf), (640, 300)])
def test_both_attention_paths_equal_the_formula_and_visit_no_block_that_nobody_sees(
    monkeypatch, reach, document_tokens
):
    """Token i sees token j where j <= i, both in one document, `reach` apart at most."""
    # By plain operations; on a CPU FlexAttention refuses gradients, which it has.
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    starts = random_tokens(2, 4 * BLOCK, reach, document_tokens) == EOT
    starts[:, 0] = True
    docs = starts.flatten().cumsum(0).int()
    i, j = torch.meshgrid(torch.arange(len(docs)), torch.arange(len(docs)), indexing="ij")
    seen = (j <= i) & (docs[i] == docs[j]) & (i - j <= reach)
    shape = (3, 2, 4 * BLOCK, 2, 16)
    qkv = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.5
    expected = F.scaled_dot_product_attention(
        *qkv.double().flatten(1, 2).transpose(1, 2), attn_mask=seen, scale=1.0)
    expected = expected.transpose(0, 1).view(shape[1:])
    arguments = docs.view(2, -1), torch.tensor(reach, dtype=torch.int32)
    dense_mask, flex_mask = train_gpt.dense_mask(*arguments), train_gpt.flex_mask(*arguments)
    with torch.no_grad():
        for mask in (dense_mask, as_the_kernel_sees(flex_mask)):
            found = train_gpt.attend(*qkv, mask, None)
            torch.testing.assert_close(found.double(), expected, **FP32)

    keys = min(32 * math.ceil(reach / 32) + 32, 4 * BLOCK)  # of blocks of 32
    assert dense_mask.numel() == len(docs) * keys
    blocks = seen.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    assert flex_mask.full_kv_num_blocks.sum() == blocks.all(-1).all(1).sum()
    visited = flex_mask.kv_num_blocks + flex_mask.full_kv_num_blocks
    assert visited.sum() == blocks.any(-1).any(1).sum()


@pytest.mark.parametrize("length", [1, 127, 128, 200])
def test_a_text_of_any_length_is_seen_as_the_beginning_of_a_longer_one(length):
    tokens, model = random_tokens(2, 256, 6), make_model()
    model.reach[:] = torch.tensor([256, 128])
    with torch.no_grad():
        whole, part = (model.logits(model.hidden(x)) for x in (tokens, tokens[:, :length]))
    torch.testing.assert_close(part, whole[:, :length], **FP32)


@pytest.mark.parametrize("size, sizes", [(512, [512]), (256, [256, 256]), (200, [200, 200, 112])])
def test_the_head_takes_chunks_that_the_backward_pass_computes_again(size, sizes):
    """Or all logits would be in memory at once. The records' tests hold the losses."""
    tokens, model, taken = random_tokens(2, 256, 0), make_model(), []
    head_loss, model.tokens_per_chunk = model.head_loss, size
    model.head_loss = lambda x, *rest: (taken.append(len(x)), head_loss(x, *rest))[1]
    losses = model(tokens, tokens.long(), 3)
    assert taken == sizes
    losses.sum().backward()
    again = sizes[::-1] if len(sizes) > 1 else []
    assert taken == sizes + again


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


def test_the_record_has_as_many_parameters_as_published():
    with torch.device("meta"):
        assert sum(p.numel() for p in GPT(Hyperparameters()).parameters()) == 268_665_609
