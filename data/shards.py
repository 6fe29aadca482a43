"""What the scripts of this folder share: shards, how they load a training script, how they end.

A shard is a header of 256 little-endian int32 (magic, version, token count, zeros) and then
the tokens, each a little-endian uint16. train_gpt.py reads shards as well, but it imports torch,
which takes seconds. The scripts that make data do not wait for it.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import numpy as np

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from machine import lock

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
TOKEN_DTYPE = np.dtype("<u2")
LONG_RUN = 1 << 14  # tokens; no text has so many of one kind
END_OF_SOURCE = "\n" + "=" * 100 + "\n"  # of a script, in the log of its run


class DataError(Exception):
    """What the user can put right; its message is the one line they see."""


def read_header(path: Path) -> int:
    """Return the token count of the shard at path.

    Raises: DataError where magic, version or the size of the file is not what it should be.
    """
    with open(path, "rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        raise DataError(f"{path}: {len(head)} bytes, shorter than a header ({HEADER_BYTES})")
    magic, version, num_tokens = np.frombuffer(head, "<i4", 3).tolist()
    if (magic, version) != (MAGIC, VERSION):
        raise DataError(f"{path}: {magic=}, {version=}; a shard has {MAGIC} and {VERSION}")
    expected_bytes = HEADER_BYTES + TOKEN_DTYPE.itemsize * num_tokens
    if path.stat().st_size != expected_bytes:
        raise DataError(f"{path}: {num_tokens} tokens in {path.stat().st_size} bytes; "
                        f"that many need {expected_bytes}")
    return num_tokens


def is_whole(path: Path) -> bool:
    """Whether a shard is there, as long as its header says, and has no long run of one token.

    A download that was only allocated has its full size, and zeros behind what has come.
    """
    try:
        parts = read_header(path) // LONG_RUN
    except (DataError, FileNotFoundError):
        return False
    tokens = np.fromfile(path, TOKEN_DTYPE, offset=HEADER_BYTES)
    runs = tokens[: parts * LONG_RUN].reshape(parts, LONG_RUN)
    return len(tokens) > 0 and not any((run == run[0]).all() for run in runs)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder, and hold it while other processes wait that would write into it.

    Raises: DataError where the folder cannot be made.
    """
    path = folder / ".lock"
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(path, "wb")  # noqa: SIM115
        except OSError as error:
            if folder.is_symlink() and not folder.exists():
                raise DataError(f"{folder}: a link to {os.readlink(folder)}, which is not there; "
                                "make that folder, or remove the link") from None
            raise DataError(f"{folder}: {error.strerror}; choose another folder") from None
        with file:
            lock(file.fileno(), f"writes into {folder}")
            if os.fstat(file.fileno()).st_nlink == 0:  # who held it has removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Name the file that cannot be written, as on a full disk. Raises: DataError."""
    try:
        yield
    except OSError as error:
        if error.filename:  # it names a file
            raise
        raise DataError(f"{path}: not written ({error.strerror}); make room, or choose another "
                        "folder") from error


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write, which takes its place at path when it is whole, or not at all.

    The caller is alone in the folder. Raises: DataError.
    """
    partial = path.with_name(f".{path.name}.partial")  # a killed run leaves it for the next one
    try:
        with named_errors(path), open(partial, "wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write tokens (N,), each below 2**16, to the shard at path, whole or not at all."""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with whole_file(path) as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens, TOKEN_DTYPE))


def read_source(path: Path) -> str:
    """Return the source at path, which may be a log that begins with it."""
    return path.read_text("utf-8", errors="replace").partition(END_OF_SOURCE)[0]


def load_script(path: Path) -> ModuleType:
    """Run the training script at path, or at the beginning of a log, and return its module.

    Whatever the script raises is raised. Each call returns a new module.
    """
    script = ModuleType(f"script_{len(sys.modules)}")
    script.__file__ = str(path)
    sys.modules[script.__name__] = script  # where dataclasses look for it
    exec(compile(read_source(path), path, "exec"), vars(script))
    return script


class Parser(argparse.ArgumentParser):
    """An argument parser of whole flags, whose errors are one line, without the usage.

    Its help begins with a module's docstring, which PYTHONOPTIMIZE=2 leaves out.
    """

    def __init__(self, docstring: str | None):
        super().__init__(description=docstring, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> None:
        if "expected one argument" in message:
            message += "; one that begins with - is given as --flag=VALUE"
        self.exit(2, f"{self.prog}: {message} (--help shows the flags)\n")


def run(main: Callable[[], None]) -> None:
    """Call main; show what a user can put right as one line on stderr and exit with code 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds: half-written files go
    name = Path(sys.argv[0]).name
    try:
        main()
    except BrokenPipeError:  # who reads has seen enough, as head has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (DataError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except MemoryError:
        print(f"{name}: out of memory; give it shorter lines or files, or a machine with more",
              file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)
