"""Other people's logs: their forms, and which of a folder's are a record's. No source is run."""

import contextlib
import functools
import re
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ledger.logs import LedgerError, Log, places, read_log, read_text, seed_files, split_source

TARGET = 3.28  # nats per token, of logs that name no target
DATED = re.compile(r"(\d{4}-\d{2}(?:-\d{2})?)[-_ ]*(.*)")
BASELINE = re.compile(r"baseline|comparison|control|parent|previous|original|\bold\b", re.I)


def read_any(path: Path) -> Log:
    """A log of this project or of any public form, with a validation. Raises LedgerError."""
    text = re.sub(r"^s:(\d+) tel:", r"step:\1 val_loss:", read_text(path), flags=re.M)
    log = read_log(path, re.sub(r"^s:(\d+) trl:", r"step:\1 train_loss:", text, flags=re.M))
    for peers in re.findall(r"Rank \d+ is connected to (\d+) peer ranks", log.body):  # gloo
        log.header["world_size"] = str(int(peers) + 1)
    if gpus := re.findall(r"^\|\s+\d+\s+NVIDIA ", log.body, re.M):  # nvidia-smi
        log.header["world_size"] = str(len(gpus))
    if not log.val:
        raise LedgerError(f"{path} has no validation in {log.last_step} steps; give a longer run")
    return log


@dataclass
class Group:
    """Runs of one folder that can be pooled: one source, number of steps and number of ranks."""

    folder: Path
    origin: str | None  # the older folder whose source this is
    hinted: bool  # whether the files are called a baseline's
    ranks: int
    linked: bool = False  # whether the lineage's README links one of them as the record's log
    logs: list[Log] = field(default_factory=list)

    @property
    def order(self):
        """Sorts the folder's record before its other groups."""
        ms = statistics.fmean(log.train_time_ms or 0 for log in self.logs)
        misses = statistics.fmean(log.val_loss for log in self.logs) > TARGET
        doubts = not self.linked, bool(self.origin), self.hinted
        return *doubts, -self.ranks, -len(self.logs), misses, ms

    def words(self, record: "Group") -> str:
        """What it is, beside the folder's record."""
        first, other = self.logs[0], record.logs[0]
        if self is record and self.linked:
            return "record"
        if self.origin:
            return f"baseline: {self.origin}"
        if self.hinted:
            return "called a baseline"
        if self is record:
            return "record"
        if self.ranks != record.ranks:
            return f"{self.ranks} rank(s) instead of {record.ranks}"
        if first.source_sha256 != other.source_sha256:
            return "another source"
        return f"{first.planned_steps} steps instead of {other.planned_steps}"


@functools.cache
def links_of(readme: Path) -> list:
    """The files and folders that a README, where there is one, links as logs."""
    if not readme.is_file():
        return []
    text = readme.read_text(errors="replace")
    targets = re.findall(r"\[logs?\]\(([^()\s]+)\)", text)
    return [(readme.parent / target).resolve() for target in targets]


def is_linked(log: Log, folder: Path) -> bool:
    """Whether a README up to three folders above links the log, or a folder inside that has it."""
    path, folder = log.path.resolve(), folder.resolve()
    links = []
    for above in folder.parents[:3]:
        links += links_of(above / "README.md")
    while folder in path.parents:
        if path in links:
            return True
        path = path.parent
    return False


def log_files(folder: Path):
    return sorted({*folder.rglob("*.txt"), *folder.rglob("*.log")})


@functools.cache
def sources_of(folder: Path) -> set:
    """sha256 of the sources in a folder's logs."""
    found = set()
    for file in log_files(folder):
        with contextlib.suppress(LedgerError):
            found.add(split_source(read_text(file))[1])
    return found - {None}


def origins(folder: Path):
    """sha256 of a source: the oldest dated folder beside this one, if older, that has it."""
    found = {}
    for older in sorted(folder.parent.iterdir()):
        if older < folder and DATED.fullmatch(folder.name) and DATED.fullmatch(older.name):
            found = dict.fromkeys(sources_of(older), older.name) | found
    return found


def folder_groups(folder: Path):
    """The logs of a folder, pooled, its record's first. Raises LedgerError where none validates."""
    if any(DATED.fullmatch(path.name) and path.is_dir() for path in folder.iterdir()):
        raise LedgerError(f"{folder} is a folder of records; give one of its folders")
    files, logs = log_files(folder), []
    for file in files:
        with contextlib.suppress(LedgerError):
            logs.append(read_any(file))
    if not logs:
        raise LedgerError(f"{folder} has no log with validation losses; give a folder that has")
    if len(logs) < len(files):
        print(f"{folder}: {len(files) - len(logs)} of {len(files)} files are not used: no log, or "
              "no validation loss in it", file=sys.stderr)
    found, older = {}, origins(folder.resolve())
    for log in logs:
        log.body = ""  # a thousand of them are large
        where = log.path.relative_to(folder)
        hinted = bool(BASELINE.search(str(where)))
        ranks = int(log.header.get("world_size", 0))
        key = (log.source_sha256 or where.parent, log.planned_steps, ranks, hinted)
        group = Group(folder, older.get(log.source_sha256), hinted, ranks)
        group = found.setdefault(key, group)
        group.linked = group.linked or is_linked(log, folder)
        group.logs.append(log)
    return sorted(found.values(), key=lambda group: group.order)


def list_groups(folder: Path):
    """The groups of each folder of logs in a folder, or of the one that it is."""
    folders, found = sorted(folder.glob("*/")), []
    if DATED.fullmatch(folder.resolve().name) or {*folder.glob("*.txt"), *folder.glob("*.log")}:
        folders = [folder]
    for path in folders:
        with contextlib.suppress(LedgerError):
            found.append(folder_groups(path))
    return found


def source_of(operand: str) -> str:
    """The source of a script, a log, or a folder: its train_gpt.py, train*.py or record's log."""
    path = Path(operand)
    scripts = [path] if path.suffix == ".py" else [*path.glob("train*.py")]
    for script in scripts:
        if script.name == "train_gpt.py" or len(scripts) == 1:
            return read_text(script)
    log = folder_groups(path)[0].logs[0] if path.is_dir() else read_any(path)
    if not log.source:
        raise LedgerError(f"{path} has no source in it; give the script or another log")
    return log.source


def logs_of(operand: str):
    """(record's name, logs) of a log, or of a folder's record; what is left out is said."""
    path = Path(operand)
    name = path.resolve().parent.name if path.stem == "log" else path.stem
    for folder in (path.resolve(), *path.resolve().parents)[::-1]:
        if DATED.fullmatch(folder.name):
            name = DATED.fullmatch(folder.name)[2]
    files = [path]
    if path.is_dir():  # a folder of logs, or the first one of a record
        files = seed_files(path) or seed_files(next(iter(places(path)), path))
    if files:
        return name, [read_any(file) for file in files]
    record, *others = folder_groups(path)
    for group in others:
        print(f"{path}: {len(group.logs)} log(s) are left out, {group.words(record)}",
              file=sys.stderr)
    return name, record.logs
