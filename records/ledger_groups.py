"""Folders of logs: which of them are the record's, and which a baseline's or another machine's."""

import contextlib
import functools
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from ledger_base import LedgerError, read_text
from ledger_logs import Log, read_log, seed_files, split_source
from ledger_rules import PUBLIC_TARGET
from ledger_sources import diff_sources
from ledger_stats import p_below, scipy_stats, std_of

DATED = re.compile(r"(\d{4}-\d{2}(?:-\d{2})?)[-_ ]*(.*)")
BASELINE = re.compile(r"baseline|comparison|control|parent|previous|original|\bold\b", re.I)


def date_and_name(folder: Path) -> tuple[str, str]:
    """("2025-01-26", "BatchSize") of 2025-01-26_BatchSize; no date is an empty one."""
    match = DATED.fullmatch(folder.name)
    return (match[1], match[2] or match[1]) if match else ("", folder.name)


def record_name(path: Path) -> str:
    """The name of the record that a folder or log belongs to, or else its own."""
    for folder in (path, *path.parents):
        if DATED.fullmatch(folder.name) and folder.is_dir():
            return date_and_name(folder)[1]
    return path.parent.name if path.name == "log.txt" else path.stem


@dataclass
class Group:
    """Runs of one folder that can be pooled: one source, number of steps and number of ranks."""

    folder: Path
    logs: list[Log]
    origin: str | None  # the older folder whose source this is
    hinted: bool  # whether the files are called a baseline's

    @property
    def ranks(self) -> int:
        return int(self.logs[0].header.get("world_size", 0))

    @property
    def source(self) -> str | None:
        return self.logs[0].source

    @property
    def rank(self) -> tuple:
        """Sorts the folder's record before its other groups."""
        times = [log.train_time_ms or 0 for log in self.logs]
        return (bool(self.origin), self.hinted, -self.ranks, -len(self.logs),
                statistics.fmean(times))

    def words(self, record: "Group") -> str:
        """What it is, beside the folder's record."""
        if self.origin:
            return f"baseline: source of {self.origin}"
        if self.hinted:
            return "called a baseline"
        if self is record:
            return "record"
        if self.ranks != record.ranks:
            return f"{self.ranks or 'unknown'} rank(s) instead of {record.ranks or 'unknown'}"
        if self.logs[0].sha256 != record.logs[0].sha256:
            return "another source"
        return f"{self.logs[0].planned_steps} steps instead of {record.logs[0].planned_steps}"


def log_files(folder: Path) -> list[Path]:
    return sorted({*folder.rglob("*.txt"), *folder.rglob("*.log")})


def read_logs(files: list[Path], show=None) -> list[Log]:
    """The logs among the files that have a validation, calling `show()` for each file."""
    logs = []
    for file in files:
        with contextlib.suppress(LedgerError):
            logs.append(read_log(file))
        if show:
            show()
    return [log for log in logs if log.val]


@functools.cache
def source_hashes(folder: Path) -> frozenset[str]:
    """The sha256 of every source in a folder's logs."""
    found = set()
    for file in log_files(folder):
        with contextlib.suppress(LedgerError):
            found.add(split_source(read_text(file))[1])
    return frozenset(found - {None})


def origins(folder: Path) -> dict[str, str]:
    """sha256 of a source: the oldest dated folder beside this one, if older, that has it."""
    if not DATED.fullmatch(folder.name):
        return {}
    older = sorted((path for path in folder.parent.iterdir() if path.is_dir()
                    and DATED.fullmatch(path.name) and path.name < folder.name), reverse=True)
    return {sha: path.name for path in older for sha in source_hashes(path)}


def groups_of(folder: Path, logs: list[Log], older: dict[str, str]) -> list[Group]:
    """The logs of a folder, pooled; the group that is the record's comes first."""
    found = {}
    for log in logs:
        where = log.path.relative_to(folder)
        key = (log.sha256 or where.parent, log.planned_steps, log.header.get("world_size"),
               bool(BASELINE.search(str(where))))
        found.setdefault(key, []).append(log)
    groups = [Group(folder, pool, older.get(pool[0].sha256), key[-1])
              for key, pool in found.items()]
    return sorted(groups, key=lambda group: group.rank)


