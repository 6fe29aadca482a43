"""data/pocket.py: the corpus of the installed torch, and that of a made-up package."""

import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "data" / "pocket.py"
END_OF_TEXT = 256


def run_pocket(out, **environment):
    command = [sys.executable, SCRIPT, "--out", out]
    return subprocess.run(command, env={**os.environ, **environment}, cwd=out.parent,
                          capture_output=True, text=True, timeout=120)


def read_shard(path):
    """The tokens of a shard, its header held against the published layout."""
    header = np.fromfile(path, "<i4", 256)
    tokens = np.fromfile(path, "<u2", offset=1024)
    assert header.tolist() == [20240520, 1, len(tokens)] + 253 * [0]
    return tokens


def documents(tokens):
    """The documents of byte tokens, each opened by end-of-text."""
    starts = np.flatnonzero(tokens == END_OF_TEXT)
    assert starts[0] == 0 and tokens.max() == END_OF_TEXT
    ends = [*starts[1:], len(tokens)]
    return [tokens[a + 1:b].astype(np.uint8).tobytes() for a, b in zip(starts, ends)]


def expected_documents(package):
    """Training and validation documents by the rule, spelled out anew."""
    files = {}
    for folder, _, names in os.walk(package):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), package).replace(os.sep, "/")
            if path.endswith(".py") and path != "version.py":
                files[hashlib.sha256(path.encode()).hexdigest()] = os.path.join(package, path)
    split = {True: [], False: []}
    for digest, path in sorted(files.items()):
        split[int(digest[:2], 16) % 20 == 0].append(Path(path).read_bytes())
    return split[False], split[True]


@pytest.fixture(scope="module")
def torch_corpus(tmp_path_factory):
    """The folder that the script wrote for the installed torch, and what it printed."""
    out = tmp_path_factory.mktemp("pocket") / "out"
    result = run_pocket(out)
    assert result.returncode == 0, result.stderr
    return out, result.stdout


@pytest.fixture
def made_up_torch(tmp_path):
    """A folder for PYTHONPATH with a small package called torch in it."""
    package = tmp_path / "path" / "torch"
    (package / "nn").mkdir(parents=True)
    for index in range(200):
        (package / "nn" / f"file{index}.py").write_text(f"x = {index}  # é\r\n" * (index % 7))
    for name in ("__init__.py", "version.py", "nn/version.py"):
        (package / name).write_text(f"name = {name!r}\n")
    (package / "notes.txt").write_text("no source")
    return package.parent


def test_corpus_is_that_of_the_rule(torch_corpus):
    out, _ = torch_corpus
    package = importlib.util.find_spec("torch").submodule_search_locations[0]
    train, val = expected_documents(package)
    assert documents(read_shard(out / "pocket_train_000000.bin")) == train
    assert documents(read_shard(out / "pocket_val_000000.bin")) == val
    assert sorted(path.name for path in out.iterdir()) == [
        "pocket_train_000000.bin", "pocket_val_000000.bin"]


def test_counts_and_sha256_are_printed(torch_corpus):
    out, printed = torch_corpus
    shards = [out / f"pocket_{split}_000000.bin" for split in ("train", "val")]
    for path in shards:
        assert f"{len(read_shard(path)):,}" in printed
    assert hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest() in printed


@pytest.mark.skipif(importlib.metadata.version("torch").partition("+")[0] != "2.13.0",
                    reason="the counts are those of torch 2.13.0")
def test_torch_2_13_gives_the_published_counts(torch_corpus):
    out, printed = torch_corpus
    assert len(read_shard(out / "pocket_train_000000.bin")) == 44_246_716
    assert len(read_shard(out / "pocket_val_000000.bin")) == 2_200_344
    assert "2,284 files" in printed and "compare" not in printed


@pytest.mark.skipif(importlib.metadata.version("torch").partition("+")[0] != "2.13.0",
                    reason="only the corpus of torch 2.13.0 is known to be whole")
def test_a_whole_corpus_is_kept_and_a_damaged_one_made_anew(torch_corpus):
    out, _ = torch_corpus
    val = out / "pocket_val_000000.bin"
    whole, written = val.read_bytes(), val.stat().st_mtime_ns
    assert "found whole" in run_pocket(out).stdout
    assert val.stat().st_mtime_ns == written

    val.write_bytes(whole[:5000] + b"\xff" + whole[5001:])
    assert "written" in run_pocket(out).stdout
    assert val.read_bytes() == whole


def test_another_torch_is_said_not_to_compare(made_up_torch, tmp_path):
    result = run_pocket(tmp_path / "out", PYTHONPATH=str(made_up_torch))
    assert result.returncode == 0, result.stderr
    assert "not the corpus of torch 2.13.0" in result.stdout and "compare" in result.stdout
    train, val = expected_documents(made_up_torch / "torch")
    assert train and val and len(train) + len(val) == 202  # version.py of the top alone is left out
    assert documents(read_shard(tmp_path / "out" / "pocket_train_000000.bin")) == train
    assert documents(read_shard(tmp_path / "out" / "pocket_val_000000.bin")) == val


def test_shards_that_cannot_be_written_are_one_line_and_leave_nothing(made_up_torch, tmp_path):
    out = tmp_path / "out"
    (out / "pocket_train_000000.bin").mkdir(parents=True)  # in the place of the shard
    result = run_pocket(out, PYTHONPATH=str(made_up_torch))
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "pocket_train_000000.bin" in result.stderr
    assert [path.name for path in out.iterdir()] == ["pocket_train_000000.bin"]
