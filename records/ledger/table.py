"""The records: a folder each, with a claim, a script, a page and logs; what they show; the rules.

A record's runs are its logs/seed-N.txt, all of one setting. Runs of another setting (machine,
preset, number of ranks) are logs/NAME/seed-N.txt. The parent's runs that were made beside them lie
below, in parent/, unless the parent's own folder has them. runs.csv has a row for each log.
"""

import contextlib
import csv
import io
import itertools
import json
import multiprocessing
import operator
import re
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ledger.logs import LedgerError, Log, places, read_log, read_text, seed_files, sha256

TABLE = "runs.csv"
FINAL = ("val_loss", "train_time_ms", "steps", "tokens", "threads", "device", "torch",
         "world_size", "parameters", "peak_memory_mib")  # cells from a log's last block
COLUMNS = ("record", "folder", "seed", "preset", *FINAL[:5], "jobs", *FINAL[5:], "cuda", "driver",
           "source_sha256", "log_sha256")
SETTING = ("preset", "device", "world_size", "torch", "threads", "jobs")  # of runs to be compared
PARENT = "parent"  # the folder of a parent's runs, beside those of the record
FOLDER_NAME = re.compile(r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])_[A-Za-z0-9]+")
SIGNIFICANCE = 0.01  # what a p-value has to stay under
SEEDS = {"loss": 10, "time": 5}  # pairs of runs that a gain of a kind needs
RULES = {  # what the header of every run with a preset has to have; None: not known here
    "record": {"target_loss": "3.28", "val_tokens": "10485760", "val_digest": None,
               "train_digest": None, "val_files": "data/fineweb10B/fineweb_val_*.bin",
               "train_files": "data/fineweb10B/fineweb_train_*.bin"},
    "pocket": {"target_loss": "1.64", "val_tokens": "262144", "val_digest": "f89a85391a8fc0bf",
               "train_digest": "db4041a8d500cfab", "val_files": "data/pocket/pocket_val_*.bin",
               "train_files": "data/pocket/pocket_train_*.bin"},
}
FIELDS = ("change", "parent", "published", "modelled_minutes", "equality", "gain")


@dataclass
class Record:
    """A record's folder, what it claims, and its rows of the table."""

    folder: Path
    claim: dict
    runs: list[dict]  # rows of the table; its parent's that lie beside them too
    parent: "Record | None" = None

    @property
    def script(self) -> str:
        return read_text(self.folder / "train_gpt.py")

    def rows(self, of_parent: bool):
        """Its runs, or those of its parent in its folder, by setting."""
        found = {}
        for run in self.runs:
            if (Path(run["folder"]).name == PARENT) == of_parent:
                found.setdefault(setting_of(run), []).append(run)
        return found

    def measured(self):
        """By setting, what counts most first: its runs, and its parent's in that setting."""
        theirs = self.parent.rows(of_parent=False) if self.parent else {}
        theirs |= self.rows(of_parent=True)
        own = self.rows(of_parent=False)
        return {name: (own[name], theirs.get(name, [])) for name in sorted(own, key=rank_of)}


def setting_of(run: dict):
    return tuple(run[name] for name in SETTING)


def rank_of(setting: tuple):
    """Sorts the record's preset on GPUs before all others."""
    preset, device, ranks, *others = setting
    return preset != "record", device.startswith("cpu"), -int(ranks), device, others


def read_claim(folder: Path):
    """What a folder's record.json says. Raises LedgerError where that has no usable form."""
    path = folder / "record.json"
    try:
        claim = json.loads(read_text(path))
        if claim["published"]:
            # Of a script that has no published log there is no loss.
            known = {name: value or 0 for name, value in claim["published"].items()}
            "{number:d} {minutes:f} {val_loss:f} {n:d} {hardware} {source}".format(**known)
        if claim["equality"]:
            "{largest:f} {of}".format(**claim["equality"])
        float(claim["modelled_minutes"] or 0)
        if tuple(claim) not in (FIELDS, (*FIELDS, "reads")) or claim["gain"] not in (None, *SEEDS):
            raise ValueError(f"it needs {', '.join(FIELDS)}, and gain is loss, time or null")
        if not isinstance(claim["parent"], str | None):
            raise ValueError("parent is the name of a folder, or null")
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{path} is no record.json: {error!r}; see records/README.md") from None
    return claim


def run_row(record: str, where: str, log: Log):
    """The table's row of a run. Raises LedgerError where it is not finished."""
    if not log.finished:
        raise LedgerError(f"{log.path} is not a finished run: {'; '.join(log.notes)}")
    found = {"jobs": "1", **log.header, **log.final, "record": record, "folder": where,
             "source_sha256": log.source_sha256, "log_sha256": sha256(read_text(log.path))}
    return {name: found.get(name) or "" for name in COLUMNS}


def rows_of(folder: Path):
    """The rows of a record's finished runs, its parent's that lie beside them too."""
    found = []
    for place in places(folder):
        for path in seed_files(place):
            with contextlib.suppress(LedgerError, ValueError, KeyError):  # `verify` tells
                where = place.relative_to(folder).as_posix()
                found.append(run_row(folder.name, where, read_log(path)))
    return found


