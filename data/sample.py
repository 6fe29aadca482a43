#!/usr/bin/env python3
"""Print what a trained model writes after a prompt, as it writes it.

    python data/sample.py [CHECKPOINT] [--prompt TEXT | --prompt_file FILE] [--num_samples N]

Without a checkpoint, the last step is taken of the run under logs/ whose log was written last. The
model is built by the script that trained it: its run's log begins with that script's source. It is
run where it is this repository's script or a record's. --script names any other.
"""

import argparse
import codecs
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
sys.path.append(str(Path(__file__).parents[1] / "records"))
from ledger.records import record_folders
from shards import DataError, Parser, load_script, read_source, run
from text import END_OF_TEXT, STDIN, load_tokenizer, open_bytes

ROOT = Path(__file__).resolve().parent.parent
SMALL_MODEL = 10_000_000  # parameters; below it threads wait for each other longer than they work
BETWEEN_SAMPLES = "\n" + "-" * 20


def last_checkpoint() -> Path:
    """Return the last step's of the run whose log was written last. Raises: DataError.

    Other names than step-NNNNNN.pt are a person's. Between runs the clock decides, so it is said.
    """
    last_steps = {}
    for path in sorted(Path("logs").glob("*/step-" + 6 * "[0-9]" + ".pt")):
        last_steps[path.parent] = path
    if not last_steps:
        raise DataError("no checkpoint under logs/: train with --save_every, or name a checkpoint")

    def written(folder):
        log = folder / "log.txt"
        return log.stat().st_mtime_ns if log.exists() else 0

    found = last_steps[max(last_steps, key=written)]
    if len(last_steps) > 1:
        print(f"{found}, of {len(last_steps)} runs", file=sys.stderr)
    return found


def check_known(log: Path) -> None:
    """Raise DataError where the log begins with code that is not of this repository."""
    source = read_source(log).rstrip()
    for folder in (ROOT, *record_folders(ROOT / "records")):
        script = folder / "train_gpt.py"
        if script.is_file() and source == script.read_text("utf-8").rstrip():
            return
    raise DataError(f"{log}: its source is neither train_gpt.py nor a record's, and would be run; "
                    f"read it, then: --script {log}")


def load_model(path: Path, script: Path | None, device: str) -> torch.nn.Module:
    """Return the model of the checkpoint, in evaluation, built by its script. Raises: DataError."""
    log = path.with_name("log.txt")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; name a checkpoint, logs/RUN/step-*.pt")
    if not (script or log).is_file():
        raise DataError(f"{path}: there is no {script or log}; name a checkpoint in its run's "
                        "folder, or its script by --script")
    if script is None:
        check_known(log)
    trainer = None
    try:
        trainer = load_script(script or log)
        state = trainer.load_checkpoint(path)
        cfg = trainer.shorten(trainer.hyperparameters({}, state["settings"]))
        model = trainer.GPT(cfg)
        model.load_state_dict(state["model"])
        for name in "set_stage", "set_window":  # of windows and rotary table, as the run had them
            if hasattr(model, name):
                getattr(model, name)(trainer.schedule(state["step"], cfg))
        if hasattr(model, "ngram_table"):  # which is an optimizer's state
            ranks = trainer.Ranks(replace(cfg, device=device))
            trainer.build_optimizers(model, cfg, ranks)
            table = model.ngram_table
            table.load_full_state(state["optimizers"][table.name])
    except Exception as error:  # by what is in the files
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        what = f"{path}: not of this script" if trainer else f"{script or log}: no training script"
        said = f"{what} ({reason})"
        if type(error).__name__ == "UserError":  # the script says it, with a remedy of its flags
            said = str(error).rpartition("; ")[0]
        raise DataError(f"{said}; name another checkpoint, or its script by --script") from error
    try:
        torch.zeros(1, device=device).item()  # which the device `meta` cannot
        return model.to(device).eval()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"--device {device}: {reason}; cpu is always there") from error


