"""Runs that are killed, stopped, resumed, or that go wrong, in this process.

What is expected of a resumed run is what one run without any fault did, the fixture `whole`.
"""

import errno
import itertools
import os
import re
import shutil
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from test_checkpoints import equal
from tiny_runs import FLAGS, Killed, one_error, run_main, saved_steps, to_argv

import train_gpt

STEPS = 10
# Stages begin at steps 0, 2, 4 and 6. At 4 the embedding leaves the head. Adam rests at even steps,
# which are those that may be saved.
MODEL = FLAGS | dict(
    num_iterations=STEPS, extension_steps=4, val_every=4, val_tokens=300, warmup_steps=0,
    resume="auto")


@pytest.fixture(scope="module")
def files(tmp_path_factory, write_shard):
    """The flags of two training shards and one for validation."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    # Documents of some four steps, then of two, then the second epoch
    for name, count in (("train_0", 9000), ("train_1", 5500), ("val_0", 400)):
        write_shard(folder / f"{name}.bin", draw.integers(0, 257, count))
    return dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin")


@pytest.fixture
def start(files, tmp_path, monkeypatch):
    """`start(...)` runs main in tmp_path; again, it is the same run."""
    monkeypatch.chdir(tmp_path)

    def start(fault=None, **flags):
        return run_main(tmp_path, to_argv(MODEL | files | flags), fault)

    return start


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """The run without any fault, and its last checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    run = run_main(folder, to_argv(MODEL | files | dict(save_every=2, warmup_steps=1)))
    assert run.code == 0, run.err
    run.state = state_at(STEPS, run.folder)
    return run


def state_at(step, folder=Path("logs/x")):
    return torch.load(folder / f"step-{step:06d}.pt", weights_only=True)


def assert_goes_on(run, whole, step):
    """The run, resumed at a step, ends as the one without any fault does: all that its last
    checkpoint holds is equal to the bit, but for clock and flags."""
    assert run.code == 0, run.err
    assert f"\nresumed at step:{step} from " in run.log
    state = state_at(STEPS)
    assert state.keys() == whole.state.keys()
    for key in state.keys() - {"settings", "train_time_ms", "process_time_ms"}:
        assert equal(state[key], whole.state[key]), key


# ---- Faults


def at_step(when, action, *args):
    def fault(step, losses):
        if step == when:
            action(*args)

    return fault


def signalled(step, *numbers):
    def send():
        for number in numbers:
            os.kill(os.getpid(), number)

    return at_step(step, send)


def raising(error):
    def fail(*args, **kwargs):
        raise error

    return fail


# ---- Killed


