"""Float64 oracles of the public records that the lineage has, as plain as can be.

They say what those records compute, for tests to hold a script to: no script is imported here.
Source: the logs that the public record table links, https://github.com/KellerJordan/modded-nanogpt
at f411b3d3, read as formulas; all casts to bf16, fp8 and fp32 are left out.

A station's constants are the fields of its entry in STATIONS, sizes among them; where records
differ in a formula, a function asks for the station's number. Weights are dicts of tensors by
their public names, in their public shapes, which `parameter_shapes` gives. What has other names
up to #28, or is not merged, has those of #31. In the comments:
D model_dim, H heads, K head_dim, F hidden width of the MLP, V rows of the head, T tokens of a
stream, N scheduled steps, E steps after them, s a step's index from 0, w a window in blocks.

What the records leave open, and what is done here:

- Epsilon of the norm is 2^-23, what a script in fp32 or bf16 has, also in float64. Up to #19 it is
  that of the type.
- Weights' names and shapes follow the records, other sizes than theirs by the same rule: the
  scalars of n layers are n entries of each kind, padded by ones to a multiple of 8.
  #50 and #53 have one skip, whatever their layers.
- A long window of one block has a short one of one block, in all records.
- A run so short that momentum's warm-up meets its cooldown: the warm-up has precedence.
- A shard of #28 that is loaded where the one before has ended is not asked for its length again;
  it is found too short where documents are missing. A shard of the later records without enough
  documents for one step is passed over. Data end without a wrap-around.
- Where N is a multiple of 3, window and batch change one step before the rates of #50 and #53, as
  their comparisons have it. At record size they agree.
- The gradient of a step is the mean over its streams of each stream's summed loss, up to #24 of
  its mean loss: what 8 ranks have. That up to #42 fewer ranks had larger gradients is left out.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

POLAR_EXPRESS = (  # coefficients of X, A X and A² X in each of five iterations
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5


@dataclass(frozen=True)
class Station:
    """The constants of a public record; `dataclasses.replace` gives it other sizes."""

    number: int
    # Steps and data
    num_iterations: int  # N, the steps that the schedules are made for
    extension: int = 0  # E, the steps after them
    streams: int = 8  # sequences of a step, one for each of the public ranks
    seq_lens: tuple[int, ...] = (49_152,)  # tokens of a stream, in each third of N if there are 3
    max_document: int = 2048  # tokens of a document that are used (#31 on)
    eot_token: int = 50_256  # opens each document
    val_seq_len: int = 262_144
    val_tokens: int = 10_485_760
    val_every: int = 125
    # Windows, in blocks; the short one is half of the long one, rounded down
    block: int = 128
    window_tokens: int = 1728  # what the long window grows to (#18 to #28)
    windows: tuple[int, ...] = (3, 7, 11, 13)  # long, in each third of N, and at last (#31 on)
    final_window: int = 13  # long, in the last validation (#31 on)
    rope_base: int = 1024  # inverse of the lowest frequency
    attention_scale: float = 0.1  # of the scores at the beginning; up to #19 it is K^-½
    # Model
    model_dim: int = 768
    head_dim: int = 128
    mlp_ratio: int = 4
    vocab_size: int = 50_304  # rows of the head
    table_rows: int = 50_304  # of the embeddings
    gate_inputs: int = 12  # channels that a gate sees
    attention_pattern: str = "LSSSLSS.SSSL"  # a letter a layer: long window, short, . none
    mlp_pattern: str = "MMMMMMMMMMMM"  # . where a layer has none; one with neither is not there
    value_embed_pattern: str = "012......012"  # value table of each layer
    offset_layers: str = "L"  # whose keys are offset (#50 on)
    skips: tuple[tuple[int, int], ...] = ((6, 5), (7, 4), (8, 3), (9, 2), (10, 1), (11, 0))
    # pairs (into, from) of layers, in the order of their scalars
    backout_layer: int | None = None  # whose output is taken from the last one's (#40 on)
    qkv_std: float = 0.5  # of the initial Q, K and V, in units of D^-½; of the MLP's up to #18
    embed_std: float = 1.0  # of the initial token embedding (#53: and head, which are one)
    value_embed_std: float = 1.0
    logit_cap: float = 30.0
    logit_slope: float = 7.5
    norm_eps: float = 2.0**-23
    fp8_divisors: tuple[float, ...] = (768**0.5 / 448, 2.0**-9, 1 / 448)  # of x, w and gradient
    # Optimizers
    adam_lr: float = 0.008  # what ADAM_MULTIPLIERS multiplies
    adam_betas: tuple[float, float] = (0.65, 0.95)
    scalar_betas: tuple[float, float] = (0.65, 0.95)
    adam_eps: float = 1e-8
    adam_decay: float = 0.0
    muon_lr: float = 0.05
    muon_decay: float = 0.0
    second_beta: float = 0.95  # of the second moments of NorMuon (#43 on)
    cooldown_frac: float = 0.55
    final_lr_frac: float = 0.1
    rate_stages: tuple[float, ...] = (1.0, 1.0, 1.0)  # factor of the rates in each third of N
    momentum: tuple[float, float] = (0.85, 0.95)
    momentum_warmup: int = 300
    momentum_cooldown: int = 50  # last steps, over which momentum falls again (#40 on)
    freeze_steps: int = 0  # steps from a change of window on in which the scalars rest (#53)


_5 = Station(
    number=5, num_iterations=5100, streams=512, seq_lens=(1024,), val_seq_len=1024,
    rope_base=10_000, attention_pattern="L" * 12, value_embed_pattern="." * 12, skips=(),
    qkv_std=3**-0.5, adam_betas=(0.9, 0.95), muon_lr=0.00036, cooldown_frac=1450 / 5100,
    final_lr_frac=0.0, momentum=(0.95, 0.95))
_8 = replace(_5, number=8, num_iterations=4578, muon_lr=0.02, cooldown_frac=1308 / 4578)
_18 = Station(
    number=18, num_iterations=1390, seq_lens=(65_536,), val_seq_len=65_536, window_tokens=1856,
    attention_pattern="LLLLLLL.LLLL", qkv_std=3**-0.5, adam_betas=(0.8, 0.95),
    scalar_betas=(0.8, 0.95), cooldown_frac=0.4, final_lr_frac=0.0)
_19 = replace(
    _18, number=19, num_iterations=1395, window_tokens=1728, table_rows=50_257, qkv_std=0.5,
    final_lr_frac=0.1, fp8_divisors=(0.5, 2.0**-5, 2.0**-29))
_21 = replace(
    _19, number=21, num_iterations=1770, seq_lens=(49_152,), val_seq_len=262_144,
    attention_scale=0.12, attention_pattern="LSSSLSS.SSSL", adam_eps=1e-10,
    fp8_divisors=(0.5, 2.0**-9, 2.0**-19))
_24 = replace(_21, number=24)
_28 = replace(
    _21, number=28, num_iterations=1695, table_rows=50_304, cooldown_frac=0.45,
    fp8_divisors=(768**0.5 / 448, 2.0**-9, 1 / 448))
_31 = replace(
    _28, number=31, num_iterations=1670, attention_scale=0.1, mlp_pattern=".MMMMMMMMMMM",
    cooldown_frac=0.5)
_40 = Station(
    number=40, num_iterations=2290, extension=40, seq_lens=(32_768,), val_every=250,
    final_window=20, attention_pattern=".SSSLSS.SSSL", mlp_pattern=".MMMMMMMMMMM",
    value_embed_pattern=".12......012", skips=((6, 5), (7, 4), (8, 3), (9, 2), (10, 1)),
    backout_layer=8, muon_lr=0.06, cooldown_frac=0.45)
_43 = replace(
    _40, number=43, num_iterations=2205, muon_lr=0.03, muon_decay=1.2, cooldown_frac=0.5)
_50 = replace(
    _43, number=50, num_iterations=2050, seq_lens=(16_384, 32_768, 49_152),
    attention_pattern="SSSLSS.SSSL", mlp_pattern="MMMMMMMMMMM", value_embed_pattern="12......012",
    skips=((6, 3),), backout_layer=7, value_embed_std=0.0, muon_lr=0.023, adam_decay=0.005,
    cooldown_frac=0.55, rate_stages=(1.0, 1.51, 1.93))
_53 = replace(
    _50, number=53, num_iterations=1880, qkv_std=1.0, embed_std=0.005, scalar_betas=(0.9, 0.99),
    rate_stages=(1.0, 1.52, 1.73), freeze_steps=40,
    fp8_divisors=(100 / 448, 1.5 / 448, 0.75 / 448))
STATIONS = {s.number: s for s in (_5, _8, _18, _19, _21, _24, _28, _31, _40, _43, _50, _53)}
_ADAM = {"embed": 75, "value_embeds": 75, "lm_head": 1, "scalars": 5}
ADAM_MULTIPLIERS = {  # of adam_lr, by the first part of a parameter's name
    **dict.fromkeys(STATIONS, _ADAM), 5: {"embed": 0.45}, 8: {"embed": 37.5, "lm_head": 0.25},
    53: _ADAM | {"embed": 1, "smear_gate": 0.01, "x0_lambdas": 5}}
# Of muon_lr, by the last part of a parameter's name, where it is not 1
MUON_MULTIPLIERS = {43: {"c_fc": 2}, 50: {"c_proj": 2}, 53: {"c_proj": 2}}


def total_steps(station: Station) -> int:
    """N + E. The last validation is that of the step with this index."""
    return station.num_iterations + station.extension


# ---- Streams ----------------------------------------------------------------


class Stream(NamedTuple):
    """A sequence, one forward pass: inputs and targets (T,), int64."""

    inputs: np.ndarray
    targets: np.ndarray


def streams_of(station: Station, shards, lengths):
    """Yield each step's list of Streams, `lengths` of T tokens, until either ends. Raises
    ValueError where #28 misses documents."""
    rest = shards, lengths, station.streams, station.eot_token
    if station.number < 28:
        return plain_streams(*rest[:3])
    if station.number == 28:
        return aligned_streams(*rest)
    return packed_streams(*rest, station.max_document)


