"""data/text.py: tokens that are the tokenizer's, shards, the validation draw, bad input.

The tests with the gpt2 tokenizer run where tiktoken finds its files (TIKTOKEN_CACHE_DIR).
"""

import gzip
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
import pyarrow
import pytest
import tiktoken
from conftest import REPO, read_shard
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

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
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(f"no network and no TIKTOKEN_CACHE_DIR with the gpt2 files: {error!r:.60}")
    return SimpleNamespace(name="gpt2", end_of_text=50256, encode=gpt2.encode_ordinary,
                           decode=gpt2.decode)


@pytest.fixture
def run_text(tmp_path, call_tool):
    """`run_text(*args)` runs the script in tmp_path, bytes into `out`; what it printed. With
    `refused`, it has to end with code 2 and one line that has these parts."""

    def run(*args, stdin=b"", refused=()):
        defaults = ["--tokenizer", "bytes", "--out", "out", "--processes", "1"]
        done = call_tool(text, [*defaults, *args], tmp_path, stdin)
        assert done.returncode == (2 if refused else 0), done.stderr
        assert not refused or done.stderr.count("\n") == 1, done.stderr
        assert all(part in done.stderr for part in refused), done.stderr
        return done.stdout

    return run


def read_shards(folder, split):
    return [read_shard(path).tolist() for path in sorted(folder.glob(f"*_{split}_*.bin"))]


def read_documents(folder, split, tokenizer=BYTES):
    """The texts of a split, each opened by end-of-text."""
    tokens = np.array(sum(read_shards(folder, split), []))
    none, *parts = np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_text))
    assert not len(none)
    return [tokenizer.decode(part[1:].tolist()) for part in parts]


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def to_jsonl(documents, end="\n"):
    return "".join(json.dumps({"id": 1, "text": doc}) + end for doc in documents).encode()


def to_parquet(columns, **options):
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), stream, **options)
    return stream.getvalue()


def sample_documents(count):
    """Distinct documents of random length, the first one empty."""
    draw = np.random.default_rng(0)
    return ["", *(f"{index} " + "".join(draw.choice(FRAGMENTS, draw.integers(80)))
                  for index in range(1, count))]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(string=STRINGS, block=st.integers(1, 20))
