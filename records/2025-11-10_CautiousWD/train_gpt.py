#!/usr/bin/env python3
"""Train a 124M-class GPT to 3.28 validation loss on FineWeb, as fast as 8 H100s allow.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the record, on 8 GPUs
    python train_gpt.py                                       # the record, on one GPU
    python train_gpt.py --preset pocket                       # a small model, on a CPU too

Parent: 2025-10-04_Backout. Change: NorMuon with half of Muon's rates, twice that for the MLP's
first matrix; cautious weight decay; the extension trains with a longer window.

The record comes first: hyperparameters, model, optimizers, schedules, training loop. The harness
below the banner reads data, validates, saves and logs. It is the same in every record.

Technique                                         where it is
ReLU²                                             MLP
QK-norm, merged QKV, value embeddings             CausalSelfAttention
sparse attention gate                             CausalSelfAttention
half-truncated rotary embedding                   GPT.set_stage, rotate
YaRN, growing windows                             yarn, GPT.set_stage
sliding windows over documents, FlexAttention     flex_mask, attend
FP8 head                                          FP8Product, CastedLinear
capped logits                                     GPT.logits
smeared embeddings, U-Net skips, backout          GPT.smear, GPT.hidden
Polar Express, NorMuon, cautious weight decay     orthogonalize, muon_update
sharded optimizers, Adam every other step         ShardedOptimizer, Adam, step_optimizers
documents packed into sequences                   cut_rows
rates, momentum, windows by stage                 schedule
"""

import argparse
import ctypes
import glob
import hashlib
import inspect
import itertools
import math
import os
import re
import resource
import signal
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C ends the imports, which take seconds, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint


# ---- Hyperparameters --------------------------------------------------------
def with_presets(table: type) -> type:
    """A frozen dataclass of a table whose rows are `name: type = record, pocket`."""
    for name in table.__annotations__:
        record, pocket = getattr(table, name)
        setattr(table, name, field(default=record, metadata={"pocket": pocket}))
    return dataclass(frozen=True)(table)


@with_presets
class Hyperparameters:
    """The settings of a run. Each field is also a command-line flag.

    A run has five stages: the three thirds of its schedules, the extension, the last validation.
    A tuple has one value per stage. The last one also holds for the stages after it.
    A row has the default of the preset record, then that of pocket.
    """

    preset: str = "record", "pocket"  # the defaults that the other flags change
    # Model
    vocab_size: int = 50257, 257  # token ids are smaller
    vocab_multiple: int = 128, 16  # embeddings and head are padded to a multiple of it
    eot_token: int = 50256, 256  # end-of-text, the token that opens each document
    model_dim: int = 768, 64  # width of the residual stream
    head_dim: int = 128, 16  # width of an attention head
    attention_pattern: str = "SSSLSS.SSSL", "L."  # each layer's window: Long, Short, . none
    value_embed_pattern: str = "12......012", "0."  # each layer's value embeddings, . for none
    backout_layer: int = 7, 0  # its output is subtracted from the last layer's
    attention_scale: float = 0.1, 0.5  # factor of the attention scores in the first stage
    rope_base: int = 1024, 32  # inverse of the lowest rotary frequency
    fp8_head: bool = True, True  # FP8 products in the head while training, where the GPU has them
    seed: int = 0, 0  # seed of the initial weights
    # Optimizers
    embed_lr: float = 0.6, 0.5  # Adam's rate of token and value embeddings
    head_lr: float = 0.008, 0.03  # Adam's rate of output head
    muon_lr: float = 0.03, 0.08  # Muon's rate; about the spectral norm of a step
    muon_momentum: float = 0.95, 0.85  # Muon's momentum
    # Schedules
    num_iterations: int = 2245, 240  # optimizer steps
    extension_steps: int = 40, 4  # last steps, at the lowest rates
    seq_lens: tuple = (32768,), (128,)  # tokens of a training sequence, by stage
    long_windows: tuple = (3, 7, 11, 13, 20), (1,)  # blocks of 128 tokens seen, by stage
    short_windows: tuple = (1, 3, 5, 6), (1,)  # the same of layers with short windows
    cooldown_frac: float = 0.5, 0.7  # last share of the schedule, in which rates fall
    momentum_cooldown: int = 50, 5  # last steps, in which Muon's momentum falls
    # Data and validation
    train_files: str = "data/fineweb10B/fineweb_train_*.bin", "data/pocket/pocket_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin", "data/pocket/pocket_val_*.bin"
    sequences_per_step: int = 8, 16  # sequences of a step, all ranks together
    sequences_per_forward: int = 1, 16  # sequences that a rank runs at once, at most
    max_document_tokens: int = 2048, 0  # documents are cut to it and packed; 0: neither
    sequence_stride: int = 1, 1_000_003  # unpacked: stride between sequences, modulo all
    val_seq_len: int = 262_144, 4096  # tokens of a validation sequence
    val_tokens: int = 10_485_760, 262_144  # validation tokens, each counted once
    val_every: int = 250, 0  # steps between validations; 0: only the last
    target_loss: float = 3.28, 1.64  # validation loss to reach, nats per token
    # Run
    device: str = "auto", "auto"  # cuda, cpu, or auto: cuda where there is one
    run_id: str = "", ""  # name of the folder under logs/; empty: made from the time
    warmup_steps: int = 10, 1  # untimed steps per stage that warm up the kernels
    head_chunks: int = 0, 0  # pieces in which the head is computed; 0: by the card's memory
    save_every: int = 0, 0  # steps between checkpoints; 0: none
    resume: str = "", ""  # checkpoint to resume; auto: the newest of --run_id
    init: str = "", ""  # checkpoint whose weights a new run starts from


def check_model(cfg, require):
    """Check this record's own flags by `require(holds, flag, rule)`."""
    layers = len(cfg.attention_pattern)
    require(cfg.head_dim % 4 == 0, "head_dim", "be a multiple of 4")
    require(cfg.model_dim % cfg.head_dim == 0, "model_dim", "be a multiple of head_dim")
    letters = re.fullmatch("[LS.]{1,99}", cfg.attention_pattern)
    require(letters, "attention_pattern", "be of L, S and .")
    require(len(cfg.value_embed_pattern) == layers, "value_embed_pattern", "have an entry a layer")
    require(cfg.backout_layer < layers, "backout_layer", "be a layer")
    require(0 < cfg.cooldown_frac <= 1, "cooldown_frac", "be above 0, at most 1")


# ---- Model ------------------------------------------------------------------
# In names: B sequences, T tokens, S = B·T, D model_dim, H heads, K head_dim, V padded vocabulary.
# The residual stream x has the shape (B, T, D).
BLOCK = 128  # tokens in a block of the attention mask


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension. On CPUs it is faster than F.rms_norm."""
    length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
    mean_square = length.square() / x.size(-1)
    epsilon = torch.finfo(torch.float32).eps  # as in F.rms_norm
    return (x * (mean_square + epsilon).rsqrt()).type_as(x)


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x · scale in an FP8 type. Values out of range saturate."""
    limit = torch.finfo(dtype).max  # casts saturate only since torch 2.12
    scaled = x.float().mul(scale)
    return scaled.clamp(-limit, limit).to(dtype)


def scaled_mm(a_MK: Tensor, b_KN: Tensor, scale: float, **options) -> Tensor:
    """a @ b · scale. A GPU needs a row-major, b column-major, K and N multiples of 16."""
    scale_a = torch.full((), scale, device=a_MK.device)
    scale_b = torch.ones_like(scale_a)
    return torch._scaled_mm(a_MK, b_KN, scale_a, scale_b, **options)


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
        return scaled_mm(x_f8, w_f8.T, unscale, out_dtype=torch.bfloat16, use_fast_accum=True)

    @staticmethod
    def backward(ctx, grad):
        x_f8, w_f8 = ctx.saved_tensors
        grad_f8 = to_fp8(grad, FP8_GRAD_SCALE, torch.float8_e5m2)  # (S, V)
        # The right factor must be column-major: copy the transpose, then transpose back.
        w_columns = w_f8.T.contiguous().T  # (V, D)
        x_columns = x_f8.T.contiguous().T  # (S, D)
        grad_rows = grad_f8.T.contiguous()  # (V, S)
        unscale_x = 1 / (FP8_GRAD_SCALE * FP8_W_SCALE)
        grad_x = scaled_mm(grad_f8, w_columns, unscale_x,
                           out_dtype=torch.bfloat16, use_fast_accum=False)
        unscale_w = 1 / (FP8_GRAD_SCALE * FP8_X_SCALE)
        grad_w = scaled_mm(grad_rows, x_columns, unscale_w,
                           out_dtype=torch.float32, use_fast_accum=False)
        return grad_x, grad_w


