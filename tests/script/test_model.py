"""The model against its published formulas, written out again token by token in float64."""

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY_MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

import train_gpt
from train_gpt import BLOCK, GPT, PRESETS, Hyperparameters

RECORD = Hyperparameters(**PRESETS["record"])
EOT = TINY_MODEL["eot_token"]
TINY = dataclasses.replace(
    RECORD,
    **TINY_MODEL,
    attention_pattern="LSSL",
    value_embed_pattern="0..0",
    skip_layer=0,
    window_stages="2 2 2 2",  # the same in each stage: rotary table and scale stay as they begin
    final_window=2,
    train_seq_len=256,
    val_seq_len=256,
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


def set_window(model, window):
    """Long windows of so many blocks, as the script sets them for a step."""
    model.cfg = dataclasses.replace(model.cfg, window_stages=" ".join([str(window)] * 4))
    model.set_window(0)


@torch.no_grad()
def all_logits(model, tokens, window):
    set_window(model, window)
    return model.logits(model.hidden(tokens))


@pytest.fixture(autouse=True)
def eager_flex(monkeypatch):
    """FlexAttention by plain operations; on a CPU it refuses gradients it has."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_validate_device", lambda query, key, value: None)


def attend(q_BTHK, k_BTHK, v_BTHK, mask):
    return train_gpt.attend(q_BTHK, k_BTHK, v_BTHK, mask=mask, scale=0.12)


def flex_mask(docs, window):
    """The script's block mask with its lists of blocks put into mask_mod.

    The kernel takes a full block whole, of a partial one what mask_mod lets through, and no other;
    plain FlexAttention would go by mask_mod alone.
    """
    mask = train_gpt.flex_mask(docs, window)
    lists = [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)]
    partial, full = (torch.zeros_like(indices[0, 0], dtype=torch.bool) for _, indices in lists)
    for table, (counts, indices) in zip((partial, full), lists, strict=True):
        for row, (count, order) in enumerate(zip(counts[0, 0], indices[0, 0], strict=True)):
            table[row, order[:count]] = True
    assert not (partial & full).any()
    seen = copy.copy(mask)
    seen.mask_mod = lambda b, h, q, k: (
        full[q // BLOCK, k // BLOCK] | (partial[q // BLOCK, k // BLOCK] & mask.mask_mod(b, h, q, k))
    )
    return seen


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
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**20),
    num_blocks=st.integers(1, 4),
    rows=st.integers(1, 2),
    window=st.integers(1, 5),
    document_tokens=st.sampled_from([5, 50, 300, math.inf]),
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
        for build in (train_gpt.dense_mask, flex_mask):
            found = attend(*qkv, build(docs, blocks(window)))
            torch.testing.assert_close(found.double(), expected, **FP32)


@pytest.mark.parametrize(("seed", "window"), [(0, 1), (1, 2), (2, 3)])
def test_both_attention_paths_have_the_gradients_of_the_dense_formula(seed, window):
    tokens = random_tokens(1, 3 * BLOCK, seed)
    qkv = random_qkv(1, 3 * BLOCK, seed, heads=1)
    weights = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(seed))
    leaves = [x.double().requires_grad_() for x in qkv]
    expected = naive_attention(*leaves, [naive_mask(tokens[0], window)], 0.12)
    expected = torch.autograd.grad((expected * weights).sum(), leaves)
    for build in (train_gpt.dense_mask, flex_mask):
        leaves = [x.clone().requires_grad_() for x in qkv]
        found = attend(*leaves, build(documents(tokens), blocks(window)))
        found = torch.autograd.grad((found * weights).sum(), leaves)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, **FP32)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("document_tokens", [60, math.inf])
def test_flex_mask_visits_no_block_that_nobody_sees(window, document_tokens):
    tokens = random_tokens(1, 6 * BLOCK, 4, document_tokens)
    seen = naive_mask(tokens[0], window).view(6, BLOCK, 6, BLOCK).permute(0, 2, 1, 3).flatten(2)
    mask = train_gpt.flex_mask(documents(tokens), blocks(window))
    assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() == seen.any(-1).sum()
    assert mask.full_kv_num_blocks.sum() == seen.all(-1).sum()


def test_flex_mask_takes_the_window_as_a_tensor():
    docs, window = documents(random_tokens(1, 4 * BLOCK, 0, document_tokens=math.inf)), blocks(1)
    short = train_gpt.flex_mask(docs, window).to_dense()
    window.fill_(3)
    assert train_gpt.flex_mask(docs, window).to_dense().sum() > short.sum()


def test_dense_mask_grows_with_tokens_times_window():
    docs = documents(random_tokens(1, 8 * BLOCK, 0))
    sizes = {w: train_gpt.dense_mask(docs, blocks(w)).numel() for w in (1, 2, 4)}
    assert sizes == {w: 8 * BLOCK * (w + 1) * BLOCK for w in (1, 2, 4)}


def test_dense_mask_is_no_longer_than_the_sequence():
    docs = documents(random_tokens(2, 2 * BLOCK, 0))
    sizes = [train_gpt.dense_mask(docs, blocks(w)).numel() for w in (1, 2, 100)]
    assert sizes == [4 * BLOCK * 2 * BLOCK] * 3


@pytest.mark.parametrize("window", [1, 2])
def test_the_window_binds_to_the_token(window):
    """Per layer: a token changes what sees it, and nothing one token beyond the window."""
    length, changed = 5 * BLOCK, BLOCK + 17
    q, k, v = random_qkv(1, length, 0)
    mask = train_gpt.dense_mask(torch.ones(1, length, dtype=torch.int32), blocks(window))
    before = attend(q, k, v, mask)
    v = v.clone()
    v[:, changed] += 1
    differs = (attend(q, k, v, mask) != before).flatten(2).any(-1)[0]
    last = changed + window * BLOCK
    assert differs.nonzero().flatten().tolist() == list(range(changed, last + 1))


# What a logit may depend on


def changed_positions(tokens, position, window, cfg=TINY):
    """Where logits differ after another token is put at the position."""
    model = make_model(cfg)
    other = tokens.clone()
    other[0, position] = (tokens[0, position] + 1) % EOT
    before, after = (all_logits(model, x, window) for x in (tokens, other))
    return (before != after).any(-1).nonzero().tolist()


@pytest.mark.parametrize("position", [1, 100, 127, 128, 200, 255])
def test_a_future_token_changes_no_earlier_logit(position):
    tokens = random_tokens(1, 256, 1, document_tokens=math.inf)
    changed = [t for _, t in changed_positions(tokens, position, window=2)]
    assert min(changed) == position
    assert max(changed) == 255


ONE = dataclasses.replace(TINY, attention_pattern="S", value_embed_pattern="0", backout_layer=0)


def test_a_token_of_another_document_changes_nothing():
    tokens = random_tokens(2, 256, 2, document_tokens=math.inf)
    tokens[0, 0] = tokens[0, 90] = tokens[0, 200] = EOT
    changed = changed_positions(tokens, 120, window=2, cfg=ONE)
    assert {row for row, _ in changed} == {0}
    assert [t for _, t in changed] == list(range(120, 200))


def test_smear_and_shifted_keys_alone_look_over_the_edge_of_a_document():
    """And then by one token: the next document's first takes up the last one's embedding and half
    of its key."""
    tokens = random_tokens(1, 256, 2, document_tokens=math.inf)
    tokens[0, 0] = tokens[0, 200] = EOT
    changed = changed_positions(tokens, 199, window=2, cfg=ONE)
    assert [t for _, t in changed] == list(range(199, 256))
    changed = changed_positions(tokens, 198, window=2, cfg=ONE)
    assert [t for _, t in changed] == [198, 199, *range(201, 256)]  # 200 sees itself alone
    changed = changed_positions(tokens, 197, window=2, cfg=ONE)
    assert [t for _, t in changed] == [197, 198, 199]


def test_rows_do_not_see_each_other():
    tokens = random_tokens(2, 128, 3)
    model = make_model()
    together = all_logits(model, tokens, 2)
    alone = torch.cat([all_logits(model, row[None], 2) for row in tokens])
    torch.testing.assert_close(together, alone, **FP32)


@pytest.mark.parametrize("length", [1, 127, 128, 200])
def test_a_text_of_any_length_is_seen_as_the_beginning_of_a_longer_one(length):
    tokens, model = random_tokens(2, 256, 6), make_model()
    whole, part = (all_logits(model, x, 2) for x in (tokens, tokens[:, :length]))
    torch.testing.assert_close(part, whole[:, :length], **FP32)


def test_each_layer_has_the_window_of_its_letter():
    """With the window at 4 blocks, one S layer reaches 2 blocks and one L layer 4. What they reach
    has taken up the embedding of the token before it, and some of its key."""
    tokens = random_tokens(1, 6 * BLOCK, 5, document_tokens=math.inf)
    for letter, reach in (("S", 2), ("L", 4)):
        cfg = dataclasses.replace(
            TINY, attention_pattern=letter, value_embed_pattern=".", val_seq_len=6 * BLOCK
        )
        changed = changed_positions(tokens, 10, window=4, cfg=cfg)
        assert max(t for _, t in changed) == 12 + reach * BLOCK


def test_the_short_window_is_never_below_one_block():
    cfg = dataclasses.replace(TINY, attention_pattern="S", value_embed_pattern=".")
    tokens = random_tokens(1, 256, 5, document_tokens=math.inf)
    changed = changed_positions(tokens, 10, window=1, cfg=cfg)
    assert [t for _, t in changed] == list(range(10, 12 + BLOCK + 1))


# Rotary embedding


def rotate(x_BTHK, attention_scale=1.0):
    head_dim, length = x_BTHK.size(-1), x_BTHK.size(1)
    cfg = dataclasses.replace(
        TINY, head_dim=head_dim, model_dim=head_dim, train_seq_len=1024,
        attention_scale=attention_scale,
    )  # fmt: skip
    return train_gpt.rotate(x_BTHK, *GPT(cfg).turns[:, :length])


def test_the_tables_hold_the_root_of_the_attention_scale():
    x = torch.randn(1, 300, 2, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(x, 0.0625), 0.25 * rotate(x), rtol=1e-6, atol=1e-7)


def test_half_of_the_rotary_dimensions_are_untouched():
    x = torch.randn(1, 300, 2, 32, generator=torch.Generator().manual_seed(0))
    y = rotate(x)
    still = torch.cat([torch.arange(8, 16), torch.arange(24, 32)])
    turning = torch.cat([torch.arange(0, 8), torch.arange(16, 24)])
    assert torch.equal(x[..., still], y[..., still])
    assert torch.equal(x[:, 0], y[:, 0])
    assert (x[:, 1:][..., turning] != y[:, 1:][..., turning]).float().mean() > 0.99


def test_rotary_turns_each_pair_by_position_times_frequency():
    x = torch.randn(1, 700, 1, 32, generator=torch.Generator().manual_seed(0))
    y = rotate(x)
    for pair, position in itertools.product(range(8), (1, 5, 333, 699)):
        frequency = 1024 ** -(pair / 7)  # from 1 down to 1 / rope_base
        before, after = (
            complex(z[0, position, 0, pair], z[0, position, 0, pair + 16]) for z in (x, y)
        )
        angle = position * frequency
        expected = before * complex(math.cos(angle), -math.sin(angle))
        # The angle, up to 699, is rounded to fp32 twice.
        assert abs(after - expected) < 3e-4


def test_scores_depend_on_differences_of_position_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 32, generator=generator)
    rows = [x.expand(1, 1000, 1, 32) for x in (q, k)]
    rq, rk = (rotate(x)[0, :, 0].double() for x in rows)
    for distance in (0, 1, 17, 400):
        scores = torch.stack([rq[i + distance] @ rk[i] for i in range(0, 600, 37)])
        torch.testing.assert_close(scores, scores[:1].expand_as(scores), rtol=0, atol=5e-3)
    assert abs(rq[1] @ rk[0] - rq[0] @ rk[0]) > 0.1


# The whole


def naive_logits(state, tokens_BT, window, cfg):
    """The published formulas on a state dict, in float64 and with dense attention."""
    W = {name: x.double() for name, x in state.items()}
    B, T = tokens_BT.shape
    heads, half, quarter = cfg.model_dim // cfg.head_dim, cfg.head_dim // 2, cfg.head_dim // 4
    windows = {"L": window, "S": max(1, window // 2)}
    masks = {key: [naive_mask(row, w) for row in tokens_BT] for key, w in windows.items()}

    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    def rotate(x_BTHK):
        frequency = torch.zeros(half, dtype=torch.float64)
        frequency[:quarter] = (1 / cfg.rope_base) ** (torch.arange(quarter) / (quarter - 1))
        angle = torch.arange(T)[:, None, None] * frequency
        a, b = x_BTHK[..., :half], x_BTHK[..., half:]
        return torch.cat(
            [a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()], dim=-1
        )

    def gate(x, name):
        return torch.sigmoid(x[..., :12] @ W[f"{name}.weight"].T)

    tokens = tokens_BT.long()
    embeds = W["embed.weight"][tokens]
    x = embeds.clone()
    for t in range(1, T):
        x[:, t] += W["smear_lambda"] * gate(embeds[:, t], "smear_gate") * embeds[:, t - 1]
    x0 = x = rms(x)
    outputs = []
    for layer in range(len(cfg.attention_pattern)):
        name = f"blocks.{layer}"
        if cfg.attention_pattern[layer] == ".":
            x = x + torch.sigmoid(W["skip_lambda"]) * outputs[cfg.skip_layer]
        x = W[f"{name}.x_lambda"] * x + W[f"{name}.x0_lambda"] * x0
        if cfg.attention_pattern[layer] != ".":
            qkv_lambda, output_lambda = W[f"{name}.attn.lambdas"]
            q, k, v = (
                (rms(x) @ (qkv_lambda * w).T).view(B, T, heads, cfg.head_dim)
                for w in W[f"{name}.attn.qkv_w"]
            )
            if cfg.value_embed_pattern[layer] != ".":
                table = W[f"value_embeds.{cfg.value_embed_pattern[layer]}.weight"]
                v = v + table[tokens].view_as(v)
            q, k, seen = rotate(rms(q)), rotate(rms(k)), masks[cfg.attention_pattern[layer]]
            own = k.clone()
            for still in (slice(quarter, half), slice(half + quarter, None)):
                k[:, 1:, :, still] = own[:, :-1, :, still]
            y = naive_attention(q, k, v, seen, cfg.attention_scale)
            y = y * gate(rms(x), f"{name}.attn.attn_gate")[..., None]
            x = x + y.reshape(B, T, -1) @ (output_lambda * W[f"{name}.attn.c_proj.weight"]).T
        h = (rms(x) @ W[f"{name}.mlp.c_fc"].T).clamp(min=0) ** 2
        x = x + h @ W[f"{name}.mlp.c_proj"]
        outputs.append(x)
    x = x - W["backout_lambda"] * outputs[cfg.backout_layer]
    return 30 / (1 + torch.exp(-(rms(x) @ W["lm_head.weight"].T) / 7.5))


@pytest.mark.parametrize(
    ("attention_pattern", "value_embed_pattern", "backout_layer"),
    [
        ("LSSL", "0..0", 2),
        ("LSL", "0.0", 0),
        ("LS.SSL", "01..10", 4),
        ("SL", "..", 0),
        ("S", ".", 0),
    ],
)
def test_the_model_is_the_published_formulas(attention_pattern, value_embed_pattern, backout_layer):
    cfg = dataclasses.replace(
        TINY, attention_pattern=attention_pattern, value_embed_pattern=value_embed_pattern,
        backout_layer=backout_layer, attention_scale=0.3,
    )  # fmt: skip
    model = make_model(cfg)
    with torch.no_grad():  # keeps the residual stream, and so the rounding, near one
        for block in model.blocks:
            block.mlp.c_proj.mul_(0.1)
    tokens = random_tokens(2, 256, 7)
    for window in (1, 2):
        expected = naive_logits(model.state_dict(), tokens, window, cfg)
        found = all_logits(model, tokens, window)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
        targets = random_tokens(2, 256, 8).long()
        loss = model(tokens, targets).item()
        logs = expected.log_softmax(-1).gather(-1, targets[..., None])
        assert loss == pytest.approx(-logs.sum().item(), rel=1e-5)


def test_logits_lie_between_zero_and_the_cap():
    model = make_model()
    x = torch.tensor([-1e6, -100.0, -7.5, 0.0, 7.5, 100.0, 1e6])
    model.lm_head.forward = lambda x: x
    logits = model.logits(x)
    assert logits[3] == 15
    assert logits.dtype == torch.float32
    assert (logits.diff() >= 0).all() and logits.min() >= 0 and logits.max() <= 30
    torch.testing.assert_close(logits, 15 * torch.tanh(x / 15) + 15, rtol=0, atol=1e-5)
    assert model.logits(torch.full((1,), -1.0, dtype=torch.bfloat16)).dtype == torch.float32


def test_logits_of_a_model_lie_inside_the_open_interval():
    logits = all_logits(make_model(), random_tokens(1, 256, 0), 2)
    assert logits.min() > 0 and logits.max() < 30


@pytest.mark.parametrize("vocab_size", [257, 384, 1000])
def test_the_first_loss_is_the_log_of_the_padded_vocabulary(vocab_size):
    cfg = dataclasses.replace(TINY, vocab_size=vocab_size, embed_std=0.0)
    model = GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    tokens = random_tokens(1, 256, 0)
    loss = model(tokens, tokens.long()).item() / 256
    padded = 128 * math.ceil(vocab_size / 128)
    assert model.lm_head.weight.shape == (padded, 32)
    assert loss == pytest.approx(math.log(padded), rel=1e-6)


def test_a_target_of_minus_one_counts_for_nothing():
    model, tokens = make_model(), random_tokens(1, 256, 0)
    targets = random_tokens(1, 256, 1).long()
    whole = F.cross_entropy(all_logits(model, tokens, 2)[0], targets[0], reduction="none")
    targets[0, 100:] = -1
    assert model(tokens, targets).item() == pytest.approx(whole[:100].sum().item(), 1e-5)


@pytest.mark.parametrize("head_chunks", [2, 3, 8, 1000])
def test_a_head_in_chunks_has_the_same_loss_and_gradients(head_chunks):
    cfg = dataclasses.replace(TINY, sequences_per_forward=2)
    tokens, targets = random_tokens(2, 256, 0), random_tokens(2, 256, 1).long()
    results, weights = [], torch.tensor([1.0, 0.5, 0.2])
    for chunks in (1, head_chunks):
        model = make_model(dataclasses.replace(cfg, head_chunks=chunks))
        sizes, head_loss = [], model.head_loss
        model.head_loss = lambda x, *rest, s=sizes, f=head_loss: (s.append(len(x)), f(x, *rest))[1]
        loss = model(tokens, targets, weights)
        sizes = sizes.copy()
        loss.backward()
        grads = [p.grad for name, p in model.named_parameters() if name != "skip_lambda"]  # unused
        results.append((loss.detach(), sizes, grads))
    (whole, one, whole_grads), (loss, many, grads) = results
    assert one == [512]
    assert sum(many) == 512 and 1 < len(many) <= head_chunks
    torch.testing.assert_close(loss, whole, rtol=1e-6, atol=0)
    for a, b in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA, as does all that is computed from it."""

    is_cuda = True


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.5, 0.2]])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_loss_is_the_cross_entropy_in_float64(device, weights):
    """Both forms of it, the CPU's and that of one pass, with targets of -1 among the others.

    Raw logits of 1e4 and -1e4 are at the ends of the cap, where the sum of exponentials is largest,
    48 * exp(30), and where all of it would be lost but for the target itself.
    """
    generator = torch.Generator().manual_seed(0)
    model = make_model(dataclasses.replace(TINY, vocab_size=40, eot_token=39, vocab_multiple=16))
    raw = 20 * torch.randn(64, 48, generator=generator)
    raw[0], raw[1], raw[2, :7], raw[2, 7:] = 1e4, -1e4, 1e4, -1e4
    targets = torch.randint(40, (64, len(weights)), generator=generator)
    targets[[3, 17, 63]] = targets[10:20, 1:] = -1
    raw = raw.as_subclass(OnCuda if device == "cuda" else torch.Tensor).requires_grad_()
    model.lm_head.forward = lambda x: x
    loss = model.head_loss(raw, targets, torch.tensor(weights), torch.arange(48))
    loss.backward()

    exact = raw.detach().as_subclass(torch.Tensor).double().requires_grad_()
    logs = (30 * torch.sigmoid(exact / 7.5)).log_softmax(-1)
    pairs = [(i, target, w) for i, row in enumerate(targets) for target, w in zip(row, weights)]
    expected = -sum(w * logs[i, target] for i, target, w in pairs if target >= 0)
    expected.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    grad = raw.grad.as_subclass(torch.Tensor)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-5, atol=1e-7 * sum(weights))
    assert (grad[[3, 17, 63]] == 0).all()


