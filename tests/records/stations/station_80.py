"""#80 PairedHeadMuon: queries and keys are orthogonalised by pairs of heads; moments of a wide
matrix are by column, and shorter (#78)."""

from stations import station_77


class Station(station_77.Station):
    published = station_77.Station.published | dict(
        steps=1480, tokens=393.216, windows=[480, 960, 1440], jumps=[480, 960], falls=577,
        rates={577: 1.518414, 959: 0.912697, 960: 1.027778, 1439: 0.151829},
        momentum_falls=1430, tied=(962, 961), adam_steps=(740, 481),
        fading={479: 5.208e-4, 959: 1.0417e-3})
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

    def projected(self, weights, layer, u, value_embed):
        bank = weights[f"blocks.{layer}.attn.qk_w"].flatten(0, 1)
        W_Q, W_K = bank.chunk(2)
        W_V, W_O = weights[f"blocks.{layer}.attn.vo_w"]
        lambda0 = weights["lambda0"][layer]
        q, k, v = (u @ (lambda0 * W).T for W in (W_Q, W_K, W_V))
        if value_embed is not None:
            v = self.with_values(weights, layer, u, v, value_embed)
        return q, k, v, weights["lambda1"][layer] * W_O

    def moments_axis(self, U):
        """One for each column where rows are fewer, else for each row."""
        return -2 if U.size(-2) < U.size(-1) else -1
