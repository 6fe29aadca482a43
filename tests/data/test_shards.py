"""data/shards.py: shards written whole or not at all, their checks, and how its scripts end."""

import errno
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import shards
from conftest import REPO


def test_a_failed_write_leaves_the_earlier_shard(tmp_path, monkeypatch, write_shard):
    path = write_shard(tmp_path / "a.bin", range(5))
    earlier = path.read_bytes()
    (tmp_path / ".a.bin.partial").write_bytes(b"of a run that was killed")
    monkeypatch.setattr(shards, "TOKEN_DTYPE", "no type")  # fails once the header is written
    with pytest.raises(TypeError):
        shards.write_shard(path, np.arange(9))
    with (pytest.raises(shards.DataError, match="a.bin: not written .No space left"),
          shards.whole_file(path)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_bytes() == earlier and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("count", "hole", "is_whole"), [
    (100_000, slice(0, 0), True), (100_000, slice(60_000, 100_000), False),
    (100_000, slice(10_000, 50_000), False), (100, slice(0, 100), True), (0, slice(0, 0), False)])
def test_a_shard_with_a_hole_is_not_whole(tmp_path, write_shard, count, hole, is_whole):
    """Nor is one without tokens, or that is not there; a short text may be one token."""
    tokens = np.random.default_rng(0).integers(0, 257, count)
    tokens[hole] = 0
    assert shards.is_whole(write_shard(tmp_path / "a.bin", tokens)) == is_whole
    assert not shards.is_whole(write_shard(tmp_path / "b.bin", tokens, count=count + 1))
    assert not shards.is_whole(tmp_path / "c.bin")


def test_who_stops_reading_ends_a_script_without_a_word():
    code = "import shards; shards.run(lambda: print(10**6 * 'many words '))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPO / "data", stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_standard_streams_may_be_closed():
    code = "import sys, shards; shards.run(lambda: print('many words', file=sys.stderr) or print())"
    done = subprocess.run(["bash", "-c", '"$@" >&- 2>&-', "", sys.executable, "-c", code],
                          cwd=REPO / "data")
    assert done.returncode == 0


# In one process, whose own folder is not on the path, as with PYTHONSAFEPATH
HELP = """import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        assert not error.code
"""


@pytest.mark.parametrize(("switches", "names"), [
    ("-OOP", "pocket text fineweb prefixes canonical"),  # without docstrings and asserts
    pytest.param("-P", "sample", marks=pytest.mark.slow)])
def test_pythons_switches_change_nothing(switches, names):
    paths = [REPO / "data" / f"{name}.py" for name in names.split()]
    done = subprocess.run([sys.executable, switches, "-c", f"assert True\n{HELP}", *paths],
                          cwd=REPO / "tests", text=True, capture_output=True)
    assert done.returncode == 0 and done.stdout.count("usage: ") == len(paths), done.stderr


def test_a_lock_whose_file_is_gone_is_not_taken(tmp_path, monkeypatch):
    """Who held it has removed it, and the next process would lock a new file."""
    held = []

    def lock(file, waits_for):
        held.append(os.fstat(file).st_ino)
        if len(held) < 3:
            (tmp_path / ".lock").unlink()

    monkeypatch.setattr(shards, "lock", lock)
    with shards.alone_in(tmp_path):
        assert len(held) == 3 and (tmp_path / ".lock").stat().st_ino == held[-1]


# Flags that a message names, by the programs that have them
NAMED_FLAGS = {"text.py": "text", "sample.py": "sample", "fineweb.py": "fineweb",
               "pocket.py": "pocket"}


@pytest.mark.parametrize("name", NAMED_FLAGS.values())
def test_messages_name_flags_that_the_program_has(name):
    """Of the program itself, of the training script that it speaks about, or of a shell's tool."""
    shell = {"--help", "--version", "--flag", "--preset", "--repeat_data", "--save_every"}
    source = (REPO / "data" / f"{name}.py").read_text()
    has = set(re.findall(r'add_argument\("(--\w+)"', source))
    assert set(re.findall(r"--[a-z_]+", source)) <= has | shell


def test_the_start_names_flags_that_there_are():
    fields = set(re.findall(r"^    (\w+): ", (REPO / "train_gpt.py").read_text(), re.MULTILINE))
    known = fields | {"record", "help", "ngram_rows", "maxprocesses", "prompt"}
    for name in "plan", "start":
        named = re.findall(r"--([a-z_]+)", (REPO / "data" / f"{name}.py").read_text())
        assert set(named) <= known


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path, capsys):
    """Also by those who waited for a lock whose file is gone."""
    inside, done = [], []

    def work():
        with shards.alone_in(tmp_path):
            inside.append(1)
            assert len(inside) == 1
            time.sleep(0.02)
            inside.pop()
            done.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 8 and not list(tmp_path.iterdir())
    assert f"waiting for another process that writes into {tmp_path}" in capsys.readouterr().err
