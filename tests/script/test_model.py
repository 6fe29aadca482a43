"""Masks, attention and losses against float64, a token at a time; tests/records hold the model."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_compile import as_the_kernel_sees
from torch.nn.attention import flex_attention as flex

import train_gpt
from train_gpt import BLOCK, GPT, Hyperparameters

RECORD = Hyperparameters()
EOT = TINY_MODEL["eot_token"]
TINY = dataclasses.replace(
    RECORD,
    **TINY_MODEL,
    attention_pattern="LSSL",
    value_embed_pattern="0..0",
    skip_layer=0,
    seq_lens=(256,),
    val_seq_len=256,
    long_windows=(2,),  # the same in each stage: rotary table and scale stay as they begin
    short_windows=(1,),
)
# Two sums of some hundred fp32 products in different orders, on values of about one.
FP32 = {"rtol": 1e-4, "atol": 2e-5}


def make_model(cfg=TINY, seed=0):
    """A model with no weight at zero, so that everything in it matters."""
    model = GPT(cfg)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lambda" in name:
                param.uniform_(0.3, 1.2, generator=generator)
            elif name.endswith(("c_proj", "c_proj.weight", "gate.weight", "lm_head.weight")):
                param.normal_(std=0.3, generator=generator)
    return model


def blocks(window):
    return torch.tensor(window, dtype=torch.int32)


def random_tokens(rows, length, seed, document_tokens=60):
    """(rows, length) tokens of documents of random length, the first of them begun before."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, EOT, size=(rows, length))
    tokens[generator.random(tokens.shape) < 1 / document_tokens] = EOT
    return torch.from_numpy(tokens.astype(np.int32))


