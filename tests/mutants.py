#!/usr/bin/env python3
"""Plant one fault at a time in a copy of the project, and tell which test finds it.

    python tests/mutants.py                    each fault, by the tests of its part
    python tests/mutants.py --all              each fault, by the whole quick suite
    python tests/mutants.py --only NAME,NAME   these faults, or those of these parts
    python tests/mutants.py --list             the faults

A fault replaces a text that stands once in a file by another one. The quick tests shall find each,
but for those of code that only a GPU runs, which the slow tests on the stand-in shall find. The
exit code is the number of faults that no test found. Where there are some, a test is missing.
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


class Fault(NamedTuple):
    """What is wrong in the copy."""

    part: str
    name: str
    file: str
    old: str
    new: str


class Verdict(NamedTuple):
    """The test that found a fault, or why none did."""

    found: bool
    words: str
    seconds: float


FAULTS = [
    # Data, sampling, run.sh
    Fault("data", "the split looks at another byte", "data/pocket.py",
          "digests[path][0] %", "digests[path][1] %"),
    Fault("data", "a shard may be longer than its header says", "data/shards.py",
          "st_size != expected_bytes", "st_size < expected_bytes"),
    Fault("data", "sha256 of a download is not looked at", "data/fineweb.py",
          "return None if sha256 == published.sha256 else", "return None if sha256 else"),
    Fault("data", "a text is cut before any white space", "data/text.py",
          r'\S(?=[ \n])")', r'\S(?=\s)")'),
    Fault("data", "a second shard is cut anew", "data/text.py",
          "            left -= len(head)\n", ""),
    Fault("data", "a short last shard takes too little", "data/text.py",
          "kept = self.shard_tokens - MIN_SHARD_TOKENS",
          "kept = self.shard_tokens - MIN_SHARD_TOKENS // 2"),
    Fault("data", "equal logits are all cut by top_k", "data/sample.py",
          "logits[logits < least]", "logits[logits <= least]"),
    Fault("data", "the model sees a token less", "data/sample.py",
          "ids[-cfg.val_seq_len:]", "ids[1 - cfg.val_seq_len:]"),
    Fault("data", "own data is fetched for", "run.sh",
          "data=own ;;\n        --resume |", ";;\n        --resume |"),
    # Checkpoints
    Fault("checkpoints", "a file is not on the disk before it is renamed", "train_gpt.py",
          "            os.fsync(file.fileno())", "            pass"),
    Fault("checkpoints", "one checkpoint is kept, not two", "train_gpt.py",
          "saved[:-keep]", "saved[:-1]"),
    Fault("checkpoints", "checksums are not looked at", "train_gpt.py",
          'assert file.testzip() is None, "damaged"', "pass"),
    Fault("checkpoints", "infinite weights are taken", "train_gpt.py",
          "assert torch.isfinite(tensor).all(), f", "assert not torch.isnan(tensor).any(), f"),
    Fault("checkpoints", "auto takes the oldest checkpoint", "train_gpt.py",
          'sorted(folder.glob("step-*.pt"), reverse=True)', 'sorted(folder.glob("step-*.pt"))'),
    Fault("checkpoints", "other training data may be gone on with", "train_gpt.py",
          'if data and state["data"] != data:', 'if data and not state["data"]:'),
    Fault("checkpoints", "the data begin anew in a resumed run", "train_gpt.py",
          "loader=self.loader.place,", "loader=(0, 0),"),
    # Model
    Fault("script", "the first key takes a part of the last one", "train_gpt.py",
          "torch.cat([first, k_BTHK[:, :-1]], dim=1)", "k_BTHK.roll(1, 1)"),
    Fault("script", "the window is a token short", "train_gpt.py",
          "(query - key <= BLOCK * window)", "(query - key < BLOCK * window)"),
    Fault("script", "backout takes another layer", "train_gpt.py",
          "outputs[cfg.backout_layer]", "outputs[cfg.backout_layer - 1]"),
    Fault("script", "the smear is gated by the previous token", "train_gpt.py",
          "channels = current[", "channels = previous["),
    Fault("script", "rows see each other", "train_gpt.py",
          "        starts_BT[:, 0] = True\n", ""),
    Fault("script", "the MLP begins too large", "train_gpt.py", "std *= 0.5", "std *= 0.6"),
    Fault("script", "targets of token 0 are not counted", "train_gpt.py",
          "(losses_SN * (targets_SN >= 0))", "(losses_SN * (targets_SN > 0))"),
    # Optimizers
    Fault("script", "Muon without Nesterov's momentum", "train_gpt.py",
          "nesterov = grad.lerp(mean, momentum)", "nesterov = mean"),
    Fault("script", "rows' squares are smoothed less", "train_gpt.py",
          "square.lerp_(row_square, 0.05)", "square.lerp_(row_square, 0.06)"),
    Fault("script", "Adam's correction lacks its root", "train_gpt.py",
          "lr * (1 - beta2**count).sqrt()", "lr * (1 - beta2**count)"),
    Fault("script", "weights decay where the step makes them grow", "train_gpt.py",
          "torch.where(change * old > 0, old, 0)", "torch.where(change * old < 0, old, 0)"),
    Fault("script", "the factors of the MLP's matrices are swapped", "train_gpt.py",
          "factors=(2.0, 4.0)", "factors=(4.0, 2.0)"),
    Fault("script", "the tied embedding shares weights but no state", "train_gpt.py",
          "zip(follower.tensors(), leader.tensors())",
          "zip(follower.tensors()[:1], leader.tensors())"),
    Fault("script", "a rank steps by another rank's rows of factors", "train_gpt.py",
          "first = ranks.rank * len(mean)", "first = 0"),
    # Schedules
    Fault("script", "Adam rests on the other steps", "train_gpt.py",
          "adam_rests=step % 2 == 0", "adam_rests=step % 2 == 1"),
    Fault("script", "rates end too high", "train_gpt.py",
          "(1 - high) * 0.1\n", "(1 - high) * 0.15\n"),
    Fault("script", "targets fade out more slowly", "train_gpt.py",
          "cfg.targets_ahead - ahead - 3 * progress", "cfg.targets_ahead - ahead - 2 * progress"),
    Fault("script", "the last validation changes the rotary embedding", "train_gpt.py",
          "cfg.long_windows[:LAST_STAGE]", "cfg.long_windows"),
    Fault("script", "the head is untied a third later", "train_gpt.py",
          "tied=stage < 2", "tied=stage < 3"),
    # Training
    Fault("script", "the mean loss is of the last batch's tokens", "train_gpt.py",
          "tokens += targets.numel()", "tokens = targets.numel()"),
    Fault("script", "all stages train with the first one's windows", "train_gpt.py",
          "run.model.set_stage(stage)", "run.model.set_stage(0)"),
    Fault("script", "documents are not cut", "train_gpt.py",
          "min(ends[position] - start, cfg.max_document_tokens, room)",
          "min(ends[position] - start, room)"),
    Fault("script", "the clock runs while validating", "train_gpt.py",
          "clock.stop()\n            run.validate(step)\n            run.clock.start()",
          "clock.read()\n            run.validate(step)\n            run.clock.read()"),
    # Data
    Fault("script", "all ranks take the same sequences", "train_gpt.py",
          "first = self.ranks.rank * self.sequences", "first = 0"),
    Fault("script", "the stride is not used", "train_gpt.py",
          "start = k * stride % N * length", "start = k % N * length"),
    Fault("script", "a stride that divides the shard is taken", "train_gpt.py",
          "while math.gcd(stride, N) > 1:", "while stride < 1:"),
    Fault("script", "a shard's first document is skipped from the second shard on", "train_gpt.py",
          "self.begin_shard(shard + 1)", "self.begin_shard(shard + 1, 1)"),
    # Validation
    Fault("script", "the last validation token is not counted", "train_gpt.py",
          "targets.view(-1)[count - start :]", "targets.view(-1)[count - start - 1 :]"),
    Fault("script", "the mean has a token too many", "train_gpt.py",
          ".sum().item() / count", ".sum().item() / (count + 1)"),
    Fault("script", "ranks validate on overlapping parts", "train_gpt.py",
          "range(ranks.rank * size, count,", "range(0, count,"),
    # Ranks and log
    Fault("script", "a restarted group meets at the addresses of dead ranks", "train_gpt.py",
          "store = dist.PrefixStore(attempt, store)", "pass"),
    Fault("script", "the log has the loss of the first rank", "train_gpt.py",
          "*self.losses, _ = rows.mean(0).tolist()", "*self.losses, _ = rows[0].tolist()"),
    Fault("script", "a signal to another rank stops nothing", "train_gpt.py",
          "int(rows[:, -1].max())", "int(rows[0, -1])"),
    Fault("script", "what nohup ignores stops a run", "train_gpt.py",
          "if signal.getsignal(number) != signal.SIG_IGN:", "if number:"),
    Fault("script", "a busy machine gets two threads", "train_gpt.py",
          "max(1, round(idle))", "max(2, round(idle))"),
    # Command line
    Fault("script", "true is false", "train_gpt.py",
          '["false", "true"].index(', '["true", "false"].index('),
    Fault("script", "end-of-text may lie above the vocabulary", "train_gpt.py",
          "cfg.eot_token < cfg.vocab_size <=", "cfg.eot_token <= cfg.vocab_size <="),
    Fault("script", "a resumed run keeps the name of its checkpoint's run", "train_gpt.py",
          'device="auto", run_id="", resume=""', 'device="auto", resume=""'),
    Fault("script", "an error ends in exit code 1", "train_gpt.py",
          "file=sys.stderr)\n    return 2\n", "file=sys.stderr)\n    return 1\n"),
    # Branches that only a GPU takes
    Fault("gpu", "the window of FlexAttention is a token short", "train_gpt.py",
          "(q - k <= BLOCK * window)", "(q - k < BLOCK * window)"),
    Fault("gpu", "the block at the window's end is seen whole", "train_gpt.py",
          "(distance > 0) & (distance < window)", "(distance > 0) & (distance <= window)"),
    Fault("gpu", "the backward pass goes over the wrong blocks", "train_gpt.py",
          "order_blocks(partial.T.contiguous())", "order_blocks(partial.contiguous())"),
    Fault("gpu", "the FP8 gradient of the weight has another scale", "train_gpt.py",
          "unscale_w = 1 / (FP8_GRAD_SCALE * FP8_X_SCALE)",
          "unscale_w = 1 / (FP8_GRAD_SCALE * FP8_W_SCALE)"),
    Fault("gpu", "the loss takes the logit of another token", "train_gpt.py",
          "target_S[:, None] == ids_V\n", "target_S[:, None] == ids_V + 1\n"),
    Fault("gpu", "FP8 on a GPU that has none", "train_gpt.py", ">= (8, 9)", ">= (8, 0)"),
    Fault("gpu", "gates stay in fp32", "train_gpt.py",
          're.search("embed|gate|head", name)', 're.search("embed|head", name)'),
    Fault("gpu", "the host waits for each step", "train_gpt.py",
          "self.read(late=int(news.is_cuda))", "self.read()"),
    Fault("gpu", "the host waits for each copy of a batch", "train_gpt.py",
          "tokens = tokens.to(device, non_blocking=True)", "tokens = tokens.to(device)"),
    Fault("gpu", "Newton-Schulz in fp32", "train_gpt.py",
          "torch.bfloat16 if mean.is_cuda else torch.float32", "torch.float32"),
]


def copy_project(folder: Path) -> None:
    """Copy the files that git knows or would add, and link the data that tests only read."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPO, check=True, capture_output=True, text=True).stdout
    for name in names.split("\0"):
        if name and (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)
    if (REPO / "data" / "pocket").is_dir():
        (folder / "data" / "pocket").symlink_to(REPO / "data" / "pocket")


