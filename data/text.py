"""Turn your own text into token shards, and print the command that trains on them.

    python data/text.py --tokenizer gpt2|bytes --out DIR PATH...

A PATH is a UTF-8 text file, source code or Markdown as well, which is one document; a .jsonl or
.ndjson file, of which each line is an object with a document in its field "text"; a folder, of
which all such files are read that are not hidden; or - for the standard input, one document.
"""

import contextlib
import glob
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from shards import TOKEN_DTYPE, DataError, Parser, alone_in, named_errors, run, write_shard

END_OF_TEXT = {"gpt2": 50256, "bytes": 256}  # also the last id of its vocabulary
STDIN = "-"
JSON_LINES = (".jsonl", ".ndjson")
BLOCK_CHARS = 1 << 18  # of a text, read at a time
SHARD_TOKENS = 100_000_000  # in a shard at most
BLOCK_TOKENS = 128  # val_tokens and val_seq_len are multiples of it
PRESET_VAL_TOKENS = 65_536  # what the pocket preset validates on
PRESET_VAL_SEQ_LEN = 4096  # in sequences of so many tokens
MIN_TRAIN_TOKENS = 8 * 384 + 1  # a step of the pocket preset; the last token is a target only
MIN_VAL_TOKENS = BLOCK_TOKENS + 1

NO_TEXT = "not UTF-8 text; unpack it first (zcat FILE | ... -), or convert it (iconv -t utf-8)"
TABLES = (".csv", ".tsv")
# Quoted, it is talked about, as in source code.
SEPARATOR = re.compile(r"""(?<!["'`])<\|endoftext\|>(?!["'`])""")

# Where a text may be cut, so that the tokens of the parts are those of the whole: no GPT-2 token
# spans a place between a non-space and a space or newline. Greedy: the last such place.
LAST_CUT = {"gpt2": re.compile(r"(?s:.*)\S(?=[ \n])"), "bytes": re.compile(r"(?s:.*)\S")}


class Text(io.TextIOWrapper):
    """A text, whose `read` refuses what would be trained on as it stands."""

    name_told = ""
    is_jsonl = False  # whose documents may hold anything
    end = ""  # of the block before

    def read(self, size=-1):
        """Return a block of at most `size` characters. Raises: DataError."""
        try:
            block = super().read(size)
        except UnicodeDecodeError:
            block = "\0"
        if "\0" in block:
            raise DataError(f"{self.name_told}: {NO_TEXT}")
        if self.is_jsonl:
            return block
        if SEPARATOR.search(self.end + block):
            raise DataError(f"{self.name_told}: <|endoftext|> between documents; make a .jsonl of "
                            "them, a document a line (data/README.md)")
        if not self.end and is_json(block, is_whole=len(block) < size):
            raise DataError(f"{self.name_told}: JSON documents; as lines they are read from a "
                            ".jsonl (jq -c '.[]' makes lines)")
        self.end = block[-len("'<|endoftext|>'"):]
        return block


def is_json(block: str, is_whole: bool) -> bool:
    """Whether a text begins as JSON documents do: it parses as lines with a text or as an array."""
    lines = block.split("\n") if is_whole else block.split("\n")[:-1]
    with contextlib.suppress(DataError):
        if list(read_jsonl(lines, "")):
            return True
    if not is_whole:  # an array of objects is too long to be parsed here
        return bool(re.match(r'\s*\[\s*\{\s*"[^"\n]*"\s*:', block))
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(block), list)
    return False


def open_bytes(path: str) -> BinaryIO:
    """Open a file or the standard input. Raises: DataError."""
    if path != STDIN:
        return open(path, "rb")
    if sys.stdin is None:
        raise DataError("standard input is closed; give it a file or a pipe")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def open_text(path: str) -> Text:
    """Open a file or the standard input, line ends left as they are, without a byte-order mark.

    Raises: DataError where its name is that of a table.
    """
    if path.lower().endswith(TABLES):
        raise DataError(f'{path}: a table; make a .jsonl of it, a document a line in its field '
                        '"text"')
    text = Text(open_bytes(path), encoding="utf-8-sig", newline="")
    text.name_told = "standard input" if path == STDIN else path
    text.is_jsonl = path.lower().endswith(JSON_LINES)
    return text


def why_not_read(path: str) -> str:
    """Read the file whole and return why it is not read as text, nothing where it is."""
    try:
        with open_text(path) as file:
            while file.read(BLOCK_CHARS):
                pass
    except DataError as error:
        return str(error)
    return ""


