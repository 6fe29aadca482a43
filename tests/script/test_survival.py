"""Runs that are killed, stopped, resumed, or that go wrong, with faults really injected, on CPU.

A fault is a function of this file that a rank calls before main() to put something in the script's
way. What is expected of a resumed run is what one run without any fault did, the fixture `whole`.
"""

import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rank_processes import Run, at_each_step, start_run
from test_checkpoints import equal

import train_gpt

MODEL = """--preset pocket --model_dim 32 --head_dim 16 --attention_pattern LS
    --value_embed_pattern 0. --backout_layer 0 --sequences_per_step 4 --seq_lens 128,256
    --sequences_per_forward 4 --val_tokens 1000 --val_seq_len 256 --val_every 2 --warmup_steps 1
    --freeze_steps 1 --long_windows 1,2 --lr_factors 0.8,1.0""".split()
# Stages begin at steps 0, 2, 4 and 6. At 4 the embedding leaves the head. Adam rests at even steps,
# which are those that may be saved.
STEPS = 10
SHARDS = [2100, 1600]  # tokens: two short steps and a long one, a long one, then the second epoch
# gloo sums in another order than one process does.
RANKS_RTOL = 1e-5


@pytest.fixture(scope="module")
def data(tmp_path_factory, write_shard):
    """A folder with two training shards and one for validation."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for index, count in enumerate(SHARDS):
        write_shard(folder / f"train_{index}.bin", random.integers(0, 257, count))
    write_shard(folder / "val_0.bin", random.integers(0, 257, 1200))
    return folder


def flags(data, args):
    files = ["--train_files", f"{data}/train_*.bin", "--val_files", f"{data}/val_*.bin"]
    return [*MODEL, *files, "--num_iterations", STEPS, *args]


@pytest.fixture
def start(data, tmp_path):
    """`start(*args, nproc=1, fault=None)` starts a run in tmp_path; again, it is the same run."""
    def start(*args, nproc=1, fault=None, cwd=tmp_path, data=data):
        cwd.mkdir(exist_ok=True)
        return start_run(cwd, flags(data, args), nproc, fault)

    return start


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The run without any fault, on one rank, with all its checkpoints kept."""
    cwd = tmp_path_factory.mktemp("whole")
    run = start_run(cwd, flags(data, ["--save_every", 2]), fault=keep_all)
    assert run.wait() == [0], run.err()
    return run


def keep_all(rank):
    write = train_gpt.write_checkpoint
    train_gpt.write_checkpoint = lambda path, state, keep: write(path, state, 999)


def one_line(run):
    """What the run said of its end: one line, so no traceback."""
    assert len(run.err().splitlines()) == 1, run.err()
    return run.err()


