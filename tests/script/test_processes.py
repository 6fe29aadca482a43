"""Runs whose ranks are processes of their own: several ranks, terminals, daemons, torchrun.

A fault is a function of this file that a rank calls before main() to put something in its way.
"""

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from functools import partial
from pathlib import Path

import pytest
import test_survival
import torch
from conftest import PATIENCE
from launch import torchrun_options
from rank_processes import Run, at_each_step, start_run
from test_survival import MODEL, STEPS, assert_goes_on, whole  # noqa: F401 (a fixture)
from tiny_runs import run_main, to_argv

import train_gpt

files = test_survival.files  # a fixture


@pytest.fixture
def start(files, tmp_path, monkeypatch):
    """`start(nproc=1, fault=None, ...)` starts a run in tmp_path; again, it is the same run."""
    monkeypatch.chdir(tmp_path)

    def start(nproc=1, fault=None, cwd=tmp_path, **flags):
        return start_run(cwd, MODEL | files | flags, nproc, fault)

    return start


# Faults, to be bound by `partial` up to the last argument, the rank


def at_step(when, only_rank, action, rank):
    """Call `action()` at one step on one rank, before its update."""
    def act(step, losses):
        if step == when and rank == only_rank:
            action()

    at_each_step(act)


def signalled(step, number, rank=0):
    return partial(at_step, step, rank, partial(send_self, number))


def send_self(number):
    os.kill(os.getpid(), number)


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 1")


def closed_terminal(step, on_hangup, rank):
    """The process leads the session of a terminal, whose other end is closed at this step."""
    os.setsid()
    signal.signal(signal.SIGHUP, on_hangup)
    other_end, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    sys.stdout = os.fdopen(terminal, "w")
    at_step(step, 0, partial(os.close, other_end), rank)


def closed_pipe(rank):
    """Who reads the output has seen enough, as `head`."""
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = os.fdopen(writer, "w")


def killed_beside(step, rank):
    """At a step rank 1 is killed and rank 0 gets a SIGTERM, as from torchrun."""
    signalled(step, signal.SIGKILL, rank=1)(rank)
    signalled(step, signal.SIGTERM)(rank)


def other_flags(words, rank):
    main = train_gpt.main
    if rank:
        train_gpt.main = lambda argv: main([*argv, *words])


def test_two_ranks_stop_together_and_go_on_as_one(start, whole, files):  # noqa: F811
    """A signal to one of them stops both. Their losses are one rank's, but for rounding."""
    two = start(2, signalled(6, signal.SIGTERM, rank=1), save_every=100)
    assert two.wait() == [1, 1], two.err()
    assert two.saved() == [8] and two.out(0) and not two.out(1)
    one = run_main(Path.cwd(), to_argv(MODEL | files | dict(save_every=100)))
    assert one.code == 0 and "\nresumed at step:8 from " in one.log
    losses = [minimised for minimised, _ in whole.losses]
    assert two.losses() == pytest.approx(losses, abs=1.1e-4)  # of four decimals, in one log


@pytest.mark.slow
def test_two_ranks_skip_a_damaged_checkpoint(start, tmp_path):
    first = start(2, save_every=4)
    assert first.wait() == [0, 0], first.err()
    newest = first.folder / f"step-{STEPS:06d}.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    run = start(2)
    assert run.wait() == [0, 0], run.err()
    for rank in range(2):
        assert run.err(rank).startswith(f"skipped logs/x/{newest.name}: no whole checkpoint")
    assert "resumed at step:8 from logs/x/step-000008.pt" in run.out()


@pytest.mark.slow
@pytest.mark.parametrize("fault, named", [
    (partial(other_flags, ["--seed", "5"]), "--seed: rank 0 has 0, rank 1 has 5"),
    (partial(at_step, 5, 1, out_of_memory), None),
    (partial(killed_beside, 4), None)], ids=["differ", "memory", "killed"])
def test_no_rank_hangs_where_another_ends(start, fault, named):
    """Each says its own error, with its rank."""
    two = start(2, fault, save_every=2)
    codes = two.wait()
    if named:
        assert codes == [2, 2] and not two.saved()
        for rank in range(2):
            assert f"error: rank {rank}: ranks differ in {named}" in two.err(rank)
        return
    assert codes[0] == 2 and two.saved() == [2, 4]
    assert re.fullmatch(r".*: error: rank 0: another rank has ended, .*\n", two.err())
    assert "error: another rank has ended" in two.log().splitlines()[-1]
    if codes[1] == 2:
        assert two.err(1).startswith("train_gpt.py: error: rank 1: out of memory; raise --head")


@pytest.mark.slow
@pytest.mark.parametrize("fault, code, saved", [
    (partial(closed_terminal, 5, signal.SIG_DFL), 1, [6]),
    (partial(closed_terminal, 5, signal.SIG_IGN), 0, [STEPS]),
    (closed_pipe, 0, [STEPS])], ids=["terminal", "nohup", "head"])
def test_who_reads_may_go(start, files, whole, fault, code, saved):  # noqa: F811
    run = start(1, fault, save_every=100)
    assert run.wait() == [code] and run.err() == "", run.err()
    assert run.saved() == saved
    if code:
        again = run_main(Path.cwd(), to_argv(MODEL | files | dict(save_every=100)))
        assert_goes_on(again, whole, saved[-1])


@pytest.mark.slow
def test_torchrun_restarts_after_a_killed_worker(tmp_path, files):
    """As the page says: the rank that comes first must not find its dead peer in a store."""
    # Python imports it before the script. Once restarted, rank 0 comes first.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('RANK') == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':\n"
        "    time.sleep(3)\n")
    flags = MODEL | files | dict(num_iterations=200, save_every=10, run_id="x")
    variables = {"PYTHONPATH": str(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *torchrun_options(2),
               "--max-restarts=2", train_gpt.SCRIPT, *to_argv(flags)]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL,
                               env=os.environ | variables)
    run, log = Run(tmp_path), tmp_path / "logs" / "x" / "log.txt"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + PATIENCE
    try:
        while not (log.exists() and "step:15/" in run.log()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(int(children.read_text().split()[1]), signal.SIGKILL)
        assert process.wait(timeout=PATIENCE) == 0
    finally:
        process.terminate()  # it ends its workers
        process.wait()
    (step,) = re.findall(r"resumed at step:(\d+)", run.log())
    assert int(step) >= 10 and run.saved()[-1] == 200
