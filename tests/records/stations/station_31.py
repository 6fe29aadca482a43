"""#31 Yarn: windows grow in stages, and the rotary embedding with them; documents are packed."""

import itertools
import math
from functools import cached_property

from lineage_oracles import packed_streams
from stations import station_28


def yarn(frequencies: list[float], block: int, before: int, after: int) -> list[float]:
    """Frequencies after the window has gone from `before` to `after` blocks: kept from 32 turns in
    the old window on, times the ratio of the windows up to one turn, interpolated between."""
    changed = []
    for frequency in frequencies:
        turns = block * before * frequency / (2 * math.pi)
        kept = min(max((turns - 1) / (32 - 1), 0.0), 1.0)
        ratio = before / after
        changed.append(frequency * (ratio + kept * (1 - ratio)))
    return changed


class Station(station_28.Station):
    num_iterations = 1670
    attention_scale = 0.1
    mlp_pattern = ".MMMMMMMMMMM"
    cooldown_frac = 0.5

    def settings(self):
        shorts = tuple(max(1, window // 2) for window in self.windows)
        return super().settings() | dict(
            long_windows=self.windows, short_windows=shorts, max_document_tokens=self.max_document)

    def document_limit(self, step):
        return self.max_document

    def streams_of_steps(self, shards, steps):
        lengths, limits = [], []
        for step in steps:
            lengths.append(self.seq_len(step))
            limits.append(self.document_limit(step))
        return packed_streams(shards, lengths, self.streams, self.eot_token, limits)

    def stage(self, step):
        """0, 1 or 2, the third of the schedule that a training step is in; 3 after it (#43 on)."""
        return int(3 * step / (self.num_iterations + 1))

    def long_window(self, step):
        """What drives YaRN, in blocks. At the end: before validation."""
        return self.windows[-1 if step == self.total_steps() else self.stage(step)]

    def validation_windows(self, step):
        long, short = self.training_windows(step)
        return self.final_window if step == self.total_steps() else long, short

    @cached_property
    def window_changes(self):
        """(step, window before, window from then on) of each change of the long window."""
        windows = [self.long_window(step) for step in range(self.total_steps() + 1)]
        pairs = enumerate(itertools.pairwise(windows), 1)
        return [(step, before, after) for step, (before, after) in pairs if before != after]

    def rotary(self, step):
        """It follows each change of the long window: YaRN, https://arxiv.org/abs/2309.00071."""
        frequencies, scale = super().rotary(step)
        for change, before, after in self.window_changes:
            if change <= step:
                frequencies = yarn(frequencies, self.block, before, after)
                scale *= 1 + 0.2 * math.log(after / before)
        return frequencies, scale

    def near(self, i, j, window):
        """By tokens, inclusive."""
        return i - j <= self.block * window
