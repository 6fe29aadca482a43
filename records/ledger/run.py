"""Runs: scripts trained in turns, and a record's seeds run again, their models judged."""

import contextlib
import dataclasses
import glob
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ledger import records
from ledger.logs import (
    RULE,
    LedgerError,
    Log,
    machine_words,
    read_log,
    read_text,
    sha256,
    split_source,
)
from ledger.records import FLOOR, RULES, Record
from ledger.scripts import apart, flag_words, imports_of, meaning, settings_of
from shards import load_script

REPO = Path(__file__).resolve().parents[2]
RUNNING = set()  # processes
STOPPING = threading.Event()
# glibc keeps freed memory, as in run.sh: asking for new pages costs 8 % of the pocket's time.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_MAX_": "0"}


# ---- Contestants ----
@dataclass
class Contestant:
    """A script with its flags that `run` measures, and the logs of its runs."""

    operand: str  # as it was given
    name: str  # of its script or its folder
    script: Path
    source: str
    runs: list  # what of the source decides a run, as JSON can hold it
    flags: dict[str, str]
    settings: dict[str, str]  # all of its flags; where it cannot be asked, those given
    record: Record | None  # that it is, as it stands
    logs: list[Log] = field(default_factory=list)


def contestant_of(operand: str, preset: str) -> Contestant:
    """The contestant of `PATH` or `PATH:name=value,name=value`. Raises LedgerError."""
    place, _, words = operand.partition(":")
    path, flags = Path(place).resolve(), {}
    for item in re.split(r",(?=[a-zA-Z_]\w*=)", words) if words else ():  # values may have commas
        name, equals, value = item.partition("=")
        if not name.isidentifier() or not equals:
            raise LedgerError(f"{operand}: {item!r} is no flag; give name=value,name=value")
        if name in ("run_id", "preset", "seed"):
            raise LedgerError(f"{operand}: {name} is the ledger's; use --preset or --seeds")
        flags[name] = value
    script = path / "train_gpt.py" if path.is_dir() else path
    if script.suffix != ".py" or not script.is_file():
        raise LedgerError(f"{operand}: no script there; give a record folder or a .py file")
    record = None
    if path.is_dir() and records.FOLDER_NAME.fullmatch(path.name) and not flags:
        record = Record(path, records.read_claim(path))  # refused now, not after the training
    settings = settings_of(script, preset=preset, **flags)
    source = read_text(script)
    # Not in the threads of the runs: in Python 3.11 two threads that parse may fail.
    runs = [meaning(source), sorted(imports_of(source))]
    return Contestant(operand, re.sub(r"\W", "-", path.stem), script, source, runs, flags, settings,
                      record)


def contestants_of(operands: list, preset: str):
    """The operands as contestants, no two alike; a folder of records stands for all of them."""
    found = []
    for operand in operands:
        inside = sorted(Path(operand).glob("*/record.json"))
        for each in [str(claim.parent) for claim in inside] or [operand]:
            found.append(contestant_of(each, preset))
    for one, other in itertools.combinations(found, 2):
        if (one.runs, one.settings) == (other.runs, other.settings):
            raise LedgerError(f"{other.operand} has the script and the settings of {one.operand}, "
                              "but for comments; give one")
        for name in ("val_files", "val_tokens"):
            value, other_value = one.settings.get(name), other.settings.get(name)
            if value != other_value:
                raise LedgerError(f"{other.operand} validates on {name} {other_value}, "
                                  f"{one.operand} on {value}: their losses do not compare")
    return found


# ---- Training in turns ----
def data_of(settings: dict):
    """What tells other text of the same files' names: each file's size and time."""
    found = []
    for name in {"train_files", "val_files"} & settings.keys():
        for path in glob.glob(str(REPO / settings[name])):
            found.append([path, os.path.getsize(path), os.path.getmtime(path)])
    return sorted(found)