def folder_groups(folder: Path) -> list[Group]:
    """The groups of a folder's logs. Raises LedgerError where no log has a validation."""
    files = seed_files(folder) or log_files(folder)
    logs = read_logs(files)
    if not logs:
        raise LedgerError(f"{folder} has no log with validation losses in {len(files)} .txt or "
                          ".log files; give a folder that has")
    if len(logs) < len(files):
        print(f"{folder}: {len(files) - len(logs)} of {len(files)} files are not used: no log, or "
              "no validation loss in it", file=sys.stderr)
    if seed_files(folder):
        return [Group(folder, logs, None, False)]
    return groups_of(folder, logs, origins(folder.resolve()))


def logs_of(operand: str | Path) -> list[Log]:
    """The log at a path, or those of a folder's record; what is left out is said."""
    path = Path(operand)
    if not path.is_dir():
        return [read_log(path)]
    record, *others = folder_groups(path)
    for group in others:
        print(f"{path}: {len(group.logs)} log(s) are left out, {group.words(record)}",
              file=sys.stderr)
    return record.logs


def source_of(operand: str | Path) -> str:
    """The source of a folder, script or log. Raises LedgerError where there is none.

    A folder's source is its train_gpt.py, else that in its record's log, else its only train*.py.
    """
    path = Path(operand)
    if path.suffix == ".py" and not path.is_dir():
        return read_text(path)
    if not path.is_dir():
        sources = [read_log(path).source]
    elif (path / "train_gpt.py").exists():
        return read_text(path / "train_gpt.py")
    else:
        scripts = list(path.glob("train*.py"))
        try:
            sources = [log.source for log in logs_of(path)]
        except LedgerError:
            if not scripts:
                raise
            sources = []
        if not any(sources) and len(scripts) == 1:
            return read_text(scripts[0])
    found = next(filter(None, sources), None)
    if not found:
        raise LedgerError(f"{path} has no source in it; give the script or another log")
    return found


# -----------------------------------------------------------------------------
# Rows of a table
# -----------------------------------------------------------------------------


def group_row(group: Group, record: Group, previous: str | None, tested: bool) -> dict:
    """One row, as numbers: what the group is, and its runs against the public target."""
    losses = [log.val_loss for log in group.logs]
    times = [log.train_time_ms for log in group.logs]
    tokens = group.logs[0].tokens_per_step
    date, name = date_and_name(group.folder)
    diff = diff_sources(previous, group.source) if previous and group.source else None
    std = std_of(losses)
    return {
        "date": date,
        "name": name,
        "runs": group.words(record),
        "n": len(losses),
        "ranks": group.ranks or None,
        "steps": group.logs[0].planned_steps or group.logs[0].last_step,
        "tokens_per_step": tokens and round(tokens),
        "val_loss_mean": round(statistics.fmean(losses), 6),
        "val_loss_std": None if std is None else round(std, 6),
        "p_target": p_below(losses, PUBLIC_TARGET) if len(losses) > 1 and tested else None,
        "train_time_ms_median": None if None in times else statistics.median(times),
        "lines_added": diff["added"] if diff else None,
        "lines_removed": diff["removed"] if diff else None,
    }


def foreign_rows(folder: Path) -> list[dict]:
    """Rows of a folder of log folders, or of one such folder, that this project did not write.

    Says on standard error how many logs it has read, and on a terminal while it reads.
    """
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    alone = DATED.fullmatch(folder.resolve().name) or any(
        path.suffix in (".txt", ".log") for path in folder.iterdir())
    folders = [folder] if alone else inside
    files = {path: log_files(path) for path in folders}
    total, done = sum(map(len, files.values())), 0

    def show():
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(f"\r\x1b[2Kreading {done} of {total} files", end="", file=sys.stderr, flush=True)

    try:
        tested = bool(scipy_stats())
    except LedgerError as error:
        print(f"{error}; without it they are left out", file=sys.stderr)
        tested = False
    rows, previous, used = [], None, 0
    older = origins(folder.resolve()) if alone else {}
    for path in folders:
        logs = read_logs(files[path], show)
        for log in logs:
            log.body = ""  # a thousand of them are large
        used += len(logs)
        if not logs:
            continue
        groups = groups_of(path, logs, older)
        for group in groups:
            against = previous if group is groups[0] else None
            rows.append(group_row(group, groups[0], against, tested))
            if group.logs[0].source:
                older.setdefault(group.logs[0].sha256, path.name)
        previous = groups[0].source or previous
    end = "\r\x1b[2K" if sys.stderr.isatty() else ""
    print(f"{end}read {used} logs in {total} files of {len(folders)} folder(s)", file=sys.stderr)
    return rows
