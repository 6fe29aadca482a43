"""Tuning: scripts are compared at the best values of their settings, all after as many tries."""

import math
import statistics
from dataclasses import dataclass, replace

from ledger.logs import LedgerError
from ledger.pages import table
from ledger.run import Contestant, run_all

SEEDS = 1000, 1001  # of every try; `run` compares on others, from 0 on
MOST = 8  # values that are added while somebody's best one is at an end
BATCH = "seq_len", "val_seq_len", "sequences_per_step"  # settings that have to be equal
TUNED = ("Contestant", "Setting", "Best", "Mean loss by value")
TUNED_LEGEND = """\
Best is the lowest point of a parabola through the best value and its two neighbours."""


@dataclass
class Search:
    """A contestant at its best values so far, and the loss at each value of a setting."""

    given: str  # the contestant, as the command names it
    one: Contestant
    tried: dict[str, dict[float, float | None]]  # None: it has not run yet; infinite: it diverged

    def at(self, name: str, value: float) -> Contestant:
        return replace(self.one, flags=self.one.flags | {name: f"{value:g}"}, logs=[])


def best_of(tried: dict) -> float | None:
    """The value with the least loss; None where none has run, or all diverged."""
    losses = {value: loss for value, loss in tried.items() if loss is not None}
    best = min(losses, key=losses.get, default=None)
    return None if best is None or math.isinf(losses[best]) else best


def is_at_end(tried: dict) -> bool:
    return best_of(tried) in (None, min(tried), max(tried))


def next_value(tried: dict, own: float) -> float:
    """Half the least value or twice the largest one, whichever is nearer to the best."""
    if not tried:
        return own
    low, high = min(tried), max(tried)
    best = best_of(tried)
    if best is None:
        best = low if math.inf in tried.values() else own
    return low / 2 if best / low <= high / best else high * 2


def lowest_point(tried: dict) -> float:
    """The value at which a parabola through the best one and its neighbours is lowest.

    It is over the logarithm of values. These are a factor of two apart, which alone could part two
    equal scripts. The best value itself is returned where it is at an end, or beside one that
    diverged.
    """
    best = best_of(tried)
    if is_at_end(tried):
        return best
    values = sorted(tried)
    place = values.index(best)
    left, least, right = (tried[value] for value in values[place - 1 : place + 2])
    curvature = left - 2 * least + right
    if curvature == 0 or math.isinf(curvature):
        return best
    doublings = (left - right) / (2 * curvature)
    return float(f"{best * 2**doublings:.3g}")


def search_of(one: Contestant, names: list) -> Search:
    """What can be tuned of a contestant. Raises LedgerError where nothing can."""
    own = [name for name in names if name in one.settings]
    if not own:
        raise LedgerError(f"{one.operand} has none of the settings {', '.join(names)}")
    for name in own:
        try:
            usable = 0 < float(one.settings[name]) < math.inf
        except ValueError:
            usable = False
        if not usable:
            raise LedgerError(f"{one.operand}: {name} is {one.settings[name]!r}; what is tuned has "
                              "to begin at a number above 0")
    return Search(one.operand, one, {name: {} for name in own})


def tune(contestants: list, names: list, args) -> tuple:
    """(the contestants at their best values, what was tried as text). Raises LedgerError.

    Settings are tuned one after another. Who has fewer of them tries more values of the last one.
    """
    for one in contestants:
        for name in BATCH:
            ours, first = one.settings.get(name), contestants[0].settings.get(name)
            if ours != first:
                raise LedgerError(f"{one.operand} has {name} {ours}, {contestants[0].operand} has "
                                  f"{first}; give them the same")
    searches = [search_of(one, names) for one in contestants]
    for name in names:
        if not any(name in search.tried for search in searches):
            raise LedgerError(f"--tune {name}: no script has this setting")
    for place in range(max(len(search.tried) for search in searches)):
        now = []
        for search in searches:
            own = list(search.tried)
            now.append((search, own[min(place, len(own) - 1)]))
        count = args.values
        for _ in range(MOST + 1):
            try_values(now, count, args)
            if not any(is_at_end(search.tried[name]) for search, name in now):
                break
            count = 1
        for search, name in now:
            tried = search.tried[name]
            if best_of(tried) is None:
                raise LedgerError(f"{search.given} diverges at all {len(tried)} values of {name}, "
                                  f"{min(tried):g} to {max(tried):g}")
            search.one = search.at(name, lowest_point(tried))
    return [search.one for search in searches], tuned_words(searches, names)


def try_values(now: list, count: int, args):
    """Run `count` more values of a setting of each contestant."""
    tries = []
    for _ in range(count):
        for search, name in now:
            tried = search.tried[name]
            value = next_value(tried, float(search.one.settings[name]))
            tried[value] = None
            tries.append((tried, value, search.at(name, value)))
    run_all([one for *_, one in tries], SEEDS, args, "tuning")
    for tried, value, one in tries:
        tried[value] = statistics.fmean(log.val_loss for log in one.logs)


def tuned_words(searches: list, names: list) -> str:
    """What was tried, as a table, and who lacks a setting."""
    rows, lacking = [], []
    for search in searches:
        for name, tried in search.tried.items():
            best = f"{lowest_point(tried):g}"
            if is_at_end(tried):
                best += " (at an end)"
            words = [f"{value:g}: {tried[value]:.4f}".replace("inf", "diverged")
                     for value in sorted(tried)]
            rows.append([search.given, name, best, ", ".join(words)])
        for name in names:
            if name not in search.tried:
                lacking.append(f"{search.given} has no {name}; it got as many tries of the others.")
    return "\n".join([f"{table(TUNED, rows)}\n", TUNED_LEGEND, *lacking])
