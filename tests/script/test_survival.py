"""Runs that are killed, stopped, resumed, or that go wrong, with faults really injected, on CPU.

Each rank of a run is a process, forked from a server that has imported torch once. A fault is a
function of this file that a rank calls before main() to put something in the script's way. Every
run notes the exact loss of each step. What is expected of a resumed run is what one run without
any fault did, the fixture `whole`.
"""

import contextlib
import errno
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_checkpoints import equal

import train_gpt

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["test_survival"])

MODEL = """--preset pocket --model_dim 32 --head_dim 16 --attention_pattern LSL
    --value_embed_pattern 0.0 --backout_layer 1 --sequences_per_step 4 --seq_lens 128,256
    --sequences_per_forward 2 --val_tokens 1000 --val_seq_len 256 --val_every 2 --warmup_steps 1
    --freeze_steps 1 --long_windows 1,2 --lr_factors 0.8,1.0""".split()
# Stages begin at steps 0, 2, 4 and 6. At 4 the embedding leaves the head. Adam rests at even steps,
# which are those that may be saved.
STEPS, STAGES = 10, 4
SHARDS = [2100, 1600]  # tokens: two short steps and a long one, a long one, then the second epoch
# gloo sums in another order than one process does.
RANKS_RTOL = 1e-5


class Run:
    """The processes of a run, one a rank: `wait` for them, then read what they did."""

    def __init__(self, processes, cwd):
        self.processes, self.cwd = processes, cwd
        self.folder = cwd / "logs" / "x"

    def wait(self, timeout=120):
        """Exit codes by rank, negative where a signal ended it. A rank that hangs is a failure."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in hanging:
            self.processes[rank].kill()
        assert not hanging, f"ranks {hanging} hang after {timeout} s"
        return [process.exitcode for process in self.processes]

    def out(self, rank=0):
        return (self.cwd / f"out-{rank}").read_text()

    def err(self, rank=0):
        return (self.cwd / f"err-{rank}").read_text()

    def log(self):
        """The log without the script's source and the list of hyperparameters that open it."""
        return (self.folder / "log.txt").read_text().rpartition("=" * 100)[2]

    def losses(self, rank=0):
        """[[step, loss as float.hex]] of each step that came to its gradients."""
        return [line.split() for line in (self.cwd / f"losses-{rank}").read_text().splitlines()]

    def state(self, step=STEPS):
        return torch.load(self.folder / f"step-{step:06d}.pt", weights_only=True)

    def saved(self):
        """Steps of the checkpoints that are there."""
        return sorted(int(path.stem[5:]) for path in self.folder.glob("step-*.pt"))


