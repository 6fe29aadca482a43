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

from ledger.logs import LedgerError, Log, parse_log, read_text, split_source

TARGET = 3.28  # nats per token, of logs that name no target
DATED = re.compile(r"(\d{4}-\d{2}(?:-\d{2})?)[-_ ]*(.*)")
BASELINE = re.compile(r"baseline|comparison|control|parent|previous|original|\bold\b", re.I)
NVIDIA_SMI_DATE = re.compile(r"^[A-Z][a-z]{2} ([A-Z][a-z]{2} +\d+) [\d:]{8} (\d{4})$", re.M)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}
LATE = datetime.timedelta(days=31)  # a folder's runs are not made so long after its date


def read_any(path: Path) -> Log:
    """A log of this project or of any public form. Raises LedgerError where it is none."""
    text = re.sub(r"^s:(\d+) tel:", r"step:\1 val_loss:", read_text(path), flags=re.M)
    log = parse_log(path, re.sub(r"^s:(\d+) trl:", r"step:\1 train_loss:", text, flags=re.M))
    if "run_id" not in log.header:
        read_machine(log)
    if not log.token_stages:
        log.token_stages = token_stages(log)
    return log


def read_machine(log: Log) -> None:
    """Read torch, devices, ranks and memory from the words of the public scripts."""
    for name, version in re.findall(r"^Running (pytorch|python) (\S+)", log.body, re.I | re.M):
        log.header["torch" if name.lower() == "pytorch" else "python"] = version
    if peers := re.search(r"Rank \d+ is connected to (\d+) peer ranks", log.body):  # gloo
        log.header["world_size"] = str(int(peers[1]) + 1)
    if devices := re.findall(r"^\|\s+\d+\s+(NVIDIA .*?)\s{2,}", log.body, re.M):  # nvidia-smi
        log.header["device"] = f"{len(devices)}x {devices[0]}"
        log.header["world_size"] = str(len(devices))
    if peak := re.search(r"^peak memory (?:consumption|allocated): (\d+) MiB", log.body, re.M):
        log.final["peak_memory_mib"] = peak[1]


# ---- Tokens of a step, from the arithmetic of a source's settings -----------

def split_files(source: str) -> dict[str, str]:
    """The files that a public log joined, by name; the first has the name train_gpt.py."""
    rule = r"(?:# ?)?[-=#]{10,}\n"
    parts = re.split(rf"^{rule}#? ?([\w./-]+\.py)\n{rule}", source, flags=re.M)
    return dict(zip(["train_gpt.py", *parts[1::2]], parts[::2]))


