#!/usr/bin/env python3
"""Measure what the README quotes. This is no test: run it on an idle machine, and give it time.

    python tests/bench.py pocket [--seeds 5] [--against CMD]   time to the target, in turns with CMD
    python tests/bench.py pocket --picture docs/pocket.png     the same, drawn: loss over seconds
    python tests/bench.py phases                               where a step's time goes
    python tests/bench.py profile [--preset record]            a few steps by operator, with a trace
    python tests/bench.py scaling                              cost by tokens, length and width
    python tests/bench.py gpu [--steps 5]                      tests, start and steps on this GPU
    python tests/bench.py kernels [--card h200] [--script F]   the same modelled, without a GPU
    python tests/bench.py memory [--script F]                  a GPU's memory, counted without one

Any other flag goes to train_gpt.py or F. Numbers are medians, with (lowest-highest) beside them.

CMD is a command that ends with a block of `key: value` as train_gpt.py does; {seed} in it becomes
the seed. By default it is the yardstick, tests/plain_baseline.py; '' runs the preset alone.

--picture draws the runs of this script and of the yardstick. What they print is kept in --keep, a
folder beside the picture by default; --redraw draws it again without a run. `gpu` takes less than
ten minutes and keeps all that it prints, and its runs' logs, in a new folder under logs/.
"""

import argparse
import contextlib
import functools
import io
import itertools
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from scipy import stats

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "data"), str(REPO / "tests" / "gpu")]
import host_gpu  # noqa: E402
from host_gpu import cost  # noqa: E402
from host_gpu.trace import cached_trace, two_layers_of  # noqa: E402
from shards import write_shard  # noqa: E402

import train_gpt  # noqa: E402

# Commands, from the repository's root; python is this one.
SCRIPT = "python train_gpt.py"
YARDSTICK = ("python tests/plain_baseline.py --train data/pocket/pocket_train_*.bin "
             "--val data/pocket/pocket_val_*.bin --target 1.64 --seed {seed}")
EVERY = {"pocket": " --val_every 20", "against": " --eval_every 50"}  # validations to draw
NAMES = {"pocket": "this GPT", "against": "plain GPT"}
DOCUMENT_MEDIAN, DOCUMENT_MEAN, DOCUMENT_MIN = 403, 690, 32  # tokens, of FineWeb's documents
SPEC_TFLOPS = {"H100": 989.4, "H200": 989.4, "A100": 312.0, "4090": 165.2, "3090": 71.0}  # bf16


# -----------------------------------------------------------------------------
# Printing


def wait_for(device):
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(text=""):
    """Replace the live line of a terminal; elsewhere nothing is shown."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text[:100]}", end="", flush=True)


def say(text):
    show()
    print(text, flush=True)


def spread(values, digits=1):
    """'median (lowest-highest)' of numbers."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def print_table(header, rows):
    """Print rows of strings in columns, the first one to the left.

    A list sets the columns' widths; of a generator each row is printed when it is there, in columns
    as wide as the header.
    """
    known = [header, *rows] if isinstance(rows, list) else [header]
    widths = [max(map(len, column)) for column in zip(*known)]
    for first, *others in itertools.chain([header], rows):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        say("   ".join([first.ljust(widths[0]), *cells]).rstrip())


# -----------------------------------------------------------------------------
# pocket: whole runs


class RunFailed(Exception):
    """A measured command did not end well."""


def run_command(command, label, env=None, cwd=REPO):
    """Run a command to its end, with its last line live.

    Returns its final values as strings, and with them wall_s, peak_mib of its process, and
    lines: (seconds since the start, text) of all it printed. Raises RunFailed.
    """
    words = shlex.split(command)
    if words[0] == "python":
        words[0] = sys.executable
    lines = []
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True,
                                   cwd=cwd, env={**os.environ, **(env or {})})
        try:
            for line in process.stdout:
                lines.append((time.perf_counter() - start, line.rstrip()))
                show(f"{label}: {line.rstrip()}")
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.terminate()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            reason = (errors.read().splitlines() or ["no message"])[-1]
            raise RunFailed(f"{command} ended with {process.returncode}: {reason}")
    values = final_values("\n".join(text for _, text in lines))
    peak = usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return values | dict(wall_s=time.perf_counter() - start, peak_mib=peak, lines=lines)


