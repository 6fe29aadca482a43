"""#91 CanonicalMask, on #88: in the last validation a token is not followed by one that GPT-2's
tokenizer would never emit after it."""

import torch
from lineage_oracles import losses
from stations import station_88


class Station(station_88.Station):
    forbidden = None  # (V, V), bool: whether a column's token never comes after a row's

    def validation_loss(self, weights, streams, step):
        """The last one masked. The row is that of the input, not of the target."""
        if step < self.total_steps() or self.forbidden is None:
            return super().validation_loss(weights, streams, step)
        means = []
        for stream in streams:
            z = self.stream_logits(weights, stream, self.validation_windows(step), step)
            for position, token in enumerate(stream.inputs):
                z[position, torch.as_tensor(self.forbidden[token])] = -60.0
            means.append(losses(z, stream.targets).mean())
        return torch.stack(means).mean()

    def unmasked_loss(self, weights, streams, step):
        return super().validation_loss(weights, streams, step)
