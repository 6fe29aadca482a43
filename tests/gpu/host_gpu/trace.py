"""A script's step and validation at full size, compiled for a card and counted, without data.

    trace(script, flags, validation=True, ranks=[1, 8])

All tensors are fake, so that 48K tokens cost nothing. Inductor makes the graphs and the kernels.
The wrapper code that it generates then runs, but what it would launch is noted, not launched. All
stages of a run are noted, or those asked for. The script has windows by stage, as the records from
2025-09-10 on. A pass reads as many candidates as its stage has, and rows of a table of n-grams.
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402


@dataclasses.dataclass
class Trace:
    """What a script does on one GPU of a card. Sizes in bytes.

    facts: of the run, and of each noted `stages`: steps, tokens of a pass and of a step, width of
        its softmax, block_pairs that attention visits in a forward pass, the mean of its steps;
        `averages`: how many steps take each.
    memory: state (weights, their gradients, the optimizers'), and the peak of each phase.
    launches: in order: phase, kind (triton; aten, where a library has the kernel; wire, for
        collectives), name, bytes, flop, tensors ([type, shape]). Phases are "pass of STAGE",
        "update of STAGE on RANKS", "average NAME on RANKS", "validation".
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


EXACT_SUMS = ", exact sums"  # of an FP8 product, in its launch's name


def num_bytes(tensor) -> int:
    """Of the elements that differ: expanded dimensions count once."""
    sizes = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size()


class KernelStandIn:
    """In place of a compiled Triton kernel: notes that it would be launched.

    What it moves is what Inductor counts, or what it loads and stores of its arguments, if that is
    less: Inductor counts an argument twice if it is given in place, though it may only be loaded,
    and each slice of one.
    """

    def __init__(self, notes: Notes, name: str, source: str):
        self.notes, self.name = notes, name
        counted = re.search(r"'kernel_num_gb': ([\d.e-]+)", source)  # none in attention's
        self.counted = 1e9 * float(counted[1]) if counted else math.inf
        self.passes = []  # how often it goes through each of its arguments
        arguments = re.search(rf"def {re.escape(name)}\(([^)]*)\)", source)
        for argument in arguments[1].split(",") if arguments else ():
            pointer = argument.split(":")[0].strip()
            found = re.findall(rf"tl\.(load|store|atomic_\w+)\({pointer}\b", source)
            self.passes.append(sum(1 + use.startswith("atomic") for use in {*found}))
        if not counted:
            self.passes = []

    def run(self, *args, **kwargs):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        passes = self.passes[: len(args)] or [1] * len(args)
        moved = sum(times * num_bytes(x) for times, x in zip(passes, args)
                    if isinstance(x, torch.Tensor))
        self.notes.launch("triton", self.name, min(moved, self.counted), tensors=tensors)


NO_KERNEL = re.compile(r"empty|detach|alias|_unsafe_view|prim\.")
WRITES_ONLY = re.compile(r"aten\.(copy_|zero_|fill_)")
GATHERS = re.compile(r"aten\.(index|index_select|embedding|gather)\.")
SCATTERS = re.compile(r"aten\.(index_put_|index_add_)\.")


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
        if GATHERS.match(name):  # it reads as much of its first argument as it makes
            moved = given[1:] + 2 * made
        if SCATTERS.match(name):  # it reads and writes rows of its first as large as its last
            rows_alone = given[1:] + 2 * given[-1:]
            moved = min(moved, rows_alone, key=lambda tensors: sum(map(num_bytes, tensors)))
        flop_of = flop_registry.get(getattr(func, "overloadpacket", None))
        flop = flop_of(*args, **kwargs, out_val=result) if flop_of else 0
        if "linalg_qr" in name:  # Householder's, and the orthogonal factor from it
            flop = 8 / 3 * given[0].numel() * given[0].size(-1)
        if "_scaled_mm" in name and not kwargs.get("use_fast_accum", args[-1] is True):
            name += EXACT_SUMS
        self.notes.launch("aten", name, sum(map(num_bytes, moved)), flop, given)
        return result


class Wire:
    """In place of torch.distributed: notes what a script hands to the collectives."""

    def __init__(self, notes: Notes):
        self.notes = notes

    def __getattr__(self, name: str):
        def collective(*tensors, **options):
            given = [x for x in tensors if isinstance(x, torch.Tensor)]  # beside numbers of rows
            self.notes.launch("wire", name, max(map(num_bytes, given)))
            return self

        return collective

    def wait(self):
        pass


# ---- What has to stand in for what ------------------------------------------------------------


def stand_in_for_launches(notes: Notes, binaries: bool) -> None:
    """Inductor's generated code runs on fake tensors, and notes instead of launching."""
    from torch._inductor import async_compile, config

    torch.compiler.config.force_disable_caches = True
    torch._dynamo.config.recompile_limit = 64  # optimizers of several numbers of ranks share code
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
    def flash_attention(q, k, v, is_causal, scale):
        """Torch takes it on a GPU, and on this device its plain products."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        return attend(q, k, v, is_causal=is_causal, scale=scale)[0]

    torch.nn.functional.scaled_dot_product_attention = flash_attention
    FakeTensor.__bool__ = lambda x: True  # amid a run, what a step asks for is there
    notes.library = torch.library.Library("aten", "IMPL")  # gone when nothing holds it
    notes.library.impl("_scaled_mm.out", lambda *args, out, **kwargs: out, "Meta")


def cast_weights(model):
    """What `prepare` does, by new parameters: fake ones do not change their type.

    Without marks of their type, as in records by steps, the token embedding alone is bf16.
    """
    for owner in model.modules():
        for name, param in list(owner.named_parameters(recurse=False)):
            if getattr(param, "bf16", param.group == "embed"):
                new = torch.nn.Parameter(param.detach().bfloat16())
                vars(new).update(vars(param))
                setattr(owner, name, new)


# ---- The run ------------------------------------------------------------------------------------


DISTINCT = 0.8  # of the rows that a pass reads; 0.71 to 0.91 were counted, of text
READ_IDS = 3  # of so many ids a rank reads one between two steps of value tables: an estimate
ROW_BYTES = 26_000  # that a step of the table of n-grams moves a row, by the shapes in its update


class Tracer:
    """A script on fake tensors."""

    def __init__(self, script, cfg, notes: Notes, ranks):
        self.script, self.cfg, self.notes = script, cfg, notes
        self.graphs, self.memory = {}, {}
        self.device = torch.device("cuda", 0)
        self.stages = stages(script, cfg)
        # After so many every optimizer has stepped. On the way to #92 tables step at one of four.
        self.period = 4 if hasattr(cfg, "period_from") else 2

        with self.device:  # no weight has values
            self.model = script.GPT(cfg)
        cast_weights(self.model)
        # Without the tables that it would read
        files = dict.fromkeys({"prefix_file", "canonical_file"} & vars(cfg).keys(), "")
        script.prepare(self.model, dataclasses.replace(cfg, **files), self.device)
        self.optimizers = script.build_optimizers(self.model, cfg, self.ranks(1))
        self.table = getattr(self.model, "ngram_table", None)
        if self.table:  # which rows differ is not known without tokens
            self.model.read_rows = self.some_rows
        self.value_adam = getattr(self.model, "value_adam", None)  # as of 92i
        script.to_device = self.to_device
        owned = [*self.model.parameters(), *self.model.buffers()]
        for optimizer in self.optimizers:
            owned += [*vars(optimizer).values(), *optimizer.state.values()]
            owned += dict(getattr(optimizer, "averages", {})).values()  # as of 92e
        for x in owned:
            if isinstance(x, torch.Tensor):
                notes.allocated(x)
        self.memory["state"] = notes.live_bytes()
        # Those of 8 ranks, say, share the model. They hold another part of the state.
        self.sharded = {1: self.optimizers}
        if set(ranks) - {1}:
            self.script.dist = Wire(notes)
        for world_size in set(ranks) - {1}:
            self.sharded[world_size] = script.build_optimizers(self.model, cfg,
                                                               self.ranks(world_size))
        self.model.ngram_table = self.table
        self.model.value_adam = self.value_adam

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

    def batch(self, rows: int, length: int, classes=0):
        targets = torch.zeros(rows, length, dtype=torch.int64, device=self.device)
        batch = self.script.Batch(targets.int(), targets)
        if classes:
            batch = batch._replace(classes=targets.new_zeros(rows, classes))
        return batch

    def to_device(self, x, device):
        """In place of a copy from the host's memory, which is not pinned without a GPU."""
        return torch.zeros(x.shape, dtype=x.dtype, device=device)

    def with_values(self, batch):
        """The batch with rows of the value tables, where a script plans them."""
        if not self.value_adam:
            return batch
        ids = torch.zeros(self.value_adam.rows_of(batch), dtype=torch.int64, device=self.device)
        place = torch.zeros_like(batch.targets)
        return batch._replace(values=self.script.ValueReading(ids, place, is_read=False))

    def some_rows(self, tokens):
        """Two rows of the n-gram table for each token, read as a script does that has planned."""
        table = self.table
        distinct = int(DISTINCT * 2 * tokens.numel())
        places = torch.zeros(*tokens.shape, 2, dtype=torch.int64, device=self.device)
        read = table.state["rows"][places.flatten()[:distinct]]
        return table.take(types.SimpleNamespace(
            place=places, num_read=[distinct], num_asked=[distinct], asked=None,
            received=(read, None)))

    def train(self, stage: int) -> None:
        """A pass of the stage: the last before the tables step, on one GPU, as it holds most."""
        now = self.script.schedule(self.stages[stage][0], self.cfg)
        facts = self.facts_of(stage)

        def gradients():
            batch = self.batch(self.cfg.sequences_per_forward, now.seq_len, facts["classes"])
            self.script.accumulate_gradients(self.model, [self.with_values(batch)], now)
            if self.table:
                del self.table.waiting[1:]

        self.set_stage(now)
        if self.table:
            rows = self.table.state["rows"]
            passes = self.period * facts["step_tokens"] // facts["tokens"]
            size = int(DISTINCT * 2 * facts["tokens"]) * (passes - 1)
            self.table.waiting = [rows.new_empty(size, rows.size(-1))]
            self.notes.allocated(self.table.waiting[0])
        self.note(f"pass of {stage}", gradients)
        if self.table:
            self.table.clear()

    def set_stage(self, now) -> None:
        """Records by steps have none: all of their steps run the same kernels."""
        if hasattr(self.model, "set_stage"):
            self.model.set_stage(now)

    def validate(self) -> None:
        """As after the last step, with its windows."""
        cfg = self.cfg
        tokens = cfg.sequences_per_forward * self.script.longest_sequence(cfg)
        batch = self.batch(max(1, tokens // cfg.val_seq_len), cfg.val_seq_len)
        now = self.script.schedule(cfg.num_iterations, cfg)
        self.set_stage(now)
        self.model.eval()
        with torch.no_grad(), self.script.store_masks():
            self.note("validation", lambda: self.script.losses_of(self.model, batch, now))
        self.model.train()

    def update(self, stage: int, world_size: int) -> None:
        """Steps amid a stage, after which each optimizer has stepped, as one rank of so many."""
        steps = self.stages[stage]
        amid = steps[len(steps) // 2]
        first = amid - amid % self.period
        # A table of n-grams has read no rows: its step is noted by shapes.
        optimizers = [x for x in self.sharded[world_size] if not hasattr(x, "ask_ahead")]

        def some_steps():
            for step in range(first, first + self.period):
                now = self.script.schedule(step, self.cfg)
                tied = getattr(now, "tied", False)  # as of #53
                update = self.script.step_tied if tied else self.script.step_optimizers
                divisor = dict(divisor=1) if hasattr(now, "long_window") else {}
                if hasattr(self.script, "look_ahead"):
                    self.script.look_ahead(optimizers, now)
                for optimizer in optimizers:
                    if hasattr(optimizer, "is_read"):
                        optimizer.is_read[:, ::READ_IDS] = True
                update(optimizers, now, **divisor)
                if self.table:
                    self.step_table(stage, world_size, now)

        self.note(f"update of {stage} on {world_size}", some_steps)

    def step_table(self, stage: int, world_size: int, now) -> None:
        """Note the exchange of rows and gradients in a step, and a step of the rows, if due."""
        tokens = self.facts_of(stage)["step_tokens"] // world_size
        read = int(DISTINCT * 2 * tokens)
        if world_size > 1:
            for what in "rows", "gradients":
                self.notes.launch("wire", f"all_to_all of {what}", read * 2 * self.cfg.model_dim)
        if now.tables_step:
            moved = self.period * read * ROW_BYTES + 8 * self.cfg.ngram_rows // world_size
            self.notes.launch("aten", "row_adam_update", moved)

    def average(self, world_size: int) -> None:
        """Take each average once: of weights in the last steps, as of 92e."""
        now = self.script.schedule(self.cfg.num_iterations - 1, self.cfg)
        for name in self.averages():
            due = dataclasses.replace(now, average_rates={name: 0.5})
            self.note(f"average {name} on {world_size}", lambda due=due: [
                x.average(due) for x in self.sharded[world_size]])

    def averages(self) -> dict:
        """How many steps take each average, by its name."""
        steps = range(self.cfg.num_iterations)
        rates = (getattr(self.script.schedule(step, self.cfg), "average_rates", ())
                 for step in steps)
        return dict(Counter(name for each in rates for name in each))

    def facts_of(self, stage: int) -> dict:
        cfg, steps = self.cfg, self.stages[stage]
        length, targets, classes = shapes(self.script.schedule(steps[0], cfg))
        tokens = cfg.sequences_per_forward * length
        return dict(
            steps=len(steps), targets=targets, classes=classes, tokens=tokens,
            width=classes or len(self.model.lm_head.weight),
            head_tokens=min(self.model.tokens_per_chunk, tokens // cfg.sequences_per_forward
                            if classes else tokens),
            step_tokens=cfg.sequences_per_step * length)

    def facts(self, noted) -> dict:
        stages = {}
        for stage in noted:
            pairs = block_pairs(self.script, self.cfg, self.stages[stage])
            stages[str(stage)] = self.facts_of(stage) | dict(block_pairs=pairs)
        return dict(head_chunks=self.cfg.head_chunks, model_dim=self.cfg.model_dim,
                    period=self.period, stages=stages, averages=self.averages())


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


def with_few_layers(script, cfg):
    """The settings with so many layers as have every kind of kernel; all are alike by steps."""
    if hasattr(cfg, "num_layers"):
        return dataclasses.replace(cfg, num_layers=2)
    return dataclasses.replace(cfg, layers=few_layers_of(script))


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

    None (0) where attention is not FlexAttention: there its operators tell their FLOP.
    Paired heads have twice the blocks for half of the heads. Composed heads attend once for each.
    """
    first = script.schedule(steps[0], cfg)
    if not hasattr(first, "long_window"):
        return 0
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


def main(script, flags, out, validation=False, ranks=(), card="sm_90", noted=None, few_layers=False,
         binaries=False):
    """Trace passes of all stages or the noted ones, validation, the steps of a rank of so many.

    out: the file that the trace goes to. few_layers: with those of `few_layers_of`. binaries:
    kernels become machine code for the card.
    """
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    host_gpu.use_card(card)
    notes = Notes()
    stand_in_for_launches(notes, binaries)
    stand_in_for_tensors(notes)
    script = load_script(Path(script))
    cfg = script.shorten(script.parse_args(flags))
    chunks = cfg.head_chunks or script.default_head_chunks(torch.device("cuda", 0))
    cfg = dataclasses.replace(cfg, head_chunks=chunks)
    if few_layers:
        cfg = with_few_layers(script, cfg)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tracer = Tracer(script, cfg, notes, ranks)
        noted = [*range(len(tracer.stages))] if noted is None else noted
        for stage in noted:
            tracer.train(stage)
            for world_size in ranks:
                tracer.update(stage, world_size)
        for world_size in ranks:
            tracer.average(world_size)
        if validation:
            tracer.validate()
    found = Trace(tracer.facts(noted), tracer.graphs, list(counters["graph_break"]), tracer.memory,
                  notes.launches, notes.shared)
    Path(out).write_text(json.dumps(vars(found)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
