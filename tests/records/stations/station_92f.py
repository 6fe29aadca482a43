"""The sixth of seven steps to #92: until the batch gets smaller again, a stream's softmax is over
its targets and some other classes, by a sweep. It has no public number."""

from stations import station_92e


class Station(station_92e.Station):
    tiny = station_92e.Station.tiny | dict(
        sweep_stride=107, sweep_margin=0, classes=((64,), (80,), (72, 72, 96), (), ()))
    classes = ((10_240,), (10_240,), (14_336, 14_336, 24_576), (), ())  # a stream's, by stage
    sweep_stride = 20_011  # has no divisor in common with the number of all classes
    sweep_margin = 256
    offsets = None  # of the sweeps, a stream each

    def optimizer_state(self, weights):
        self.offsets = [self.vocab_size * r // self.streams for r in range(self.streams)]
        return super().optimizer_state(weights)

    def num_classes(self, step):
        """Of a stream in a step, or None: all."""
        counts = self.classes[self.stage(step)]
        return counts[int(len(counts) * self.within(step))] if counts else None

    def candidates(self, targets, offset, wanted):
        """The classes of a stream, ascending, and the sweep's next offset."""
        V, chosen = self.vocab_size, {int(target) for target in targets}
        need = wanted - len(chosen)
        assert need >= 0, "more targets than classes"
        if need == 0:
            return sorted(chosen), offset
        drawn = min(V, int(1.7 * need) + self.sweep_margin)
        swept = [self.sweep_stride * k % V for k in range(offset, offset + drawn)]
        others = [x for x in swept if x not in chosen][:need]
        if len(others) < need:  # too few: the sweep is not used, but moves on
            free = [x for x in range(V) if x not in chosen]
            others = free[:: max(1, len(free) // need)][:need]
        return sorted(chosen.union(others)), (offset + drawn) % V

    def step_loss(self, weights, streams, step):
        wanted = self.num_classes(step)
        if wanted is None:
            return super().step_loss(weights, streams, step)
        total = 0.0
        for r, stream in enumerate(streams):
            C, self.offsets[r] = self.candidates(stream.targets, self.offsets[r], wanted)
            total = total + self.sampled_loss(weights, stream, C, step)
        return total / len(streams)

    def sampled_loss(self, weights, stream, C, step):
        """Token by token. A prefix that is not among the classes has no part in it."""
        z = self.training_logits(weights, stream, step)
        length, total, chosen = len(z), 0.0, set(C)
        for t in range(length):
            log_sum = z[t, C].logsumexp(0)
            for ahead, weight in enumerate(self.target_weights(step)):
                if t + ahead < length:
                    total = total + weight * (log_sum - z[t, stream.targets[t + ahead]])
            prefix = self.prefixes[stream.targets[t]]
            if prefix in chosen:
                total = total + self.prefix_weight(step) * (log_sum - z[t, prefix])
        return total
