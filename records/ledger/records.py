"""The records: a folder each, with a claim, a script, a page and logs; the rules; what runs show.

There are two ladders: records/ has records by time, records/optimizers/ those by steps.

All runs of a record are in its logs/, from any person and machine: their headers tell the
setting, and a file's name is made from what is in it.
"""

import contextlib
import json
import math
import re
import statistics
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType

from ledger.logs import LedgerError, Log, read_run, read_text

FOLDER_NAME = re.compile(r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])_[A-Za-z0-9_]+")
LABEL = re.compile(r"_(o\d+(?:[a-z]\d?)?|\d+[a-z]\d?)_")  # in names of steps and results
BY_STEPS = re.compile(r"_o(\d+)([a-z]?)(\d?)_")  # the number of the result, and the step to it
SIGNIFICANCE = 0.01  # what a p-value has to stay under
FULL_SIZE = {"target_loss": "3.28", "val_tokens": "10485760", "val_digest": None,
             "train_digest": None, "val_files": "data/fineweb10B/fineweb_val_*.bin",
             "train_files": "data/fineweb10B/fineweb_train_*.bin"}
SMALL = {"target_loss": "1.78", "val_tokens": "65536", "val_digest": "1407c02db97ab9a7",
         # Of the first MiB, as scripts took it up to November 2026, and of samples of the file
         "train_digest": ("30407b9a0e1c536a", "5fe79b8eb005c0dc"),
         "val_files": "data/pocket/pocket_val_*.bin",
         "train_files": "data/pocket/pocket_train_*.bin"}
RULES = {  # what the header of every run with a preset has to have; None: what older runs have
    "time": {"record": FULL_SIZE, "pocket": SMALL},
    "steps": {"record": FULL_SIZE, "pocket": SMALL | {
        "target_loss": "1.75", "val_tokens": "32768", "val_digest": "736533de61cf53fa"}},
}
PRESETS = tuple(RULES["time"])
# The keys of record.json, with the types of their values, and those of its parts
CLAIM = {"change": (str,), "parent": (str, NoneType), "published": (dict, NoneType),
         "equality": (dict, NoneType)}
EQUALITY = {"largest": (int, float), "of": (str,)}
SOURCE = {"hardware": (str, NoneType), "source": (str,), "val_loss": (int, float, NoneType),
          "n": (int, NoneType)}
PUBLISHED = {"time": SOURCE | {"number": (int,), "minutes": (int, float)},
             "steps": SOURCE | {"result": (int,), "steps": (int,)}}


def ladder_of(folder: Path) -> str:
    """The ladder of a record's folder: "time" or "steps", a key of RULES."""
    return "steps" if folder.resolve().parent.name == "optimizers" else "time"


def place_in_ladder(folder: Path) -> tuple:
    """What folders are sorted by: o20a1, o20a, o20b, o20, o21; then all others by their name."""
    step = BY_STEPS.search(folder.name)
    if not step:
        return math.inf, folder.name
    return int(step[1]), step[2] or "~", step[3] or "~"


def record_folders(folder: Path) -> list:
    """The folders of all records in `folder`, which is records/: those by time, those by steps.

    Oldest first, or by the number of the result, steps to it before it. This is the one list of
    records that all tools share.
    """
    found = []
    for ladder in (folder, folder / "optimizers"):
        for home in sorted(ladder.glob("*"), key=place_in_ladder):
            if FOLDER_NAME.fullmatch(home.name) or (home / "record.json").exists():
                found.append(home)
    return found


@dataclass
class Record:
    """A record's folder, what it claims, and its finished runs."""

    folder: Path
    claim: dict
    parent: "Record | None" = None
    minutes: str = ""  # of the public record that it retells, as public.toml has them
    leads_to: int | None = None  # the public record, or result, to which it is a step
    logs: list[Log] = field(default_factory=list)

    def __post_init__(self):
        self.path = self.folder / "train_gpt.py"
        self.ladder = ladder_of(self.folder)
        self.published = self.claim["published"] or {}
        self.number = self.published.get("number")  # of the public record that it is, by time
        self.result = self.published.get("result")  # of the public result that it is, by steps
        self.retells = self.number or self.result
        step = LABEL.search(self.folder.name)
        first = f"#{self.number}" if self.number else step and step[1]
        name = self.folder.name[step.end() :] if step else self.folder.name.partition("_")[2]
        self.name = f"{first} {name}" if first else name

    @property
    def script(self) -> str:
        return read_text(self.path)

    def runs(self) -> dict:
        """Its logs by setting: full size first, then most ranks and runs."""
        def place(item):
            setting, logs = item
            return setting[0] != "record", -int(setting[2]), -len(logs), setting

        found = {}
        for log in self.logs:
            found.setdefault(log.setting, []).append(log)
        return dict(sorted(found.items(), key=place))


