"""The table of runs, runs.csv: a row a run, made from the logs; what its rows show, and the rules.

A record's folder has record.json, what it claims, and logs/seed-N.txt, what it ran; logs/times/ has
runs that were made alone, for their times. A parent's runs are in the parent's own folder.
"""

import csv
import io
import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from ledger.logs import LedgerError, Log, read_log, read_text, sha256, write_file

TABLE = "runs.csv"
FOLDERS = {"loss": "logs", "time": "logs/times"}  # of each kind of run
FINAL = ("val_loss", "train_time_ms", "steps", "tokens", "threads", "device", "torch",
         "world_size", "parameters", "peak_memory_mib")  # cells from a log's last block
COLUMNS = ("record", "kind", "seed", "preset", *FINAL[:5], "jobs", *FINAL[5:],
           "source_sha256", "log_sha256")
NUMBERS = ("seed", "val_loss", "train_time_ms", "steps", "tokens", "jobs")
MACHINE = ("preset", "torch", "device", "threads", "world_size", "jobs")  # of runs to be compared
FOLDER_NAME = re.compile(r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])_[A-Za-z0-9]+")

SIGNIFICANCE = 0.01  # what a p-value has to stay under
SEEDS = {"loss": 10, "time": 5}  # runs of a measurement, set before the first: all count, no more
RULES = {  # what the header of every run with a preset has to have; None: not known here
    "record": {"target_loss": "3.28", "val_tokens": "10485760", "val_digest": None,
               "val_files": "data/fineweb10B/fineweb_val_*.bin",
               "train_files": "data/fineweb10B/fineweb_train_*.bin"},
    "pocket": {"target_loss": "1.64", "val_tokens": "262144", "val_digest": "f89a85391a8fc0bf",
               "val_files": "data/pocket/pocket_val_*.bin",
               "train_files": "data/pocket/pocket_train_*.bin"},
}

FIELDS = ("number", "change", "parent", "published", "modelled_minutes", "equality", "gain")


@dataclass
class Record:
    """A record's folder, what it claims, and its rows of the table by kind."""

    folder: Path
    claim: dict
    runs: dict[str, list[dict]] = field(default_factory=dict)
    parent: "Record | None" = None


def read_claim(folder: Path) -> dict:
    """What a folder's record.json says. Raises LedgerError where that has no usable form."""
    path = folder / "record.json"
    try:
        claim = json.loads(read_text(path))
        words = "{number:d} {change} {parent} {modelled_minutes} {equality} {gain}".format(**claim)
        if claim["published"]:
            words += "{number:d} {minutes:f} {val_loss:f} {n:d} {hardware} {source}".format(
                **claim["published"])
        if claim["equality"]:
            words += "{largest:f} {of}".format(**claim["equality"])
        float(claim["modelled_minutes"] or 0)
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} is no record.json: {error!r}; see records/README.md") from None
    if tuple(claim) != FIELDS or claim["gain"] not in (None, "loss", "time"):
        raise LedgerError(f"{path} is no record.json: it needs {', '.join(FIELDS)}, and gain is "
                          "loss, time or null")
    return claim


def find_records(folder: Path) -> list[Record]:
    """The records of a folder of records, oldest first, with their rows of the table."""
    if not folder.is_dir():
        raise LedgerError(f"{folder}: no such folder; give records/ or one record's folder")
    found = {}
    for path in sorted(folder.glob("*/record.json")):
        found[path.parent.name] = Record(path.parent, read_claim(path.parent))
    for row in read_table(folder):
        if row["record"] in found:
            found[row["record"]].runs.setdefault(row["kind"], []).append(row)
    for record in found.values():
        record.parent = found.get(record.claim["parent"])
    return list(found.values())


def seed_files(folder: Path, kind: str) -> list[Path]:
    """A record's logs of a kind, by seed."""
    files = (folder / FOLDERS[kind]).glob("seed-*.txt")
    return sorted(files, key=lambda path: (len(path.name), path.name))


def run_row(record: str, kind: str, log: Log) -> dict[str, str]:
    """The table's row of a run. Raises LedgerError where it is not finished."""
    if not log.finished:
        raise LedgerError(f"{log.path} is not a finished run: {'; '.join(log.notes)}")
    found = {"jobs": "1", **log.header, **log.final, "record": record, "kind": kind,
             "source_sha256": log.source_sha256, "log_sha256": sha256(read_text(log.path))}
    row = {name: found.get(name) or "" for name in COLUMNS}
    check_numbers(row, log.path)
    return row


