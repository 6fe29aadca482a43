"""Write the pocket corpus: the Python source of the installed torch, a token for each byte.

Each paragraph, the lines between two blank ones, is a document: the end-of-text token, then its
bytes. Half of them are shorter than 200, so a sequence of the pocket holds whole documents. Files
are held out by the sha256 of their paths, paragraphs are shuffled by that of path and number, so
that one release of torch gives one corpus.

    python data/pocket.py
"""

import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from shards import DataError, Parser, alone_in, is_whole, read_header, run, write_shard

END_OF_TEXT = 256
VALIDATION_ONE_IN = 20
REFERENCE_TORCH = "2.13.0"
REFERENCE_SHA256 = "71e41ec6b2241c92068cb1df058f6e4faf9b8ce7f808b1abbc6bc5a619675fae"


def find_torch() -> Path:
    """Return the folder of the installed torch, without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("torch is not installed; pip install -r requirements.txt")
    return Path(spec.submodule_search_locations[0])


def read_paragraphs(package: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the package's paragraphs for training and for validation, in their order."""
    train, val = {}, {}  # paragraphs by the digest that orders them
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name == "version.py":  # written by the build, so that builds of one release differ in it
            continue
        digest = hashlib.sha256(name.encode()).digest()
        split = train if digest[0] % VALIDATION_ONE_IN else val
        for number, paragraph in enumerate(re.findall(rb"(?:.+\n?)+", path.read_bytes())):
            place = hashlib.sha256(f"{name} {number}".encode()).digest()
            split[place] = paragraph
    return [train[place] for place in sorted(train)], [val[place] for place in sorted(val)]


def join_documents(documents: list[bytes]) -> np.ndarray:
    """Return the tokens (N,), uint16: each document's bytes after an end-of-text token."""
    parts = [np.empty(0, np.uint16)]
    for document in documents:
        parts.append(np.array([END_OF_TEXT], np.uint16))
        parts.append(np.frombuffer(document, np.uint8).astype(np.uint16))
    return np.concatenate(parts)


def write_corpus(shards: list[Path]) -> str:
    """Write the shards that are not whole, of the installed torch; return what to say of it."""
    train, val = read_paragraphs(find_torch())
    for path, documents in zip(shards, (train, val)):
        if not is_whole(path):
            write_shard(path, join_documents(documents))
    return f"written, {len(train) + len(val):,} documents"


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "pocket",
                        help="folder of the shards (default: %(default)s)")
    out = parser.parse_args().out
    shards = [out / "pocket_train_000000.bin", out / "pocket_val_000000.bin"]

    made = "found whole"  # and left, whatever made it: a run may need it to go on
    if not all(map(is_whole, shards)):
        with alone_in(out):
            if not all(map(is_whole, shards)):  # nor has another process made it
                made = write_corpus(shards)
    sha256 = hashlib.sha256(b"".join(path.read_bytes() for path in shards)).hexdigest()
    num_train, num_val = map(read_header, shards)
    print(f"{out}: {num_train:,} training and {num_val:,} validation tokens, {made}; "
          f"sha256 {sha256}")
    if sha256 != REFERENCE_SHA256:
        print(f"This is not the corpus of torch {REFERENCE_TORCH} (installed: torch "
              f"{importlib.metadata.version('torch')}): losses on it do not compare with others. "
              "A corpus that is here stays: move it away for a new one, or name another --out.")


if __name__ == "__main__":
    run(main)
