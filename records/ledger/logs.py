"""Logs of this project and of the public speedrun, read to the digit.

A log of ours: the script's source; a line of 100 `=`; a header of `key: value` lines; such a line
again; a line for each step and validation; `---`; results.
"""

import contextlib
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

RULE = "=" * 100  # the line between the parts of a log
SETTING = {  # what is equal where runs are compared, and the words for it
    "preset": "Preset {}", "device": " on {}", "world_size": ", {} rank(s)",
    "threads": ", {} thread(s)", "torch": ", torch {}", "cuda": ", CUDA {}",
    "driver": ", driver {}", "jobs": ", {} runs at once"}
NEEDED = "preset device torch threads world_size seed target_loss val_digest".split()
ENDINGS = (".txt", ".log", ".out", ".stdout")  # of other people's logs
FORMS = "logs of this project, of modded-nanogpt's three tracks, and llm.c's main.log"


class LedgerError(Exception):
    """Input that cannot be used, or a run that failed: what is wrong, in one line."""


def read_text(path: Path) -> str:
    """The file as text, newlines as they are. Raises LedgerError where it is no text."""
    try:
        return path.read_bytes().decode("utf-8-sig")  # some editors write a mark at the begin
    except UnicodeDecodeError as error:
        raise LedgerError(f"{path}: byte {error.start} is not text; give a log or script") from None


@dataclass
class Log:
    """A training log. Times are milliseconds, None where the log did not time the step."""

    path: Path
    source: str | None = None
    body: str = ""  # all that follows the source
    header: dict[str, str] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    runs: list[dict] = field(default_factory=list)  # name of a validation loss: step: loss
    train: dict[int, tuple] = field(default_factory=dict)  # step: (next token's loss, time)
    val: dict[int, tuple] = field(default_factory=dict)  # step: (validation loss, time)
    planned_steps: int | None = None
    last_step: int | None = None  # of a file in which no step can be read
    diverged_at: int | None = None  # the first of its last validations that gave no number
    finished: bool = False  # validated at its last step and, if it is ours, ended by its results
    val_loss: float = math.nan  # the last one, to all the digits that the log has
    train_time_ms: float | None = None
    # Of a run of ours
    setting: tuple = ()  # the machine, its software and what was asked of it, as in SETTING
    seed: int = 0
    on_gpu: bool = False
    measured_ms: float | None = None  # its time, where it had its machine to itself

    def describe(self):
        """Set what is known of a run of ours from its header and its results."""
        found = {"jobs": "1", **self.final, **self.header}
        self.seed, ranks = int(found["seed"]), int(found.get("world_size", 1))
        self.on_gpu = "cuda" in found
        if self.on_gpu:
            found["threads"] = ""  # of the host, which decide nothing there
        self.setting = tuple(" ".join(found.get(name, "").split()) for name in SETTING)
        is_whole = found["jobs"] == "1" and "\nresumed at " not in self.body
        # A process that waited was not alone, unless it waits for its GPU or for other ranks.
        busy_ms = float(found.get("process_time_ms", math.inf))
        had_waited = busy_ms < 0.9 * self.train_time_ms and ranks == 1 and not self.on_gpu
        self.measured_ms = self.train_time_ms if is_whole and not had_waited else None


def machine_words(setting: tuple) -> str:
    """A setting as a heading."""
    words = [form.format(value) for form, value in zip(SETTING.values(), setting) if value]
    return "".join(words).removesuffix(", 1 runs at once")


