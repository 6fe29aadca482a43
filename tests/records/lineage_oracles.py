"""Float64 oracles of the public records that the lineage has, as plain as can be.

They say what those records compute, for tests to hold a script to: no script is imported here.
Source: the logs that the public record table links, https://github.com/KellerJordan/modded-nanogpt
at f411b3d3, read as formulas; all casts to bf16, fp8 and fp32 are left out.

A record is a class in stations/, found by its public number, or by the next one and a letter if it
has none. It has what it changes in the class of the station before it, constants and
formulas; the first ones stand here. published.toml has values that were published, to check them
by. Weights are dicts of tensors by their public names, in their public shapes, which
`parameter_shapes` gives. What has other names up to #28, or is not merged, has those of #31. In the
comments:
D model_dim, H heads, K head_dim, F hidden width of the MLP, V rows of the head, T tokens of a
stream, N scheduled steps, E steps after them, s a step's index from 0, w a window in blocks.

What the records leave open, and what is done here:

- Epsilon of the norm is 2^-23, what a script in fp32 or bf16 has, also in float64. Up to #19 it is
  that of the type.
- Weights' names and shapes follow the records, other sizes than theirs by the same rule. But of
  scalars, which are one vector there, each kind has an entry a layer here, used or not, and
  qkvo_w, Q, K, V and O, has always shape (4, D, D). From #50 on there is one skip.
- A long window of one block has a short one of one block, in all records.
- A run so short that momentum's warm-up meets its cooldown: the warm-up has precedence.
- A shard of #28 that is loaded where the one before has ended is not asked for its length again;
  it is found too short where documents are missing. A shard of the later records without enough
  documents for one step is passed over. Data end without a wrap-around.
- Where N is a multiple of 3, window and batch change one step before the rates of #50 and later,
  as their comparisons have it.
- The gradient of a step is the mean over its streams of each stream's summed loss, up to #24 of
  its mean loss: what 8 ranks have. That up to #42 fewer ranks had larger gradients is left out.
"""

import copy
import importlib
import math
from pathlib import Path
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


def find_stations() -> dict:
    """The stations in their order: by public numbers, as 92, or, of what is on the way to one, by
    that and a letter, as "92a"."""
    found = {}
    for path in sorted((Path(__file__).parent / "stations").glob("*.py")):
        module = importlib.import_module(f"stations.{path.stem}")
        for name, of in vars(module).items():
            if name.startswith("Station") and of.__module__ == module.__name__:
                key = name.removeprefix("Station")
                station = of()
                station.place = len(found)
                found[int(key) if key.isdigit() else key] = station
    return found


# ---- Streams ----------------------------------------------------------------


class Stream(NamedTuple):
    """A sequence, one forward pass: inputs and targets (T,), int64."""

    inputs: np.ndarray
    targets: np.ndarray


def stream_at(tokens, first: int, length: int) -> Stream:
    piece = np.asarray(tokens[first : first + length + 1], dtype=np.int64)
    return Stream(piece[:-1], piece[1:])


def packed_streams(shards, lengths, streams: int, eot: int, limits):
    """The rule of #29 and after: whole documents one after another, each clipped, until T + 1. The
    rest of the last one is left. A step that a shard cannot fill is made of the next one.
    limits: the tokens that a document is clipped to, by step, as lengths are."""
    lengths, limits = list(lengths), list(limits)
    for tokens in shards:
        begins = [i for i in range(len(tokens)) if tokens[i] == eot]
        documents = zip(begins, [*begins[1:], len(tokens)])
        while lengths:
            step = []
            for _ in range(streams):
                step.append(_packed(tokens, documents, lengths[0], limits[0]))
            if None in step:
                break
            yield step
            lengths.pop(0)
            limits.pop(0)
        if not lengths:
            return


def _packed(tokens, documents, length, max_document):
    """A Stream of the next documents, or None where they are used up."""
    packed = []
    for first, last in documents:
        last = min(last, first + max_document, first + length - len(packed) + 1)
        packed.extend(int(token) for token in tokens[first:last])
        if len(packed) > length:
            return stream_at(packed, 0, length)
    return None


