#!/usr/bin/env python3
"""Print what a trained model says after a prompt.

    python data/sample.py [CHECKPOINT] [--prompt TEXT] [--tokens N]

Without a checkpoint, the newest one under logs/ is taken. The model is built by the script that
trained it, whose source its run's log holds, or by the one named by --script.
"""

import math
import sys
from pathlib import Path
from types import ModuleType

import torch
from shards import DataError, Parser, run
from text import END_OF_TEXT, load_tokenizer


def newest_checkpoint() -> Path:
    """Return the newest checkpoint of the runs in the current folder. Raises: DataError."""
    found = sorted(Path("logs").glob("*/step-*.pt"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise DataError("no checkpoint under logs/: train with --save_every, or name a checkpoint")
    return found[-1]


def load_script(path: Path) -> ModuleType:
    """Return the script at path, which may be a log that begins with it. Raises: DataError."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; name the checkpoint's script by --script")
    script = sys.modules["script"] = ModuleType("script")
    script.__file__ = str(path)
    source = path.read_text(errors="replace").partition("\n" + "=" * 100 + "\n")[0]
    try:
        exec(compile(source, path, "exec"), vars(script))
        assert script.GPT and script.Hyperparameters
    except Exception as error:  # by what is in the file
        raise DataError(f"{path}: no training script, {type(error).__name__}; name the "
                        "checkpoint's script by --script") from error
    return script


def load_model(script: ModuleType, path: Path, device: str) -> torch.nn.Module:
    """Return the model of the checkpoint, in evaluation. Raises: DataError."""
    try:
        state = script.load_checkpoint(path)
        model = script.GPT(script.Hyperparameters(**state["hyperparameters"]))
        model.load_state_dict(state["model"])
        return model.to(device).eval()
    except (script.UserError, RuntimeError) as error:
        raise DataError(" ".join(str(error).split())) from error


def find_tokenizer(eot_token: int) -> tuple:
    """Return the functions from text to token ids and back. Raises: DataError."""
    names = [name for name, token in END_OF_TEXT.items() if token == eot_token]
    if not names:
        raise DataError(f"eot_token {eot_token}: of no tokenizer known, {', '.join(END_OF_TEXT)}")
    encode = load_tokenizer(names[0])
    if names == ["bytes"]:
        return encode, lambda ids: bytes(ids).decode(errors="replace")
    import tiktoken

    return encode, tiktoken.get_encoding(names[0]).decode


@torch.no_grad()
def sample(model, ids: list[int], tokens: int, temperature: float, top_k: int) -> list[int]:
    """Return ids and up to `tokens` more, drawn one by one until the document ends.

    temperature divides the logits, 0 takes the likeliest; top_k, where it is not 0, leaves only
    the likeliest.
    """
    cfg, device, ids = model.cfg, next(model.parameters()).device, list(ids)
    for _ in range(tokens):
        inputs = torch.tensor([ids[-cfg.val_seq_len :]], dtype=torch.int32, device=device)
        logits = model.logits(model.hidden(inputs)[0, -1])[: cfg.vocab_size]
        if top_k:
            logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -math.inf
        shares = (logits / max(temperature, 1e-6)).softmax(-1)
        ids.append(torch.multinomial(shares, 1).item())
        if ids[-1] == cfg.eot_token:
            break
    return ids


def not_negative(kind: type):
    """Return a parser's type for numbers from 0 on."""
    def number(text: str):
        if not 0 <= (value := kind(text)) < math.inf:
            raise ValueError
        return value
    return number


def main() -> None:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: the newest under logs/")
    parser.add_argument("--script", type=Path, help="that trained it; default: as its log has it")
    parser.add_argument("--prompt", default="\n", help="text to go on from")
    parser.add_argument("--tokens", type=not_negative(int), default=200, help="at most, new ones")
    parser.add_argument("--temperature", type=not_negative(float), default=1.0,
                        help="divides the logits; 0: always the likeliest token")
    parser.add_argument("--top_k", type=not_negative(int), default=0,
                        help="the next token is one of the likeliest k; 0: of all")
    parser.add_argument("--seed", type=not_negative(int), default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    path = args.checkpoint or newest_checkpoint()
    if not path.is_file():
        raise DataError(f"{path}: there is no such checkpoint; name another, or none: the newest")
    script = load_script(args.script or path.with_name("log.txt"))
    model = load_model(script, path, args.device)
    encode, decode = find_tokenizer(model.cfg.eot_token)
    torch.manual_seed(args.seed)
    prompt = [model.cfg.eot_token, *map(int, encode(args.prompt))]
    ids = sample(model, prompt, args.tokens, args.temperature, args.top_k)
    print(decode([token for token in ids if token != model.cfg.eot_token]))


if __name__ == "__main__":
    run(main)
