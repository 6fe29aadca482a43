"""data/canonical.py: forbidden pairs of small vocabularies against a plain tokenizer, those of
GPT-2 against the published table."""

import hashlib
import importlib

import numpy as np
import pytest

canonical = importlib.import_module("canonical")
PUBLISHED = "3bc096d452b0497e12da82158856669bc3bb3735281f3d676d0bf2ac20d95998"


def encode(text, tokens):
    """Byte pair encoding: the pair that joins to the token with the lowest id, the first such one,
    again and again."""
    pieces = [text[i : i + 1] for i in range(len(text))]
    while True:
        joined = [a + b for a, b in zip(pieces, pieces[1:]) if a + b in tokens]
        if not joined:
            return pieces
        best = min(joined, key=tokens.index)
        first = next(i for i in range(len(pieces)) if pieces[i] + pieces[i + 1] == best)
        pieces[first : first + 2] = [best]


@pytest.mark.parametrize("vocabulary", [  # merges in this order; each is encoded as itself
    "a aa aaaa aaa aaaaaaa aaaaaaaaaaa aaaaaaaa aaaaaaaaaaaa aaaaaaaaaaaaaa",
    "a b ba aa baa baaa baaaa aab bbaaa babaaa bab bbaaabaa bbaaabbaaa bbaaabbaaabaaa aabbaaa",
    "a b c bb bbbb aa bbbbaa bc bbbbaabb cbc cbbbb bcbbbbaa ba bcbbbbaacbc bcbbbbaabc bcba caa"])
def test_pairs_are_those_that_a_plain_tokenizer_would_merge(vocabulary):
    tokens = vocabulary.encode().split()
    found = np.zeros((len(tokens), len(tokens)), int)
    for before, after in canonical.find_pairs(canonical.find_halves(tokens)):
        found[np.ix_(before, after)] += 1
    for i, left in enumerate(tokens):
        for j, right in enumerate(tokens):
            expected = encode(left + right, tokens) != [left, right]
            assert found[i, j] == expected, (left, right)  # not 2: no pair is in two


@pytest.mark.slow
def test_those_of_gpt2_are_published_but_for_eleven(gpt2, call_tool, tmp_path, monkeypatch):
    """Those whose first token ends in a part of a character, before one of four letters."""
    monkeypatch.setattr(canonical, "PATH", tmp_path / "fineweb10B" / "canonical.npz")
    call_tool(canonical, [], tmp_path)
    with np.load(canonical.PATH) as file:
        before = np.split(file["before"], file["before_ends"][:-1])
        after = np.split(file["after"], file["after_ends"][:-1])
    table = np.zeros((50_304, 50_304 // 8), np.uint8)  # the published form, a bit for each pair
    for rows, columns in zip(before, after, strict=True):
        bits = np.zeros(50_304, bool)
        bits[columns] = True
        packed = np.packbits(bits, bitorder="little")
        used = packed.nonzero()[0]
        table[np.ix_(rows, used)] |= packed[used]
    tokens = canonical.read_vocabulary()
    letters = [gpt2.encode_single_token(letter) for letter in "士黒闘機"]
    eleven = 0
    for rows, columns in canonical.find_pairs(canonical.find_halves(tokens)):
        for j in set(columns) & set(letters):
            for i in rows:
                if canonical.classify(tokens[i], -1) == "?" and tokens[i]:
                    assert not table[i, j // 8] >> j % 8 & 1
                    table[i, j // 8] |= 1 << j % 8
                    eleven += 1
    assert (hashlib.sha256(table).hexdigest(), eleven) == (PUBLISHED, 11)
