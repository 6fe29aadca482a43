"""What a machine's GPUs tell in an hour. `python tests/bench.py gpu` runs the parts in turn.

Each part is a process of its own, which has to end within its time. All that it prints is in one
file, and a part that fails stops no other. The first parts are those from which most is learned.

    python tests/gpu/first_hour.py steps train_gpt.py    # one part alone, with flags of the script
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "data"), str(REPO / "tests" / "gpu")]
from host_gpu.cost import group_of_name  # noqa: E402
from host_gpu.trace import document_starts  # noqa: E402
from launch import torchrun_options  # noqa: E402
from shards import load_script, write_shard  # noqa: E402

VALIDATION = r"^step:\d+/\d+ val_loss:[\d.]+ train_time:(\d+)ms"
STAGE_STEPS = 10  # of each of a script's stages
NOISE_SHARE = 12  # the noise has one id of so many: text, too, has few of them in a sequence
SMALL_CARD = 22.9 * 2**30  # bytes that a card of 24 GB has for torch
ROOT = str(REPO / "train_gpt.py")
# Without the tables that it reads from files, and with as many n-grams as any card can hold
NEWEST = [str(REPO / "records/2026-08-30_92h_Fp8Products/train_gpt.py"),
          "--prefix_file=", "--canonical_file=", "--ngram_rows=377280"]
MEASURE = [sys.executable, __file__]
MODELLED_RANKS = 8  # of the model's steps with an exchange
# The seconds that each may take, an hour in all, and its command, to which flags are added. The
# first start of the newest record compiles for some ten minutes, by estimate.
PARTS = {
    "machine": (60, [sys.executable, "-m", "torch.utils.collect_env"]),
    "steps": (600, [*MEASURE, "steps", ROOT]),
    "kernels": (300, [*MEASURE, "kernels", ROOT]),
    "steps of the newest record": (1200, [*MEASURE, "steps", *NEWEST]),
    "kernels of the newest record": (600, [*MEASURE, "kernels", *NEWEST]),
    "steps on a small card": (360, [*MEASURE, "small_card", ROOT]),
    "tests": (480, [sys.executable, "-m", "pytest", "-m", "gpu", str(REPO / "tests/gpu")])}


def parts_of(gpus: int) -> dict:
    """PARTS and, where there are several GPUs, steps in which they exchange gradients and rows."""
    ranks = max(n for n in (1, 2, 4, 8) if n <= gpus)
    if ranks == 1:
        return PARTS
    torchrun = [sys.executable, "-m", "torch.distributed.run", *torchrun_options(ranks), __file__,
                "kernels"]
    return PARTS | {
        f"exchange of {ranks} GPUs": (420, [*torchrun, ROOT]),
        f"exchange of {ranks} GPUs, the newest record": (600, [*torchrun, *NEWEST])}


def run_parts(file, flags, parts) -> list[str]:
    """Run each part, all that it prints in the file. Returns the names of those that ended well."""
    minutes = sum(seconds for seconds, _ in parts.values()) / 60
    print(f"{minutes:.0f} minutes at most; all that is found is in {file}", flush=True)
    measured = []
    for name, (seconds, command) in parts.items():
        print(f"{name}, {seconds} s at most ...", flush=True)
        if __file__ in command:
            command = [*command, *flags]
        with file.open("a") as opened:
            opened.write(f"\n==== {name}\n")
            opened.flush()
            begin = time.monotonic()
            process = subprocess.Popen(command, stdout=opened, stderr=subprocess.STDOUT, cwd=REPO)
            try:
                code = process.wait(seconds)
                said = f"exit code {code}"
                measured += [name] * (code == 0)
            except subprocess.TimeoutExpired:
                said = "out of time"
            finally:
                stop(process)
            opened.write(f"---- {name}: {said} after {time.monotonic() - begin:.0f} s\n")
        print(f"    {said}", flush=True)
    return measured


def stop(process):
    """End a process, if it has not ended. torchrun ends its own when it is told to terminate."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- Parts ------------------------------------------------------------------


def steps(script, flags):
    """Milliseconds of a step in each stage, on documents of noise. The run's log has the memory.

    Also how much more memory torch has taken from the GPU at the end than when the clock started.
    """
    train = script.train

    def train_reserving(run, cfg):
        if isinstance(run, script.WarmUp):
            return train(run, cfg)
        before = torch.cuda.memory_reserved()
        train(run, cfg)
        more = torch.cuda.memory_reserved() - before
        print(f"memory taken after the warm-up: {more / 2**20:.0f} MiB")

    with mock.patch.object(script, "train", train_reserving):
        text = short_run(script, flags)
    times = [int(ms) for ms in re.findall(VALIDATION, text, re.MULTILINE)]
    for stage, (begin, end) in enumerate(itertools.pairwise(times)):
        print(f"stage {stage}: {(end - begin) / STAGE_STEPS:.1f} ms a step")


def small_card(script, flags):
    """Steps on a card of 24 GB, whose memory is imitated: whether the record fits."""
    total = torch.cuda.get_device_properties(0).total_memory
    part = min(1.0, SMALL_CARD / total)
    os.environ["PYTORCH_ALLOC_CONF"] = (
        f"expandable_segments:True,per_process_memory_fraction:{part:.3f}")
    limits = int(SMALL_CARD), int(SMALL_CARD)
    with mock.patch.object(torch.cuda, "mem_get_info", lambda device=None: limits):
        steps(script, [*flags, "--head_chunks", "8"])


