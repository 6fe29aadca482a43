#!/usr/bin/env python3
"""The yardstick of the pocket preset: a plain GPT with AdamW, trained on the same shards.

    python tests/plain_baseline.py --train GLOB --val GLOB [--size quickstart] [--seed 0]

--size quickstart is the setting of nanoGPT's CPU quickstart (README of karpathy/nanoGPT) in code of
its own, without dropout. --size pocket has the pocket's layers, width, batch and steps, and the
mean length of its sequences. Its rate was the best of eight from 0.002 to 0.03 on the validation
set, on seeds 10 and 11.

`python tests/bench.py pocket` runs the first in turns with the preset; `python tests/bench.py
baselines` runs the second.
"""
import argparse
import glob
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    context: int  # tokens of a sequence
    batch: int  # sequences of a step
    steps: int
    lr: float


SIZES = dict(quickstart=Size(4, 4, 128, 64, 12, 2000, 1e-3),
             pocket=Size(4, 4, 64, 256, 8, 120, 3e-3))


def read_tokens(pattern):
    shards = []
    for file in sorted(glob.glob(pattern)):
        shards.append(np.fromfile(file, dtype=np.uint16, offset=1024))
    return torch.from_numpy(np.concatenate(shards).astype(np.int64))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        b, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocab, size):
        super().__init__()
        self.tok = nn.Embedding(vocab, size.width)
        self.pos = nn.Embedding(size.context, size.width)
        self.layers = nn.ModuleList(Layer(size.width, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * size.layers) if deep else 0.02)

    def forward(self, inputs, targets):
        x = self.tok(inputs) + self.pos.weight[: inputs.size(1)]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tok.weight)  # tied head
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model, tokens, limit, context):
    """Mean loss of the first tokens, cut into sequences: the first token of each sees itself."""
    tokens = tokens[: min(len(tokens), limit + 1)]
    rows = (len(tokens) - 1) // context
    inputs = tokens[: rows * context].view(rows, context)
    targets = tokens[1 : rows * context + 1].view(rows, context)
    total = 0.0
    for some, theirs in zip(inputs.split(512), targets.split(512)):
        total += model(some, theirs).item() * len(some)
    return total / rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--size", choices=SIZES, default="quickstart")
    parser.add_argument("--steps", type=int, help="default: the size's")
    parser.add_argument("--lr", type=float, help="default: the size's")
    parser.add_argument("--eval_every", type=int, default=250)
    parser.add_argument("--val_tokens", type=int, default=65536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=1.78)
    args = parser.parse_args()
    size = SIZES[args.size]
    context = size.context
    steps = args.steps or size.steps
    rate = args.lr or size.lr
    torch.manual_seed(args.seed)
    train = read_tokens(args.train)
    val = read_tokens(args.val)
    model = PlainGPT(int(train.max()) + 1, size)
    groups = [dict(params=[p for p in model.parameters() if p.ndim >= 2], weight_decay=0.1),
              dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.0)]
    opt = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=True)
    seconds = 0.0
    reached = "not reached"
    offsets = torch.arange(context + 1)
    warm_up = math.ceil(steps / 20)
    for step in range(steps + 1):
        if step % args.eval_every == 0 or step == steps:
            loss = validate(model, val, args.val_tokens, context)
            if reached == "not reached" and loss <= args.target:
                reached = f"{seconds:.2f}"
            print(f"step:{step}/{steps} val_loss:{loss:.4f} "
                  f"train_time:{1000 * seconds:.0f}ms", flush=True)
        if step == steps:
            break
        start = time.perf_counter()
        if step < warm_up:
            factor = (step + 1) / warm_up
        else:
            factor = 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))
        for group in opt.param_groups:
            group["lr"] = rate * factor
        rows = train[torch.randint(len(train) - context - 1, (size.batch, 1)) + offsets]
        model(rows[:, :-1], rows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - start
    print(f"---\nparameters: {sum(p.numel() for p in model.parameters())}\n"
          f"tokens: {steps * size.batch * context}\ncontext: {context}\nval_loss: {loss:.6f}\n"
          f"train_seconds: {seconds:.2f}\nseconds_to_target: {reached}")


if __name__ == "__main__":
    main()
