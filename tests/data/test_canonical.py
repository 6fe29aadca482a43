"""data/canonical.py: the forbidden pairs of GPT-2's tokens against the published table."""

import hashlib
import importlib

import numpy as np
import pytest

canonical = importlib.import_module("canonical")
PUBLISHED = "3bc096d452b0497e12da82158856669bc3bb3735281f3d676d0bf2ac20d95998"


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
