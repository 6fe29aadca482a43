"""data/pocket.py: the corpus of the installed torch, and that of a made-up package."""

import hashlib
import importlib.metadata

import pocket
import pytest
from conftest import read_shard

SHARDS = ["pocket_train_000000.bin", "pocket_val_000000.bin"]
PARAGRAPHS = [b"x = 1  # \xc3\xa9\r\n", b"y = 2\nz = 3\n", b"end = 4"]


@pytest.fixture
def run_pocket(call_tool, tmp_path):
    """Runs the script, which writes into tmp_path / out; what it printed."""
    return lambda: call_tool(pocket, ["--out", "out"], tmp_path)


@pytest.fixture
def made_up_torch(tmp_path, monkeypatch):
    """A small package that the script takes for torch; its paragraphs by file."""
    package = tmp_path / "path" / "torch"
    (package / "nn").mkdir(parents=True)
    contents = {"version.py": [], "__init__.py": [], "nn/version.py": PARAGRAPHS[:1]}
    for index in range(100):
        contents[f"nn/file{index}.py"] = PARAGRAPHS[: index % 4]
    for name, paragraphs in contents.items():
        (package / name).write_bytes(b"\n\n" + b"\n\n".join(paragraphs))
    (package / "version.py").write_text("of this build = 1\n")
    (package / "notes.txt").write_text("no source\n")
    monkeypatch.setattr(pocket, "find_torch", lambda: package)
    return contents


def sha256_of(folder):
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in SHARDS)).hexdigest()


def test_the_corpus_is_that_of_the_rule_and_another_torch_is_said_not_to_compare(
    run_pocket, made_up_torch, tmp_path
):
    """The rule: 1 file in 20 apart, paragraphs in the order of their sha256."""
    printed = run_pocket()
    documents = {name: {} for name in SHARDS}
    for name, paragraphs in made_up_torch.items():
        first = hashlib.sha256(name.encode()).hexdigest()[:2]
        shard = SHARDS[int(first, 16) % 20 == 0]
        for number, paragraph in enumerate(paragraphs):
            place = hashlib.sha256(f"{name} {number}".encode()).hexdigest()
            documents[shard][place] = paragraph
    for name in SHARDS:
        tokens = []
        for _, paragraph in sorted(documents[name].items()):
            tokens += [256, *paragraph]
        assert read_shard(tmp_path / "out" / name).tolist() == tokens != []
        assert f"{len(tokens):,}" in printed
    assert f"{sum(map(len, documents.values()))} documents" in printed
    assert f"sha256 {sha256_of(tmp_path / 'out')}" in printed
    assert "not the corpus of torch 2.13.0" in printed and "compare" in printed


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
def test_torch_2_13_gives_the_published_counts(run_pocket):
    printed = run_pocket()
    assert all(words in printed for words in ("44,221,701", "2,198,999", "144,767 documents"))
    assert "compare" not in printed
