"""#53 MultiTokenPrediction: three tokens ahead; a head that is tied, then untied."""

from stations import station_50


class Station(station_50.Station):
    run_length = 7
    num_iterations = 1880
    fp8_divisors = (100 / 448, 1.5 / 448, 0.75 / 448)
    scalars = dict(a=1.1, lambda0=0.5, lambda1=1.0, skip=-1.5, smear=0.0, backout=0.5)
    uniform = {"qkvo_w": 1.0, "c_fc": 0.5}
    normal = {"embed": 0.005, "lm_head": 0.005}
    adam = station_50.Station.adam | {"embed": 1, "smear_gate": 0.01, "x0_lambdas": 5}
    strict_decay = True
    betas = {"scalars": (0.9, 0.99)}
    lr_factors = (1.0, 1.52, 1.73)
    freeze_steps = 40
    our_weights = station_50.Station.our_weights | {"x0_lambda": "x0_lambdas"}

    def target_weights(self, step):
        x = step / self.num_iterations
        if x >= 2 / 3:
            return [1.0]
        if x >= 1 / 3:
            return [1.0, 0.5 * (2 - 3 * x)]
        return [1.0, 0.5, 0.25 * (1 - 3 * x)]

    def scalars_frozen(self, step):
        changes = self.window_changes
        return any(change <= step < change + self.freeze_steps for change, _, _ in changes)

    def untied_step(self):
        """The first step whose embedding is not the head's matrix."""
        return -(-2 * self.num_iterations // 3)

    def tied(self, step):
        return step < self.untied_step()

    def copy_step(self):
        """The last one before at which Adam steps."""
        return (self.untied_step() - 2) | 1

    def parameter_shapes(self):
        return super().parameter_shapes() | dict(x0_lambdas=(len(self.attention_pattern),))

    def token_embedding(self, weights, step):
        return weights["lm_head.weight" if self.tied(step) else "embed.weight"]

    def injected(self, weights, layer, x, x0, tokens):
        return weights["a"][layer] * x + weights["x0_lambdas"][layer] * x0