def run_rank(rank, nproc, port, cwd, args, fault):
    """What the process of a rank does: main(), its output in files, a fault put in its way."""
    os.chdir(cwd)
    for number, name in ((1, f"out-{rank}"), (2, f"err-{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if nproc > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    Path(f"losses-{rank}").write_text("")
    at_each_step(partial(note_loss, Path(f"losses-{rank}")))
    if fault:
        fault(rank)
    sys.exit(train_gpt.main(args))


def note_loss(path, step, losses):
    with path.open("a") as file:
        file.write(f"{step} {losses[0].item().hex()}\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory, write_shard):
    """A folder with two training shards and one for validation."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for index, count in enumerate(SHARDS):
        write_shard(folder / f"train_{index}.bin", random.integers(0, 257, count))
    write_shard(folder / "val_0.bin", random.integers(0, 257, 1200))
    return folder


@pytest.fixture(scope="module")
def start_in(data):
    """`start_in(cwd, *args, nproc=1, fault=None)` starts a run named x and returns it."""
    with pytest.MonkeyPatch.context() as patch:  # the server finds this file and the script
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.forkserver.ensure_running()

    def start_in(cwd, *args, nproc=1, fault=None, data=data):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        flags = [*MODEL, "--train_files", f"{data}/train_*.bin", "--val_files", f"{data}/val_*.bin",
                 "--num_iterations", str(STEPS), "--run_id", "x", *map(str, args)]
        processes = [FORKS.Process(target=run_rank, args=(rank, nproc, port, cwd, flags, fault))
                     for rank in range(nproc)]
        for process in processes:
            process.start()
        return Run(processes, cwd)

    return start_in


@pytest.fixture
def start(start_in, tmp_path):
    """`start(*args, nproc=1, fault=None)` starts a run in tmp_path; again, it is the same run."""
    return partial(start_in, tmp_path)


@pytest.fixture(scope="module")
def whole(start_in, tmp_path_factory):
    """The run without any fault, on one rank, with all its checkpoints kept."""
    run = start_in(tmp_path_factory.mktemp("whole"), "--save_every", 2, fault=keep_all)
    assert run.wait() == [0], run.err()
    return run


def one_line(text):
    """The text, which must be one line, so no traceback."""
    assert len(text.splitlines()) == 1, text
    return text


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
    assert_same_state(run.state(), whole.state())


# Faults, to be bound by `partial` up to the last argument, the rank.

def at_each_step(action):
    """Call `action(step, losses)` once a step's gradients are there, before its update."""
    check = train_gpt.Health.check

    def check_after_action(health, step, losses):
        action(step, losses)
        return check(health, step, losses)

    train_gpt.Health.check = check_after_action


def at_step(when, only_rank, action, rank):
    """Call `action(losses)` at one step on one rank."""
    def act(step, losses):
        if step == when and rank == only_rank:
            action(losses)

    at_each_step(act)


def send_self(numbers, *_):
    for number in numbers:
        os.kill(os.getpid(), number)


def keep_all(rank):
    """No checkpoint is removed."""
    write = train_gpt.write_checkpoint
    train_gpt.write_checkpoint = lambda path, state, keep: write(path, state, 999)


def killed(step):
    return partial(at_step, step, 0, partial(send_self, [signal.SIGKILL]))


# Resume


def test_the_whole_run_has_what_there_is_to_go_on_from(whole):
    """Steps of both lengths, and a head that is the embedding until step 4."""
    assert whole.saved() == [2, 4, 6, 8, 10]
    assert [whole.state(step)["loader"] for step in (2, 4, 6)] == [(0, 1024), (1, 1024), (2, 2048)]
    for step in whole.saved():
        model, optimizers = whole.state(step)["model"], whole.state(step)["optimizers"]
        assert optimizers["head"]["count"] == step // 2
        assert torch.equal(model["embed.weight"], model["lm_head.weight"]) == (step <= 4)


def test_resumed_run_is_the_same_to_the_bit(start_in, whole, tmp_path):
    """From within a shard, from the end of one, from the middle of an epoch; from the beginning of
    each stage and after it. The loader does not begin again, the first step has its own learning
    rate, its batch and its targets.
    """
    expected = re.findall(r"step:(\d+)/10 val_loss:(\S+)", whole.log())
    runs = {}
    for step in (2, 4, 6, 8):  # side by side
        (cwd := tmp_path / str(step)).mkdir()
        runs[step] = start_in(cwd, "--save_every", 100, "--resume",
                              whole.folder / f"step-{step:06d}.pt")
    for step, run in runs.items():
        assert_goes_on(run, whole, step)
        found = re.findall(r"step:(\d+)/10 val_loss:(\S+)", run.log())
        assert found == [pair for pair in expected if int(pair[0]) >= step]


def test_killed_run_goes_on_in_the_same_log(start, whole, final_values):
    args = ("--save_every", 4, "--resume", "auto")
    run = start(*args, fault=killed(6))
    assert run.wait() == [-signal.SIGKILL]
    assert "afresh" in run.out()
    saved = run.state(4)
    before = (run.folder / "log.txt").read_text()

    run = start(*args)
    assert_goes_on(run, whole, 4)
    assert (run.folder / "log.txt").read_text().startswith(before)
    after = run.log().partition("resumed at step:4 from logs/x/step-000004.pt\n")[2]
    lines = re.findall(r"^step:(\d+)/10 (train|val)_loss.*train_time:(\d+)ms", after, re.M)
    assert [(int(step), kind) for step, kind, _ in lines[:3]] == [
        (4, "val"), (5, "train"), (6, "train")], "validated again, then trained again"
    times = [int(ms) for *_, ms in lines]
    assert times == sorted(times) and times[0] >= int(saved["train_time_ms"])
    assert int(final_values(run.log())["train_time_ms"]) >= times[-1]


def test_finished_run_is_validated_again_and_not_trained(start, final_values):
    args = ("--save_every", 4, "--resume", "auto")
    first = start(*args)
    assert first.wait() == [0]
    values = final_values(first.log())
    files = {path: path.stat().st_mtime_ns for path in first.folder.glob("step-*")}
    run = start(*args)
    assert run.wait() == [0], run.err()
    assert not run.losses()
    assert files == {path: path.stat().st_mtime_ns for path in run.folder.glob("step-*")}
    again = final_values(run.log())
    assert {key for key in values if values[key] != again[key]} <= {
        "train_time_ms", "tokens_per_second", "peak_memory_mib"}
    after = run.log().partition("resumed at step:10 from logs/x/step-000010.pt\n")[2]
    [line] = re.findall("^step:.*", after, re.M)
    assert line.startswith("step:10/10 val_loss:")

    run = start(*args, "--num_iterations", STEPS + 2)
    assert run.wait() == [0], run.err()
    assert [step for step, _ in run.losses()] == ["10", "11"]
    assert run.saved()[-1] == STEPS + 2


def blind(rank):
    """Rank 1 finds no checkpoint."""
    if rank == 1:
        Path.glob = lambda *args: iter(())


def test_two_ranks_resume_as_one_two_or_four(start_in, tmp_path):
    """All ranks take the checkpoint that rank 0 finds, the one before a damaged one."""
    first = start_in(tmp_path, "--save_every", 4, nproc=2)
    assert first.wait() == [0, 0], first.err()
    expected = mean_losses(first, 2)
    path = first.folder / f"step-{STEPS:06d}.pt"
    path.write_bytes(path.read_bytes()[:-1])

    for nproc, fault in ((1, None), (2, blind), (4, None)):
        shutil.copytree(first.folder, (cwd := tmp_path / str(nproc)) / "logs" / "x")
        run = start_in(cwd, "--save_every", 100, "--resume", "auto", nproc=nproc, fault=fault)
        assert run.wait() == [0] * nproc, run.err()
        assert re.search(f"skipped .*{path.name}: no whole checkpoint", run.out())
        assert "resumed at step:8 from logs/x/step-000008.pt" in run.out()
        losses = mean_losses(run, nproc)
        np.testing.assert_allclose(losses, expected[8:], rtol=RANKS_RTOL)
        if nproc == 2:
            assert losses == expected[8:]


def mean_losses(run, nproc):
    by_rank = [[float.fromhex(loss) for _, loss in run.losses(rank)] for rank in range(nproc)]
    return [sum(losses) / nproc for losses in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("change, named", [
    (("--muon_lr", 0.06), "muon_lr 0.08, now 0.06"),
    (("--num_iterations", 3), "num_iterations"),
    ((), "data"),
])
def test_another_run_is_refused(start, whole, data, tmp_path, change, named):
    """A checkpoint of other hyperparameters, of a longer run, of data that have changed."""
    other = shutil.copytree(data, tmp_path / "other")
    if named == "data":
        with (other / "train_0.bin").open("r+b") as file:
            file.seek(1500)
            file.write(b"\0\0")
    run = start("--resume", whole.folder / "step-000004.pt", *change, data=other)
    assert run.wait() == [2]
    line = one_line(run.err())
    assert "step-000004.pt" in line and named in line
    assert not run.losses()


# Kill


MOMENTS = ["half-written", "before fsync", "before rename", "after rename"]


def killed_in_save(moment, which, rank):
    """SIGKILL at a moment of the `which`-th save."""
    def kill_at(owner, name, call, before):
        original, calls = getattr(owner, name), itertools.count(1)

        def counted(*args):
            due = next(calls) == call
            if due:
                before(*args)
            result = original(*args)
            if due:
                send_self([signal.SIGKILL])
            return result

        setattr(owner, name, counted)

    def kill(*args):
        send_self([signal.SIGKILL])

    def half(state, file):
        file.write(os.urandom(100_000))
        file.flush()
        kill()

    kill_at(*{
        "half-written": (torch, "save", which, half),
        "before fsync": (os, "fsync", which, kill),
        "before rename": (Path, "replace", which, kill),
        "after rename": (Path, "replace", which, lambda *args: None),
    }[moment])


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_a_save(start, whole, moment):
    """What the killed save leaves behind does no harm; the checkpoint before it is used."""
    args = ("--save_every", 4, "--resume", "auto")
    run = start(*args, fault=partial(killed_in_save, moment, 2))
    assert run.wait() == [-signal.SIGKILL]
    assert 4 in run.saved()
    run = start(*args)
    assert_goes_on(run, whole, 8 if moment == "after rename" else 4)
    assert not list(run.folder.glob("*.tmp"))


def killed_at_random(seed, rank):
    """SIGKILL, every second time within a save, else shortly after the gradients of some step."""
    chance = random.Random(seed)
    if seed % 2:
        return killed_in_save(chance.choice(MOMENTS), chance.randrange(1, 3), rank)
    left, delay = itertools.count(-chance.randrange(4)), chance.uniform(0, 0.02)

    def act(*_):
        if next(left) == 0:
            threading.Timer(delay, send_self, [[signal.SIGKILL]]).start()

    at_each_step(act)


@pytest.mark.slow
def test_killed_twenty_times(start, start_in, tmp_path_factory):
    """What is resumed after each death comes to the parameters of a run that nobody killed."""
    args = ("--num_iterations", 150, "--val_every", 50, "--save_every", 2)
    whole = start_in(tmp_path_factory.mktemp("uninterrupted"), *args)
    for seed in range(20):
        run = start(*args, "--resume", "auto", fault=partial(killed_at_random, seed))
        assert run.wait() == [-signal.SIGKILL], f"death {seed}: {run.err()}"
    run = start(*args, "--resume", "auto")
    assert run.wait() == whole.wait() == [0], run.err() + whole.err()
    assert_same_state(run.state(150), whole.state(150))


# Signals


@pytest.mark.parametrize("number, at, step", [
    (signal.SIGTERM, 4, 6), (signal.SIGINT, 3, 4), (signal.SIGHUP, 1, 2)])
def test_signal_saves_where_no_gradients_are_left_over(start, whole, number, at, step):
    """At once or a step later; a stage begins there, at step 4 the embedding leaves the head."""
    args = ("--save_every", 100, "--resume", "auto")
    run = start(*args, fault=partial(at_step, at, 0, partial(send_self, [number])))
    assert run.wait() == [128 + number], run.err()
    assert run.err() == ""
    assert run.saved() == [step]
    assert run.log().splitlines()[-1] == (
        f"stopped at step:{step} by {number.name}; to go on: --run_id x --resume auto")
    run = start(*args)
    assert_goes_on(run, whole, step)
    trained = re.findall(r"^step:(\d+)/10 train_loss", run.log(), re.M)
    assert trained == [str(step) for step in range(1, STEPS + 1)], "no step is taken twice"


def test_signal_in_the_last_step_lets_the_run_end(start, whole):
    fault = partial(at_step, STEPS - 1, 0, partial(send_self, [signal.SIGTERM]))
    run = start("--save_every", 100, fault=fault)
    assert run.wait() == [0], run.err()
    assert run.saved() == [STEPS] and "stopped" not in run.log()
    assert_same_state(run.state(), whole.state())


def test_second_signal_ends_at_once(start):
    fault = partial(at_step, 4, 0, partial(send_self, [signal.SIGTERM, signal.SIGINT]))
    run = start("--save_every", 100, fault=fault)
    assert run.wait() == [-signal.SIGINT]
    assert run.saved() == []


def test_signal_without_saving_only_stops(start):
    run = start(fault=partial(at_step, 4, 0, partial(send_self, [signal.SIGTERM])))
    assert run.wait() == [128 + signal.SIGTERM], run.err()
    assert run.saved() == [] and "resume" not in run.log()
    assert run.log().splitlines()[-1] == (
        "stopped at step:5 by SIGTERM; nothing is saved, as --save_every is 0")


def ignoring(number, rank):
    """As under nohup; the signal comes at step 4."""
    signal.signal(number, signal.SIG_IGN)
    at_step(4, 0, partial(send_self, [number]), rank)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signal_that_the_caller_ignores_stops_nothing(start, number):
    """nohup ignores SIGHUP; a shell ignores SIGINT for what it starts in the background."""
    run = start(fault=partial(ignoring, number))
    assert run.wait() == [0], run.err()
    assert len(run.losses()) == STEPS and "stopped" not in run.log()


def test_signal_to_one_rank_stops_both_at_the_same_step(start):
    fault = partial(at_step, 4, 1, partial(send_self, [signal.SIGTERM]))
    run = start("--save_every", 100, nproc=2, fault=fault)
    assert run.wait() == [128 + signal.SIGTERM] * 2, run.err()
    assert run.saved() == [6] and len(run.losses(0)) == len(run.losses(1)) == 6


def die_or_be_told(rank):
    """At step 4 rank 1 is killed and rank 0 gets a SIGTERM, as from torchrun."""
    at_step(4, 1, partial(send_self, [signal.SIGKILL]), rank)
    at_step(4, 0, partial(send_self, [signal.SIGTERM]), rank)


def test_rank_told_to_stop_because_another_died_does_not_hang(start):
    run = start("--save_every", 2, nproc=2, fault=die_or_be_told)
    codes = run.wait(timeout=30)
    assert codes[0] != 0 and codes[1] == -signal.SIGKILL
    assert run.saved() == [2, 4]
    assert "Traceback" not in run.err(), run.err()


# Numbers


def minus_infinity(losses):
    losses[0] = -torch.inf


def update_by_nan(which, when, rank):
    """From the `when`-th update on, warm-up not counted, a rule gives NaN, all losses finite."""
    rule, updates = getattr(train_gpt, which), itertools.count()

    def spoil(weight, *args, **options):
        rule(weight, *args, **options)
        if armed and next(updates) >= when:
            weight.view(-1)[-1] = torch.nan

    armed = []
    at_step(0, rank, lambda losses: armed.append(True), rank)
    setattr(train_gpt, which, spoil)


@pytest.mark.parametrize("nproc, fault, step, named, saved", [
    # On one rank alone, and told on both.
    (2, partial(at_step, 5, 1, minus_infinity), 5, "the loss is -inf on rank 1", [2, 4]),
    # The update of step 5: what it leaves is seen before it is saved.
    (1, partial(update_by_nan, "adam_update", 13), 6, "a weight or a state is not finite", [2, 4]),
    # The last update: the run does not end well.
    (1, partial(update_by_nan, "muon_update", 28), 10, "a weight or a state is not finite",
     [6, 8]),
], ids=["loss", "Adam", "Muon"])
def test_numbers_that_are_not_finite_end_the_run_and_are_never_saved(
    start, whole, nproc, fault, step, named, saved
):
    args = ("--save_every", 2, "--resume", "auto")
    run = start(*args, nproc=nproc, fault=fault)
    assert run.wait() == [2] * nproc
    line = one_line(run.err())
    assert f"step {step}: " in line and named in line and "lower the learning rates" in line
    assert run.saved() == saved
    for each in saved:
        assert all(x.isfinite().all() for x in run.state(each)["model"].values())
    assert "val_loss:nan" not in run.log() and "---" not in run.log()
    if nproc == 1:  # what was saved last is sound
        assert_goes_on(start(*args), whole, saved[-1])


def drift(rank):
    """On rank 1 one bit of one weight is another before the validation at step 6."""
    check_weights = train_gpt.Run.check_weights

    def check_after_flip(run, step):
        if step == 6 and rank == 1:
            run.model.blocks[1].mlp.c_fc.data.view(torch.int32)[3, 5] ^= 1
        check_weights(run, step)

    train_gpt.Run.check_weights = check_after_flip


def test_drifted_parameters_are_found_at_a_validation(start):
    run = start(nproc=2, fault=drift)
    assert run.wait() == [2, 2]
    line = one_line(run.err())
    assert "step 6: mlp: the ranks' weights have drifted apart" in line
    assert re.findall(r"step:(\d+)/10 val_loss", run.log()) == ["0", "2", "4"]


def test_what_all_ranks_know_is_said_once(start):
    run = start("--sequences_per_step", 3, nproc=2)
    assert run.wait() == [2, 2]
    assert "--sequences_per_step 3: the 2 ranks must divide it" in one_line(run.err())
    assert run.err(1) == "" and not run.folder.exists()


# Disk and data


def full_disk(which, rank):
    """From the `which`-th save on the disk is full after the first half."""
    save, left = torch.save, [which]

    def save_or_fail(state, file):
        left[0] -= 1
        if left[0] > 0:
            return save(state, file)
        file.write(b"PK" + bytes(200_000))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    torch.save = save_or_fail


@pytest.mark.parametrize("nproc", [1, 2])
def test_full_disk_ends_the_run_with_one_line(start, whole, nproc):
    args = ("--save_every", 2, "--resume", "auto")
    run = start(*args, nproc=nproc, fault=partial(full_disk, 2))
    assert run.wait() == [2] * nproc
    line = one_line(run.err())
    assert "step-000004.pt" in line and "No space left" in line and "--resume auto" in line
    assert {p.name for p in run.folder.iterdir()} == {"log.txt", "step-000002.pt"}
    if nproc == 1:
        assert_goes_on(start(*args), whole, 2)


def test_small_disk(start_in, whole, tmp_path):
    """A file system on which the log and one checkpoint have room."""
    size = 200_000 + int(1.5 * (whole.folder / "step-000004.pt").stat().st_size)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mount is not permitted here")
    try:
        run = start_in(tmp_path, "--save_every", 4)
        codes, line, files = run.wait(), run.err(), {p.name for p in run.folder.iterdir()}
        assert codes[0] > 0
        assert "step-000008.pt" in one_line(line) and "No space left" in line
        assert files == {"log.txt", "step-000004.pt"}
        assert run.state(4)["step"] == 4
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_checkpoint_that_cannot_be_written(start):
    run = start("--save_every", 2, fault=partial(at_step, 3, 0, make_obstacle))
    assert run.wait() == [2]
    assert "step-000004.pt: not written" in one_line(run.err())
    assert run.saved() == [2]


def make_obstacle(losses):
    """A folder where the temporary file of the save at step 4 goes."""
    Path("logs/x/step-000004.tmp").mkdir()


def test_logs_folder_that_cannot_be_made(start, tmp_path):
    (tmp_path / "logs").write_text("")
    run = start()
    assert run.wait() == [2]
    assert "logs" in one_line(run.err())


def vanish(path, losses):
    path.unlink()


@pytest.mark.parametrize("nproc", [1, 2])
def test_data_that_vanish(start, data, write_shard, tmp_path, nproc):
    """The third shard is gone before it is read, which is while the second one is in use."""
    mine = shutil.copytree(data, tmp_path / "data")
    third = write_shard(mine / "train_2.bin", np.zeros(1600))
    run = start("--save_every", 2, nproc=nproc, data=mine,
                fault=partial(at_step, 1, 0, partial(vanish, third)))
    assert all(code > 0 for code in run.wait())
    assert "train_2.bin" in one_line(run.err())
    assert run.saved() == [2, 4]


# torchrun


@contextlib.contextmanager
def torchrun(tmp_path, data, *args, launcher=(), late=0):
    """A run under torchrun with two ranks; what is left of it is killed at the end.

    Once restarted, rank 1 begins `late` seconds after rank 0.
    """
    (tmp_path / "sitecustomize.py").write_text(  # Python imports it before the script
        "import os, time\n"
        "if os.environ.get('RANK') == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':\n"
        f"    time.sleep({late})\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               *launcher, train_gpt.SCRIPT, *MODEL, "--train_files", data / "train_*.bin",
               "--val_files", data / "val_*.bin", "--run_id", "x", "--resume", "auto", *args]
    process = subprocess.Popen(list(map(str, command)), cwd=tmp_path, stdin=subprocess.DEVNULL,
                               env=os.environ | {"PYTHONPATH": str(tmp_path)},
                               stdout=(tmp_path / "out-0").open("w"),
                               stderr=(tmp_path / "err-0").open("w"), start_new_session=True)
    try:
        yield process, Run([], tmp_path)
    finally:
        for child in [*children(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.wait()


def children(pid):
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_until(condition, process, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def is_logged(run, text):
    log = run.folder / "log.txt"
    return log.exists() and text in run.log()


@pytest.mark.slow
def test_torchrun_restarts_after_a_killed_worker(tmp_path, data, start_in, tmp_path_factory):
    """torchrun keeps its store: the rank that comes first must not find its dead peer there."""
    args = ("--num_iterations", 100, "--save_every", 20)
    options = dict(launcher=["--max-restarts=2"], late=3)
    with torchrun(tmp_path, data, *args, **options) as (process, run):
        wait_until(lambda: is_logged(run, "step:30/100"), process)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        assert process.wait(timeout=120) == 0, run.err()
    resumed = re.findall(r"resumed at step:(\d+)", (run.folder / "log.txt").read_text())
    assert len(resumed) == 1 and int(resumed[0]) >= 20
    whole = start_in(tmp_path_factory.mktemp("uninterrupted"), *args, nproc=2)
    assert whole.wait() == [0, 0], whole.err()
    assert_same_state(run.state(100), whole.state(100))


@pytest.mark.slow
def test_sigterm_to_torchrun(tmp_path, data):
    """torchrun passes it on; the ranks save, close the log and leave none behind."""
    args = ("--num_iterations", 2000, "--save_every", 1000)
    with torchrun(tmp_path, data, *args) as (process, run):
        wait_until(lambda: is_logged(run, "step:5/2000"), process)
        workers = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0  # torchrun says so of itself
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    [step] = run.saved()
    assert run.state(step)["step"] == step
    assert f"stopped at step:{step} by SIGTERM" in run.log().splitlines()[-1]
