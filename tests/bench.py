#!/usr/bin/env python3
"""Measure what the pages quote. This is no test: run it on an idle machine, and give it time.

    python tests/bench.py pocket [--seeds 5]            time to the target, beside the plain GPT's
    python tests/bench.py pocket --picture docs/pocket.png        loss over seconds, drawn
    python tests/bench.py baselines [--seeds 5]         losses of a small plain GPT, of counting
    python tests/bench.py busy [--num_iterations 100]   times by threads, idle and with a core taken
    python tests/bench.py turns --script FILE           a step's time, FILE's beside train_gpt.py's
    python tests/bench.py gpu                           steps, kernels, memory on this GPU
    python tests/bench.py kernels [--card rtx4090]      the same modelled, without a GPU
    python tests/bench.py memory [--script FILE]        memory and bytes sent, counted without one

Any other flag goes to train_gpt.py or FILE. Numbers are medians, with (lowest-highest) beside them.

--picture draws the runs whose output is kept in the folder of the picture's name (docs/pocket/).
Where that folder is not there, they are made first.

`gpu` takes half an hour and needs no data (tests/gpu/half_hour.py). All that it finds is in one
file under logs/.
"""

import argparse
import contextlib
import functools
import io
import multiprocessing
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPO), str(REPO / "data"), str(REPO / "tests" / "gpu")]
import half_hour  # noqa: E402
import host_gpu  # noqa: E402
from host_gpu import cost  # noqa: E402
from host_gpu.trace import trace  # noqa: E402
from shards import load_script  # noqa: E402

import train_gpt  # noqa: E402

YARDSTICK = ["python", "tests/plain_baseline.py", "--train", "data/pocket/pocket_train_*.bin",
             "--val", "data/pocket/pocket_val_*.bin", "--target", "1.78"]
COUNTED_STEPS = (120, 1200)  # of the pocket: 0.25 and 2.5 million tokens
VALIDATION = r"^step:\d+/\d+ val_loss:([\d.]+) train_time:(\d+)ms"  # as both print it
LABELS = {"pocket": ("train_gpt.py --preset pocket", "tab:blue"),
          "against": ("plain GPT, settings of nanoGPT's CPU quickstart", "dimgray")}

say = functools.partial(print, flush=True)


def spread(values, digits=1):
    """'median (lowest-highest)' of numbers."""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return f"{statistics.median(values):.{digits}f} ({low}-{high})"


def print_table(header, rows):
    """Print rows of strings in columns, the first one to the left."""
    rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        say("   ".join([first.ljust(widths[0]), *cells]).rstrip())


# ---- pocket, baselines, busy: whole runs ----
def run_command(words, env):
    """Run a script of ours, and print what it prints. Returns its final values and the seconds."""
    program = sys.executable if words[0] == "python" else words[0]
    start = time.perf_counter()
    done = subprocess.run([program, *words[1:]], stdout=subprocess.PIPE, text=True, cwd=REPO,
                          env=os.environ | env)
    wall_s = time.perf_counter() - start
    text = f"$ {shlex.join(words)}\n{done.stdout}"
    say(text)
    if done.returncode:
        raise train_gpt.UserError(f"exit code {done.returncode}")
    values = final_values(text) | dict(text=text, wall_s=wall_s)
    if "train_time_ms" in values:
        values["train_seconds"] = float(values["train_time_ms"]) / 1000
    return values


def final_values(text):
    return dict(re.findall(r"^(\w+): (.*)$", text, re.M))


def run_in_turns(settings, seeds):
    """Run each setting, a command and its environment, on each seed; print a table of them.

    Returns the values of each setting's runs.
    """
    device = train_gpt.machine_facts(torch.device("cpu"))["device"]
    say(f"{device}, {os.cpu_count()} cores, torch {torch.__version__}")
    runs = {name: [] for name in settings}
    for seed in range(seeds):
        for name, (words, env) in settings.items():
            runs[name].append(run_command([*words, "--seed", str(seed)], env))
    rows = []
    for name, each in runs.items():
        losses = [float(values["val_loss"]) for values in each]
        std = f"{statistics.stdev(losses):.4f}" if seeds > 1 else ""
        rows.append([name, spread([float(values.get("train_seconds", 0)) for values in each], 2),
                     spread([values["wall_s"] for values in each]),
                     f"{statistics.mean(losses):.4f}", std, f"{seeds}"])
    print_table(["", "training, s", "command to exit, s", "mean val_loss", "std", "n"], rows)
    return runs