def find_tokenizer(eot_token: int) -> str:
    """Return the name of the tokenizer with this end-of-text token. Raises: DataError."""
    for name, token in END_OF_TEXT.items():
        if token == eot_token:
            return name
    raise DataError(f"eot_token {eot_token}: of no tokenizer known, {', '.join(END_OF_TEXT)}")


def read_prompt(text: str, file: str | None) -> str:
    """Return the text, or what is in the file where one is named. Raises: DataError."""
    given = text.encode(errors="surrogateescape")  # the bytes as given
    if file is not None:
        with open_bytes(file) as prompt:
            given = prompt.read()
    try:
        return given.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        told = {None: "--prompt", STDIN: "standard input"}.get(file, file)
        raise DataError(f"{told}: not UTF-8 at byte {error.start}; convert it first, as with "
                        "iconv -t utf-8") from None


@torch.no_grad()
def draw_tokens(model, ids: list[int], tokens: int, temperature: float,
                top_k: int) -> Iterator[int]:
    """Yield up to `tokens` token ids that follow ids, until the document ends.

    temperature divides the logits, 0 takes the likeliest; top_k, where it is not 0, leaves only
    the likeliest. Ids beyond the end-of-text token, the tokenizer's last, are never drawn.
    """
    cfg, device = model.cfg, next(model.parameters()).device
    ids = list(ids)
    for _ in range(tokens):
        seen = ids[-cfg.val_seq_len:]
        inputs = torch.tensor([seen], dtype=torch.int32, device=device)
        logits = model.logits(model.hidden(inputs)[0, -1])[:cfg.eot_token + 1]
        if top_k:
            least = logits.topk(min(top_k, len(logits))).values[-1]
            logits[logits < least] = -math.inf
        probabilities = (logits / max(temperature, 1e-6)).softmax(-1)
        token = torch.multinomial(probabilities, 1).item()
        if token == cfg.eot_token:
            return
        yield token
        ids.append(token)


def whole_number(text: str) -> int:
    """Return a flag's whole number from 0 on. Raises: ArgumentTypeError."""
    if not re.fullmatch("[0-9]+", text) or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number from 0 on")
    return int(text)


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: the last under logs/")
    parser.add_argument("--script", type=Path, help="that trained it; default: its log's")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="\n", metavar="TEXT", help="text to go on from")
    prompt.add_argument("--prompt_file", metavar="FILE", help="read it there; - is standard input")
    parser.add_argument("--num_samples", type=whole_number, default=1, metavar="N",
                        help="texts, one after the other (default: %(default)s)")
    parser.add_argument("--tokens", type=whole_number, default=200, metavar="N",
                        help="new ones, at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T",
                        help="divides the logits; 0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top_k", type=whole_number, default=0, metavar="K",
                        help="draw from the likeliest K tokens; 0: from all (default: %(default)s)")
    parser.add_argument("--seed", type=whole_number, default=0,
                        help="the same one draws the same text (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="default: cuda where there is one, else cpu")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if not 0 <= args.temperature < math.inf:
        parser.error(f"--temperature {args.temperature}: give a number from 0 on")
    path = args.checkpoint or last_checkpoint()
    prompt = read_prompt(args.prompt, args.prompt_file)
    model = load_model(path, args.script, args.device)
    if sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    encode, bytes_of = load_tokenizer(find_tokenizer(model.cfg.eot_token))
    ids = [model.cfg.eot_token, *map(int, encode(prompt))]

    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has none
        sys.stdout.reconfigure(errors="replace")  # a terminal's encoding may lack some letters
    torch.manual_seed(args.seed)
    for number in range(args.num_samples):
        if number:
            print(BETWEEN_SAMPLES)
        print(prompt, end="", flush=True)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in draw_tokens(model, ids, args.tokens, args.temperature, args.top_k):
            print(decoder.decode(bytes_of(token)), end="", flush=True)
        print(decoder.decode(b"", final=True))


if __name__ == "__main__":
    run(main)
