#!/usr/bin/env python3
"""Train a GPT of GPT-2 small's shape to 3.28 validation loss on FineWeb, as fast as 8 H100s allow.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the record, on 8 GPUs
    python train_gpt.py                                       # the record, on one GPU
    python train_gpt.py --preset pocket                       # a small model, on a CPU too

Record: 2024-10-14_ModernArch
Parent: none. It has ReLU², QK-norm, zero-initialised output projections and a padded vocabulary.

The record comes first: hyperparameters, schedules, model, optimizers, training loop. The harness
below the banner reads data, validates, saves and logs. It is the same in every record.

Technique                                         where it is
ReLU²                                             MLP
QK-norm                                           CausalSelfAttention
rotary embedding                                  GPT, rotate
Muon                                              orthogonalize, muon_update
rates                                             schedule
"""

import argparse
import fcntl
import glob
import hashlib
import math
import os
import platform
import re
import shlex
import signal
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import collect_env
from torch.utils.checkpoint import checkpoint


# ---- Hyperparameters --------------------------------------------------------
@dataclass(frozen=True)
class Hyperparameters:
    """The settings of a run. Each field is also a command-line flag.

    These are the values of the preset record.
    """

    preset: str = "record"  # name of the defaults that the other flags change
    # Model
    vocab_size: int = 50257  # token ids are smaller
    vocab_multiple: int = 128  # embeddings and head are padded to a multiple of it
    eot_token: int = 50256  # end-of-text, the token that opens each document
    model_dim: int = 768  # width of the residual stream
    head_dim: int = 128  # width of an attention head
    num_layers: int = 12  # of attention and an MLP each
    rope_base: int = 10000  # inverse of the lowest rotary frequency
    seed: int = 0  # seed of the initial weights
    # Optimizers
    embed_lr: float = 0.0036  # Adam's rate of the matrix of embedding and head
    muon_lr: float = 0.00036  # Muon's rate; root mean square of a step
    muon_momentum: float = 0.95  # Muon's momentum
    # Schedules
    num_iterations: int = 5100  # optimizer steps
    seq_len: int = 1024  # tokens of a training sequence
    cooldown_frac: float = 1450 / 5100  # last share of the run, in which rates fall
    # Data and validation
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob of the training shards
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # glob of the validation shards
    repeat_data: bool = False  # allow the preset record to read its data again
    sequences_per_step: int = 512  # sequences of a step, all ranks together
    sequences_per_forward: int = 64  # sequences that a rank runs at once, at most
    sequence_stride: int = 1  # from one sequence to the next taken, wrapping around
    val_seq_len: int = 1024  # tokens of a validation sequence
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


