"""The first of seven steps to #92: fewer and narrower heads. It has no public number.

Seven layers have attention. Queries and keys have 128 channels where the window is long, in the
other layers the first 64 of their 128; values have the first 64 in layers 1 and 8. Layer 7 has
neither attention nor MLP, layer 8 two MLPs. Unused rows and columns are there, and decay.
"""

import itertools
import math

from stations import station_91
from stations.station_31 import yarn


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

    def rotary_of(self, layer, step):
        return self.rotary(step, self.attention_pattern[layer])

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

    def layers(self):
        return list(range(11))

    def mlp_shapes(self):
        return ((self.mlp_dim, self.model_dim),) * 2

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if layer == 8:
            shapes["second_mlp.c_fc"], shapes["second_mlp.c_proj"] = self.mlp_shapes()
        return shapes

    def trimmed(self, x, width):
        """The first channels of each head, of all heads' (..., D)."""
        return x.unflatten(-1, (-1, self.head_dim))[..., :width].flatten(-2)

    def value_width(self, layer):
        return self.head_dim // 2 if layer in self.half_values else self.head_dim

    def projections(self, weights, layer):
        wide = self.attention_pattern[layer] == "L"
        W_Q, W_K, W_V, W_O = super().projections(weights, layer)
        qk, v = self.head_dim if wide else self.head_dim // 2, self.value_width(layer)
        rows = [self.trimmed(W.T, width).T for W, width in ((W_Q, qk), (W_K, qk), (W_V, v))]
        return *rows, self.trimmed(W_O, v)

    def with_values(self, weights, layer, u, v, value_embed):
        gated = super().with_values(weights, layer, u, 0.0, value_embed)
        return v + self.trimmed(gated, self.value_width(layer))

    def mlp_of(self, weights, layer, x):
        """The sum of a layer's MLPs: of one, of two, of none."""
        total = 0.0
        for name in ("mlp", "second_mlp"):
            if f"blocks.{layer}.{name}.c_fc" in weights:
                ends = (weights[f"blocks.{layer}.{name}.{end}"] for end in ("c_fc", "c_proj"))
                total = total + self.mlp(*ends, self.norm(x))
        return total
