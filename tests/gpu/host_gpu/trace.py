"""A script's step and validation at full size, compiled for a card and counted, without data.

    trace(script, flags, validation=True, ranks=[1, 8])

All tensors are fake, so that 48K tokens cost nothing. Inductor makes the graphs and the kernels.
The wrapper code that it generates then runs, but what it would launch is noted, not launched. Of a
run in stages the last is noted, or `stage`. The script has windows by stage, as the records from
2025-09-10 on.
"""

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
from torch.utils.flop_counter import flop_registry  # noqa: E402


@dataclasses.dataclass
class Trace:
    """What a script does on one GPU of a card. Sizes in bytes.

    facts: stages, the number of steps in each; of the noted one head_tokens of a chunk of the head,
        and block_pairs that attention visits in a forward pass, the mean of the stage's steps.
    memory: state (weights, their gradients, the optimizers'), and the peak of each phase.
    launches: in order: phase (train, validation, optimizers of N), kind (triton; aten, where a
        library has the kernel; wire, for collectives), name, bytes, flop, tensors ([type, shape]).
    shared: the shared memory that a block of each compiled kernel takes.
    """

    facts: dict
    graphs: dict  # how many Dynamo made, by phase
    breaks: list  # reasons
    memory: dict
    launches: list
    shared: dict


def trace(script: Path, flags=(), **options) -> Trace:
    """Trace the script in a process of its own. The options are those of `main`."""
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        out = Path(folder) / "trace.json"
        given = json.dumps(dict(script=str(script), flags=list(flags), out=str(out), **options))
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        environment.pop("TORCHDYNAMO_DISABLE", None)
        done = subprocess.run([sys.executable, __file__, given], capture_output=True, text=True,
                              env=environment)
        if done.returncode:
            raise RuntimeError(f"{given}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
        return Trace(**json.loads(out.read_text()))


# ---- What is noted --------------------------------------------------------------------------


class Notes:
    def __init__(self):
        self.phase = None  # of what is launched now; None: nothing is noted
        self.launches, self.shared = [], {}
        self.storages, self.peak = {}, 0  # those alive, with their bytes; the most at once

    def launch(self, kind: str, name: str, num_bytes: float, flop=0, tensors=()) -> None:
        if self.phase:
            described = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors]
            self.launches.append(dict(phase=self.phase, kind=kind, name=name, bytes=num_bytes,
                                      flop=flop, tensors=described))

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


class KernelStandIn:
    """In place of a compiled Triton kernel: notes that it would be launched."""

    def __init__(self, notes: Notes, name: str, source: str):
        self.notes, self.name = notes, name
        self.gigabytes = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)  # none in attention's

    def run(self, *args, **kwargs):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        moved = 1e9 * float(self.gigabytes[1]) if self.gigabytes else sum(map(num_bytes, tensors))
        self.notes.launch("triton", self.name, moved, tensors=tensors)


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
        flop_of = flop_registry.get(getattr(func, "overloadpacket", None))
        flop = flop_of(*args, **kwargs, out_val=result) if flop_of else 0
        self.notes.launch("aten", name, sum(map(num_bytes, moved)), flop, given)
        return result


class Wire:
    """In place of torch.distributed: notes what a script hands to the collectives."""

    def __init__(self, notes: Notes):
        self.notes = notes

    def __getattr__(self, name: str):
        def collective(*tensors, **options):
            self.notes.launch("wire", name, max(map(num_bytes, tensors)))
            return self

        return collective

    def wait(self):
        pass


# ---- What has to stand in for what ------------------------------------------------------------


def stand_in_for_launches(notes: Notes, binaries: bool) -> None:
    """Inductor's generated code runs on fake tensors, and notes instead of launching."""
    from torch._inductor import async_compile, config

    torch.compiler.config.force_disable_caches = True
    config.benchmark_kernel = True  # writes the number of bytes into the kernel's source
    config.triton.autotune_at_compile_time = False
    config.use_static_triton_launcher = False

    def triton(self, kernel_name, source_code, device_str="cuda"):
        if binaries:
            notes.shared[kernel_name] = shared_memory(kernel_name, source_code)
        return KernelStandIn(notes, kernel_name, source_code)

    async_compile.AsyncCompile.triton = triton


