"""Steps to a loss, and the rule of the second ladder: the first step at which all runs pass."""

import contextlib
import math
import statistics

MARGIN = 0.004  # for (target − mean)·√n: p < 0.001 by a one-sided z-test, of runs with σ 0.0013


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
        if found[-1] > MARGIN - 1e-9:  # by rounding
            break
    return found


def steps_to(curve: dict, target: float) -> float | None:
    """The step at which a run reaches a loss, on a straight line between two validations."""
    before = None
    for step, loss in sorted(curve.items()):
        if loss <= target:
            return before and step - (step - before[0]) * (target - loss) / (before[1] - loss)
        before = step, loss
    return None


def steps_words(curves: list, target: float) -> str:
    """The mean number of steps to a loss, with its interval, or how many runs reach it.

    Nothing of runs that were validated at their end alone.
    """
    if max(map(len, curves)) == 1:
        return ""
    steps = [step for curve in curves if (step := steps_to(curve, target))]
    if len(steps) < len(curves):
        return f"{len(steps)} of {len(curves)} reach it"
    words = f"{statistics.fmean(steps):,.1f}"
    with contextlib.suppress(ImportError, statistics.StatisticsError):  # no scipy; one run
        error = statistics.stdev(steps) / math.sqrt(len(steps))
        from scipy import stats  # a second, which other verbs do not wait for

        words += f" ± {stats.t.ppf(0.975, len(steps) - 1) * error:.1f}"
    return words