def kernels(script, flags):
    """The sixty kernels and operators that take longest in a step of each stage, and what groups of
    them take, beside the model's time. Of several ranks the first prints.

    Kernels of an exchange, "wire", also wait for the other ranks.
    """
    rank, ranks = (int(os.environ.get(name, default)) for name, default in
                   (("RANK", 0), ("WORLD_SIZE", 1)))
    train, accumulate = script.train, script.accumulate_gradients
    # The profiler counts a step more than the run has done: it is each stage's last but one.
    once_a_stage = torch.profiler.schedule(wait=STAGE_STEPS - 2, warmup=1, active=1)
    expected = modelled(script)

    def print_kernels(profile):
        if rank:
            return
        table = profile.key_averages().table("self_device_time_total", row_limit=60)
        stage = (profile.step_num - 1) // STAGE_STEPS
        print(f"\nstep {profile.step_num - 1}\n{table}")
        print(f"stage {stage}, ms of the step: measured, modelled")
        for group, ms in measured_groups(profile, expected.get("kernels", {})).items():
            print(f"{ms:8.2f} {expected_ms(expected, stage, ranks).get(group, 0):8.2f}  {group}")

    def train_profiled(run, cfg):
        if isinstance(run, script.WarmUp):
            return train(run, cfg)

        def accumulate_profiled(*args):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profile.step()
            return accumulate(*args)

        with torch.profiler.profile(
                schedule=once_a_stage, on_trace_ready=print_kernels) as profile, mock.patch.object(
                script, "accumulate_gradients", accumulate_profiled):  # once a step
            train(run, cfg)

    with mock.patch.object(script, "train", train_profiled):
        short_run(script, flags)


def measured_groups(profile, groups) -> dict:
    """Milliseconds of a profiled step by the model's groups, and of gaps between kernels."""
    found = dict.fromkeys(
        ("FP8 copies", "FP8 matmuls", "bf16 matmuls", "attention", "loss", "wire", "other"), 0.0)
    spans = []
    for event in profile.events():
        group = groups.get(event.name) or group_of_name(event.name)
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if is_kernel:
            spans.append((event.time_range.start, event.time_range.end))
        # The names of a library's kernels do not tell matmuls; those of their operators do.
        if is_kernel != group.endswith("matmuls"):
            found[group] += event.self_device_time_total / 1000
    found["other"] -= found["FP8 matmuls"] + found["bf16 matmuls"]  # counted as kernels, too
    busy = sum(end - start for start, end in spans) / 1000
    begin = min((start for start, _ in spans), default=0)
    end = max((end for _, end in spans), default=0)
    return found | {"gaps between kernels": (end - begin) / 1000 - busy}


def modelled(script) -> dict:
    """What is kept of the script's model; nothing where there is none."""
    kept = json.loads(Path(__file__).with_name("modelled.json").read_text())
    of_script = [x for x in kept.values() if (REPO / x["script"]).samefile(script.SCRIPT)]
    return of_script[0] if of_script else {}


def expected_ms(expected, stage, ranks=1) -> dict:
    """Of a step on one GPU or on MODELLED_RANKS, by group; nothing for other numbers."""
    if stage >= len(expected.get("stages", ())) or ranks not in (1, MODELLED_RANKS):
        return {}
    row = expected["stages"][stage]
    alone = ranks == 1
    passes = row["passes_of_one"] if alone else row["passes"]
    found = {group: passes * ms for group, ms in row["groups"].items()}
    found["other"] += row["update_of_one"] if alone else row["update_ms"]
    return found if alone else found | dict(wire=row["wire_ms"])


def load_with_equal_stages(path):
    """The script. All stages of its runs have as many steps."""
    script = load_script(Path(path))
    parse_flags = script.parse_flags

    def parse(argv):
        flags = parse_flags(argv)
        stages = script.hyperparameters(flags).stages
        return flags | dict(stages=tuple(dataclasses.replace(row, share=1.0) for row in stages))

    script.parse_flags = parse
    return script


def short_flags(script, flags) -> list[str]:
    """With so many steps of each stage, and none afterwards."""
    num_steps = STAGE_STEPS * len(script.parse_args(flags).stages)
    return [*flags, "--num_iterations", str(num_steps), "--val_every", str(STAGE_STEPS),
            "--extension_steps", "0", "--repeat_data", "true"]


def short_run(script, flags) -> str:
    """The log of a run of the script on documents of noise, as long as FineWeb's."""
    flags = short_flags(script, flags)
    cfg = script.parse_args(flags)
    ids = cfg.eot_token // NOISE_SHARE
    longest = max(row.seq_len for row in cfg.all_stages())
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
        if int(os.environ.get("RANK", 0)):
            return ""  # the first rank has the log
        text = Path("logs", "short", "log.txt").read_text()
    return text.rpartition("=" * 100)[2]


if __name__ == "__main__":
    {part.__name__: part for part in (steps, small_card, kernels)}[sys.argv[1]](
        load_with_equal_stages(sys.argv[2]), sys.argv[3:])
