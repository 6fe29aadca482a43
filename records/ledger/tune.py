"""Tuning: scripts are compared at the best values of their settings, all after as many tries."""

import math
import re
import statistics
from dataclasses import dataclass, replace

from ledger.logs import LedgerError
from ledger.pages import table
from ledger.run import Contestant, run_all

SEEDS = 1000, 1001  # of every try; `run` compares on others, from 0 on
MOST = 8  # values that are added while somebody's best one is at an end
TUNED = ("Contestant", "Setting", "Best", "Mean loss by value")


@dataclass
class Search:
    """A contestant at its best values so far, and the loss at each value of a setting."""

    one: Contestant
    tried: dict[str, dict[float, float]]

    def at(self, name: str, value: float) -> Contestant:
        return replace(self.one, flags=self.one.flags | {name: f"{value:g}"}, logs=[])


def best_of(tried: dict) -> float:
    return min(tried, key=tried.get)


def is_at_end(tried: dict) -> bool:
    return best_of(tried) in (min(tried), max(tried))


def next_value(tried: dict, own: float) -> float:
    """Half the least value or twice the largest one, whichever is nearer to the best."""
    if not tried:
        return own
    best, low, high = best_of(tried), min(tried), max(tried)
    return low / 2 if best / low <= high / best else high * 2


def search_of(one: Contestant, names: list) -> Search:
    """What can be tuned of a contestant. Raises LedgerError where nothing can."""
    own = [name for name in names if name in one.settings]
    if not own:
        raise LedgerError(f"{one.operand} has none of the settings {', '.join(names)}")
    for name in own:
        if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", one.settings[name]):
            raise LedgerError(f"{one.operand}: {name} is {one.settings[name]!r}, no number")
    return Search(one, {name: {} for name in own})


def tune(contestants: list, names: list, args) -> tuple:
    """(the contestants at their best values, what was tried as a table). Raises LedgerError.

    Settings are tuned one after another. Who has fewer of them tries more values of the last one.
    """
    searches = [search_of(one, names) for one in contestants]
    for name in names:
        if not any(name in search.tried for search in searches):
            raise LedgerError(f"--tune {name}: no script has this setting")
    for place in range(max(len(search.tried) for search in searches)):
        now = [(search, list(search.tried)[: place + 1][-1]) for search in searches]
        count = args.values
        for _ in range(MOST + 1):
            tries = []
            for _ in range(count):
                for search, name in now:
                    tried = search.tried[name]
                    value = next_value(tried, float(search.one.settings[name]))
                    tried[value] = math.inf  # until it has run
                    tries.append((tried, value, search.at(name, value)))
            run_all([one for *_, one in tries], SEEDS, args, may_diverge=True)
            for tried, value, one in tries:
                tried[value] = statistics.fmean(log.val_loss for log in one.logs)
            if not any(is_at_end(search.tried[name]) for search, name in now):
                break
            count = 1
        for search, name in now:
            search.one = search.at(name, best_of(search.tried[name]))
    rows = []
    for search in searches:
        for name, tried in search.tried.items():
            words = [f"{value:g}: {tried[value]:.4f}" for value in sorted(tried)]
            best = f"{best_of(tried):g}" + " (at an end)" * is_at_end(tried)
            rows.append([search.one.place, name, best, ", ".join(words)])
    return [search.one for search in searches], table(TUNED, rows)
