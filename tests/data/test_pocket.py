"""data/pocket.py: the corpus of the installed torch, and that of a made-up package."""

import hashlib
import importlib.metadata

import numpy as np
import pocket
import pytest
from conftest import read_shard


@pytest.fixture
def run_pocket(call_tool, tmp_path):
    """Runs the script, which writes into tmp_path / out; what it printed."""
    return lambda: call_tool(pocket, ["--out", "out"], tmp_path)


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """The paths of both shards, of a small package that the script takes for torch."""
    package = tmp_path / "torch"
    package.mkdir()
    for index in range(100):
        (package / f"file{index}.py").write_bytes(b"\n\nx = 1  # \xc3\xa9\r\n\ny = 2\nz = 3\n")
    (package / "notes.txt").write_text("no source\n")
    (package / "version.py").write_text("of a build\n")  # whose builds differ in it
    monkeypatch.setattr(pocket, "find_torch", lambda: package)
    return [tmp_path / "out" / f"pocket_{split}_000000.bin" for split in ("train", "val")]


def test_paragraphs_are_documents_and_another_torch_is_said_not_to_compare(run_pocket, shards):
    printed = run_pocket()
    tokens = np.concatenate([read_shard(path) for path in shards])
    none, *documents = np.split(tokens, np.flatnonzero(tokens == 256))
    found = sorted(document[1:].astype("u1").tobytes() for document in documents)
    assert found == 100 * [b"x = 1  # \xc3\xa9\r\n"] + 100 * [b"y = 2\nz = 3\n"]
    assert not len(none) and "200 documents" in printed
    # A file's paragraphs are together: held out where its path's digest says so, one in twenty.
    digests = [hashlib.sha256(f"file{index}.py".encode()).digest() for index in range(100)]
    held_out = sum(digest[0] % 20 == 0 for digest in digests)
    assert held_out > 0 and 2 * held_out == (read_shard(shards[1]) == 256).sum()
    sha256 = hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest()
    assert f"sha256 {sha256}" in printed
    assert "not the corpus of torch 2.13.0" in printed and "compare" in printed


def contents(paths):
    return [path.read_bytes() for path in paths]


def test_a_whole_corpus_is_kept_and_one_that_was_cut_made_anew(run_pocket, shards, monkeypatch):
    run_pocket()
    whole, written = contents(shards), shards[1].stat().st_mtime_ns
    monkeypatch.setattr(pocket, "REFERENCE_SHA256", hashlib.sha256(b"".join(whole)).hexdigest())
    printed = run_pocket()
    assert "found whole" in printed and "compare" not in printed
    assert shards[1].stat().st_mtime_ns == written
    for damaged in whole[1][:-2], b"", None:
        shards[1].unlink()
        if damaged is not None:
            shards[1].write_bytes(damaged)
        assert "written" in run_pocket() and contents(shards) == whole


def test_a_corpus_of_another_torch_is_never_overwritten(run_pocket, shards):
    """A run that was trained on it cannot go on with another one."""
    run_pocket()
    whole = contents(shards)
    for path in (shards[0].parent.parent / "torch").glob("*.py"):  # an upgrade
        path.write_text("z = 4\n")
    printed = run_pocket()
    assert contents(shards) == whole
    assert "found whole" in printed and "A corpus that is here stays: move it away" in printed
    shards[1].write_bytes(b"cut")
    run_pocket()
    assert shards[0].read_bytes() == whole[0] and shards[1].read_bytes() != b"cut"


@pytest.mark.slow
@pytest.mark.skipif(importlib.metadata.version("torch").partition("+")[0] != "2.13.0",
                    reason="the counts are those of torch 2.13.0")
def test_torch_2_13_gives_the_published_corpus(run_pocket):
    """Its sha256 holds the whole rule: which files are held out, and the order."""
    printed = run_pocket()
    assert all(words in printed for words in ("44,221,701", "2,198,999", "144,767 documents"))
    assert "compare" not in printed
