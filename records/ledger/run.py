"""Runs: scripts trained in turns, their logs kept, and a record's seeds run once more."""

import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from ledger import table
from ledger.logs import LedgerError, Log, read_log, read_text, sha256, write_file

REPO = Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True  # of the scripts whose settings are asked
KEPT = ("run_id", "preset", "seed")  # flags that the ledger sets for all
# How far a loss may be from the same run's on another machine, in nats per token. The pocket was
# seen to move by some 0.002 between machines; this is ten times that, and two to three standard
# deviations of its seeds (0.007 to 0.012). What is further off was not made by this script.
MOVES = 0.02


@dataclass
class Contestant:
    """A script with its flags that `run` measures, and the logs of its runs."""

    label: str  # as it was given, without the folders above
    script: Path
    folder: Path | None  # its record folder, where it is one as it stands
    flags: dict[str, str]
    source: str
    logs: list[Log] = field(default_factory=list)


def contestant_of(operand: str) -> Contestant:
    """The contestant of `PATH` or `PATH:name=value,name=value`. Raises LedgerError."""
    place, _, words = operand.partition(":")
    path = Path(place).resolve()
    script = path / "train_gpt.py" if path.is_dir() else path
    if script.suffix != ".py" or not script.is_file():
        raise LedgerError(f"{operand}: no script there; give a record folder or a .py file")
    flags = {}
    for item in re.split(r",(?=[a-zA-Z_]\w*=)", words) if words else ():
        name, equals, value = item.partition("=")
        if not name.isidentifier() or not equals:
            raise LedgerError(f"{operand}: {item!r} is no flag; after the colon come name=value, "
                              "with commas between")
        if name in KEPT:
            raise LedgerError(f"{operand}: {name} is the ledger's; use --preset or --seeds")
        flags[name] = value
    is_record = table.FOLDER_NAME.fullmatch(path.name) and path.is_dir() and not flags
    label = (path.name if path.is_dir() else path.stem) + operand[len(place):]
    return Contestant(label, script, path if is_record else None, flags, read_text(script))


def contestants_of(operands: list[str], preset: str) -> list[Contestant]:
    """The operands as contestants, no two alike, with flags that their scripts take."""
    found, seen = [], {}
    for operand in operands:
        one = contestant_of(operand)
        settings = settings_of(one.script, {"preset": preset, **one.flags})
        same = seen.setdefault((one.source, str(settings or one.flags)), operand)
        if found and same != operand or operand in operands[:len(found)]:
            raise LedgerError(f"{operand} is the same script with the same settings as {same}; "
                              "give it once, with --seeds")
        found.append(one)
    return found


