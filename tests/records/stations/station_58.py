"""#58 PairedHeadAttention: two heads share a softmax, in a sequence of twice the tokens."""

import math

import numpy as np
import torch
from lineage_oracles import turned
from stations import station_57


def woven(first, second):
    """(2T, K) of two (T, K), row by row in turns."""
    return torch.stack([first, second], dim=1).flatten(0, 1)


class Station(station_57.Station):
    number = 58
    published = dict(
        steps=1775, tokens=470.417408, windows=[579, 1157, 1735], at_last=(20, 6),
        shorts={3: 1, 7: 3, 11: 5, 13: 6}, jumps=[579, 1157], falls=868, peak=1.52,
        rates={867: 1.52, 868: 1.519182, 1156: 1.047758, 1157: 1.186040, 1734: 0.101879},
        momentum_falls=1725, tied=(1158, 1157), scalars=40, multipliers=(2, 2, 4),
        target_weights={578: [1.0, 0.5, 1.441e-4], 579: [1.0, 0.499424]})
    run_lengths = (7,)
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
        frequencies, scale = self.rotary(step)
        token, half = torch.arange(len(q[0])), len(q) // 2

        def turned_head(x, head):
            return turned(self.norm(x[head]), 2 * token + head % 2, frequencies)

        outputs = {}
        for first in range(half):
            pair = first, first + half
            q_pair = woven(*(turned_head(q, head) for head in pair))
            k_pair = woven(*(turned_head(k, head) for head in pair))
            scores = (scale * q_pair @ k_pair.T).masked_fill(~seen, -math.inf)
            y = scores.softmax(-1) @ woven(*(v[head] for head in pair))
            outputs[first], outputs[first + half] = y[0::2], y[1::2]
        return [outputs[head] for head in range(len(q))]

    def shifted(self, channels):
        """The slow half of those that turn, and half of those that do not: an accident of this
        record, whose channels have another order."""
        return channels // (self.head_dim // 8) % 2 == 1
