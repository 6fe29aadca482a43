#!/usr/bin/env python3
"""Train a 124M-class GPT to 3.28 validation loss on FineWeb, as fast as 8 H100s allow.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the record, on 8 GPUs
    python train_gpt.py                                       # the record, on one GPU
    python train_gpt.py --preset pocket                       # a small model on a CPU

A step's sequences are shared out among the ranks; what a rank cannot take at once is accumulated.

Parent: 2025-01-26_BatchSize. Changes relative to it:
- Optimizers: gradients are reduce-scattered, optimizer state is sharded over the ranks.
"""


# -----------------------------------------------------------------------------
# Setup
# -----------------------------------------------------------------------------

import argparse
import gc
import glob
import hashlib
import itertools
import math
import os
import platform
import re
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

BLOCK = 128  # tokens in a block of the attention mask, of queries and of keys
SCRIPT = Path(__file__).resolve()
ROOT = next((p for p in SCRIPT.parents if (p / "data" / "pocket.py").exists()), SCRIPT.parent)

class UserError(Exception):
    """Something that the user can mend: it ends the run with one line and no traceback."""

def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# -----------------------------------------------------------------------------
# Hyperparameters
# -----------------------------------------------------------------------------

@dataclass(frozen=True)
class Hyperparameters:
    """Everything a run can be asked to do differently; each field is a flag of the same name."""
    # Data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob of the training shards
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # glob of the validation shards
    tokenizer: str = "gpt2"  # what made the tokens, gpt2 or bytes; decodes the sample
    vocab_size: int = 50257  # token ids lie below it
    eot_token: int = 50256  # end-of-text, the token that opens each document
    # Step
    num_iterations: int = 1770  # optimizer steps
    sequences_per_step: int = 8  # sequences in one step, all ranks together
    train_seq_len: int = 48 * 1024  # tokens of a training sequence, a multiple of 128
    sequences_per_forward: int = 1  # sequences that a rank runs at once, at most
    seed: int = 0  # of the initial weights and of the sample
    target_loss: float = 3.28  # validation loss to reach, nats per token
    # Validation
    val_every: int = 125  # steps between validations; 0: only the last
    val_tokens: int = 10_485_760  # validation tokens, each counted once
    val_seq_len: int = 4 * 64 * 1024  # tokens of a validation sequence, a multiple of 128
    # Model
    model_dim: int = 768  # width of the residual stream
    head_dim: int = 128  # width of an attention head
    mlp_ratio: int = 4  # hidden width of the MLP, in model_dim
    attention_pattern: str = "LSSSLSS.SSSL"  # a letter a layer: Long window, Short, . none
    value_embed_pattern: str = "012......012"  # value embedding table of each layer, . none
    attention_scale: float = 0.12  # factor of the attention scores
    rope_base: int = 1024  # inverse of the lowest rotary frequency
    logit_cap: float = 30.0  # logits lie between 0 and it
    logit_slope: float = 7.5  # divides the raw logits inside the sigmoid
    vocab_multiple: int = 128  # the head's rows are padded to a multiple of it
    # FP8 head
    fp8_head: bool = True  # FP8 products in the head while training, where the GPU has them
    fp8_x_scale: float = 2.0  # factor of the activations before the cast to e4m3
    fp8_w_scale: float = 2.0**9  # factor of the weights before the cast to e4m3
    fp8_grad_scale: float = 2.0**19  # factor of the gradients before the cast to e5m2
    # Optimizers
    embed_lr: float = 0.6  # Adam, token and value embeddings
    head_lr: float = 0.008  # Adam, output head
    scalar_lr: float = 0.04  # Adam, lambdas and skip weights
    adam_beta1: float = 0.8  # decay of Adam's mean of gradients
    adam_beta2: float = 0.95  # decay of Adam's mean of squared gradients
    adam_eps: float = 1e-10  # added to Adam's denominator
    muon_lr: float = 0.05  # Muon, hidden matrices; spectral norm per step
    muon_momentum: float = 0.95  # decay of Muon's mean of gradients, after the warm-up
    ns_steps: int = 5  # Newton-Schulz iterations
    # Schedules
    cooldown_frac: float = 0.4  # last part of the run, over which the rates fall
    final_lr_frac: float = 0.1  # fraction of the rates at the end of the run
    window_tokens: int = 1728  # long attention window at the end, rounded up to whole blocks
    momentum_start: float = 0.85  # Muon's momentum at step 0
    momentum_warmup: int = 300  # steps until muon_momentum is reached
    # Run: none of these changes the mathematics
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is one
    run_id: str = ""  # folder under logs/; empty: made from time and chance
    warmup_steps: int = 10  # untimed steps on random tokens that warm the kernels up
    head_chunks: int = 0  # pieces in which head and loss are computed; 0: by free memory
    compile_mode: str = ""  # mode of torch.compile; empty: its default
    save_every: int = 0  # steps between checkpoints; 0: none
    resume: str = ""  # checkpoint to go on from; auto: the newest whole one of --run_id
    sample_tokens: int = 0  # tokens of text to print after the last validation
    prompt: str = "\n"  # text that the sample continues
    profile: bool = False  # write a chrome trace of a few steps and a table by kernel

    @property
    def num_layers(self) -> int:
        return len(self.attention_pattern)

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab_size, self.vocab_multiple)

    @property
    def step_tokens(self) -> int:
        return self.sequences_per_step * self.train_seq_len

PRESETS = {
    "record": {},
    "pocket": dict(
        train_files="data/pocket/pocket_train_*.bin", val_files="data/pocket/pocket_val_*.bin",
        tokenizer="bytes", vocab_size=257, eot_token=256, target_loss=1.64,
        num_iterations=200, train_seq_len=512, sequences_per_forward=8,
        val_every=0, val_tokens=262_144, val_seq_len=8192,
        model_dim=128, head_dim=64, attention_pattern="LSSL", value_embed_pattern="0..0",
        window_tokens=256, momentum_warmup=50,
        warmup_steps=1, sample_tokens=200, prompt="def ",
    ),
}
# A checkpoint may be resumed with other values of these.
FREE_TO_CHANGE = set("""num_iterations train_files val_files sequences_per_forward target_loss
    val_every device run_id warmup_steps head_chunks compile_mode save_every resume sample_tokens
    prompt profile""".split())

class Parser(argparse.ArgumentParser):

    def error(self, message: str):
        raise UserError(f"{message}; --help lists the flags")

def boolean(text: str) -> bool:
    return ["false", "true"].index(text.lower()) == 1

