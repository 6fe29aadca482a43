"""data/prefixes.py: the prefixes of made-up and of GPT-2's tokens; the record that reads them."""

import hashlib
import importlib

import numpy as np
import pytest
import tiktoken
from conftest import REPO
from sample import load_script

prefixes = importlib.import_module("prefixes")
RECORD = REPO / "records" / "2026-07-13_PrefixTargets"


def test_a_prefix_is_the_longest_token_that_another_one_begins_with():
    tokens = [b"a", b"b", b" ", b"ab", b"abab", b"aba", b" ab", b"bb", b"\xc3", b"\xc3\xa9", b""]
    expected = []
    for token in tokens:
        begins = [other for other in tokens if other != token and token.startswith(other or b"-")]
        expected.append(tokens.index(max(begins, key=len)) if begins else -1)
    assert prefixes.find_prefixes(tokens).tolist() == expected
    assert expected[4:7] == [5, 3, 2]  # not always the half of a merge, nor a smaller number


def test_those_of_gpt2_are_the_published_ones(tmp_path, monkeypatch, call_tool):
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(f"no network and no TIKTOKEN_CACHE_DIR with the gpt2 files: {error!r:.60}")
    monkeypatch.setattr(prefixes, "PATH", tmp_path / "fineweb10B" / "prefixes.npy")
    assert call_tool(prefixes, [], tmp_path).returncode == 0
    found = np.load(prefixes.PATH)
    for token, prefix in ((" there", " ther"), (" running", " run"), ("ers", "er")):
        assert found[gpt2.encode_single_token(token)] == gpt2.encode_single_token(prefix)
    padded = np.full(50_304, -1, "<i4")
    padded[: len(found)] = found
    assert hashlib.sha256(padded).hexdigest().startswith("36281293860d09f2")


def test_without_the_vocabulary_one_line_says_how_to_get_it(tmp_path, monkeypatch, call_tool):
    def refuse(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    monkeypatch.setattr(prefixes, "PATH", tmp_path / "prefixes.npy")
    done = call_tool(prefixes, [], tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "ConnectionError" in done.stderr and "TIKTOKEN_CACHE_DIR" in done.stderr
    assert not prefixes.PATH.exists()


@pytest.mark.parametrize("content", [None, b"", b"text", [1, 2], [300] * 257], ids=str)
def test_a_record_refuses_prefixes_of_another_vocabulary(tmp_path, content):
    script = load_script(RECORD / "train_gpt.py")
    path = tmp_path / "own.npy"
    if isinstance(content, list):
        np.save(path, np.array(content, np.int32))
    elif content is not None:
        path.write_bytes(content)
    cfg = script.parse_args(["--preset", "pocket", "--prefix_file", str(path)])
    with pytest.raises(script.UserError, match="257 tokens; make them: python data/prefixes.py"):
        script.read_prefixes(cfg)


def test_a_record_reads_prefixes(tmp_path):
    script = load_script(RECORD / "train_gpt.py")
    expected = np.arange(257) - 1
    np.save(tmp_path / "own.npy", expected.astype(np.int32))
    cfg = script.parse_args(["--preset", "pocket", "--prefix_file", str(tmp_path / "own.npy")])
    assert script.read_prefixes(cfg).tolist() == expected.tolist()
