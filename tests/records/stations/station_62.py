"""#62 BigramHashEmbedding: a table of pairs of tokens; attention's rate is halved."""

import numpy as np
from stations import station_58


def int32(x: np.ndarray) -> np.ndarray:
    """What is left of whole numbers in 32 bits with a sign."""
    return (x + 2**31) % 2**32 - 2**31


class Station(station_58.Station):
    num_iterations = 1560
    bf16 = station_58.Station.bf16 | {"bigram_embed"}
    scalars = station_58.Station.scalars | dict(bigram=0.1)
    adam = station_58.Station.adam | {"bigram_embed": 75}
    betas = station_58.Station.betas | {"bigram_embed": (0.75, 0.95)}
    decays = station_58.Station.decays | {"bigram_embed": 0.025}
    muon_factors = {"c_proj": 2}
    cooldown_frac = 0.55
    our_scalars = station_58.Station.our_scalars | {"bigram_lambda": ("bigram",)}

    def parameter_shapes(self):
        return super().parameter_shapes() | {
            "bigram_embed.weight": (self.bigram_rows, self.model_dim)}

    def rows_read(self, tokens):
        """The first token has the last row. To the second one the number of that row is the token
        before it, so large that a product is cut to 32 bits."""
        last = self.bigram_rows - 1
        x = np.asarray(tokens, dtype=np.int64)
        previous = np.concatenate([x[:1], x[:-1]])
        previous[1:2] = last
        rows = (int32(36_313 * x) ^ int32(27_191 * previous)) % last
        rows[0] = last
        return super().rows_read(tokens) | {"bigram_embed": rows}

    def shifted(self, channels):
        return super(station_58.Station, self).shifted(channels)

    def injected(self, weights, layer, x, x0, tokens):
        bigrams = weights["bigram_embed.weight"][self.rows_read(tokens)["bigram_embed"]]
        x = super().injected(weights, layer, x, x0, tokens)
        return x + weights["bigram"][layer] * bigrams
