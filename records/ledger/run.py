"""Runs: scripts trained interleaved, and a record's seeds run again, their models judged."""

import contextlib
import glob
import hashlib
import importlib.metadata
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from ledger.logs import RULE, SETTING, LedgerError, Log, machine_words, read_log, read_text
from ledger.records import RULES, Record
from ledger.scripts import above, meaning, settings_of

REPO = Path(__file__).resolve().parents[2]
JUDGE = REPO / "records" / "ledger" / "judge.py"
sys.path.append(str(REPO / "data"))
from launch import torchrun_options  # noqa: E402
from machine import MALLOC  # noqa: E402


# ---- Contestants ----
@dataclass
class Contestant:
    """A script with its flags that `run` measures, and the logs of its runs."""

    place: str  # of the script, as it was given
    flags: dict[str, str]
    settings: dict[str, str]  # of its preset, and the flags
    data: list  # names, sizes and digests of the files
    source: str  # of the script when `run` began: every seed trains it
    first_seed: int
    logs: list[Log] = field(default_factory=list)

    @property
    def operand(self) -> str:
        flags = [f"{name}={value}" for name, value in self.flags.items()]
        if self.first_seed:
            flags.append(f"seed={self.first_seed}")
        return f"{self.place}:{','.join(flags)}" if flags else self.place


def contestant_of(operand: str, preset: str) -> Contestant:
    """The contestant of `PATH` or `PATH:name=value,name=value`. Raises LedgerError."""
    place, _, words = operand.partition(":")
    path = Path(place).resolve()
    script = path / "train_gpt.py" if path.is_dir() else path
    if script.suffix != ".py" or not script.is_file():
        raise LedgerError(f"{operand}: no script there; give a record folder or a .py file")
    source, flags = read_text(script), {}
    try:  # not in the threads of the runs: in Python 3.11 two threads that parse may fail
        meaning(source)
    except SyntaxError as error:
        raise LedgerError(f"{operand}: {error}") from None
    for item in filter(None, words.split(",")):
        name, _, value = item.partition("=")
        if name in ("run_id", "preset") or not value or name == "seed" and not value.isdigit():
            raise LedgerError(f"{operand}: {item!r} is no name=value that can be given here")
        if name in flags:
            raise LedgerError(f"{operand}: {name} is given twice; leave one out")
        flags[name] = value
    first_seed, data = int(flags.pop("seed", 0)), []
    settings = settings_of(source, preset) | flags
    for name in sorted({"train_files", "val_files"} & settings.keys()):
        for file in sorted(map(Path, glob.glob(str(REPO / settings[name])))):
            with file.open("rb") as shard:  # other text has another size or begin
                digest = hashlib.sha256(shard.read(2**20)).hexdigest()
            data.append([file.name, file.stat().st_size, digest])
    return Contestant(place, flags, settings, data, source, first_seed)


def contestants_of(operands: list, preset: str) -> list:
    """The operands as contestants; a folder of records stands for all of them."""
    found = []
    for operand in operands:
        inside = sorted(Path(operand).glob("*/record.json"))
        for each in [str(claim.parent) for claim in inside] or [operand]:
            found.append(contestant_of(each, preset))
    return found


# ---- Interleaved training ----
def train(source: str, folder: Path, flags: dict, ranks: int, threads: str) -> Log:
    """Run a script in `folder`, in a process of its own; its log. Raises LedgerError.

    It is a copy: the one that the source was read from may be edited meanwhile.
    """
    script = folder / "scripts" / f"{flags['run_id']}.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(source, encoding="utf-8", newline="")
    command = [sys.executable, str(script)]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", *torchrun_options(ranks)]
    with contextlib.suppress(FileExistsError):
        (folder / "data").symlink_to(REPO / "data")
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, errors="replace",
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, **MALLOC, "OMP_NUM_THREADS": threads})
    if done.returncode:
        last = (done.stdout.strip() or "nothing").splitlines()[-1]
        raise LedgerError(f"exit status {done.returncode}, its last words: {last[:200]}; what ran "
                          f"is a copy without the files beside it, {script}")
    path = folder / "logs" / flags["run_id"] / "log.txt"
    log = read_log(path) if path.exists() else None
    if not log or not log.finished or "seed" not in log.header:
        raise LedgerError(f"it left no finished {path.relative_to(folder)} with its seed")
    if log.source != source:
        raise LedgerError(f"its log has another source than {script}")
    return log


# ---- Finished runs are kept ----
SAME = {"val_digest": "validation data", "train_digest": "training data",
        "planned_tokens": "numbers of tokens", "num_iterations": "numbers of steps"}
