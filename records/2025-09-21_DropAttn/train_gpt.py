#!/usr/bin/env python3
"""Train a GPT of GPT-2 small's class to 3.28 validation loss on FineWeb, as fast as 8 H100s allow.

    torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=8 train_gpt.py
    python train_gpt.py
    python train_gpt.py --preset pocket

Record: 2025-09-21_DropAttn
Parent: 2025-09-18_Smear. Change: there is no first layer; 40 last steps keep the
lowest rates; both long windows are longer in the last validation.

The record comes first: hyperparameters, schedules, model, optimizers, training loop. The harness
below the banner reads data, validates, saves and logs. It is the same in every record.

Technique                                         where it is
ReLU²                                             MLP
QK-norm, merged QKV, value embeddings             CausalSelfAttention
sparse attention gate                             CausalSelfAttention
half-truncated rotary embedding                   GPT.set_stage, rotate
YaRN, growing windows                             yarn, GPT.set_stage
sliding windows over documents, FlexAttention     first_keys, flex_mask, attend
FP8 head                                          FP8Product, Head
softcapped logits                                 GPT.logits
smeared embeddings, U-Net skips                   GPT.smear, GPT.hidden
Muon                                              orthogonalize, muon_update
sharded optimizers                                ShardedOptimizer, step_optimizers
documents packed into sequences                   cut_rows
rates, momentum, windows by stage                 Stage, schedule
"""

from pathlib import Path

SCRIPT = Path(__file__).resolve()
SOURCE = SCRIPT.read_bytes()  # of what runs: the file may be edited while torch is imported

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint


# ---- Hyperparameters --------------------------------------------------------
@dataclass(frozen=True)
class Layer:
    """A row of the table of layers."""

    window: str | None  # "L": long, "S": short, None: no attention
    table: int | None = None  # which value embeddings its attention adds


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A row of the table of stages: what holds from the first step of a stage to its last."""

    share: float = 0.0  # relative length; shares are divided by their sum
    seq_len: int = 0  # tokens of a training sequence
    long_window: int  # tokens seen back
    short_window: int  # the same of layers with short windows


@dataclass(frozen=True)
class Hyperparameters:
    """The settings of a run, with the values of the preset record.

    Numbers and texts are also command-line flags. Tables are edited here.
    """

    preset: str = "record"  # name of the defaults that the other flags change
    # Model
    vocab_size: int = 50257  # token ids are smaller
    vocab_multiple: int = 128  # embeddings and head are padded to a multiple of it
    eot_token: int = 50256  # end-of-text, the token that opens each document
    model_dim: int = 768  # width of the residual stream
    head_dim: int = 128  # width of an attention head
    layers: tuple = (
        Layer("S", table=1),
        Layer("S", table=2),
        Layer("S"),
        Layer("L"),
        Layer("S"),
        Layer("S"),
        Layer(None),
        Layer("S"),
        Layer("S", table=0),
        Layer("S", table=1),
        Layer("L", table=2),
    )
    attention_scale: float = 0.1  # factor of the attention scores in the first stage
    rope_base: int = 1024  # inverse of the lowest rotary frequency
    fp8_head: bool = True  # FP8 matmuls in the head while training, where the GPU has them
    seed: int = 0  # seed of the initial weights
    # Optimizers
    embed_lr: float = 0.6  # Adam's rate of token and value embeddings
    head_lr: float = 0.008  # Adam's rate of output head
    muon_lr: float = 0.05  # Muon's rate
    muon_momentum: float = 0.95  # Muon's momentum
    # Schedules
    num_iterations: int = 1680  # optimizer steps
    extension_steps: int = 40  # last steps, at the lowest rates
    stages: tuple = (
        Stage(share=1.0, seq_len=49152, long_window=384, short_window=128),
        Stage(share=1.0, seq_len=49152, long_window=896, short_window=384),
        Stage(share=1.0, seq_len=49152, long_window=1408, short_window=640),
    )
    extension: Stage = Stage(seq_len=49152, long_window=1408, short_window=640)
    last_validation: Stage = Stage(long_window=2560, short_window=768)
    yarn_window: int = 1664  # long window that YaRN assumes in the last validation
    cooldown_frac: float = 0.5  # last share of the schedule, in which rates fall
    momentum_warmup: int = 300  # first steps, in which Muon's momentum rises
    # Data and validation
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob of the training shards
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # glob of the validation shards
    repeat_data: bool = False  # allow the preset record to read its data again
    sequences_per_step: int = 8  # sequences of a step, all ranks together
    sequences_per_forward: int = 1  # sequences that a rank runs at once, at most
    max_document_tokens: int = 2048  # documents are cut to it and packed; 0: neither
    shorten: int = 1  # sequences are so many times shorter, and as many more in a step
    val_seq_len: int = 262_144  # tokens of a validation sequence
    val_tokens: int = 10_485_760  # validation tokens, each counted once
    val_every: int = 125  # steps between validations; 0: only the last
    target_loss: float = 3.28  # validation loss to reach, nats per token
    # Run
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is one
    run_id: str = ""  # name of the folder under logs/; empty: made from the time
    warmup_steps: int = 10  # untimed steps per stage that warm up the kernels
    head_chunks: int = 0  # chunks in which the head is computed; 0: by the card's memory
    save_every: int = 0  # steps between checkpoints; 0: none
    resume: str = ""  # checkpoint to resume; auto: the newest of --run_id
    init: str = ""  # checkpoint whose weights a new run starts from

    def all_stages(self) -> tuple:
        """All rows of stages in the order of the run."""
        return *self.stages, self.extension, self.last_validation


# The preset pocket: what differs, for a small model of bytes that a CPU trains
POCKET = dict(
    preset="pocket",
    vocab_size=257,
    vocab_multiple=16,
    eot_token=256,
    model_dim=64,
    head_dim=16,
    layers=(
        Layer("L", table=0),
        Layer("S"),
        Layer(None),
        Layer("L", table=0),
    ),
    attention_scale=0.5,
    rope_base=32,
    embed_lr=0.5,
    head_lr=0.03,
    muon_lr=0.08,
    muon_momentum=0.85,  # also the lowest, so momentum stays as it is
    num_iterations=120,
    extension_steps=5,
    stages=(
        replace(Hyperparameters.stages[0], seq_len=256, long_window=64, short_window=32),
        replace(Hyperparameters.stages[1], seq_len=256, long_window=128, short_window=64),
        replace(Hyperparameters.stages[2], seq_len=256, long_window=192, short_window=96),
    ),
    extension=Stage(seq_len=256, long_window=192, short_window=96),
    last_validation=Stage(long_window=256, short_window=96),
    yarn_window=224,
    train_files="data/pocket/pocket_train_*.bin",
    val_files="data/pocket/pocket_val_*.bin",
    sequences_per_step=8,
    sequences_per_forward=8,
    max_document_tokens=256,
    val_seq_len=4096,
    val_tokens=65_536,
    val_every=0,
    target_loss=1.78,
    warmup_steps=1,
)


def check(cfg, require):
    """The rules of this record. `require` raises UserError, "--name must rule", where one fails."""
    require(cfg.head_dim > 0 and cfg.head_dim % 4 == 0, "head_dim", "be a multiple of 4")
    require(cfg.model_dim % cfg.head_dim == 0, "model_dim", "be a multiple of head_dim")
    require(cfg.model_dim >= GATE_CHANNELS, "model_dim", f"be at least {GATE_CHANNELS}")
    require(cfg.rope_base > 0, "rope_base", "be above 0")
    require(cfg.yarn_window > 0, "yarn_window", "be above 0")
    require(0 < cfg.cooldown_frac <= 1, "cooldown_frac", "be above 0, at most 1")
    require(cfg.momentum_warmup > 0, "momentum_warmup", "be above 0")
    # Layers
    windows = [layer.window for layer in cfg.layers]
    require({*windows} <= {"L", "S", None}, "layers", 'have windows "L", "S" or None')
    # Stages. Both presets have as many.
    num_stages = len(Hyperparameters.stages)
    require(len(cfg.stages) == num_stages, "stages", f"have {num_stages} rows")
    require(all(row.share > 0 for row in cfg.stages), "stages", "have shares above 0")
    require(cfg.extension.share == 0, "extension", "have no share")
    last = cfg.last_validation
    at_least = dict(long_window=max(1, last.long_window), short_window=max(1, last.short_window))
    require(last == Stage(**at_least), "last_validation", "have two windows above 0, no more")
    for row in cfg.all_stages()[:-1]:
        numbers = row.seq_len, row.long_window, row.short_window
        require(min(numbers) > 0, "stages", "have lengths and windows above 0")
        require(row.seq_len % BLOCK == 0, "stages", f"have lengths that are multiples of {BLOCK}")
        require(row.seq_len % (cfg.shorten * BLOCK) == 0, "shorten", f"leave multiples of {BLOCK}")


def shorten(cfg) -> Hyperparameters:
    """The settings that --shorten makes, for cards with less memory. Windows stay as they are."""

    def shorter(row):
        return replace(row, seq_len=row.seq_len // cfg.shorten)

    return replace(
        cfg,
        sequences_per_step=cfg.sequences_per_step * cfg.shorten,
        stages=tuple(shorter(row) for row in cfg.stages),
        extension=shorter(cfg.extension),
    )


# ---- Schedules --------------------------------------------------------------
BLOCK = 128  # tokens in a block of the attention mask
LR_FLOOR = 0.1  # factor of all rates in the extension
LOWEST_MOMENTUM = 0.85  # of Muon, in the first step


@dataclass(frozen=True, kw_only=True)
class Schedule(Stage):
    """What holds in a step: the row of its stage, and what moves within the stage."""

    stage: int  # the row's index in `all_stages`
    lr_factor: float  # of all rates
    momentum: float  # Muon's


def schedule(step: int, cfg) -> Schedule:
    """The schedule of a step from 0 to num_iterations. The last one only validates."""
    index = stage_of(step, cfg)
    row = cfg.all_stages()[index]

    # Learning rate: linearly down to nearly the floor where the extension begins
    progress = min(0.9999, step / max(1, cfg.num_iterations - cfg.extension_steps))
    kept = min(1.0, (1 - progress) / cfg.cooldown_frac)
    lr_factor = kept + (1 - kept) * LR_FLOOR

    # Muon's momentum: up in the first steps
    share = min(1.0, step / cfg.momentum_warmup)
    momentum = share * cfg.muon_momentum + (1 - share) * LOWEST_MOMENTUM

    moving = dict(
        stage=index,
        lr_factor=lr_factor,
        momentum=momentum,
    )
    return Schedule(**vars(row) | moving)


def stage_of(step: int, cfg) -> int:
    """The index of a step's stage."""
    if step == cfg.num_iterations:
        return len(cfg.all_stages()) - 1  # the last validation
    scheduled = max(1, cfg.num_iterations - cfg.extension_steps + 1)
    shares = [row.share for row in cfg.stages]
    behind = itertools.accumulate(shares, initial=0.0)  # shares before each stage
    starts = [scheduled * share / sum(shares) for share in behind]
    return sum(start <= step for start in starts) - 1


