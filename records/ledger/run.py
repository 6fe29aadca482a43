"""Runs: scripts trained in turns, their logs kept, and a record's seeds run once more."""

import contextlib
import itertools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ledger import table
from ledger.logs import FOLDERS, LedgerError, Log, read_log, read_text, seed_files, sha256

REPO = Path(__file__).resolve().parents[2]
RUNNING = set()  # processes
# Nats per token that another machine may move a loss. The pocket's was seen to move by some 0.002.
MOVES = 0.01


@dataclass
class Contestant:
    """A script with its flags that `run` measures, and the logs of its runs."""

    label: str  # as it was given, without the folders above
    script: Path
    folder: Path | None  # its record folder, where it is one as it stands
    flags: dict[str, str]
    source: str
    logs: list[Log]


def contestant_of(operand: str) -> Contestant:
    """The contestant of `PATH` or `PATH:name=value,name=value`. Raises LedgerError."""
    place, _, words = operand.partition(":")
    path = Path(place).resolve()
    script = path / "train_gpt.py" if path.is_dir() else path
    if script.suffix != ".py" or not script.is_file():
        raise LedgerError(f"{operand}: no script there; give a record folder or a .py file")
    flags = {}
    for item in re.split(r",(?=[a-zA-Z_]\w*=)", words) if words else ():
        name, equals, flags[name] = item.partition("=")
        if not name.isidentifier() or not equals:
            raise LedgerError(f"{operand}: {item!r} is no flag; give name=value,name=value")
        if name in ("run_id", "preset", "seed"):
            raise LedgerError(f"{operand}: {name} is the ledger's; use --preset or --seeds")
    is_record = table.FOLDER_NAME.fullmatch(path.name) and path.is_dir() and not flags
    label = (path.name if path.is_dir() else path.stem) + operand[len(place):]
    return Contestant(label, script, path if is_record else None, flags, read_text(script), [])


def contestants_of(operands: list, preset: str):
    """The operands as contestants, no two alike, with flags that their scripts take."""
    found, seen = [], {}
    for operand in operands:
        one = contestant_of(operand)
        settings = settings_of(one.script, {"preset": preset, **one.flags})
        key = (one.source, str(settings or one.flags))
        if key in seen:
            raise LedgerError(f"{operand} has the script and the settings of {seen[key]}; give one")
        seen[key] = operand
        found.append(one)
    return found


def flag_words(flags: dict):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def settings_of(script: Path, flags: dict):
    """A script's hyperparameters with these flags, as headers show them. Raises LedgerError."""
    # Without parse_args it has none, and is not imported: it might train at once.
    if not re.search(r"^def parse_args\(", read_text(script), re.M):
        return {}
    try:
        parse_args = runpy.run_path(str(script))["parse_args"]
        values = vars(parse_args(flag_words(flags)))
    except (Exception, SystemExit) as error:
        raise LedgerError(f"{script.parent.name}/{script.name}: {error}") from None
    found = {}
    for name, value in values.items():
        found[name] = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return found


def train(script: Path, folder: Path, flags: dict, ranks: int, threads: str) -> Log:
    """Run a script in `folder`, in a process of its own; its log. Raises LedgerError."""
    command = [sys.executable, str(script), *flag_words(flags)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with contextlib.suppress(FileExistsError):
        (folder / "data").symlink_to(REPO / "data")
    source = sha256(read_text(script))
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={**os.environ, "OMP_NUM_THREADS": threads})
    RUNNING.add(process)
    console, _ = process.communicate()
    RUNNING.discard(process)
    if process.returncode:
        last = (console.strip() or "nothing").splitlines()[-1]
        raise LedgerError(f"exit status {process.returncode}, its last words: {last[:200]}", 1)
    log = read_log(folder / "logs" / flags["run_id"] / "log.txt")
    if not log.finished:
        raise LedgerError("; ".join(log.notes), 1)
    if log.source_sha256 != source:
        raise LedgerError("its script was changed after it began; start again", 1)
    return log


