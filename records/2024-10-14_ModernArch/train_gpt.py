#!/usr/bin/env python3
"""Train a 124M-class GPT to 3.28 validation loss on FineWeb, as fast as 8 H100s allow.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the record, on 8 GPUs
    python train_gpt.py                                       # the record, on one GPU
    python train_gpt.py --preset pocket                       # a small model, on a CPU too

Parent: none. It has ReLU², QK-norm, zero-initialised output projections and a padded vocabulary.

The record comes first: hyperparameters, model, optimizers, schedules, training loop. The harness
below the banner reads data, validates, saves and logs. It is the same in every record.

Technique                                         where it is
ReLU²                                             MLP
QK-norm                                           CausalSelfAttention
rotary embedding                                  GPT, rotate
Muon                                              orthogonalize, muon_update
rates                                             schedule
"""

import argparse
import ctypes
import glob
import hashlib
import inspect
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

    A row has the default of the preset record, then that of pocket.
    """

    preset: str = "record", "pocket"  # the defaults that the other flags change
    # Model
    vocab_size: int = 50257, 257  # token ids are smaller
    vocab_multiple: int = 128, 16  # embeddings and head are padded to a multiple of it
    eot_token: int = 50256, 256  # end-of-text, the token that opens each document
    model_dim: int = 768, 64  # width of the residual stream
    head_dim: int = 128, 16  # width of an attention head
    num_layers: int = 12, 2  # of attention and an MLP each
    rope_base: int = 10000, 32  # inverse of the lowest rotary frequency
    seed: int = 0, 0  # seed of the initial weights
    # Optimizers
    embed_lr: float = 0.0036, 0.025  # Adam's rate of the matrix of embedding and head
    muon_lr: float = 0.00036, 0.005  # Muon's rate; root mean square of a step
    muon_momentum: float = 0.95, 0.85  # Muon's momentum
    # Schedules
    num_iterations: int = 5100, 240  # optimizer steps
    seq_lens: tuple = (1024,), (128,)  # tokens of a training sequence
    cooldown_frac: float = 1450 / 5100, 0.7  # last share of the run, in which rates fall
    # Data and validation
    train_files: str = "data/fineweb10B/fineweb_train_*.bin", "data/pocket/pocket_train_*.bin"
    val_files: str = "data/fineweb10B/fineweb_val_*.bin", "data/pocket/pocket_val_*.bin"
    sequences_per_step: int = 512, 16  # sequences of a step, all ranks together
    sequences_per_forward: int = 64, 16  # sequences that a rank runs at once, at most
    sequence_stride: int = 1, 1_000_003  # between sequences, modulo all of a shard
    val_seq_len: int = 1024, 128  # tokens of a validation sequence
    val_tokens: int = 10_485_760, 262_144  # validation tokens, each counted once
    val_every: int = 125, 0  # steps between validations; 0: only the last
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
    require(len(cfg.seq_lens) == 1, "seq_lens", "be one length")
    require(cfg.head_dim % 4 == 0, "head_dim", "be a multiple of 4")
    require(cfg.model_dim % cfg.head_dim == 0, "model_dim", "be a multiple of head_dim")
    require(0 < cfg.cooldown_frac <= 1, "cooldown_frac", "be above 0, at most 1")


# ---- Model ------------------------------------------------------------------
# In names: B sequences, T tokens, S = B·T, D model_dim, H heads, K head_dim, V padded vocabulary.
# The residual stream x has the shape (B, T, D).
def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension."""
    length = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
    mean_square = length.square() / x.size(-1)
    epsilon = torch.finfo(x.dtype).eps  # as in the F.rms_norm of its day
    return (x * (mean_square + epsilon).rsqrt()).type_as(x)


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
        self.c_q = nn.Linear(dim, dim, bias=False)
        self.c_k = nn.Linear(dim, dim, bias=False)
        self.c_v = nn.Linear(dim, dim, bias=False)
        self.c_proj = nn.Linear(dim, dim, bias=False)

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
        self.c_fc = nn.Linear(cfg.model_dim, 4 * cfg.model_dim, bias=False)
        self.c_proj = nn.Linear(4 * cfg.model_dim, cfg.model_dim, bias=False)

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
    """The model, under the published parameter names."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        vocab = round_up(cfg.vocab_size, cfg.vocab_multiple)
        self.embed = nn.Embedding(vocab, cfg.model_dim)
        self.blocks = nn.ModuleList()
        for _ in range(cfg.num_layers):
            self.blocks.append(Block(cfg))
        self.lm_head = nn.Linear(cfg.model_dim, vocab, bias=False)
        self.lm_head.weight = self.embed.weight  # one matrix
        self.tokens_per_piece = cfg.sequences_per_forward * max(cfg.seq_lens)  # of the head
        exponent = torch.arange(0, cfg.head_dim, 2) / cfg.head_dim
        frequency = 1 / cfg.rope_base**exponent  # (K / 2,)
        position = torch.arange(max(*cfg.seq_lens, cfg.val_seq_len))
        theta = torch.outer(position, frequency)[:, None]  # (T, 1, K / 2)
        rotary = torch.stack([theta.cos(), theta.sin()]).bfloat16()
        self.register_buffer("rotary", rotary, persistent=False)

    @torch.no_grad()
    def init_weights(self, generator):
        """Initialise each matrix by its name. Raises KeyError for an unknown one."""
        for name, param in self.named_parameters():
            if name.endswith(("embed.weight", "q.weight", "k.weight", "v.weight", "fc.weight")):
                bound = param.size(-1) ** -0.5
                param.uniform_(-bound, bound, generator=generator)
            elif name.endswith(".weight"):
                param.zero_()  # zero-initialised projections: @Grad62304977
            else:
                raise KeyError(f"no initialisation for the parameter {name}")

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
        size = self.tokens_per_piece
        if len(x_SD) <= size:
            return self.head_loss(x_SD, targets_S)
        # In pieces, recomputed in the backward pass: the logits are never in memory all at once.
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
    """A row of the table: some parameters and how they are updated."""

    name: str
    rule: type  # Adam or Muon
    params: list
    lr: float  # Adam: about a weight's change; Muon: about the spectral norm of a change
    betas: tuple = (0.9, 0.95)  # Adam: decay of its means of gradients and of their squares


def parameter_groups(model: GPT, cfg) -> list[Group]:
    """The table of parameter groups. Each parameter of the model is in one row."""
    def ending(*names):
        return [param for name, param in model.named_parameters() if name.endswith(names)]

    attention = ending("c_q.weight", "c_k.weight", "c_v.weight", "attn.c_proj.weight")
    return [
        Group("attention", Muon, attention, cfg.muon_lr),
        Group("mlp in", Muon, ending("c_fc.weight"), cfg.muon_lr),
        Group("mlp out", Muon, ending("mlp.c_proj.weight"), cfg.muon_lr),
        Group("embed", Adam, [model.embed.weight], cfg.embed_lr),
    ]


class Optimizer:
    """A group's weights and gradients as two flat buffers, and its state, on every rank."""

    def __init__(self, group, ranks):
        self.group = group
        self.name = group.name
        self.ranks = ranks
        self.handle = None  # of a communication under way
        self.numel = sum(param.numel() for param in group.params)
        first = group.params[0].detach()
        self.weights = first.new_zeros(self.numel)
        self.grads = torch.zeros_like(self.weights)
        start = 0
        for param in group.params:  # they become views of the buffers
            end = start + param.numel()
            weight = self.weights[start:end].view_as(param)
            param.data = weight.copy_(param.detach())
            param.grad = self.grads[start:end].view_as(param)
            start = end
        self.lr = torch.zeros((), device=self.grads.device)  # a tensor: compiled once
        self.state = {"mean": torch.zeros_like(self.grads)}

    def tensors(self):
        return [self.weights, *self.state.values()]

    def reduce(self):
        """Begin to sum the gradients over the ranks."""
        if self.ranks.world_size > 1:
            self.handle = dist.all_reduce(self.grads, async_op=True)

    def update(self, now, divisor):
        """Update by gradients / divisor, or begin to."""
        self.wait()
        self.grads.div_(divisor)
        self.lr.fill_(self.group.lr * now.lr_factor)
        self.begin_update(now)

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

    def __init__(self, group, ranks):
        super().__init__(group, ranks)
        self.state["square"] = torch.zeros_like(self.grads)
        self.state["count"] = torch.zeros_like(self.lr)
        self.rule = compile_on_gpu(adam_update, self.lr)

    def begin_update(self, now):
        state = self.state.values()
        self.rule(self.weights, self.grads, *state, lr=self.lr, betas=self.group.betas)


