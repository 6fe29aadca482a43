#!/usr/bin/env python3
"""Plant one fault at a time in a copy of the project, and tell which test finds it.

    python tests/mutants.py                    each fault, by the tests of its part
    python tests/mutants.py --only NAME,NAME   these faults, or those of these parts
    python tests/mutants.py --list             the faults

The files tests/**/faults.txt have the faults. The quick tests shall find each, but for those of
code that only a GPU runs, which the slow tests on the stand-in shall find. The exit code is the
number of faults that no test found. Where there are some, a test is missing.
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
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
TIMEOUT = 900  # seconds; a fault that hangs the tests is found
TESTS = {  # of each part: the tests that can see its faults, the likeliest first
    "data": ["tests/data"],
    "checkpoints": ["tests/script/test_checkpoints.py", "tests/script/test_survival.py",
                    "tests/script/test_fuzz.py"],
    "script": ["tests/records", "tests/script"],
    "records": ["tests/records/test_lineage.py"],
    "gpu": ["tests/script/test_compile.py", "tests/script/test_wire.py",
            "tests/script/test_fp8.py"],  # then the slow ones of tests/gpu, on a stand-in
    "ledger": ["tests/ledger"]}


class Fault(NamedTuple):
    """A text that stands once in a file, and the wrong one that is put in its place."""

    part: str
    name: str
    old: str
    new: str
    file: str


def read_faults() -> list[Fault]:
    """All that the files of faults have, which say how they are written."""
    form = re.compile(r"^(\w.+)\n((?:- .*\n)+)((?:\+ .*\n)+)", re.MULTILINE)
    faults = []
    for path in sorted(REPO.glob("tests/**/faults.txt")):
        for section in path.read_text().split("\n== ")[1:]:
            heading, _, rows = section.partition("\n")
            part, file = heading.split()
            for name, *texts in form.findall(rows):
                old, new = ("\n".join(line[2:] for line in text.splitlines()) for text in texts)
                faults.append(Fault(part, name, old, new, file))
            if rest := form.sub("", rows).strip():
                sys.exit(f"{path}: no name, - and + in turns, in {heading}: {rest}")
    return faults


FAULTS = read_faults()


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


def run_tests(part: str, fault: Fault | None = None) -> tuple[bool, str]:
    """Run a part's tests in a copy with the fault. Return whether one failed, and which."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", "--no-header",
              "-p", "no:cacheprovider"]
    runs = [TESTS[part]]
    if part == "gpu":
        runs += [["tests/gpu", "-m", "gpu"], ["tests/gpu/test_kernels.py", "-m", "slow"]]
    if part == "records" and fault:
        runs[0] = [*runs[0], "-k", fault.file.split("/")[1]]
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_project(folder)
        if fault:
            # In the records too, or it would be found by their bytes alone.
            for path in [folder / fault.file, *folder.glob(f"records/*/{fault.file}")]:
                path.write_text(path.read_text().replace(fault.old, fault.new))
        for tests in runs:
            try:
                done = subprocess.run([*pytest, *tests], cwd=folder, text=True, timeout=TIMEOUT,
                                      env={**os.environ, "OMP_NUM_THREADS": "1"},
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT)
            except subprocess.TimeoutExpired:
                return True, f"nothing ended within {TIMEOUT} s"
            failed = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
            if failed:
                return True, failed[0]
    return False, done.stdout.strip().rpartition("\n")[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--only", metavar="NAME,NAME", help="names or parts (default: all faults)")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else list(TESTS)
    faults = [fault for fault in FAULTS if fault.part in wanted or fault.name in wanted]
    if not faults:
        parser.error(f"--only {args.only}: no such fault; --list shows them")
    if args.list:
        for fault in faults:
            print(f"{fault.part:12} {fault.file:48} {fault.name}")
        return 0

    def judge(fault: Fault) -> tuple[bool, str, float]:
        start = time.monotonic()
        return *run_tests(fault.part, fault), time.monotonic() - start

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        parts = sorted({fault.part for fault in faults})
        for failed, words in pool.map(run_tests, parts):
            if failed:  # what fails anyway finds no fault
                parser.error(f"without any fault there fails {words}")
        width = max(len(fault.name) for fault in faults)
        print(f"{'part':12} {'fault':{width}} seconds  found by")
        missed = 0
        for fault, (found, words, seconds) in zip(faults, pool.map(judge, faults)):
            missed += not found
            print(f"{fault.part:12} {fault.name:{width}} {seconds:7.0f}  "
                  f"{words if found else f'NO TEST: {words}'}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