def flag_words(flags: dict[str, object]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def settings_of(script: Path, flags: dict[str, str]) -> dict[str, str]:
    """A script's hyperparameters with these flags, as headers show them. Raises LedgerError.

    A script without `parse_args` has none, and is not imported: it might train at once.
    """
    if not re.search(r"^def parse_args\(", read_text(script), re.M):
        return {}
    spec = importlib.util.spec_from_file_location("contestant", script)
    module = sys.modules["contestant"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = vars(module.parse_args(flag_words(flags))).copy()
    except (Exception, SystemExit) as error:
        raise LedgerError(f"{script.parent.name}/{script.name}: {error}") from None
    for name, value in found.items():
        found[name] = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return found


def train(script: Path, folder: Path, flags: dict, ranks: int, threads: str, running: set) -> Log:
    """Run a script in `folder`, in a process of its own; its log. Raises LedgerError."""
    command = [sys.executable, str(script), *flag_words(flags)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    has_data = any((above / "data" / "pocket.py").exists() for above in script.parents)
    if not has_data:
        with contextlib.suppress(FileExistsError):
            (folder / "data").symlink_to(REPO / "data")
    source = sha256(read_text(script))
    with tempfile.TemporaryFile("w+", errors="replace") as console:
        environment = {**os.environ, "OMP_NUM_THREADS": threads}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                                   stdout=console, stderr=console)
        running.add(process)
        status = process.wait()
        running.discard(process)
        console.seek(0)
        last = (console.read().strip() or "nothing").splitlines()[-1]
    if status:
        raise LedgerError(f"exit status {status}, its last words: {last[:200]}", 1)
    log = read_log(folder / "logs" / flags["run_id"] / "log.txt")
    if not log.finished:
        raise LedgerError("; ".join(log.notes), 1)
    if log.source_sha256 != source:
        raise LedgerError("its script was changed after it began; start again", 1)
    return log


@dataclass
class Turns:
    """Every seed of every contestant, A B A B, as many at once as there are jobs.

    A finished run is used again where its RUN_ID, which hashes all that it depends on, is there.
    """

    out: Path
    preset: str
    seeds: int
    ranks: int
    jobs: int
    kind: str  # of the table's rows
    running: set = field(default_factory=set)  # processes

    def one(self, contestant: Contestant, seed: int) -> Log:
        """The log of a run, made now if it is not there yet."""
        what = [contestant.source, contestant.flags, self.preset, self.ranks, self.jobs, self.kind]
        name = contestant.label.partition(":")[0]
        run_id = f"{name}-{sha256(json.dumps(what, sort_keys=True))[:8]}-seed-{seed}"
        path = self.out / "logs" / run_id / "log.txt"
        with contextlib.suppress(LedgerError, FileNotFoundError):
            log = read_log(path)
            if log.finished and not log.resumed:
                return log
        shutil.rmtree(path.parent, ignore_errors=True)  # what is left of a run that was stopped
        threads = str(max(1, len(os.sched_getaffinity(0)) // self.jobs))
        if self.jobs == 1:
            threads = os.environ.get("OMP_NUM_THREADS", threads)
        flags = {"preset": self.preset, "seed": seed, "run_id": run_id, **contestant.flags}
        train(contestant.script, self.out, flags, self.ranks, threads, self.running)
        if self.jobs > 1:
            with path.open("a") as file:
                file.write(f"jobs: {self.jobs}\n")
        return read_log(path)

    def run(self, contestants: list[Contestant]) -> None:
        """Run all that is left. Raises LedgerError where one fails or is stopped."""
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        kept = f"what is done is kept in {self.out}; the same command goes on"
        pool, futures, started = ThreadPoolExecutor(self.jobs), {}, time.monotonic()
        for seed, contestant in itertools.product(range(self.seeds), contestants):
            futures[pool.submit(self.one, contestant, seed)] = (contestant, seed)
        try:
            for done, future in enumerate(as_completed(futures), 1):
                contestant, seed = futures[future]
                what = f"[{done}/{len(futures)}] {contestant.label} seed {seed}"
                log = future.result()
                left = (time.monotonic() - started) / done * (len(futures) - done)
                print(f"{what}: {log.val_loss:.4f} in {log.train_time_ms / 1000:.2f} s, about "
                      f"{left / 60:.0f} min left", file=sys.stderr, flush=True)
        except LedgerError as error:
            raise LedgerError(f"{what}: {error}; {kept}", 1) from None
        except KeyboardInterrupt:
            raise LedgerError(f"stopped; {kept}", 1) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self.running):  # they stop at their next step
                process.terminate()
            pool.shutdown()
        for future, (contestant, _) in futures.items():
            contestant.logs.append(future.result())

    def reason_against(self, logs: list[Log]) -> str:
        """Why a record's runs are no measurement of it; empty where they are one."""
        if self.preset not in table.RULES:
            return f"the rules do not have --preset {self.preset}"
        if len(logs) != table.SEEDS[self.kind]:
            return f"{len(logs)} seeds, by the rules a measurement is of {table.SEEDS[self.kind]}"
        return f"it ran on a {logs[0].header['device']}" if logs[0].simulated else ""

    def keep(self, contestants: list[Contestant]) -> None:
        """Copy the logs of measured records, the first with its source, and make their rows."""
        for one in contestants:
            if not one.folder:
                continue
            reason = self.reason_against(one.logs)
            if reason:
                print(f"{one.label}: not kept: {reason}", file=sys.stderr)
                continue
            place = one.folder / table.FOLDERS[self.kind]
            place.mkdir(parents=True, exist_ok=True)
            for path in place.glob("seed-*.txt"):
                path.unlink()
            for log in one.logs:
                text = f"source sha256: {log.source_sha256}\n{log.body}"
                if log is one.logs[0]:
                    text = read_text(log.path)
                write_file(place / f"seed-{int(log.final['seed'])}.txt", text)
            table.write_table(one.folder.parent)
            print(f"{one.label}: kept; `list --write` is next", file=sys.stderr)


def replay(record: table.Record, path: Path) -> tuple[bool, str]:
    """Run a record's seed again: whether its log may be true, and what was found."""
    old = read_log(path)
    flags = {"preset": old.header["preset"], "seed": old.header["seed"], "run_id": "replay"}
    with tempfile.TemporaryDirectory() as out:
        new = train(record.folder / "train_gpt.py", Path(out), flags,
                    int(old.header["world_size"]), old.header["threads"], set())
    before, now = old.final["val_loss"], new.final["val_loss"]
    what = (f"{record.folder.name}: logs/{path.name}: run again it has val_loss {now}, its log "
            f"{before}")
    differ = []
    for name in ("torch", "device", "threads", "world_size"):
        if new.header[name] != old.header[name]:
            differ.append(f"{name} {new.header[name]} instead of {old.header[name]}")
    if not differ:
        return now == before, f"{what}, on the same machine"
    near = abs(float(now) - float(before)) <= MOVES
    return near, (f"{what}; not comparable to the digit with {', '.join(differ)}; "
                  f"{'within' if near else 'further off than'} {MOVES}, what machines may move")
