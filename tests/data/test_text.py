"""data/text.py: tokens that are the tokenizer's, shards, what is held out, bad input."""

import gzip
import importlib
import io
import itertools
import json
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import PATIENCE, REPO, read_shard

import train_gpt

text = importlib.import_module("text")
# What GPT-2's pattern tells apart, and what could be taken for a special token or for a space.
FRAGMENTS = ["a", "Bc", "é", "中", "7", "12", "'", "'s", "'ll", " ", "  ", "\n", "\r\n", "\t",
             "\x1c", "\x85", "\xa0", "\u3000", ".", "!?", "<|endoftext|>", "🙂", "\0"]
LATE = b"a" * 1_000_000 + b"\xff"  # no UTF-8, after the blocks that are read first


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


def read_documents(tokens):
    """The texts of bytes, each opened by end-of-text."""
    none, *parts = np.split(tokens, np.flatnonzero(tokens == 256))
    assert not len(none)
    return [bytes(part[1:].tolist()).decode() for part in parts]


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def to_jsonl(documents):
    return "".join(json.dumps({"id": 1, "text": doc}) + "\r\n \n" for doc in documents).encode()


@pytest.mark.parametrize("block", [1, 50])
def test_tokens_of_the_parts_are_those_of_the_whole(gpt2, tmp_path, monkeypatch, block):
    string = "".join(map("".join, itertools.product(FRAGMENTS, repeat=3)))
    monkeypatch.setattr(text, "BLOCK_CHARS", block)
    parts = list(text.read_parts(io.StringIO(string, newline=""), "gpt2"))
    assert "".join(parts) == string and len(parts) > 99
    texts = ((part, number == 0) for number, part in enumerate(parts))
    assert text.write_tokens(texts, "gpt2", 1e-9, tmp_path) == (1, 0)
    tokens = np.fromfile(tmp_path / "train", "<u2").tolist()
    assert tokens == [50256, *gpt2.encode_ordinary(string)]
    assert (tmp_path / "val").stat().st_size == 0


def test_a_text_without_spaces_is_looked_through_once(monkeypatch):
    looked_at = []
    pattern = text.LAST_CUT["gpt2"]
    search = SimpleNamespace(match=lambda part: looked_at.append(len(part)) or pattern.match(part))
    monkeypatch.setitem(text.LAST_CUT, "gpt2", search)
    monkeypatch.setattr(text, "BLOCK_CHARS", 10)
    string = "x" * 10_000 + " y"
    assert "".join(text.read_parts(io.StringIO(string), "gpt2")) == string
    assert sum(looked_at) <= 2 * len(string)
    parts = list(text.read_parts(io.StringIO(string), "bytes"))  # none waits for others
    assert "".join(parts) == string and max(map(len, parts)) <= 10


def test_every_kind_of_path_becomes_documents_in_order(run_text, tmp_path):
    """A folder's in sorted order, then the others; the file that is named twice is read once."""
    documents = ["é", "".join(FRAGMENTS), "a\nb"]
    filler = "a word " * 1000  # whose end is held out, as no document is
    write(tmp_path, {  # in another order than they are read
        "my texts/z.txt": b"z",
        "my texts/b/c.NDJSON": b"\xef\xbb\xbf" + to_jsonl(documents[2:]),
        "my texts/a.JSONL": b"\n" + to_jsonl(documents[:2]),
        "notes.md": b"\xef\xbb\xbfline ends\r\nare kept\r\xef\xbb\xbf"})
    printed = run_text("--val_fraction", 1e-9, "my texts", "notes.md", "-",
                       tmp_path / "my texts" / "z.txt", stdin=filler.encode())
    train, val = read_splits(tmp_path / "out")
    assert read_documents(np.concatenate([train, val])) == [
        *documents, "z", "line ends\r\nare kept\r\ufeff", filler]
    assert f"{len(train):,} training and {len(val):,} validation" in printed
    assert "6 document(s); 0 without text" in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "text_train_000000.bin", "text_val_000000.bin"]