def find_records(folder: Path):
    """The records of a folder of records, oldest first, with their runs."""
    if not folder.is_dir():
        raise LedgerError(f"{folder}: no such folder; give records/ or one record's folder")
    found = {}
    for path in sorted(folder.glob("*/record.json")):
        home, claim = path.parent, read_claim(path.parent)
        found[home.name] = Record(home, claim, rows_of(home), found.get(claim["parent"]))
    return list(found.values())


def table_of(records: list) -> str:
    """What runs.csv has to be: a row of each log of the records."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerows(record.runs)
    return text.getvalue()


# ---- What a script says of itself ----
ANSWERS = {}  # by source and flags


def apart(function, *what):
    """What `function(*what)` returns in a fresh process, where a script can do as it likes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # seconds, which are spent once
    with ProcessPoolExecutor(1, context) as fresh:
        return fresh.submit(function, *what).result()


def module_of(script: Path) -> ModuleType:
    """A script that was run, though not as the main program. Only in a process of its own."""
    module = sys.modules["record"] = ModuleType("record")  # where dataclasses look for it
    module.__file__ = str(script)
    exec(compile(read_text(script), script, "exec"), vars(module))
    return module


def flag_words(flags: dict):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def read_settings(script: Path, words: list):
    """(hyperparameters as headers show them, training tokens or None). Raises LedgerError."""
    found, tokens = {}, None
    try:
        module = module_of(script)
        cfg = module.parse_args(words)
        for name, value in vars(cfg).items():
            found[name] = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if hasattr(module, "schedule"):
            lengths = [module.schedule(step, cfg).seq_len for step in range(cfg.num_iterations)]
            tokens = cfg.sequences_per_step * sum(lengths)
    except BaseException as error:  # whatever the script raises
        raise LedgerError(str(error) or repr(error)) from None
    return found, tokens


def ask(script: Path, flags: dict):
    """What `read_settings` finds, once for each source and flags. Raises LedgerError."""
    words = flag_words(flags)
    key = read_text(script), *words
    if not re.search(r"^def parse_args\(", key[0], re.M):
        return {}, None  # it might train at once
    try:
        ANSWERS[key] = ANSWERS.get(key) or apart(read_settings, script, words)
    except (LedgerError, BrokenProcessPool) as error:
        raise LedgerError(f"{script.parent.name}/{script.name}: {error}") from None
    return ANSWERS[key]


def settings_of(script: Path, flags: dict):
    """A script's hyperparameters with these flags, as headers show them. Raises LedgerError."""
    return ask(script, flags)[0]


def tokens_of(script: Path) -> int | None:
    """Training tokens of a run of the preset record; None where the script does not tell."""
    return ask(script, {"preset": "record"})[1]


def p_below(losses: list, target: float) -> float | None:
    """One-sided t-test that the mean lies below `target`; None without spread."""
    if len(set(losses)) < 2:
        return None
    from scipy import stats  # a second, which what needs no p-value does not wait for

    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def compare(runs: list, others: list) -> dict | None:
    """Runs against others of the same seeds, and so the same data; None where there are none.

    Runs that shared their machine have no times.
    """
    ours, theirs, ratios, alone = [], [], [], True
    for run, other in itertools.product(runs, others):
        if run["seed"] == other["seed"]:
            ours.append(float(run["val_loss"]))
            theirs.append(float(other["val_loss"]))
            ratios.append(float(run["train_time_ms"]) / float(other["train_time_ms"]))
            alone &= run["jobs"] == other["jobs"] == "1"
    if not ours:
        return None
    found = {"difference": statistics.fmean(ours) - statistics.fmean(theirs), "n": len(ours),
             "p": None, "smallest_shown": None, "shown": "",
             "time": statistics.median(ratios) if alone else None,
             "fastest": min(ratios) if alone else None, "slowest": max(ratios) if alone else None}
    if len(set(map(operator.sub, ours, theirs))) > 1:
        from scipy import stats

        test = stats.ttest_rel(ours, theirs)
        low, high = test.confidence_interval(1 - SIGNIFICANCE)
        found |= {"p": float(test.pvalue), "smallest_shown": float(high - low) / 2}
        if test.pvalue < SIGNIFICANCE and round(found["difference"], 4):  # not by rounding alone
            found["shown"] = "*"
    elif ours == theirs and len(ours) > 1:
        found["p"] = 1.0
    return found


def shows_gain(record: Record) -> bool:
    """Whether enough runs of one setting bear a record's claim of a gain, by the rules."""
    gain = record.claim["gain"]
    for runs, others in record.measured().values():
        found = compare(runs, others)
        if not found or found["n"] < SEEDS[gain]:
            continue
        better = found["difference"] < 0
        if gain == "loss" and found["shown"] and better:
            return True
        alone = found["time"] is not None
        if gain == "time" and alone and found["slowest"] < 1 and (better or not found["shown"]):
            return True
    return False
