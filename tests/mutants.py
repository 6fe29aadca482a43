#!/usr/bin/env python3
"""Plant one fault at a time in a copy of the project, and tell which test finds it.

    python tests/mutants.py                    each fault, by the tests of its part
    python tests/mutants.py --all              each fault, by the whole quick suite
    python tests/mutants.py --only NAME,NAME   these faults, or those of these parts
    python tests/mutants.py --list             the faults

The quick tests shall find each fault, but for those of code that only a GPU runs, which the slow
tests on the stand-in shall find. The exit code is the number of faults that no test found. Where
there are some, a test is missing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
TIMEOUT = 900  # seconds; a fault that hangs the tests is found
TESTS = {  # of each part: the tests that can see its faults, the likeliest first
    "data": ["tests/data"],
    "checkpoints": ["tests/script/test_checkpoints.py", "tests/script/test_survival.py",
                    "tests/script/test_fuzz.py"],
    "script": ["tests/script", "tests/records"],
    "gpu": ["tests/script/test_compile.py", "tests/script/test_wire.py",
            "tests/script/test_fp8.py", "tests/gpu"],
    "ledger": ["tests/ledger"],
}
TABLE = {  # of each part: the fault, its file, the text that is replaced, what is put there
    "data": [
        ("the split looks at another byte", "data/pocket.py",
         "digests[path][0] %", "digests[path][1] %"),
        ("a shard may be longer than its header says", "data/shards.py",
         "st_size != expected_bytes", "st_size < expected_bytes"),
        ("sha256 of a download is not looked at", "data/fineweb.py",
         "return None if sha256 == published.sha256 else", "return None if sha256 else"),
        ("a text is cut before any white space", "data/text.py",
         r'\S(?=[ \n])")', r'\S(?=\s)")'),
        ("a second shard is cut anew", "data/text.py",
         "            left -= len(head)\n", ""),
        ("a short last shard takes too little", "data/text.py",
         "kept = self.shard_tokens - MIN_SHARD_TOKENS",
         "kept = self.shard_tokens - MIN_SHARD_TOKENS // 2"),
        ("equal logits are all cut by top_k", "data/sample.py",
         "logits[logits < least]", "logits[logits <= least]"),
        ("the model sees a token less", "data/sample.py",
         "ids[-cfg.val_seq_len:]", "ids[1 - cfg.val_seq_len:]"),
        ("own data is fetched for", "run.sh",
         "data=own ;;\n        --resume |", ";;\n        --resume |"),
    ],
    "checkpoints": [
        ("a file is not on the disk before it is renamed", "train_gpt.py",
         "            os.fsync(file.fileno())", "            pass"),
        ("one checkpoint is kept, not two", "train_gpt.py",
         "saved[:-keep]", "saved[:-1]"),
        ("checksums are not looked at", "train_gpt.py",
         'assert file.testzip() is None, "damaged"', "pass"),
        ("infinite weights are taken", "train_gpt.py",
         "assert torch.isfinite(tensor).all(), f", "assert not torch.isnan(tensor).any(), f"),
        ("auto takes the oldest checkpoint", "train_gpt.py",
         'sorted(folder.glob("step-*.pt"), reverse=True)', 'sorted(folder.glob("step-*.pt"))'),
        ("other training data may be gone on with", "train_gpt.py",
         'if data and state["data"] != data:', 'if data and not state["data"]:'),
        ("the data begin anew in a resumed run", "train_gpt.py",
         "loader=self.loader.place,", "loader=(0, 0),"),
    ],
    "script": [
        # Model
        ("the first key takes a part of the last one", "train_gpt.py",
         "torch.cat([first, k_BTHK[:, :-1]], dim=1)", "k_BTHK.roll(1, 1)"),
        ("the window is a token short", "train_gpt.py",
         "(query - key <= BLOCK * window)", "(query - key < BLOCK * window)"),
        ("backout takes another layer", "train_gpt.py",
         "outputs[cfg.backout_layer]", "outputs[cfg.backout_layer - 1]"),
        ("the smear is gated by the previous token", "train_gpt.py",
         "channels = current[", "channels = previous["),
        ("rows see each other", "train_gpt.py",
         "        starts_BT[:, 0] = True\n", ""),
        ("the MLP begins too large", "train_gpt.py",
         "std *= 0.5", "std *= 0.6"),
        ("targets of token 0 are not counted", "train_gpt.py",
         "(losses_SN * (targets_SN >= 0))", "(losses_SN * (targets_SN > 0))"),
        # Optimizers
        ("Muon without Nesterov's momentum", "train_gpt.py",
         "nesterov = grad.lerp(mean, momentum)", "nesterov = mean"),
        ("rows' squares are smoothed less", "train_gpt.py",
         "square.lerp_(row_square, 0.05)", "square.lerp_(row_square, 0.06)"),
        ("Adam's correction lacks its root", "train_gpt.py",
         "lr * (1 - beta2**count).sqrt()", "lr * (1 - beta2**count)"),
        ("weights decay where the step makes them grow", "train_gpt.py",
         "torch.where(change * old > 0, old, 0)", "torch.where(change * old < 0, old, 0)"),
        ("the factors of the MLP's matrices are swapped", "train_gpt.py",
         "factors=(2.0, 4.0)", "factors=(4.0, 2.0)"),
        ("the tied embedding shares weights but no state", "train_gpt.py",
         "zip(follower.tensors(), leader.tensors())",
         "zip(follower.tensors()[:1], leader.tensors())"),
        ("a rank steps by another rank's rows of factors", "train_gpt.py",
         "first = ranks.rank * len(mean)", "first = 0"),
        # Schedules
        ("Adam rests on the other steps", "train_gpt.py",
         "adam_rests=step % 2 == 0", "adam_rests=step % 2 == 1"),
        ("rates end too high", "train_gpt.py",
         "(1 - high) * 0.1\n", "(1 - high) * 0.15\n"),
        ("targets fade out more slowly", "train_gpt.py",
         "cfg.targets_ahead - ahead - 3 * progress", "cfg.targets_ahead - ahead - 2 * progress"),
        ("the last validation changes the rotary embedding", "train_gpt.py",
         "cfg.long_windows[:LAST_STAGE]", "cfg.long_windows"),
        ("the head is untied a third later", "train_gpt.py",
         "tied=stage < 2", "tied=stage < 3"),
        # Training
        ("the mean loss is of the last batch's tokens", "train_gpt.py",
         "tokens += targets.numel()", "tokens = targets.numel()"),
        ("all stages train with the first one's windows", "train_gpt.py",
         "run.model.set_stage(stage)", "run.model.set_stage(0)"),
        ("documents are not cut", "train_gpt.py",
         "min(ends[position] - start, cfg.max_document_tokens, room)",
         "min(ends[position] - start, room)"),
        ("the clock runs while validating", "train_gpt.py",
         "clock.stop()\n            run.validate(step)\n            run.clock.start()",
         "clock.read()\n            run.validate(step)\n            run.clock.read()"),
        # Data
        ("all ranks take the same sequences", "train_gpt.py",
         "first = self.ranks.rank * self.sequences", "first = 0"),
        ("the stride is not used", "train_gpt.py",
         "start = k * stride % N * length", "start = k % N * length"),
        ("a stride that divides the shard is taken", "train_gpt.py",
         "while math.gcd(stride, N) > 1:", "while stride < 1:"),
        ("a shard's first document is skipped from the second shard on", "train_gpt.py",
         "self.begin_shard(shard + 1)", "self.begin_shard(shard + 1, 1)"),
        # Validation
        ("the last validation token is not counted", "train_gpt.py",
         "targets.view(-1)[count - start :]", "targets.view(-1)[count - start - 1 :]"),
        ("the mean has a token too many", "train_gpt.py",
         ".sum().item() / count", ".sum().item() / (count + 1)"),
        ("ranks validate on overlapping parts", "train_gpt.py",
         "range(ranks.rank * size, count,", "range(0, count,"),
        # Ranks and log
        ("a restarted group meets at the addresses of dead ranks", "train_gpt.py",
         "store = dist.PrefixStore(attempt, store)", "pass"),
        ("the log has the loss of the first rank", "train_gpt.py",
         "*self.losses, _ = rows.mean(0).tolist()", "*self.losses, _ = rows[0].tolist()"),
        ("a signal to another rank stops nothing", "train_gpt.py",
         "int(rows[:, -1].max())", "int(rows[0, -1])"),
        ("what nohup ignores stops a run", "train_gpt.py",
         "if signal.getsignal(number) != signal.SIG_IGN:", "if number:"),
        ("a busy machine gets two threads", "train_gpt.py",
         "max(1, round(idle))", "max(2, round(idle))"),
        # Command line
        ("true is false", "train_gpt.py",
         '["false", "true"].index(', '["true", "false"].index('),
        ("end-of-text may lie above the vocabulary", "train_gpt.py",
         "cfg.eot_token < cfg.vocab_size <=", "cfg.eot_token <= cfg.vocab_size <="),
        ("a resumed run keeps the name of its checkpoint's run", "train_gpt.py",
         'device="auto", run_id="", resume=""', 'device="auto", resume=""'),
        ("an error ends in exit code 1", "train_gpt.py",
         "file=sys.stderr)\n    return 2\n", "file=sys.stderr)\n    return 1\n"),
    ],
    "gpu": [
        ("the window of FlexAttention is a token short", "train_gpt.py",
         "(q - k <= BLOCK * window)", "(q - k < BLOCK * window)"),
        ("the block at the window's end is seen whole", "train_gpt.py",
         "(distance > 0) & (distance < window)", "(distance > 0) & (distance <= window)"),
        ("the backward pass goes over the wrong blocks", "train_gpt.py",
         "order_blocks(partial.T.contiguous())", "order_blocks(partial.contiguous())"),
        ("the FP8 gradient of the weight has another scale", "train_gpt.py",
         "unscale_w = 1 / (FP8_GRAD_SCALE * FP8_X_SCALE)",
         "unscale_w = 1 / (FP8_GRAD_SCALE * FP8_W_SCALE)"),
        ("the loss takes the logit of another token", "train_gpt.py",
         "target_S[:, None] == ids_V\n", "target_S[:, None] == ids_V + 1\n"),
        ("FP8 on a GPU that has none", "train_gpt.py",
         ">= (8, 9)", ">= (8, 0)"),
        ("gates stay in fp32", "train_gpt.py",
         're.search("embed|gate|head", name)', 're.search("embed|head", name)'),
        ("the host waits for each step", "train_gpt.py",
         "self.read(late=int(news.is_cuda))", "self.read()"),
        ("the host waits for each copy of a batch", "train_gpt.py",
         "tokens = tokens.to(device, non_blocking=True)", "tokens = tokens.to(device)"),
        ("Newton-Schulz in fp32", "train_gpt.py",
         "torch.bfloat16 if mean.is_cuda else torch.float32", "torch.float32"),
    ],
    "ledger": [
        ("a seed that was run twice is taken", "records/ledger/verify.py",
         "sorted(seeds) != sorted(wanted)", "{*seeds} != {*wanted}"),
        ("a run that stands twice in the table is taken", "records/ledger/verify.py",
         "said = Counter(read_text(folder / TABLE).splitlines())",
         "said = Counter({*read_text(folder / TABLE).splitlines()})"),
        ("a loss edited in a log's end is taken", "records/ledger/verify.py",
         '("val_loss", loss, 5.06e-5)', '("val_loss", loss, 10)'),
        ("a resumed run is taken", "records/ledger/verify.py",
         "if log.resumed:", "if log.resumed and not log.finished:"),
        ("a resumed run is used again", "records/ledger/run.py",
         "if log.finished and not log.resumed:", "if log.finished:"),
        ("runs of two machines are taken", "records/ledger/verify.py",
         "if len(values) > 1:", "if len(values) > 2:"),
        ("a parent's other machine is taken", "records/ledger/verify.py",
         "headers.get(name) != {run[name] for run in theirs}",
         "not headers.get(name)"),
        ("p is that of a mean above the target", "records/ledger/table.py",
         'alternative="less"', 'alternative="greater"'),
        ("runs of different seeds are paired", "records/ledger/table.py",
         'if run["seed"] == other["seed"]:', 'if run["seed"] <= other["seed"]:'),
        ("one faster run is a gain in time", "records/ledger/table.py",
         'times["slowest"] < 1', 'times["fastest"] < 1'),
        ("lines that are frequent in a long section count as changed", "records/ledger/diff.py",
         "autojunk=False", "autojunk=True"),
        ("losses of one token and sums of several are mixed", "records/ledger/logs.py",
         'found.get("next_token_loss", found.get("train_loss"))', 'found.get("train_loss")'),
        ("an ablation that misses the target is the record", "records/ledger/public.py",
         "-len(self.logs), misses, ms", "-len(self.logs), ms"),
    ],
}


class Fault(NamedTuple):
    """A text that stands once in a file, and the wrong one that is put in its place."""

    part: str
    name: str
    file: str
    old: str
    new: str


FAULTS = [Fault(part, *row) for part, rows in TABLE.items() for row in rows]


class Verdict(NamedTuple):
    """The test that found a fault, or why none did."""

    found: bool
    words: str
    seconds: float


def copy_project(folder: Path) -> None:
    """Copy the files that git knows or would add, and link the data that tests only read."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)
    if (REPO / "data" / "pocket").is_dir():
        (folder / "data" / "pocket").symlink_to(REPO / "data" / "pocket")