class Muon(Optimizer):
    """Muon on matrices of one shape, by every rank."""

    def __init__(self, group, ranks):
        self.shape = group.params[0].shape[-2:]
        super().__init__(group, ranks)
        self.batch = (-1, *self.shape)
        dtype = torch.bfloat16 if self.lr.is_cuda else torch.float32
        self.updates = torch.zeros_like(self.weights, dtype=dtype)
        self.rule = compile_on_gpu(muon_update, self.lr)

    def begin_update(self, now):
        updates = self.updates.view(self.batch)
        grads = self.grads.view(self.batch)
        means = self.state["mean"].view(self.batch)
        for update, grad, mean in zip(updates, grads, means):
            self.rule(update, grad, mean, momentum=now.momentum)
        factor = max(self.shape) ** 0.5  # brings the entries' root mean square to 1
        self.weights.sub_(self.updates * (self.lr * factor))


def compile_on_gpu(rule: Callable, tensor: Tensor) -> Callable:
    return torch.compile(rule, dynamic=False) if tensor.is_cuda else rule


def build_optimizers(model: GPT, cfg, ranks) -> list[Optimizer]:
    """An optimizer for each row of the table that has parameters."""
    groups = parameter_groups(model, cfg)
    covered = sorted(id(param) for group in groups for param in group.params)
    assert covered == sorted(map(id, model.parameters())), "each parameter needs one row"
    return [group.rule(group, ranks) for group in groups if group.params]


