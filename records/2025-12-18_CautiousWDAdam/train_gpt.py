#!/usr/bin/env python3
"""Train a 124M-class GPT to 3.28 validation loss on FineWeb, as fast as 8 H100s allow.

    torchrun --standalone --nproc_per_node=8 train_gpt.py     # the record, on 8 GPUs
    python train_gpt.py                                       # the record, on one GPU
    python train_gpt.py --preset pocket                       # a small model, on a CPU too

Parent: 2025-11-10_CautiousWD. Change: batch and rates grow in stages; one skip, a residual that
grows; key offset; scalars on weights; weight decay in Adam where a step shrinks the weight.
"""

# ---- Setup ------------------------------------------------------------------
import argparse
import ctypes
import glob
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
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
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

BLOCK = 128  # tokens in a block of the attention mask
SCRIPT = Path(__file__).resolve()
ROOT = next((p for p in SCRIPT.parents if (p / "data" / "pocket.py").exists()), SCRIPT.parent)

class UserError(Exception):
    """What ends the run with one line, exit code 2 and no traceback."""

def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

# ---- Hyperparameters --------------------------------------------------------
@dataclass(frozen=True)
class Hyperparameters:
    """Everything a run can be asked to do differently; each field is a flag of the same name."""
    # Data, step and validation
    preset: str = "record"  # the set of values that the other flags change
    vocab_size: int = 50257  # token ids lie below it
    eot_token: int = 50256  # end-of-text, the token that opens each document
    sequences_per_step: int = 8  # sequences in one step, all ranks together
    train_seq_len: int = 48 * 1024  # tokens of a training sequence, at its longest
    length_stages: str = "1"  # relative lengths, a third of the schedules each; or one
    sequence_stride: int = 1  # sequence k of a shard's N is the one at k · stride mod N
    align_documents: bool = False  # each sequence begins with a document
    max_document_tokens: int = 0  # sequences are packed with the beginnings of documents; 0: not
    seed: int = 0  # of the initial weights
    val_seq_len: int = 4 * 64 * 1024  # tokens of a validation sequence, a multiple of 128
    # Model
    model_dim: int = 768  # width of the residual stream
    head_dim: int = 128  # width of an attention head
    mlp_ratio: int = 4  # hidden width of the MLP, in model_dim
    attention_pattern: str = "SSSLSS.SSSL"  # a letter a layer: Long window, Short, . none
    value_embed_pattern: str = "12......012"  # value embedding table of each layer, . none
    skip_layer: int = 3  # layer whose output is added where there is no attention
    backout_layer: int = 7  # layer whose output is taken from the last one's
    attention_scale: float = 0.1  # factor of the attention scores in the first stage of windows
    rope_base: int = 1024  # inverse of the lowest rotary frequency
    logit_cap: float = 30.0  # logits lie between 0 and it
    logit_slope: float = 7.5  # divides the raw logits inside the sigmoid
    vocab_multiple: int = 128  # rows of embeddings and head are padded to a multiple of it
    fp8_head: bool = True  # FP8 products in the head while training, where the GPU has them
    fp8_x_scale: float = 448 / 768**0.5  # factor of the activations before the cast to e4m3
    fp8_w_scale: float = 2.0**9  # factor of the weights before the cast to e4m3
    fp8_grad_scale: float = 448.0  # factor of the gradients before the cast to e5m2
    # Optimizers and schedules
    embed_lr: float = 0.6  # Adam, token and value embeddings
    head_lr: float = 0.008  # Adam, output head
    scalar_lr: float = 0.04  # Adam, lambdas and skip weights
    adam_every: int = 2  # steps between Adam's, which take the sum of their gradients
    adam_beta1: float = 0.65  # decay of Adam's mean of gradients
    adam_beta2: float = 0.95  # decay of Adam's mean of squared gradients
    adam_eps: float = 1e-8  # added to Adam's denominator
    adam_decay: float = 0.005  # weight decay in a step of embeddings and head, in squares of rates
    muon_lr: float = 0.023  # Muon, hidden matrices; about the spectral norm of a step
    muon_momentum: float = 0.95  # decay of Muon's mean of gradients, after the warm-up
    muon_decay: float = 1.2  # weight decay in a step, in squares of muon_lr
    extension_steps: int = 40  # last steps, after the schedules of rates and windows have ended
    lr_stages: str = "100"  # percent of all rates, a third of these schedules each; or one
    cooldown_frac: float = 0.55  # last part of these schedules, over which the rates fall
    final_lr_frac: float = 0.1  # fraction of the rates at the end of the run
    window_stages: str = "3 7 11 13"  # long windows in blocks, a third of these each; after
    final_window: int = 20  # long window of the last validation, in blocks
    momentum_start: float = 0.85  # Muon's momentum at step 0
    momentum_warmup: int = 300  # steps until muon_momentum is reached
    momentum_cooldown: int = 50  # last steps of the run, over which momentum falls back
    # Run: a checkpoint may be resumed with other values of all that follows
    num_iterations: int = 2090  # optimizer steps
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # glob of the training shards
    val_files: str = "data/fineweb10B/fineweb_val_*.bin"  # glob of the validation shards
    val_tokens: int = 10_485_760  # validation tokens, each counted once
    sequences_per_forward: int = 1  # sequences that a rank runs at once, at most
    target_loss: float = 3.28  # validation loss to reach, nats per token
    val_every: int = 250  # steps between validations; 0: only the last
    device: str = "auto"  # cuda, cpu, or auto: cuda where there is one
    run_id: str = ""  # folder under logs/; empty: made from time and chance
    warmup_steps: int = 10  # untimed steps on random tokens that warm the kernels up
    head_chunks: int = 0  # pieces in which head and loss are computed; 0: by free memory
    save_every: int = 0  # steps between checkpoints; 0: none
    resume: str = ""  # checkpoint to go on from; auto: the newest whole one of --run_id

PRESETS = {"record": dict(max_document_tokens=2048, length_stages="1 2 3", lr_stages="100 151 193"),
    "pocket": dict(preset="pocket", train_files="data/pocket/pocket_train_*.bin",
    val_files="data/pocket/pocket_val_*.bin", vocab_size=257, eot_token=256, vocab_multiple=16,
    num_iterations=240, sequences_per_step=16, sequences_per_forward=16, train_seq_len=128,
    sequence_stride=1_000_003, val_seq_len=4096, val_tokens=262_144, val_every=0, warmup_steps=1,
    target_loss=1.64, model_dim=64, head_dim=16, rope_base=32, cooldown_frac=0.7,
    muon_momentum=0.85, embed_lr=0.5, head_lr=0.03, muon_lr=0.04, window_stages="1 1 1 1",
    attention_pattern="L.", value_embed_pattern="0.", skip_layer=0, backout_layer=0, final_window=1,
    extension_steps=4, momentum_cooldown=5, attention_scale=0.5)}
PRESETS["lab"] = PRESETS["pocket"] | dict(preset="lab", train_files="data/lab/lab_train_*.bin",
    val_files="data/lab/lab_val_*.bin", val_tokens=131_072, target_loss=1.4, sequences_per_step=4,
    sequences_per_forward=4, head_dim=32, rope_base=1024, cooldown_frac=0.6, muon_momentum=0.95,
    momentum_warmup=60, train_seq_len=1536, length_stages="1 2 3", lr_stages="100 151 193",
    max_document_tokens=768, window_stages="1 2 3 4", attention_pattern="SS.SL",
    value_embed_pattern="1..01", backout_layer=2, final_window=6, attention_scale=0.3, embed_lr=0.6,
    head_lr=0.04, num_iterations=210, muon_lr=0.02)

