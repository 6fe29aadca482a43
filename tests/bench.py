#!/usr/bin/env python3
"""Measure what the pages quote. This is no test: run it on an idle machine, and give it time.

    python tests/bench.py turns --script FILE           a step's time, FILE's beside train_gpt.py's
    python tests/bench.py gpu                           steps, kernels, memory on this GPU
    python tests/bench.py kernels [--card rtx4090]      the same modelled, without a GPU
    python tests/bench.py memory [--script FILE]        memory, counted without one

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
def trace_here(args, flags, **options):
    """The trace of FILE for H100 and H200. Raises UserError where none can be made."""
    if reason := host_gpu.obstacle():
        raise train_gpt.UserError(reason)
    if "long_window: " not in args.script.read_text():
        raise train_gpt.UserError(f"--script {args.script}: it has no windows by stage")
    say(f"compiling {args.script} for a GPU that is not there: minutes ...")
    return trace(args.script, flags, **options)


def kernels(args, flags):
    """Model the script's step on a GPU in each stage, and a run, by its launches.

    The kernels are the H100's on every card. A card without FP8 needs --fp8_head False.
    """
    traces = [trace_here(args, flags, ranks=[1, 8])]  # of the last stage
    for stage in reversed(range(traces[0].facts["stage"])):
        traces.insert(0, trace_here(args, flags, ranks=[1, 8], stage=stage))
    say("modelled from generated code, not measured")
    priced = [(each.facts, cost.price(each, cost.RATES[args.card])) for each in traces]
    for ranks in (1, 8) if args.card in ("h100", "h200") else (1,):
        say(f"\non {ranks} {args.card.upper()}")
        run_ms = 0
        for facts, launches in priced:
            pass_ms, passes, rest_ms = cost.step_ms(launches, facts, ranks)
            step_ms = passes * pass_ms + rest_ms  # nothing overlaps
            steps = facts["stages"][facts["stage"]]
            run_ms += steps * step_ms
            say(f"{steps:,} steps of {step_ms:,.1f} ms: {passes} passes of {facts['tokens']:,} "
                f"tokens, {pass_ms:.1f} ms each, and {rest_ms:.1f} ms of optimizers and wire")
        say(f"a run in {run_ms / 60_000:.2f} minutes")
    say("\na pass of the last stage, ms:")
    for name, row in cost.by_group(launches).items():
        say(f"{row['ms']:8.1f}  {name}: {row['launches']} launches, {row['bytes'] / 1e9:.1f} GB, "
            f"{row['flop'] / 1e12:.2f} TFLOP")


def memory(args, flags):
    """Count what the script holds at once in the last stage."""
    found = trace_here(args, flags, validation=True)
    gib = {name: size / 2**30 for name, size in found.memory.items()}
    say("counted in generated code, not measured; without CUDA's own and gaps\n"
        f"on one GPU, head in {found.facts['head_chunks']} chunk(s), GiB at the peak: "
        f"{gib['train']:.1f} of training, {gib['validation']:.1f} of validation, which "
        f"--val_seq_len lowers\nof these {gib['state']:.1f} are weights, gradients and the "
        "optimizers' state")


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    all_commands = turns, gpu, kernels, memory
    commands = {command.__name__: command for command in all_commands}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--seeds", type=int, default=5, help="of turns, from 0 up")
    parser.add_argument("--script", type=Path, default=REPO / "train_gpt.py",
                        help="of turns, kernels, memory")
    parser.add_argument("--card", choices=cost.RATES, default="h100", help="of kernels")
    args, flags = parser.parse_known_args()
    args.script = args.script.resolve()
    if args.seeds < 1:
        parser.error("--seeds: it must be at least 1")
    if not args.script.is_file():
        parser.error(f"--script {args.script}: there is no such file")
    try:
        commands[args.what](args, flags)
    except (train_gpt.UserError, RunFailed) as error:
        print(f"bench.py: {args.what}: {error}", file=sys.stderr)
        return 1 if isinstance(error, RunFailed) else 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
