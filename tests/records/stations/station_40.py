"""#40 Backout: an early output is taken away at the end; Adam steps every other time."""

import torch
from lineage_oracles import POLAR_EXPRESS, size_of
from stations import station_31


class Station(station_31.Station):
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
    scalars = station_31.Station.scalars | dict(skip=-1.5, smear=0.0, backout=0.5)
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