def test_validation_cuts_the_head_into_whole_training_sequences_only():
    """It keeps nothing for a backward pass, and a long sequence is a graph of few pieces."""
    cfg = dataclasses.replace(TINY, head_chunks=4, train_seq_len=512, val_seq_len=1024)
    model, tokens = make_model(cfg), random_tokens(1, 1024, 0)
    sizes, head_loss = [], model.head_loss
    model.head_loss = lambda x, *rest: (sizes.append(len(x)), head_loss(x, *rest))[1]
    with torch.no_grad():
        losses = [model.train(mode)(tokens, tokens.long()) for mode in (True, False)]
    assert sizes == 8 * [128] + 2 * [512]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


# Weights


def expected_shapes(cfg):
    """Names and shapes of the parameters of record #53, as its facts state them, in our names."""
    D, H, V = cfg.model_dim, cfg.model_dim // cfg.head_dim, 50304
    shapes = {"embed.weight": (V, D), "skip_lambda": (), "lm_head.weight": (V, D)}
    shapes |= {"smear_gate.weight": (1, 12), "smear_lambda": (), "backout_lambda": ()}
    shapes |= {f"value_embeds.{i}.weight": (V, D) for i in range(3)}
    for layer in range(11):
        if layer != 6:
            shapes[f"blocks.{layer}.attn.qkv_w"] = (3, D, D)
            shapes[f"blocks.{layer}.attn.lambdas"] = (2,)
            shapes[f"blocks.{layer}.attn.c_proj.weight"] = (D, D)
            shapes[f"blocks.{layer}.attn.attn_gate.weight"] = (H, 12)
        shapes[f"blocks.{layer}.mlp.c_fc"] = (4 * D, D)
        shapes[f"blocks.{layer}.mlp.c_proj"] = (4 * D, D)
        shapes[f"blocks.{layer}.x_lambda"] = shapes[f"blocks.{layer}.x0_lambda"] = ()
    return shapes


