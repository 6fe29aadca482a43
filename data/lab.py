"""Write the lab's corpus: the functions and classes of the installed torch, a token for each byte.

The pocket's files are cut before each definition at the top level or one level in, and before its
decorators. Each piece of at most LONGEST bytes is a document: once, however often it occurs, and
for validation alone where a validation file has it. Their order is that of the sha256 of their
bytes, so that neighbours come from anywhere. One release of torch gives one corpus.

    python data/lab.py
"""

import hashlib
import re
from pathlib import Path

from pocket import read_files, write_corpus
from shards import run

LONGEST = 2048  # bytes of a document; longer ones would fill sequences without a boundary
OPENING = re.compile(rb"^(?: {4})?(@|(?:async )?def |class )", re.MULTILINE)
REFERENCE_SHA256 = "4eb530f7c4662880a000bead337bc761c1cc0b5bcb31e50d6136cc5f93674ff7"


def cut_definitions(source: bytes) -> list[bytes]:
    """Return the pieces of a Python file, which together are the file."""
    cuts, decorated = [0], False
    for opening in OPENING.finditer(source):
        if not decorated:
            cuts.append(opening.start())
        decorated = opening[1] == b"@"
    return [source[start:end] for start, end in zip(cuts, [*cuts[1:], len(source)])]


def read_documents(package: Path) -> tuple[list[bytes], list[bytes]]:
    """Return the documents of the package for training and for validation, in their order."""
    train, val = ({piece for file in files for piece in cut_definitions(file)
                   if 0 < len(piece) <= LONGEST} for files in read_files(package))
    return tuple(sorted(split, key=lambda piece: hashlib.sha256(piece).digest())
                 for split in (train - val, val))


if __name__ == "__main__":
    run(lambda: write_corpus("lab", __doc__.split("\n")[0], REFERENCE_SHA256, "documents",
                             read_documents))
