#!/usr/bin/env python3
"""Print what a trained model writes after a prompt, as it writes it.

    python data/sample.py [CHECKPOINT] [--prompt TEXT | --prompt_file FILE] [--num_samples N]

Without a checkpoint, the newest one under logs/ is taken. The model is built by the script that
trained it: its run's log begins with that script's source. It is run where it is this repository's
script or a record's. --script names any other.
"""

import codecs
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import torch
from shards import DataError, Parser, run
from text import END_OF_TEXT, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
END_OF_SOURCE = "\n" + "=" * 100 + "\n"  # in a log
STDIN = "-"
LARGEST_PROMPT = 1 << 20  # bytes
SMALL_MODEL = 10_000_000  # parameters; below it threads wait for each other longer than they work
SEEDS = 1 << 64
BETWEEN_SAMPLES = "\n" + "-" * 20


def newest_checkpoint() -> Path:
    """Return the newest checkpoint of the runs in the current folder. Raises: DataError."""
    found = sorted(Path("logs").glob("*/step-*.pt"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise DataError("no checkpoint under logs/: train with --save_every, or name a checkpoint")
    return found[-1]


def read_source(path: Path) -> str:
    """Return the source at path, which may be a log that begins with it. Raises: DataError."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; name the checkpoint's script by --script")
    return path.read_text(errors="replace").partition(END_OF_SOURCE)[0]


def check_known(path: Path) -> None:
    """Raise DataError where the log at path begins with code that is not of this repository."""
    known = [ROOT / "train_gpt.py", *ROOT.glob("records/*/train_gpt.py")]
    source = read_source(path).rstrip()
    if not any(source == script.read_text().rstrip() for script in known if script.is_file()):
        raise DataError(f"{path}: its source is neither train_gpt.py nor a record's, and would be "
                        f"run; read it, then: --script {path}")


def load_script(path: Path) -> ModuleType:
    """Return the script at path, which may be a log that begins with it. Raises: DataError."""
    source = read_source(path)
    script = ModuleType("script")
    script.__file__ = str(path)
    sys.modules["script"] = script  # where dataclasses look for it
    try:
        exec(compile(source, path, "exec"), vars(script))
        assert script.GPT and script.Hyperparameters
    except Exception as error:  # by what is in the file
        raise DataError(f"{path}: no training script, {type(error).__name__}; name the "
                        "checkpoint's script by --script") from error
    return script


def check_device(name: str) -> None:
    """Raise DataError where no tensor with values can be made on the device."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"--device {name}: {reason}; cpu is always there") from error


def load_model(script: ModuleType, path: Path, device: str) -> torch.nn.Module:
    """Return the model of the checkpoint, in evaluation. Raises: DataError."""
    try:
        state = script.load_checkpoint(path)
        model = script.GPT(script.Hyperparameters(**state["settings"]))
        model.load_state_dict(state["model"])
    except script.UserError as error:
        raise DataError(one_line(error)) from error
    except (RuntimeError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not of this script, {one_line(error)}; name its script by "
                        "--script") from error
    return model.to(device).eval()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def find_tokenizer(eot_token: int) -> tuple[Callable, Callable]:
    """Return the functions from a text to token ids and from one id to its bytes.

    Raises: DataError where no known tokenizer has this end-of-text token.
    """
    names = {token: name for name, token in END_OF_TEXT.items()}
    if eot_token not in names:
        raise DataError(f"eot_token {eot_token}: of no tokenizer known, {', '.join(END_OF_TEXT)}")
    name = names[eot_token]
    encode = load_tokenizer(name)
    if name == "bytes":
        return encode, lambda token: bytes([token])
    import tiktoken

    return encode, tiktoken.get_encoding(name).decode_single_token_bytes


def read_prompt(text: str, file: str | None) -> str:
    """Return the text, or what is in the file where one is named. Raises: DataError."""
    if file is None:
        name, content = "--prompt", text.encode(errors="surrogateescape")  # the bytes as given
    elif file == STDIN:
        name, content = "standard input", sys.stdin.buffer.read(LARGEST_PROMPT + 1)
    else:
        name = file
        with open(file, "rb") as stream:
            content = stream.read(LARGEST_PROMPT + 1)
    if len(content) > LARGEST_PROMPT:
        raise DataError(f"{name}: a prompt has at most {LARGEST_PROMPT:,} bytes; cut it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 at byte {error.start}; convert it first, as with "
                        "iconv -t utf-8") from None


@torch.no_grad()
def draw_tokens(model, ids: list[int], tokens: int, temperature: float,
                top_k: int) -> Iterator[int]:
    """Yield up to `tokens` token ids that follow ids, until the document ends.

    temperature divides the logits, 0 takes the likeliest; top_k, where it is not 0, leaves only
    the likeliest.
    """
    cfg, device = model.cfg, next(model.parameters()).device
    ids = list(ids)
    for _ in range(tokens):
        seen = ids[-cfg.val_seq_len:]
        inputs = torch.tensor([seen], dtype=torch.int32, device=device)
        logits = model.logits(model.hidden(inputs)[0, -1])[:cfg.vocab_size]
        if top_k:
            least = logits.topk(min(top_k, len(logits))).values[-1]
            logits[logits < least] = -math.inf
        probabilities = (logits / max(temperature, 1e-6)).softmax(-1)
        token = torch.multinomial(probabilities, 1).item()
        if token == cfg.eot_token:
            return
        yield token
        ids.append(token)


def not_negative(kind: type) -> Callable[[str], float]:
    """Return a parser's type for numbers from 0 on."""
    def number(text: str):
        value = kind(text)
        if not 0 <= value < math.inf:
            raise ValueError
        return value
    return number


def make_parser() -> Parser:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", nargs="?", type=Path, help="default: the newest under logs/")
    parser.add_argument("--script", type=Path, help="that trained it; default: its log's")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="\n", metavar="TEXT", help="text to go on from")
    prompt.add_argument("--prompt_file", metavar="FILE", help="read it there; - is standard input")
    parser.add_argument("--num_samples", type=not_negative(int), default=1, metavar="N",
                        help="texts, one after the other (default: %(default)s)")
    parser.add_argument("--tokens", type=not_negative(int), default=200, metavar="N",
                        help="new ones, at most (default: %(default)s)")
    parser.add_argument("--temperature", type=not_negative(float), default=1.0, metavar="T",
                        help="divides the logits; 0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top_k", type=not_negative(int), default=0, metavar="K",
                        help="draw from the likeliest K tokens; 0: from all (default: %(default)s)")
    parser.add_argument("--seed", type=not_negative(int), default=0,
                        help="the same one draws the same text (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="default: cuda where there is one, else cpu")
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    if args.seed >= SEEDS:
        parser.error(f"--seed is {args.seed}; it is below 2**64")
    path = args.checkpoint or newest_checkpoint()
    if not path.is_file():
        raise DataError(f"{path}: there is no such checkpoint; name another, or none: the newest")
    prompt = read_prompt(args.prompt, args.prompt_file)
    check_device(args.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    log = path.with_name("log.txt")
    if not args.script:
        check_known(log)
    model = load_model(load_script(args.script or log), path, args.device)
    if sum(parameter.numel() for parameter in model.parameters()) >= SMALL_MODEL:
        torch.set_num_threads(threads)
    encode, bytes_of = find_tokenizer(model.cfg.eot_token)
    ids = [model.cfg.eot_token, *map(int, encode(prompt))]

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
