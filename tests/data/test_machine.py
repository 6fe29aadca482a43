"""data/machine.py: threads for the CPU, and what a machine with GPUs lacks."""

import errno
import os
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import machine
import pytest


@pytest.fixture
def system(tmp_path, monkeypatch):
    """`system(files)` makes a system of these files."""
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


IDLE = 160  # hundredths of a second in 0.2 s, of eight cores


@pytest.mark.skipif(sys.platform != "linux", reason="macOS leaves the number to torch")
@pytest.mark.parametrize(("idle", "cpus", "cores", "quotas", "threads"), [
    (0, 8, 4, {}, 1),
    (31, 8, 4, {}, 2),
    (IDLE, 2, 4, {}, 2),
    (IDLE, 16, 0, {}, 8),  # where Linux does not tell the cores
    (IDLE, 8, 8, {"pod/cpu.max": "max 100000", "cpu.max": "265000 100000"}, 2),
    (IDLE, 8, 8, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    (IDLE, 8, 8, {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    (IDLE, 8, 8, {"cpu/pod/cpu.cfs_quota_us": "100000", "cpu/pod/cpu.cfs_period_us": "100000"},
     1)])
def test_threads_are_as_many_as_cores_are_idle_and_no_more_than_the_quota(
    system, monkeypatch, idle, cpus, cores, quotas, threads
):
    """By the CPUs of the process, cores of two threads, and files of the control groups."""
    stat = "cpu  11 22 33 {} 44\ncpu0 1 2 3 4 5\n"
    system({"proc/stat": stat.format(70000),
            "proc/self/cgroup": "1:name=x:/y\n4:cpu,cpuacct:/pod/a\n0::/pod\n"})
    system({f"sys/fs/cgroup/{name}": text + "\n" for name, text in quotas.items()})
    system({f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list":
            f"{cpu % cores},{cpu % cores + cores}\n" for cpu in range(2 * cores)})
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cpus)))
    monkeypatch.setattr("time.sleep", lambda _: system({"proc/stat": stat.format(70000 + idle)}))
    assert machine.count_threads() == threads


@pytest.mark.parametrize(("capabilities", "told"), [
    ("7.5", True), ("7.5\n8.0", False), ("12.0", False), ("[N/A]", False)])
def test_gpus_that_cannot_run_the_model_are_told_before_anything_is_fetched(
    system, monkeypatch, tmp_path, capabilities, told
):
    system({"nvidia-smi": "#!/bin/sh\ncase $1 in *cap) printf '%s\\n' \"$CAPABILITIES\";; esac\n"})
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CAPABILITIES", capabilities)
    if told:
        with pytest.raises(machine.MachineError, match="capability 7.5, and .* 8.0 or newer"):
            machine.check_driver()
    else:
        machine.check_driver()


def test_what_a_gpu_needs_is_told_with_its_remedy(system, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    with pytest.raises(machine.MachineError, match="Python.h, which Triton needs: install python3"):
        machine.check_compiler()
    system({"Python.h": "", "dev/shm/x": ""})
    machine.check_compiler()
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(machine.MachineError, match="no C compiler.* install gcc, or set CC"):
        machine.check_compiler()
    sizes = []
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=sizes[-1] << 20))
    for mib, ranks in (64, 1), (65, 2):
        sizes.append(mib)
        machine.check_shared_memory(ranks)
    sizes.append(64)
    with pytest.raises(machine.MachineError, match="has 64 MiB.*--shm-size=1g"):
        machine.check_shared_memory(2)


def test_a_file_system_without_locks_is_used_as_it_is(tmp_path, monkeypatch):
    flock = Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))
    monkeypatch.setattr(machine.fcntl, "flock", flock)
    with open(tmp_path / "lock", "w") as file:
        machine.lock(file.fileno(), "writes here")
    flock.assert_called_once()


def test_a_package_without_its_files_is_not_there(tmp_path, monkeypatch):
    """As where a person has removed them, which pip does not notice."""
    monkeypatch.syspath_prepend(tmp_path)
    assert machine.find_version("of-a-test") is None
    code, info = tmp_path / "of_a_test" / "__init__.py", tmp_path / "of_a_test-1.2.dist-info"
    for folder in code.parent, info:
        folder.mkdir()
    code.touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: of-a-test\nVersion: 1.2\n")
    (info / "RECORD").write_text("of_a_test/__init__.py,,\n")
    assert machine.find_version("of-a-test") == "1.2"
    (tmp_path / "requirements.txt").write_text("of-a-test>=1.2\n")
    assert machine.has_packages("2.11", [tmp_path / "requirements.txt"])
    code.unlink()
    assert machine.find_version("of-a-test") is None
    assert not machine.has_packages("2.11", [tmp_path / "requirements.txt"])
