"""Runs: scripts trained in turns, and a record's seeds run again, judged by code of our own."""

import contextlib
import hashlib
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
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ledger import table
from ledger.logs import LedgerError, Log, read_log, read_text, sha256
from ledger.table import RULES, apart, flag_words, module_of, settings_of

REPO = Path(__file__).resolve().parents[2]
RUNNING = set()  # processes
# glibc keeps freed memory. Asking for new pages costs 8 % of the pocket's time.
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_MAX_": "0"}
COMPARABLE = ("val_files", "val_tokens")  # settings without which losses are not comparable


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
    found, seen, first = [], {}, {}
    for operand in operands:
        one = contestant_of(operand)
        settings = settings_of(one.script, {"preset": preset, **one.flags})
        key = (one.source, str(settings or one.flags))
        if key in seen:
            raise LedgerError(f"{operand} has the script and the settings of {seen[key]}; give one")
        seen[key] = operand
        for name in COMPARABLE:
            value, other = settings.get(name), first.setdefault(name, settings.get(name))
            if value != other:
                raise LedgerError(f"{operand} validates on {name} {value}, {operands[0]} on "
                                  f"{other}: losses on other tokens do not compare; give all one")
        found.append(one)
    return found


def gpus() -> int:
    import torch  # takes seconds

    return torch.cuda.device_count()


