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
    (IDLE, 8, 8, {"pod/cpu.max": "150000 100000", "cpu.max": "265000 100000"}, 1)])
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


@pytest.mark.parametrize("stat", ["", "cpu  0 0 0 0 0\n", "intr 5\n"])
def test_where_a_system_does_not_tell_its_idle_time_torch_chooses(system, stat):
    """As on macOS, which has no such file, and in gVisor, whose numbers are zeros."""
    system({"proc/stat": stat} if stat else {})
    assert machine.count_threads() is None


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


# ---- Packages ----


def install(folder, name, version):
    """A package as pip leaves it, or without a version, as where pip was killed."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    if version:
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository that asks for a package, which this Python lacks, and how its set-up goes."""
    (tmp_path / "asks.txt").write_text("of-a-test>=1.2\nother; sys_platform == \"linux\"\n")
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    venv = tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setattr(machine, "REPO", tmp_path)
    monkeypatch.setattr(machine, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(machine, "VENV_PYTHON", venv)
    monkeypatch.setattr(machine, "SYSTEM", tmp_path)
    monkeypatch.setattr(machine, "start_anew", lambda python: tried.append("anew"))
    monkeypatch.setattr(machine, "check_driver", lambda: tried.append("driver"))
    tried = []
    return SimpleNamespace(folder=tmp_path, venv=venv, tried=tried)


@pytest.mark.parametrize(("torch", "other", "whole"), [
    ("2.11.0+cpu", "1.2", True), ("2.13.0+cu130", "1.10.1", True),
    ("2.10.1", "1.2", False), ("2.13.0", "1.1.9", False), ("2.13.0", None, False),
    ("2.13.0", "", False)])
def test_any_torch_from_the_oldest_on_will_do(project, monkeypatch, torch, other, whole):
    folder = project.folder / "packages"
    monkeypatch.syspath_prepend(folder)
    install(folder, "torch", torch)
    if other is not None:
        install(folder, "of_a_test", other)
    assert machine.has_packages(["requirements.txt", "asks.txt"]) == whole


# What stands for the Python of .venv: it notes its words, and answers as it is told
FAKE = """#!/bin/sh
echo "$*" >>{folder}/calls
case "$*" in
    *machine.py*) [ -e {folder}/installed ] ;;
    *ensurepip*|*--version*) {pip} ;;
    *index-url*) {cpu_builds} ;;
    *requirement=*) {index} && touch {folder}/installed ;;
esac
"""


@pytest.fixture
def fake(project, monkeypatch):
    """`fake(name=command)` puts a .venv there whose pip ends as these commands of a shell."""

    def make(pip="true", cpu_builds="true", index="true"):
        project.venv.parent.mkdir(parents=True, exist_ok=True)
        words = dict(pip=pip, cpu_builds=cpu_builds, index=index)
        project.venv.write_text(FAKE.format(folder=project.folder, **words))
        project.venv.chmod(0o755)
        return lambda: (project.folder / "calls").read_text().splitlines()

    monkeypatch.setenv("PATH", f"{project.folder}:/usr/bin:/bin")
    return make


def test_a_venv_that_has_the_packages_is_taken(project, fake):
    calls = fake()
    (project.folder / "installed").touch()
    machine.set_up(["asks.txt"])
    assert project.tried[0] == "anew"
    assert not any("pip" in call for call in calls())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has no CUDA")
@pytest.mark.parametrize("gpu", [False, True])
def test_what_is_missing_is_installed_in_the_venv_that_is_there(project, fake, capfd, gpu):
    """A person's, too, in which nothing is removed. CUDA's libraries come only where a GPU is."""
    calls = fake()
    (project.venv.parent / "mine").touch()
    if gpu:
        (project.folder / "dev").mkdir()
        (project.folder / "dev" / "nvidiactl").touch()
    machine.set_up(["asks.txt"], on_gpu=gpu)
    installed = [call for call in calls() if "install " in call]
    assert installed.pop().endswith(f" --requirement={project.folder}/asks.txt")
    of_torch = f"-m pip install --no-deps torch==2.13.0 --index-url {machine.CPU_BUILDS}"
    assert installed == ([] if gpu else [of_torch])
    assert project.tried == ["driver"] * gpu + ["anew"]
    assert (project.venv.parent / "mine").exists()
    assert "setting up" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has no CUDA")
def test_where_there_are_no_builds_for_cpus_the_index_has_one(project, fake, capfd):
    fake(cpu_builds="false")
    machine.set_up(["asks.txt"])
    assert "no torch from https://download.pytorch.org" in capfd.readouterr().err
    assert project.tried == ["anew"]


def test_what_failed_is_named_by_its_command_and_the_next_call_goes_on(project, fake, capfd):
    fake(index="echo no network >&2; false")
    with pytest.raises(machine.MachineError, match=r"bin/python -m pip install .*/asks.txt "
                                                   r"failed \(1\): mend what it says"):
        machine.set_up(["asks.txt"])
    assert "no network" in capfd.readouterr().err and not project.tried
    fake()
    machine.set_up(["asks.txt"])
    assert project.tried == ["anew"]


def test_uv_installs_where_python_has_no_pip_to_give(project, fake):
    fake(pip="false")
    with pytest.raises(machine.MachineError, match="uv pip install .* failed .no such program"):
        machine.set_up(["asks.txt"])
    uv = project.folder / "uv"
    uv.write_text(f"#!/bin/sh\ncd {project.folder}; touch installed; echo $* >>uvs\n")
    uv.chmod(0o755)
    machine.set_up(["asks.txt"])
    assert project.tried == ["anew"]
    assert f"pip install --python {project.venv}" in (project.folder / "uvs").read_text()


def test_an_old_python_of_a_venv_is_told(project, fake):
    fake()
    project.venv.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(machine.MachineError, match="is not Python 3.11 or newer: move .*venv away"):
        machine.set_up(["asks.txt"])
