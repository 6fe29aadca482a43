"""Write which tokens GPT-2's tokenizer never emits after which: they would have been merged.

Record #91 leaves them out of its last softmax. A text's tokens are unique, so where the merge of
two pieces comes before others, one of them at the end of a token and the other one at the beginning
of the next, these two tokens are never neighbours. That holds unless the tokenizer splits the text
between them before it merges.

The published table forbids 11 pairs too many (records/2026-08-06_CanonicalMask/README.md). SHA-256
of both tables, (50304, 6288) bytes, a bit for each pair:
published 3bc096d452b0497e12da82158856669bc3bb3735281f3d676d0bf2ac20d95998, 70,889,701 pairs,
this one  1cb5f242494e30552a6fc38c33d777716acc9018848fe74494f7cace294db222, 70,889,690 pairs.

    python data/canonical.py
"""

import sys
import unicodedata
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from prefixes import read_vocabulary
from shards import Parser, alone_in, run, whole_file

PATH = Path(__file__).parent / "fineweb10B" / "canonical.npz"
CONTRACTIONS = {b"'s", b"'t", b"'re", b"'ve", b"'m", b"'ll", b"'d"}  # split from what follows


def find_halves(tokens: list[bytes]) -> list:
    """Return the ids of the two pieces that each token is merged from, None of bytes.

    An id is the rank of its token's merge.
    """
    id_of = {token: index for index, token in enumerate(tokens) if token}
    halves = []
    for token in tokens:
        pieces = [token[i : i + 1] for i in range(len(token))]
        while len(pieces) > 2:
            joined = [id_of.get(a + b, len(tokens)) for a, b in zip(pieces, pieces[1:])]
            first = joined.index(min(joined))
            pieces[first : first + 2] = [pieces[first] + pieces[first + 1]]
        halves.append((id_of[pieces[0]], id_of[pieces[1]]) if len(pieces) == 2 else None)
    return halves


class Forest:
    """The tokens in an order in which those with one end stand together.

    A token's children are those whose last (or first) merged half it is. They stand before it by
    ascending id. They are inserted in this order, so `next` of a token splits its descendants: by
    children with smaller ids than the last one's, and by all others and the token.
    """

    def __init__(self, halves, side):
        self.parents = [half and half[side] for half in halves]
        sizes = [1] * len(halves)
        for token in reversed(range(len(halves))):  # children have larger ids
            if halves[token]:
                sizes[self.parents[token]] += sizes[token]
        self.sizes = sizes
        self.next = [0] * len(halves)  # where a token's next child begins
        self.end = [0] * len(halves)
        self.roots_end = 0

    def insert(self, token):
        parent = self.parents[token]
        begin = self.roots_end if parent is None else self.next[parent]
        self.next[token] = begin
        self.end[token] = begin + self.sizes[token]
        if parent is None:
            self.roots_end = self.end[token]
        else:
            self.next[parent] = self.end[token]

    def order(self):
        return np.argsort(self.end, kind="stable")  # a token is the last one of its own part


def find_pairs(halves) -> list:
    """Return (ids before, ids after) of the pairs that each merge joins. No pair is in two."""
    ends, begins = Forest(halves, side=1), Forest(halves, side=0)
    found = []
    for token, half in enumerate(halves):
        ends.insert(token)
        if half:
            left, right = half
            # When it merges, some tokens still end with its left half, some begin with the right
            # one. Its own merge precedes others of the same rank further to the right.
            rows = slice(ends.next[left], ends.end[left])
            found.append((rows, slice(begins.next[right], begins.end[right])))
        begins.insert(token)
    by_end, by_begin = ends.order(), begins.order()
    return [(by_end[rows], by_begin[columns]) for rows, columns in found]


def classify(text: bytes, side: int) -> str:
    """Return the class of a token's first (0) or last (-1) character, ? of a part of one."""
    for length in range(1, 5):
        try:
            character = (text[-length:] if side else text[:length]).decode()[side]
        except UnicodeDecodeError:
            continue
        if character.isspace() and character not in "\x1c\x1d\x1e\x1f":
            return "S"
        category = unicodedata.category(character)[0]
        return category if category in "LN" else "O"
    return "?"


def find_forbidden(tokens: list[bytes]) -> list:
    """Return (ids before, ids after), each of the latter forbidden after each of the former."""
    ends = np.array([classify(token, -1) if token else "?" for token in tokens])
    ends[[index for index, token in enumerate(tokens) if token in CONTRACTIONS]] = "?"
    begins = np.array([classify(token, 0) if token else "?" for token in tokens])
    split = dict(S="S?", L="?", N="?", O="L?")  # where the text may be split, by the class before
    found = []
    for rows, columns in find_pairs(find_halves(tokens)):
        for kind, exempt in split.items():
            after = columns[~np.isin(begins[columns], list(exempt))]
            before = rows[ends[rows] == kind]
            if len(before) and len(after):
                found.append((before, after))
    return found


def main() -> None:
    Parser(__doc__).parse_args()
    rows, columns = zip(*find_forbidden(read_vocabulary()))
    parts = {}
    for name, of in dict(before=rows, after=columns).items():
        parts[name] = np.concatenate(of).astype(np.uint16)
        parts[f"{name}_ends"] = np.cumsum([len(ids) for ids in of], dtype=np.int32)
    with alone_in(PATH.parent), whole_file(PATH) as file:
        np.savez_compressed(file, **parts)
    pairs = sum(len(before) * len(after) for before, after in zip(rows, columns))
    print(f"{PATH}: {pairs} pairs of tokens that are never neighbours")


if __name__ == "__main__":
    run(main)
