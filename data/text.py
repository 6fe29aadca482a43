"""Turn text of any size into token shards to train on.

    python data/text.py --tokenizer gpt2|bytes --out DIR PATH...

A PATH is a text file, source code or Markdown as well, which is one document; a .jsonl file, of
which each line is an object with the document in its field "text"; a .parquet file, with the
documents in its column "text" (wants pyarrow); a text or .jsonl file compressed as .gz; a folder,
of which all of these are read that are not hidden, and what is no UTF-8 text is skipped and
counted; or - for the standard input, which is one document of plain text.
"""

import argparse
import codecs
import functools
import glob
import gzip
import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import stat
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from shards import (
    HEADER_BYTES,
    TOKEN_DTYPE,
    DataError,
    Parser,
    encode_header,
    read_header,
    run,
    write_shard,
)

END_OF_TEXT = {"gpt2": 50256, "bytes": 256}  # also the last id of its vocabulary
TEXT_FIELD = "text"  # of a line of .jsonl, and the column of .parquet
STDIN = "-"
BLOCK_BYTES = 1 << 20  # read at a time
BATCH_CHARS = 1 << 20  # tokenized in one task
MIN_SHARD_TOKENS = 1 << 19  # the trainer wants a step in each shard; the record's is smaller
SKIPPED_SHOWN = 3  # skipped files that are named
PRESET_VAL_TOKENS = 262_144  # what the pocket preset validates on
PRESET_VAL_SEQ_LEN = 4096  # in sequences of so many tokens
BLOCK_TOKENS = 128  # val_tokens is a multiple of it

# No GPT-2 token spans a place between a non-space and a space or newline, so that the tokens of
# the parts are those of the whole. Greedy: the last such place.
LAST_CUT = re.compile(r"(?s:.*)\S(?=[ \n])")


class Source(NamedTuple):
    """A file to read, or the standard input."""

    path: str
    in_folder: bool  # found there, not named by the user: it may be anything

    @property
    def is_gzip(self) -> bool:
        return self.path.endswith(".gz")

    @property
    def is_parquet(self) -> bool:
        return self.path.endswith(".parquet")

    @property
    def is_jsonl(self) -> bool:
        return self.path.removesuffix(".gz").endswith(".jsonl")

    @property
    def name(self) -> str:
        return "standard input" if self.path == STDIN else self.path


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    opens_document: bool
    validation: bool


