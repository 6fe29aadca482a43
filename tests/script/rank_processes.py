"""Runs of which each rank is a process, forked from a server that has imported torch once."""

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import re
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import PATIENCE
from tiny_runs import to_argv

import train_gpt

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["test_processes", "torch._dynamo"])  # a step imports the latter
THREADS_LEFT = 70  # an exit code of these tests alone


class Run:
    """The ranks of a run named x: `wait` for them, then read what they did."""

    def __init__(self, cwd):
        self.cwd = cwd
        self.processes = []
        self.folder = cwd / "logs" / "x"

    def wait(self, timeout=PATIENCE):
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

    def losses(self):
        """Those of training, as the log has them."""
        return [float(loss) for loss in re.findall(r" train_loss:(\S+) ", self.log())]

    def state(self, step):
        return torch.load(self.folder / f"step-{step:06d}.pt", weights_only=True)

    def saved(self):
        """Steps of the checkpoints that are there."""
        return sorted(int(path.stem[5:]) for path in self.folder.glob("step-*.pt"))


def start_run(cwd, flags, nproc=1, fault=None):
    """Start main() on so many ranks. Each calls `fault(rank)`, of a test's file, before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the tests and the script
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns where there is no network
        multiprocessing.forkserver.ensure_running()
    store = f"file://{cwd}/store-{uuid.uuid4()}"  # where ranks meet; a port might be taken
    argv = to_argv(flags | dict(run_id="x"))
    run = Run(cwd)
    for rank in range(nproc):
        process = FORKS.Process(target=run_rank, args=(rank, nproc, store, cwd, argv, fault))
        process.start()
        run.processes.append(process)
    return run


def run_rank(rank, nproc, store, cwd, argv, fault):
    """What the process of a rank does: main(), its output in files, a fault put in its way.

    A thread of the process group must not outlive main(): it would give back its last tensor to a
    Python that has ended, which aborts the process after a whole run. The exit code tells of it.
    """
    os.chdir(cwd)
    for number, name in ((1, f"out-{rank}"), (2, f"err-{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if nproc > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc),
                          MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo",
                          TORCH_DIST_INIT_BARRIER="1")  # none goes on before all are connected
        torch.distributed.init_process_group = partial(
            torch.distributed.init_process_group, init_method=store, rank=rank, world_size=nproc)
    torch.set_num_threads(1)
    gc.freeze()  # the run's search for cycles leaves out what is imported

    if fault:
        fault(rank)
    code = train_gpt.main(argv)
    for thread in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if "gloo" in thread.read_text():
                code = THREADS_LEFT
    sys.exit(code)


def at_each_step(action):
    """Call `action(step, losses)` once a step's gradients are there, before its update."""
    exchange = train_gpt.Run.exchange_losses

    def exchange_after_action(run, step, losses):
        action(step, losses)
        return exchange(run, step, losses)

    train_gpt.Run.exchange_losses = exchange_after_action
