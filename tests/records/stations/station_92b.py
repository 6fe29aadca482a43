"""The second of seven steps to #92: the output mixes ten sources, at factors of twelve groups of
channels. It has no public number."""

from stations import station_92a
from stations.station_82 import gelu


class Station(station_92a.Station):
    groups = 12  # of neighbouring channels
    adam = station_92a.Station.adam | {"mudd_w2g": 0.25}
    decays = station_92a.Station.decays | {"mudd_w2g": 0.005}
    our_weights = station_92a.Station.our_weights | {r"output_factors\.groups": "mudd_w2g"}
    # Places of ours: outputs of layers, what the last layer and its MLP see, values of four tables
    our_sources = 0, 1, 2, 6, 3, 7, 9, 8, 5, 4

    @property
    def constant(self):
        before = super().constant
        return before | {"mudd_b2": before["mudd_b2"] + [0.0] * 5}

    def parameter_shapes(self):
        return super().parameter_shapes() | dict(
            mudd_w2=(14 + 10, 64), mudd_b2=(14 + 10,), mudd_w2g=(10, self.groups, 64))

    def mlp_of(self, weights, layer, x):
        """What that of the last layer reads is kept aside."""
        self.last_read = self.norm(x)
        return super().mlp_of(weights, layer, x)

    def left(self, weights, x, x0, tokens, outputs):
        """All factors are made from the stream before. Those of groups have no bias."""
        e1, e2, e8, e10 = (weights[f"value_embeds.{table}.weight"][tokens] for table in range(4))
        sources = (
            self.entered(weights, x0, tokens), outputs[7], outputs[9], e1, outputs[3], e2, e10, e8,
            self.last_read, self.norm(outputs[7]))
        hidden = gelu(x @ weights["mudd_w1"][1].T)
        width = self.model_dim // self.groups
        for k, source in enumerate(sources):
            of_all = hidden @ weights["mudd_w2"][14 + k] + weights["mudd_b2"][14 + k]  # (T,)
            of_groups = hidden @ weights["mudd_w2g"][k].T  # (T, groups)
            factors = of_all[:, None] + of_groups
            x = x + 0.1 * factors.repeat_interleave(width, dim=1) * source
        return x
