"""How run.sh starts a script on this machine's GPUs, in words that it prints.

The first line: GPUs, processes, processes that there could be, sequences of a step, and the flags
that let the script fit a GPU of little memory. docs/gpus.md has the count behind them. Each further
line is a script of this folder that makes its data.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

import train_gpt

# (GiB of a GPU, into how many parts its sequences are cut). What the root was counted to hold at
# its peak, and 1.5 GiB for CUDA, gaps between tensors and a screen.
PARTS = [(21.3, 1), (13.0, 2), (9.4, 4), (6.6, 8)]
FEWEST_SHARDS = 8  # of FineWeb, each of 100 million tokens; enough for most records
TABLES = {  # files that records read beside the text, and what makes them
    "data/fineweb10B/prefixes.npy": "prefixes.py",
    "data/fineweb10B/canonical.npz": "canonical.py"}
OWN_PLAN = ("--stages", "--seq_len", "--sequences_per_step", "--sequences_per_forward", "--resume")


def flags_that_fit(cfg, gib: float) -> str:
    """Flags for a GPU of so many GiB. The tokens of a step stay; 'none' where nothing fits."""
    parts = next((parts for least, parts in PARTS if gib >= least), 0)
    if parts == 1:
        return ""
    if parts == 0:
        return "none"
    if cfg.sequences_per_forward >= parts:  # of the first records: the same steps in more passes
        return f"--sequences_per_forward {cfg.sequences_per_forward // parts}"
    if hasattr(cfg, "stages"):
        rows = tuple(replace(row, seq_len=row.seq_len // parts) for row in cfg.stages)
        flags = f"--stages {train_gpt.show(rows)}"
    else:
        flags = f"--seq_len {cfg.seq_len // parts}"
    flags += f" --sequences_per_step {cfg.sequences_per_step * parts}"
    if parts == 8:  # else validation would be the peak
        flags += f" --val_seq_len {min(cfg.val_seq_len, 131072)}"
    return flags


def scripts_of_data(cfg) -> list[str]:
    """The scripts that make what the run reads, with their words; none for data of one's own."""
    if "pocket" in cfg.train_files:
        return ["pocket.py"]
    if "fineweb" not in cfg.train_files:
        return []
    repo = Path(__file__).parent.parent
    paths = [getattr(cfg, name, "") for name in ("prefix_file", "canonical_file")]
    scripts = [TABLES[path] for path in paths if path in TABLES and not (repo / path).exists()]
    shards = math.ceil(train_gpt.plan(cfg).tokens / 1e8)
    return [*scripts, f"fineweb.py {max(FEWEST_SHARDS, shards)}"]


def plan(argv: list[str]):
    """Print the plan. Raises UserError for wrong flags, and where the machine cannot train."""
    cfg = train_gpt.parse_args(argv)
    gpus = train_gpt.count_gpus(cfg.device)
    most, flags = 1, ""
    if cfg.preset == "record":
        most = gpus
        memory = [torch.cuda.get_device_properties(i).total_memory for i in range(gpus)]
        if memory and not any(word.startswith(OWN_PLAN) for word in argv):
            flags = flags_that_fit(cfg, min(memory) / 2**30)
    if flags != "none":
        cfg = train_gpt.parse_args([*flags.split(), *argv])
    fits = [n for n in range(1, most + 1) if cfg.sequences_per_step % n == 0]
    processes = max(fits, default=1)
    if gpus:
        train_gpt.check_gpu_machine(processes)
    print(gpus, processes, most, cfg.sequences_per_step, flags)
    print(*scripts_of_data(cfg), sep="\n")


if __name__ == "__main__":
    try:
        plan(sys.argv[1:])
    except train_gpt.UserError as error:
        print("run.sh:", *str(error).split(), file=sys.stderr)
        sys.exit(2)