class Progress:
    """One line on the terminal: how much is read, tokens, speed, time left."""

    def __init__(self, total_bytes: int | None):
        self.total_bytes = total_bytes
        self.read_bytes = self.documents = self.tokens = 0
        self.skipped: list[Source] = []
        self.start = self.shown = time.monotonic()

    def show(self) -> None:
        """Rewrite the line, a few times a second."""
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self.shown < 0.2:
            return
        self.shown, rate = now, self.read_bytes / (now - self.start)
        share = left = ""
        if self.total_bytes:
            share = f"{self.read_bytes / self.total_bytes:4.0%}  "
            left = f"  {(self.total_bytes - self.read_bytes) / rate:,.0f} s left"
        print(f"\r{share}{self.read_bytes / 1e6:,.0f} MB  {self.tokens:,} tokens  "
              f"{rate / 1e6:.1f} MB/s{left}\033[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class CountedFile(io.FileIO):
    """A file that tells the progress what is read of it, before any decompression."""

    def __init__(self, file: str | int, progress: Progress):
        super().__init__(file, closefd=not isinstance(file, int))
        self.progress = progress

    def readinto(self, buffer) -> int:
        count = super().readinto(buffer)
        self.progress.read_bytes += count
        return count


class ShardWriter:
    """Append tokens to folder/text_<split>_NNNNNN.bin, a new file every shard_tokens tokens."""

    def __init__(self, folder: Path, split: str, shard_tokens: int):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.paths: list[Path] = []
        self.file, self.filled, self.num_tokens = None, 0, 0

    def append(self, tokens: np.ndarray) -> None:
        """Append tokens (N,), uint16."""
        self.num_tokens += len(tokens)
        while len(tokens):
            if self.file is None:
                self.paths.append(self.folder / f"text_{self.split}_{len(self.paths):06d}.bin")
                self.file, self.filled = self.paths[-1].open("wb"), 0
                self.file.write(encode_header(0))
            part = tokens[:self.shard_tokens - self.filled]
            self.file.write(np.ascontiguousarray(part, TOKEN_DTYPE))
            self.filled += len(part)
            tokens = tokens[len(part):]
            if self.filled == self.shard_tokens:
                self._finish_shard()

    def _finish_shard(self) -> None:
        self.file.seek(0)
        self.file.write(encode_header(self.filled))
        self.file.close()
        self.file = None

    def close(self) -> None:
        """Finish the last shard; one too short to train on shares with the one before it."""
        if self.file is None:
            return
        self._finish_shard()
        if len(self.paths) > 1 and self.filled < MIN_SHARD_TOKENS <= self.shard_tokens // 2:
            before, last = self.paths[-2:]
            kept = self.shard_tokens - MIN_SHARD_TOKENS
            kept_bytes = HEADER_BYTES + kept * TOKEN_DTYPE.itemsize
            parts = (np.fromfile(before, TOKEN_DTYPE, offset=kept_bytes),
                     np.fromfile(last, TOKEN_DTYPE, offset=HEADER_BYTES))
            write_shard(last, np.concatenate(parts))
            os.truncate(before, kept_bytes)
            with open(before, "r+b") as file:
                file.write(encode_header(kept))


@functools.cache
def load_tokenizer(name: str) -> Callable[[str], np.ndarray]:
    """Return the function from a text to its tokens (N,). Raises: DataError."""
    if name == "bytes":
        return lambda text: np.frombuffer(text.encode(), np.uint8)
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever the HTTP library raises
        raise DataError(
            f"--tokenizer {name}: tiktoken cannot fetch its files ({type(error).__name__}); run "
            "once with a network, set TIKTOKEN_CACHE_DIR to a folder that has them, or use "
            "--tokenizer bytes") from error
    # As encode_ordinary, special tokens being plain text, without a list of Python integers.
    return functools.partial(encoding.encode_to_numpy, disallowed_special=())


def find_in_folder(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the folder's files in sorted order, without those that are hidden.

    Where suffixes are given, a name has to end in one of them, before a .gz or with it.
    Raises: DataError where there is none.
    """
    found = []
    for path in Path(folder).rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        chosen = not suffixes or path.name.endswith(suffixes) or (
            path.name.removesuffix(".gz").endswith(suffixes))
        if chosen and not hidden and path.is_file():
            found.append(str(path))
    if not found:
        kind = " or ".join(suffixes) + " " if suffixes else ""
        raise DataError(f"{folder}: no {kind}file in this folder; name another, or files in it")
    return sorted(found)


def check_readable(path: str) -> None:
    """Raise DataError where there is nothing at the path, or what may never end."""
    if path == STDIN:
        mode = os.fstat(sys.stdin.fileno()).st_mode
        if os.isatty(sys.stdin.fileno()):
            print("reading standard input, to its end (Ctrl-D)", file=sys.stderr)
        elif stat.S_ISCHR(mode):
            raise DataError("standard input: a device, no file or pipe; give one of them")
    elif not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    elif not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: no regular file but a pipe or a device; to read a pipe, give - "
                        f"and < {shlex.quote(path)}")


def find_sources(paths: list[str], suffixes: tuple[str, ...]) -> list[Source]:
    """Return the files of the paths, of folders those with the suffixes, each file once.

    Raises: DataError where a path is not there or has no end, a folder has no file to read, or a
    file wants a package that is not installed.
    """
    sources = {}
    for path in paths:
        check_readable(path)
        in_folder = os.path.isdir(path)
        for file in find_in_folder(path, suffixes) if in_folder else [path]:
            identity = file if file == STDIN else os.path.realpath(file)
            sources.setdefault(identity, Source(file, in_folder))
    for source in sources.values():
        if source.is_parquet and importlib.util.find_spec("pyarrow") is None:
            raise DataError(f"{source.path}: reading parquet wants pyarrow; pip install pyarrow, "
                            "or choose a folder's other files with --suffix")
    return list(sources.values())


@contextmanager
def open_source(source: Source, progress: Progress) -> Iterator[io.BufferedIOBase]:
    """Give the source's bytes, decompressed where it is a .gz.

    Raises: DataError where what is read in the context shows that the .gz is cut or damaged.
    """
    file = sys.stdin.fileno() if source.path == STDIN else source.path
    with io.BufferedReader(CountedFile(file, progress), BLOCK_BYTES) as stream:
        if not source.is_gzip:
            yield stream
            return
        try:
            with gzip.GzipFile(fileobj=stream) as decompressed:
                yield decompressed
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{source.path}: a .gz that is cut or damaged ({error}); "
                            "make or fetch it again") from None


def is_text(source: Source) -> bool:
    """Read the source whole and return whether it is UTF-8 without a NUL.

    Raises: DataError, as `open_source`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_source(source, Progress(None)) as stream:
        try:
            while block := stream.read(BLOCK_BYTES):
                if b"\0" in block:
                    return False
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
    return True


def read_text(stream: io.BufferedIOBase, name: str) -> Iterator[str]:
    """Yield the parts of a UTF-8 text: together they are the text, with the tokens of the text.

    Raises: DataError naming the first byte that is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, position, at_end = "", 0, False
    while not at_end:
        block = stream.read(BLOCK_BYTES)
        at_end = not block
        start = position - len(decoder.getstate()[0])
        try:
            text += decoder.decode(block, final=at_end)
        except UnicodeDecodeError as error:
            raise DataError(f"{name}: not UTF-8 at byte {start + error.start}; convert it first, "
                            "as with iconv -t utf-8") from None
        position += len(block)
        cut = LAST_CUT.match(text)
        if cut and not at_end:
            yield cut[0]
            text = text[cut.end():]
    yield text


def read_jsonl(stream: io.BufferedIOBase, name: str) -> Iterator[str]:
    """Yield the field `text` of each line that is not blank.

    Raises: DataError naming the file and the line of what is no object with such a field.
    """
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line.decode())[TEXT_FIELD]
            text.encode()  # half of a surrogate pair is JSON, but no text
        except KeyError:
            raise DataError(f'{name}:{number}: no field "{TEXT_FIELD}"') from None
        except (TypeError, AttributeError):
            raise DataError(
                f'{name}:{number}: not an object with a string "{TEXT_FIELD}"') from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}:{number}: {error}") from None
        yield text


def read_parquet(stream: io.BufferedIOBase, name: str) -> Iterator[str]:
    """Yield the values of the column `text`, holding a row group at a time.

    Raises: DataError naming the file where it is no parquet or has no such column of strings, and
    the row, counted from 1, where a value is missing or not UTF-8.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(stream)
        column = file.schema_arrow.field(TEXT_FIELD)
        if str(column.type) not in ("string", "large_string", "string_view"):
            raise DataError(f'{name}: its column "{TEXT_FIELD}" is of {column.type}, not of string')
        # Without threads: the processes that tokenize may be forked while this is read.
        batches = file.iter_batches(columns=[TEXT_FIELD], use_threads=False)
        for row, value in enumerate((value for batch in batches for value in batch.column(0)), 1):
            if not value.is_valid:
                raise DataError(f'{name}: row {row} has no "{TEXT_FIELD}"; drop such rows')
            yield value.as_py()
    except KeyError:
        raise DataError(f'{name}: no column "{TEXT_FIELD}"; rename the one that has it') from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: row {row} is not UTF-8; convert it first") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a whole parquet file ({str(error).splitlines()[0]}); "
                        "make or fetch it again") from None


def in_validation(document: int, val_fraction: float) -> bool:
    """Draw whether the document with this running number is for validation."""
    digest = hashlib.sha256(str(document).encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def read_pieces(sources: list[Source], val_fraction: float,
                progress: Progress) -> Iterator[Piece]:
    """Yield every document of the sources, long ones in parts; skip a folder's binary files."""
    for source in sources:
        one_document = not (source.is_jsonl or source.is_parquet)
        if source.in_folder and one_document and not is_text(source):
            progress.skipped.append(source)
            continue
        read = read_parquet if source.is_parquet else read_jsonl if source.is_jsonl else read_text
        with open_source(source, progress) as stream:
            for number, text in enumerate(read(stream, source.name)):
                opens_document = not one_document or number == 0
                progress.documents += opens_document
                yield Piece(text, opens_document,
                            in_validation(progress.documents - 1, val_fraction))


def make_batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces in lists of some BATCH_CHARS."""
    batch, chars = [], 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text) + 1
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def tokenize(batch: list[Piece], tokenizer: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the batch's training tokens (N,) and validation tokens (M,), both uint16."""
    encode = load_tokenizer(tokenizer)
    train, val = [np.empty(0, np.uint16)], [np.empty(0, np.uint16)]
    for piece in batch:
        split = val if piece.validation else train
        if piece.opens_document:
            split.append(np.array([END_OF_TEXT[tokenizer]], np.uint16))
        split.append(encode(piece.text).astype(np.uint16))
    return np.concatenate(train), np.concatenate(val)


def reset_signals() -> None:
    """Leave it to the parent to end this process at Ctrl-C, which reaches both."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def map_in_order(function: Callable, items: Iterable, processes: int) -> Iterator:
    """Yield function(item) in the items' order, with a few items a process under way at a time."""
    if processes == 1:
        yield from map(function, items)
        return
    pending = deque()
    try:
        with ProcessPoolExecutor(processes, initializer=reset_signals) as pool:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > 2 * processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    except BrokenProcessPool:
        raise DataError("a process was killed, for its memory perhaps; "
                        "try with fewer --processes") from None


def write_shards(folder: Path, batches: Iterable[tuple[np.ndarray, np.ndarray]], shard_tokens: int,
                 progress: Progress) -> tuple[ShardWriter, ShardWriter]:
    """Write the batches of training and validation tokens as shards; return the two writers."""
    with (closing(ShardWriter(folder, "train", shard_tokens)) as train,
          closing(ShardWriter(folder, "val", shard_tokens)) as val):
        for train_tokens, val_tokens in batches:
            train.append(train_tokens)
            val.append(val_tokens)
            progress.tokens = train.num_tokens + val.num_tokens
            progress.show()
    return train, val


def cut_corpus(written: ShardWriter, val_fraction: float,
               end_of_text: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the written tokens again, the last val_fraction of them for validation.

    The first of these is preceded by end_of_text.
    """
    left = int(written.num_tokens * (1 - val_fraction))
    opening = np.array([end_of_text], TOKEN_DTYPE)
    for path in written.paths:
        for start in range(HEADER_BYTES, path.stat().st_size, BLOCK_BYTES):
            tokens = np.fromfile(path, TOKEN_DTYPE, BLOCK_BYTES // TOKEN_DTYPE.itemsize,
                                 offset=start)
            head, tail = np.split(tokens, [left])
            yield head, np.concatenate([opening, tail]) if len(tail) else tail
            left -= len(head)
            opening = opening[len(tail):]


def training_command(out: Path, tokenizer: str, val_tokens: int) -> str:
    """Return the command that trains on the shards in out, to be run in the current folder."""
    script = os.path.relpath(Path(__file__).resolve().parent.parent / "train_gpt.py")
    files = glob.escape(str(out))
    flags = {
        "preset": "pocket",
        "train_files": f"{files}/text_train_*.bin",
        "val_files": f"{files}/text_val_*.bin",
        "vocab_size": END_OF_TEXT[tokenizer] + 1,
        "eot_token": END_OF_TEXT[tokenizer],
        "val_seq_len": min(val_tokens, PRESET_VAL_SEQ_LEN),
        "val_tokens": min(val_tokens, PRESET_VAL_TOKENS),
    }
    words = ["python", script]
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return shlex.join(words)


def report_skipped(skipped: list[Source]) -> str:
    """Return the sentence on a folder's files that are no text, empty where there are none."""
    if not skipped:
        return ""
    names = ", ".join(source.path for source in skipped[:SKIPPED_SHOWN])
    more = f" and {len(skipped) - SKIPPED_SHOWN:,} more" * (len(skipped) > SKIPPED_SHOWN)
    return f"skipped {len(skipped):,} file(s) that are not UTF-8 text: {names}{more}"


def convert(args: argparse.Namespace, sources: list[Source], staging: Path) -> list[Path]:
    """Write the shards of the sources into staging, say what there is; return their paths."""
    paths = [source.path for source in sources]
    progress = Progress(None if STDIN in paths else sum(map(os.path.getsize, paths)))
    pieces = read_pieces(sources, args.val_fraction, progress)
    batches = map_in_order(functools.partial(tokenize, tokenizer=args.tokenizer),
                           make_batches(pieces), args.processes)
    try:
        train, val = write_shards(staging, batches, args.shard_tokens, progress)
    finally:
        progress.clear()
    if not progress.documents:
        read = "; ".join(filter(None, [report_skipped(progress.skipped), "no document in there"]))
        raise DataError(f"{', '.join(args.paths)}: {read}")
    if 0 < args.val_fraction < 1 and not (train.num_tokens and val.num_tokens):
        print(f"{progress.documents} document(s) are too few to draw from: "
              f"the last {args.val_fraction:.2%} of the text is for validation")
        (staging / "cut").mkdir()
        parts = cut_corpus(train if train.num_tokens else val, args.val_fraction,
                           END_OF_TEXT[args.tokenizer])
        train, val = write_shards(staging / "cut", parts, args.shard_tokens, progress)
    if progress.skipped:
        print(report_skipped(progress.skipped))
    num_files = len(sources) - len(progress.skipped)
    print(f"{progress.documents:,} document(s) of {num_files:,} file(s) in {args.out}: "
          f"{train.num_tokens:,} training tokens in {len(train.paths)} shard(s), "
          f"{val.num_tokens:,} validation tokens in {len(val.paths)} shard(s)")
    return train.paths + val.paths


def fraction(value: str) -> float:
    """Parse a flag's number from 0 to 1."""
    number = float(value)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not between 0 and 1")
    return number


def positive(value: str) -> int:
    """Parse a flag's whole number from 1 up."""
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return number


def suffix_list(value: str) -> tuple[str, ...]:
    """Parse a flag's suffixes, which commas part."""
    suffixes = tuple(value.split(","))
    for suffix in suffixes:
        if not re.fullmatch(r"\.[^/\s]+", suffix):
            raise argparse.ArgumentTypeError(f"{suffix!r} is no suffix; write them as in .py,.md")
    return suffixes


def main() -> None:
    parser = Parser(description=__doc__.partition("\n\n")[0],
                    epilog=__doc__.partition("PATH...\n\n")[2])
    parser.add_argument("--tokenizer", choices=END_OF_TEXT, required=True)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True,
                        help="folder of the shards, made where it is missing")
    parser.add_argument("--suffix", type=suffix_list, default=(), metavar=".A,.B",
                        help="read those files of folders only (default: all that are text)")
    parser.add_argument("--val_fraction", type=fraction, default=0.05, metavar="F",
                        help="share of the documents for validation (default: %(default)s)")
    parser.add_argument("--shard_tokens", type=positive, default=100_000_000, metavar="N",
                        help="tokens of a shard (default: %(default)s)")
    parser.add_argument("--processes", type=positive, default=os.cpu_count(), metavar="N",
                        help="processes that tokenize (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true",
                        help="replace the shards of an earlier run, once the new ones are whole")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    args = parser.parse_args()

    sources = find_sources(args.paths, args.suffix)
    load_tokenizer(args.tokenizer)
    earlier = list(args.out.glob("text_*_*.bin"))
    if earlier and not args.overwrite:
        raise DataError(f"{args.out} holds {len(earlier)} shard(s) of an earlier run; "
                        "choose another --out, or replace them with --overwrite")
    is_new = not args.out.exists()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=".partial-", dir=args.out) as staging:
            shards = convert(args, sources, Path(staging))
            for path in earlier:
                path.unlink()
            for path in shards:
                path.replace(args.out / path.name)
    except BaseException:
        if is_new:
            args.out.rmdir()
        raise

    # The last token is a target only.
    val_tokens = sum(map(read_header, args.out.glob("text_val_*.bin"))) - 1
    val_tokens -= val_tokens % BLOCK_TOKENS
    if val_tokens <= 0:
        print(f"There are too few validation tokens to train with, {BLOCK_TOKENS + 1} at least: "
              "give more text, or a larger --val_fraction")
        return
    print("Train a laptop's model on it (on CUDA devices, without --preset pocket: the record's):\n"
          + training_command(args.out, args.tokenizer, val_tokens))


if __name__ == "__main__":
    run(main)
