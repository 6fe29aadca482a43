#!/usr/bin/env python3
"""Train a GPT of GPT-2 small's class to 3.28 validation loss on FineWeb, as fast as 8 H100s allow.

    torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=8 train_gpt.py
    python train_gpt.py
    python train_gpt.py --preset pocket

Record: 2024-06-06_AdamW
Parent: none. It is a GPT-2 with rotary embedding, without biases, trained by AdamW alone.

The record comes first: hyperparameters, schedules, model, optimizers, training loop. The harness
below the banner reads data, validates, saves and logs. It is the same in every record.

Technique                                         where it is
rotary embedding                                  GPT.set_rotary, rotate
AdamW                                             adam_update
rates                                             schedule
"""

from pathlib import Path

SCRIPT = Path(__file__).resolve()
SOURCE = SCRIPT.read_bytes()  # of what runs: the file may be edited while torch is imported

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


# ---- Hyperparameters --------------------------------------------------------
@dataclass(frozen=True)
class Hyperparameters:
    """The settings of a run, with the values of the preset record.

    Each is also a command-line flag.
    """

    preset: str = "record"  # name of the defaults that the other flags change
    # Model
    vocab_size: int = 50257  # token ids are smaller
    vocab_multiple: int = 1  # embeddings and head are padded to a multiple of it
    eot_token: int = 50256  # end-of-text, the token that opens each document
    model_dim: int = 768  # width of the residual stream
    head_dim: int = 64  # width of an attention head
    num_layers: int = 12  # of attention and an MLP each
    rope_base: int = 10000  # inverse of the lowest rotary frequency
    seed: int = 0  # seed of the initial weights
    # Optimizers
    adam_lr: float = 0.0018  # Adam's rate
    weight_decay: float = 0.1  # of all weights in a step, in units of the rate
    # Schedules
    num_iterations: int = 9536  # optimizer steps
    seq_len: int = 1024  # tokens of a training sequence
    warmup_iters: int = 250  # first steps, in which rates rise
    cooldown_frac: float = 2000 / 9536  # last share of the run, in which rates fall
    # Data and validation
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob of the training shards
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # glob of the validation shards
    repeat_data: bool = False  # allow the preset record to read its data again
    sequences_per_step: int = 512  # sequences of a step, all ranks together
    sequences_per_forward: int = 64  # sequences that a rank runs at once, at most
    shorten: int = 1  # sequences are so many times shorter, and as many more in a step
    val_seq_len: int = 1024  # tokens of a validation sequence
    val_tokens: int = 10_485_760  # validation tokens, each counted once
    val_every: int = 128  # steps between validations; 0: only the last
    target_loss: float = 3.28  # validation loss to reach, nats per token
    # Run
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is one
    run_id: str = ""  # name of the folder under logs/; empty: made from the time
    warmup_steps: int = 10  # untimed steps per stage that warm up the kernels
    head_chunks: int = 0  # chunks in which the head is computed; 0: by the card's memory
    save_every: int = 0  # steps between checkpoints; 0: none
    resume: str = ""  # checkpoint to resume; auto: the newest of --run_id
    init: str = ""  # checkpoint whose weights a new run starts from


# The preset pocket: what differs, for a small model of bytes that a CPU trains
POCKET = dict(
    preset="pocket",
    vocab_size=257,
    eot_token=256,
    model_dim=64,
    head_dim=16,
    num_layers=4,
    rope_base=32,
    adam_lr=0.007,
    num_iterations=120,
    seq_len=256,
    warmup_iters=10,
    train_files="data/pocket/pocket_train_*.bin",
    val_files="data/pocket/pocket_val_*.bin",
    sequences_per_step=8,
    sequences_per_forward=8,
    val_seq_len=256,
    val_tokens=65_536,
    val_every=0,
    target_loss=1.78,
    warmup_steps=1,
)


def check(cfg, require):
    """The rules of this record. `require` raises UserError, "--name must rule", where one fails."""
    require(cfg.head_dim > 0 and cfg.head_dim % 2 == 0, "head_dim", "be a multiple of 2")
    require(cfg.model_dim % cfg.head_dim == 0, "model_dim", "be a multiple of head_dim")
    require(cfg.model_dim > 0, "model_dim", "be above 0")
    require(cfg.num_layers > 0, "num_layers", "be above 0")
    require(cfg.rope_base > 0, "rope_base", "be above 0")
    require(cfg.seq_len > 0, "seq_len", "be above 0")
    require(cfg.seq_len % cfg.shorten == 0, "shorten", "divide seq_len")
    require(0 < cfg.cooldown_frac <= 1, "cooldown_frac", "be above 0, at most 1")


