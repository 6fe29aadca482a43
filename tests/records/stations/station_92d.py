"""The fourth of seven steps to #92: five stages, 1,194 steps. It has no public number.

Rates fall over four fifths of it. Documents are longer, but attention is cut within them. Head and
embedding part at the end, the prefixes' weight falls in steps. Tables are stepped at events, fewer
later on; that of bigrams is one of them, as in the public #349.
"""

from typing import NamedTuple

import numpy as np
from lineage_oracles import kind_of
from stations import station_92c


class Stage(NamedTuple):
    end: int  # its first step that is the next one's
    seq_len: int  # tokens of a stream
    max_document: int
    long: int  # windows, in blocks
    short: int
    peak: float  # what the rates fall from


class Station(station_92c.Station):
    run_length = 24
    tiny = station_92c.Station.tiny | dict(
        period_from=8, attention_cut=20, blend_from=15, stage_rows=(
            Stage(6, 16, 12, 2, 1, 1.0), Stage(12, 32, 20, 4, 2, 1.52),
            Stage(21, 48, 24, 6, 3, 1.73), Stage(24, 40, 24, 6, 3, 1.6),
            Stage(26, 16, 24, 8, 4, 1.0)))
    num_iterations = 1174
    extension = 20
    stage_rows = (
        Stage(320, 16_384, 896, 3, 1, 1.0), Stage(681, 32_768, 2048, 7, 3, 1.52),
        Stage(1107, 49_152, 3072, 11, 5, 1.73),
        Stage(1174, 40_960, 3072, 11, 5, 1.73 * (20 / 24) ** 0.5),
        Stage(1194, 16_384, 3072, 13, 6, 1.0))
    attention_cut = 2560  # tokens of a document that see each other, from the third stage on
    longest = None  # the same, while a training step is computed
    cooldown_frac = 0.80
    lr_factors = None  # stage_rows have them
    last_rate = 0.30
    prefix_weights = (0.20, 0.15, 0.10, 0.05)  # in the quarters of the second stage
    period_from = 336  # the step from which an event is one step of four
    tables = ("value_embeds", "bigram_embed")
    adam = station_92c.Station.adam | {"value_embeds": 70, "bigram_embed": 70}

    def document_limit(self, step):
        return self.stage_rows[self.stage(step)].max_document

    def stage(self, step):
        return min(sum(step >= row.end for row in self.stage_rows), 4)

    def within(self, step):
        """The share of its stage that is done before a step."""
        stage = self.stage(step)
        begin = self.stage_rows[stage - 1].end if stage else 0
        return (step - begin) / (self.stage_rows[stage].end - begin)

    def seq_len(self, step):
        return self.stage_rows[self.stage(step)].seq_len

    def long_window(self, step):
        return self.stage_rows[self.stage(step)].long

    def training_windows(self, step):
        return self.long_window(step), self.stage_rows[self.stage(step)].short

    def rate_factor(self, step):
        """From a peak of the stage to an end that is the same for all."""
        N, peak = self.num_iterations, self.stage_rows[self.stage(step)].peak
        begins = int(N * (1 - self.cooldown_frac))
        fallen = min(1.0, max(0, step - begins) / (N - begins))
        return peak * (1 - fallen) + self.last_rate * fallen

    def target_weights(self, step):
        stage, left = self.stage(step), 1 - self.within(step)
        return ([1.0, 0.5, 0.25 * left], [1.0, 0.5 * left], [1.0], [1.0], [1.0])[stage]

    def prefix_weight(self, step):
        if self.stage(step) == 1:
            return self.prefix_weights[int(4 * self.within(step))]
        return 0.25 if self.stage(step) == 0 else 0.0

    def untied_step(self):
        return (self.num_iterations | 1) + 1

    def event(self, step):
        """Whether the tables are stepped, by the sum of all gradients since the last event."""
        return step % (2 if step < self.period_from else 4) == (1 if step < self.period_from else 3)

    def due(self, name, step):
        return self.event(step) if kind_of(name) in self.tables else self.adam_steps(step)

    def complete(self, step):
        return self.event(step - 1)

    def training_logits(self, weights, stream, step):
        self.longest = self.attention_cut if self.stage(step) >= 2 else None
        z = super().training_logits(weights, stream, step)
        self.longest = None
        return z

    def documents(self, inputs):
        """Counted from a document's first token in the stream. Nothing but attention is cut."""
        numbers, number, length = [], 0, 0
        for token in inputs:
            if token == self.eot_token or length == self.longest:
                number, length = number + 1, 0
            numbers.append(number)
            length += 1
        return np.array(numbers)

    def powers(self, kind, step):
        """Tables that wait for four steps forget and decay as in two steps of before."""
        return 2 if kind in self.tables and step >= self.period_from else 1

    def betas_at(self, kind, step):
        return tuple(beta ** self.powers(kind, step) for beta in super().betas_at(kind, step))

    def decay_at(self, kind, step):
        return self.powers(kind, step) * super().decay_at(kind, step)
