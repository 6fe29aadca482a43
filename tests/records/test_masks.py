"""The masks of attention, of a GPU and of a CPU, against the rule that they stand for.

A query sees its own document, of it no token after itself, and at most `reach` tokens back. Up to
#28 it sees all of each block that begins fewer than `reach` tokens back.
"""

import inspect

import golden
import numpy as np
import pytest
import torch
from record_folders import first_of_its_kind, for_each, having, load, one_of_each_kind
from torch.nn.attention.flex_attention import BlockMask

BLOCK = golden.BLOCK
LENGTH = 6 * BLOCK
NAMES = "first_keys", "flex_mask", "dense_mask"
KINDS = one_of_each_kind(having("flex_mask"), *NAMES)


@pytest.fixture
def script(record, monkeypatch):
    script = load(record)
    monkeypatch.setattr(script, "BLOCK", BLOCK)
    return script


@for_each(KINDS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 9])
def test_masks_see_what_the_rule_says(record, script, blocks):
    tokens = golden.tokens_of(f"masks {blocks}", 2 * LENGTH).reshape(2, LENGTH)
    tokens[:, 0] = golden.EOT
    docs = torch.from_numpy((tokens == golden.EOT).cumsum().reshape(2, -1).astype(np.int32))
    S = docs.numel()
    i, j = torch.meshgrid(torch.arange(S), torch.arange(S), indexing="ij")
    reach = torch.tensor(BLOCK * blocks - 3, dtype=torch.int32)
    near = i - j <= reach
    day = first_of_its_kind(record, *NAMES).name
    if day < "2024-12-10":  # fewer than `reach` tokens back
        near = i - j < reach
    if day[:10] == "2024-12-08":  # and in as many blocks as would hold them
        near &= i // BLOCK - j // BLOCK <= (reach - 1) // BLOCK
    elif "BLOCK" in inspect.getsource(script.first_keys):
        near = i - j // BLOCK * BLOCK < reach
    rows = docs.flatten()
    expected = (rows[i] == rows[j]) & (j <= i) & near
    flex = script.flex_mask(docs, reach)
    seen = flex.to_dense()[0, 0].bool()
    full = BlockMask.from_kv_blocks(flex.full_kv_num_blocks, flex.full_kv_indices).to_dense()[0, 0]
    seen, full = (torch.kron(x, torch.ones(BLOCK, BLOCK)).bool() for x in (seen, full))
    assert torch.equal(seen & (full | flex.mask_mod(0, 0, i, j)), expected)
    # No block is visited for nothing, and none is asked about that all of a block sees.
    for listed, of_block in ((seen, torch.any), (full, torch.all)):
        by_block = expected.view(S // BLOCK, BLOCK, S // BLOCK, BLOCK).transpose(1, 2).flatten(2)
        assert torch.equal(listed[::BLOCK, ::BLOCK], of_block(by_block, dim=2))
    # The CPU's: for each block of queries, its keys are those that end with it.
    dense = script.dense_mask(docs, reach)
    size, keys = dense.shape[-2:]
    wide = torch.zeros(S, S, dtype=torch.bool)
    for index, block in enumerate(dense[:, 0]):
        end = (index + 1) * size
        first = max(0, end - keys)
        wide[end - size : end, first:end] = block[:, keys - (end - first) :] == 0
    assert torch.equal(wide, expected)