def shorten(cfg) -> Hyperparameters:
    """The settings that --shorten makes, for cards with less memory."""
    return replace(
        cfg,
        sequences_per_step=cfg.sequences_per_step * cfg.shorten,
        seq_len=cfg.seq_len // cfg.shorten,
    )


# ---- Schedules --------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What holds in a step."""

    stage: int
    seq_len: int  # tokens of a training sequence
    lr_factor: float  # of all rates


def schedule(step: int, cfg) -> Schedule:
    """The schedule of a step from 0 to num_iterations. The last one only validates."""
    progress = step / cfg.num_iterations

    # Learning rate: linearly up, constant, linearly down to zero (https://arxiv.org/abs/2405.18392)
    warmup = (step + 1) / max(1, cfg.warmup_iters)
    lr_factor = min(1.0, warmup, (1 - progress) / cfg.cooldown_frac)

    return Schedule(
        stage=0,  # all steps run the same kernels
        seq_len=cfg.seq_len,
        lr_factor=lr_factor,
    )


# ---- Parameters -------------------------------------------------------------
# A parameter says where it is made how it begins and how it is updated.
def zeros(param, generator):
    param.zero_()


def uniform(std):
    bound = 3**0.5 * std
    return lambda param, generator: param.uniform_(-bound, bound, generator=generator)


def weight(*shape, group, init=zeros) -> nn.Parameter:
    """A parameter, not yet initialised.

    group: its row in `parameter_groups`. init: initialises it.
    """
    param = nn.Parameter(torch.empty(shape))
    param.group = group
    param.init = init
    return param


class Table(nn.Module):
    """An embedding table."""

    def __init__(self, rows, width, group, init=zeros):
        super().__init__()
        self.weight = weight(rows, width, group=group, init=init)

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class CastedLinear(nn.Module):
    """A linear map. On a GPU autocast casts its weight."""

    def __init__(self, in_features, out_features, group, init=zeros):
        super().__init__()
        self.weight = weight(out_features, in_features, group=group, init=init)

    def forward(self, x):
        return F.linear(x, self.weight)


# ---- Model ------------------------------------------------------------------
# In names: B sequences, T tokens, S = B·T, D model_dim, H heads, K head_dim, V padded vocabulary.
# The residual stream x has the shape (B, T, D).


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, https://arxiv.org/abs/2104.09864, by angles (T, 1, K / 2).

    Entry i and entry i + K / 2 are a pair.
    """
    first, second = x_BTHK.chunk(2, dim=-1)
    turned = [first * cos + second * sin, second * cos - first * sin]
    # Cast first, so that what is joined has half the bytes.
    halves = [half.type_as(x_BTHK) for half in turned]
    return torch.cat(halves, dim=-1)


class Batch(NamedTuple):
    """The sequences of a forward pass."""

    inputs: Tensor  # (B, T), int32
    targets: Tensor  # (B, T), int64: the token after each input, or -1 for none


class CausalSelfAttention(nn.Module):
    """Attention with rotary embedding, within each sequence."""

    def __init__(self, cfg):
        super().__init__()
        dim = cfg.model_dim
        self.num_heads = dim // cfg.head_dim
        init = uniform((3 * dim) ** -0.5)
        self.c_q = CastedLinear(dim, dim, group="attention", init=init)
        self.c_k = CastedLinear(dim, dim, group="attention", init=init)
        self.c_v = CastedLinear(dim, dim, group="attention", init=init)
        self.c_proj = CastedLinear(dim, dim, group="attention", init=init)

    def forward(self, x, rotary):
        # Queries, keys and values
        heads = (self.num_heads, -1)
        q = self.c_q(x).unflatten(-1, heads)  # (B, T, H, K)
        k = self.c_k(x).unflatten(-1, heads)
        v = self.c_v(x).unflatten(-1, heads)
        q = rotate(q, *rotary)
        k = rotate(k, *rotary)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, K)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear maps and GELU between them."""

    def __init__(self, cfg):
        super().__init__()
        dim = cfg.model_dim
        self.c_fc = CastedLinear(dim, 4 * dim, group="mlp in", init=uniform((3 * dim) ** -0.5))
        init = uniform((3 * 4 * dim) ** -0.5)
        self.c_proj = CastedLinear(4 * dim, dim, group="mlp out", init=init)

    def forward(self, x):
        x = self.c_fc(x)  # (B, T, 4 D)
        x = F.gelu(x)  # exact, not by tanh
        return self.c_proj(x)


