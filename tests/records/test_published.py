"""What the public scripts compute at full size, where golden numbers are of small ones: rows of
hashes, and ids of a softmax."""

import numpy as np
import pytest
import torch
from record_folders import RECORDS, load

NEWEST = RECORDS[-1]
(WITH_BIGRAMS,) = [record for record in RECORDS if record.name == "2026-01-19_BigramTable"]


def test_pairs_of_tokens_have_the_published_rows():
    """A row a token; to the second one the token before is always the same, and overflows."""
    def rows(*tokens):
        return load(WITH_BIGRAMS).hash_bigrams(torch.tensor([tokens]), 251_520)[0].tolist()

    tokens = 50256, 0, 1, 2, 50256, 50255, 50256, 50256, 262, 464, 11, 13, 198
    assert rows(*tokens) == [251519, 193815, 36313, 94597, 187029, 127707, 244156, 35060, 245243,
                             70649, 188566, 238680, 78264]
    seconds = [rows(7, second)[1] for second in (0, 1, 2, 198, 464, 50255)]
    assert seconds == [193815, 159838, 129737, 209144, 204580, 32011]


def test_classes_of_a_softmax_in_92():
    script = load(NEWEST)
    cfg = script.Hyperparameters()

    def chosen(targets, offset, wanted):
        ids, offset = script.candidates(np.array(targets), offset, wanted, 50_304, cfg)
        return ids.tolist(), offset

    targets = range(3000)
    ids, offset = chosen(targets, 0, 10_240)
    assert (sum(ids), ids[3000:3004], offset) == (197_471_229, [3006, 3014, 3017, 3025], 12_564)
    ids, offset = chosen(targets, offset, 10_240)
    assert (sum(ids), offset) == (197_431_846, 25_128)
    ids, offset = chosen(targets, 50_304 * 7 // 8, 10_240)
    assert (sum(ids), offset) == (197_494_251, 6276)
    swept = [20_011 * k % 50_304 for k in range(30_000)]  # all that the window will have
    ids, offset = chosen(swept, 0, 32_768)
    assert (sum(ids), len(ids), offset) == (821_036_818, 32_768, 4961)
    assert chosen(range(7), 5, 7) == (list(range(7)), 5)
    with pytest.raises(script.UserError, match="7 classes are fewer than the 8 targets"):
        chosen(range(8), 5, 7)
    assert script.first_sweeps(50_304, 8) == [6288 * index for index in range(8)]


def test_rows_and_signs_of_n_grams_in_92():
    script = load(NEWEST)
    rows = 84_602_880

    def hashes(*tokens):
        tokens = torch.tensor([tokens])
        pairs, threes = script.hash_bigrams(tokens, rows), script.hash_trigrams(tokens, rows)
        return pairs[0].tolist(), threes[0].tolist()

    for token, row in ((262, 20_632_011), (11, 13_084_038), (50_256, 40_499_699)):
        assert hashes(7, token) == ([42_301_439, row], [84_602_879] * 2) == hashes(9, token)
    pairs, threes = hashes(1, 50_256, 262, 11)
    assert (pairs[3], threes[3]) == (6_990_873, 49_278_731)
    signs = script.hash_signs(torch.tensor([[1, 50_256, 262, 11]]), 8192)
    of_pairs, of_threes = (x[0].tolist() for x in signs)
    assert (of_pairs[3], of_threes[3]) == (71, 1595)
    assert (of_pairs[0], of_threes[:2]) == (0, [0, 0]) and of_pairs[1] != 0