def yarn(stage: int, cfg, device=None):
    """Rotary frequencies (K / 4,) and the attention scale of a stage: @classiclarryd, #31.

    When the window grows, frequencies that made few turns in the old one slow down in proportion,
    as in YaRN, https://arxiv.org/abs/2309.00071, and the scale rises.
    """
    exponent = torch.linspace(0, 1, steps=cfg.head_dim // 4, device=device)
    frequency = (1 / cfg.rope_base) ** exponent
    scale = cfg.attention_scale
    windows = [row.long_window for row in cfg.all_stages()[:-1]] + [cfg.yarn_window]
    for old, new in itertools.pairwise(windows[: stage + 1]):
        turns = old * frequency / (2 * math.pi)
        kept = ((turns - 1) / (32 - 1)).clamp(0, 1)  # all of 32 turns and more, none of one
        frequency = frequency * (old / new + kept * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    return frequency, scale


# ---- Parameters -------------------------------------------------------------
# A parameter says where it is made how it begins, how it is updated and of which type it is.
def zeros(param, generator):
    param.zero_()


def constant(*values):
    return lambda param, generator: param.copy_(torch.tensor(values).view_as(param))


def normal(std):
    return lambda param, generator: param.normal_(std=std, generator=generator)


def uniform(std):
    bound = 3**0.5 * std
    return lambda param, generator: param.uniform_(-bound, bound, generator=generator)


def weight(*shape, group, init=zeros, bf16=False) -> nn.Parameter:
    """A parameter, not yet initialised.

    group: its row in `parameter_groups`. init: initialises it. bf16: on a GPU it is bf16,
    as published, else fp32.
    """
    param = nn.Parameter(torch.empty(shape))
    param.group = group
    param.init = init
    param.bf16 = bf16
    return param


class Table(nn.Module):
    """An embedding table, bf16 on a GPU."""

    def __init__(self, rows, width, group, init=zeros):
        super().__init__()
        self.weight = weight(rows, width, group=group, init=init, bf16=True)

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class CastedLinear(nn.Module):
    """A linear map whose weight, bf16 on a GPU, is cast to its input's type."""

    def __init__(self, in_features, out_features, group, init=zeros):
        super().__init__()
        self.weight = weight(out_features, in_features, group=group, init=init, bf16=True)

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


# ---- Model ------------------------------------------------------------------
# In names: B sequences, T tokens, S = B·T, D model_dim, H heads, K head_dim, V padded vocabulary.
# The residual stream x has the shape (B, T, D).
GATE_CHANNELS = 12  # of its input that a gate sees
SOFTCAP = 30  # logits lie between 0 and it
SOFTCAP_WIDTH = 7.5  # raw logits are divided by it


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension. The epsilon is that of fp32 in every type."""
    return F.rms_norm(x, x.shape[-1:], eps=2**-23)


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x · scale in an FP8 type. Values out of range saturate."""
    limit = torch.finfo(dtype).max  # casts saturate only since torch 2.12
    scaled = x.float().mul(scale)
    return scaled.clamp(-limit, limit).to(dtype)


def scaled_mm(a_MK: Tensor, b_KN: Tensor, scale: float, **options) -> Tensor:
    """a @ b · scale as bf16. A GPU needs a row-major, b column-major, K and N multiples of 16."""
    scale_a = torch.full((), scale, device=a_MK.device)
    scale_b = torch.ones_like(scale_a)
    return torch._scaled_mm(a_MK, b_KN, scale_a, scale_b, out_dtype=torch.bfloat16, **options)


# Scales before the casts to FP8, which bring typical values into its range. They are constants
# of the module because torch.compile does not read attributes of an autograd.Function.
FP8_X_SCALE = 448 / 768**0.5
FP8_W_SCALE = 2.0**9
FP8_GRAD_SCALE = 448.0


class FP8Product(torch.autograd.Function):
    """x (S, D) @ w (V, D).T in FP8, as bf16: @YouJiacheng.

    x and w are cast to e4m3, which has more digits; the gradient to e5m2, which has more range.
    torch.compile fuses the casts with the operations before them.
    """

    @staticmethod
    def forward(ctx, x, w):
        x_f8 = to_fp8(x, FP8_X_SCALE, torch.float8_e4m3fn)  # (S, D)
        w_f8 = to_fp8(w, FP8_W_SCALE, torch.float8_e4m3fn)  # (V, D)
        ctx.save_for_backward(x_f8, w_f8)
        unscale = 1 / (FP8_X_SCALE * FP8_W_SCALE)
        return scaled_mm(x_f8, w_f8.T, unscale, use_fast_accum=True)

    @staticmethod
    def backward(ctx, grad):
        x_f8, w_f8 = ctx.saved_tensors
        grad_f8 = to_fp8(grad, FP8_GRAD_SCALE, torch.float8_e5m2)  # (S, V)
        # The right factor must be column-major: copy the transpose, then transpose back.
        w_columns = w_f8.T.contiguous().T  # (V, D)
        unscale_x = 1 / (FP8_GRAD_SCALE * FP8_W_SCALE)
        grad_x = scaled_mm(grad_f8, w_columns, unscale_x, use_fast_accum=False)
        # Row-major, as the buffer that it is added to
        grad_rows = grad_f8.T.contiguous()  # (V, S)
        x_columns = x_f8.T.contiguous().T  # (S, D)
        unscale_w = 1 / (FP8_GRAD_SCALE * FP8_X_SCALE)
        grad_w = scaled_mm(grad_rows, x_columns, unscale_w, use_fast_accum=False)
        return grad_x, grad_w


class Head(CastedLinear):
    """The output head. Its matmuls may be FP8 while training: @YouJiacheng, @leloykun."""

    use_fp8 = False

    def forward(self, x):
        if self.use_fp8 and self.training:
            return FP8Product.apply(x, self.weight)
        return super().forward(x)


# Attention. The B rows are one sequence of B·T tokens: documents keep them apart.
def first_keys(docs_BT: Tensor, reach) -> Tensor:
    """The first key that each query attends to, (S,): query q sees the keys from it to q.

    A query sees its own document (@KoszarskyB), and of it at most `reach` tokens back.
    """
    docs_S = docs_BT.flatten()  # numbers of documents, ascending
    start_S = torch.searchsorted(docs_S, docs_S, out_int32=True)  # of each token's document
    query_S = torch.arange(len(docs_S), dtype=torch.int32, device=docs_S.device)
    return torch.maximum(start_S, query_S - reach)


def flex_mask(docs_BT: Tensor, reach) -> BlockMask:
    """FlexAttention's mask, from each token's document number and the tokens that it sees back.

    It is built by tensor operations, so a growing window needs no recompilation.
    """
    first_S = first_keys(docs_BT, reach)
    first = first_S.view(-1, BLOCK)  # (blocks, 128)
    block = torch.arange(len(first), dtype=torch.int32, device=first.device)
    # Rows are blocks of queries, columns blocks of keys. With a reach of 256 and one document:
    # p . . .    p: partial, as some of its pairs are masked
    # f p . .    f: full, all of its pairs are seen
    # p f p .
    # . p f p
    first_key = BLOCK * block  # of each block
    last_key = first_key + BLOCK - 1
    before = block < block[:, None]
    # In a block the first query sees the earliest keys, the last query the fewest.
    seen = (block == block[:, None]) | (before & (first[:, :1] <= last_key))
    full = before & (first[:, -1:] <= first_key)  # needs no mask inside
    partial = seen & ~full

    def document_causal(batch, head, q, k):
        return (first_S[q] <= k) & (k <= q)

    kv_num, kv_order = order_blocks(partial)
    full_kv_num, full_kv_order = order_blocks(full)
    # The backward pass goes over the queries of each block of keys.
    q_num, q_order = order_blocks(partial.T.contiguous())
    full_q_num, full_q_order = order_blocks(full.T.contiguous())
    return BlockMask(
        seq_lengths=(len(first_S), len(first_S)),
        kv_num_blocks=kv_num,
        kv_indices=kv_order,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv_order,
        q_num_blocks=q_num,
        q_indices=q_order,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q_order,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=document_causal,
    )


def order_blocks(seen_QK: Tensor):
    """A row's number of seen blocks, (1, 1, Q), and all its blocks, seen ones first, (1, 1, Q, K).

    Cumulative sums give each block its place. A sort would take minutes to compile.
    """
    seen_so_far = seen_QK.cumsum(-1, dtype=torch.int32)
    unseen_so_far = (~seen_QK).cumsum(-1, dtype=torch.int32)
    count_Q1 = seen_so_far[:, -1:]
    place = torch.where(seen_QK, seen_so_far, count_Q1 + unseen_so_far) - 1
    block = torch.arange(seen_QK.size(1), dtype=torch.int32, device=seen_QK.device)
    order = place.scatter(-1, place, block.expand_as(place))
    return count_Q1[None, None, :, 0], order[None, None]


def dense_mask(docs_BT: Tensor, reach) -> Tensor:
    """An additive mask for each block of 32 queries, (blocks, 1, 32, keys), of 0 and -inf.

    It is used where FlexAttention is not compiled. The keys are those of the block and of the
    blocks before it within reach, so the cost grows with the window, not with the sequence.
    """
    first_S = first_keys(docs_BT, reach)
    size = BLOCK // 4  # of a block: the smaller it is, the fewer of its keys are masked
    blocks_before = min(-(-int(reach) // size), docs_BT.size(1) // size - 1)
    query = torch.arange(len(first_S), device=first_S.device).view(-1, size, 1)
    # The keys of a block of queries end with it.
    offset = torch.arange(-blocks_before * size, size, device=first_S.device)
    key = query[:, :1] + offset  # (blocks, 1, keys)
    seen = (first_S.view_as(query) <= key) & (key <= query)
    return torch.where(seen, 0.0, -math.inf)[:, None]


def gather_window(blocks: Tensor, window: int) -> Tensor:
    """Put each block behind those before it: (blocks, 32, …) to (blocks, window · 32, …)."""
    if window == 1:
        return blocks
    padding = blocks.new_zeros(window - 1, *blocks.shape[1:])
    padded = torch.cat([padding, blocks])
    shifted = [padded[i : i + len(blocks)] for i in range(window)]
    return torch.cat(shifted, dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask, kernel_options) -> Tensor:
    """Attention among all B·T tokens under either mask. q, k, v and the result: (B, T, H, K).

    The scale is 1, as q and k each carry the root of the attention scale (`GPT.set_stage`).
    """
    shape = q.shape
    if isinstance(mask, BlockMask):
        q, k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))  # (1, H, S, K)
        y = flex_attention(q, k, v, block_mask=mask, scale=1.0, kernel_options=kernel_options)
    else:
        size, keys = mask.shape[-2:]
        window = keys // size  # blocks
        q = q.reshape(-1, size, *shape[2:])  # (blocks, 32, H, K)
        k = gather_window(k.reshape(q.shape), window)  # (blocks, window · 32, H, K)
        v = gather_window(v.reshape(q.shape), window)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (blocks, H, tokens, K)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.type_as(q), scale=1.0)
    return y.transpose(1, 2).reshape(shape)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, https://arxiv.org/abs/2104.09864, by angles (T, 1, K / 2).

    Entry i and entry i + K / 2 are a pair.
    """
    first, second = x_BTHK.float().chunk(2, dim=-1)
    turned = [first * cos + second * sin, second * cos - first * sin]
    # Cast first, so that what is joined has half the bytes.
    halves = [half.type_as(x_BTHK) for half in turned]
    return torch.cat(halves, dim=-1)


class Batch(NamedTuple):
    """The sequences of a forward pass."""

    inputs: Tensor  # (B, T), int32
    targets: Tensor  # (B, T), int64: the token after each input, or -1 for none


class View(NamedTuple):
    """How the layers of one window see the tokens."""

    rotary: Tensor  # cosines and sines
    mask: object  # a BlockMask, or a dense mask


class CausalSelfAttention(nn.Module):
    """Attention whose heads are gated by the first channels of its input."""

    def __init__(self, cfg):
        super().__init__()
        dim = cfg.model_dim
        self.num_heads = dim // cfg.head_dim
        self.kernel_options = None  # of FlexAttention
        # Merged: @fernbear.bsky.social, @YouJiacheng. Uniform at first: @YouJiacheng
        self.qkv_w = weight(3, dim, dim, group="attention", init=uniform(0.5 * dim**-0.5))
        # Zero-initialised projections: @Grad62304977
        self.c_proj = weight(dim, dim, group="attention")
        # Factors of values and value embeddings
        self.lambdas = weight(2, group="lambdas", init=constant(0.5, 0.5))
        self.attn_gate = CastedLinear(GATE_CHANNELS, self.num_heads, group="gates")

    def forward(self, x, value_embed, view):
        # Queries, keys and values
        qkv_w = self.qkv_w.flatten(0, 1)  # (3 D, D)
        qkv = F.linear(x, qkv_w.type_as(x))
        qkv = qkv.unflatten(-1, (3 * self.num_heads, -1))  # (B, T, 3 H, K)
        qk, v = qkv.split([2 * self.num_heads, self.num_heads], dim=2)
        q, k = rotate(norm(qk), *view.rotary).chunk(2, dim=2)  # QK-norm: @Grad62304977
        v = self.lambdas[0] * v
        if value_embed is not None:  # @KoszarskyB, @Grad62304977, after Zhou et al. 2024
            v = v + self.lambdas[1] * value_embed.view_as(v)
        y = attend(q, k, v, view.mask, self.kernel_options)
        # Sparse gate: a head can turn itself off: @classiclarryd, #28, about 50 steps
        gate_BTH = torch.sigmoid(self.attn_gate(x[..., :GATE_CHANNELS]))
        y = (y * gate_BTH[..., None]).flatten(2)  # (B, T, D)
        return F.linear(y, self.c_proj.type_as(x))


class MLP(nn.Module):
    """Two matrices of the same shape, so that Muon batches them: @byronxu99."""

    def __init__(self, cfg):
        super().__init__()
        shape = (cfg.model_dim, 4 * cfg.model_dim)
        self.c_fc = weight(*shape, group="mlp", init=uniform(0.5 * cfg.model_dim**-0.5))
        self.c_proj = weight(*shape, group="mlp")

    def forward(self, x):
        x = x @ self.c_fc.type_as(x)  # (B, T, 4 D)
        x = F.relu(x).square()  # ReLU²: https://arxiv.org/abs/2109.08668
        return F.linear(x, self.c_proj.type_as(x))


class Block(nn.Module):
    """A layer: attention, if it has a window, and an MLP, both pre-normed."""

    def __init__(self, cfg, layer: Layer):
        super().__init__()
        self.layer = layer
        self.attn = None
        if layer.window:
            self.attn = CausalSelfAttention(cfg)
        self.mlp = MLP(cfg)
        # The embedding's share begins at 0.
        self.lambdas = weight(2, group="lambdas", init=constant(1.0, 0.0))

    def factors(self) -> dict:
        """The factors of its terms, by their names: @KoszarskyB, @Grad62304977."""
        return dict(x=self.lambdas[0], x0=self.lambdas[1])

    def forward(self, terms, value_embed, view):
        """terms: what its input is the weighted sum of, by name; each (B, T, D)."""
        factors = self.factors()
        x = sum(factors[name] * term for name, term in terms.items())
        if self.attn is not None:
            x = x + self.attn(norm(x), value_embed, view)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The model. Its weights have no values until `init_weights` or a checkpoint gives them."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        vocab = round_up(cfg.vocab_size, cfg.vocab_multiple)
        self.embed = Table(vocab, cfg.model_dim, group="embed", init=normal(1.0))
        self.value_embeds = nn.ModuleDict()
        for table in sorted({layer.table for layer in cfg.layers} - {None}):
            values = Table(vocab, cfg.model_dim, group="value embeds", init=normal(1.0))
            self.value_embeds[str(table)] = values
        self.blocks = nn.ModuleList([Block(cfg, layer) for layer in cfg.layers])
        self.smear_gate = CastedLinear(GATE_CHANNELS, 1, group="smear gate")
        self.smear_lambda = weight(group="lambdas")  # nothing is smeared at first
        # U-Net: for each layer of the second half, the weight of the earlier output that it adds.
        # Its sigmoid is the factor of the skip: 0.18 at first
        pairs = len(cfg.layers) // 2
        self.skip_weights = weight(pairs, group="lambdas", init=constant(*[-1.5] * pairs))
        self.lm_head = Head(cfg.model_dim, vocab, group="head")
        # The head is computed in chunks of this many tokens.
        longest = max(row.seq_len for row in cfg.all_stages())
        tokens = cfg.sequences_per_forward * longest / max(1, cfg.head_chunks)
        self.tokens_per_chunk = round_up(math.ceil(tokens), 128)
        # Buffers, so that a new stage needs no recompilation: the reach of long and short windows
        # in tokens; cosines and sines of the rotary embedding.
        self.register_buffer("reach", torch.zeros(2, dtype=torch.int32), persistent=False)
        rotary = torch.zeros(2, max(longest, cfg.val_seq_len), 1, cfg.head_dim // 2)
        self.register_buffer("rotary", rotary, persistent=False)
        self.set_stage(schedule(cfg.num_iterations, cfg))  # as a loaded model is used

    @torch.no_grad()
    def init_weights(self, generator):
        """Initialise every parameter."""
        for param in self.parameters():
            param.init(param, generator)

    @torch.no_grad()
    def set_stage(self, now):
        """Set the windows and the rotary embedding for a stage."""
        self.reach[0] = now.long_window
        self.reach[1] = now.short_window
        frequency, attention_scale = yarn(now.stage, self.cfg, self.rotary.device)
        # Half-truncated: half of the pairs do not rotate at all: @YouJiacheng
        frequency = F.pad(frequency, (0, self.cfg.head_dim // 4))  # (K / 2,)
        position = torch.arange(self.rotary.size(1), device=frequency.device)
        theta = torch.outer(position, frequency)[:, None]  # (T, 1, K / 2)
        # Queries and keys each carry the root of the attention scale.
        scale = attention_scale**0.5
        self.rotary[0] = scale * theta.cos()
        self.rotary[1] = scale * theta.sin()

    def views(self, inputs_BT) -> dict:
        """The `View` of the layers of each window."""
        # Documents are numbered through all rows, so that no row attends to another.
        starts_BT = inputs_BT == self.cfg.eot_token
        starts_BT[:, 0] = True
        docs_S = starts_BT.flatten().cumsum(0, dtype=torch.int32)
        docs_BT = docs_S.view_as(starts_BT)
        # FlexAttention is fast only where it is compiled.
        on_gpu = docs_BT.is_cuda and torch.compiler.is_compiling()
        make_mask = flex_mask if on_gpu else dense_mask
        T = inputs_BT.size(1)
        long, short = self.reach
        used = {block.layer.window for block in self.blocks}
        views = {}
        for window, reach in dict(L=long, S=short).items():
            if window in used:
                rotary = self.rotary[:, :T]
                views[window] = View(rotary, make_mask(docs_BT, reach))
        return views

    def hidden(self, inputs_BT):
        """The normed output of the last layer, (B, T, D)."""
        length = inputs_BT.size(1)
        padding = -length % BLOCK
        inputs_BT = F.pad(inputs_BT, (0, padding), value=self.cfg.eot_token)
        views = self.views(inputs_BT)
        values = {}
        for table, embedding in self.value_embeds.items():
            values[int(table)] = embedding(inputs_BT)

        x = x0 = norm(self.smear(self.embed(inputs_BT)))  # norm of embeddings: @Grad62304977
        stream = {}  # what is read again
        pairs = len(self.skip_weights)
        for index, block in enumerate(self.blocks):
            layer = block.layer
            if pairs <= index < 2 * pairs:  # U-Net: @brendanh0gan; sigmoid: @bernard24, hiverge.ai
                skip = stream[2 * pairs - 1 - index]
                x = x + torch.sigmoid(self.skip_weights[index - pairs]) * skip
            x = block(dict(x=x, x0=x0), values.get(layer.table), views.get(layer.window))
            stream[index] = x
        return norm(x[:, :length])

    def smear(self, x_BTD):
        """Add a gated share of the previous token's embedding: @classiclarryd, #34, 15 steps."""
        current = x_BTD[:, 1:]
        previous = x_BTD[:, :-1]
        gate = torch.sigmoid(self.smear_gate(current[..., :GATE_CHANNELS]))  # (B, T - 1, 1)
        smeared = current + self.smear_lambda * gate * previous
        return torch.cat([x_BTD[:, :1], smeared], dim=1)

    def logits(self, x):
        """Softcapped logits (…, V) in fp32: Gemma 2, @Grad62304977, @KoszarskyB, @YouJiacheng."""
        raw = self.lm_head(x).float()
        return SOFTCAP * torch.sigmoid(raw / SOFTCAP_WIDTH)

    def head_loss(self, x_SD, targets_S, ids_V):
        """Cross-entropy, summed over positions.

        Logits are capped, so their exponentials are summed without subtracting a maximum.
        """
        logits_SV = self.logits(x_SD)
        if logits_SV.is_cuda:  # comparisons fuse into one pass over the logits, a gather does not
            is_target_SV = targets_S[:, None] == ids_V
            target_logit_S = (logits_SV * is_target_SV).sum(-1)
            losses_S = logits_SV.exp().sum(-1).log() - target_logit_S
            return (losses_S * (targets_S >= 0)).sum()
        return F.cross_entropy(logits_SV, targets_S, ignore_index=-1, reduction="sum")

    def forward(self, batch: Batch):
        """Summed cross-entropy of the next tokens."""
        x_SD = self.hidden(batch.inputs).flatten(0, 1)
        targets_S = batch.targets.flatten()
        ids_V = torch.arange(len(self.lm_head.weight), device=x_SD.device)
        size = self.tokens_per_chunk
        if len(x_SD) <= size:
            return self.head_loss(x_SD, targets_S, ids_V)
        # In chunks, recomputed in the backward pass: the logits are never in memory all at once.
        loss = 0
        for x, targets in zip(x_SD.split(size), targets_S.split(size)):
            loss = loss + checkpoint(self.head_loss, x, targets, ids_V, use_reentrant=False)
        return loss


# ---- Optimizers -------------------------------------------------------------
def orthogonalize(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly the closest semi-orthogonal matrix to each of (B, M, N), by Newton-Schulz iteration.

    Muon: Keller Jordan et al., https://kellerjordan.github.io/posts/muon/.
    Batched: @scottjmaddox, @YouJiacheng.
    """
    is_tall = grad_MN.size(-2) > grad_MN.size(-1)
    X = grad_MN.mT if is_tall else grad_MN  # the smaller side decides the cost
    X = X.to(dtype)
    frobenius = X.norm(dim=(-2, -1), keepdim=True)  # at least the spectral norm
    X = X / (frobenius + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315  # coefficients of X, A X and A² X
    for _ in range(5):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A²
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.mT if is_tall else X


def muon_update(weight, grad, mean, *, lr, momentum, dtype):
    """A step of Muon on a batch of matrices (B, M, N), in place. mean: of gradients."""
    mean.lerp_(grad, 1 - momentum)
    nesterov = grad.lerp(mean, momentum)
    update = orthogonalize(nesterov, dtype)
    factor = max(1, weight.size(-2) / weight.size(-1)) ** 0.5  # of matrices that are tall
    weight.sub_(update * (lr * factor))


def adam_update(weight, grad, mean, square, count, *, lr, betas):
    """A step of Adam, https://arxiv.org/abs/1412.6980, section 2, in fp32 and in place.

    count: steps taken, a tensor.
    """
    count += 1
    beta1, beta2 = betas
    grad = grad.float()
    new_mean = mean.float().lerp(grad, 1 - beta1)
    new_square = square.float().lerp(grad.square(), 1 - beta2)
    # Bias correction, as both means begin at zero
    step_size = lr * (1 - beta2**count).sqrt() / (1 - beta1**count)
    change = step_size * new_mean / (new_square.sqrt() + 1e-8)
    weight.copy_(weight.float() - change)
    mean.copy_(new_mean)
    square.copy_(new_square)


@dataclass(frozen=True)
class AdamGroup:
    """A row of the table: how Adam updates the parameters of a group."""

    lr: float  # about how much a weight changes in a step
    betas: tuple  # decay of the means of gradients and of their squares


@dataclass(frozen=True)
class MuonGroup:
    """A row of the table: how Muon updates the matrices of a group."""

    lr: float  # about the spectral norm of a step; that of tall matrices is larger


def parameter_groups(cfg) -> dict:
    """The table of parameter groups. The parameters name their group (`weight`)."""
    return {
        "attention": MuonGroup(cfg.muon_lr),
        "mlp": MuonGroup(cfg.muon_lr),
        "gates": MuonGroup(cfg.muon_lr),
        "smear gate": MuonGroup(cfg.muon_lr),
        "embed": AdamGroup(cfg.embed_lr, betas=(0.8, 0.95)),
        "head": AdamGroup(cfg.head_lr, betas=(0.8, 0.95)),
        "value embeds": AdamGroup(cfg.embed_lr, betas=(0.8, 0.95)),
        "lambdas": AdamGroup(0.04, betas=(0.8, 0.95)),
    }


class ShardedOptimizer:
    """A group's weights and gradients as two flat buffers, and this rank's part of the state.

    One reduce-scatter sums all gradients, one all-gather collects all weights. Rank r owns the
    r-th part: only it holds the state of that part and updates it, as in ZeRO,
    https://arxiv.org/abs/1910.02054. A part has whole units: numbers, or matrices. The buffers are
    padded to as many units a rank.
    """

    def __init__(self, name, group, params, ranks, unit=1):
        self.name = name
        self.group = group
        self.ranks = ranks
        self.handle = None  # the async handle of a collective under way
        self.numel = sum(param.numel() for param in params)
        self.units = self.numel // unit  # of all ranks, without padding
        self.my_units = -(-self.units // ranks.world_size)
        share = self.my_units * unit
        self.mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
        first = params[0].detach()
        if any(param.dtype != first.dtype for param in params):
            raise TypeError(f"group {name!r}: its parameters have several types")
        self.weights = first.new_zeros(share * ranks.world_size)
        self.grads = torch.zeros_like(self.weights)
        start = 0
        for param in params:  # they become views of the buffers
            end = start + param.numel()
            values = self.weights[start:end].view_as(param)
            param.data = values.copy_(param.detach())
            param.grad = self.grads[start:end].view_as(param)
            start = end
        self.my_grad = self.grads  # this rank's part of the sum of all ranks' gradients
        if ranks.world_size > 1:
            self.my_grad = torch.empty_like(self.grads[self.mine])
        self.lr = torch.zeros((), device=self.grads.device)  # a tensor: compiled once
        self.state = {}  # tensors by name; this rank's part, or a number

    def tensors(self):
        """What a step changes: the warm-up steps on them and restores them."""
        return [self.weights, *self.state.values()]

    def clear(self):
        """Drop the gradients."""
        self.grads.zero_()

    def reduce(self):
        """Begin to sum the gradients over the ranks; each receives its own part."""
        if self.ranks.world_size > 1:
            mine = self.my_grad.view(-1)
            self.handle = dist.reduce_scatter_tensor(mine, self.grads, async_op=True)

    def update(self, now, divisor):
        """Update this rank's part by gradients / divisor, then begin to gather all parts."""
        self.wait()
        self.my_grad.div_(divisor)
        self.lr.fill_(self.group.lr * now.lr_factor)
        share = self.weights[self.mine]
        self.update_share(share, now)  # Adam's or Muon's
        if self.ranks.world_size > 1:
            self.handle = dist.all_gather_into_tensor(self.weights, share, async_op=True)

    def wait(self):
        """End what was begun."""
        if self.handle:
            self.handle.wait()
            self.handle = None

    def full_state(self):
        """The state of all ranks, without padding. All ranks call it."""
        full = {}
        for key, share in self.state.items():
            rows = self.ranks.all_gather(share.flatten())
            full[key] = rows.flatten()[: self.length_of(share)].cpu()
        return full

    def load_full_state(self, full):
        """Take this rank's part of a `full_state` from any number of ranks.

        Raises RuntimeError where a length differs.
        """
        for key, share in self.state.items():
            size = self.length_of(share)
            rows = share.new_zeros(self.ranks.world_size, share.numel())
            rows.view(-1)[:size] = full[key].view(size)
            share.copy_(rows[self.ranks.rank if share.ndim else 0].view_as(share))

    def length_of(self, share):
        """Entries of a state over all ranks, without padding; one of a number."""
        entries_a_unit = share.numel() // self.my_units
        return entries_a_unit * self.units if share.ndim else 1


class Adam(ShardedOptimizer):
    """Adam on tensors of any shape."""

    def __init__(self, name, group, params, ranks):
        super().__init__(name, group, params, ranks)
        self.state["mean"] = torch.zeros_like(self.my_grad)
        self.state["square"] = torch.zeros_like(self.my_grad)
        self.state["count"] = torch.zeros_like(self.lr)
        self.step_fn = compile_on_gpu(adam_update, self.lr.device)

    def update_share(self, weight, now):
        self.step_fn(
            weight,
            self.my_grad,
            **self.state,
            lr=self.lr,
            betas=self.group.betas,
        )


class Muon(ShardedOptimizer):
    """Muon on a batch of matrices of one shape. A parameter may hold several of them."""

    def __init__(self, name, group, params, ranks):
        shape = params[0].shape[-2:]
        if any(param.shape[-2:] != shape for param in params):
            raise ValueError(f"group {name!r}: its matrices have several shapes")
        super().__init__(name, group, params, ranks, unit=shape.numel())
        self.my_grad = self.my_grad.view(-1, *shape)
        self.state["mean"] = torch.zeros_like(self.my_grad)
        # Numbers of the schedule by name, as tensors, so that the step is compiled once
        self.scheduled = {"momentum": torch.zeros_like(self.lr)}
        self.dtype = torch.bfloat16 if self.lr.is_cuda else torch.float32
        self.step_fn = compile_on_gpu(muon_update, self.lr.device)

    def update_share(self, weight, now):
        for name, number in self.scheduled.items():
            number.fill_(getattr(now, name))
        self.step_fn(
            weight.view_as(self.my_grad),
            self.my_grad,
            **self.state,
            **self.scheduled,
            lr=self.lr,
            dtype=self.dtype,
        )


def compile_on_gpu(step_fn: Callable, device: torch.device) -> Callable:
    return torch.compile(step_fn, dynamic=False) if device.type == "cuda" else step_fn


def build_optimizers(model: GPT, cfg, ranks) -> list:
    """An optimizer for each group that has parameters. Raises KeyError for an unknown group."""
    groups = parameter_groups(cfg)
    members = {name: [] for name in groups}
    for param in model.parameters():
        members[param.group].append(param)
    optimizers = []
    for name, group in groups.items():
        kind = Adam if isinstance(group, AdamGroup) else Muon
        if members[name]:
            optimizers.append(kind(name, group, members[name], ranks))
    return optimizers


def step_optimizers(optimizers, now, divisor):
    """One step of all optimizers. Each one computes while others communicate."""
    for optimizer in optimizers:
        optimizer.reduce()
    for optimizer in optimizers:
        optimizer.update(now, divisor)
    for optimizer in optimizers:
        optimizer.wait()
        optimizer.clear()


# ---- Training ---------------------------------------------------------------
class Place(NamedTuple):
    """Where a step's sequences begin. A checkpoint keeps it."""

    shard: int = 0  # counted through all epochs
    position: int = 0  # in the shard: documents, or tokens where these are not packed


class Rows(NamedTuple):
    """All sequences of a step, of all ranks, on the host. Each array has one entry a sequence."""

    tokens: np.ndarray  # (N, T + 1), uint16


def cut_rows(tokens, documents, place: Place, now, cfg):
    """Cut a step's `Rows` from a shard, and return them and the next place.

    Each sequence is filled with the first tokens of one document after another, and the rest of a
    cut document is skipped: @varunneal, #29, 25 steps. `documents` has their starts in `tokens`.
    Returns None if the shard has too few left.
    """
    if not cfg.max_document_tokens:
        return consecutive_rows(tokens, place, now, cfg)
    ends = np.append(documents[1:], len(tokens))
    position = place.position
    rows = []
    for _ in range(cfg.sequences_per_step):
        pieces = []
        room = now.seq_len + 1
        while room:
            if position == len(documents):
                return None
            start = documents[position]
            size = min(ends[position] - start, cfg.max_document_tokens, room)
            pieces.append(tokens[start : start + size])
            room -= size
            position += 1
        rows.append(np.concatenate(pieces))
    return Rows(np.stack(rows)), place._replace(position=position)


def consecutive_rows(tokens, place: Place, now, cfg):
    """All tokens of a shard in their order, as `cut_rows` returns them."""
    size = cfg.sequences_per_step * now.seq_len
    start = place.position
    # The last sequence needs one more token, its last target.
    part = tokens[start : start + size + 1]
    if len(part) <= size:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(part, now.seq_len + 1)
    return Rows(windows[:: now.seq_len]), place._replace(position=start + size)


# Tile sizes of FlexAttention's backward pass for GPUs with less shared memory than an A100
SMALL_TILES = dict(BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32)


def prepare(model: GPT, cfg, device: torch.device):
    """Make the model ready to train on this device."""
    if device.type != "cuda":
        return
    for param in model.parameters():
        if param.bf16:
            param.data = param.data.bfloat16()
    can_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    model.lm_head.use_fp8 = cfg.fp8_head and can_fp8
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if shared_memory < 160 * 1024:
        for block in model.blocks:
            if block.attn:
                block.attn.kernel_options = SMALL_TILES
    model.compile(dynamic=False)


def to_batch(rows: Rows, device: torch.device) -> Batch:
    """The sequences of a forward pass, on the device."""
    tokens = torch.from_numpy(rows.tokens.astype(np.int64))
    if device.type == "cuda":
        tokens = tokens.pin_memory()  # the host need not wait for the copy
    tokens = tokens.to(device, non_blocking=True)
    return Batch(tokens[:, :-1].int(), tokens[:, 1:].contiguous())


def losses_of(model, batch: Batch, now) -> Tensor:
    """The loss of a batch, summed over its tokens, (1,).

    Training, warm-up and validation all call it.
    """
    return model(batch).view(1)


def accumulate_gradients(model, batches, now) -> Tensor:
    """Add up the gradients of a step's batches. Returns the mean of `losses_of`, (1,).

    The gradients are those of the sum over tokens, not of the mean.
    """
    totals = 0
    tokens = 0
    for batch in batches:
        losses = losses_of(model, batch, now)
        losses[0].backward()
        totals = totals + losses.detach()
        tokens += batch.targets.numel()
    return totals / tokens


def train(run, cfg):
    """The training loop. It ends after the last step, or after a save when a signal asks it to.

    run: the harness below the banner. It holds model, optimizers and data. Its
    `validate_and_save` does so where that is due, while the clock stands.
    """
    stage = None
    for step in range(run.first_step, cfg.num_iterations + 1):  # the last round only validates
        now = schedule(step, cfg)
        if now.stage != stage:
            stage = now.stage
            run.model.set_stage(now)

        if run.validate_and_save(step, can_save=True):
            break

        batches = run.loader.next_step(now)
        losses = accumulate_gradients(run.model, batches, now)
        run.exchange_losses(step, losses)
        step_optimizers(run.optimizers, now, divisor=cfg.sequences_per_step)
        run.log_step(step + 1)


# ==== Harness: below this line every record has the same bytes ===============
# What it asks of a record:
#   SCRIPT, SOURCE                       its path, and its bytes as they were when it started
#   Hyperparameters, POCKET              settings, a field each; what differs in the preset pocket
#   check(cfg, require), shorten(cfg)    their rules; the settings that --shorten makes
#   schedule(step, cfg)                  what holds in a step; it has at least stage and seq_len
#   GPT(cfg), prepare(model, cfg, device)                 the model, and its form on a device
#   build_optimizers(model, cfg, ranks)  each has name, numel, group, tensors(), clear(),
#                                        full_state() and load_full_state(full)
#   Place                                where a step's sequences begin, which a checkpoint keeps
#   cut_rows(tokens, documents, place, now, cfg)          a step's Rows and the next Place, or None
#   Rows, to_batch(rows, device)         sequences (N, T + 1) on the host, and as a Batch
#   losses_of(model, batch, now)         summed losses: what is minimised, the next token's
#   train(run, cfg)                      the loop, for the run as for its warm-up. Until a step's
#                                        exchange_losses it changes nothing that a checkpoint has
# What a record may use of it: UserError, find_shards, validate, ThreadPoolExecutor
# and of `run`: first_step, model, optimizers, loader, ranks, val_tokens, log, validate_and_save,
# exchange_losses, log_step.
import argparse
import contextlib
import fcntl
import functools
import gc
import glob
import hashlib
import os
import platform
import re
import signal
import sys
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime, timedelta

from torch.utils import collect_env


class UserError(Exception):
    """An error that a user can mend. It ends the run in one line.

    Every function below may raise it: files and flags are checked where they are used.
    """


class DataError(UserError):
    """The training data have no next step, on any rank."""


def explain(error: BaseException) -> str:
    """What a user is told of an error. It is empty for a fault of the script."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):  # signals are caught from the first step on
        return "interrupted"
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in text:
        return "out of memory; raise --head_chunks or --shorten, or lower --sequences_per_forward"
    if isinstance(error, RuntimeError) and "third_party/gloo/" in text:
        return f"another rank has ended, and says why unless it was killed ({text})"
    if isinstance(error, UserError | OSError | dist.DistError):
        return text
    return ""


# ---- Data -------------------------------------------------------------------
HEADER_BYTES = 1024  # of a shard: int32, the first three of which are used; tokens follow
MAGIC = 20240520  # of llm.c's shards
VERSION = 1
SAMPLES = 64  # parts of a shard that its digest is made of
SAMPLE_BYTES = 4096
MORE_DATA = "add shards (data/README.md), or give --repeat_data true"


def find_shards(pattern: str) -> list[Path]:
    """Files that match the glob, here or else in a folder above the script, sorted."""
    for folder in (Path(), *SCRIPT.parents):  # a record finds the data of the repository
        if names := glob.glob(pattern, root_dir=folder):
            return sorted(folder / name for name in names)
    raise UserError(f"no file matches {pattern!r}; make the data first: data/README.md")


def shard_size(path: Path) -> int:
    """Number of tokens in a shard, which its header and its file size tell."""
    size = (path.stat().st_size - HEADER_BYTES) / 2
    header = np.fromfile(path, "<i4", 3).tolist()
    if header != [MAGIC, VERSION, size]:  # also of a download that was cut short
        raise UserError(f"{path}: no whole shard of version {VERSION}; make or fetch it again")
    return header[2]


def sample_shard(path: Path) -> bytes:
    """Parts of a shard from all over the file, which tell other data apart."""
    content = np.memmap(path, "u1", "r")
    samples = []
    for start in np.linspace(0, max(0, len(content) - SAMPLE_BYTES), SAMPLES, dtype=int):
        sample = content[start : start + SAMPLE_BYTES]
        if len(sample) == SAMPLE_BYTES and not sample.any():  # of a download that left holes
            raise UserError(f"{path}: only zeros from byte {start} on; make or fetch it again")
        samples.append(sample)
    return np.concatenate(samples).tobytes()


def read_shard(path: Path, vocab_size: int) -> np.ndarray:
    """The shard's tokens, uint16, all of which are in the vocabulary."""
    tokens = np.fromfile(path, "<u2", shard_size(path), offset=HEADER_BYTES)
    if (largest := tokens.max(initial=0)) >= vocab_size:
        raise UserError(f"{path}: has token {largest}, not below --vocab_size {vocab_size}")
    return tokens


class TokenLoader:
    """Gives rank r the r-th part of each step's sequences.

    A step is cut from one shard. Tokens at its end that do not fill a step are skipped. A thread
    reads the next shard ahead.
    """

    def __init__(self, cfg, ranks, place, log):
        self.cfg = cfg
        self.ranks = ranks
        self.log = log
        self.tokens_given = 0  # to all ranks
        self.sequences, rest = divmod(cfg.sequences_per_step, ranks.world_size)
        if rest:
            raise UserError(f"--sequences_per_step must be a multiple of {ranks.world_size} ranks")
        self.per_forward = min(cfg.sequences_per_forward, self.sequences)
        while self.sequences % self.per_forward:  # all forward passes of a step have as many
            self.per_forward -= 1
        self.passes = self.sequences // self.per_forward
        self.files = find_shards(cfg.train_files)  # in the order of reading
        self.sizes = [shard_size(path) for path in self.files]
        self.digests = []  # of all files up to each one
        digest = hashlib.sha256()
        for path, size in zip(self.files, self.sizes):
            digest.update(f"{path.name} {size}".encode() + sample_shard(path))
            self.digests.append(digest.hexdigest()[:16])
        self.reader = ThreadPoolExecutor(1)  # reads ahead while the model trains
        self.ahead = self.reader.submit(self.read, place.shard)  # a future
        self.begin_shard(place)

    def digest_at(self, place) -> str:
        """A digest of the files up to this place. More may come before the run is resumed."""
        return self.digests[min(place.shard, len(self.files) - 1)]

    def read(self, shard):
        """A shard's tokens and where its documents begin. Shards are counted through all epochs."""
        tokens = read_shard(self.files[shard % len(self.files)], self.cfg.vocab_size)
        return tokens, np.flatnonzero(tokens == self.cfg.eot_token)

    def begin_shard(self, place):
        """Take the shard that was read ahead, and begin to read the next one."""
        try:
            self.tokens, self.documents = self.ahead.result()
        except (UserError, OSError) as error:
            raise DataError(error) from None
        self.place = place  # the same on any number of ranks
        self.ahead = self.reader.submit(self.read, place.shard + 1)

    def next_step(self, now) -> list:
        """This rank's batch for each forward pass of a step."""
        rows = self.next_rows(now)
        self.tokens_given += rows.tokens[:, 1:].size
        begin = self.ranks.rank * self.sequences
        end = begin + self.passes * self.per_forward
        batches = []
        for first in range(begin, end, self.per_forward):
            part = [array[first : first + self.per_forward] for array in rows]
            batches.append(to_batch(Rows(*part), self.ranks.device))
        return batches

    def next_rows(self, now):
        """The step's rows of all ranks. Each rank cuts the same."""
        files = f"--train_files {self.cfg.train_files}"
        for _ in range(len(self.files) + 1):  # the rest of this shard, then each shard once
            if step := cut_rows(self.tokens, self.documents, self.place, now, self.cfg):
                rows, self.place = step
                return rows
            shard = self.place.shard + 1  # after the last one the first again
            is_again = shard % len(self.files) == 0
            if is_again and not self.cfg.repeat_data:
                raise DataError(f"{files}: the data end before the run; {MORE_DATA}")
            self.begin_shard(self.place._replace(shard=shard, position=0))
            if is_again:
                self.log(f"the training data begin again: {self.cfg.train_files}")
        raise DataError(f"{files}: no shard has the documents of a step, which begin with "
                        f"--eot_token {self.cfg.eot_token}; lower --sequences_per_step")


@functools.cache
def planned_tokens(cfg) -> list[int]:
    """How many tokens a run trains on before each step, and in all."""
    tokens = [0]
    for step in range(cfg.num_iterations):
        length = schedule(step, cfg).seq_len
        tokens.append(tokens[-1] + cfg.sequences_per_step * length)
    return tokens


def check_data(cfg, loader, saved):
    """Refuse training data that are not the checkpoint's, that are held out, or too few."""
    files = f"--train_files {cfg.train_files}"
    if saved["data_digest"] and saved["data_digest"] != loader.digest_at(loader.place):
        raise UserError(f"{files}: not the data of {cfg.resume}; name those that it was trained on")
    held_out = {path.resolve() for path in find_shards(cfg.val_files)}
    if held_out & {path.resolve() for path in loader.files}:
        raise UserError(f"{files}: --val_files has a file of these, too")
    planned, found = planned_tokens(cfg)[-1], sum(loader.sizes)
    if planned > found and not cfg.repeat_data:
        raise UserError(f"{files}: the run trains on {planned} tokens, and these are {found}; "
                        f"{MORE_DATA}")


# ---- Validation -------------------------------------------------------------
def read_val_tokens(cfg) -> np.ndarray:
    """The first val_tokens + 1 validation tokens, uint16."""
    # One after another, as if they were one file
    shards = [read_shard(path, cfg.vocab_size) for path in find_shards(cfg.val_files)]
    tokens = np.concatenate(shards)
    if len(tokens) <= cfg.val_tokens:
        raise UserError(f"--val_tokens must be below the {len(tokens)} of {cfg.val_files}")
    return tokens[: cfg.val_tokens + 1].copy()  # a view would keep all of them in memory


@contextlib.contextmanager
def store_masks():
    """Where a model is compiled without a backward pass, store what FlexAttention's mask reads."""
    from torch._inductor import config, ir  # this import takes a second

    # Where the reach is a constant, its reads need a layout that is not decided yet.
    ir.FlexibleLayout.allow_indexing = True
    try:
        with config.patch(realize_reads_threshold=1):
            yield
    finally:
        ir.FlexibleLayout.allow_indexing = False


@functools.cache
def longest_sequence(cfg) -> int:
    """Tokens of the longest training sequence of a run."""
    return max(schedule(step, cfg).seq_len for step in range(cfg.num_iterations))


def is_validated(step, cfg) -> bool:
    """Whether a run is validated before this step. Some records do so more often near its end."""
    every = cfg.val_every
    if every and step >= 0.9 * cfg.num_iterations:
        every = getattr(cfg, "val_every_late", 0) or every
    return every > 0 and step % every == 0


@torch.no_grad()
def validate(model: nn.Module, tokens: np.ndarray, now, cfg, ranks) -> float:
    """Mean loss over the validation tokens. Ranks share the sequences."""
    model.eval()  # no FP8, and the loss of the next token alone
    total = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    num_targets = len(tokens) - 1  # the first token has no prediction
    sequence = cfg.val_seq_len
    # As many sequences at once as a training pass has tokens for, at least one
    pass_tokens = sequence * max(1, cfg.sequences_per_forward * longest_sequence(cfg) // sequence)
    # All ranks have as many passes, and the last ones are as large as the others.
    tokens = np.pad(tokens, (0, ranks.world_size * pass_tokens))
    for first in range(0, num_targets, ranks.world_size * pass_tokens):
        start = first + ranks.rank * pass_tokens
        part = tokens[start : start + pass_tokens + 1]
        # (sequences, length + 1): the last token of a row is the first of the next row.
        rows = np.lib.stride_tricks.sliding_window_view(part, sequence + 1)[::sequence]
        batch = to_batch(Rows(rows), ranks.device)
        batch.targets.view(-1)[max(0, num_targets - start) :] = -1  # padding is not counted
        with store_masks() if total.is_cuda else contextlib.nullcontext():
            total += losses_of(model, batch, now)[-1]
    model.train()
    # Each rank has the sum of its own sequences.
    return ranks.all_gather(total).sum().item() / num_targets


# ---- Checkpoints ------------------------------------------------------------
# What a checkpoint has, here of a run that begins. Other keys are of another version of the script.
NEW_RUN = dict(
    step=0,
    settings=None,  # before --shorten
    script_digest="",
    place=(),  # the values of a Place
    data_digest=None,  # of the training data up to this place
    tokens_trained=0,
    threads=None,
    train_time_ms=0.0,
    process_time_ms=0.0,
    model=None,
    optimizers=None,
)


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}.pt"  # leading zeros let names sort by step


def checkpoints_of(folder: Path) -> list[Path]:
    """A run's checkpoints by step. Files with other names are a person's own."""
    return sorted(folder.glob("step-" + 6 * "[0-9]" + ".pt"))


def write_checkpoint(path: Path, state: dict):
    """Write the state, whole or not at all. It and the two before it stay."""
    temporary = path.with_name("unfinished-step.tmp")  # what a killed save left is overwritten
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the data reach the disk before the name does
        temporary.replace(path)  # atomic
    except (OSError, RuntimeError) as error:  # torch.save's RuntimeError hides the cause
        temporary.unlink(missing_ok=True)
        cause = error.__context__ or error
        raise UserError(f"{path}: not written ({cause}); make room, --resume auto") from None
    # By step, not by time: a clock that went back would cost the newest.
    saved = checkpoints_of(path.parent)
    for old in saved[: max(0, saved.index(path) - 2)]:
        old.unlink()


def load_checkpoint(path: Path) -> dict:
    """What is in the file at `path`, and a checksum of all of it."""
    try:
        with zipfile.ZipFile(path) as file:  # as torch.save writes it, with checksums
            if damaged := file.testzip():
                raise ValueError(f"{damaged} is damaged")
            checksums = [entry.CRC for entry in file.infolist()]
        # Weights alone: a pickle that runs code is refused.
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        saved["checksum"] = hashlib.sha256(str(checksums).encode()).hexdigest()[:16]
    except MemoryError:
        raise
    except Exception as error:  # zipfile and torch raise nearly any for a damaged file
        cause = str(error).partition(". ")[0]  # without torch's advice
        raise UserError(f"{path}: no whole checkpoint ({type(error).__name__}: {cause}); name "
                        "another") from None
    return saved


def load_run(path: Path) -> dict:
    """A checkpoint that a run can go on from."""
    saved = load_checkpoint(path)
    # What is missing would silently be the default of the preset record.
    odd = NEW_RUN.keys() ^ (saved.keys() - {"checksum"})
    if not odd:
        odd = vars(Hyperparameters()).keys() ^ saved["settings"].keys()
    if odd:
        some = ", ".join(sorted(odd)[:3])
        raise UserError(f"{path}: of another version of the script, which differs in {some}; "
                        "resume it with that version")
    return saved


def find_checkpoint(resume: str, run_id: str):
    """Path and content of what --resume names, or of a new run."""
    folder = Path("logs", run_id)
    in_folder = checkpoints_of(folder) if run_id else []
    if resume == "auto":
        if not run_id:
            raise UserError("--resume auto: which run is told by --run_id")
        for path in reversed(in_folder):
            try:
                return str(path), load_run(path)
            except UserError as error:
                print(f"skipped {error}", file=sys.stderr)
        if in_folder:
            raise UserError(f"--resume auto: {folder} has no other; name another --run_id")
        return "", NEW_RUN
    saved = load_run(Path(resume)) if resume else NEW_RUN
    if resume and run_id and Path(resume).resolve().parent != folder.resolve():
        raise UserError(f"--resume {resume}: not of --run_id {run_id}; leave --run_id out")
    if in_folder and in_folder[-1].name > checkpoint_name(saved["step"]):
        raise UserError(f"--run_id {run_id}: {in_folder[-1]} is there already; go on from it by "
                        "--resume auto, or begin another branch with another --run_id")
    return resume, saved


# ---- The machine ------------------------------------------------------------
def default_head_chunks(device: torch.device) -> int:
    """In how many chunks a device computes the head."""
    if device.type == "cpu":
        return 1
    memory = torch.cuda.get_device_properties(device).total_memory
    # 80 GB hold all logits and their gradient. More than eight chunks save nothing.
    return 8 if memory < 32e9 else math.ceil(70e9 / memory)


def machine_facts(device: torch.device) -> dict:
    """What a log tells of the machine and of its software."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")  # where Linux has its maker's name for it
    if info.exists() and (found := re.search(r"model name\s*: (.+)", info.read_text())):
        cpu = " ".join(found[1].split())
    facts = dict(
        device=f"{cpu} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})",
        torch=torch.__version__,
        threads=torch.get_num_threads(),  # OMP_NUM_THREADS, or the number of cores
    )
    if device.type == "cuda":
        facts |= dict(
            device=torch.cuda.get_device_name(device),
            cuda=torch.version.cuda,
            driver=collect_env.get_nvidia_driver_version(collect_env.run),
        )
    return facts


def check_gpu(device: torch.device):
    """Refuse a GPU for which nothing here was written."""
    if torch.version.hip:
        raise UserError("ROCm is untried; use --device cpu")
    if torch.cuda.get_device_capability(device) < (8, 0):  # torch compiles no bf16 there
        name = torch.cuda.get_device_name(device)
        raise UserError(f"{name} has a compute capability below 8.0; use --device cpu")


# ---- Ranks and log ----------------------------------------------------------
class Ranks:
    """This process's rank and device, and what ranks exchange."""

    def __init__(self, cfg):
        # torchrun sets these three.
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))  # among those of this machine
        # How many srun, mpirun or mpiexec started, which set no WORLD_SIZE
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
            if "WORLD_SIZE" not in os.environ and os.environ.get(name, "") not in ("", "1"):
                raise UserError(f"{name}: each task would train alone; let one start torchrun")
        gpus = torch.cuda.device_count() if cfg.device != "cpu" else 0
        if local_rank >= gpus and (gpus or cfg.device == "cuda"):
            raise UserError(f"--device {cfg.device}: no GPU {local_rank}; use --device cpu")
        self.device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
        try:
            if gpus:
                torch.cuda.set_device(self.device)  # "cuda" now means this one
                check_gpu(self.device)
            if self.world_size > 1:
                # torch 2.13 has new names for the collectives; 2.11 has the old ones alone.
                warnings.filterwarnings("ignore", "", FutureWarning, "torch.distributed")
                # Ranks compile at different speeds, and wait for the slowest.
                patience = timedelta(minutes=30)
                dist.init_process_group(timeout=patience, device_id=self.device if gpus else None)
        except (RuntimeError, ValueError) as error:  # a driver, a variable or a network is wrong
            raise UserError(f"{self.world_size} rank(s) cannot start: {error}") from None

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        """End the process group. Its threads would abort Python when that ends before them."""
        if self.world_size > 1:
            if failure and self.device.type == "cuda":
                dist.group.WORLD.abort()  # without waiting for ranks that may have failed, too
            dist.destroy_process_group()

    def all_gather(self, x):
        """(N,) of every rank, as (ranks, N)."""
        of_ranks = x.repeat(self.world_size, 1)
        if self.world_size > 1:
            dist.all_gather_into_tensor(of_ranks.view(-1), x)
        return of_ranks

    def agree(self, facts: dict):
        """Refuse to start where a fact, text by name, is not the same on all ranks."""
        if self.world_size == 1:
            return
        of_ranks = [None] * self.world_size
        dist.all_gather_object(of_ranks, facts)
        for rank, others in enumerate(of_ranks):
            for name, value in of_ranks[0].items():
                if others[name] != value:
                    raise UserError(f"ranks differ in {name}: rank 0 has {value or 'none'}, rank "
                                    f"{rank} has {others[name] or 'none'}; give all the same")


