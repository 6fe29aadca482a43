"""What operands stand for, sources and logs, and what changed between two sources."""

import ast
import difflib
import re
import sys
from pathlib import Path

from ledger.logs import LedgerError, Log, assignments, read_text, split_files
from ledger.public import DATED, folder_groups, read_any
from ledger.table import seed_files

HEADING = re.compile(r"# [-=]{2,} (\w.*?) ?[-=]{3,}")  # of our sections, and the harness's banner
DEFINITION = re.compile(r"(?:async )?(?:def|class) (\w+)")


def source_of(operand: str) -> str:
    """The source of a script, a log, or a folder: its train_gpt.py, record's log or train*.py."""
    path = Path(operand)
    if path.suffix == ".py" and not path.is_dir():
        return read_text(path)
    if not path.is_dir():
        source = read_any(path).source
    elif (path / "train_gpt.py").exists():
        return read_text(path / "train_gpt.py")
    else:
        scripts = list(path.glob("train*.py"))
        source = None
        try:
            source = folder_groups(path)[0].logs[0].source
        except LedgerError:
            if not scripts:
                raise
        if not source and len(scripts) == 1:
            return read_text(scripts[0])
    if not source:
        raise LedgerError(f"{path} has no source in it; give the script or another log")
    return source


def logs_of(operand: str) -> tuple[str, list[Log]]:
    """(record's name, logs) of a log, or of a folder's record; what is left out is said."""
    path = Path(operand)
    name, files = path.stem.replace("log", path.resolve().parent.name), [path]
    for folder in (path.resolve(), *path.resolve().parents)[::-1]:
        if DATED.fullmatch(folder.name):
            name = DATED.fullmatch(folder.name)[2]
    if path.is_dir():
        files = seed_files(path, "loss")
    if files:
        return name, [read_any(file) for file in files]
    record, *others = folder_groups(path)
    for group in others:
        print(f"{path}: {len(group.logs)} log(s) are left out, {group.words(record)}",
              file=sys.stderr)
    return name, record.logs


def sections(source: str) -> dict[str, list[str]]:
    """Title: lines; by our headings, else by definition, and by joined file."""
    by_heading = re.search(rf"^{HEADING.pattern}$", source, re.M)
    found = {}
    for file, text in split_files(source).items():
        title = "(docstring and imports)" if by_heading else "(module level)"
        for line in text.splitlines():
            match = HEADING.fullmatch(line) if by_heading else DEFINITION.match(line)
            if match:
                title = match[1]
            elif not by_heading and re.match(r"[^\s#)\]}]", line):
                title = "(module level)"
            name = title if file == "train_gpt.py" else f"{file}: {title}"
            found.setdefault(name, []).append(line)
    return found


def hyperparameters(source: str) -> dict[str, str]:
    """Field: value as written, of class Hyperparameters; of `row(record, pocket)`, both values."""
    found = {}
    for name, value, is_field in assignments(source):
        if is_field and isinstance(value, ast.Call):
            found[name] = ", ".join(map(ast.unparse, value.args))
        elif is_field:
            found[name] = ast.unparse(value)
    return found


def diff_sources(a: str, b: str) -> dict:
    """What changed from source `a` to source `b`, as numbers and lines."""
    before, after = sections(a), sections(b)
    changed, added, removed = [], 0, 0
    for title in after | before:
        lines = difflib.unified_diff(before.get(title, []), after.get(title, []), lineterm="")
        lines = list(lines)[2:]
        if lines:
            signs = "".join(line[0] for line in lines)
            plus, minus = signs.count("+"), signs.count("-")
            added += plus
            removed += minus
            changed.append({"title": title, "added": plus, "removed": minus, "lines": lines})
    old, new, fields = hyperparameters(a), hyperparameters(b), []
    for name in old | new:
        if old.get(name) != new.get(name):
            fields.append({"name": name, "a": old.get(name), "b": new.get(name)})
    return {"added": added, "removed": removed, "hyperparameters": fields, "sections": changed}
