"""Logs and sources as files: what every part of the ledger reads, and the error that it raises.

A log of this project is the script's source, or `source sha256: …` in its place; a line of 100 `=`;
a header of `key: value` lines; such a line again; a line for each step and validation; last `---`
and a block of `key: value` lines.
"""

import ast
import contextlib
import difflib
import hashlib
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

RULE = "=" * 100  # the line between the parts of a log
BANNER = "# ==== "  # begins the line between a record's own part of its script and the harness


class LedgerError(Exception):
    """Input that cannot be used, or a run that failed: what is wrong, in one line."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status  # of the process


def read_text(path: Path) -> str:
    """The file as text, newlines as they are. Raises LedgerError where it is empty or no text."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise LedgerError(f"{path}: byte {error.start} is not text; give a log or script") from None
    if not text.strip():
        raise LedgerError(f"{path} is empty; give another log or script")
    if "\0" in text.partition("\n")[0]:  # further on, a model's sample of text may have some
        raise LedgerError(f"{path}: byte {text.index(chr(0))} is not text; give a log or script")
    return text


def write_file(path: Path, text: str) -> None:
    """Replace a file in one step, so that neither reader nor crash finds half of it."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="")
    os.replace(temporary, path)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split_banner(source: str) -> tuple[str, str]:
    """(a record's own part, the harness from its banner on); the harness is empty without one."""
    above, banner, below = ("\n" + source).partition("\n" + BANNER)
    return above[1:], (banner + below)[1:]


def parent_and_change(source: str) -> list[str]:
    """What the docstring says after `Parent: ` and, to the end of the paragraph, `Change: `."""
    found = []
    for pattern in (r"^Parent: (\S+)\.", r"\bChange: (.*?)(?:\n\n|\"\"\")"):
        match = re.search(pattern, source, re.M | re.S)
        found.append(match[1] if match else "")
    return found


def own_part(source: str) -> str:
    """What a log is held to: all above the banner but prose and the imports, which serve all."""
    above = re.sub(r'\A(#!.*\n)?""".*?"""\n', "", split_banner(source)[0], flags=re.S)
    return re.sub(r"^(import|from) .*\n", "", above, flags=re.M).strip()


def changed_lines(old: str, new: str) -> tuple[int, int]:
    """Lines (added, removed) between two texts."""
    added = removed = 0
    sides = old.splitlines(), new.splitlines()
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, *sides, autojunk=False).get_opcodes():
        if tag != "equal":
            removed += i2 - i1
            added += j2 - j1
    return added, removed


def split_files(source: str) -> dict[str, str]:
    """The files that a public log joined, by name; the first has the name train_gpt.py."""
    rule = r"(?:# ?)?[-=#]{10,}\n"
    parts = re.split(rf"^{rule}#? ?([\w./-]+\.py)\n{rule}", source, flags=re.M)
    return dict(zip(["train_gpt.py", *parts[1::2]], parts[::2]))


def assignments(source: str) -> list[tuple[str, ast.expr, bool]]:
    """(name, value, whether it is a field of class Hyperparameters) of a module, in order."""
    found = []
    with contextlib.suppress(SyntaxError, ValueError):
        for outer in ast.parse(split_files(source)["train_gpt.py"]).body:
            inside = isinstance(outer, ast.ClassDef) and outer.name == "Hyperparameters"
            for node in outer.body if inside else [outer]:
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    found.append((ast.unparse(target), node.value, inside))
    return found


@dataclass
class Log:
    """A training log. Times are milliseconds, None where the log did not time the step."""

    path: Path
    source: str | None = None
    source_sha256: str | None = None  # also where a `source sha256:` line stands for the source
    body: str = ""  # all that follows the source
    header: dict[str, str] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    train: dict[int, tuple] = field(default_factory=dict)  # step: (next token's loss, time)
    val: dict[int, tuple] = field(default_factory=dict)  # step: (validation loss, time)
    planned_steps: int | None = None
    error: str | None = None
    notes: list[str] = field(default_factory=list)  # what is odd: stopped, resumed, failed, cut
    token_stages: list[tuple] = field(default_factory=list)  # (end step, tokens of a step)

    @property
    def last_step(self) -> int:
        return max(self.val | self.train, default=0)

    @property
    def finished(self) -> bool:
        """Validated at its last step and, if it is ours, ended by its final block."""
        validated = self.planned_steps is None or self.planned_steps in self.val
        return validated and ("val_loss" in self.final or "run_id" not in self.header)

    @property
    def val_loss(self) -> float:
        """The last validation loss, to all the digits that the log has."""
        return float(self.final.get("val_loss") or self.val[max(self.val)][0])

    @property
    def train_time_ms(self) -> float | None:
        return float(self.final.get("train_time_ms", 0)) or self.val[max(self.val)][1]

    @property
    def resumed(self) -> bool:
        return "\nresumed at " in self.body

    @property
    def simulated(self) -> bool:
        """Whether its GPU was an interpreter on the host, whose runs measure nothing."""
        return self.header.get("device", "").startswith("host standing in for")

    def tokens_until(self, step: int) -> float | None:
        """Training tokens of the first `step` steps, or None where the log does not tell."""
        total = start = 0
        for end, tokens in self.token_stages:
            total += max(0, min(step, end) - start) * tokens
            start = end
        return total or None


