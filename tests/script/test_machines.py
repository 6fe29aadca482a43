"""The script on machines as people have them: what it says of them, and what it can do without."""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny_runs
import torch
from conftest import REPO, final_values
from tiny_runs import FLAGS, to_argv

import train_gpt
from train_gpt import UserError, check_gpu_machine, check_launcher, count_gpus

run, data_flags = tiny_runs.run, tiny_runs.data_flags  # fixtures

# Imports the script, fails where that did more than import modules, then runs it. What torch itself
# opens while it is imported is out of sight: it is there already.
PROCESS = """
import os, sys, signal
import numpy, torch, torch.utils.checkpoint, torch.nn.attention.flex_attention
import torch.distributed as dist
events, handlers = [], [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
sys.addaudithook(lambda event, args: events.append((event, str(args[:1]))))
import train_gpt
did = [event for event in events if event[0].startswith(("socket.", "subprocess."))]
did += [event for event in events if event[0] == "open" and ".py" not in event[1]]
assert not did, did
assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules)  # seconds of CPU
assert not dist.is_initialized() and not torch.cuda.is_initialized()
assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
assert os.listdir() == [], os.listdir()
sys.exit(train_gpt.main())
"""


def test_an_import_does_nothing_and_a_run_needs_no_utf8_and_no_home(data_flags, tmp_path):
    """Its peak of memory is its own, not that of a larger process which started it."""
    (tmp_path / "cwd").mkdir()
    variables = dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", HOME="",
                     PYTHONPATH=str(REPO), PYTHONDONTWRITEBYTECODE="1")
    larger = torch.ones(2**28)  # 1 GiB
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *to_argv(FLAGS | data_flags)], cwd=tmp_path / "cwd",
        env=os.environ | variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert larger.numel() and 100 < int(final_values(done.stdout)["peak_memory_mib"]) < 1024


def test_ranks_that_cannot_find_each_other_are_told_before_they_wait(monkeypatch):
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
    monkeypatch.setenv("MASTER_ADDR", "pod-17")
    monkeypatch.delenv("RANK", raising=False)
    check_launcher(world_size=1)
    with pytest.raises(UserError, match="MASTER_ADDR pod-17: .*not known.*--local-addr=127.0.0.1"):
        check_launcher(world_size=2)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(UserError, match="srun started 8 tasks"):
        check_launcher(world_size=1)


@pytest.mark.parametrize("count", [8, 0])
def test_what_keeps_cuda_from_starting_is_told_in_its_own_words(monkeypatch, count):
    """Also where torch counts no GPUs, unless they are hidden by who started it."""
    said = "The NVIDIA driver on your system is too old"
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda p: str(p) == "/dev/nvidiactl" or exists(p))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(said)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=f"CUDA does not start: {said}; --device cpu"):
        count_gpus("auto")
    assert count_gpus("cpu") == 0
    if not count:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert count_gpus("auto") == 0


def test_what_a_gpus_compiler_or_nccl_lack_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26))
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: str(tmp_path))
    with pytest.raises(UserError, match=f"{tmp_path}/Python.h: not there"):
        check_gpu_machine(1)
    (tmp_path / "Python.h").touch()
    check_gpu_machine(1)
    with pytest.raises(UserError, match="--shm-size=1g"):
        check_gpu_machine(2)
    monkeypatch.delenv("CC")
    with pytest.raises(UserError, match="no C compiler"):
        check_gpu_machine(1)


def test_a_smaller_card_takes_the_head_in_chunks(monkeypatch):
    for memory_gb, chunks in ((84, 1), (41.5, 2), (16, 8)):
        properties = SimpleNamespace(total_memory=int(memory_gb * 1e9))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        assert train_gpt.default_head_chunks(torch.device("cuda", 0)) == chunks


def test_a_file_system_without_locks_is_trained_on_and_named(run, monkeypatch):
    error = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
    done = run(num_iterations=1, val_every=0)
    assert done.code == 0 and done.log.count(f"no lock ({error}") == 1
