"""Judge a trained model by its logits alone: its loss, and whether it sees later tokens.

    python records/ledger/judge.py SCRIPT CHECKPOINT PRESET DEVICE

`ledger verify --replay` calls it, in a process of its own, as it runs the record's script. It
prints a line of JSON: the loss on the preset's validation data and their digest, and whether
logits depend on later tokens (leaks).
"""

import hashlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "data"))  # which has shards.py
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ledger.records import RULES, ladder_of
from shards import load_script

RECORDS = Path(__file__).resolve().parents[1]
CUTS = 32  # places from which on tokens are changed
PIECE = 4096  # positions whose logits are computed at once
# How much logits may differ by rounding: sums of other sizes, and bf16 on a GPU (2⁻⁸ of 30).
ROUNDING = {"cpu": 1e-3, "cuda": 0.25}


def load_model(script: Path, checkpoint: Path, device: str):
    """The trained model. This and `logits_of` are all that is taken of a record."""
    script = load_script(script)
    state = script.load_checkpoint(checkpoint)
    cfg = script.hyperparameters({"device": device}, state["settings"])
    model, optimizers = script.build(cfg, script.Ranks(cfg))
    script.load_state(model, optimizers, state, checkpoint)  # which may have a table's rows
    return model.eval()


@torch.no_grad()
def logits_of(model, rows: np.ndarray, device: str):
    """Yield the logits of rows of tokens (B, T), piece by piece, as numpy's (positions, V)."""
    tokens = torch.from_numpy(rows).int().to(device)
    size = min(PIECE, 2**26 // model.cfg.vocab_size)
    hidden = model.hidden(tokens).flatten(0, 1)
    for part, inputs in zip(hidden.split(size), tokens.flatten().split(size)):
        logits = model.logits(part)
        # #91 leaves logits out in its last validation.
        if getattr(model, "forbidden", None) is not None:
            logits = model.canonical(logits, inputs)
        if type(logits) is not torch.Tensor:  # another class may compute what it likes
            sys.exit(f"the logits are no tensor but a {type(logits).__name__}")
        yield logits.float().cpu().numpy()


def mean_loss(model, tokens: np.ndarray, device: str) -> float:
    """Nats per token, by numpy's own softmax."""
    exp, log = np.exp, np.log
    length, total = model.cfg.val_seq_len, 0.0
    for start in range(0, len(tokens) - 1, length):
        row = tokens[start : start + length + 1]
        targets = row[1:]
        for logits in logits_of(model, row[None, :-1], device):
            logits = logits.astype(np.float64)
            now, targets = np.split(targets, [len(logits)])
            top = logits.max(1, keepdims=True)
            log_sum = top[:, 0] + log(exp(logits - top).sum(1))
            total += float((log_sum - logits[np.arange(len(now)), now]).sum())
    return total / (len(tokens) - 1)


def leak(model, tokens: np.ndarray, device: str) -> float:
    """How far logits move by later tokens."""
    draw = random.SystemRandom()
    length, moved = min(model.cfg.val_seq_len, PIECE), 0.0
    for _ in range(CUTS):
        start = draw.randrange(0, len(tokens) - 1 - length, length)
        row = tokens[start : start + length]
        cut, changed = draw.randrange(1, length), row.copy()
        changed[cut:] = row[[draw.randrange(length) for _ in row[cut:]]]
        logits = np.concatenate([*logits_of(model, np.stack([row, changed]), device)])
        seen, seen_changed = np.split(logits, 2)
        moved = max(moved, abs(seen[:cut] - seen_changed[:cut]).max())
    return moved


def judge(script: Path, checkpoint: Path, preset: str, device: str) -> dict:
    """The verdict on a checkpoint. Data are read here, and numpy does the mathematics."""
    rules = RULES[ladder_of(script.parent)][preset]
    (shard,) = RECORDS.parent.glob(rules["val_files"])
    tokens = np.fromfile(shard, "<u2", int(rules["val_tokens"]) + 1, offset=1024)
    digest = hashlib.sha256(tokens).hexdigest()[:16]
    tokens = tokens.astype(np.int64)
    model = load_model(script, checkpoint, device)
    leaks = bool(leak(model, tokens, device) > ROUNDING[device])
    return dict(loss=mean_loss(model, tokens, device), digest=digest, leaks=leaks)


if __name__ == "__main__":
    print(json.dumps(judge(*map(Path, sys.argv[1:3]), *sys.argv[3:])))