def pocket(args, flags):
    """Train on each seed in turns with the yardstick; compare times and losses."""
    ours = ["python", "train_gpt.py", "--preset", "pocket", *flags]
    if not args.picture:
        run_in_turns({"pocket": (ours, {}), "against": (YARDSTICK, {})}, args.seeds)
        return
    folder = args.picture.with_suffix("")  # keeps what the runs print
    if not folder.is_dir():
        ours += ["--val_every", "10"]
        theirs = [*YARDSTICK, "--eval_every", "50"]
        runs = run_in_turns({"pocket": (ours, {}), "against": (theirs, {})}, args.seeds)
        folder.mkdir(parents=True)
        for name, each in runs.items():
            for seed, values in enumerate(each):
                (folder / f"{name}-{seed}.txt").write_text(values["text"])
    draw(folder, args.picture)


def draw(folder, picture):
    """Draw the runs kept in the folder: validation loss over seconds of training."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    target = train_gpt.parse_args(["--preset", "pocket"]).target_loss
    # Twice as many pixels as a page shows.
    with rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(target, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"target: {target}", (0, target), (6, 4), xycoords=("axes fraction", "data"),
                      textcoords="offset points", va="bottom")
        for name, (label, color) in LABELS.items():
            times = []  # to the target, of each run
            for file in sorted(folder.glob(f"{name}-*.txt")):
                text = file.read_text()
                found = re.findall(VALIDATION, text, re.M)
                losses, ms = np.array(found, float)[1:].T  # the first is before the first step
                axes.plot(ms / 1000, losses, color=color, linewidth=1.6, alpha=0.7, label=label)
                times.append(seconds_to(target, losses, ms))
                label = None  # one of them is named
            reached = np.median(times)
            axes.plot(reached, target, "o", color=color, markersize=8)
            axes.annotate(f"{reached:.0f} s", (reached, target), (-6, -6), color=color,
                          textcoords="offset points", ha="right", va="top")
        axes.set(xscale="log", ylim=(1.4, 3.2), ylabel="validation loss, nats per byte")
        axes.set_yticks([1.5, 2, 2.5, 3])
        axes.set_xticks([1, 2, 5, 10, 20, 50, 100])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.legend(frameon=False)
        facts = final_values((folder / "pocket-0.txt").read_text())
        axes.set_xlabel(f"seconds of training (logarithmic), {facts['threads']} threads, "
                        f"{facts['device']}")
        figure.savefig(picture, dpi=200, metadata={"Software": None})
    say(f"{picture}, of the runs in {folder}")


def seconds_to(loss, losses, ms):
    """When a run's validation loss reached `loss`, linear between two validations."""
    end = np.argmax(losses <= loss) + 1
    two = slice(max(end - 2, 0), end)
    return np.interp(-loss, -losses[two], ms[two] / 1000, right=np.inf)


def baselines(args, flags):
    """Losses beside the pocket's: of a plain GPT of its size, and of n-gram counts."""
    one_thread = dict(OMP_NUM_THREADS="1")
    run_in_turns({"plain GPT": ([*YARDSTICK, "--size", "pocket"], one_thread)}, args.seeds)
    counting = {}
    for steps in COUNTED_STEPS:
        words = ["python", "tests/ngram_baseline.py", "--num_iterations", str(steps)]
        counting[f"counting, {steps} steps"] = (words, one_thread)
    run_in_turns(counting, 1)