def read_log(path: Path, text: str | None = None) -> Log:
    """Parse a log, or its text. Raises LedgerError where it is none."""
    log = Log(path)
    text = (text or read_text(path)).replace("\r\n", "\n")  # as git for Windows checks it out
    begin = len(RULE) + 1 if text.startswith(RULE + "\n") else 0
    end = re.compile(rf"^{RULE}$|\Z", re.M).search(text, begin).start()
    log.source, log.body = text[begin:end], text[end:]
    if re.search(r"^(import|from) \w", log.source, re.M):
        log.source = re.sub(r"\n\n\Z", "\n", log.source)  # print adds a newline to its own
    else:  # a console's output
        log.source, log.body = None, text

    body = re.sub(r"^s:(\d+) tel:", r"step:\1 val_loss:", log.body, flags=re.M)  # the first logs
    body, _, rest = body.rpartition("\n")
    if re.fullmatch(r"step:.* step_avg:[\d.]+ms", rest):
        body += "\n" + rest  # all else may be cut, and a number that was cut looks like a whole one
    headers = re.findall(rf"^{RULE}$(.*?)(?:^{RULE}$|\Z)", body, re.M | re.S)
    results = re.findall(r"^---((?:\n\w+: .*)*)$", body, re.M)
    for found, parts in ((log.header, headers[:1]), (log.final, results[-1:])):
        found.update(re.findall(r"^(\w+): (.*)$", "".join(parts), re.M))
    for line in re.findall(r"^step:.*", body, re.M):
        with contextlib.suppress(KeyError, ValueError):  # a line that cannot be read is left out
            read_step(log, dict(pair.partition(":")[::2] for pair in line.split()))
    steps = log.val.keys() | log.train.keys() | {log.diverged_at} - {None}
    if not steps:
        raise LedgerError(f"{path} has no step that can be read; known are {FORMS}")
    log.last_step = max(steps)
    if log.val:
        loss, ms = log.val[max(log.val)]
        log.val_loss = float(log.final.get("val_loss", loss))
        log.train_time_ms = float(log.final.get("train_time_ms", 0)) or ms
        is_ours = "run_id" in log.header
        log.finished = log.planned_steps in (None, *log.val) and log.diverged_at is None and (
            "val_loss" in log.final or not is_ours)
    return log


def read_step(log: Log, found: dict):
    """Read the pairs of a `step:1/10 val_loss:…` line. Raises KeyError, ValueError."""
    step, *planned = map(int, found["step"].split("/"))
    # Of several tokens ahead, the loss of the next
    loss = found.get("next_token_loss", found.get("train_loss"))
    loss = None if loss is None else float(loss)
    val_loss = found.get("val_loss")
    val_loss = None if val_loss is None else float(val_loss)
    time = found.get("train_time")
    if time:  # 943ms, or 739.639s in track 3
        time = float(time.rstrip("ms")) * (1 if time.endswith("ms") else 1000)
    log.planned_steps = planned[0] if planned else log.planned_steps
    if val_loss is not None and math.isfinite(val_loss):
        log.val[step], log.diverged_at = (val_loss, time), None
        # Public logs have one run after another.
        if not log.runs or step <= max(log.runs[-1]["val_loss"]) and "run_id" not in log.header:
            log.runs.append({})
        for name in found:  # that of the weights, and those of blends of them
            if re.fullmatch(r"val_(\w+_)?loss", name):
                log.runs[-1].setdefault(name, {})[step] = float(found[name])
    elif val_loss is not None and log.diverged_at is None:
        log.diverged_at = step
    if val_loss is None or loss is not None:
        log.train[step] = (loss, time)


def read_run(path: Path) -> Log:
    """The log of a finished run of ours. Raises LedgerError."""
    try:
        log = read_log(path)
        if not log.finished:
            raise LedgerError(f"{path} is no finished run: it ends at step {log.last_step} of "
                              f"{log.planned_steps}, or before its results")
        for name in NEEDED:
            if name not in log.header:
                raise ValueError(f"no {name}")
        numbers = [float(log.header["target_loss"]), log.val_loss, log.train_time_ms]
        for loss, ms in (*log.train.values(), *log.val.values()):
            numbers += [loss, ms]
        if not all(map(math.isfinite, numbers)) or log.train_time_ms <= 0:
            raise ValueError("a loss or time that is no finite number")
        log.describe()
    except (TypeError, ValueError) as error:
        raise LedgerError(f"{path} cannot be read: {error}") from None
    return log


def why_not_counted(log: Log) -> str:
    """Why a log counts in no mean, or nothing."""
    if log.diverged_at is not None:
        return f"diverged at step {log.diverged_at}"
    if not log.val:
        return "has no validation that can be read"
    return "" if log.finished else f"stopped at step {log.last_step} of {log.planned_steps}"


def read_folder(folder: Path) -> tuple[list, list]:
    """(the logs below a folder, or the one that is meant, a line for all that counts in no mean).

    A file that is called as a log and cannot be read is one, without steps.
    """
    logs, left_out, others = [], [], 0
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path.suffix.lower() not in ENDINGS or not path.is_file():
            others += path.is_file() or path.is_symlink()
            continue
        try:
            log = read_log(path)
            log.body = ""  # a thousand of them are large
            why = why_not_counted(log)
        except (LedgerError, ValueError) as error:
            log, why = Log(path), str(error).removeprefix(f"{path}")
        logs.append(log)
        if why:
            left_out.append(f"in no mean: {path} {why.lstrip(': ')}")
    if others:
        left_out.append(f"left out: {others} file(s) or linked folders that are not called "
                        f"*{', *'.join(ENDINGS)}")
    return logs, left_out
