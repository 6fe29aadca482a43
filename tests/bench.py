#!/usr/bin/env python3
"""Measure what the pages quote. This is no test: run it on an idle machine, and give it time.

    python tests/bench.py turns --script FILE           a step's time, FILE's beside train_gpt.py's
    python tests/bench.py gpu                           steps, kernels, memory on this GPU
    python tests/bench.py kernels [--card rtx4090]      the same modelled, without a GPU
    python tests/bench.py memory [--script FILE]        memory and bytes sent, counted without one

Any other flag goes to train_gpt.py or FILE. Numbers are medians, with (lowest-highest) beside them.

`gpu` takes half an hour and needs no data (tests/gpu/half_hour.py). All that it finds is in one
file under logs/.
"""

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "data"), str(REPO / "tests" / "gpu")]
import half_hour  # noqa: E402
import host_gpu  # noqa: E402
from host_gpu import cost  # noqa: E402
from host_gpu.trace import trace  # noqa: E402
from shards import DataError, load_script  # noqa: E402

import train_gpt  # noqa: E402

say = functools.partial(print, flush=True)


def spread(values, digits=1):
    """'median (lowest-highest)' of numbers."""
    low, high = (f"{end:,.{digits}f}" for end in (min(values), max(values)))
    return f"{statistics.median(values):,.{digits}f} ({low}-{high})"


def print_table(header, rows):
    """Print rows of strings in columns, the first one to the left."""
    rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        say("   ".join([first.ljust(widths[0]), *cells]).rstrip())


class RunFailed(Exception):
    """A measured command did not end well."""


# ---- turns: the steps of two scripts ----
def time_steps(argv, my_turn, other_turn, times):
    """Run the script argv[0]; put the seconds of its steps into `times`. Steps wait for their turn.

    A step lasts from a call of `next_step` to the next call. Those of the warm-up do not count.
    """
    seconds = []

    def train_in_turns(run, cfg):
        next_step = run.loader.next_step
        started = None

        def next_step_in_turn(now):
            nonlocal started
            if started is not None:
                seconds.append(time.perf_counter() - started)
                other_turn.release()
            my_turn.acquire()
            started = time.perf_counter()
            return next_step(now)

        run.loader.next_step = next_step_in_turn
        train(run, cfg)

    try:
        script = load_script(Path(argv[0]))
        train = script.train
        script.train = train_in_turns
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            code = script.main(argv[1:])
        times.put(seconds)
    except DataError as error:
        sys.exit(str(error))
    finally:
        for _ in range(2**15):  # from here on the other script runs alone
            other_turn.release()
    sys.exit(code)


def turns(args, flags):
    """Time the steps of train_gpt.py and of FILE in turns, so that both meet the same machine."""
    # Left to themselves, scripts that start side by side would find their cores taken.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    context = multiprocessing.get_context("spawn")
    ratios = []
    for seed in range(args.seeds):
        processes = []
        times = []
        turn = [context.Semaphore(0), context.Semaphore(0)]
        turn[seed % 2].release()  # this one begins
        for i, script in enumerate((REPO / "train_gpt.py", args.script)):
            times.append(context.SimpleQueue())
            run_id = f"turns-{os.getpid()}-{seed}-{i}"  # they begin in one second
            argv = [str(script), "--preset", "pocket", "--seed", str(seed), "--run_id", run_id]
            argv += flags
            words = (argv, turn[i], turn[1 - i], times[i])
            processes.append(context.Process(target=time_steps, args=words))
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RunFailed(f"seed {seed}: a script failed; its reason is above")
        ours, theirs = (each.get() for each in times)
        ratios.append(statistics.median(b / a for a, b in zip(ours, theirs)))
        say(f"seed {seed}: {1000 * statistics.median(ours):.2f} ms, "
            f"FILE {1000 * statistics.median(theirs):.2f} ms, median ratio {ratios[-1]:.3f}")
    say(f"a step of FILE takes {spread(ratios, 3)} times as long; {len(ratios)} seed(s)")


# ---- gpu: half an hour of one ----
def gpu(args, flags):
    """Measure the record on this GPU. It is measured where its steps were, whatever else fails."""
    if not torch.cuda.is_available():
        raise train_gpt.UserError("torch finds no CUDA device; `kernels` and `memory` model one")
    file = REPO / "logs" / time.strftime("gpu-%Y%m%d-%H%M%S.txt")
    file.parent.mkdir(exist_ok=True)
    say(f"half an hour; all that is found is in {file}")
    measured = half_hour.run_parts(file, flags)
    say(f"measured: {', '.join(measured) or 'nothing'}; please send {file}")
    if "steps" not in measured:
        raise RunFailed(f"no step was timed; {file} has the reasons")