def check_numbers(row: dict, path: Path) -> None:
    for name in NUMBERS:
        try:
            float(row[name])
        except (ValueError, TypeError):
            raise LedgerError(f"{path}: {name} is {row[name]!r}, not a number") from None


def logs_to_rows(folder: Path) -> list[dict]:
    """The rows of all records' logs in a folder of records."""
    rows = []
    for claim in sorted(folder.glob("*/record.json")):
        for kind in FOLDERS:
            for path in seed_files(claim.parent, kind):
                rows.append(run_row(claim.parent.name, kind, read_log(path)))
    return rows


def read_table(folder: Path) -> list[dict]:
    """The rows of runs.csv; none where there is no such file."""
    path = folder / TABLE
    if not path.exists():
        return []
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    if tuple(reader.fieldnames) != COLUMNS:
        raise LedgerError(f"{path}: its columns are not {','.join(COLUMNS)}; `list --write` makes "
                          "it from the logs")
    rows = list(reader)
    for row in rows:
        check_numbers(row, path)
    return rows


def write_table(folder: Path) -> None:
    """Make runs.csv from the logs."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(logs_to_rows(folder))
    write_file(folder / TABLE, text.getvalue())


def scipy_stats():
    try:
        from scipy import stats
    except ImportError:
        raise LedgerError("p-values need scipy: pip install -r requirements-dev.txt") from None
    return stats


def std_of(values: list[float]) -> float | None:
    """Standard deviation (n - 1), or None of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def p_below(losses: list[float], target: float) -> float | None:
    """One-sided t-test that the mean lies below `target`; None without spread."""
    if not std_of(losses):
        return None
    return float(scipy_stats().ttest_1samp(losses, target, alternative="less").pvalue)


def by_seed(runs: list[dict], name: str) -> dict[int, float]:
    return {int(run["seed"]): float(run[name]) for run in runs}


def compare(runs: list[dict], others: list[dict]) -> dict:
    """Runs against others: difference of the mean losses, its test, and ratios of times by seed.

    The test is fixed before the runs: paired where the seeds, and so the data, are the same.
    """
    ours, theirs = by_seed(runs, "val_loss"), by_seed(others, "val_loss")
    a, b = [ours[seed] for seed in sorted(ours)], [theirs[seed] for seed in sorted(theirs)]
    paired = sorted(ours) == sorted(theirs)
    found = {"difference": statistics.fmean(a) - statistics.fmean(b), "p": None,
             "test": "paired t-test" if paired else "Welch's t-test",
             "smallest_shown": None, "time_ratios": []}
    spread = std_of([x - y for x, y in zip(a, b)]) if paired else std_of(a) and std_of(b)
    if spread:
        stats = scipy_stats()
        test = stats.ttest_rel(a, b) if paired else stats.ttest_ind(a, b, equal_var=False)
        low, high = test.confidence_interval(1 - SIGNIFICANCE)
        found["p"], found["smallest_shown"] = float(test.pvalue), float(high - low) / 2
    elif a == b:
        found["p"] = 1.0
    times, their_times = by_seed(runs, "train_time_ms"), by_seed(others, "train_time_ms")
    for seed in sorted(times.keys() & their_times.keys()):
        found["time_ratios"].append(times[seed] / their_times[seed])
    return found


def is_shown(versus: dict) -> bool:
    """Whether a difference is shown, of losses as tables round them: rounding is no difference."""
    p = versus["p"]
    return p is not None and p < SIGNIFICANCE and round(versus["difference"], 4) != 0


def versus_parent(record: Record, kind: str) -> dict | None:
    """A record's runs of a kind against its parent's; None where one has none."""
    theirs = record.parent.runs.get(kind) if record.parent else None
    return compare(record.runs[kind], theirs) if theirs and record.runs.get(kind) else None


def shows_gain(record: Record) -> bool:
    """Whether a record's runs bear its claim of a gain over its parent, by the rules."""
    losses, times = versus_parent(record, "loss"), versus_parent(record, "time")
    if not losses:
        return False
    if record.claim["gain"] == "loss":
        return is_shown(losses) and losses["difference"] < 0
    worse = is_shown(losses) and losses["difference"] > 0
    return bool(times) and max(times["time_ratios"]) < 1 and not worse
