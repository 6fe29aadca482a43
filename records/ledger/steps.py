"""Steps to a loss, and the rule of the second ladder: the first step at which all runs pass."""

import contextlib
import math
import statistics
from pathlib import Path

from ledger.logs import LedgerError, read_folder, read_log

# Of (target − mean)·√n: p < 0.001 by a one-sided z-test where runs have σ 0.0013; less rounding.
MARGIN = 0.004 - 1e-9


def distinct(runs: list) -> list:
    """Runs without those whose losses are a part of another's, which are copies."""
    found = []
    for run in sorted(runs, key=lambda run: -len(run["val_loss"])):
        losses = run["val_loss"].items()
        if not any(losses <= other["val_loss"].items() for other in found):
            found.append(run)
    return found


def first_pass(curves: list, target: float) -> tuple:
    """(step, mean, margin) where the mean of runs passes first; where none does, at the last step.

    It is a step at which each run was validated: none is left out, also if it was stopped.
    """
    found = 0, math.nan, math.nan
    for step in sorted(set.intersection(*map(set, curves))):
        mean = statistics.fmean(curve[step] for curve in curves)
        found = step, mean, (target - mean) * math.sqrt(len(curves))
        if found[-1] >= MARGIN:
            break
    return found


def steps_to(curve: dict, target: float) -> float | None:
    """The step at which a run reaches a loss, on a straight line between two validations."""
    before = None
    for step, loss in sorted(curve.items()):
        if loss <= target:
            if before is None:
                return step
            return step - (step - before[0]) * (target - loss) / (before[1] - loss)
        before = step, loss
    return None


def reached_by_all(curves: list) -> float:
    """The least loss that each run reaches."""
    return max(min(curve.values()) for curve in curves)


def steps_words(curves: list, target: float) -> str:
    """The mean number of steps to a loss, and its interval; or how many runs reach it.

    Nothing where the runs were validated at their end alone.
    """
    if max(map(len, curves)) < 2:
        return ""
    steps = [steps_to(curve, target) for curve in curves]
    reached = len(steps) - steps.count(None)
    if reached < len(curves):
        return f"{reached} of {len(curves)} runs reach it"
    words = f"{statistics.fmean(steps):,.1f}"
    with contextlib.suppress(ImportError, statistics.StatisticsError):  # no scipy; one run
        error = statistics.stdev(steps) / math.sqrt(len(steps))
        from scipy import stats  # a second, which other verbs do not wait for

        words += f" ± {stats.t.ppf(0.975, len(steps) - 1) * error:.1f}"
    return words


def judge(place: Path, preset: str, target: float) -> list:
    """Lines on each loss of a log's or a folder's runs; of ours, those of a preset count.

    Raises LedgerError.
    """
    logs, lines = read_folder(place) if place.is_dir() else ([read_log(place)], [])
    logs = [log for log in logs if log.header.get("preset", preset) == preset]
    runs = distinct([run for log in logs for run in log.runs])
    if not runs:
        raise LedgerError(f"{place} has no run of the preset {preset} that was validated")
    for name in runs[0]:
        curves = [run.get(name, {}) for run in runs]
        step, mean, margin = first_pass(curves, target)
        verb = "passes" if margin >= MARGIN else "does not pass up to"
        lines.append(f"{place.name}, {name}, n = {len(runs)}: {verb} step {step:,}, where the mean"
                     f" is {mean:.5f}; steps to {target:g}: {steps_words(curves, target)}")
    return lines
