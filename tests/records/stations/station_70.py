"""#70 VeTuned: five value tables, whose gates see them; first values of V, O and the tables;
stages with rounded borders. That the linked log doubles all gradients is left out."""

import torch
from stations import station_62


class Station(station_62.Station):
    run_length = 8  # its second border is not that of #62
    num_iterations = 1507
    value_embed_pattern = ".01.....234"
    uniform = {"qkvo_w": 0.5, "c_fc": 0.5}
    draws_output = True
    normal = station_62.Station.normal | {"value_embeds": 0.01}

    def borders(self):
        """Where the stages end."""
        N = self.num_iterations
        return [round(N / 3), round(2 * N / 3), N]

    def stage(self, step):
        return sum(step >= border for border in self.borders())

    def rate_factor(self, step):
        """It falls from a whole step on, and changes where the stages do."""
        N, stage = self.num_iterations, self.stage(step)
        begins = int(N * (1 - self.cooldown_frac))
        fallen = min(1.0, max(0, step - begins) / (N - begins))
        peak = self.lr_factors[stage] if stage < 3 else 1.0
        return peak * (1 - fallen) + self.final_lr_frac * fallen

    def target_weights(self, step):
        stage = self.stage(step)
        if stage > 1:
            return [1.0]
        begin, end = [0, *self.borders()][stage : stage + 2]
        fading = 0.5 ** (2 - stage) * (1 - (step - begin) / (end - begin))
        return [1.0, 0.5, fading] if stage == 0 else [1.0, fading]

    def untied_step(self):
        return (self.borders()[1] | 1) + 1

    def value_gate_input(self, layer, u, value_embed):
        """Of heads that are not paired, half of it is the table's row."""
        if self.attention_pattern[layer] == "P":
            return super().value_gate_input(layer, u, value_embed)
        half = self.gate_inputs // 2
        return torch.cat([u[:, :half], value_embed[:, :half]], dim=1)
