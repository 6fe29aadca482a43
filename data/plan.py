"""How a script fits this machine's GPUs: ranks, flags for little memory, the data that it reads."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.append(str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out
from machine import MachineError, check_compiler, has_nvidia

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
# take of both. A record is taken to need what the last one before it needs that was counted. What
# is newer than all of them is taken to need what the root needs.
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
# GiB of the ladder by steps, whose records have one model: of a pass, and of each 1,024 tokens of
# it. An update needs, beside the state, so many times the largest tensor of the state. A head in
# pieces takes no less: Inductor sums the gradients of its bias over all pieces in one kernel.
OF_PASS, OF_ROW = 0.5, 0.414
OF_UPDATE = 5.5
SPARE = 2.0  # GiB for CUDA, gaps between tensors and a screen
# Minutes that the first start compiles for each stage, by how the names of records begin: estimates
COMPILING = {"": 1.2, "2026-07-13": 1.7}
COMPILING_BY_STEPS = 2.0  # one stage, and a step for each of six groups of matrices
PARTS = (1, 2, 4, 8)  # into which a sequence may be cut


# ---- GPUs ----


def count_gpus(script, device: str) -> int:
    """This machine's GPUs, none where --device is cpu. Raises MachineError where one cannot train.
    """
    if device == "cpu":
        return 0
    gpus = torch.cuda.device_count()
    # It also counts none where the driver does not answer, and where torch is a build for CPUs.
    shown = re.match(r"\d|GPU-|MIG-", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    if not gpus and not (shown and has_nvidia()):
        return 0
    if not torch.version.cuda and not torch.version.hip:
        raise MachineError(
            f"torch {torch.__version__} of {sys.executable} has no CUDA, and this machine has a "
            f"GPU: '{sys.executable} -m pip uninstall torch' lets the next start install another; "
            "or name a Python that has one: PYTHON=/path/to/python; --device cpu does without")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        raise MachineError(f"CUDA does not start: {error}; --device cpu does without") from None
    for index in range(gpus):
        try:
            script.check_gpu(torch.device("cuda", index))
        except script.UserError as error:
            raise MachineError(f"GPU {index}: {error}") from None
    check_compiler()
    return gpus


def most_ranks(cfg, gpus: int) -> int:
    """As many ranks as there are GPUs, or the most below that divide the sequences of a step."""
    return max((n for n in range(1, gpus + 1) if cfg.sequences_per_step % n == 0), default=1)


def record_of(script) -> str:
    """The name of a script's record, as its docstring says; else the oldest that was counted."""
    named = re.search(r"^Record: (\S+)", script.SCRIPT.read_text(), re.MULTILINE)
    return named[1] if named else min(MEMORY)


def is_by_steps(script) -> bool:
    """Whether the script is of the ladder of fewest steps, whose labels have an o."""
    return bool(re.search(r"_o\d", record_of(script)))


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