KEPT = *SETTING, *SAME, "seed", "process_time_ms"  # of a header


def read_store(path: Path) -> dict:
    """{run id: the row of a finished run}, which `keep` appended as a line of JSON."""
    rows = {}
    for line in read_text(path).splitlines() if path.exists() else []:
        # The machine went off while it was written, or it is no row.
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            row = json.loads(line)
            log_of(row, path)
            rows[row["run"]] = row
    return rows


def digest_of(source: str) -> str:
    """A digest of what a script means above its banner."""
    return hashlib.sha256(meaning(above(source)).encode()).hexdigest()[:16]


def row_of(run_id: str, one: Contestant, log: Log) -> dict:
    """What is kept of a finished run. Where its last loss is None, it diverged."""
    found = log.final | log.header
    return dict(
        run=run_id, script=digest_of(one.source), flags=one.flags,
        header={name: found[name] for name in KEPT if name in found},
        val=[(step, loss) for step, (loss, _) in log.val.items()],
        val_loss=log.val_loss, train_time_ms=log.train_time_ms)


def keep(path: Path, row: dict):
    """Append a row to the store."""
    line = json.dumps(row) + "\n"
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        line = "\n" + line  # the last one was cut
    with path.open("a", encoding="utf-8", newline="") as file:  # one write: others may append, too
        file.write(line)


def loss_of(row: dict) -> float:
    return math.inf if row["val_loss"] is None else row["val_loss"]  # it diverged


def log_of(row: dict, path: Path) -> Log:
    """What a row tells of the log at `path`."""
    log = Log(path, header=row["header"], finished=True, train_time_ms=row["train_time_ms"] or 0)
    log.val_loss = loss_of(row)
    log.runs = [{"val_loss": dict(row["val"])}]
    log.describe()
    return log


def run_id_of(one: Contestant, seed: int, args) -> str:
    """The name of a run, which hashes all that it depends on."""
    what = [meaning(one.source), one.flags, one.data, args.preset, args.nproc, args.jobs,
            args.threads, importlib.metadata.version("torch")]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    name = re.sub(r"\W", "-", Path(one.place).resolve().stem)
    return f"{name}-{digest[:8]}-seed-{seed}"


def hold_alike(log: Log, first: Log, args):
    """Raise LedgerError where two runs are of other machines."""
    if log.setting != first.setting:
        flag = "--out" if args.store.parent == args.out else "--store"
        raise LedgerError(f"it is of {machine_words(log.setting)}, and what {args.store} has is of "
                          f"{machine_words(first.setting)}; give another {flag}")


def run_one(one: Contestant, seed: int, first: Log | None, args) -> Log:
    """The log of a run, made now unless the store has it. It has to be of the first one's machine.

    Raises LedgerError.
    """
    run_id = run_id_of(one, seed, args)
    path = args.out / "logs" / run_id / "log.txt"
    if run_id in args.rows:
        return log_of(args.rows[run_id], path)
    shutil.rmtree(path.parent, ignore_errors=True)  # what is left of a run that was stopped
    flags = {"preset": args.preset, "seed": seed, "run_id": run_id, **one.flags}
    try:
        log = train(one.source, args.out, flags, args.nproc, args.threads)
    except LedgerError as error:
        if not re.search("loss:-?(nan|inf)", str(error)):
            raise
        log = read_log(path)
        log.val_loss = None
    if args.jobs > 1:
        start, log.header["jobs"] = f"\n{RULE}\n", str(args.jobs)
        text = read_text(path).replace(start, f"{start}jobs: {args.jobs}\n", 1)
        path.write_text(text, encoding="utf-8", newline="")
    row = row_of(run_id, one, log)
    found = log_of(row, path)
    if first:
        hold_alike(found, first, args)  # before it is kept, in the place of one of that machine
    keep(args.store, row)
    args.rows[run_id] = row
    return found


