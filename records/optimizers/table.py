"""The optimizers on the small model, and whether it predicts the published steps.

    python records/optimizers/table.py [--write] [--operands NAME=VALUE] [STORE]

STORE, runs.jsonl beside this file, has all runs behind the table, and sizes.jsonl those of other
sizes. README.md has the commands that make them anew. --write puts the tables into README.md, and
draws docs/laptop.svg.
"""

import argparse
import math
import os
import signal
import statistics
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ledger import pages
from ledger.logs import LedgerError
from ledger.records import Record, compare, find_records
from ledger.run import digest_of, log_of, loss_of, read_store
from ledger.steps import reached_by_all, steps_words
from ledger.tune import SEEDS, best_of, lowest_point
from website.chart import LETTER, Chart, hue

FOLDER = Path(__file__).resolve().parent
PICTURE = FOLDER.parents[1] / "docs" / "laptop.svg"
BASELINE = 36  # the result that all are compared with: Muon, tuned
HEADING = ("Result", "Best rate", "Loss ± std (seeds)", f"From o{BASELINE} ± error",
           "Steps to {target:.4f}", "Published steps")
CORRELATIONS = ("Results", "n", "ρ of loss and published steps (95 %)")
SIZES = ("Size", "Seconds", "Std of optimizers", "Std of seeds", "Ratio",
         "ρ of loss and published steps (95 %)", "ρ with the table above")
NO_SIZE = "matrix_lr", "val_every", "sequences_per_forward"  # flags that leave the size
SIZE_WORDS = {"num_iterations": "{} steps", "sequences_per_step": "{} sequences a step",
              "model_dim": "width {}", "num_layers": "{} layers"}
SIDES = """\
The last two groups were formed after a look at the plot.

Of the {fewer} results with fewer published steps than o{baseline}, {below} end below it here. Of
the {more} with more, {above} end above it."""
SIZES_LEGEND = """\
Each result ran once, at the best of the rates that were tried at the pocket's size, with seed 0, on
{machine}.
The standard deviation of seeds is that of {seeds} seeds of o{baseline}."""
LEGEND = """\
Each result was tried at {rates} rates; the best rate is the lowest point of a parabola through
three of them. Losses are in nats a byte. The difference from o{baseline} is by seed, with its
standard error; * where p < 0.01, which chance gives to one comparison in a hundred. Steps are
those to the loss that all runs of o{baseline} reach, interpolated, ± the interval of 95 %.

Behind the table are {runs} runs of {seconds:.0f} s (the median), {hours:.1f} hours of one core.
Tuning ran on {tuning},
the comparison on {machine},
both with torch {torch}, one thread and {jobs} runs at once. The standard deviation of optimizers is
{between:.4f}, that of one optimizer's seeds {within:.4f}."""
COMPARED = range(5)  # seeds of the comparison
NEAR = 3400  # steps; results above it were made to compare, not to win
# Whose correlation is given; the last two were thought of when the plot was there.
GROUPS = {
    "all results": lambda entry: True,
    f"up to {NEAR:,} steps": lambda entry: entry.steps <= NEAR,
    "matrices keep their norm": lambda entry: entry.keeps_norm,
    "all others": lambda entry: not entry.keeps_norm,
}


@dataclass
class Entry:
    """A result: its record, the runs at its best rate on the seeds of the comparison."""

    record: Record
    runs: list  # rows of the store
    tuning: list  # rows, too
    tried: dict[float, float]  # rate: mean loss of tuning

    @property
    def rate(self) -> str:
        return self.runs[0]["flags"]["matrix_lr"]

    @property
    def digest(self) -> str:
        return self.runs[0]["script"]

    @property
    def keeps_norm(self) -> bool:
        return "hyperball_step(" in self.record.script

    @property
    def losses(self) -> list:
        return [loss_of(row) for row in self.runs]

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses)

    @property
    def curves(self) -> list:
        return [dict(row["val"]) for row in self.runs]

    @property
    def steps(self) -> int:
        return self.record.published["steps"]