def parse_args(argv: list[str] | None, saved: dict | None = None) -> Hyperparameters:
    """The flags given, on top of the preset named or else of a checkpoint's saved values."""
    def error(message: str):
        raise UserError(f"{message}; --help lists the flags")
    def boolean(text: str) -> bool:
        return ["false", "true"].index(text.lower()) == 1
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--FLAG VALUE ...]", description=__doc__.split("\n")[0], allow_abbrev=False,
        epilog=f"In brackets: {', '.join(PRESETS)}.", argument_default=argparse.SUPPRESS)
    parser.error = error
    types = {field.name: field.type for field in fields(Hyperparameters)}
    for line in inspect.getsource(Hyperparameters).splitlines():  # a field's comment is its help
        if title := re.match(r"    # ([^:]*)", line):
            group = parser.add_argument_group(title[1])
        elif flag := re.match(r"    (\w+): .*  # (.*)", line):
            kind = dict(type=types[flag[1]], choices=PRESETS if flag[1] == "preset" else None)
            if types[flag[1]] is bool:
                kind = dict(type=boolean, nargs="?", const=True)
            values = [getattr(Hyperparameters(**preset), flag[1]) for preset in PRESETS.values()]
            group.add_argument(f"--{flag[1]}", help=f"{flag[2]} {values}", metavar="X", **kind)
    flags = vars(parser.parse_args(argv))
    values = PRESETS[flags.get("preset", "record")]
    if saved and "preset" not in flags:
        values = {key: saved[key] for key in saved if key not in ("device", "run_id", "resume")}
    cfg = Hyperparameters(**values | flags)
    check_hyperparameters(cfg)
    return cfg

def check_hyperparameters(cfg: Hyperparameters) -> None:
    """Raise UserError for a value that no run can be made of: flag, value and rule."""
    def require(names: str, holds, rule: str) -> None:
        for name in names.split():
            if not holds(value := getattr(cfg, name)):
                raise UserError(f"--{name} {value}: must {rule}")
    numbers = " ".join(f.name for f in fields(cfg) if f.type in (int, float))
    require(numbers, lambda x: 0 <= x < math.inf, "be finite and not negative")
    require("""num_iterations sequences_per_step train_seq_len sequences_per_forward val_tokens
        val_seq_len model_dim head_dim mlp_ratio rope_base logit_cap logit_slope vocab_multiple
        adam_every final_window""",
            lambda x: x > 0, "be positive")
    require("train_seq_len val_seq_len", lambda x: x % BLOCK == 0, f"be a multiple of {BLOCK}")
    require("adam_beta1 adam_beta2 muon_momentum momentum_start", lambda x: x < 1, "be below 1")
    require("cooldown_frac final_lr_frac", lambda x: x <= 1, "be at most 1")
    require("seed", lambda x: x < 2**63, "be below 2**63")
    require("run_id", lambda x: "/" not in x and x not in (".", ".."), "be the name of a folder")
    require("head_dim", lambda x: x % 4 == 0, "be a multiple of 4")
    require("model_dim", lambda x: x % cfg.head_dim == 0, f"be a multiple of {cfg.head_dim}")
    require("vocab_size", lambda x: cfg.eot_token < x <= 2**16, "exceed eot_token, up to 65536")
    require("attention_pattern", lambda x: re.fullmatch("[LS.]+", x), "be of L, S and .")
    tables, layers = "".join(sorted({*cfg.value_embed_pattern} - {"."})), len(cfg.attention_pattern)
    require("value_embed_pattern", lambda x: "0123456789".startswith(tables) and len(x) == layers,
            "have . or 0, 1, … a layer")
    require("backout_layer", lambda x: x < layers, "be a layer's number")
    require("skip_layer", lambda x: x < f"{cfg.attention_pattern}.".index("."), "be below any '.'")
    require("window_stages length_stages lr_stages", lambda x: re.fullmatch(
        r"(\b[1-9]\d{,3} ?){1,4}", x), "be up to 4 numbers from 1 to 9999")
    require("logit_cap", lambda x: x <= 64, "be at most 64, as its exponential is summed in fp32")
    require("device", lambda x: x in ("auto", "cuda", "cpu"), "be auto, cuda or cpu")
    require("resume", lambda x: x != "auto" or cfg.run_id, "come with the --run_id of a run")

# ---- Data (the same in every record) ----------------------------------------
HEADER_INTS, MAGIC, VERSION = 256, 20240520, 1  # of a shard, little-endian int32

def find_shards(pattern: str) -> list[Path]:
    """Files that match the glob, here or else in the repository, sorted. Raises UserError."""
    files = sorted(glob.glob(pattern) or glob.glob(str(ROOT / pattern)))
    if not files:
        maker = next((x for x in ("pocket", "fineweb", "lab") if f"data/{x}" in pattern), "text")
        raise UserError(f"no file matches {pattern!r}; make the data with: python data/{maker}.py")
    return list(map(Path, files))

def shard_size(path: Path) -> int:
    """Number of tokens by the shard's header, held against the file's size. Raises UserError."""
    try:
        size, header = path.stat().st_size, [*np.fromfile(path, "<i4", HEADER_INTS), 0, 0, 0]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); fetch it again") from None
    *kind, count = map(int, header[:3])
    if kind != [MAGIC, VERSION]:
        raise UserError(f"{path}: magic, version {kind}, not {[MAGIC, VERSION]}; remake it")
    if size != 4 * HEADER_INTS + 2 * count:
        raise UserError(f"{path}: {size} bytes do not hold {count} tokens; fetch it again")
    return count

def read_shard(path: Path, vocab_size: int) -> np.ndarray:
    """The shard's tokens, uint16. Raises UserError where it is none, or of another vocabulary."""
    tokens = np.fromfile(path, "<u2", shard_size(path), offset=4 * HEADER_INTS)
    if len(tokens) and tokens.max() >= vocab_size:
        at = np.argmax(tokens >= vocab_size)
        raise UserError(f"{path}: token {tokens[at]} at position {at}; "
                        f"raise --vocab_size {vocab_size} or name other data")
    return tokens

# Three ways to cut a shard: a step's rows (N, length + 1) at a position and the next one, or None.
def consecutive_rows(tokens, documents, position: int, length: int, cfg: Hyperparameters):
    """Tokens as they follow one another; a stride spreads the step's sequences over the shard."""
    step_tokens = cfg.sequences_per_step * length
    N = (len(tokens) - 1) // step_tokens * cfg.sequences_per_step  # sequences of whole steps
    first = round_up(position, length) // length
    if first + cfg.sequences_per_step > N:
        return None
    stride = next(n for n in itertools.count(cfg.sequence_stride) if math.gcd(n, N) == 1)
    starts = [k * stride % N * length for k in range(first, first + cfg.sequences_per_step)]
    return np.stack([tokens[x : x + length + 1] for x in starts]), first * length + step_tokens

def aligned_rows(tokens, documents, position: int, length: int, cfg: Hyperparameters):
    """Each sequence begins with a document, the rest of the last one is skipped: @classiclarryd."""
    if position + 2 * cfg.sequences_per_step * length + 1 >= len(tokens):
        return None
    starts, following = [], np.searchsorted(documents, position)
    while following < len(documents) and len(starts) < cfg.sequences_per_step:
        starts.append(documents[following])
        following = np.searchsorted(documents, starts[-1] + length)
    if following == len(documents):
        return None
    return np.stack([tokens[x : x + length + 1] for x in starts]), int(documents[following])

def packed_rows(tokens, documents, position: int, length: int, cfg: Hyperparameters):
    """Each sequence is filled with the first tokens of one document after the other: @varunneal.
    The position counts documents; what is left of one that is cut is skipped."""
    ends, rows = np.append(documents[1:], len(tokens)), []
    for _ in range(cfg.sequences_per_step):
        pieces, room = [], length + 1
        while room:
            if position == len(documents):
                return None
            size = min(ends[position] - documents[position], cfg.max_document_tokens, room)
            pieces.append(tokens[documents[position] :][:size])
            room -= size
            position += 1
        rows.append(np.concatenate(pieces))
    return np.stack(rows), position