def split_source(text: str) -> tuple[str | None, str | None, str]:
    """(source, its sha256, all that follows it) of a log; both None where it has no source."""
    begin = len(RULE) + 1 if text.startswith(RULE + "\n") else 0
    match = re.compile(rf"^{RULE}(\n|\Z)", re.M).search(text, begin)
    end = match.start() if match else begin
    before, body = text[begin:end], text[end:]
    if stand_in := re.fullmatch(r"source sha256: ([0-9a-f]{64})\n", before):
        return None, stand_in[1], body
    if re.search(r"^(import|from) \w", before, re.M):
        # A printed source ends in its own newline and in the one that print adds.
        source = re.sub(r"\n\n\Z", "\n", before)
        return source, sha256(source), body
    return None, None, before + body  # a console's output


def read_log(path: Path) -> Log:
    """Parse a log of this project. Raises LedgerError where it is none."""
    return parse_log(path, read_text(path))


def parse_log(path: Path, text: str) -> Log:
    log = Log(path, *split_source(text))
    parse_body(log)
    if not log.val and not log.train:
        reason = "give a log"
        if not log.source and re.search(r"^(import|from) \w", text, re.M):
            reason = "a script, or a log cut inside its source"
        raise LedgerError(f"{path} has no training steps: {log.error or reason}")
    if log.error:
        log.notes.append(f"failed: {log.error}")
    if not log.finished and not any("stopped" in note for note in log.notes):
        log.notes.append(f"stopped at step {log.last_step} of {log.planned_steps}")
    if "tokens" in log.final:
        log.token_stages = [(math.inf, int(log.final["tokens"]) / max(1, log.last_step))]
    return log


def parse_body(log: Log) -> None:
    """Read header, steps and final block from the text that follows the source."""
    *lines, rest = log.body.split("\n")
    if re.fullmatch(r"step:.* step_avg:[\d.]+ms", rest):
        lines.append(rest)
    elif rest:  # a number that was cut looks like a whole one
        log.notes.append(f"cut in the middle of a line ({rest[:40]!r}), which is not used")
    block, rules = None, 0  # the block of `key: value` lines that is being read
    for line in lines:
        pair = re.fullmatch(r"(\w+): (.*)", line)
        if line == RULE:
            rules += 1
            block = log.header if rules == 1 else None
        elif line == "---":
            block = log.final
            block.clear()
        elif line.startswith("step:"):
            block = None
            parse_step(log, line)
        elif line.startswith(("resumed at ", "stopped at ")):
            log.notes.append(line)
        elif line.startswith("error:"):
            log.error = line.removeprefix("error:").strip()
        elif block is not None and pair:
            block[pair[1]] = pair[2]
        elif block is log.final:  # what a restart of a finished run adds
            block = None
    if "val_loss" in log.final:  # it went on, or the words stood in its sample of text
        log.error = None
        log.notes = [note for note in log.notes if not note.startswith("stopped at ")]


def parse_step(log: Log, line: str) -> None:
    """Read a `step:1/10 val_loss:…` line; the last line of a step wins.

    Of several tokens ahead train_loss is the sum: other scripts' compare with next_token_loss.
    """
    pairs = dict(pair.partition(":")[::2] for pair in line.split())
    step, _, planned = pairs["step"].partition("/")
    found = {}
    try:
        for name in pairs.keys() & {"train_loss", "next_token_loss", "val_loss", "train_time"}:
            found[name] = float(pairs[name].removesuffix("ms"))
        step = int(step)
        log.planned_steps = int(planned) if planned else log.planned_steps
    except ValueError:
        log.notes.append(f"a step line that cannot be read: {line[:60]!r}")
        return
    train_loss = found.get("next_token_loss", found.get("train_loss"))
    val_loss, ms = found.get("val_loss"), found.get("train_time")
    if "nan" in pairs.get("step_avg", ""):  # warm-up steps, before the clock is set to zero
        ms = None if step else 0.0
    if val_loss is not None:
        log.val[step] = (val_loss, ms)
    if val_loss is None or train_loss is not None:
        log.train[step] = (train_loss, ms)