def seed_of(row: dict) -> int:
    return int(row["header"]["seed"])


def rate_of(row: dict) -> float:
    """The rate that it was given; nan where none was."""
    return float(row["flags"].get("matrix_lr", "nan"))


def read_entries(records: list, rows: list) -> list:
    """An entry for each public result with two runs at its best rate, the least loss first."""
    entries = []
    for record in records:
        if record.ladder != "steps" or not record.result:
            continue
        digest = digest_of(record.script)
        ours = [row for row in rows
                if row["script"] == digest and row["flags"].keys() == {"matrix_lr"}]
        tuning = [row for row in ours if seed_of(row) in SEEDS]
        tried = tried_rates(tuning)
        if best_of(tried) is None:
            continue
        best = lowest_point(tried)
        runs = [row for row in ours if rate_of(row) == best and seed_of(row) in COMPARED]
        if len(runs) > 1:
            runs.sort(key=seed_of)
            entries.append(Entry(record, runs, tuning, tried))
    return sorted(entries, key=lambda entry: entry.loss)


def tried_rates(tuning: list) -> dict:
    """{rate: the mean loss of its rows}."""
    losses = {}
    for row in tuning:
        losses.setdefault(rate_of(row), []).append(loss_of(row))
    return {rate: statistics.fmean(some) for rate, some in losses.items()}


# ---- What the table says ----
def spearman(xs: list, ys: list) -> tuple:
    """(ρ, low, high): the rank correlation, and its interval of 95 %.

    By Fisher's transform, with the standard error of Bonett and Wright (2000). It gives no
    interval, but nan, of less than 4 pairs and where ρ is 1 or −1.
    """
    rho = statistics.correlation(stats.rankdata(xs), stats.rankdata(ys))
    if len(xs) < 4 or abs(rho) > 1 - 1e-9:
        return rho, math.nan, math.nan
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (len(xs) - 3))
    return rho, math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)


def correlation_words(losses: list, entries: list) -> str:
    rho, low, high = spearman(losses, [entry.steps for entry in entries])
    return f"{rho:.2f} ({low:.2f} to {high:.2f})".replace("-", "−")


def correlations_table(entries: list) -> str:
    """A row for each group of results."""
    lines = []
    for words, is_in in GROUPS.items():
        group = [entry for entry in entries if is_in(entry)]
        if len(group) > 3:
            losses = [entry.loss for entry in group]
            lines.append([words, str(len(group)), correlation_words(losses, group)])
    return pages.table(CORRELATIONS, lines)


def sides_words(entries: list) -> str:
    """How often a result is on the published side of the baseline here, too."""
    baseline = baseline_of(entries)
    fewer = [entry for entry in entries if entry.steps < baseline.steps]
    more = [entry for entry in entries if entry.steps > baseline.steps]
    below = sum(entry.loss < baseline.loss for entry in fewer)
    above = sum(entry.loss > baseline.loss for entry in more)
    return SIDES.format(baseline=BASELINE, fewer=len(fewer), below=below, more=len(more),
                        above=above)


def from_baseline(entry: Entry, baseline: Entry) -> str:
    """The mean difference from the baseline and its standard error, in pairs of one seed."""
    if entry is baseline:
        return ""
    ours, theirs = ([log_of(row, FOLDER) for row in one.runs] for one in (entry, baseline))
    found = compare(ours, theirs)
    return pages.difference_words(found.difference, error=found.error(), is_shown=found.is_shown())


def baseline_of(entries: list) -> Entry:
    (baseline,) = [entry for entry in entries if entry.record.result == BASELINE]
    return baseline


def target_of(entries: list) -> float:
    """The loss that all runs of the baseline reach."""
    return reached_by_all(baseline_of(entries).curves)