class Log:
    """The console and logs/RUN_ID/log.txt, both of rank 0. Other ranks write nothing."""

    def __init__(self, ranks):
        self.enabled = ranks.rank == 0
        self.folder = None
        self.file = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Close the log. Its last line is what ended the run."""
        if self.file:
            with contextlib.suppress(OSError):  # the disk may be full
                if error:
                    self.file.write(f"error: {explain(error) or repr(error)}\n".encode())
            self.file.close()

    def open(self, cfg, may_exist, header):
        """Open the log for this process alone, and begin a new one."""
        # Two runs may begin in one second.
        self.folder = Path("logs", cfg.run_id or f"{datetime.now():%Y%m%d-%H%M%S-%f}")
        if not self.enabled:
            return
        path = self.folder / "log.txt"
        self.folder.mkdir(parents=True, exist_ok=bool(cfg.run_id))
        file = path.open("ab", buffering=0)  # nothing waits to be written
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except BlockingIOError:
            raise UserError(f"--run_id {cfg.run_id}: another process runs it now") from None
        except OSError as error:  # some network file systems have no locks
            print(f"{path}: no lock ({error}); start no other run there", file=sys.stderr)
        written = path.read_bytes()
        if written and not cfg.resume and (not may_exist or b"\n---\n" in written):
            raise UserError(f"--run_id {cfg.run_id}: {path} is there already; name another, or go "
                            "on by --resume auto")
        self.file = file  # no other process writes to it
        if cfg.resume and written:
            return
        if written:  # --resume auto, where nothing was saved: the run starts over
            old = path.with_name(f"left-{datetime.now():%Y%m%d-%H%M%S-%f}-log.txt")
            old.write_bytes(written)
            self.file.truncate(0)
        self(header, console=False)
        if written:
            self(f"nothing was saved, so the run starts over; its log is now {old}")

    def __call__(self, text, more="", console=True):
        """Write the text to the log; print it to the console, with more."""
        try:
            if self.file:
                self.file.write(f"{text}\n".encode())
        except OSError as error:
            raise UserError(f"{self.file.name}: not written ({error}); make room") from None
        try:
            if self.enabled and console:
                print(text + more, flush=True)
        except OSError:  # the terminal is gone, or who read this; the run needs neither
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- The run ----------------------------------------------------------------
def build(cfg, ranks):
    """Model and optimizers of a new run."""
    # Drawn on the CPU, so that a seed means the same weights on every device
    model = GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(cfg.seed))
    if cfg.init and not cfg.resume:
        load_state(model, [], load_checkpoint(Path(cfg.init)), cfg.init)
    model.to(ranks.device)
    prepare(model, cfg, ranks.device)
    return model, build_optimizers(model, cfg, ranks)


def load_state(model, optimizers, saved, path):
    """Put the weights and the optimizer state of a checkpoint where they belong."""
    try:
        model.load_state_dict(saved["model"])
        for optimizer in optimizers:
            optimizer.load_full_state(saved["optimizers"][optimizer.name])
    except (KeyError, TypeError, RuntimeError) as error:
        cause = " ".join(str(error).split("\n")[:2])  # torch lists all that does not fit
        raise UserError(f"{path}: does not fit ({cause}); name another checkpoint") from None


class Run:
    """All that the training loop works with: `start` it, `train` it, `finish` it."""

    def __init__(self, cfg, ranks, log, saved):
        self.unshortened = cfg  # what logs and checkpoints keep
        self.cfg = cfg = shorten(cfg)
        self.ranks = ranks
        self.log = log
        self.saved = saved  # what it begins with: a checkpoint, or NEW_RUN
        self.first_step = self.saved_step = saved["step"]
        self.here = None  # step and place, as long as they can be saved
        self.pending = []  # losses not read yet: step, those of all ranks, CUDA event
        self.signalled = False  # whether a signal told this rank to stop
        self.stop = False  # whether any rank was told to
        self.stopped = False  # whether it has ended there
        self.val_loss = math.nan
        self.train_time_ms = saved["train_time_ms"]  # up to when the clock was stopped
        self.process_time_ms = saved["process_time_ms"]  # of all threads; waiting does not count
        # Tokens trained on before each step. A run that was made longer had another plan.
        planned = planned_tokens(cfg)
        earlier = saved["tokens_trained"] - planned[self.first_step]
        self.tokens_before = [earlier + tokens for tokens in planned]
        # Data are checked before the model is built.
        self.val_tokens = read_val_tokens(cfg)
        self.loader = None  # evaluation needs no training data
        if self.first_step < cfg.num_iterations:
            self.loader = TokenLoader(cfg, ranks, Place(*saved["place"]), log)
            check_data(cfg, self.loader, saved)
        self.train_digest = self.loader.digests[-1] if self.loader else ""
        self.val_digest = hashlib.sha256(self.val_tokens.astype("<u2")).hexdigest()[:16]
        self.script_digest = hashlib.sha256(SOURCE).hexdigest()
        self.check_ranks()
        self.model, self.optimizers = build(cfg, ranks)
        # What the log begins and ends with
        self.facts = machine_facts(ranks.device) | dict(
            seed=cfg.seed,
            world_size=ranks.world_size,
            parameters=sum(optimizer.numel for optimizer in self.optimizers),
            val_digest=self.val_digest,
        )

    def check_ranks(self):
        """Refuse to start where ranks would train different runs together."""
        facts = {"script": self.script_digest[:16]}
        for name, value in vars(self.unshortened).items():
            if isinstance(value, int | float | str) and name != "head_chunks":  # each card's own
                facts[f"--{name}"] = str(value)
        facts["the checkpoint"] = self.saved.get("checksum", "")
        if self.cfg.init and not self.cfg.resume:
            facts["the weights of --init"] = load_checkpoint(Path(self.cfg.init))["checksum"]
        facts["the training data"] = self.train_digest
        facts["the validation data"] = self.val_digest
        facts["torch"] = torch.__version__
        self.ranks.agree(facts)

    def start(self, may_exist):
        """Open the log, warm up, load the checkpoint, start the clock."""
        self.open_log(may_exist)
        if self.loader:
            self.log_odd_settings()
            self.warm_up()
        if self.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.ranks.device)  # without the tuner's
        if self.cfg.resume:  # after the warm-up, which leaves no trace
            load_state(self.model, self.optimizers, self.saved, self.cfg.resume)
            self.log_resumed()
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # SIGHUP is ignored under nohup
                signal.signal(number, self.on_signal)
        self.start_clock()

    def open_log(self, may_exist):
        """Begin the log with the script, all settings and what machine it is."""
        values = vars(self.unshortened) | self.facts
        values["planned_tokens"] = planned_tokens(self.cfg)[-1]
        values["train_digest"] = self.train_digest
        rule = "=" * 100  # the end of the source
        lines = [f"{key}: {value}" for key, value in values.items()]
        header = "\n".join([SOURCE.decode(), rule, *lines, rule])
        self.log.open(self.cfg, may_exist, header)
        self.log("{device}, {threads} thread(s), {world_size} rank(s), {parameters:,} parameters, "
                 "head in {head_chunks} chunk(s), ".format(**values) + str(self.log.folder))

    def log_odd_settings(self):
        """Tell what does not fit a run as short as this one, or data as few."""
        preset = POCKET if self.cfg.preset == "pocket" else {}
        usual_steps = Hyperparameters(**preset).num_iterations
        steps = self.cfg.num_iterations
        for name, value in vars(self.cfg).items():
            in_steps = re.search("_(steps|warmup|cooldown|iters|from)$", name)
            if in_steps and name != "warmup_steps" and steps <= value < usual_steps:
                self.log(f"--{name} {value} does not shrink with --num_iterations {steps}")
        skipped = self.cfg.sequences_per_step * longest_sequence(self.cfg) * len(self.loader.files)
        share = skipped / sum(self.loader.sizes)
        if share > 0.1:
            self.log(f"up to {min(share, 1):.0%} of --train_files may be skipped, as no step goes "
                     "on in another shard; make larger ones, or lower --sequences_per_step")

    def log_resumed(self):
        """Tell where a run goes on, and by which other settings."""
        is_same = self.saved["script_digest"] == self.script_digest
        other = "" if is_same else ", which another script wrote"
        self.log(f"resumed at step:{self.first_step} from {self.cfg.resume}{other}")
        for name in MAY_CHANGE:
            old, new = self.saved["settings"][name], getattr(self.unshortened, name)
            if new != old and name not in ("run_id", "resume", "device"):
                self.log(f"{name}: {new}, before {old}")

    def on_signal(self, number, frame):
        """Stop all ranks after this step. A second Ctrl-C ends the process."""
        if self.signalled and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            os._exit(130)  # the first process of a container outlives its signals
        self.signalled = True

    def warm_up(self):
        """Run every kernel, then restore weights, optimizer state and the place in the data.

        The record's own loop runs, on some steps of each stage and on the last ones.
        """
        cfg = self.cfg
        loader_before = vars(self.loader).copy()
        model_before = vars(self.model).copy()
        groups = [optimizer.group for optimizer in self.optimizers]
        tensors = [x for optimizer in self.optimizers for x in optimizer.tensors()]
        before = [x.to("cpu", copy=True) for x in tensors]  # a GPU may have no room for a copy
        for optimizer in self.optimizers:  # no row moves of a table that is too large for a copy
            optimizer.group = replace(optimizer.group, lr=0.0)
        self.loader.log = lambda text: None
        self.loader.passes = 1
        self.loader.cfg = replace(cfg, repeat_data=True)

        stages = [schedule(step, cfg).stage for step in range(cfg.num_iterations)]
        firsts = [stages.index(stage) for stage in dict.fromkeys(stages[self.first_step :])]
        parts = [(first, first + cfg.warmup_steps) for first in firsts]  # their shapes differ
        parts.append((max(0, cfg.num_iterations - cfg.warmup_steps), cfg.num_iterations))
        for index, (first, end) in enumerate(parts, 1):
            if self.ranks.device.type == "cuda":  # the first start compiles for minutes
                self.log(f"warming up: {index} of {len(parts)}")
            train(WarmUp(self, first, end), cfg)

        vars(self.loader).update(loader_before)
        vars(self.model).update(model_before)
        for optimizer, group in zip(self.optimizers, groups):
            optimizer.group = group
            optimizer.clear()
        for tensor, value in zip(tensors, before):
            tensor.copy_(value)  # in place, since kernels and views keep their addresses
        # Else Python would search all that the compiler has left for cycles, a second in the steps.
        gc.collect()
        gc.freeze()

    def validate_and_save(self, step, can_save) -> bool:
        """Before a step, validate and save where that is due. Returns whether the run ends here.

        can_save: no gradients are waiting for the next step, so nothing is lost by a save.
        """
        cfg = self.cfg
        every = cfg.save_every
        is_last = step == cfg.num_iterations
        can_save = can_save or is_last
        ends = is_last or (self.stop and (can_save or not every))
        validates = is_last or (is_validated(step, cfg) and not ends)
        # A multiple of save_every that could not be saved is made up for.
        is_due = every and step // every > self.saved_step // every
        saves = can_save and every and step > self.saved_step and (is_due or ends)
        if ends or validates or saves:
            self.stop_clock(step)
        self.here = step, self.loader and self.loader.place
        if saves:  # first, as a validation takes long enough to be stopped
            self.save_checkpoint()
        if validates:
            now = schedule(step, cfg)
            self.val_loss = validate(self.model, self.val_tokens, now, cfg, self.ranks)
            self.log_losses(step, self.train_time_ms, val_loss=self.val_loss)
        if ends or validates or saves:
            self.start_clock()
        self.stopped = ends and not is_last
        return ends

    def exchange_losses(self, step, losses):
        """Exchange a step's losses, and whether a signal came. `log_step` reads them."""
        self.here = None  # weights change from here on
        stop = torch.full_like(losses[:1], self.signalled)
        of_ranks = self.ranks.all_gather(torch.cat([losses, stop]).float())
        of_ranks = of_ranks.to("cpu", non_blocking=True)
        # Recorded after the copy above
        event = torch.cuda.current_stream().record_event() if losses.is_cuda else None
        self.pending.append((step + 1, of_ranks, event))

    def log_step(self, step):
        """Log a step; on CUDA the one before it, so that the host need not wait for the GPU."""
        self.read_losses(step - 1 if self.ranks.device.type == "cuda" else step)

    def read_losses(self, step):
        """Log the losses up to a step, and note whether a rank was told to stop."""
        while self.pending and self.pending[0][0] <= step:
            done, of_ranks, event = self.pending.pop(0)
            if event:
                event.synchronize()
            *losses, stop = of_ranks.mean(0).tolist()  # all ranks have as many tokens
            self.stop = self.stop or stop > 0
            # What is minimised and, where a record has it, the next token's
            names = dict(zip(("train_loss", "next_token_loss"), losses))
            self.log_losses(done, self.elapsed_ms(), **names)

    def log_losses(self, step, ms, **losses):
        """Log a step's losses. The console shows each tenth of the run, and the time left."""
        last = self.cfg.num_iterations
        text = f"step:{step}/{last}"
        for name, loss in losses.items():
            text += f" {name}:{loss:.4f}"
            if not math.isfinite(loss):
                raise UserError(f"{text}; lower the learning rates")
        tokens = self.tokens_before[step]
        text += f" train_time:{ms:.0f}ms step_avg:{ms / max(1, step):.2f}ms"
        text += f" tokens_per_s:{1000 * tokens / max(1, ms):.0f}"
        # By tokens, as later steps may have more of them
        seconds_left = ms / 1000 * (self.tokens_before[-1] - tokens) / max(1, tokens)
        # The first step with another tenth of the run behind it
        is_tenth = step * 10 % last < 10
        shown = is_tenth or "val_loss" in losses
        self.log(text, f" left:{seconds_left:.0f}s", console=shown)

    def stop_clock(self, step):
        """Log the steps before this one, and count the time up to now."""
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()  # the GPU finishes what it was given
        self.read_losses(step)
        # The clock stands until it is started again.
        self.train_time_ms = self.elapsed_ms()
        self.process_time_ms += 1000 * (time.process_time() - self.process_started)

    def start_clock(self):
        self.started = time.perf_counter()
        self.process_started = time.process_time()

    def elapsed_ms(self):
        """Time spent on training: what was counted before, and since the clock started."""
        return self.train_time_ms + 1000 * (time.perf_counter() - self.started)

    def save_checkpoint(self):
        """Save all that a resumed run needs: on a CPU it is equal to the bit."""
        step, place = self.here
        self.saved_step = step
        state = dict(
            step=step,
            settings=asdict(self.unshortened),
            script_digest=self.script_digest,
            place=tuple(place),
            data_digest=self.loader.digest_at(place),
            tokens_trained=self.tokens_before[step],
            threads=torch.get_num_threads(),
            train_time_ms=self.train_time_ms,
            process_time_ms=self.process_time_ms,
            model=self.model.state_dict(),
            optimizers={each.name: each.full_state() for each in self.optimizers},
        )
        if self.ranks.rank == 0:
            write_checkpoint(self.log.folder / checkpoint_name(step), state)

    def save_after(self, error):
        """Where the data have no next step, save the run as it was before that step.

        All ranks are told so. After another error weights may be halfway, as a record may move
        them before its forward pass.
        """
        can_save = self.here and self.cfg.save_every and isinstance(error, DataError)
        if can_save and self.here[0] > self.saved_step:
            self.stop_clock(self.here[0])
            self.save_checkpoint()
            self.log(f"saved at step:{self.saved_step}; gradients that wait for Adam are left out")

    def finish(self) -> int:
        """Log how the run has ended. Returns the exit code."""
        if self.stopped:
            how = f"go on by --run_id {self.log.folder.name} --resume auto"
            if not self.cfg.save_every:
                how = "nothing was saved, as --save_every is 0"
            self.log(f"stopped by a signal; {how}")
            return 1
        target = self.cfg.target_loss
        reached = "reached" if self.val_loss <= target else "not reached"
        self.log(f"validation loss {self.val_loss:.4f}: the target, {target}, is {reached}")
        given = self.loader.tokens_given if self.loader else 0
        results = dict(
            val_loss=f"{self.val_loss:.6f}",
            train_time_ms=f"{self.train_time_ms:.0f}",
            process_time_ms=f"{self.process_time_ms:.0f}",
            steps=self.cfg.num_iterations,
            tokens=self.tokens_before[self.first_step] + given,
            **self.facts,
        )
        if self.ranks.device.type == "cuda":  # of rank 0, since the warm-up
            results["peak_memory_mib"] = torch.cuda.max_memory_allocated() // 2**20
        self.log("---", console=False)  # programs read what follows
        for key, value in results.items():
            self.log(f"{key}: {value}", console=False)
        return 0


