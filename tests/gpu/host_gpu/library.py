"""Builds device.cpp against the torch that is installed, once, and loads it."""

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-shared", "-fPIC", "-O1", "-std=c++20", "-lc10", "-ltorch_cpu"]
TRITON = "3.7.1"  # what torch 2.13 pins for CUDA; constraints.txt has the same


def cache_folder() -> Path:
    """Where the library and what Inductor compiles are kept from run to run."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "train_gpt" / "host_gpu"


def torch_folder() -> Path:
    """The installed torch, which is not imported."""
    return Path(importlib.util.find_spec("torch").origin).parent


@functools.cache
def obstacle() -> str | None:
    """Why this machine cannot stand in for a GPU, in words for a skipped test; None if it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "no host GPU: Triton's wheel is for Linux on x86-64"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "no host GPU: this torch is built for CUDA, which leaves no room for a stand-in"
    found = [x.version for x in importlib.metadata.distributions(name="triton")]
    if TRITON not in found:
        return f"no host GPU: pip install --no-deps triton=={TRITON} (found {found or 'none'})"
    if not shutil.which(COMPILER):
        return f"no host GPU: no C++ compiler ({COMPILER}); install g++ or set CXX"
    return None


def build() -> Path:
    """The library for this torch and this source, built where the cache has none (20 s)."""
    torch = torch_folder()
    version = importlib.metadata.version("torch")
    words = f"{version} {torch} {FLAGS} {SOURCE.read_text()}"
    key = hashlib.sha256(words.encode()).hexdigest()[:16]
    library = cache_folder() / f"device-{version}-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        built = library.with_suffix(f".{os.getpid()}")
        includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        folders = f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"
        command = [COMPILER, *includes, SOURCE, "-o", built, *folders, *FLAGS]
        subprocess.run(command, check=True)
        built.replace(library)  # whole or not at all, whoever else builds it
    return library


def load() -> None:
    """Load the library. Raises RuntimeError where torch is there already: it asks once."""
    if "torch" in sys.modules:
        raise RuntimeError("the host GPU must be installed before torch is imported")
    ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
