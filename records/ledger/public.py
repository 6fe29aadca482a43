"""Other people's logs: the forms of the public lineage, and which logs of a folder are a record's.

Nothing of a source that is read here is run.
"""

import ast
import contextlib
import datetime
import itertools
import math
import operator
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from ledger.logs import LedgerError, Log, assignments, parse_log, read_text, split_source

TARGET = 3.28  # nats per token, of logs that name no target
DATED = re.compile(r"(\d{4}-\d{2}(?:-\d{2})?)[-_ ]*(.*)")
BASELINE = re.compile(r"baseline|comparison|control|parent|previous|original|\bold\b", re.I)
SMI_DATE = re.compile(r"^[A-Z][a-z]{2} ([A-Z][a-z]{2} +\d+) [\d:]{8} (\d{4})$", re.M)
LATE = datetime.timedelta(days=31)  # a folder's runs are not made so long after its date
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}


def read_any(path: Path) -> Log:
    """A log of this project or of any public form. Raises LedgerError where it is none."""
    text = re.sub(r"^s:(\d+) tel:", r"step:\1 val_loss:", read_text(path), flags=re.M)
    log = parse_log(path, re.sub(r"^s:(\d+) trl:", r"step:\1 train_loss:", text, flags=re.M))
    for name, version in re.findall(r"^Running (pytorch|python) (\S+)", log.body, re.I | re.M):
        log.header["torch" if name.lower() == "pytorch" else "python"] = version
    for peers in re.findall(r"Rank \d+ is connected to (\d+) peer ranks", log.body):  # gloo
        log.header["world_size"] = str(int(peers) + 1)
    devices = re.findall(r"^\|\s+\d+\s+(NVIDIA .*?)\s{2,}", log.body, re.M)  # nvidia-smi
    if devices:
        log.header["device"] = f"{len(devices)}x {devices[0]}"
        log.header["world_size"] = str(len(devices))
    for peak in re.findall(r"^peak memory (?:consumption|allocated): (\d+)", log.body, re.M):
        log.final["peak_memory_mib"] = peak
    log.token_stages = log.token_stages or scheduled_stages(log) or constant_stage(log)
    return log


def evaluate(node: ast.expr, names: dict):
    """Numbers, known names, lists, + - * / and //; None where more would have to be run."""
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.Name(id=name) | ast.Attribute(attr=name):  # args.seq_len
            return names.get(name)
        case ast.Tuple() | ast.List():
            return [evaluate(item, names) for item in node.elts]
        case ast.Call():  # TrainingStage(duration=1/3, batch_size=…)
            return {one.arg: evaluate(one.value, names) for one in node.keywords}
        case ast.BinOp() if type(node.op) in OPERATORS:
            a, b = evaluate(node.left, names), evaluate(node.right, names)
            if isinstance(a, (int, float)) and isinstance(b, (int, float)):
                with contextlib.suppress(ArithmeticError):
                    return OPERATORS[type(node.op)](a, b)
    return None


def settings(log: Log) -> dict[str, object]:
    """What the source sets, as far as it can be told, and the number of ranks."""
    found = {}
    for name, value, _ in assignments(log.source or ""):
        found[name] = evaluate(value, found)
    found["ranks"] = int(log.header.get("world_size", 0))
    if re.search(r"grad_accum_steps = 8 ?// ?world_size", log.source or ""):
        found["ranks"] = 8
    return found


def constant_stage(log: Log) -> list[tuple[float, float]]:
    """[(infinity, tokens of a step)]; empty where nothing tells."""
    found = settings(log)
    # A batch in tokens; one sequence a rank; a batch in sequences; a batch in tokens.
    for names in (("train_batch_size",), ("ranks", "train_seq_len"),
                  ("batch_size", "sequence_length"), ("batch_size",)):
        tokens = 1
        for name in names:
            number = found.get(name)
            tokens *= number if isinstance(number, int) else 0
        if tokens > 1024:  # a small one is of sequences, not of tokens
            return [(math.inf, tokens)]
    return []


