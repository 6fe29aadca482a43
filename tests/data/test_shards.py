"""data/shards.py: the shard format, written whole or not at all, and its checks."""

import importlib

import numpy as np
import pytest

shards = importlib.import_module("shards")


def test_a_shard_is_header_and_little_endian_tokens(tmp_path):
    path = tmp_path / "new folder" / "a.bin"
    shards.write_shard(path, np.array([1, 50256, 65535], np.int64))
    content = path.read_bytes()
    assert content[:12].hex(" ", 4) == "88d83401 01000000 03000000"  # 0x0134d888 is 20240520
    assert content[12:1024] == bytes(1012)
    assert content[1024:].hex(" ", 2) == "0100 50c4 ffff"
    assert shards.read_header(path) == 3


def test_a_failed_write_leaves_the_earlier_shard(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    shards.write_shard(path, np.arange(5))
    earlier = path.read_bytes()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards.os, "replace", no_space)
    with pytest.raises(OSError, match="No space"):
        shards.write_shard(path, np.arange(9))
    assert path.read_bytes() == earlier
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("field", "value"), [
    ("magic", 20240521), ("version", 2), ("count", 9), ("count", 11), ("count", -1)])
def test_a_wrong_header_names_the_file(tmp_path, write_shard, field, value):
    assert shards.read_header(write_shard(tmp_path / "right.bin", range(10))) == 10
    path = write_shard(tmp_path / "wrong.bin", range(10), **{field: value})
    with pytest.raises(shards.DataError, match="wrong.bin"):
        shards.read_header(path)


@pytest.mark.parametrize("num_bytes", [0, 1023, 1024 + 19])
def test_a_cut_file_names_the_file(tmp_path, write_shard, num_bytes):
    path = write_shard(tmp_path / "cut.bin", range(10))
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(shards.DataError, match="cut.bin"):
        shards.read_header(path)
