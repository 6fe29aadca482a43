"""A script's step and validation at full size, compiled for a card and counted, without data.

    trace(card, [--phases train,validation,optimizers,] [--stage, 0,] [--ranks, 8,]
          [--binaries,] [--instructions,] [--FLAG_OF_THE_SCRIPT, VALUE, …,] script=FILE)

All tensors are fake, so that 48K tokens cost nothing. Inductor makes the graphs and the kernels.
The wrapper code that it generates then runs, but what it would launch is noted, not launched. With
--binaries, Triton and ptxas make each kernel's machine code, whose instructions --instructions
counts, in as much time again. Of a run in stages the last is noted, or that of --stage. FILE has
windows by stage, as the records from 2025-09-10 on.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
if __name__ == "__main__":  # before torch is there
    sys.path[:1] = [str(REPO / "tests" / "gpu"), str(REPO / "data")]  # in place of this folder
import host_gpu  # noqa: E402

if __name__ == "__main__":
    host_gpu.install("sm_90", execute=False)
import numpy as np  # noqa: E402
import torch  # noqa: E402
from shards import load_script  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402


@dataclasses.dataclass
class Trace:
    """What a script does on one GPU of a card. Sizes in bytes.

    facts: stages, the number of steps in each; of the noted one head_tokens of a chunk of the head,
        block_pairs that attention visits in a forward pass, the mean of the stage's steps, and
        wire, the bytes that a rank hands to collectives in each step, the least first.
    memory: state (weights, their gradients, the optimizers'), kept (from the forward for the
        backward pass, and no state), and peak by phase, the state included.
    launches: in order: phase (forward, backward, validation, optimizers, optimizers of N ranks),
        kind (triton; aten, where a library has the kernel; wire, for collectives), name, bytes,
        flop, tensors ([type, shape]) and sizes (of a triton kernel: its integers by name).
    binaries: of each kernel in each configuration that it may run in: name, config, warps, shared
        (bytes of a block) and, with --instructions, instructions (all, in_loops).
    """

    facts: dict
    graphs: dict  # how many were compiled, by phase; backward ones are among forward's
    breaks: list  # reasons
    memory: dict
    launches: list
    binaries: list


def trace(card: str, *arguments: str, script=REPO / "train_gpt.py") -> Trace:
    """Trace the script in a process of its own. arguments: this file's and the script's."""
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        out = Path(folder) / "trace.json"
        command = [sys.executable, __file__, out, card, script, *arguments]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        environment.pop("TORCHDYNAMO_DISABLE", None)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{command}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
        return Trace(**json.loads(out.read_text()))


# ---- What is noted --------------------------------------------------------------------------


class Notes:
    def __init__(self):
        self.phase = None  # of what is launched now; None: nothing is noted
        self.launches, self.kernels, self.modules = [], {}, 0
        self.storages, self.peak = {}, 0  # those alive, with their bytes; the most at once

    def launch(self, kind: str, name: str, num_bytes: float, flop=0.0, tensors=(), **more) -> None:
        if self.phase:
            described = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
            self.launches.append(dict(phase=self.phase, kind=kind, name=name, bytes=num_bytes,
                                      flop=flop, tensors=described, **more))

    def allocated(self, tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live_bytes())

    def live_bytes(self) -> int:
        self.storages = {k: x for k, x in self.storages.items() if not x[0].expired()}
        return sum(size for _, size in self.storages.values())


def num_bytes(tensor) -> int:
    """Of the elements that differ: expanded dimensions count once."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size()


def bytes_of_kernel(kernel) -> int:
    """What a kernel reads and what it writes, each element of a buffer once. Inductor's own
    estimate counts the whole of a buffer that is sliced."""
    from torch._inductor.codegen.common import RemovedArg
    from torch._inductor.dependencies import MemoryDep, WeakDep
    from torch._inductor.virtualized import V

    names = set()
    for buffers in (kernel.args.input_buffers, kernel.args.output_buffers):
        names |= {name for name, x in buffers.items() if not isinstance(x, RemovedArg)}
    for x in kernel.args.inplace_buffers.values():
        if not isinstance(x, RemovedArg):
            names |= set(x.other_names)
    for handler in kernel, V.graph:  # what is never stored
        names -= handler.removed_buffers | handler.inplaced_to_remove
    # A buffer that is changed in place goes by another name from then on. Arguments have the first.
    first_names = V.graph.scheduler.mutation_real_name
    changed = {first_names.get(name, name) for name in kernel.features.get_mutations()}
    total = 0
    for name, accesses in kernel.features.buf_accesses().items():
        first_name = first_names.get(name, name)
        if first_name not in names:
            continue
        touched = {}  # elements, by the expression that indexes them
        for access in accesses:
            if isinstance(access, MemoryDep):
                used = [n for variable, n in access.ranges.items()
                        if access.is_indirect() or variable in access.index.free_symbols]
                touched[access.index] = math.prod(map(int, used))
            elif not isinstance(access, WeakDep) and first_name not in changed:
                touched[None] = math.inf  # it may be all; the others only say what comes first
        elements = min(int(V.graph.get_numel(first_name)), sum(touched.values()))
        if any(getattr(access, "mode", None) == "atomic_add" for access in accesses):
            elements *= 2  # it reads and writes
        total += elements * V.graph.get_dtype(first_name).itemsize
    return total