# The preset pocket: what differs, for a small model of bytes that a CPU trains
POCKET = dict(
    preset="pocket",
    vocab_size=257,
    vocab_multiple=16,
    eot_token=256,
    model_dim=64,
    head_dim=16,
    num_layers=4,
    rope_base=32,
    embed_lr=0.025,
    muon_lr=0.005,
    muon_momentum=0.85,
    num_iterations=120,
    seq_len=256,
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


# Whole numbers that may be 0; all others are at least 1.
MAY_BE_ZERO = ["seed", "eot_token"]


def check_flags(cfg) -> dict:
    """This record's rules for its flags: words that begin with the flag, whether they hold."""
    return {
        "head_dim must be a multiple of 4": cfg.head_dim % 4 == 0,
        "model_dim must be a multiple of head_dim": cfg.model_dim % cfg.head_dim == 0,
        "cooldown_frac must be above 0, at most 1": 0 < cfg.cooldown_frac <= 1,
    }


# ---- Schedules --------------------------------------------------------------
@dataclass(frozen=True)
class Schedule:
    """What holds in a step."""

    stage: int
    seq_len: int  # tokens of a training sequence
    lr_factor: float  # of all rates
    momentum: float  # Muon's


def schedule(step: int, cfg) -> Schedule:
    """The schedule of a step from 0 to num_iterations. The last one only validates."""
    progress = step / cfg.num_iterations

    # Learning rate: linearly down to zero
    lr_factor = min(1.0, (1 - progress) / cfg.cooldown_frac)

    return Schedule(
        stage=0,  # all steps run the same kernels
        seq_len=cfg.seq_len,
        lr_factor=lr_factor,
        momentum=cfg.muon_momentum,
    )


# ---- Parameters -------------------------------------------------------------
# A parameter says where it is made how it begins and how it is updated.
def zeros(param, generator):
    param.zero_()


def uniform(std):
    bound = 3**0.5 * std
    return lambda param, generator: param.uniform_(-bound, bound, generator=generator)


def weight(*shape, group, first=zeros) -> nn.Parameter:
    """A parameter, not yet initialised.

    group: its row in `parameter_groups`. first: sets its first values.
    """
    param = nn.Parameter(torch.empty(shape))
    param.group = group
    param.first = first
    return param


class Table(nn.Module):
    """An embedding table."""

    def __init__(self, rows, width, group, first=zeros):
        super().__init__()
        self.weight = weight(rows, width, group=group, first=first)

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class Linear(nn.Module):
    """A linear map."""

    def __init__(self, in_features, out_features, group, first=zeros):
        super().__init__()
        self.weight = weight(out_features, in_features, group=group, first=first)

    def forward(self, x):
        return F.linear(x, self.weight)


# ---- Model ------------------------------------------------------------------
# In names: B sequences, T tokens, S = B·T, D model_dim, H heads, K head_dim, V padded vocabulary.
# The residual stream x has the shape (B, T, D).


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension. The epsilon is that of the type."""
    epsilon = torch.finfo(x.dtype).eps
    return F.rms_norm(x, x.shape[-1:], eps=epsilon).type_as(x)  # autocast would make it fp32


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, https://arxiv.org/abs/2104.09864, by angles (T, 1, K / 2).

    Entry i and entry i + K / 2 are a pair.
    """
    x = x_BTHK
    half = x.size(-1) // 2
    partner = x.roll(half, dims=-1)  # the other entry of each pair
    cos = torch.cat([cos, cos], dim=-1)  # (T, 1, K)
    sin = torch.cat([sin, -sin], dim=-1)  # (T, 1, K)
    return (x * cos + partner * sin).type_as(x_BTHK)


class CausalSelfAttention(nn.Module):
    """Attention with rotary embedding, within each sequence."""

    def __init__(self, cfg):
        super().__init__()
        dim = cfg.model_dim
        self.num_heads = dim // cfg.head_dim
        first = uniform((3 * dim) ** -0.5)
        self.c_q = Linear(dim, dim, group="attention", first=first)
        self.c_k = Linear(dim, dim, group="attention", first=first)
        self.c_v = Linear(dim, dim, group="attention", first=first)
        # Zero-initialised projections: @Grad62304977
        self.c_proj = Linear(dim, dim, group="attention")

    def forward(self, x, rotary):
        heads = (self.num_heads, -1)
        q = self.c_q(x).unflatten(-1, heads)  # (B, T, H, K)
        k = self.c_k(x).unflatten(-1, heads)
        v = self.c_v(x).unflatten(-1, heads)
        q = norm(rotate(q, *rotary))  # QK-norm: @Grad62304977
        k = norm(rotate(k, *rotary))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, K)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear maps and ReLU² between them."""

    def __init__(self, cfg):
        super().__init__()
        dim = cfg.model_dim
        self.c_fc = Linear(dim, 4 * dim, group="mlp in", first=uniform((3 * dim) ** -0.5))
        self.c_proj = Linear(4 * dim, dim, group="mlp out")

    def forward(self, x):
        x = self.c_fc(x)  # (B, T, 4 D)
        x = F.relu(x).square()  # ReLU²: https://arxiv.org/abs/2109.08668
        return self.c_proj(x)


class Block(nn.Module):
    """A layer: attention and an MLP, both pre-normed."""

    def __init__(self, cfg):
        super().__init__()
        self.attn = CausalSelfAttention(cfg)
        self.mlp = MLP(cfg)

    def forward(self, x, rotary):
        x = x + self.attn(norm(x), rotary)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """The model. Its weights have no values until `init_weights` or a checkpoint gives them."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        vocab = round_up(cfg.vocab_size, cfg.vocab_multiple)
        first = uniform((3 * cfg.model_dim) ** -0.5)
        self.embed = Table(vocab, cfg.model_dim, group="embed", first=first)
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(cfg.num_layers)])
        self.lm_head = Linear(cfg.model_dim, vocab, group="embed")
        self.lm_head.weight = self.embed.weight  # one matrix
        # The head is computed in chunks of this many tokens.
        tokens = cfg.sequences_per_forward * cfg.seq_len / max(1, cfg.head_chunks)
        self.tokens_per_chunk = round_up(math.ceil(tokens), 128)
        exponent = torch.arange(0, cfg.head_dim, 2) / cfg.head_dim
        frequency = 1 / cfg.rope_base**exponent  # (K / 2,)
        position = torch.arange(max(cfg.seq_len, cfg.val_seq_len))
        theta = torch.outer(position, frequency)[:, None]  # (T, 1, K / 2)
        rotary = torch.stack([theta.cos(), theta.sin()]).bfloat16()
        self.register_buffer("rotary", rotary, persistent=False)

    @torch.no_grad()
    def init_weights(self, generator):
        """Give every parameter its first values."""
        for param in self.parameters():
            param.first(param, generator)

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

    def forward(self, inputs_BT, targets_BT):
        """Summed cross-entropy of the next tokens.

        targets_BT has the token after each of inputs_BT, or -1 for none.
        """
        x_SD = self.hidden(inputs_BT).flatten(0, 1)
        targets_S = targets_BT.flatten()
        size = self.tokens_per_chunk
        if len(x_SD) <= size:
            return self.head_loss(x_SD, targets_S)
        # In chunks, recomputed in the backward pass: the logits are never in memory all at once.
        loss = 0
        for x, targets in zip(x_SD.split(size), targets_S.split(size)):
            loss = loss + checkpoint(self.head_loss, x, targets, use_reentrant=False)
        return loss