class TokenLoader:
    """Gives each rank its sequences of each step, the r-th part of the step's sequences to rank r.
    A step's sequences are of one shard: what does not fill a step at its end is skipped."""
    def __init__(self, cfg: Hyperparameters, rank: int, world_size: int, device, say=print):
        self.cfg, self.rank, self.device, self.say, self.ahead = cfg, rank, device, say, {}
        self.files, self.reader = find_shards(cfg.train_files), ThreadPoolExecutor(1)
        size, path = min((shard_size(path), path) for path in self.files)
        if size <= (taken := cfg.sequences_per_step * cfg.train_seq_len):
            raise UserError(f"{path}: {size} tokens, a step takes {taken} and one more; "
                            "lower --train_seq_len")
        if cfg.sequences_per_step % world_size:
            raise UserError(f"--sequences_per_step {cfg.sequences_per_step}: "
                            f"the {world_size} ranks must divide it")
        self.sequences = cfg.sequences_per_step // world_size
        self.per_forward = max(n for n in range(1, self.sequences + 1)
                               if self.sequences % n == 0 and n <= cfg.sequences_per_forward)
        self.micro_steps = self.sequences // self.per_forward  # forward passes of a rank in a step
        self.seek(0, 0)

    def read(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """A shard's tokens, and where its documents begin."""
        tokens = read_shard(path, self.cfg.vocab_size)
        return tokens, np.flatnonzero(tokens == self.cfg.eot_token)

    def seek(self, shard: int, position: int) -> None:
        """Have the next step begin there, in a shard counted on from epoch to epoch."""
        self.place = shard, position  # for any number of ranks
        here, following = (self.files[i % len(self.files)] for i in (shard, shard + 1))
        self.ahead = {path: self.ahead.get(path) or self.reader.submit(self.read, path)
                      for path in (here, following)}
        self.tokens, self.documents = self.ahead[here].result()

    def next_step(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of the next step's sequences: inputs and targets of each forward pass.
        Raises UserError where no shard holds the documents of a step."""
        cut = aligned_rows if self.cfg.align_documents else consecutive_rows
        cut = packed_rows if self.cfg.max_document_tokens else cut
        for _ in range(len(self.files) + 1):
            shard, position = self.place
            if step := cut(self.tokens, self.documents, position, length, self.cfg):
                rows, position = step
                self.place = shard, position
                mine = rows[self.rank * self.sequences :][: self.sequences]
                return [to_batch(part, self.device) for part in np.split(mine, self.micro_steps)]
            self.seek(shard + 1, 0)
            if (shard + 1) % len(self.files) == 0:
                epoch = (shard + 1) // len(self.files) + 1
                self.say(f"data: its end is reached, epoch {epoch} begins")
        raise UserError(f"--train_files {self.cfg.train_files}: no shard has documents for "
                        "a step; lower --train_seq_len or --sequences_per_step")

def to_batch(tokens: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs (int32) and targets (int64), both (B, T), of tokens (B, T + 1), on the device."""
    buffer = torch.from_numpy(tokens.astype(np.int64))
    pair, cuda = (buffer[:, :-1].int(), buffer[:, 1:].contiguous()), device.type == "cuda"
    return tuple(x.pin_memory().to(device, non_blocking=True) if cuda else x for x in pair)

# ---- Model ------------------------------------------------------------------
# In names: B sequences, T tokens, S = B·T, D model_dim, H heads, K head_dim, V padded vocabulary.
def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, with the epsilon of F.rms_norm, which is slow on CPUs."""
    size = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True)
    mean_square = size.square() / x.size(-1)
    return (x * (mean_square + torch.finfo(torch.float32).eps).rsqrt()).type_as(x)

def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max  # casts saturate by themselves only since torch 2.12
    return x.float().mul(scale).clamp(-limit, limit).to(dtype)

def scaled_mm(a_MK: Tensor, b_KN: Tensor, scale: float, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b · scale; a GPU takes a row-major, b column-major, K and N multiples of 16."""
    scales = (torch.full((), x, device=a_MK.device) for x in (scale, 1.0))
    return torch._scaled_mm(a_MK, b_KN, *scales, out_dtype=dtype, use_fast_accum=fast)

class FP8Product(torch.autograd.Function):
    """x (S, D) @ w (V, D).T in e4m3, scaled by x_s and w_s, as bf16. Its gradient, in e5m2, scaled
    by g_s, gives that of x, bf16, and that of w, fp32. A compiler sees the casts, to fuse them."""
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, x_s: float, w_s: float, g_s: float) -> Tensor:
        x_f8, w_f8 = to_fp8(x, x_s, torch.float8_e4m3fn), to_fp8(w, w_s, torch.float8_e4m3fn)
        ctx.save_for_backward(x_f8, w_f8)
        ctx.scales = x_s, w_s, g_s
        return scaled_mm(x_f8, w_f8.T, 1 / (x_s * w_s), torch.bfloat16, True)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple:
        (x_f8, w_f8), (x_s, w_s, g_s) = ctx.saved_tensors, ctx.scales
        g_f8 = to_fp8(g, g_s, torch.float8_e5m2)
        x_columns, w_columns, g_rows = (t.T.contiguous() for t in (x_f8, w_f8, g_f8))
        grad_x = scaled_mm(g_f8, w_columns.T, 1 / (g_s * w_s), torch.bfloat16, False)
        grad_w = scaled_mm(g_rows, x_columns.T, 1 / (g_s * x_s), torch.float32, False)
        return grad_x, grad_w, None, None, None

class CastedLinear(nn.Linear):
    """A linear map whose weight is cast to its input's type, or to FP8: @YouJiacheng, @leloykun."""
    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.fp8_scales = None  # of input, weight and gradient, where FP8 is to be used

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8_scales is None or not self.training:
            return F.linear(x, self.weight.type_as(x))
        y = FP8Product.apply(x.flatten(0, -2), self.weight, *self.fp8_scales)
        return y.unflatten(0, x.shape[:-1])

# Attention: token i sees token j where j <= i, both are of one document (@KoszarskyB), and
# i - j <= 128 · window. FlexAttention wants CUDA for its backward pass and compilation for speed.
def flex_mask(docs_BT: Tensor, window: Tensor) -> BlockMask:
    """The mask by tensor operations alone, so that the window's growth compiles nothing anew."""
    def document_causal(b, h, q, k):
        return (q >= k) & (docs_S[q] == docs_S[k]) & (q - k <= BLOCK * window)
    def ordered(seen_QK: Tensor) -> tuple[Tensor, Tensor]:  # how many blocks are seen, which first
        count, others = seen_QK.cumsum(-1), (~seen_QK).cumsum(-1)  # a sort compiles for minutes
        place = torch.where(seen_QK, count, count[:, -1:] + others) - 1
        return count[:, -1].int(), place.scatter(-1, place, block.expand_as(place)).int()
    docs_S, docs = docs_BT.flatten(), docs_BT.view(-1, BLOCK)
    block, first, last = torch.arange(len(docs), device=docs.device), docs[:, 0], docs[:, -1]
    distance = block[:, None] - block
    seen = (distance >= 0) & (distance <= window) & (first[:, None] <= last)
    full = seen & (distance > 0) & (distance < window) & (last[:, None] == first)
    views = seen & ~full, full, (seen & ~full).T.contiguous(), full.T.contiguous()  # back: by key
    return BlockMask((len(docs_S),) * 2, *(x[None, None] for view in views for x in ordered(view)),
                     BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=document_causal)

def dense_mask(docs_BT: Tensor, window: Tensor) -> Tensor:
    """What is added to the scores of each block of queries with the blocks up to it."""
    before = min(int(window), docs_BT.size(1) // BLOCK - 1)  # blocks that a window reaches back
    docs = docs_BT.view(-1, BLOCK)
    seen = docs[:, :, None] == gather_window(docs, before + 1)[:, None, :]
    token = torch.arange(-before * BLOCK, BLOCK, device=docs.device)
    distance = token[-BLOCK:, None] - token
    seen &= (distance >= 0) & (distance <= BLOCK * window)
    return torch.where(seen, 0.0, -math.inf)[:, None]

def gather_window(blocks: Tensor, window: int) -> Tensor:
    """(S / 128, 128, …) to (S / 128, window · 128, …): each block after those before it."""
    padded = torch.cat([blocks.new_zeros(window - 1, *blocks.shape[1:]), blocks])
    return torch.cat([padded[i : i + len(blocks)] for i in range(window)], dim=1)

def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask, kernel_options=None) -> Tensor:
    """Attention among all B·T tokens under either mask; q, k, v and the result (B, T, H, K)."""
    shape = q.shape
    if isinstance(mask, BlockMask):
        q, k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))
        y = flex_attention(q, k, v, block_mask=mask, scale=scale, kernel_options=kernel_options)
    else:
        q, k, v = (x.reshape(-1, BLOCK, *shape[2:]) for x in (q, k, v))
        if (window := mask.size(-1) // BLOCK) > 1:
            k, v = (gather_window(x, window) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.type_as(q), scale=scale)
    return y.transpose(1, 2).reshape(shape)

def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, https://arxiv.org/abs/2104.09864, by the angles of (T, 1, K / 2) pairs."""
    x = x_BTHK.float()
    cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, -sin], dim=-1)
    return (x * cos + x.roll(x.size(-1) // 2, -1) * sin).type_as(x_BTHK)

class CausalSelfAttention(nn.Module):
    def __init__(self, cfg: Hyperparameters, layer: int):
        super().__init__()
        self.heads = cfg.model_dim // cfg.head_dim
        self.shifts_keys = cfg.attention_pattern[layer] == "L"
        # Merged QKV: @fernbear.bsky.social, @YouJiacheng
        self.qkv_w = nn.Parameter(torch.empty(3, cfg.model_dim, cfg.model_dim))
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0]))  # of the weights of QKV and output
        self.c_proj = CastedLinear(cfg.model_dim, cfg.model_dim)
        self.qkv_w.lr_factor = self.c_proj.weight.lr_factor = 2.0  # of Muon's
        self.attn_gate = CastedLinear(min(12, cfg.model_dim), self.heads)

    def forward(self, x: Tensor, value_embed: Tensor | None, turn: tuple, *mask) -> Tensor:
        qkv = F.linear(x, (self.lambdas[0] * self.qkv_w).flatten(0, 1).type_as(x))
        qk, v = qkv.unflatten(-1, (3 * self.heads, -1)).split([2 * self.heads, self.heads], dim=2)
        q, k = rotate(norm(qk), *turn).chunk(2, dim=2)  # QK-norm: @Grad62304977
        if self.shifts_keys:  # what does not turn is of the token before: @classiclarryd
            k = k.unflatten(-1, (2, 2, -1))  # both of a pair; those that turn, those that do not
            before = torch.cat([k[:, :1], k[:, :-1]], dim=1)
            k = torch.stack([k[..., 0, :], before[..., 1, :]], dim=-2).flatten(-3)
        if value_embed is not None:  # @KoszarskyB, @Grad62304977, after Zhou et al. 2024
            v = v + value_embed.view_as(v)
        y = attend(q, k, v, 1.0, *mask)  # the tables of `turn` hold the scale
        # Each head may stay silent, where it has nothing to say: @classiclarryd
        gate = torch.sigmoid(self.attn_gate(x[..., : self.attn_gate.in_features]))
        c_proj = (self.lambdas[1] * self.c_proj.weight).type_as(x)
        return F.linear((y * gate[..., None]).flatten(2), c_proj)