def train(script: Path, source: str, folder: Path, flags: dict, ranks, threads: str) -> Log:
    """Run a script in `folder`, in a process of its own; its log. Raises LedgerError."""
    command = [sys.executable, str(script), *flag_words(flags)]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with contextlib.suppress(FileExistsError):
        (folder / "data").symlink_to(REPO / "data")
    process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, errors="replace",
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": threads})
    RUNNING.add(process)
    if STOPPING.is_set():
        process.terminate()
    console, _ = process.communicate()
    RUNNING.discard(process)
    if process.returncode:
        last = (console.strip() or "nothing").splitlines()[-1]
        raise LedgerError(f"exit status {process.returncode}, its last words: {last[:200]}", 1)
    path = folder / "logs" / flags["run_id"] / "log.txt"
    if not path.exists():
        raise LedgerError(f"it wrote no {path.relative_to(folder)}, as --run_id asks", 1)
    log = read_log(path)
    if not log.finished:
        raise LedgerError(f"it stopped at step {log.last_step} of {log.planned_steps}", 1)
    for name in ("seed", "target_loss"):
        if name not in log.header:
            raise LedgerError(f"the header of its log has no {name}", 1)
    if log.source_sha256 != sha256(source):
        raise LedgerError("its script was changed meanwhile; start again", 1)
    return log


def run_one(one: Contestant, seed: int, args) -> Log:
    """The log of a run, made now unless its RUN_ID, which hashes all it depends on, is there."""
    # Small models are the quicker for one thread where other programs take a core.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    what = [one.runs, one.flags, args.preset, args.nproc, args.jobs, threads,
            importlib.metadata.version("torch"), data_of(one.settings)]
    run_id = f"{one.name}-{sha256(json.dumps(what, sort_keys=True))[:8]}-seed-{seed}"
    path = args.out / "logs" / run_id / "log.txt"
    with contextlib.suppress(LedgerError, FileNotFoundError):
        log = read_log(path)
        if log.finished and not log.resumed and log.jobs == str(args.jobs):
            return log
    shutil.rmtree(path.parent, ignore_errors=True)  # what is left of a run that was stopped
    flags = {"preset": args.preset, "seed": seed, "run_id": run_id, **one.flags}
    train(one.script, one.source, args.out, flags, args.nproc, threads)
    if args.jobs > 1:
        text = read_text(path).replace("\r\n", "\n")
        body = split_source(text)[2]  # begins with the header
        told = body.replace(f"{RULE}\n", f"{RULE}\njobs: {args.jobs}\n", 1)
        path.write_text(text.removesuffix(body) + told, encoding="utf-8", newline="")
    return read_log(path)


def run_all(contestants: list, args):
    """Every seed of every contestant, A B A B. Raises LedgerError where one fails or is stopped."""
    (args.out / "logs").mkdir(parents=True, exist_ok=True)
    turns = [(one, seed) for seed in range(args.seeds) for one in contestants]
    pool = ThreadPoolExecutor(args.jobs)
    futures = [pool.submit(run_one, one, seed, args) for one, seed in turns]
    try:
        for number, (one, seed) in enumerate(turns, 1):
            what = f"[{number}/{len(turns)}] {one.operand} seed {seed}"
            log = futures[number - 1].result()
            one.logs.append(log)
            first = contestants[0].logs[0]
            if log.setting != first.setting:
                raise LedgerError(f"it is of {machine_words(log.setting)}; {first.path} is of "
                                  f"{machine_words(first.setting)}; give another --out", 1)
            time = f" in {log.measured_ms / 1000:.2f} s" if log.measured_ms else ""
            print(f"{what}: {log.val_loss:.4f}{time}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        raise LedgerError("stopped; the same command goes on; what is done is kept in "
                          f"{args.out}", 1) from None
    except LedgerError as error:
        raise LedgerError(f"{what}: {error}; what is done is kept in {args.out}", 1) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        STOPPING.set()
        for process in list(RUNNING):  # they stop at their next step
            process.terminate()
        pool.shutdown()
        STOPPING.clear()


# ---- A model is judged ----
CUTS = 32  # places from which on tokens are changed
PIECE = 4096  # positions whose logits are computed at once
# How much logits may differ by rounding: sums of other sizes, and bf16 on a GPU (2⁻⁸ of 30).
ROUNDING = {"cpu": 1e-3, "cuda": 0.25}


def build_model(script: Path, checkpoint: Path, device: str):
    """(cfg, the trained model, whether another seed has the same first weights).

    This and `logits_of` are all that the judge takes of a record.
    """
    import torch

    script = load_script(script)
    state = script.load_checkpoint(checkpoint)
    cfg = script.hyperparameters({"device": device}, state["settings"])
    ranks = script.Ranks(cfg)
    other, _ = script.build(dataclasses.replace(cfg, seed=cfg.seed + 1), ranks)
    model, optimizers = script.build(cfg, ranks)
    pairs = zip(model.parameters(), other.parameters())
    seedless = all(torch.equal(one, same) for one, same in pairs)
    script.load_state(model, optimizers, state, checkpoint)  # which may have a table's rows
    return cfg, model.eval(), seedless


