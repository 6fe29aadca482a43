"""What one GPU tells in half an hour. `python tests/bench.py gpu` runs the parts in turn.

Each part is a process of its own, which has to end within its time. All that it prints is in one
file, and a part that fails stops no other. The first parts are those from which most is learned.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import torch

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "data"), str(REPO / "tests" / "gpu")]
from host_gpu.trace import document_starts  # noqa: E402
from shards import load_script, write_shard  # noqa: E402

import train_gpt  # noqa: E402

say = functools.partial(print, flush=True)
VALIDATION = r"^step:\d+/\d+ val_loss:[\d.]+ train_time:(\d+)ms"
STAGE_STEPS = 10  # of each of a record's stages
NOISE_SHARE = 12  # the noise has one id of so many: text, too, has few of them in a sequence
NEWEST = "2026-08-30_92h_Fp8Products"
NEWEST_ROWS = "377280"  # of its n-gram table, which fit any card; the record's fit eight
SMALL_CARD = 22.9 * 2**30  # bytes that a card of 24 GB has for torch
GROUPS = (  # of kernels: the first whose pattern is in the name
    ("attention", "flex_attention|triton_tem|flash"),
    ("on the wire", "nccl"),
    ("matrix products", "gemm|nvjet|xmma|cutlass|cublas"),
    ("copies", "Memcpy|Memset"),
    ("other compiled kernels", "triton_"),
    ("torch's own kernels", ""))


# ---- Parts ------------------------------------------------------------------


def machine(flags):
    """What the machine has."""
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    say(f"Python {sys.version}\nPython.h: {headers.exists()}, /dev/shm: "
        f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB, cores: {os.cpu_count()}")
    for name, value in train_gpt.machine_facts(torch.device("cuda", 0)).items():
        say(f"{name}: {value}")
    for command in ["nvidia-smi"], ["gcc", "--version"], ["free", "-g"]:
        if shutil.which(command[0]):
            say(subprocess.run(command, capture_output=True, text=True).stdout)


def fp8(flags):
    """The three kinds of FP8 products, of ones: each sum is 256 cubed."""
    ones = torch.ones(256, 256, device="cuda")
    e4m3, e5m2 = ones.to(torch.float8_e4m3fn), ones.to(torch.float8_e5m2)
    scale = torch.ones((), device="cuda")
    for a, b, dtype in ((e4m3, e4m3, torch.bfloat16), (e5m2, e4m3, torch.bfloat16),
                        (e4m3, e5m2, torch.float32)):
        y = torch._scaled_mm(a, b.T, scale, scale, out_dtype=dtype)
        right = y.double().sum().item() == 256**3
        say(f"{a.dtype} times {b.dtype}: {'right' if right else 'WRONG'}")


def attention(flags, length=8192, heads=6, reach=1024, repeats=200):
    """Result and gradients of FlexAttention's kernels beside the CPU's way, in fp32.

    A race would show in one launch of hundreds.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, length, heads, 128)
    q, k, v, gradient = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4))
    q = 0.12 * q
    docs = torch.zeros(1, length, dtype=torch.int32, device="cuda")
    docs[0, document_starts(length)] = 1
    docs = docs.cumsum(1, dtype=torch.int32)
    reach = torch.tensor(reach, dtype=torch.int32, device="cuda")

    @functools.partial(torch.compile, dynamic=False)
    def flex(q, k, v):
        return train_gpt.attend(q, k, v, train_gpt.flex_mask(docs, reach), None)

    def dense(q, k, v):
        mask = train_gpt.dense_mask(docs, reach)
        return train_gpt.attend(q.float(), k.float(), v.float(), mask, None)

    def results(function):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = function(*leaves)
        y.backward(gradient.to(y.dtype))
        return [x.double() for x in (y.detach(), *(leaf.grad for leaf in leaves))]

    expected = results(dense)
    worst = [0.0] * 4
    for _ in range(repeats):
        for i, (x, reference) in enumerate(zip(results(flex), expected)):
            error = ((x - reference).norm() / reference.norm()).item()
            worst[i] = max(worst[i], error if math.isfinite(error) else math.inf)
    errors = ", ".join(f"{part} {error:.4f}" for part, error in zip("yqkv", worst))
    say(f"largest relative errors of result and gradients, {repeats} times: {errors}")


