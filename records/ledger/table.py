"""The table of runs, runs.csv: a row a run, made from the logs; what its rows show, and the rules.

A record's folder has record.json, what it claims, and logs/seed-N.txt, what it ran; logs/times/ has
runs that were made alone, for their times. A parent's runs are in the parent's own folder.
"""

import csv
import io
import itertools
import json
import operator
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from ledger.logs import FOLDERS, LedgerError, Log, read_log, read_text, seed_files, sha256

TABLE = "runs.csv"
FINAL = ("val_loss", "train_time_ms", "steps", "tokens", "threads", "device", "torch",
         "world_size", "parameters", "peak_memory_mib")  # cells from a log's last block
COLUMNS = ("record", "kind", "seed", "preset", *FINAL[:5], "jobs", *FINAL[5:],
           "source_sha256", "log_sha256")
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

    @property
    def script(self) -> str:
        return read_text(self.folder / "train_gpt.py")


def read_claim(folder: Path):
    """What a folder's record.json says. Raises LedgerError where that has no usable form."""
    path = folder / "record.json"
    try:
        claim = json.loads(read_text(path))
        "{number:d}".format(**claim)  # fails where it is not there, or of another kind
        if claim["published"]:
            "{number:d} {minutes:f} {val_loss:f} {n:d} {hardware} {source}".format(
                **claim["published"])
        if claim["equality"]:
            "{largest:f} {of}".format(**claim["equality"])
        float(claim["modelled_minutes"] or 0)
        if tuple(claim) != FIELDS or claim["gain"] not in (None, *FOLDERS):
            raise ValueError(f"it needs {', '.join(FIELDS)}, and gain is loss, time or null")
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} is no record.json: {error!r}; see records/README.md") from None
    return claim


def find_records(folder: Path):
    """The records of a folder of records, oldest first, with their rows of the table."""
    if not folder.is_dir():
        raise LedgerError(f"{folder}: no such folder; give records/ or one record's folder")
    found = {}
    for path in sorted(folder.glob("*/record.json")):
        record = found[path.parent.name] = Record(path.parent, read_claim(path.parent))
        record.parent = found.get(record.claim["parent"])
    for row in read_table(folder):
        if row["record"] in found:
            found[row["record"]].runs.setdefault(row["kind"], []).append(row)
    return list(found.values())


def run_row(record: str, kind: str, log: Log):
    """The table's row of a run. Raises LedgerError where it is not finished."""
    if not log.finished:
        raise LedgerError(f"{log.path} is not a finished run: {'; '.join(log.notes)}")
    found = {"jobs": "1", **log.header, **log.final, "record": record, "kind": kind,
             "source_sha256": log.source_sha256, "log_sha256": sha256(read_text(log.path))}
    return {name: found.get(name) or "" for name in COLUMNS}


def read_table(folder: Path):
    """The rows of runs.csv; none where there is no such file."""
    path = folder / TABLE
    if not path.exists():
        return []
    reader = csv.DictReader(read_text(path).splitlines())
    if tuple(reader.fieldnames) != COLUMNS:
        raise LedgerError(f"{path} has not the columns that `list --write` makes from the logs")
    return list(reader)


def table_of(folder: Path) -> str:
    """What runs.csv has to be: a row of each log of the records in a folder."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for claim, kind in itertools.product(sorted(folder.glob("*/record.json")), FOLDERS):
        for path in seed_files(claim.parent, kind):
            writer.writerow(run_row(claim.parent.name, kind, read_log(path)))
    return text.getvalue()


def p_below(losses: list, target: float) -> float | None:
    """One-sided t-test that the mean lies below `target`; None without spread."""
    if len(set(losses)) < 2:
        return None
    from scipy import stats  # a second, which what needs no p-value does not wait for

    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def compare(runs: list, others: list) -> dict | None:
    """Runs against others of the same seeds, and so the same data; None where there are none."""
    ours, theirs, ratios = [], [], []
    for run, other in itertools.product(runs, others):
        if run["seed"] == other["seed"]:
            ours.append(float(run["val_loss"]))
            theirs.append(float(other["val_loss"]))
            ratios.append(float(run["train_time_ms"]) / float(other["train_time_ms"]))
    if not ours:
        return None
    found = {"difference": statistics.fmean(ours) - statistics.fmean(theirs), "p": None,
             "smallest_shown": None, "shown": "", "time": statistics.median(ratios),
             "fastest": min(ratios), "slowest": max(ratios)}
    if len(set(map(operator.sub, ours, theirs))) > 1:
        from scipy import stats

        test = stats.ttest_rel(ours, theirs)
        low, high = test.confidence_interval(1 - SIGNIFICANCE)
        found |= {"p": float(test.pvalue), "smallest_shown": float(high - low) / 2}
        if test.pvalue < SIGNIFICANCE and round(found["difference"], 4):  # not by rounding alone
            found["shown"] = "*"
    elif ours == theirs:
        found["p"] = 1.0
    return found


def versus_parent(record: Record, kind: str) -> dict | None:
    """A record's runs of a kind against its parent's; None where one has none."""
    theirs = record.parent.runs.get(kind, []) if record.parent else []
    return compare(record.runs.get(kind, []), theirs)


def shows_gain(record: Record) -> bool:
    """Whether a record's runs bear its claim of a gain over its parent, by the rules."""
    losses, times = versus_parent(record, "loss"), versus_parent(record, "time")
    if not losses:
        return False
    better = losses["difference"] < 0
    if record.claim["gain"] == "loss":
        return bool(losses["shown"]) and better
    return bool(times) and times["slowest"] < 1 and (better or not losses["shown"])
