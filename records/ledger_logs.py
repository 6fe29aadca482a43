"""Logs: this project's, and those of the public lineage in all their forms."""

import ast
import itertools
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from ledger_base import LedgerError, read_text, sha256
from ledger_rules import PUBLIC_TARGET, SIMULATED
from ledger_sources import assignment, known, split_files, statements, values

RULE = "=" * 100  # the line between the parts of a log


@dataclass
class Log:
    """A training log. Times are milliseconds, None where the log did not time the step."""

    path: Path
    source: str | None = None
    sha256: str | None = None  # of the source, also where a `source sha256:` line stands for it
    body: str = ""  # all that follows the source
    header: dict[str, str] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    train: dict[int, tuple] = field(default_factory=dict)  # step: (train_loss or None, time)
    val: dict[int, tuple] = field(default_factory=dict)  # step: (val_loss, time)
    planned_steps: int | None = None
    error: str | None = None
    notes: list[str] = field(default_factory=list)  # what is odd: stopped, resumed, failed, cut

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
    def target(self) -> float:
        return float(self.header.get("target_loss", PUBLIC_TARGET))

    @property
    def resumed(self) -> bool:
        return any(note.startswith("resumed") for note in self.notes)

    @property
    def simulated(self) -> bool:
        """Whether its GPU was the host's memory and an interpreter, whose runs measure nothing."""
        return any(block.get("device", "").startswith(SIMULATED)
                   for block in (self.header, self.final))

    def tokens_until(self, step: int) -> float | None:
        """Training tokens of the first `step` steps, or None where the log does not tell."""
        stages = token_stages(self)
        if not stages:
            return None
        starts = [0, *(end for end, _ in stages)]
        return sum(max(0, min(step, end) - start) * tokens
                   for start, (end, tokens) in zip(starts, stages))

    @property
    def tokens_per_step(self) -> float | None:
        """Training tokens of a step, in the mean; None where the log does not tell."""
        steps = self.planned_steps or self.last_step or 1
        tokens = self.tokens_until(steps)
        return None if tokens is None else tokens / steps

    def reach(self, loss: float) -> tuple | None:
        """(step, time) of the first validation at or below `loss`, or None."""
        return next(((s, ms) for s, (v, ms) in sorted(self.val.items()) if v <= loss), None)

def split_source(text: str) -> tuple[str | None, str | None, str]:
    """(source, its sha256, all that follows it) of a log; both None where it has no source."""
    begin = len(RULE) + 1 if text.startswith(RULE + "\n") else 0
    match = re.compile(rf"^{RULE}(\n|\Z)", re.M).search(text, begin)
    before, body = (text[begin:match.start()], text[match.start():]) if match else ("", text)
    if stand_in := re.fullmatch(r"source sha256: ([0-9a-f]{64})\n", before):
        return None, stand_in[1], body
    if re.search(r"^(import|from) \w", before, re.M):
        # A printed source ends in its own newline and in the one that print adds.
        source = before[:-1] if before.endswith("\n\n") else before
        return source, sha256(source), body
    return None, None, before + body  # a console's output


def read_log(path: Path) -> Log:
    """Parse a log of this project or of any public format. Raises LedgerError where it is none."""
    text = read_text(path)
    log = Log(path, *split_source(text))
    parse_body(log)
    if not log.val and not log.train:
        is_script = log.source is None and re.search(r"^(import|from) \w", text, re.M)
        raise LedgerError(f"{path} has no training steps: "
                          + (log.error or "a script, or a log cut inside its source"
                             * bool(is_script) or "give a log"))
    if log.error:
        log.notes.append(f"failed: {log.error}")
    if not log.finished and not any("stopped" in note for note in log.notes):
        log.notes.append(f"stopped at step {log.last_step} of {log.planned_steps}")
    return log


def parse_body(log: Log) -> None:
    """Read header, steps and final block from the text that follows the source."""
    *lines, rest = log.body.split("\n")
    if re.fullmatch(r"step:.* step_avg:[\d.]+ms", rest):
        lines.append(rest)
    elif rest:  # a number that was cut looks like a whole one
        log.notes.append(f"cut in the middle of a line ({rest[:40]!r}), which is not used")
    part, rules, devices = "header", 0, []
    for line in lines:
        if line == RULE:
            rules += 1
        elif line == "---":
            part, log.final = "final", {}
        elif re.match(r"(step:\d+/\d+|s:\d+) ", line):
            part = "steps"
            parse_step(log, line)
        elif line.startswith(("resumed at ", "stopped at ")):
            log.notes.append(line)
        elif line.startswith("error:"):
            log.error = line.removeprefix("error:").strip()
        elif found := re.match(r"peak memory (?:consumption|allocated): (\d+) MiB", line):
            log.final["peak_memory_mib"] = found[1]
        elif found := re.match(r"Running (pytorch|python) (\S+)", line, re.I):
            log.header["torch" if "torch" in found[1].lower() else "python"] = found[2]
        elif found := re.match(r"\|\s+\d+\s+(NVIDIA .*?)\s{2,}", line):  # nvidia-smi
            devices.append(found[1])
        elif found := re.search(r"Rank \d+ is connected to (\d+) peer ranks", line):  # gloo
            log.header["world_size"] = str(int(found[1]) + 1)
        elif part == "final" or (part == "header" and rules == 1):
            if found := re.fullmatch(r"(\w+): (.*)", line):
                (log.final if part == "final" else log.header)[found[1]] = found[2]
            elif part == "final":  # what a restart of a finished run adds
                part = "end"
    if devices:
        log.header |= {"device": f"{len(devices)}x {devices[0]}", "world_size": str(len(devices))}
    if "val_loss" in log.final:  # it went on, or the words stood in its sample of text
        log.error = None
        log.notes = [note for note in log.notes if not note.startswith("stopped at ")]