class KernelStandIn:
    """In place of a compiled Triton kernel: notes that it would be launched."""

    def __init__(self, notes: Notes, name: str, source: str):
        self.notes, self.name = notes, name
        found = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)  # none in attention's
        self.num_bytes = found and 1e9 * float(found[1])
        self.parameters = re.search(r"\ndef \w+\(([^)]*)\)", source)[1].split(", ")

    def run(self, *args, **kwargs):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        sizes = {name: x for name, x in zip(self.parameters, args) if isinstance(x, int)}
        moved = sum(map(num_bytes, tensors)) if self.num_bytes is None else self.num_bytes
        self.notes.launch("triton", self.name, moved, 0.0, tensors, sizes=sizes)


NO_KERNEL = re.compile(r"empty|detach|alias|_unsafe_view|prim\.")
WRITES_ONLY = re.compile(r"aten\.(copy_|zero_|fill_)")


class Recorder(TorchDispatchMode):
    """Notes each operator that computes something and is no Triton kernel."""

    supports_higher_order_operators = True

    def __init__(self, notes: Notes):
        super().__init__()
        self.notes = notes

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, classes, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func)
        if getattr(func, "is_view", False) or NO_KERNEL.search(name):
            return result
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if "out" not in kwargs and not name.split(".")[1].endswith("_"):  # nor in place
            for x in made:
                self.notes.allocated(x)
        moved = given if "out" in kwargs or WRITES_ONLY.match(name) else given + made
        flop = flop_of(name, given)
        self.notes.launch("aten", name, sum(map(num_bytes, moved)), flop, given)
        return result


def flop_of(name: str, tensors: list) -> float:
    """Of a matrix product, or a batch of them."""
    if not name.startswith("aten.") or "mm" not in name:
        return 0.0
    a, b = tensors[1:3] if "add" in name else tensors[:2]
    return 2.0 * math.prod(a.shape) * b.shape[-1]


class Wire:
    """In place of torch.distributed: notes what a script hands to the collectives."""

    def __init__(self, notes: Notes):
        self.notes = notes

    def __getattr__(self, name: str):
        def collective(*tensors, **options):
            largest = max(tensors, key=num_bytes)
            self.notes.launch("wire", name, num_bytes(largest), 0.0, [largest])
            return self

        return collective

    def wait(self):
        pass


# ---- What has to stand in for what ------------------------------------------------------------


def stand_in_for_launches(notes: Notes) -> None:
    """Inductor's generated code runs on fake tensors, and notes instead of launching."""
    from torch._inductor import async_compile, codecache, config
    from torch._inductor.codegen.simd import SIMDKernel

    torch.compiler.config.force_disable_caches = True
    config.benchmark_kernel = True  # writes the number of bytes into the kernel's source
    config.triton.autotune_at_compile_time = False
    SIMDKernel.estimate_kernel_num_bytes = bytes_of_kernel

    def triton(self, kernel_name, source_code, device_str="cuda"):
        name = f"{notes.modules}:{kernel_name}"  # names repeat from one graph to the next
        notes.kernels[name] = source_code
        return KernelStandIn(notes, name, source_code)

    async_compile.AsyncCompile.triton = triton
    load = codecache.PyCodeCache.load_by_key_path.__func__

    def load_by_key_path(cls, key, path, *args, **kwargs):
        text = Path(path).read_text()
        notes.modules += "def call(" in text or "class Runner" in text  # a graph's, not a kernel's
        return load(cls, key, path, *args, **kwargs)

    codecache.PyCodeCache.load_by_key_path = classmethod(load_by_key_path)