def test_the_record_has_the_published_parameters():
    with torch.device("meta"):
        model = GPT(RECORD)
    found = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    assert found == expected_shapes(RECORD)
    assert sum(p.numel() for p in model.parameters()) == 268_665_609


@pytest.mark.parametrize(("stages", "windows"), [("3 7 11 13", (20, 6)), ("1 1 1 1", (20, 1))])
def test_a_model_attends_with_the_runs_last_windows_until_it_is_told_others(stages, windows):
    model = GPT(dataclasses.replace(TINY, window_stages=stages, final_window=20))
    assert tuple(model.windows.tolist()) == windows


def test_windows_and_tables_are_those_of_the_step():
    """Also of an earlier one: a stage's tables do not depend on what was set before."""
    cfg = dataclasses.replace(
        TINY, window_stages="3 7 11 13", final_window=20, num_iterations=12, extension_steps=0
    )
    model, tables = GPT(cfg), []
    for step, windows in ((0, (3, 1)), (5, (7, 3)), (11, (11, 5)), (12, (20, 6))):
        model.set_window(step)
        assert tuple(model.windows.tolist()) == windows
        tables.append(model.turns.clone())
        frequency, scale = train_gpt.yarn(step, cfg)
        angle = 100 * frequency.double()
        expected = scale**0.5 * torch.stack([angle.cos(), angle.sin()])
        torch.testing.assert_close(
            model.turns[:, 100, 0, : len(angle)].double(), expected, rtol=0, atol=1e-5
        )
    model.set_window(0)
    assert torch.equal(model.turns, tables[0])
    assert not torch.equal(tables[0], tables[1])