class WarmUp:
    """Some steps before a run begins. `train` takes it in the run's place. Nothing of it stays."""

    def __init__(self, run, first_step, end):
        self.cfg = run.cfg
        self.ranks = run.ranks
        self.model = run.model
        self.optimizers = run.optimizers
        self.loader = run.loader
        self.first_step = first_step
        self.end = min(end, run.cfg.num_iterations)
        # A validation sequence for each rank
        self.val_tokens = np.zeros(self.ranks.world_size * self.cfg.val_seq_len + 1, int)

    def validate_and_save(self, step, can_save):
        if step == self.cfg.num_iterations:
            now = schedule(step, self.cfg)
            validate(self.model, self.val_tokens, now, self.cfg, self.ranks)
        return step >= self.end

    def exchange_losses(self, step, losses):
        self.ranks.all_gather(losses)

    def log_step(self, step):
        pass

    def log(self, text):
        pass


# ---- Command line -----------------------------------------------------------
# SLURM announces the end of a job by SIGUSR1, a limit of CPU time by SIGXCPU.
STOP_SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU
# Flags that may differ from the checkpoint of a resumed run
MAY_CHANGE = """num_iterations train_files repeat_data val_files val_tokens val_every device
    sequences_per_forward head_chunks run_id save_every resume""".split()
