"""How run.sh starts a script on this machine's GPUs, in words that it prints.

    plan.py SCRIPT [flags of the script]
    plan.py --table

The first line: GPUs, processes, and flags that let the script fit a GPU of little memory. Each
further line is a script of this folder that makes its data. Wrong flags, a machine that cannot
train, and a record that does not fit end it with one line and exit code 2. --table prints all
records against cards of 8 to 80 GB, in Markdown.
"""

import math
import os
import re
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
import machine
from shards import load_script

SHARD_TOKENS = 10**8  # of FineWeb's training shards
FEWEST_SHARDS = 8  # enough for most records
# Share of the text that is trained on, where documents are cut at so many tokens or more. Nine
# shards were enough for the published #30, which cuts at 2,048 and trains on 670 million tokens:
# 0.745. This is a little less. Half of the text for shorter documents is a guess on the safe side.
LEAST_KEPT = {0: 0.5, 2048: 0.7}
TABLES = {  # files that records read beside the text, and what makes them
    "data/fineweb10B/prefixes.npy": "prefixes.py",
    "data/fineweb10B/canonical.npz": "canonical.py"}

# GiB of one GPU as `bench.py kernels` counts them with the head in one piece, by how the names of
# records begin: the peaks of training and of a validation, and what weights, gradients and state
# take of both. A record is taken to need what the last one before it needs that was counted, and
# one that is newer than all of them what the root needs.
MEMORY = {
    "2025-12-22": (27.2, 7.8, 2.4),
    "2026-01-04": (28.2, 8.5, 3.1),
    "2026-01-07": (28.5, 8.9, 3.3),
    "2026-01-19": (30.7, 11.4, 5.4),
    "2026-02-03": (31.7, 11.6, 6.3),
    "2026-03-06": (32.3, 14.4, 6.3),
    "2026-04-08": (32.4, 14.4, 6.3),
    "2026-04-29": (33.0, 15.0, 6.3),
    "2026-05-20": (32.4, 14.1, 5.7),
    "2026-05-27": (34.5, 16.2, 7.4),
    "2026-07-13": (34.5, 16.2, 7.4),
    "2026-08-03": (33.6, 13.4, 7.3),
    "2026-08-06": (34.5, 16.2, 7.4),
    "2026-08-30_92a_": (29.7, 13.0, 7.1),
    "2026-08-30_92b_": (29.7, 13.9, 7.1),
    "2026-08-30_92c_": (30.0, 14.1, 7.3),
    "2026-08-30_92e_": (31.3, 15.4, 8.6),
    "2026-08-30_92f_": (27.4, 15.4, 8.6),
    "2026-08-30_92g4": (28.1, 13.0, 5.5),
    "2026-08-30_92g_": (42.3, 28.1, 20.6),
    "2026-08-30_92h_": (37.8, 28.1, 20.6),
    "2026-08-30_92i_": (38.0, 28.1, 20.6),
}
COUNTED_TOKENS = 49_152  # of a forward pass
# Without FP8 the first needs what the second does.
NEEDS_FP8 = {"2026-08-30_92h_": "2026-08-30_92g_", "2026-08-30_92i_": "2026-08-30_92g_"}
TABLE_IN_PARTS = "2026-08-30_92g4"  # from here on a rank has its part; an eighth was counted
SAVED_BY_CHUNKS = {1: 0.0, 2: 4.4, 4: 6.5, 8: 7.4}  # GiB of training's, by pieces of the head
SPARE = 2.0  # GiB for CUDA, gaps between tensors and a screen
# Minutes that the first start compiles for each stage, by how the names of records begin: estimates
COMPILING = {"": 1.2, "2026-07-13": 1.7}
PARTS = (1, 2, 4, 8)  # into which a sequence may be cut
OWN_PLAN = ("--shorten", "--sequences_per_step", "--sequences_per_forward", "--val_seq_len",
            "--resume")


def count_gpus(device: str) -> int:
    """This machine's GPUs, none where --device is cpu. Raises MachineError."""
    if device == "cpu":
        return 0
    gpus = torch.cuda.device_count()
    # It also counts none where the driver does not answer.
    broken = (machine.SYSTEM / "dev/nvidiactl").exists() and torch.version.cuda
    if gpus or (broken and "CUDA_VISIBLE_DEVICES" not in os.environ):
        try:
            torch.cuda.init()
        except RuntimeError as error:
            said = f"CUDA does not start: {error}; --device cpu does without"
            raise machine.MachineError(said) from None
    return gpus


def most_ranks(cfg, gpus: int) -> int:
    """As many ranks as there are GPUs, or the most below that divide the sequences of a step."""
    return max((n for n in range(1, gpus + 1) if cfg.sequences_per_step % n == 0), default=1)


