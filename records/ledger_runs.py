"""Runs: scripts trained in turns, what they give kept, and a record's seeds run once more."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ledger_base import LedgerError, RunError, read_text, sha256, write_file
from ledger_logs import Log, read_log, seed_files
from ledger_records import TIMES, Record, measure, read_record, record_text
from ledger_rules import RULES
from ledger_tables import duration
from ledger_verify import FOLDER_NAME, claim_findings

REPO = Path(__file__).resolve().parent.parent


# -----------------------------------------------------------------------------
# What is run
# -----------------------------------------------------------------------------


def split_operand(operand: str) -> tuple[Path, dict[str, str]]:
    """Path and flags of `PATH` or `PATH:name=value,name=value`. Raises LedgerError."""
    colons = [index for index, letter in enumerate(operand) if letter == ":"]
    for end in (len(operand), *reversed(colons)):
        path = Path(operand[:end])
        if path.exists():
            break
    else:
        raise LedgerError(f"{operand}: no script there; give a record folder or a .py file")
    pairs = [item.partition("=") for item in operand[end + 1:].split(",") if item]
    for name, equals, _ in pairs:
        if not name.isidentifier() or not equals:
            raise LedgerError(f"{operand}: {name!r} is no flag; after the colon come name=value, "
                              "with commas between")
    return path.resolve(), {name: value for name, _, value in pairs}


@dataclass
class Contestant:
    """A script with its flags that `run` measures, and the logs of its runs by seed."""

    name: str
    script: Path
    folder: Path | None  # its record folder, where it is one as it stands
    flags: dict[str, str]
    sha256: str
    logs: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, operand: str) -> "Contestant":
        path, flags = split_operand(operand)
        script = path / "train_gpt.py" if path.is_dir() else path
        if script.suffix != ".py" or not script.is_file():
            raise LedgerError(f"{operand}: no script there; give a record folder or a .py file")
        is_record = path.is_dir() and FOLDER_NAME.fullmatch(path.name) and not flags
        name = re.sub(r"[^\w.-]", "_", path.name if path.is_dir() else path.stem)
        return cls(name, script, path if is_record else None, flags, sha256(read_text(script)))

    def next_log(self, out: Path, seed: int) -> tuple[Path, bool]:
        """Where a run's log goes, and whether a finished run of this script is there already."""
        for attempt in itertools.count(1):
            suffix = f"-{attempt}" if attempt > 1 else ""
            path = out / "logs" / f"{self.name}-seed-{seed}{suffix}" / "log.txt"
            if not path.parent.exists():
                return path, False
            with contextlib.suppress(LedgerError, FileNotFoundError):
                log = read_log(path)
                if log.finished and not log.resumed and log.sha256 == self.sha256:
                    return path, True


def contestants_of(operands: list[str]) -> list[Contestant]:
    """The operands as contestants; equal names get numbers, from the second on."""
    found = [Contestant.of(operand) for operand in operands]
    seen = {}
    for contestant in found:
        seen[contestant.name] = seen.get(contestant.name, 0) + 1
        if seen[contestant.name] > 1:
            contestant.name += f"-{seen[contestant.name]}"
    return found


# -----------------------------------------------------------------------------
# One run
# -----------------------------------------------------------------------------


def link_data(folder: Path, script: Path) -> None:
    """Let a script that has no data above it find the repository's from `folder`."""
    has_data = any((above / "data" / "pocket.py").exists() for above in script.parents)
    if not has_data and (REPO / "data" / "pocket.py").exists():
        with contextlib.suppress(FileExistsError):
            (folder / "data").symlink_to(REPO / "data")