@example(string=PAIRS, block=50)
def test_tokens_of_the_parts_are_those_of_the_whole(tokenizer, string, block):
    """A cut is before a space or newline alone: a tab takes a space before it into its token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK_BYTES", block)
        parts = list(text.read_text(io.BytesIO(string.encode()), "-"))
    assert "".join(parts) == string and (len(parts) > 9 or string != PAIRS)
    for before, after in itertools.pairwise(filter(None, parts)):
        assert not before[-1].isspace() and after[0] in " \n"
    pieces = [text.Piece(part, number == 0, False) for number, part in enumerate(parts)]
    train, val = text.tokenize(pieces, tokenizer.name)
    assert train.dtype == np.uint16 and len(val) == 0
    assert train.tolist() == [tokenizer.end_of_text, *tokenizer.encode(string)]


def test_every_kind_of_file_becomes_documents_in_order(tokenizer, run_text, tmp_path):
    """A folder's in sorted order, then the others; the file that is named twice is read once."""
    documents = sample_documents(80)
    lines = to_jsonl(documents[:20])
    rows = {"id": list(range(20)), "text": documents[40:60]}
    write(tmp_path, {  # in another order than they are read
        "my texts/z.txt": b"",
        "my texts/b/d.parquet": to_parquet(rows, row_group_size=7, compression="gzip"),
        "my texts/b/c.jsonl.gz": gzip.compress(lines[:500]) + gzip.compress(lines[500:]),
        "my texts/b/b.txt.gz": gzip.compress(b"one text\n"),
        "my texts/a.jsonl": b"\n" + to_jsonl(documents[20:40], end="\r\n \n"),
        "notes.md": b"\xef\xbb\xbfline ends\r\nare kept\r",
        "noname.gz": gzip.compress(b"another")})
    printed = run_text("--tokenizer", tokenizer.name, "--val_fraction", 0, "my texts", "notes.md",
                       "noname.gz", "-", tmp_path / "my texts" / "z.txt", stdin=b"typed in")
    assert read_documents(tmp_path / "out", "train", tokenizer) == [
        *documents[20:40], "one text\n", *documents[:20], *documents[40:60], "",
        "\ufeffline ends\r\nare kept\r", "another", "typed in"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["text_train_000000.bin"]
    assert "65 document(s) of 8 file(s)" in printed
    assert f"{sum(map(len, read_shards(tmp_path / 'out', 'train'))):,} training tokens" in printed


TEXTS = {"LICENSE": b"no suffix", "docs/a.md": b"# \xc3\x9c\n", "docs/b.json": b"{}",
         "src/a.py": b"print()\r\n", "src/b.py.gz": b"x = 1\n", "src/c.txt": b"a text\f"}
NO_TEXTS = {
    "image.png": b"\x89PNG\r\n\x1a\n",
    "late.txt": b"a" * 3_000_000 + b"\xff",  # after the blocks that are read first
    "latin1.py": b"\xe9",
    "nul.tar.gz": b"ustar\0",
    "utf16.txt": "ascii".encode("utf-16-le"),  # valid UTF-8, but for its NULs no text
}
HIDDEN = dict.fromkeys([".git/config", ".hidden.txt", "src/.cache/a.py"], b"hidden")


@pytest.fixture
def mixed_folder(tmp_path):
    """The folder `mixed`, with the texts, the files to skip, and hidden ones."""
    files = TEXTS | NO_TEXTS | HIDDEN
    for name in ("src/b.py.gz", "nul.tar.gz"):
        files[name] = gzip.compress(files[name])
    write(tmp_path / "mixed", files)


@pytest.mark.parametrize(("suffix", "names", "skipped"), [
    ("", list(TEXTS), ["skipped 5 file(s)", *list(NO_TEXTS)[:3], "and 2 more"]),
    (".py", ["LICENSE", "src/a.py", "src/b.py.gz"], ["skipped 1 file(s)", "mixed/latin1.py"]),
    (".md,.json", ["LICENSE", "docs/a.md", "docs/b.json"], []),
    (".py.gz", ["LICENSE", "src/b.py.gz"], [])])
def test_text_of_a_folder_is_read_and_the_rest_counted(run_text, mixed_folder, tmp_path, suffix,
                                                       names, skipped):
    """Suffixes choose files of a folder, and not those that are named."""
    flags = ["--suffix", suffix] if suffix else []
    printed = run_text("--val_fraction", 0, *flags, "mixed/LICENSE", "mixed")
    assert read_documents(tmp_path / "out", "train") == [TEXTS[name].decode() for name in names]
    assert f"{len(names)} document(s) of {len(names)} file(s)" in printed
    assert ("skipped" in printed) == bool(skipped) and all(part in printed for part in skipped)


def test_parquet_without_pyarrow_is_one_line(monkeypatch, tmp_path):
    write(tmp_path, {"a.parquet": b"PAR1", "b.txt": b"b"})
    monkeypatch.setattr(text.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(text.DataError, match="a.parquet: .*pip install pyarrow"):
        text.find_sources([str(tmp_path)], ())
    assert len(text.find_sources([str(tmp_path)], (".txt",))) == 1


def test_the_draw_is_a_spread_partition_that_later_documents_leave_alone(run_text, tmp_path):
    documents = [f"document {index}" for index in range(2000)]
    for name, count in (("all", 2000), ("first", 700)):
        write(tmp_path, {f"{name}.jsonl": to_jsonl(documents[:count])})
        run_text("--val_fraction", 0.1, "--out", name, f"{name}.jsonl")
    train, val = (read_documents(tmp_path / "all", split) for split in ("train", "val"))
    assert train == [d for d in documents if d not in val]
    assert val == [d for d in documents if d not in train]
    # 200 of 2000 with a standard deviation of 13, in either half too.
    indices = np.array([documents.index(document) for document in val])
    assert 140 <= len(indices) <= 260 and 60 <= (indices < 1000).sum() <= 140
    assert np.unique(np.diff(indices)).size > 10
    assert read_documents(tmp_path / "first", "val") == [d for d in val if d in documents[:700]]


@pytest.mark.parametrize("length", [40, 1000, 3999])
def test_the_end_of_a_single_document_is_for_validation(run_text, tmp_path, length):
    string = "".join(chr(97 + index % 26) for index in range(length))
    run_text("--val_fraction", 0.25, "--shard_tokens", 500, "-", stdin=string.encode())
    train, val = (sum(read_shards(tmp_path / "out", split), []) for split in ("train", "val"))
    assert train[0] == 256 and val[0] == 256 and bytes(train[1:] + val[1:]).decode() == string
    assert abs(len(val) - 1 - length / 4) <= 1


def test_processes_and_lengths_of_shards_do_not_change_the_tokens(run_text, tmp_path):
    """Shards are full but the last, and three processes write the same bytes as one."""
    write(tmp_path, {"a.txt": " ".join(sample_documents(400) * 60).encode(),  # several tasks
                     "b.jsonl": to_jsonl(sample_documents(400) * 10)})
    for out, processes, length in (("a", 1, 100_000), ("b", 3, 100_000), ("c", 1, 10**8)):
        run_text("--processes", processes, "--out", out, "--shard_tokens", length, "a.txt",
                 "b.jsonl")
    for split, least in (("train", 5), ("val", 0)):
        (whole,) = read_shards(tmp_path / "c", split)
        shards = read_shards(tmp_path / "a", split)
        assert shards == read_shards(tmp_path / "b", split) and sum(shards, []) == whole
        assert [len(shard) for shard in shards[:-1]] == [100_000] * (len(whole) // 100_000)
        assert len(shards) > least


@pytest.mark.parametrize("num_tokens", [100, 150, 199, 200, 201, 239, 240, 241, 305])
def test_a_rest_too_short_to_train_on_shares_with_the_shard_before(tmp_path, monkeypatch,
                                                                   num_tokens):
    monkeypatch.setattr(text, "MIN_SHARD_TOKENS", 40)
    writer = text.ShardWriter(tmp_path, "train", 100)
    for part in np.array_split(np.arange(num_tokens, dtype=np.uint16), 7):
        writer.append(part)
    writer.close()
    shards = read_shards(tmp_path, "train")
    assert sum(shards, []) == list(range(num_tokens)) and len(shards) == -(-num_tokens // 100)
    assert all(40 <= len(shard) <= 100 for shard in shards)


GZ = gzip.compress(b'{"text": "a"}\n' * 1000)
PARQUET = to_parquet({"text": sample_documents(200)})
NOT_UTF_8 = pyarrow.StringArray.from_buffers(
    2, pyarrow.py_buffer(np.array([0, 1, 2], np.int32)), pyarrow.py_buffer(b"a\xff"))
GOOD = b'{"text": "good"}\n\n'
BAD_FILES = {  # name of the file: what is in it, what is said
    "cut.jsonl.gz": (GZ[:len(GZ) // 2], "cut or damaged"),
    "checksum.txt.gz": (GZ[:-5] + bytes([GZ[-5] ^ 1]) + GZ[-4:], "cut or damaged"),
    "stream.txt.gz": (GZ[:10] + b"\xff" + GZ[11:], "cut or damaged"),
    "cut.parquet": (PARQUET[:len(PARQUET) // 2], "not a whole parquet file"),
    "zeros.parquet": (PARQUET[:30] + bytes(40) + PARQUET[70:], "not a whole parquet file"),
    "no column.parquet": (to_parquet({"txt": ["a"]}), 'no column "text"'),
    "numbers.parquet": (to_parquet({"text": [1, 2]}), "int64"),
    "no value.parquet": (to_parquet({"text": ["a", None]}), 'row 2 has no "text"'),
    "not UTF-8.parquet": (to_parquet({"text": NOT_UTF_8}), "row 2 is not UTF-8"),
    "no JSON.jsonl": (GOOD + b'{"text": ', "no JSON.jsonl:3:"),
    "no object.jsonl": (GOOD + b"[1]", "no object.jsonl:3:"),
    "no string.jsonl": (GOOD + b'{"text": 1}', "no string.jsonl:3:"),
    "no field.jsonl": (GOOD + b'{"txt": "a"}', "no field.jsonl:3:"),
    "not UTF-8.jsonl": (GOOD + b'{"text": "\xff"}', "not UTF-8.jsonl:3:"),
    "no text.jsonl": (GOOD + b'{"text": "\\ud800"}', "no text.jsonl:3:"),
    "too deep.jsonl": (GOOD + b'{"text": ' + 10_000 * b"[", "too deep.jsonl:3:")}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_and_nothing_is_left(run_text, tmp_path, name):
    content, said = BAD_FILES[name]
    write(tmp_path, {"folder/a.jsonl": to_jsonl(sample_documents(50)), f"folder/{name}": content})
    for source in (f"folder/{name}", "folder"):
        run_text("folder/a.jsonl", source, refused=[f"folder/{name}", said])
    assert not (tmp_path / "out").exists()


def test_an_error_leaves_the_earlier_shards(run_text, tmp_path):
    def contents():
        return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    write(tmp_path, {"b.txt": b"second " * 100, "bad.txt": b"third \xff"})
    run_text("-", stdin=b"first " * 100)
    first = contents()
    run_text("b.txt", refused=["out", "--overwrite"])
    run_text("--overwrite", "b.txt", "bad.txt", refused=["bad.txt"])
    assert contents() == first
    run_text("--overwrite", "--val_fraction", 1, "b.txt")
    assert list(contents()) == ["text_val_000000.bin"]  # no training shard of the first run
    assert read_documents(tmp_path / "out", "val") == ["second " * 100]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_leaves_nothing(tmp_path, number, code):
    command = [sys.executable, REPO / "data" / "text.py", "--tokenizer", "bytes", "--out", "out",
               "--processes", "2", "-"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                          stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            # More than the tasks under way, so that shards are being written at the signal.
            process.stdin.write(b"some words " * 1_000_000)
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob("out/.partial-*/*.bin")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            # Ctrl-C reaches the processes that tokenize too.
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code and not (tmp_path / "out").exists()
    assert b"Traceback" not in errors and len(errors.splitlines()) <= 1


@pytest.mark.parametrize(("args", "parts"), [
    ("missing.txt", ["missing.txt"]),
    ("mixed/image.png", ["image.png", "byte 0"]),
    ("mixed/late.txt", ["late.txt", "byte 3000000;"]),
    ("mixed --suffix .png", ["skipped 1 file(s)", "image.png"]),
    ("mixed --suffix .c,.cpp", ["mixed: no .c or .cpp file"]),
    ("a.txt --suffix py,.md", ["'py'"]),
    ("a.txt --val_fraction 1.5", ["1.5"]),
    ("a.txt --val_fraction nan", ["nan"]),
    ("a.txt --shard_tokens 0", ["shard_tokens"]),
    ("a.txt --out a.txt", ["a.txt"]),
    ("pipe", ["pipe: no regular file but a pipe", "give - and < pipe"]),
    ("", ["PATH"])])
def test_bad_input_is_one_line(run_text, mixed_folder, tmp_path, args, parts):
    write(tmp_path, {"a.txt": b"text", "mixed/cpp": b"no suffix"})
    os.mkfifo(tmp_path / "pipe")
    run_text(*args.split(), refused=parts)
    assert not (tmp_path / "out").exists() and (tmp_path / "a.txt").read_text() == "text"


def test_standard_input_without_an_end_is_refused(monkeypatch):
    with open("/dev/zero") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(text.DataError, match="standard input: a device"):
            text.find_sources(["-"], ())


def test_tiktoken_without_its_files_is_one_line(run_text, tmp_path, monkeypatch):
    text.load_tokenizer.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    run_text("--tokenizer", "gpt2", "-", stdin=b"text",
             refused=["ZeroDivisionError", "TIKTOKEN_CACHE_DIR", "--tokenizer bytes"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("size", "blocks"), [(115_179, 45), (51_179, 20), (11, 0)])
def test_the_printed_command_trains_on_the_shards(run_text, tmp_path, capsys, size, blocks):
    """Also where they are shorter than the preset's validation sequences, if not by too much."""
    content = (b"some words of text\n" * 6100)[:size]
    printed = run_text("--out", "my [odd] folder", "-", stdin=content)
    if not blocks:
        assert "too few validation tokens" in printed and "train_gpt.py" not in printed
        return
    program, script, *flags = shlex.split(printed.splitlines()[-1])
    assert program == "python" and (tmp_path / script).resolve() == REPO / "train_gpt.py"
    val_tokens = int(flags[flags.index("--val_tokens") + 1])
    total = sum(map(len, read_shards(tmp_path / "my [odd] folder", "val")))
    # All but one block, as each sequence has one more token, its last target.
    assert total == blocks * 128 and val_tokens == (blocks - 1) * 128
    assert not train_gpt.main([*flags, "--num_iterations", "1", "--warmup_steps", "0"])
    assert "val_loss" in capsys.readouterr().out