def final_values(text):
    return dict(re.findall(r"^(\w+): (.*)$", text, re.M))


def training_seconds(values):
    if "train_time_ms" in values:
        return float(values["train_time_ms"]) / 1000
    return float(values["train_seconds"])


def pocket(args, flags):
    """Train on each seed in turns with another command; compare times, losses and memory."""
    folder = None  # that keeps what the runs print
    if args.picture:
        folder = args.keep or args.picture.with_suffix("")
    if args.redraw:
        draw(folder, args.picture)
        return
    cfg = train_gpt.parse_args(["--preset", "pocket", *flags])
    commands = {"pocket": shlex.join([*SCRIPT.split(), "--preset", "pocket", *flags])
                + " --seed {seed}"}
    if args.against:
        commands["against"] = args.against
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        commands = {name: command + EVERY[name] for name, command in commands.items()}
    runs = {name: [] for name in commands}
    total = args.seeds * len(commands)
    start = time.time()
    try:
        for seed in range(args.seeds):
            for name, command in commands.items():
                done = sum(map(len, runs.values()))
                command = command.replace("{seed}", str(seed))
                values = run_command(command, f"run {done + 1} of {total}, {name}, seed {seed}")
                runs[name].append(values)
                if folder:
                    printed = "".join(f"{text}\n" for _, text in values["lines"])
                    (folder / f"{name}-{seed}.txt").write_text(f"$ {command}\n{printed}")
                left = (time.time() - start) / (done + 1) * (total - done - 1)
                say(f"run {done + 1} of {total}: {name}, seed {seed}: val_loss "
                    f"{values['val_loss']}, training {training_seconds(values):.1f} s, command to "
                    f"exit {values['wall_s']:.1f} s; about {left:.0f} s left")
    finally:  # what has been measured is reported, however the rest ends
        if runs["pocket"]:
            report_pocket({name: each for name, each in runs.items() if each}, cfg.target_loss)
    if folder:
        draw(folder, args.picture)


