"""data/text.py: tokens that are the tokenizer's, shards, the validation draw, bad input.

The tests with the gpt2 tokenizer run where tiktoken finds its files (TIKTOKEN_CACHE_DIR), those
with parquet where pyarrow is installed.
"""

import functools
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
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gpt

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "data" / "text.py"
text = importlib.import_module("text")

END_OF_TEXT = {"bytes": 256, "gpt2": 50256}
# What GPT-2's pattern tells apart, and what could be taken for a special token or for a space.
FRAGMENTS = ["a", "Bc", "é", "中", "7", "12", "'", "'s", "'ll", " ", "  ", "\n", "\r\n", "\t",
             "\x1c", "\x85", "\xa0", "\u3000", ".", "!?", "<|endoftext|>", "🙂", "\0"]
NO_FIXTURE_STATE = settings(deadline=None,
                            suppress_health_check=[HealthCheck.function_scoped_fixture])


@functools.cache
def gpt2():
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:
        pytest.skip(f"no network and no TIKTOKEN_CACHE_DIR with the gpt2 files: {error!r:.60}")


def encode(tokenizer, string):
    return gpt2().encode_ordinary(string) if tokenizer == "gpt2" else list(string.encode())


def decode(tokenizer, tokens):
    return gpt2().decode(tokens) if tokenizer == "gpt2" else bytes(tokens).decode()


@pytest.fixture(params=["bytes", "gpt2"])
def tokenizer(request):
    if request.param == "gpt2":
        gpt2()
    return request.param


@pytest.fixture
def run_text(tmp_path, call_tool):
    """`run_text(*args)` runs the script in tmp_path, bytes into `out` where not told otherwise.

    It runs in this process, but for a changed environment and where it starts processes.
    """

    def run(*args, stdin=b"", **environment):
        args = [str(arg) for arg in args]
        alone = environment or "--processes" in args
        for flag, value in (("--tokenizer", "bytes"), ("--out", "out"), ("--processes", "1")):
            if flag not in args:
                args = [flag, value, *args]
        if not alone:
            return call_tool(text, args, tmp_path, stdin)
        result = subprocess.run([sys.executable, SCRIPT, *args], cwd=tmp_path, input=stdin,
                                capture_output=True, env={**os.environ, **environment},
                                timeout=120)
        result.stdout, result.stderr = result.stdout.decode(), result.stderr.decode()
        return result

    return run


def read_shards(folder, split):
    """The tokens of each shard of a split, their headers held against the published layout."""
    shards = []
    for path in sorted(folder.glob(f"*_{split}_*.bin")):
        header = np.fromfile(path, "<i4", 256)
        shards.append(np.fromfile(path, "<u2", offset=1024).tolist())
        assert header.tolist() == [20240520, 1, len(shards[-1])] + 253 * [0]
    return shards


def read_documents(folder, split, tokenizer="bytes"):
    """The texts of a split, each opened by end-of-text."""
    documents = []
    for token in sum(read_shards(folder, split), []):
        if token == END_OF_TEXT[tokenizer]:
            documents.append([])
        else:
            documents[-1].append(token)
    return [decode(tokenizer, tokens) for tokens in documents]