def stand_in_for_tensors(notes: Notes) -> None:
    """What goes past FakeTensorMode, because it is C++ or has no rule for fake tensors."""

    def empty_strided_cuda(size, stride, dtype):
        x = torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")
        notes.allocated(x)
        return x

    def reinterpret_tensor(x, size, stride, offset=0):
        return torch.as_strided(x, size, stride, x.storage_offset() + offset)

    torch._C._dynamo.guards._empty_strided_cuda = empty_strided_cuda
    torch._C._dynamo.guards._reinterpret_tensor = reinterpret_tensor
    notes.library = torch.library.Library("aten", "IMPL")  # gone when nothing holds it
    notes.library.impl("_scaled_mm.out", lambda *args, out, **kwargs: out, "Meta")


def cast_weights(model):
    """What `prepare` does, by new parameters: fake ones do not change their type."""
    for owner in model.modules():
        for name, param in list(owner.named_parameters(recurse=False)):
            if param.bf16:
                new = torch.nn.Parameter(param.detach().bfloat16())
                vars(new).update(vars(param))
                setattr(owner, name, new)


# ---- The run ------------------------------------------------------------------------------------


class Tracer:
    """A script on fake tensors."""

    def __init__(self, path: str, flags: list[str], stage: int, few_layers=False):
        self.notes, self.graphs, self.memory, self.wire = Notes(), {}, {}, []
        stand_in_for_launches(self.notes)
        stand_in_for_tensors(self.notes)
        self.script = load_script(Path(path))
        self.device = torch.device("cuda", 0)
        cfg = self.script.parse_args(flags)
        chunks = cfg.head_chunks or self.script.default_head_chunks(self.device)
        self.cfg = dataclasses.replace(cfg, head_chunks=chunks)
        if few_layers:
            self.cfg = dataclasses.replace(self.cfg, layers=few_layers_of(self.script))
        self.stages = stages(self.script, self.cfg)
        self.stage = stage % len(self.stages)
        self.steps = self.stages[self.stage]
        self.first = self.script.schedule(self.steps[0], self.cfg)
        # After so many every optimizer has stepped. On the way to #92 tables step at one of four.
        self.optimizer_steps = 4 if hasattr(self.cfg, "period_from") else 2

    def note(self, phase: str, function):
        """Run it once, which compiles it, and once more to be noted."""
        before = self.notes.modules
        function()
        self.graphs[phase] = self.notes.modules - before
        self.begin(phase)
        with Recorder(self.notes):
            function()
        self.begin(None)

    def begin(self, phase: str | None):
        """Note for another phase; of the one before, the most memory that was in use."""
        live = self.notes.live_bytes()
        if self.notes.phase:
            self.memory[f"peak of {self.notes.phase}"] = self.notes.peak
        if phase == "forward":
            self.memory["state"] = live
        if phase == "backward":
            self.memory["kept"] = live - self.memory["state"]
        self.notes.phase = phase
        self.notes.peak = live

    def ranks(self, world_size: int):
        return types.SimpleNamespace(rank=0, world_size=world_size, device=self.device)

    def batch(self, rows: int, length: int):
        targets = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
        return self.script.Batch(targets.int(), targets)

    def some_rows(self, tokens):
        """Two rows of the n-gram table for each token, which ask for gradients when training."""
        rows = self.model.ngram_table.state["rows"]
        return rows.new_zeros(*tokens.shape, 2, rows.size(-1)).requires_grad_(self.model.training)

    def build(self):
        with self.device:  # no weight has values
            self.model = self.script.GPT(self.cfg)
        cast_weights(self.model)
        # Without the tables that it would read
        files = dict.fromkeys({"prefix_file", "canonical_file"} & vars(self.cfg).keys(), "")
        self.script.prepare(self.model, dataclasses.replace(self.cfg, **files), self.device)
        self.optimizers = self.script.build_optimizers(self.model, self.cfg, self.ranks(1))
        if hasattr(self.model, "ngram_table"):  # how many rows differ is not known without tokens
            self.model.read_rows = self.some_rows
            self.model.ngram_table.keep_gradients = lambda: None
        owned = [*self.model.parameters(), *self.model.buffers()]
        for optimizer in self.optimizers:
            owned += [*vars(optimizer).values(), *optimizer.state.values()]
            owned += dict(getattr(optimizer, "averages", {})).values()  # as of 92e
        for x in owned:
            if isinstance(x, torch.Tensor):
                self.notes.allocated(x)

    def train(self):
        backward = torch.Tensor.backward

        def backward_as_a_phase(loss):
            if self.notes.phase:
                self.begin("backward")
            backward(loss)

        def gradients():
            batch = self.batch(self.cfg.sequences_per_forward, self.first.seq_len)
            self.script.accumulate_gradients(self.model, [batch], self.first)

        torch.Tensor.backward = backward_as_a_phase
        self.model.set_stage(self.first)
        self.note("forward", gradients)

    def validate(self):
        """As after the last step, with its windows."""
        cfg = self.cfg
        tokens = cfg.sequences_per_forward * max(row.seq_len for row in cfg.rows())
        batch = self.batch(max(1, tokens // cfg.val_seq_len), cfg.val_seq_len)
        now = self.script.schedule(cfg.num_iterations, cfg)
        self.model.set_stage(now)
        self.model.eval()
        with torch.no_grad(), self.script.store_masks():
            self.note("validation", lambda: self.script.losses_of(self.model, batch, now))
        self.model.train()

    def update(self, world_size: int):
        """Steps of the optimizers, after which each has stepped, as one rank of so many."""
        phase = "optimizers"
        optimizers = self.optimizers
        if world_size > 1:
            phase = f"optimizers of {world_size} ranks"
            self.script.dist = Wire(self.notes)
            ranks = self.ranks(world_size)
            optimizers = self.script.build_optimizers(self.model, self.cfg, ranks)
        amid = self.steps[len(self.steps) // 2]
        first = amid - amid % self.optimizer_steps

        # A table that has read no rows steps none.
        optimizers = [x for x in optimizers if getattr(x, "waiting", None) != []]

        def some_steps():
            self.wire = []
            for step in range(first, first + self.optimizer_steps):
                before = len(self.notes.launches)
                now = self.script.schedule(step, self.cfg)
                tied = getattr(now, "tied", False)  # as of #53
                update = self.script.step_tied if tied else self.script.step_optimizers
                update(optimizers, now, divisor=1)
                sent = [x["bytes"] for x in self.notes.launches[before:] if x["kind"] == "wire"]
                self.wire.append(sum(sent))

        self.note(phase, some_steps)

    def facts(self) -> dict:
        model, cfg = self.model, self.cfg
        length, targets, _ = shapes(self.first)
        tokens = cfg.sequences_per_forward * length
        return dict(
            head_chunks=cfg.head_chunks, padded_vocab=len(model.lm_head.weight),
            model_dim=cfg.model_dim, optimizer_steps=self.optimizer_steps,
            stages=[len(each) for each in self.stages], stage=self.stage,
            targets=targets, tokens=tokens, head_tokens=min(model.tokens_per_chunk, tokens),
            step_tokens=cfg.sequences_per_step * length,
            block_pairs=block_pairs(self.script, cfg, self.steps), wire=sorted(self.wire))


def shapes(now) -> tuple[int, int, int]:
    """Tokens of a step's sequences, targets of each token, classes of a sequence's softmax."""
    return now.seq_len, len(getattr(now, "target_weights", [1.0])), getattr(now, "classes", 0)


def few_layers_of(script) -> tuple:
    """Three layers with every kind of kernel that the record has; four on the way to #92."""
    known = {field.name for field in dataclasses.fields(script.Layer)}
    first = "P" if '"P"' in Path(script.__file__).read_text() else "S"
    rows = [
        (first, dict(table=0, gate=True, skip=True, saved=True)),
        (None, {}),
        ("L", dict(table=1, xsa=True, gate=True)),
    ]
    if "takes_skip" in known:
        rows = [
            ("S", dict(table=0, bigram=True, skip=True)),
            ("P", dict(table=1, x0=True, bigram=True, mlps=0, saved=True)),
            (None, dict(takes_skip=True, mlps=2)),
            ("L", dict(table=2, xsa=True, gate=True)),
        ]
    layers = []
    for window, marks in rows:
        marks = {name: value for name, value in marks.items() if name in known}
        layers.append(script.Layer(window, **marks))
    return tuple(layers)


def stages(script, cfg) -> list[list[int]]:
    """The steps of a run in the parts that need graphs of their own."""
    groups = itertools.groupby(
        range(cfg.num_iterations), lambda step: shapes(script.schedule(step, cfg)))
    return [list(steps) for _, steps in groups]


def document_starts(tokens: int, longest=math.inf) -> np.ndarray:
    """Where documents as long as FineWeb's begin, but the first: log-normal, median 403, mean 690,
    and 32 at least (statistics of 1.45 M of them in modded-nanogpt's record of 2026-03-22)."""
    spread = math.sqrt(2 * math.log(690 / 403))
    lengths = np.random.default_rng(0).lognormal(math.log(403), spread, size=tokens // 32)
    starts = np.cumsum(lengths.clip(32, longest).astype(int))
    return starts[starts < tokens]


def block_pairs(script, cfg, steps: list[int]) -> float:
    """Pairs of blocks that the script's masks have, the mean over steps of a stage.

    Paired heads have twice the blocks for half of the heads. Composed heads attend once for each.
    """
    first = script.schedule(steps[0], cfg)
    tokens = cfg.sequences_per_forward * first.seq_len
    # It cuts longer ones. From #77 on each stage has its own.
    longest = getattr(first, "max_document_tokens", getattr(cfg, "max_document_tokens", 0))
    starts = torch.zeros(tokens, dtype=torch.int32)
    starts[document_starts(tokens, longest or math.inf)] = 1
    docs = starts.cumsum(0, dtype=torch.int32)
    letters = Counter(layer.window for layer in cfg.layers)
    times = Counter()  # that layers visit so many tokens back, with so many positions a token
    for step in steps:
        now = script.schedule(step, cfg)
        for letter, reach in zip("LSP", (now.long_window, now.short_window, now.short_window)):
            times[reach, 2 if letter == "P" else 1] += letters[letter]
        if hasattr(cfg, "composed_window"):
            times[cfg.composed_window - 1, 1] += cfg.model_dim // cfg.head_dim
    total = 0
    for (reach, positions), count in times.items():
        mask = script.flex_mask(docs.repeat_interleave(positions), torch.tensor(reach))
        visited = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
        total += count * int(visited) / positions
    return total / len(steps)


# ---- Machine code -----------------------------------------------------------------------------


def make_binaries(kernels: dict[str, str], instructions: bool) -> list[dict]:
    """Each distinct kernel in each of its configurations, compiled for the card at hand."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    config.use_static_triton_launcher = False
    rows, seen = [], {}
    for key, source in kernels.items():
        name = key.partition(":")[2]
        body = source.replace(name, "kernel")
        if body not in seen:
            autotuner = getattr(PyCodeCache.load(source), name)
            seen[body] = [binary_row(autotuner, x, instructions) for x in autotuner.configs]
        rows += [row | dict(name=key) for row in seen[body]]
    return rows


def binary_row(autotuner, choice, instructions: bool) -> dict:
    binary = autotuner._precompile_config(choice).kernel
    row = dict(config=dict(choice.kwargs), warps=choice.num_warps, shared=binary.metadata.shared)
    if instructions:
        row["instructions"] = count_instructions(disassemble(binary.asm["cubin"]))
    return row


def disassemble(cubin: bytes) -> str:
    """By NVIDIA's program, which comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([tool, "-c", file.name], text=True)


def count_instructions(code: str) -> dict:
    """Instructions of a disassembled kernel: all, and those between a label and a branch back."""
    labels, total, looped = {}, 0, set()
    for line in code.splitlines():
        if found := re.match(r"\s*(\.L_x_\d+):", line):
            labels[found[1]] = total
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
            total += 1
            target = re.search(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)", line)
            if target and labels.get(target[1], total) < total - 1:  # else it is the end's trap
                looped.update(range(labels[target[1]], total))
    return dict(all=total, in_loops=len(looped))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in "out", "card", "script":
        parser.add_argument(name)
    parser.add_argument("--phases", default="train,validation,optimizers")
    parser.add_argument("--stage", type=int, default=-1)
    parser.add_argument("--few_layers", action="store_true")
    parser.add_argument("--binaries", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    args, flags = parser.parse_known_args(argv)
    host_gpu.use_card(args.card)
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_num_threads(1)
    tracer = Tracer(args.script, flags, args.stage, args.few_layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tracer.build()
        tracer.train()
        if "validation" in args.phases:
            tracer.validate()
        if "optimizers" in args.phases:
            for world_size in sorted({1, args.ranks}):
                tracer.update(world_size)
    notes = tracer.notes
    kernels = notes.kernels if args.binaries else {}
    found = Trace(
        tracer.facts(), tracer.graphs, list(counters["graph_break"]), tracer.memory, notes.launches,
        make_binaries(kernels, args.instructions))
    Path(args.out).write_text(json.dumps(vars(found)))


if __name__ == "__main__":
    main(sys.argv[1:])