def step_optimizers(optimizers: list[Optimizer], now: "Schedule", divisor: int):
    """One step of all optimizers. Each one computes while others communicate."""
    for optimizer in optimizers:
        optimizer.reduce()
    for optimizer in optimizers:
        optimizer.update(now, divisor)
    for optimizer in optimizers:
        optimizer.grads.zero_()


# ---- Schedules --------------------------------------------------------------
@dataclass
class Schedule:
    """What changes from step to step."""

    stage: int
    seq_len: int  # tokens of a sequence
    lr_factor: float  # of all rates
    momentum: float  # Muon's


def schedule(step: int, cfg) -> Schedule:
    """The schedule of a step from 0 to num_iterations. The last one only validates."""
    progress = step / cfg.num_iterations

    # Learning rate: linearly down to zero
    lr_factor = min(1.0, (1 - progress) / cfg.cooldown_frac)

    return Schedule(
        stage=0,  # all steps run the same kernels
        seq_len=cfg.seq_lens[0],
        lr_factor=lr_factor,
        momentum=cfg.muon_momentum,
    )


# ---- Training ---------------------------------------------------------------
def cut_rows(tokens, documents, position: int, length: int, cfg):
    """Cut a step's sequences, (N, length + 1), from a shard. Returns them and the next position."""
    return consecutive_rows(tokens, position, length, cfg)


def prepare_for_cuda(model: GPT, cfg, device: torch.device) -> str:
    """Mixed precision and compilation. Returns the head's type."""
    model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    model.compile(dynamic=False)
    return "bf16"


def accumulate_gradients(model: GPT, batches: list, now: Schedule) -> Tensor:
    """Add up the gradients of the mean losses of a step's batches. Returns the mean loss, (1,)."""
    total = 0
    for inputs, targets in batches:
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        total = total + loss.detach()
    return total.view(1) / len(batches)


def train(run: "Run", cfg):
    """The training loop. It ends after the last step, or when a signal asks it to stop."""
    last = cfg.num_iterations
    run.clock.start()
    for step in range(run.first_step, last + 1):  # the last round only validates
        now = schedule(step, cfg)

        if run.validation_is_due(step):
            run.clock.stop()
            run.validate(step)
            run.clock.start()

        if run.checkpoint_is_due(step, complete=True):
            run.clock.stop()
            run.save_checkpoint(step)
            run.clock.start()
        if step == last or run.is_asked_to_stop(step, complete=True):
            break

        batches = run.loader.next_step(now.seq_len)
        losses = accumulate_gradients(run.model, batches, now)
        run.health.check(step, losses)
        step_optimizers(run.optimizers, now, divisor=len(batches) * run.ranks.world_size)
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
