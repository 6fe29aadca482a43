#!/usr/bin/env python3
"""The yardstick of the pocket preset: a plain small GPT, trained on the same shards.

It is the setting of nanoGPT's CPU quickstart (README of karpathy/nanoGPT) in code of its own:
4 layers, 4 heads, width 128, context 64, 12 sequences a step, 2,000 AdamW steps, no dropout.

    python tests/plain_baseline.py --train GLOB --val GLOB [--steps 2000] [--seed 0] [--target 1.64]

`python tests/bench.py pocket` runs it in turns with the preset, since seconds on a shared machine
mean little by themselves. Prints a line for each evaluation, then a block of `key: value`.
"""
import argparse
import glob
import math
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12


def read_tokens(pattern):
    files = sorted(glob.glob(pattern))
    if not files:
        raise SystemExit(f"no shard matches {pattern!r}")
    tokens = np.concatenate([np.fromfile(file, dtype=np.uint16, offset=1024) for file in files])
    if len(tokens) < CONTEXT + 2:
        raise SystemExit(f"{pattern!r} has {len(tokens)} tokens; {CONTEXT + 2} are needed")
    return torch.from_numpy(tokens.astype(np.int64))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if deep else 0.02)

    def forward(self, inputs, targets):
        x = self.tok(inputs) + self.pos.weight[: inputs.size(1)]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tok.weight)  # tied head
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model, tokens, limit):
    tokens = tokens[: min(len(tokens), limit + 1)]
    rows = (len(tokens) - 1) // CONTEXT
    inputs = tokens[: rows * CONTEXT].view(rows, CONTEXT)
    targets = tokens[1 : rows * CONTEXT + 1].view(rows, CONTEXT)
    total = sum(model(inputs[i : i + 512], targets[i : i + 512]).item() * len(inputs[i : i + 512])
                for i in range(0, rows, 512))
    return total / rows


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--train", required=True)
    ap.add_argument("--val", required=True)
    ap.add_argument("--steps", type=int, default=2000)
    ap.add_argument("--eval_every", type=int, default=250)
    ap.add_argument("--val_tokens", type=int, default=262144)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--target", type=float, default=1.64)
    args = ap.parse_args()
    if args.steps < 1 or args.eval_every < 1 or args.val_tokens < CONTEXT:
        ap.error(f"--steps and --eval_every are at least 1, --val_tokens at least {CONTEXT}")
    torch.manual_seed(args.seed)
    train, val = read_tokens(args.train), read_tokens(args.val)
    model = PlainGPT(int(train.max()) + 1)
    groups = [dict(params=[p for p in model.parameters() if p.ndim >= 2], weight_decay=0.1),
              dict(params=[p for p in model.parameters() if p.ndim < 2], weight_decay=0.0)]
    opt = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    seconds, reached, offsets = 0.0, None, torch.arange(CONTEXT + 1)
    for step in range(args.steps + 1):
        if step % args.eval_every == 0 or step == args.steps:
            loss = validate(model, val, args.val_tokens)
            if reached is None and loss <= args.target:
                reached = seconds
            print(f"step:{step}/{args.steps} val_loss:{loss:.4f} "
                  f"train_time:{1000 * seconds:.0f}ms", flush=True)
        if step == args.steps:
            break
        start = time.perf_counter()
        if step < 100:
            factor = (step + 1) / 100
        else:
            factor = 0.55 + 0.45 * math.cos(math.pi * (step - 100) / (args.steps - 100))
        for group in opt.param_groups:
            group["lr"] = 1e-3 * factor
        rows = train[torch.randint(len(train) - CONTEXT - 1, (BATCH, 1)) + offsets]
        model(rows[:, :-1], rows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        seconds += time.perf_counter() - start
    reached = "not reached" if reached is None else f"{reached:.2f}"
    print(f"---\nparameters: {sum(p.numel() for p in model.parameters())}\nval_loss: {loss:.6f}\n"
          f"train_seconds: {seconds:.2f}\nseconds_to_target: {reached}")


if __name__ == "__main__":
    main()
