"""data/lab.py: the definitions of the installed torch, and those of a made-up package.

    pytest tests/test_data_lab.py
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_data_pocket import documents, expected_documents, read_shard

SCRIPT = Path(__file__).resolve().parent.parent / "data" / "lab.py"
sys.path.insert(0, str(SCRIPT.parent))
lab = importlib.import_module("lab")

END_OF_TEXT = 256
SHARDS = ["lab_train_000000.bin", "lab_val_000000.bin"]
is_reference_torch = pytest.mark.skipif(
    importlib.metadata.version("torch").partition("+")[0] != "2.13.0",
    reason="the reference is the corpus of torch 2.13.0")


def run_lab(out, **environment):
    command = [sys.executable, SCRIPT, "--out", out]
    return subprocess.run(command, env={**os.environ, **environment}, cwd=out.parent,
                          capture_output=True, text=True, timeout=120)


def cut_by_lines(source):
    """The pieces of a file by the rule, spelled out anew: line by line."""
    pieces, decorated = [b""], False
    for line in io.BytesIO(source):
        start = line[4:] if line.startswith(b"    ") else line
        decorator = start.startswith(b"@")
        if decorator or start.startswith((b"def ", b"class ", b"async def ")):
            if not decorated:
                pieces.append(b"")
            decorated = decorator
        pieces[-1] += line
    return pieces


def expected_definitions(package):
    """Training and validation documents by the rule."""
    train, val = ([piece for file in files for piece in cut_by_lines(file)
                   if 1 <= len(piece) <= 2048] for files in expected_documents(package))
    train = set(train).difference(val)
    return [[piece for _, piece in sorted((hashlib.sha256(piece).hexdigest(), piece)
                                          for piece in set(pieces))] for pieces in (train, val)]


@pytest.fixture(scope="module")
def torch_corpus(tmp_path_factory):
    """The folder that the script wrote for the installed torch, and what it printed."""
    out = tmp_path_factory.mktemp("lab") / "out"
    result = run_lab(out)
    assert result.returncode == 0, result.stderr
    return out, result.stdout


@pytest.fixture(scope="module")
def tokens(torch_corpus):
    """The tokens of the training and of the validation shard."""
    return [read_shard(torch_corpus[0] / name) for name in SHARDS]


def test_corpus_is_that_of_the_rule(torch_corpus, tokens):
    package = importlib.util.find_spec("torch").submodule_search_locations[0]
    assert [documents(split) for split in tokens] == expected_definitions(package)
    assert sorted(path.name for path in torch_corpus[0].iterdir()) == SHARDS


def test_no_document_is_in_both_splits_or_twice_in_one(tokens):
    train, val = map(documents, tokens)
    assert not set(train) & set(val)
    assert len(set(train)) == len(train) and len(set(val)) == len(val)


@pytest.mark.parametrize("length", [384, 512, 1024])
def test_most_sequences_hold_a_boundary_wherever_they_begin(tokens, length):
    for split in tokens:
        for first in (0, length // 3, length // 2):
            rows = split[first : first + (len(split) - first) // length * length]
            held = (rows.reshape(-1, length)[:, 1:] == END_OF_TEXT).any(axis=1)
            assert held.mean() > 0.5
            # Documents are in no order: the share is the same all along.
            assert min(part.mean() for part in np.array_split(held, 10)) > 0.5


def test_most_tokens_have_a_block_of_their_own_document_before_them(tokens):
    for split in tokens:
        lengths = np.diff(np.flatnonzero(split == END_OF_TEXT))
        positions = np.concatenate([np.arange(length) for length in lengths])
        assert (positions >= 128).mean() > 0.5


def test_counts_and_sha256_are_printed(torch_corpus, tokens):
    out, printed = torch_corpus
    for split in tokens:
        assert f"{len(split):,}" in printed
    digest = hashlib.sha256(b"".join((out / name).read_bytes() for name in SHARDS))
    assert digest.hexdigest() in printed


def test_two_runs_write_the_same_bytes(torch_corpus, tmp_path):
    assert run_lab(tmp_path / "again").returncode == 0
    for name in SHARDS:
        assert (tmp_path / "again" / name).read_bytes() == (torch_corpus[0] / name).read_bytes()


@is_reference_torch
def test_torch_2_13_gives_the_published_counts(torch_corpus, tokens):
    assert [len(split) for split in tokens] == [21_408_279, 1_204_666]
    assert "45,914 documents" in torch_corpus[1] and "compare" not in torch_corpus[1]


@is_reference_torch
def test_a_whole_corpus_is_kept_and_a_damaged_one_made_anew(torch_corpus):
    val = torch_corpus[0] / SHARDS[1]
    whole, written = val.read_bytes(), val.stat().st_mtime_ns
    assert "found whole" in run_lab(torch_corpus[0]).stdout
    assert val.stat().st_mtime_ns == written

    val.write_bytes(whole[:5000] + b"\xff" + whole[5001:])
    assert "written" in run_lab(torch_corpus[0]).stdout
    assert val.read_bytes() == whole


LINES = [b"x = 1\n", b"\n", b"    y\n", b"def f(a):\n", b"    def g(self):\n", b"\tdef t():\n",
         b"        def h():\n", b"class A:\n", b"async def c():\n", b"    async def d():\n",
         b"@wraps\n", b"    @property\n", b"@cases(\n", b")\n", b"define = 1\n", b"classes\n",
         b"#\r\n", b"#\r", b"end"]


@given(st.lists(st.sampled_from(LINES)).map(b"".join))
def test_the_pieces_are_the_file_cut_before_definitions(source):
    pieces = lab.cut_definitions(source)
    assert b"".join(pieces) == source
    assert [piece for piece in pieces if piece] == [p for p in cut_by_lines(source) if p]


def test_decorators_stay_with_what_they_decorate():
    pieces = [
        b"import x\n\n\n",
        b"@first\n@second(\n    1,\n)\ndef f():\n    if True:\n        def inner(): pass\n\n\n",
        b"class A(B):\n    '''Doc.'''\n\n",
        b"    @property\n    def p(self):\n        return 1\n\n",
        b"    async def q(self):\n        pass\n",
    ]
    assert lab.cut_definitions(b"".join(pieces)) == pieces


def test_what_occurs_in_both_splits_is_for_validation_alone(tmp_path):
    package = tmp_path / "path" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for index in range(200):
        definitions = ["def everywhere():\n    pass\n", f"class Long{index}:\n".ljust(2048) + "\n"]
        definitions += [f"    def longest(self):  # {index:03d}\u00e9".ljust(2046) + "\n"]
        definitions += [f"    def in_some(self):\n        return {index % 50}\n"]
        (package / f"file{index}.py").write_text("".join([f"x = {index}\n", *definitions]))
    out = tmp_path / "out"
    result = run_lab(out, PYTHONPATH=str(package.parent))
    assert result.returncode == 0, result.stderr
    assert "not the corpus of torch 2.13.0" in result.stdout
    train, val = (documents(read_shard(out / name)) for name in SHARDS)
    assert [train, val] == expected_definitions(package)
    assert b"def everywhere():\n    pass\n" in val
    assert b"def everywhere():\n    pass\n" not in train
    assert not any(b"class Long" in document for document in train + val)
    assert max(map(len, train)) == max(map(len, val)) == 2048
