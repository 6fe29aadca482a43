"""Runs that are killed, stopped, resumed, or that go wrong, with faults really injected, on CPU.

A fault is a function of this file that a rank calls before main() to put something in the script's
way. What is expected of a resumed run is what one run without any fault did, the fixture `whole`.
"""

import fcntl
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time
from functools import partial
from pathlib import Path

import pytest
import rank_processes
import torch
from launch import torchrun_options
from rank_processes import Run, at_each_step, start_run
from test_checkpoints import equal
from tiny_runs import FLAGS, to_argv

import train_gpt

files = rank_processes.files  # a fixture

STEPS = 10
# Stages begin at steps 0, 2, 4 and 6. At 4 the embedding leaves the head. Adam rests at even steps,
# which are those that may be saved.
MODEL = FLAGS | dict(
    num_iterations=STEPS, extension_steps=4, val_every=2, val_tokens=1000, resume="auto")


@pytest.fixture
def start(files, tmp_path):
    """`start(nproc=1, fault=None, ...)` starts a run in tmp_path; again, it is the same run."""
    def start(nproc=1, fault=None, cwd=tmp_path, **flags):
        return start_run(cwd, MODEL | files | flags, nproc, fault)

    return start


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """The run without any fault, on one rank."""
    run = start_run(tmp_path_factory.mktemp("whole"), MODEL | files | dict(save_every=2))
    assert run.wait() == [0], run.err()
    return run


def assert_goes_on(run, whole, step):
    """The run, resumed at a step, ends as the one without any fault does: all that its last
    checkpoint holds is equal to the bit, but for clock and flags."""
    assert run.wait() == [0], run.err()
    assert f"resumed at step:{step} from " in run.log()
    state, expected = run.state(STEPS), whole.state(STEPS)
    assert state.keys() == expected.keys()
    for key in state.keys() - {"settings", "train_time_ms", "process_time_ms"}:
        assert equal(state[key], expected[key]), key


# Faults, to be bound by `partial` up to the last argument, the rank


def at_step(when, only_rank, action, rank):
    """Call `action(losses)` at one step on one rank, before its update."""
    def act(step, losses):
        if step == when and rank == only_rank:
            action(losses)

    at_each_step(act)


def send_self(number, *_):
    os.kill(os.getpid(), number)


def signalled(step, number, rank=0):
    return partial(at_step, step, rank, partial(send_self, number))


def signalled_at_the_end(times, rank):
    """SIGINT while the last step is validated, and again."""
    def validate(*args, validate=train_gpt.validate):
        if args[2].stage == 4:  # of the last validation, also in the warm-up
            for _ in range(times if signal.getsignal(signal.SIGTERM) else 0):
                send_self(signal.SIGINT)
        return validate(*args)

    train_gpt.validate = validate


def closed_terminal(step, on_hangup, rank):
    """The process leads the session of a terminal, whose other end is closed at this step."""
    os.setsid()
    signal.signal(signal.SIGHUP, on_hangup)
    other_end, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    sys.stdout = os.fdopen(terminal, "w")
    at_step(step, 0, lambda losses: os.close(other_end), rank)


def closed_pipe(rank):
    """Who reads the output has seen enough, as `head`."""
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = os.fdopen(writer, "w")


def closed_streams(rank):
    """As a daemon's. What the run opens must not take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.close(number)
        setattr(sys, name, None)


def killed_in_second_save(moment, rank):
    """SIGKILL, in or around a function that does not come to its end."""
    owner, name = (torch, "save") if moment == "half-written" else (Path, "replace")
    function, calls = getattr(owner, name), itertools.count(1)

    def die(*args):
        if next(calls) < 2:
            return function(*args)
        if moment == "half-written":
            args[1].write(os.urandom(100_000))
            args[1].flush()
        else:
            function(*args)
        send_self(signal.SIGKILL)

    setattr(owner, name, die)


def killed_beside(step, rank):
    """At a step rank 1 is killed and rank 0 gets a SIGTERM, as from torchrun."""
    signalled(step, signal.SIGKILL, rank=1)(rank)
    signalled(step, signal.SIGTERM)(rank)


def told_again_in_a_save(number, seconds, rank):
    """SIGTERM at step 3, and by the script's clock so many seconds later another signal, while the
    checkpoint is half written."""
    now = [0.0]
    time.perf_counter = lambda: now[0]
    save = torch.save

    def save_and_signal(state, file):
        if state["step"] == 4:
            file.write(b"the first half")
            file.flush()
            now[0] += seconds
            send_self(number)
            file.seek(0)
        save(state, file)

    torch.save = save_and_signal
    signalled(3, signal.SIGTERM)(rank)


def minus_infinity(losses):
    losses[0] = -torch.inf


def out_of_memory(losses):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 1")


def fill_disk(size, losses):
    """From here on no file may grow beyond this, which stands for a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# Together these resume from within a shard, from the end of one and from the middle of an epoch,