def text_of(entries: list) -> str:
    """The table and what is said around it."""
    baseline, target, lines = baseline_of(entries), target_of(entries), []
    for entry in entries:
        name, folder = entry.record.name, entry.record.folder.name
        lines.append([f"[{name}]({folder})", entry.rate, pages.spread(entry.losses),
                      from_baseline(entry, baseline), steps_words(entry.curves, target),
                      f"{entry.steps:,}"])
    behind = [row for entry in entries for row in entry.runs + entry.tuning]
    seconds = seconds_of(behind)
    tuned_on = sorted({row["header"]["device"] for entry in entries for row in entry.tuning})
    header = baseline.runs[0]["header"]
    variances = [statistics.variance(entry.losses) for entry in entries]
    legend = LEGEND.format(
        rates=" or ".join(sorted({str(len(entry.tried)) for entry in entries})),
        baseline=BASELINE, tuning=" and ".join(tuned_on),
        runs=len(behind), seconds=statistics.median(seconds),
        hours=sum(seconds) / 3600, machine=header["device"], torch=header["torch"],
        jobs=header.get("jobs", 1), within=math.sqrt(statistics.fmean(variances)),
        between=statistics.stdev(entry.loss for entry in entries))
    heading = [words.format(target=target) for words in HEADING]
    parts = correlations_table(entries), sides_words(entries), pages.table(heading, lines), legend
    return "\n\n".join(parts)


def seconds_of(rows: list) -> list:
    """The seconds of runs, of all threads; none where one diverged."""
    return [int(row["header"]["process_time_ms"]) / 1000 for row in rows
            if "process_time_ms" in row["header"]]


def runs_by_size(entries: list, rows: list) -> dict:
    """{flags as words: {(result, seed): row}}, of the runs at the best rates that were tried."""
    by_digest, sizes = {entry.digest: entry for entry in entries}, {}
    for row in rows:
        entry, seed = by_digest.get(row["script"]), seed_of(row)
        if not entry or seed not in COMPARED or rate_of(row) != best_of(entry.tried):
            continue
        words = [SIZE_WORDS.get(name, f"{name} {{}}").format(value)
                 for name, value in row["flags"].items() if name not in NO_SIZE]
        size = ", ".join(words) or "the pocket's"
        sizes.setdefault(size, {})[entry.record.result, seed] = row
    return sizes


def sizes_text(entries: list, rows: list) -> str:
    """A table of the sizes at which all ran, and two seeds of the baseline at least."""
    order, lines, counts = [(entry.record.result, 0) for entry in entries], [], set()
    for words, runs in runs_by_size(entries, rows).items():
        seeds = [loss_of(row) for (result, _), row in runs.items() if result == BASELINE]
        if len(seeds) < 2 or not set(order) <= runs.keys():
            continue
        counts.add(str(len(seeds)))
        losses = [loss_of(runs[key]) for key in order]
        between, within = statistics.stdev(losses), statistics.stdev(seeds)
        seconds = statistics.median(seconds_of([runs[key] for key in order]))
        rho, *_ = spearman(losses, [entry.loss for entry in entries])
        lines.append([words, f"{seconds:.0f}", f"{between:.4f}", f"{within:.4f}",
                      f"{between / within:.1f}", correlation_words(losses, entries),
                      f"{rho:.2f}"])
    if not lines:
        return ""
    legend = SIZES_LEGEND.format(machine=rows[0]["header"]["device"], baseline=BASELINE,
                                 seeds=" or ".join(sorted(counts)))
    return f"{pages.table(SIZES, lines)}\n\n{legend}"


# ---- The plot ----
def day_of(entry: Entry) -> int:
    return date.fromisoformat(entry.record.folder.name[:10]).toordinal()


def across(steps: float) -> float:
    """Where steps stand on the axis: beyond NEAR, where few results are, it is narrower."""
    return steps if steps <= NEAR else NEAR + (steps - NEAR) / 12