class CastedLinear(nn.Linear):
    """A linear map whose weight is cast to its input's type, or to FP8: @YouJiacheng, @leloykun."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)
        self.use_fp8 = False

    def forward(self, x):
        if self.use_fp8 and self.training:
            return FP8Product.apply(x, self.weight)
        return F.linear(x, self.weight.type_as(x))


# Attention. Query q attends to key k if k <= q, both are in one document (@KoszarskyB), and
# q - k <= 128 · window.
# The B rows are one sequence of B·T tokens: documents keep them apart.
def order_blocks(seen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """A row's number of seen blocks, (1, 1, Q), and all its blocks, seen ones first, (1, 1, Q, K).

    Cumulative sums give each block its place. A sort would take minutes to compile.
    """
    seen_so_far = seen_QK.cumsum(-1)
    unseen_so_far = (~seen_QK).cumsum(-1)
    count_Q1 = seen_so_far[:, -1:]
    place = torch.where(seen_QK, seen_so_far, count_Q1 + unseen_so_far) - 1
    block = torch.arange(seen_QK.size(1), device=seen_QK.device)
    order = place.scatter(-1, place, block.expand_as(place))
    count = count_Q1[:, 0]
    return count.int()[None, None], order.int()[None, None]


def flex_mask(docs_BT: Tensor, window: Tensor) -> BlockMask:
    """FlexAttention's mask, from each token's document number and the window in blocks.

    It is built by tensor operations, so a growing window needs no recompilation.
    """
    docs_S = docs_BT.flatten()
    docs = docs_S.view(-1, BLOCK)  # (blocks, 128)
    first = docs[:, 0]  # each block's first document
    last = docs[:, -1]
    block = torch.arange(len(docs), device=docs.device)
    distance = block[:, None] - block  # from a block of keys to the block of queries
    near = (distance >= 0) & (distance <= window)
    seen = near & (first[:, None] <= last)
    one_document = last[:, None] == first
    full = seen & one_document & (distance > 0) & (distance < window)  # needs no mask inside
    partial = seen & ~full

    def document_causal(batch, head, q, k):
        same_document = docs_S[q] == docs_S[k]
        return (q >= k) & (q - k <= BLOCK * window) & same_document

    kv_num, kv_order = order_blocks(partial)
    full_kv_num, full_kv_order = order_blocks(full)
    # The backward pass goes over the queries of each block of keys.
    q_num, q_order = order_blocks(partial.T.contiguous())
    full_q_num, full_q_order = order_blocks(full.T.contiguous())
    return BlockMask(
        seq_lengths=(len(docs_S), len(docs_S)),
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


def dense_mask(docs_BT: Tensor, window: Tensor) -> Tensor:
    """An additive mask for each block of queries, (blocks, 1, 128, keys), of 0 and -inf.

    It is used where FlexAttention is not compiled. The keys are those of the block and of the
    blocks before it within the window, so the cost grows with the window, not with the sequence.
    """
    blocks_before = min(int(window), docs_BT.size(1) // BLOCK - 1)
    docs = docs_BT.view(-1, BLOCK)  # (blocks, 128)
    key_docs = gather_window(docs, blocks_before + 1)
    same_document = docs[:, :, None] == key_docs[:, None, :]
    key = torch.arange(-blocks_before * BLOCK, BLOCK, device=docs.device)
    query = key[-BLOCK:, None]
    in_reach = (query >= key) & (query - key <= BLOCK * window)
    return torch.where(same_document & in_reach, 0.0, -math.inf)[:, None]


def gather_window(blocks: Tensor, window: int) -> Tensor:
    """Put each block behind those before it: (blocks, 128, …) to (blocks, window · 128, …)."""
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
        window = mask.size(-1) // BLOCK
        q = q.reshape(-1, BLOCK, *shape[2:])  # (blocks, 128, H, K)
        k = gather_window(k.reshape(q.shape), window)  # (blocks, window · 128, H, K)
        v = gather_window(v.reshape(q.shape), window)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (blocks, H, tokens, K)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.type_as(q), scale=1.0)
    return y.transpose(1, 2).reshape(shape)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, https://arxiv.org/abs/2104.09864, by angles (T, 1, K / 2).

    Entry i and entry i + K / 2 are a pair.
    """
    x = x_BTHK.float()
    half = x.size(-1) // 2
    partner = x.roll(half, dims=-1)  # the other entry of each pair
    cos = torch.cat([cos, cos], dim=-1)  # (T, 1, K)
    sin = torch.cat([sin, -sin], dim=-1)  # (T, 1, K)
    return (x * cos + partner * sin).type_as(x_BTHK)


class CausalSelfAttention(nn.Module):
    """Attention whose heads are gated by the first 12 channels of its input."""

    def __init__(self, cfg):
        super().__init__()
        dim = cfg.model_dim
        self.num_heads = dim // cfg.head_dim
        self.kernel_options = None  # of FlexAttention
        self.qkv_w = nn.Parameter(torch.empty(3, dim, dim))  # @fernbear.bsky.social, @YouJiacheng
        self.c_proj = CastedLinear(dim, dim)
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))  # of values and value embeddings
        self.attn_gate = CastedLinear(min(12, dim), self.num_heads)

    def forward(self, x, value_embed, rotary, mask):
        # Queries, keys and values
        qkv_w = self.qkv_w.flatten(0, 1)  # (3 D, D)
        qkv = F.linear(x, qkv_w.type_as(x))
        qkv = qkv.unflatten(-1, (3 * self.num_heads, -1))  # (B, T, 3 H, K)
        qk, v = qkv.split([2 * self.num_heads, self.num_heads], dim=2)
        q, k = rotate(norm(qk), *rotary).chunk(2, dim=2)  # QK-norm: @Grad62304977
        v = self.lambdas[0] * v
        if value_embed is not None:  # @KoszarskyB, @Grad62304977, after Zhou et al. 2024
            v = v + self.lambdas[1] * value_embed.view_as(v)
        y = attend(q, k, v, mask, self.kernel_options)
        # Sparse gate: a head can turn itself off: @classiclarryd, #28, some 50 steps
        channels = x[..., : self.attn_gate.in_features]
        gate_BTH = torch.sigmoid(self.attn_gate(channels))
        y = (y * gate_BTH[..., None]).flatten(2)  # (B, T, D)
        return self.c_proj(y)


class MLP(nn.Module):
    """Two matrices of the same shape, so that Muon batches them: @byronxu99."""

    def __init__(self, cfg):
        super().__init__()
        shape = (cfg.model_dim, 4 * cfg.model_dim)
        self.c_fc = nn.Parameter(torch.empty(shape))
        self.c_proj = nn.Parameter(torch.empty(shape))

    def forward(self, x):
        x = x @ self.c_fc.type_as(x)  # (B, T, 4 D)
        x = F.relu(x).square()  # ReLU²: https://arxiv.org/abs/2109.08668
        return F.linear(x, self.c_proj.type_as(x))


