"""data/pocket.py: the corpus of the installed torch, and that of a made-up package."""

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np
import pocket
import pytest
from conftest import read_shard

END_OF_TEXT = 256


@pytest.fixture
def run_pocket(call_tool):
    """`run_pocket(out)` runs the script, which writes into the folder out."""
    return lambda out: call_tool(pocket, ["--out", out], out.parent)


def documents(tokens):
    """The documents of byte tokens, each opened by end-of-text."""
    starts = np.flatnonzero(tokens == END_OF_TEXT)
    assert starts[0] == 0 and tokens.max() == END_OF_TEXT
    ends = [*starts[1:], len(tokens)]
    return [tokens[a + 1:b].astype(np.uint8).tobytes() for a, b in zip(starts, ends)]


def expected_documents(package):
    """Training and validation documents by the rule, spelled out anew."""
    files = {}
    for path in package.glob("**/*.py"):
        name = str(path.relative_to(package)).replace("\\", "/")
        if name != "version.py":
            files[hashlib.sha256(name.encode()).hexdigest()] = path.read_bytes()
    train, val = [], []
    for digest, content in sorted(files.items()):
        split = train if int(digest[:2], 16) % 20 else val
        split.append(content)
    return train, val


@pytest.fixture
def made_up_torch(tmp_path, monkeypatch):
    """The folder of a small package that the script takes for torch's."""
    package = tmp_path / "path" / "torch"
    (package / "nn").mkdir(parents=True)
    for index in range(200):
        (package / "nn" / f"file{index}.py").write_text(f"x = {index}  # é\r\n" * (index % 7))
    for name in ("__init__.py", "version.py", "nn/version.py"):
        (package / name).write_text(f"name = {name!r}\n")
    (package / "notes.txt").write_text("no source")
    monkeypatch.setattr(pocket, "find_torch", lambda: package)
    return package


def sha256_of(paths):
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def assert_corpus_is_that_of_the_rule(out, package, printed):
    paths = [out / "pocket_train_000000.bin", out / "pocket_val_000000.bin"]
    assert sorted(out.iterdir()) == paths
    train, val = expected_documents(package)
    assert train and val
    assert documents(read_shard(paths[0])) == train and documents(read_shard(paths[1])) == val
    for path in paths:
        assert f"{len(read_shard(path)):,}" in printed
    assert f"sha256 {sha256_of(paths)}" in printed


def test_the_torch_that_is_read_is_the_installed_one():
    assert pocket.find_torch() == Path(importlib.util.find_spec("torch").origin).parent


def test_another_torch_is_said_not_to_compare(run_pocket, made_up_torch, tmp_path):
    result = run_pocket(tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "not the corpus of torch 2.13.0" in result.stdout and "compare" in result.stdout
    assert "202 files" in result.stdout  # version.py of the top alone is left out
    assert_corpus_is_that_of_the_rule(tmp_path / "out", made_up_torch, result.stdout)


def test_a_whole_corpus_is_kept_and_a_damaged_one_made_anew(run_pocket, made_up_torch, tmp_path,
                                                            monkeypatch):
    out = tmp_path / "out"
    run_pocket(out)
    train, val = out / "pocket_train_000000.bin", out / "pocket_val_000000.bin"
    monkeypatch.setattr(pocket, "REFERENCE_SHA256", sha256_of([train, val]))
    whole, written = val.read_bytes(), val.stat().st_mtime_ns
    printed = run_pocket(out).stdout
    assert "found whole" in printed and "compare" not in printed
    assert val.stat().st_mtime_ns == written

    val.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "written" in run_pocket(out).stdout
    assert val.read_bytes() == whole


def test_shards_that_cannot_be_written_are_one_line_and_leave_nothing(run_pocket, made_up_torch,
                                                                      tmp_path):
    out = tmp_path / "out"
    (out / "pocket_train_000000.bin").mkdir(parents=True)  # in the place of the shard
    result = run_pocket(out)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "pocket_train_000000.bin" in result.stderr
    assert [path.name for path in out.iterdir()] == ["pocket_train_000000.bin"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.metadata.version("torch").partition("+")[0] != "2.13.0",
                    reason="the counts are those of torch 2.13.0")
def test_torch_2_13_gives_the_published_counts(run_pocket, tmp_path):
    out = tmp_path / "out"
    printed = run_pocket(out).stdout
    assert_corpus_is_that_of_the_rule(out, pocket.find_torch(), printed)
    assert len(read_shard(out / "pocket_train_000000.bin")) == 44_246_716
    assert len(read_shard(out / "pocket_val_000000.bin")) == 2_200_344
    assert "2,284 files" in printed and "compare" not in printed
