"""#82, merged: the last layer and the head mix earlier outputs by factors of each token (MUDD,
#81); heads lose what lies along their token's own value (XSA); all value gates see their value.

Parameters of which a part is never used have only the rest here: MUDD's second network, XSA by
layer, the value gate of the last layer.
"""

import torch
from stations import station_80

LAST = 1.1**0.5 * 10  # factors of the last layer over 0.1


def gelu(z):
    return z * (1 + torch.erf(z / 2**0.5)) / 2


def network(weights, x, kind, number, rows):
    """b + W_2 gelu(W_1 x) of a bank's network, (T, rows.stop - rows.start)."""
    hidden = gelu(x @ weights[f"{kind}_w1"][number].T)
    return weights[f"{kind}_b2"][rows] + hidden @ weights[f"{kind}_w2"][rows].T


class Station(station_80.Station):
    num_iterations = 1375
    extension = 10
    bf16 = station_80.Station.bf16 | {"w1", "w2", "bias", "output_factors"}  # by our names
    xsa_pattern = ".X.XX..XX.X"
    mudd_biases = [0.0] * 6 + [20.0, 20.0, LAST, 10.0, 0.0, 0.5, LAST, 10.0]  # of the last layer
    mudd_biases += [0.0, -5.0, 0.0, 0.0, 0.0]  # of the head
    scalars = dict(lambda0=0.5, lambda1=1.0, skip=-1.5, smear=0.0)
    constant = station_80.Station.constant | {"mudd_b2": mudd_biases}
    uniform = station_80.Station.uniform | {"mudd_w1": 3**-0.5}
    adam = station_80.Station.adam | {"mudd_w1": 0.25, "mudd_w2": 0.25, "mudd_b2": 0.25,
                                      "xsa_alphas": 1}
    betas = station_80.Station.betas | {"xsa_alphas": (0.9, 0.95)}
    decays = station_80.Station.decays | {"mudd_w1": 0.005, "mudd_w2": 0.005}
    our_scalars = {name: of for name, of in station_80.Station.our_scalars.items()
                   if name != "backout_lambda"}
    our_weights = station_80.Station.our_weights | {
        r"(network|output_factors)\.(w.)\.weight": r"mudd_\2",
        r"(network|output_factors)\.bias": "mudd_b2",
        r"attn\.xsa_lambda": "xsa_alphas"}

    def last_layer(self):
        return len(self.attention_pattern) - 1

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if layer == self.last_layer():
            shapes.pop("attn.value_gate.weight")
        return shapes

    def parameter_shapes(self):
        heads = self.model_dim // self.head_dim
        return super().parameter_shapes() | dict(
            mudd_w1=(2, 64, self.model_dim), mudd_w2=(19, 64), mudd_b2=(19,),
            xsa_alphas=(self.xsa_pattern.count("X"), heads))

    def value_gate_input(self, layer, u, value_embed):
        half = self.gate_inputs // 2
        return torch.cat([u[:, :half], value_embed[:, :half]], dim=1)

    def with_values(self, weights, layer, u, v, value_embed):
        """The last layer's come with their factors."""
        if layer == self.last_layer():
            return v + value_embed
        return super().with_values(weights, layer, u, v, value_embed)

    def own_share(self, weights, layer):
        """Of what lies along a head's own value, (H,) or (T, H); None where nothing is taken."""
        if self.xsa_pattern[layer] != "X":
            return None
        return weights["xsa_alphas"][self.xsa_pattern[:layer].count("X")].tanh()

    def without_own(self, weights, layer, outputs, v):
        shares = self.own_share(weights, layer)
        if shares is None:
            return outputs
        unit = v / v.norm(dim=-1, keepdim=True).clamp(min=1e-4)
        own = (outputs * unit).sum(-1, keepdim=True) * unit
        return outputs - shares.expand(v.size(1), -1).T[..., None] * own

    def mixture(self, weights, number, x):
        """Factors of each token, of the last layer (0) or after it (1), (T, 1) each."""
        rows = slice(0, 14) if number == 0 else slice(14, None)
        return (0.1 * network(weights, x, "mudd", number, rows)).unsqueeze(2).unbind(1)

    def layer_output(self, weights, layer, x, x0, tokens, outputs, seen, step):
        if layer != self.last_layer():
            return super().layer_output(weights, layer, x, x0, tokens, outputs, seen, step)
        m = self.mixture(weights, 0, x)
        h0, h7 = self.entered(weights, x0, tokens), outputs[self.backout_layer]
        e = weights[f"value_embeds.{self.value_embed_pattern[layer]}.weight"][tokens]
        half = self.model_dim // 2
        values = m[0] * h0 + m[1] * h7 + m[2] * x
        values = values + torch.cat([m[6] * e[:, :half], m[7] * e[:, half:]], dim=1)
        kind = self.attention_pattern[layer]
        y = self.attention(weights, layer, self.norm(h7), values, seen[kind], step)
        x = (1 + m[5]) * x + m[3] * h0 + m[4] * h7
        x = m[8] * x + m[9] * y + m[10] * h0 + m[11] * self.bigrams(weights, tokens)
        return m[12] * x + m[13] * self.mlp_of(weights, layer, x)

    def left(self, weights, x, x0, tokens, outputs):
        m = self.mixture(weights, 1, x)
        skipped = self.skips[0][1]
        x = x + m[0] * self.entered(weights, x0, tokens) + m[1] * outputs[self.backout_layer]
        x = x + m[2] * outputs[self.last_layer() - 1] + m[4] * outputs[skipped]
        return x + m[3] * weights["value_embeds.0.weight"][tokens]