def command_of(script: Path, ranks: int, flags: dict[str, object]) -> list[str]:
    """The command line of one run."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [*launcher, str(script), *words]


class Run:
    """A training in a process of its own."""

    def __init__(self, command: list[str], folder: Path, log: Path, threads: int | None = None):
        environment = dict(os.environ)
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        self.log, self.started = log, time.monotonic()
        self.console = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL,
                                        stdout=self.console, stderr=subprocess.STDOUT,
                                        env=environment)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def share(self) -> float:
        """How much of its steps it has done."""
        found = self.log.exists() and re.findall(rb"^step:(\d+)/(\d+)", self.log.read_bytes(), re.M)
        return int(found[-1][0]) / max(int(found[-1][1]), 1) if found else 0.0

    def trouble(self, source_sha256: str) -> str | None:
        """What went wrong with a run that has ended, or None."""
        self.console.seek(0)
        last = (self.console.read().strip() or "nothing").splitlines()[-1]
        self.console.close()
        if self.process.returncode:
            return f"exit status {self.process.returncode}, its last words: {last[:200]}"
        try:
            log = read_log(self.log)
        except OSError:
            return f"it left no log at {self.log}"
        except LedgerError as error:
            return str(error)
        if not log.finished:
            return "; ".join(log.notes)
        if log.sha256 != source_sha256:
            return "its script was changed after the first run began; start again"
        return None

    def stop(self) -> None:
        """Ask it to stop, which the scripts do at their next step, and wait."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.console.close()


# -----------------------------------------------------------------------------
# Many runs, in turns
# -----------------------------------------------------------------------------


@dataclass
class Clock:
    """How long runs take, by contestant, from those that were timed."""

    jobs: int
    seconds: dict[str, float] = field(default_factory=dict)  # mean of a run
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        count = self.counts[name] = self.counts.get(name, 0) + 1
        mean = self.seconds.get(name, 0.0)
        self.seconds[name] = mean + (seconds - mean) / count

    def left(self, names: list[str]) -> float | None:
        """Seconds that runs of these names take; None where nothing is known."""
        if not self.seconds:
            return None
        mean = sum(self.seconds.values()) / len(self.seconds)
        return sum(self.seconds.get(name, mean) for name in names) / self.jobs