def flags_that_fit(script, cfg, memory: int, ranks: int, fp8: bool = True) -> list[str]:
    """Flags for GPUs of so many bytes, with FP8 matmuls or without.

    --head_chunks is given in cfg. The tokens of a step stay. Raises MachineError.
    """
    if is_by_steps(script):
        return passes_that_fit(script, cfg, memory, ranks)
    training, validation, state = counted_memory(script, cfg, ranks, fp8)
    room = memory / 2**30 - SPARE - state
    if not hasattr(script.schedule(0, cfg), "classes"):  # whose heads are small
        saved = max(gib for n, gib in SAVED_BY_CHUNKS.items() if n <= cfg.head_chunks)
        training -= saved * tokens_of_forward(script, cfg) / COUNTED_TOKENS
    shorter = next((n for n in PARTS if (training - state) / n <= room), None)
    cuts = next((n for n in PARTS if (validation - state) / n <= room), None)
    if not shorter or not cuts:
        fewer = "fewer --ngram_rows, or " if hasattr(cfg, "ngram_rows") else ""
        raise MachineError(
            f"a GPU of {memory / 2**30:.1f} GiB is too small for {record_of(script)}, with "
            f"sequences of an eighth, too (docs/gpus.md); take {fewer}--preset pocket, which "
            "trains a small model")
    flags = []
    if shorter > 1 and cfg.sequences_per_forward >= shorter:
        # The first records take the same sequences in more forward passes.
        flags += ["--sequences_per_forward", str(cfg.sequences_per_forward // shorter)]
    elif shorter > 1:
        flags += ["--shorten", str(shorter)]
    if cuts > 1:
        flags += ["--val_seq_len", str(cfg.val_seq_len // cuts)]
    return flags


def passes_that_fit(script, cfg, memory: int, ranks: int) -> list[str]:
    """Flags for a record by steps: passes of fewer sequences, which keep their length, and the
    head in one piece.

    Raises MachineError.
    """
    state, update = optimizer_memory(script, cfg, ranks)
    room = memory / 2**30 - SPARE - state
    flags = ["--head_chunks", "1"] if cfg.head_chunks > 1 else []
    sequences = cfg.sequences_per_forward
    while update <= room and sequences:
        rows = sequences * cfg.seq_len / 1024
        if OF_PASS + rows * OF_ROW <= room:
            if sequences < cfg.sequences_per_forward:
                flags += ["--sequences_per_forward", str(sequences)]
            return flags
        sequences //= 2
    raise MachineError(
        f"a GPU of {memory / 2**30:.1f} GiB is too small for {record_of(script)} (docs/gpus.md); "
        "take --preset pocket, which trains a small model")


def optimizer_memory(script, cfg, ranks: int) -> tuple[float, float]:
    """GiB of a rank's weights, gradients and state, and what an update needs beside them."""
    of_rank = SimpleNamespace(rank=0, world_size=ranks, device=torch.device("meta"))
    with of_rank.device:  # no tensor has values
        model = script.GPT(cfg)
        model.embed.weight.data = model.embed.weight.data.bfloat16()  # as `prepare` does
        optimizers = script.build_optimizers(model, cfg, of_rank)
    size = largest = 0
    for optimizer in optimizers:
        tensors = [optimizer.weights, optimizer.grads, *optimizer.state.values()]
        if ranks > 1:
            tensors.append(optimizer.my_grad)
        size += sum(tensor.nbytes for tensor in tensors)
        largest = max(largest, *(tensor.nbytes for tensor in optimizer.state.values()), 0)
    return size / 2**30, OF_UPDATE * largest / 2**30


def flags_for_gpus(script, cfg, gpus: int) -> list[str]:
    """Flags for the smallest of this machine's GPUs. Raises MachineError."""
    memory = {index: torch.cuda.get_device_properties(index).total_memory for index in range(gpus)}
    smallest = min(memory, key=memory.get)
    chunks = cfg.head_chunks or script.default_head_chunks(torch.device("cuda", smallest))
    fp8 = all(torch.cuda.get_device_capability(index) >= (8, 9) for index in memory)
    cfg = replace(cfg, head_chunks=chunks)
    return flags_that_fit(script, cfg, memory[smallest], most_ranks(cfg, gpus), fp8)


def compiling_minutes(script, cfg) -> int:
    """How long the first start compiles on a GPU, about: by estimate."""
    stages = {script.schedule(step, cfg).stage for step in range(cfg.num_iterations)}
    name = max(key for key in COMPILING if key <= record_of(script))
    minutes = COMPILING_BY_STEPS if is_by_steps(script) else COMPILING[name]
    return max(1, round(len(stages) * minutes))


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
    if cfg.train_files.startswith("data/pocket/"):
        return ["pocket.py"]
    if not cfg.train_files.startswith("data/fineweb10B/"):
        return []
    repo = Path(__file__).parent.parent
    paths = [getattr(cfg, name, "") for name in ("prefix_file", "canonical_file")]
    scripts = [TABLES[path] for path in paths if path in TABLES and not (repo / path).exists()]
    return [*scripts, f"fineweb.py {max(FEWEST_SHARDS, count_shards(script, cfg))}"]
