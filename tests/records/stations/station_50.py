"""#50 CautiousWDAdam: Adam decays too; batches grow; keys are offset; one skip; eleven layers."""

import torch
from stations import station_40, station_43


class Station(station_43.Station):
    num_iterations = 2050
    seq_lens = (16_384, 32_768, 49_152)
    attention_pattern = "SSSLSS.SSSL"
    mlp_pattern = "MMMMMMMMMMM"
    value_embed_pattern = "12......012"
    skips = ((6, 3),)
    skip_layer = 3
    backout_layer = 7
    scalars = station_43.Station.scalars | dict(a=1.1, lambda1=1.0)
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
        return super(station_40.Station, self).progress(step)

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