def write_jsonl(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": 1, "text": doc}) + "\n" for doc in documents))
    return path


def sample_documents(count, seed=0):
    """Distinct documents of random length, the first one empty."""
    generator = np.random.default_rng(seed)
    return [f"{index} " * (index > 0) + "".join(generator.choice(FRAGMENTS, generator.integers(80)))
            * (index > 0) for index in range(count)]


def assert_one_line(result, *parts):
    """The run ended with code 2 and a single line on stderr that has the parts."""
    assert result.returncode == 2, result
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for part in parts:
        assert str(part) in result.stderr


# -----------------------------------------------------------------------------
# Tokens
# -----------------------------------------------------------------------------


@NO_FIXTURE_STATE
@given(string=st.text(st.characters(exclude_categories=["Cs"])), block=st.integers(1, 20))
def test_bytes_come_back_whatever_the_text_and_the_block(string, block):
    assert_parts_are_the_text("bytes", string, block)


@NO_FIXTURE_STATE
@given(string=st.lists(st.sampled_from(FRAGMENTS), max_size=60).map("".join),
       block=st.integers(1, 20))
def test_tokens_of_the_parts_are_those_of_the_whole(tokenizer, string, block):
    assert_parts_are_the_text(tokenizer, string, block)


@pytest.mark.parametrize("block", [1, 2, 3])
def test_no_cut_falls_into_a_token(block):
    gpt2()
    for letters in itertools.product("a' \n", repeat=6):
        assert_parts_are_the_text("gpt2", "".join(letters), block)


@pytest.mark.parametrize("block", [1, 3, 50])
def test_a_text_is_cut_before_a_space_or_newline_alone(monkeypatch, block):
    """Before a tab, say, GPT-2's pattern takes a space with it, so that tokens would differ."""
    monkeypatch.setattr(text, "BLOCK_BYTES", block)
    string = "".join(map("".join, itertools.product(FRAGMENTS, repeat=2)))
    parts = [part for part in text.read_text(io.BytesIO(string.encode()), "-") if part]
    assert "".join(parts) == string and len(parts) > 3
    for before, after in itertools.pairwise(parts):
        assert not before[-1].isspace() and after[0] in " \n"


def assert_parts_are_the_text(tokenizer, string, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK_BYTES", block)
        parts = list(text.read_text(io.BytesIO(string.encode()), "-"))
    assert "".join(parts) == string
    pieces = [text.Piece(part, number == 0, False) for number, part in enumerate(parts)]
    train, val = text.tokenize(pieces, tokenizer)
    assert train.dtype == np.uint16 and len(val) == 0
    assert train.tolist() == [END_OF_TEXT[tokenizer], *encode(tokenizer, string)]
    assert decode(tokenizer, train[1:].tolist()) == string


def test_a_long_text_is_read_in_parts():
    words = b"some words of text\n" * 200_000
    parts = list(text.read_text(io.BytesIO(words), "-"))
    assert len(parts) > 2 and max(map(len, parts)) <= text.BLOCK_BYTES + 20


# -----------------------------------------------------------------------------
# Sources and documents
# -----------------------------------------------------------------------------


def test_folders_files_and_lines_become_documents_in_order(tokenizer, run_text, tmp_path):
    folder = tmp_path / "my texts"
    documents = sample_documents(20)
    documents[19] = documents[19].replace("\0", "")  # a file of a folder has none, a line may
    write_jsonl(folder / "b" / "a.jsonl", documents[1:19])
    (folder / "b" / "b.txt").write_bytes(documents[19].encode())
    (folder / "a.txt").write_bytes(documents[0].encode())
    (tmp_path / "notes.md").write_text("read where it is named")
    result = run_text("--tokenizer", tokenizer, "--val_fraction", 0, "--processes", 2,
                      folder, "notes.md", "-", stdin=b"typed in")
    assert result.returncode == 0, result.stderr
    expected = [*documents, "read where it is named", "typed in"]
    assert read_documents(tmp_path / "out", "train", tokenizer) == expected
    tokens = sum(read_shards(tmp_path / "out", "train"), [])
    assert tokens == [token for document in expected
                      for token in (END_OF_TEXT[tokenizer], *encode(tokenizer, document))]
    assert "22 document(s) of 5 file(s)" in result.stdout
    assert f"{len(tokens):,} training tokens" in result.stdout


def test_a_folder_is_read_in_sorted_order(run_text, tmp_path):
    names = [f"{folder}/{index}.txt" for folder in "ba" for index in range(9, 0, -1)]
    for name in names:
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_text(name)
    assert run_text("--val_fraction", 0, "f").returncode == 0
    assert read_documents(tmp_path / "out", "train") == sorted(names)


def test_a_file_named_twice_is_read_once(run_text, tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.txt").write_text("once")
    assert run_text("--val_fraction", 0, "f/a.txt", "f", tmp_path / "f" / "a.txt").returncode == 0
    assert read_documents(tmp_path / "out", "train") == ["once"]


def test_blank_lines_are_no_documents_and_line_ends_are_kept(run_text, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "a\\r\\n"}\r\n \n{"text": ""}')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfx\r\ny\r")
    assert run_text("--val_fraction", 0, "a.jsonl", "b.txt").returncode == 0
    assert read_documents(tmp_path / "out", "train") == ["a\r\n", "", "\ufeffx\r\ny\r"]


TEXTS_OF_A_FOLDER = {
    "LICENSE": "no suffix",
    "docs/a.md": "# Ü\n",
    "docs/b.json": "{}",
    "src/a.py": "print()\r\n",
    "src/b.py.gz": "x = 1\n",
    "src/c.txt": "a text\f",
}
SKIPPED_OF_A_FOLDER = {
    "image.png": b"\x89PNG\r\n\x1a\n",
    "late.txt": b"a" * 3_000_000 + b"\xff",  # after the blocks that are read first
    "latin1.py": "é".encode("latin-1"),
    "nul.tar.gz": b"ustar\0",
    "utf16.txt": "ascii".encode("utf-16-le"),  # valid UTF-8, but for its NULs no text
}
HIDDEN_IN_A_FOLDER = [".git/config", ".hidden.txt", "src/.cache/a.py"]


@pytest.fixture
def mixed_folder(tmp_path):
    """The folder `mixed`, with the texts, the files to skip, and hidden ones."""
    files = {name: string.encode() for name, string in TEXTS_OF_A_FOLDER.items()}
    files |= SKIPPED_OF_A_FOLDER | dict.fromkeys(HIDDEN_IN_A_FOLDER, b"hidden")
    for name, content in files.items():
        path = tmp_path / "mixed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return tmp_path / "mixed"


def test_all_text_of_a_folder_is_read_and_the_rest_counted(run_text, mixed_folder, tmp_path):
    result = run_text("--val_fraction", 0, "mixed")
    assert result.returncode == 0, result.stderr
    expected = [TEXTS_OF_A_FOLDER[name] for name in sorted(TEXTS_OF_A_FOLDER)]
    assert read_documents(tmp_path / "out", "train") == expected
    assert "6 document(s) of 6 file(s)" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if "skipped" in line]
    assert line.startswith("skipped 5 file(s)") and line.endswith("and 2 more")
    for name in sorted(SKIPPED_OF_A_FOLDER)[:3]:
        assert str(Path("mixed", name)) in line


@pytest.mark.parametrize(("suffix", "names", "skipped"), [
    (".py", ["src/a.py", "src/b.py.gz"], ["latin1.py"]),
    (".md,.json", ["docs/a.md", "docs/b.json"], []),
    (".py.gz", ["src/b.py.gz"], []),
])
def test_suffixes_choose_of_a_folder_alone(run_text, mixed_folder, tmp_path, suffix, names,
                                           skipped):
    result = run_text("--val_fraction", 0, "--suffix", suffix, "mixed", "mixed/LICENSE")
    assert result.returncode == 0, result.stderr
    expected = [TEXTS_OF_A_FOLDER[name] for name in [*names, "LICENSE"]]
    assert read_documents(tmp_path / "out", "train") == expected
    assert ("skipped" in result.stdout) == bool(skipped)
    assert all(name in result.stdout for name in skipped)


def test_a_binary_file_that_is_named_is_an_error(run_text, mixed_folder, tmp_path):
    assert_one_line(run_text("mixed/image.png"), "image.png", "byte 0")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_binary_files_alone_is_an_error(run_text, mixed_folder, tmp_path):
    assert_one_line(run_text("--suffix", ".png", "mixed"), "skipped 1 file(s)", "image.png")
    assert not (tmp_path / "out").exists()


def test_a_gz_is_read_as_what_is_in_it(tokenizer, run_text, tmp_path):
    documents = sample_documents(30)
    lines = write_jsonl(tmp_path / "plain.jsonl", documents).read_bytes()
    members = gzip.compress(lines[:500]) + gzip.compress(lines[500:])
    (tmp_path / "lines.jsonl.gz").write_bytes(members)
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(b"one text\n"))
    (tmp_path / "noname.gz").write_bytes(gzip.compress(b"another"))
    result = run_text("--tokenizer", tokenizer, "--val_fraction", 0,
                      "lines.jsonl.gz", "book.txt.gz", "noname.gz")
    assert result.returncode == 0, result.stderr
    expected = [*documents, "one text\n", "another"]
    assert read_documents(tmp_path / "out", "train", tokenizer) == expected


def damage_cut(content):
    return content[:len(content) // 2]


def damage_byte(content):
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]  # of the checksum


def damage_stream(content):
    return content[:10] + b"\xff" + content[11:]


def damage_magic(content):
    return b"text" + content


@pytest.mark.parametrize("damage", [damage_cut, damage_byte, damage_stream, damage_magic])
@pytest.mark.parametrize("name", ["folder/a.txt.gz", "folder/a.jsonl.gz"])
def test_a_damaged_gz_is_one_line(run_text, tmp_path, name, damage):
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(damage(gzip.compress(b'{"text": "a"}\n' * 1000)))
    for source in (name, "folder"):
        assert_one_line(run_text(source), name, "cut or damaged")
    assert not (tmp_path / "out").exists()


def test_the_progress_counts_each_file_s_bytes(tmp_path):
    content = b"some words of text\n" * 100_000
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    for path in (tmp_path / "a.txt", tmp_path / "a.txt.gz"):
        progress = text.Progress(None)
        sources = [text.Source(str(path), in_folder=True)]  # looked at first, but counted once
        pieces = list(text.read_pieces(sources, 0, progress))
        assert "".join(piece.text for piece in pieces).encode() == content
        assert progress.read_bytes == path.stat().st_size


# -----------------------------------------------------------------------------
# Parquet
# -----------------------------------------------------------------------------


@pytest.fixture
def write_parquet(tmp_path):
    """`write_parquet(name, columns, **options)` writes the columns, and skips without pyarrow."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(name, columns, **options):
        parquet.write_table(pyarrow.table(columns), tmp_path / name, **options)
        return tmp_path / name

    return write


def test_a_parquet_file_s_rows_are_documents(tokenizer, write_parquet, run_text, tmp_path):
    documents = sample_documents(500)
    columns = {"id": list(range(500)), "text": documents}
    write_parquet("a.parquet", columns, row_group_size=70, compression="gzip")
    result = run_text("--tokenizer", tokenizer, "--val_fraction", 0, "--processes", 2, "a.parquet")
    assert result.returncode == 0, result.stderr
    assert read_documents(tmp_path / "out", "train", tokenizer) == documents


def test_a_folder_s_parquet_is_read(write_parquet, run_text, tmp_path):
    (tmp_path / "f").mkdir()
    write_parquet("f/b.parquet", {"text": ["b", "c"]})
    (tmp_path / "f" / "a.txt").write_text("a")
    assert run_text("--val_fraction", 0, "f").returncode == 0
    assert read_documents(tmp_path / "out", "train") == ["a", "b", "c"]


@pytest.mark.parametrize(("columns", "parts"), [
    ({"txt": ["a"]}, ['no column "text"']),
    ({"text": [1, 2]}, ["int64"]),
    ({"text": ["a", None]}, ["row 2"]),
])
def test_a_parquet_file_without_texts_is_one_line(write_parquet, run_text, tmp_path, columns,
                                                  parts):
    write_parquet("bad.parquet", columns)
    assert_one_line(run_text("bad.parquet"), "bad.parquet", *parts)
    assert not (tmp_path / "out").exists()


def test_a_row_that_is_not_utf_8_is_named(write_parquet, run_text):
    import pyarrow

    offsets, data = (pyarrow.py_buffer(np.array(values)) for values in
                     (np.array([0, 1, 2], np.int32), np.frombuffer(b"a\xff", np.uint8)))
    strings = pyarrow.StringArray.from_buffers(2, offsets, data)
    write_parquet("bad.parquet", {"text": strings})
    assert_one_line(run_text("bad.parquet"), "bad.parquet", "row 2", "UTF-8")


@pytest.mark.parametrize("damage", [damage_cut, lambda content: b"PAR1",
                                    lambda content: content[:30] + bytes(40) + content[70:]])
def test_a_damaged_parquet_is_one_line(write_parquet, run_text, tmp_path, damage):
    path = write_parquet("bad.parquet", {"text": sample_documents(200)})
    path.write_bytes(damage(path.read_bytes()))
    assert_one_line(run_text("bad.parquet"), "bad.parquet", "not a whole parquet file")
    assert not (tmp_path / "out").exists()


def test_parquet_without_pyarrow_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(text.importlib.util, "find_spec", lambda name: None)
    for path in (tmp_path / "a.parquet", tmp_path):
        with pytest.raises(text.DataError, match="a.parquet: .*pip install pyarrow"):
            text.find_sources([str(path)], ())
    (tmp_path / "b.txt").write_text("b")
    (source,) = text.find_sources([str(tmp_path)], (".txt",))
    assert source.path == str(tmp_path / "b.txt")


# -----------------------------------------------------------------------------
# Validation draw
# -----------------------------------------------------------------------------


def test_the_draw_is_a_spread_partition_that_later_documents_leave_alone(run_text, tmp_path):
    documents = [f"document {index}" for index in range(2000)]
    write_jsonl(tmp_path / "all.jsonl", documents)
    write_jsonl(tmp_path / "first.jsonl", documents[:700])
    for name in ("all", "first"):
        assert run_text("--val_fraction", 0.1, "--out", name, f"{name}.jsonl").returncode == 0
    train, val = (read_documents(tmp_path / "all", split) for split in ("train", "val"))
    assert sorted(train + val) == sorted(documents) and not set(train) & set(val)
    assert train == sorted(train, key=documents.index) and val == sorted(val, key=documents.index)
    # 200 of 2000 with a standard deviation of 13, in either half too.
    indices = np.array([documents.index(document) for document in val])
    assert 140 <= len(indices) <= 260 and 60 <= (indices < 1000).sum() <= 140
    assert np.unique(np.diff(indices)).size > 10
    assert read_documents(tmp_path / "first", "val") == [d for d in val if d in documents[:700]]


@pytest.mark.parametrize(("fraction", "split"), [(0, "train"), (1, "val")])
def test_a_fraction_of_0_or_1_makes_one_split(run_text, tmp_path, fraction, split):
    write_jsonl(tmp_path / "a.jsonl", ["a", "b"])
    assert run_text("--val_fraction", fraction, "a.jsonl").returncode == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"text_{split}_000000.bin"]
    assert read_documents(tmp_path / "out", split) == ["a", "b"]


@pytest.mark.parametrize("length", [40, 1000, 3999])
def test_the_end_of_a_single_document_is_for_validation(run_text, tmp_path, length):
    string = "".join(chr(97 + index % 26) for index in range(length))
    (tmp_path / "a.txt").write_text(string)
    result = run_text("--val_fraction", 0.25, "--shard_tokens", 500, "a.txt")
    assert result.returncode == 0, result.stderr
    train, val = (sum(read_shards(tmp_path / "out", split), []) for split in ("train", "val"))
    assert train[0] == 256 and val[0] == 256 and 256 not in train[1:] + val[1:]
    assert decode("bytes", train[1:] + val[1:]) == string
    assert abs(len(val) - 1 - length / 4) <= 1


# -----------------------------------------------------------------------------
# Shards
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("shard_tokens", [1, 97, 500])
def test_shards_are_full_but_the_last_and_join_to_the_corpus(run_text, tmp_path, shard_tokens):
    documents = sample_documents(8 if shard_tokens == 1 else 60)
    write_jsonl(tmp_path / "a.jsonl", documents)
    assert run_text("--val_fraction", 0.3, "--out", "one", "a.jsonl").returncode == 0
    assert run_text("--val_fraction", 0.3, "--out", "many", "--shard_tokens", shard_tokens,
                    "a.jsonl").returncode == 0
    for split in ("train", "val"):
        (whole,) = read_shards(tmp_path / "one", split)
        shards = read_shards(tmp_path / "many", split)
        assert sum(shards, []) == whole
        assert len(shards) > 1
        assert all(len(shard) == shard_tokens for shard in shards[:-1])
        assert 1 <= len(shards[-1]) <= shard_tokens


@pytest.mark.parametrize("num_tokens", [100, 150, 199, 200, 201, 239, 240, 241, 305])
def test_a_rest_too_short_to_train_on_shares_with_the_shard_before(tmp_path, monkeypatch,
                                                                   num_tokens):
    monkeypatch.setattr(text, "MIN_SHARD_TOKENS", 40)
    writer = text.ShardWriter(tmp_path, "train", 100)
    for part in np.array_split(np.arange(num_tokens, dtype=np.uint16), 7):
        writer.append(part)
    writer.close()
    shards = read_shards(tmp_path, "train")
    assert sum(shards, []) == list(range(num_tokens))
    assert all(40 <= len(shard) <= 100 for shard in shards)
    assert len(shards) == -(-num_tokens // 100)


def test_tasks_keep_their_order_and_few_are_under_way():
    taken = []
    results = text.map_in_order(str, (taken.append(item) or item for item in range(50)), 3)
    assert next(results) == "0"
    assert len(taken) <= 3 * 3
    assert list(results) == [str(item) for item in range(1, 50)]


def test_one_and_three_processes_write_the_same_bytes(run_text, tmp_path):
    (tmp_path / "a.txt").write_bytes(" ".join(sample_documents(400) * 60).encode())
    write_jsonl(tmp_path / "b.jsonl", sample_documents(400, seed=1) * 10)
    assert (tmp_path / "a.txt").stat().st_size > 2 * text.BATCH_CHARS  # several tasks
    for processes in (1, 3):
        result = run_text("--processes", processes, "--out", processes, "--shard_tokens", 100_000,
                          "a.txt", "b.jsonl")
        assert result.returncode == 0, result.stderr
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(names) > 5 and names == sorted(path.name for path in (tmp_path / "3").iterdir())
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes()


# -----------------------------------------------------------------------------
# Whole or not at all
# -----------------------------------------------------------------------------


BAD_LINES = {
    "no JSON": b'{"text": ',
    "no object": b"[1]",
    "no string": b'{"text": 1}',
    "no field": b'{"txt": "a"}',
    "not UTF-8": b'{"text": "\xff"}',
    "no text": b'{"text": "\\ud800"}',
    "too deep": b'{"text": ' + 10_000 * b"[",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_and_nothing_is_left(run_text, tmp_path, line):
    write_jsonl(tmp_path / "good.jsonl", sample_documents(50))
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    assert_one_line(run_text("good.jsonl", "bad.jsonl"), "bad.jsonl:3")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"abc \xff def", b"ab\xc3", b"\xed\xa0\x80"])
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_a_byte_that_is_not_utf_8_is_named(monkeypatch, content, block):
    monkeypatch.setattr(text, "BLOCK_BYTES", block)
    with pytest.raises(UnicodeDecodeError) as error:
        content.decode()
    with pytest.raises(text.DataError, match=f"some.txt.*byte {error.value.start};"):
        list(text.read_text(io.BytesIO(content), "some.txt"))


def test_an_error_leaves_the_earlier_shards(run_text, tmp_path):
    (tmp_path / "a.txt").write_text("first " * 100)
    (tmp_path / "b.txt").write_text("second " * 100)
    (tmp_path / "bad.txt").write_bytes(b"third \xff")
    assert run_text("a.txt").returncode == 0

    def contents():
        return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    first = contents()
    assert_one_line(run_text("b.txt"), "out", "--overwrite")
    assert_one_line(run_text("--overwrite", "b.txt", "bad.txt"), "bad.txt")
    assert contents() == first
    result = run_text("--overwrite", "--val_fraction", 0, "b.txt")
    assert result.returncode == 0, result.stderr
    assert read_documents(tmp_path / "out", "train") == ["second " * 100]
    assert list(contents()) == ["text_train_000000.bin"]  # no validation shard of the first run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_leaves_nothing(tmp_path, number, code):
    command = [sys.executable, SCRIPT, "--tokenizer", "bytes", "--out", "out", "--processes", "2",
               "-"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE,
                               stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        # More than the tasks under way, so that shards are being written when the signal comes.
        process.stdin.write(b"some words " * 1_000_000)
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("out/.partial-*/*.bin")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(tmp_path.glob("out/.partial-*/*.bin"))
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code
    assert b"Traceback" not in errors and len(errors.splitlines()) <= 1
    assert not (tmp_path / "out").exists()


# -----------------------------------------------------------------------------
# Flags
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(("args", "part"), [
    (["missing.txt"], "missing.txt"),
    (["empty"], "empty"),
    (["blank.jsonl"], "blank.jsonl"),
    (["a.txt", "--tokenizer", "bpe"], "bpe"),
    (["a.txt", "--val_fraction", "1.5"], "1.5"),
    (["a.txt", "--val_fraction", "nan"], "nan"),
    (["a.txt", "--shard_tokens", "0"], "shard_tokens"),
    (["a.txt", "--suffix", "py,.md"], "'py'"),
    (["a.txt", "--suffix", ".py,"], "''"),
    (["texts", "--suffix", ".py,.md"], "texts: no .py or .md file"),
    (["a.txt", "--processes", "two"], "two"),
    (["a.txt", "--wrong", "1"], "--wrong"),
    (["a.txt", "--out", "a.txt"], "a.txt"),
    (["pipe"], "pipe: no regular file but a pipe or a device; to read a pipe, give - and < pipe"),
    (["/dev/zero"], "/dev/zero: no regular file"),
    ([], "PATH"),
])
def test_bad_input_is_one_line(run_text, tmp_path, args, part):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "py").write_text("text")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    assert_one_line(run_text(*args), part)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "a.txt").read_text() == "text"


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_standard_input_without_an_end_is_refused(monkeypatch, device):
    with open(device) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(text.DataError, match="standard input: a device"):
            text.find_sources(["-"], ())


def test_a_pipe_is_read_on_standard_input(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--tokenizer", "bytes", "--out", "out", "-",
                           "--val_fraction", "0"], cwd=tmp_path, input=b"piped", check=True)
    assert done.returncode == 0 and read_documents(tmp_path / "out", "train") == ["piped"]


def test_tiktoken_without_its_files_is_one_line(run_text, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "cache").mkdir()
    result = run_text("--tokenizer", "gpt2", "a.txt", TIKTOKEN_CACHE_DIR=str(tmp_path / "cache"),
                      HTTPS_PROXY="http://127.0.0.1:1", https_proxy="http://127.0.0.1:1")
    assert_one_line(result, "TIKTOKEN_CACHE_DIR", "--tokenizer bytes")
    assert not (tmp_path / "out").exists()


def test_the_printed_command_trains_on_the_shards(run_text, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some words of text\n" * 6000)
    result = run_text("--out", "my [odd] folder", "a.txt")
    assert result.returncode == 0, result.stderr
    program, script, *flags = shlex.split(result.stdout.splitlines()[-1])
    assert program == "python" and (tmp_path / script).resolve() == REPO / "train_gpt.py"
    val_tokens = int(flags[flags.index("--val_tokens") + 1])
    total = sum(map(len, read_shards(tmp_path / "my [odd] folder", "val")))
    assert val_tokens % 128 == 0 and total - 129 < val_tokens < total
    assert not train_gpt.main([*flags, "--num_iterations", "1", "--warmup_steps", "0"])
    assert "val_loss" in capsys.readouterr().out


def test_too_little_text_to_validate_on_is_said(run_text, tmp_path):
    result = run_text("-", stdin=b"a few words")
    assert result.returncode == 0
    assert "too few validation tokens" in result.stdout and "train_gpt.py" not in result.stdout
