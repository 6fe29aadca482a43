"""The records: a folder each, with a claim, a script, a page and logs; the rules; what runs show.

All runs of a record lie in its logs/, whoever made them and wherever: their headers tell the
setting, and a file's name is made from what is in it.
"""

import json
import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from ledger.logs import LedgerError, Log, read_log, read_text

FOLDER_NAME = re.compile(r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])_[A-Za-z0-9_]+")
SIGNIFICANCE = 0.01  # what a p-value has to stay under
SEEDS = {"loss": 10, "time": 5}  # pairs of runs that a gain of a kind needs
RULES = {  # what the header of every run with a preset has to have; None: not known here
    "record": {"target_loss": "3.28", "val_tokens": "10485760", "val_digest": None,
               "train_digest": None, "val_files": "data/fineweb10B/fineweb_val_*.bin",
               "train_files": "data/fineweb10B/fineweb_train_*.bin"},
    "pocket": {"target_loss": "1.78", "val_tokens": "65536", "val_digest": "1407c02db97ab9a7",
               "train_digest": "30407b9a0e1c536a", "val_files": "data/pocket/pocket_val_*.bin",
               "train_files": "data/pocket/pocket_train_*.bin"},
}
# Nats per token that no honest model reaches: half of what xz needs for the pocket's validation
# bytes after all 44 MB of its training text (0.94), and less than any published run on FineWeb.
FLOOR = {"record": 2.0, "pocket": 0.47}
NEEDED = {  # what the header of a run's log tells, and what can be made of it
    "preset": RULES.__getitem__, "device": str, "torch": str, "seed": int, "world_size": int,
    "target_loss": float}
# Keys of record.json, in any order
CLAIM = {"change": str, "parent": str | None, "published": dict | None, "gain": str | None,
         "modelled_minutes": int | float | None, "equality": dict | None, "reads": str | None,
         "station": str}  # of a record without a public number: the oracle that it is held to
PUBLISHED = {"number": int, "minutes": int | float, "hardware": str, "source": str,
             "val_loss": int | float | None, "n": int | None}  # no loss without a published log
EQUALITY = {"largest": int | float, "of": str}
# Flags that a time depends on, though no loss does: a gain in time needs them alike
TIMED_ALIKE = ("warmup_steps", "sequences_per_forward", "head_chunks")


@dataclass
class Record:
    """A record's folder, what it claims, and its finished runs."""

    folder: Path
    claim: dict
    parent: "Record | None" = None
    logs: list[Log] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # what its other logs are

    @property
    def path(self) -> Path:
        return self.folder / "train_gpt.py"

    @property
    def script(self) -> str:
        return read_text(self.path)

    @property
    def published(self) -> dict:
        return self.claim["published"] or {}

    @property
    def name(self) -> str:
        name = self.folder.name.partition("_")[2]
        return f"#{self.published['number']} {name}" if self.published else name

    def runs(self) -> dict:
        """Its logs by setting, those of the preset record first."""
        found = {}
        for log in sorted(self.logs, key=lambda log: log.seed):
            found.setdefault(log.setting, []).append(log)
        order = sorted(found, key=lambda setting: (setting[0] != "record", setting))
        return {setting: found[setting] for setting in order}

    def measured(self):
        """(its logs, its parent's) in each setting of its own."""
        theirs = self.parent.runs() if self.parent else {}
        return [(logs, theirs.get(setting, [])) for setting, logs in self.runs().items()]