def cores() -> int:
    """How many this process may use; macOS does not tell, so there it is all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
                               env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": threads})
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
    what = [one.source, one.flags, args.preset, args.nproc, args.jobs]
    digest = sha256(json.dumps(what, sort_keys=True))[:8]
    run_id = f"{one.label.partition(':')[0]}-{digest}-seed-{seed}"
    path = args.out / "logs" / run_id / "log.txt"
    with contextlib.suppress(LedgerError, FileNotFoundError):
        log = read_log(path)
        if log.finished and not log.resumed:
            return log
    shutil.rmtree(path.parent, ignore_errors=True)  # what is left of a run that was stopped
    threads = str(max(1, cores() // args.jobs))
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
            time = f" in {log.train_time_ms / 1000:.2f} s" if args.jobs == 1 else ""
            print(f"{what}: {log.val_loss:.4f}{time}", file=sys.stderr, flush=True)
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


def filing(contestants: list):
    """The command that files the logs of the records among the contestants, if there are any."""
    logs = []
    for one in contestants:
        if one.folder:
            first = os.path.relpath(one.logs[0].path.parent)  # …-seed-0
            logs.append(f"{first[:-1]}*/log.txt")
    return f"python records/ledger file {' '.join(logs)}" if logs else ""


def results(contestants: list):
    """What `run` found, as numbers: each contestant, against its parent or the first one."""
    found, rows = [], {}
    for one in contestants:
        rows[one.label] = [table.run_row(one.label, "", log) for log in one.logs]
        parent = table.read_claim(one.folder)["parent"] if one.folder else None
        other = parent if parent in rows else contestants[0].label
        losses, target = [log.val_loss for log in one.logs], one.logs[0].header["target_loss"]
        found.append({"name": one.label, "label": re.sub(r"^[\d-]{10}_", "", one.label),
                      "losses": losses, "target": float(target), "against": None,
                      "p_target": table.p_below(losses, float(target))})
        if one is not contestants[0]:
            found[-1]["against"] = {"name": other, **table.compare(rows[one.label], rows[other])}
    return found


# ---- A record's seeds run again ----
# How far a seed's loss moves on another machine, in nats per token, as root mean square. Pocket: of
# ten seeds of #53 from an EPYC on a Xeon; one of each record there: 0.0043, at most 0.0103. Record:
# two public runs of #21 differ by the root of 2 times their std, 0.0019.
MOVES = {"pocket": 0.0072, "record": 0.0027}
# Honest seeds move both ways, a cheat's move one way: the mean of N moves by MOVES / √N. Three such
# are passed by one honest mean in 370.
BOUND = 3
SAME_WEIGHTS = {"cpu": 1e-5, "cuda": 2e-3}  # nats between two ways to sum one loss; bf16 on a GPU
CUTS = 32  # places behind which tokens are changed


def judge(script: Path, checkpoint: Path, preset: str, device: str, seed: int):
    """A checkpoint's loss by our own loop, and what is wrong with its model.

    It runs in a process of its own. Of the record it takes the model alone: its class, hidden() and
    logits(). Data, softmax and mean are read and computed here.
    """
    import torch

    log_sum, equal, draw = torch.Tensor.logsumexp, torch.equal, random.SystemRandom()
    load, no_grad, read = torch.load, torch.no_grad, np.fromfile
    (shard,) = REPO.glob(RULES[preset]["val_files"])
    tokens = read(shard, "<u2", int(RULES[preset]["val_tokens"]) + 1, offset=1024)
    digest = hashlib.sha256(tokens).hexdigest()[:16]
    tokens = torch.from_numpy(tokens.astype(np.int64)).to(device)
    record = module_of(script)
    state = load(checkpoint, map_location=device, weights_only=True)
    cfg = record.parse_args([f"--{name}={text}" for name, text in state["settings"].items()])
    with torch.device(device):
        model = record.GPT(cfg)
    with no_grad():
        starts = []
        for start in (seed, seed + 1):
            model.init_weights(torch.Generator(device).manual_seed(start))
            starts.append(torch.cat([one.flatten().float() for one in model.parameters()]))
        model.load_state_dict(state["model"])
        model.eval()

        total, length = 0.0, cfg.val_seq_len
        for start in range(0, len(tokens) - 1, length):  # a row alone sees no other row
            row = tokens[start : start + length + 1]
            hidden = model.hidden(row[None, :-1].int())[0]
            for part, targets in zip(hidden.split(4096), row[1:].split(4096)):
                logits = model.logits(part).double()
                losses = log_sum(logits, -1) - logits.gather(1, targets[:, None])[:, 0]
                total += losses.sum().item()

        def logits_at(row, places):
            return model.logits(model.hidden(row[None].int())[0, places])

        leaks = False
        for _ in range(CUTS):
            cut = draw.randrange(1, length)
            start = length * draw.randrange((len(tokens) - 1) // length)
            row = tokens[start : start + length]
            changed = row.clone()
            changed[cut:] = row[torch.tensor([draw.randrange(length) for _ in row[cut:]])]
            places = torch.tensor([cut - 1, *(draw.randrange(cut) for _ in range(64))])
            moved = logits_at(changed, places) - logits_at(row, places)
            leaks |= moved.abs().max().item() > 1e-3
    return {"loss": total / (len(tokens) - 1), "digest": digest, "leaks": leaks,
            "seedless": equal(*starts)}


def run_again(script: Path, old: Log):
    """(log, verdict) of a seed that is run again, its last weights judged. Raises LedgerError."""
    flags = {"preset": old.header["preset"], "seed": old.header["seed"], "run_id": "replay",
             "save_every": old.header["num_iterations"]}
    ranks, device = int(old.header["world_size"]), "cuda"
    if old.header["device"].startswith("cpu"):
        device = "cpu"
    with tempfile.TemporaryDirectory() as out:
        new = train(script, Path(out), flags, ranks, old.header["threads"])
        (checkpoint,) = Path(out).glob("logs/replay/step-*.pt")
        alone = Path(out) / "record.py"  # a folder without data
        shutil.copy(script, alone)
        what = alone, checkpoint, flags["preset"], device, int(flags["seed"])
        try:
            return new, apart(judge, *what)
        except Exception as error:  # whatever the record's code raises
            raise LedgerError(f"{old.path}: its weights cannot be judged: {error}", 1) from None


def replay(record: table.Record, paths: list):
    """Run seeds of one setting again: (what is wrong with their logs, and what was found)."""
    wrong, shifts, differ = [], [], set()
    for path in paths:
        old = read_log(path)
        new, found = run_again(record.folder / "train_gpt.py", old)
        before = old.final["val_loss"]
        now = new.final["val_loss"]
        true = found["loss"]
        shifts.append(true - float(before))
        for name in ("torch", "device", "threads", "world_size"):
            if new.header[name] != old.header[name]:
                differ.add(f"{name} {new.header[name]} instead of {old.header[name]}")
        kind = "cpu" if new.header["device"].startswith("cpu") else "cuda"
        if kind == "cuda":
            differ.add("a GPU, which sums in any order")
        preset = new.header["preset"]
        rule = RULES[preset]["val_digest"]
        for is_wrong, words in (
                (rule and {found["digest"], new.header["val_digest"]} != {rule},
                 "is run again on other validation data than the rules'"),
                (abs(true - float(now)) > SAME_WEIGHTS[kind],
                 f"says val_loss {now} when it is run again, and its weights have {true:.6f}"),
                (not differ and now != before,
                 f"has val_loss {before}; run again on the same machine it has {now}"),
                (found["leaks"], "is of a model whose logits depend on later tokens"),
                (found["seedless"], "is of a script with the same first weights for each seed")):
            if is_wrong:
                wrong.append(f"{record.folder.name}: {path.parent.name}/{path.name} {words}")
    mean, bound = statistics.fmean(shifts), BOUND * MOVES[preset] / math.sqrt(len(shifts))
    seeds = ", ".join(path.stem.removeprefix("seed-") for path in paths)
    words = (f"{record.folder.name}: {len(paths)} seed(s) of {paths[0].parent.name}/ run again "
             f"({seeds}): judged losses are {mean:+.6f} from the logs' in the mean, ")
    if not differ:
        words += "on the same machine"
    else:
        words += (f"where {len(paths)} may move by {bound:.4f}, as of {', '.join(sorted(differ))}")
        if abs(mean) > bound:
            wrong.append(words)
    return wrong, words