# ---- Optimizers -------------------------------------------------------------
def orthogonalize(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly the closest semi-orthogonal matrix, by Newton-Schulz iteration.

    Muon: Keller Jordan et al., https://kellerjordan.github.io/posts/muon/.
    """
    is_tall = grad_MN.size(-2) > grad_MN.size(-1)
    X = grad_MN.mT if is_tall else grad_MN  # the smaller side decides the cost
    X = X.to(dtype)
    X = X / (X.norm() + 1e-7)  # the norm is at least the spectral norm
    a, b, c = 3.4445, -4.7750, 2.0315  # coefficients of X, A X and A² X
    for _ in range(5):
        A = X @ X.mT
        B = A @ X
        X = a * X + b * B + c * A @ B
    return X.mT if is_tall else X


def muon_update(update, grad, mean, *, momentum):
    """Muon's update of a matrix (M, N), without its rate, into `update`.

    mean: of gradients.
    """
    mean.mul_(momentum).add_(grad)  # a sum here, that is, the mean times a constant
    nesterov = grad + momentum * mean
    update.copy_(orthogonalize(nesterov, update.dtype))


def adam_update(weight, grad, mean, square, count, *, lr, betas):
    """A step of Adam, https://arxiv.org/abs/1412.6980, in fp32 and in place.

    count: steps taken, a tensor.
    """
    count += 1
    beta1, beta2 = betas
    grad = grad.float()
    new_mean = mean.float().lerp(grad, 1 - beta1)
    new_square = square.float().lerp(grad.square(), 1 - beta2)
    # Bias correction, as both means begin at zero
    step_size = lr / (1 - beta1**count)
    size = (new_square / (1 - beta2**count)).sqrt()
    weight.copy_(weight.float() - step_size * new_mean / (size + 1e-8))
    mean.copy_(new_mean)
    square.copy_(new_square)


@dataclass
class Group:
    """A row of the table: how the parameters of a group are updated."""

    optimizer: type  # Adam or Muon
    lr: float  # Adam: about a weight's change; Muon: about the spectral norm of a change
    betas: tuple = (0.9, 0.95)  # Adam: decay of its means of gradients and of their squares


def parameter_groups(cfg) -> dict[str, Group]:
    """The table of parameter groups. The parameters name their group (`weight`)."""
    return {
        "attention": Group(Muon, cfg.muon_lr),
        "mlp in": Group(Muon, cfg.muon_lr),
        "mlp out": Group(Muon, cfg.muon_lr),
        "embed": Group(Adam, cfg.embed_lr),
    }


class Optimizer:
    """A group's weights and gradients as two flat buffers, and its state, on every rank."""

    def __init__(self, name, group, params, ranks):
        self.name = name
        self.group = group
        self.ranks = ranks
        self.handle = None  # the async handle of a collective under way
        self.numel = sum(param.numel() for param in params)
        first = params[0].detach()
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
        return [self.weights, *self.state.values()]

    def reduce(self):
        """Begin to sum the gradients over the ranks."""
        if self.ranks.world_size > 1:
            self.handle = dist.all_reduce(self.grads, async_op=True)

    def update(self, now, divisor):
        """Update by gradients / divisor."""
        self.wait()
        self.grads.div_(divisor)
        self.lr.fill_(self.group.lr * now.lr_factor)
        self.apply_update(now)  # Adam's or Muon's

    def wait(self):
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


class Adam(Optimizer):
    """Adam on tensors of any shape, by every rank."""

    def __init__(self, name, group, params, ranks):
        super().__init__(name, group, params, ranks)
        self.state["mean"] = torch.zeros_like(self.grads)
        self.state["square"] = torch.zeros_like(self.grads)
        self.state["count"] = torch.zeros_like(self.lr)
        self.step_fn = compile_on_gpu(adam_update, self.lr.device)

    def apply_update(self, now):
        self.step_fn(
            self.weights,
            self.grads,
            **self.state,
            lr=self.lr,
            betas=self.group.betas,
        )


class Muon(Optimizer):
    """Muon on matrices of one shape, by every rank."""

    def __init__(self, name, group, params, ranks):
        super().__init__(name, group, params, ranks)
        matrices = self.grads.view(-1, *params[0].shape[-2:])
        self.state["mean"] = torch.zeros_like(matrices)
        dtype = torch.bfloat16 if self.lr.is_cuda else torch.float32
        self.updates = torch.zeros_like(matrices, dtype=dtype)
        self.step_fn = compile_on_gpu(muon_update, self.lr.device)

    def apply_update(self, now):
        grads = self.grads.view_as(self.updates)
        for update, grad, mean in zip(self.updates, grads, self.state["mean"]):
            self.step_fn(update, grad, mean, momentum=now.momentum)
        factor = max(self.updates.shape[1:]) ** 0.5  # brings the entries' root mean square to 1
        self.weights.sub_(self.updates.flatten() * (self.lr * factor))


def compile_on_gpu(step_fn: Callable, device: torch.device) -> Callable:
    return torch.compile(step_fn, dynamic=False) if device.type == "cuda" else step_fn


def build_optimizers(model: GPT, cfg, ranks) -> list[Optimizer]:
    """An optimizer for each group that has parameters. Raises KeyError for an unknown group."""
    groups = parameter_groups(cfg)
    members = {name: [] for name in groups}
    for param in model.parameters():
        members[param.group].append(param)
    optimizers = []
    for name, group in groups.items():
        if members[name]:
            optimizers.append(group.optimizer(name, group, members[name], ranks))
    return optimizers


def step_optimizers(optimizers, now, divisor):
    """One step of all optimizers. Each one computes while others communicate."""
    for optimizer in optimizers:
        optimizer.reduce()
    for optimizer in optimizers:
        optimizer.update(now, divisor)
    for optimizer in optimizers:
        optimizer.grads.zero_()


# ---- Training ---------------------------------------------------------------
def cut_rows(tokens, documents, position: int, now, cfg):
    """Cut a step's sequences, (N, seq_len + 1), from a shard. Returns them and the next position.

    Returns None if the shard has too few tokens left.
    """
    return consecutive_rows(tokens, position, now, cfg)


def consecutive_rows(tokens, position: int, now, cfg):
    """Sequences in order or, with a stride, spread over the shard; as `cut_rows` returns them.

    The k-th sequence taken is number k · stride modulo N of the shard's N. The stride is made
    coprime to N, so each is taken once.
    """
    length = now.seq_len
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


def prepare_for_cuda(model: GPT, cfg, device: torch.device):
    """Set mixed precision, and compile."""
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    model.compile(dynamic=False)


def accumulate_gradients(model, batches, now) -> Tensor:
    """Add up the gradients of the mean losses of a step's batches. Returns the mean loss, (1,)."""
    total = 0
    for inputs, targets in batches:
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        total = total + loss.detach()
    return total.view(1) / len(batches)


def train(run, cfg):
    """The training loop. It ends after the last step, or after a save when a signal asks it to.

    run: the harness below the banner. It holds model, optimizers and data, and its `pause`
    validates and saves where that is due, while the clock stands.
    """
    for step in range(run.first_step, cfg.num_iterations + 1):  # the last round only validates
        now = schedule(step, cfg)

        if run.pause(step, complete=True):
            break

        batches = run.loader.next_step(now)
        losses = accumulate_gradients(run.model, batches, now)
        run.health.check(step, losses)
        step_optimizers(run.optimizers, now, divisor=len(batches) * run.ranks.world_size)
        run.log_step(step + 1)


# ==== Harness: below this line every record has the same bytes ===============
# These the harness alone needs.
import contextlib
import errno
import gc
import resource
import shutil
import socket
import sysconfig
from datetime import timedelta
from unittest import mock

SCRIPT = Path(__file__).resolve()


class UserError(Exception):
    """An error that a user can mend. It ends the run in one line, with exit code 2."""


# ---- Data -------------------------------------------------------------------
# A shard is a header of 256 little-endian int32 (magic, version, number of tokens), then the
# tokens as uint16.
HEADER_BYTES = 1024
MAGIC = 20240520  # of llm.c's shards
VERSION = 1  # of their format


def find_shards(pattern: str) -> list[Path]:
    """Files that match the glob, sorted: in the current folder, or else in one above the script.

    Raises UserError.
    """
    # A record in records/ finds the data of the repository.
    for folder in (Path(), *SCRIPT.parents):
        paths = [folder / name for name in glob.glob(pattern, root_dir=folder)]
        files = sorted(filter(Path.is_file, paths))  # no folder and no pipe
        if files:
            return files
    raise UserError(f"no file matches {pattern!r}; make the data first: python data/pocket.py, "
                    "data/fineweb.py or data/text.py")


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


class TokenLoader:
    """Gives rank r the r-th part of each step's sequences.

    A step is cut from one shard. Tokens at its end that do not fill a step are skipped. A thread
    reads the next shard ahead.
    """

    def __init__(self, cfg, ranks, shard=0, position=0, log=print):
        self.cfg = cfg
        self.ranks = ranks
        self.log = log
        if cfg.sequences_per_step % ranks.world_size:
            raise UserError(f"--sequences_per_step {cfg.sequences_per_step}: "
                            f"the {ranks.world_size} ranks must divide it")
        sequences = cfg.sequences_per_step // ranks.world_size  # of this rank, in a step
        # All forward passes of a step have as many.
        self.per_forward = math.gcd(sequences, cfg.sequences_per_forward)
        self.files = find_shards(cfg.train_files)  # in the order of reading
        self.size = 0  # tokens of all files, one epoch
        digest = hashlib.sha256()  # of each shard's name, size and first MiB
        for path in self.files:
            size = shard_size(path)
            self.size += size
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
        self.ahead = self.reader.submit(self.read, shard + 1)

    def next_step(self, now):
        """This rank's inputs and targets for each forward pass. Raises UserError without data."""
        for _ in range(len(self.files) + 1):  # the rest of this shard, then each shard once
            shard, position = self.place
            step = cut_rows(self.tokens, self.documents, position, now, self.cfg)
            if step:
                rows, position = step
                self.place = (shard, position)
                # All ranks cut the same rows. Each takes its part.
                parts = rows.reshape(self.ranks.world_size, -1, self.per_forward, rows.shape[1])
                return [to_batch(part, self.ranks.device) for part in parts[self.ranks.rank]]
            self.begin_shard(shard + 1)  # after the last one the first again
            # An epoch begins.
            if (shard + 1) % len(self.files) == 0:
                self.log(f"the training data begin again: {self.cfg.train_files}")
        raise UserError(f"--train_files {self.cfg.train_files}: no shard has documents for a step; "
                        "shorten the sequences or lower --sequences_per_step")


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
    # One after another, as if they were one file
    shards = [read_shard(path, cfg.vocab_size) for path in find_shards(cfg.val_files)]
    tokens = np.concatenate(shards)
    if len(tokens) <= cfg.val_tokens:
        raise UserError(f"--val_tokens {cfg.val_tokens}: lower it below the {len(tokens)} tokens "
                        f"of {cfg.val_files}")
    return tokens[: cfg.val_tokens + 1]


def store_masks(device):
    """A context in which a model is compiled that has no backward pass.

    Inductor would not store the mask's first keys there, which FlexAttention reads, and fail.
    """
    context = contextlib.ExitStack()
    if device.type == "cuda":
        from torch._inductor import config, ir  # take a second, and a CPU needs none

        context.enter_context(config.patch(realize_reads_threshold=1))
        # Where the reach is a constant, they are still computed within the kernel, from a tensor
        # of one dimension, whose layout is not decided yet.
        context.enter_context(mock.patch.object(ir.FlexibleLayout, "allow_indexing", True))
    return context


@torch.no_grad()
def validate(model: nn.Module, tokens: np.ndarray, cfg, ranks) -> float:
    """Mean loss over the validation tokens. Ranks share the sequences."""
    model.eval()  # no FP8
    total = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    count = len(tokens) - 1  # the first token has no prediction
    length = cfg.val_seq_len
    # As many sequences at once as a training pass has tokens for, at least one
    longest = cfg.sequences_per_forward * plan(cfg).longest
    size = length * max(1, longest // length)
    # All ranks have as many passes, and the last ones are as large as the others.
    tokens = np.pad(tokens, (0, ranks.world_size * size))
    for first in range(0, count, ranks.world_size * size):
        start = first + ranks.rank * size
        part = tokens[start : start + size + 1]
        # (sequences, length + 1): the last token of a row is the first of the next row.
        rows = np.lib.stride_tricks.sliding_window_view(part, length + 1)[::length]
        inputs, targets = to_batch(rows, ranks.device)
        targets.view(-1)[max(0, count - start) :] = -1  # padding is not counted
        with store_masks(ranks.device):
            total += model(inputs, targets)
    model.train()
    # Each rank has the sum of its own sequences.
    return ranks.all_gather(total).sum().item() / count


# ---- Checkpoints ------------------------------------------------------------
NEW_RUN = dict(step=0, loader=(0, 0), train_time_ms=0.0)


def write_checkpoint(path: Path, state: dict):
    """Write the state, whole or not at all, and keep the newest three. Raises UserError."""
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
    # By time, as a run that was resumed from an old one has later steps in its folder.
    saved = sorted(path.parent.glob("step-*.pt"), key=os.path.getmtime)
    for old in saved[:-3]:
        old.unlink()


def load_checkpoint(path: Path) -> dict:
    """The state at `path`. Raises UserError where it is damaged or has a value that is not finite.

    Settings are saved in the form of flags, so that the same parser checks them.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; give its path, or auto with --run_id")
    try:
        with zipfile.ZipFile(path) as file:  # as torch.save writes it, with checksums
            damaged = file.testzip()
        if damaged:
            raise ValueError(f"{damaged} is damaged")
        # Weights alone: a pickle that runs code is refused.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        settings = [f"--{name}={text}" for name, text in state["settings"].items()]
        state["settings"] = parse_flags(settings)
        # What is missing would silently be the default of the preset record.
        if len(settings) < len(fields(Hyperparameters)):
            raise ValueError("it lacks a setting")
        # A run resumed from NaN would fail at the same step for ever.
        for tensors in (state["model"], *state["optimizers"].values()):
            for name, tensor in tensors.items():
                if not (tensor.is_floating_point() and tensor.isfinite().all()):
                    raise ValueError(f"{name} is not finite")
    # zipfile and torch raise nearly any exception for a damaged file.
    except Exception as error:
        cause = str(error).partition(". ")[0]  # without torch's advice
        raise UserError(f"{path}: no whole checkpoint of this script "
                        f"({type(error).__name__}: {cause}); name another") from None
    return state


def newest_checkpoint(folder: Path):
    """Path and state of a run's newest whole checkpoint. Without one, those of a new run."""
    # Names sort by step.
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        try:
            return str(path), load_checkpoint(path)
        except UserError as error:
            print(f"skipped {error}", file=sys.stderr)
    return "", NEW_RUN


# ---- The machine ------------------------------------------------------------
def check_launcher(world_size):
    """Raise UserError where the ranks of a run could not find each other."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and "RANK" not in os.environ:
        raise UserError(f"srun started {tasks} tasks, and each would train alone; "
                        "let it start torchrun, with --ntasks-per-node=1")
    if world_size > 1:
        address = os.environ.get("MASTER_ADDR", "")
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            raise UserError(f"MASTER_ADDR {address}: not to be resolved here ({error}); on one "
                            "machine start torchrun with --local-addr=127.0.0.1") from None


def count_gpus(device) -> int:
    """This machine's GPUs, none where --device is cpu. Raises UserError where CUDA cannot start."""
    if device == "cpu":
        return 0
    gpus = torch.cuda.device_count()
    # It also counts none where the driver does not answer.
    broken = Path("/dev/nvidiactl").exists() and torch.version.cuda
    if gpus or (broken and "CUDA_VISIBLE_DEVICES" not in os.environ):
        try:
            torch.cuda.init()
        except RuntimeError as error:
            raise UserError(f"CUDA does not start: {error}; --device cpu does without") from None
    return gpus


def check_gpu_machine(ranks):
    """Raise UserError where so many ranks on GPUs would fail minutes after their start."""
    # Triton compiles a launcher with them.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UserError("no C compiler, which Triton needs; install gcc, or set CC")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.exists():
        raise UserError(f"{header}: not there, and Triton needs it; install python3-dev, "
                        "or a Python of uv's")
    memory = Path("/dev/shm")
    mib = shutil.disk_usage(memory).total // 2**20 if memory.exists() else 0
    if ranks > 1 and mib <= 64:  # Docker's default
        raise UserError(f"{memory}: of {mib} MiB, which NCCL fills; start the container with "
                        "--shm-size=1g")


def default_head_chunks(device: torch.device) -> int:
    """In how many chunks a device computes the head."""
    if device.type == "cpu":
        return 1
    memory = torch.cuda.get_device_properties(device).total_memory
    # 80 GB hold all logits and their gradient. More than eight chunks save nothing.
    return 8 if memory < 32e9 else math.ceil(70e9 / memory)


def cpu_model() -> str:
    """The name of this machine's CPU, as its maker writes it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE)
        name = found[1] if found else ""  # ARM's have none
    else:
        name = collect_env.run("sysctl -n machdep.cpu.brand_string")[1]  # macOS
    return " ".join(name.split()) or platform.processor() or "cpu"


def machine_facts(device: torch.device) -> dict:
    """What a log tells of the machine and of its software."""
    folder = shlex.quote(str(SCRIPT.parent))  # it may have spaces
    capability = torch.backends.cpu.get_cpu_capability()
    facts = dict(
        device=f"{cpu_model()} ({platform.machine()}, {capability})",
        torch=torch.__version__,
        threads=torch.get_num_threads(),  # OMP_NUM_THREADS, or the number of cores
        commit=collect_env.run(f"git -C {folder} rev-parse HEAD")[1],  # empty without git
    )
    if device.type == "cuda":
        facts |= dict(
            device=torch.cuda.get_device_name(device),
            gpus=torch.cuda.device_count(),
            cuda=torch.version.cuda,
            driver=collect_env.get_nvidia_driver_version(collect_env.run),
            nccl=torch.cuda.nccl.version(),
            triton=version("triton"),
        )
    return facts


def peak_memory_mib(device: torch.device) -> int:
    """The most that the process has held: of its GPU since the warm-up, or of the CPU's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 2**20
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's may be the peak of the process that started this one
        kib = int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1])
        return kib // 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 2**20  # macOS has bytes