class Block(nn.Module):
    """A layer: attention, unless its window is ".", and an MLP, both pre-normed."""

    def __init__(self, cfg, window, value_table):
        super().__init__()
        self.window = window  # L, S, or . for no attention
        self.value_table = value_table  # of value_embeds, or . for none
        self.attn = None
        if window != ".":
            self.attn = CausalSelfAttention(cfg)
        self.mlp = MLP(cfg)
        # The embedding's share begins at 0.
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # factors of x and x0

    def forward(self, x, x0, value_embed, rotary, mask):
        x = self.lambdas[0] * x + self.lambdas[1] * x0  # @KoszarskyB, @Grad62304977
        if self.attn is not None:
            x = x + self.attn(norm(x), value_embed, rotary, mask)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The model, under the published parameter names."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        vocab = round_up(cfg.vocab_size, cfg.vocab_multiple)
        self.embed = nn.Embedding(vocab, cfg.model_dim)
        self.value_embeds = nn.ModuleDict()
        for table in sorted(set(cfg.value_embed_pattern) - {"."}):
            self.value_embeds[table] = nn.Embedding(vocab, cfg.model_dim)
        self.blocks = nn.ModuleList()
        for window, table in zip(cfg.attention_pattern, cfg.value_embed_pattern):
            self.blocks.append(Block(cfg, window, table))
        self.smear_gate = CastedLinear(min(12, cfg.model_dim), 1)
        self.smear_lambda = nn.Parameter(torch.tensor(0.0))  # nothing is smeared at first
        # U-Net: for each layer of the second half, the weight of the earlier output that it adds.
        pairs = len(self.blocks) // 2
        self.skip_weights = nn.Parameter(torch.full((pairs,), -1.5))  # sigmoid: 0.18 at first
        self.backout_lambda = nn.Parameter(torch.tensor(0.5))
        self.lm_head = CastedLinear(cfg.model_dim, vocab)
        self.tokens_per_piece = cfg.sequences_per_forward * max(cfg.seq_lens)  # of the head
        # Buffers, so that a new stage needs no recompilation: the long and the short window in
        # blocks; cosines and sines of the rotary embedding.
        windows = torch.zeros(2, dtype=torch.int32)
        self.register_buffer("windows", windows, persistent=False)
        max_length = max(*cfg.seq_lens, cfg.val_seq_len)
        rotary = torch.zeros(2, max_length, 1, cfg.head_dim // 2)
        self.register_buffer("rotary", rotary, persistent=False)
        self.set_stage(LAST_STAGE)  # as a loaded model is used

    def set_stage(self, stage):
        """Set the windows and the rotary embedding for a stage."""
        self.windows[0] = at_stage(self.cfg.long_windows, stage)
        self.windows[1] = at_stage(self.cfg.short_windows, stage)
        frequency, attention_scale = yarn(stage, self.cfg, self.rotary.device)
        # Half-truncated: half of the pairs do not rotate at all: @YouJiacheng
        frequency = F.pad(frequency, (0, self.cfg.head_dim // 4))  # (K / 2,)
        max_length = self.rotary.size(1)
        position = torch.arange(max_length, device=frequency.device)
        theta = torch.outer(position, frequency)[:, None]  # (T, 1, K / 2)
        # Queries and keys each carry the root of the attention scale.
        scale = attention_scale**0.5
        self.rotary[0] = scale * theta.cos()
        self.rotary[1] = scale * theta.sin()

    @torch.no_grad()
    def init_weights(self, generator):
        """Initialise each matrix by its name. Raises KeyError for an unknown one."""
        for name, param in self.named_parameters():
            if "embed" in name:
                param.normal_(generator=generator)
            elif name.endswith(("qkv_w", "c_fc")):  # uniform: @YouJiacheng
                bound = (0.75 / self.cfg.model_dim) ** 0.5  # std 0.5 / sqrt(fan_in)
                param.uniform_(-bound, bound, generator=generator)
            elif name.endswith(("c_proj", ".weight")):
                param.zero_()  # zero-initialised projections: @Grad62304977
            elif not re.search("lambda|skip", name):  # these are initialised by the constructors
                raise KeyError(f"no initialisation for the parameter {name}")

    def hidden(self, inputs_BT):
        """The normed output of the last layer, (B, T, D)."""
        cfg = self.cfg
        length = inputs_BT.size(1)
        padding = -length % BLOCK
        inputs_BT = F.pad(inputs_BT, (0, padding), value=cfg.eot_token)
        # Documents are numbered through all rows, so that no row attends to another.
        starts_BT = inputs_BT == cfg.eot_token
        starts_BT[:, 0] = True
        docs_S = starts_BT.flatten().cumsum(0, dtype=torch.int32)
        docs_BT = docs_S.view_as(starts_BT)
        make_mask = dense_mask
        if docs_BT.is_cuda and torch.compiler.is_compiling():
            make_mask = flex_mask
        masks = {}
        for letter, window in zip("LS", self.windows):
            if letter in cfg.attention_pattern:
                masks[letter] = make_mask(docs_BT, window)
        rotary = self.rotary[:, : inputs_BT.size(1)]
        values = {}
        for table, embedding in self.value_embeds.items():
            values[table] = embedding(inputs_BT)

        outputs = []
        pairs = len(self.skip_weights)
        x = x0 = norm(self.smear(self.embed(inputs_BT)))  # norm of embeddings: @Grad62304977
        for layer, block in enumerate(self.blocks):
            if pairs <= layer < 2 * pairs:  # U-Net: @brendanh0gan; sigmoid: @bernard24, hiverge.ai
                skip = outputs[2 * pairs - 1 - layer]
                x = x + torch.sigmoid(self.skip_weights[layer - pairs]) * skip
            mask = masks.get(block.window)
            value_embed = values.get(block.value_table)
            x = block(x, x0, value_embed, rotary, mask)
            outputs.append(x)
        # Backout: subtract what only the early layers needed: @snimu, #40
        x = x - self.backout_lambda * outputs[cfg.backout_layer]
        return norm(x[:, :length])

    def smear(self, x_BTD):
        """Add a gated share of the previous token's embedding: @classiclarryd, #34, 15 steps."""
        current = x_BTD[:, 1:]
        previous = x_BTD[:, :-1]
        channels = current[..., : self.smear_gate.in_features]
        gate = torch.sigmoid(self.smear_gate(channels))  # (B, T - 1, 1)
        smeared = current + self.smear_lambda * gate * previous
        return torch.cat([x_BTD[:, :1], smeared], dim=1)

    def logits(self, x):
        """Capped logits (…, V) in fp32: Gemma 2, @Grad62304977, @KoszarskyB, @YouJiacheng."""
        raw = self.lm_head(x).float()
        return 30 * torch.sigmoid(raw / 7.5)

    def head_loss(self, x_SD, targets_S, ids_V):
        """Cross-entropy, summed over positions.

        Logits are at most 30, so their exponentials are summed without subtracting a maximum.
        """
        logits_SV = self.logits(x_SD)
        if logits_SV.is_cuda:  # comparisons fuse into one pass over the logits, a gather does not
            is_target_SV = targets_S[:, None] == ids_V
            target_logit_S = (logits_SV * is_target_SV).sum(-1)
            losses_S = logits_SV.exp().sum(-1).log() - target_logit_S
            return (losses_S * (targets_S >= 0)).sum()
        return F.cross_entropy(logits_SV, targets_S, ignore_index=-1, reduction="sum")

    def forward(self, inputs_BT, targets_BT):
        """Summed cross-entropy of the next tokens.

        targets_BT has the token after each of inputs_BT, or -1 for none.
        """
        x_SD = self.hidden(inputs_BT).flatten(0, 1)
        targets_S = targets_BT.flatten()
        ids_V = torch.arange(len(self.lm_head.weight), device=x_SD.device)
        size = self.tokens_per_piece
        if len(x_SD) <= size:
            return self.head_loss(x_SD, targets_S, ids_V)
        # In pieces, recomputed in the backward pass: the logits are never in memory all at once.
        loss = 0
        for x, targets in zip(x_SD.split(size), targets_S.split(size)):
            loss = loss + checkpoint(self.head_loss, x, targets, ids_V, use_reentrant=False)
        return loss


# ---- Optimizers -------------------------------------------------------------
# Coefficients of X, A X and A² X in each iteration, found for a spectral norm of at most 1.02.
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonalize(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly the closest semi-orthogonal matrix to each of (B, M, N), by Newton-Schulz iteration.

    Muon: Keller Jordan et al., https://kellerjordan.github.io/posts/muon/. Coefficients: Polar
    Express, https://arxiv.org/abs/2505.16932, @varunneal. Batched: @scottjmaddox, @YouJiacheng.
    """
    is_tall = grad_MN.size(-2) > grad_MN.size(-1)
    X = grad_MN.mT if is_tall else grad_MN  # the smaller side decides the cost
    X = X.to(dtype)
    frobenius = X.norm(dim=(-2, -1), keepdim=True)  # at least the spectral norm
    X = X / (1.02 * frobenius + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A²
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X
    return X.mT if is_tall else X


def muon_update(weight, grad, mean, square, *, step_size, momentum, decay, dtype):
    """A step of NorMuon on a batch of matrices (B, M, N), in place.

    Muon's update, normalised by column: https://arxiv.org/abs/2510.05491, @li_zichong, #41.
    Weights decay only where the update shrinks them ("cautious"):
    https://arxiv.org/abs/2510.12402, @varunneal, #43, 40 steps.
    mean: of gradients. square: of a column's entries, (B, 1, N). step_size: (B, 1, 1).
    """
    mean.lerp_(grad, 1 - momentum)
    nesterov = grad.lerp(mean, momentum)
    update = orthogonalize(nesterov, dtype).type_as(weight)
    size = update.norm(dim=(-2, -1), keepdim=True)
    column_square = update.square().mean(-2, keepdim=True)
    square.lerp_(column_square, 0.05)
    update = update / square.clamp_min(1e-10).sqrt()
    update = F.normalize(update, dim=(-2, -1), eps=1e-10)
    update = update * size  # as large as before
    shrinking = torch.where(update * weight >= 0, weight, 0)
    weight.sub_(step_size * (update + decay * shrinking))


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


@dataclass
class Group:
    """A row of the table: some parameters and how they are updated."""

    name: str
    rule: type  # Adam or Muon
    params: list
    lr: float  # Adam: about a weight's change; Muon: about the spectral norm of a change
    betas: tuple = (0.65, 0.95)  # Adam: decay of its means of gradients and of their squares
    decay: float = 0.0  # Muon: of weights, in units of the rate
    factors: tuple = (1.0,)  # Muon: factors of the rate, matrices in turn


def parameter_groups(model: GPT, cfg) -> list[Group]:
    """The table of parameter groups. Each parameter of the model is in one row."""
    def ending(*names):
        return [param for name, param in model.named_parameters() if name.endswith(names)]

    embeds = list(model.value_embeds.parameters())
    attention = ending("qkv_w") + ending("attn.c_proj.weight")
    mlp = ending("c_fc", "mlp.c_proj")
    return [
        Group("attention", Muon, attention, cfg.muon_lr, decay=1.2),
        Group("mlp", Muon, mlp, cfg.muon_lr, decay=1.2, factors=(2.0, 1.0)),
        Group("gates", Muon, ending("attn_gate.weight"), cfg.muon_lr, decay=1.2),
        Group("smear gate", Muon, [model.smear_gate.weight], cfg.muon_lr, decay=1.2),
        Group("embed", Adam, [model.embed.weight], cfg.embed_lr),
        Group("head", Adam, [model.lm_head.weight], cfg.head_lr),
        Group("value embeds", Adam, embeds, cfg.embed_lr),
        Group("lambdas", Adam, ending("lambdas", "_lambda", "skip_weights"), 0.04),
    ]


class ShardedOptimizer:
    """A group's weights and gradients as two flat buffers, and this rank's part of the state.

    One reduce-scatter sums all gradients, one all-gather collects all weights. Rank r owns the
    r-th part: only it holds the state of that part and updates it, as in ZeRO,
    https://arxiv.org/abs/1910.02054. No matrix is split, so the buffers are padded.
    """

    def __init__(self, group, ranks, unit=1):
        self.group = group
        self.name = group.name
        self.ranks = ranks
        self.handle = None  # of a communication under way
        self.numel = sum(param.numel() for param in group.params)
        share = round_up(self.numel, unit * ranks.world_size) // ranks.world_size
        self.mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
        first = group.params[0].detach()
        self.weights = first.new_zeros(share * ranks.world_size)
        self.grads = torch.zeros_like(self.weights)
        start = 0
        for param in group.params:  # they become views of the buffers
            end = start + param.numel()
            weight = self.weights[start:end].view_as(param)
            param.data = weight.copy_(param.detach())
            param.grad = self.grads[start:end].view_as(param)
            start = end
        self.grad = self.grads  # this rank's part of their sum
        if ranks.world_size > 1:
            self.grad = torch.empty_like(self.grads[self.mine])
        self.lr = torch.zeros((), device=self.grads.device)  # a tensor: compiled once
        self.state = {"mean": torch.zeros_like(self.grad)}

    def tensors(self):
        return [self.weights, *self.state.values()]

    def reduce(self):
        """Begin to sum the gradients over the ranks; each receives its own part."""
        if self.ranks.world_size > 1:
            grad = self.grad.view(-1)
            self.handle = dist.reduce_scatter_tensor(grad, self.grads, async_op=True)

    def update(self, now, divisor):
        """Update this rank's part by gradients / divisor, then begin to gather all parts."""
        self.wait()
        self.grad.div_(divisor)
        self.lr.fill_(self.group.lr * now.lr_factor)
        share = self.weights[self.mine]
        self.update_share(share, now)
        if self.ranks.world_size > 1:
            self.handle = dist.all_gather_into_tensor(self.weights, share, async_op=True)

    def wait(self):
        if self.handle:
            self.handle.wait()
            self.handle = None

    def full_state(self):
        """The state of all ranks. All ranks call it."""
        full = {}
        for key, share in self.state.items():
            rows = self.ranks.all_gather(share.flatten())
            whole = rows.flatten() if share.ndim else rows[0]
            full[key] = whole.cpu()
        return full

    def load_full_state(self, full):
        """Take this rank's part of a `full_state` from any number of ranks."""
        for key, share in self.state.items():
            whole = full[key]
            if share.ndim:
                size = self.ranks.world_size * share.numel()
                whole = F.pad(whole, (0, size - len(whole)))  # cut off or added: padding
                whole = whole.view(self.ranks.world_size, -1)[self.ranks.rank]
            share.copy_(whole.view_as(share))


class Adam(ShardedOptimizer):
    """Adam on tensors of any shape, every other step: @classiclarryd, #39.

    In between, gradients add up in their buffer and nothing is communicated.
    """

    def __init__(self, group, ranks):
        super().__init__(group, ranks)
        self.state["square"] = torch.zeros_like(self.grad)
        self.state["count"] = torch.zeros_like(self.lr)
        self.rule = compile_on_gpu(adam_update, self.lr)

    def update_share(self, weight, now):
        state = self.state.values()
        self.rule(weight, self.grad, *state, lr=self.lr, betas=self.group.betas)


class Muon(ShardedOptimizer):
    """NorMuon on a batch of matrices of one shape. A parameter may hold several of them."""

    def __init__(self, group, ranks):
        shape = group.params[0].shape[-2:]
        super().__init__(group, ranks, unit=shape.numel())
        self.grad = self.grad.view(-1, *shape)
        self.state["mean"] = torch.zeros_like(self.grad)
        self.state["square"] = torch.zeros_like(self.grad[:, :1])
        self.factors = torch.zeros_like(self.grad[:, :1, :1])
        first = ranks.rank * len(self.grad)  # this rank's first matrix
        for row in range(len(self.grad)):
            self.factors[row] = group.factors[(first + row) % len(group.factors)]
        self.momentum = torch.zeros_like(self.lr)
        self.dtype = torch.bfloat16 if self.lr.is_cuda else torch.float32
        self.rule = compile_on_gpu(muon_update, self.lr)

    def update_share(self, weight, now):
        self.momentum.fill_(now.momentum)
        self.rule(
            weight.view_as(self.grad),
            self.grad,
            *self.state.values(),
            step_size=self.lr * self.factors,
            momentum=self.momentum,
            decay=self.lr * self.group.decay,
            dtype=self.dtype,
        )


def compile_on_gpu(rule: Callable, tensor: Tensor) -> Callable:
    return torch.compile(rule, dynamic=False) if tensor.is_cuda else rule


def build_optimizers(model: GPT, cfg, ranks) -> list[ShardedOptimizer]:
    """An optimizer for each row of the table that has parameters."""
    groups = parameter_groups(model, cfg)
    covered = sorted(id(param) for group in groups for param in group.params)
    assert covered == sorted(map(id, model.parameters())), "each parameter needs one row"
    return [group.rule(group, ranks) for group in groups if group.params]


def step_optimizers(optimizers: list[ShardedOptimizer], now: "Schedule", divisor: int):
    """One step of all optimizers. Each one computes while others communicate."""
    stepping = []
    for optimizer in optimizers:
        # Where Adam rests its gradients wait for the next step.
        if not (now.adam_rests and isinstance(optimizer, Adam)):
            stepping.append(optimizer)
    for optimizer in stepping:
        optimizer.reduce()
    for optimizer in stepping:
        optimizer.update(now, divisor)
    for optimizer in stepping:
        optimizer.wait()
        optimizer.grads.zero_()


# ---- Schedules --------------------------------------------------------------
LAST_STAGE = 4  # the last validation; stages 0 to 2 are the thirds, 3 is the extension


@dataclass
class Schedule:
    """What changes from step to step."""

    stage: int
    seq_len: int  # tokens of a sequence
    lr_factor: float  # of all rates
    momentum: float  # Muon's
    adam_rests: bool


def schedule(step: int, cfg) -> Schedule:
    """The schedule of a step from 0 to num_iterations. The last one only validates."""
    stage = stage_of(step, cfg)
    progress = min(0.9999, step / max(1, cfg.num_iterations - cfg.extension_steps))

    # Learning rate: linearly down to nearly 0.1 where the extension begins
    high = min(1.0, (1 - progress) / cfg.cooldown_frac)
    lr_factor = high + (1 - high) * 0.1

    # Muon's momentum: up from 0.85 in the first 300 steps, and back to it in the last steps
    steps_left = cfg.num_iterations - step
    high = min(1.0, steps_left / max(1, cfg.momentum_cooldown))
    if step < 300:
        high = step / 300
    momentum = high * cfg.muon_momentum + (1 - high) * 0.85

    return Schedule(
        stage=stage,
        seq_len=at_stage(cfg.seq_lens, stage),
        lr_factor=lr_factor,
        momentum=momentum,
        adam_rests=step % 2 == 0,
    )


def stage_of(step: int, cfg) -> int:
    if step == cfg.num_iterations:
        return LAST_STAGE
    return min(3, 3 * step // max(1, cfg.num_iterations - cfg.extension_steps))


def at_stage(values: tuple, stage: int):
    return values[min(stage, len(values) - 1)]


def yarn(stage: int, cfg, device=None) -> tuple[Tensor, float]:
    """Rotary frequencies (K / 4,) and the attention scale of a stage: @classiclarryd, #31.

    When the window grows, frequencies that made few turns in the old one slow down in proportion,
    as in YaRN, https://arxiv.org/abs/2309.00071, and the scale rises.
    """
    exponent = torch.linspace(0, 1, steps=cfg.head_dim // 4, device=device)
    frequency = (1 / cfg.rope_base) ** exponent
    scale = cfg.attention_scale
    windows = cfg.long_windows[:LAST_STAGE]  # the last validation extrapolates
    for old, new in itertools.pairwise(windows[: stage + 1]):
        turns = BLOCK * old * frequency / (2 * math.pi)
        kept = ((turns - 1) / (32 - 1)).clamp(0, 1)  # all of 32 turns and more, none of one
        frequency = frequency * (old / new + kept * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    return frequency, scale


# ---- Training ---------------------------------------------------------------
def cut_rows(tokens, documents, position: int, length: int, cfg):
    """Cut a step's sequences, (N, length + 1), from a shard. Returns them and the next position.

    Each sequence is filled with the first tokens of one document after another, and the rest of a
    cut document is skipped: @varunneal, #29, 25 steps. A position counts documents; `documents`
    has their starts in `tokens`. Returns None if the shard has too few left.
    """
    if not cfg.max_document_tokens:
        return consecutive_rows(tokens, position, length, cfg)
    ends = np.append(documents[1:], len(tokens))
    rows = []
    for _ in range(cfg.sequences_per_step):
        pieces = []
        room = length + 1
        while room:
            if position == len(documents):
                return None
            start = documents[position]
            size = min(ends[position] - start, cfg.max_document_tokens, room)
            pieces.append(tokens[start : start + size])
            room -= size
            position += 1
        rows.append(np.concatenate(pieces))
    return np.stack(rows), position


# Tile sizes of FlexAttention's backward pass for GPUs with less shared memory than an A100
SMALL_TILES = dict(BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32)


def prepare_for_cuda(model: GPT, cfg, device: torch.device) -> str:
    """Set types and kernel options for this GPU, and compile. Returns the head's type."""
    for name, module in model.named_modules():
        if re.search("embed|gate|head", name):
            module.bfloat16()
    can_fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
    model.lm_head.use_fp8 = cfg.fp8_head and can_fp8
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if shared_memory < 160 * 1024:
        for block in model.blocks:
            if block.attn:
                block.attn.kernel_options = SMALL_TILES
    model.compile(dynamic=False)
    return "fp8" if model.lm_head.use_fp8 else "bf16"


def accumulate_gradients(model: GPT, batches: list, now: Schedule) -> Tensor:
    """Add up the gradients of a step's batches. Returns the mean loss, (1,).

    The gradients are those of the sum over tokens, not of the mean.
    """
    total = 0
    tokens = 0
    for inputs, targets in batches:
        loss = model(inputs, targets)
        loss.backward()
        total = total + loss.detach()
        tokens += targets.numel()
    return total.view(1) / tokens


def train(run: "Run", cfg):
    """The training loop. It ends after the last step, or when a signal asks it to stop."""
    last = cfg.num_iterations
    stage = None
    run.clock.start()
    for step in range(run.first_step, last + 1):  # the last round only validates
        now = schedule(step, cfg)
        if now.stage != stage:
            stage = now.stage
            run.model.set_stage(stage)

        if run.validation_is_due(step):
            run.clock.stop()
            run.validate(step)
            run.clock.start()

        # If Adam rests in this step it has just stepped, so no gradients are waiting.
        complete = now.adam_rests
        if run.checkpoint_is_due(step, complete):
            run.clock.stop()
            run.save_checkpoint(step)
            run.clock.start()
        if step == last or run.is_asked_to_stop(step, complete):
            break

        batches = run.loader.next_step(now.seq_len)
        losses = accumulate_gradients(run.model, batches, now)
        run.health.check(step, losses)
        step_optimizers(run.optimizers, now, divisor=cfg.sequences_per_step)
        run.log_step(step + 1, num_targets=1)
    run.clock.stop()


# ==== Harness: below this line every record has the same bytes ===============
SCRIPT = Path(__file__).resolve()
ROOT = SCRIPT.parents[2] if SCRIPT.parents[1].name == "records" else SCRIPT.parent


class UserError(Exception):
    """An error that a user can mend. It ends the run in one line, with exit code 2."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# ---- Data -------------------------------------------------------------------
# A shard is a header of 256 little-endian int32 (magic, version, number of tokens), then the
# tokens as uint16.
HEADER_BYTES = 1024
MAGIC = 20240520  # of llm.c's shards
VERSION = 1  # of their format


def find_shards(pattern: str) -> list[Path]:
    """Files that match the glob, in the current folder or else in the repository, sorted.

    Raises UserError.
    """
    files = glob.glob(pattern) or glob.glob(str(ROOT / pattern))
    if not files:
        maker = next((x for x in ("pocket", "fineweb") if x in pattern), "text")
        raise UserError(f"no file matches {pattern!r}; make the data with: python data/{maker}.py")
    return [Path(file) for file in sorted(files)]


def shard_size(path: Path) -> int:
    """Number of tokens in a shard. Raises UserError where header and file size disagree."""
    bytes_after_header = path.stat().st_size - HEADER_BYTES
    header = np.fromfile(path, "<i4", 3).tolist()
    # This also finds a download that was cut short.
    if header != [MAGIC, VERSION, bytes_after_header / 2]:
        raise UserError(f"{path}: no whole shard of version {VERSION}; make or fetch it again")
    return header[2]


def read_shard(path: Path, vocab_size: int) -> np.ndarray:
    """The shard's tokens, uint16. Raises UserError where one is not in the vocabulary."""
    tokens = np.fromfile(path, "<u2", shard_size(path), offset=HEADER_BYTES)
    largest = tokens.max(initial=0)
    if largest >= vocab_size:
        raise UserError(f"{path}: has token {largest}; raise --vocab_size {vocab_size} "
                        "or name other data")
    return tokens


def consecutive_rows(tokens, position: int, length: int, cfg):
    """Sequences in order or, with a stride, spread over the shard; as `cut_rows` returns them.

    The k-th sequence taken is number k · stride modulo N of the shard's N. The stride is made
    coprime to N, so each is taken once.
    """
    step_tokens = cfg.sequences_per_step * length
    # Only whole steps count. Each sequence needs one more token, its last target.
    N = (len(tokens) - 1) // step_tokens * cfg.sequences_per_step
    first = round_up(position, length) // length
    last = first + cfg.sequences_per_step
    if last > N:
        return None
    stride = cfg.sequence_stride
    while math.gcd(stride, N) > 1:
        stride += 1
    rows = []
    for k in range(first, last):
        start = k * stride % N * length
        rows.append(tokens[start : start + length + 1])
    return np.stack(rows), last * length


class TokenLoader:
    """Gives rank r the r-th part of each step's sequences.

    A step is cut from one shard. Tokens at its end that do not fill a step are skipped. A thread
    reads the next shard ahead.
    """

    def __init__(self, cfg, ranks, shard=0, position=0):
        self.cfg = cfg
        self.ranks = ranks
        if cfg.sequences_per_step % ranks.world_size:
            raise UserError(f"--sequences_per_step {cfg.sequences_per_step}: "
                            f"the {ranks.world_size} ranks must divide it")
        sequences = cfg.sequences_per_step // ranks.world_size  # of this rank
        # All forward passes of a step have as many.
        self.per_forward = math.gcd(sequences, cfg.sequences_per_forward)
        self.files = find_shards(cfg.train_files)  # in the order of reading
        needed = cfg.sequences_per_step * max(cfg.seq_lens)  # a step is cut from one shard
        digest = hashlib.sha256()  # of each shard's name, size and first MiB
        for path in self.files:
            size = shard_size(path)
            if size <= needed:
                raise UserError(f"{path}: {size} tokens, a step takes {needed} and one more; "
                                "lower --seq_lens")
            digest.update(f"{path.name} {size}".encode())
            digest.update(np.fromfile(path, "u1", 2**20))
        self.digest = digest.hexdigest()[:16]  # tells other training data apart
        self.reader = ThreadPoolExecutor(1)  # reads ahead while the model trains
        self.ahead = self.reader.submit(self.read, shard)  # a future
        self.begin_shard(shard, position)

    def read(self, shard):
        """A shard's tokens and where its documents begin. Shards are counted through all epochs."""
        path = self.files[shard % len(self.files)]
        tokens = read_shard(path, self.cfg.vocab_size)
        return tokens, np.flatnonzero(tokens == self.cfg.eot_token)

    def begin_shard(self, shard, position=0):
        """Take the shard that was read ahead, and begin to read the next one."""
        self.place = (shard, position)  # the same on any number of ranks
        self.tokens, self.documents = self.ahead.result()
        if len(self.files) > 1:  # else the next one is this one
            self.ahead = self.reader.submit(self.read, shard + 1)

    def next_step(self, length):
        """This rank's inputs and targets for each forward pass. Raises UserError without data."""
        for _ in range(len(self.files) + 1):  # the rest of this shard, then each shard once
            shard, position = self.place
            step = cut_rows(self.tokens, self.documents, position, length, self.cfg)
            if step:
                rows, position = step
                self.place = (shard, position)
                # All ranks cut the same rows. Each takes its part.
                parts = rows.reshape(self.ranks.world_size, -1, self.per_forward, length + 1)
                return [to_batch(part, self.ranks.device) for part in parts[self.ranks.rank]]
            self.begin_shard(shard + 1)  # after the last one the first again
        raise UserError(f"--train_files {self.cfg.train_files}: no shard has documents for a step; "
                        "lower --seq_lens or --sequences_per_step")


def to_batch(tokens: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs (int32) and targets (int64), both (B, T), of tokens (B, T + 1), on the device."""
    tokens = torch.from_numpy(tokens.astype(np.int64))
    if device.type == "cuda":
        tokens = tokens.pin_memory()  # the host need not wait for the copy
    tokens = tokens.to(device, non_blocking=True)
    return tokens[:, :-1].int(), tokens[:, 1:].contiguous()


# ---- Validation -------------------------------------------------------------
def read_val_tokens(cfg) -> np.ndarray:
    """The first val_tokens + 1 validation tokens, uint16. Raises UserError."""
    shards = [read_shard(path, cfg.vocab_size) for path in find_shards(cfg.val_files)]
    tokens = np.concatenate(shards)
    if len(tokens) <= cfg.val_tokens:
        raise UserError(f"--val_tokens {cfg.val_tokens}: lower it below the {len(tokens)} tokens "
                        f"of {cfg.val_files}")
    return tokens[: cfg.val_tokens + 1]


@torch.no_grad()
def validate(model: nn.Module, tokens: np.ndarray, cfg, ranks) -> float:
    """Mean loss over the validation tokens. Ranks share the sequences."""
    model.eval()  # no FP8
    total = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    count = len(tokens) - 1  # the first token has no prediction
    length = cfg.val_seq_len
    # As many sequences at once as a training pass has tokens for, at least one
    fitting = min(cfg.sequences_per_forward * max(cfg.seq_lens), count) // length
    size = length * max(1, fitting)  # tokens of a forward pass
    tokens = np.pad(tokens, (0, size))  # for the last pass
    for start in range(ranks.rank * size, count, ranks.world_size * size):
        part = tokens[start : start + size + 1]
        # (sequences, length + 1): the last token of a row is the first of the next row.
        rows = np.lib.stride_tricks.sliding_window_view(part, length + 1)[::length]
        inputs, targets = to_batch(rows, ranks.device)
        targets.view(-1)[count - start :] = -1  # padding is not counted
        total += model(inputs, targets)
    model.train()
    return ranks.all_gather(total).sum().item() / count


# ---- Checkpoints ------------------------------------------------------------
# Settings that a resumed run may change. All others must be those of its checkpoint.
MAY_CHANGE = """num_iterations train_files val_files val_tokens val_every sequences_per_forward
    target_loss device run_id warmup_steps head_chunks save_every resume""".split()
NEW_RUN = dict(step=0, loader=(0, 0), train_time_ms=0.0)


def write_checkpoint(path: Path, state: dict, keep: int):
    """Write the state, whole or not at all, and keep the newest files. Raises UserError."""
    temporary = path.with_suffix(".tmp")  # no checkpoint yet
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
    saved = sorted(path.parent.glob("step-*.pt"), key=os.path.getmtime)
    for old in saved[:-keep]:
        old.unlink()


def load_checkpoint(path: Path) -> dict:
    """The state at `path`. Raises UserError where a checksum or a value is wrong."""
    try:
        with zipfile.ZipFile(path) as file:  # as torch.save writes it, with checksums
            assert file.testzip() is None, "damaged"
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        check_hyperparameters(Hyperparameters(**state["hyperparameters"]))
        # Missing parts and wrong types raise here.
        shard, position = state["loader"]
        for count in (state["step"], state["threads"] - 1, shard, position):
            assert type(count) is int and count >= 0, "a count is wrong"
        assert 0 <= state["train_time_ms"] < math.inf, "the time is wrong"
        # A run resumed from NaN would fail at the same step for ever.
        for tensors in (state["model"], *state["optimizers"].values()):
            for name, tensor in tensors.items():
                assert torch.isfinite(tensor).all(), f"{name} is not finite"
    # zipfile and torch raise nearly any exception for a damaged file.
    except Exception as error:
        cause = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: no whole checkpoint ({cause}); name another") from None
    return state


def newest_checkpoint(folder: Path, log: Callable) -> Path | None:
    """The newest whole checkpoint of a run."""
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            load_checkpoint(path)
            return path
        except UserError as error:
            log(f"skipped {error}")
    log(f"no checkpoint in {folder}: starting afresh")


def check_same_run(state: dict, cfg, data: str):
    """Raise UserError where `cfg` or the training data, if any, are not the checkpoint's."""
    differing = []  # all are told at once
    for name, theirs in state["hyperparameters"].items():
        ours = getattr(cfg, name)
        if ours != theirs and name not in MAY_CHANGE:
            differing.append(f"{name} {theirs!r}, now {ours!r}")
    if state["step"] > cfg.num_iterations:
        differing.append(f"num_iterations, its step is {state['step']}")
    # A finished run is evaluated without training data.
    if data and state["data"] != data:
        differing.append("the training data")
    if differing:
        raise UserError(f"{cfg.resume}: of another run; what differs: {'; '.join(differing)}")


# ---- Ranks and log ----------------------------------------------------------
class Ranks:
    """This process's rank and device, and what ranks exchange. Raises UserError."""

    def __init__(self, cfg):
        # torchrun sets these. Without it there is one process.
        self.world_size = environment_int("WORLD_SIZE", 1, 2**16)
        self.rank = environment_int("RANK", 0, self.world_size - 1)
        # The rank among those of this machine
        local_rank = environment_int("LOCAL_RANK", 0, self.world_size - 1)
        gpus = 0 if cfg.device == "cpu" else torch.cuda.device_count()
        if local_rank >= gpus > 0 or (cfg.device == "cuda" and not gpus):
            raise UserError(f"--device {cfg.device}: no GPU {local_rank}; use --device cpu")
        self.device = torch.device("cpu")  # where there is no GPU, or none is wanted
        if gpus:
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)  # "cuda" now means this one
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise UserError(f"--device {cfg.device}: this GPU has no bf16; use --device cpu")
        if self.world_size > 1:
            self.meet("cpu:gloo,cuda:nccl" if gpus else "gloo")  # gloo for objects of the host

    def meet(self, backend):
        # torch 2.13 has new names for the collectives; 2.11 has the old ones alone.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        try:
            store = next(dist.rendezvous("env://"))[0]
        except ValueError as error:
            raise UserError(f"WORLD_SIZE={self.world_size}: {error}; start by torchrun") from None
        # After a restart by torchrun the store still holds the addresses of dead ranks, so each
        # attempt has its own prefix.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(attempt, store)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size)

    def all_gather(self, x):
        """(N,) of every rank, as (ranks, N)."""
        rows = x.repeat(self.world_size, 1)
        if self.world_size > 1:
            dist.all_gather_into_tensor(rows.view(-1), x)
        return rows

    def from_rank_0(self, value):
        """Rank 0's value, on all ranks."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait_for_device(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def environment_int(name: str, default: int, most: int) -> int:
    """A variable of torchrun's, from the default to `most`. Raises UserError."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or not default <= int(text) <= most:
        raise UserError(f"{name}={text}: must be from {default} to {most}; start by torchrun")
    return int(text)


def choose_threads() -> int:
    """As many threads as cores are idle. A thread that waits for a core holds up all others."""
    most = torch.get_num_threads()  # OMP_NUM_THREADS, or the number of cores
    if "OMP_NUM_THREADS" in os.environ or not Path("/proc/stat").exists():
        return most
    before = idle_seconds()
    time.sleep(0.2)  # Linux counts in hundredths of a second
    idle = (idle_seconds() - before) / 0.2
    return min(most, max(1, round(idle)))


def idle_seconds() -> float:
    """Idle time of all cores since Linux started, summed."""
    total = Path("/proc/stat").read_text().split()
    return int(total[4]) / os.sysconf("SC_CLK_TCK")  # after the label: user, nice, system, idle


def device_facts(device: torch.device) -> tuple[str, int]:
    """Name of the GPU or CPU, and peak memory of the GPU or this process in MiB."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        return torch.cuda.get_device_name(device), peak // 2**20
    name = os.uname().machine
    info = Path("/proc/cpuinfo")
    known = info.exists() and re.search(r"model name\s*: (.*)", info.read_text())
    if known:
        name = known[1]
    unit = 2**20 if sys.platform == "darwin" else 2**10  # macOS counts bytes, Linux KiB
    return f"cpu ({name})", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


class Log:
    """Rank 0's log file and console. The other ranks write nothing.

    A resumed run adds to its log. For any other run a log of the same name is a UserError.
    """

    def __init__(self, cfg, ranks):
        self.run_id = cfg.run_id
        if not cfg.run_id:
            self.run_id = time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
        self.folder = Path("logs") / self.run_id  # in the current folder
        self.path = self.folder / "log.txt"
        self.enabled = ranks.rank == 0  # to write and to print
        self.file = None
        # A full disk leaves an empty one.
        self.is_new = not (self.path.exists() and self.path.stat().st_size)
        if self.enabled and not (self.is_new or cfg.resume):
            raise UserError(f"--run_id {cfg.run_id}: {self.path} is there already; go on with "
                            "its run by --resume auto, or name another --run_id")

    def open(self, header):
        """Open the log. A new one begins with the header."""
        if self.enabled:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a", buffering=1, errors="replace")  # line by line
            if self.is_new:
                self.file.write(header)

    def __call__(self, text, console=True):
        if self.file:
            self.file.write(text + "\n")
        if self.enabled and console:
            print(text, flush=True)

    def step(self, step, last, ms, **losses):
        """A step's line. The console shows every tenth of the run."""
        text = f"step:{step}/{last}"
        for name, loss in losses.items():
            text += f" {name}:{loss:.4f}"
        text += f" train_time:{ms:.0f}ms step_avg:{ms / max(1, step):.2f}ms"
        is_tenth = step * 10 // last > (step - 1) * 10 // last
        self(text, console=is_tenth or "val_loss" in losses)


class Clock:
    """Milliseconds of training: the time between each start and the next stop."""

    def __init__(self, ranks, ms):
        self.ranks = ranks
        self.ms = ms  # up to the last stop
        self.started = None  # in seconds; None while stopped

    def start(self):
        self.started = time.perf_counter()

    def stop(self):
        """Stop once the device has finished its work."""
        self.ranks.wait_for_device()
        self.ms = self.read()
        self.started = None

    def read(self):
        if self.started is None:
            return self.ms
        return self.ms + 1000 * (time.perf_counter() - self.started)


class Health:
    """Ranks exchange their losses at every step, and whether a signal asks the run to stop.

    On CUDA this is read one step late, so that the host never waits for the current step.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # SIGHUP: a connection was closed

    def __init__(self, ranks):
        self.ranks = ranks
        self.news = []  # not read yet: step, rows of all ranks, CUDA event
        self.signal = 0  # received by this rank
        self.stopping = 0  # received by any rank
        self.losses = []  # of the step read last
        for number in self.SIGNALS:
            # Under nohup SIGHUP stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)

    def on_signal(self, number, frame):
        self.signal = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)  # a second signal ends the process at once

    def check(self, step, losses):
        """Exchange the losses of a step before its update. Raises UserError, as `read`."""
        news = torch.cat([losses.float(), torch.full_like(losses[:1], self.signal)])
        rows = self.ranks.all_gather(news).to("cpu", non_blocking=True)
        event = None
        if news.is_cuda:
            event = torch.cuda.Event()  # marks the end of the copy above
            event.record()
        self.news.append((step, rows, event))
        self.read(late=int(news.is_cuda))

    def read(self, late=0):
        """Read all news but the last `late`. Raises UserError where a loss is not finite."""
        while len(self.news) > late:
            step, rows, event = self.news.pop(0)
            if event:
                event.synchronize()
            for rank, loss in enumerate(rows[:, 0].tolist()):
                if not math.isfinite(loss):
                    raise UserError(f"step {step}: the loss is {loss} on rank {rank}; "
                                    "lower the learning rates")
            *self.losses, _ = rows.mean(0).tolist()  # all ranks have as many tokens
            self.stopping = int(rows[:, -1].max())


# ---- The run ----------------------------------------------------------------
def build(cfg, ranks):
    """Model and optimizers of a new run. Raises UserError where --init does not fit."""
    with torch.device(ranks.device):
        model = GPT(cfg)
        model.init_weights(torch.Generator(ranks.device).manual_seed(cfg.seed))
    if cfg.init and not cfg.resume:
        load_state(model, [], load_checkpoint(Path(cfg.init)), cfg.init)
    model.head_type = "fp32"
    chunks = 1
    if ranks.device.type == "cuda":
        model.head_type = prepare_for_cuda(model, cfg, ranks.device)
        # 80 GB hold all logits and their gradient. Smaller cards compute the head in pieces.
        memory = torch.cuda.get_device_properties(ranks.device).total_memory
        chunks = math.ceil(70e9 / memory)
    model.head_chunks = cfg.head_chunks or chunks
    tokens = math.ceil(model.tokens_per_piece / model.head_chunks)
    model.tokens_per_piece = round_up(tokens, 128)
    return model, build_optimizers(model, cfg, ranks)


def load_state(model, optimizers, state, path):
    """Load weights and optimizer state. Raises UserError, which names what does not fit."""
    part = "weights"
    try:
        model.load_state_dict(state["model"])
        for optimizer in optimizers:
            part = f"optimizer of {optimizer.name}"
            optimizer.load_full_state(state["optimizers"][optimizer.name])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{path}: {part}: {error}; name another checkpoint") from None


class Run:
    """All that the training loop works with."""

    def __init__(self, cfg, ranks, log, state):
        self.cfg = cfg
        self.ranks = ranks
        self.log = log
        self.last = cfg.num_iterations  # this step only validates
        self.first_step = state["step"]
        self.saved_step = self.first_step  # of the newest checkpoint
        self.exit_code = 0
        self.val_loss = math.nan
        # The data are checked before the model is built.
        self.val_tokens = read_val_tokens(cfg)
        self.loader = None  # evaluation needs no training data
        self.data = ""  # digest of the training data
        if self.first_step < self.last:
            self.loader = TokenLoader(cfg, ranks, *state["loader"])
            self.data = self.loader.digest
        if cfg.resume:
            check_same_run(state, cfg, self.data)
        self.model, self.optimizers = build(cfg, ranks)
        self.health = Health(ranks)  # catches signals from here on
        self.clock = Clock(ranks, state["train_time_ms"])
        self.facts = dict(
            device=device_facts(ranks.device)[0],
            torch=torch.__version__,
            seed=cfg.seed,
            world_size=ranks.world_size,
            threads=torch.get_num_threads(),
            parameters=sum(optimizer.numel for optimizer in self.optimizers),
        )
        self.write_header()
        if self.loader:
            self.warm_up()
        if cfg.resume:
            load_state(self.model, self.optimizers, state, cfg.resume)
            log(f"resumed at step:{self.first_step} from {cfg.resume}")

    def write_header(self):
        """Begin the log with the script and all settings."""
        val_digest = hashlib.sha256(self.val_tokens.astype("<u2")).hexdigest()[:16]
        values = asdict(self.cfg) | self.facts | dict(
            run_id=self.log.run_id,
            python=sys.version.split()[0],
            head=self.model.head_type,
            head_chunks=self.model.head_chunks,
            train_digest=self.data,
            val_digest=val_digest,
        )
        lines = [f"{key}: {show(value)}" for key, value in values.items()]
        rule = "=" * 100  # the end of the source
        self.log.open("\n".join([SCRIPT.read_text(), rule, *lines, rule, ""]))
        # The first line of the console
        summary = ("{device}, {threads} thread(s), {world_size} rank(s), "
                   "{parameters:,} parameters, {head} head in {head_chunks} piece(s), "
                   "logs/{run_id}")
        self.log(summary.format(**values))

    def warm_up(self):
        """Run every kernel on blank tokens, then restore weights and optimizer state."""
        if self.ranks.device.type == "cuda":
            self.log("warming up; a GPU compiles for 1 to 3 minutes the first time ...")
        tensors = []
        for optimizer in self.optimizers:
            tensors += optimizer.tensors()
        # On the host: a GPU may have no room for a copy.
        before = [tensor.to("cpu", copy=True) for tensor in tensors]
        runs = {}  # steps run in each stage, as shapes differ between stages
        for step in range(self.last):
            now = schedule(step, self.cfg)
            runs[now.stage] = runs.get(now.stage, 0) + 1
            if runs[now.stage] <= self.cfg.warmup_steps:
                tokens = np.zeros((self.loader.per_forward, now.seq_len + 1), int)
                batch = to_batch(tokens, self.ranks.device)
                accumulate_gradients(self.model, [batch], now)
                step_optimizers(self.optimizers, now, tokens.size)
        # A validation sequence for each rank
        tokens = np.zeros(self.ranks.world_size * self.cfg.val_seq_len + 1, int)
        validate(self.model, tokens, self.cfg, self.ranks)
        for tensor, value in zip(tensors, before):
            tensor.copy_(value)  # in place, since kernels and views keep their addresses
        for optimizer in self.optimizers:
            optimizer.grads.zero_()

    def validation_is_due(self, step):
        every = self.cfg.val_every  # 0: only the last step
        return step == self.last or (every > 0 and step % every == 0)

    def validate(self, step):
        """Validate and log. Raises UserError, as `check_weights`."""
        self.check_weights(step)
        self.val_loss = validate(self.model, self.val_tokens, self.cfg, self.ranks)
        if not math.isfinite(self.val_loss):
            raise UserError(f"step {step}: the validation loss is {self.val_loss}")
        self.log.step(step, self.last, self.clock.read(), val_loss=self.val_loss)

    def check_weights(self, step):
        """Raise UserError where weights or state are not finite, or ranks' weights differ."""
        self.health.read()  # all that a GPU has still to tell
        for optimizer in self.optimizers:
            finite = [torch.isfinite(tensor).all() for tensor in optimizer.tensors()]
            checksum = optimizer.weights.view(torch.uint8).sum()  # of their bits
            rows = self.ranks.all_gather(torch.stack([*finite, checksum]))
            name = optimizer.name
            if not rows[:, :-1].all():
                raise UserError(f"step {step}: {name}: a weight or a state is not finite; "
                                "lower the learning rates")
            if len(rows[:, -1].unique()) > 1:
                raise UserError(f"step {step}: {name}: the ranks' weights have drifted apart")

    def checkpoint_is_due(self, step, complete):
        """Whether to save now. `complete`: no gradients are waiting for the next step."""
        every = self.cfg.save_every  # 0: never
        # The step a run was resumed from is saved already.
        if not every or step == self.first_step:
            return False
        passed = step // every > self.saved_step // every  # a multiple of it since the last one
        return step == self.last or (complete and (passed or self.health.stopping > 0))

    def save_checkpoint(self, step):
        """Save all that a resumed run needs to be equal to the bit. Raises UserError."""
        self.check_weights(step)
        self.saved_step = step
        state = dict(
            step=step,
            hyperparameters=asdict(self.cfg),
            data=self.data,
            loader=self.loader.place,
            threads=torch.get_num_threads(),
            train_time_ms=self.clock.read(),
            model=self.model.state_dict(),
            optimizers={each.name: each.full_state() for each in self.optimizers},
        )
        # Leading zeros let names sort by step.
        path = self.log.folder / f"step-{step:06d}.pt"
        # Two are kept in case the newest is damaged, and the final one beside them.
        if self.ranks.rank == 0:
            write_checkpoint(path, state, keep=2 + (step == self.last))

    def is_asked_to_stop(self, step, complete):
        """Whether a signal asks to stop and nothing is left to save."""
        stopping = self.health.stopping
        if not stopping or (self.cfg.save_every and not complete):
            return False
        advice = "nothing is saved, as --save_every is 0"
        if self.cfg.save_every:
            advice = f"to go on: --run_id {self.log.run_id} --resume auto"
        self.log(f"stopped at step:{step} by {signal.Signals(stopping).name}; {advice}")
        self.exit_code = 128 + stopping  # as shells report a signal
        return True

    def log_step(self, step, num_targets):
        """Log the loss that is minimised and, if it has more targets, the next token's."""
        names = ("train_loss", "next_token_loss")[:num_targets]
        losses = dict(zip(names, self.health.losses))
        self.log.step(step, self.last, self.clock.read(), **losses)

    def finish(self):
        """Log the results. Returns the exit code."""
        if self.exit_code:
            return self.exit_code
        tokens = 0  # trained on
        for step in range(self.last):
            tokens += self.cfg.sequences_per_step * schedule(step, self.cfg).seq_len
        results = dict(
            val_loss=f"{self.val_loss:.6f}",
            train_time_ms=f"{self.clock.ms:.0f}",
            steps=self.last,
            tokens=tokens,
            tokens_per_second=f"{1000 * tokens / self.clock.ms:.0f}",
            peak_memory_mib=device_facts(self.ranks.device)[1],  # of rank 0
            **self.facts,
        )
        self.log("---")  # programs read what follows
        for key, value in results.items():
            self.log(f"{key}: {value}")
        return 0


# ---- Command line -----------------------------------------------------------
def show(value) -> str:
    """A value in the form that its flag takes."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_value(text: str, default):
    """A flag's text as a value of the default's type. Raises ValueError."""
    if isinstance(default, bool):
        return ["false", "true"].index(text.lower()) == 1
    if isinstance(default, tuple):
        return tuple(type(default[0])(entry) for entry in text.split(","))
    return type(default)(text)


def print_help():
    """The docstring and the table of hyperparameters, as they stand above."""
    def columns(row):
        name, values, meaning = row.groups()
        return f"  --{name:21} {values:29}{meaning}"

    table = inspect.getsource(Hyperparameters).partition("class Hyperparameters:\n")[2]
    print(__doc__)
    print(re.sub(r"    (\w+): \w+ = (.*?)(  #.*|)$", columns, table.replace('"""', ""), flags=re.M))


def parse_args(argv: list[str] | None, saved: dict | None = None) -> Hyperparameters:
    """Hyperparameters: the flags given, then the preset or a checkpoint's saved values."""
    def error(message):
        raise UserError(f"{message}; --help lists the flags")

    # argparse separates flags and values. The table has their types.
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = error  # one line, as all errors
    parser.add_argument("-h", "--help", action="store_true")
    table = {each.name: each for each in fields(Hyperparameters)}
    for name in table:
        parser.add_argument(f"--{name}")
    given = vars(parser.parse_args(argv))
    if "help" in given:
        print_help()
        sys.exit()
    # Values come from the preset or the checkpoint, then from the flags.
    preset = given.get("preset", "record")
    if preset not in ("record", "pocket"):
        error(f"--preset {preset}: must be record or pocket")
    values = {}  # the record's are the defaults
    if preset == "pocket":
        values = {name: each.metadata["pocket"] for name, each in table.items()}
    if saved and "preset" not in given:
        values = saved | dict(device="auto", run_id="", resume="")
    for name, text in given.items():
        try:
            values[name] = parse_value(text, table[name].default)
        except ValueError:
            error(f"--{name} {text}: must be like {show(table[name].default)}")
    cfg = Hyperparameters(**values)
    checked = cfg
    if cfg.resume and not saved:  # the rest is checked with the values of the checkpoint
        checked = Hyperparameters(device=cfg.device, run_id=cfg.run_id, resume=cfg.resume)
    check_hyperparameters(checked)
    return cfg


def check_hyperparameters(cfg):
    """Raise UserError for a value that no run can have. It tells flag, value and rule."""
    def require(holds, name, rule):
        if not holds:
            raise UserError(f"--{name} {show(getattr(cfg, name))}: must {rule}")

    # All other whole numbers are at least 1.
    may_be_zero = """seed val_every warmup_steps head_chunks save_every max_document_tokens
        extension_steps freeze_steps momentum_cooldown skip_layer backout_layer eot_token""".split()
    # No number is negative, infinite or too large for any machine.
    for each in fields(cfg):
        value = getattr(cfg, each.name)
        least = int(each.name not in may_be_zero)
        most = 2**20 if each.type is tuple else 2**31 - 1  # tuples: lengths and windows
        for entry in value if each.type is tuple else (value,):
            if isinstance(entry, float):
                require(0 <= entry <= 1000, each.name, "be from 0 to 1000")
            elif each.type in (int, tuple):
                require(least <= entry <= most, each.name, f"be from {least} to {most}")
    # Attention goes by blocks of 128 tokens.
    for length in cfg.seq_lens:
        require(length % 128 == 0, "seq_lens", "be multiples of 128")
    require(cfg.val_seq_len % 128 == 0, "val_seq_len", "be a multiple of 128")
    require(cfg.val_seq_len <= max(128, cfg.val_tokens), "val_seq_len", "not exceed val_tokens")
    require(cfg.model_dim <= 2**13, "model_dim", "be at most 8192")
    require(cfg.eot_token < cfg.vocab_size <= 2**16, "vocab_size", "exceed eot_token, up to 65536")
    require(cfg.muon_momentum < 1, "muon_momentum", "be below 1")
    folder = re.fullmatch(r"([\w+-][\w.+-]*)?", cfg.run_id)
    require(folder, "run_id", "be of letters, digits, _ . + -, and not begin with .")
    require(cfg.device in ("auto", "cuda", "cpu"), "device", "be auto, cuda or cpu")
    require(cfg.resume != "auto" or cfg.run_id, "resume", "come with the --run_id of a run")
    check_model(cfg, require)


def run_script(argv: list[str] | None) -> int:
    """Train or resume by the flags. Returns the exit code. Raises UserError."""
    cfg = parse_args(argv)
    ranks = Ranks(cfg)
    log = Log(cfg, ranks)
    threads = choose_threads()
    state = NEW_RUN
    if cfg.resume:
        path = cfg.resume
        if path == "auto":  # rank 0 decides
            path = ranks.from_rank_0(newest_checkpoint(log.folder, log))
        if path:
            state = load_checkpoint(Path(path))
            cfg = parse_args(argv, state["hyperparameters"])
            if "OMP_NUM_THREADS" not in os.environ:  # so that the run goes on to the bit
                threads = state["threads"]
        cfg = replace(cfg, resume=str(path or ""))
        check_hyperparameters(cfg)
    # MKL chooses threads for each product until a number is set: 4 % of the pocket's time.
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    # A finished record can be evaluated without a GPU.
    to_train = state["step"] < cfg.num_iterations
    if to_train and cfg.preset == "record" and ranks.device.type != "cuda":
        raise UserError("--preset record: there is no CUDA device; use --preset pocket")
    run = Run(cfg, ranks, log, state)
    train(run, cfg)
    return run.finish()


def main(argv: list[str] | None = None) -> int:
    """Run the script and return its exit code: 2 after an error that a user can mend."""
    # Compiled kernels survive a reboot here. torch reads both variables at first use.
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(cache, "train_gpt")))
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    libc = ctypes.CDLL(None)
    # glibc keeps freed memory. Asking for new pages costs 8 % of the pocket's time.
    if hasattr(libc, "mallopt"):
        M_TRIM_THRESHOLD = -1
        M_MMAP_MAX = -4
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_MMAP_MAX, 0)
    try:
        return run_script(argv)
    except (UserError, OSError) as error:
        message = str(error)  # names the file or flag
    except (MemoryError, RuntimeError) as error:
        message = str(error).partition("\n")[0]  # torch has no classes for some of these
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate" in message:
            message = "out of memory; raise --head_chunks, or lower --sequences_per_forward"
        # That rank has said why.
        elif isinstance(error, dist.DistError) or "gloo" in message.lower():
            message = f"another rank is gone: {message}"
        else:
            raise
    # One rank of each machine is enough.
    if os.environ.get("LOCAL_RANK", "0") == "0" or "WORLD_SIZE" not in os.environ:
        print(f"{SCRIPT.name}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
