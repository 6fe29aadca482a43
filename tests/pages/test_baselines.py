"""The two baselines beside the pocket: n-gram counts, and a plain GPT with AdamW."""

import math
import re
from collections import Counter

import ngram_baseline
import numpy as np
import plain_baseline
import pytest
import torch

import train_gpt

VOCAB = 5


def naive_probability(rows, context, token, strengths):
    """Of the token after the context, by counting what followed its ends, from the shortest on."""
    p = 1 / VOCAB
    for length, strength in enumerate(strengths):
        padding = [None] * length  # nothing stands before a row
        end = (padding + context)[len(context) :]
        seen = Counter()
        for row in rows:
            padded = padding + row
            for place in range(length + 1, len(padded)):
                if padded[place - length : place] == end:
                    seen[padded[place]] += 1
        if seen:
            weight = strength * len(seen)
            p = (seen[token] + weight * p) / (sum(seen.values()) + weight)
    return p


@pytest.fixture
def text():
    """Rows that are counted, and one row to predict: half of each repeats, so contexts recur."""
    generator = np.random.default_rng(0)
    phrase = generator.integers(VOCAB, size=10)
    rows = generator.integers(VOCAB, size=(8, 20))
    rows[:, 5:15] = phrase
    other = np.concatenate([generator.integers(VOCAB, size=6), phrase, phrase[:4]])
    return rows.astype(np.uint64), other.astype(np.uint64)


def test_ngrams_are_those_of_a_dict(text):
    """For each token of the vocabulary, so that they sum to one."""
    rows, other = text
    strengths = (0.25, 1, 3, 16)
    for place in range(1, len(other)):
        endings = np.tile(other[: place + 1], (VOCAB, 1))
        endings[:, -1] = np.arange(VOCAB)
        found = ngram_baseline.probabilities(rows, endings, strengths, VOCAB)[:, -1]
        wanted = [naive_probability(rows.tolist(), other[:place].tolist(), token, strengths)
                  for token in range(VOCAB)]
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        assert found.sum() == pytest.approx(1, rel=1e-12)


def test_ngrams_count_what_the_pocket_trains_on(tiny_shards):
    flags = ["--preset", "pocket", "--train_files", tiny_shards([9000]), "--num_iterations", "3"]
    cfg = train_gpt.parse_args(flags)
    loader = train_gpt.TokenLoader(cfg, train_gpt.Ranks(cfg))
    trained = []
    for _ in range(cfg.num_iterations):
        for inputs, targets in loader.next_step(cfg.seq_lens[0]):
            trained += torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
    assert sorted(ngram_baseline.training_rows(cfg).tolist()) == sorted(trained)


@pytest.mark.parametrize("name, parameters", [("quickstart", 828_672), ("pocket", 123_264)])
def test_a_plain_gpt_has_its_parameters_and_sees_no_later_token(name, parameters):
    size = plain_baseline.SIZES[name]
    torch.manual_seed(0)
    model = plain_baseline.PlainGPT(257, size)
    assert sum(param.numel() for param in model.parameters()) == parameters
    inputs = torch.randint(257, (2, size.context))
    targets = torch.full_like(inputs, -100)  # not counted
    targets[:, :20] = inputs[:, 1:21]
    later, earlier = inputs.clone(), inputs.clone()
    later[:, 20:] = 0
    earlier[:, 19] = (earlier[:, 19] + 1) % 257
    same, other, loss = (model(each, targets).item() for each in (later, earlier, inputs))
    assert same == pytest.approx(loss, rel=1e-6)
    assert other != pytest.approx(loss, rel=1e-6)


def test_the_plain_gpt_learns(tiny_shards, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [
        "plain_baseline.py", "--size", "pocket", "--steps", "3", "--train", tiny_shards([9000]),
        "--val", tiny_shards([2000], name="tiny_val", seed=1)])
    plain_baseline.main()
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^step:\d/3 val_loss:([\d.]+)", printed, re.M)]
    assert losses[1] < losses[0] < math.log(257) + 0.2
    assert "\ntokens: 6144\ncontext: 128\n" in printed