@torch.no_grad()
def all_logits(model, tokens, window):
    model.windows[0], model.windows[1] = window, max(1, window // 2)
    return model.logits(model.hidden(tokens))


@pytest.fixture(autouse=True)
def eager_flex(monkeypatch):
    """FlexAttention by plain operations; on a CPU it refuses gradients it has."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)


def attend(q_BTHK, k_BTHK, v_BTHK, mask):
    return train_gpt.attend(0.12 * q_BTHK, k_BTHK, v_BTHK, mask, None)


def naive_mask(tokens_row, window):
    """Token i sees token j where j <= i, both in one document, `window` · 128 apart at most."""
    tokens = tokens_row.numpy()
    i, j = np.indices((len(tokens), len(tokens)))
    document = np.cumsum(tokens == EOT)
    seen = (j <= i) & (document[i] == document[j]) & (i - j <= BLOCK * window)
    return torch.from_numpy(seen)


def naive_attention(q_BTHK, k_BTHK, v_BTHK, masks, scale):
    """Softmax over what each token sees, one sequence and one head at a time."""
    out = torch.empty_like(q_BTHK)
    for b, h in itertools.product(range(q_BTHK.size(0)), range(q_BTHK.size(2))):
        scores = scale * q_BTHK[b, :, h] @ k_BTHK[b, :, h].T
        out[b, :, h] = scores.masked_fill(~masks[b], -math.inf).softmax(-1) @ v_BTHK[b, :, h]
    return out


def documents(tokens_BT):
    """Number of the document of each token, as the masks take it: no two rows share one."""
    starts = tokens_BT == EOT
    starts[:, 0] = True
    return starts.flatten().cumsum(0).int().view_as(tokens_BT)


def random_qkv(rows, length, seed, heads=2, head_dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, rows, length, heads, head_dim)
    return torch.randn(shape, generator=generator, dtype=dtype).unbind()


# The mask


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**20), num_blocks=st.integers(1, 4), rows=st.integers(1, 2),
    window=st.integers(1, 5), document_tokens=st.sampled_from([5, 50, 300, math.inf]),
)
def test_both_attention_paths_equal_the_dense_formula(
    seed, num_blocks, rows, window, document_tokens
):
    length = num_blocks * BLOCK
    tokens = random_tokens(rows, length, seed, document_tokens)
    qkv = random_qkv(rows, length, seed)
    masks = [naive_mask(row, window) for row in tokens]
    expected = naive_attention(*(x.double() for x in qkv), masks, 0.12)
    docs = documents(tokens)
    with torch.no_grad():
        flex_mask = as_the_kernel_sees(train_gpt.flex_mask(docs, blocks(window)))
        for mask in (train_gpt.dense_mask(docs, blocks(window)), flex_mask):
            found = attend(*qkv, mask)
            torch.testing.assert_close(found.double(), expected, **FP32)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("document_tokens", [60, math.inf])
def test_flex_mask_visits_no_block_that_nobody_sees(window, document_tokens):
    tokens = random_tokens(1, 6 * BLOCK, 4, document_tokens)
    seen = naive_mask(tokens[0], window).view(6, BLOCK, 6, BLOCK).permute(0, 2, 1, 3).flatten(2)
    mask = train_gpt.flex_mask(documents(tokens), blocks(window))
    assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() == seen.any(-1).sum()
    assert mask.full_kv_num_blocks.sum() == seen.all(-1).sum()


def test_dense_mask_grows_with_tokens_times_window_up_to_the_sequence():
    docs = documents(random_tokens(2, 8 * BLOCK, 0))
    for window, most in ((1, 2), (2, 3), (4, 5), (100, 8)):
        mask = train_gpt.dense_mask(docs, blocks(window))
        assert mask.numel() == 16 * BLOCK * most * BLOCK


@pytest.mark.parametrize("length", [1, 127, 128, 200])
def test_a_text_of_any_length_is_seen_as_the_beginning_of_a_longer_one(length):
    tokens, model = random_tokens(2, 256, 6), make_model()
    whole, part = (all_logits(model, x, 2) for x in (tokens, tokens[:, :length]))
    torch.testing.assert_close(part, whole[:, :length], **FP32)


# The whole


@pytest.mark.parametrize("head_chunks", [2, 3, 1000])
def test_a_head_in_pieces_has_the_same_losses_and_gradients(head_chunks):
    cfg = dataclasses.replace(TINY, sequences_per_forward=2, device="cpu")
    tokens, targets = random_tokens(2, 256, 0), random_tokens(2, 256, 1).long()
    results = []
    for chunks in (1, head_chunks):
        cfg = dataclasses.replace(cfg, head_chunks=chunks)
        model = make_model(cfg)
        model.tokens_per_piece = train_gpt.build(cfg, train_gpt.Ranks(cfg))[0].tokens_per_piece
        sizes, head_loss = [], model.head_loss
        model.head_loss = lambda x, *rest, s=sizes, f=head_loss: (s.append(len(x)), f(x, *rest))[1]
        losses = model(tokens, targets, 3)
        sizes = sizes.copy()
        (losses * torch.tensor([1.0, 0.5, 0.2])).sum().backward()
        grads = [p.grad for name, p in model.named_parameters() if name != "skip_lambda"]  # unused
        results.append((losses.detach(), sizes, grads))
    (whole, one, whole_grads), (losses, many, grads) = results
    assert one == [512]
    assert sum(many) == 512 and 1 < len(many) <= head_chunks
    assert all(size % 128 == 0 for size in many)
    torch.testing.assert_close(losses, whole, rtol=1e-6, atol=0)
    for a, b in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA, as does all that is computed from it."""

    is_cuda = True


@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
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
    raw = raw.as_subclass(OnCuda if device == "cuda" else torch.Tensor).requires_grad_()
    model.lm_head.forward = lambda x: x
    losses = model.head_loss(raw, targets, torch.arange(48))
    weights = torch.tensor([1.0, 0.5, 0.2])[:num_targets]
    (losses * weights).sum().backward()

    exact = raw.detach().as_subclass(torch.Tensor).double().requires_grad_()
    logs = (30 * torch.sigmoid(exact / 7.5)).log_softmax(-1)
    expected = []
    for column in targets.T:
        expected.append(-sum(logs[i, target] for i, target in enumerate(column) if target >= 0))
    sum(w * loss for w, loss in zip(weights, expected)).backward()
    assert losses.dtype == torch.float32
    assert losses.tolist() == pytest.approx([loss.item() for loss in expected], rel=1e-6)
    grad = raw.grad.as_subclass(torch.Tensor)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-5, atol=2e-7)
    assert (grad[[3, 17, 63]] == 0).all()


# Weights


def test_the_record_has_as_many_parameters_as_published():
    with torch.device("meta"):
        model = GPT(RECORD)
    assert sum(p.numel() for p in model.parameters()) == 268_665_609


def test_a_parameter_without_a_rule_is_an_error():
    model = GPT(TINY)
    model.blocks[0].bias = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(KeyError, match=r"blocks\.0\.bias"):
        model.init_weights(torch.Generator())


def test_a_seed_gives_the_same_weights_and_another_seed_others():
    states = []
    for seed in (0, 0, 1):
        model = GPT(TINY)
        model.init_weights(torch.Generator().manual_seed(seed))
        states.append(model.state_dict())
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())
    assert not torch.equal(states[0]["embed.weight"], states[2]["embed.weight"])
