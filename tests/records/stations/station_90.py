"""#90 NarrowHeads, as submitted: queries and keys have 96 channels, values 128. W_O is stored
transposed, so that NorMuon has a second moment for each of its inputs, not for each output."""

from stations import station_88


class Station(station_88.Station):
    tiny = dict(model_dim=96, head_dim=16, qk_dim=12)
    extension = 45
    qk_dim = 96

    def rotary(self, step):
        """The scale keeps the spread of random scores."""
        frequencies, scale = super().rotary(step)
        return frequencies, scale * (self.head_dim / self.qk_dim) ** 0.5

    def block_shapes(self, layer):
        shapes = super().block_shapes(layer)
        if "attn.qk_w" in shapes:
            heads = self.model_dim // self.head_dim
            shapes["attn.qk_w"] = heads, 2 * self.qk_dim, self.model_dim
        return shapes

    def projections(self, weights, layer):
        W_Q, W_K, W_V, stored = super().projections(weights, layer)
        return W_Q, W_K, W_V, stored.T
