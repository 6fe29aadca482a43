"""What a start needs of this machine, by Python's own library alone, as packages may be missing.

    machine.py FILE...    whether this Python has what the requirement files ask, by its exit code
"""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
VENV = REPO / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
OLDEST_TORCH = "2.11"  # the code runs from here on; requirements.txt pins the one that is measured
OLDEST_DRIVER = 580  # of NVIDIA's, for CUDA 13, which the pinned torch is built for
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"  # of torch
SYSTEM = Path("/")  # whose proc, sys and dev are read
# glibc keeps freed memory. Asking for new pages costs 8 % of the pocket's time.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_MAX_": "0"}


class MachineError(Exception):
    """What this machine lacks, in one line with its remedy."""


def say(text: str) -> None:
    """Tell a stage of the start, beside what the run prints."""
    print(f"run.sh: {text}", file=sys.stderr, flush=True)


def succeeds(command: list) -> bool:
    """Whether a program is there and ends well. What it prints is not shown."""
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def lock(file: int, waits_for: str) -> None:
    """Lock an open file until it is closed. Some file systems have no locks: there it goes on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another process that {waits_for}", file=sys.stderr)
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        pass


# ---- Packages ----


def numbers(of_version: str) -> list[int]:
    """The numbers of a version, without the name of its build."""
    return [int(number) for number in re.findall(r"\d+", of_version.partition("+")[0])]


def read_requirements(files: list[str]) -> dict[str, str]:
    """Packages and their least versions. What is asked for some platforms alone is left out."""
    text = "\n".join((REPO / file).read_text() for file in files)
    return dict(re.findall(r"^([\w-]+)[=>]=([\w.]+)$", text, re.MULTILINE))


def pinned_torch() -> str:
    return read_requirements(["requirements.txt"])["torch"]


def has_packages(files: list[str]) -> bool:
    """Whether this Python has what the files ask. Any torch from the oldest on will do."""
    for name, least in (read_requirements(files) | {"torch": OLDEST_TORCH}).items():
        try:
            found = version(name) or ""  # nothing where pip was killed
        except (PackageNotFoundError, KeyError):
            return False
        if numbers(found) < numbers(least):
            return False
    return True


def find_packages(files: list[str]) -> bool:
    """Whether this Python has them. Where .venv's alone has them, this program starts anew in it.
    """
    if has_packages(files):
        return True
    if succeeds([VENV_PYTHON, __file__, *files]):
        start_anew(VENV_PYTHON)
    return False


def start_anew(python) -> None:
    os.execv(python, [python, *sys.argv])


def set_up(files: list[str], on_gpu: bool = False) -> None:
    """Go on in a Python that has what the files ask: install what none has in .venv.

    Raises MachineError.
    """
    if find_packages(files):
        return
    with open(REPO / files[0]) as file:
        lock(file.fileno(), "sets up .venv")
        if not succeeds([VENV_PYTHON, __file__, *files]):  # nor has the other process made it
            if on_gpu:
                check_driver()
            install(files)
    start_anew(VENV_PYTHON)


def install(files: list[str]) -> None:
    """Install what the files ask in .venv, which is made where it is not there.

    Nothing in it is removed. After a failure, what was installed stays, and the next call goes on.
    Raises MachineError.
    """
    say(f"packages: setting up {VENV}; torch comes first, a large download")
    if not VENV_PYTHON.exists():
        call([sys.executable, "-m", "venv", VENV])
    if not succeeds([VENV_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]):
        raise MachineError(f"{VENV_PYTHON} is not Python 3.11 or newer: move {VENV} away")
    pip = [VENV_PYTHON, "-m", "pip"]
    installer = [*pip, "install"]
    # uv makes environments without pip, on Debian also of a Python that has none to give.
    if not succeeds([*pip, "--version"]) and not succeeds([VENV_PYTHON, "-m", "ensurepip"]):
        installer = ["uv", "pip", "install", "--python", VENV_PYTHON]
    options = []
    # A machine without NVIDIA's driver needs none of the CUDA libraries, gigabytes on Linux.
    if sys.platform == "linux" and not has_nvidia():
        torch = f"torch=={pinned_torch()}"
        quickly = os.environ | {"PIP_RETRIES": "0"}
        try:
            call([*installer, "--no-deps", torch, "--index-url", CPU_BUILDS], quickly)
            options = ["--quiet"]  # what is left is small
        except MachineError:
            say(f"packages: no torch from {CPU_BUILDS}; now from the package index, whose torch "
                "brings NVIDIA's libraries")
    call([*installer, *options, *(f"--requirement={REPO / file}" for file in files)])
    if not succeeds([VENV_PYTHON, __file__, *files]):
        raise MachineError(f"{VENV} lacks packages that {installer[0]} says are there: move it "
                           "away, and run this again")


def call(command: list, variables: dict | None = None) -> None:
    """Run a program, which says itself what goes wrong. Raises MachineError."""
    try:
        code = subprocess.run(command, stdout=2, env=variables).returncode
    except FileNotFoundError:
        code = "no such program"
    if code:
        raise MachineError(f"{shlex.join(map(str, command))} failed ({code}): mend what it says, "
                           "such as a network or a full disk, and run this again, or name a "
                           "Python that has the packages: PYTHON=/path/to/python")


# ---- GPUs ----


def has_nvidia() -> bool:
    """Whether NVIDIA's driver is there, and has GPUs."""
    return (SYSTEM / "dev/nvidiactl").exists() or succeeds(["nvidia-smi"])


def check_driver() -> None:
    """Raise MachineError where the driver is too old for the torch that would be fetched."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if not shutil.which(command[0]):
        return
    driver = subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]
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


def read(name: str) -> str:
    """What a file of the system says, nothing where it is not there."""
    try:
        return (SYSTEM / name).read_text()
    except OSError:
        return ""


def quotas() -> list[float]:
    """How many threads the control groups of this process have time for."""
    # In a container the files of its own group are at the root, whatever its name is outside.
    folders = {""}
    for group in re.findall(r"^0::/(.*)$", read("proc/self/cgroup"), re.MULTILINE):
        folders.update(str(folder) for folder in (Path(group), *Path(group).parents))
    limits = []
    for folder in folders:
        quota, _, period = read(f"sys/fs/cgroup/{folder}/cpu.max").partition(" ")
        if quota.isdigit():  # not "max"
            limits.append(int(quota) / int(period))
    return limits


def idle_time() -> int:
    """Hundredths of a second that all CPUs have been idle, 0 where Linux does not tell."""
    found = re.match(r"cpu +(?:\d+ +){3}(\d+)", read("proc/stat"))
    return int(found[1]) if found else 0


def count_threads() -> int | None:
    """As many as cores are idle now: a thread that waits for a core holds up all others.

    None where there is nothing to go by, as on macOS.
    """
    before = idle_time()
    if not before:
        return None
    cpus = (SYSTEM / "sys/devices/system/cpu").glob("cpu*/topology/thread_siblings_list")
    cores = {path.read_text() for path in cpus}  # two hyperthreads are one core
    time.sleep(0.2)
    limits = [len(os.sched_getaffinity(0)), *quotas(), (idle_time() - before) / 20 + 0.5]
    if cores:
        limits.append(len(cores))
    return max(1, int(min(limits)))


if __name__ == "__main__":
    sys.exit(not has_packages(sys.argv[1:]))
