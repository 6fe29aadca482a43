"""data/canonical.py: the forbidden pairs of GPT-2's tokens, by the digest in its docstring."""

import hashlib
import importlib

import numpy as np
import pytest

canonical = importlib.import_module("canonical")


@pytest.mark.slow
def test_the_pairs_of_gpt2_have_their_digest(gpt2, call_tool, tmp_path, monkeypatch):
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
    assert f"this one  {hashlib.sha256(table).hexdigest()}" in canonical.__doc__
