"""run.sh on machines as people have them. As in test_run_sh.py, nothing is installed or trained."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_run_sh
from conftest import REPO
from test_run_sh import write

fake = test_run_sh.fake  # a fixture


# ---- What is told before gigabytes are fetched ----


GPU_MACHINES = [  # nvidia-smi's driver, programs of the PATH, the headers' folder, what is said
    ("550.54.15", "gcc", "", ["550.54.15", "580 or newer"]),
    ("580.65.06", "clang", "", None),
    ("600.1", "gcc", "", None),
    ("580.65.06", "", "", ["no C compiler", "install gcc"]),
    ("580.65.06", "gcc", "/no/headers", ["no /no/headers/Python.h", "python3-dev"])]


@pytest.mark.parametrize(("driver", "compiler", "headers", "said"), GPU_MACHINES)
def test_what_a_gpu_lacks_is_told_before_the_set_up(fake, driver, compiler, headers, said):
    programs = fake.folder / "programs"  # all that there are
    for name in """awk bash cat cmp cp dirname env grep head ls nproc readlink rm sed sleep sort
                tail uname wc""".split():
        write(programs / name, f'#!/bin/sh\nexec {shutil.which(name)} "$@"\n')
    write(programs / "nvidia-smi", f"#!/bin/sh\necho {driver}\necho {driver}\n")
    if compiler:
        write(programs / compiler, "#!/bin/sh\n")
    python = (fake.stubs / "bin" / "python").read_text()
    if headers:  # in place of those that the real one names
        answer = f"'sysconfig' in words[-1] and sys.exit(print('{headers}'))\n"
        python = python.replace("asks =", answer + "asks =")
    write(programs / "python", python)
    fake.set_torch("2.10.1")
    fake.plan("1 1 1 8")
    env = dict(PATH=str(programs), CC="")
    if said:
        errors = fake.run(code=2, **env).stderr
        assert all(part in errors for part in said) and errors.count("\n") == 1
        assert not fake.calls
        fake.set_torch("2.13.0")  # which is there: CUDA itself is asked by the plan
    fake.run(**env)
    assert fake.calls[-1][-1] == "train_gpt.py"
    fake.set_torch("2.10.1")
    fake.plan("1 1 1 8")
    fake.run("--device", "cpu", "--preset", "pocket", **env)
    assert fake.calls[-1][-4:] == ["--device", "cpu", "--preset", "pocket"]


@pytest.mark.parametrize(("words", "said"), [
    ("The virtual environment was not created as ensurepip is not\navailable.\n\nFailing command",
     "install its venv module"),
    ("Error: [Errno 30] Read-only file system: '/a clone/.venv'", "Read-only file system")])
def test_a_venv_that_cannot_be_made_has_its_own_reason(fake, words, said):
    write(fake.folder / "words", words)
    python = (fake.stubs / "bin" / "python").read_text()
    write(fake.stubs / "bin" / "python", python.replace(
        "asks =", f"'venv' in words and sys.exit(open({str(fake.folder / 'words')!r}).read())\n"
                  "asks ="))
    shutil.rmtree(fake.root / ".venv")
    fake.set_torch("2.10.1")
    errors = fake.run(code=2).stderr
    assert said in errors.splitlines()[-1]
    assert ("venv module" in errors) == ("venv module" in said)


def test_pip_installs_into_the_venv_where_its_settings_say_user(fake):
    fake.set_torch("2.10.1")
    fake.run(PIP_USER="1")
    assert fake.variables()["PIP_USER"] == "0"


# ---- Shells, line ends, quotas ----


@pytest.mark.parametrize("shell", ["sh", "dash", "bash --posix"])
def test_any_shell_goes_on_in_bash(fake, shell):
    if not shutil.which(shell.split()[0]):
        pytest.skip(f"no {shell}")
    run = subprocess.run([*shell.split(), fake.root / "run.sh", "--seed", "3"],
                         capture_output=True, **fake.environment({}))
    assert run.returncode == 0, run.stderr
    assert (fake.folder / "calls").read_text().endswith('"--seed", "3"]\n')


def test_a_clone_has_no_line_ends_of_windows(tmp_path):
    git = ["git", "-c", "core.autocrlf=true", "-c", "user.name=x", "-c", "user.email=x@x"]
    shutil.copy(REPO / ".gitattributes", tmp_path)
    shutil.copy(REPO / "run.sh", tmp_path)
    (tmp_path / "a.txt").write_text("a\nb\n")
    subprocess.run([*git, "init", "-q", tmp_path], check=True)
    subprocess.run([*git, "-C", tmp_path, "add", "."], check=True)
    for name in "run.sh", "a.txt":
        (tmp_path / name).unlink()
    subprocess.run([*git, "-C", tmp_path, "checkout", "-q", "."], check=True)
    assert b"\r" not in (tmp_path / "run.sh").read_bytes() + (tmp_path / "a.txt").read_bytes()


IDLE = 160  # hundredths of a second in 0.2 s, of eight cores
THREADS = [  # of them, CPUs of the process, cores, files of the control groups, the threads
    (29, 8, 4, {}, 1), (31, 8, 4, {}, 2), (IDLE, 8, 4, {}, 4), (IDLE, 2, 4, {}, 2),
    (45, 8, 0, {}, 2),  # where Linux does not tell the cores
    (IDLE, 8, 8, {"cpu.max": "max 100000"}, 8),
    (IDLE, 8, 8, {"cpu.max": "765000 100000"}, 7),
    (IDLE, 8, 8, {"cpu.max": "50000 100000"}, 1),
    (IDLE, 8, 8, {"pod/cpu.max": "max 100000", "cpu.max": "200000 100000"}, 2),
    (IDLE, 8, 8, {"pod/cpu.max": "300000 100000"}, 3),
    (IDLE, 8, 8, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    (IDLE, 8, 8, {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2)]


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="not Linux")
@pytest.mark.parametrize(("idle", "cpus", "cores", "groups", "threads"), THREADS)
def test_threads_are_as_many_as_cores_are_idle_and_no_more_than_the_quota(
    fake, idle, cpus, cores, groups, threads
):
    for name, ticks in ("before", 70_000), ("after", 70_000 + idle):
        write(fake.stubs / name, f"cpu  11 22 33 {ticks} 44\ncpu0 1 2 3 4 5\n")
    write(fake.stubs / "siblings", "".join(f"{core},{core + cores}\n" * 2 for core in range(cores)))
    write(fake.stubs / "cgroup", "0::/pod\n" if "pod/cpu.max" in groups else "0::/\n")
    for name, text in groups.items():
        write(fake.stubs / "groups" / name, text + "\n")
    awk, cat, sort = map(shutil.which, ("awk", "cat", "sort"))
    programs = {
        "awk": f'exec {awk} "$1" "$STUBS/before" "$STUBS/after"',
        "cat": f"""case $1 in
            /proc/self/cgroup) exec {cat} "$STUBS/cgroup" ;;
            /sys/fs/cgroup/*) exec {cat} "$STUBS/groups/${{1#/sys/fs/cgroup/}}" ;;
            esac; exec {cat} "$@\"""",
        "sort": f'case $* in "-u "*/thread_siblings_list) set -- -u "$STUBS/siblings" ;; esac\n'
                f'exec {sort} "$@"',
        "nproc": f"echo {cpus}"}
    for name, text in programs.items():
        write(fake.stubs / "bin" / name, f"#!/bin/sh\n{text}\n")
    fake.run(OMP_NUM_THREADS="")
    assert fake.variables()["OMP_NUM_THREADS"] == str(threads)


