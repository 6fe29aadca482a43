"""#58 PairedHeadAttention: two heads share a softmax, in a sequence of twice the tokens."""

import math

import numpy as np
import torch
from lineage_oracles import turned
from stations import station_57


def woven(x):
    """(H / 2, 2T, K) of heads (H, T, K): those of both halves, token by token in turns."""
    first, second = x.chunk(2)
    return torch.stack([first, second], dim=2).flatten(1, 2)


class Station(station_57.Station):
    tiny = dict(model_dim=48, head_dim=8)  # of two or four heads all angles would be in step
    num_iterations = 1735
    attention_pattern = "PSPLSP.SSPL"  # P: short, of paired heads

    def masks(self, documents, windows):
        paired = self.mask(np.repeat(documents, 2), windows[1])  # of as many positions
        return super().masks(documents, windows) | {"P": paired}

    def heads(self, layer, q, k, v, seen, step):
        """Head b and head b + H / 2 of a token are positions 2t and 2t + 1 of one sequence. A head
        turns by 2t + its number's parity, so the first one of (1, 4) by 2t + 1."""
        if self.attention_pattern[layer] != "P":
            return super().heads(layer, q, k, v, seen, step)
        frequencies, scale = self.rotary_of(layer, step)
        parity = torch.arange(q.size(0)) % 2
        positions = 2 * torch.arange(q.size(1)) + parity[:, None]
        q = woven(turned(self.norm(q), positions, frequencies))
        k = woven(turned(self.norm(k), positions, frequencies))
        scores = (scale * q @ k.mT).masked_fill(~seen, -math.inf)
        y = scores.softmax(-1) @ woven(v)
        return torch.cat([y[:, 0::2], y[:, 1::2]])

    def shifted(self, channels):
        """The slow half of those that turn, and half of those that do not: an accident of this
        record, whose channels have another order."""
        return channels // (self.head_dim // 8) % 2 == 1