# ---- kernels and memory: what the compiler makes of the step, on a stand-in for a GPU ----
def trace_here(script, *arguments):
    """The script's trace for H100 and H200. Raises UserError where none can be made."""
    if reason := host_gpu.obstacle():
        raise train_gpt.UserError(reason)
    if "long_window: " not in script.read_text():
        raise train_gpt.UserError(f"--script {script}: it has no windows by stage")
    return trace("sm_90", *arguments, script=script)


def kernels(args, flags):
    """Model the script's step on a GPU in each stage, and a run, by its launches.

    The kernels are the H100's on every card. A card without FP8 needs --fp8_head False.
    """
    card = args.card or "h200"
    say("compiling for a GPU that is not there: minutes for each stage ...")
    counted = ["--phases", "train,optimizers", "--ranks", "8", "--binaries", "--instructions"]
    last = trace_here(args.script, *counted, *flags)
    traces = [trace_here(args.script, *counted, *flags, "--stage", str(stage))
              for stage in range(last.facts["stage"])]
    say("modelled from generated code, not measured\n"
        f"{args.script}: forward and backward pass of {last.facts['tokens']:,} tokens in the "
        f"last stage, on one {card.upper()}\n")
    groups = cost.by_group(cost.price(last, cost.RATES[card]), ("forward", "backward"))
    total = sum(groups.values(), Counter())
    print_table(["group", "launches", "GB", "TFLOP", "ms", "share"], [
        [name, f"{row['launches']:g}", f"{row['bytes'] / 1e9:.1f}", f"{row['flop'] / 1e12:.2f}",
         f"{row['ms']:.1f}", f"{row['ms'] / total['ms']:.0%}"]
        for name, row in [*groups.items(), ("sum", total)]])
    for card, ranks in ((args.card, 1),) if args.card else (("h200", 1), ("h100", 8)):
        rows, run_ms = [], 0
        for traced in (*traces, last):
            facts = traced.facts
            pass_ms, passes, rest_ms = cost.step_ms(traced, cost.RATES[card], ranks)
            step_ms = passes * pass_ms + rest_ms  # nothing overlaps
            steps = facts["stages"][facts["stage"]]
            run_ms += steps * step_ms
            rows.append([f"{steps:,}", f"{facts['tokens']:,}", f"{facts['targets']}",
                         f"{pass_ms:.1f}", f"{passes}", f"{rest_ms:.1f}", f"{step_ms:,.1f}"])
        say(f"\non {ranks} {card.upper()}: a run in {run_ms / 60_000:.2f} minutes")
        print_table(["steps", "tokens a pass", "targets", "ms a pass", "passes",
                     "optimizers and wire, ms", "ms a step"], rows)


def memory(args, flags):
    """Count what the script holds at once in the last stage, and what a step sends."""
    say("compiling for a GPU that is not there: minutes ...")
    phases = "train,validation,optimizers"
    found = trace_here(args.script, "--phases", phases, "--ranks", "8", *flags)
    gib = {name: size / 2**30 for name, size in found.memory.items()}
    sent = [size / 1e9 for size in found.facts["wire"]]
    say("counted in generated code, not measured; without CUDA's own and gaps\n"
        f"on one GPU, head in {found.facts['head_chunks']} chunk(s), GiB at the peak: "
        f"{gib['peak of backward']:.1f} of training, {gib['peak of validation']:.1f} of "
        "validation, which --val_seq_len lowers\n"
        f"of training's, GiB: {gib['state']:.1f} weights, gradients and the optimizers' state; "
        f"{gib['kept']:.1f} kept by the forward for the backward pass, logits included\n"
        f"on eight, GB that each hands to collectives: {sent[0]:.2f} in a step without Adam, "
        f"{sent[-1]:.2f} in one with it")


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    all_commands = turns, gpu, kernels, memory
    commands = {command.__name__: command for command in all_commands}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--seeds", type=int, default=5, help="of turns, from 0 up")
    parser.add_argument("--script", type=Path, default=REPO / "train_gpt.py",
                        help="of turns, kernels, memory")
    parser.add_argument("--card", choices=cost.RATES, help="of kernels: model one of these")
    args, flags = parser.parse_known_args()
    args.script = args.script.resolve()
    if args.seeds < 1:
        parser.error("--seeds: it must be at least 1")
    try:
        commands[args.what](args, flags)
    except (train_gpt.UserError, RunFailed, FileNotFoundError) as error:
        print(f"bench.py: {args.what}: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