def clock_words(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def least_seconds(contestant: Contestant, preset: str, jobs: int) -> float | None:
    """Training and compilation of one run by a log in the record's folder, in seconds."""
    if not contestant.folder:
        return None
    alone = seed_files(contestant.folder, TIMES) if jobs == 1 else []
    for file in (alone or seed_files(contestant.folder))[:1]:
        with contextlib.suppress(LedgerError):
            log = read_log(file)
            compiled = re.search(r"^compile_seconds: ([\d.]+)", log.body, re.M)
            if log.header.get("preset") == preset and log.train_time_ms:
                return log.train_time_ms / 1000 + (float(compiled[1]) if compiled else 0)
    return None


def forecast(clock: Clock, waiting: list[Contestant], preset: str) -> str:
    """How long the runs will take, as well as it can be told before they begin."""
    names = [contestant.name for contestant in waiting]
    what = f"{len(names)} run(s) to go"
    if (left := clock.left(names)) is not None:
        return f"{what}, about {clock_words(left)} by the runs kept here"
    least = {c.name: least_seconds(c, preset, clock.jobs) for c in waiting}
    if names and None not in least.values():
        total = sum(least[name] for name in names) / clock.jobs
        return (f"{what}, some {clock_words(total)} by the records' logs, which do not have the "
                "time to start and to validate; the first run tells more")
    return f"{what}; the first tells how long they take"


class Turns:
    """Every seed of every contestant, A B A B, as many at once as there are jobs."""

    def __init__(self, contestants: list[Contestant], out: Path, seeds: int, settings: dict):
        self.out, self.settings = out, settings
        self.clock = Clock(settings["jobs"])
        out.mkdir(parents=True, exist_ok=True)
        self.kept = out / "settings.json"
        flags = {contestant.name: contestant.flags for contestant in contestants}
        if self.kept.exists():
            self.check_settings(json.loads(read_text(self.kept)), flags)
        self.save(flags)
        for contestant in contestants:
            link_data(out, contestant.script)
        self.waiting, self.total = deque(), seeds * len(contestants)
        for seed, contestant in itertools.product(range(seeds), contestants):
            path, reused = contestant.next_log(out, seed)
            contestant.logs[seed] = path
            if reused:
                print(f"{contestant.name} seed {seed}: used as it was", file=sys.stderr)
            else:
                self.waiting.append((seed, contestant))

    def check_settings(self, before: dict, flags: dict) -> None:
        """Refuse a folder whose runs were made otherwise; take over how long they took."""
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise LedgerError(f"--out {self.out} has runs with {name} {before.get(name)}, not "
                                  f"{value}; give another folder")
        for name in flags.keys() & before.get("flags", {}).keys():
            if flags[name] != before["flags"][name]:
                raise LedgerError(f"--out {self.out} has runs of {name} with other flags, "
                                  f"{before['flags'][name]}; give another folder")
        flags |= before.get("flags", {}) | flags
        self.clock.seconds = before.get("seconds", {})
        self.clock.counts = dict.fromkeys(self.clock.seconds, 1)

    def save(self, flags: dict | None = None) -> None:
        self.flags = flags if flags is not None else self.flags
        content = self.settings | {"flags": self.flags, "seconds": self.clock.seconds}
        write_file(self.kept, json.dumps(content, indent=2) + "\n")

    def start(self, seed: int, contestant: Contestant) -> Run:
        path = contestant.logs[seed]
        flags = {"preset": self.settings["preset"], "seed": seed, "run_id": path.parent.name,
                 **contestant.flags}
        command = command_of(contestant.script, self.settings["nproc"], flags)
        threads = 1 if self.clock.jobs > 1 else None
        return Run(command + self.settings["args"], self.out, path, threads)

    def run(self) -> None:
        """Run all that is left. Raises RunError where one fails or is stopped; the rest is kept."""
        names = [contestant for _, contestant in self.waiting]
        print(f"runs are kept in {self.out}; --out {self.out} goes on with them", file=sys.stderr)
        if names:
            print(forecast(self.clock, names, self.settings["preset"]), file=sys.stderr, flush=True)
        running = {}
        try:
            while self.waiting or running:
                while self.waiting and len(running) < self.clock.jobs:
                    turn = self.waiting.popleft()
                    running[turn[0], turn[1].name] = (turn, self.start(*turn))
                time.sleep(0.1)
                self.show(running)
                for key, (turn, run) in list(running.items()):
                    if run.process.poll() is not None:
                        del running[key]
                        self.finish(turn, run, [name for _, name in running])
        except KeyboardInterrupt:
            what = ", ".join(f"{name} seed {seed}" for seed, name in running) or "the ledger"
            raise RunError(f"{what}: stopped; what is done is kept, go on with --out "
                           f"{self.out}") from None
        finally:
            for _, run in running.values():
                run.stop()

    def finish(self, turn: tuple, run: Run, others: list[str]) -> None:
        seed, contestant = turn
        done = self.total - len(self.waiting) - len(others)
        what = f"[{done}/{self.total}] {contestant.name} seed {seed}"
        if trouble := run.trouble(contestant.sha256):
            raise RunError(f"{what}: {trouble}; what is done is kept, go on with --out {self.out}")
        if self.clock.jobs > 1:
            with run.log.open("a") as file:
                file.write(f"jobs: {self.clock.jobs}\n")
        self.clock.add(contestant.name, run.seconds)
        self.save()
        left = self.clock.left([c.name for _, c in self.waiting] + others)
        log = read_log(run.log)
        end = "\r\x1b[2K" if sys.stderr.isatty() else ""
        print(f"{end}{what}: {log.val_loss:.4f} in {duration(log.train_time_ms)}, "
              f"{clock_words(left or 0)} left",
              file=sys.stderr, flush=True)

    def show(self, running: dict) -> None:
        """On a terminal, a line that says how far the runs are."""
        if sys.stderr.isatty() and running:
            words = [f"{name} seed {seed} {run.share:4.0%}"
                     for (seed, name), (_, run) in running.items()]
            print(f"\r\x1b[2K{', '.join(words)}", end="", file=sys.stderr, flush=True)


# -----------------------------------------------------------------------------
# What is kept of them
# -----------------------------------------------------------------------------


def keep_logs(folder: Path, prefix: str, logs: list[Path]) -> None:
    """Copy runs' logs to logs/<prefix>seed-N.txt: the record's first with its source."""
    stale = set(seed_files(folder, prefix))
    for index, path in enumerate(logs):
        log, text = read_log(path), read_text(path)
        kept = folder / "logs" / f"{prefix}seed-{int(log.final['seed'])}.txt"
        kept.parent.mkdir(parents=True, exist_ok=True)
        whole = index == 0 and not prefix
        write_file(kept, text if whole else f"source sha256: {log.sha256}\n{log.body}")
        stale.discard(kept)
    for path in stale:
        path.unlink()


def unfit(contestant: Contestant, record: Record, preset: str, times: bool) -> str | None:
    """Why the runs of a record are no measurement of it, or None."""
    folder, logs = contestant.folder, list(contestant.logs.values())
    newest = max(path.name for path in folder.parent.iterdir() if FOLDER_NAME.fullmatch(path.name))
    if preset not in RULES:
        return f"the rules do not have --preset {preset}"
    if times and (record.measured or {}).get("preset") != preset:
        return f"its losses are not measured with --preset {preset}; times stand beside losses"
    least = RULES[preset].least_seeds(folder.name == newest and not times)
    if len(logs) < least:
        return f"{len(logs)} seeds, by the rules {least} are the least"
    log = read_log(logs[0])
    return f"it ran on a {log.header.get('device')}" if log.simulated else None


def write_measurements(contestants: list[Contestant], preset: str, times: bool,
                       say: Callable) -> None:
    """Keep the logs and write the measured block of each record that this run measured.

    With `times` the runs are kept beside those of the losses, and only their times count.
    """
    by_folder, prefix = {c.folder.name: c for c in contestants if c.folder}, TIMES if times else ""
    for name, contestant in by_folder.items():
        record = read_record(contestant.folder)
        parent = by_folder.get(record.claim["parent"])
        if reason := unfit(contestant, record, preset, times):
            say(f"{name}: record.json is not written: {reason}")
            continue
        before = (record.measured or {}).get("times") if times else record.measured
        if not parent and before and before["parent"]:
            say(f"{name}: kept as it was measured beside its parent")
            continue
        keep_logs(record.folder, prefix, list(contestant.logs.values()))
        keep_logs(record.folder, f"{prefix}parent-", list(parent.logs.values()) if parent else [])
        write_measured(record)
        todo = ", ".join(claim_findings(record.claim)) or "`list --write` is next"
        say(f"{name}: wrote record.json; {todo}")


def write_measured(record: Record) -> bool:
    """Write record.json's measured block from the logs; whether it changed."""
    path, text = record.folder / "record.json", record_text(record.claim, measure(record))
    if path.exists() and read_text(path) == text:
        return False
    write_file(path, text)
    return True


# -----------------------------------------------------------------------------
# A record's runs once more
# -----------------------------------------------------------------------------

MACHINE = ("torch", "device", "threads", "world_size")  # with these alike, losses are to the digit


def replay(records: list[Record], seeds: int) -> tuple[list[str], list[str]]:
    """Run the first seeds of records again: (findings, notes).

    A finding is another loss where torch, device, threads and ranks are the log's; where they are
    not, a note says in what and shows both losses.
    """
    findings, notes = [], []
    for record in records:
        script = record.folder / "train_gpt.py"
        for file in seed_files(record.folder)[:seeds]:
            where, old = f"{record.folder.name}: logs/{file.name}", read_log(file)
            print(f"{where}: runs again", file=sys.stderr, flush=True)
            new = run_again(script, old)
            losses = f"val_loss {new.final.get('val_loss')}, its log has {old.final['val_loss']}"
            differ = [f"{name} {new.header.get(name)} instead of {old.header.get(name)}"
                      for name in MACHINE if new.header.get(name) != old.header.get(name)]
            if differ:
                notes.append(f"{where}: run again with {', '.join(differ)}: {losses}")
            elif new.final.get("val_loss") != old.final["val_loss"]:
                findings.append(f"{where}: run again it has {losses}")
            else:
                notes.append(f"{where}: run again it has the same val_loss, "
                             f"{old.final['val_loss']}")
    return findings, notes


def run_again(script: Path, old: Log) -> Log:
    """The log of a run with a log's preset, seed, threads and ranks. Raises RunError."""
    threads, ranks = (int(old.header.get(name, 1)) for name in ("threads", "world_size"))
    flags = {"preset": old.header.get("preset"), "seed": old.header["seed"], "run_id": "replay"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        link_data(folder, script)
        path = folder / "logs" / "replay" / "log.txt"
        run = Run(command_of(script, ranks, flags), folder, path, threads)
        try:
            run.process.wait()
        except KeyboardInterrupt:
            run.stop()
            raise
        if trouble := run.trouble(sha256(read_text(script))):
            raise RunError(f"{old.path}: run again, it failed: {trouble}")
        return read_log(path)