def busy(args, flags):
    """Time the pocket by threads, in turns: as many as run.sh chooses, one, one per core."""
    every = str(len(os.sched_getaffinity(0)))
    words = ["python", "train_gpt.py", "--preset", "pocket", *flags]
    settings = {
        "chosen": (["./run.sh", *words[2:]], dict(PYTHON=sys.executable)),
        "1": (words, dict(OMP_NUM_THREADS="1")),
        every: (words, dict(OMP_NUM_THREADS=every))}
    say("no core is taken")
    run_in_turns(settings, args.seeds)
    say("a core is taken, as a browser might")
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        run_in_turns(settings, args.seeds)
    finally:
        other.kill()


# ---- turns: the steps of two scripts ----
def take_turns(argv, turns):
    """Run the script argv[0]. Before each step it tells how long the last one took, and waits.

    A step lasts from a call of `next_step` to the next call.
    """
    script = load_script(Path(argv[0]))
    next_step = script.TokenLoader.next_step
    started = None

    def next_step_in_turn(self, now):
        nonlocal started
        with contextlib.suppress(EOFError, OSError):  # the other script has ended
            turns.send(started and time.perf_counter() - started)
            turns.recv()
        started = time.perf_counter()
        return next_step(self, now)

    script.TokenLoader.next_step = next_step_in_turn
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
        code = script.main(argv[1:])
    sys.exit(code)


def turns(args, flags):
    """Time the steps of train_gpt.py and of FILE in turns, so that both meet the same machine."""
    # Left to themselves, scripts that start side by side would find their cores taken.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    context = multiprocessing.get_context("spawn")
    ratios = []
    for seed in range(args.seeds):
        processes = []
        ends = []
        for i, script in enumerate((REPO / "train_gpt.py", args.script)):
            run_id = f"turns-{os.getpid()}-{seed}-{i}"  # they begin in one second
            argv = [str(script), "--preset", "pocket", "--seed", str(seed), "--run_id", run_id]
            ours, theirs = context.Pipe()
            process = context.Process(target=take_turns, args=([*argv, *flags], theirs))
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(ours)
        seconds = [[], []]
        with contextlib.suppress(EOFError):  # the first one to end ends the comparison
            for end in ends:
                end.recv()
            while True:
                for i in (0, 1) if seed % 2 == 0 else (1, 0):
                    ends[i].send("your turn")
                    seconds[i].append(ends[i].recv())
        for end in ends:
            end.close()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise train_gpt.UserError(f"seed {seed}: a script failed; its reason is above")
        ratios.append(statistics.median(b / a for a, b in zip(*seconds)))
        medians = [1000 * statistics.median(each) for each in seconds]
        say(f"seed {seed}: {medians[0]:.2f} ms, FILE {medians[1]:.2f} ms, "
            f"median ratio {ratios[-1]:.3f}")
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
        raise train_gpt.UserError(f"no step was timed; {file} has the reasons")


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
    rows = []
    for name, row in [*groups.items(), ("sum", total)]:
        rows.append([name, f"{row['launches']:g}", f"{row['bytes'] / 1e9:.1f}",
                     f"{row['flop'] / 1e12:.2f}", f"{row['ms']:.1f}",
                     f"{row['ms'] / total['ms']:.0%}"])
    print_table(["group", "launches", "GB", "TFLOP", "ms", "share"], rows)
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
    all_commands = pocket, baselines, busy, turns, gpu, kernels, memory
    commands = {command.__name__: command for command in all_commands}
    parser.add_argument("what", choices=commands)
    parser.add_argument("--seeds", type=int, default=5, help="from 0 up; of all but the last three")
    parser.add_argument("--picture", type=Path, help="of pocket: see above")
    parser.add_argument("--script", type=Path, default=train_gpt.SCRIPT,
                        help="of turns, kernels, memory")
    parser.add_argument("--card", choices=cost.RATES, help="of kernels: model one of these")
    args, flags = parser.parse_known_args()
    args.script = args.script.resolve()
    if args.seeds < 1:
        parser.error("--seeds: it must be at least 1")
    if not args.script.is_file():
        parser.error(f"--script {args.script}: no such file")
    try:
        commands[args.what](args, flags)
    except train_gpt.UserError as error:
        print(f"bench.py: {args.what}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