def test_text_of_a_folder_is_read_and_the_rest_counted(capsys, tmp_path):
    """Suffixes choose files of a folder, and not those that are named. A NUL is no text."""
    write(tmp_path, {
        "LICENSE": b"no suffix",
        "docs/a.MD": b"# \xc3\x9c\n",
        "late.py": LATE,
        "utf16.txt": "ascii".encode("utf-16-le"),
        "docs/.cache/a.md": b"hidden"})
    (tmp_path / "beside").mkdir()
    (tmp_path / "docs" / "linked").symlink_to(tmp_path / "beside")
    (tmp_path / "docs" / "to_nothing.md").symlink_to("/nowhere/at/all")
    named = [f"{tmp_path}/LICENSE", f"{tmp_path}/docs/a.MD"]
    assert text.find_files([str(tmp_path)], ("",)) == named
    assert capsys.readouterr().out.splitlines() == [
        f"1 file(s) skipped, as {tmp_path}/docs/linked: a link to a folder; name it as a PATH",
        f"1 file(s) skipped, as {tmp_path}/docs/to_nothing.md: no file",
        f"2 file(s) skipped, as {tmp_path}/late.py: {text.NO_TEXT}"]
    assert text.find_files([named[0], str(tmp_path)], (".md", ".json")) == named
    assert capsys.readouterr().out.splitlines()[2:] == [f"{tmp_path}: no text file ends in .json"]


@pytest.mark.parametrize("suffix", [".py, .md", ".MD,.py", ".py,.md,", ",.py,.md"])
def test_a_list_of_suffixes_may_have_spaces_and_commas(run_text, tmp_path, suffix):
    write(tmp_path, {"in/a.py": b"a " * 1000, "in/b.md": b"b " * 1000, "in/c.txt": b"c " * 1000})
    assert "2 document(s)" in run_text("--suffix", suffix, "in")


@pytest.mark.parametrize(("content", "is_json"), [
    ('PAR1 is a receptor', False), ("BZhang wrote it", False), ("%PDF-1.4 begins a PDF", False),
    ('["Attention is all you need"](https://arxiv.org)', False), ('["tool"]\nname = 1', False),
    ('{"text": "hello"} is what a request has', False), ('{"text": "a"}\n\nis one', False),
    ("[1, 2] and more", False), ('{"name": "a.package"}', False), ("\n \n", False),
    ('{"text": "a"}', True), ('{"text": "a\u2028b"}\n{"text": "c"}\n', True),
    ('["a", "b"]\n', True), ('[{"text": "a"},\n {"text": "b"}]', True),
    ('[{"text": "a"},\n' + 200_000 * '{"text": "b"},\n', True),  # longer than a block
    (200_000 * '{"text": "b"}\n', True), (200_000 * '["tool"]\nname = 1\n', False)])
def test_json_is_what_parses(tmp_path, content, is_json):
    """Texts may begin as files of other kinds do."""
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    assert ("JSON documents" in text.why_not_read(f"{tmp_path}/a.txt")) == is_json


def test_a_million_blanks_in_a_row_are_tokenized(gpt2):
    string = "x\n" + " " * 1_000_000 + "\ny"
    encode, bytes_of = text.load_tokenizer("gpt2")
    assert b"".join(map(bytes_of, encode(string).tolist())).decode() == string


def test_a_separator_is_found_across_blocks_unless_it_is_quoted(monkeypatch, tmp_path):
    write(tmp_path, {"code.py": b'END = "<|endoftext|>"\n', "json.py": b"[x for x in y]\n",
                     "two.txt": b"a story\n<|endoftext|>\nanother"})
    monkeypatch.setattr(text, "BLOCK_CHARS", 12)
    for name in "code.py", "json.py":
        assert text.why_not_read(f"{tmp_path}/{name}") == ""
    assert "<|endoftext|> between documents" in text.why_not_read(f"{tmp_path}/two.txt")


def test_too_little_memory_is_one_line():
    code = "import shards; shards.run(lambda: 'x' * 10**18)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO / "data", text=True,
                          capture_output=True)
    assert done.returncode == 2 and "out of memory" in done.stderr and done.stderr.count("\n") == 1