# from the beginning of each stage and after it.


@pytest.mark.parametrize("moment, step", [
    ("half-written", 4), slow("after rename", 8)])
def test_a_run_that_is_killed_in_a_save_goes_on_to_the_bit(start, whole, moment, step):
    """What the killed save leaves behind does no harm; the checkpoint before it is used. The log
    goes on, and the clock."""
    run = start(save_every=4, fault=partial(killed_in_second_save, moment))
    assert run.wait() == [-signal.SIGKILL]
    log, saved = run.log(), run.state(step)

    run = start(save_every=4)
    assert_goes_on(run, whole, step)
    assert not list(run.folder.glob("*.tmp"))
    assert run.log().startswith(log)
    times = [int(ms) for ms in re.findall(r" train_time:(\d+)ms", run.log().removeprefix(log))]
    assert saved["train_time_ms"] // 1 <= times[0] and times == sorted(times)


@pytest.mark.parametrize("nproc, fault, every, code, saved", [
    (1, signalled(3, signal.SIGINT), 100, 1, [4]),
    (2, signalled(4, signal.SIGTERM, rank=1), 100, 1, [6]),  # where no gradients are left over
    (1, signalled(4, signal.SIGTERM), 0, 1, []),
    (1, partial(closed_terminal, 5, signal.SIG_DFL), 100, 1, [6]),
    slow(1, partial(closed_terminal, 5, signal.SIG_IGN), 100, 0, [STEPS]),
    slow(1, closed_pipe, 100, 0, [STEPS]),
    slow(1, closed_streams, 100, 0, [STEPS]),
    slow(1, partial(signalled_at_the_end, 1), 100, 0, [STEPS]),
    (1, partial(signalled_at_the_end, 2), 100, -signal.SIGINT, [STEPS]),
], ids=["Ctrl-C", "a rank", "without saves", "terminal", "nohup", "head", "daemon",
        "last validation", "twice"])
def test_a_signal_ends_a_run_at_a_save_from_which_it_goes_on(
    start, whole, nproc, fault, every, code, saved
):
    run = start(nproc, fault, save_every=every)
    assert run.wait() == [code] * nproc and run.err() == "", run.err()
    assert run.saved() == saved
    said = "stopped by a signal; go on by --run_id x --resume auto\n"
    if not every:
        said = "stopped by a signal; nothing was saved, as --save_every is 0\n"
    assert run.log().count(said) == (code == 1)
    if nproc == code == 1 and saved:
        assert_goes_on(start(save_every=every), whole, saved[-1])


@pytest.mark.parametrize("number, seconds, code, saved", [
    (signal.SIGTERM, 0.9, 1, [2, 4]),  # a launcher tells each process twice
    (signal.SIGTERM, 1.1, -signal.SIGTERM, [2]),
    (signal.SIGINT, 0.0, -signal.SIGINT, [2])])
def test_a_second_signal_in_a_save_ends_the_run_unless_it_is_the_first_ones_echo(
    start, whole, number, seconds, code, saved
):
    """Either way it goes on from a whole checkpoint."""
    run = start(save_every=2, fault=partial(told_again_in_a_save, number, seconds))
    assert run.wait() == [code] and run.err() == "", run.err()
    assert run.saved() == saved
    said = "stopped by a signal; go on by --run_id x --resume auto\n"
    assert run.log().count(said) == (code == 1)
    assert_goes_on(start(save_every=2), whole, saved[-1])
    assert not list(run.folder.glob("*.tmp"))


