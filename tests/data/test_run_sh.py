"""run.sh in a copy of the repository where Python only writes down what it is called with.

Nothing is installed, downloaded or trained.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO

# The active Python, and that of .venv. What asks something gets its answer from the real one, but
# for a script's plan, which stands beside the script. Ranks run where RANKS is set.
PYTHON = f"""#!{sys.executable} -IS
import json, os, sys
words = sys.argv[1:]
ranks = "--standalone" in words
asks = words[0] in ("-", "-c") and not ranks
if "sysconfig" in words[-1]:
    sys.exit(print(os.environ["HEADERS"]))
if not asks:
    call = ["torchrun", *words[2:]] if ranks else words
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps([".venv", *call] if ".venv" in __file__ else call) + "\\n")
    with open(os.environ["CALLS"] + ".env", "w") as variables:
        json.dump(dict(os.environ), variables)
if words[0] == "-P":
    sys.exit(print(open(os.environ["PYTHONPATH"].partition(":")[0] + "/plan").read()))
if asks or "RANKS" in os.environ:
    os.execv(sys.executable, [sys.executable, *words])
if "venv" in words or "-r" in words:
    sys.exit(os.environ.get("INSTALL_SAYS"))
print(os.getcwd())
sys.exit(int(os.environ.get(os.path.basename(words[0]).removesuffix(".py"), 0)))
"""
# A rank ends as its flag says, or waits.
RANK = """import os, sys, time
if "--fail" in sys.argv: sys.exit(3)
if "--die" in sys.argv: os.abort()
os.write(1, b"a rank waits\\n")
time.sleep(600)
"""
WIDE = "records/2024-01-01_Wide"
RECORDS = ["2024-01-01_Wide", "2024-01-02_WideHead", "2024-01-03_Twice", "2024-01-04_Twice"]
FILES = {
    "a clone/requirements.txt": "torch==2.13.0\n",
    "a clone/requirements-dev.txt": "-r requirements.txt\n",
    "a clone/train_gpt.py": RANK,
    "a clone/plan": "0 1 0 8\nfineweb.py 8",
    "a clone/records/a_tool.py": "",
    **{f"a clone/records/{name}/train_gpt.py": "" for name in RECORDS},
    "a clone/.venv/bin/python": PYTHON,
    "stubs/bin/python": PYTHON,
    "stubs/bin/python3.9": '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.6',
    "else where/notes": ""}
POCKET = "--preset pocket --save_every 120".split()
for_cuda = pytest.mark.skipif(sys.platform != "linux", reason="torchrun's ranks are for CUDA")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class FakeRepo:
    """A repository with run.sh in it, in a path with spaces, and what its last run called."""

    def __init__(self, folder):
        self.folder, self.root, self.stubs = folder, folder / "a clone", folder / "stubs"
        for name, text in FILES.items():
            write(folder / name, text)
        shutil.copy(REPO / "run.sh", self.root)
        self.set_torch("2.13.0")

    def set_torch(self, version):
        """Make `version` the one that the active Python has."""
        write(self.stubs / "torch-0.dist-info" / "METADATA", f"Name: torch\nVersion: {version}\n")

    def plan(self, text, record=""):
        """Make this a machine with GPUs, and `text` what plan.py says of the root or a record."""
        write(self.stubs / "bin" / "nvidia-smi", '#!/bin/sh\necho "$DRIVER"')
        write(self.root / record / "plan", text)

    def environment(self, env):
        """What a run has around it, as arguments of subprocess."""
        calls = self.folder / "calls"
        calls.write_text("")
        env = dict(PATH=f"{self.stubs / 'bin'}:{os.environ['PATH']}", PYTHON="python",
                   PYTHONPATH=self.stubs, CALLS=calls) | env
        return dict(cwd=self.folder / "else where", env=os.environ | env, text=True)

    def run(self, *args, code=0, start=(), **env):
        """Run run.sh from another folder, by `start` or by itself; its exit code is `code`.

        self.calls are what Python was called with, paths from the repository on, and .venv before
        them where it was that one; self.plans are the calls of plan.py, of which a machine without
        GPUs has none; self.variables are the environment of the last call.
        """
        start = start or [self.root / "run.sh"]
        done = subprocess.run([*start, *args], capture_output=True, timeout=60,
                              **self.environment(env))
        assert done.returncode == code, done.stderr
        calls = (self.folder / "calls").read_text().replace(f"{self.root}/", "")
        self.calls, self.plans = [], []
        for call in map(json.loads, calls.splitlines()):
            (self.plans if call[0] == "-P" else self.calls).append(call)
        if self.calls:
            self.variables = json.loads((self.folder / "calls.env").read_text())
        return done


@pytest.fixture
def fake(tmp_path):
    return FakeRepo(tmp_path)


# ---- What is run ----


@pytest.mark.parametrize(("flags", "data", "first"), [
    ("--run_id=ab --val_files x", [["data/pocket.py"]], POCKET),
    ("--preset=pocket --seed 3", [["data/pocket.py"]], []),
    ("--train_files mine/*.bin", [], POCKET),
    ("--run_id x --resume auto", [["data/pocket.py"]], POCKET),
    ("--seed 3 --resume=x.pt", [], [])])  # a checkpoint has its data already
def test_without_a_gpu_it_trains_the_pocket(fake, flags, data, first):
    fake.run(*flags.split(), OMP_NUM_THREADS="7")
    assert fake.calls == [*data, ["train_gpt.py", *first, *flags.split()]]
    assert fake.variables["OMP_NUM_THREADS"] == "7"


def test_on_gpus_it_does_what_the_plan_says(fake):
    data = [["data/prefixes.py"], ["data/fineweb.py", "25"]]
    run = "torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=2 train_gpt.py --stages x"
    fake.plan("3 2 3 16 --stages x\nprefixes.py\nfineweb.py 25")
    said = fake.run("--seed", "3", OMP_NUM_THREADS="", MALLOC_MMAP_MAX_="9").stderr
    assert fake.plans == [["-P", "data/plan.py", "--seed", "3"]]
    assert fake.calls == [*data, [*run.split(), "--seed", "3"]]
    assert "with --stages x, for" in said and "do not compare" in said
    assert "2 of 3 GPUs: a step has 16 sequences" in said
    assert fake.variables["OMP_NUM_THREADS"] == ""  # torch's to choose
    assert int(fake.variables["MALLOC_TRIM_THRESHOLD_"]) >= 2**30
    assert fake.variables["MALLOC_MMAP_MAX_"] == "9"
    fake.run("--resume=x.pt")
    assert fake.calls == [[*run.split(), "--resume=x.pt"]]
    fake.run(prefixes="2", code=2)  # data that cannot be made end the run
    assert fake.calls == data[:1]
    (fake.root / "plan").unlink()  # as with wrong flags
    fake.run(code=1)
    assert not fake.calls
    fake.plan("1 1 1 8 none")
    assert "--preset pocket" in fake.run(code=2).stderr and not fake.calls


def test_words_the_folder_and_the_exit_code_are_handed_on(fake):
    flags = ["--val_files", "two  words", "--run_id=a b"]
    printed = fake.run(*flags, train_gpt="75", code=75).stdout
    assert fake.calls[-1] == ["train_gpt.py", *POCKET, *flags]
    assert printed.splitlines()[-1] == str(fake.folder / "else where")
    fake.run("sample", "--prompt", "two  words")
    assert fake.calls == [["data/sample.py", "--prompt", "two  words"]]
    write(fake.root / "tests" / "test_it.py", "")  # may be named
    words = ["-k", "muon or adam", "tests/test_it.py::test_a", "--deselect=no.py"]
    printed = fake.run("test", *words).stdout
    start = "-m pytest -n auto --maxprocesses 8".split()
    assert fake.calls == [["data/pocket.py"], [*start, *words]]
    assert printed.splitlines()[-1] == str(fake.root)


def test_a_record_runs_in_place_of_the_root_and_through_links(fake):
    beside = fake.folder / "else where" / "run"
    (fake.folder / "link").symlink_to(fake.root / "run.sh")
    beside.symlink_to("../link")
    fake.run("--record", "Wide", "--seed", "3", start=[beside])
    assert fake.calls[-1] == [f"{WIDE}/train_gpt.py", *POCKET, "--seed", "3"]
    fake.plan("4 3 4 9", WIDE)
    fake.run("--record", "2024-01-01_Wide/", "--seed", "3")
    *launch, script, flag, seed = fake.calls[-1]
    assert launch[-1] == "--nproc_per_node=3" and [flag, seed] == ["--seed", "3"]
    assert Path(script) == Path(WIDE, "train_gpt.py")


def test_help_installs_nothing(fake):
    fake.set_torch("2.10.1")
    assert "./run.sh test" in fake.run("--help").stdout and not fake.calls
    fake.set_torch("2.13.0")
    fake.run("--seed", "1", "--help")
    assert fake.calls == [["train_gpt.py", "--help"]]


@pytest.mark.parametrize(("words", "python", "said"), [
    ("", "python3.9", "needs Python 3.11 or newer, and python3.9 is Python 3.9.6: name one"),
    ("", "/no/such/python", "/no/such/python is none"),
    ("tests", "python", "tests: give test, sample, or flags"),
    ("test -x tests/no.py::test_it", "python", "no tests/no.py::test_it in"),
    ("--seed 3 --record Wide", "python", "--record NAME comes before"),
    ("--record", "python", f"--record NAME: name one of {' '.join(RECORDS)}\n"),
    ("--record Wid", "python", "name one of"),
    ("--record Twice", "python", "name one of"),
    ("--record a_tool.py", "python", "name one of")])
def test_what_cannot_run_is_refused_in_one_line_before_the_set_up(fake, words, python, said):
    fake.set_torch("2.10.1")
    errors = fake.run(*shlex.split(words), PYTHON=python, code=2).stderr
    assert said in errors and errors.count("\n") == 1 and not fake.calls


# ---- The set-up ----


def test_missing_packages_are_installed_once(fake):
    install = [".venv", "-m", "pip", "install", "-r"]
    fake.set_torch("2.10.1")
    last = fake.run(INSTALL_SAYS="ERROR: No matching torch", code=2).stderr.splitlines()[-1]
    assert "No matching torch" in last and "pip-errors.txt" in last  # and is not taken for done
    packages = fake.root / ".venv/lib/python3.11/site-packages"
    write(packages / "whole-1.dist-info" / "INSTALLER", "pip\n")
    write(packages / "cut-1.dist-info" / "METADATA", "")
    run = [[".venv", "data/pocket.py"], [".venv", "train_gpt.py", *POCKET]]
    fake.run(PIP_USER="1")  # of settings with which pip refuses a venv
    assert fake.variables["PIP_USER"] == "0"
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]
    assert fake.calls[-3:] == [[*install, "requirements.txt"], *run]
    fake.run("test")  # wants those of the tests too
    assert [*install, "requirements-dev.txt"] in fake.calls
    assert fake.calls[-1][:3] == [".venv", "-m", "pytest"]
    fake.run()
    assert fake.calls == run
    write(fake.root / "requirements.txt", "torch==2.14.0\n")
    fake.run()
    assert [*install, "requirements.txt"] in fake.calls


def test_active_torch_that_is_not_the_pinned_one_is_named(fake):
    assert not fake.run().stderr
    fake.set_torch("2.12.0+cu130")
    said = fake.run().stderr
    assert "2.12.0+cu130" in said and "2.13.0" in said
    assert fake.calls[-1][0] == "train_gpt.py"


def test_a_venv_that_cannot_be_made_has_its_own_reason(fake):
    shutil.rmtree(fake.root / ".venv")
    fake.set_torch("2.10.1")
    errors = fake.run(code=2, INSTALL_SAYS="as ensurepip is not\navailable.\n\nFailing").stderr
    assert "install its venv module" in errors.splitlines()[-1]
    errors = fake.run(code=2, INSTALL_SAYS="Error: [Errno 30] Read-only file system").stderr
    assert "Error: [Errno 30] Read-only" in errors.splitlines()[-1]


def test_what_a_gpu_lacks_is_told_before_gigabytes_are_fetched(fake):
    programs = fake.stubs / "bin"  # all that there are
    for name in """awk bash cat cmp cp dirname env grep head ls nproc readlink rm sed sleep sort
                tail uname wc""".split():
        (programs / name).symlink_to(shutil.which(name))
    write(programs / "gcc", "#!/bin/sh\n")
    write(fake.stubs / "Python.h", "")
    fake.set_torch("2.10.1")
    fake.plan("1 1 1 8")
    machine = dict(PATH=str(programs), CC="", DRIVER="580.65.06", HEADERS=str(fake.stubs))
    fake.run(**machine)
    assert fake.calls[-1] == [".venv", "train_gpt.py"]

    def refusal(**lacks):
        (fake.root / ".venv" / "requirements.txt").unlink(missing_ok=True)  # nothing is installed
        errors = fake.run(code=2, **machine | lacks).stderr
        assert errors.count("\n") == 1 and not fake.calls
        return errors

    old = dict(DRIVER="550.54.15")
    assert "driver is 550.54.15, and torch needs 580 or newer" in refusal(**old)
    assert "no /no/Python.h, which Triton needs: install python3-dev" in refusal(HEADERS="/no")
    (programs / "gcc").unlink()
    assert "no C compiler, which Triton needs: install gcc" in refusal()
    fake.run("--device", "cpu", **machine | old)
    assert fake.calls[-1] == [".venv", "train_gpt.py", *POCKET, "--device", "cpu"]
    fake.set_torch("2.13.0")  # which is there: CUDA itself is asked by the plan
    fake.run(**machine | old)
    assert fake.calls[-1] == ["train_gpt.py"]


# ---- Shells and threads ----


@pytest.mark.parametrize("shell", ["sh", "bash --posix"])
def test_any_shell_goes_on_in_bash(fake, shell):
    fake.run("--seed", "3", start=[*shell.split(), fake.root / "run.sh"])
    assert fake.calls[-1][-2:] == ["--seed", "3"]


IDLE = 160  # hundredths of a second in 0.2 s, of eight cores


@pytest.mark.parametrize(("idle", "cpus", "cores", "quotas", "threads"), [
    (31, 8, 4, {}, 2),
    (IDLE, 16, 4, {}, 4),
    (IDLE, 2, 4, {}, 2),
    (IDLE, 16, 0, {}, 8),  # where Linux does not tell the cores
    (IDLE, 8, 8, {"cpu.max": "50000 100000"}, 1),
    (IDLE, 8, 8, {"pod/cpu.max": "max 100000", "cpu.max": "265000 100000"}, 2),
    (IDLE, 8, 8, {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2)])
def test_threads_are_as_many_as_cores_are_idle_and_no_more_than_the_quota(
    fake, idle, cpus, cores, quotas, threads
):
    """By the CPUs of the process, cores of two threads, and files of the control groups."""
    run_sh = (fake.root / "run.sh").read_text()
    run_sh = run_sh.replace("<(sleep 0.2; cat /proc/stat)", "/proc/stat-later")
    for folder in "/proc/", "/sys/":
        run_sh = run_sh.replace(folder, f"{fake.stubs}{folder}")
    write(fake.root / "run.sh", run_sh)
    write(fake.stubs / "bin/nproc", f"#!/bin/sh\necho {cpus}\n")
    write(fake.stubs / "proc/stat", "cpu  11 22 33 70000 44\ncpu0 1 2 3 4 5\n")
    write(fake.stubs / "proc/stat-later", f"cpu  11 22 33 {70000 + idle} 44\ncpu0 1 2 3 4 5\n")
    write(fake.stubs / "proc/self/cgroup", "0::/pod\n" if "pod/cpu.max" in quotas else "0::/\n")
    for name, text in quotas.items():
        write(fake.stubs / "sys/fs/cgroup" / name, text + "\n")
    for cpu in range(2 * cores):
        siblings = fake.stubs / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(siblings, f"{cpu % cores},{cpu % cores + cores}\n")
    fake.run(OMP_NUM_THREADS="")
    assert fake.variables["OMP_NUM_THREADS"] == str(threads)


# ---- The launcher, with two ranks that fail, or wait for a signal ----


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "code"), [("--fail", 3), ("--die", 1)])
def test_the_exit_code_is_that_of_the_ranks_without_torchruns_traceback(fake, flag, code):
    fake.plan("2 2 2 8")
    errors = fake.run(flag, code=code, RANKS="2").stderr
    assert "Traceback" not in errors and errors.count("\n") < 8, errors


@for_cuda
def test_under_nohup_a_closed_terminal_does_not_end_the_ranks_and_sigterm_does(fake):
    fake.plan("2 2 2 8")
    run = subprocess.Popen(["nohup", fake.root / "run.sh"], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, **fake.environment({"RANKS": "2"}))
    try:
        assert [run.stdout.readline() for _ in range(2)] == ["a rank waits\n"] * 2
        run.send_signal(signal.SIGHUP)
        time.sleep(1.5)  # torchrun looks once a second
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        errors = run.communicate(timeout=60)[1]
    finally:
        run.kill()
    assert run.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors and errors.count("\n") < 8, errors


# In the launcher, a signal comes when the first rank is started and torchrun has not noted it yet.
SIGNAL_WHILE_STARTING = """
import os, signal, subprocess, sys
if "--standalone" in sys.argv:
    start = subprocess.Popen.__init__
    def start_and_signal(self, args, **options):
        start(self, args, **options)
        if options.get("start_new_session"):
            os.kill(os.getpid(), signal.SIGTERM)
    subprocess.Popen.__init__ = start_and_signal
"""


@for_cuda
def test_a_signal_that_meets_torchrun_while_it_starts_leaves_no_rank(fake):
    """A rank that is left would hold the pipe open until the time is up."""
    fake.plan("2 2 2 8")
    write(fake.stubs / "sitecustomize.py", SIGNAL_WHILE_STARTING)
    fake.run(code=128 + signal.SIGTERM, RANKS="2")