def stream_at(tokens, first: int, length: int) -> Stream:
    piece = np.asarray(tokens[first : first + length + 1], dtype=np.int64)
    return Stream(piece[:-1], piece[1:])


def plain_streams(shards, lengths, streams: int):
    """One after another, of the first shard; where it ends is the loader's."""
    position = 0
    for length in lengths:
        firsts = range(position, position + streams * length, length)
        yield [stream_at(shards[0], first, length) for first in firsts]
        position = firsts.stop


def aligned_streams(shards, lengths, streams: int, eot: int):
    """The rule of #28: each stream begins where a document does, T or more after the one before.
    Before a step, a shard with no more than twice its tokens and one is left for the next."""
    shards = iter(shards)
    tokens, position = next(shards, ()), 0
    for length in lengths:
        reach = 2 * streams * length
        if position + reach + 1 >= len(tokens):
            tokens, position = next(shards, None), 0
            if tokens is None:
                return
        starts, start = [], None
        for here in range(position, min(position + reach, len(tokens))):
            if tokens[here] != eot:
                continue
            if start is None:
                start = here
            elif here - start >= length:
                starts.append(start)
                start = here
                if len(starts) == streams:
                    break
        if len(starts) < streams:
            raise ValueError(f"{len(starts)} beginnings in {reach} tokens, a step has {streams}")
        position = start
        yield [stream_at(tokens, first, length) for first in starts]