def test_two_ranks_resume_as_two_or_one(start, whole, tmp_path):
    """Their losses are those of one rank, and they take the checkpoint before a damaged one."""
    first = start(2, save_every=4)
    assert first.wait() == [0, 0], first.err()
    assert first.losses() == pytest.approx(whole.losses(), abs=1.1e-4)  # of four decimals
    validated = [re.findall(r" val_loss:(\S+)", run.log()) for run in (first, whole)]
    of_two, of_one = ([float(loss) for loss in losses] for losses in validated)
    assert len(of_two) > 3 and of_two == pytest.approx(of_one, abs=1.1e-4)
    assert first.out(0) and not first.out(1)
    expected = first.state(STEPS)["model"]
    newest = first.folder / f"step-{STEPS:06d}.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    for nproc in (2, 1):
        shutil.copytree(first.folder, (cwd := tmp_path / str(nproc)) / "logs" / "x")
        run = start(nproc, cwd=cwd)
        assert run.wait() == [0] * nproc, run.err()
        said = "".join(map(run.err, range(nproc)))  # by one rank
        assert re.fullmatch(f"skipped .*{newest.name}: no whole checkpoint.*\n", said)
        assert "resumed at step:8 from logs/x/step-000008.pt" in run.out()
        rtol = 0 if nproc == 2 else 1e-5  # fewer ranks sum in another order
        for name, weight in run.state(STEPS)["model"].items():
            torch.testing.assert_close(weight, expected[name], rtol=rtol, atol=rtol)


def test_a_rank_told_to_stop_because_another_died_does_not_hang(start):
    run = start(2, partial(killed_beside, 4), save_every=2)
    codes = run.wait()
    assert codes[0] != 0 and codes[1] == -signal.SIGKILL
    assert run.saved() == [2, 4]
    assert re.fullmatch(r".*: error: rank 0: another rank has ended, .*\n", run.err()), run.err()


def test_each_rank_says_its_own_error_and_one_what_all_would_say(start):
    run = start(2, partial(at_step, 5, 1, out_of_memory))
    assert run.wait() == [2, 2]
    assert run.err(1).startswith("train_gpt.py: error: rank 1: out of memory; raise --head")
    assert "rank 0: another rank has ended" in run.err(0) and run.err(0).count("\n") == 1
    run = start(2, partial(at_step, 5, 1, minus_infinity), save_every=2)
    assert run.wait() == [2, 2]
    assert re.fullmatch(r"train_gpt.py: error: step:6/10 train_loss:-inf; lower.*\n", run.err())
    assert run.err(1) == "" and run.saved() == [2, 4] and "---" not in run.log()


@pytest.mark.slow
@pytest.mark.parametrize("size, named", [(200_000, "step-000004.pt"), (90_000, "log.txt")])
def test_a_run_goes_on_once_a_full_disk_has_room(start, whole, size, named):
    run = start(fault=partial(at_step, 3, 0, partial(fill_disk, size)), save_every=2)
    assert run.wait() == [2] and run.err().count("\n") == 1
    assert not list(run.folder.glob("*.tmp"))
    assert f"{named}: not written ([Errno 27] File too large); make room" in run.err()
    assert_goes_on(start(save_every=2), whole, 2)


@pytest.mark.slow
def test_torchrun_restarts_after_a_killed_worker(tmp_path, files):
    """As the page says: the rank that comes first must not find its dead peer in a store."""
    # Python imports it before the script. Once restarted, rank 0 comes first.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('RANK') == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':\n"
        "    time.sleep(3)\n")
    flags = MODEL | files | dict(num_iterations=200, save_every=10)
    variables = {"PYTHONPATH": str(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun_options(2),
               "--max-restarts=2", train_gpt.SCRIPT, *to_argv(flags)]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL,
                               env=os.environ | variables)
    run, log = Run(tmp_path), tmp_path / "logs" / "x" / "log.txt"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    try:
        while not (log.exists() and "step:15/" in run.log()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(int(children.read_text().split()[1]), signal.SIGKILL)
        assert process.wait(timeout=120) == 0
    finally:
        process.terminate()  # it ends its workers
        process.wait()
    (step,) = re.findall(r"resumed at step:(\d+)", run.log())
    assert int(step) >= 10 and run.saved()[-1] == 200