def run_tests(folder: Path, part: str, whole_suite: bool, flags: list[str]) -> tuple[int, str]:
    """Return pytest's exit code and output."""
    tests = ["tests"] if whole_suite else TESTS[part]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "--no-header",
               "-p", "no:cacheprovider", *tests, *flags]
    if part == "gpu":
        command += ["-m", "not cards"]
    # A changed file may keep its size and its second, by which compiled files are told apart.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, timeout=TIMEOUT,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def failed_tests(output: str) -> list[str]:
    """Return the names of the tests that failed, in their order."""
    return re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, re.MULTILINE)


def failing_before(folder: Path, parts: set[str], whole_suite: bool) -> list[str]:
    """Return the flags that leave out the tests that fail without any fault; they show nothing."""
    failing = []
    for part in sorted(parts):
        failing += failed_tests(run_tests(folder, part, whole_suite, [])[1])
        if whole_suite and part != "gpu":
            break
    for name in failing:
        print(f"fails without any fault, left out: {name}", flush=True)
    flags = []
    for name in failing:  # a whole file, where it cannot be imported
        flags.append(f"--deselect={name}" if "::" in name else f"--ignore={name}")
    return flags


def plant(fault: Fault, folder: Path, whole_suite: bool, flags: list[str]) -> Verdict:
    """Run the tests with the fault in the copy, and take it out again."""
    path = folder / fault.file
    sound = path.read_text()
    if sound.count(fault.old) != 1:
        return Verdict(False, f"cannot be planted: its text stands {sound.count(fault.old)} times",
                       0.0)
    start = time.monotonic()
    path.write_text(sound.replace(fault.old, fault.new))
    try:
        code, output = run_tests(folder, fault.part, whole_suite, ["-x", *flags])
    except subprocess.TimeoutExpired:
        code, output = 1, f"FAILED nothing ended within {TIMEOUT} s"
    finally:
        path.write_text(sound)
    seconds = time.monotonic() - start
    failed = failed_tests(output)
    if failed:
        return Verdict(True, failed[0], seconds)
    return Verdict(False, f"exit code {code}: {output.strip().splitlines()[-1]}", seconds)