# ---- Ranks and log ----------------------------------------------------------
class Ranks:
    """This process's rank and device, and what ranks exchange. Raises UserError."""

    def __init__(self, cfg):
        # torchrun sets these. Without it there is one process.
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))  # among those of this machine
        check_launcher(self.world_size)
        gpus = count_gpus(cfg.device)
        if local_rank >= gpus and (gpus or cfg.device == "cuda"):
            raise UserError(f"--device {cfg.device}: no GPU {local_rank}; use --device cpu")
        self.device = torch.device("cpu")  # where there is no GPU, or none is wanted
        if gpus:
            check_gpu_machine(self.world_size)
            self.device = torch.device("cuda", local_rank)
            torch.cuda.set_device(self.device)  # "cuda" now means this one
        if self.world_size > 1:
            # torch 2.13 has new names for the collectives; 2.11 has the old ones alone.
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
            # Ranks compile at different speeds, and wait for the slowest.
            dist.init_process_group(device_id=self.device if gpus else None,
                                    timeout=timedelta(minutes=30))

    def __enter__(self):
        return self

    def __exit__(self, failure, *_):
        """End the process group, whose threads must not outlive Python: it would abort them."""
        if self.world_size > 1:
            if failure and self.device.type == "cuda":
                dist.group.WORLD.abort()  # without waiting for ranks that may have failed, too
            dist.destroy_process_group()

    def all_gather(self, x):
        """(N,) of every rank, as (ranks, N)."""
        rows = x.repeat(self.world_size, 1)
        if self.world_size > 1:
            dist.all_gather_into_tensor(rows.view(-1), x)
        return rows