def record_of(script) -> str:
    """The name of a script's record, as its docstring says; else the oldest that was counted."""
    named = re.search(r"^Record: (\S+)", script.SCRIPT.read_text(), re.MULTILINE)
    return named[1] if named else min(MEMORY)


def tokens_of_forward(script, cfg) -> int:
    """The most tokens of one forward pass in the whole schedule."""
    lengths = {script.schedule(step, cfg).seq_len for step in range(cfg.num_iterations)}
    return max(lengths, default=0) * cfg.sequences_per_forward


def counted_memory(script, cfg, ranks: int, fp8: bool) -> tuple[float, float, float]:
    """A row of MEMORY for a script on so many GPUs, with the tokens of its forward passes."""
    name, newest = record_of(script), max(MEMORY)
    before = max((key for key in MEMORY if key <= name), default="")
    if not before or name[:10] > newest[:10]:
        before = min(MEMORY)
    training, validation, state = MEMORY[before if fp8 else NEEDS_FP8.get(before, before)]
    training = state + (training - state) * tokens_of_forward(script, cfg) / COUNTED_TOKENS
    validation = state + (validation - state) * cfg.val_seq_len / 2**18
    if before >= TABLE_IN_PARTS:
        counted = script.Hyperparameters().ngram_rows / 8
        more = (cfg.ngram_rows / ranks - counted) * 2 * cfg.model_dim / 2**30  # in bf16
        return training + more, validation + more, state + more
    return training, validation, state


def flags_that_fit(script, cfg, memory: int, ranks: int, fp8: bool = True) -> str:
    """Flags for GPUs of so many bytes, with FP8 matmuls or without.

    The tokens of a step stay. Raises MachineError.
    """
    training, validation, state = counted_memory(script, cfg, ranks, fp8)
    room = memory / 2**30 - SPARE - state
    chunks = cfg.head_chunks or (8 if memory < 32e9 else math.ceil(70e9 / memory))
    if not hasattr(script.schedule(0, cfg), "classes"):  # whose heads are small
        saved = max(gib for n, gib in SAVED_BY_CHUNKS.items() if n <= chunks)
        training -= saved * tokens_of_forward(script, cfg) / COUNTED_TOKENS
    shorter = next((n for n in PARTS if (training - state) / n <= room), None)
    cuts = next((n for n in PARTS if (validation - state) / n <= room), None)
    if not shorter or not cuts:
        fewer = "fewer --ngram_rows, or " if hasattr(cfg, "ngram_rows") else ""
        raise machine.MachineError(
            f"a GPU of {memory / 2**30:.1f} GiB is too small for {record_of(script)}, with "
            f"sequences of an eighth, too (docs/gpus.md); take {fewer}--preset pocket, which "
            "trains a small model")
    flags = []
    if shorter > 1 and cfg.sequences_per_forward >= shorter:
        # The first records take the same sequences in more forward passes.
        flags.append(f"--sequences_per_forward {cfg.sequences_per_forward // shorter}")
    elif shorter > 1:
        flags.append(f"--shorten {shorter}")
    if cuts > 1:
        flags.append(f"--val_seq_len {cfg.val_seq_len // cuts}")
    return " ".join(flags)


def compiling_minutes(script, cfg) -> int:
    """How long the first start compiles on a GPU, about: by estimate."""
    stages = {script.schedule(step, cfg).stage for step in range(cfg.num_iterations)}
    name = max(key for key in COMPILING if key <= record_of(script))
    return max(1, round(len(stages) * COMPILING[name]))


def count_shards(script, cfg) -> int:
    """How many shards of FineWeb a run may read, by its schedule."""
    shards = left = 0  # left: tokens of the last one
    for step in range(cfg.num_iterations):
        now = script.schedule(step, cfg)
        longest = getattr(now, "max_document_tokens", getattr(cfg, "max_document_tokens", 0))
        kept = max(share for least, share in LEAST_KEPT.items() if least <= longest)
        read = cfg.sequences_per_step * now.seq_len / (kept if longest else 1)
        if left <= read:  # a step's sequences come from one shard, and need one token more
            shards, left = shards + 1, SHARD_TOKENS
        left -= read
    return shards


def scripts_of_data(script, cfg) -> list[str]:
    """The scripts that make what the run reads, with their words; none for data of one's own."""
    if "pocket" in cfg.train_files:
        return ["pocket.py"]
    if "fineweb" not in cfg.train_files:
        return []
    repo = Path(__file__).parent.parent
    paths = [getattr(cfg, name, "") for name in ("prefix_file", "canonical_file")]
    scripts = [TABLES[path] for path in paths if path in TABLES and not (repo / path).exists()]
    return [*scripts, f"fineweb.py {max(FEWEST_SHARDS, count_shards(script, cfg))}"]