@pytest.mark.parametrize("moment, step", [("half-written", 4), ("renamed", 8)])
def test_a_run_that_is_killed_in_a_save_goes_on_to_the_bit(
    start, whole, monkeypatch, moment, step
):
    """What the killed save leaves behind does no harm; the checkpoint before it is used. The log
    goes on, and the clock."""
    owner, name = (torch, "save") if moment == "half-written" else (Path, "replace")
    function, calls = getattr(owner, name), itertools.count(1)

    def die(*args):
        if next(calls) < 2:
            return function(*args)
        if moment == "half-written":
            args[1].write(os.urandom(100_000))
        else:
            function(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        killed = start(save_every=4)
    assert killed.code is None and saved_steps() == [4, 8][: step // 4]
    saved = state_at(step)
    again = start(save_every=4)
    assert_goes_on(again, whole, step)
    assert not list(Path("logs/x").glob("*.tmp"))
    assert again.log.startswith(killed.log)
    times = [int(ms) for ms in re.findall(r" train_time:(\d+)ms", again.log[len(killed.log):])]
    assert saved["train_time_ms"] // 1 <= times[0] and times == sorted(times)


# ---- Stopped


@pytest.mark.parametrize("fault, every, saved", [
    (signalled(3, signal.SIGINT), 100, [4]),
    (signalled(4, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP), 100, [6]),
    (signalled(3, signal.SIGUSR1), 100, [4]),
    (signalled(3, signal.SIGXCPU), 100, [4]),
    (signalled(4, signal.SIGTERM), 0, []),
], ids=["Ctrl-C", "waiting gradients, told again", "SLURM", "CPU time", "without saves"])
def test_a_signal_ends_a_run_at_a_save_from_which_it_goes_on(start, whole, fault, every, saved):
    """No validation delays it; what is due there is done once the run goes on."""
    stopped = start(fault, save_every=every)
    assert (stopped.code, stopped.err, saved_steps()) == (1, "", saved)
    assert stopped.log.count("\nstopped by a signal; ") == 1 and not stopped.values
    if saved:
        steps_validated = [f"step:{step}/" in stopped.log.rpartition("val_loss")[0]
                           for step in (4, 8)]
        assert steps_validated[0] == (saved[0] > 4) and not steps_validated[1]
        again = start(save_every=every)
        assert_goes_on(again, whole, saved[-1])
        assert re.findall(r"^step:(\d+)/\d+ val_loss:", again.log, re.M) == ["0", "4", "8", "10"]


def test_a_signal_at_the_last_step_is_late(start):
    done = start(signalled(STEPS - 1, signal.SIGTERM), save_every=100)
    assert done.code == 0 and saved_steps() == [STEPS] and done.values


def test_a_second_ctrl_c_ends_the_process(start, monkeypatch):
    """Also one that signals do not end, the first of a container. Other signals come twice."""
    ended = []

    def leave(code):
        ended.append(code)
        raise Killed

    monkeypatch.setattr(signal, "raise_signal", ended.append)
    monkeypatch.setattr(os, "_exit", leave)
    assert start(signalled(3, signal.SIGTERM, signal.SIGINT)).code is None
    assert ended == [signal.SIGINT, 130]


# ---- Gone wrong


@pytest.mark.parametrize("tokens, last", [(9000, 4), (11_500, 5)])
def test_the_end_of_the_data_saves_all_that_was_trained_on(
    start, files, tmp_path, write_shard, tokens, last
):
    """Also where gradients wait for Adam. With more data it goes on, and to the bit where none did.
    """
    draw = np.random.default_rng(1)
    for index, count in enumerate((tokens, 12_000, 12_000)):
        write_shard(tmp_path / f"more_{index}.bin", draw.integers(0, 257, count))
    more = dict(train_files=f"{tmp_path}/more_*.bin", repeat_data="false", save_every=100)
    expected = start(**more | dict(run_id="y"))
    assert expected.code == 0, expected.err
    few = more | dict(train_files=f"{tmp_path}/more_0.bin")
    with pytest.MonkeyPatch.context() as patch:  # they are not refused at once
        patch.setattr(train_gpt, "check_data", lambda *args: None)
        ended = start(**few)
    assert "the data end before the run" in one_error(ended)
    assert saved_steps() == [last] and len(ended.losses) == last
    again = start(**more)
    assert again.code == 0 and f"\nresumed at step:{last} from " in again.log
    assert f"\ntrain_files: {more['train_files']}, before {few['train_files']}\n" in again.log
    if last % 2 == 0:
        states = [state_at(STEPS, Path("logs") / name) for name in "xy"]
        for key in ("model", "optimizers", "place", "tokens_trained", "data_digest"):
            assert equal(*[state[key] for state in states]), key


@pytest.mark.parametrize("harm", ["deleted", "cut off", "a foreign token"])
def test_an_error_of_the_loader_saves_all_that_was_trained_on(start, files, tmp_path, harm):
    """The second shard is wrong, when it comes to be read. What was read before is needed no more.
    """
    first, second = (tmp_path / f"train_{index}.bin" for index in range(2))
    for path in first, second:
        shutil.copy(Path(files["train_files"]).with_name(path.name), path)
    read_shard, is_spoilt = train_gpt.read_shard, threading.Event()

    def spoil():
        first.unlink()
        if harm == "deleted":
            second.unlink()
        elif harm == "cut off":
            os.truncate(second, 5000)
        else:
            content = bytearray(second.read_bytes())
            content[3000:3002] = b"\xff\xff"
            second.write_bytes(content)

    def read_late(path, vocab_size):
        if path == second:
            is_spoilt.wait(30)
        return read_shard(path, vocab_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "read_shard", read_late)

        def fault(step, losses):
            if step == 1:
                spoil()
                is_spoilt.set()

        ended = start(fault, train_files=f"{tmp_path}/train_*.bin", save_every=100)
    assert second.name in one_error(ended)
    trained = len(ended.losses)
    assert saved_steps() == [trained] and trained > 2
    assert ended.log.splitlines()[-1].startswith("error: ") and second.name in ended.log


def test_memory_that_runs_out_in_a_step_saves_no_weights_that_may_be_halfway(start, monkeypatch):
    accumulate, calls = train_gpt.accumulate_gradients, itertools.count()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0")

    def run_out(*args):
        return accumulate(*args) if next(calls) != 3 else raising(error)()

    monkeypatch.setattr(train_gpt, "accumulate_gradients", run_out)
    ended = start(save_every=2)
    assert "out of memory; raise --head_chunks" in one_error(ended)
    assert saved_steps() == [2]
    assert ended.log.splitlines()[-1].startswith("error: out of memory; ")


def test_losses_that_are_no_numbers_end_a_run_and_are_not_saved(start):
    def minus_infinity(step, losses):
        if step == 5:
            losses[0] = -torch.inf

    ended = start(minus_infinity, save_every=2)
    assert "step:6/10 train_loss:-inf" in one_error(ended)
    assert saved_steps() == [2, 4] and not ended.values
    assert ended.log.splitlines()[-1].startswith("error: step:6/10 train_loss:-inf; ")


def test_a_run_goes_on_once_a_full_disk_has_room(start, whole, monkeypatch):
    save = torch.save
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_half(state, file):
        if state["step"] == 4:
            file.write(b"half")
            try:
                raise full
            except OSError:
                raise RuntimeError("unexpected pos") from None
        save(state, file)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save_half)
        line = one_error(start(save_every=2))
    assert f"step-000004.pt: not written ({full}); make room" in line
    assert not list(Path("logs/x").glob("*.tmp")) and saved_steps() == [2]
    assert_goes_on(start(save_every=2), whole, 2)


def test_a_log_that_cannot_be_written_ends_a_run_in_one_line(start, monkeypatch):
    call = train_gpt.Log.__call__

    def full_from_step_3(log, text, *args, **kwargs):
        if text.startswith("step:3/"):
            log.file.close()
            log.file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        call(log, text, *args, **kwargs)

    monkeypatch.setattr(train_gpt.Log, "__call__", full_from_step_3)
    assert "not written ([Errno 28] No space left on device); make" in one_error(start())


# ---- Nothing of a person's


def test_only_the_checkpoints_that_the_run_wrote_are_pruned_or_taken(start):
    """Copies under names of a person's own stay, whatever they sort before."""
    start(save_every=2)
    folder = Path("logs/x")
    own = ["step-000002-best.pt", "step-000002.best.pt", "step-best.pt", "step-0000002.pt",
           "step-00002.pt", "best.pt", "step-000099.pt.old", "left-step-000004.pt"]
    for name in own:
        shutil.copy(folder / "step-000008.pt", folder / name)
    again = start(save_every=2, num_iterations=STEPS)
    assert f"\nresumed at step:{STEPS} from logs/x/step-{STEPS:06d}.pt\n" in again.log
    for step in 12, 14:
        train_gpt.write_checkpoint(folder / f"step-{step:06d}.pt", dict(step=step))
    assert all((folder / name).exists() for name in own) and saved_steps() == [10, 12, 14]


def test_a_run_does_not_begin_beside_later_checkpoints(start):
    """Neither a new one, whose log was deleted, nor one that goes back: `auto` would take them."""
    start(save_every=2)
    earlier = "logs/x/step-000006.pt"
    line = one_error(run_main(Path.cwd(), ["--resume", earlier, "--run_id", "x"]))
    assert "--run_id x: logs/x/step-000010.pt is there already; go on from it by --resume a" in line
    Path("logs/x/log.txt").unlink()
    line = one_error(start(resume=""))
    assert "logs/x/step-000010.pt is there already" in line
    assert not Path("logs/x/log.txt").exists() and saved_steps() == [6, 8, 10]
    branch = run_main(Path.cwd(), ["--resume", earlier, "--save_every", "2"])
    assert branch.code == 0 and len(list(Path("logs").iterdir())) == 2
