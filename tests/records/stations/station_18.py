"""#18 SoftCap: documents in one sequence, a growing window, value embeddings, capped logits."""

import numpy as np
import torch
from stations import station_8


class Station(station_8.Station):
    parameters = 275_742_772
    num_iterations = 1390
    streams = 8
    seq_lens = (65_536,)
    val_seq_len = 65_536
    window_tokens = 1856
    rope_base = 1024
    attention_pattern = "LLLLLLL.LLLL"
    value_embed_pattern = "012......012"
    skips = ((6, 5), (7, 4), (8, 3), (9, 2), (10, 1), (11, 0))
    bf16 = frozenset({"embed", "value_embeds"})
    scalars = station_8.Station.scalars | dict(lambda0=0.5)
    normal = {"embed": 1.0, "value_embeds": 1.0}
    adam = {"embed": 75, "value_embeds": 75, "lm_head": 1, "scalars": 5}
    adam_betas = (0.8, 0.95)
    muon_lr = 0.05
    cooldown_frac = 0.4
    momentum = (0.85, 0.95)

    def settings(self):
        first = self.layers()[0]
        return super().settings() | dict(
            sequences_per_forward=1, attention_pattern=self.attention_pattern[first:],
            value_embed_pattern=self.value_embed_pattern[first:],
            embed_lr=self.adam_lr * self.adam["value_embeds"])

    def long_window(self, step):
        """In blocks, from one on, rounded down."""
        N = self.num_iterations
        grown = self.window_tokens * step + self.block * (N - step)
        return max(1, grown // (N * self.block))

    def training_windows(self, step):
        long = self.long_window(step)
        return long, max(1, long // 2)

    def rotary(self, step):
        """The second half of the pairs does not turn."""
        turning = (self.qk_dim or self.head_dim) // 4
        frequencies = [self.rope_base ** (-j / (turning - 1)) for j in range(turning)]
        return frequencies + [0.0] * turning, self.attention_scale or self.head_dim**-0.5

    def near(self, i, j, window):
        """By the numbers of blocks."""
        return i // self.block - j // self.block < window

    def mask(self, documents, window):
        i, j = np.indices((len(documents), len(documents)))
        seen = (j <= i) & (documents[i] == documents[j])
        return torch.from_numpy(seen & self.near(i, j, window))

    def parameter_shapes(self):
        shapes = super().parameter_shapes()
        for name in self.scalars:
            shapes[name] = (len(self.attention_pattern),)
        for table in sorted(set(self.value_embed_pattern) - {"."}):
            shapes[f"value_embeds.{table}.weight"] = (self.table_rows, self.model_dim)
        return shapes

    def capped(self, z):
        return 15 * torch.tanh(z / 15)

    def nesterov(self, grad, state, momentum):
        """A mean."""
        state["mean"] = state["mean"] + (1 - momentum) * (grad - state["mean"])
        return grad + momentum * (state["mean"] - grad)