def parse_args(argv: list[str]) -> tuple[str, Hyperparameters]:
    """The preset's name and the hyperparameters that the command line asks for."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", SCRIPT.read_text(), re.M))
    parser = Parser(prog=SCRIPT.name, allow_abbrev=False, description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="record", help="[record]")
    for field in fields(Hyperparameters):
        presets = [f"{k}: {v[field.name]!r}" for k, v in PRESETS.items() if field.name in v]
        text = f"{comments[field.name]} [{', '.join([repr(field.default), *presets])}]"
        switch = dict(type=boolean, nargs="?", const=True) if field.type is bool else {}
        parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, help=text,
                            **dict(type=field.type, metavar=field.type.__name__) | switch)
    flags = vars(parser.parse_args(argv))
    preset = flags.pop("preset")
    cfg = Hyperparameters(**PRESETS[preset] | flags)
    check_hyperparameters(cfg)
    return preset, cfg

def check_hyperparameters(cfg: Hyperparameters) -> None:
    """Raise UserError where no run can be made of `cfg`, with the flag, its value and the rule."""
    def must(condition: bool, name: str, rule: str) -> None:
        if not condition:
            raise UserError(f"--{name} {getattr(cfg, name)}: must {rule}")

    may_be_zero = set("""seed val_every sample_tokens head_chunks save_every warmup_steps ns_steps
        momentum_warmup window_tokens eot_token""".split())
    for field in fields(cfg):
        if field.type in (int, float):
            least = field.type is int and field.name not in may_be_zero
            must(least <= getattr(cfg, field.name) < math.inf, field.name, f"be {least:d} or more")
    for name in ("train_seq_len", "val_seq_len"):
        must(getattr(cfg, name) % BLOCK == 0, name, f"be a multiple of {BLOCK}")
    must(cfg.head_dim % 4 == 0, "head_dim", "be a multiple of 4")
    must(cfg.model_dim % cfg.head_dim == 0, "model_dim", f"be a multiple of {cfg.head_dim=}")
    must(cfg.eot_token < cfg.vocab_size <= 2**16, "vocab_size", f"exceed {cfg.eot_token=}, to 65536")
    must(re.fullmatch("[LS.]+", cfg.attention_pattern), "attention_pattern", "be of L, S and .")
    must(re.fullmatch(f"[0-9.]{{{cfg.num_layers}}}", cfg.value_embed_pattern),
         "value_embed_pattern", f"hold {cfg.num_layers} digits or ., as many as attention_pattern")
    must(cfg.logit_slope > 0, "logit_slope", "be positive")
    must(cfg.tokenizer in ("gpt2", "bytes"), "tokenizer", "be gpt2 or bytes")
    must(cfg.device in ("auto", "cuda", "cpu"), "device", "be auto, cuda or cpu")
    must(re.fullmatch(r"[\w-][\w.-]*|", cfg.run_id), "run_id", "be of letters, digits, _, - and .")


# -----------------------------------------------------------------------------
# Data (the same in every record)
# -----------------------------------------------------------------------------

HEADER_INTS, MAGIC, VERSION = 256, 20240520, 1  # of a shard, little-endian int32

def find_shards(pattern: str) -> list[Path]:
    """Files that match the glob, here or else in the repository, sorted. Raises UserError."""
    files = sorted(glob.glob(pattern)) or sorted(glob.glob(str(ROOT / pattern)))
    if not files:
        known = [f"{name}.py" for name in ("pocket", "fineweb") if name in pattern]
        maker = (known or ["text.py --tokenizer gpt2 --out DIR FILE"])[0]
        raise UserError(f"no file matches {pattern!r}; make the data with: python data/{maker}")
    return [Path(file) for file in files]

def shard_size(path: Path) -> int:
    """Number of tokens by the shard's header, held against the file's size. Raises UserError."""
    try:
        size, header = path.stat().st_size, np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if len(header) < HEADER_INTS or header[0] != MAGIC or header[1] != VERSION:
        raise UserError(f"{path}: magic number and version are {header[:2].tolist()} instead of "
                        f"{[MAGIC, VERSION]}: no token shard; make or fetch it again")
    expected = 4 * HEADER_INTS + 2 * int(header[2])
    if header[2] < 0 or size != expected:
        raise UserError(f"{path}: {size} bytes, but by its count of {header[2]} tokens it should "
                        f"have {expected}; make or fetch it again")
    return int(header[2])

def read_shard(path: Path, vocab_size: int) -> np.ndarray:
    """The shard's tokens, uint16. Raises UserError where it is none, or of another vocabulary."""
    num_tokens = shard_size(path)
    tokens = np.fromfile(path, dtype="<u2", count=num_tokens, offset=4 * HEADER_INTS)
    if num_tokens and tokens.max() >= vocab_size:
        position = int(np.argmax(tokens >= vocab_size))
        raise UserError(f"{path}: token {tokens[position]} at position {position} is not below "
                        f"--vocab_size {vocab_size}; name the vocabulary that the data has")
    return tokens

def fingerprint(files: list[Path]) -> list:
    """Name, number of tokens and a hash of three samples of each shard: tells other data apart."""
    prints = []
    for path in files:
        num_tokens, digest = shard_size(path), hashlib.sha256()
        with path.open("rb") as file:
            for offset in (0, num_tokens, 2 * num_tokens - 4096):
                file.seek(4 * HEADER_INTS + max(0, offset))
                digest.update(file.read(4096))
        prints.append([path.name, num_tokens, digest.hexdigest()])
    return prints

class TokenLoader:
    """Gives each rank its sequences of each step; the stream is the same for any number of ranks.

    A step's tokens are contiguous in one shard and rank r takes the r-th part of its sequences.
    What does not fill a step at a shard's end is skipped. After the last shard comes the first.
    """

    def __init__(self, cfg: Hyperparameters, rank: int, world_size: int, device: torch.device,
                 say: Callable[[str], None] = print):
        self.cfg, self.rank, self.device, self.say = cfg, rank, device, say
        self.files = find_shards(cfg.train_files)
        for path in self.files:
            if (size := shard_size(path)) <= cfg.step_tokens:
                raise UserError(f"{path}: {size} tokens are too few for a step, which takes one "
                                f"more than {cfg.step_tokens}; lower --train_seq_len")
        self.sequences = cfg.sequences_per_step // world_size
        self.per_forward = max(n for n in range(1, self.sequences + 1)
                               if self.sequences % n == 0 and n <= cfg.sequences_per_forward)
        self.micro_steps = self.sequences // self.per_forward  # forward passes of a rank in a step
        self.reader, self.ahead = ThreadPoolExecutor(1), None
        self.seek(dict(epoch=0, shard=0, position=0))

    def state(self) -> dict[str, int]:
        """Where the next step begins, for any number of ranks."""
        return dict(epoch=self.epoch, shard=self.shard, position=self.position)

    def seek(self, state: dict[str, int]) -> None:
        """Go to where `state` was taken."""
        self.epoch, self.shard, self.position = (state[k] for k in ("epoch", "shard", "position"))
        self._open(read_shard(self.files[self.shard], self.cfg.vocab_size))

    def _open(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        if len(self.files) > 1:
            following = self.files[(self.shard + 1) % len(self.files)]
            self.ahead = self.reader.submit(read_shard, following, self.cfg.vocab_size)

    def next_step(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of the next step: inputs and targets of each forward pass."""
        if self.position + self.cfg.step_tokens >= len(self.tokens):
            self.shard, self.position = (self.shard + 1) % len(self.files), 0
            if self.shard == 0:
                self.epoch += 1
                self.say(f"data: its end is reached, epoch {self.epoch + 1} begins")
            self._open(self.ahead.result() if self.ahead else self.tokens)
        length = self.per_forward * self.cfg.train_seq_len
        first = self.position + self.rank * self.sequences * self.cfg.train_seq_len
        self.position += self.cfg.step_tokens
        return [to_batch(self.tokens[start : start + length + 1], self.per_forward, self.device)
                for start in range(first, first + self.micro_steps * length, length)]

def to_batch(tokens: np.ndarray, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs (int32) and targets (int64), both (rows, T), of rows·T + 1 tokens, on the device."""
    buffer = torch.from_numpy(tokens.astype(np.int64))
    pair = buffer[:-1].int().view(rows, -1), buffer[1:].view(rows, -1)
    if device.type == "cuda":
        pair = tuple(x.pin_memory().to(device, non_blocking=True) for x in pair)
    return pair


# -----------------------------------------------------------------------------
# Model
# -----------------------------------------------------------------------------

# Letters in tensor names: B sequences, T tokens of each, S = B·T, D model_dim, H heads, K head_dim,
# V padded vocabulary, M×N a weight. The residual stream is x, (B, T, D).

def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))

