"""The first of seven steps to #92: fewer and narrower heads. It has no public number.

Seven layers have attention. Queries and keys have 128 channels where the window is long, in the
other layers the first 64 of their 128; values have the first 64 in layers 1 and 8. Layer 7 has
neither attention nor MLP, layer 8 two MLPs. Unused rows and columns are there, and decay.
"""

import itertools
import math

import numpy as np
import torch
from lineage_oracles import turned
from stations import station_91
from stations.station_31 import yarn
from stations.station_82 import gelu


def softmax_heads(queries, keys, values, scale, seen):
    """The output of each head, of its own q, k and v, (T, channels) each."""
    outputs = []
    for q, k, v in zip(queries, keys, values):
        scores = (scale * q @ k.T).masked_fill(~seen, -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    return outputs


def paired_heads(queries, keys, values, scale, seen):
    """Heads b and b + H / 2 of a token are positions 2t and 2t + 1 of one sequence."""
    half = len(queries) // 2
    woven = []
    for of in (queries, keys, values):
        pairs = zip(of[:half], of[half:])
        woven.append([torch.stack(pair, dim=1).flatten(0, 1) for pair in pairs])
    outputs = softmax_heads(*woven, scale, seen)
    return [y[0::2] for y in outputs] + [y[1::2] for y in outputs]


class Station(station_91.Station):
    tiny = dict(model_dim=48, head_dim=12, mlp_dim=176, windows=(2, 4, 6, 8), final_window=10)
    attention_pattern = "PSPL.P..S.L"
    mlp_pattern = "MMMMMMM.MMM"
    value_embed_pattern = ".01.....2.3"
    xsa_pattern = ".X.X......."
    half_values = (1, 8)  # layers
    mlp_dim = 2816
    scales = dict(L=0.085, S=0.13, P=0.13)  # of attention, in the first stage
    our_weights = station_91.Station.our_weights | {r"mlp_2\.(c_.*)": r"second_mlp.\1"}

    def rotary(self, step, letter="L"):
        """Frequencies and scale follow the long windows in layers with long ones, else the short
        ones; not what only the last validation sees. Half-wide heads turn wholly."""
        turning = self.head_dim // 4
        frequencies = [self.rope_base ** (-j / (turning - 1)) for j in range(turning)]
        scale = self.scales[letter]
        steps = range(min(step, self.total_steps() - 1) + 1)
        windows = [self.training_windows(s)[letter != "L"] for s in steps]
        for before, after in itertools.pairwise(windows):
            if before != after:
                frequencies = yarn(frequencies, self.block, before, after)
                scale *= 1 + 0.2 * math.log(after / before)
        return frequencies + [0.0] * turning * (letter == "L"), scale

    def gate_rows(self):
        """(kind, layer, rows, first value) of the gates that are made from x0, and from h3."""
        heads = self.model_dim // self.head_dim
        early = [("xsa", 1, heads, 0.0), ("xsa", 3, heads, 0.0), ("heads", 3, heads, 0.25)]
        early += [("x0", layer, 1, 0.0) for layer in (0, 1, 2)]
        early += [("bigram", layer, 1, 0.05) for layer in (0, 1)]
        late = [("heads", 10, heads, 0.25)]
        late += [("x0", layer, 1, 0.0) for layer in (4, 5, 7)]
        late += [("bigram", layer, 1, 0.05) for layer in (4, 5, 9)]
        return early, [*late, ("skip", 6, 1, 0.5)]

    def mlp_shapes(self):
        return ((self.mlp_dim, self.model_dim),) * 2

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if layer == 8:
            shapes["second_mlp.c_fc"], shapes["second_mlp.c_proj"] = self.mlp_shapes()
        return shapes

    # ---- Model

    def stream_logits(self, weights, stream, windows, step):
        weights = self.initial_scalars() | weights
        tokens = torch.as_tensor(stream.inputs)
        seen = self.seen(self.documents(stream.inputs, step), *windows)
        b = self.bigrams(weights, tokens)
        e = {layer: weights[f"value_embeds.{table}.weight"][tokens]
             for layer, table in enumerate(self.value_embed_pattern) if table != "."}
        x0 = self.embedded(weights, tokens, step)
        gates = self.gates_of(weights, 0, x0)
        h0 = x = x0 + gates.pop(("bigram", 0)) * b
        after = {}  # the stream after each layer
        for layer in range(10):
            if layer == 4:
                gates |= self.gates_of(weights, 1, x)
            keep, add = weights["resid_lambdas"][layer], weights["post_lambdas"][layer]
            if layer == 6:
                x = x + weights["skip"][0].sigmoid() * gates["skip", 6] * after[3]
            else:
                y = 0.0
                if self.attention_pattern[layer] != ".":
                    u = self.norm(after.get(7, x))
                    values = self.gated_values(weights, layer, u, e.get(layer))
                    y = add[0] * self.attended(weights, layer, u, values, gates, seen, step)
                x = keep[0] * x + y
                if ("x0", layer) in gates:
                    x = x + gates["x0", layer] * x0
                if ("bigram", layer) in gates:
                    x = x + gates["bigram", layer] * b
            x = keep[1] * x + add[1] * self.mlp_of(weights, layer, self.norm(x))
            after[layer] = x

        # The last layer. Its factors, and those of the mixture after it, are made from the stream.
        m = self.mixture(weights, 0, x)
        u = self.norm(after[7])
        low = torch.arange(self.model_dim) < self.model_dim // 2  # of the first half of the heads
        values = m[0] * h0 + m[1] * after[7] + m[2] * x + torch.where(low, m[6], m[7]) * e[10]
        y = self.attended(weights, 10, u, values, gates, seen, step)
        x = (1 + m[5]) * x + m[3] * h0 + m[4] * after[7]
        x = m[8] * x + m[9] * y + m[10] * h0 + m[11] * b
        u10 = self.norm(x)
        x = m[12] * x + m[13] * self.mlp_of(weights, 10, u10)
        sources = h0, after[7], after[9], e[1], after[3], e[2], e[10], e[8], u10, u
        x = self.mixed(weights, x, sources)
        return self.capped(self.norm(x) @ weights["lm_head.weight"].T)

    def documents(self, inputs, step):
        """A number for each token: of the document that its attention stays in."""
        return np.cumsum(inputs == self.eot_token)

    def seen(self, documents, long, short):
        """What positions see of each other, by the letters of layers. A token is two positions of
        paired heads, which see as many positions as the others."""
        seen = {}
        for letter, window, rows in (("L", long, 1), ("S", short, 1), ("P", short, 2)):
            of = np.repeat(documents, rows)
            i, j = np.indices((len(of), len(of)))
            near = (j <= i) & (i - j <= self.block * window)
            seen[letter] = torch.from_numpy(near & (of[i] == of[j]))
        return seen

    def gated_values(self, weights, layer, u, e):
        """What is added to the values of all heads, (T, D), or None."""
        if e is None:
            return None
        W = weights[f"blocks.{layer}.attn.value_gate.weight"]
        half = self.gate_inputs // 2
        gate = 2 * torch.sigmoid(torch.cat([u[:, :half], e[:, :half]], dim=1) @ W.T)
        return gate.repeat_interleave(self.head_dim, dim=1) * e

    def attended(self, weights, layer, u, values, gates, seen, step):
        """The attention of a layer on u (T, D), head by head."""
        letter, K = self.attention_pattern[layer], self.head_dim
        qk_width = K if letter == "L" else K // 2
        v_width = K // 2 if layer in self.half_values else K
        W_Q, W_K = weights[f"blocks.{layer}.attn.qk_w"].flatten(0, 1).chunk(2)
        W_V, W_O = weights[f"blocks.{layer}.attn.vo_w"]
        frequencies, scale = self.rotary(step, letter)
        queries, keys, heads_values = [], [], []
        for head in range(self.model_dim // K):
            rows = slice(K * head, K * head + qk_width)
            positions = torch.arange(len(u))
            if letter == "P":  # the second of a token's two positions for odd heads
                positions = 2 * positions + head % 2
            q, k = (weights["lambda0"][layer] * u @ W[rows].T for W in (W_Q, W_K))
            queries.append(turned(self.norm(q), positions, frequencies))
            k = turned(self.norm(k), positions, frequencies)
            if letter == "L":  # what does not turn is that of the token before
                still = torch.arange(K) // (K // 4) % 2 == 1
                k = torch.where(still, torch.cat([k[:1], k[:-1]]), k)
            keys.append(k)
            rows = slice(K * head, K * head + v_width)
            v = weights["lambda0"][layer] * u @ W_V[rows].T
            heads_values.append(v if values is None else v + values[:, rows])
        found = softmax_heads if letter != "P" else paired_heads
        outputs = found(queries, keys, heads_values, scale, seen[letter])
        out = 0.0
        for head, (y, v) in enumerate(zip(outputs, heads_values)):
            if ("xsa", layer) in gates:
                own = (y * v).sum(1, keepdim=True) / (v**2).sum(1, keepdim=True).clamp(min=1e-8) * v
                y = y - gates["xsa", layer][:, head, None].tanh() * own
            if ("heads", layer) in gates:
                y = gates["heads", layer][:, head, None] * y
            columns = slice(K * head, K * head + v_width)
            out = out + y @ (weights["lambda1"][layer] * W_O[:, columns]).T
        return out

    def mlp_of(self, weights, layer, u):
        """The sum of a layer's MLPs on its normed input: of one, of two, of none."""
        total = 0.0
        for name in ("mlp", "second_mlp"):
            if f"blocks.{layer}.{name}.c_fc" in weights:
                W_1, W_2 = (weights[f"blocks.{layer}.{name}.{end}"] for end in ("c_fc", "c_proj"))
                total = total + (u @ W_1.T).clamp(min=0) ** 2 @ W_2
        return total

    def mixture(self, weights, number, x):
        """Factors of each token, of the last layer (0) or after it (1), (T, 1) each."""
        hidden = gelu(x @ weights["mudd_w1"][number].T)
        rows = slice(0, 14) if number == 0 else slice(14, None)
        m = 0.1 * (hidden @ weights["mudd_w2"][rows].T + weights["mudd_b2"][rows])
        return m.unsqueeze(2).unbind(1)

    def mixed(self, weights, x, sources):
        """The stream with five outputs of before: of the first layers, of 7, of 9, the values of
        layer 1, the output of 3."""
        for factor, source in zip(self.mixture(weights, 1, x), sources[:5], strict=True):
            x = x + factor * source
        return x