def scatter(entries: list) -> str:
    """An SVG: a dot for each result, loss on the small model over published steps."""
    losses = [entry.loss for entry in entries]
    low, high = math.floor(min(losses) * 20 - 0.5), math.ceil(max(losses) * 20 + 0.5)
    chart = Chart(880, 560, (2620, 3880, False), (low / 20, high / 20, False))
    x_ticks = (*range(2700, NEAR + 1, 100), 5000, 6000, 7000, 8000)
    chart.axes({across(tick): f"{tick:,}" for tick in x_ticks},
               {tick / 20: f"{tick / 20:.2f}" for tick in range(low, high + 1)},
               f"published steps to 3.28 at full size; beyond {NEAR:,} a twelfth as wide",
               "loss of the small model after 200 steps, nats a byte")
    days = [day_of(entry) for entry in entries]
    for entry in entries:
        x, y = chart.place(across(entry.steps), entry.loss)
        color = hue((day_of(entry) - min(days)) / max(max(days) - min(days), 1))
        spread = statistics.stdev(entry.losses)
        ends = [chart.place(0, entry.loss + sign * spread)[1] for sign in (-1, 1)]
        chart.parts.append(f'<path class="grid" d="M{x} {ends[0]}V{ends[1]}"></path>'
                           f'<circle cx="{x}" cy="{y}" r="4" style="fill:{color}"></circle>')
        chart.taken.append((x - 4, y - 4, x + 4, y + 4))
    for entry in entries:
        add_name(chart, entry.record.name, *chart.place(across(entry.steps), entry.loss))
    return chart.svg("Loss on the small model against published steps, a dot for each result")


def add_name(chart: Chart, name: str, x: float, y: float):
    """Write a name, or else its label alone, beside the dot at (x, y), where there is room."""
    for words in name, name.partition(" ")[0]:
        width = LETTER * len(words)
        places = (("", x + 6, x + 6, y + 4), ("y", x - 6, x - 6 - width, y + 4),
                  ("x", x, x - width / 2, y - 8), ("x", x, x - width / 2, y + 16))
        for anchor, where, left, base in places:
            if left > chart.left and chart.has_room(left, base - 10, f"{words} "):
                chart.parts.append(f'<text class="{anchor}" x="{where}" y="{base:.0f}">{words}'
                                   "</text>")
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path, default=FOLDER / "runs.jsonl")
    parser.add_argument("--write", action="store_true", help="into README.md and docs/laptop.svg")
    parser.add_argument("--operands", metavar="NAME=VALUE", help="print what `run` takes to train "
                        "all at the best rates that were tried, with these flags")
    args = parser.parse_args()
    if not args.store.exists():
        sys.exit(f"{args.store} is not there; README.md has the command that makes it")
    rows = list(read_store(args.store).values())
    try:
        entries = read_entries(find_records(FOLDER.parent), rows)
    except LedgerError as error:
        sys.exit(str(error))
    if BASELINE not in [entry.record.result for entry in entries] or len(entries) < 4:
        sys.exit(f"{args.store} has {len(entries)} of these results at their best rates; it needs "
                 f"4, and o{BASELINE} among them")
    if len({log_of(row, FOLDER).setting for entry in entries for row in entry.runs}) > 1:
        sys.exit(f"{args.store} compares runs of several machines; keep those of one")
    if args.operands is not None:
        for entry in entries:
            folder = os.path.relpath(entry.record.folder)
            rate = best_of(entry.tried)
            print(f"{folder}:matrix_lr={rate:g},{args.operands}".rstrip(","))
        return
    sizes = list(read_store(FOLDER / "sizes.jsonl").values())
    parts = {" laptop": text_of(entries), " sizes": sizes_text(entries, sizes)}
    if not args.write:
        print(pages.plain("\n\n".join(parts.values())))
        return
    page = FOLDER / "README.md"
    page.write_text(pages.filled(page, parts), encoding="utf-8")
    PICTURE.write_text(scatter(entries), encoding="utf-8")
    print(f"wrote {page} and {PICTURE}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `table.py | head`
    main()
