"""The table of runs, runs.csv: a row a run, made from the logs; what its rows show, and the rules.

A record's folder has record.json, what it claims, and logs/seed-N.txt, what it ran; logs/times/ has
the runs that were made alone, for their times. A parent's runs are in the parent's own folder.
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
MACHINE = ("preset", "torch", "device", "threads", "world_size", "jobs")  # of runs to be compared
NUMBERS = ("seed", "val_loss", "train_time_ms", "steps", "tokens", "jobs")
FOLDER_NAME = re.compile(r"\d{4}-\d{2}-\d{2}_[A-Za-z0-9]+")

# ---- Rules --------------------------------------------------------------------

SIGNIFICANCE = 0.01  # what a p-value has to stay under
SEEDS = {"loss": 10, "time": 5}  # runs of a measurement, set before the first: all count, no more


@dataclass(frozen=True)
class Rule:
    """What every run with a preset is held to."""

    target_loss: float  # nats per token
    train_files: str
    val_files: str
    val_tokens: int
    val_digest: str | None  # as a log's header has it; None where the data is not known here


RULES = {
    "record": Rule(3.28, "data/fineweb10B/fineweb_train_*.bin",
                   "data/fineweb10B/fineweb_val_*.bin", 10_485_760, None),
    "pocket": Rule(1.64, "data/pocket/pocket_train_*.bin",
                   "data/pocket/pocket_val_*.bin", 262_144, None),
}

# ---- Records ------------------------------------------------------------------

GAINS = (None, "loss", "time")
NUMBER = (int, float)
OPTIONAL = type(None)
CLAIM = {"number": int, "change": str, "parent": (str, OPTIONAL), "published": (dict, OPTIONAL),
         "modelled_minutes": (int, float, OPTIONAL), "equality": (dict, OPTIONAL),
         "gain": (str, OPTIONAL)}
PARTS = {"published": {"number": int, "minutes": NUMBER, "val_loss": float, "n": int,
                       "hardware": str, "source": str},
         "equality": {"largest": float, "of": str}}


@dataclass
class Record:
    """A record's folder, what it claims, and its rows of the table, by kind and seed."""

    folder: Path
    claim: dict
    runs: dict[str, list[dict]] = field(default_factory=dict)
    parent: "Record | None" = None

    @property
    def name(self) -> str:
        return self.folder.name.partition("_")[2]


def read_claim(path: Path) -> dict:
    try:
        claim = json.loads(read_text(path))
        return dict.fromkeys(CLAIM) | claim
    except (ValueError, TypeError) as error:
        raise LedgerError(f"{path} is no record.json: {error!r}; see records/README.md") from None


def claim_findings(claim: dict) -> list[str]:
    """What is wrong with a record.json by itself."""
    found = []
    for name, value in claim.items():
        if name not in CLAIM:
            found.append(f"{name} is not a field of record.json")
        elif not isinstance(value, CLAIM[name]) or (name == "gain" and value not in GAINS):
            found.append(f"record.json: {name} is {value!r}, not a usable value")
        elif isinstance(value, dict):
            for part, kind in PARTS[name].items():
                if not isinstance(value.get(part), kind):
                    found.append(f"record.json: {name}.{part} is missing or of another kind")
    if claim["gain"] and not claim["parent"]:
        found.append("record.json: gain is claimed without a parent")
    return found


def find_records(folder: Path) -> list[Record]:
    """The records of a folder of records, oldest first, with their rows of the table."""
    if not folder.is_dir():
        raise LedgerError(f"{folder}: no such folder; give records/ or one record's folder")
    found = {}
    for path in sorted(folder.glob("*/record.json")):
        found[path.parent.name] = Record(path.parent, read_claim(path))
    for row in read_table(folder / TABLE):
        if row["record"] in found:
            found[row["record"]].runs.setdefault(row["kind"], []).append(row)
    for record in found.values():
        record.parent = found.get(record.claim["parent"])
    return list(found.values())


# ---- The table ------------------------------------------------------------------


def seed_files(folder: Path, kind: str) -> list[Path]:
    """A record's logs of a kind, by seed."""
    files = (folder / FOLDERS[kind]).glob("seed-*.txt")
    return sorted(files, key=lambda path: (len(path.name), path.name))


