"""data/text.py: tokens that are the tokenizer's, shards, what is held out, bad input.

The tests with the gpt2 tokenizer run where tiktoken finds its files (TIKTOKEN_CACHE_DIR).
"""

import importlib
import io
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import REPO, read_shard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import train_gpt

text = importlib.import_module("text")
BYTES = SimpleNamespace(name="bytes", end_of_text=256, encode=lambda string: list(string.encode()),
                        decode=lambda tokens: bytes(tokens).decode())
# What GPT-2's pattern tells apart, and what could be taken for a special token or for a space.
FRAGMENTS = ["a", "Bc", "é", "中", "7", "12", "'", "'s", "'ll", " ", "  ", "\n", "\r\n", "\t",
             "\x1c", "\x85", "\xa0", "\u3000", ".", "!?", "<|endoftext|>", "🙂", "\0"]
PAIRS = "".join(map("".join, itertools.product(FRAGMENTS, repeat=2)))
STRINGS = st.lists(st.sampled_from(FRAGMENTS) | st.characters(exclude_categories=["Cs"]),
                   max_size=60).map("".join)


@pytest.fixture(params=["bytes", "gpt2"])
def tokenizer(request):
    if request.param == "bytes":
        return BYTES
    gpt2 = request.getfixturevalue("gpt2")
    return SimpleNamespace(name="gpt2", end_of_text=50256, encode=gpt2.encode_ordinary,
                           decode=gpt2.decode)


@pytest.fixture
def run_text(tmp_path, call_tool):
    """`run_text(*args)` runs the script in tmp_path, bytes into `out`; what it printed."""

    def run(*args, **options):
        args = ["--tokenizer", "bytes", "--out", "out", *args]
        return call_tool(text, args, tmp_path, **options)

    return run


def read_splits(folder):
    """The tokens of the training and of the validation shards."""
    splits = (sorted(folder.glob(f"text_{split}_*.bin")) for split in ("train", "val"))
    return [np.concatenate([read_shard(path) for path in paths]) for paths in splits]


def read_documents(tokens, tokenizer=BYTES):
    """The texts of tokens, each opened by end-of-text."""
    none, *parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_text))
    assert not len(none)
    return [tokenizer.decode(part[1:].tolist()) for part in parts]


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def to_jsonl(documents, end="\n"):
    return "".join(json.dumps({"id": 1, "text": doc}) + end for doc in documents).encode()


def sample_documents(count):
    """Distinct documents of random length, the first one empty."""
    draw = np.random.default_rng(0)
    return ["", *(f"{index} " + "".join(draw.choice(FRAGMENTS, draw.integers(80)))
                  for index in range(1, count))]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(string=STRINGS, block=st.integers(1, 20), batch=st.integers(1, 5))
@example(string=PAIRS, block=50, batch=3)
def test_tokens_of_the_parts_are_those_of_the_whole(tokenizer, tmp_path, string, block, batch):
    """A cut is before a space or newline alone: a tab takes a space before it into its token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK_CHARS", block)
        patch.setattr(text, "BATCH_PIECES", batch)
        parts = list(text.read_parts(io.StringIO(string, newline="")))
        pieces = (text.Piece(part, number == 0, False) for number, part in enumerate(parts))
        assert text.write_tokens(pieces, tokenizer.name, tmp_path) == 1
    assert "".join(parts) == string and (len(parts) > 9 or string != PAIRS)
    for before, after in itertools.pairwise(filter(None, parts)):
        assert not before[-1].isspace() and after[0] in " \n"
    tokens = np.fromfile(tmp_path / "train", "<u2").tolist()
    assert tokens == [tokenizer.end_of_text, *tokenizer.encode(string)]
    assert (tmp_path / "val").stat().st_size == 0


def test_every_kind_of_path_becomes_documents_in_order(tokenizer, run_text, tmp_path):
    """A folder's in sorted order, then the others; the file that is named twice is read once."""
    documents = sample_documents(80)
    filler = "a word " * 1000  # whose end is held out, as no document is
    write(tmp_path, {  # in another order than they are read
        "my texts/z.txt": b"",
        "my texts/b/c.jsonl": b"\xef\xbb\xbf" + to_jsonl(documents[40:]),
        "my texts/a.jsonl": b"\n" + to_jsonl(documents[:40], end="\r\n \n"),
        "notes.md": b"\xef\xbb\xbfline ends\r\nare kept\r\xef\xbb\xbf"})
    end, start = os.pipe()
    os.write(start, b"from a pipe")
    os.close(start)
    printed = run_text("--tokenizer", tokenizer.name, "--val_fraction", 1e-9, "my texts",
                       "notes.md", f"/dev/fd/{end}", "-", tmp_path / "my texts" / "z.txt",
                       stdin=filler.encode())
    os.close(end)
    train, val = read_splits(tmp_path / "out")
    assert read_documents(np.concatenate([train, val]), tokenizer) == [
        *documents, "", "line ends\r\nare kept\r\ufeff", "from a pipe", filler]
    assert f"{len(train):,} training and {len(val):,} validation" in printed
    assert "84 document(s)" in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "text_train_000000.bin", "text_val_000000.bin"]