def run_tests(folder: Path, tests: list[str], flags: list[str]) -> tuple[list[str], str]:
    """Return the names of the tests that failed, and the last line that pytest printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "--no-header",
               "-p", "no:cacheprovider", *tests, *flags]
    # A changed file may keep its size and its second, by which compiled files are told apart.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, text=True, timeout=TIMEOUT,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return [f"nothing ended within {TIMEOUT} s"], ""
    failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed, done.stdout.strip().rpartition("\n")[2]


def tests_of(part: str, whole_suite: bool) -> list[str]:
    """Return the words that choose the tests of a part's faults."""
    if part == "gpu":
        return [*TESTS["gpu"], "-m", "not cards"]
    return ["tests"] if whole_suite else TESTS[part]


def leave_out_failing(folder: Path, parts: list[str], whole_suite: bool) -> list[str]:
    """Return the flags that leave out the tests that fail without any fault; they show nothing."""
    flags = []
    for tests in {tuple(tests_of(part, whole_suite)) for part in parts}:
        for name in run_tests(folder, list(tests), [])[0]:
            print(f"fails without any fault, left out: {name}", flush=True)
            # A whole file, where it cannot be imported.
            flags.append(f"--deselect={name}" if "::" in name else f"--ignore={name}")
    return flags