# FP8 head: @YouJiacheng; scales within CastedLinear: @leloykun.

def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max  # casts saturate by themselves only since torch 2.12
    return x.float().mul(scale).clamp(-limit, limit).to(dtype)

def scaled_mm(a_MK: Tensor, b_KN: Tensor, scale: float, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b · scale, held to the GPU's rules for FP8 on every device."""
    (K, N), one = b_KN.shape, torch.ones((), device=a_MK.device)
    assert K % 16 == 0 and N % 16 == 0, f"FP8 products take multiples of 16: {K=} {N=}"
    assert a_MK.stride(1) == 1 and b_KN.stride(0) == 1, "FP8 products take row-major @ column-major"
    return torch._scaled_mm(a_MK, b_KN, scale_a=one * scale, scale_b=one, out_dtype=dtype,
                            use_fast_accum=fast)

@torch.library.custom_op("nanogpt::mm", mutates_args=())
def fp8_mm(x_SD: Tensor, w_VD: Tensor, x_scale: float, w_scale: float, grad_scale: float
           ) -> tuple[Tensor, Tensor, Tensor]:
    """x @ w.T by e4m3 factors, as bf16, and the two factors for the backward pass."""
    x_f8, w_f8 = (to_fp8(*pair, torch.float8_e4m3fn) for pair in ((x_SD, x_scale), (w_VD, w_scale)))
    return scaled_mm(x_f8, w_f8.T, 1 / (x_scale * w_scale), torch.bfloat16, True), x_f8, w_f8

@fp8_mm.register_fake
def _(x_SD, w_VD, *scales):
    out = x_SD.new_empty(len(x_SD), len(w_VD), dtype=torch.bfloat16)
    x_f8, w_f8 = (x.new_empty(x.shape, dtype=torch.float8_e4m3fn) for x in (x_SD, w_VD))
    return out, x_f8, w_f8

@torch.library.custom_op("nanogpt::mm_backward", mutates_args=())
def fp8_mm_backward(grad_SV: Tensor, x_f8: Tensor, w_f8: Tensor, x_scale: float, w_scale: float,
                    grad_scale: float) -> tuple[Tensor, Tensor]:
    """Gradients of x, bf16, and of w, fp32 and column-major, by e5m2 output gradients."""
    grad_f8 = to_fp8(grad_SV, grad_scale, torch.float8_e5m2)
    grad_x = scaled_mm(grad_f8, w_f8.T.contiguous().T, 1 / (grad_scale * w_scale), torch.bfloat16,
                       False)
    grad_w = scaled_mm(x_f8.T.contiguous(), grad_f8.T.contiguous().T, 1 / (x_scale * grad_scale),
                       torch.float32, False)
    return grad_x, grad_w.T

@fp8_mm_backward.register_fake
def _(grad_SV, x_f8, w_f8, *scales):
    return (x_f8.new_empty(x_f8.shape, dtype=torch.bfloat16),
            w_f8.new_empty(w_f8.T.shape, dtype=torch.float32).T)

def fp8_setup_context(ctx, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.scales = inputs[2:]
    ctx.set_materialize_grads(False)

def fp8_backward(ctx, grad_SV: Tensor, *_) -> tuple:
    grads = torch.ops.nanogpt.mm_backward(grad_SV, *ctx.saved_tensors, *ctx.scales)
    return *grads, None, None, None

fp8_mm.register_autograd(fp8_backward, setup_context=fp8_setup_context)

class CastedLinear(nn.Linear):
    """A linear map without bias whose weight is cast to the input's type, or to FP8 in training."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.fp8_scales = None  # of input, weight and gradient, where FP8 is to be used

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8_scales is None or not self.training:
            return F.linear(x, self.weight.type_as(x))
        out, *_ = torch.ops.nanogpt.mm(x.flatten(0, -2), self.weight, *self.fp8_scales)
        return out.view(*x.shape[:-1], -1)

# Attention: token i sees token j where j <= i, both are of one document, and
# block(i) - block(j) < window. On CUDA FlexAttention skips the blocks that nobody sees. Elsewhere
# it has no backward pass: each block of queries meets the `window` blocks of keys up to its own.

def flex_mask(docs_S: Tensor, window: Tensor) -> BlockMask:
    """The mask by tensor operations alone, so that the window's growth compiles nothing anew.

    Documents: @KoszarskyB; block-wise window, built by hand: @YouJiacheng."""
    def document_causal(b, h, q, k):
        return (q >= k) & (docs_S[q] == docs_S[k])

    def ordered(seen_QK: Tensor) -> tuple[Tensor, Tensor]:  # how many blocks are seen, which first
        indices = seen_QK.int().argsort(dim=-1, descending=True, stable=True)
        return seen_QK.sum(-1, dtype=torch.int32)[None, None], indices.int()[None, None]

    docs, block = docs_S.view(-1, BLOCK), torch.arange(len(docs_S) // BLOCK, device=docs_S.device)
    distance = block[:, None] - block
    first, last = docs[:, 0], docs[:, -1]
    seen = (distance >= 0) & (distance < window) & (first[:, None] <= last)
    full = seen & (distance > 0) & (last[:, None] == first)
    return BlockMask.from_kv_blocks(*ordered(seen & ~full), *ordered(full), BLOCK_SIZE=BLOCK,
                                    mask_mod=document_causal)

def dense_mask(docs_S: Tensor, window: Tensor) -> Tensor:
    """What is added to the scores: 0 where a query sees a key, (S / 128, 1, 128, window · 128)."""
    docs = docs_S.view(-1, BLOCK)
    window = min(int(window), len(docs))
    seen = docs[:, :, None] == gather_window(docs, window)[:, None, :]
    seen &= seen.new_ones(BLOCK, window * BLOCK).tril((window - 1) * BLOCK)
    return torch.zeros(seen.shape, device=docs.device).masked_fill_(~seen, -math.inf)[:, None]

def gather_window(blocks: Tensor, window: int) -> Tensor:
    """(S / 128, 128, …) → (S / 128, window · 128, …): each block after the ones before it."""
    padded = torch.cat([blocks.new_zeros(window - 1, *blocks.shape[1:]), blocks])
    return torch.cat([padded[i : i + len(blocks)] for i in range(window)], dim=1)

def attend(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask: BlockMask | Tensor, scale: float,
           kernel_options: dict | None) -> Tensor:
    """Attention among the B·T tokens under either mask, (B, T, H, K)."""
    shape, qkv = q_BTHK.shape, (q_BTHK, k_BTHK, v_BTHK)
    if isinstance(mask, BlockMask):
        q, k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in qkv)
        y = flex_attention(q, k, v, block_mask=mask, scale=scale, kernel_options=kernel_options)
    else:
        q, k, v = (x.reshape(-1, BLOCK, *shape[2:]) for x in qkv)
        k, v = (gather_window(x, mask.size(-1) // BLOCK) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y.transpose(1, 2).reshape(shape)

class Rotary(nn.Module):
    """Rotary position embedding, https://arxiv.org/abs/2104.09864; half-truncated, that is, half of
    the pairs do not turn: @YouJiacheng."""

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        quarter = cfg.head_dim // 4
        frequency = (1 / cfg.rope_base) ** torch.linspace(0, 1, steps=quarter)
        frequency = torch.cat([frequency, torch.zeros(quarter)])
        theta = torch.outer(torch.arange(max(cfg.train_seq_len, cfg.val_seq_len)), frequency)
        self.register_buffer("cos", theta.cos()[:, None], persistent=False)
        self.register_buffer("sin", theta.sin()[:, None], persistent=False)

    def forward(self, x_BTHK: Tensor) -> Tensor:
        cos, sin = self.cos[: x_BTHK.size(1)], self.sin[: x_BTHK.size(1)]
        x1, x2 = x_BTHK.float().chunk(2, dim=-1)
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).type_as(x_BTHK)

class CausalSelfAttention(nn.Module):

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.heads, self.scale = cfg.model_dim // cfg.head_dim, cfg.attention_scale
        # Merged QKV: @fernbear.bsky.social, @YouJiacheng
        self.qkv_w = nn.Parameter(torch.empty(3, cfg.model_dim, cfg.model_dim))
        self.lambdas = nn.Parameter(torch.empty(2))  # of the values and of their embedding
        self.c_proj = CastedLinear(cfg.model_dim, cfg.model_dim)

    def forward(self, x: Tensor, value_embed: Tensor | None, rotary: Rotary, *mask) -> Tensor:
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x))
        qk, v = qkv.unflatten(-1, (3 * self.heads, -1)).split([2 * self.heads, self.heads], dim=2)
        q, k = rotary(norm(qk)).chunk(2, dim=2)  # QK-norm: @Grad62304977
        v = self.lambdas[0] * v
        if value_embed is not None:  # @KoszarskyB, @Grad62304977, after Zhou et al. 2024
            v = v + self.lambdas[1] * value_embed.view_as(v)
        return self.c_proj(attend(q, k, v, *mask[:1], self.scale, *mask[1:]).flatten(2))

class MLP(nn.Module):

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.c_fc = CastedLinear(cfg.model_dim, cfg.mlp_ratio * cfg.model_dim)
        self.c_proj = CastedLinear(cfg.mlp_ratio * cfg.model_dim, cfg.model_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())  # ReLU²: https://arxiv.org/abs/2109.08668

class Block(nn.Module):

    def __init__(self, cfg: Hyperparameters, layer: int):
        super().__init__()
        self.attn = CausalSelfAttention(cfg) if cfg.attention_pattern[layer] != "." else None
        self.mlp = MLP(cfg)
        self.lambdas = nn.Parameter(torch.empty(2))  # of x and of the embedding x0

    def forward(self, x: Tensor, x0: Tensor, *attention) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0  # @KoszarskyB, @Grad62304977
        if self.attn is not None:
            x = x + self.attn(norm(x), *attention)
        return x + self.mlp(norm(x))

class GPT(nn.Module):
    """The model, with the published parameter names.

    Its forward gives the summed cross-entropy of `targets` (B, T), of which -1 counts for nothing,
    after `inputs` (B, T). Each row is a sequence of its own. `window`, int32 without dimensions, is
    the long window in blocks; the short one is half of it.
    """

    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg, self.pairs = cfg, cfg.num_layers // 2
        self.embed = nn.Embedding(cfg.vocab_size, cfg.model_dim)
        self.value_embeds = nn.ModuleList(nn.Embedding(cfg.vocab_size, cfg.model_dim)
                                          for _ in set(cfg.value_embed_pattern) - {"."})
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.num_layers))
        self.skip_weights = nn.Parameter(torch.empty(self.pairs))  # U-Net skips: @brendanh0gan
        self.lm_head = CastedLinear(cfg.model_dim, cfg.padded_vocab)
        self.rotary = Rotary(cfg)
        self.head_chunks, self.kernel_options = max(1, cfg.head_chunks), None

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise every parameter by its name. Raises KeyError for one it does not know."""
        for name, param in self.named_parameters():
            if "embed" in name:
                param.normal_(generator=generator)
            elif name.endswith(("qkv_w", "c_fc.weight")):
                bound = (0.75 / param.size(-1)) ** 0.5  # std 0.5 / sqrt(fan_in): @YouJiacheng
                param.uniform_(-bound, bound, generator=generator)
            elif name.endswith(("c_proj.weight", "lm_head.weight")):
                param.zero_()  # zero-initialised projections: @Grad62304977
            elif name.endswith("lambdas"):
                param.copy_(torch.tensor([0.5, 0.5] if "attn" in name else [1.0, 0.0]))
            elif name == "skip_weights":
                param.fill_(1)
            else:
                raise KeyError(f"no initialisation for the parameter {name}")

    def hidden(self, inputs_BT: Tensor, window: Tensor) -> Tensor:
        """The normed output of the last layer, (B, T, D)."""
        cfg = self.cfg
        starts = inputs_BT == cfg.eot_token
        starts |= torch.arange(starts.size(1), device=starts.device) == 0
        docs_S = starts.flatten().cumsum(0, dtype=torch.int32)
        build = flex_mask if docs_S.is_cuda else dense_mask
        masks = {"L": build(docs_S, window), "S": build(docs_S, (window // 2).clamp_min(1))}
        values = {str(i): table(inputs_BT) for i, table in enumerate(self.value_embeds)}

        x = x0 = norm(self.embed(inputs_BT))  # norm after the embedding: @Grad62304977
        skips = []
        for layer, block in enumerate(self.blocks):
            if layer >= cfg.num_layers - self.pairs:
                x = x + self.skip_weights[layer - cfg.num_layers + self.pairs] * skips.pop()
            x = block(x, x0, values.get(cfg.value_embed_pattern[layer]), self.rotary,
                      masks.get(cfg.attention_pattern[layer]), self.kernel_options)
            if layer < self.pairs:
                skips.append(x)
        return norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits in fp32, (…, V), soft-capped after Gemma 2: @Grad62304977, @KoszarskyB,
        @YouJiacheng."""
        return self.cfg.logit_cap * torch.sigmoid(self.lm_head(x).float() / self.cfg.logit_slope)

    def head_loss(self, x_SD: Tensor, targets_S: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x_SD), targets_S, ignore_index=-1, reduction="sum")

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor, window: Tensor) -> Tensor:
        x, targets = self.hidden(inputs_BT, window).flatten(0, 1), targets_BT.flatten()
        piece = self.cfg.sequences_per_forward * self.cfg.train_seq_len // self.head_chunks
        piece = round_up(piece, BLOCK)  # in validation too, so that it needs no more memory
        if piece >= len(x):
            return self.head_loss(x, targets)
        return sum(checkpoint(self.head_loss, *part, use_reentrant=False)  # computed twice, never kept
                   for part in zip(x.split(piece), targets.split(piece), strict=True))


# -----------------------------------------------------------------------------
# Optimizers
# -----------------------------------------------------------------------------

def orthogonalize(grad_MN: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix to each one of a batch, (…, M, N).

    Newton-Schulz iteration by a quintic as steep as can be at zero: singular values end between
    about 0.7 and 1.2. Source: Keller Jordan, https://kellerjordan.github.io/posts/muon/, with @jxbz,
    @leloykun, @YouJiacheng; batched: @scottjmaddox, @YouJiacheng.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    X = grad_MN.to(dtype)
    tall = X.size(-2) > X.size(-1)
    X = X.mT if tall else X
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X

def muon_update(grad_MN: Tensor, mean_MN: Tensor, momentum: Tensor, ns_steps: int,
                dtype: torch.dtype) -> Tensor:
    """Muon's step for a batch of matrices, before -lr. Changes the mean of gradients in place."""
    mean_MN.lerp_(grad_MN, 1 - momentum)
    nesterov = grad_MN.lerp(mean_MN, momentum)
    M, N = grad_MN.shape[-2:]
    return orthogonalize(nesterov, ns_steps, dtype) * max(1, M / N) ** 0.5

def adam_update(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, lr: Tensor,
                beta1: float, beta2: float, eps: float) -> None:
    """Adam's step, https://arxiv.org/abs/1412.6980, in place, computed in fp32."""
    step += 1
    new_mean = mean.float().lerp(grad.float(), 1 - beta1)
    new_square = square.float().lerp(grad.float().square(), 1 - beta2)
    denominator = (new_square / (1 - beta2**step)).sqrt() + eps
    weight.copy_(weight.float() - lr / (1 - beta1**step) * new_mean / denominator)
    mean.copy_(new_mean)
    square.copy_(new_square)

class ShardedOptimizer:
    """Parameters of one kind in one flat buffer, updated as one, the state shared by the ranks.

    The parameters become views of `weights`, their gradients of `grads`: one call reduces, updates
    or gathers all, and gradients accumulate in place. The buffers are padded to whole units (a
    scalar, or a matrix) on each rank; rank r owns the r-th part. They live as long as the
    optimizer, so that no tensor dies before the collective that uses it has ended.
    """

    def __init__(self, name: str, params: list[nn.Parameter], lr: float, cfg: Hyperparameters,
                 ranks: "Ranks", unit: int = 1):
        self.name, self.base_lr, self.cfg, self.ranks, self.handle = name, lr, cfg, ranks, None
        self.numel = sum(p.numel() for p in params)
        share = round_up(self.numel, unit * ranks.world_size) // ranks.world_size
        self.mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
        self.weights = params[0].detach().new_zeros(share * ranks.world_size)
        self.grads = torch.zeros_like(self.weights)
        parts = zip(params, itertools.accumulate((p.numel() for p in params), initial=0))
        for p, start in parts:
            part = slice(start, start + p.numel())
            self.weights[part] = p.detach().flatten()
            p.data, p.grad = self.weights[part].view_as(p), self.grads[part].view_as(p)
        self.grad = torch.empty_like(self.grads[self.mine]) if ranks.world_size > 1 else self.grads
        self.lr = torch.zeros((), device=self.weights.device)
        self.state = dict(mean=torch.zeros_like(self.grad))  # of this rank's share

    def compiled(self, function: Callable) -> Callable:
        return torch.compile(function, dynamic=False) if self.weights.is_cuda else function

    def set_schedule(self, step: int) -> None:
        self.lr.fill_(self.base_lr * lr_scale(step, self.cfg))

    def reduce(self) -> None:
        """Begin to sum the gradients over the ranks; each receives its own share."""
        if self.ranks.world_size > 1:
            self.handle = dist.reduce_scatter_tensor(self.grad, self.grads, async_op=True)

    def gather(self, whole: Tensor) -> None:
        """Begin to hand this rank's share of a buffer round."""
        if self.ranks.world_size > 1:
            self.handle = dist.all_gather_into_tensor(whole, whole[self.mine], async_op=True)

    def wait(self) -> None:
        if self.handle is not None:
            self.handle.wait()
            self.handle = None

    def update(self, divisor: int) -> None:
        """Take a step on this rank's share with gradients / divisor and hand the result round."""
        raise NotImplementedError

    def finish(self) -> None:
        self.wait()
        self.grads.zero_()

    def full_state(self) -> dict[str, Tensor]:
        """The whole state on rank 0, without padding, for any number of ranks. All ranks call it."""
        full = {}
        for key, value in self.state.items():
            if value.ndim and self.ranks.world_size > 1:
                whole = torch.empty_like(self.weights, dtype=value.dtype)
                dist.all_gather_into_tensor(whole, value)
                value = whole
            full[key] = value.flatten()[: self.numel].cpu() if self.ranks.rank == 0 else None
        return full

    def load_full_state(self, full: dict[str, Tensor]) -> None:
        for key, value in self.state.items():
            padded = F.pad(full[key], (0, len(self.weights) - self.numel)) if value.ndim else full[key]
            value.copy_(padded[self.mine] if value.ndim else padded[0])

class Adam(ShardedOptimizer):
    """Adam on any tensors. lr: about the change of each weight in a step."""

    def __init__(self, *args):
        super().__init__(*args)
        self.state |= dict(square=torch.zeros_like(self.grad), step=torch.zeros_like(self.lr))
        self.compute = self.compiled(adam_update)

    def update(self, divisor: int) -> None:
        self.wait()
        self.compute(self.weights[self.mine], self.grad.div_(divisor), *self.state.values(), self.lr,
                     self.cfg.adam_beta1, self.cfg.adam_beta2, self.cfg.adam_eps)
        self.gather(self.weights)

class Muon(ShardedOptimizer):
    """Muon on matrices of equally many elements; stacks of them count as many.

    lr: spectral norm of the change in a step. What is handed round is the update, in the type it is
    computed in, bf16 on CUDA; every rank then takes the same step.
    """

    def __init__(self, name: str, params: list[nn.Parameter], *args):
        unit = params[0].shape[-2:].numel()
        super().__init__(name, params, *args, unit)
        dtype = torch.bfloat16 if self.weights.is_cuda else torch.float32
        self.updates = torch.zeros_like(self.weights, dtype=dtype)
        self.momentum = torch.zeros_like(self.lr)
        self.compute = self.compiled(muon_update)
        shapes = [p.shape[-2:] for p in params for _ in range(p.numel() // unit)]
        shapes += shapes[-1:] * (len(self.weights) // unit - len(shapes))
        owned = itertools.groupby(shapes[self.mine.start // unit : self.mine.stop // unit])
        self.runs = [(len(list(run)), *shape) for shape, run in owned]  # batches of equal shape

    def set_schedule(self, step: int) -> None:
        super().set_schedule(step)
        self.momentum.fill_(muon_momentum(step, self.cfg))

    def update(self, divisor: int) -> None:
        self.wait()
        self.grad.div_(divisor)
        sizes = [math.prod(run) for run in self.runs]
        buffers = (self.grad, self.state["mean"], self.updates[self.mine])
        for run, *parts in zip(self.runs, *(x.split(sizes) for x in buffers), strict=True):
            grad, mean, update = (x.view(run) for x in parts)
            update.copy_(self.compute(grad, mean, self.momentum, self.cfg.ns_steps, update.dtype))
        self.gather(self.updates)

    def finish(self) -> None:
        super().finish()
        self.weights.addcmul_(self.updates, self.lr, value=-1)

def build_optimizers(model: GPT, cfg: Hyperparameters, ranks: "Ranks") -> list[ShardedOptimizer]:
    """An optimizer for each row of the table, which covers every parameter once."""
    matrices = [p for p in model.blocks.parameters() if p.ndim >= 2]
    square = [p for p in matrices if p.shape[-1] == p.shape[-2]]
    table = [
        (Muon, "mlp", [p for p in matrices if p.shape[-1] != p.shape[-2]], cfg.muon_lr),
        (Muon, "attn", square, cfg.muon_lr),
        (Adam, "embed", [model.embed.weight, *model.value_embeds.parameters()], cfg.embed_lr),
        (Adam, "head", [model.lm_head.weight], cfg.head_lr),
        (Adam, "scalars", [p for p in model.parameters() if p.ndim < 2], cfg.scalar_lr),
    ]
    covered = sorted(id(p) for _, _, params, _ in table for p in params)
    assert covered == sorted(id(p) for p in model.parameters()), "each parameter needs one row"
    return [kind(name, params, lr, cfg, ranks) for kind, name, params, lr in table if params]

def step_optimizers(optimizers: list[ShardedOptimizer], divisor: int) -> None:
    """One step of all; what one computes overlaps what the others communicate."""
    for optimizer in optimizers:
        optimizer.reduce()
    for optimizer in optimizers:
        optimizer.update(divisor)
    for optimizer in optimizers:
        optimizer.finish()


# -----------------------------------------------------------------------------
# Schedules
# -----------------------------------------------------------------------------

def lr_scale(step: int, cfg: Hyperparameters) -> float:
    """Factor of every learning rate: 1, then falling linearly to final_lr_frac at the end."""
    remaining = 1 - step / cfg.num_iterations
    frac = min(1.0, remaining / cfg.cooldown_frac) if cfg.cooldown_frac else 1.0
    return frac + (1 - frac) * cfg.final_lr_frac

def window_blocks(step: int, cfg: Hyperparameters) -> int:
    """Long attention window in blocks: linear in the step, rounded up, at least one."""
    return max(1, math.ceil(cfg.window_tokens * step / cfg.num_iterations / BLOCK))

def muon_momentum(step: int, cfg: Hyperparameters) -> float:
    """Muon's momentum: linear from momentum_start to muon_momentum, then constant."""
    frac = min(1.0, step / cfg.momentum_warmup) if cfg.momentum_warmup else 1.0
    return (1 - frac) * cfg.momentum_start + frac * cfg.muon_momentum


# -----------------------------------------------------------------------------
# Distributed and logging (the same in every record)
# -----------------------------------------------------------------------------

class Ranks:
    """This process among the others, by torchrun's variables, and its device.

    Raises UserError where the ranks cannot share a step, or the device is missing or too old.
    """

    def __init__(self, cfg: Hyperparameters):
        self.rank, local_rank, self.world_size = (
            int(os.environ.get(key, value)) for key, value in
            (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
        if cfg.sequences_per_step % self.world_size:
            raise UserError(f"--sequences_per_step {cfg.sequences_per_step}: {self.world_size} ranks "
                            "cannot share them; start a number of ranks that divides them")
        self.device, backend = torch.device("cpu"), "gloo"
        if cfg.device == "cuda" or cfg.device == "auto" and torch.cuda.is_available():
            if local_rank >= torch.cuda.device_count():
                raise UserError(f"--device {cfg.device}: there is no GPU {local_rank}; start fewer "
                                "ranks a machine, or use --device cpu --preset pocket")
            self.device, backend = torch.device("cuda", local_rank), "cpu:gloo,cuda:nccl"
            cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "train_gpt"))
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
            torch.cuda.set_device(self.device)
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise UserError(f"--device {cfg.device}: {torch.cuda.get_device_name()} has no bf16; "
                                "use --device cpu --preset pocket")
        if self.world_size > 1:
            dist.init_process_group(backend)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> Tensor:
        if self.world_size > 1:
            dist.all_reduce(x, op)
        return x

    def broadcast(self, value):
        """Rank 0's value."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_parity(self, step: int, model: nn.Module) -> None:
        """Raise RunError where the ranks' parameters are not the same bits."""
        words = {2: torch.int16, 4: torch.int32}
        sums = torch.stack([p.detach().view(words[p.element_size()]).sum() for p in model.parameters()])
        low, high = (self.all_reduce(sums.clone(), op) for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
        for (name, _), apart in zip(model.named_parameters(), (low != high).tolist(), strict=True):
            if apart:
                raise RunError(f"step {step}: the ranks' copies of {name} have drifted apart")

class RunError(Exception):
    """Something that ends a run for good: one line, no traceback."""

def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"cpu ({found[1] if found else platform.machine()})"

def peak_memory_mib(device: torch.device) -> int:
    """Of torch's allocator on the GPU, or of this process where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 2**20

class Log:
    """Rank 0's log file and console; the other ranks stay silent. A log that is there goes on."""

    def __init__(self, path: Path, enabled: bool):
        self.file, self.shown, self.last_step = None, "", -1
        self.terminal = enabled and sys.stdout.isatty()
        if enabled:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a+", buffering=1)
            self.file.seek(0)
            steps = (re.match(r"step:(\d+)/", line) for line in self.file)
            self.last_step = max((int(found[1]) for found in steps if found), default=-1)

    def __call__(self, text: str, console: bool = True) -> None:
        if self.file:
            self.file.write(text + "\n")
            if console:
                self.live("")
                print(text, flush=True)

    def step(self, step: int, num_steps: int, ms: float, val_loss: float | None = None) -> None:
        """A step's line, marked where the log has that step already, from before a crash."""
        val = "" if val_loss is None else f"val_loss:{val_loss:.4f} "
        self(f"step:{step}/{num_steps} {val}train_time:{ms:.0f}ms step_avg:{ms / max(1, step):.2f}ms"
             + " redone:1" * (step <= self.last_step), console=bool(val))

    def live(self, text: str) -> None:
        """Show the text in place of the last one, on a terminal."""
        if self.terminal:
            print(f"\r{text:{len(self.shown)}}\r", end=text, flush=True)
            self.shown = text

class Clock:
    """Training time in ms. It waits for the device only where it starts or stops."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.ms, self.since = ranks, 0.0, None

    def start(self) -> None:
        self.ranks.synchronize()
        self.since = time.perf_counter()

    def stop(self) -> None:
        self.ranks.synchronize()
        self.ms, self.since = self.read(), None

    def read(self) -> float:
        return self.ms + (1000 * (time.perf_counter() - self.since) if self.since else 0)

class Health:
    """What ranks tell each other at every step: a signal to stop, a non-finite loss or gradient.

    On CUDA the news is read one step late, so that the host never waits for the step it is in.
    """

    def __init__(self, ranks: Ranks, names: list[str]):
        self.ranks, self.names, self.signal, self.stopping = ranks, names, 0, 0
        self.loss, self.news = math.nan, None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame) -> None:
        self.signal = number
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)  # a second one ends the process at once

    def check(self, step: int, loss: Tensor, grads: list[Tensor]) -> None:
        """Share the news of this step, before its update. Raises RunError, see `read`."""
        values = torch.stack([x.sum(dtype=torch.float32) for x in (loss, *grads)])
        shared = F.pad(~values.isfinite() * (self.ranks.rank + 1), (0, 1), value=self.signal)
        values = torch.cat([self.ranks.all_reduce(shared, dist.ReduceOp.MAX), values[:1]])
        news = step, values.to("cpu", non_blocking=True), None
        if values.is_cuda:
            self.read()
            news[-1] = torch.cuda.Event()
            news[-1].record()
        self.news = news
        if not values.is_cuda:
            self.read()

    def read(self) -> None:
        """Take in the last news. Raises RunError that names step, rank and what is not finite."""
        if self.news:
            (step, values, event), self.news = self.news, None
            if event:
                event.synchronize()
            *bad, self.stopping, self.loss = values.tolist()
            for name, rank in zip(self.names, bad, strict=True):
                if rank:
                    raise RunError(f"step {step}: non-finite {name} on rank {rank - 1:.0f}")


# -----------------------------------------------------------------------------
# Checkpoints (the same in every record)
# -----------------------------------------------------------------------------

def write_durably(path: Path, write: Callable) -> None:
    """Have `write` fill a file that appears at `path` whole or not at all."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

def save_checkpoint(folder: Path, state: dict, ranks: Ranks, keep: int) -> None:
    """Rank 0 writes the state, then its sha256, and keeps the newest. Raises UserError."""
    path, failure = folder / f"step-{state['step']:06d}.pt", None
    try:
        if ranks.rank == 0:
            write_durably(path, lambda file: torch.save(state, file))
            digest = digest_of(path).encode()
            write_durably(path.with_suffix(".sha256"), lambda file: file.write(digest))
            for old in sorted(folder.glob("step-*.pt"))[:-keep]:
                old.unlink()
                old.with_suffix(".sha256").unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch.save raises the latter where the disk is full
        failure = (f"{path}: cannot be written ({str(error).splitlines()[0]}); earlier checkpoints "
                   "are untouched: make room, then go on with --resume auto")
    if failure := ranks.broadcast(failure):
        raise UserError(failure)

def find_checkpoint(cfg: Hyperparameters, folder: Path, ranks: Ranks, log: Log) -> Path | None:
    """The checkpoint that --resume asks for, the same one on all ranks. Raises UserError."""
    found = failure = None
    if ranks.rank == 0:
        newest_first = sorted(folder.glob("step-*.pt"), reverse=True)
        for path in newest_first if cfg.resume == "auto" else [Path(cfg.resume)]:
            digest = path.with_suffix(".sha256")
            if path.exists() and digest.exists() and digest.read_bytes() == digest_of(path).encode():
                found = path
                break
            failure = f"{path} is damaged, or it or its .sha256 is missing"
            if cfg.resume == "auto":
                log(f"checkpoint skipped: {failure}")
        if cfg.resume == "auto" and not found:
            log(f"nothing to resume in {folder}: starting afresh")
    found, failure = ranks.broadcast((found, failure))
    if not found and cfg.resume != "auto":
        raise UserError(f"--resume {failure}; name another")
    return found

def load_checkpoint(path: Path, cfg: Hyperparameters, data: list) -> dict:
    """The state at `path`. Raises UserError where it is none, or not of this run."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        saved, other_data = state["hyperparameters"], state["data"] != data
    except Exception as error:  # by what is in the file, torch.load raises nearly anything
        raise UserError(f"{path}: not a checkpoint ({type(error).__name__}); name another") from None
    differing = [f"{key} {saved.get(key)!r} (now {value!r})" for key, value in asdict(cfg).items()
                 if saved.get(key) != value and (key not in FREE_TO_CHANGE or
                 key == "num_iterations" and value < state["step"])] + ["data"] * other_data
    if differing:
        raise UserError(f"{path}: is of another run: it has other {', '.join(differing)}")
    return state


# -----------------------------------------------------------------------------
# Validation (the same in every record)
# -----------------------------------------------------------------------------

def read_val_tokens(cfg: Hyperparameters) -> np.ndarray:
    """The first val_tokens validation tokens and one more, uint16. Raises UserError."""
    parts, missing = [], cfg.val_tokens + 1
    for path in find_shards(cfg.val_files):
        parts.append(read_shard(path, cfg.vocab_size)[:missing])
        missing -= len(parts[-1])
    if missing:
        raise UserError(f"--val_tokens {cfg.val_tokens}: {cfg.val_files!r} holds "
                        f"{cfg.val_tokens + 1 - missing} tokens and one more than that is needed")
    return np.concatenate(parts)

@torch.no_grad()
def validate(model: nn.Module, tokens: np.ndarray, window: Tensor, cfg: Hyperparameters,
             ranks: Ranks) -> float:
    """Mean loss over the validation tokens, each counted once; the sequences are dealt to ranks."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    length = cfg.val_seq_len
    for start in range(ranks.rank * length, cfg.val_tokens, ranks.world_size * length):
        part = tokens[start : start + length + 1]
        inputs, targets = to_batch(np.pad(part, (0, length + 1 - len(part))), 1, ranks.device)
        targets[:, len(part) - 1 :] = -1  # the last sequence may be short
        total += model(inputs, targets, window)
    model.train()
    return ranks.all_reduce(total).item() / cfg.val_tokens

@torch.no_grad()
def sample(model: nn.Module, window: Tensor, cfg: Hyperparameters, device: torch.device) -> str:
    """The prompt and what the model says after it, up to sample_tokens or the end of the text."""
    if cfg.tokenizer == "gpt2":
        import tiktoken  # only here: it may have to fetch its files
        codec = tiktoken.get_encoding("gpt2")
        prompt, decode = codec.encode_ordinary(cfg.prompt), codec.decode
    else:
        prompt, decode = cfg.prompt.encode(), lambda ids: bytes(ids).decode(errors="replace")
    generator = torch.Generator(device).manual_seed(cfg.seed)
    ids = [cfg.eot_token, *prompt]
    for _ in range(cfg.sample_tokens):
        recent = ids[-cfg.val_seq_len :]
        padded = recent + [cfg.eot_token] * (-len(recent) % BLOCK)
        x = model.hidden(torch.tensor([padded], dtype=torch.int32, device=device), window)
        logits = model.logits(x[0, len(recent) - 1])[: cfg.vocab_size]
        ids.append(torch.multinomial(logits.softmax(-1), 1, generator=generator).item())
        if ids[-1] == cfg.eot_token:
            break
    return decode([i for i in ids if i != cfg.eot_token])


# -----------------------------------------------------------------------------
# Training
# -----------------------------------------------------------------------------

def prepare_for_cuda(model: GPT, cfg: Hyperparameters, device: torch.device) -> None:
    """Types, head, kernel options and compilation that suit the GPU at hand."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.bfloat16()
    capability = torch.cuda.get_device_capability(device)
    if cfg.fp8_head and (capability == (8, 9) or capability >= (9, 0)):
        model.lm_head.fp8_scales = (cfg.fp8_x_scale, cfg.fp8_w_scale, cfg.fp8_grad_scale)
    if torch.cuda.get_device_properties(device).shared_memory_per_block_optin < 160 * 1024:
        model.kernel_options = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64,
                                    BLOCK_N2=32)  # a 4090 or 3090 has less than an A100 or H100
    if cfg.head_chunks == 0:  # about 12 bytes a logit; a third of what is free may go there
        logits = cfg.sequences_per_forward * cfg.train_seq_len * cfg.padded_vocab
        need = 3 * 12 * logits / torch.cuda.mem_get_info(device)[0]
        model.head_chunks = 2 ** max(0, math.ceil(math.log2(need)))
    model.compile(dynamic=False, mode=cfg.compile_mode or None)

def warm_up(model: GPT, optimizers: list, loader: TokenLoader, cfg: Hyperparameters, ranks: Ranks
            ) -> None:
    """Run every kernel on random tokens, then put weights and optimizer state back."""
    tensors = [x for o in optimizers for x in (o.weights, *o.state.values())]
    before = [x.clone() for x in tensors]
    random = np.random.default_rng(0)

    def random_batch(rows: int, length: int) -> tuple[Tensor, Tensor]:
        return to_batch(random.integers(cfg.vocab_size, size=rows * length + 1), rows, ranks.device)

    window = torch.ones((), dtype=torch.int32, device=ranks.device)
    for step in range(cfg.warmup_steps):
        window.fill_(window_blocks(step % 2 * cfg.num_iterations, cfg))
        model(*random_batch(loader.per_forward, cfg.train_seq_len), window).backward()
        step_optimizers(optimizers, cfg.step_tokens)
    if cfg.warmup_steps:
        with torch.no_grad():
            model.eval()(*random_batch(1, cfg.val_seq_len), window)
        model.train()
    for x, value in zip(tensors, before, strict=True):
        x.copy_(value)

def start_profiler(folder: Path, log: Log) -> torch.profiler.profile:
    """A profiler of steps 4 to 6, which writes trace.json to the folder and a table to the log."""
    def report(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        log(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))

    schedule = torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=report)
    profiler.start()
    return profiler

def train(preset: str, cfg: Hyperparameters, ranks: Ranks) -> int:
    """Train, validate and log as `cfg` says; the exit code."""
    device, last = ranks.device, cfg.num_iterations
    run_id = ranks.broadcast(cfg.run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
    folder = Path("logs") / run_id
    val_tokens, loader = read_val_tokens(cfg), TokenLoader(cfg, ranks.rank, ranks.world_size, device)
    log = loader.say = Log(folder / "log.txt", enabled=ranks.rank == 0)
    data = fingerprint(loader.files)

    torch.manual_seed(cfg.seed)
    with torch.device(device):
        model = GPT(cfg)
        model.init_weights(torch.Generator(device).manual_seed(cfg.seed))
    if device.type == "cuda":
        prepare_for_cuda(model, cfg, device)
    optimizers = build_optimizers(model, cfg, ranks)
    health = Health(ranks, ["loss", *(f"gradient of {o.name}" for o in optimizers)])
    parameters = sum(p.numel() for p in model.parameters())
    machine = dict(device=device_name(device), torch=torch.__version__, world_size=ranks.world_size)
    facts = asdict(cfg) | machine | dict(run_id=run_id, preset=preset, python=sys.version.split()[0],
                                         threads=torch.get_num_threads())
    rule = "=" * 100
    log("\n".join([SCRIPT.read_text(), rule, *(f"{k}: {v}" for k, v in facts.items()), rule]), False)
    log(f"{machine['device']}, world size {ranks.world_size}, {parameters:,} parameters, head "
        f"{'fp8' if model.lm_head.fp8_scales else 'bf16' if device.type == 'cuda' else 'fp32'} in "
        f"{model.head_chunks} piece(s); log in {folder}")

    started = time.perf_counter()
    if device.type == "cuda":
        log("compiling, usually 1 to 3 minutes the first time and under half a minute later ...")
    warm_up(model, optimizers, loader, cfg, ranks)
    ranks.synchronize()
    log(f"compile_seconds: {time.perf_counter() - started:.1f}", console=device.type == "cuda")
    clock, first = Clock(ranks), 0
    if cfg.resume and (path := find_checkpoint(cfg, folder, ranks, log)):
        state = load_checkpoint(path, cfg, data)
        first = state["step"]
        if first == last:
            log(f"{path}: run {run_id} is finished, nothing to do")
            return 0
        model.load_state_dict(state["model"])
        for optimizer in optimizers:
            optimizer.load_full_state(state["optimizers"][optimizer.name])
        loader.seek(state["loader"])
        clock.ms = state["train_time_ms"]
        torch.set_rng_state(state["generator"])
        log(f"resumed at step:{first} from {path.name}; steps {first} to {log.last_step} are redone")
    window = torch.ones((), dtype=torch.int32, device=device)
    profiler = start_profiler(folder, log) if cfg.profile else None
    gc.collect()
    gc.freeze()  # no collection of what lives as long as the run
    clock.start()

    for step in range(first, last + 1):  # one round more than there are steps: the last validation
        window.fill_(window_blocks(step, cfg))
        if step == last or cfg.val_every and step % cfg.val_every == 0 and not health.stopping:
            clock.stop()
            health.read()
            ranks.check_parity(step, model)
            val_loss = validate(model, val_tokens, window, cfg, ranks)
            log.step(step, last, clock.ms, val_loss)
            clock.start()
        due = health.stopping or step == last or cfg.save_every and step % cfg.save_every == 0
        if cfg.save_every and due and step > first:
            clock.stop()
            health.read()
            state = dict(step=step, hyperparameters=asdict(cfg), data=data, model=model.state_dict(),
                         optimizers={o.name: o.full_state() for o in optimizers},
                         loader=loader.state(), train_time_ms=clock.ms,
                         generator=torch.get_rng_state(), torch=str(torch.__version__))
            save_checkpoint(folder, state, ranks, keep=2 + (step == last))
            clock.start()
        if step == last:
            break
        if health.stopping:
            log(f"stopped at step:{step} by signal {health.stopping:.0f}" + cfg.save_every.bool()
                * f"; to go on: --run_id {run_id} --resume auto")
            return 128 + int(health.stopping)

        loss = torch.zeros((), device=device)
        for inputs, targets in loader.next_step():
            micro_loss = model(inputs, targets, window) / targets.numel()
            micro_loss.backward()
            loss += micro_loss.detach() / loader.micro_steps
        health.check(step, loss, [o.grads for o in optimizers])
        for optimizer in optimizers:
            optimizer.set_schedule(step)
        step_optimizers(optimizers, loader.micro_steps * ranks.world_size)
        if profiler:
            profiler.step()
        ms = clock.read()
        log.step(step + 1, last, ms)
        log.live(f"step {step + 1}/{last}, loss {health.loss:.4f}, "
                 f"{1000 * (step + 1) * cfg.step_tokens / ms:,.0f} tokens/s, "
                 f"{(last - step - 1) * ms / (step + 1) / 1000:.0f} s left")

    clock.stop()
    tokens = last * cfg.step_tokens
    results = dict(val_loss=f"{val_loss:.6f}", train_time_ms=f"{clock.ms:.0f}", steps=last,
                   tokens=tokens, tokens_per_second=f"{1000 * tokens / clock.ms:.0f}",
                   parameters=parameters, peak_memory_mib=peak_memory_mib(device),
                   world_size=ranks.world_size, device=machine["device"], torch=machine["torch"],
                   seed=cfg.seed)
    if cfg.sample_tokens and ranks.rank == 0:
        text = sample(model.eval(), window, cfg, device)
        log("\n  ".join(["sample:", *text.splitlines()]))
    log("\n".join(["---", *(f"{key}: {value}" for key, value in results.items())]))
    return 0

def main(argv: list[str] | None = None) -> int:
    """Run the script and give its exit code: what a user can mend ends in one line, and in 2."""
    try:
        preset, cfg = parse_args(sys.argv[1:] if argv is None else argv)
        ranks = Ranks(cfg)
        if preset == "record" and ranks.device.type != "cuda":
            raise UserError("--preset record: there is no CUDA device; use --preset pocket")
        return train(preset, cfg, ranks)
    except UserError as error:
        code, message = 2, error
    except torch.OutOfMemoryError:
        code, message = 1, "out of GPU memory; raise --head_chunks or lower --sequences_per_forward"
    except (RunError, OSError, dist.DistError) as error:
        code, message = 1, error
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{SCRIPT.name}: error: {message}", file=sys.stderr)
    return code

if __name__ == "__main__":
    sys.exit(main())