TEXTS = {"LICENSE": b"no suffix", "docs/a.md": b"# \xc3\x9c\n", "docs/b.json": b"{}",
         "src/a.py": b"print()\r\n", "src/c.txt": b"a text\f"}
NO_TEXTS = {
    "image.png": b"\x89PNG\r\n\x1a\n",
    "late.txt": b"a" * 3_000_000 + b"\xff",  # after the blocks that are read first
    "latin1.py": b"\xe9",
    "utf16.txt": "ascii".encode("utf-16-le")}  # valid UTF-8, but for its NULs no text
HIDDEN = dict.fromkeys([".git/config", ".hidden.txt", "src/.cache/a.py"], b"hidden")


@pytest.mark.parametrize(("suffix", "names", "skipped"), [
    ("", list(TEXTS), "4 file(s) skipped that are not UTF-8 text, as 'mixed/image.png'\n"),
    (".py", ["LICENSE", "src/a.py"],
     "1 file(s) skipped that are not UTF-8 text, as 'mixed/latin1.py'\n"),
    (".md,.json", ["LICENSE", "docs/a.md", "docs/b.json"], "")])
def test_text_of_a_folder_is_read_and_the_rest_counted(monkeypatch, capsys, tmp_path, suffix,
                                                       names, skipped):
    """Suffixes choose files of a folder, and not those that are named."""
    write(tmp_path / "mixed", TEXTS | NO_TEXTS | HIDDEN)
    monkeypatch.chdir(tmp_path)
    files = text.find_files(["mixed/LICENSE", "mixed"], tuple(suffix.split(",")))
    assert files == [f"mixed/{name}" for name in names]
    assert capsys.readouterr().out == skipped


def test_the_documents_held_out_are_spread_and_stay_when_more_come(run_text, tmp_path):
    documents = [f"document {index} {'of many words ' * 3}" for index in range(2000)]
    for name, count in (("all", 2000), ("first", 700)):
        write(tmp_path, {f"{name}.jsonl": to_jsonl(documents[:count])})
        run_text("--val_fraction", 0.1, "--out", name, f"{name}.jsonl")
    train, val = map(read_documents, read_splits(tmp_path / "all"))
    assert train == [document for document in documents if document not in val]
    assert val == [document for document in documents if document not in train]
    for start in range(0, 2000, 100):  # ten in each hundred
        assert len(set(documents[start:start + 100]) & set(val)) in (9, 10, 11)
    first = read_splits(tmp_path / "first")[1]
    assert read_documents(first) == [document for document in val if document in documents[:700]]


@pytest.mark.parametrize(("fraction", "length", "held_out"), [
    (0.25, 40_000, 10_000), (0.25, 3999, 1000), (0.01, 3999, 129), (0.9, 3999, 1951)])
@pytest.mark.parametrize("one_tiny", [False, True])
def test_the_end_of_too_few_documents_is_held_out(run_text, tmp_path, fraction, length, held_out,
                                                  one_tiny):
    """As large a part as asked for, but for what a side takes at least. One document that is too
    small to be validated on does not count."""
    tiny = ["b"] * one_tiny
    parts = [("a word " * length)[: length - 1 - 2 * one_tiny], *tiny]  # and an end-of-text each
    write(tmp_path, {"a.jsonl": to_jsonl(parts)})
    printed = run_text("--val_fraction", fraction, "a.jsonl")
    train, val = read_splits(tmp_path / "out")
    documents = read_documents(np.concatenate([train, val]))
    assert sorted(documents) == sorted(parts) and abs(len(val) - held_out) <= 1
    assert "end of the text is for validation" in printed


@pytest.mark.parametrize("num_tokens", [99, 100, 101, 150, 200, 201, 305])
def test_shards_are_full_at_most_and_none_is_short(tmp_path, monkeypatch, num_tokens):
    monkeypatch.setattr(text, "SHARD_TOKENS", 100)
    text.write_shards(tmp_path, "train", np.arange(num_tokens, dtype=np.uint16))
    parts = [read_shard(path) for path in sorted(tmp_path.iterdir())]
    assert np.concatenate(parts).tolist() == list(range(num_tokens))
    lengths = [*map(len, parts)]
    assert max(lengths) <= 100 and min(lengths) >= min(num_tokens, 50)


@pytest.mark.parametrize("line", [  # the half of a surrogate pair is JSON, but no text
    b'{"text": ', b"[1]", b'{"text": 1}', b'{"txt": "a"}', b'{"text": "\\ud800"}',
    b'{"text": ' + 10_000 * b"["], ids=lambda line: line[:20])