def draw(folder, picture):
    """Draw the runs kept in the folder: validation loss over seconds of training."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kept = {name: sorted(folder.glob(f"{name}-*.txt")) for name in NAMES}
    if not kept["pocket"]:
        raise train_gpt.UserError(f"--keep {folder}: there is no pocket-*.txt")
    target = train_gpt.parse_args(["--preset", "pocket"]).target_loss
    # Twice as many pixels as a page shows.
    with rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for (name, files), color in zip(kept.items(), ("tab:blue", "tab:gray")):
            curves = [losses_over_seconds(file.read_text()) for file in files]
            for seconds, losses in curves:
                axes.plot(seconds, losses, color=color, linewidth=1.6, alpha=0.7)
            if curves:
                seconds = statistics.median(seconds[-1] for seconds, _ in curves)
                loss = statistics.median(losses[-1] for _, losses in curves)
                reached = statistics.median(
                    seconds_to(target, *curve) for curve in curves)
                words = f"{NAMES[name]}: {loss:.3f} after {seconds:.1f} s"
                if math.isfinite(reached):
                    words += f", {target} after {reached:.1f} s"
                    axes.plot(reached, target, "o", color=color, markersize=8)
                axes.plot([], [], color=color, linewidth=3, label=words)
        axes.axhline(target, color="black", linestyle="--", linewidth=1, label=f"target: {target}")
        axes.set_ylim(1.4, 3.4)
        axes.set_xlim(left=0)
        facts = final_values(kept["pocket"][0].read_text())
        axes.set_xlabel(f"seconds of training, {facts['threads']} threads, {facts['device']}")
        axes.set_ylabel("validation loss, nats per byte")
        axes.legend(frameon=False, loc="upper right")
        figure.savefig(picture, dpi=200, metadata={"Software": None})
    say(f"{picture}, of {sum(map(len, kept.values()))} runs in {folder}")


def losses_over_seconds(text):
    """Seconds and losses of the validations in what a run has printed."""
    found = re.findall(r"^step:\d+/\d+ val_loss:([\d.]+) train_time:(\d+)ms", text, re.M)
    return [int(ms) / 1000 for _, ms in found], [float(loss) for loss, _ in found]


def seconds_to(target, seconds, losses):
    """When a loss reaches the target, linear between validations; infinite where it never does."""
    for index, loss in enumerate(losses):
        if loss <= target:
            if index == 0:
                return seconds[0]
            share = (losses[index - 1] - target) / (losses[index - 1] - loss)
            return seconds[index - 1] + share * (seconds[index] - seconds[index - 1])
    return math.inf


def report_pocket(runs, target):
    measures = {
        "training, s": (training_seconds, 1),
        "command to exit, s": (lambda values: values["wall_s"], 1),
        "val_loss, nats per byte": (lambda values: float(values["val_loss"]), 4),
        "peak memory, MiB": (lambda values: values["peak_mib"], 0),
    }
    rows = []
    for title, (measure, digits) in measures.items():
        columns = [[measure(values) for values in each] for each in runs.values()]
        row = [title, *(spread(column, digits) for column in columns)]
        if len(columns) > 1:
            row.append(f"{statistics.median(columns[1]) / statistics.median(columns[0]):.2f}")
        rows.append(row)
    machine = runs["pocket"][0]
    print(f"\n{machine['device']}, {os.cpu_count()} cores, torch {machine['torch']}")
    print_table(["", *runs, *["ratio"] * (len(runs) > 1)], rows)
    if len(runs) > 1:
        wall = statistics.median(values["wall_s"] for values in runs["pocket"])
        other = statistics.median(map(training_seconds, runs["against"]))
        print(f"pocket, command to exit: 1/{other / wall:.1f} of the training time of the other")
    losses = [float(values["val_loss"]) for values in runs["pocket"]]
    if len(losses) > 1:
        p = stats.ttest_1samp(losses, target, alternative="less").pvalue
        print(f"pocket, {len(losses)} seeds: mean val_loss {statistics.mean(losses):.4f}, "
              f"std {statistics.stdev(losses):.4f}, highest {max(losses):.4f}; "
              f"mean <= {target} with p = {p:.2g} (one-sided t-test)")


# -----------------------------------------------------------------------------
# phases: a step of a real run, by the functions it calls


class Stopwatch:
    """Seconds of each step in wrapped functions, without what wrapped functions inside them take.

    The first phase that is named begins a step.
    """

    def __init__(self):
        self.steps, self.inner, self.paused = [], [], False

    def wrap(self, owner, name, phase, begins_step=False):
        """Count calls of owner.name as `phase`; with None, count nothing while it runs."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args, **kwargs):
            if self.paused:
                return function(*args, **kwargs)
            start = time.perf_counter()
            if begins_step:
                self.steps.append((start, Counter()))
            self.inner.append(0.0)
            self.paused = phase is None
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.paused = False
                inner = self.inner.pop()
                if self.steps and phase:
                    self.steps[-1][1][phase] += seconds - inner
                if self.inner:
                    self.inner[-1] += seconds

        setattr(owner, name, timed)

    def milliseconds(self):
        """{phase: [ms of each step]}, `the rest` and `step` included; the last step is left out."""
        phases = sorted({phase for _, counted in self.steps for phase in counted})
        ms = {phase: [1000 * counted[phase] for _, counted in self.steps[:-1]] for phase in phases}
        begins = [start for start, _ in self.steps]
        steps = [1000 * (end - start) for start, end in zip(begins, begins[1:])]
        rest = [step - sum(parts) for step, *parts in zip(steps, *ms.values())]
        return ms | {"the rest": rest, "step": steps}


def run_here(flags):
    """A pocket run in this process that prints nothing. Raises RunFailed."""
    errors, interrupt = io.StringIO(), signal.getsignal(signal.SIGINT)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = train_gpt.main(["--preset", "pocket", "--device", "cpu", *flags])
    signal.signal(signal.SIGINT, interrupt)  # the run has taken it over
    if code:
        raise RunFailed(errors.getvalue().strip())


def phases(args, flags):
    """Run the pocket with its functions wrapped, and print the median of each over the steps."""
    watch, script = Stopwatch(), train_gpt
    watch.wrap(script.TokenLoader, "next_step", "loader", begins_step=True)
    watch.wrap(script.GPT, "forward", "forward")
    watch.wrap(torch.Tensor, "backward", "backward")
    watch.wrap(script, "orthogonalize", "Newton-Schulz")
    watch.wrap(script.Muon, "update", "Muon, the rest of it")
    watch.wrap(script.Adam, "update", "Adam")
    watch.wrap(script.Health, "check", "check of the losses")
    for name in ("warm_up", "validate"):
        watch.wrap(script.Run, name, None)
    say("a pocket run, measured step by step ...")
    run_here(flags)
    ms = watch.milliseconds()
    step = statistics.median(ms["step"])
    ordered = sorted(ms, key=lambda phase: -statistics.median(ms[phase]))
    print_table(["phase", "ms a step", "share"], [
        [phase, spread(ms[phase], 2), f"{statistics.median(ms[phase]) / step:.0%}"]
        for phase in ordered])