class Log:
    """Rank 0's log file and console. The other ranks write nothing.

    A resumed run adds to its log. For any other run a log of the same name is a UserError, unless
    it `may_restart`: then it was killed before it saved anything, and begins anew.
    """

    def __init__(self, cfg, ranks, may_restart=False):
        self.run_id = cfg.run_id or time.strftime("%Y%m%d-%H%M%S")
        self.folder = Path("logs", self.run_id)  # in the current folder
        self.path = self.folder / "log.txt"
        self.enabled = ranks.rank == 0
        self.is_new = not cfg.resume
        self.file = None
        # By rank 0 alone: another one may come when the log is open.
        if self.enabled and self.path.exists() and not may_restart:
            raise UserError(f"--run_id {cfg.run_id}: {self.path} is there already; go on with "
                            "its run by --resume auto, or name another --run_id")

    def open(self, header):
        """Open the log, for this run alone. A new one begins with the header. Raises UserError."""
        if self.enabled:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a", buffering=1, encoding="utf-8")  # line by line
            without_lock = None
            try:
                # The lock ends with the process, however that ends.
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"--run_id {self.run_id}: another process runs it now") from None
            except OSError as error:  # as on some network file systems
                without_lock = error
            if self.is_new:
                self.file.truncate(0)  # of what a run wrote that was killed before it saved
            # Also after a full disk has left an empty file
            if not self.path.stat().st_size:
                self.file.write(header)
            if without_lock:
                self(f"{self.path}: no lock ({without_lock}), so let no other process run "
                     f"--run_id {self.run_id}")

    def __call__(self, text, more="", console=True):
        """Write the text to the log; print it to the console, with more."""
        if self.file:
            self.file.write(text + "\n")
        if self.enabled and console:
            try:
                print(text + more, flush=True)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                # The terminal is gone, and the run goes on or saves without it.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LossExchange:
    """Ranks exchange their losses at every step, and whether a signal told one of them to stop.

    On CUDA this is read one step late, so that the host never waits for the current step.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self.pending = []  # not read yet: step, rows of all ranks, CUDA event
        self.told_to_stop = False  # this rank
        self.stopping = False  # any rank was told to
        self.losses = []  # of the step read last
        signal.signal(signal.SIGTERM, self.on_signal)
        signal.signal(signal.SIGINT, self.on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, self.on_signal)  # the terminal was closed

    def on_signal(self, number, frame):
        self.told_to_stop = True  # all ranks learn it in the next step

    def check(self, step, losses):
        """Exchange the losses of a step before its update. Raises UserError, as `read`."""
        row = torch.cat([losses.float(), torch.full_like(losses[:1], self.told_to_stop)])
        rows = self.ranks.all_gather(row).to("cpu", non_blocking=True)
        event = None
        if row.is_cuda:
            event = torch.cuda.current_stream().record_event()  # after the copy above
        self.pending.append((step, rows, event))
        self.read(late=int(row.is_cuda))

    def read(self, late=0):
        """Read what is pending but the last `late`. Raises UserError where a loss is not finite."""
        while len(self.pending) > late:
            step, rows, event = self.pending.pop(0)
            if event:
                event.synchronize()
            *self.losses, stops = rows.mean(0).tolist()  # all ranks have as many tokens
            self.stopping = stops > 0
            if not math.isfinite(self.losses[0]):
                raise UserError(f"step {step}: the loss is {self.losses[0]}; "
                                "lower the learning rates")


# ---- The run ----------------------------------------------------------------
def build(cfg, ranks):
    """Model and optimizers of a new run. Raises UserError where --init does not fit."""
    # Drawn on the CPU, so that a seed means the same weights on every device
    model = GPT(cfg)
    model.init_weights(torch.Generator().manual_seed(cfg.seed))
    if hasattr(model, "read_tables"):  # of a record whose model reads a file
        model.read_tables()
    if cfg.init and not cfg.resume:
        load_state(model, [], load_checkpoint(Path(cfg.init)), cfg.init)
    model.to(ranks.device)
    if ranks.device.type == "cuda":
        prepare_for_cuda(model, cfg, ranks.device)
    return model, build_optimizers(model, cfg, ranks)


def load_state(model, optimizers, state, path):
    """Load weights and optimizer state. Raises UserError where they do not fit."""
    try:
        model.load_state_dict(state["model"])
        for optimizer in optimizers:
            optimizer.load_full_state(state["optimizers"][optimizer.name])
    except (KeyError, RuntimeError) as error:
        raise UserError(f"{path}: does not fit ({error}); name another checkpoint") from None


class Plan(NamedTuple):
    """What a run's schedule comes to."""

    first_steps: dict  # of each stage
    tokens: int  # that it trains on
    longest: int  # training sequence, in tokens


