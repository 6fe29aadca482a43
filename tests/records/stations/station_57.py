"""#57 MixedPrecisionInterweavedOptimizer: another cap, gates on value embeddings and on the skip,
Adam's betas and decay by group."""

import torch
from stations import station_53


class Station(station_53.Station):
    run_length = 6
    num_iterations = 1800
    fp8_divisors = (100 / 448, 1.6 / 448, 0.75 / 448)
    bf16 = station_53.Station.bf16 | {"value_gate", "skip_gate"}
    adam = station_53.Station.adam | {"attn_gate": 1, "value_gate": 1, "skip_gate": 0.05}
    adam_betas = (0.9, 0.99)
    betas = {
        "lm_head": (0.5, 0.95), "embed": (0.5, 0.95), "value_embeds": (0.75, 0.95),
        "x0_lambdas": (0.65, 0.95)}
    adam_eps = 1e-10
    decays = {
        "lm_head": 0.75, "embed": 0.75, "value_embeds": 0.025, "attn_gate": 0.005,
        "value_gate": 0.005}
    cooldown_frac = 0.5
    freeze_steps = 0

    def untied_step(self):
        """Adam has stepped in the one before."""
        return (super().untied_step() | 1) + 1

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if self.value_embed_pattern[layer] != ".":
            shapes["attn.value_gate.weight"] = shapes["attn.attn_gate.weight"]
        return shapes

    def parameter_shapes(self):
        return super().parameter_shapes() | {"skip_gate.weight": (1, self.gate_inputs)}

    def with_values(self, weights, layer, u, v, value_embed):
        W = weights[f"blocks.{layer}.attn.value_gate.weight"]
        gates = 2 * torch.sigmoid(self.value_gate_input(layer, u, value_embed) @ W.T)  # (T, H)
        return v + gates.repeat_interleave(self.head_dim, dim=1) * value_embed

    def value_gate_input(self, layer, u, value_embed):
        return u[:, : self.gate_inputs]

    def skip_weight(self, weights, index, x0):
        gate = 2 * torch.sigmoid(x0[:, : self.gate_inputs] @ weights["skip_gate.weight"].T)
        return super().skip_weight(weights, index, x0) * gate

    def capped(self, z):
        return 23 * torch.sigmoid((z + 5) / 7.5)
