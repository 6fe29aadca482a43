"""The table of optimizers on the small model, and whether it predicts the published steps.

    python records/optimizers/table.py [STORE]

STORE, runs.jsonl beside this file, has all runs behind it. This makes them, and goes on where it
was stopped:

    python records/ledger run records/optimizers --tune matrix_lr --seeds 5 --jobs 2 \
        --store records/optimizers/runs.jsonl
"""

import math
import statistics
import sys
from pathlib import Path

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ledger import pages
from ledger.records import Record, find_records
from ledger.run import digest_of, read_store
from ledger.steps import steps_words
from ledger.tune import SEEDS

FOLDER = Path(__file__).resolve().parent
BASELINE = 36  # the result to whose loss all steps are counted: Muon, tuned
HEADING = ("Result", "Rate", "Rates tried", "Loss ± std (seeds)", "Steps", "Published steps")


def spearman(xs: list, ys: list) -> tuple:
    """(ρ, low, high): the rank correlation of at least 4 pairs, and its interval of 95 %.

    By Fisher's transform, with the standard error of Bonett and Wright (2000). It gives no
    interval, but nan, where ρ is 1 or −1.
    """
    rho = statistics.correlation(stats.rankdata(xs), stats.rankdata(ys))
    if abs(rho) > 1 - 1e-9:
        return rho, math.nan, math.nan
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (len(xs) - 3))
    return rho, math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)


def runs_of(record: Record, rows: list) -> tuple:
    """(the rows of a record at its best rate on the seeds of the comparison, how many rates)."""
    by_rate, digest = {}, digest_of(record.script)
    for row in rows:
        if row["script"] == digest:
            by_rate.setdefault(row["flags"].get("matrix_lr"), []).append(row)
    compared = []
    for some in by_rate.values():
        others = [row for row in some if int(row["header"]["seed"]) not in SEEDS]
        compared = max(compared, others, key=len)
    return compared, len(by_rate)


def curves_of(runs: list) -> list:
    return [dict(row["val"]) for row in runs]


def measured(records: list, rows: list) -> list:
    """(record, its compared runs, how many rates were tried) of each that has runs, best first."""
    found = [(record, *runs_of(record, rows)) for record in records if record.ladder == "steps"]
    found = [entry for entry in found if entry[1]]
    return sorted(found, key=lambda entry: statistics.fmean(row["val_loss"] for row in entry[1]))


def target_of(found: list) -> float:
    """The loss that all runs of the baseline reach."""
    (runs,) = [runs for record, runs, _ in found if record.result == BASELINE]
    return max(min(curve.values()) for curve in curves_of(runs))


def text_of(found: list) -> str:
    """The table, and the correlations below it."""
    target, rows = target_of(found), []
    for record, runs, tries in found:
        steps = steps_words(curves_of(runs), target)
        losses = [row["val_loss"] for row in runs]
        rows.append([record.name, runs[0]["flags"]["matrix_lr"], str(tries), pages.spread(losses),
                     steps, f"{record.published.get('steps', '')}"])
    steps = f"Steps: to {target:.4f}, which all runs of o{BASELINE} reach."
    parts = [pages.table(HEADING, rows), steps]
    known = [(statistics.fmean(row["val_loss"] for row in runs), record.published["steps"])
             for record, runs, _ in found if record.published]
    if len(known) > 3:
        rho, low, high = spearman(*zip(*known))
        parts.append(f"Spearman's ρ of loss and published steps: {rho:.2f} ({low:.2f} to "
                     f"{high:.2f}, 95 %), n = {len(known)}.")
    return "\n\n".join(parts)


if __name__ == "__main__":
    store = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "runs.jsonl"
    found = measured(find_records(FOLDER.parent), list(read_store(store).values()))
    print(pages.plain(text_of(found)) if found else f"{store} has no runs of these scripts")