def test_initial_weights_follow_the_published_rules():
    cfg = dataclasses.replace(TINY, model_dim=128, head_dim=32)
    model = GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(0))
    numbers = {"skip_lambda": -1.5, "smear_lambda": 0, "backout_lambda": 0.5}
    assert torch.equal(model.embed.weight, model.lm_head.weight)
    for name, param in model.state_dict().items():
        if name in ("embed.weight", "lm_head.weight"):
            assert param.std().item() == pytest.approx(0.005, rel=0.02)
            assert abs(param.mean().item()) < 1e-4
        elif name.endswith(("c_proj.weight", "mlp.c_proj", "gate.weight")) or "embed" in name:
            assert not param.any()
        elif name.endswith(("qkv_w", "c_fc")):
            std = (1 if name.endswith("qkv_w") else 0.5) / math.sqrt(cfg.model_dim)
            assert param.std().item() == pytest.approx(std, rel=0.02)
            assert param.abs().max().item() <= math.sqrt(3) * std * (1 + 1e-6)
        elif name.endswith("attn.lambdas"):
            assert param.tolist() == [0.5, 1.0]
        elif name.endswith(("x_lambda", "x0_lambda")):
            assert param.item() == pytest.approx(1.1 if name.endswith("x_lambda") else 0)
        else:
            assert param.tolist() == numbers.pop(name)
    assert not numbers


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
