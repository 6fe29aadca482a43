#!/usr/bin/env python3
"""Counting, beside the pocket preset: the loss of interpolated n-grams of the same bytes.

    python tests/ngram_baseline.py [--num_iterations 120] [any other flag of train_gpt.py]

It counts the very sequences on which the pocket trains in so many steps, and predicts the pocket's
validation tokens. The probability of a token w after a context h of n tokens is

    p(w | h) = (count(h w) + strength · kinds(h) · p(w | h')) / (count(h) + strength · kinds(h))

where kinds(h) is how many different tokens followed h, and h' is h without its first token
(Witten and Bell, 1991). At the bottom is the uniform distribution. Each n has its own strength.
Strengths and the longest context are the best on the last tenth of the training text, when the
rest is counted. Then all of it is counted.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt

STRENGTHS = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)
MOST_CONTEXT = 12  # tokens, the longest that is tried
START = 2**16 - 1  # stands where a row has no token; no token of the pocket has this number
HASH_FACTOR = np.uint64(6364136223846793005)  # of Knuth's MMIX generator


def training_rows(cfg):
    """The pocket's training sequences, (N, T + 1), in the order of the text.

    T is the longest. Before the first token of a shorter one stands START.
    """
    tokens = train_gpt.read_shard(train_gpt.find_shards(cfg.train_files)[0], cfg.vocab_size)
    documents = np.flatnonzero(tokens == cfg.eot_token)
    longest = max(stage.seq_len for stage in cfg.stages)
    taken = []
    position = 0
    for step in range(cfg.num_iterations):
        now = train_gpt.schedule(step, cfg)
        rows, position = train_gpt.cut_rows(tokens, documents, position, now, cfg)
        padding = [(0, 0), (longest - now.seq_len, 0)]
        taken.append(np.pad(rows, padding, constant_values=START))
    return np.concatenate(taken).astype(np.uint64)


def hash_ngrams(rows, length):
    """A hash of the `length` tokens before each token of the rows but the first, and of both."""
    contexts = np.zeros(rows.shape, np.uint64)
    for distance in range(length, 0, -1):
        before = np.full(rows.shape, START, np.uint64)
        before[:, distance:] = rows[:, :-distance]
        contexts = contexts * HASH_FACTOR + before + np.uint64(1)
    ngrams = contexts * HASH_FACTOR + rows + np.uint64(1)
    return contexts[:, 1:], ngrams[:, 1:]


def look_up(keys, values, wanted):
    """The value of each wanted key, 0 where it is not among the sorted keys."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def count(rows, tokens, length):
    """count(h w), count(h), kinds(h) in the rows, for each of the tokens (N, T) but the first."""
    is_target = rows[:, :-1] != START  # neither padding nor a row's first token
    contexts, ngrams = (each[is_target] for each in hash_ngrams(rows, length))
    ngrams, first, ngram_counts = np.unique(ngrams, return_index=True, return_counts=True)
    kinds = np.unique(contexts[first], return_counts=True)[1]
    contexts, context_counts = np.unique(contexts, return_counts=True)
    wanted_contexts, wanted_ngrams = hash_ngrams(tokens, length)
    ngram_counts = look_up(ngrams, ngram_counts, wanted_ngrams)
    context_counts = look_up(contexts, context_counts, wanted_contexts)
    kinds = look_up(contexts, kinds, wanted_contexts)
    return ngram_counts, context_counts, kinds


def interpolate(counts, strength, shorter):
    """p(w | h) from the three counts and p(w | h')."""
    ngram_count, context_count, kinds = counts
    weight = strength * kinds
    total = np.maximum(context_count + weight, 1e-9)  # 0 where the context was not seen
    return np.where(context_count > 0, (ngram_count + weight * shorter) / total, shorter)


def choose_strengths(rows, vocab_size):
    """The strengths of the contexts of 0, 1, 2, … tokens, by the last tenth of the rows."""
    cut = len(rows) * 9 // 10
    is_target = rows[cut:, :-1] != START
    p = 1 / vocab_size
    chosen = []
    best_loss = np.inf
    for length in range(MOST_CONTEXT + 1):
        counts = count(rows[:cut], rows[cut:], length)
        losses = []
        for strength in STRENGTHS:
            losses.append(-np.log(interpolate(counts, strength, p)[is_target]).mean())
        if min(losses) >= best_loss:
            break
        best_loss = min(losses)
        chosen.append(STRENGTHS[np.argmin(losses)])
        p = interpolate(counts, chosen[-1], p)
    return chosen


def probabilities(rows, tokens, strengths, vocab_size):
    """p of each of the tokens (N, T) but the first, after those before it, by the rows' counts."""
    p = 1 / vocab_size
    for length, strength in enumerate(strengths):
        p = interpolate(count(rows, tokens, length), strength, p)
    return p


def main(argv):
    cfg = train_gpt.parse_args(["--preset", "pocket", *argv])
    rows = training_rows(cfg)
    val_tokens = train_gpt.read_val_tokens(cfg).astype(np.uint64)[None]
    strengths = choose_strengths(rows, cfg.vocab_size)
    p = probabilities(rows, val_tokens, strengths, cfg.vocab_size)
    print(f"strengths: {' '.join(map(str, strengths))}\ntokens: {(rows[:, :-1] != START).sum()}\n"
          f"context: {len(strengths) - 1}\nval_tokens: {p.size}\n"
          f"val_loss: {-np.log(p).mean():.6f}")


if __name__ == "__main__":
    main(sys.argv[1:])
