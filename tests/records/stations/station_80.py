"""#80 PairedHeadMuon: queries and keys are orthogonalised by pairs of heads; moments of a wide
matrix are by column, and shorter (#78)."""

from stations import station_77


class Station(station_77.Station):
    num_iterations = 1440
    second_beta = 0.9
    uniform = {"qk_w": 0.5, "vo_w": 0.5, "c_fc": 0.5}
    our_weights = station_77.Station.our_weights | {
        r"attn\.(qkv_w|c_.*)": "attn.vo_w", r"attn\.v_w": "attn.vo_w"}

    def block_shapes(self, layer):
        """Of attention: matrices for heads 0 and 1, 2 and 3, ..., of Q and then of K; V and O."""
        shapes = super().block_shapes(layer)
        if "attn.qkvo_w" in shapes:
            shapes.pop("attn.qkvo_w")
            heads = self.model_dim // self.head_dim
            shapes["attn.qk_w"] = heads, 2 * self.head_dim, self.model_dim
            shapes["attn.vo_w"] = 2, self.model_dim, self.model_dim
        return shapes

    def projections(self, weights, layer):
        Q_and_K = weights[f"blocks.{layer}.attn.qk_w"].flatten(0, 1)
        return *Q_and_K.chunk(2), *weights[f"blocks.{layer}.attn.vo_w"]

    def moments_axis(self, U):
        """One for each column where rows are fewer, else for each row."""
        return -2 if U.size(-2) < U.size(-1) else -1
