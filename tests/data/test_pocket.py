"""data/pocket.py: the corpus of the installed torch, and that of a made-up package."""

import hashlib
import importlib.metadata

import numpy as np
import pocket
import pytest
from conftest import read_shard

SHARDS = ["pocket_train_000000.bin", "pocket_val_000000.bin"]


@pytest.fixture
def run_pocket(call_tool, tmp_path):
    """Runs the script, which writes into tmp_path / out; what it printed."""
    return lambda: call_tool(pocket, ["--out", "out"], tmp_path)


@pytest.fixture
def made_up_torch(tmp_path, monkeypatch):
    """The folder of a small package that the script takes for torch's."""
    package = tmp_path / "path" / "torch"
    (package / "nn").mkdir(parents=True)
    for index in range(200):
        (package / "nn" / f"file{index}.py").write_text(f"x = {index}  # é\r\n" * (index % 7))
    for name in ("__init__.py", "version.py", "nn/version.py", "notes.txt"):
        (package / name).write_text(f"name = {name!r}\n")
    monkeypatch.setattr(pocket, "find_torch", lambda: package)
    return package


def sha256_of(folder):
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in SHARDS)).hexdigest()


def assert_corpus_is_that_of_the_rule(out, package, printed):
    """The rule, spelled out anew: documents in the order of their paths' sha256, 1 in 20 apart."""
    files = {}
    for path in package.glob("**/*.py"):
        name = path.relative_to(package).as_posix()
        if name != "version.py":  # that of the top alone is left out
            files[hashlib.sha256(name.encode()).hexdigest()] = path.read_bytes()
    parts = {name: [] for name in SHARDS}
    for digest, content in sorted(files.items()):
        shard = SHARDS[int(digest[:2], 16) % 20 == 0]
        parts[shard] += [[256], np.frombuffer(content, np.uint8)]
    assert sorted(path.name for path in out.iterdir()) == SHARDS
    for name in SHARDS:
        tokens = np.concatenate(parts[name])
        assert np.array_equal(read_shard(out / name), tokens) and f"{len(tokens):,}" in printed
    assert f"{len(files):,} files" in printed and f"sha256 {sha256_of(out)}" in printed


def test_another_torch_is_said_not_to_compare(run_pocket, made_up_torch, tmp_path):
    printed = run_pocket()
    assert "not the corpus of torch 2.13.0" in printed and "compare" in printed
    assert_corpus_is_that_of_the_rule(tmp_path / "out", made_up_torch, printed)


def test_a_whole_corpus_is_kept_and_a_damaged_one_made_anew(run_pocket, made_up_torch, tmp_path,
                                                            monkeypatch):
    run_pocket()
    monkeypatch.setattr(pocket, "REFERENCE_SHA256", sha256_of(tmp_path / "out"))
    val = tmp_path / "out" / SHARDS[1]
    whole, written = val.read_bytes(), val.stat().st_mtime_ns
    printed = run_pocket()
    assert "found whole" in printed and "compare" not in printed
    assert val.stat().st_mtime_ns == written
    val.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "written" in run_pocket() and val.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.skipif(importlib.metadata.version("torch").partition("+")[0] != "2.13.0",
                    reason="the counts are those of torch 2.13.0")
def test_torch_2_13_gives_the_published_counts(run_pocket, tmp_path):
    printed = run_pocket()
    assert_corpus_is_that_of_the_rule(tmp_path / "out", pocket.find_torch(), printed)
    assert all(words in printed for words in ("44,246,716", "2,200,344", "2,284 files"))
    assert "compare" not in printed