def scheduled_stages(log: Log) -> list[tuple[float, float]]:
    """(end, tokens of a step) of each stage of a batch that grows, or empty.

    A stage ends with the step in which its share of the scheduled steps is used up.
    """
    found, told = settings(log), []
    extension, batches = found.get("train_bs_extension"), found.get("train_bs_schedule")
    for batch in batches if isinstance(batches, list) else ():
        told.append((1 / len(batches), batch))
    for stage in found.get("TRAINING_STAGES") or ():
        if "duration" in stage:
            told.append((stage["duration"], stage.get("batch_size")))
        else:
            extension = stage.get("batch_size")
    steps, total, stages = found.get("num_scheduled_iterations"), 0, []
    if told and None not in (steps, *itertools.chain(*told)):
        for share, tokens in told:
            total += steps * share
            stages.append((math.ceil(round(total, 6)), tokens))
        stages.append((math.inf, extension or tokens))
    return stages


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
    def order(self) -> tuple:
        """Sorts the folder's record before its other groups."""
        times = [log.train_time_ms or 0 for log in self.logs]
        misses = statistics.fmean(log.val_loss for log in self.logs) > TARGET
        return (bool(self.origin), self.hinted, -self.ranks, -len(self.logs), misses,
                statistics.fmean(times))

    def words(self, record: "Group") -> str:
        """What it is, beside the folder's record."""
        first, other = self.logs[0], record.logs[0]
        if self.origin:
            return f"baseline: source of {self.origin}"
        if self.hinted:
            return "called a baseline"
        if self is record:
            return "record"
        if self.ranks != record.ranks:
            return f"{self.ranks} rank(s) instead of {record.ranks}"
        if first.source_sha256 != other.source_sha256:
            return "another source"
        return f"{first.planned_steps} steps instead of {other.planned_steps}"


def log_files(folder: Path) -> list[Path]:
    return sorted({*folder.rglob("*.txt"), *folder.rglob("*.log")})


def read_logs(files: list[Path]) -> list[Log]:
    """The logs among the files that have a validation."""
    logs = []
    for file in files:
        with contextlib.suppress(LedgerError):
            logs.append(read_any(file))
    return [log for log in logs if log.val]


def is_late(folder: Path, body: str) -> bool:
    """Whether a log's nvidia-smi is much younger than its folder, which is then misdated."""
    found = SMI_DATE.search(body)
    with contextlib.suppress(TypeError, ValueError):  # one of the two dates is missing
        made = datetime.datetime.strptime(f"{found[1]} {found[2]}", "%b %d %Y")
        return made - datetime.datetime.fromisoformat(folder.name[:10]) > LATE
    return False


def origins(folder: Path) -> dict[str, str]:
    """sha256 of a source: the oldest dated folder beside this one, if older, that has it."""
    found = {}
    for older in sorted(folder.parent.iterdir()) if DATED.fullmatch(folder.name) else ():
        if DATED.fullmatch(older.name) and older.name < folder.name:
            for file in log_files(older):
                with contextlib.suppress(LedgerError):
                    _, source, body = split_source(read_text(file))
                    if source and not is_late(older, body):
                        found.setdefault(source, older.name)
    return found


def groups_of(folder: Path, logs: list[Log], older: dict[str, str]) -> list[Group]:
    """The logs of a folder, pooled; the group that is the record's comes first."""
    found = {}
    for log in logs:
        where = log.path.relative_to(folder)
        hinted = bool(BASELINE.search(str(where)))
        source = log.source_sha256 or where.parent
        key = (source, log.planned_steps, log.header.get("world_size"), hinted)
        group = Group(folder, [], older.get(log.source_sha256), hinted)
        found.setdefault(key, group).logs.append(log)
    return sorted(found.values(), key=lambda group: group.order)


def folder_groups(folder: Path) -> list[Group]:
    """The groups of a folder's logs. Raises LedgerError where no log has a validation."""
    if any(DATED.fullmatch(path.name) and path.is_dir() for path in folder.iterdir()):
        raise LedgerError(f"{folder} is a folder of records; give one of its folders")
    files = log_files(folder)
    logs = read_logs(files)
    if not logs:
        raise LedgerError(f"{folder} has no log with validation losses in {len(files)} .txt or "
                          ".log files; give a folder that has")
    if len(logs) < len(files):
        print(f"{folder}: {len(files) - len(logs)} of {len(files)} files are not used: no log, or "
              "no validation loss in it", file=sys.stderr)
    return groups_of(folder, logs, origins(folder.resolve()))


def list_groups(folder: Path) -> list[list[Group]]:
    """The groups of each folder of logs in a folder, or of the one that it is."""
    folders, older, files = [folder], {}, log_files(folder)
    if DATED.fullmatch(folder.resolve().name):
        older = origins(folder.resolve())
    elif folder not in {path.parent for path in files}:
        folders = sorted(path for path in folder.iterdir() if path.is_dir())
    found, used = [], 0
    for path in folders:
        logs = read_logs(log_files(path))
        used += len(logs)
        if logs:
            found.append(groups_of(path, logs, older))
        for log in logs:
            if log.source_sha256 and not is_late(path, log.body):
                older.setdefault(log.source_sha256, path.name)
            log.body = ""  # a thousand of them are large
    print(f"read {used} logs in {len(files)} files of {len(folders)} folder(s)", file=sys.stderr)
    return found