class MLP(nn.Module):
    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        # Of one shape, so that one batch of Muon's has all of them: @byronxu99
        self.c_fc = nn.Parameter(torch.empty(cfg.mlp_ratio * cfg.model_dim, cfg.model_dim))
        self.c_proj = nn.Parameter(torch.empty(cfg.mlp_ratio * cfg.model_dim, cfg.model_dim))
        self.c_fc.lr_factor, self.c_proj.lr_factor = 2.0, 4.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.c_fc.type_as(x))
        return F.relu(x).square() @ self.c_proj.type_as(x)  # ReLU²: arxiv.org/abs/2109.08668

class Block(nn.Module):
    def __init__(self, cfg: Hyperparameters, layer: int):
        super().__init__()
        self.attn = CausalSelfAttention(cfg, layer) if cfg.attention_pattern[layer] != "." else None
        self.mlp = MLP(cfg)
        self.lambdas = nn.Parameter(torch.tensor([1.1, 0.0]))  # of x and of the embedding x0

    def forward(self, x: Tensor, x0: Tensor, *attention) -> Tensor:
        x = self.lambdas[0] * x + self.lambdas[1] * x0  # @KoszarskyB, @Grad62304977
        if self.attn is not None:
            x = x + self.attn(norm(x), *attention)
        return x + self.mlp(norm(x))