# ---- Signals ----


# In the launcher, a signal comes when the first rank is started and torchrun has not noted it yet.
SIGNAL_WHILE_STARTING = """
import os, signal, subprocess, sys
if "--standalone" in sys.argv:
    start = subprocess.Popen.__init__
    def start_and_signal(self, args, **options):
        start(self, args, **options)
        if options.get("start_new_session"):
            open(os.environ["CALLS"] + ".rank", "w").write(str(self.pid))
            os.kill(os.getpid(), signal.SIGTERM)
    subprocess.Popen.__init__ = start_and_signal
"""


def is_alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="torchrun's ranks are for CUDA")
def test_a_signal_that_meets_torchrun_while_it_starts_leaves_no_rank(fake):
    fake.plan("2 2 2 8")
    write(fake.stubs / "sitecustomize.py", SIGNAL_WHILE_STARTING)
    run = subprocess.run([fake.root / "run.sh"], capture_output=True, timeout=60,
                         **fake.environment({"RANKS": "2"}))
    assert run.returncode == 128 + signal.SIGTERM, run.stderr
    rank = int((fake.folder / "calls.rank").read_text())
    deadline = time.monotonic() + 10
    while is_alive(rank) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(rank)


@pytest.mark.skipif(sys.platform != "linux", reason="torchrun's ranks are for CUDA")
def test_under_nohup_a_closed_terminal_does_not_end_the_ranks(fake):
    fake.plan("2 2 2 8")
    run = subprocess.Popen(["nohup", fake.root / "run.sh"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, **fake.environment({"RANKS": "2"}))
    try:
        assert [run.stdout.readline() for _ in range(2)] == ["a rank waits\n"] * 2
        run.send_signal(signal.SIGHUP)
        time.sleep(1.5)  # torchrun looks once a second
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 128 + signal.SIGTERM