class Block(nn.Module):
    """A layer: attention and an MLP, both pre-normed."""

    def __init__(self, cfg):
        super().__init__()
        self.attn = CausalSelfAttention(cfg)
        self.mlp = MLP(cfg)
        self.attn_factor = (2 * cfg.num_layers) ** -0.5  # the MLP has none

    def forward(self, x, rotary):
        x = x + self.attn_factor * self.attn(norm(x), rotary)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The model. Its weights have no values until `init_weights` or a checkpoint gives them."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        vocab = round_up(cfg.vocab_size, cfg.vocab_multiple)
        init = uniform((3 * cfg.model_dim) ** -0.5)
        self.embed = Table(vocab, cfg.model_dim, group="embed", init=init)
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(cfg.num_layers)])
        self.lm_head = CastedLinear(cfg.model_dim, vocab, group="embed")
        self.lm_head.weight = self.embed.weight  # one matrix
        # The head is computed in chunks of this many tokens.
        tokens = cfg.sequences_per_forward * cfg.seq_len / max(1, cfg.head_chunks)
        self.tokens_per_chunk = round_up(math.ceil(tokens), 128)
        # Cosines and sines of the rotary embedding
        rotary = torch.zeros(2, max(cfg.seq_len, cfg.val_seq_len), 1, cfg.head_dim // 2)
        self.register_buffer("rotary", rotary, persistent=False)
        self.set_rotary()

    @torch.no_grad()
    def init_weights(self, generator):
        """Initialise every parameter."""
        for param in self.parameters():
            param.init(param, generator)

    @torch.no_grad()
    def set_rotary(self):
        """Fill in the rotary embedding, the same in all steps."""
        head_dim = self.cfg.head_dim
        exponent = torch.arange(0, head_dim, 2, device=self.rotary.device) / head_dim
        frequency = 1 / self.cfg.rope_base**exponent  # (K / 2,)
        position = torch.arange(self.rotary.size(1), device=frequency.device)
        theta = torch.outer(position, frequency)[:, None]  # (T, 1, K / 2)
        self.rotary[0] = theta.cos()
        self.rotary[1] = theta.sin()

    def hidden(self, inputs_BT):
        """The normed output of the last layer, (B, T, D)."""
        rotary = self.rotary[:, : inputs_BT.size(1)]
        x = self.embed(inputs_BT)
        for block in self.blocks:
            x = block(x, rotary)
        return norm(x)

    def logits(self, x):
        """Logits (…, V) in fp32."""
        return self.lm_head(x).float()

    def head_loss(self, x_SD, targets_S):
        """Cross-entropy, summed over positions."""
        logits_SV = self.logits(x_SD)
        return F.cross_entropy(logits_SV, targets_S, ignore_index=-1, reduction="sum")

    def forward(self, batch: Batch):
        """Summed cross-entropy of the next tokens."""
        x_SD = self.hidden(batch.inputs).flatten(0, 1)
        targets_S = batch.targets.flatten()
        size = self.tokens_per_chunk
        if len(x_SD) <= size:
            return self.head_loss(x_SD, targets_S)
        # In chunks, recomputed in the backward pass: the logits are never in memory all at once.
        loss = 0
        for x, targets in zip(x_SD.split(size), targets_S.split(size)):
            loss = loss + checkpoint(self.head_loss, x, targets, use_reentrant=False)
        return loss


# ---- Optimizers -------------------------------------------------------------
def adam_update(weight, grad, mean, square, count, *, lr, betas, decay):
    """A step of AdamW, https://arxiv.org/abs/1711.05101, in fp32 and in place.

    count: steps taken, a tensor. decay: of the weight, in units of the rate.
    """
    count += 1
    beta1, beta2 = betas
    grad = grad.float()
    new_mean = mean.float().lerp(grad, 1 - beta1)
    new_square = square.float().lerp(grad.square(), 1 - beta2)
    # Bias correction, as both means begin at zero
    step_size = lr / (1 - beta1**count)
    size = (new_square / (1 - beta2**count)).sqrt()
    old = weight.float() * (1 - lr * decay)
    weight.copy_(old - step_size * new_mean / (size + 1e-8))
    mean.copy_(new_mean)
    square.copy_(new_square)


@dataclass(frozen=True)
class AdamGroup:
    """A row of the table: how Adam updates the parameters of a group."""

    lr: float  # about how much a weight changes in a step
    betas: tuple  # decay of the means of gradients and of their squares
    decay: float  # of weights in a step, in units of the rate


def parameter_groups(cfg) -> dict:
    """The table of parameter groups. The parameters name their group (`weight`)."""
    adam = AdamGroup(cfg.adam_lr, betas=(0.9, 0.95), decay=cfg.weight_decay)
    return {
        "attention": adam,
        "mlp in": adam,
        "mlp out": adam,
        "embed": adam,
    }


class ReplicatedOptimizer:
    """A group's weights and gradients as two flat buffers, whole on every rank.

    One all-reduce sums all gradients. Every rank updates all weights and holds the whole state.
    """

    def __init__(self, name, group, params, ranks):
        self.name = name
        self.group = group
        self.ranks = ranks
        self.handle = None  # the async handle of a collective under way
        self.numel = sum(param.numel() for param in params)
        first = params[0].detach()
        if any(param.dtype != first.dtype for param in params):
            raise TypeError(f"group {name!r}: its parameters have several types")
        self.weights = first.new_zeros(self.numel)
        self.grads = torch.zeros_like(self.weights)
        start = 0
        for param in params:  # they become views of the buffers
            end = start + param.numel()
            values = self.weights[start:end].view_as(param)
            param.data = values.copy_(param.detach())
            param.grad = self.grads[start:end].view_as(param)
            start = end
        self.lr = torch.zeros((), device=self.grads.device)  # a tensor: compiled once
        self.state = {}  # tensors by name

    def tensors(self):
        """What a step changes: the warm-up steps on them and restores them."""
        return [self.weights, *self.state.values()]

    def clear(self):
        """Drop the gradients."""
        self.grads.zero_()

    def reduce(self):
        """Begin to sum the gradients over the ranks."""
        if self.ranks.world_size > 1:
            self.handle = dist.all_reduce(self.grads, async_op=True)

    def update(self, now, divisor):
        """Update by gradients / divisor."""
        self.wait()
        self.grads.div_(divisor)
        self.lr.fill_(self.group.lr * now.lr_factor)
        self.update_share(now)

    def wait(self):
        """End what was begun."""
        if self.handle:
            self.handle.wait()
            self.handle = None

    def full_state(self):
        """The state, the same on all ranks."""
        return {key: value.flatten().cpu() for key, value in self.state.items()}

    def load_full_state(self, full):
        """Take the state of `full_state`."""
        for key, value in self.state.items():
            value.copy_(full[key].view_as(value))


class Adam(ReplicatedOptimizer):
    """Adam on tensors of any shape, by every rank."""

    def __init__(self, name, group, params, ranks):
        super().__init__(name, group, params, ranks)
        self.state["mean"] = torch.zeros_like(self.grads)
        self.state["square"] = torch.zeros_like(self.grads)
        self.state["count"] = torch.zeros_like(self.lr)
        self.step_fn = compile_on_gpu(adam_update, self.lr.device)

    def update_share(self, now):
        self.step_fn(
            self.weights,
            self.grads,
            **self.state,
            lr=self.lr,
            betas=self.group.betas,
            decay=self.group.decay,
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
        if members[name]:
            optimizers.append(Adam(name, group, members[name], ranks))
    return optimizers


def step_optimizers(optimizers, now, divisor):
    """One step of all optimizers. Each one computes while others communicate."""
    for optimizer in optimizers:
        optimizer.reduce()
    for optimizer in optimizers:
        optimizer.update(now, divisor)
    for optimizer in optimizers:
        optimizer.clear()


# ---- Training ---------------------------------------------------------------
class Place(NamedTuple):
    """Where a step's sequences begin. A checkpoint keeps it."""

    shard: int = 0  # counted through all epochs
    position: int = 0  # in the shard, in tokens


class Rows(NamedTuple):
    """All sequences of a step, of all ranks, on the host. Each array has one entry a sequence."""

    tokens: np.ndarray  # (N, T + 1), uint16


def cut_rows(tokens, documents, place: Place, now, cfg):
    """Cut a step's `Rows` from a shard, and return them and the next place.

    Returns None if the shard has too few tokens left.
    """
    size = cfg.sequences_per_step * now.seq_len
    start = place.position
    # The last sequence needs one more token, its last target.
    part = tokens[start : start + size + 1]
    if len(part) <= size:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(part, now.seq_len + 1)
    return Rows(windows[:: now.seq_len]), place._replace(position=start + size)


def prepare(model: GPT, cfg, device: torch.device):
    """Make the model ready to train on this device."""
    if device.type != "cuda":
        return
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
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

    The gradients are those of each batch's mean over tokens.
    """
    totals = 0
    for batch in batches:
        losses = losses_of(model, batch, now) / batch.targets.numel()
        losses[0].backward()
        totals = totals + losses.detach()
    return totals / len(batches)


def train(run, cfg):
    """The training loop. It ends after the last step, or after a save when a signal asks it to.

    run: the harness below the banner. It holds model, optimizers and data. Its
    `validate_and_save` does so where that is due, while the clock stands.
    """
    for step in range(run.first_step, cfg.num_iterations + 1):  # the last round only validates
        now = schedule(step, cfg)

        if run.validate_and_save(step, can_save=True):
            break

        batches = run.loader.next_step(now)
        losses = accumulate_gradients(run.model, batches, now)
        run.exchange_losses(step, losses)
        step_optimizers(run.optimizers, now, divisor=len(batches) * run.ranks.world_size)
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
