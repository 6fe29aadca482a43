"""Logs of this project and of the public speedrun, read to the digit.

A log of ours: the script's source, or `source sha256: …` in its place; a line of 100 `=`; a header
of `key: value` lines; such a line again; a line for each step and validation; `---`; results.
"""

import contextlib
import hashlib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

RULE = "=" * 100  # the line between the parts of a log
PAIR = re.compile(r"^(\w+): (.*)$", re.M)
SETTING = {  # what is equal where runs are compared, and the words for it
    "preset": "Preset {}", "device": " on {}", "world_size": ", {} rank(s)",
    "threads": ", {} thread(s)", "torch": ", torch {}", "cuda": ", CUDA {}",
    "driver": ", driver {}", "nccl": ", NCCL {}", "triton": ", Triton {}",
    "jobs": ", {} runs at once"}
ENDINGS = (".txt", ".log", ".out", ".stdout")  # of other people's logs
FORMS = "logs of this project, of modded-nanogpt's three tracks, and llm.c's main.log"


class LedgerError(Exception):
    """Input that cannot be used, or a run that failed: what is wrong, in one line."""

    def __init__(self, message: str, status: int = 2):
        super().__init__(message)
        self.status = status  # of the process


def read_text(path: Path) -> str:
    """The file as text, newlines as they are. Raises LedgerError where it is no text."""
    try:
        return path.read_bytes().decode("utf-8-sig")  # some editors write a mark at the begin
    except UnicodeDecodeError as error:
        raise LedgerError(f"{path}: byte {error.start} is not text; give a log or script") from None


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


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

    @property
    def last_step(self) -> int:
        return max(self.val | self.train)

    @property
    def finished(self) -> bool:
        """Validated at its last step and, if it is ours, ended by its results."""
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
    def seed(self) -> int:
        return int(self.header["seed"])

    @property
    def preset(self) -> str:
        return self.header["preset"]

    @property
    def on_gpu(self) -> bool:
        return "cuda" in self.header

    @property
    def resumed(self) -> bool:
        return "\nresumed at " in self.body

    @property
    def jobs(self) -> str:
        """How many runs shared the machine; logs that `run` made before say it at their end."""
        return self.header.get("jobs") or self.final.get("jobs", "1")

    @property
    def measured_ms(self) -> float | None:
        """Its time where that is a measurement: of a whole run, alone on its machine."""
        if self.resumed or self.jobs != "1":
            return None
        return self.train_time_ms

    @property
    def setting(self) -> tuple:
        """The machine, its software, and what was asked of it: the values of SETTING."""
        found = self.final | self.header
        found["jobs"] = self.jobs
        if self.on_gpu:
            found["threads"] = ""  # of the host, which decide nothing there
        return tuple(found.get(name, "") for name in SETTING)

    @property
    def losses(self) -> tuple:
        """The losses by which a copy is known, however often it was validated."""
        return tuple(loss for loss, _ in self.train.values()), self.final.get("val_loss")


def machine_words(setting: tuple) -> str:
    """A setting as a heading."""
    words = ""
    for form, value in zip(SETTING.values(), setting):
        if value:
            words += form.format(value)
    return words.removesuffix(", 1 runs at once")


def split_source(text: str):
    """(source, its sha256, all that follows it) of a log; both None where it has no source."""
    begin = len(RULE) + 1 if text.startswith(RULE + "\n") else 0
    match = re.compile(rf"^{RULE}$", re.M).search(text, begin)
    end = match.start() if match else begin
    before, body = text[begin:end], text[end:]
    if stand_in := re.fullmatch(r"source sha256: ([0-9a-f]{64})\n", before):
        return None, stand_in[1], body
    if not re.search(r"^(import|from) \w", before, re.M):
        return None, None, before + body  # a console's output
    source = re.sub(r"\n\n\Z", "\n", before)  # print adds a newline to the source's own
    return source, sha256(source), body


def read_log(path: Path, text: str | None = None) -> Log:
    """Parse a log, or its text. Raises LedgerError where it is none."""
    text = (text or read_text(path)).replace("\r\n", "\n")  # as git for Windows checks it out
    for old, name in (("tel", "val_loss"), ("trl", "train_loss")):  # the first public logs
        text = re.sub(rf"^s:(\d+) {old}:", rf"step:\1 {name}:", text, flags=re.M)
    log = Log(path, *split_source(text))
    body, _, rest = log.body.rpartition("\n")
    if re.fullmatch(r"step:.* step_avg:[\d.]+ms", rest):
        body += "\n" + rest  # all else may be cut, and a number that was cut looks like a whole one
    if header := re.search(rf"^{RULE}$(.*?)(^{RULE}$|\Z)", body, re.M | re.S):
        log.header.update(PAIR.findall(header[1]))
    if blocks := re.findall(r"^---((?:\n\w+: .*)*)$", body, re.M):
        log.final.update(PAIR.findall(blocks[-1]))
    for line in re.findall(r"^step:.*", body, re.M):
        parse_step(log, line)
    if not log.val and not log.train:
        raise LedgerError(f"{path} has no step that can be read; known are {FORMS}")
    return log


def parse_step(log: Log, line: str):
    """Read a `step:1/10 val_loss:…` line; one that cannot be read is left out."""
    found = dict(pair.partition(":")[::2] for pair in line.split())
    # Of several tokens ahead, the loss of the next
    loss = found.get("next_token_loss", found.get("train_loss"))
    time = found.get("train_time")
    try:
        step, *planned = map(int, found["step"].split("/"))
        if loss is not None:
            loss = float(loss)
        val_loss = float(found.get("val_loss", "nan"))
        if time:  # 943ms, or 739.639s in track 3
            time = float(time.rstrip("ms")) * (1 if time.endswith("ms") else 1000)
    except ValueError:
        return
    if "nan" in found.get("step_avg", ""):  # warm-up steps, before the clock is set to zero
        time = None if step else 0.0
    if planned:
        log.planned_steps = planned[0]
    if math.isfinite(val_loss):
        log.val[step] = (val_loss, time)
    if "val_loss" not in found or loss is not None:
        log.train[step] = (loss, time)


def read_folder(folder: Path):
    """(logs with a validation below a folder, number of other files); no source is run."""
    logs, others = [], 0
    for path in sorted(folder.rglob("*")):
        if path.suffix in ENDINGS and path.is_file():
            with contextlib.suppress(LedgerError, ValueError):  # of numbers in its results
                log = read_log(path)
                log.body = ""  # a thousand of them are large
                numbers = [log.val_loss, log.train_time_ms or 0] if log.val else [math.nan]
                if all(map(math.isfinite, numbers)) and numbers[-1] >= 0:
                    logs.append(log)
                    continue
            others += 1
    return logs, others


def source_of(operand: str) -> str:
    """The source of a script, of a record's folder, or in a log. Raises LedgerError."""
    path = Path(operand)
    if path.is_dir():
        path /= "train_gpt.py"
    text = read_text(path)
    source = text if path.suffix == ".py" else split_source(text)[0]
    if source is None:
        raise LedgerError(f"{operand} has no source; give a script, or a log that has one")
    return source
