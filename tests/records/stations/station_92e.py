"""The fifth of seven steps to #92: before the last validation, averages over the last steps are
written into the weights. It has no public number."""

from lineage_oracles import kind_of
from stations import station_92d

BANKS = dict(  # kinds of weights whose size is kept, together
    embed=["embed"], head=["lm_head"], mlp=["c_fc", "c_proj"], qk=["qk_w"], vo=["vo_w"])
KINDS = dict(  # of weights, by their averages
    ends=["embed", "lm_head"], late=["vo_w", "c_fc", "c_proj"],
    banks=["qk_w", "vo_w", "c_fc", "c_proj"], tables=["value_embeds"])


class Station(station_92d.Station):
    tiny = station_92d.Station.tiny | dict(average_steps=18, late_steps=14)
    average_steps = 298  # the last ones
    late_steps = 250
    ends_rate = 2 / 299  # of a step
    banks_rate = 2 / 75
    late_rate = 4 / 53  # of the tables, too
    unused_square = 0.0  # of a matrix that no layer uses, but which counts in the MLPs' norm

    def ticks(self, step):
        """{average: rate} of those that take the weights after a step. The first one copies."""
        end, found = self.total_steps(), {}
        first, late = end - self.average_steps, end - self.late_steps
        if step == first or (step > first and step % 2 == 1):
            steps = 1 if step == end - 1 else 2
            found["ends"] = 1 - (1 - self.ends_rate) ** steps
        if step >= late and (end - 1 - step) % 4 == 0:
            found["late"] = self.late_rate
        if step >= first and (step % 4 == 1 or step == end - 2):
            found["banks"] = self.banks_rate
        if step >= late and self.event(step):
            found["tables"] = self.late_rate
        return found

    def optimizer_state(self, weights):
        return super().optimizer_state(weights) | {"averages": {}}

    def optimizer_step(self, weights, grads, state, step):
        super().optimizer_step(weights, grads, state, step)
        for average, rate in self.ticks(step).items():
            for name, p in weights.items():
                if kind_of(name) in KINDS[average]:
                    if name == "embed.weight" and self.tied(step):
                        p = weights["lm_head.weight"]
                    a = state["averages"].get((average, name), p)
                    state["averages"][average, name] = a + rate * (p - a)

    def norms(self, weights):
        found = {}
        for bank, kinds in BANKS.items():
            squares = [(p**2).sum() for name, p in weights.items() if kind_of(name) in kinds]
            found[bank] = (sum(squares) + self.unused_square * (bank == "mlp")) ** 0.5
        return found

    def finish(self, weights, state):
        averages, before = state["averages"], self.norms(weights)
        for name, p in weights.items():
            kind = kind_of(name)
            if kind in KINDS["ends"]:
                p += 0.65 * (averages["ends", name] - p)
            if kind == "value_embeds":
                p.copy_(averages["tables", name])
            if kind == "qk_w":
                p += 0.55 * (averages["banks", name] - p)
            if kind in KINDS["late"]:
                late = averages["late", name]
                p.copy_(late + (0.55 - 0.2007) * (averages["banks", name] - late))
        after = self.norms(weights)
        for name, p in weights.items():
            for bank, kinds in BANKS.items():
                if kind_of(name) in kinds:
                    p *= before[bank] / after[bank]