def wait_until(condition, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def val_losses(run):
    return re.findall(r"step:(\d+)/10 val_loss:(\S+)", run.log())


def assert_same_state(state, expected):
    """All that a checkpoint holds is equal to the bit, but for clock and flags."""
    assert state.keys() == expected.keys()
    for key in state.keys() - {"hyperparameters", "train_time_ms"}:
        assert equal(state[key], expected[key]), key


def assert_goes_on(run, whole, step):
    """The run, resumed at a step, ends as the one without any fault does."""
    assert run.wait() == [0], run.err()
    assert f"resumed at step:{step} from " in run.log()
    assert run.losses() == whole.losses()[step:]
    assert_same_state(run.state(STEPS), whole.state(STEPS))


# Faults, to be bound by `partial` up to the last argument, the rank.

def at_step(when, only_rank, action, rank):
    """Call `action(losses)` at one step on one rank, before its update."""
    def act(step, losses):
        if step == when and rank == only_rank:
            action(losses)

    at_each_step(act)


def send_self(numbers, *_):
    for number in numbers:
        os.kill(os.getpid(), number)


def signalled(step, *numbers, rank=0):
    return partial(at_step, step, rank, partial(send_self, numbers))


# Resume


def test_resumed_run_is_the_same_to_the_bit(start, whole, tmp_path):
    """From within a shard, from the end of one, from the middle of an epoch; from the beginning of
    each stage and after it. The loader does not begin again, the first step has its own learning
    rate, its batch and its targets.
    """
    runs = {}
    for step in (2, 4, 6, 8):  # side by side
        path = whole.folder / f"step-{step:06d}.pt"
        runs[step] = start("--save_every", 100, "--resume", path, cwd=tmp_path / str(step))
    for step, run in runs.items():
        assert_goes_on(run, whole, step)
        assert val_losses(run) == val_losses(whole)[step // 2 :]


def test_finished_run_is_not_saved_again_and_takes_more_steps(start, whole, tmp_path):
    args = ("--save_every", 2, "--resume", "auto")
    shutil.copytree(whole.folder, tmp_path / "logs" / "x")
    run = start(*args)
    assert run.wait() == [0], run.err()
    assert not run.losses()
    for path in whole.folder.glob("step-*"):
        assert (run.folder / path.name).stat().st_mtime_ns == path.stat().st_mtime_ns
    run = start(*args, "--num_iterations", STEPS + 2)
    assert run.wait() == [0], run.err()
    assert [step for step, _ in run.losses()] == [10, 11]
    assert run.saved()[-1] == STEPS + 2


def blind(rank):
    """Rank 1 finds no checkpoint."""
    if rank == 1:
        Path.glob = lambda *args: iter(())


def test_two_ranks_resume_as_one_two_or_four(start, tmp_path):
    """All ranks take the checkpoint that rank 0 finds, the one before a damaged one."""
    first = start("--save_every", 4, nproc=2)
    assert first.wait() == [0, 0], first.err()
    newest = first.folder / f"step-{STEPS:06d}.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    for nproc, fault in ((1, None), (2, blind), (4, None)):
        shutil.copytree(first.folder, (cwd := tmp_path / str(nproc)) / "logs" / "x")
        run = start("--resume", "auto", nproc=nproc, fault=fault, cwd=cwd)
        assert run.wait() == [0] * nproc, run.err()
        assert re.search(f"skipped .*{newest.name}: no whole checkpoint", run.out())
        assert "resumed at step:8 from logs/x/step-000008.pt" in run.out()
        rtol = 0 if nproc == 2 else RANKS_RTOL
        np.testing.assert_allclose(run.mean_losses(), first.mean_losses()[8:], rtol=rtol)


# Kill

MOMENTS = {  # the function that does not come to its end
    "half-written": (torch, "save"),
    "before fsync": (os, "fsync"),
    "before rename": (Path, "replace"),
    "after rename": (Path, "replace"),
}


def killed_in_save(moment, which, rank):
    """SIGKILL at a moment of the `which`-th save."""
    owner, name = MOMENTS[moment]
    function, calls = getattr(owner, name), itertools.count(1)

    def die(*args):
        if next(calls) < which:
            return function(*args)
        if moment == "half-written":
            state, file = args
            file.write(os.urandom(100_000))
            file.flush()
        if moment == "after rename":
            function(*args)
        send_self([signal.SIGKILL])

    setattr(owner, name, die)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_a_save(start, whole, final_values, moment):
    """What the killed save leaves behind does no harm; the checkpoint before it is used. The log
    goes on, and the clock.
    """
    args = ("--save_every", 4, "--resume", "auto")
    step = 8 if moment == "after rename" else 4
    run = start(*args, fault=partial(killed_in_save, moment, 2))
    assert run.wait() == [-signal.SIGKILL]
    assert "afresh" in run.out()
    log, saved = run.log(), run.state(step)

    run = start(*args)
    assert_goes_on(run, whole, step)
    assert not list(run.folder.glob("*.tmp"))
    assert run.log().startswith(log)
    after = run.log().partition(f"resumed at step:{step} from logs/x/step-00000{step}.pt\n")[2]
    lines = re.findall(r"^step:(\d+)/10 (train|val)_loss.*train_time:(\d+)ms", after, re.M)
    assert [(int(number), kind) for number, kind, _ in lines[:2]] == [
        (step, "val"), (step + 1, "train")], "validated again, then trained"
    times = [int(saved["train_time_ms"]), *(int(ms) for *_, ms in lines),
             int(final_values(run.log())["train_time_ms"])]
    assert times == sorted(times)


def has_come_to(run, steps):
    return len(run.losses()) >= steps or not run.processes[0].is_alive()


@pytest.mark.slow
def test_killed_twenty_times(start, tmp_path):
    """At any moment. What is resumed comes to the parameters of a run that nobody killed.

    On a machine so fast that the end comes first, the last ones find a run that is finished.
    """
    args = ("--num_iterations", 100, "--val_every", 50, "--save_every", 2)
    whole = start(*args, cwd=tmp_path / "uninterrupted")
    chance = random.Random(0)
    for _ in range(20):
        run, steps = start(*args, "--resume", "auto"), chance.randrange(2, 6)
        wait_until(partial(has_come_to, run, steps))
        time.sleep(chance.uniform(0, 0.05))
        run.processes[0].kill()
        assert run.wait()[0] in (-signal.SIGKILL, 0), run.err()
    run = start(*args, "--resume", "auto")
    assert run.wait() == whole.wait() == [0], run.err() + whole.err()
    assert_same_state(run.state(100), whole.state(100))


# Signals


@pytest.mark.parametrize("number, at, step", [
    (signal.SIGTERM, 4, 6), (signal.SIGINT, 3, 4), (signal.SIGHUP, 1, 2)])
def test_signal_saves_where_no_gradients_are_left_over(start, whole, number, at, step):
    """At once or a step later; a stage begins there, at step 4 the embedding leaves the head."""
    args = ("--save_every", 100, "--resume", "auto")
    run = start(*args, fault=signalled(at, number))
    assert run.wait() == [128 + number], run.err()
    assert run.err() == ""
    assert run.saved() == [step]
    assert run.log().splitlines()[-1] == (
        f"stopped at step:{step} by {number.name}; to go on: --run_id x --resume auto")
    run = start(*args)
    assert_goes_on(run, whole, step)
    trained = re.findall(r"^step:(\d+)/10 train_loss", run.log(), re.M)
    assert trained == [str(step) for step in range(1, STEPS + 1)], "no step is taken twice"


def ignoring(number, rank):
    """As under nohup; a shell ignores SIGINT for what it starts in the background."""
    signal.signal(number, signal.SIG_IGN)
    signalled(4, number)(rank)


NOT_SAVED = ["stopped at step:5 by SIGTERM; nothing is saved, as --save_every is 0"]


@pytest.mark.parametrize("fault, every, code, saved, said", [
    (signalled(STEPS - 1, signal.SIGTERM), 100, 0, [STEPS], []),
    (signalled(4, signal.SIGTERM), 0, 128 + signal.SIGTERM, [], NOT_SAVED),
    (signalled(4, signal.SIGTERM, signal.SIGINT), 100, -signal.SIGINT, [], []),
    (partial(ignoring, signal.SIGHUP), 0, 0, [], []),
    (partial(ignoring, signal.SIGINT), 0, 0, [], []),
], ids=["in the last step", "without saving", "a second one ends at once", "ignored SIGHUP",
        "ignored SIGINT"])
def test_signal_that_asks_for_no_checkpoint(start, fault, every, code, saved, said):
    run = start("--save_every", every, fault=fault)
    assert run.wait() == [code], run.err()
    assert run.saved() == saved
    assert re.findall("^stopped.*", run.log(), re.M) == said


def test_signal_to_one_rank_stops_both_at_the_same_step(start):
    run = start("--save_every", 100, nproc=2, fault=signalled(4, signal.SIGTERM, rank=1))
    assert run.wait() == [128 + signal.SIGTERM] * 2, run.err()
    assert run.saved() == [6] and len(run.losses(0)) == len(run.losses(1)) == 6


def die_or_be_told(rank):
    """At step 4 rank 1 is killed and rank 0 gets a SIGTERM, as from torchrun."""
    signalled(4, signal.SIGKILL, rank=1)(rank)
    signalled(4, signal.SIGTERM)(rank)


def test_rank_told_to_stop_because_another_died_does_not_hang(start):
    run = start("--save_every", 2, nproc=2, fault=die_or_be_told)
    codes = run.wait()
    assert codes[0] != 0 and codes[1] == -signal.SIGKILL
    assert run.saved() == [2, 4]
    assert "Traceback" not in run.err(), run.err()


# Numbers


def minus_infinity(losses):
    losses[0] = -torch.inf


def nan_from(rule_name, when, rank):
    """From the update of a step on a rule gives NaN; the losses until then are finite."""
    rule, begun = getattr(train_gpt, rule_name), []

    def spoil(weight, *args, **options):
        rule(weight, *args, **options)
        if begun:
            weight.view(-1)[-1] = torch.nan

    at_step(when, rank, begun.append, rank)
    setattr(train_gpt, rule_name, spoil)


def drift(rank):
    """On rank 1 one bit of one weight is another before the validation at step 6."""
    check_weights = train_gpt.Run.check_weights

    def check_after_flip(run, step):
        if step == 6 and rank == 1:
            run.model.blocks[1].mlp.c_fc.data.view(torch.int32)[3, 5] ^= 1
        check_weights(run, step)

    train_gpt.Run.check_weights = check_after_flip


NOT_FINITE = "a weight or a state is not finite; lower the learning rates"


@pytest.mark.parametrize("nproc, fault, step, said, saved", [
    # On one rank alone, and told on both.
    (2, partial(at_step, 5, 1, minus_infinity), 5,
     "the loss is -inf on rank 1; lower the learning rates", [2, 4]),
    (2, drift, 6, "mlp: the ranks' weights have drifted apart", [2, 4]),
    # What an update leaves is seen before it is saved.
    (1, partial(nan_from, "adam_update", 5), 6, NOT_FINITE, [2, 4]),
    # The last update: the run does not end well.
    (1, partial(nan_from, "muon_update", STEPS - 1), STEPS, NOT_FINITE, [6, 8]),
], ids=["loss", "drift", "Adam", "Muon"])
def test_what_is_not_finite_or_drifts_ends_the_run_and_is_never_saved(
    start, whole, nproc, fault, step, said, saved
):
    args = ("--save_every", 2, "--resume", "auto")
    run = start(*args, nproc=nproc, fault=fault)
    assert run.wait() == [2] * nproc
    line = one_line(run)
    assert f"step {step}: " in line and line.endswith(f"{said}\n")
    if nproc == 2:
        assert run.err(1) == "", "what all ranks know is said once"
    assert run.saved() == saved
    assert f"step:{step}/10 val_loss" not in run.log() and "---" not in run.log()
    if nproc == 1:  # what was saved last is sound
        assert_goes_on(start(*args), whole, saved[-1])


# Disk and data


def fill_disk(losses):
    """From here on no file may grow beyond a part of a checkpoint, which stands for a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


@pytest.mark.parametrize("nproc", [1, 2])
def test_full_disk_ends_the_run_with_one_line(start, whole, nproc):
    args = ("--save_every", 2, "--resume", "auto")
    run = start(*args, nproc=nproc, fault=partial(at_step, 3, 0, fill_disk))
    assert run.wait() == [2] * nproc
    line = one_line(run)
    assert "step-000004.pt" in line and "File too large" in line and "--resume auto" in line
    assert {p.name for p in run.folder.iterdir()} == {"log.txt", "step-000002.pt"}
    assert [len(run.losses(rank)) for rank in range(nproc)] == [4] * nproc, "none goes on alone"
    if nproc == 1:
        assert_goes_on(start(*args), whole, 2)


def vanish(path, losses):
    path.unlink()


def test_data_that_vanish(start, data, write_shard, tmp_path):
    """The third shard is gone before it is read, which is while the second one is in use."""
    mine = shutil.copytree(data, tmp_path / "data")
    third = write_shard(mine / "train_2.bin", np.zeros(1600))
    fault = partial(at_step, 1, 0, partial(vanish, third))
    run = start("--save_every", 2, nproc=2, data=mine, fault=fault)
    assert all(code > 0 for code in run.wait())
    assert "train_2.bin" in one_line(run)
    assert run.saved() == [2, 4]


# torchrun


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_torchrun_restarts_after_a_killed_worker_and_passes_a_signal_on(tmp_path, data):
    """It keeps its store: the rank that comes first must not find its dead peer there. By a signal
    the ranks save, close the log and leave none behind.
    """
    # Python imports it before the script. Once restarted, rank 0 comes first.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('RANK') == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':\n"
        "    time.sleep(3)\n")
    args = ("--run_id", "x", "--num_iterations", 2000, "--save_every", 10, "--resume", "auto")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "--max-restarts=2", train_gpt.SCRIPT, *flags(data, args)]
    process = subprocess.Popen(list(map(str, command)), cwd=tmp_path, stdin=subprocess.DEVNULL,
                               env=os.environ | {"PYTHONPATH": str(tmp_path)})
    run, log = Run(tmp_path), tmp_path / "logs" / "x" / "log.txt"

    def wait_until_logged(text):
        wait_until(lambda: process.poll() is not None or log.exists() and text in run.log())
        assert process.poll() is None, text

    try:
        wait_until_logged("step:15/2000")
        os.kill(children(process.pid)[1], signal.SIGKILL)
        wait_until_logged("resumed at step:")
        step = int(re.findall(r"resumed at step:(\d+)", run.log())[0])
        assert step >= 10
        wait_until_logged(f"step:{step + 25}/2000")
        workers = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0  # torchrun says so of itself
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        if process.poll() is None:
            for pid in [*children(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)
            process.wait()
    step = run.saved()[-1]
    assert run.state(step)["step"] == step
    assert f"stopped at step:{step} by SIGTERM" in run.log().splitlines()[-1]