def run_one(one: Contestant, seed: int, args) -> Log:
    """The log of a run, made now unless its RUN_ID, which hashes all it depends on, is there."""
    what = [one.source, one.flags, args.preset, args.nproc, args.jobs, args.kind]
    digest = sha256(json.dumps(what, sort_keys=True))[:8]
    run_id = f"{one.label.partition(':')[0]}-{digest}-seed-{seed}"
    path = args.out / "logs" / run_id / "log.txt"
    with contextlib.suppress(LedgerError, FileNotFoundError):
        log = read_log(path)
        if log.finished and not log.resumed:
            return log
    shutil.rmtree(path.parent, ignore_errors=True)  # what is left of a run that was stopped
    threads = str(max(1, len(os.sched_getaffinity(0)) // args.jobs))
    if args.jobs == 1:
        threads = os.environ.get("OMP_NUM_THREADS", threads)
    flags = {"preset": args.preset, "seed": seed, "run_id": run_id, **one.flags}
    train(one.script, args.out, flags, args.nproc, threads)
    if args.jobs > 1:
        path.write_text(f"{read_text(path)}jobs: {args.jobs}\n", encoding="utf-8", newline="")
    return read_log(path)


def run_all(contestants: list, args):
    """Every seed of every contestant, A B A B. Raises LedgerError where one fails or is stopped."""
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    kept = f"what is done is kept in {args.out}; the same command goes on"
    pool, futures = ThreadPoolExecutor(args.jobs), {}
    for seed, one in itertools.product(range(args.seeds), contestants):
        futures[pool.submit(run_one, one, seed, args)] = (one, seed)
    try:
        for done, future in enumerate(as_completed(futures), 1):
            one, seed = futures[future]
            what = f"[{done}/{len(futures)}] {one.label} seed {seed}"
            log = future.result()
            print(f"{what}: {log.val_loss:.4f} in {log.train_time_ms / 1000:.2f} s",
                  file=sys.stderr, flush=True)
    except (LedgerError, KeyboardInterrupt) as error:
        why = f"{what}: {error}" if isinstance(error, LedgerError) else "stopped"
        raise LedgerError(f"{why}; {kept}", 1) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list(RUNNING):  # they stop at their next step
            process.terminate()
        pool.shutdown()
    for future, (one, _) in futures.items():
        one.logs.append(future.result())


def keep(one: Contestant, args):
    """Copy the logs of a measured record, the first with its source, and make its rows."""
    wanted, log = table.SEEDS[args.kind], one.logs[0]
    if args.seeds != wanted or args.preset not in table.RULES or log.simulated:
        device, presets = log.header["device"], " or ".join(table.RULES)
        print(f"{one.label}: not kept: {args.seeds} seeds of {args.preset} on {device}; by the "
              f"rules they are {wanted}, of {presets}, on no stand-in", file=sys.stderr)
        return
    for path in seed_files(one.folder, args.kind):
        path.unlink()
    place = one.folder / FOLDERS[args.kind]
    place.mkdir(parents=True, exist_ok=True)
    for seed, log in enumerate(one.logs):
        short = f"source sha256: {log.source_sha256}\n{log.body}"
        text = short if seed else read_text(log.path)
        (place / f"seed-{seed}.txt").write_text(text, encoding="utf-8", newline="")
    print(f"{one.label}: kept; `list --write` is next", file=sys.stderr)


def results(contestants: list):
    """What `run` found, as numbers: each contestant, against its parent or the first one."""
    found, rows = [], {}
    for one in contestants:
        rows[one.label] = [table.run_row(one.label, "loss", log) for log in one.logs]
        parent = table.read_claim(one.folder)["parent"] if one.folder else None
        other = parent if parent in rows else contestants[0].label
        losses, target = [log.val_loss for log in one.logs], one.logs[0].header["target_loss"]
        found.append({"name": one.label, "label": re.sub(r"^[\d-]{10}_", "", one.label),
                      "losses": losses, "target": float(target), "against": None,
                      "p_target": table.p_below(losses, float(target))})
        if one is not contestants[0]:
            found[-1]["against"] = {"name": other, **table.compare(rows[one.label], rows[other])}
    return found


def replay(record: table.Record, path: Path):
    """Run a record's seed again: whether its log may be true, and what was found."""
    old = read_log(path)
    flags = {"preset": old.header["preset"], "seed": old.header["seed"], "run_id": "replay"}
    with tempfile.TemporaryDirectory() as out:
        new = train(record.folder / "train_gpt.py", Path(out), flags,
                    int(old.header["world_size"]), old.header["threads"])
    before, now, differ = old.final["val_loss"], new.final["val_loss"], []
    for name in ("torch", "device", "threads", "world_size"):
        if new.header[name] != old.header[name]:
            differ.append(f"{name} {new.header[name]} instead of {old.header[name]}")
    true, how = now == before, "on the same machine"
    if table.RULES[new.header["preset"]]["val_digest"] not in (None, new.header["val_digest"]):
        true, how = False, "on other validation data than the rules'"
    elif differ:
        true = abs(float(now) - float(before)) <= MOVES
        how = (f"not comparable to the digit with {', '.join(differ)}; "
               f"{'within' if true else 'further off than'} {MOVES}, what machines may move")
    return true, (f"{record.folder.name}: logs/{path.name}: run again it has val_loss {now}, "
                  f"its log {before}; {how}")