def steps(flags, script=train_gpt, stage_steps=STAGE_STEPS):
    """Milliseconds of a step in each stage, on documents of noise, and memory at the peak."""
    text = short_run(script, flags, stage_steps)
    times = [int(ms) for ms in re.findall(VALIDATION, text, re.MULTILINE)]
    final = dict(re.findall(r"^(\w+): (.*)$", text, re.MULTILINE))
    cfg = script.parse_args(short_flags(script, flags, stage_steps))
    say(f"{final['device']}, torch {final['torch']}: the mean of {stage_steps} steps of each stage")
    for stage, (begin, end) in enumerate(itertools.pairwise(times)):
        now = script.schedule(stage * stage_steps, cfg)
        tokens = cfg.sequences_per_step * now.seq_len
        ms = max(1, end - begin) / stage_steps
        say(f"stage {stage}: sequences of {now.seq_len:,} tokens, {ms:.1f} ms a step, "
            f"{1000 * tokens / ms:,.0f} tokens/s")
    say(f"memory at the peak: {int(final['peak_memory_mib']) / 2**10:.1f} GiB")


def kernels(flags, script=train_gpt, stage_steps=STAGE_STEPS):
    """The kernels of a step in each stage: groups, and the sixty that take longest."""
    train = script.train
    # The profiler counts a step more than the run has done: it is each stage's last but one.
    once_a_stage = torch.profiler.schedule(wait=stage_steps - 2, warmup=1, active=1)

    def train_profiled(run, cfg):
        next_step = run.loader.next_step

        def next_step_profiled(now):
            torch.cuda.synchronize()
            profile.step()
            return next_step(now)

        run.loader.next_step = next_step_profiled  # after the warm-up, whose steps ask for it, too
        with torch.profiler.profile(
                schedule=once_a_stage, on_trace_ready=print_kernels) as profile:
            train(run, cfg)

    with mock.patch.object(script, "train", train_profiled):
        short_run(script, flags, stage_steps)


def print_kernels(profile):
    rows = [(x.key, x.count, x.self_device_time_total / 1000) for x in profile.key_averages()
            if x.self_device_time_total]
    groups = Counter()
    for name, _, ms in rows:
        groups[next(group for group, pattern in GROUPS if re.search(pattern, name))] += ms
    say(f"\nstep {profile.step_num - 1}: {sum(groups.values()):.1f} ms of kernels")
    for group, ms in groups.most_common():
        say(f"{ms:9.2f} ms  {group}")
    for name, count, ms in sorted(rows, key=lambda row: -row[2])[:60]:
        say(f"{ms:9.3f} ms {count:5} times  {name[:100]}")


def small_card(flags):
    """Steps on a card of 24 GB, whose memory is imitated: whether the record fits."""
    total = torch.cuda.get_device_properties(0).total_memory
    part = min(1.0, SMALL_CARD / total)
    os.environ["PYTORCH_ALLOC_CONF"] = (
        f"expandable_segments:True,per_process_memory_fraction:{part:.3f}")
    steps([*flags, "--head_chunks", "8"])


def newest(flags, stage_steps=STAGE_STEPS, measure=None):
    """Steps of the newest record, without the tables that it would read from files."""
    say(NEWEST)
    script = load_script(REPO / "records" / NEWEST / "train_gpt.py")
    for field in dataclasses.fields(script.Hyperparameters):
        if field.name.endswith("_file"):
            flags = [*flags, f"--{field.name}", ""]
        if field.name == "ngram_rows":
            flags = [*flags, "--ngram_rows", NEWEST_ROWS]
    (measure or steps)(flags, script, stage_steps)