def run_all(contestants: list, seeds, args, stage: str):
    """Every seed of every contestant, A B A B. Raises LedgerError where one fails or is stopped."""
    for folder in (args.out / "logs", args.store.parent):
        folder.mkdir(parents=True, exist_ok=True)
    turns = [(one, seed, run_id_of(one, seed + one.first_seed, args))
             for seed in seeds for one in contestants]
    new = {run_id for *_, run_id in turns} - args.rows.keys()
    kept_rows = [args.rows[run_id] for *_, run_id in turns if run_id in args.rows]
    kept_log = log_of(kept_rows[0], args.store) if kept_rows else None
    pool, futures, began = ThreadPoolExecutor(args.jobs), {}, time.monotonic()
    same = SAME if args.tune else ["val_digest"]
    kept = f"what is done is kept in {args.store}"
    for one, seed, run_id in turns:
        if run_id not in futures:  # a script may stand against itself
            futures[run_id] = pool.submit(run_one, one, seed + one.first_seed, kept_log, args)
    try:
        for number, (one, seed, run_id) in enumerate(turns, 1):
            what = f"[{number}/{len(turns)}] {one.operand} seed {seed + one.first_seed}"
            log = replace(futures[run_id].result(), seed=seed)
            one.logs.append(log)
            first = contestants[0].logs[0]
            for name in same:
                if log.header.get(name) != first.header.get(name):
                    raise LedgerError(f"it has other {SAME[name]} than {first.path}")
            hold_alike(log, first, args)
            words = "diverged" if math.isinf(log.val_loss) else f"{log.val_loss:.4f}"
            if log.measured_ms:
                words += f" in {log.measured_ms / 1000:.2f} s"
            done = len(new & args.rows.keys())
            if 0 < done < len(new):
                seconds = (time.monotonic() - began) / done * (len(new) - done)
                words += f", {seconds / 60:.1f} min of {stage} left"
            print(f"{what}: {words}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise LedgerError(f"stopped; the same command goes on; {kept}") from None
    except LedgerError as error:
        raise LedgerError(f"{what}: {error}; {kept}") from None
    finally:
        pool.shutdown(cancel_futures=True)  # ctrl-C stops what runs now at its next step


# ---- Seeds are run again ----
SAME_WEIGHTS = {"cpu": 1e-5, "cuda": 2e-3}  # nats between two ways to sum one loss


def replay(record: Record, old: Log) -> list:
    """What is wrong with a log whose seed is run again, its last weights judged; more is told."""
    preset, device = old.header["preset"], "cuda" if old.on_gpu else "cpu"
    flags = {"preset": preset, "seed": old.seed, "run_id": "replay",
             "sequences_per_forward": old.header["sequences_per_forward"],
             "save_every": old.header["num_iterations"]}
    with tempfile.TemporaryDirectory() as out:
        new = train(record.script, Path(out), flags, int(old.header["world_size"]),
                    old.header["threads"])
        (checkpoint,) = Path(out).glob("logs/replay/step-*.pt")
        # As text from another process: what a record does there stays there.
        command = [sys.executable, JUDGE, record.path, checkpoint, preset, device]
        judged = subprocess.run(command, text=True, capture_output=True)
        if judged.returncode:
            raise LedgerError(f"its weights cannot be judged: {judged.stderr.strip()[-200:]}")
        found = json.loads(judged.stdout.splitlines()[-1])
    new.header["jobs"] = old.header.get("jobs", "1")  # which change no loss
    new.describe()
    name = f"{record.folder.name}: logs/{old.path.name}"
    print(f"{name} run again: {new.val_loss - old.val_loss:+.6f} from its val_loss, "
          f"{machine_words(new.setting)}", file=sys.stderr)

    digest, loss = RULES[record.ladder][preset]["val_digest"], found["loss"]
    reasons = [
        (new.header["planned_tokens"] != old.header.get("planned_tokens"),
         f"plans {new.header['planned_tokens']} tokens when it is run again"),
        (digest and {found["digest"], new.header["val_digest"]} != {digest},
         "is run again on other validation data than the rules'"),
        (abs(loss - new.val_loss) > SAME_WEIGHTS[device],
         f"says val_loss {new.val_loss} when it is run again, and its weights have {loss:.6f}"),
        (found["leaks"], "is of a model whose logits depend on later tokens")]
    return [f"{name} {words}" for is_wrong, words in reasons if is_wrong]


def replay_all(chosen: list, seeds: int) -> list:
    """Replay seeds of each setting that this machine can run: what is wrong."""
    from torch.cuda import device_count  # takes seconds

    wrong = []
    for record in chosen:
        for setting, logs in record.runs().items():
            if logs[0].on_gpu and device_count() < int(logs[0].header["world_size"]):
                print(f"{record.folder.name}: {machine_words(setting)}: this machine has no such "
                      "GPUs; not run again", file=sys.stderr)
                continue
            for old in random.sample(logs, min(seeds, len(logs))):
                try:
                    wrong += replay(record, old)
                except LedgerError as error:
                    wrong.append(f"{record.folder.name}: cannot be run again: {error}")
    return wrong