def plan(cfg) -> Plan:
    first_steps = {}
    tokens = longest = 0
    for step in range(cfg.num_iterations):
        now = schedule(step, cfg)
        first_steps.setdefault(now.stage, step)
        tokens += cfg.sequences_per_step * now.seq_len
        longest = max(longest, now.seq_len)
    return Plan(first_steps, tokens, longest)


class Run:
    """All that the training loop works with."""

    def __init__(self, cfg, ranks, log, state):
        self.cfg = cfg
        self.ranks = ranks
        self.log = log
        self.last = cfg.num_iterations  # this step only validates
        self.first_step = self.saved_step = state["step"]
        self.script = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
        self.plan = plan(cfg)
        self.open_data(state)  # checked before the model is built
        self.model, self.optimizers = build(cfg, ranks)
        self.train_time_ms = state["train_time_ms"]  # up to when the clock was stopped
        self.write_header()
        if self.loader:
            self.warm_up()
        if cfg.resume:  # after the warm-up, which leaves no trace
            load_state(self.model, self.optimizers, state, cfg.resume)
            resumed = f"resumed at step:{self.first_step} from {cfg.resume}"
            if state.get("script", self.script) != self.script:
                resumed += ", which another script wrote"
            log(resumed)
        self.health = LossExchange(ranks)  # catches signals from here on
        self.started = time.perf_counter()  # the clock

    def open_data(self, state):
        """Read the validation tokens and open the training data. Raises UserError."""
        self.val_tokens = read_val_tokens(self.cfg)
        self.val_digest = hashlib.sha256(self.val_tokens.astype("<u2")).hexdigest()[:16]
        self.loader = None  # evaluation needs no training data
        self.data = ""  # digest of the training data
        if self.first_step < self.last:
            self.loader = TokenLoader(self.cfg, self.ranks, *state["loader"], self.log)
            self.data = self.loader.digest
            check_data(self.cfg, self.loader, self.plan.tokens, state.get("data", self.data))

    def write_header(self):
        """Begin the log with the script, all settings and what machine it is."""
        self.facts = machine_facts(self.ranks.device) | dict(
            seed=self.cfg.seed,
            world_size=self.ranks.world_size,
            parameters=sum(optimizer.numel for optimizer in self.optimizers),
        )
        head = "fp32"
        if self.ranks.device.type == "cuda":
            head = "fp8" if getattr(self.model.lm_head, "use_fp8", False) else "bf16"
        values = vars(self.cfg) | self.facts | dict(
            run_id=self.log.run_id,
            head=head,
            train_digest=self.data,
            val_digest=self.val_digest,
        )
        lines = [f"{key}: {show(value)}" for key, value in values.items()]
        rule = "=" * 100  # the end of the source
        self.log.open("\n".join([SCRIPT.read_text("utf-8"), rule, *lines, rule, ""]))
        # The first line of the console
        self.log("{device}, {threads} thread(s), {world_size} rank(s), {parameters:,} parameters, "
                 "{head} head in {head_chunks} chunk(s), logs/{run_id}".format(**values))

    def warm_up(self):
        """Run every kernel on blank tokens, then restore weights and optimizer state."""
        cfg = self.cfg
        device = self.ranks.device
        if device.type == "cuda":
            self.log("warming up; a GPU compiles for some 5 minutes the first time ...")
            # Blocks that were in use once leave room for the tuner's copies of its arguments,
            # which would else go through the host's memory and be timed with it.
            free, _ = torch.cuda.mem_get_info(device)
            torch.empty(free // 2, dtype=torch.uint8, device=device)
        tensors = []
        for optimizer in self.optimizers:
            tensors += optimizer.tensors()
        # On the host: a GPU may have no room for a copy.
        before = [tensor.to("cpu", copy=True) for tensor in tensors]
        for first in self.plan.first_steps.values():  # shapes differ between stages
            for step in range(first, first + cfg.warmup_steps):
                now = schedule(step, cfg)
                tokens = np.zeros((self.loader.per_forward, now.seq_len + 1), int)
                accumulate_gradients(self.model, [to_batch(tokens, device)], now)
                step_optimizers(self.optimizers, now, tokens.size)
        # A validation sequence for each rank
        tokens = np.zeros(self.ranks.world_size * cfg.val_seq_len + 1, int)
        validate(self.model, tokens, cfg, self.ranks)
        for tensor, value in zip(tensors, before):
            tensor.copy_(value)  # in place, since kernels and views keep their addresses
        for optimizer in self.optimizers:
            optimizer.grads.zero_()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # the tuner's copies do not count
        # No search among all that the compiler has left, which takes a second, in the steps.
        gc.collect()
        gc.freeze()

    def pause(self, step, complete) -> bool:
        """Validate and save before a step, where that is due. Returns whether the run ends here.

        complete: no gradients are waiting for the next step, so nothing is lost by a save.
        """
        is_last = step == self.last
        stops = self.health.stopping and not is_last
        validates = is_last or (self.cfg.val_every and step % self.cfg.val_every == 0)
        saves = self.is_save_due(step, complete, stops)
        # The clock stands from here until it is started again.
        if validates or saves:
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize()  # the GPU finishes what it was given
            self.train_time_ms = self.elapsed_ms()
            if validates:
                self.val_loss = validate(self.model, self.val_tokens, self.cfg, self.ranks)
                self.log_losses(step, self.train_time_ms, val_loss=self.val_loss)
            if saves:
                self.save_checkpoint(step)
            self.started = time.perf_counter()
        self.stopped = stops and (saves or not self.cfg.save_every)
        return is_last or self.stopped

    def is_save_due(self, step, complete, stops) -> bool:
        every = self.cfg.save_every
        # The step that a run was resumed from is saved already.
        if not every or step <= self.first_step:
            return False
        # Whether a multiple of save_every lies between, as not every step can be saved
        passed = step // every > self.saved_step // every
        return step == self.last or (complete and (passed or stops))

    def elapsed_ms(self):
        """Time spent on training: what was counted before, and since the clock started."""
        return self.train_time_ms + 1000 * (time.perf_counter() - self.started)

    def log_losses(self, step, ms, **losses):
        """Log a step's losses. The console shows each tenth of the run, and the time left."""
        average = ms / max(1, step)
        text = f"step:{step}/{self.last}"
        for name, loss in losses.items():
            text += f" {name}:{loss:.4f}"
            if not math.isfinite(loss):
                raise UserError(f"{text}; lower the learning rates")
        text += f" train_time:{ms:.0f}ms step_avg:{average:.2f}ms"
        left = f" left:{average * (self.last - step) / 1000:.0f}s"
        # The first step with another tenth of the run behind it
        is_tenth = step * 10 % self.last < 10
        self.log(text, left, console=is_tenth or "val_loss" in losses)

    def save_checkpoint(self, step):
        """Save all that a resumed run needs: on a CPU it is equal to the bit. Raises UserError."""
        self.saved_step = step
        state = dict(
            step=step,
            settings={name: show(value) for name, value in vars(self.cfg).items()},
            script=self.script,
            data=self.data,
            loader=self.loader.place,
            threads=torch.get_num_threads(),
            train_time_ms=self.train_time_ms,
            model=self.model.state_dict(),
            optimizers={each.name: each.full_state() for each in self.optimizers},
        )
        # Leading zeros let names sort by step.
        path = self.log.folder / f"step-{step:06d}.pt"
        if self.ranks.rank == 0:
            write_checkpoint(path, state)

    def log_step(self, step):
        """Log the loss that is minimised and, where a record has it, the next token's."""
        losses = dict(zip(("train_loss", "next_token_loss"), self.health.losses))
        self.log_losses(step, self.elapsed_ms(), **losses)

    def finish(self):
        """Log the results."""
        cfg = self.cfg
        reached = "reached" if self.val_loss <= cfg.target_loss else "not reached"
        self.log(f"target loss {cfg.target_loss}: {reached}")
        if cfg.preset == "record":
            self.log(f"to file it with its record: python records/ledger file {self.log.path}")
        results = dict(
            val_loss=f"{self.val_loss:.6f}",
            train_time_ms=f"{self.train_time_ms:.0f}",
            steps=self.last,
            tokens=self.plan.tokens,
            val_digest=self.val_digest,  # a resumed run may validate on other tokens
            peak_memory_mib=peak_memory_mib(self.ranks.device),  # of rank 0
            **self.facts)
        self.log("---")  # programs read what follows
        for key, value in results.items():
            self.log(f"{key}: {value}")


def check_data(cfg, loader, tokens, digest):
    """Raise UserError where training data are not the checkpoint's, held out, or too few."""
    files = f"--train_files {cfg.train_files}"
    if loader.digest != digest:
        raise UserError(f"{files}: not the data of {cfg.resume}")
    if set(loader.files) & set(find_shards(cfg.val_files)):
        raise UserError(f"{files}: --val_files has a file of these, too")
    if tokens > loader.size:
        message = f"{files}: {loader.size} tokens, read again as the run takes {tokens}"
        if cfg.preset == "record" and not cfg.repeat_data:
            shards = math.ceil(tokens / 1e8)  # of FineWeb
            raise UserError(f"{message}; fetch more: python data/fineweb.py {shards}, "
                            "or --repeat_data true")
        loader.log(message)


# ---- Command line -----------------------------------------------------------
# Flags that may differ from the checkpoint of a resumed run
MAY_CHANGE = """num_iterations train_files val_files val_tokens val_every device
    sequences_per_forward head_chunks run_id save_every resume""".split()
ZERO_IS_OFF = "val_every warmup_steps head_chunks save_every".split()


def show(value) -> str:
    """A value in the form that its flag takes."""
    if isinstance(value, tuple):
        return ",".join(map(show, value))
    if is_dataclass(value):  # a row
        return ":".join(map(show, vars(value).values()))
    return str(value)


def flag_type(name, default):
    """What turns the text of a flag into a value like the default. It raises ValueError."""
    kind = type(default)
    least = 0 if kind is float or name in (*MAY_BE_ZERO, *ZERO_IS_OFF) else 1

    def flag(text):
        if kind is bool:
            return ["false", "true"].index(text.lower()) == 1
        if kind is tuple:
            return tuple(map(flag_type(name, default[0]), text.split(",")))
        if is_dataclass(default):  # a row
            pairs = zip(vars(default).items(), text.split(":"), strict=True)
            return kind(*(flag_type(*field)(part) for field, part in pairs))
        value = kind(text)
        if kind is not str and not least <= value < 2**31:  # too large for any machine
            raise ValueError
        return value

    return flag


def parse_flags(argv) -> dict:
    """The flags among these words, or those of the command line, as values. Raises UserError."""
    def error(message):
        raise UserError(f"{message}; --help lists the flags")

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.error = error  # one line, as all errors
    # The comments of the table: `name: type = default  # meaning`
    meanings = dict(re.findall(r"^    (\w+): .* = .*?  # (.*)$", SCRIPT.read_text("utf-8"), re.M))
    choices = dict(preset=["record", "pocket"], device=["auto", "cuda", "cpu"])
    # Only what is given stands in the result, so that defaults can come from elsewhere.
    for each in fields(Hyperparameters):
        name = each.name
        default = show(each.default)
        pocket = show(POCKET.get(name, each.default))
        meaning = meanings.get(name, "")
        parser.add_argument(f"--{name}", type=flag_type(name, each.default), metavar="X",
                            choices=choices.get(name),
                            help=f"{meaning} (record: {default}, pocket: {pocket})")
    return vars(parser.parse_args(argv))


def parse_args(argv) -> Hyperparameters:
    """The hyperparameters of a new run. Raises UserError."""
    return hyperparameters(parse_flags(argv))


def hyperparameters(given, saved=None) -> Hyperparameters:
    """The flags given, over those of their preset or of a checkpoint. Raises UserError."""
    values = POCKET if given.get("preset") == "pocket" else {}
    if saved:
        # The new process chooses its device and its log.
        values = saved | dict(device="auto", run_id="", head_chunks=0)
        for name, value in given.items():
            if name not in MAY_CHANGE and value != saved[name]:
                raise UserError(f"--{name} {show(value)}: the checkpoint has {show(saved[name])}; "
                                f"a resumed run may change {', '.join(MAY_CHANGE)}")
    cfg = Hyperparameters(**(values | given))
    # A rule begins with its flag. The record has rules of its own.
    rules = {
        "val_seq_len must be a multiple of 128": cfg.val_seq_len % 128 == 0,
        "eot_token must be below vocab_size": cfg.eot_token < cfg.vocab_size,
        "num_iterations must be at most a million": cfg.num_iterations <= 10**6,
        "run_id must be of letters, digits, _ . + -, and not begin with .":
            re.fullmatch(r"([\w+-][\w.+-]*)?", cfg.run_id),
    }
    for rule, holds in (rules | check_flags(cfg)).items():
        if not holds:
            raise UserError(f"--{rule}; here it is {show(getattr(cfg, rule.split()[0]))}")
    return cfg


def run_script(argv) -> int:
    """Train or resume by the flags. Returns the exit code. Raises UserError."""
    given = parse_flags(argv)
    path = given.get("resume", "")
    state = NEW_RUN
    if path == "auto" and given.get("run_id"):
        path, state = newest_checkpoint(Path("logs", given["run_id"]))
    elif path:
        state = load_checkpoint(Path(path))
    cfg = hyperparameters(given | dict(resume=path), state.get("settings"))
    with Ranks(cfg) as ranks:
        chunks = cfg.head_chunks or default_head_chunks(ranks.device)
        cfg = replace(cfg, head_chunks=chunks)
        log = Log(cfg, ranks, may_restart=given.get("resume"))
        if path:
            torch.set_num_threads(state["threads"])  # so that the run goes on to the bit
        left = cfg.num_iterations - state["step"]
        if left < 0:
            raise UserError(f"--num_iterations {cfg.num_iterations}: {path} is of a later step")
        # A finished record can be evaluated without a GPU.
        if left and cfg.preset == "record" and ranks.device.type != "cuda":
            raise UserError("--preset record: there is no CUDA device; use --preset pocket")
        run = Run(cfg, ranks, log, state)
        train(run, cfg)
        if run.stopped:
            log("stopped by a signal; what --save_every saved goes on by "
                f"--run_id {log.run_id} --resume auto")
            return 1
        run.finish()
        return 0


def main(argv=None) -> int:
    """Run the script and return its exit code: 2 after an error that a user can mend."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack some letters
    try:
        return run_script(argv)
    except (UserError, OSError, dist.DistError) as error:
        message = str(error)  # names the file or flag
    except (MemoryError, torch.OutOfMemoryError):
        # Fewer tokens at once; --head_chunks helps where the logits alone are too large.
        message = "out of memory; shorten the sequences or lower --sequences_per_forward"
    # One rank of each machine is enough.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{SCRIPT.name}: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
