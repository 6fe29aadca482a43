"""Stations of 2024 and 2025, from #5 to #53."""

import itertools
import math
from functools import cached_property

import numpy as np
import torch
from lineage_oracles import POLAR_EXPRESS, Station, packed_streams, size_of, stream_at


class Station5(Station):
    """#5 ModernArch: a plain Transformer with ReLU², QK-norm and Muon."""

    parameters = 123_568_128


class Station8(Station5):
    """#8 UntieEmbed: embedding and head are two matrices, the embedding is normed."""

    parameters = 162_201_600
    num_iterations = 4578
    uniform = {"qkvo_w": 3**-0.5, "c_fc": 3**-0.5}
    normal = {"embed": 1.0}
    adam = {"embed": 37.5, "lm_head": 0.25}
    muon_lr = 0.02
    cooldown_frac = 1308 / 4578

    def settings(self):
        return super().settings() | dict(head_lr=self.adam_lr * self.adam["lm_head"])

    def parameter_shapes(self):
        return super().parameter_shapes() | {"lm_head.weight": (self.vocab_size, self.model_dim)}

    def embedded(self, weights, tokens, step):
        return self.norm(super().embedded(weights, tokens, step))

    def shape_factor(self, rows, columns):
        return max(1, rows / columns) ** 0.5


