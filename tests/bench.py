#!/usr/bin/env python3
"""Measure what the pages quote. This is no test: run it on an idle machine, and give it time.

    python tests/bench.py turns --script FILE           a step's time, FILE's beside train_gpt.py's
    python tests/bench.py gpu                           steps, kernels, memory on this GPU
    python tests/bench.py kernels [--script FILE]       steps, kernels, memory, modelled without one
    python tests/bench.py tables [--write]              the tables of docs/gpus.md, or are they so?
    python tests/bench.py cards                         how all records fit cards of 8 to 80 GB

Any other flag goes to train_gpt.py or FILE. Numbers are medians, with (lowest-highest) beside them.

`kernels --keep NAME` also keeps what it finds in tests/gpu/modelled.json, from which `tables` makes
those of the page.

`gpu` takes an hour at most, 17 minutes more with several GPUs, and needs no data
(tests/gpu/first_hour.py). All that it finds is in one file under logs/.
"""

import argparse
import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "data"), str(REPO / "tests" / "gpu")]
import first_hour  # noqa: E402
import gpu_tables  # noqa: E402
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
        if isinstance(run, script.WarmUp):
            return train(run, cfg)
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
    """Time the steps of train_gpt.py and of FILE, interleaved, so both meet the same machine."""
    if "def next_batches(" in args.script.read_text():
        raise train_gpt.UserError(f"--script {args.script}: it plans each step beside the one "
                                  "before, so its steps cannot be interleaved; time whole runs")
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


# ---- gpu: the first hour ----
def gpu(args, flags):
    """Measure the record on this machine's GPUs. It is measured where its steps were, whatever else
    fails."""
    if not torch.cuda.is_available():
        raise train_gpt.UserError("torch finds no CUDA device; `kernels` models one")
    file = REPO / "logs" / time.strftime("gpu-%Y%m%d-%H%M%S.txt")
    file.parent.mkdir(exist_ok=True)
    measured = first_hour.run_parts(file, flags, first_hour.parts_of(torch.cuda.device_count()))
    say(f"measured: {', '.join(measured) or 'nothing'}; please send {file}")
    if "steps" not in measured:
        raise RunFailed(f"no step was timed; {file} has the reasons")


# ---- kernels: what the compiler makes of the step, on a stand-in for a GPU ----
def kernels(args, flags):
    """Model the script's steps, a run and its memory, by what it launches in all stages.

    The kernels are the H100's on every card. A card without FP8 needs --fp8_head False.
    """
    if reason := host_gpu.obstacle():
        raise train_gpt.UserError(reason)
    text = args.script.read_text()
    if "long_window: " not in text and not re.search(r"^Record: \S+_o\d", text, re.MULTILINE):
        raise train_gpt.UserError(f"--script {args.script}: it has no windows by stage, and is "
                                  "none of the ladder by steps")
    say(f"compiling {args.script} for a GPU that is not there: minutes a stage ...")
    found = modelled(trace(args.script, flags, ranks=[1, 8], validation=True))
    found = dict(script=str(args.script.relative_to(REPO)), flags=flags) | found
    say("modelled from generated code, not measured; milliseconds, on an H100")
    for stage in found["stages"]:
        say(f"{stage['steps']:,} steps on 8: a pass of {stage['tokens']:,} tokens "
            f"{stage['pass_ms']:.1f}, optimizers {stage['update_ms']:.1f}, wire "
            f"{stage['wire_ms']:.1f}")
        for name, ms in stage["groups"].items():
            say(f"{ms:8.1f}  {name}")
    for where, minutes in found["minutes"].items():
        say(f"a run on {where}: {minutes:.2f} minutes")
    say(f"GiB on one GPU, head in {found['head_chunks']} chunk(s), without CUDA's own and gaps: "
        + ", ".join(f"{name} {gib:.1f}" for name, gib in found["gib"].items()))
    if args.keep:
        kept = json.loads(gpu_tables.KEPT.read_text()) if gpu_tables.KEPT.exists() else {}
        gpu_tables.KEPT.write_text(json.dumps(kept | {args.keep: found}, indent=1) + "\n")


def modelled(found) -> dict:
    """What pages need of a trace: an H100's steps, all cards' runs, GiB at the peaks."""
    stages = []
    alone = cost.price(found, cost.RATES["h100"], 1)
    for each, of_one in zip(cost.price(found, cost.RATES["h100"], 8), alone):
        stages.append(vars(each) | dict(
            pass_ms=each.pass_ms, step_ms=each.step_ms, passes_of_one=of_one.passes,
            update_of_one=of_one.update_ms))
    minutes = {f"1 {card}": cost.run_ms(found, rates, 1) / 60_000
               for card, rates in cost.RATES.items()}
    minutes["8 h100"] = cost.run_ms(found, cost.RATES["h100"], 8) / 60_000
    gib = {name: size / 2**30 for name, size in found.memory.items()}
    training = max(size for name, size in gib.items() if name.startswith("pass"))
    made = dict(head_chunks=found.facts["head_chunks"], stages=stages, minutes=minutes,
                averages_ms=cost.averages_ms(found, cost.RATES["h100"], 8),
                gib=dict(training=training, validation=gib["validation"], state=gib["state"]),
                kernels=cost.groups_by_name(found))
    return json.loads(json.dumps(made), parse_float=lambda digits: round(float(digits), 3))


def tables(args, flags):
    """Write the tables of the pages, or tell whether they are what the kept numbers make."""
    if flags:
        raise train_gpt.UserError(f"{' '.join(flags)}: tables take no flags")
    for page in gpu_tables.PAGES:
        before = page.read_text()
        after = gpu_tables.filled(before)
        if args.write:
            page.write_text(after)
        elif before != after:
            raise RunFailed(f"{page.relative_to(REPO)} differs from its numbers; tables --write "
                            "mends it")


def cards(args, flags):
    """Print the table of all records against cards, by data/plan.py."""
    say(gpu_tables.all_planned())


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    all_commands = turns, gpu, kernels, tables, cards
    commands = {command.__name__: command for command in all_commands}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--seeds", type=int, default=5, help="of turns, from 0 up")
    parser.add_argument("--script", type=Path, default=REPO / "train_gpt.py",
                        help="of turns, kernels")
    parser.add_argument("--keep", metavar="NAME", help="of kernels: keep them for the page")
    parser.add_argument("--write", action="store_true", help="of tables: write the page")
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
