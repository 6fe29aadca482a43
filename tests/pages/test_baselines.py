"""The two baselines beside the pocket: n-gram counts, and a plain GPT with AdamW."""

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


def test_ngrams_are_those_of_a_dict():
    """For each token of the vocabulary, so that they sum to one. Padding is not counted."""
    generator = np.random.default_rng(0)
    phrase = generator.integers(VOCAB, size=10)  # it recurs, and so do its contexts
    rows = generator.integers(VOCAB, size=(8, 20))
    rows[:, 5:15] = phrase
    other = np.concatenate([generator.integers(VOCAB, size=3), phrase]).astype(np.uint64)
    padding = [(0, 0), (3, 0)]
    padded = np.pad(rows.astype(np.uint64), padding, constant_values=ngram_baseline.START)
    strengths = (0.25, 1, 3, 16)
    for place in range(1, len(other)):
        endings = np.tile(other[: place + 1], (VOCAB, 1))
        endings[:, -1] = np.arange(VOCAB)
        found = ngram_baseline.probabilities(padded, endings, strengths, VOCAB)[:, -1]
        for token in range(VOCAB):
            wanted = naive_probability(rows.tolist(), other[:place].tolist(), token, strengths)
            assert found[token] == pytest.approx(wanted, rel=1e-12)
        assert found.sum() == pytest.approx(1, rel=1e-12)


def test_ngrams_count_what_the_pocket_trains_on(tiny_shards):
    flags = ["--preset", "pocket", "--train_files", tiny_shards([60_000]), "--num_iterations", "9"]
    cfg = train_gpt.parse_args(flags)
    loader = train_gpt.TokenLoader(cfg, train_gpt.Ranks(cfg))
    trained = []
    for step in range(cfg.num_iterations):
        for inputs, targets in loader.next_step(train_gpt.schedule(step, cfg)):
            trained += torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
    assert len({len(row) for row in trained}) > 1  # of several stages
    counted = []
    for row in ngram_baseline.training_rows(cfg).tolist():
        counted.append([token for token in row if token != ngram_baseline.START])
    assert counted == trained


def test_a_plain_gpt_sees_no_later_token_and_learns(tmp_path, write_shard, monkeypatch, capsys):
    size = plain_baseline.SIZES["pocket"]
    torch.manual_seed(0)
    model = plain_baseline.PlainGPT(257, size)
    inputs = torch.randint(257, (2, size.context))
    targets = torch.full_like(inputs, -100)  # not counted
    targets[:, :20] = inputs[:, 1:21]
    later = inputs.clone()
    later[:, 20:] = 0
    assert model(later, targets).item() == pytest.approx(model(inputs, targets).item(), rel=1e-6)

    shard = str(write_shard(tmp_path / "text.bin", np.arange(9000) % 7))
    monkeypatch.setattr("sys.argv", ["plain_baseline.py", "--size", "pocket", "--steps", "3",
                                     "--train", shard, "--val", shard, "--val_tokens", "2048"])
    plain_baseline.main()
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^step:\d/3 val_loss:([\d.]+)", printed, re.M)]
    assert losses[1] < losses[0] - 0.1
