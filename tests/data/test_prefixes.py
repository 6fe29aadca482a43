"""data/prefixes.py: the prefixes of made-up and of GPT-2's tokens; the record that reads them."""

import hashlib

import numpy as np
import prefixes
import pytest
from conftest import REPO
from shards import load_script


def test_a_prefix_is_the_longest_token_that_another_one_begins_with():
    tokens = [b"a", b"b", b" ", b"ab", b"abab", b"aba", b" ab", b"bb", b"\xc3", b"\xc3\xa9", b""]
    expected = []
    for token in tokens:
        begins = [other for other in tokens if other != token and token.startswith(other or b"-")]
        expected.append(tokens.index(max(begins, key=len)) if begins else -1)
    assert prefixes.find_prefixes(tokens).tolist() == expected
    assert expected[4:7] == [5, 3, 2]  # not always the half of a merge, nor a smaller number


def test_those_of_gpt2_are_the_published_ones(gpt2, tmp_path, monkeypatch, call_tool):
    monkeypatch.setattr(prefixes, "PATH", tmp_path / "fineweb10B" / "prefixes.npy")
    call_tool(prefixes, [], tmp_path)
    found = np.load(prefixes.PATH)
    for token, prefix in ((" there", " ther"), (" running", " run"), ("ers", "er")):
        assert found[gpt2.encode_single_token(token)] == gpt2.encode_single_token(prefix)
    padded = np.full(50_304, -1, "<i4")
    padded[: len(found)] = found
    assert hashlib.sha256(padded).hexdigest().startswith("36281293860d09f2")


def test_without_the_vocabulary_one_line_says_how_to_get_it(tmp_path, monkeypatch, call_tool):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: 1 / 0)
    monkeypatch.setattr(prefixes, "PATH", tmp_path / "prefixes.npy")
    call_tool(prefixes, [], tmp_path, refused=["ZeroDivisionError", "TIKTOKEN_CACHE_DIR"])
    assert not prefixes.PATH.exists()


def test_a_record_reads_prefixes_and_refuses_those_of_another_vocabulary(tmp_path):
    script = load_script(REPO / "records" / "2026-07-13_PrefixTargets" / "train_gpt.py")
    right = [*range(-1, 256)]
    (tmp_path / "empty.npy").touch()
    (tmp_path / "text.npy").write_text("text")
    for name, values in (("few", [1, 2]), ("high", [300] * 257), ("right", right)):
        np.save(tmp_path / f"{name}.npy", np.array(values, np.int32))

    def read(name):
        file = f"{tmp_path}/{name}.npy"
        cfg = script.parse_args(["--preset", "pocket", "--prefix_file", file])
        return script.read_prefixes(cfg).tolist()

    for name in ("missing", "empty", "text", "few", "high"):
        with pytest.raises(script.UserError, match="257 tokens; make them: python data/prefixes"):
            read(name)
    assert read("right") == right