def check(part: dict, kinds: dict):
    """Raise ValueError where a value has another type."""
    for key, types in kinds.items():
        if type(part.get(key)) not in types:
            raise ValueError(f"{key} is {part.get(key)!r:.99}")


def read_claim(folder: Path) -> dict:
    """What a folder's record.json says. Raises LedgerError."""
    try:
        claim = json.loads(read_text(folder / "record.json"))
        check(claim, CLAIM)
        if claim["published"]:
            check(claim["published"], PUBLISHED[ladder_of(folder)])
        if claim.get("equality"):
            check(claim["equality"], EQUALITY)
    except (AttributeError, LedgerError, OSError, RecursionError, ValueError) as error:
        raise LedgerError(f"{folder.name}/record.json: {error}; see records/README.md") from None
    return dict.fromkeys(CLAIM) | claim


def read_public(folder: Path) -> dict:
    """Number: the row of each public record, of public.toml."""
    path = folder / "public.toml"
    rows = tomllib.loads(read_text(path))["record"] if path.exists() else []
    return {row["number"]: row for row in rows}


def ancestors(record: Record | None) -> list:
    """A record, its parent, and so on."""
    found = []
    while record:
        found.append(record)
        record = record.parent
    return found


def find_records(folder: Path) -> list:
    """The records of `record_folders(folder)`, with their logs. Raises LedgerError."""
    found, public = {}, read_public(folder)
    homes = record_folders(folder)
    if not any((home / "record.json").exists() for home in homes):
        return []  # public folders have such names, too
    for home in homes:
        claim = read_claim(home)
        found[home.name] = record = Record(home, claim)
        record.logs = [read_run(path) for path in sorted(home.glob("logs/*.txt"))]
        if record.number:
            record.minutes = public.get(record.number, {}).get("minutes", "")
    for record in found.values():
        parent = found.get(record.claim["parent"])
        if record.ladder == "steps" or parent and parent.folder.name < record.folder.name:
            record.parent = parent if record not in ancestors(parent) else None
    for record in found.values():
        step = BY_STEPS.search(record.folder.name)
        if step and record.ladder == "steps" and not record.result:  # one of our own has no label
            record.leads_to = int(step[1])
        for step in ancestors(record.parent):
            if step.ladder != record.ladder or step.retells or step.leads_to:
                break
            step.leads_to = record.retells
    return list(found.values())


# ---- What runs show ----
@dataclass
class Comparison:
    """Runs against others of the same seeds, pair by pair."""

    losses: list[tuple]  # ours and theirs, by seed
    difference: float  # of the means, ours less theirs
    ratios: list[float]  # of times, ours to theirs, by seed
    time: float | None  # the median of the ratios

    def p_value(self) -> float | None:
        """That of the two-sided paired t-test; None without scipy, or where all differ alike."""
        if len({round(a - b, 9) for a, b in self.losses}) > 1:
            with contextlib.suppress(ImportError):
                from scipy import stats  # a second, which what needs no p-value does not wait for

                return float(stats.ttest_rel(*zip(*self.losses)).pvalue)
        return None

    def error(self) -> float | None:
        """The standard error of the difference; None of a single pair."""
        gaps = [a - b for a, b in self.losses]
        return statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None

    def is_shown(self) -> bool:
        """Whether the runs show a difference, which is not one of rounding."""
        p = self.p_value()
        return p is not None and p < SIGNIFICANCE and abs(self.difference) > 5e-5


def by_seed(logs: list) -> dict:
    """Seed: the mean loss and the mean time of its runs; on a GPU each one ends elsewhere."""
    found = {}
    for seed in sorted({log.seed for log in logs}):
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
    losses = [(mine[seed][0], theirs[seed][0]) for seed in seeds]
    ours, others = map(statistics.fmean, zip(*losses))
    times = [(mine[seed][1], theirs[seed][1]) for seed in seeds]
    ratios = [a / b for a, b in times if a and b]
    return Comparison(losses, ours - others, ratios, statistics.median(ratios) if ratios else None)
