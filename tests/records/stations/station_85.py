"""#85, as logged: two networks make all gates of a token (MUDD gates); the heads of the last layer
look through each other's eyes in a window of their own (DC); x0 has no bigrams."""

import math

import numpy as np
import torch
from stations import station_82, station_83

GATES = ("attn_gate", "skip_gate", "x0_lambdas", "bigram_lambdas", "xsa_alphas")


class Station(station_83.Station):
    num_iterations = 1275
    extension = 15
    bf16 = station_83.Station.bf16 | {"gates_early", "gates_late"}
    bigram_rows = 377_280
    bigram_width = 768
    xsa_pattern = ".X.XX..X..."
    gate_pattern = "...G......G"
    adam = {kind: of for kind, of in station_83.Station.adam.items() if kind not in GATES}
    adam |= dict.fromkeys(("mudd_gate_w1", "mudd_gate_w2", "mudd_gate_b2", "mudd_gate_scale"), 0.1)
    decays = station_83.Station.decays | {"mudd_gate_w1": 0.005, "mudd_gate_w2": 0.005}
    uniform = station_83.Station.uniform | {"mudd_gate_w1": 3**-0.5}
    our_weights = {
        r"gates_.*\.(w.)\.weight": r"mudd_gate_\1", r"gates_.*\.bias": "mudd_gate_b2",
        "gates_lambda": "mudd_gate_scale"} | station_83.Station.our_weights

    def gate_rows(self):
        """(kind, layer, rows, first value) of the gates of both networks, in their order."""
        heads = self.model_dim // self.head_dim
        early = []
        for layer in (0, 1, 2, 3):
            early += [("xsa", layer, heads, 0.0)] * (layer in (1, 3))
            early += [("heads", layer, heads, 0.25)] * (layer == 3)
            early += [("x0", layer, 1, 0.0), ("bigram", layer, 1, 0.05)]
        late = []
        for layer in (4, 5, 7, 8, 9):
            late += [("skip", 6, 1, 0.5)] * (layer == 7)
            late += [("xsa", layer, heads, 0.0)] * (layer in (4, 7))
            late += [("x0", layer, 1, 0.0), ("bigram", layer, 1, 0.05)]
        late += [("heads", 10, heads, 0.25), ("w1", 10, heads, 1.0), ("w2", 10, heads, 0.0)]
        return early, late

    def gates_of(self, weights, number, x):
        """{(kind, layer): (T, rows)} of network 0 or 1, on x."""
        of_both = self.gate_rows()
        first = sum(rows for _, _, rows, _ in of_both[0]) if number else 0
        sizes = [rows for _, _, rows, _ in of_both[number]]
        rows = slice(first, first + sum(sizes))
        z = station_82.network(weights, x, "mudd_gate", number, rows)
        parts = (weights["mudd_gate_scale"] * z).split(sizes, dim=1)
        return {gate[:2]: part for gate, part in zip(of_both[number], parts)}

    def parameter_shapes(self):
        shapes = super().parameter_shapes()
        for name in list(shapes):
            if any(gate in name for gate in GATES):
                shapes.pop(name)
        rows = sum(rows for of in self.gate_rows() for _, _, rows, _ in of)
        return shapes | dict(mudd_gate_w1=(2, 64, self.model_dim), mudd_gate_w2=(rows, 64),
                             mudd_gate_b2=(rows,), mudd_gate_scale=())

    @property
    def constant(self):
        biases = []
        for *_, rows, value in sum(self.gate_rows(), []):
            biases += [value / 0.1] * rows
        of_gates = {"mudd_gate_b2": biases, "mudd_gate_scale": 0.1}
        return station_83.Station.constant | of_gates

    def embedded(self, weights, tokens, step):
        return super(station_83.Station, self).embedded(weights, tokens, step)

    def entered(self, weights, x0, tokens):
        gate = self.gates_of(weights, 0, x0)["bigram", 0]
        return x0 + gate * self.bigrams(weights, tokens)

    def masks(self, documents, windows):
        """What composed heads see is kept aside: fewer tokens than the window, not as many."""
        i, j = np.indices((len(documents), len(documents)))
        near = (j <= i) & (i - j < self.composed_window)
        self.composed = torch.from_numpy(near & (documents[i] == documents[j]))
        return super().masks(documents, windows)

    def layer_output(self, weights, layer, x, x0, tokens, outputs, seen, step):
        """Gates of layers 0 to 3 are made from x0, the others from the output of layer 3."""
        if layer == 0:
            self.of_tokens = self.gates_of(weights, 0, x0)
        if layer == 4:
            self.of_tokens = self.of_tokens | self.gates_of(weights, 1, x)
        return super().layer_output(weights, layer, x, x0, tokens, outputs, seen, step)

    def injection(self, weights, layer, x0, tokens):
        added = 0.0
        if ("x0", layer) in self.of_tokens:
            added = self.of_tokens["x0", layer] * x0
        if layer > 0 and ("bigram", layer) in self.of_tokens:
            added = added + self.of_tokens["bigram", layer] * self.bigrams(weights, tokens)
        return added

    def skip_weight(self, weights, index, x0):
        return weights["skip"][0].sigmoid() * self.of_tokens["skip", self.skips[0][0]]

    def own_share(self, weights, layer):
        gate = self.of_tokens.get(("xsa", layer))
        return None if gate is None else gate.tanh()

    def gates(self, weights, layer, u):
        ones = torch.ones(len(u), self.model_dim // self.head_dim)
        return self.of_tokens.get(("heads", layer), ones)

    def heads(self, layer, q, k, v, seen, step):
        """In the last layer each head also has its values where all heads look, mixed by w1, at
        its own w2."""
        outputs = super().heads(layer, q, k, v, seen, step)
        if ("w1", layer) not in self.of_tokens:
            return outputs
        w1, w2 = self.of_tokens["w1", layer], self.of_tokens["w2", layer]
        w1 = w1 / ((w1**2).mean(1, keepdim=True) + 1e-6).sqrt()
        scores = self.scores(layer, q, k, step).masked_fill(~self.composed, -math.inf)
        mixed = (w1.T[..., None] * scores.softmax(-1)).sum(0)
        return outputs + w2.T[..., None] * (mixed @ v)