def list_folder(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the folder's text files in sorted order, without those that are hidden.

    Raises: DataError where there is none whose name ends in one of the suffixes.
    """
    found = []
    skipped = {}  # paths by the reason
    for path in sorted(Path(folder).rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        is_other = path.is_file() and not path.name.lower().endswith(suffixes)
        if hidden or is_other or path.is_dir() and not path.is_symlink():
            continue
        why = "a link to a folder; name it as a PATH" if path.is_dir() else "no file"
        if path.is_file():
            why = why_not_read(str(path)).removeprefix(f"{path}: ")
        if why:
            skipped.setdefault(why, []).append(path)
        else:
            found.append(str(path))
    for why, paths in skipped.items():
        print(f"{len(paths):,} file(s) skipped, as {paths[0]}: {why}")
    if not found:
        raise DataError(f"{folder}/*{','.join(suffixes)}: no text file; name other paths")
    for suffix in suffixes:
        if not any(path.lower().endswith(suffix) for path in found):
            print(f"{folder}: no text file ends in {suffix}")
    return found


def find_files(paths: list[str], suffixes: tuple[str, ...]) -> list[str]:
    """Return the files of the paths, each once. Raises: DataError where a path is not there."""
    found = {}
    for path in paths:
        if os.path.isdir(path):
            files = list_folder(path, suffixes)
        elif path == STDIN or os.path.exists(path):
            files = [path]
        else:
            raise DataError(f"{path}: no such file or folder")
        for file in files:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def read_parts(file: TextIO, tokenizer: str) -> Iterator[str]:
    """Yield the parts of a text: together they are the text, with the tokens of the text.

    The first one is blank only where the whole text is.
    """
    waiting = []  # blocks without a place to cut
    last = ""  # character before the block
    while block := file.read(BLOCK_CHARS):
        cut = LAST_CUT[tokenizer].match(last + block)
        if cut:
            end = cut.end() - len(last)
            yield "".join([*waiting, block[:end]])
            waiting = []
        waiting.append(block[end:] if cut else block)
        last = block[-1]
    yield "".join(waiting)


def read_jsonl(file: TextIO, path: str) -> Iterator[str]:
    """Yield the field `text` of each line that is not blank. Raises: DataError naming the line."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            text.encode()  # half of a surrogate pair is JSON, but no text
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise DataError(f'{path}:{number}: not a JSON object with a text in "text"') from None
        yield text


def read_texts(paths: list[str], tokenizer: str) -> Iterator[tuple[str, bool]]:
    """Yield every document of the files, long ones in parts, and whether a text opens a document.

    Raises: DataError naming the file.
    """
    for path in paths:
        with open_text(path) as file:
            texts = read_jsonl(file, path) if file.is_jsonl else read_parts(file, tokenizer)
            try:
                for number, text in enumerate(texts):
                    yield text, file.is_jsonl or number == 0
            except UnicodeDecodeError:  # in a line of a .jsonl
                raise DataError(f"{path}: {NO_TEXT}") from None


def load_tokenizer(name: str) -> tuple[Callable, Callable]:
    """Return the functions from a text to its tokens (N,), and from a token to its bytes.

    Raises: DataError where tiktoken cannot get its files.
    """
    if name == "bytes":
        return lambda text: np.frombuffer(text.encode(), np.uint8), lambda token: bytes([token])
    import tiktoken

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:  # whatever the HTTP library raises
        raise DataError(
            f"tokenizer {name}: tiktoken cannot fetch its files ({type(error).__name__}); run "
            "once with a network, or set TIKTOKEN_CACHE_DIR to a folder that has them") from error

    def encode(text):
        try:  # as encode_ordinary, special tokens being plain text, without a list of integers
            return encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a million blanks in a row, too many for its pattern, are cut
            middle = len(text) // 2
            return np.concatenate([encode(text[:middle]), encode(text[middle:])])

    return encode, encoding.decode_single_token_bytes


def write_tokens(texts: Iterator[tuple[str, bool]], tokenizer: str, val_fraction: float,
                 folder: Path) -> tuple[int, int]:
    """Write folder/train and folder/val, tokens without a header. Raises: DataError.

    Return how many documents they have, and how many had no text and were left out.
    """
    encode, _ = load_tokenizer(tokenizer)
    end_of_text = np.array([END_OF_TEXT[tokenizer]], TOKEN_DTYPE)
    documents = blank = 0
    with (named_errors(folder), open(folder / "train", "wb") as train,
          open(folder / "val", "wb") as val):
        for text, opens_document in texts:
            if opens_document and not text.strip():
                blank += 1
                continue
            if opens_document:
                documents += 1
                digest = hashlib.sha256(str(documents).encode()).digest()
                # By a hash, as what is held out by a period meets data with that period.
                file = val if int.from_bytes(digest[:8]) < val_fraction * 2**64 else train
                file.write(end_of_text)
            file.write(encode(text).astype(TOKEN_DTYPE))
    return documents, blank


def split_tokens(folder: Path, val_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and validation tokens, uint16, that `write_tokens` wrote.

    Where the documents leave one side too few, all are joined and the end is for validation.
    Raises: DataError where there are too few in all.
    """
    train, val = folder / "train", folder / "val"
    num_train = train.stat().st_size // TOKEN_DTYPE.itemsize
    num_val = val.stat().st_size // TOKEN_DTYPE.itemsize
    total, least = num_train + num_val, MIN_TRAIN_TOKENS + MIN_VAL_TOKENS
    if total < least:
        raise DataError(f"too little text to train on: {total:,} token(s), of {least:,} at least")
    if num_train >= MIN_TRAIN_TOKENS and num_val >= MIN_VAL_TOKENS:
        return np.memmap(train, TOKEN_DTYPE, "r"), np.memmap(val, TOKEN_DTYPE, "r")

    print("too few documents to hold some out: the end of the text is for validation")
    with named_errors(folder), open(train, "ab") as joined, open(val, "rb") as rest:
        shutil.copyfileobj(rest, joined)
    cut = int(total * (1 - val_fraction))
    cut = min(max(cut, MIN_TRAIN_TOKENS), total - MIN_VAL_TOKENS)
    tokens = np.memmap(train, TOKEN_DTYPE, "r")
    return tokens[:cut], tokens[cut:]


def write_shards(folder: Path, split: str, tokens: np.ndarray) -> None:
    """Write tokens (N,) as shards of nearly equal length, folder/text_<split>_NNNNNN.bin."""
    num_shards = -(-len(tokens) // SHARD_TOKENS)
    for index, part in enumerate(np.array_split(tokens, num_shards)):
        write_shard(folder / f"text_{split}_{index:06d}.bin", part)


def training_command(out: Path, tokenizer: str, num_val: int) -> str:
    """Return the command that trains on the shards in out, to be run in the current folder."""
    script = os.path.relpath(Path(__file__).resolve().parent.parent / "train_gpt.py")
    files = glob.escape(str(out))
    val_tokens = (num_val - 1) // BLOCK_TOKENS * BLOCK_TOKENS  # the last one is a target only
    flags = {
        "preset": "pocket",
        "train_files": f"{files}/text_train_*.bin",
        "val_files": f"{files}/text_val_*.bin",
        "vocab_size": END_OF_TEXT[tokenizer] + 1,
        "eot_token": END_OF_TEXT[tokenizer],
        "repeat_data": "true",  # a short text is read more than once
        "max_document_tokens": 0,  # the presets drop what is behind the first part of a document
        "val_seq_len": min(val_tokens, PRESET_VAL_SEQ_LEN),
        "val_tokens": min(val_tokens, PRESET_VAL_TOKENS),
    }
    words = ["python", script]
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return shlex.join(words)


def write_all(files: list[str], args) -> None:
    """Write the files' shards, all or none. Raises: DataError."""
    earlier = sorted(args.out.glob("text_*.bin"))
    if earlier:
        raise DataError(f"{earlier[0]}: a shard of an earlier run; remove its shards or choose "
                        "another --out")
    staging = args.out / ".text.partial"
    shutil.rmtree(staging, ignore_errors=True)  # a run that was killed leaves it
    staging.mkdir()
    try:
        texts = read_texts(files, args.tokenizer)
        documents, blank = write_tokens(texts, args.tokenizer, args.val_fraction, staging)
        train, val = split_tokens(staging, args.val_fraction)
        write_shards(staging, "train", train)
        write_shards(staging, "val", val)
        for path in staging.glob("*.bin"):
            path.replace(args.out / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)

    print(f"{args.out}: {len(train):,} training and {len(val):,} validation tokens of "
          f"{documents:,} document(s); {blank:,} without text left out")
    print("Train the pocket on it (without --preset pocket, the record on GPUs):\n"
          + training_command(args.out, args.tokenizer, len(val)))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--tokenizer", choices=END_OF_TEXT, required=True)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True,
                        help="folder of the shards, made where it is missing")
    parser.add_argument("--suffix", default="", metavar=".A,.B",
                        help="read those files of folders only (default: all that are text)")
    parser.add_argument("--val_fraction", type=float, default=0.05, metavar="F",
                        help="share of the documents for validation (default: %(default)s)")
    parser.add_argument("paths", nargs="+", metavar="PATH")
    args = parser.parse_args()
    if not 0 < args.val_fraction < 1:
        parser.error(f"--val_fraction {args.val_fraction}: must lie between 0 and 1")

    suffixes = [suffix.strip().lower() for suffix in args.suffix.split(",")]
    files = find_files(args.paths, tuple(filter(None, suffixes)) or ("",))
    with alone_in(args.out):
        write_all(files, args)


if __name__ == "__main__":
    run(main)
