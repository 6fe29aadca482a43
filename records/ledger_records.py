"""Records: what a folder claims, and what its logs bear."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from ledger_base import LedgerError, read_text
from ledger_groups import source_of
from ledger_logs import read_log, seed_files
from ledger_sources import diff_sources
from ledger_stats import compare, is_shown, p_below, summarize

SAME = ("preset", "torch", "device", "threads", "world_size")  # one value within a measurement
TIMES = "times/"  # in logs/, the runs made for their times
GAINS = (None, "loss", "time")
CLAIM = {"number": int, "change": str, "parent": (str, type(None)), "meets_target": bool,
         "gain": (str, type(None)), "published": (dict, type(None)),
         "modelled": (dict, type(None))}
PUBLISHED = {"number": int, "minutes": (int, float), "val_loss": float, "hardware": str,
             "source": str}
MODELLED = {"minutes": (int, float), "source": str}


@dataclass
class Record:
    """A record folder and what its record.json says."""

    folder: Path
    claim: dict
    measured: dict | None

    @property
    def date(self) -> str:
        return self.folder.name.partition("_")[0]

    @property
    def name(self) -> str:
        return self.folder.name.partition("_")[2]


def read_record(folder: Path) -> Record:
    """The record of a folder; its claim is empty where there is no record.json yet."""
    path, empty = folder / "record.json", dict.fromkeys(CLAIM)
    if not path.exists():
        return Record(folder, empty, None)
    try:
        content = json.loads(read_text(path))
        return Record(folder, empty | content["claim"], content.get("measured"))
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} is no record.json: {error!r}; see records/README.md") from None


def find_records(folder: Path) -> list[Record]:
    """The records of a folder of records, oldest first; or the one that the folder is."""
    if not folder.is_dir():
        raise LedgerError(f"{folder}: no such folder; give records/ or one record's folder")
    if (folder / "record.json").exists():
        return [read_record(folder)]
    records = [read_record(path.parent) for path in folder.glob("*/record.json")]
    return sorted(records, key=lambda record: (record.date, record.claim["number"] or 0))


def run_facts(path: Path) -> dict:
    """What record.json keeps of one finished run. Raises LedgerError where it is not finished."""
    log = read_log(path)
    if not log.finished:
        raise LedgerError(f"{path} is not a finished run: {'; '.join(log.notes)}")
    step, ms = log.reach(log.target) or (None, None)
    try:
        return {
            "seed": int(log.final["seed"]),
            "log": path.name,
            "val_loss": round(float(log.final["val_loss"]), 6),
            **{name: int(log.final[name]) for name in
               ("train_time_ms", "steps", "tokens", "parameters", "peak_memory_mib")},
            "target_step": step,
            "target_time_ms": ms,
        }
    except (KeyError, ValueError) as error:
        raise LedgerError(f"{path}: no usable {error} in its final block") from None


def measure_runs(record: Record, prefix: str = "") -> dict | None:
    """What `logs/<prefix>seed-N.txt` bear, and the parent's beside them; None where there are none.

    Of the losses' runs without a prefix, of the runs that were made for their times with "times/".
    """
    files = seed_files(record.folder, prefix)
    parent_files = seed_files(record.folder, prefix + "parent-")
    if not files:
        return None
    runs, parent_runs = list(map(run_facts, files)), list(map(run_facts, parent_files))
    log = read_log(files[0])
    reached = [run["target_time_ms"] for run in runs if run["target_step"] is not None]
    return {
        "script_sha256": log.sha256,
        **{name: log.header.get(name) for name in SAME},
        "jobs": int(log.final.get("jobs", 1)),
        **{name: runs[0][name] for name in ("steps", "tokens", "parameters")},
        "peak_memory_mib": max(run["peak_memory_mib"] for run in runs),
        **summarize(runs),
        "target": log.target,
        "p_target": p_below([run["val_loss"] for run in runs], log.target),
        "reached_target": len(reached),
        "target_time_ms_median": statistics.median(reached) if reached else None,
        "runs": runs,
        "parent": {**compare(runs, parent_runs), "runs": parent_runs} if parent_runs else None,
    }


def measure(record: Record) -> dict:
    """record.json's measured block, from the logs and scripts in the folders alone."""
    found = measure_runs(record)
    if not found:
        raise LedgerError(f"{record.folder / 'logs'} has no seed-N.txt; measure with `run`")
    lines = None
    if record.claim["parent"]:
        diff = diff_sources(source_of(record.folder.parent / record.claim["parent"]),
                            read_text(record.folder / "train_gpt.py"))
        lines = {"added": diff["added"], "removed": diff["removed"]}
    return {**found, "lines": lines, "times": measure_runs(record, TIMES)}


def timed(measured: dict) -> dict:
    """The runs whose times count: those made alone for that, where there are any."""
    return measured["times"] or measured


def record_text(claim: dict, measured: dict) -> str:
    """The content of record.json."""
    content = {"claim": claim, "measured": measured}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def shows_gain(measured: dict, gain: str) -> bool:
    """Whether what was measured bears the claim of a gain over the parent.

    "loss": shown to be lower. "time": a range of time ratios that lies below 1, of runs that each
    had the machine alone, with a loss that is not shown to be higher.
    """
    parent, times = measured["parent"], timed(measured)
    if not parent or gain == "time" and not times["parent"]:
        return False
    if gain == "loss":
        return is_shown(parent) and parent["difference"] < 0
    slowest = times["parent"]["time_ratio_max"]
    worse = is_shown(parent) and parent["difference"] > 0
    return times["jobs"] == 1 and slowest is not None and slowest < 1 and not worse