def parse_step(log: Log, line: str) -> None:
    """Read a `step:1/10 val_loss:…` or `s:1 tel:…` line; the last line of a step wins."""
    pairs = dict(pair.partition(":")[::2] for pair in line.split())
    try:
        number, _, planned = (pairs.get("step") or pairs["s"]).partition("/")
        step, ms = int(number), pairs.get("train_time")
        ms = float(ms.removesuffix("ms")) if ms else None
        val, train = (float(text) if text else None for text in (
            pairs.get("val_loss", pairs.get("tel")), pairs.get("train_loss", pairs.get("trl"))))
    except ValueError:
        log.notes.append(f"a step line that cannot be read: {line[:60]!r}")
        return
    if planned:
        log.planned_steps = int(planned)
    if "nan" in pairs.get("step_avg", ""):  # warm-up steps, before the clock is set to zero
        ms = None if step else 0.0
    if val is not None:
        log.val[step] = (val, ms)
    if val is None or train is not None:
        log.train[step] = (train, ms)


def token_stages(log: Log) -> list[tuple[float, float]]:
    """(end, tokens of a step) of each stage of a run; empty where nothing tells.

    They come from the log's own numbers, else from the arithmetic of its source's settings.
    """
    if "tokens" in log.final:
        return [(math.inf, int(log.final["tokens"]) / max(1, int(log.final["steps"])))]
    found = values(log.source) if log.source else {}
    found |= {name: int(value) for name, value in log.header.items() if value.isdigit()}
    if stages := scheduled_stages(log.source or "", found):
        return stages
    ranks = 8 if re.search(r"grad_accum_steps = 8 ?// ?world_size", log.source or "") else None
    found["ranks"] = ranks or found.get("world_size")
    # Ours; a batch in tokens; one sequence a rank; a batch in sequences; a batch in tokens.
    for names in (("sequences_per_step", "train_seq_len"), ("train_batch_size",),
                  ("ranks", "train_seq_len"), ("batch_size", "sequence_length"), ("batch_size",)):
        numbers = [found.get(name) for name in names]
        if not all(isinstance(number, int) for number in numbers):
            continue
        if len(numbers) > 1 or numbers[0] > 1024:  # a small one is of sequences, not of tokens
            return [(math.inf, math.prod(numbers))]
    return []


def scheduled_stages(source: str, found: dict) -> list[tuple[float, float]]:
    """The stages of a source whose batch grows: of equal length, or each with its share.

    In the public lineage these are `train_bs_schedule` and, later, a list of `TrainingStage`. A
    stage ends with the step in which its share of the scheduled steps is used up.
    """
    shares, batches, extension = [], found.get("train_bs_schedule"), None
    if isinstance(batches, (list, tuple)):
        shares, extension = [1 / len(batches)] * len(batches), found.get("train_bs_extension")
    else:
        batches = []
        for node in statements(split_files(source)["train_gpt.py"]):
            pair = assignment(node)
            if not pair or pair[0] != "TRAINING_STAGES" or not isinstance(pair[1], ast.List):
                continue
            for call in pair[1].elts:
                told = {keyword.arg: known(keyword.value, found)
                        for keyword in getattr(call, "keywords", ())}
                if "duration" in told:
                    shares.append(told["duration"])
                    batches.append(told.get("batch_size"))
                else:
                    extension = told.get("batch_size")
    steps = found.get("num_scheduled_iterations")
    if not batches or None in (steps, *shares, *batches):
        return []
    ends = [math.ceil(round(steps * share, 6)) for share in itertools.accumulate(shares)]
    return [*zip(ends, batches), (math.inf, extension or batches[-1])]


def seed_files(folder: Path, prefix: str = "") -> list[Path]:
    """A record's `logs/<prefix>seed-N.txt`, by N."""
    found = (folder / "logs").glob(f"{prefix}seed-*.txt")
    return sorted(found, key=lambda path: (len(path.name), path.name))