def test_a_bad_line_is_named_and_nothing_is_left(run_text, tmp_path, line):
    write(tmp_path, {"a.jsonl": to_jsonl(sample_documents(5000)),
                     "b.jsonl": b'{"text": "good"}\n\n' + line})
    run_text("a.jsonl", "b.jsonl", refused=["b.jsonl:3: not a JSON object"])
    assert not list((tmp_path / "out").iterdir())


def test_earlier_shards_are_left_alone(run_text, tmp_path):
    run_text("-", stdin=b"first " * 1000)
    first = read_splits(tmp_path / "out")
    run_text("-", stdin=b"second " * 1000, refused=["out/text_", "another --out"])
    np.testing.assert_equal(read_splits(tmp_path / "out"), first)


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_run_leaves_nothing_that_stays(run_text, tmp_path, number, code):
    command = [sys.executable, REPO / "data" / "text.py", *"--tokenizer bytes --out out -".split()]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        try:
            # More than one batch, so that tokens are being written at the signal.
            process.stdin.write(b"some words " * 3_000_000)
            deadline = time.monotonic() + 60
            while not any(path.stat().st_size for path in tmp_path.glob("out/.*/train")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code
    assert b"Traceback" not in errors and len(errors.splitlines()) <= 1
    assert any((tmp_path / "out").iterdir()) == (number == signal.SIGKILL)
    run_text("-", stdin=b"some words " * 1000)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin"}


@pytest.mark.parametrize(("args", "part"), [
    ("missing.txt", "missing.txt: no such file"),
    ("late.txt", "late.txt: not UTF-8; convert it first, as with iconv"),
    ("latin1.jsonl", "latin1.jsonl: not UTF-8; convert it first, as with iconv"),
    ("empty.txt", "too little text to train on: 1 token(s)"),
    ("empty.jsonl", "too little text to train on: 0 token(s)"),
    ("-", "too little text to train on: 11 token(s)"),
    ("folder", "folder/*: no text file"),
    (". --suffix .c,.cpp", "./*.c,.cpp: no text file"),
    ("a.txt --val_fraction 1", "--val_fraction 1"),
    ("a.txt --val_fraction nan", "--val_fraction nan"),
    ("a.txt --out a.txt", "--out a.txt: "),
    ("", "PATH")])
def test_bad_input_is_one_line(run_text, tmp_path, args, part):
    write(tmp_path, {"a.txt": b"text " * 1000, "late.txt": NO_TEXTS["late.txt"],
                     "latin1.jsonl": b'{"text": "\xff"}', "empty.txt": b"", "empty.jsonl": b"\n",
                     "folder/image.png": NO_TEXTS["image.png"]})
    run_text(*args.split(), stdin=b"tenletters", refused=[part])
    assert not list(tmp_path.glob("out/*")) + list(tmp_path.glob("out/.*"))
    assert (tmp_path / "a.txt").read_bytes() == b"text " * 1000


def test_closed_standard_input_and_tiktoken_without_its_files_are_refused(run_text, monkeypatch):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: 1 / 0)
    run_text("--tokenizer", "gpt2", "-", stdin=b"text",
             refused=["ZeroDivisionError", "TIKTOKEN_CACHE_DIR", "--tokenizer bytes"])
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of <&-
    with pytest.raises(text.DataError, match="standard input is closed"):
        text.open_text("-")


@pytest.mark.parametrize(("size", "val_tokens"), [
    (115_179, 5632), (51_179, 2432), (2177, 128)])  # the last one is the least that is taken
def test_the_printed_command_trains_on_the_shards(run_text, tmp_path, capsys, size, val_tokens):
    """Also where they are shorter than the preset's validation sequences."""
    content = (b"some words of text\n" * 6100)[:size]
    run_text("-", stdin=content[:2176], refused=["2,177 token(s), of 2,178 at least"])
    printed = run_text("--out", "my [odd] folder", "-", stdin=content)
    said, command = printed.splitlines()[-2:]
    assert "--repeat_data true in place of --preset pocket" in said
    record = command.replace("--preset pocket", "--repeat_data true")
    assert train_gpt.parse_args(shlex.split(record)[2:]).preset == "record"
    program, script, *flags = shlex.split(command)
    assert program == "python" and (tmp_path / script).resolve() == REPO / "train_gpt.py"
    assert int(flags[flags.index("--val_tokens") + 1]) == val_tokens
    # Whole blocks, and one more token at least, the last target.
    assert 0 < len(read_splits(tmp_path / "my [odd] folder")[1]) - val_tokens <= 128
    assert not train_gpt.main([*flags, "--num_iterations", "1", "--warmup_steps", "0"])
    assert "val_loss" in capsys.readouterr().out