def plant(fault: Fault, folder: Path, tests: list[str], flags: list[str]) -> Verdict:
    """Run the tests with the fault in the copy, and take it out again."""
    path = folder / fault.file
    sound = path.read_text()
    if sound.count(fault.old) != 1:
        return Verdict(False, f"its text stands {sound.count(fault.old)} times", 0.0)
    start = time.monotonic()
    path.write_text(sound.replace(fault.old, fault.new))
    try:
        failed, last_line = run_tests(folder, tests, ["-x", *flags])
    finally:
        path.write_text(sound)
    words = failed[0] if failed else last_line
    return Verdict(bool(failed), words, time.monotonic() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="run the whole quick suite for each")
    parser.add_argument("--only", metavar="NAME,NAME", help="names or parts (default: all faults)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N",
                        help="copies that are tested at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    args = parser.parse_args()
    faults = FAULTS
    if args.only:
        wanted = args.only.split(",")
        faults = [fault for fault in FAULTS if fault.part in wanted or fault.name in wanted]
    if not faults:
        parser.error(f"--only {args.only}: no such fault; --list shows them")
    if args.list:
        for fault in faults:
            print(f"{fault.part:12} {fault.file:16} {fault.name}")
        return 0

    jobs = max(1, args.jobs)
    with tempfile.TemporaryDirectory(prefix="mutants-") as base, ThreadPoolExecutor(jobs) as pool:
        folders = SimpleQueue()
        for number in range(jobs):
            folder = Path(base) / str(number)
            copy_project(folder)
            folders.put(folder)
        flags = leave_out_failing(folder, [fault.part for fault in faults], args.all)

        def judge(fault: Fault) -> Verdict:
            folder = folders.get()
            try:
                return plant(fault, folder, tests_of(fault.part, args.all), flags)
            finally:
                folders.put(folder)

        width = max(len(fault.name) for fault in faults)
        print(f"{'part':12} {'fault':{width}} seconds  found by")
        missed = 0
        for fault, verdict in zip(faults, pool.map(judge, faults)):
            missed += not verdict.found
            words = verdict.words if verdict.found else f"NO TEST: {verdict.words}"
            print(f"{fault.part:12} {fault.name:{width}} {verdict.seconds:7.0f}  {words}",
                  flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