def evaluate(node: ast.expr, names: dict):
    """Numbers, known names, tuples, + - * / and //; None where more would have to be run."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):  # args.seq_len
        return names.get(node.attr)
    if isinstance(node, (ast.Tuple, ast.List)):
        return [evaluate(item, names) for item in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        sides = evaluate(node.left, names), evaluate(node.right, names)
        if isinstance(sides[0], (int, float)) and isinstance(sides[1], (int, float)):
            with contextlib.suppress(ArithmeticError):
                return OPERATORS[type(node.op)](*sides)
    return None


def assignments(source: str) -> list[tuple[str, ast.expr, bool]]:
    """(name, value, whether it is a field of class Hyperparameters) of a module, in order."""
    found = []
    try:
        nodes = ast.parse(split_files(source)["train_gpt.py"]).body
    except (SyntaxError, ValueError):
        return found
    for outer in nodes:
        inside = isinstance(outer, ast.ClassDef) and outer.name == "Hyperparameters"
        for node in outer.body if inside else [outer]:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found.append((ast.unparse(target), node.value, inside))
    return found


def settings(source: str) -> dict[str, object]:
    """Assigned values that can be told; a list of TrainingStage is one of their keywords."""
    found = {}
    for name, value, _ in assignments(source):
        found[name] = evaluate(value, found)
        if name == "TRAINING_STAGES":
            found[name] = []
            for call in getattr(value, "elts", ()):
                told = {}
                for keyword in getattr(call, "keywords", ()):
                    told[keyword.arg] = evaluate(keyword.value, found)
                found[name].append(told)
    return found


def token_stages(log: Log) -> list[tuple[float, float]]:
    """(end, tokens of a step) of each stage of a run; empty where nothing tells."""
    source = log.source or ""
    found = settings(source)
    for name, value in log.header.items():
        if value.isdigit():
            found[name] = int(value)
    if stages := scheduled_stages(found):
        return stages
    summed = re.search(r"grad_accum_steps = 8 ?// ?world_size", source)
    found["ranks"] = 8 if summed else found.get("world_size")
    # A batch in tokens; one sequence a rank; a batch in sequences; a batch in tokens.
    for names in (("train_batch_size",), ("ranks", "train_seq_len"),
                  ("batch_size", "sequence_length"), ("batch_size",)):
        numbers = [found.get(name) for name in names]
        if all(isinstance(number, int) for number in numbers):
            if len(numbers) > 1 or numbers[0] > 1024:  # a small one is of sequences, not of tokens
                return [(math.inf, math.prod(numbers))]
    return []


def scheduled_stages(found: dict) -> list[tuple[float, float]]:
    """The stages of a source whose batch grows: of equal length, or each with its share.

    In the public lineage these are `train_bs_schedule` and, later, a list of `TrainingStage`. A
    stage ends with the step in which its share of the scheduled steps is used up.
    """
    batches = found.get("train_bs_schedule")
    batches = batches if isinstance(batches, list) else []
    shares = [1 / len(batches) for _ in batches]
    extension = found.get("train_bs_extension")
    for stage in found.get("TRAINING_STAGES", ()):
        if "duration" in stage:
            shares.append(stage["duration"])
            batches.append(stage.get("batch_size"))
        else:
            extension = stage.get("batch_size")
    steps = found.get("num_scheduled_iterations")
    if not batches or None in (steps, *shares, *batches):
        return []
    ends = [math.ceil(round(steps * share, 6)) for share in itertools.accumulate(shares)]
    return [*zip(ends, batches), (math.inf, extension or batches[-1])]


# ---- Folders of logs --------------------------------------------------------

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

    def kind(self, record: "Group") -> tuple[str, str]:
        """(a word for a table, the same in a sentence): what it is, beside the folder's record."""
        first, other = self.logs[0], record.logs[0]
        if self.origin:
            return "baseline", f"baseline: source of {self.origin}"
        if self.hinted:
            return "baseline?", "called a baseline"
        if self is record:
            return "record", "record"
        if self.ranks != record.ranks:
            ranks = self.ranks or "unknown"
            return "ranks", f"{ranks} rank(s) instead of {record.ranks or 'unknown'}"
        if first.source_sha256 != other.source_sha256:
            return "source", "another source"
        return "steps", f"{first.planned_steps} steps instead of {other.planned_steps}"


def log_files(folder: Path) -> list[Path]:
    return sorted({*folder.rglob("*.txt"), *folder.rglob("*.log")})


def read_logs(files: list[Path]) -> list[Log]:
    """The logs among the files that have a validation."""
    logs = []
    for file in files:
        with contextlib.suppress(LedgerError):
            logs.append(read_any(file))
    return [log for log in logs if log.val]


def is_late(folder: Path, text: str) -> bool:
    """Whether a log's nvidia-smi is much younger than its folder, which is then misdated."""
    match = NVIDIA_SMI_DATE.search(text)
    try:
        made = datetime.datetime.strptime(f"{match[1]} {match[2]}", "%b %d %Y")
        return made - datetime.datetime.fromisoformat(folder.name[:10]) > LATE
    except (TypeError, ValueError):  # one of the two dates is missing
        return False


def origins(folder: Path) -> dict[str, str]:
    """sha256 of a source: the oldest dated folder beside this one, if older, that has it.

    A run long after its folder's date tells that the folder is misdated, and no one's origin.
    """
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
        origin = older.get(log.source_sha256)
        found.setdefault(key, Group(folder, [], origin, hinted)).logs.append(log)
    return sorted(found.values(), key=lambda group: group.order)


def folder_groups(folder: Path) -> list[Group]:
    """The groups of a folder's logs. Raises LedgerError where no log has a validation."""
    files = log_files(folder)
    if any(DATED.fullmatch(path.name) and path.is_dir() for path in folder.iterdir()):
        raise LedgerError(f"{folder} is a folder of records; give one of its folders")
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
    alone = DATED.fullmatch(folder.resolve().name)
    for path in folder.iterdir():
        alone = alone or path.suffix in (".txt", ".log")
    folders = [folder] if alone else sorted(path for path in folder.iterdir() if path.is_dir())
    found, files, used = [], 0, 0
    older = origins(folder.resolve()) if alone else {}
    for path in folders:
        logs = read_logs(log_files(path))
        files += len(log_files(path))
        used += len(logs)
        groups = groups_of(path, logs, older)
        for log in logs:
            if log.source_sha256 and not is_late(path, log.body):
                older.setdefault(log.source_sha256, path.name)
            log.body = ""  # a thousand of them are large
        if groups:
            found.append(groups)
    print(f"read {used} logs in {files} files of {len(folders)} folder(s)", file=sys.stderr)
    return found