def run_row(record: str, kind: str, path: Path, log: Log) -> dict[str, str]:
    """The table's row of one finished run. Raises LedgerError where it is not finished."""
    if not log.finished:
        raise LedgerError(f"{path} is not a finished run: {'; '.join(log.notes)}")
    found = {"record": record, "kind": kind, "source_sha256": log.source_sha256 or "",
             "preset": log.header.get("preset", ""), "seed": log.final.get("seed", ""),
             "jobs": log.final.get("jobs", "1"), "log_sha256": sha256(read_text(path))}
    for name in FINAL:
        found[name] = log.final.get(name, log.header.get(name, ""))
    row = {name: found[name] for name in COLUMNS}
    check_numbers(row, path)
    return row


def check_numbers(row: dict, path: Path) -> None:
    for name in NUMBERS:
        try:
            float(row[name])
        except (ValueError, TypeError, KeyError):
            raise LedgerError(f"{path}: {name} is {row.get(name)!r}, not a number") from None


def logs_to_rows(folder: Path) -> tuple[list[dict], list[str]]:
    """The rows of all records' logs in a folder of records, and what could not be read."""
    rows, troubles = [], []
    for record in sorted(path.parent for path in folder.glob("*/record.json")):
        for kind in FOLDERS:
            for path in seed_files(record, kind):
                try:
                    rows.append(run_row(record.name, kind, path, read_log(path)))
                except LedgerError as error:
                    troubles.append(str(error))
    return rows, troubles


def read_table(path: Path) -> list[dict]:
    """The rows of runs.csv; none where there is no such file."""
    if not path.exists():
        return []
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise LedgerError(f"{path}: its columns are not {','.join(COLUMNS)}; `list --write` makes "
                          "it from the logs")
    rows = list(reader)
    for row in rows:
        check_numbers(row, path)
    return rows


def write_table(path: Path, rows: list[dict]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue())


# ---- Statistics -----------------------------------------------------------------


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

    The test is fixed before the runs: where both have the same seeds, which see the same data in
    the same order, the paired t-test, else Welch's. Both are two-sided.
    """
    ours, theirs = by_seed(runs, "val_loss"), by_seed(others, "val_loss")
    a = [ours[seed] for seed in sorted(ours)]
    b = [theirs[seed] for seed in sorted(theirs)]
    found = {"difference": statistics.fmean(a) - statistics.fmean(b), "p": None,
             "smallest_shown": None, "time_ratios": []}
    if sorted(ours) == sorted(theirs):
        found["test"] = "paired t-test"
        spread = std_of([x - y for x, y in zip(a, b)])
    else:
        found["test"] = "Welch's t-test"
        spread = (std_of(a) or 0) + (std_of(b) or 0)
    if spread and min(len(a), len(b)) > 1:
        stats = scipy_stats()
        paired = found["test"] == "paired t-test"
        test = stats.ttest_rel(a, b) if paired else stats.ttest_ind(a, b, equal_var=False)
        low, high = test.confidence_interval(1 - SIGNIFICANCE)
        found["p"] = float(test.pvalue)
        found["smallest_shown"] = float(high - low) / 2
    elif a == b:
        found["p"] = 1.0
    times, their_times = by_seed(runs, "train_time_ms"), by_seed(others, "train_time_ms")
    for seed in sorted(times.keys() & their_times.keys()):
        found["time_ratios"].append(times[seed] / their_times[seed])
    return found


def is_shown(versus: dict) -> bool:
    """Whether a comparison shows a difference: of losses as tables round them, and significant.

    Rounding alone makes equal mathematics differ in the sixth digit, at every seed alike.
    """
    p = versus["p"]
    return p is not None and p < SIGNIFICANCE and round(versus["difference"], 4) != 0


def shows_gain(record: Record) -> bool:
    """Whether a record's runs bear its claim of a gain over its parent.

    "loss": shown to be lower. "time": each ratio of the times of runs alone is below 1, with a loss
    that is not shown to be higher.
    """
    pairs = {}
    for kind in FOLDERS:
        theirs = record.parent.runs.get(kind, []) if record.parent else []
        if record.runs.get(kind) and theirs:
            pairs[kind] = compare(record.runs[kind], theirs)
    if "loss" not in pairs:
        return False
    losses = pairs["loss"]
    if record.claim["gain"] == "loss":
        return is_shown(losses) and losses["difference"] < 0
    ratios = pairs["time"]["time_ratios"] if "time" in pairs else []
    alone = all(run["jobs"] == "1" for run in record.runs.get("time", []))
    worse = is_shown(losses) and losses["difference"] > 0
    return bool(ratios) and max(ratios) < 1 and alone and not worse
