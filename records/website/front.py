"""The words of the front page, in Markdown; links are those of records/."""

FRONT = """# A NanoGPT speedrun in one file

[modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt) is a public race: train a language
model on eight H100s until its validation loss is 3.28. [Keller
Jordan](https://kellerjordan.github.io/) keeps the list, and dozens of people have brought it down.
**In May 2024 it took 45 minutes. On the list of 3 October 2026 it takes 39.9 seconds.** The {count}
scripts here retrace how, one idea at a time. Each is a single file that runs. The ideas are those
of the people that its page names.

## How did it become 68 times faster?

With 31 times fewer tokens (10.3 billion, then 329 million), each in 2.2 times less time:

- **A better optimizer.** [Muon](idea-muon.html) moves a matrix in all directions alike: 31.4 to
  22.3 minutes, with a third fewer steps than Adam.
- **One long sequence.** [FlexAttention](idea-flexattention-over-documents.html) keeps documents
  whole and apart: 3,000 to 1,875 steps. [Windows that grow](idea-growing-window.html) make early
  steps cheap.
- **Tables instead of matrices.** [Value embeddings](idea-value-embeddings.html), then rows for
  [pairs](idea-bigram-table.html) and [triples](idea-hashed-n-gram-table.html) of tokens, are looked
  up, not computed: about 150 steps less for the pairs.
- **More to learn from each token.** [Several targets](idea-multi-token-prediction.html), [small
  batches first](idea-batch-size-stages.html), [dense
  connections](idea-dense-connections-mudd.html), [averages of the last
  weights](idea-averages-at-the-end.html).
- **Cheaper matmuls.** [FP8](idea-fp8-head.html), [half the
  width](idea-heads-of-half-the-width.html) in attention, and a [softmax of some
  tokens](idea-sampled-softmax.html): 8.8 of the last 34 seconds.

The 39.9 seconds belong to [#92](2026-08-30_92g_NgramTable), which has a table of 65 billion
parameters over eight GPUs. That is another model than GPT-2 small: [several people
doubt](../docs/after-53.md#what-is-open) that it is in the spirit of the race, and Keller Jordan
called it legitimate. What never changed is the text and the loss to reach.

**No GPU has run our scripts yet.** Minutes and losses here are those that the records' authors
published. On a CPU, in float64, our scripts compute [what the public ones
do](../docs/deviations.md#how-equality-was-shown).

There is [a second race](optimizers/README.md), by steps: the same model, text and batch for all,
and any optimizer. One GPU is enough. It went from 3,600 steps with Muon to 2,690. [An optimizer of
your own](../docs/optimizers.md) is judged on a laptop in minutes; [how far to trust
that](optimizers/README.md#does-the-laptop-predict-the-ladder) was measured.

**[Run it](run-it.html)** on one GPU, on eight, or on a laptop. Read [the story](#story) below, [the
ladder of all scripts](README.md), or [the ideas through time](ideas.html).
"""
