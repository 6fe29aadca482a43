"""The script on machines as people have them: what it says of them, and what it can do without."""

import errno
import fcntl
import os
import platform
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_runs
import torch
from rank_processes import start_run
from tiny_runs import FLAGS, to_argv

import train_gpt
from train_gpt import UserError, check_gpu_machine, check_launcher, count_gpus, machine_facts

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells")


# ---- Launchers ----


def test_a_name_that_does_not_resolve_is_told_before_ranks_wait(monkeypatch):
    def resolve(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("MASTER_ADDR", "pod-17")
    check_launcher(world_size=1)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    check_launcher(world_size=1)
    with pytest.raises(UserError, match="MASTER_ADDR pod-17: .*not known.*--local-addr=127.0.0.1"):
        check_launcher(world_size=2)


def test_tasks_of_srun_do_not_each_train_alone(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="srun started 8 tasks"):
        check_launcher(world_size=1)
    monkeypatch.setenv("RANK", "0")  # of torchrun
    check_launcher(world_size=1)


# ---- GPUs that cannot start ----


TOO_OLD = "The NVIDIA driver on your system is too old (found version 12060)."
NOT_UP = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"


@pytest.fixture
def cuda(monkeypatch):
    """`cuda(count, words)`: torch counts so many GPUs, and CUDA starts or says these words."""
    def make(count, words=""):
        def init():
            if words:
                raise RuntimeError(words)

        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.version, "cuda", "13.0")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return make


@pytest.mark.parametrize(("count", "words"), [(8, TOO_OLD), (8, NOT_UP), (0, NOT_UP)])
def test_what_keeps_cuda_from_starting_is_told_in_its_own_words(cuda, monkeypatch, count, words):
    cuda(count, words)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda p: str(p) == "/dev/nvidiactl" or exists(p))
    with pytest.raises(UserError, match=f"CUDA does not start: {re.escape(words)}; --device cpu"):
        count_gpus("auto")
    assert count_gpus("cpu") == 0
    if not count:  # hidden by who started it, or none there
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert count_gpus("auto") == 0


def test_gpus_that_start_are_counted(cuda):
    cuda(4)
    assert count_gpus("auto") == 4


@pytest.mark.parametrize(("ranks", "lacks", "said"), [
    (2, None, ""),
    (1, "compiler", "no C compiler"),
    (1, "headers", "/none/Python.h: not there"),
    (1, "memory", ""),
    (2, "memory", "--shm-size=1g")])
def test_what_a_gpus_compiler_or_nccl_lack_is_told_in_one_line(monkeypatch, tmp_path, ranks, lacks,
                                                              said):
    (tmp_path / "Python.h").touch()
    folder = "/none" if lacks == "headers" else str(tmp_path)
    memory = 2**26 if lacks == "memory" else 2**30
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which",
                        lambda name: name == "clang" and lacks != "compiler" or None)
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=memory))
    if not said:
        return check_gpu_machine(ranks)
    with pytest.raises(UserError, match=said):
        check_gpu_machine(ranks)


# ---- What the log tells ----


@LINUX
def test_the_log_names_the_cpu(monkeypatch):
    cpu = torch.device("cpu")
    kind = f" ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1] for line in file if line.startswith("model name")]
    if names:
        assert machine_facts(cpu)["device"] == " ".join(names[0].split()) + kind
    monkeypatch.setattr(Path, "read_text", lambda path: "processor\t: 0\nBogoMIPS\t: 243.75\n")
    monkeypatch.setattr(platform, "processor", lambda: "aarch64")
    assert machine_facts(cpu)["device"] == "aarch64" + kind


@LINUX
def test_peak_memory_is_this_process_s_own():
    """Not that of a larger one which started it, and not what it holds at its end."""
    code = ("import torch, train_gpt; x = torch.ones(2**26); del x;"
            "print(train_gpt.peak_memory_mib(torch.device('cpu')))")
    larger = torch.ones(2**28)  # 1 GiB
    printed = subprocess.check_output([sys.executable, "-c", code], text=True,
                                      cwd=train_gpt.SCRIPT.parent)
    assert larger.numel() and 256 < int(printed) < 1024


# ---- Locks, terminals, threads ----


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_trained_on_and_named(run, monkeypatch, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    done = run(num_iterations=1, val_every=0)
    assert done.code == 0
    assert done.log.count(f"no lock ([Errno {number}]") == 1
    assert done.values["steps"] == "1"


@LINUX
@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_ends_a_run_at_a_save(tmp_path, data_flags, ignored):
    """The process leads the session of a terminal, whose other end is closed. Under nohup, which
    ignores the signal, the run goes on to its end, though it cannot print any more."""
    steps = 60 if ignored else 100_000
    flags = FLAGS | data_flags | dict(save_every=2, num_iterations=steps, val_every=0)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, str(train_gpt.SCRIPT), *to_argv(flags)])
    said = b""
    try:
        while b"piece(s)" not in said and b"chunk(s)" not in said:
            said += os.read(terminal, 1000)
        log = tmp_path / "logs" / "x" / "log.txt"
        while " train_loss:" not in log.read_text().rpartition("=" * 100)[2]:
            pass
    finally:
        os.close(terminal)
    status = os.waitpid(pid, 0)[1]
    text = log.read_text().rpartition("=" * 100)[2]
    assert os.waitstatus_to_exitcode(status) == (0 if ignored else 1), text
    assert ("stopped by a signal" in text) != ignored and ("val_loss: " in text) == ignored
    assert list(log.parent.glob("step-*.pt"))


def note_threads(rank):
    """Have main() leave in a file the names of the threads that are alive at its end.

    A rank that fails may end while another still connects to it, which then has no group to end.
    With torch's barrier none goes on before all are connected.
    """
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    main = train_gpt.main

    def main_then_note(argv):
        code = main(argv)
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        Path(f"threads-{rank}").write_text("".join(names))
        return code

    train_gpt.main = main_then_note


@LINUX
@pytest.mark.parametrize("val_tokens", [700, 100_000])
def test_threads_of_the_process_group_end_with_the_run(tmp_path, data_flags, val_tokens):
    """Also after an error, as where there are fewer tokens. One that lived on would give back its
    last tensor to a Python that has ended, which aborts the process after a whole run."""
    flags = FLAGS | data_flags | dict(val_tokens=val_tokens)
    run = start_run(tmp_path, to_argv(flags), nproc=2, fault=note_threads)
    assert run.wait() == 2 * [0 if val_tokens == 700 else 2], run.err()
    for rank in range(2):
        assert "gloo" not in (tmp_path / f"threads-{rank}").read_text()
