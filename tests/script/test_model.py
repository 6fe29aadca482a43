"""The model against its published formulas, written out again token by token in float64."""

import copy
import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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


def test_dense_mask_grows_with_tokens_times_window_up_to_the_sequence():
    docs = documents(random_tokens(2, 8 * BLOCK, 0))
    for window, most in ((1, 2), (2, 3), (4, 5), (100, 8)):
        mask = train_gpt.dense_mask(docs, blocks(window))
        assert mask.numel() == 16 * BLOCK * most * BLOCK


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


ONE = dataclasses.replace(TINY, attention_pattern="L", value_embed_pattern="0")


def test_another_document_sees_nothing_but_for_smear_and_shifted_keys():
    """And these by one token: the next document's first takes up the last one's embedding and half
    of its key."""
    tokens = random_tokens(2, 256, 2, document_tokens=math.inf)
    tokens[0, 0] = tokens[0, 90] = tokens[0, 200] = EOT
    for position, expected in (
        (120, range(120, 200)),
        (197, [197, 198, 199]),
        (198, [198, 199, *range(201, 256)]),  # 200 sees itself alone
        (199, range(199, 256)),
    ):
        changed = changed_positions(tokens, position, window=2, cfg=ONE)
        assert changed == [[0, t] for t in expected]


@pytest.mark.parametrize("length", [1, 127, 128, 200])
def test_a_text_of_any_length_is_seen_as_the_beginning_of_a_longer_one(length):
    tokens, model = random_tokens(2, 256, 6), make_model()
    whole, part = (all_logits(model, x, 2) for x in (tokens, tokens[:, :length]))
    torch.testing.assert_close(part, whole[:, :length], **FP32)


def test_each_layer_has_the_window_of_its_letter():
    """To the token. What is reached has taken up the embedding of the token before it and, in the
    layer with a long window, half of its key."""
    tokens = random_tokens(1, 6 * BLOCK, 5, document_tokens=math.inf)
    for letter, last in (("S", 11 + 2 * BLOCK), ("L", 12 + 4 * BLOCK)):
        cfg = dataclasses.replace(
            TINY, attention_pattern=letter, value_embed_pattern=".", val_seq_len=6 * BLOCK
        )
        changed = changed_positions(tokens, 10, window=4, cfg=cfg)
        assert max(t for _, t in changed) == last


# Rotary embedding


def test_rotary_turns_each_pair_by_position_times_frequency():
    """The first half of them. The others keep their entries, times the root of the scale."""
    x = torch.randn(1, 700, 1, 32, generator=torch.Generator().manual_seed(0))
    cfg = dataclasses.replace(
        TINY, head_dim=32, seq_lens=(1024,), attention_scale=0.0625, rope_base=1024
    )
    y = train_gpt.rotate(x, *GPT(cfg).rotary[:, :700])
    for pair, position in itertools.product(range(16), (0, 1, 5, 333, 699)):
        frequency = 1024 ** -(pair / 7) if pair < 8 else 0  # from 1 down to 1 / rope_base
        before, after = (
            complex(z[0, position, 0, pair], z[0, position, 0, pair + 16]) for z in (x, y)
        )
        angle = position * frequency
        expected = 0.25 * before * complex(math.cos(angle), -math.sin(angle))
        # The angle, up to 699, is rounded to fp32 twice.
        assert abs(after - expected) < 1e-4


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
            if cfg.attention_pattern[layer] == "L":
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
    )
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
        logs = expected.log_softmax(-1)
        for ahead, loss in enumerate(model(tokens, targets, 3)):  # row by row, no further
            logs_ahead = logs[:, : 256 - ahead].gather(-1, targets[:, ahead:, None])
            assert loss.item() == pytest.approx(-logs_ahead.sum().item(), rel=1e-5)


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


@pytest.mark.parametrize("vocab_size", [257, 384, 1000])
def test_the_first_loss_is_the_log_of_the_padded_vocabulary(vocab_size):
    model = GPT(dataclasses.replace(TINY, vocab_size=vocab_size))
    model.init_weights(torch.Generator().manual_seed(0))
    model.lm_head.weight.data.zero_()
    tokens = random_tokens(1, 256, 0)
    loss = model(tokens, tokens.long()).item() / 256
    padded = 128 * math.ceil(vocab_size / 128)
    assert model.lm_head.weight.shape == (padded, 32)
    assert loss == pytest.approx(math.log(padded), rel=1e-6)


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


def test_windows_and_tables_are_those_of_the_stage_and_at_first_of_the_last():
    """Whatever was set before: a stage's tables do not depend on it."""
    cfg = dataclasses.replace(
        TINY, long_windows=RECORD.long_windows, short_windows=RECORD.short_windows
    )
    model, tables = GPT(cfg), []
    assert model.windows.tolist() == [20, 6]
    for stage, windows in enumerate(([3, 1], [7, 3], [11, 5], [13, 6], [20, 6])):
        model.set_stage(stage)
        assert model.windows.tolist() == windows
        tables.append(model.rotary.clone())
        frequency, scale = train_gpt.yarn(stage, cfg)
        angle = 100 * frequency.double()
        expected = scale**0.5 * torch.stack([angle.cos(), angle.sin()])
        turning, still = model.rotary[:, 100, 0].double().split(len(angle), dim=-1)
        torch.testing.assert_close(turning, expected, rtol=0, atol=1e-5)
        assert still[0].tolist() == pytest.approx([scale**0.5] * len(angle))
        assert not still[1].any()
    model.set_stage(0)
    assert torch.equal(model.rotary, tables[0]) and not torch.equal(tables[0], tables[1])


def test_the_record_has_as_many_parameters_as_published():
    with torch.device("meta"):
        model = GPT(RECORD)
    assert sum(p.numel() for p in model.parameters()) == 268_665_609


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