def shared_memory(name: str, source: str) -> int:
    """What a block of the kernel takes, compiled by Triton and ptxas in each configuration."""
    from torch._inductor.codecache import PyCodeCache

    autotuner = getattr(PyCodeCache.load(source), name)
    binaries = [autotuner._precompile_config(choice).kernel for choice in autotuner.configs]
    return max(binary.metadata.shared for binary in binaries)


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

    def __init__(self, script, cfg, stage: int, notes: Notes):
        self.script, self.cfg, self.notes = script, cfg, notes
        self.graphs, self.memory = {}, {}
        self.device = torch.device("cuda", 0)
        self.stages = stages(script, cfg)
        self.stage = stage % len(self.stages)
        self.steps = self.stages[self.stage]
        self.first = script.schedule(self.steps[0], cfg)
        # After so many every optimizer has stepped. On the way to #92 tables step at one of four.
        self.optimizer_steps = 4 if hasattr(cfg, "period_from") else 2

        with self.device:  # no weight has values
            self.model = script.GPT(cfg)
        cast_weights(self.model)
        # Without the tables that it would read
        files = dict.fromkeys({"prefix_file", "canonical_file"} & vars(cfg).keys(), "")
        script.prepare(self.model, dataclasses.replace(cfg, **files), self.device)
        self.optimizers = script.build_optimizers(self.model, cfg, self.ranks(1))
        if hasattr(self.model, "ngram_table"):  # how many rows differ is not known without tokens
            self.model.read_rows = self.some_rows
            self.model.ngram_table.keep_gradients = lambda: None
        owned = [*self.model.parameters(), *self.model.buffers()]
        for optimizer in self.optimizers:
            owned += [*vars(optimizer).values(), *optimizer.state.values()]
            owned += dict(getattr(optimizer, "averages", {})).values()  # as of 92e
        for x in owned:
            if isinstance(x, torch.Tensor):
                notes.allocated(x)
        self.memory["state"] = notes.live_bytes()

    def note(self, phase: str, function) -> None:
        """Run it once, which compiles it, and once more to be noted."""
        from torch._dynamo.utils import counters

        before = counters["stats"]["unique_graphs"]
        function()
        self.graphs[phase] = counters["stats"]["unique_graphs"] - before
        self.notes.phase, self.notes.peak = phase, 0
        with Recorder(self.notes):
            function()
        self.notes.phase = None
        self.memory[phase] = self.notes.peak

    def ranks(self, world_size: int):
        return types.SimpleNamespace(rank=0, world_size=world_size, device=self.device)

    def batch(self, rows: int, length: int):
        targets = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
        return self.script.Batch(targets.int(), targets)

    def some_rows(self, tokens):
        """Two rows of the n-gram table for each token, which ask for gradients when training."""
        rows = self.model.ngram_table.state["rows"]
        return rows.new_zeros(*tokens.shape, 2, rows.size(-1)).requires_grad_(self.model.training)

    def train(self) -> None:
        def gradients():
            batch = self.batch(self.cfg.sequences_per_forward, self.first.seq_len)
            self.script.accumulate_gradients(self.model, [batch], self.first)

        self.model.set_stage(self.first)
        self.note("train", gradients)

    def validate(self) -> None:
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

    def update(self, world_size: int) -> None:
        """Steps of the optimizers, after which each has stepped, as one rank of so many."""
        optimizers = self.optimizers
        if world_size > 1:
            self.script.dist = Wire(self.notes)
            ranks = self.ranks(world_size)
            optimizers = self.script.build_optimizers(self.model, self.cfg, ranks)
        # A table that has read no rows steps none.
        optimizers = [x for x in optimizers if getattr(x, "waiting", None) != []]
        amid = self.steps[len(self.steps) // 2]
        first = amid - amid % self.optimizer_steps

        def some_steps():
            for step in range(first, first + self.optimizer_steps):
                now = self.script.schedule(step, self.cfg)
                tied = getattr(now, "tied", False)  # as of #53
                update = self.script.step_tied if tied else self.script.step_optimizers
                update(optimizers, now, divisor=1)

        self.note(f"optimizers of {world_size}", some_steps)

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
            block_pairs=block_pairs(self.script, cfg, self.steps))


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


def main(script, flags, out, validation=False, ranks=(), card="sm_90", stage=-1, few_layers=False,
         binaries=False):
    """Trace training in a stage, validation, and the optimizers of a rank of so many each.

    out: the file that the trace goes to. few_layers: with those of `few_layers_of`. binaries:
    kernels become machine code for the card.
    """
    from torch._dynamo.utils import counters
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.set_num_threads(1)
    host_gpu.use_card(card)
    notes = Notes()
    stand_in_for_launches(notes, binaries)
    stand_in_for_tensors(notes)
    script = load_script(Path(script))
    cfg = script.shorten(script.parse_args(flags))
    chunks = cfg.head_chunks or script.default_head_chunks(torch.device("cuda", 0))
    layers = few_layers_of(script) if few_layers else cfg.layers
    cfg = dataclasses.replace(cfg, head_chunks=chunks, layers=layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tracer = Tracer(script, cfg, stage, notes)
        tracer.train()
        if validation:
            tracer.validate()
        for world_size in ranks:
            tracer.update(world_size)
    found = Trace(tracer.facts(), tracer.graphs, list(counters["graph_break"]), tracer.memory,
                  notes.launches, notes.shared)
    Path(out).write_text(json.dumps(vars(found)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
