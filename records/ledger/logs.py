"""Logs and sources as files: what every part of the ledger reads, and the errors that it raises.

A log of this project is the script's source, or `source sha256: …` in its place; a line of 100 `=`;
a header of `key: value` lines; such a line again; a line for each step and validation; last `---`
and a block of `key: value` lines.
"""

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
    """Input that cannot be used, or a run that failed; what is wrong, in one line."""

    status = 2  # of the process


class RunError(LedgerError):
    status = 1


# ---- Files ------------------------------------------------------------------

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


# ---- Sources ----------------------------------------------------------------

def split_banner(source: str) -> tuple[str, str]:
    """(a record's own part, the harness from its banner on); the harness is empty without one."""
    above, banner, below = ("\n" + source).partition("\n" + BANNER)
    return above[1:], (banner + below)[1:]


def docstring(source: str) -> str:
    """The script's first string in triple quotes, on one line."""
    match = re.search(r'"""(.*?)"""', source, re.S)
    return " ".join(match[1].split()) if match else ""


def own_part(source: str) -> str:
    """What a log is held to: all above the banner but its docstring and imports.

    The docstring is prose, and imports serve the harness too.
    """
    above = re.sub(r'\A(#!.*\n)?""".*?"""\n', "", split_banner(source)[0], flags=re.S)
    return re.sub(r"^(import|from) .*\n", "", above, flags=re.M).strip()


def changed_lines(old: list[str], new: list[str]) -> tuple[int, int]:
    """Lines (added, removed) between two texts."""
    added = removed = 0
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            removed += i2 - i1
            added += j2 - j1
    return added, removed


# ---- Logs -------------------------------------------------------------------

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
        """Whether its GPU was the host's memory and an interpreter, whose runs measure nothing."""
        return self.header.get("device", "").startswith("host standing in for")

    def tokens_until(self, step: int) -> float | None:
        """Training tokens of the first `step` steps, or None where the log does not tell."""
        total, start = 0, 0
        for end, tokens in self.token_stages:
            total += max(0, min(step, end) - start) * tokens
            start = end
        return total if self.token_stages else None

    def reach(self, loss: float) -> tuple | None:
        """(step, time) of the first validation at or below `loss`, or None."""
        hits = [(step, ms) for step, (value, ms) in sorted(self.val.items()) if value <= loss]
        return hits[0] if hits else None


def split_source(text: str) -> tuple[str | None, str | None, str]:
    """(source, its sha256, all that follows it) of a log; both None where it has no source."""
    begin = len(RULE) + 1 if text.startswith(RULE + "\n") else 0
    match = re.compile(rf"^{RULE}(\n|\Z)", re.M).search(text, begin)
    before, body = ("", text) if not match else (text[begin:match.start()], text[match.start():])
    if stand_in := re.fullmatch(r"source sha256: ([0-9a-f]{64})\n", before):
        return None, stand_in[1], body
    if re.search(r"^(import|from) \w", before, re.M):
        # A printed source ends in its own newline and in the one that print adds.
        source = before[:-1] if before.endswith("\n\n") else before
        return source, sha256(source), body
    return None, None, before + body  # a console's output


def read_log(path: Path) -> Log:
    """Parse a log. Raises LedgerError where it is none."""
    return parse_log(path, read_text(path))


def parse_log(path: Path, text: str) -> Log:
    log = Log(path, *split_source(text))
    parse_body(log)
    if not log.val and not log.train:
        script = re.search(r"^(import|from) \w", text, re.M) and not log.source
        reason = "a script, or a log cut inside its source" if script else "give a log"
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
        elif block is not None:
            if found := re.fullmatch(r"(\w+): (.*)", line):
                block[found[1]] = found[2]
            elif block is log.final:  # what a restart of a finished run adds
                block = None
    if "val_loss" in log.final:  # it went on, or the words stood in its sample of text
        log.error = None
        log.notes = [note for note in log.notes if not note.startswith("stopped at ")]


def parse_step(log: Log, line: str) -> None:
    """Read a `step:1/10 val_loss:…` line; the last line of a step wins.

    Where a script predicts several tokens ahead its train_loss is their sum: the next token's loss
    stands beside it, which alone can be compared with other scripts'.
    """
    pairs = dict(pair.partition(":")[::2] for pair in line.split())
    train = pairs.get("next_token_loss", pairs.get("train_loss"))
    try:
        number, _, planned = pairs["step"].partition("/")
        step = int(number)
        ms = float(pairs["train_time"].removesuffix("ms")) if "train_time" in pairs else None
        val_loss = float(pairs["val_loss"]) if "val_loss" in pairs else None
        train_loss = float(train) if train else None
        log.planned_steps = int(planned) if planned else log.planned_steps
    except ValueError:
        log.notes.append(f"a step line that cannot be read: {line[:60]!r}")
        return
    if "nan" in pairs.get("step_avg", ""):  # warm-up steps, before the clock is set to zero
        ms = None if step else 0.0
    if val_loss is not None:
        log.val[step] = (val_loss, ms)
    if val_loss is None or train_loss is not None:
        log.train[step] = (train_loss, ms)
