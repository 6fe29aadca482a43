"""Statistics of runs: means, tests, and what a number of seeds can show."""

import statistics

from ledger_base import LedgerError
from ledger_rules import SIGNIFICANCE


def scipy_stats():
    try:
        from scipy import stats
    except ImportError:
        raise LedgerError("p-values need scipy: pip install -r requirements-dev.txt") from None
    return stats


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def std_of(values: list[float]) -> float | None:
    """Standard deviation (n - 1), or None of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def p_below(losses: list[float], target: float) -> float | None:
    """One-sided t-test that the mean lies below `target`, to three digits; None without spread."""
    if not std_of(losses):
        return None
    return three_digits(scipy_stats().ttest_1samp(losses, target, alternative="less").pvalue)


def p_welch(a: list[float], b: list[float]) -> float | None:
    """Welch's two-sided t-test that two means differ, to three digits; None without spread."""
    if min(len(a), len(b)) < 2 or std_of(a) == std_of(b) == 0:
        return None
    return three_digits(scipy_stats().ttest_ind(a, b, equal_var=False).pvalue)


def p_paired(differences: list[float]) -> float | None:
    """Two-sided t-test that the mean of paired differences is not 0; 1.0 where all are 0."""
    if len(differences) < 2 or (std_of(differences) == 0 and any(differences)):
        return None
    if not any(differences):
        return 1.0
    return three_digits(scipy_stats().ttest_1samp(differences, 0).pvalue)


def correlation(a: list[float], b: list[float]) -> tuple[float, float] | None:
    """Pearson's r of pairs and the one-sided p-value that it is positive; None if undefined."""
    if len(a) < 3 or not std_of(a) or not std_of(b):
        return None
    found = scipy_stats().pearsonr(a, b, alternative="greater")
    return float(found.statistic), float(found.pvalue)


def smallest_difference(spread: float, degrees: int) -> float:
    """The difference of two means at which a two-sided t-test reaches SIGNIFICANCE.

    `spread` is the standard error of the difference, `degrees` the test's degrees of freedom.
    """
    return scipy_stats().t.ppf(1 - SIGNIFICANCE / 2, degrees) * spread


def is_significant(p: float | None) -> bool:
    return p is not None and p < SIGNIFICANCE


def is_shown(versus: dict) -> bool:
    """Whether a comparison shows a difference: of losses as tables round them, and significant.

    Rounding alone makes equal mathematics differ in the sixth digit, at every seed alike.
    """
    return is_significant(versus["p_differs"]) and round(versus["difference"], 4) != 0


def summarize(runs: list[dict]) -> dict:
    """n, mean and standard deviation (n - 1) of the runs' losses; the median of their times."""
    losses = [run["val_loss"] for run in runs]
    std = std_of(losses)
    return {
        "n": len(runs),
        "val_loss_mean": round(statistics.fmean(losses), 6),
        "val_loss_std": None if std is None else round(std, 6),
        "train_time_ms_median": statistics.median(run["train_time_ms"] for run in runs),
    }


def compare_losses(losses: dict[int, float], others: dict[int, float]) -> dict:
    """Losses by seed against others: the difference of the means, and what it is worth.

    Runs of one seed see the same data. Where their losses rise and fall together (correlation
    above 0 with p < 0.05), the t-test of the differences is used, else Welch's.
    """
    a, b = list(losses.values()), list(others.values())
    common = [seed for seed in losses if seed in others]
    paired = [losses[seed] for seed in common], [others[seed] for seed in common]
    related = correlation(*paired) if len(common) == len(a) == len(b) else None
    equal = bool(common) and len(common) == len(a) == len(b) and a == paired[1]
    if equal or related and related[1] < 0.05:
        differences = [x - y for x, y in zip(*paired)]
        test, p, spread = "paired t-test", p_paired(differences), std_of(differences)
        error, degrees = (spread or 0) / len(common) ** 0.5, len(common) - 1
    else:
        test, p = "Welch's t-test", p_welch(a, b)
        parts = [(std_of(group) or 0) ** 2 / len(group) for group in (a, b)]
        error = sum(parts) ** 0.5
        inner = sum(part**2 / max(1, len(group) - 1) for part, group in zip(parts, (a, b)))
        degrees = error**4 / inner if inner else 0
    return {
        "difference": round(statistics.fmean(a) - statistics.fmean(b), 6),
        "test": test,
        "p_differs": p,
        "correlation": three_digits(related[0]) if related else None,
        "smallest_shown": (three_digits(smallest_difference(error, degrees))
                           if degrees and min(len(a), len(b)) > 1 else None),
    }


def compare(runs: list[dict], parent_runs: list[dict]) -> dict:
    """Runs against a parent's: difference of means with its test, ratio of times by seed."""
    theirs = {run["seed"]: run["train_time_ms"] for run in parent_runs}
    ratios = [run["train_time_ms"] / theirs[run["seed"]] for run in runs if theirs.get(run["seed"])]
    losses = [{run["seed"]: run["val_loss"] for run in group} for group in (runs, parent_runs)]
    measures = {"median": statistics.median, "min": min, "max": max}
    return {
        **summarize(parent_runs),
        **compare_losses(*losses),
        **{f"time_ratio_{name}": round(measure(ratios), 4) if ratios else None
           for name, measure in measures.items()},
    }