# Whole numbers of all records that may not be 0
ABOVE_ZERO = """vocab_size vocab_multiple model_dim head_dim num_iterations sequences_per_step
    sequences_per_forward val_seq_len val_tokens""".split()


def true_or_false(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is not true or false")
    return text.lower() == "true"


def parse_flags(argv) -> dict:
    """The flags among these words, or those of the command line, by name."""
    def error(message):
        remedy = "start it by torchrun" if "--local-rank" in message else "--help lists the flags"
        raise UserError(f"{message}; {remedy}")

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # only what is given stands in the result
        allow_abbrev=False,
    )
    parser.error = error  # one line, as all errors
    # The comments of the table: `name: type = default  # meaning`
    meanings = dict(re.findall(r"^    (\w+): .* = .*?  # (.*)$", SOURCE.decode(), re.M))
    for name, default in vars(Hyperparameters()).items():
        kind = type(default)
        if kind in (int, float, bool, str):  # tables are edited in the file
            values = f"(record: {default}, pocket: {POCKET.get(name, default)})"
            parser.add_argument(f"--{name}", type=true_or_false if kind is bool else kind,
                                metavar="X", help=f"{meanings.get(name, '')} {values}")
    return vars(parser.parse_args(argv))


def parse_args(argv) -> Hyperparameters:
    """The settings of a new run, for programs that use this script."""
    return hyperparameters(parse_flags(argv))