def check_gpus(gpus: int) -> None:
    """Raise MachineError where this torch is AMD's, or a GPU cannot run the compiled model."""
    if gpus and torch.version.hip:
        raise machine.MachineError("torch is built for AMD's GPUs, on which no script here was "
                                   "tried: --device cpu trains a small model without them")
    found = [torch.cuda.get_device_capability(index) for index in range(gpus)]
    if found and min(found) < machine.OLDEST_CAPABILITY and len(set(found)) > 1:
        raise machine.MachineError(f"GPU {found.index(min(found))} has compute capability "
                                   f"{'.'.join(map(str, min(found)))}, below 8.0: leave it out by "
                                   "CUDA_VISIBLE_DEVICES")
    machine.check_capability(found)


# ---- A table for the page ----

CARDS = {  # GPUs, GiB of each that CUDA reports, and whether they have FP8
    "8 GB": (1, 7.7, True),
    "12 GB": (1, 11.6, True),
    "16 GB": (1, 15.6, True),
    "24 GB, no FP8": (1, 23.5, False),
    "24 GB": (1, 23.5, True),
    "32 GB": (1, 31.4, True),
    "48 GB": (1, 47.4, True),
    "80 GB, no FP8": (1, 79.1, False),
    "80 GB": (1, 79.1, True),
    "8 × 80 GB": (8, 79.1, True),
}


def cell_of(script, cfg, gpus: int, gib: float, fp8: bool) -> str:
    """How a record fits a card: the part of its sequences, or "–"."""
    try:
        flags = flags_that_fit(script, cfg, int(gib * 2**30), gpus, fp8)
    except machine.MachineError:
        return "–"
    shorter = re.search(r"--shorten (\d+)", flags)
    return f"1/{shorter[1]}" if shorter else "whole"


def table(rows: list, cards: dict) -> str:
    """Records, each with flags, against cards in Markdown, with the shards that each reads."""
    lines = [["Record", "Shards", *cards], ["---"] * (2 + len(cards))]
    for record, flags in rows:
        script = load_script(Path(__file__).parent.parent / "records" / record / "train_gpt.py")
        cfg = script.parse_args(flags.split())
        cells = [cell_of(script, cfg, *card) for card in cards.values()]
        shards = max(FEWEST_SHARDS, count_shards(script, cfg))
        name = record.partition("_")[2]  # without the date
        lines.append([f"{name} {flags}".strip(), str(shards), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def plan(script, argv: list[str]) -> None:
    """Print the plan. Raises the script's UserError, and MachineError."""
    cfg = script.parse_args(argv)
    gpus = count_gpus(cfg.device)
    check_gpus(gpus)
    if gpus:
        machine.check_compiler()
    most, flags = 1, ""
    if cfg.preset == "record":
        most = gpus
        memory = [torch.cuda.get_device_properties(i).total_memory for i in range(gpus)]
        if memory and not any(word.startswith(OWN_PLAN) for word in argv):
            fp8 = all(torch.cuda.get_device_capability(i) >= (8, 9) for i in range(gpus))
            flags = flags_that_fit(script, cfg, min(memory), most_ranks(cfg, gpus), fp8)
    cfg = script.shorten(script.parse_args([*flags.split(), *argv]))
    ranks = most_ranks(cfg, most)
    machine.check_shared_memory(ranks)
    if flags:
        said = "" if "--shorten" not in flags else "; losses of shorter sequences do not compare"
        print(f"run.sh: {flags}, for this GPU's memory{said} (docs/gpus.md)", file=sys.stderr)
    if ranks < most:
        print(f"run.sh: {ranks} of {most} GPUs: a step has {cfg.sequences_per_step} sequences",
              file=sys.stderr)
    if gpus and cfg.preset == "record":
        print(f"run.sh: the first start compiles for about {compiling_minutes(script, cfg)} "
              "minutes (estimated), later ones for about one", file=sys.stderr)
    machine.answer(f"{gpus} {ranks} {flags}")
    for line in scripts_of_data(script, cfg):
        machine.answer(line)


def main(path: str, *argv: str) -> int:
    if path == "--table":
        records = sorted(Path(__file__).parent.parent.glob("records/20*/train_gpt.py"))
        print(table([(path.parent.name, "") for path in records], CARDS))
        return 0
    script = load_script(Path(path))
    try:
        plan(script, list(argv))
    except (script.UserError, machine.MachineError) as error:
        print("run.sh:", *str(error).split(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
