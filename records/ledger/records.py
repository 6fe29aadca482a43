"""The records: a folder each, with a claim, a script, a page and logs; the rules; what runs show.

All runs of a record lie in its logs/, whoever made them and wherever: their headers tell the
setting, and a file's name is made from what is in it.
"""

import json
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from ledger.logs import LedgerError, Log, read_log, read_text
from ledger.scripts import settings_of

FOLDER_NAME = re.compile(r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])_[A-Za-z0-9]+")
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
KEYS = {  # of record.json, in any order; the first three have to be there
    "change": str, "parent": str | None, "published": dict | None, "gain": str | None,
    "modelled_minutes": float | None, "equality": dict | None, "reads": str | None,
    "station": str}  # of a record without a public number: the oracle that it is held to


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
        """Its logs by setting, what counts most first."""
        found = {}
        for log in sorted(self.logs, key=lambda log: log.seed):
            found.setdefault(log.setting, []).append(log)
        return dict(sorted(found.items(), key=lambda item: rank_of(item[1])))

    def measured(self):
        """(its logs, its parent's) in each setting of its own."""
        theirs = self.parent.runs() if self.parent else {}
        return [(logs, theirs.get(setting, [])) for setting, logs in self.runs().items()]


def rank_of(logs: list):
    """Sorts logs of the record's preset on GPUs before all others."""
    log = logs[0]
    return log.preset != "record", not log.on_gpu, -log.ranks, log.setting


def read_claim(folder: Path):
    """What a folder's record.json says. Raises LedgerError, in words that name what is wrong."""
    path, wrong = folder / "record.json", []
    try:
        claim = json.loads(read_text(path))
        wrong += [f"lacks {name}" for name in [*KEYS][:3] if name not in claim]
        wrong += [f"has {name}; known are {', '.join(KEYS)}" for name in claim if name not in KEYS]
        wrong += [f"has a {name} of another kind, {claim[name]!r}" for name in KEYS & claim.keys()
                  if not isinstance(claim[name], KEYS[name])]
        if claim.get("gain") not in (None, *SEEDS):
            wrong.append(f"has gain {claim['gain']}; it is {', '.join(SEEDS)} or null")
        published = claim.get("published") or {}
        if published:  # of a script that has no published log there is no loss
            known = {name: value or 0 for name, value in published.items()}
            "{number:d} {minutes:f} {val_loss:f} {n:d} {hardware} {source}".format(**known)
        if claim.get("equality"):
            "{largest:f} {of}".format(**claim["equality"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong.append(f"has no usable form: {error!r}")
    if wrong:
        raise LedgerError(f"{folder.name}/{path.name} {wrong[0]}; see records/README.md")
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
            except LedgerError as error:
                record.damaged.append(f"logs/{path.name}: {error}")
    return list(found.values()), wrong


def read_run(path: Path) -> Log:
    """The log of a finished run of ours. Raises LedgerError."""
    log = read_log(path)
    if not log.finished:
        raise LedgerError(f"is no finished run: {'; '.join(log.notes)}")
    try:
        "{device} {torch} {world_size}".format(**log.header)
        float(log.final["val_loss"]) + float(log.final["train_time_ms"]) + log.seed + log.ranks
        RULES[log.preset]
    except (KeyError, ValueError) as error:
        raise LedgerError(f"cannot be read: {error!r}") from None
    return log


def chain_of(records: list) -> list:
    """The longest line of parents and children. All other records stand beside it."""
    longest = []
    for record in records:
        line = [record]
        while line[0].parent:
            line.insert(0, line[0].parent)
        if len(line) > len(longest):
            longest = line
    return longest


def neighbours(record: Record, records: list):
    """(a word, a record) of each one that a page leads to: parent, next ones, those beside."""
    chain = [one.folder for one in chain_of(records)]
    found = []
    for other in records:
        follows = other.parent is record
        if other is record.parent:
            found.append(("Parent", other))
        elif follows and (other.folder in chain or record.folder not in chain):
            found.append(("Next", other))
        elif follows or (other.parent and other.parent is record.parent and other is not record):
            found.append(("Beside", other))
    return found


# ---- What runs show ----
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
        times = [log.measured_ms for log in some if log.measured_ms]
        loss = statistics.fmean(log.val_loss for log in some)
        found[seed] = loss, statistics.fmean(times) if times else None
    return found


def compare(logs: list, others: list) -> dict | None:
    """Runs against others of the same seeds, and so the same data; None where there are none."""
    mine, theirs = by_seed(logs), by_seed(others)
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return None
    losses, times = zip(*(mine[seed] for seed in seeds))
    their_losses, their_times = zip(*(theirs[seed] for seed in seeds))
    found = {"difference": statistics.fmean(losses) - statistics.fmean(their_losses),
             "n": len(seeds), "equal": losses == their_losses, "p": None, "smallest_shown": None,
             "shown": False, "timed": 0, "time": None, "fastest": None, "slowest": None}
    timed = [pair for pair in zip(times, their_times) if None not in pair]
    if timed:
        ratios = [ours / other for ours, other in timed]
        ours, other = map(statistics.median, zip(*timed))
        found |= {"timed": len(timed), "time": ours / other, "fastest": min(ratios),
                  "slowest": max(ratios)}
    if len({a - b for a, b in zip(losses, their_losses)}) > 1:
        from scipy import stats

        test = stats.ttest_rel(losses, their_losses)
        low, high = test.confidence_interval(1 - SIGNIFICANCE)
        found |= {"p": float(test.pvalue), "smallest_shown": float(high - low) / 2}
        # Not by rounding alone
        found["shown"] = bool(test.pvalue < SIGNIFICANCE and round(found["difference"], 4))
    return found


def shows_gain(record: Record) -> bool:
    """Whether enough runs of one setting bear a record's claim of a gain, by the rules."""
    gain = record.claim["gain"]
    for logs, others in record.measured():
        found = compare(logs, others)
        seeds = sorted(by_seed(logs))
        pairs = found["timed" if gain == "time" else "n"] if found else 0
        if pairs < SEEDS[gain] or seeds != [*range(len(seeds))]:
            continue
        better = found["difference"] < 0
        if gain == "loss" and found["shown"] and better:
            return True
        if gain == "time" and found["slowest"] < 1 and (better or not found["shown"]):
            return True
    return False


def is_retuned(record: Record, preset: str) -> bool:
    """Whether a preset's rates, or its validation, differ from those of the record's parent."""
    ours = settings_of(record.path, {"preset": preset})
    theirs = settings_of(record.parent.path, {"preset": preset})
    return any(theirs.get(name, value) != value for name, value in ours.items()
               if name.endswith("_lr") or name.startswith("val_"))