def hyperparameters(given, saved=None) -> Hyperparameters:
    """The flags given, over the defaults of their preset or over a checkpoint's settings."""
    flags = given
    if saved:
        flags = {name: x for name, x in saved.items() if not isinstance(x, tuple | dict)}
        # The new process chooses its device and its log.
        flags |= dict(device="auto", run_id="", head_chunks=0) | given
    preset = POCKET if flags.get("preset") == "pocket" else {}
    cfg = Hyperparameters(**(preset | flags))
    for name, value in asdict(cfg).items():
        if saved and name not in MAY_CHANGE and value != saved[name]:
            what = f"--{name} {value}" if name in flags else f"{name} in {SCRIPT.name}"
            raise UserError(f"{what}: not as in the checkpoint; a resumed run may change "
                            f"{', '.join(MAY_CHANGE)}")

    def require(holds, name, rule):
        value = getattr(cfg, name)
        if not holds and isinstance(value, int | float | str):
            raise UserError(f"--{name} must {rule}; here it is {value}")
        if not holds:
            raise UserError(f"{name} in {SCRIPT.name} must {rule}")

    for name, value in vars(cfg).items():
        if isinstance(value, int | float):
            least = 1 if name in ABOVE_ZERO else 0
            require(least <= value < 2**31, name, f"be at least {least}, and below 2147483648")
    require(cfg.preset in ("record", "pocket"), "preset", "be record or pocket")
    require(cfg.device in ("auto", "cuda", "cpu"), "device", "be auto, cuda or cpu")
    require(cfg.num_iterations < 10**6, "num_iterations", "be below a million")
    require(cfg.val_seq_len % 128 == 0, "val_seq_len", "be a multiple of 128")
    require(cfg.eot_token < cfg.vocab_size, "eot_token", "be below vocab_size")
    require(cfg.shorten in (1, 2, 4, 8), "shorten", "be 1, 2, 4 or 8")
    is_name = re.fullmatch(r"([\w+-][\w.+-]*)?", cfg.run_id)
    require(is_name, "run_id", "be of letters, digits, _ . + -, and not begin with .")
    check(cfg, require)
    return cfg