class GPT(nn.Module):
    """The model, under the published parameter names. Its forward gives the summed cross-entropy of
    targets (B, T; -1: none) after inputs (B, T), rows apart."""
    def __init__(self, cfg: Hyperparameters):
        super().__init__()
        self.cfg = cfg
        vocab = round_up(cfg.vocab_size, cfg.vocab_multiple)
        self.embed = nn.Embedding(vocab, cfg.model_dim)
        self.value_embeds = nn.ModuleList(nn.Embedding(vocab, cfg.model_dim)
                                          for _ in set(cfg.value_embed_pattern) - {"."})
        self.blocks = nn.ModuleList(Block(cfg, i) for i in range(len(cfg.attention_pattern)))
        # U-Net skips: @brendanh0gan; weighted within a sigmoid: @bernard24, hiverge.ai
        self.skip_lambda = nn.Parameter(torch.tensor(-1.5))
        self.smear_gate = CastedLinear(min(12, cfg.model_dim), 1)
        self.smear_lambda = nn.Parameter(torch.tensor(0.0))
        self.backout_lambda = nn.Parameter(torch.tensor(0.5))
        self.lm_head = CastedLinear(cfg.model_dim, vocab)
        # Long and short window in blocks; cosines and sines, times the root of the attention scale.
        tables = torch.zeros(2, max(cfg.train_seq_len, cfg.val_seq_len), 1, cfg.head_dim // 2)
        self.register_buffer("windows", torch.zeros(2, dtype=torch.int32), persistent=False)
        self.register_buffer("turns", tables, persistent=False)
        self.set_window(cfg.num_iterations)
        self.head_chunks, self.kernel_options = max(1, cfg.head_chunks), None

    def set_window(self, step: int) -> None:
        """Take the windows of a step, after the last of the final validation: @classiclarryd."""
        with self.turns.device:
            frequency, scale = yarn(step, self.cfg)
            # Half-truncated rotary embedding, that is, half of the pairs do not turn: @YouJiacheng
            frequency = F.pad(frequency, (0, self.cfg.head_dim // 4))
            theta = torch.outer(torch.arange(self.turns.size(1)), frequency)[:, None]
        self.turns.copy_(scale**0.5 * torch.stack([theta.cos(), theta.sin()]))
        long = window_blocks(step, self.cfg)
        self.windows[1] = max(1, long // 2)
        self.windows[0] = self.cfg.final_window if step == self.cfg.num_iterations else long

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise every matrix by its name. Raises KeyError for one it does not know."""
        for name, param in self.named_parameters():
            if name == "embed.weight":
                param.normal_(generator=generator)
            elif name.endswith(("qkv_w", "c_fc")):
                bound = (0.75 / self.cfg.model_dim) ** 0.5  # std 0.5 / sqrt(fan_in): @YouJiacheng
                param.uniform_(-bound, bound, generator=generator)
            elif name.endswith(("c_proj", ".weight")):
                param.zero_()  # zero-initialised projections: @Grad62304977
            elif "lambda" not in name:  # these are made as they begin
                raise KeyError(f"no initialisation for the parameter {name}")

    def hidden(self, inputs_BT: Tensor) -> Tensor:
        """The normed output of the last layer, (B, T, D)."""
        length = inputs_BT.size(1)
        inputs_BT = F.pad(inputs_BT, (0, -length % BLOCK), value=self.cfg.eot_token)
        starts = inputs_BT == self.cfg.eot_token
        starts |= torch.arange(starts.size(1), device=starts.device) == 0
        docs_BT = starts.flatten().cumsum(0, dtype=torch.int32).view_as(starts)
        build = flex_mask if docs_BT.is_cuda and torch.compiler.is_compiling() else dense_mask
        windows = dict(zip("LS", self.windows, strict=True))
        masks = {x: build(docs_BT, windows[x]) for x in "LS" if x in self.cfg.attention_pattern}
        turn = self.turns[:, : inputs_BT.size(1)]
        values, outputs = {str(i): e(inputs_BT) for i, e in enumerate(self.value_embeds)}, []
        x = x0 = norm(self.smear(self.embed(inputs_BT)))  # norm there: @Grad62304977
        for layer, block in enumerate(self.blocks):
            if block.attn is None:
                x = x + torch.sigmoid(self.skip_lambda) * outputs[self.cfg.skip_layer]
            x = block(x, x0, values.get(self.cfg.value_embed_pattern[layer]), turn,
                      masks.get(self.cfg.attention_pattern[layer]), self.kernel_options)
            outputs.append(x)
        x = x - self.backout_lambda * outputs[self.cfg.backout_layer]  # backout: @snimu
        return norm(x[:, :length])

    def smear(self, x_BTD: Tensor) -> Tensor:
        """Each token's embedding and some of the one before it: @classiclarryd."""
        now, before = x_BTD[:, 1:], x_BTD[:, :-1]
        gate = torch.sigmoid(self.smear_gate(now[..., : self.smear_gate.in_features]))
        return torch.cat([x_BTD[:, :1], now + self.smear_lambda * gate * before], dim=1)

    def logits(self, x: Tensor) -> Tensor:
        """Soft-capped (Gemma 2) logits, fp32, (…, V): @Grad62304977, @KoszarskyB, @YouJiacheng."""
        return self.cfg.logit_cap * torch.sigmoid(self.lm_head(x).float() / self.cfg.logit_slope)

    def head_loss(self, x_SD: Tensor, targets_S: Tensor, ids_V: Tensor) -> Tensor:
        """Summed cross-entropy; on a GPU in one pass over the logits each way: capped, they need no
        maximum; and the target's is found by its id, as to gather it scatters its gradient."""
        logits = self.logits(x_SD)
        if not logits.is_cuda:
            return F.cross_entropy(logits, targets_S, ignore_index=-1, reduction="sum")
        losses = logits.exp().sum(-1).log() - (logits * (targets_S[:, None] == ids_V)).sum(-1)
        return (losses * (targets_S >= 0)).sum()

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x, targets = self.hidden(inputs_BT).flatten(0, 1), targets_BT.flatten()
        ids = torch.arange(len(self.lm_head.weight), device=x.device)  # here: pieces share nothing
        chunks = self.head_chunks if self.training else 1  # without gradients there is room enough
        size = self.cfg.sequences_per_forward * self.cfg.train_seq_len // chunks
        if size >= len(x):
            return self.head_loss(x, targets, ids)
        parts = zip(*(t.split(round_up(max(size, 1), BLOCK)) for t in (x, targets)), strict=True)
        return sum(checkpoint(self.head_loss, *part, ids, use_reentrant=False) for part in parts)

# ---- Optimizers -------------------------------------------------------------
POLAR_EXPRESS = [  # of X, A X and A² X in each iteration; found for a spectral norm of at most 1.02
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]

def orthogonalize(grad_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly the closest semi-orthogonal matrix to each of (B, M, N), by Newton-Schulz iterations:
    Keller Jordan et al., https://kellerjordan.github.io/posts/muon/, with the coefficients of Polar
    Express, https://arxiv.org/abs/2505.16932: @varunneal; batched: @scottjmaddox, @YouJiacheng."""
    tall = grad_MN.size(-2) > grad_MN.size(-1)
    X = (grad_MN.mT if tall else grad_MN).to(dtype)
    X = X / (1.02 * X.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X

def muon_update(weight, grad, mean, square, factor, lr, momentum, decay, dtype) -> None:
    """NorMuon's step, Muon's with rows made even: https://arxiv.org/abs/2510.05491, @li_zichong.
    What it shrinks decays: https://arxiv.org/abs/2510.12402, @varunneal. In place, for a batch."""
    mean.lerp_(grad, 1 - momentum)
    update = orthogonalize(grad.lerp(mean, momentum), dtype).type_as(weight)
    size = update.norm(dim=(-2, -1), keepdim=True)
    square.lerp_(update.square().mean(-1, keepdim=True), 0.05)
    evened = update / square.clamp_min(1e-10).sqrt()
    update = F.normalize(evened, dim=(-2, -1), eps=1e-10) * size
    decaying = torch.where(update * weight >= 0, weight, 0)
    weight.sub_(lr * factor * (update + lr * decay * decaying))

def adam_update(weight, grad, mean, square, step, lr: Tensor, beta1, beta2, eps, decay) -> None:
    """Adam's step in the order of section 2, https://arxiv.org/abs/1412.6980, in place, in fp32."""
    step += 1
    decay, old = decay * lr**2, weight.float()
    new_mean = mean.float().lerp(grad.float(), 1 - beta1)
    new_square = square.float().lerp(grad.float().square(), 1 - beta2)
    lr = lr * (1 - beta2**step).sqrt() / (1 - beta1**step)
    change = lr * new_mean / (new_square.sqrt() + eps)
    weight.copy_(old - change - decay * torch.where(change * old >= 0, old, 0))  # @roeeshenberg
    mean.copy_(new_mean)
    square.copy_(new_square)

class ShardedOptimizer:
    """Parameters, and their gradients, that are views of one flat buffer each: one call reduces or
    gathers all. Rank r owns the r-th part, of whole units (scalars or matrices), and its state."""
    def __init__(self, name: str, params: list[nn.Parameter], lr: float, cfg, ranks, unit: int = 1):
        self.name, self.base_lr, self.cfg, self.ranks, self.handle = name, lr, cfg, ranks, None
        self.numel = sum(p.numel() for p in params)
        share = round_up(self.numel, unit * ranks.world_size) // ranks.world_size
        self.mine = slice(ranks.rank * share, (ranks.rank + 1) * share)
        self.weights = params[0].detach().new_zeros(share * ranks.world_size)
        self.grads = torch.zeros_like(self.weights)
        ends = itertools.accumulate(p.numel() for p in params)
        for p, end in zip(params, ends, strict=True):
            weight, grad = (x[end - p.numel() : end].view_as(p) for x in (self.weights, self.grads))
            p.data, p.grad = weight.copy_(p.detach()), grad
        self.grad = torch.empty_like(self.grads[self.mine]) if ranks.world_size > 1 else self.grads
        self.lr = torch.zeros((), device=self.weights.device)
        self.state = dict(mean=torch.zeros_like(self.grad))  # of this rank's share

    def reduce(self) -> None:
        """Begin to sum the gradients over the ranks; each receives its own share."""
        if self.ranks.world_size > 1:
            self.handle = dist.reduce_scatter_tensor(self.grad, self.grads, async_op=True)

    def update(self, step: int, divisor: int) -> None:
        """Step on this rank's share by gradients / divisor, then begin to hand it round."""
        if self.handle:
            self.handle.wait()
        self.grad.div_(divisor)
        if "sum" in self.state:  # of the gradients since the last step: @classiclarryd
            self.state["sum"] += self.grad
            if (step + 1) % self.cfg.adam_every:
                return
            self.grad.copy_(self.state["sum"])
            self.state["sum"].zero_()
        self.lr.fill_(self.base_lr * lr_scale(step, self.cfg))
        self.update_share(share := self.weights[self.mine], step)
        if self.ranks.world_size > 1:
            self.handle = dist.all_gather_into_tensor(self.weights, share, async_op=True)

    def full_state(self) -> dict[str, Tensor]:
        """The state of all ranks, without padding, on rank 0. All ranks call it."""
        full = {}
        for key, share in self.state.items():
            whole = self.ranks.all_gather(share.flatten()).flatten() if share.ndim else share[None]
            size = max(1, self.numel * len(whole) // len(self.weights))
            full[key] = whole[:size].cpu() if self.ranks.rank == 0 else None
        return full

    def load_full_state(self, full: dict[str, Tensor]) -> None:
        """Take this rank's share of what `full_state` gave, by any number of ranks."""
        for key, value in self.state.items():
            whole = F.pad(full[key], (0, self.ranks.world_size * value.numel() - len(full[key])))
            value.copy_(whole.view(-1, *value.shape)[self.ranks.rank if value.ndim else 0])

class Adam(ShardedOptimizer):
    """Adam on any tensors. lr: about the change of each weight in a step."""
    def __init__(self, *args):
        super().__init__(*args)
        self.state |= dict(square=torch.zeros_like(self.grad), step=torch.zeros_like(self.lr))
        self.state |= dict(sum=torch.zeros_like(self.grad))
        self.rule = torch.compile(adam_update, dynamic=False) if self.lr.is_cuda else adam_update

    def update_share(self, weight: Tensor, step: int) -> None:
        betas_eps = self.cfg.adam_beta1, self.cfg.adam_beta2, self.cfg.adam_eps
        decay = self.cfg.adam_decay if self.name != "scalars" else 0.0
        state = (self.state[key] for key in ("mean", "square", "step"))
        self.rule(weight, self.grad, *state, self.lr, *betas_eps, decay)

class Muon(ShardedOptimizer):
    """NorMuon on matrices of one shape, and stacks. lr · lr_factor: a step's spectral norm."""
    def __init__(self, name: str, params: list[nn.Parameter], *args):
        self.shape = params[0].shape[-2:]
        super().__init__(name, params, *args, size := self.shape.numel())
        self.state["square"] = self.grad.new_zeros(len(self.grad) // size, self.shape[0], 1)
        factors = [p.new_full((p.numel() // size,), getattr(p, "lr_factor", 1.0)) for p in params]
        factors = F.pad(torch.cat(factors), (0, (len(self.weights) - self.numel) // size))
        self.factors = factors.view(self.ranks.world_size, -1, 1, 1)[self.ranks.rank]
        self.momentum = torch.zeros_like(self.lr)
        self.dtype = torch.bfloat16 if self.lr.is_cuda else torch.float32
        self.rule = torch.compile(muon_update, dynamic=False) if self.lr.is_cuda else muon_update

    def update_share(self, weight: Tensor, step: int) -> None:
        self.momentum.fill_(muon_momentum(step, self.cfg))
        batch = (x.view(-1, *self.shape) for x in (weight, self.grad, self.state["mean"]))
        rates = self.factors, self.lr, self.momentum, self.cfg.muon_decay
        self.rule(*batch, self.state["square"], *rates, self.dtype)

def build_optimizers(model: GPT, cfg: Hyperparameters, ranks: "Ranks") -> list[ShardedOptimizer]:
    """An optimizer for each row of the table, which covers every parameter once."""
    params = list(model.parameters())
    matrices = [p for p in model.blocks.parameters() if p.ndim >= 2] + [model.smear_gate.weight]
    table = [(Muon, f"matrices of {M}x{N}", [p for p in matrices if p.shape[-2:] == (M, N)],
              cfg.muon_lr) for M, N in sorted({p.shape[-2:] for p in matrices})]
    table += [(Adam, "embed", [model.embed.weight, *model.value_embeds.parameters()], cfg.embed_lr),
              (Adam, "head", [model.lm_head.weight], cfg.head_lr),
              (Adam, "scalars", [p for p in params if p.ndim < 2], cfg.scalar_lr)]
    covered = sorted(id(p) for _, _, rows, _ in table for p in rows)
    assert covered == sorted(map(id, params)), "every parameter needs one row of the table"
    return [kind(name, rows, lr, cfg, ranks) for kind, name, rows, lr in table]

def step_optimizers(optimizers: list[ShardedOptimizer], step: int, divisor: int) -> None:
    """One step of all; what one computes overlaps what the others communicate."""
    for optimizer in optimizers:
        optimizer.reduce()
    for optimizer in optimizers:
        optimizer.update(step, divisor)
    for optimizer in optimizers:
        if optimizer.handle:
            optimizer.handle.wait()
        optimizer.grads.zero_()

# ---- Schedules --------------------------------------------------------------
def stage(step: int, cfg: Hyperparameters) -> int:
    """The third of the schedules that a step is in, from 0; 3 after them."""
    return min(3, 3 * step // max(1, cfg.num_iterations - cfg.extension_steps))

def stage_value(stages: str, step: int, cfg: Hyperparameters) -> int:
    """A step's, of up to four numbers, which are for a stage each."""
    numbers = [int(x) for x in stages.split()]
    return numbers[min(stage(step, cfg), len(numbers) - 1)]

def lr_scale(step: int, cfg: Hyperparameters) -> float:
    """Factor of every learning rate: the stage's, falling linearly to final_lr_frac."""
    progress = min(1.0, step / max(1, cfg.num_iterations - cfg.extension_steps))
    frac = min(1.0, (1 - progress) / cfg.cooldown_frac) if cfg.cooldown_frac else 1.0
    return frac * stage_value(cfg.lr_stages, step, cfg) / 100 + (1 - frac) * cfg.final_lr_frac

def window_blocks(step: int, cfg: Hyperparameters) -> int:
    """Long attention window in blocks."""
    return stage_value(cfg.window_stages, step, cfg)

def sequence_length(step: int, cfg: Hyperparameters) -> int:
    """Tokens of each of a step's sequences. Small batches do at first: @varunneal."""
    unit, stages = BLOCK * max(map(int, cfg.length_stages.split())), cfg.length_stages
    return BLOCK * (round_up(cfg.train_seq_len * stage_value(stages, step, cfg), unit) // unit)

def yarn(step: int, cfg: Hyperparameters) -> tuple[Tensor, float]:
    """Rotary frequencies and attention scale. Where the window grows, what hardly turned in it is
    slowed in proportion: https://arxiv.org/abs/2309.00071, and the scale rises: @classiclarryd."""
    frequency = (1 / cfg.rope_base) ** torch.linspace(0, 1, steps=cfg.head_dim // 4)
    windows, scale = [int(x) for x in cfg.window_stages.split()], cfg.attention_scale
    for old, new in itertools.pairwise(windows[: stage(step, cfg) + 1]):
        turns = BLOCK * old * frequency / (2 * math.pi)
        kept = ((turns - 1) / (32 - 1)).clamp(0, 1)  # all of what turns 32 times, none of once
        frequency = frequency * (old / new + kept * (1 - old / new))
        scale *= 1 + 0.2 * math.log(new / old)
    return frequency, scale

def muon_momentum(step: int, cfg: Hyperparameters) -> float:
    """Muon's momentum: linear from momentum_start to muon_momentum, constant, at the end back."""
    frac = min(1.0, (cfg.num_iterations - step) / max(1, cfg.momentum_cooldown))
    if step < cfg.momentum_warmup:
        frac = step / cfg.momentum_warmup
    return (1 - frac) * cfg.momentum_start + frac * cfg.muon_momentum

# ---- Distributed and logging (the same in every record) ---------------------
class Ranks:
    """This process among the others, by torchrun's variables, and its device. Raises UserError."""
    def __init__(self, cfg: Hyperparameters):
        env = dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0)
        self.rank, self.world_size, local_rank = (int(os.environ.get(*x)) for x in env.items())
        gpus = 0 if cfg.device == "cpu" else torch.cuda.device_count()
        self.device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
        if local_rank >= gpus > 0 or cfg.device == "cuda" and not gpus:
            raise UserError(f"--device {cfg.device}: no GPU {local_rank}; use --device cpu")
        if gpus:
            torch.cuda.set_device(self.device)
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                raise UserError(f"--device {cfg.device}: this GPU has no bf16; use --device cpu")
        if self.world_size > 1:
            warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
            # After a restart the store still holds the addresses of dead ranks, under its number.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(attempt, next(dist.rendezvous("env://"))[0])
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store,
                                    rank=self.rank, world_size=self.world_size)

    def all_gather(self, x: Tensor) -> Tensor:
        """(N,) of every rank, as (ranks, N)."""
        rows = x.repeat(self.world_size, 1)
        if self.world_size > 1:
            dist.all_gather_into_tensor(rows.view(-1), x)
        return rows

    def broadcast(self, value):
        """Rank 0's value of any picklable object."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def check_parity(self, step: int, model: nn.Module) -> None:
        """Raise UserError where the ranks' parameters are not the same bits."""
        checksum = sum(p.detach().flatten().view(torch.uint8).sum() for p in model.parameters())
        if len(self.all_gather(checksum[None]).unique()) > 1:
            raise UserError(f"step {step}: the ranks' parameters have drifted apart")

def device_facts(device: torch.device) -> tuple[str, int]:
    """Name and peak memory in MiB, of the GPU or of the CPU and this process."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.max_memory_allocated(device) // 2**20
    info, mib = Path("/proc/cpuinfo"), 2**20 if sys.platform == "darwin" else 2**10
    name = re.search(r"model name\s*: (.*)", info.read_text() if info.exists() else "")
    name = f"cpu ({name[1] if name else os.uname().machine})"
    return name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // mib

class Log:
    """Rank 0's log file and console; the other ranks stay silent. A new log begins with its header;
    an old one goes on where its run is resumed. Raises UserError where it is not."""
    def __init__(self, cfg: Hyperparameters, ranks: Ranks):
        run_id = cfg.run_id or time.strftime("%Y%m%d-%H%M%S-") + os.urandom(3).hex()
        self.enabled, self.run_id = ranks.rank == 0, ranks.broadcast(run_id)
        self.folder, self.file, self.last_step = Path("logs") / self.run_id, None, -1
        path = self.folder / "log.txt"
        if self.enabled and path.exists() and path.stat().st_size:
            if not cfg.resume:
                raise UserError(f"--run_id {cfg.run_id}: {path} is there already; go on with its "
                                "run by --resume auto, or name another --run_id")
            steps = re.findall(r"^step:(\d+)/", path.read_text(errors="replace"), re.M)
            self.last_step = max(map(int, steps), default=-1)
            self.file = path.open("a", buffering=1, errors="replace")

    def begin(self, header: str) -> None:
        """Make a new log of the header; an old one has its own."""
        if self.enabled and not self.file:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = (self.folder / "log.txt").open("a", buffering=1, errors="replace")
            self(header, console=False)

    def __call__(self, text: str, console: bool = True) -> None:
        if self.file:
            self.file.write(text + "\n")
        if self.enabled and console:
            print(text, flush=True)

    def step(self, step: int, last: int, ms: float, **losses: float) -> None:
        """A step's line, marked if the log has it from before a crash; the console shows tenths."""
        shown = "".join(f"{k}:{loss:.4f} " for k, loss in losses.items() if math.isfinite(loss))
        redone = " redone:1" if step <= self.last_step else ""
        self(f"step:{step}/{last} {shown}train_time:{ms:.0f}ms step_avg:{ms / max(1, step):.2f}ms"
             + redone, console="val_loss" in losses or step * 10 // last > (step - 1) * 10 // last)

class Health:
    """What ranks tell each other at every step: a signal to stop, a non-finite loss or gradient.
    On CUDA it is read one step late, so that the host never waits for the step it is in."""
    SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP  # the last: a closed connection

    def __init__(self, ranks: Ranks, names: list[str]):
        self.ranks, self.names, self.news = ranks, names, []
        self.signal, self.stopping, self.loss = 0, 0, math.nan
        for number in self.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP: so do we
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame) -> None:
        self.signal = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)  # a second one ends the process at once

    def check(self, step: int, loss: Tensor, grads: list[Tensor]) -> None:
        """Share the news of this step, before its update. Raises UserError, as `read`."""
        sums = [x.sum(dtype=torch.float32) for x in (loss, *grads)]  # finite where all entries are
        news = torch.stack([*sums, torch.full_like(sums[0], self.signal)])
        rows = self.ranks.all_gather(news)
        event = torch.cuda.Event() if news.is_cuda else None
        self.news.append((step, rows.to("cpu", non_blocking=True), event))
        if event:
            event.record()
        self.read(late=int(news.is_cuda))

    def read(self, late: int = 0) -> None:
        """Take in all news but the last `late`. Raises UserError: step, rank and what is bad."""
        while len(self.news) > late:
            step, rows, event = self.news.pop(0)
            if event:
                event.synchronize()
            for (rank, entry), value in np.ndenumerate(rows.tolist()):
                if not math.isfinite(value):
                    raise UserError(f"step {step}: non-finite {self.names[entry]} on rank {rank}")
            self.loss, self.stopping = rows[:, 0].mean().item(), int(rows[:, -1].max())

# ---- Checkpoints (the same in every record) ---------------------------------
def save_checkpoint(folder: Path, state: dict, ranks: Ranks, keep: int) -> None:
    """Rank 0 writes the state, whole or not at all, and keeps the newest. Raises UserError."""
    path, failure = folder / f"step-{state['step']:06d}.pt", None
    temporary = path.with_suffix(".tmp")
    try:
        if ranks.rank == 0:
            with temporary.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            for old in sorted(folder.glob("step-*.pt"), key=lambda p: p.stat().st_mtime_ns)[:-keep]:
                old.unlink()
    except (OSError, RuntimeError) as error:  # torch.save's RuntimeError hides the cause
        if temporary.is_file():
            temporary.unlink()
        failure = f"{path}: not written ({error.__context__ or error}); make room, --resume auto"
    if failure := ranks.broadcast(failure):
        raise UserError(failure)

def is_whole(path: Path) -> bool:
    """Whether the file is there with all that torch.save wrote, by the checksums in it."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except Exception:  # by where the damage is, zipfile raises nearly anything
        return False

def find_checkpoint(cfg: Hyperparameters, ranks: Ranks, log: Log) -> Path | None:
    """The checkpoint that --resume asks for, the same one on all ranks. Raises UserError."""
    auto = cfg.resume == "auto"
    if not auto and not Path(cfg.resume).is_file():
        raise UserError(f"--resume {cfg.resume}: there is no such file; name another")
    paths = sorted(log.folder.glob("step-*.pt"), reverse=True) if auto else [Path(cfg.resume)]
    for path in ranks.broadcast(paths):
        if ranks.broadcast(ranks.rank == 0 and is_whole(path)):
            return path
        log(f"skipped the checkpoint {path}: it is damaged")
    if not auto:
        raise UserError(f"--resume {cfg.resume}: no whole checkpoint; name another")
    log(f"no checkpoint in {log.folder}: starting afresh")

def load_checkpoint(path: Path) -> dict:
    """The state at `path`. Raises UserError where it is none."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        needed = "step model optimizers loader data train_time_ms"
        types = {key: type(value) for key, value in state["hyperparameters"].items()}
        if (set(needed.split()) - state.keys() or state["step"] < 0
                or types != {field.name: field.type for field in fields(Hyperparameters)}):
            raise ValueError
        check_hyperparameters(Hyperparameters(**state["hyperparameters"]))
    except Exception as error:  # by what is in the file, torch.load raises nearly anything
        raise UserError(f"{path}: no checkpoint, {type(error).__name__}; name another") from None
    return state

def check_same_run(path: Path, state: dict, cfg: Hyperparameters, data: list | None) -> None:
    """Raise UserError where `cfg` or the training data, if any, are not the checkpoint's."""
    theirs, ours = state["hyperparameters"], asdict(cfg)
    fixed = itertools.takewhile("num_iterations".__ne__, ours)  # what follows may change
    differing = [f"{k} {theirs[k]!r}, now {ours[k]!r}" for k in fixed if theirs[k] != ours[k]]
    if state["step"] > cfg.num_iterations:
        differing.append(f"num_iterations, its step is {state['step']}")
    if data is not None and state["data"] != data:
        differing.append("the training data")
    if differing:
        raise UserError(f"{path}: of another run; what differs: {'; '.join(differing)}")

# ---- Validation (the same in every record) ----------------------------------
def read_val_tokens(cfg: Hyperparameters) -> np.ndarray:
    """The first val_tokens validation tokens and one more, uint16. Raises UserError."""
    shards = [read_shard(path, cfg.vocab_size) for path in find_shards(cfg.val_files)]
    tokens = np.concatenate(shards)[: cfg.val_tokens + 1]
    if len(tokens) <= cfg.val_tokens:
        raise UserError(f"--val_tokens {cfg.val_tokens}: lower it below {cfg.val_files!r}'s "
                        f"{len(tokens)} tokens")
    return tokens

@torch.no_grad()
def validate(model: nn.Module, tokens: np.ndarray, cfg: Hyperparameters, ranks: Ranks) -> float:
    """Mean loss over the validation tokens, each counted once; the sequences are dealt to ranks."""
    model.eval()
    total, length = torch.zeros((), dtype=torch.float64, device=ranks.device), cfg.val_seq_len
    count = len(tokens) - 1
    size = length * max(1, min(cfg.sequences_per_forward * cfg.train_seq_len, count) // length)
    tokens = np.pad(tokens, (0, size))
    for start in range(ranks.rank * size, count, ranks.world_size * size):
        part = tokens[start : start + size + 1]
        rows = np.lib.stride_tricks.sliding_window_view(part, length + 1)[::length]
        inputs, targets = to_batch(rows, ranks.device)
        targets.view(-1)[count - start :] = -1  # the last ones are padding
        total += model(inputs, targets)
    model.train()
    return ranks.all_gather(total[None]).sum().item() / count

# ---- Training ---------------------------------------------------------------
def prepare_for_cuda(model: GPT, cfg: Hyperparameters, device: torch.device) -> None:
    """Types, head, kernel options and compilation that suit the GPU at hand."""
    bf16 = [module for name, module in model.named_modules() if re.search("embed|gate|head", name)]
    nn.ModuleList(bf16).bfloat16()
    if cfg.fp8_head and torch.cuda.get_device_capability(device) >= (8, 9):
        model.lm_head.fp8_scales = cfg.fp8_x_scale, cfg.fp8_w_scale, cfg.fp8_grad_scale
    if torch.cuda.get_device_properties(device).shared_memory_per_block_optin < 160 * 1024:
        model.kernel_options = dict(BLOCK_M1=32, BLOCK_N1=64, BLOCK_M2=64, BLOCK_N2=32)  # backward
    model.compile(dynamic=False)

def choose_head_chunks(model: GPT, cfg: Hyperparameters, device: torch.device) -> int:
    """Pieces in which head and loss fit into a GPU's free memory, or a GiB where nothing is
    compiled; a power of two, 16 at most."""
    tokens = cfg.sequences_per_forward * cfg.train_seq_len
    bytes_each, room = 32, 2**30  # bytes for a logit
    if device.type == "cuda":  # some 50 bytes for each activation that is kept
        kept = 50 * tokens * cfg.model_dim * len(model.blocks)
        bytes_each, room = 4, max(1e8, torch.cuda.mem_get_info(device)[0] - kept)
    pieces = bytes_each * tokens * len(model.lm_head.weight) / room
    return cfg.head_chunks or min(16, 2 ** max(0, math.ceil(math.log2(pieces))))

def warm_up(model: GPT, optimizers: list, per_forward: int, cfg, ranks: Ranks) -> None:
    """Run every kernel on random tokens, then put weights and optimizer state back."""
    tensors = [x for o in optimizers for x in (o.weights, *o.state.values())]
    before, length = [x.to("cpu", copy=True) for x in tensors], cfg.train_seq_len
    size = ranks.world_size * max(cfg.val_seq_len, per_forward * (length + 1))
    tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=size)
    batch = to_batch(tokens[: per_forward * (length + 1)].reshape(per_forward, -1), ranks.device)
    for step in range(cfg.warmup_steps):
        model(*batch).backward()
        step_optimizers(optimizers, step, len(tokens))
    validate(model, tokens, cfg, ranks)
    for x, value in zip(tensors, before, strict=True):
        x.copy_(value)

def build(cfg: Hyperparameters, ranks: Ranks) -> tuple[GPT, list]:
    """Model and optimizers as a run begins."""
    with torch.device(ranks.device):
        model = GPT(cfg)
        model.init_weights(torch.Generator(ranks.device).manual_seed(cfg.seed))
    if ranks.device.type == "cuda":
        prepare_for_cuda(model, cfg, ranks.device)
    model.head_chunks = choose_head_chunks(model, cfg, ranks.device)
    return model, build_optimizers(model, cfg, ranks)

def train(cfg: Hyperparameters, ranks: Ranks, log: Log, state: dict | None) -> int:
    """Train, validate and log as `cfg` says, on from `state`; the exit code."""
    device, last, on_gpu = ranks.device, cfg.num_iterations, ranks.device.type == "cuda"
    first, train_ms = (state["step"], state["train_time_ms"]) if state else (0, 0.0)
    val_tokens = read_val_tokens(cfg)
    loader = TokenLoader(cfg, ranks.rank, ranks.world_size, device, log) if first < last else None
    data = loader and [[path.name, shard_size(path), zlib.crc32(np.fromfile(path, "u1", 2**20))]
                       for path in loader.files]  # tells other data apart
    if state:
        check_same_run(Path(cfg.resume), state, cfg, data)
    model, optimizers = build(cfg, ranks)
    health = Health(ranks, ["loss", *(f"gradient of {o.name}" for o in optimizers)])
    machine = dict(device=device_facts(device)[0], torch=torch.__version__, seed=cfg.seed,
                   world_size=ranks.world_size, parameters=sum(o.numel for o in optimizers))
    head = "fp8" if model.lm_head.fp8_scales else "bf16" if on_gpu else "fp32"
    setup = dict(run_id=log.run_id, python=sys.version.split()[0], threads=torch.get_num_threads())
    facts = asdict(cfg) | machine | setup | dict(head=head, head_chunks=model.head_chunks)
    lines = (f"{key}: {value}" for key, value in facts.items())
    log.begin("\n".join([SCRIPT.read_text(), "=" * 100, *lines, "=" * 100]))
    log("{device}, {world_size} rank(s), {parameters:,} parameters, {head} head in {head_chunks} "
        "piece(s), logs/{run_id}".format(**facts))
    if loader:
        log("warming up; a GPU compiles for 1 to 3 minutes the first time ...", console=on_gpu)
        started = time.perf_counter()
        for length in {sequence_length(step, cfg) for step in range(last)}:
            of_length = replace(cfg, train_seq_len=length)
            warm_up(model, optimizers, loader.per_forward, of_length, ranks)  # waits at its end
        log(f"compile_seconds: {time.perf_counter() - started:.1f}", console=on_gpu)
    if state:
        model.load_state_dict(state["model"])
        for optimizer in optimizers:
            optimizer.load_full_state(state["optimizers"][optimizer.name])
        redone = f"; steps up to {log.last_step} are redone" if log.last_step > first else ""
        log(f"resumed at step:{first} from {cfg.resume}{redone}")
    if state and loader:
        loader.seek(*state["loader"])
    started = time.perf_counter() - train_ms / 1000  # the clock starts
    for step in range(first, last + 1):  # one round more than steps: the last only validates
        if step in (first, last) or window_blocks(step, cfg) != window_blocks(step - 1, cfg):
            model.set_window(step)
        stopping = health.stopping if step < last else 0
        if step == last or cfg.val_every and step % cfg.val_every == 0 and not stopping:
            optimizers[0].lr.item()  # waits for the device
            train_ms = 1000 * (time.perf_counter() - started)  # the clock stops
            health.read()
            ranks.check_parity(step, model)
            val_loss = validate(model, val_tokens, cfg, ranks)
            log.step(step, last, train_ms, val_loss=val_loss)
            started = time.perf_counter() - train_ms / 1000  # the clock goes on
        if cfg.save_every and step > first and (
                stopping or step == last or step % cfg.save_every == 0):
            health.read()
            save_checkpoint(log.folder, ranks=ranks, keep=2 + (step == last), state=dict(
                step=step, hyperparameters=asdict(cfg), data=data, loader=loader.place,
                train_time_ms=1000 * (time.perf_counter() - started), model=model.state_dict(),
                optimizers={o.name: o.full_state() for o in optimizers}))
        if stopping:
            log(f"stopped at step:{step} by {signal.Signals(stopping).name}; "
                + (f"to go on: --run_id {log.run_id} --resume auto" if cfg.save_every
                   else "nothing is saved, as --save_every is 0"))
            return 128 + stopping
        if step == last:
            break
        loss, length = torch.zeros((), device=device), sequence_length(step, cfg)
        for inputs, targets in loader.next_step(length):
            micro_loss = model(inputs, targets)
            micro_loss.backward()
            loss += micro_loss.detach() / (loader.sequences * length)
        health.check(step, loss, [o.grads for o in optimizers])
        step_optimizers(optimizers, step, cfg.sequences_per_step)
        log.step(step + 1, last, 1000 * (time.perf_counter() - started), train_loss=health.loss)
    tokens = cfg.sequences_per_step * sum(sequence_length(step, cfg) for step in range(last))
    results = dict(val_loss=f"{val_loss:.6f}", train_time_ms=f"{train_ms:.0f}", steps=last,
                   tokens=tokens, tokens_per_second=f"{1000 * tokens / train_ms:.0f}",
                   peak_memory_mib=device_facts(device)[1], **machine)
    log("\n".join(["---", *(f"{key}: {value}" for key, value in results.items())]))
    return 0

def main(argv: list[str] | None = None) -> int:
    """Run the script and give its exit code: what a user can mend ends in one line, and in 2."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(cache, "train_gpt")))
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # both: at first use
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc keeps what is freed: pages cost time
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)  # M_MMAP_MAX
    try:
        cfg, state = parse_args(argv), None
        ranks = Ranks(cfg)
        log = Log(cfg, ranks)
        if cfg.resume and (path := find_checkpoint(cfg, ranks, log)):
            state = load_checkpoint(path)
            cfg = replace(parse_args(argv, state["hyperparameters"]), resume=str(path))
        unfinished = not state or state["step"] < cfg.num_iterations
        if unfinished and cfg.preset == "record" and ranks.device.type != "cuda":
            raise UserError("--preset record: there is no CUDA device; use --preset pocket")
        return train(cfg, ranks, log, state)
    except (UserError, OSError) as error:
        message = error
    except (MemoryError, RuntimeError) as error:
        message = str(error).partition("\n")[0]
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate" in message:
            message = "out of memory; raise --head_chunks, or lower --sequences_per_forward"
        elif isinstance(error, dist.DistError) or "gloo" in message.lower():
            message = f"another rank is gone: {message}"
        else:
            raise
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{SCRIPT.name}: error: {' '.join(str(message).split())}", file=sys.stderr)
    return 2

if __name__ == "__main__":
    sys.exit(main())