def rows(flags, num_rows=1_000_000, tokens=49_152, repeats=10):
    """Milliseconds of what a rank does in a step with its part of the n-gram table, but sending."""
    script = load_script(REPO / "records" / NEWEST / "train_gpt.py")
    cfg = script.parse_args([*flags, "--ngram_rows", str(num_rows)])
    table = script.NgramTable("rows", script.parameter_groups(cfg)["n-grams"], cfg,
                              script.Ranks(cfg))
    now = script.schedule(1, cfg)
    draw = np.random.default_rng(0)
    times = Counter()

    @contextlib.contextmanager
    def timed(what):
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times[what] += 1000 * (time.perf_counter() - began) / repeats

    for repeat in range(-1, repeats):
        ids = torch.from_numpy(draw.integers(num_rows, size=(1, 1, tokens, 2), dtype=np.int32))
        with timed("plan on the host, but for other ranks"):
            reading = table.plan(ids)
        with timed("fetch"):
            read = table.take(reading)
        read.grad = torch.ones_like(read)
        with timed("gradients"):
            table.keep_gradients()
        with timed("step of the table"):
            table.update(now, divisor=8)
        table.clear()
        if repeat < 0:  # the first time is of loading
            times.clear()
    for what, ms in times.items():
        say(f"{ms:8.2f} ms  {what}")


def newest_kernels(flags, stage_steps=STAGE_STEPS):
    """The kernels of the newest record: FP8 products, softmax, table, one group each or more."""
    newest(flags, stage_steps, measure=kernels)


PARTS = {  # with the seconds that each may take: 47 minutes at most, some 30 are likely
    machine: 30, fp8: 60, attention: 240, steps: 600, kernels: 300, small_card: 420, rows: 60,
    newest: 720, newest_kernels: 400}


# ---- Runs -------------------------------------------------------------------


def short_flags(script, flags, stage_steps):
    """With so many steps for each stage on average, and none afterwards."""
    num_steps = stage_steps * len(script.parse_args(flags).stages)
    return [*flags, "--num_iterations", str(num_steps), "--val_every", str(stage_steps),
            "--extension_steps", "0", "--repeat_data", "true"]


def short_run(script, flags, stage_steps) -> str:
    """The log of a run of the script on documents of noise, as long as FineWeb's."""
    flags = short_flags(script, flags, stage_steps)
    cfg = script.parse_args(flags)
    ids = cfg.eot_token // NOISE_SHARE
    longest = max(row.seq_len for row in cfg.rows())
    sizes = dict(train=16 * cfg.sequences_per_step * longest,
                 val=cfg.val_seq_len + 1)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, size in sizes.items():
            tokens = np.random.default_rng(0).integers(ids, size=size)
            tokens[[0, *document_starts(size)]] = cfg.eot_token
            write_shard(Path(f"{name}_0.bin"), tokens)
        flags += ["--train_files", "train_*.bin", "--val_files", "val_*.bin",
                  "--val_tokens", str(cfg.val_seq_len), "--run_id", "short"]
        code = script.main(flags)
        if code:
            sys.exit(code)
        text = Path("logs", "short", "log.txt").read_text()
    return text.rpartition("=" * 100)[2]


def run_parts(file, flags, parts=PARTS, words=(sys.executable, __file__)) -> list[str]:
    """Run each part, all that it prints in the file. Returns the names of those that ended well."""
    measured = []
    for part, seconds in parts.items():
        name = getattr(part, "__name__", part)
        say(f"{name}, {seconds} s at most ...")
        with file.open("a") as opened:
            opened.write(f"\n==== {name}\n")
            opened.flush()
            begin = time.monotonic()
            try:
                done = subprocess.run([*words, name, *flags], stdout=opened, timeout=seconds,
                                      stderr=subprocess.STDOUT)
                said = f"exit code {done.returncode}"
                measured += [name] * (done.returncode == 0)
            except subprocess.TimeoutExpired:
                said = "out of time"
            opened.write(f"---- {name}: {said} after {time.monotonic() - begin:.0f} s\n")
        say(f"    {said}")
    return measured


if __name__ == "__main__":
    {part.__name__: part for part in PARTS}[sys.argv[1]](sys.argv[2:])