def chosen_faults(only: str | None) -> list[Fault]:
    if only is None:
        return FAULTS
    wanted = only.split(",")
    return [fault for fault in FAULTS if fault.part in wanted or fault.name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--all", action="store_true", help="run the whole quick suite for each")
    parser.add_argument("--only", metavar="NAME,NAME", help="names or parts (default: all faults)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N",
                        help="copies that are tested at a time (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    args = parser.parse_args()
    faults = chosen_faults(args.only)
    if not faults:
        parser.error(f"--only {args.only}: no such fault; --list shows them")
    if args.list:
        for fault in faults:
            print(f"{fault.part:12} {fault.file:16} {fault.name}")
        return 0

    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as base:
        folders = SimpleQueue()
        for number in range(max(1, args.jobs)):
            folder = Path(base) / str(number)
            copy_project(folder)
            folders.put(folder)
        flags = failing_before(folder, {fault.part for fault in faults}, args.all)

        def judge(fault: Fault) -> Verdict:
            folder = folders.get()
            try:
                return plant(fault, folder, args.all, flags)
            finally:
                folders.put(folder)

        with ThreadPoolExecutor(max(1, args.jobs)) as pool:
            for fault, verdict in zip(faults, pool.map(judge, faults)):
                missed += not verdict.found
                state = "found" if verdict.found else "MISSED"
                print(f"{state:7} {verdict.seconds:5.0f} s  {fault.part}: {fault.name}\n"
                      f"                 {verdict.words}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
