"""The two baselines beside the pocket: n-gram counts, and a plain GPT with AdamW."""

import math
import re
from collections import Counter, defaultdict

import ngram_baseline
import numpy as np
import plain_baseline
import pytest
import torch

import train_gpt

VOCAB = 5


def naive_probability(rows, context, token, strengths):
    """Of the token after the context (a tuple), by dicts of tuples, from the shortest context."""
    p = 1 / VOCAB
    for length, strength in enumerate(strengths):
        followers = defaultdict(Counter)
        for row in rows:
            padded = [None] * length + list(row)  # nothing stands before a row
            for place in range(length + 1, len(padded)):
                followers[tuple(padded[place - length : place])][padded[place]] += 1
        last = tuple(([None] * length + list(context))[len(context) :])
        seen = followers[last]
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
    rows, other = text
    strengths = (0.5, 1, 2, 4)
    found = ngram_baseline.probabilities(rows, other[None], strengths, VOCAB)[0]
    words = [int(token) for token in other]
    plain_rows = [[int(token) for token in row] for row in rows]
    wanted = [naive_probability(plain_rows, words[:place], words[place], strengths)
              for place in range(1, len(words))]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_ngrams_sum_to_one_over_the_vocabulary(text):
    rows, other = text
    for place in range(1, len(other)):
        endings = np.tile(other[: place + 1], (VOCAB, 1))
        endings[:, -1] = np.arange(VOCAB)
        p = ngram_baseline.probabilities(rows, endings, (0.25, 1, 3, 16), VOCAB)[:, -1]
        assert p.min() > 0 and math.isclose(p.sum(), 1, rel_tol=1e-12)


def test_ngrams_count_what_the_pocket_trains_on(tiny_shards):
    files = tiny_shards([9000])
    cfg = train_gpt.parse_args(["--preset", "pocket", "--train_files", files,
                                "--num_iterations", "3"])
    loader = train_gpt.TokenLoader(cfg, train_gpt.Ranks(cfg))
    trained = []
    for _ in range(cfg.num_iterations):
        for inputs, targets in loader.next_step(cfg.seq_lens[0]):
            trained += torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
    assert sorted(ngram_baseline.training_rows(cfg).tolist()) == sorted(trained)


def test_the_loss_of_ngrams_falls_with_more_text(tiny_shards, tmp_path, write_shard, capsys):
    """Of a text that repeats itself. Both runs predict as many tokens."""
    phrase = np.random.default_rng(0).integers(256, size=3001)
    write_shard(tmp_path / "train_0.bin", np.tile(phrase, 40))
    write_shard(tmp_path / "val_0.bin", np.tile(phrase, 2))
    losses = []
    for steps in ("1", "20"):
        assert ngram_baseline.main(["--train_files", str(tmp_path / "train_*.bin"), "--val_files",
                                    str(tmp_path / "val_*.bin"), "--val_tokens", "4096",
                                    "--num_iterations", steps]) == 0
        printed = capsys.readouterr().out
        assert "\nval_tokens: 4096\n" in printed and f"tokens: {2048 * int(steps)}\n" in printed
        losses.append(float(re.search(r"val_loss: ([\d.]+)", printed)[1]))
    assert losses[1] < losses[0] < math.log(257)


def test_too_many_steps_end_in_one_line(tiny_shards, capsys):
    files = tiny_shards([9000])
    assert ngram_baseline.main(["--train_files", files, "--num_iterations", "99"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "--num_iterations 99: the first shard has 4 steps" in printed.err


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


def test_the_plain_gpt_of_the_pockets_size_takes_its_steps(tiny_shards, monkeypatch, capsys):
    cfg = train_gpt.parse_args(["--preset", "pocket"])
    size = plain_baseline.SIZES["pocket"]
    assert size.layers == len(cfg.attention_pattern) and size.width == cfg.model_dim
    assert size.heads == cfg.model_dim // cfg.head_dim and size.steps == cfg.num_iterations
    assert size.context == max(cfg.seq_lens) and size.batch == cfg.sequences_per_step
    monkeypatch.setattr("sys.argv", [
        "plain_baseline.py", "--size", "pocket", "--steps", "3", "--train", tiny_shards([9000]),
        "--val", tiny_shards([2000], name="tiny_val", seed=1)])
    plain_baseline.main()
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^step:\d/3 val_loss:([\d.]+)", printed, re.M)]
    assert losses[1] < losses[0] < math.log(257) + 0.2
    assert "\ntokens: 6144\ncontext: 128\n" in printed
