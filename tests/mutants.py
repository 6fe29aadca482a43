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
    "gpu": ["tests/gpu"],
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
    return [f"--deselect={name}" for name in failing]


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
