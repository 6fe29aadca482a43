"""#90 NarrowHeads, as submitted: queries and keys have 96 channels, values 128; the output's matrix
is stored transposed, so that NorMuon averages over what reads an input, not over what an output
reads."""

import math

import torch
from stations import station_88
from stations.station_31 import yarn


class Station(station_88.Station):
    tiny = dict(model_dim=96, head_dim=16, qk_dim=12)
    extension = 45
    qk_dim = 96  # channels of a query and of a key

    def rotary(self, step):
        """A quarter of qk_dim frequencies. The scale keeps the spread of random scores."""
        turning = self.qk_dim // 4
        frequencies = [self.rope_base ** (-j / (turning - 1)) for j in range(turning)]
        scale = 0.1 * (self.head_dim / self.qk_dim) ** 0.5
        for change, before, after in self.window_changes:
            if change <= step:
                frequencies = yarn(frequencies, self.block, before, after)
                scale *= 1 + 0.2 * math.log(after / before)
        return frequencies + [0.0] * turning, scale

    def keys(self, layer, k):
        """In layers with a long window the half that does not turn is the token's before."""
        if self.attention_pattern[layer] != "L":
            return k
        quarter = torch.arange(self.qk_dim) // (self.qk_dim // 4)
        previous = torch.cat([k[:, :1], k[:, :-1]], dim=1)
        return torch.where(quarter % 2 == 1, previous, k)

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if "attn.qk_w" in shapes:
            heads = self.model_dim // self.head_dim
            shapes["attn.qk_w"] = heads, 2 * self.qk_dim, self.model_dim
        return shapes

    def projections(self, weights, layer):
        W_Q, W_K, W_V, stored = super().projections(weights, layer)
        return W_Q, W_K, W_V, stored.T

    def attention(self, weights, layer, u, value_embed, seen, step):
        q, k, v, W_O = self.projected(weights, layer, u, value_embed)
        q, k = (x.unflatten(1, (-1, self.qk_dim)).transpose(0, 1) for x in (q, k))
        v = v.unflatten(1, (-1, self.head_dim)).transpose(0, 1)
        outputs = self.without_own(weights, layer, self.heads(layer, q, k, v, seen, step), v)
        gates = self.gates(weights, layer, u).T[..., None]
        return (gates * outputs).transpose(0, 1).flatten(1) @ W_O.T
