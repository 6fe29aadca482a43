"""#8 UntieEmbed: embedding and head are two matrices, the embedding is normed."""

from stations import station_5


class Station(station_5.Station):
    parameters = 162_201_600
    num_iterations = 4578
    uniform = {"qkvo_w": 3**-0.5, "c_fc": 3**-0.5}
    normal = {"embed": 1.0}
    adam = {"embed": 37.5, "lm_head": 0.25}
    muon_lr = 0.02
    cooldown_frac = 1308 / 4578

    def settings(self):
        return super().settings() | dict(head_lr=self.adam_lr * self.adam["lm_head"])

    def parameter_shapes(self):
        return super().parameter_shapes() | {"lm_head.weight": (self.vocab_size, self.model_dim)}

    def embedded(self, weights, tokens, step):
        return self.norm(super().embedded(weights, tokens, step))

    def shape_factor(self, rows, columns):
        return max(1, rows / columns) ** 0.5