def check_length(cfg, saved):
    """Refuse a length by which a resumed run would go back."""
    step = saved["step"]
    if step > cfg.num_iterations:
        raise UserError(f"--num_iterations {cfg.num_iterations}: {cfg.resume} is of a later step")
    before = replace(cfg, num_iterations=saved["settings"]["num_iterations"])
    if schedule(step, cfg).stage < schedule(step, before).stage:
        raise UserError(f"--num_iterations {cfg.num_iterations}: {cfg.resume} is of a later stage; "
                        "a new run can begin with its weights, by --init")


def run_script(argv) -> int:
    """Train or resume by the flags. Returns the exit code."""
    given = parse_flags(argv)
    path, saved = find_checkpoint(given.get("resume", ""), given.get("run_id", ""))
    cfg = hyperparameters(given | dict(resume=path), saved["settings"])
    if path:
        check_length(cfg, saved)
    with Ranks(cfg) as ranks, Log(ranks) as log:
        # A finished record can be evaluated without a GPU.
        is_whole = saved["step"] == cfg.num_iterations
        if cfg.preset == "record" and ranks.device.type != "cuda" and not is_whole:
            raise UserError("--preset record: there is no CUDA device; use --preset pocket")
        cfg = replace(cfg, head_chunks=cfg.head_chunks or default_head_chunks(ranks.device))
        if path and ranks.device.type == "cpu":  # goes on to the bit with as many threads
            torch.set_num_threads(min(saved["threads"], os.cpu_count()))
        run = Run(cfg, ranks, log, saved)
        run.start(may_exist=bool(given.get("resume")))
        try:
            train(run, run.cfg)
        except Exception as error:
            run.save_after(error)
            raise
        return run.finish()


def main(argv=None) -> int:
    """Run the script and return its exit code: 2 after an error that a user can mend."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        return run_script(argv)
    except (Exception, KeyboardInterrupt) as error:
        message = explain(error)
        if not message:
            raise
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"{SCRIPT.name}: error: {rank}{message}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2
    finally:
        gc.unfreeze()  # else libraries that look for leaks find some


if __name__ == "__main__":
    sys.exit(main())