def logits_of(cfg, model, rows: np.ndarray, device: str):
    """Yield the logits of rows of tokens (B, T), piece by piece, as numpy's (positions, V)."""
    import torch

    tokens = torch.from_numpy(rows).int().to(device)
    size = min(PIECE, 2**26 // cfg.vocab_size)
    with torch.no_grad():
        hidden = model.hidden(tokens).flatten(0, 1)
        for part, inputs in zip(hidden.split(size), tokens.flatten().split(size)):
            logits = model.logits(part)
            # #91 leaves logits out in its last validation.
            if getattr(model, "forbidden", None) is not None:
                logits = model.canonical(logits, inputs)
            if type(logits) is not torch.Tensor:  # another class may compute what it likes
                raise LedgerError(f"its logits are no tensor but a {type(logits).__name__}")
            yield logits.float().cpu().numpy()


def judge(script: Path, checkpoint: Path, preset: str, device: str) -> dict:
    """A checkpoint's loss by our own loop, and what is wrong with its model, by its logits alone.

    It runs in a process of its own. Data are read here, and numpy does the mathematics.
    """
    exp, log, draw = np.exp, np.log, random.SystemRandom()
    (shard,) = REPO.glob(RULES[preset]["val_files"])
    tokens = np.fromfile(shard, "<u2", int(RULES[preset]["val_tokens"]) + 1, offset=1024)
    digest = hashlib.sha256(tokens).hexdigest()[:16]
    tokens = tokens.astype(np.int64)
    cfg, model, seedless = build_model(script, checkpoint, device)

    def whole(*rows):
        return np.concatenate([*logits_of(cfg, model, np.stack(rows), device)])

    length = cfg.val_seq_len
    short = min(length, PIECE)  # of rows that are only compared
    starts = range(0, len(tokens) - 1 - short, short)
    first, second = (tokens[start : start + short] for start in draw.sample(starts, 2))
    # Other tokens everywhere, so that no mixture of the rows goes unseen by chance
    second = np.where(second == first, (second + 1) % cfg.vocab_size, second)
    alone = whole(first)
    mixed = abs(whole(second, first)[short:] - alone).max()

    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        row = tokens[start : start + length + 1]
        targets = row[1:]
        for logits in logits_of(cfg, model, row[None, :-1], device):
            logits = logits.astype(np.float64)
            count = len(logits)
            top = logits.max(1, keepdims=True)
            log_sum = top[:, 0] + log(exp(logits - top).sum(1))
            total += float((log_sum - logits[np.arange(count), targets[:count]]).sum())
            targets = targets[count:]

    leak = 0.0
    for _ in range(CUTS):
        start, cut = draw.choice(starts), draw.randrange(1, short)
        row = tokens[start : start + short]
        changed = row.copy()
        changed[cut:] = row[[draw.randrange(short) for _ in row[cut:]]]
        leak = max(leak, abs(whole(row)[:cut] - whole(changed)[:cut]).max())
    mixed = max(mixed, abs(whole(first) - alone).max())  # all other rows were seen since
    bound = ROUNDING[device]
    return {"loss": total / (len(tokens) - 1), "digest": digest, "leaks": bool(leak > bound),
            "mixes": bool(mixed > bound), "seedless": seedless}


# ---- Seeds are run again ----
# How far a seed's loss moves on another machine, in nats per token, as root mean square: at least
# so much, and at least the root of 2 times the standard deviation of the record's own seeds. On
# the pocket, eight seeds of #40, #43, #53, #57, #62 and #88 each moved by 0.004 (#62) to 0.017
# (#57) from AVX512 to AVX2. Half as much again is for machines that were not tried. The record's
# is of two public runs of #21.
MOVES = {"pocket": 0.025, "record": 0.0027}
# Honest seeds move both ways, so the mean of N of them by MOVES / √N. Three such are passed by one
# honest mean in 370.
BOUND = 3
SAME_WEIGHTS = {"cpu": 1e-5, "cuda": 2e-3}  # nats between two ways to sum one loss; bf16 on a GPU


def run_again(script: Path, old: Log):
    """(log, verdict) of a seed that is run again, its last weights judged. Raises LedgerError."""
    flags = {"preset": old.preset, "seed": old.seed, "run_id": "replay",
             "save_every": old.header["num_iterations"]}
    if "sequences_per_forward" in old.header:
        flags["sequences_per_forward"] = old.header["sequences_per_forward"]
    device = "cuda" if old.on_gpu else "cpu"
    with tempfile.TemporaryDirectory() as out:
        new = train(script, read_text(script), Path(out), flags, int(old.header["world_size"]),
                    old.header["threads"])
        new.header["jobs"] = old.jobs  # which change no loss
        (checkpoint,) = Path(out).glob("logs/replay/step-*.pt")
        try:
            return new, apart(judge, script, checkpoint, old.preset, device)
        except Exception as error:  # whatever the record's code raises
            raise LedgerError(f"{old.path}: its weights cannot be judged: {error}", 1) from None


def wrong_with(old: Log, new: Log, found: dict):
    """What a verdict holds against a log."""
    digest, floor = RULES[new.preset]["val_digest"], FLOOR[new.preset]
    loss, before, now = found["loss"], old.final["val_loss"], new.final["val_loss"]
    reasons = [
        (digest and {found["digest"], new.header["val_digest"]} != {digest},
         "is run again on other validation data than the rules'"),
        (abs(loss - float(now)) > SAME_WEIGHTS["cuda" if new.on_gpu else "cpu"],
         f"says val_loss {now} when it is run again, and its weights have {loss:.6f}"),
        (new.setting == old.setting and not new.on_gpu and now != before,
         f"has val_loss {before}; run again in the same setting it has {now}"),
        (loss < floor, f"has weights of loss {loss:.4f}: no honest model gets below {floor}"),
        (found["leaks"], "is of a model whose logits depend on later tokens"),
        (found["mixes"], "is of a model whose logits depend on other rows"),
        (found["seedless"], "is of a script with the same first weights for each seed")]
    return [words for is_wrong, words in reasons if is_wrong]


def replay(record: Record, chosen: list, logs: list):
    """What is wrong with some of a setting's logs, each of which is run again; it is told, too."""
    wrong, shifts, name = [], [], record.folder.name
    for old in chosen:
        new, found = run_again(record.path, old)
        shifts.append(found["loss"] - old.val_loss)
        wrong += [f"{name}: logs/{old.path.name} {words}" for words in wrong_with(old, new, found)]
    mean = statistics.fmean(shifts)
    words = (f"{name}: seed {', '.join(str(log.seed) for log in chosen)} of "
             f"{machine_words(logs[0].setting)} run again: judged losses are {mean:+.6f} from the "
             "logs' in the mean, ")
    if new.setting == old.setting and not new.on_gpu:
        words += "in the same setting"
    else:
        spread = statistics.stdev(log.val_loss for log in logs) if len(logs) > 1 else 0
        moves = max(MOVES[new.preset], math.sqrt(2) * spread)
        bound = BOUND * moves / math.sqrt(len(shifts))
        words += f"where they may move by {bound:.4f}, on {machine_words(new.setting)}"
        if abs(mean) > bound:
            wrong.append(words)
    print(words, file=sys.stderr)
    return wrong


def replay_all(chosen: list, seeds: int):
    """Replay seeds of each setting that this machine can run, and the parents': what is wrong."""
    from torch.cuda import device_count  # takes seconds

    wrong, settings = [], []
    for record in chosen:
        if not record.logs:
            print(f"{record.folder.name}: no runs to run again", file=sys.stderr)
        for logs, others in record.measured():
            settings.append((record, logs))
            if others and record.parent not in chosen:
                settings.append((record.parent, others))
    for record, logs in settings:
        name = record.folder.name
        if logs[0].on_gpu and device_count() < int(logs[0].header["world_size"]):
            print(f"{name}: {machine_words(logs[0].setting)}: this machine has no such GPUs; not "
                  "run again", file=sys.stderr)
            continue
        try:
            wrong += replay(record, random.sample(logs, min(seeds, len(logs))), logs)
        except LedgerError as error:
            wrong.append(f"{name}: cannot be run again: {error}")
    return wrong