# -----------------------------------------------------------------------------
# profile: a run of the script, its steps 3 to 5 recorded


def profile(args, flags):
    """Run the script, and print a table by operator and kernel of three steps; beside it a trace.

    Under torchrun every rank runs, and rank 0 records."""
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=2, warmup=1, active=3, repeat=1))
    script, check = train_gpt, train_gpt.Health.check

    def check_then_advance(health, step, *rest):
        check(health, step, *rest)
        profiler.step()

    script.Health.check = check_then_advance
    rank = int(os.environ.get("RANK", 0))
    with profiler if rank == 0 else contextlib.nullcontext():
        if code := script.main(["--preset", "pocket", *flags]):
            raise SystemExit(code)
    if rank == 0:
        trace = Path("logs") / "trace.json"
        profiler.export_chrome_trace(str(trace))
        say(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        say(f"{trace}, for chrome://tracing or ui.perfetto.dev")


# -----------------------------------------------------------------------------
# scaling: forward and backward passes, and optimizer steps, of the pocket's model


class Trainer:
    """A model of the script with its optimizers, and the parts of its training step."""

    def __init__(self, cfg, ranks, model, optimizers):
        self.cfg = cfg
        self.device = ranks.device
        self.model = model
        self.optimizers = optimizers

    def forward(self, inputs, targets, step=0):
        """The loss that a step minimises."""
        weights = train_gpt.schedule(step, self.cfg).target_weights
        losses = self.model(inputs, targets, len(weights))
        return sum(weight * loss for weight, loss in zip(weights, losses))

    def optimize(self, step):
        """Step the optimizers, as at that step of a run."""
        now = train_gpt.schedule(step, self.cfg)
        train_gpt.step_optimizers(self.optimizers, now, self.cfg.sequences_per_step)

    def optimizer_seconds(self, first=0):
        """Of a step of theirs: the mean of two, as Adam rests in the first."""
        seconds = [self.seconds(self.optimize, step)[1] for step in (first, first + 1)]
        return statistics.mean(seconds)

    def seconds(self, function, *args):
        """Result and seconds of a call, waiting for the device before and after."""
        wait_for(self.device)
        start = time.perf_counter()
        result = function(*args)
        wait_for(self.device)
        return result, time.perf_counter() - start

    def matrix_parameters(self):
        """Parameters that take part in matrix products: hidden matrices and the head."""
        hidden = sum(p.numel() for p in self.model.blocks.parameters() if p.ndim >= 2)
        return hidden, self.model.lm_head.weight.numel()


def time_steps(rows, length, *flags, repeats=5):
    """A trainer, us a token of its passes, ms of its optimizer steps, on rows of random tokens."""
    cfg = train_gpt.parse_args([
        "--preset", "pocket", "--device", "cpu", "--sequences_per_step", str(rows),
        "--sequences_per_forward", str(rows), "--seq_lens", str(length), *map(str, flags)])
    ranks = train_gpt.Ranks(cfg)
    trainer = Trainer(cfg, ranks, *train_gpt.build(cfg, ranks))
    tokens = np.random.default_rng(0).integers(cfg.vocab_size, size=(rows, length + 1))
    batch = train_gpt.to_batch(tokens, ranks.device)
    passes = []
    steps = []
    for repeat in range(repeats + 1):  # the first one warms up
        show(f"{rows} x {length} tokens, model_dim {trainer.cfg.model_dim}: {repeat} of {repeats}")
        passes.append(trainer.seconds(lambda: trainer.forward(*batch).backward())[1])
        steps.append(trainer.optimizer_seconds())
    return trainer, [1e6 * s / (rows * length) for s in passes[1:]], [1e3 * s for s in steps[1:]]


def scaling(args, flags):
    """Print time per token by the number of tokens, by sequence length and by parameters."""
    sizes = [1024 * 4**n for n in range(4)]
    passes_header, steps_header = "forward and backward, us a token", "optimizers, ms a step"

    def by_shape(shapes):
        for rows, length in shapes:
            _, us, ms = time_steps(rows, length, *flags)
            yield [f"{rows * length:,}", spread(us, 2), spread(ms, 2)]

    def by_parameters():
        for dim in (128, 192, 256, 384, 512):
            trainer, us, ms = time_steps(8, 512, "--model_dim", dim, *flags)
            millions = sum(trainer.matrix_parameters()) / 1e6
            yield [f"{millions:.2f}", spread(us, 2), spread([x / millions for x in us], 2),
                   spread(ms, 2)]

    say("one step of the pocket first: main also says how memory is kept ...")
    run_here(["--num_iterations", "1", "--val_tokens", "1", *flags])
    print_table(["tokens a step, in sequences of 1,024", passes_header, steps_header],
                by_shape((size // 1024, 1024) for size in sizes))
    say("")
    print_table(["tokens a sequence, one a step", passes_header, steps_header],
                by_shape((1, size) for size in sizes))
    say("")
    print_table(["millions of parameters in matrix products", passes_header,
                 "for a million of them", steps_header], by_parameters())


# -----------------------------------------------------------------------------
# gpu: the record's step on synthetic documents


def write_documents(path, num_tokens, cfg):
    """Write a shard of random tokens in documents of log-normal lengths, as FineWeb's are."""
    random = np.random.default_rng(0)
    sigma = math.sqrt(2 * math.log(DOCUMENT_MEAN / DOCUMENT_MEDIAN))
    lengths = random.lognormal(math.log(DOCUMENT_MEDIAN), sigma, size=num_tokens // DOCUMENT_MIN)
    starts = np.cumsum(np.maximum(lengths, DOCUMENT_MIN).astype(int))
    tokens = random.integers(cfg.eot_token, size=num_tokens)
    tokens[starts[starts < num_tokens]] = tokens[0] = cfg.eot_token
    write_shard(path, tokens)


def matmul_tflops(device, size=8192, fp8=False):
    """TFLOP/s of a square matrix product in bf16, or in FP8."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    if fp8:
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        product = functools.partial(torch._scaled_mm, a, b.T, scale_a=one, scale_b=one,
                                    out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        product = functools.partial(torch.mm, a, b)
    seconds = []
    for _ in range(20):
        wait_for(device)
        start = time.perf_counter()
        for _ in range(5):
            product()
        wait_for(device)
        seconds.append((time.perf_counter() - start) / 5)
    return 2 * size**3 / statistics.median(seconds) / 1e12


def attention_flops(trainer, inputs):
    """FLOP, forward and backward, of one batch: all pairs in the blocks that are visited."""
    cfg, flops = trainer.cfg, 0
    starts = (inputs == cfg.eot_token).flatten()
    docs = starts.cumsum(0, dtype=torch.int32)
    for letter, window in zip("LS", trainer.model.windows):
        mask = train_gpt.flex_mask(docs, window)
        blocks = (mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()).item()
        layers = cfg.attention_pattern.count(letter)
        flops += 12 * cfg.model_dim * train_gpt.BLOCK**2 * blocks * layers
    return flops


def kernel_shares(trainer, step):
    """[(kind of kernel, ms of a step)], the largest first."""
    kinds = {
        "attention": "flex_attention|flash",
        "matrix products": "gemm|nvjet|cutlass|xmma|_mm|matmul|cublas",
        "copies and fills": "memcpy|memset|copy|fill",
        "fused elementwise and reductions": "triton",
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.seconds(step)
    ms = Counter()
    for event in profiler.key_averages():
        kind = next((k for k, names in kinds.items() if re.search(names, event.key, re.I)), "other")
        ms[kind] += event.self_device_time_total / 1000
    return ms.most_common()


def first_launch(flags, folder, cache):
    """Print what a launch costs without and with compiled code in the cache. Logs are kept."""
    flags = [*flags, "--num_iterations", "4", "--extension_steps", "1"]  # a step a stage

    def launches():
        for name in ("cold", "warm"):
            command = shlex.join(["python", str(REPO / "train_gpt.py"), *flags, "--run_id", name])
            values = run_command(command, name, dict(TORCHINDUCTOR_CACHE_DIR=cache), cwd=folder)
            lines = values["lines"]
            ready, line = next(x for x in lines if x[1].startswith("compile_seconds"))
            yield [name, line.partition(": ")[2], f"{ready:.1f}"]

    print_table(["launch", "compile_seconds", "command to first step, s"], launches())


def run_tests(folder):
    """Run the tests that are a GPU's, four minutes at most, and print how they ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_gpu.py"]
    show("tests ...")
    log = folder / "tests.txt"
    with log.open("w") as file:
        try:
            subprocess.run(command, cwd=REPO, stdout=file, stderr=file, timeout=240)
        except subprocess.TimeoutExpired:
            file.write("stopped after four minutes\n")
    say(f"tests: {log.read_text().splitlines()[-1]}; {log}")


def stages(cfg):
    """The steps of each stage of a run."""
    groups = itertools.groupby(
        range(cfg.num_iterations), lambda step: train_gpt.schedule(step, cfg).stage)
    return [list(steps) for _, steps in groups]


def measure_steps(trainer, loader, num_steps):
    """Print time, rate and parts of a training step in each stage of a run, in tokens.

    Returns a function that makes a step of the last stage."""
    cfg, device = trainer.cfg, trainer.device
    hidden, head = trainer.matrix_parameters()
    fp8 = trainer.model.head_type == "fp8"
    bf16_rate = matmul_tflops(device)
    head_rate = matmul_tflops(device, fp8=True) if fp8 else bf16_rate
    name = train_gpt.device_facts(device)[0]
    spec = next((tflops for part, tflops in SPEC_TFLOPS.items() if part in name), None)

    def step(number, batches):
        for batch in batches:
            trainer.forward(*batch, number).backward()
        trainer.optimize(number)

    rows = []
    for steps in stages(cfg):
        first = steps[len(steps) // 2]
        now = train_gpt.schedule(first, cfg)
        length = now.seq_len
        trainer.model.set_stage(now.stage)
        batches = loader.next_step(length)
        step(first, batches)
        ms = [1000 * trainer.seconds(step, first + n, batches)[1] for n in range(num_steps)]
        parts = Counter()
        for batch in batches:  # apart from the timed steps: waiting for the device costs time
            loss, seconds = trainer.seconds(trainer.forward, *batch, first)
            parts["forward"] += 1000 * seconds
            parts["backward"] += 1000 * trainer.seconds(loss.backward)[1]
        parts["optimizers"] += 1000 * trainer.optimizer_seconds(first)
        tokens = cfg.sequences_per_step * length
        median, model_flops = statistics.median(ms), 6 * tokens * (hidden + head)
        attention = sum(attention_flops(trainer, inputs) for inputs, _ in batches)
        floor = ((6 * tokens * hidden + attention) / bf16_rate
                 + 6 * tokens * head / head_rate) / 1e9  # ms at the measured rates
        rows.append([
            f"{len(steps)}", f"{length:,}", str(len(now.target_weights)),
            str(train_gpt.BLOCK * int(trainer.model.windows[0])), spread(ms),
            f"{1000 * tokens / median:,.0f}",
            f"{model_flops / median / spec / 1e9:.1%}" if spec else "unknown peak",
            f"{median / floor:.2f}", *(f"{parts[part]:.1f}" for part in parts),
        ])  # fmt: skip
    say(f"{name}: matrix products at {bf16_rate:.0f} TFLOP/s in bf16"
        + f", {head_rate:.0f} in FP8" * fp8)
    print_table(["steps", "tokens a sequence", "targets", "window", "ms a step", "tokens/s", "MFU",
                 "of the floor", "forward, ms", "backward, ms", "optimizers, ms"], rows)
    return functools.partial(step, first, batches)


class Both(io.TextIOBase):
    """Standard output that is kept in a file too."""

    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for file in self.files:
            file.write(text)
            file.flush()
        return len(text)


def gpu(args, flags):
    """Test and measure the record on this GPU: tests, start, steps, parts, memory. Keep all."""
    if not torch.cuda.is_available():
        raise train_gpt.UserError("there is no CUDA device; `phases` and `scaling` run on the CPU")
    folder = Path("logs", time.strftime("gpu-%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True)
    with (
        (folder / "bench.txt").open("w") as kept,
        tempfile.TemporaryDirectory() as data,
        contextlib.redirect_stdout(Both(sys.stdout, kept)),
    ):
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        run_tests(folder)
        measure_gpu(args, flags, folder, Path(data))
        say(f"kept in {folder}")


def measure_gpu(args, flags, folder, data):
    """Measure on documents as long as FineWeb's, of random tokens."""
    cfg = train_gpt.parse_args(flags)
    step_tokens = cfg.sequences_per_step * max(cfg.seq_lens)
    write_documents(data / "train_000000.bin", 16 * step_tokens, cfg)
    write_documents(data / "val_000000.bin", cfg.val_seq_len + 1, cfg)
    flags = ["--train_files", str(data / "train_*.bin"), "--val_files", str(data / "val_*.bin"),
             "--val_tokens", str(cfg.val_seq_len), *flags]
    cache = str(data / "cache")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    first_launch(flags, folder, cache)

    cfg = train_gpt.parse_args([*flags, "--run_id", folder.name + "-steps"])
    ranks = train_gpt.Ranks(cfg)
    run = train_gpt.Run(cfg, ranks, train_gpt.Log(cfg, ranks), None)  # it warms up
    trainer = Trainer(cfg, ranks, run.model, run.optimizers)
    torch.cuda.reset_peak_memory_stats()
    step = measure_steps(trainer, run.loader, args.steps)
    say(f"peak memory of the training steps: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, "
        f"head in {run.model.head_chunks} piece(s)")
    print_table(["kernels, in the last stage", "ms a step"],
                [[kind, f"{ms:.1f}"] for kind, ms in kernel_shares(trainer, step)])


# -----------------------------------------------------------------------------
# kernels and memory: what the compiler makes of the step, on a host that stands in for a GPU


def kernels(args, flags):
    """Model the script's step on a GPU in each stage, and a run on eight H100s, by its launches."""
    rates = cost.RATES[args.card]
    traces = trace_stages(args.script, flags)
    facts = traces[-1].facts
    priced = cost.price(traces[-1], rates)
    print(f"{cost.HEADLINE}\n{args.script}: forward and backward pass of {facts['tokens']:,} "
          f"tokens{' in the last stage' * (len(traces) > 1)}, on one {args.card.upper()}\n")
    print_costs(cost.by_group(priced, ("forward", "backward")))
    print()
    print_steps(traces, rates)
    print_eight_h100s(traces)
    seconds = Counter()
    for traced in traces:
        seconds.update(traced.cpu_seconds)
    parts = ", ".join(f"{part} {each:.0f}" for part, each in seconds.items())
    print(f"\nCPU seconds of compiling, before Triton, on this machine: {parts}")


def trace_stages(script, flags):
    """A trace of each stage, by which a script's whole steps differ in shape."""
    last = trace_step(script, flags)
    return [*(trace_step(script, flags, n) for n in range(last.facts["stage"])), last]


def trace_step(script, flags, stage=-1):
    """The trace of a script's whole step, on one rank and on one of eight; -1: the last stage's."""
    return trace_here(script, "--phases", "train,optimizers", "--binaries", "--ranks", "8",
                      "--stage", str(stage), *flags)  # fmt: skip


def print_steps(traces, rates):
    """A table of a whole step on one GPU, by stage."""
    rows = []
    for traced in traces:
        facts, priced = traced.facts, cost.price(traced, rates)
        one_pass, update = (total_ms(cost.by_group(priced, phases))
                            for phases in (("forward", "backward"), ("optimizers",)))
        rows.append([
            f"{facts['stages'][facts['stage']]:,}", f"{facts['tokens']:,}", f"{facts['targets']}",
            f"{one_pass:.1f}", f"{facts['step_tokens'] // facts['tokens']}", f"{update:.1f}",
            f"{cost.step_ms(traced, rates):,.0f}",
        ])  # fmt: skip
    print_table(["steps", "tokens a pass", "targets", "ms a pass", "passes", "optimizers, ms",
                 "ms a step"], rows)


def trace_here(script, *arguments):
    """The script's trace for H100 and H200, kept from run to run.

    Raises UserError where none can be made.
    """
    if reason := host_gpu.obstacle():
        raise train_gpt.UserError(reason)
    if not Path(script).is_file():
        raise train_gpt.UserError(f"--script {script}: there is no such file")
    show("compiling for a GPU that is not there: minutes ...")
    traced = cached_trace("sm_90", *arguments, script=script)
    show()
    return traced


def total_ms(groups):
    return sum(row.ms for row in groups.values())


def print_costs(groups):
    """A table of groups of launches, and their sum."""
    total = cost.Row()
    for row in groups.values():
        total += row
    print_table(["group", "launches", "GB", "TFLOP", "ms", "share"], [
        [name, f"{row.launches:g}", f"{row.bytes / 1e9:.1f}", f"{row.flop / 1e12:.2f}",
         f"{row.ms:.1f}", f"{row.ms / total.ms:.0%}"]
        for name, row in [*groups.items(), ("sum", total)]
    ])


def print_eight_h100s(traces):
    """The step and the run of the script's preset on eight H100s, beside what is published."""
    rates, ranks, run_ms = cost.RATES["h100"], 8, 0
    print(f"\non {ranks} H100s, nothing overlapping:")
    for traced in traces:
        facts, priced = traced.facts, cost.price(traced, rates)
        one_pass = total_ms(cost.by_group(priced, ("forward", "backward")))
        shared = cost.by_group(priced, (f"optimizers of {ranks} ranks",))
        wire, steps = shared.pop("on the wire"), facts["stages"][facts["stage"]]
        step = cost.step_ms(traced, rates, ranks)
        run_ms += steps * step
        print(f"{steps} steps of {step:.1f} ms: {one_pass:.1f} ms a pass, "
              f"{total_ms(shared):.1f} ms of optimizers, "
              f"{wire.ms:.1f} ms of {wire.bytes / 1e9:.2f} GB on the wire")
    print(f"a run in {run_ms / 60_000:.2f} minutes")
    published = ", ".join(f"record #{n}, {ms} ms" for n, ms in cost.PUBLISHED_STEP_MS.items())
    print(f"published: {published} a step on {ranks} H100s; the lineage's newest script, a later "
          f"model, {cost.NEWEST_48K_MS:.0f} ms for 48K tokens on one H100")


def memory(args, flags):
    """Count what the script's training holds at once in the last stage, by pieces of the head.

    At the peak, in the head's backward pass, everything else is there whatever the pieces. So they
    are compiled with two layers, and what the others add is counted once.
    """
    whole = trace_step(args.script, flags).memory
    peaks = {}
    for head_chunks in (1, 2, 4, 8, 16):
        two_layers = trace_here(
            args.script, "--phases", "train", *flags, *two_layers_of(args.script),
            "--head_chunks", str(head_chunks))  # fmt: skip
        peaks[head_chunks] = two_layers.memory["peak of backward"]
    print("counted in generated code, not measured; one GPU, without CUDA's own and gaps\n")
    others = whole["peak of backward"] - peaks[1]
    print_table(["head_chunks", "GiB at the peak"],
                [[f"{n}", f"{(others + peak) / 2**30:.1f}"] for n, peak in peaks.items()])
    state, kept = (whole[key] / 2**30 for key in ("state", "kept"))
    print(f"\nof them, GiB: {state:.1f} weights, gradients and the optimizers' state; {kept:.1f} "
          "kept by the forward pass for the backward pass, logits included, in one piece")


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = dict(pocket=pocket, phases=phases, profile=profile, scaling=scaling, gpu=gpu,
                    kernels=kernels, memory=memory)
    parser.add_argument("what", choices=commands)
    parser.add_argument("--seeds", type=int, default=5, help="of pocket: seeds, from 0 up")
    parser.add_argument("--against", metavar="CMD", default=YARDSTICK, help="of pocket: see above")
    parser.add_argument("--picture", type=Path, help="of pocket: see above")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of pocket: see above")
    parser.add_argument("--redraw", action="store_true", help="of pocket: see above")
    parser.add_argument("--steps", type=int, default=5, help="of gpu: timed steps at each window")
    parser.add_argument("--card", choices=cost.RATES, default="h200", help="of kernels")
    parser.add_argument("--script", type=Path, default=REPO / "train_gpt.py",
                        help="of kernels, memory")
    args, flags = parser.parse_known_args()
    args.script = str(args.script.resolve())
    if (args.keep or args.redraw) and not args.picture:
        parser.error("--keep and --redraw come with --picture PATH")
    try:
        commands[args.what](args, flags)
    except (train_gpt.UserError, RunFailed) as error:
        show()
        print(f"bench.py: {args.what}: {error}", file=sys.stderr)
        return 2 if isinstance(error, train_gpt.UserError) else 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
