"""Tuning: scripts are compared at the best values of their settings, all after as many tries."""

import re
import statistics
from dataclasses import replace

from ledger.logs import LedgerError
from ledger.pages import table
from ledger.run import Contestant, run_all

SEEDS = 1000, 1001  # of every try; `run` compares on others, from 0 on
MOST = 8  # values that are added while somebody's best one is at an end
TUNED = ("Contestant", "Setting", "Best", "Mean loss by value")


def best_of(tried: dict) -> float:
    return min(tried, key=tried.get)


def is_at_end(tried: dict) -> bool:
    return best_of(tried) in (min(tried), max(tried))


def more_values(tried: dict, own: float, count: int) -> list:
    """Values to try next: half the least or twice the largest, whichever is nearer to the best."""
    values, best = list(tried) or [own], best_of(tried) if tried else own
    while len(values) < len(tried) + count:
        low, high = min(values), max(values)
        values.append(low / 2 if best / low <= high / best else high * 2)
    return values[len(tried):]


def with_value(one: Contestant, name: str, value: float) -> Contestant:
    return replace(one, flags=one.flags | {name: f"{value:g}"}, logs=[])


def tune(contestants: list, names: list, args) -> tuple:
    """(the contestants at their best values, what was tried as a table). Raises LedgerError.

    Settings are tuned one after another. Who has fewer of them tries more values of the last one.
    """
    all_tried = [{name: {} for name in names if name in one.settings} for one in contestants]
    for name in names:
        if not any(name in tried for tried in all_tried):
            raise LedgerError(f"--tune {name}: no script has this setting")
    for one, tried in zip(contestants, all_tried):
        if not tried:
            raise LedgerError(f"{one.operand} has none of the settings {', '.join(names)}")
        for name in tried:
            if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", one.settings[name]):
                raise LedgerError(f"{one.operand}: {name} is {one.settings[name]!r}, no number")
    for turn in range(max(map(len, all_tried))):
        now = [list(tried)[: turn + 1][-1] for tried in all_tried]
        count = args.values
        for _ in range(MOST + 1):
            values = [more_values(tried[name], float(one.settings[name]), count)
                      for one, name, tried in zip(contestants, now, all_tried)]
            tries = [(tried[name], value, with_value(one, name, value)) for turn in zip(*values)
                     for one, name, tried, value in zip(contestants, now, all_tried, turn)]
            run_all([one for *_, one in tries], SEEDS, args, may_diverge=True)
            for tried, value, one in tries:
                tried[value] = statistics.fmean(log.val_loss for log in one.logs)
            count = 1  # more, for all
            if not any(is_at_end(tried) for tried, *_ in tries):
                break
        contestants = [with_value(one, name, best_of(tried[name]))
                       for one, name, tried in zip(contestants, now, all_tried)]
    rows = []
    for one, settings in zip(contestants, all_tried):
        for name, tried in settings.items():
            words = [f"{value:g}: {tried[value]:.4f}" for value in sorted(tried)]
            best = f"{best_of(tried):g}" + " (at an end)" * is_at_end(tried)
            rows.append([one.place, name, best, ", ".join(words)])
    return contestants, table(TUNED, rows)