def packed_streams(shards, lengths, streams: int, eot: int, max_document: int):
    """The rule of #29 and after: whole documents one after another, each clipped, until T + 1. The
    rest of the last one is left. A step that a shard cannot fill is made of the next one."""
    shards, tokens, begins, index = iter(shards), (), [], 0
    for length in lengths:
        rest = length, streams, max_document
        while (packed := _packed_step(tokens, begins, index, *rest)) is None:
            tokens, index = next(shards, None), 0
            if tokens is None:
                return
            begins = [i for i in range(len(tokens)) if tokens[i] == eot]
        step, index = packed
        yield step


def _packed_step(tokens, begins, index, length, streams, max_document):
    """A step's Streams and the next document's index, or None where the documents are used up."""
    step = []
    for _ in range(streams):
        packed = []
        while len(packed) <= length:
            if index == len(begins):
                return None
            first = begins[index]
            following = begins[index + 1] if index + 1 < len(begins) else len(tokens)
            last = min(following, first + max_document, first + length - len(packed) + 1)
            packed.extend(int(token) for token in tokens[first:last])
            index += 1
        step.append(stream_at(packed, 0, length))
    return step, index


def validation_streams(station: Station, tokens) -> list[Stream]:
    """Consecutive sequences of the first val_tokens; targets are the tokens one further on."""
    firsts = range(0, station.val_tokens, station.val_seq_len)
    return [stream_at(tokens, first, station.val_seq_len) for first in firsts]


# ---- Schedules --------------------------------------------------------------


def stage(station: Station, step: int) -> int:
    """0, 1 or 2, the third of the schedule that a training step is in; 3 after it (#43 on)."""
    N = station.num_iterations
    if station.number == 31:
        return int(3 * step / (N + 1))
    if station.number == 40:
        return int(3 * min(step / (N + 1), 0.9999))
    return 3 * step // N if step < N else 3


def seq_len(station: Station, step: int) -> int:
    """Tokens of each stream of a training step."""
    if len(station.seq_lens) == 1:
        return station.seq_lens[0]
    return station.seq_lens[min(stage(station, step), 2)]


