"""#19 Fp8LmHead: 8-bit floats in the head."""

import torch
from stations import station_18


class Station(station_18.Station):
    parameters = 275_598_388
    num_iterations = 1395
    window_tokens = 1728
    table_rows = 50_257
    fp8_divisors = (0.5, 2.0**-5, 2.0**-29)
    uniform = {"qkvo_w": 0.5, "c_fc": 0.5}
    final_lr_frac = 0.1

    def long_window(self, step):
        """From 0 on, rounded up."""
        return max(1, -(-self.window_tokens * step // (self.num_iterations * self.block)))

    def capped(self, z):
        return 30 * torch.sigmoid(z / 7.5)
