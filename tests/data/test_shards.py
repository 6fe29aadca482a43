"""data/shards.py: shards written whole or not at all, their checks, and how its scripts end."""

import subprocess
import sys

import numpy as np
import pytest
import shards
from conftest import REPO


def test_a_shard_is_header_and_little_endian_tokens(tmp_path):
    path = tmp_path / "new folder" / "a.bin"
    shards.write_shard(path, np.array([1, 50256, 65535], np.int64))
    content = path.read_bytes()
    assert content[:12].hex(" ", 4) == "88d83401 01000000 03000000"  # 0x0134d888 is 20240520
    assert content[12:1024] == bytes(1012) and content[1024:].hex(" ", 2) == "0100 50c4 ffff"


def test_a_failed_write_leaves_the_earlier_shard(tmp_path, monkeypatch, write_shard):
    path = write_shard(tmp_path / "a.bin", range(5))
    earlier = path.read_bytes()
    (tmp_path / ".a.bin.partial").write_bytes(b"of a run that was killed")
    monkeypatch.setattr(shards, "TOKEN_DTYPE", "no type")  # fails once the header is written
    with pytest.raises(TypeError):
        shards.write_shard(path, np.arange(9))
    assert path.read_bytes() == earlier and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("changes", "num_bytes"), [
    ({"magic": 20240521}, 1044), ({"version": 2}, 1044), ({"count": 9}, 1044),
    ({"count": -1}, 1044), ({}, 0), ({}, 1023), ({}, 1043)])
def test_a_wrong_header_and_a_cut_file_are_named(tmp_path, write_shard, changes, num_bytes):
    assert shards.read_header(write_shard(tmp_path / "right.bin", range(10))) == 10
    path = write_shard(tmp_path / "wrong.bin", range(10), **changes)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(shards.DataError, match="wrong.bin"):
        shards.read_header(path)


def test_who_stops_reading_ends_a_script_without_a_word():
    code = "import shards; shards.run(lambda: print(10**6 * 'many words '))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPO / "data", stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