def long_window(station: Station, step: int) -> int:
    """The long window of a step, in blocks; what drives YaRN. At the end: before validation."""
    if station.number <= 28:
        N, grown = station.num_iterations, station.window_tokens * step
        if station.number <= 18:  # from one block on, rounded down; later from 0, rounded up
            return max(1, (grown + (N - step) * station.block) // (N * station.block))
        return max(1, -(-grown // (N * station.block)))
    if step == total_steps(station):
        return station.windows[-1]
    return station.windows[stage(station, step)]


def training_windows(station: Station, step: int) -> tuple[int, int]:
    """Long and short window of a training step, in blocks."""
    long = long_window(station, step)
    return long, max(1, long // 2)


def validation_windows(station: Station, step: int) -> tuple[int, int]:
    """Long and short window of the validation before a step, or after the last, in blocks."""
    long, short = training_windows(station, step)
    if station.number >= 31 and step == total_steps(station):
        long = station.final_window
    return long, short


@functools.cache
def window_changes(station: Station) -> tuple[tuple[int, int, int], ...]:
    """(step, window before, window from then on) of each change of the long window."""
    windows = [long_window(station, step) for step in range(total_steps(station) + 1)]
    pairs = enumerate(itertools.pairwise(windows), 1)
    return tuple((step, before, after) for step, (before, after) in pairs if before != after)


def rotary(station: Station, step: int) -> tuple[list[float], float]:
    """K / 2 frequencies, in radians a token, and the attention scale of a step. Since #31 both
    follow each change of the long window: YaRN, https://arxiv.org/abs/2309.00071."""
    K, turning = station.head_dim, station.head_dim // 4
    if station.number < 18:  # all turn
        return [station.rope_base ** (-2 * j / K) for j in range(K // 2)], K**-0.5
    frequencies = [station.rope_base ** (-j / (turning - 1)) for j in range(turning)]
    scale = station.attention_scale if station.number >= 21 else K**-0.5
    if station.number >= 31:
        for change, before, after in window_changes(station):
            if change <= step:
                frequencies = yarn(frequencies, station.block, before, after)
                scale *= 1 + 0.2 * math.log(after / before)
    return frequencies + [0.0] * turning, scale


def yarn(frequencies: list[float], block: int, before: int, after: int) -> list[float]:
    """Frequencies after the window has gone from `before` to `after` blocks: kept from 32 turns in
    the old window on, times the ratio of the windows up to one turn, interpolated between."""
    changed = []
    for frequency in frequencies:
        turns = block * before * frequency / (2 * math.pi)
        kept = min(max((turns - 1) / (32 - 1), 0.0), 1.0)
        ratio = before / after
        changed.append(frequency * (ratio + kept * (1 - ratio)))
    return changed


def rate_factor(station: Station, step: int) -> float:
    """What all rates of a step are multiplied by."""
    N, floor = station.num_iterations, station.final_lr_frac
    x = step / N
    if station.number in (40, 43):
        x = min(0.9999, x)
    if station.number >= 50 and step > N:
        return floor
    peak = station.rate_stages[0]
    if x > 1 / 3:
        peak = station.rate_stages[1]
    if x > 2 / 3:
        peak = station.rate_stages[2]
    if x < 1 - station.cooldown_frac:
        return peak
    left = (1 - x) / station.cooldown_frac
    return peak * left + floor * (1 - left)


def muon_momentum(station: Station, step: int) -> float:
    """Momentum of a step. That of #40 is never set to its highest value: its warm-up ends short."""
    low, high = station.momentum
    if step < station.momentum_warmup:
        return low + (high - low) * step / station.momentum_warmup
    fall = total_steps(station) - station.momentum_cooldown
    if station.number >= 40 and step > fall:
        return high - (high - low) * (step - fall) / station.momentum_cooldown
    if station.number == 40:
        return low + (high - low) * (station.momentum_warmup - 1) / station.momentum_warmup
    return high


def target_weights(station: Station, step: int) -> list[float]:
    """Weights of the losses of the next token, the one after it, … in training."""
    x = step / station.num_iterations
    if station.number < 53 or x >= 2 / 3:
        return [1.0]
    if x >= 1 / 3:
        return [1.0, 0.5 * (2 - 3 * x)]
    return [1.0, 0.5, 0.25 * (1 - 3 * x)]


def adam_steps(station: Station, step: int) -> bool:
    """Whether Adam steps: always, since #40 at odd steps, by the sum of two steps' gradients."""
    return station.number < 40 or step % 2 == 1


def scalars_frozen(station: Station, step: int) -> bool:
    """Whether the scalars rest and their gradients are discarded (#53)."""
    changes = window_changes(station)
    return any(change <= step < change + station.freeze_steps for change, _, _ in changes)


def split_step(station: Station) -> int:
    """The first step whose embedding is not the head's matrix: of #53 at 2/3 of N, else 0."""
    return -(-2 * station.num_iterations // 3) if station.number >= 53 else 0


def tied(station: Station, step: int) -> bool:
    """Whether the head's matrix is the token embedding too."""
    return step < split_step(station)


def copy_step(station: Station) -> int:
    """The step after whose optimizers the embedding is made a copy of the head (#53), else -1."""
    return (split_step(station) - 2) | 1 if station.number >= 53 else -1


# ---- Mask -------------------------------------------------------------------


def dense_mask(station: Station, documents: np.ndarray, window: int) -> Tensor:
    """(T, T), bool: whether token i, the row, sees token j of the documents (T,). The window is
    of blocks by their numbers up to #28, later by tokens and inclusive. #5 and #8 have none."""
    i, j = np.indices((len(documents), len(documents)))
    seen = j <= i
    if station.number >= 18:
        seen &= documents[i] == documents[j]
        near = i // station.block - j // station.block < window
        seen &= near if station.number <= 28 else i - j <= station.block * window
    return torch.from_numpy(seen)


# ---- Parameters -------------------------------------------------------------


def layers_of(station: Station) -> list[int]:
    """The numbers of the layers that are there: of those with attention, an MLP or both."""
    pairs = zip(station.attention_pattern, station.mlp_pattern, strict=True)
    return [i for i, pair in enumerate(pairs) if pair != (".", ".")]


def parameter_shapes(station: Station) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its public name."""
    D, F = station.model_dim, station.mlp_ratio * station.model_dim
    shapes = {"embed.weight": (station.table_rows, D)}
    if station.number >= 8:
        shapes["lm_head.weight"] = (station.vocab_size, D)
    for table in sorted(set(station.value_embed_pattern) - {"."}):
        shapes[f"value_embeds.{table}.weight"] = (station.table_rows, D)
    qkvo = (4, D, D)
    if station.number in (40, 43):
        qkvo = (D, 4 * D)
    elif station.number >= 50:
        qkvo = (4 * D, D)
    for layer in layers_of(station):
        if station.attention_pattern[layer] != ".":
            shapes[f"blocks.{layer}.attn.qkvo_w"] = qkvo
            if station.number >= 28:
                gate = (D // station.head_dim, station.gate_inputs)
                shapes[f"blocks.{layer}.attn.attn_gate.weight"] = gate
        if station.mlp_pattern[layer] != ".":
            for name in ("c_fc", "c_proj"):
                is_tall = station.number >= 50 or (station.number < 28 and name == "c_fc")
                shapes[f"blocks.{layer}.mlp.{name}"] = (F, D) if is_tall else (D, F)
    if station.number >= 40:
        shapes["smear_gate.weight"] = (1, station.gate_inputs)
    if station.number >= 53:
        shapes["x0_lambdas"] = (len(station.attention_pattern),)
    if station.number >= 18:
        shapes["scalars"] = (len(initial_scalars(station)),)
    return shapes


def scalar_indices(station: Station) -> dict[str, list[int]]:
    """Where `scalars` has what, in lists of indices.

    skip: weights of the skips, up to #31 as they are, later before the sigmoid; a, b: of the
    residual stream and of x0, a layer each (b of #53: x0_lambdas); lambda0, lambda1: of values and
    value embedding, since #50 of W_QKV and W_O, a layer each; smear; backout.
    """
    n = len(station.attention_pattern)
    if station.number < 50:
        indices = dict(skip=range(n), a=range(n, 3 * n, 2), b=range(n + 1, 3 * n, 2))
        indices |= dict(lambda0=range(3 * n, 5 * n, 2), lambda1=range(3 * n + 1, 5 * n, 2))
        if station.number >= 40:
            indices |= dict(smear=[5 * n], backout=[5 * n + 1])
    else:
        indices = dict(a=range(n)) | (dict(b=range(n, 2 * n)) if station.number < 53 else {})
        first, end = n * len(indices), n * len(indices) + 2 * n
        indices |= dict(lambda0=range(first, end, 2), lambda1=range(first + 1, end, 2))
        indices |= dict(smear=[end], backout=[end + 1], skip=[end + 2])
    return {name: list(where) for name, where in indices.items()}


def initial_scalars(station: Station) -> list[float]:
    """The initial `scalars`, padded by ones to a multiple of 8. #5 and #8 have constants there."""
    values = dict(skip=1.0, a=1.0, b=0.0, lambda0=0.5, lambda1=0.5, smear=0.0, backout=0.5)
    if station.number < 18:
        values |= dict(lambda0=1.0)
    if station.number >= 40:
        values |= dict(skip=-1.5)
    if station.number >= 50:
        values |= dict(a=1.1, lambda1=1.0)
    indices = scalar_indices(station)
    used = sum(len(where) for where in indices.values())
    scalars = [1.0] * (-(-used // 8) * 8)
    for name, where in indices.items():
        for index in where:
            scalars[index] = values[name]
    return scalars


def initial_distribution(station: Station, name: str) -> tuple[str, float]:
    """("normal", std), ("uniform", bound) or ("zero", 0.0) of all but scalars, and O of qkvo_w."""
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if name == "embed.weight" and station.number < 8:
        return "uniform", station.model_dim**-0.5
    if name == "embed.weight" or (name == "lm_head.weight" and station.number >= 53):
        return "normal", station.embed_std
    if name.startswith("value_embeds") and station.value_embed_std:
        return "normal", station.value_embed_std
    if kind in ("qkvo_w", "c_fc"):
        std = station.qkv_std if kind == "qkvo_w" or station.number < 19 else 0.5
        return "uniform", 3**0.5 * std * station.model_dim**-0.5
    return "zero", 0.0


def matrices(name: str, p: Tensor) -> list[Tensor]:
    """The matrices of a parameter, as views: Q, K, V and O, each (out, in), of qkvo_w, or itself.
    All three public shapes of qkvo_w have the same entries in the same order in memory."""
    if not name.endswith("qkvo_w"):
        return [p]
    width = math.isqrt(p.numel() // 4)
    return list(p.view(4, width, width).unbind(0))


# ---- Model ------------------------------------------------------------------


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, frequencies: list[float]) -> Tensor:
    """Rotary embedding of x (T, K): channel j turns with channel j + K / 2 by position · ω_j."""
    angles = torch.outer(torch.arange(len(x)).to(x), torch.tensor(frequencies, dtype=x.dtype))
    (first, second), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([first * cos + second * sin, -first * sin + second * cos], dim=-1)


def key_offset(k: Tensor) -> Tensor:
    """k (T, K) with the channels that do not turn taken from the token before, but for the first"""
    K = k.size(1)
    still = [*range(K // 4, K // 2), *range(3 * K // 4, K)]
    shifted = k.clone()
    shifted[1:, still] = k[:-1, still]
    return shifted


def attention(station, weights, layer, u, value_embed, seen, frequencies, scale) -> Tensor:
    """The attention of a layer on its normed input u (T, D); seen (T, T); value_embed (T, D)."""
    W_Q, W_K, W_V, W_O = matrices("qkvo_w", weights[f"blocks.{layer}.attn.qkvo_w"])
    indices, K = scalar_indices(station), station.head_dim
    lambda0 = weights["scalars"][indices["lambda0"][layer]]
    lambda1 = weights["scalars"][indices["lambda1"][layer]]
    if station.number < 50:
        q, k, v = u @ W_Q.T, u @ W_K.T, u @ W_V.T
        v = lambda0 * v
        if value_embed is not None:
            v = v + lambda1 * value_embed
    else:
        q, k, v = u @ (lambda0 * W_Q).T, u @ (lambda0 * W_K).T, u @ (lambda0 * W_V).T
        if value_embed is not None:
            v = v + value_embed
        W_O = lambda1 * W_O
    gates = torch.ones(len(u), station.model_dim // K)
    if station.number >= 28:
        W = weights[f"blocks.{layer}.attn.attn_gate.weight"]
        gates = torch.sigmoid(u[:, : station.gate_inputs] @ W.T)
    heads = []
    for head in range(gates.size(1)):
        channels = slice(head * K, (head + 1) * K)
        q_head = turned(rms_norm(q[:, channels], station.norm_eps), frequencies)
        k_head = turned(rms_norm(k[:, channels], station.norm_eps), frequencies)
        if station.number >= 50 and station.attention_pattern[layer] in station.offset_layers:
            k_head = key_offset(k_head)
        scores = (scale * q_head @ k_head.T).masked_fill(~seen, -math.inf)
        heads.append(gates[:, head, None] * (scores.softmax(-1) @ v[:, channels]))
    return torch.cat(heads, dim=-1) @ W_O.T


def mlp(station, weights, layer, u) -> Tensor:
    """The MLP of a layer on its normed input u (T, D)."""
    c_fc, c_proj = (weights[f"blocks.{layer}.mlp.{name}"] for name in ("c_fc", "c_proj"))
    hidden = (u @ (c_fc if 28 <= station.number < 50 else c_fc.T)).clamp(min=0) ** 2
    return hidden @ (c_proj.T if station.number < 50 else c_proj)


def smeared(station, weights, e: Tensor) -> Tensor:
    """Embeddings e (T, D), each but the first with a part of the one before it."""
    mu = weights["scalars"][scalar_indices(station)["smear"][0]]
    gate = torch.sigmoid(e[1:, : station.gate_inputs] @ weights["smear_gate.weight"].T)
    return torch.cat([e[:1], e[1:] + mu * gate * e[:-1]])


def stream_logits(station, weights, stream: Stream, windows, step: int) -> Tensor:
    """Logits (T, V) of a stream at a step, or in its validation; windows long and short."""
    weights = {"scalars": torch.tensor(initial_scalars(station)), **weights}
    eps, indices, scalars = station.norm_eps, scalar_indices(station), weights["scalars"]
    frequencies, scale = rotary(station, step)
    documents = np.cumsum(stream.inputs == station.eot_token)
    seen = {kind: dense_mask(station, documents, w) for kind, w in zip("LS", windows)}
    tokens = torch.as_tensor(stream.inputs)
    e = weights["lm_head.weight" if tied(station, step) else "embed.weight"][tokens]
    if station.number >= 40:
        e = smeared(station, weights, e)
    x = x0 = rms_norm(e, eps) if station.number >= 8 else e
    skips, outputs = dict(station.skips), {}
    for layer in layers_of(station):
        if layer in skips:
            weight = scalars[indices["skip"][list(skips).index(layer)]]
            if station.number >= 40:
                weight = torch.sigmoid(weight)
            x = x + weight * outputs[skips[layer]]
        b = weights["x0_lambdas"][layer] if station.number >= 53 else scalars[indices["b"][layer]]
        x = scalars[indices["a"][layer]] * x + b * x0
        kind, table = station.attention_pattern[layer], station.value_embed_pattern[layer]
        if kind != ".":
            value = None if table == "." else weights[f"value_embeds.{table}.weight"][tokens]
            u = rms_norm(x, eps)
            x = x + attention(station, weights, layer, u, value, seen[kind], frequencies, scale)
        if station.mlp_pattern[layer] != ".":
            x = x + mlp(station, weights, layer, rms_norm(x, eps))
        outputs[layer] = x
    if station.backout_layer is not None:
        x = x - scalars[indices["backout"][0]] * outputs[station.backout_layer]
    z = rms_norm(x, eps) @ weights["lm_head.weight" if station.number >= 8 else "embed.weight"].T
    if station.number < 18:
        return z
    if station.number == 18:
        return 15 * torch.tanh(z / 15)
    return station.logit_cap * torch.sigmoid(z / station.logit_slope)


def training_loss(station: Station, weights, stream: Stream, step: int) -> Tensor:
    """The summed loss of one stream in a training step, up to #24 the mean one."""
    z = stream_logits(station, weights, stream, training_windows(station, step), step)
    targets, loss = torch.as_tensor(stream.targets), 0.0
    for ahead, weight in enumerate(target_weights(station, step)):
        reached = range(len(z) - ahead)  # the tokens whose target is in the stream
        right = z[reached, targets[ahead:]]
        loss = loss + weight * (z.logsumexp(-1)[: len(right)] - right).sum()
    return loss if station.number >= 28 else loss / len(z)


def validation_loss(station: Station, weights, streams: list[Stream], step: int) -> Tensor:
    """The mean loss of the validation before a step, or after the last one, of its streams."""
    means = []
    for stream in streams:
        z = stream_logits(station, weights, stream, validation_windows(station, step), step)
        right = z[range(len(z)), torch.as_tensor(stream.targets)]
        means.append((z.logsumexp(-1) - right).mean())
    return torch.stack(means).mean()


def gradients(station: Station, weights, streams: list[Stream], step: int):
    """Of each weight, by name: the mean over streams of the gradient of the loss; None of the
    embedding of #53 while the head is it too."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in weights.items()}
    loss = sum(training_loss(station, leaves, stream, step) for stream in streams) / len(streams)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, grads, strict=True))


# ---- Optimizers -------------------------------------------------------------


def is_muon(station: Station, name: str) -> bool:
    """Whether Muon, or NorMuon, steps a parameter: matrices of the blocks, and up to #50 smear."""
    return name.startswith("blocks.") or (name == "smear_gate.weight" and station.number < 53)


def rate(station: Station, name: str, shape: tuple[int, ...]) -> float:
    """The rate of a parameter of its public shape, before the factor of the step."""
    if not is_muon(station, name):
        return station.adam_lr * ADAM_MULTIPLIERS[station.number][name.partition(".")[0]]
    kind = name.removesuffix(".weight").rpartition(".")[2]
    multiplier = MUON_MULTIPLIERS.get(station.number, {}).get(kind, 1)
    size = max(1, shape[-2] / shape[-1]) if station.number > 5 else max(shape[-2:])
    return station.muon_lr * size**0.5 * multiplier


def optimizer_state(station: Station, weights) -> dict:
    """State before the first step, by name: a dict for Adam, for Muon a list, a dict a matrix."""
    state = {}
    for name, p in weights.items():
        if is_muon(station, name):
            state[name] = [dict(mean=torch.zeros_like(x), second=0.0) for x in matrices(name, p)]
        else:
            zeros = {key: torch.zeros_like(p) for key in ("sum", "mean", "square")}
            state[name] = dict(zeros, count=0)
    return state


def orthogonalize(station: Station, u: Tensor) -> Tensor:
    """Nearly the closest semi-orthogonal matrix to u: Newton-Schulz, since #40 Polar Express."""
    X = u.T if u.size(0) > u.size(1) else u
    if station.number < 40:
        X, iterations = X / (X.norm() + 1e-7), NEWTON_SCHULZ
    else:
        X, iterations = X / (1.02 * X.norm() + 1e-6), POLAR_EXPRESS
    for a, b, c in iterations:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if u.size(0) > u.size(1) else X


def normalized(station: Station, U: Tensor, state: dict) -> Tensor:
    """NorMuon, https://arxiv.org/abs/2510.05491: U by the second moments of its columns (#43), or
    rows (#50 on), at its old Frobenius norm. Their mean, in `state`, is moved on."""
    axis = 0 if station.number == 43 else 1
    moments = (U**2).mean(axis, keepdim=True)
    state["second"] = state["second"] + (1 - station.second_beta) * (moments - state["second"])
    scaled = U / state["second"].clamp(min=1e-10).sqrt()
    return scaled * (U.norm() / scaled.norm().clamp(min=1e-10))


def muon_step(station: Station, p: Tensor, grad: Tensor, state: dict, step: int, lr: float) -> None:
    """Move one matrix p, in place, at its rate lr; its gradient, its state."""
    momentum, factor = muon_momentum(station, step), rate_factor(station, step)
    if station.number < 18:  # a sum
        state["mean"] = momentum * state["mean"] + grad
        U = orthogonalize(station, grad + momentum * state["mean"])
    else:
        state["mean"] = state["mean"] + (1 - momentum) * (grad - state["mean"])
        U = orthogonalize(station, grad + momentum * (state["mean"] - grad))
    if station.number >= 43:
        U = normalized(station, U, state)
        decayed = torch.where(U * p >= 0, p, 0.0)
        U = U + station.muon_lr * factor * station.muon_decay * decayed
    p -= lr * factor * U


def adam_step(station: Station, name: str, p: Tensor, state: dict, step: int, lr: float) -> None:
    """Move a parameter p, in place, by the gradients summed in its state, at its rate lr."""
    beta1, beta2 = station.scalar_betas if name == "scalars" else station.adam_betas
    lr, grad = lr * rate_factor(station, step), state["sum"]
    state["count"] += 1
    state["mean"] = beta1 * state["mean"] + (1 - beta1) * grad
    state["square"] = beta2 * state["square"] + (1 - beta2) * grad**2
    unbias1, unbias2 = 1 - beta1 ** state["count"], (1 - beta2 ** state["count"]) ** 0.5
    eps = station.adam_eps * (unbias2 if station.number < 28 else 1)
    change = lr * unbias2 / unbias1 * state["mean"] / (state["square"].sqrt() + eps)
    decayed = torch.zeros_like(p)
    if name.partition(".")[0] in ("embed", "value_embeds", "lm_head"):
        same = change * p > 0 if station.number >= 53 else change * p >= 0
        decayed = torch.where(same, p, 0.0)
    p -= change + lr**2 * station.adam_decay * decayed


def optimizer_step(station: Station, weights, grads, state, step: int) -> None:
    """Move all weights, and the state, in place, by the gradients of a step."""
    for name, p in weights.items():
        lr = rate(station, name, tuple(p.shape))
        if is_muon(station, name):
            of_grads = matrices(name, grads[name].contiguous())
            for matrix, grad, own in zip(matrices(name, p), of_grads, state[name], strict=True):
                muon_step(station, matrix, grad, own, step, lr)
            continue
        if name == "embed.weight" and tied(station, step):
            continue
        own = state[name]
        own["sum"] = own["sum"] + grads[name]
        frozen = name == "scalars" and scalars_frozen(station, step)
        if adam_steps(station, step) and not frozen:
            adam_step(station, name, p, own, step, lr)
        if adam_steps(station, step) or frozen:
            own["sum"] = torch.zeros_like(p)
    if step == copy_step(station):
        weights["embed.weight"].copy_(weights["lm_head.weight"])
        for key in ("mean", "square", "count"):
            value = state["lm_head.weight"][key]
            state["embed.weight"][key] = value if key == "count" else value.clone()
