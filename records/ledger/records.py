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
# Flags that a time depends on, though no loss does: a gain in time needs them alike
TIMED_ALIKE = ("warmup_steps", "sequences_per_forward", "head_chunks")
CLAIM = {  # the keys of record.json, in any order, those of published and those of equality
    "change": str, "parent": str | None, "published": dict | None, "gain": str | None,
    "equality": dict | None, "reads": str | None}
PUBLISHED = {
    "number": int, "minutes": int | float, "hardware": str, "source": str,
    "val_loss": int | float | None, "n": int | None}  # no loss without a published log
EQUALITY = {"largest": int | float, "of": str}


@dataclass
class Record:
    """A record's folder, what it claims, and its finished runs."""

    folder: Path
    claim: dict
    parent: "Record | None" = None
    logs: list[Log] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # what its other logs are

    def __post_init__(self):
        self.path = self.folder / "train_gpt.py"
        self.name = self.folder.name.partition("_")[2]
        self.minutes = ""
        self.published = self.claim["published"] or {}
        if self.published:
            self.name = f"#{self.published['number']} {self.name}"
            self.minutes = f"{self.published['minutes']:g}"

    @property
    def script(self) -> str:
        return read_text(self.path)

    @property
    def on_gpu(self) -> bool:
        return any(log.on_gpu for log in self.logs)

    def runs(self) -> dict:
        """Its logs by setting, those of the preset record first."""
        found = {}
        order = sorted(
            self.logs, key=lambda log: (log.preset != "record", log.setting, log.seed))
        for log in order:
            found.setdefault(log.setting, []).append(log)
        return found

    def measured(self):
        """(its logs, its parent's) in each setting of its own."""
        theirs = self.parent.runs() if self.parent else {}
        for setting, logs in self.runs().items():
            yield logs, theirs.get(setting, [])


def check(name: str, found: dict, kinds: dict, needed):
    """Raise ValueError where a key is missing or unknown, or a value of another kind."""
    if not isinstance(found, dict):
        raise ValueError(f"{name} has no keys")
    for key in needed:
        if key not in found:
            raise ValueError(f"{name} lacks {key}")
    for key, value in found.items():
        if key not in kinds:
            raise ValueError(f"{name} has {key}; known are {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            raise ValueError(f"{name} has {key} of another kind, {value!r:.60}")


def read_claim(folder: Path) -> dict:
    """What a folder's record.json says. Raises LedgerError."""
    try:
        claim = json.loads(read_text(folder / "record.json"))
        check("it", claim, CLAIM, ("change", "parent", "published"))
        for key, kinds in (("published", PUBLISHED), ("equality", EQUALITY)):
            if claim.get(key):
                check(key, claim[key], kinds, kinds)
        if any(part in claim["change"] for part in ("|", "\n", "<!--")):
            raise ValueError("change has a |, a line break or a comment, which no table can show")
        if claim.get("equality") and not claim["published"]:
            raise ValueError("equality is with a public record, and published names none")
        if claim.get("gain") not in (None, *SEEDS):
            raise ValueError(f"gain is {claim['gain']}; it is {', '.join(SEEDS)} or null")
    except (LedgerError, OSError, RecursionError, ValueError) as error:
        raise LedgerError(f"{folder.name}/record.json: {error}; see records/README.md") from None
    return claim


def find_records(folder: Path):
    """(records of a folder, oldest first, with their logs; what is wrong with other folders)."""
    found, wrong = {}, []
    for home in sorted(folder.iterdir()):
        if not (home / "record.json").exists() and not FOLDER_NAME.fullmatch(home.name):
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
    header, final = log.header, log.final
    if not log.finished:
        raise LedgerError(f"is no finished run: it ends at step {log.last_step} of "
                          f"{log.planned_steps}, or before its results")
    try:
        numbers = [FLOOR[log.preset], log.seed, int(header["world_size"]),
                   float(header["target_loss"]), float(final["val_loss"]),
                   float(final["train_time_ms"]), *log.val[log.last_step]]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"its numbers are {numbers}")
        for name in ("device", "torch", "threads"):
            if name not in header:
                raise KeyError(name)
        if "parameters" not in final:  # its last line: some are cut off
            raise KeyError("parameters")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
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
    found = {}
    for seed in {log.seed for log in logs}:
        some = [log for log in logs if log.seed == seed]
        times = [log.measured_ms for log in some if log.measured_ms]
        time = statistics.fmean(times) if times else None
        found[seed] = statistics.fmean(log.val_loss for log in some), time
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
    if len({round(a - b, 9) for a, b in zip(losses, their_losses)}) > 1:
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
        lower = found.shown and found.difference < 0
        higher = found.shown and found.difference > 0
        if gain == "loss" and lower and len(found.seeds) >= SEEDS["loss"]:
            return True
        faster = len(found.ratios) >= SEEDS["time"] and max(found.ratios) < 1
        alike = {tuple(log.header.get(name) for name in TIMED_ALIKE) for log in logs + others}
        if gain == "time" and faster and not higher and len(alike) == 1:
            return True
    return False


def is_retuned(log: Log, other: Log) -> bool:
    """Whether a rate that both know, or the length of validation rows, differs."""
    for name, value in log.header.items():
        known = name.endswith("_lr") or name == "val_seq_len"
        if known and other.header.get(name, value) != value:
            return True
    return False