class Station18(Station8):
    """#18 SoftCap: documents in one sequence, a growing window, value embeddings, capped logits."""

    parameters = 275_742_772
    num_iterations = 1390
    streams = 8
    seq_lens = (65_536,)
    val_seq_len = 65_536
    window_tokens = 1856
    rope_base = 1024
    attention_pattern = "LLLLLLL.LLLL"
    value_embed_pattern = "012......012"
    skips = ((6, 5), (7, 4), (8, 3), (9, 2), (10, 1), (11, 0))
    bf16 = frozenset({"embed", "value_embeds"})
    scalars = Station8.scalars | dict(lambda0=0.5)
    normal = {"embed": 1.0, "value_embeds": 1.0}
    adam = {"embed": 75, "value_embeds": 75, "lm_head": 1, "scalars": 5}
    adam_betas = (0.8, 0.95)
    muon_lr = 0.05
    cooldown_frac = 0.4
    momentum = (0.85, 0.95)

    def settings(self):
        first = self.layers()[0]
        return super().settings() | dict(
            sequences_per_forward=1, attention_pattern=self.attention_pattern[first:],
            value_embed_pattern=self.value_embed_pattern[first:],
            embed_lr=self.adam_lr * self.adam["value_embeds"])

    def long_window(self, step):
        """In blocks, from one on, rounded down."""
        N = self.num_iterations
        grown = self.window_tokens * step + self.block * (N - step)
        return max(1, grown // (N * self.block))

    def training_windows(self, step):
        long = self.long_window(step)
        return long, max(1, long // 2)

    def rotary(self, step):
        """The second half of the pairs does not turn."""
        turning = (self.qk_dim or self.head_dim) // 4
        frequencies = [self.rope_base ** (-j / (turning - 1)) for j in range(turning)]
        return frequencies + [0.0] * turning, self.attention_scale or self.head_dim**-0.5

    def near(self, i, j, window):
        """By the numbers of blocks."""
        return i // self.block - j // self.block < window

    def mask(self, documents, window):
        i, j = np.indices((len(documents), len(documents)))
        seen = (j <= i) & (documents[i] == documents[j])
        return torch.from_numpy(seen & self.near(i, j, window))

    def parameter_shapes(self):
        shapes = super().parameter_shapes()
        for name in self.scalars:
            shapes[name] = (len(self.attention_pattern),)
        for table in sorted(set(self.value_embed_pattern) - {"."}):
            shapes[f"value_embeds.{table}.weight"] = (self.table_rows, self.model_dim)
        return shapes

    def capped(self, z):
        return 15 * torch.tanh(z / 15)

    def nesterov(self, grad, state, momentum):
        """A mean."""
        state["mean"] = state["mean"] + (1 - momentum) * (grad - state["mean"])
        return grad + momentum * (state["mean"] - grad)


class Station19(Station18):
    """#19 Fp8LmHead: 8-bit floats in the head."""

    parameters = 275_598_388
    num_iterations = 1395
    window_tokens = 1728
    table_rows = 50_257
    fp8_divisors = (0.5, 2.0**-5, 2.0**-29)
    uniform = {"qkvo_w": 0.5, "c_fc": 0.5}
    final_lr_frac = 0.1

    def long_window(self, step):
        """From 0 on, rounded up."""
        return max(1, -(-self.window_tokens * step // (self.num_iterations * self.block)))

    def capped(self, z):
        return 30 * torch.sigmoid(z / 7.5)


class Station21(Station19):
    """#21 BatchSize: a smaller batch, long and short windows."""

    num_iterations = 1770
    seq_lens = (49_152,)
    val_seq_len = 262_144
    attention_scale = 0.12
    attention_pattern = "LSSSLSS.SSSL"
    norm_eps = 2.0**-23
    fp8_divisors = (0.5, 2.0**-9, 2.0**-19)
    adam_eps = 1e-10


class Station24(Station21):
    """#24 ShardedOptimizers: each GPU updates its share of the weights."""



class Station28(Station24):
    """#28 SparseAttnGate: heads are gated; each sequence begins with a document."""

    parameters = None
    num_iterations = 1695
    table_rows = 50_304
    cooldown_frac = 0.45
    fp8_divisors = (768**0.5 / 448, 2.0**-9, 1 / 448)
    align_documents = True
    scaled_eps = False
    summed_loss = True

    def streams_of_steps(self, shards, steps):
        """Each stream begins where a document does, T or more after the one before. Before a step,
        a shard with no more than twice its tokens and one is left for the next. Raises ValueError
        where documents are missing."""
        shards = iter(shards)
        tokens, position = next(shards, ()), 0
        for length in map(self.seq_len, steps):
            reach = 2 * self.streams * length
            if position + reach + 1 >= len(tokens):
                tokens, position = next(shards, None), 0
                if tokens is None:
                    return
            starts, start = [], -1
            for here in range(position, min(position + reach, len(tokens))):
                if tokens[here] == self.eot_token and (start < 0 or here - start >= length):
                    starts.append(start)
                    start = here
                    if len(starts) > self.streams:
                        break
            starts = starts[1:]
            if len(starts) < self.streams:
                raise ValueError(f"{len(starts)} beginnings in {reach} tokens")
            position = start
            yield [stream_at(tokens, first, length) for first in starts]

    def mlp_shapes(self):
        shape = self.model_dim, self.mlp_ratio * self.model_dim
        return shape, shape

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if "attn.qkvo_w" in shapes:
            heads = self.model_dim // self.head_dim
            shapes["attn.attn_gate.weight"] = (heads, self.gate_inputs)
        return shapes

    def gates(self, weights, layer, u):
        W = weights[f"blocks.{layer}.attn.attn_gate.weight"]
        return torch.sigmoid(u[:, : self.gate_inputs] @ W.T)

    def mlp(self, c_fc, c_proj, u):
        return (u @ c_fc).clamp(min=0) ** 2 @ c_proj.T


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


class Station31(Station28):
    """#31 Yarn: windows and rotary embedding grow in stages; documents are packed."""

    num_iterations = 1670
    attention_scale = 0.1
    mlp_pattern = ".MMMMMMMMMMM"
    cooldown_frac = 0.5

    def settings(self):
        shorts = tuple(max(1, window // 2) for window in self.windows)
        return super().settings() | dict(
            long_windows=self.windows, short_windows=shorts, max_document_tokens=self.max_document)

    def document_limit(self, step):
        return self.max_document

    def streams_of_steps(self, shards, steps):
        lengths, limits = [], []
        for step in steps:
            lengths.append(self.seq_len(step))
            limits.append(self.document_limit(step))
        return packed_streams(shards, lengths, self.streams, self.eot_token, limits)

    def stage(self, step):
        """0, 1 or 2, the third of the schedule that a training step is in; 3 after it (#43 on)."""
        return int(3 * step / (self.num_iterations + 1))

    def long_window(self, step):
        """What drives YaRN, in blocks. At the end: before validation."""
        return self.windows[-1 if step == self.total_steps() else self.stage(step)]

    def validation_windows(self, step):
        long, short = self.training_windows(step)
        return self.final_window if step == self.total_steps() else long, short

    @cached_property
    def window_changes(self):
        """(step, window before, window from then on) of each change of the long window."""
        windows = [self.long_window(step) for step in range(self.total_steps() + 1)]
        pairs = enumerate(itertools.pairwise(windows), 1)
        return [(step, before, after) for step, (before, after) in pairs if before != after]

    def rotary(self, step):
        """It follows each change of the long window: YaRN, https://arxiv.org/abs/2309.00071."""
        frequencies, scale = super().rotary(step)
        for change, before, after in self.window_changes:
            if change <= step:
                frequencies = yarn(frequencies, self.block, before, after)
                scale *= 1 + 0.2 * math.log(after / before)
        return frequencies, scale

    def near(self, i, j, window):
        """By tokens, inclusive."""
        return i - j <= self.block * window


class Station40(Station31):
    """#40 Backout: an early output is taken away at the end; Adam steps every other time."""

    num_iterations = 2290
    extension = 40
    seq_lens = (32_768,)
    val_every = 250
    final_window = 20
    attention_pattern = ".SSSLSS.SSSL"
    value_embed_pattern = ".12......012"
    skips = ((6, 5), (7, 4), (8, 3), (9, 2), (10, 1))
    backout_layer = 8
    bf16 = frozenset({"embed", "value_embeds", "lm_head", "smear_gate", "attn_gate"})
    scalars = Station31.scalars | dict(skip=-1.5, smear=0.0, backout=0.5)
    adam_betas = (0.65, 0.95)
    adam_eps = 1e-8
    muon_lr = 0.06
    coefficients = POLAR_EXPRESS
    cooldown_frac = 0.45
    momentum_cooldown = 50

    def settings(self):
        return super().settings() | dict(
            backout_layer=self.backout_layer - self.layers()[0], extension_steps=self.extension,
            long_windows=(*self.windows, self.final_window))

    def stage(self, step):
        return int(3 * min(step / (self.num_iterations + 1), 0.9999))

    def progress(self, step):
        return min(0.9999, super().progress(step))

    def muon_momentum(self, step):
        """It is never set to its highest value: its warm-up ends short."""
        momentum = super().muon_momentum(step)
        if momentum == self.momentum[1]:
            return super().muon_momentum(self.momentum_warmup - 1)
        return momentum

    def adam_steps(self, step):
        """At odd steps, by the sum of two steps' gradients."""
        return step % 2 == 1

    def parameter_shapes(self):
        return super().parameter_shapes() | {"smear_gate.weight": (1, self.gate_inputs)}

    def embedded(self, weights, tokens, step):
        """Each embedding but the first has a part of the one before it."""
        e = self.token_embedding(weights, step)[tokens]
        gate = torch.sigmoid(e[1:, : self.gate_inputs] @ weights["smear_gate.weight"].T)
        mu = weights["smear"][0]
        return self.norm(torch.cat([e[:1], e[1:] + mu * gate * e[:-1]]))

    def token_embedding(self, weights, step):
        return weights["embed.weight"]

    def skip_weight(self, weights, index, x0):
        return torch.sigmoid(super().skip_weight(weights, index, x0))

    def scaled(self, X):
        return X / (1.02 * size_of(X) + 1e-6)


class Station43(Station40):
    """#43 CautiousWD: NorMuon, whose weights decay where the step shrinks them."""

    num_iterations = 2205
    muon_lr = 0.03
    muon_factors = {"c_fc": 2}
    muon_decay = 1.2
    second_axis = -2  # of a matrix, along which second moments are averaged
    cooldown_frac = 0.5

    def stage(self, step):
        return 3 * step // self.num_iterations if step < self.num_iterations else 3

    def muon_momentum(self, step):
        return super(Station40, self).muon_momentum(step)

    def moments_axis(self, U):
        return self.second_axis

    def muon_change(self, U, p, state, factor):
        """U, and the decay."""
        decayed = torch.where(U * p >= 0, p, 0.0)
        return self.equalized(U, state) + self.muon_lr * factor * self.muon_decay * decayed

    def equalized(self, U, state):
        """U by its second moments, https://arxiv.org/abs/2510.05491, at its old Frobenius norm."""
        moments = (U**2).mean(self.moments_axis(U), keepdim=True)
        state["second"] = state["second"] + (1 - self.second_beta) * (moments - state["second"])
        scaled = U / state["second"].clamp(min=1e-10).sqrt()
        return scaled * (size_of(U) / size_of(scaled).clamp(min=1e-10))


class Station50(Station43):
    """#50 CautiousWDAdam: Adam decays too; batches grow; keys are offset; eleven layers."""

    num_iterations = 2050
    seq_lens = (16_384, 32_768, 49_152)
    attention_pattern = "SSSLSS.SSSL"
    mlp_pattern = "MMMMMMMMMMM"
    value_embed_pattern = "12......012"
    skips = ((6, 3),)
    backout_layer = 7
    scalars = Station43.scalars | dict(a=1.1, lambda1=1.0)
    normal = {"embed": 1.0}
    decays = {"embed": 0.005, "value_embeds": 0.005, "lm_head": 0.005}
    muon_lr = 0.023
    muon_factors = {"qkvo_w": 2, "c_proj": 2}
    second_axis = -1
    cooldown_frac = 0.55
    lr_factors = (1.0, 1.51, 1.93)  # factor of the rates in each third of N

    def seq_len(self, step):
        return self.seq_lens[min(self.stage(step), 2)]

    def progress(self, step):
        return super(Station40, self).progress(step)

    def peak(self, step):
        """It changes where the third begins, or a step later if it begins at N / 3."""
        x = self.progress(step)
        return self.lr_factors[(x > 1 / 3) + (x > 2 / 3)]

    def rate_factor(self, step):
        return self.final_lr_frac if step > self.num_iterations else super().rate_factor(step)

    def mlp_shapes(self):
        shape = self.mlp_ratio * self.model_dim, self.model_dim
        return shape, shape

    def projected(self, weights, layer, u, value_embed):
        *W_QKV, W_O = self.projections(weights, layer)
        q, k, v = (weights["lambda0"][layer] * u @ W.T for W in W_QKV)
        if value_embed is not None:
            v = self.with_values(weights, layer, u, v, value_embed)
        return q, k, v, weights["lambda1"][layer] * W_O

    def with_values(self, weights, layer, u, v, value_embed):
        return v + value_embed

    def shifted(self, channels):
        """Whether some channels of a key are those of the token before: those that do not turn."""
        return channels // (len(channels) // 4) % 2 == 1

    def keys(self, layer, k):
        """In layers with a long window they are offset, but for the first token's."""
        if self.attention_pattern[layer] != "L":
            return k
        previous = torch.cat([k[:, :1], k[:, :-1]], dim=1)
        return torch.where(self.shifted(torch.arange(k.size(-1))), previous, k)

    def mlp(self, c_fc, c_proj, u):
        return (u @ c_fc.T).clamp(min=0) ** 2 @ c_proj


class Station53(Station50):
    """#53 MultiTokenPrediction: three tokens ahead; a head that is tied, then untied."""

    run_length = 7
    num_iterations = 1880
    fp8_divisors = (100 / 448, 1.5 / 448, 0.75 / 448)
    scalars = dict(a=1.1, lambda0=0.5, lambda1=1.0, skip=-1.5, smear=0.0, backout=0.5)
    uniform = {"qkvo_w": 1.0, "c_fc": 0.5}
    normal = {"embed": 0.005, "lm_head": 0.005}
    adam = Station50.adam | {"embed": 1, "smear_gate": 0.01, "x0_lambdas": 5}
    strict_decay = True
    betas = {"scalars": (0.9, 0.99)}
    lr_factors = (1.0, 1.52, 1.73)
    freeze_steps = 40
    our_weights = Station50.our_weights | {"x0_lambda": "x0_lambdas"}

    def target_weights(self, step):
        x = step / self.num_iterations
        if x >= 2 / 3:
            return [1.0]
        if x >= 1 / 3:
            return [1.0, 0.5 * (2 - 3 * x)]
        return [1.0, 0.5, 0.25 * (1 - 3 * x)]

    def scalars_frozen(self, step):
        changes = self.window_changes
        return any(change <= step < change + self.freeze_steps for change, _, _ in changes)

    def untied_step(self):
        """The first step whose embedding is not the head's matrix."""
        return -(-2 * self.num_iterations // 3)

    def tied(self, step):
        return step < self.untied_step()

    def copy_step(self):
        """The last one before at which Adam steps."""
        return (self.untied_step() - 2) | 1

    def parameter_shapes(self):
        return super().parameter_shapes() | dict(x0_lambdas=(len(self.attention_pattern),))

    def token_embedding(self, weights, step):
        return weights["lm_head.weight" if self.tied(step) else "embed.weight"]

    def injected(self, weights, layer, x, x0, tokens):
        return weights["a"][layer] * x + weights["x0_lambdas"][layer] * x0
