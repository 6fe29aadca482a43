"""Write the pocket corpus: the Python source of the installed torch, a token for each byte.

Each file is a document: the end-of-text token, then its bytes. The order of the files and the
split follow from the sha256 of their paths, so that one release of torch gives one corpus.

    python data/pocket.py
"""

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np
from shards import DataError, Parser, read_header, run, write_shard

END_OF_TEXT = 256
VALIDATION_ONE_IN = 20
REFERENCE_TORCH = "2.13.0"
REFERENCE_SHA256 = "0a3c0c471066299fd17d8835a19e78bb6322350b2ab9ded5a2c9cdf139fa0f4c"


def find_torch() -> Path:
    """Return the folder of the installed torch, without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("torch is not installed; pip install -r requirements.txt")
    return Path(spec.submodule_search_locations[0])


def read_files(package: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the package's Python files for training and for validation, in their order."""
    digests = {}
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name != "version.py":  # written by the build, so that builds of one release differ in it
            digests[path] = hashlib.sha256(name.encode()).digest()
    train, val = [], []
    for path in sorted(digests, key=digests.get):
        split = train if digests[path][0] % VALIDATION_ONE_IN else val
        split.append(path.read_bytes())
    return train, val


def join_documents(documents: list[bytes]) -> np.ndarray:
    """Return the tokens (N,), uint16: each document's bytes after an end-of-text token."""
    parts = [np.empty(0, np.uint16)]
    for document in documents:
        parts.append(np.array([END_OF_TEXT], np.uint16))
        parts.append(np.frombuffer(document, np.uint8).astype(np.uint16))
    return np.concatenate(parts)


def hash_shards(paths: list[Path]) -> str | None:
    """Return the sha256 of the files' bytes one after the other, None if one is not there."""
    digest = hashlib.sha256()
    for path in paths:
        if not path.is_file():
            return None
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "pocket",
                        help="folder of the shards (default: %(default)s)")
    out = parser.parse_args().out
    shards = [out / "pocket_train_000000.bin", out / "pocket_val_000000.bin"]

    sha256 = hash_shards(shards)
    if sha256 == REFERENCE_SHA256:
        made = "found whole"
    else:
        train, val = read_files(find_torch())
        for path, documents in zip(shards, (train, val)):
            write_shard(path, join_documents(documents))
        sha256 = hash_shards(shards)
        made = f"written from {len(train) + len(val):,} files"
    num_train, num_val = map(read_header, shards)
    print(f"{out}: {num_train:,} training and {num_val:,} validation tokens, {made}")
    print(f"sha256 {sha256}")
    if sha256 != REFERENCE_SHA256:
        print(f"This is not the corpus of torch {REFERENCE_TORCH} (installed: torch "
              f"{importlib.metadata.version('torch')}): losses on it do not compare with others.")


if __name__ == "__main__":
    run(main)