def check(name: str, found: dict, kinds: dict, needed):
    """Raise LedgerError where a key is missing or unknown, or a value of another kind."""
    if not isinstance(found, dict):
        raise LedgerError(f"{name} has no usable form: {found!r:.60}; see records/README.md")
    for key in needed:
        if key not in found:
            raise LedgerError(f"{name} lacks {key}; see records/README.md")
    for key, value in found.items():
        if key not in kinds:
            raise LedgerError(f"{name} has {key}; known are {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            kind = getattr(kinds[key], "__name__", kinds[key])
            raise LedgerError(f"{name} has a {key} of another kind, {value!r}; it is {kind}")


def read_claim(folder: Path) -> dict:
    """What a folder's record.json says. Raises LedgerError."""
    name = f"{folder.name}/record.json"
    try:
        claim = json.loads(read_text(folder / "record.json"))
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{name} has no usable form: {error}; see records/README.md") from None
    check(name, claim, CLAIM, needed=("change", "parent", "published"))
    if claim["published"]:
        check(f"{name}: published", claim["published"], PUBLISHED, needed=PUBLISHED)
    if claim.get("equality"):
        check(f"{name}: equality", claim["equality"], EQUALITY, needed=EQUALITY)
    if "|" in claim["change"] or "\n" in claim["change"]:
        raise LedgerError(f"{name} has a change with a | or a line break, which tables cannot show")
    if claim.get("gain") not in (None, *SEEDS):
        raise LedgerError(f"{name} has gain {claim['gain']}; it is {', '.join(SEEDS)} or null")
    return claim


def find_records(folder: Path):
    """(records of a folder, oldest first, with their logs; what is wrong with other folders)."""
    if not folder.is_dir():
        raise LedgerError(f"{folder}: no such folder; give records/ or one record's folder")
    found, wrong = {}, []
    for home in sorted(folder.iterdir()):
        if not (home / "record.json").exists():
            if FOLDER_NAME.fullmatch(home.name):
                wrong.append(f"{home.name}/record.json is missing")
            continue
        try:
            claim = read_claim(home)
        except LedgerError as error:
            wrong.append(str(error))
            continue
        found[home.name] = record = Record(home, claim, found.get(claim["parent"]))
        for path in sorted(home.glob("logs/*.txt")):
            try:
                record.logs.append(read_run(path))
            except (LedgerError, OSError) as error:
                record.damaged.append(f"logs/{path.name}: {error}")
    return list(found.values()), wrong


def read_run(path: Path) -> Log:
    """The log of a finished run of ours. Raises LedgerError."""
    log = read_log(path)
    if not log.finished:
        raise LedgerError(f"is no finished run: it ends at step {log.last_step} of "
                          f"{log.planned_steps}, or before its results")
    try:
        for name, kind in NEEDED.items():
            kind(log.header[name])
        for name in ("val_loss", "train_time_ms"):
            if not math.isfinite(float(log.final[name])):
                raise ValueError(f"{name} is {log.final[name]}")
    except (KeyError, ValueError) as error:
        raise LedgerError(f"cannot be read: {error!r}") from None
    return log


# ---- What runs show ----
@dataclass
class Comparison:
    """Runs against others of the same seeds, and so of the same data, in pairs by seed."""

    seeds: list[int]
    difference: float  # of the mean losses, ours less theirs
    equal: bool  # every loss, to the digit
    p: float | None  # of the two-sided paired t-test; None where all pairs differ alike
    smallest_shown: float | None  # the difference that would be significant
    ratios: list[float]  # of times, ours to theirs, of the pairs that have both
    time: float | None  # ratio of the medians

    @property
    def shown(self) -> bool:
        """Significant, and not by rounding alone."""
        return self.p is not None and self.p < SIGNIFICANCE and round(self.difference, 4) != 0


def p_below(losses: list, target: float) -> float | None:
    """One-sided t-test that the mean lies below `target`; None without spread."""
    if len(set(losses)) < 2:
        return None
    from scipy import stats  # a second, which what needs no p-value does not wait for

    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def by_seed(logs: list) -> dict:
    """Seed: the mean loss and the mean time of its runs; on a GPU each one ends elsewhere."""
    runs = {}
    for log in logs:
        runs.setdefault(log.seed, []).append(log)
    found = {}
    for seed, some in runs.items():
        loss = statistics.fmean(log.val_loss for log in some)
        times = [log.measured_ms for log in some if log.measured_ms]
        found[seed] = loss, statistics.fmean(times) if times else None
    return found


def compare(logs: list, others: list) -> Comparison | None:
    """Runs against others; None where they have no seed in common."""
    mine, theirs = by_seed(logs), by_seed(others)
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return None
    losses, times = zip(*(mine[seed] for seed in seeds))
    their_losses, their_times = zip(*(theirs[seed] for seed in seeds))
    difference = statistics.fmean(losses) - statistics.fmean(their_losses)
    p = smallest_shown = time = None
    if len({a - b for a, b in zip(losses, their_losses)}) > 1:
        from scipy import stats

        test = stats.ttest_rel(losses, their_losses)
        low, high = test.confidence_interval(1 - SIGNIFICANCE)
        p, smallest_shown = float(test.pvalue), float(high - low) / 2
    timed = [pair for pair in zip(times, their_times) if None not in pair]
    if timed:
        ours, other = map(statistics.median, zip(*timed))
        time = ours / other
    ratios = [ours / other for ours, other in timed]
    return Comparison(seeds, difference, losses == their_losses, p, smallest_shown, ratios, time)


def shows_gain(record: Record) -> bool:
    """Whether enough runs of one setting bear a record's claim of a gain, by the rules."""
    gain = record.claim["gain"]
    for logs, others in record.measured():
        found = compare(logs, others)
        if not found or found.seeds != [*range(len(found.seeds))]:
            continue
        alike = all(len({log.header.get(name) for log in logs + others}) == 1
                    for name in TIMED_ALIKE)
        lower = found.shown and found.difference < 0
        higher = found.shown and found.difference > 0
        if gain == "loss" and lower and len(found.seeds) >= SEEDS["loss"]:
            return True
        faster = len(found.ratios) >= SEEDS["time"] and max(found.ratios) < 1
        if gain == "time" and faster and alike and not higher:
            return True
    return False


def is_retuned(log: Log, other: Log) -> bool:
    """Whether a rate that both know, or the length of validation rows, differs."""
    return any(other.header.get(name, value) != value for name, value in log.header.items()
               if name.endswith("_lr") or name == "val_seq_len")