def test_the_documents_held_out_have_no_period(run_text, tmp_path):
    """Of texts of two kinds in turn, both are held out; documents without text do not count."""
    documents = [f"{'EN' if index % 2 else 'FR'} {index} {30 * 'words '}" for index in range(2000)]
    blank = [documents[index // 2] if index % 2 == 0 else " \n" for index in range(4000)]
    write(tmp_path, {"a.jsonl": to_jsonl(documents), "b.jsonl": to_jsonl(blank)})
    printed = run_text("b.jsonl", "--out", "from_b")
    assert "2,000 document(s); 2,000 without text left out" in printed
    run_text("a.jsonl")
    found = [list(map(read_documents, read_splits(tmp_path / out))) for out in ("out", "from_b")]
    assert found[0] == found[1]
    train, val = found[0]
    assert sorted(train + val) == sorted(documents)
    held_out = [document[:2] for document in val]
    assert abs(len(val) - 100) < 30 and abs(held_out.count("EN") - held_out.count("FR")) < 30


@pytest.mark.parametrize(("fraction", "length", "held_out"), [
    (0.25, 40_000, 10_000), (0.01, 3999, 129), (0.9, 3999, 927)])
def test_the_end_of_too_few_documents_is_held_out(run_text, tmp_path, fraction, length, held_out):
    """As large a part as asked for, but for what a side takes at least. One document that is too
    small to be validated on does not count."""
    parts = [("a word " * length)[: length - 3], "b"]  # and an end-of-text each
    write(tmp_path, {"a.jsonl": to_jsonl(parts)})
    printed = run_text("--val_fraction", fraction, "a.jsonl")
    train, val = read_splits(tmp_path / "out")
    documents = read_documents(np.concatenate([train, val]))
    assert sorted(documents) == sorted(parts) and abs(len(val) - held_out) <= 1
    assert "end of the text is for validation" in printed


@pytest.mark.parametrize("num_tokens", [100, 305])
def test_shards_are_full_at_most_and_none_is_short(tmp_path, monkeypatch, num_tokens):
    monkeypatch.setattr(text, "SHARD_TOKENS", 100)
    text.write_shards(tmp_path, "train", np.arange(num_tokens, dtype=np.uint16))
    parts = [read_shard(path) for path in sorted(tmp_path.iterdir())]
    assert np.concatenate(parts).tolist() == list(range(num_tokens))
    assert max(map(len, parts)) <= 100 and min(map(len, parts)) >= min(num_tokens, 50)


@pytest.fixture
def start_text(tmp_path):
    """Starts the script in a process of its own, which reads a pipe into `out`."""

    def start(limit="unlimited"):
        script = f"{sys.executable} {REPO}/data/text.py --tokenizer bytes --out out -"
        return subprocess.Popen(["bash", "-c", f"ulimit -f {limit}; exec {script}"], cwd=tmp_path,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)

    return start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_nothing_that_stays(start_text, run_text, tmp_path, number):
    with start_text() as process:
        # It reads no further than the pipe, which stays open, and writes what it has read.
        process.stdin.write(b"some words " * 1_000_000)
        process.send_signal(number)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == (143 if number == signal.SIGTERM else -number) and not errors
    assert any((tmp_path / "out").iterdir()) == (number == signal.SIGKILL)
    run_text("-", stdin=b"some words " * 1000)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin"}


def test_of_two_runs_at_once_the_second_waits_and_finds_the_shards(start_text, tmp_path):
    with start_text() as first:
        first.stdin.write(b"some words " * 1_000_000)
        while not list(tmp_path.glob("out/.text.partial/*")):
            time.sleep(0.01)
        with start_text() as second:
            said = second.stderr.readline()
            assert said == b"waiting for another process that writes into out\n"
            assert not first.communicate(timeout=PATIENCE)[1] and first.returncode == 0
            assert b"a shard of an earlier run" in second.communicate(timeout=PATIENCE)[1]
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin"}


def test_what_cannot_be_written_is_named(start_text, tmp_path):
    with start_text(limit=4) as process:
        _, errors = process.communicate(b"some words " * 1_000_000, timeout=PATIENCE)
    assert process.returncode == 2 and errors.count(b"\n") == 1
    assert errors.startswith(b"text.py: out/.text.partial: not written (File too large); make room")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(("args", "part"), [
    ("missing.txt", "missing.txt: no such file"),
    ("late.txt", "late.txt: not UTF-8 text; unpack it first (zcat FILE | ... -), or convert it"),
    ("text.gz", "text.gz: not UTF-8 text"),
    ("utf16.txt", "utf16.txt: not UTF-8 text"),
    ("binary.txt", "binary.txt: not UTF-8 text"),
    ("table.csv", "table.csv: a table; make a .jsonl"),
    ("array.json", "array.json: JSON documents; as lines they are read from a .jsonl"),
    ("texts.json", "texts.json: JSON documents"),
    ("lines.txt", "lines.txt: JSON documents"),
    ("stories.txt", "stories.txt: <|endoftext|> between documents; make a .jsonl"),
    ("a.txt --out link", "link: a link to /nowhere/at/all, which is not there; make"),
    ("a.txt syntax.jsonl", "syntax.jsonl:3: not a JSON object"),
    ("a.txt half.jsonl", "half.jsonl:3: not a JSON object"),
    ("-", "too little text to train on: 3,201 token(s), of 3,202 at least"),
    (". --suffix .c,.cpp", "./*.c,.cpp: no text file"),
    ("a.txt --val_fraction nan", "--val_fraction nan"),
    ("a.txt --out a.txt", "a.txt: File exists; choose another folder"),
    ("a.txt --out earlier", "earlier/text_train_000000.bin: a shard of an earlier run; remove"),
    ("a.txt --tokenizer gpt2", "TIKTOKEN_CACHE_DIR"),
    ("", "PATH")])
def test_bad_input_is_one_line_and_nothing_is_left(run_text, tmp_path, monkeypatch, args, part):
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: 1 / 0)  # without its files
    (tmp_path / "link").symlink_to("/nowhere/at/all")
    good = b'{"text": "good"}\n\n'
    write(tmp_path, {
        "a.txt": b"text " * 1000,
        "late.txt": LATE,
        "text.gz": gzip.compress(b"text " * 1000),
        "utf16.txt": ("text " * 1000).encode("utf-16"),
        "binary.txt": b"text " * 1000 + b"\0",
        "table.csv": b"id,text\n" + b"1,some words\n" * 1000,
        "array.json": b'\xef\xbb\xbf[' + b'{"text": "some words"},\n' * 999 + b"{}]",
        "texts.json": b'["text",\n' + b'"some words",\n' * 999 + b'""]',
        "lines.txt": b'{"id": 1, "text": "some words"}\n' * 999,
        "stories.txt": b"some words\n" * 30_000 + b"<|endoftext|>\n" + b"some words\n" * 999,
        "earlier/text_train_000000.bin": b"a shard",
        "syntax.jsonl": good + b'{"text": ',
        "half.jsonl": good + b'{"text": "\\ud800"}'})  # of a surrogate pair
    run_text(*args.split(), stdin=b"x" * 3200, refused=[part])
    assert not list(tmp_path.glob("out/*")) + list(tmp_path.glob("out/.*"))
    assert (tmp_path / "a.txt").read_bytes() == b"text " * 1000
    assert [path.read_bytes() for path in tmp_path.glob("earlier/*")] == [b"a shard"]


@pytest.mark.parametrize(("size", "val_tokens"), [
    (115_199, 5632), (3201, 128)])  # of 5760; of the least that is taken
def test_the_printed_command_trains_on_the_shards(run_text, tmp_path, capsys, size, val_tokens):
    """Also where they are shorter than the preset's validation sequences; on all of a document."""
    content = (b"some words of text\n" * 6100)[:size]
    printed = run_text("--out", "my [odd] folder", "-", stdin=content)
    said, command = printed.splitlines()[-2:]
    assert "without --preset pocket" in said
    record = command.replace("--preset pocket ", "")
    assert train_gpt.parse_args(shlex.split(record)[2:]).preset == "record"
    program, script, *flags = shlex.split(command)
    assert program == "python" and (tmp_path / script).resolve() == REPO / "train_gpt.py"
    assert int(flags[flags.index("--val_tokens") + 1]) == val_tokens
    assert flags[flags.index("--max_document_tokens") + 1] == "0"
    assert not train_gpt.main([*flags, "--num_iterations", "2", "--warmup_steps", "0"])
    assert "val_loss" in capsys.readouterr().out