# ---- Parts of a model -------------------------------------------------------


def kind_of(name: str) -> str:
    """Of which kind a parameter is: its last name in a block, or its first."""
    parts = name.removesuffix(".weight").split(".")
    return parts[-1] if parts[0] == "blocks" else parts[0]


def turned(x: Tensor, positions: Tensor, frequencies: list[float]) -> Tensor:
    """Rotary embedding of heads (H, T, K) at positions (T,) or (H, T): channel j turns with channel
    j + K / 2 by position · ω_j."""
    angles = positions.to(x)[..., None] * torch.tensor(frequencies, dtype=x.dtype)
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos + second * sin, -first * sin + second * cos], dim=-1)


def losses(z: Tensor, targets) -> Tensor:
    """The cross-entropy of each token's logits z, (T, V), and its target."""
    return z.logsumexp(-1) - z[range(len(z)), torch.as_tensor(targets)]


def size_of(X: Tensor) -> Tensor:
    """The Frobenius norm of each matrix, (..., 1, 1)."""
    return X.square().sum((-2, -1), keepdim=True).sqrt()


class Station:
    """A public record: `Station()` as it was published, `Station(model_dim=64)` in other sizes.
    The values are those of #5."""

    place: int  # among all stations
    parameters: int | None = None  # how many there are, where that was published
    run_length = 5  # scheduled steps of the tiny run that our script is held to
    tiny = dict(model_dim=32, head_dim=16)  # what it has of its sizes
    # Steps and data
    num_iterations = 5100  # N, the steps that the schedules are made for
    extension = 0  # E, the steps after them
    streams = 512  # sequences of a step, one for each of the public ranks
    seq_lens = (1024,)  # tokens of a stream, in each third of N if there are 3
    max_document = 2048  # tokens of a document that are used (#31 on)
    first_document: int | None = None  # the same in the first third, where it differs (#77 on)
    eot_token = 50_256  # opens each document
    val_seq_len = 1024
    val_tokens = 10_485_760
    val_every = 125
    # Windows, in blocks; the short one is half of the long one, rounded down
    block = 128
    window_tokens = 1728  # what the long window grows to (#18 to #28)
    windows = (3, 7, 11, 13)  # long, in each third of N, and at last (#31 on)
    final_window = 13  # long, in the last validation (#31 on)
    rope_base = 10_000  # inverse of the lowest frequency
    attention_scale: float | None = None  # of the scores at the beginning; else K^-½
    # Model
    model_dim = 768
    head_dim = 128
    qk_dim: int | None = None  # channels of a query and of a key, if not head_dim (#90)
    mlp_ratio = 4
    vocab_size = 50_304  # rows of the head
    table_rows = 50_304  # of the embeddings
    bigram_rows = 251_520  # of the table of pairs of tokens (#62 on)
    bigram_width = 768  # of the same (#83 on)
    sign_rows = 8192  # of the table of signs (#83 on)
    composed_window = 112  # tokens that composed heads see (#85 on)
    gate_inputs = 12  # channels that a gate sees
    attention_pattern = "L" * 12  # a letter a layer: long window, short, . none
    mlp_pattern = "MMMMMMMMMMMM"  # . where a layer has none; one with neither is not there
    value_embed_pattern = "." * 12  # value table of each layer
    skips: tuple[tuple[int, int], ...] = ()  # pairs (into, from) of layers, as their scalars are
    backout_layer: int | None = None  # whose output is taken from the last one's (#40 on)
    norm_eps: float | None = None  # else that of the type
    fp8_divisors: tuple[float, ...] = ()  # of x, w and gradient (#19 on)
    bf16 = frozenset()  # kinds of parameters that are kept in bf16
    # Scalars by their kinds, and what they begin as: weights of the skips, from #40 on before the
    # sigmoid; of the residual stream, and of x0 (b); of values, and value embedding (lambda0 and 1;
    # from #50 on of W_QKV and W_O); of smear, backout and bigrams. In #5 and #8 they are constants
    scalars = dict(skip=1.0, a=1.0, b=0.0, lambda0=1.0, lambda1=0.5)
    # Uniform within √3 · this · D^-½, by kind; `normal` ones with this std; all others are zero
    uniform = {"embed": 3**-0.5, "qkvo_w": 3**-0.5, "c_fc": 3**-0.5}
    normal: dict[str, float] = {}
    constant: dict[str, float] = {}  # what all entries of a kind begin as
    draws_output = False  # whether O is drawn as Q, K and V are; it is zero
    # Optimizers
    adam_lr = 0.008
    adam = {"embed": 0.45}  # factors of adam_lr by kind; what is not here, Muon steps
    adam_betas = (0.9, 0.95)
    betas: dict[str, tuple[float, float]] = {}  # by kind, where they are not adam_betas
    adam_eps = 1e-8
    scaled_eps = True  # it is multiplied by what corrects the root of the mean square
    decays: dict[str, float] = {}  # of Adam, by kind
    strict_decay = False  # what does not change decays not
    muon_lr = 0.00036
    muon_factors: dict[str, float] = {}  # of muon_lr by kind, where they are not 1
    muon_decay = 0.0
    second_beta = 0.95  # of the second moments of NorMuon (#43 on)
    coefficients = NEWTON_SCHULZ
    cooldown_frac = 1450 / 5100
    final_lr_frac = 0.0
    momentum = (0.95, 0.95)  # before its warm-up and after it
    momentum_warmup = 300
    momentum_cooldown = 0  # last steps, over which momentum falls again
    freeze_steps = 0  # steps from a change of window on in which the scalars rest (#53)
    summed_loss = False  # a stream's loss is the sum over its tokens, not the mean
    # Where the scalars and weights of our script belong
    our_scalars = {
        "lambdas": ("a", "b"), "x_lambda": ("a",), "attn.lambdas": ("lambda0", "lambda1"),
        "skip_weights": ("skip",), "skip_lambda": ("skip",), "smear_lambda": ("smear",),
        "backout_lambda": ("backout",)}
    our_weights = {r"(mlp.*)\.weight": r"\1", r"attn\.(qkv_w|c_.*)": "attn.qkvo_w"}

    def __init__(self, **sizes):
        for name, value in sizes.items():
            getattr(self, name)  # it has to be there
            setattr(self, name, value)

    def total_steps(self) -> int:
        """N + E. The last validation is that of the step with this index."""
        return self.num_iterations + self.extension

    def settings(self) -> dict:
        """The flags of our script's preset `record` that are called, or counted, otherwise here."""
        return dict(
            num_iterations=self.total_steps(), sequences_per_step=self.streams, vocab_size=50_257,
            sequences_per_forward=64, embed_lr=self.adam_lr * self.adam["embed"])

    # ---- Data and schedules

    def streams_of_steps(self, shards, steps):
        """Yield the list of Streams of each step: one after another, of the first shard; where it
        ends is the loader's."""
        position = 0
        for length in map(self.seq_len, steps):
            firsts = range(position, position + self.streams * length, length)
            yield [stream_at(shards[0], first, length) for first in firsts]
            position = firsts.stop

    def validation_streams(self, tokens) -> list[Stream]:
        """Consecutive sequences of the first val_tokens; targets are the tokens one further on."""
        firsts = range(0, self.val_tokens, self.val_seq_len)
        return [stream_at(tokens, first, self.val_seq_len) for first in firsts]

    def seq_len(self, step: int) -> int:
        """Tokens of each stream of a training step."""
        return self.seq_lens[0]

    def training_windows(self, step: int):
        """Long and short window of a training step, in blocks; None where there are none."""
        return None, None

    def validation_windows(self, step: int):
        """Long and short window of the validation before a step, or after the last, in blocks."""
        return self.training_windows(step)

    def rotary(self, step: int) -> tuple[list[float], float]:
        """K / 2 frequencies, in radians a token, and the attention scale of a step."""
        K = self.head_dim
        return [self.rope_base ** (-2 * j / K) for j in range(K // 2)], K**-0.5

    def progress(self, step: int) -> float:
        return step / self.num_iterations

    def peak(self, step: int) -> float:
        """What the rates fall from."""
        return 1.0

    def rate_factor(self, step: int) -> float:
        """What all rates of a step are multiplied by."""
        x, peak = self.progress(step), self.peak(step)
        if x < 1 - self.cooldown_frac:
            return peak
        left = (1 - x) / self.cooldown_frac
        return peak * left + self.final_lr_frac * (1 - left)

    def muon_momentum(self, step: int) -> float:
        low, high = self.momentum
        if step < self.momentum_warmup:
            return low + (high - low) * step / self.momentum_warmup
        fall = self.total_steps() - self.momentum_cooldown
        if step > fall:
            return high - (high - low) * (step - fall) / self.momentum_cooldown
        return high

    def target_weights(self, step: int) -> list[float]:
        """Weights of the losses of the next token, the one after it, … in training."""
        return [1.0]

    def adam_steps(self, step: int) -> bool:
        """Whether Adam steps; where it does not, gradients add up."""
        return True

    def due(self, name: str, step: int) -> bool:
        """Whether Adam steps a parameter."""
        return self.adam_steps(step)

    def complete(self, step: int) -> bool:
        """Whether no gradients wait as a step begins."""
        return self.adam_steps(step - 1)

    def scalars_frozen(self, step: int) -> bool:
        """Whether the scalars rest and their gradients are discarded."""
        return False

    def tied(self, step: int) -> bool:
        """Whether the head's matrix is the token embedding too."""
        return False

    def copy_step(self) -> int:
        """The step after whose optimizers the embedding is made a copy of the head."""
        return -1

    def mask(self, documents: np.ndarray, window) -> Tensor:
        """(T, T), bool: whether token i, the row, sees token j of the documents (T,)."""
        i, j = np.indices((len(documents), len(documents)))
        return torch.from_numpy(j <= i)

    # ---- Parameters

    def layers(self) -> list[int]:
        """The numbers of the layers that are there: of those with attention, an MLP or both."""
        pairs = zip(self.attention_pattern, self.mlp_pattern, strict=True)
        return [i for i, pair in enumerate(pairs) if pair != (".", ".")]

    def mlp_shapes(self) -> tuple:
        """Of c_fc and c_proj."""
        D, F = self.model_dim, self.mlp_ratio * self.model_dim
        return (F, D), (D, F)

    def block_shapes(self, layer: int) -> dict:
        """The shapes of a layer's parameters, by their names in it."""
        shapes = {}
        if self.attention_pattern[layer] != ".":
            shapes["attn.qkvo_w"] = 4, self.model_dim, self.model_dim
        if self.mlp_pattern[layer] != ".":
            shapes["mlp.c_fc"], shapes["mlp.c_proj"] = self.mlp_shapes()
        return shapes

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by its public name."""
        shapes = {"embed.weight": (self.table_rows, self.model_dim)}
        for layer in self.layers():
            for name, shape in self.block_shapes(layer).items():
                shapes[f"blocks.{layer}.{name}"] = shape
        return shapes

    def initial_scalars(self) -> dict[str, Tensor]:
        """An entry a layer of each kind."""
        layers = len(self.attention_pattern)
        return {name: torch.full((layers,), value) for name, value in self.scalars.items()}

    def kind(self, name: str) -> str:
        """Of which kind a parameter is; the scalars are one."""
        return "scalars" if name in self.scalars else kind_of(name)

    def initial_distribution(self, name: str) -> tuple[str, float]:
        """("normal", std), ("uniform", bound), ("constant", value) or ("constant", 0.0)."""
        kind = kind_of(name)
        if kind in self.normal:
            return "normal", self.normal[kind]
        if kind in self.uniform:
            return "uniform", 3**0.5 * self.uniform[kind] * self.model_dim**-0.5
        return "constant", (self.constant | self.scalars).get(kind, 0.0)

    # ---- Model

    def norm(self, x: Tensor) -> Tensor:
        eps = self.norm_eps or torch.finfo(x.dtype).eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def projections(self, weights, layer: int):
        """The matrices Q, K, V and O of a layer."""
        return weights[f"blocks.{layer}.attn.qkvo_w"]

    def projected(self, weights, layer: int, u: Tensor, value_embed):
        """q, k and v (T, D) of a layer's normed input u, and the matrix O."""
        W_Q, W_K, W_V, W_O = self.projections(weights, layer)
        v = weights["lambda0"][layer] * u @ W_V.T
        if value_embed is not None:
            v = v + weights["lambda1"][layer] * value_embed
        return u @ W_Q.T, u @ W_K.T, v, W_O

    def gates(self, weights, layer: int, u: Tensor) -> Tensor:
        """Factors of each head's output, (T, H)."""
        return torch.ones(len(u), self.model_dim // self.head_dim)

    def keys(self, layer: int, k: Tensor) -> Tensor:
        """The heads' keys (H, T, K), after they have turned."""
        return k

    def rotary_of(self, layer: int, step: int) -> tuple[list[float], float]:
        """The same of a layer."""
        return self.rotary(step)

    def scores(self, layer: int, q: Tensor, k: Tensor, step: int) -> Tensor:
        """What tokens are to each other, (H, T, T), before the mask."""
        frequencies, scale = self.rotary_of(layer, step)
        positions = torch.arange(q.size(1))
        q = turned(self.norm(q), positions, frequencies)
        k = self.keys(layer, turned(self.norm(k), positions, frequencies))
        return scale * q @ k.mT

    def heads(self, layer: int, q, k, v, seen: Tensor, step: int) -> Tensor:
        """The outputs of the heads, which are (H, T, K) as their q, k and v; seen (T, T)."""
        scores = self.scores(layer, q, k, step)
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v

    def attention(self, weights, layer: int, u: Tensor, value_embed, seen, step: int) -> Tensor:
        """The attention of a layer on its normed input u (T, D); value_embed (T, D)."""
        *qkv, W_O = self.projected(weights, layer, u, value_embed)
        heads = self.model_dim // self.head_dim
        q, k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x in qkv)
        outputs = self.heads(layer, q, k, v, seen, step)
        outputs = self.without_own(weights, layer, outputs, v)
        gates = self.gates(weights, layer, u).T[..., None]
        return (gates * outputs).transpose(0, 1).flatten(1) @ W_O.T

    def without_own(self, weights, layer: int, outputs: Tensor, v: Tensor) -> Tensor:
        """The heads' outputs, some without what lies along a token's own value (#82 on)."""
        return outputs

    def mlp(self, c_fc: Tensor, c_proj: Tensor, u: Tensor) -> Tensor:
        """The MLP of a layer on its normed input u (T, D)."""
        return (u @ c_fc.T).clamp(min=0) ** 2 @ c_proj.T

    def embedded(self, weights, tokens: Tensor, step: int) -> Tensor:
        """What the first layer gets, (T, D)."""
        return weights["embed.weight"][tokens]

    def documents(self, inputs) -> np.ndarray:
        """A number for each token: of the document that its attention stays in."""
        return np.cumsum(inputs == self.eot_token)

    def masks(self, documents: np.ndarray, windows) -> dict[str, Tensor]:
        """What is seen, by the letters of layers; windows long and short."""
        return {letter: self.mask(documents, window) for letter, window in zip("LS", windows)}

    def skip_weight(self, weights, index: int, x0: Tensor) -> Tensor:
        return weights["skip"][index]

    def injected(self, weights, layer: int, x: Tensor, x0: Tensor, tokens: Tensor) -> Tensor:
        """The residual stream as a layer begins."""
        return weights["a"][layer] * x + weights["b"][layer] * x0

    def capped(self, z: Tensor) -> Tensor:
        return z

    def entered(self, weights, x0: Tensor, tokens: Tensor) -> Tensor:
        """The residual stream as the first layer gets it."""
        return x0

    def layer_output(self, weights, layer: int, x, x0, tokens, outputs, seen, step) -> Tensor:
        """The residual stream after a layer; outputs: those of the layers before, by number."""
        x = self.injected(weights, layer, x, x0, tokens)
        if self.attention_pattern[layer] != ".":
            x = x + self.attended(weights, layer, x, tokens, seen, step)
        if self.mlp_pattern[layer] != ".":
            x = x + self.mlp_of(weights, layer, x)
        return x

    def attended(self, weights, layer: int, x, tokens, seen, step) -> Tensor:
        """The attention of a layer on the residual stream, or what it reads in its place."""
        kind, table = self.attention_pattern[layer], self.value_embed_pattern[layer]
        value = None if table == "." else weights[f"value_embeds.{table}.weight"][tokens]
        return self.attention(weights, layer, self.norm(x), value, seen[kind], step)

    def mlp_of(self, weights, layer: int, x: Tensor) -> Tensor:
        c_fc, c_proj = (weights[f"blocks.{layer}.mlp.{end}"] for end in ("c_fc", "c_proj"))
        return self.mlp(c_fc, c_proj, self.norm(x))

    def left(self, weights, x: Tensor, x0: Tensor, tokens: Tensor, outputs) -> Tensor:
        """The residual stream as the head gets it, before the norm."""
        if self.backout_layer is None:
            return x
        return x - weights["backout"][0] * outputs[self.backout_layer]

    def stream_logits(self, weights, stream: Stream, windows, step: int) -> Tensor:
        """Logits (T, V) of a stream at a step, or in its validation; windows long and short."""
        weights = self.initial_scalars() | weights
        seen = self.masks(self.documents(stream.inputs), windows)
        tokens = torch.as_tensor(stream.inputs)
        x0 = self.embedded(weights, tokens, step)
        x = self.entered(weights, x0, tokens)
        skips, outputs = dict(self.skips), {}
        for layer in self.layers():
            if layer in skips:
                weight = self.skip_weight(weights, list(skips).index(layer), x0)
                x = x + weight * outputs[skips[layer]]
            x = self.layer_output(weights, layer, x, x0, tokens, outputs, seen, step)
            outputs[layer] = x
        x = self.left(weights, x, x0, tokens, outputs)
        head = weights.get("lm_head.weight", weights["embed.weight"])
        return self.capped(self.norm(x) @ head.T)

    def training_logits(self, weights, stream: Stream, step: int) -> Tensor:
        return self.stream_logits(weights, stream, self.training_windows(step), step)

    def training_loss(self, weights, stream: Stream, step: int) -> Tensor:
        """The loss of one stream in a training step."""
        z = self.training_logits(weights, stream, step)
        loss = self.other_losses(z, stream, step)
        for ahead, weight in enumerate(self.target_weights(step)):
            # Only of tokens whose target is in the stream
            loss = loss + weight * losses(z[: len(z) - ahead], stream.targets[ahead:]).sum()
        return loss if self.summed_loss else loss / len(z)

    def other_losses(self, z: Tensor, stream: Stream, step: int):
        """Of a stream's logits in training, but for the targets that are tokens ahead."""
        return 0.0

    def validation_loss(self, weights, streams: list[Stream], step: int) -> Tensor:
        """The mean loss of the validation before a step, or after the last one, of its streams."""
        windows, means = self.validation_windows(step), []
        for stream in streams:
            z = self.stream_logits(weights, stream, windows, step)
            means.append(losses(z, stream.targets).mean())
        return torch.stack(means).mean()

    def step_loss(self, weights, streams: list[Stream], step: int) -> Tensor:
        """The mean loss of a step's streams."""
        return sum(self.training_loss(weights, stream, step) for stream in streams) / len(streams)

    def gradients(self, weights, streams: list[Stream], step: int):
        """The mean of the loss over streams, and its gradient of each weight, by name: None of the
        embedding while the head is it too."""
        leaves = {name: p.detach().clone().requires_grad_() for name, p in weights.items()}
        loss = self.step_loss(leaves, streams, step)
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return loss.item(), dict(zip(leaves, grads, strict=True))

    # ---- Optimizers

    def is_muon(self, name: str) -> bool:
        """Whether Muon, or NorMuon, steps a parameter."""
        return self.kind(name) not in self.adam

    def shape_factor(self, rows: int, columns: int) -> float:
        """Of Muon's rate."""
        return max(rows, columns) ** 0.5

    def rate(self, name: str, shape: tuple[int, ...]) -> float:
        """The rate of a parameter of its public shape, before the factor of the step."""
        if not self.is_muon(name):
            return self.adam_lr * self.adam[self.kind(name)]
        factor = self.shape_factor(*shape[-2:]) * self.muon_factors.get(kind_of(name), 1)
        return self.muon_lr * factor

    def optimizer_state(self, weights) -> dict:
        """State before the first step, by name."""
        state = {}
        for name, p in weights.items():
            if self.is_muon(name):
                state[name] = dict(mean=torch.zeros_like(p), second=0.0)
            else:
                zeros = {key: torch.zeros_like(p) for key in ("sum", "mean", "square")}
                state[name] = dict(zeros, count=0)
        return state

    def scaled(self, X: Tensor) -> Tensor:
        return X / (size_of(X) + 1e-7)

    def orthogonalize(self, u: Tensor) -> Tensor:
        """Nearly the closest semi-orthogonal matrix to each u, by Newton-Schulz iterations."""
        is_tall = u.size(-2) > u.size(-1)
        X = self.scaled(u.mT if is_tall else u)
        for a, b, c in self.coefficients:
            A = X @ X.mT
            X = a * X + (b * A + c * A @ A) @ X
        return X.mT if is_tall else X

    def nesterov(self, grad: Tensor, state: dict, momentum: float) -> Tensor:
        """Muon's momentum, a sum, with one step ahead."""
        state["mean"] = momentum * state["mean"] + grad
        return grad + momentum * state["mean"]

    def muon_change(self, U: Tensor, p: Tensor, state: dict, factor: float) -> Tensor:
        """What is subtracted from matrices, in units of their rate."""
        return U

    def muon_step(self, p: Tensor, grad: Tensor, state: dict, step: int, lr: float) -> None:
        """Move a matrix p (out, in), or several (B, out, in), in place, at their rate lr."""
        factor = self.rate_factor(step)
        U = self.orthogonalize(self.nesterov(grad, state, self.muon_momentum(step)))
        p -= lr * factor * self.muon_change(U, p, state, factor)

    def betas_at(self, kind: str, step: int) -> tuple[float, float]:
        return self.betas.get(kind, self.adam_betas)

    def decay_at(self, kind: str, step: int) -> float:
        return self.decays.get(kind, 0.0)

    def adam_step(self, name: str, p: Tensor, state: dict, step: int, lr: float) -> None:
        """Move a parameter p, in place, by the gradients summed in its state, at its rate lr."""
        kind = self.kind(name)
        beta1, beta2 = self.betas_at(kind, step)
        lr, grad = lr * self.rate_factor(step), state["sum"]
        state["count"] += 1
        state["mean"] = beta1 * state["mean"] + (1 - beta1) * grad
        state["square"] = beta2 * state["square"] + (1 - beta2) * grad**2
        unbias1, unbias2 = 1 - beta1 ** state["count"], (1 - beta2 ** state["count"]) ** 0.5
        eps = self.adam_eps * (unbias2 if self.scaled_eps else 1)
        change = lr * unbias2 / unbias1 * state["mean"] / (state["square"].sqrt() + eps)
        shrinks = change * p > 0 if self.strict_decay else change * p >= 0
        decayed = torch.where(shrinks, p, 0.0)
        p -= change + lr**2 * self.decay_at(kind, step) * decayed

    def optimizer_step(self, weights, grads, state, step: int) -> None:
        """Move all weights, and the state, in place, by the gradients of a step."""
        for name, p in weights.items():
            lr = self.rate(name, tuple(p.shape))
            if self.is_muon(name):
                self.muon_step(p, grads[name], state[name], step, lr)
                continue
            if name == "embed.weight" and self.tied(step):
                continue
            own = state[name]
            own["sum"] = own["sum"] + grads[name]
            frozen = name in self.scalars and self.scalars_frozen(step)
            if self.due(name, step) and not frozen:
                self.adam_step(name, p, own, step, lr)
            if self.due(name, step) or frozen:
                own["sum"] = torch.zeros_like(p)
        if step == self.copy_step():
            weights["embed.weight"].copy_(weights["lm_head.weight"])
            state["embed.weight"] = copy.deepcopy(state["lm_head.weight"])

    def finish(self, weights, state) -> None:
        """What the weights become after the last step, in place."""
