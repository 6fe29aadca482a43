"""What run.sh asks before it trains, by Python's own library alone, since packages may be missing.

    machine.py packages OLDEST FILE...   does this Python have what the requirement files ask?
    machine.py gpu                       does this machine have what a run on GPUs needs?
    machine.py threads                   how many threads should a run on the CPU have?
    machine.py lock FD                   wait until no other process has locked this open file
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

OLDEST_CAPABILITY = (8, 0)  # below it torch does not compile bf16
OLDEST_DRIVER = 580  # of NVIDIA's, for CUDA 13, which the pinned torch is built for
SYSTEM = Path("/")  # whose proc, sys and dev are read


class MachineError(Exception):
    """What this machine lacks, in one line with its remedy."""


def answer(text) -> None:
    """Print a line for run.sh, marked, since a sitecustomize prints as well."""
    print(f"\nanswer: {text}")


# ---- Packages ----


def numbers(version: str) -> list[int]:
    """The numbers of a version, without the name of its build."""
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def find_version(name: str) -> str | None:
    """The version of an installed package, None where it or its files are not there."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return None
    # Where pip installed it, its files are listed.
    listed = re.search(r"^[\w/]+/__init__\.py", package.read_text("RECORD") or "", re.MULTILINE)
    if listed and not package.locate_file(listed[0]).exists():
        return None
    return package.version


def has_packages(oldest_torch: str, files: list[str]) -> bool:
    """Whether this Python has what the files ask. What asks for some platforms alone is left out.

    A torch that is not the pinned one is named, and taken from `oldest_torch` on.
    """
    for path in files:
        text = Path(path).read_text()
        for name, wanted in re.findall(r"^([\w-]+)[=>]=([\w.]+)$", text, re.MULTILINE):
            found = find_version(name)
            least = oldest_torch if name == "torch" else wanted
            if found is None or numbers(found) < numbers(least):
                return False
            if name == "torch" and numbers(found) != numbers(wanted):
                answer(f"using torch {found} of {sys.executable}; the project pins {wanted}")
    return True


def lock(file: int, waits_for: str) -> None:
    """Lock an open file until it is closed. Some file systems have no locks: there it goes on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another process that {waits_for}", file=sys.stderr)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        pass


# ---- GPUs ----


def ask_driver(field: str) -> list[str]:
    """What NVIDIA's driver says of each GPU, nothing where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return []
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def check_capability(capabilities: list[tuple[int, ...]]) -> None:
    """Raise MachineError where no GPU can run the compiled model."""
    if capabilities and max(capabilities) < OLDEST_CAPABILITY:
        found, needed = (".".join(map(str, numbers))
                         for numbers in (max(capabilities), OLDEST_CAPABILITY))
        raise MachineError(f"the GPU has compute capability {found}, and bf16 needs {needed} or "
                           "newer: --device cpu trains a small model without it")


def check_driver() -> None:
    """Raise MachineError where GPU or driver are too old for the torch that would be fetched."""
    said = ask_driver("compute_cap")  # which drivers before 2021 do not know
    check_capability([tuple(numbers(line)) for line in said if re.fullmatch(r"\d+\.\d+", line)])
    driver = "".join(ask_driver("driver_version")[:1])
    if driver[:1].isdigit() and numbers(driver)[0] < OLDEST_DRIVER:
        raise MachineError(f"NVIDIA's driver is {driver}, and torch needs {OLDEST_DRIVER} or "
                           "newer: update it, or name a Python with a torch for this one: "
                           "PYTHON=/path/to/python")


def check_compiler() -> None:
    """Raise MachineError where Triton cannot compile its launchers."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise MachineError("no C compiler, which Triton needs: install gcc, or set CC")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.exists():
        raise MachineError(f"no {header}, which Triton needs: install python3-dev, or name a "
                           "Python of uv's: PYTHON=/path/to/python")


def check_shared_memory(ranks: int) -> None:
    """Raise MachineError where NCCL would fill the shared memory."""
    folder = SYSTEM / "dev/shm"
    mib = shutil.disk_usage(folder).total // 2**20 if folder.exists() else 0
    if ranks > 1 and mib <= 64:  # Docker's default
        raise MachineError(f"{folder} has {mib} MiB, which NCCL fills: start the container with "
                           "--shm-size=1g")


# ---- Threads of a run on the CPU ----


def read(path: str) -> str:
    """A file of the system's, empty where it has none."""
    try:
        return (SYSTEM / path).read_text()
    except OSError:
        return ""


def quotas() -> list[float]:
    """Threads that the control groups of this process have time for, of version 2 and 1."""
    found = []
    for line in read("proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        for parent in (Path(group), *Path(group).parents):
            folder = str(parent).strip("/")
            if not controllers:  # version 2
                found.append(read(f"sys/fs/cgroup/{folder}/cpu.max"))
            elif "cpu" in controllers.split(","):
                version_1 = f"sys/fs/cgroup/cpu/{folder}/cpu.cfs_"
                found.append(read(f"{version_1}quota_us") + read(f"{version_1}period_us"))
    # In a container the files of its own group are at the root, whatever its name is outside.
    version_1 = "sys/fs/cgroup/cpu/cpu.cfs_"
    found.append(read("sys/fs/cgroup/cpu.max"))
    found.append(read(f"{version_1}quota_us") + read(f"{version_1}period_us"))
    limits = []
    for words in map(str.split, found):
        if len(words) == 2 and words[0].isdigit():  # neither max nor -1
            limits.append(int(words[0]) / int(words[1]))
    return limits


def idle_time() -> int:
    """Hundredths of a second that all CPUs have been idle."""
    return int(read("proc/stat").split()[4])


def count_threads() -> int:
    """As many as cores are idle now: a thread that waits for a core holds up all others."""
    limits = [len(os.sched_getaffinity(0)), *quotas()]
    cpus = (SYSTEM / "sys/devices/system/cpu").glob("cpu*/topology/thread_siblings_list")
    cores = {path.read_text() for path in cpus}  # two hyperthreads are one core
    if cores:
        limits.append(len(cores))
    before = idle_time()
    time.sleep(0.2)
    limits.append((idle_time() - before) / 20 + 0.5)
    return max(1, int(min(limits)))


def main(command: str, *words: str) -> int:
    if command == "packages":
        oldest_torch, *files = words
        return 0 if has_packages(oldest_torch, files) else 1
    if command == "gpu":
        check_driver()
        check_compiler()
    elif command == "threads" and read("proc/stat"):
        answer(count_threads())
    elif command == "lock":
        lock(int(words[0]), "sets up .venv")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except MachineError as error:
        print(f"run.sh: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # run.sh ends as well
        sys.exit(130)
