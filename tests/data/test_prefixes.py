"""data/prefixes.py: the prefixes of GPT-2's tokens, and the record that reads them."""

import hashlib

import numpy as np
import prefixes
import pytest
from conftest import script_module


def test_those_of_gpt2_are_the_published_ones(gpt2, tmp_path, monkeypatch, call_tool):
    monkeypatch.setattr(prefixes, "PATH", tmp_path / "fineweb10B" / "prefixes.npy")
    call_tool(prefixes, [], tmp_path)
    found = np.load(prefixes.PATH)
    assert found[gpt2.encode_single_token(" there")] == gpt2.encode_single_token(" ther")
    padded = np.full(50_304, -1, "<i4")
    padded[: len(found)] = found
    assert hashlib.sha256(padded).hexdigest().startswith("36281293860d09f2")


def test_without_the_vocabulary_one_line_says_how_to_get_it(tmp_path, monkeypatch, call_tool):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: 1 / 0)
    monkeypatch.setattr(prefixes, "PATH", tmp_path / "prefixes.npy")
    call_tool(prefixes, [], tmp_path, refused=["ZeroDivisionError", "TIKTOKEN_CACHE_DIR"])
    assert not prefixes.PATH.exists()


def test_a_record_reads_prefixes_and_refuses_those_of_another_vocabulary(tmp_path):
    script = script_module("records/2026-07-13_PrefixTargets/train_gpt.py")
    (tmp_path / "text.npy").write_text("text")
    np.save(tmp_path / "few.npy", np.array([1, 2], np.int32))
    np.save(tmp_path / "high.npy", np.array([300] * 257, np.int32))
    np.save(tmp_path / "right.npy", np.arange(-1, 256, dtype=np.int32))

    def read(name):
        file = f"{tmp_path}/{name}.npy"
        cfg = script.parse_args(["--preset", "pocket", "--prefix_file", file])
        return script.read_prefixes(cfg).tolist()

    for name in ("missing", "text", "few", "high"):
        with pytest.raises(script.UserError, match="257 tokens; make them: python data/prefixes"):
            read(name)
    assert read("right") == [*range(-1, 256)]
