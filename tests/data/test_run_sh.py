"""run.sh in a copy of the repository where Python only writes down what it is called with.

Nothing is installed, downloaded or trained.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import plan as plan_tool
import pytest
from conftest import REPO, SCRIPTS, script_module

import train_gpt

# The active Python, and that of .venv. What asks something gets its answer from the real one, but
# for a script's plan, which stands beside the script. Ranks run where RANKS is set.
PYTHON = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
if words[0] == "-P":
    Path(os.environ["CALLS"] + ".asked").write_text(json.dumps(words))
    sys.exit(print(Path(os.environ["PYTHONPATH"].partition(":")[0], "plan").read_text()))
ranks = "--standalone" in words
asks = words[0] in ("-", "-c") and not ranks
if not asks:
    call = ["torchrun", *words[2:]] if ranks else words
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps([".venv", *call] if ".venv" in __file__ else call) + "\\n")
    Path(os.environ["CALLS"] + ".env").write_text(json.dumps(dict(os.environ)))
if asks or "RANKS" in os.environ:
    os.execv(sys.executable, [sys.executable, *words])
print(os.getcwd())
if "-r" in words and os.environ.get("PIP_FAILS"):
    sys.exit("ERROR: No matching distribution found for torch")
sys.exit(int(os.environ.get(Path(words[0]).stem, 0)))
"""
# A rank ends as its flag says, or waits.
RANK = """import os, sys, time
if "--fail" in sys.argv: sys.exit(3)
if "--die" in sys.argv: os.abort()
os.write(1, b"a rank waits\\n")
time.sleep(60)
"""
NO_GPU = "0 1 0 8\nfineweb.py 8"
RECORDS = ["2024-01-01_Wide", "2024-01-02_WideHead", "2024-01-03_Twice", "2024-01-04_Twice"]
FILES = {
    "a clone/requirements.txt": "torch==2.13.0\n",
    "a clone/requirements-dev.txt": "-r requirements.txt\n",
    "a clone/train_gpt.py": RANK,
    "a clone/plan": NO_GPU,
    "a clone/records/README.md": "",
    "a clone/records/a_tool.py": "",
    **{f"a clone/records/{name}/train_gpt.py": "" for name in RECORDS},
    "a clone/.venv/bin/python": PYTHON,
    "stubs/bin/python": PYTHON,
    "stubs/bin/python3.9": '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.6',
    "stubs/bin/nvidia-smi": "#!/bin/sh\n",
    "else where/notes": ""}


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
        """Make `text` what plan.py says of the root, or of a record."""
        write(self.root / record / "plan", text)

    def environment(self, env):
        """What a run has around it, as arguments of subprocess."""
        calls = self.folder / "calls"
        calls.write_text("")
        env = dict(PATH=f"{self.stubs / 'bin'}:{os.environ['PATH']}", PYTHON="python",
                   PYTHONPATH=self.stubs, STUBS=self.stubs, CALLS=calls) | env
        return dict(cwd=self.folder / "else where", env=os.environ | env, text=True)

    def run(self, *args, code=0, path=None, **env):
        """Run run.sh from another folder; its exit code is `code`. self.calls are what Python was
        called with, paths from the repository on, and .venv before them where it was that one."""
        done = subprocess.run([path or self.root / "run.sh", *args], capture_output=True,
                              timeout=60, **self.environment(env))
        assert done.returncode == code, done.stderr
        calls = (self.folder / "calls").read_text().replace(f"{self.root}/", "").splitlines()
        self.calls = [json.loads(call) for call in calls]
        return done

    def variables(self):
        """The environment that the last called script had."""
        return json.loads((self.folder / "calls.env").read_text())


@pytest.fixture
def fake(tmp_path):
    return FakeRepo(tmp_path)


@pytest.fixture
def plan_for(monkeypatch, capsys):
    """`plan_for(gib, flags)`: what plan.py prints for the root on GPUs of so many GiB."""

    def plan(gib, flags):
        gpus = [SimpleNamespace(total_memory=int(float(size) * 2**30)) for size in gib.split()]
        monkeypatch.setattr(train_gpt, "count_gpus", lambda device: len(gpus))
        monkeypatch.setattr(train_gpt, "check_gpu_machine", lambda processes: None)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpus[index])
        capsys.readouterr()
        plan_tool.plan(flags)
        return capsys.readouterr().out

    return plan


def flags_of(sequences):
    """The flags that the page has for sequences of half the length, a quarter or an eighth."""
    page = (REPO / "docs" / "gpus.md").read_text()
    return re.search(rf'^{sequences}="(.*)"$', page, re.MULTILINE)[1]


POCKET = "--preset pocket --save_every 120"
PLANS = [  # GiB of each GPU, flags, the data that are made, processes, flags that are put first
    ("", "--run_id=ab --val_files x", "pocket.py", 1, POCKET),
    ("", "--preset=pocket --seed 3", "pocket.py", 1, ""),
    ("", "--train_files mine/*.bin", "", 1, POCKET),
    ("", "--run_id x --resume auto", "pocket.py", 1, POCKET),
    # With CUDA devices: the processes divide the sequences of a step.
    (3 * "80 ", "--seed 1", "fineweb.py 8", 2, ""),
    (8 * "80 ", "", "fineweb.py 8", 8, ""),
    (8 * "80 ", "--sequences_per_step 12", "fineweb.py 8", 6, ""),
    (4 * "80 ", "--preset pocket", "pocket.py", 1, ""),
    ("80", "--train_files mine/*.bin", "", 1, ""),
    # The smallest GPU sets the length of the sequences, unless flags do.
    ("22.0", "", "fineweb.py 8", 1, ""),
    ("79.1 15.6 79.1", "", "fineweb.py 8", 2, flags_of("half")),
    ("9.6", "--seed 3", "fineweb.py 8", 1, flags_of("quarter")),
    ("7.7", "", "fineweb.py 8", 1, flags_of("eighth")),
    ("7.7", "--sequences_per_step=16", "fineweb.py 11", 1, ""),
    ("5.8", "--preset pocket", "pocket.py", 1, "")]


@pytest.mark.parametrize(("gib", "flags", "data", "processes", "first"), PLANS)
def test_a_run_makes_its_data_and_starts_its_processes(fake, plan_for, gib, flags, data, processes,
                                                       first):
    fake.plan(plan_for(gib, flags.split()))
    said = fake.run(*flags.split()).stderr
    made = [f"data/{data}".split()] if data else []
    launch = ["torchrun", "--standalone", "--local-addr=127.0.0.1",
              f"--nproc_per_node={processes}"] if processes > 1 else []
    assert fake.calls == [*made, [*launch, "train_gpt.py", *first.split(), *flags.split()]]
    asked = json.loads((fake.folder / "calls.asked").read_text())
    assert asked == ["-P", str(fake.root / "data" / "plan.py"), *flags.split()]
    shorter, gpus = first not in ("", POCKET), len(gib.split())
    idle = 1 < processes < gpus
    assert said.count("\n") == shorter + idle
    assert not shorter or f"with {first}, for" in said and "do not compare" in said
    assert not idle or f"{processes} of {gpus} GPUs" in said


def test_what_is_wrong_with_flags_data_or_gpu_is_known_before_a_download(fake, plan_for):
    """A checkpoint has its data already. Data that cannot be made end the run."""
    fake.plan(plan_for("5.8", []))
    assert "--preset pocket" in fake.run(code=2).stderr and not fake.calls
    fake.plan("1 1 1 8\nprefixes.py\nfineweb.py 25")
    fake.run("--seed", "3", "--resume=x.pt")
    assert fake.calls == [["train_gpt.py", "--seed", "3", "--resume=x.pt"]]
    fake.run()
    assert fake.calls == [["data/prefixes.py"], ["data/fineweb.py", "25"], ["train_gpt.py"]]
    fake.run(prefixes="2", code=2)
    assert fake.calls == [["data/prefixes.py"]]


def test_wrong_flags_are_told_before_any_download(fake):
    """By the plan, a script that finds the trainer by its folder."""
    env = os.environ | dict(PYTHONPATH=REPO, CUDA_VISIBLE_DEVICES="")
    script = [sys.executable, "-P", REPO / "data" / "plan.py"]
    plan = subprocess.check_output([*script, "--preset", "pocket"], env=env, text=True)
    assert plan == "0 1 1 8 \npocket.py\n"
    for wrong in "--sede 3", "--num_iterations=0":
        run = subprocess.run([*script, *wrong.split()], env=env, text=True, capture_output=True)
        assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
        assert "run.sh: " in run.stderr and wrong[2:6] in run.stderr
    (fake.root / "plan").unlink()
    fake.run("--sede", "3", code=1)
    assert not fake.calls


DATA = {  # of most, the first eight shards; of these all that their steps of 524,288 tokens take
    "records/2024-10-14_ModernArch/train_gpt.py": ["fineweb.py 27"],
    "records/2024-11-03_UntieEmbed/train_gpt.py": ["fineweb.py 25"],
    "records/2026-07-13_PrefixTargets/train_gpt.py": ["prefixes.py", "fineweb.py 8"],
    "records/2026-08-03_NarrowHeads/train_gpt.py": ["prefixes.py", "fineweb.py 8"]}
FIRST_WITH_BOTH = SCRIPTS.index("records/2026-08-06_CanonicalMask/train_gpt.py")
DATA |= dict.fromkeys(SCRIPTS[FIRST_WITH_BOTH:], ["prefixes.py", "canonical.py", "fineweb.py 8"])


def lengths_of(cfg):
    return [row.seq_len for row in getattr(cfg, "stages", [cfg])]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_planned_with_its_data_and_for_a_small_gpu(script, monkeypatch, tmp_path):
    """The tokens of its steps stay what they were."""
    real = script_module(script)
    monkeypatch.setattr(plan_tool, "train_gpt", real)
    cfg = real.parse_args([])
    for gib, parts in (79.1, 1), (15.6, 2), (11.6, 4), (7.7, 8):
        flags = plan_tool.flags_that_fit(cfg, gib)
        assert bool(flags) == (parts > 1)
        small = real.parse_args(flags.split())
        for found, before in zip(lengths_of(small), lengths_of(cfg), strict=True):
            at_once = before * cfg.sequences_per_forward
            assert found * small.sequences_per_forward * parts == at_once
            assert found * small.sequences_per_step == before * cfg.sequences_per_step
    monkeypatch.setattr(plan_tool, "__file__", f"{tmp_path}/data/plan.py")
    data = DATA.get(script, ["fineweb.py 8"])
    assert plan_tool.scripts_of_data(cfg) == data
    for table in plan_tool.TABLES:  # which are not made again
        write(tmp_path / table, "")
    assert plan_tool.scripts_of_data(cfg) == data[-1:]


def test_words_the_folder_and_the_exit_code_are_handed_on(fake):
    flags = ["--val_files", "two  words", "--run_id=a b"]
    printed = fake.run(*flags, train_gpt="75", code=75).stdout
    assert fake.calls[-1] == ["train_gpt.py", *POCKET.split(), *flags]
    assert printed.splitlines()[-1] == str(fake.folder / "else where")
    fake.run("sample", "--prompt", "two  words")
    assert fake.calls == [["data/sample.py", "--prompt", "two  words"]]
    write(fake.root / "tests" / "test_it.py", "")  # may be named
    words = ["-k", "muon or adam", "tests/test_it.py::test_a", "--deselect=no.py"]
    printed = fake.run("test", *words).stdout
    start = "-m pytest -n auto --maxprocesses 8".split()
    assert fake.calls == [["data/pocket.py"], [*start, *words]]
    assert printed.splitlines()[-1] == str(fake.root)


def test_missing_packages_are_installed_once(fake):
    install = [".venv", "-m", "pip", "install", "-r"]
    fake.set_torch("2.10.1")
    last = fake.run(PIP_FAILS="1", code=2).stderr.splitlines()[-1]  # and is not taken for done
    assert "No matching distribution found for torch" in last and "pip-errors.txt" in last
    packages = fake.root / ".venv/lib/python3.11/site-packages"
    write(packages / "whole-1.dist-info" / "INSTALLER", "pip\n")
    write(packages / "cut-1.dist-info" / "METADATA", "")
    run = [[".venv", "data/pocket.py"], [".venv", "train_gpt.py", *POCKET.split()]]
    fake.run()
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]
    assert fake.calls[-3:] == [[*install, "requirements.txt"], *run]
    fake.run()
    assert fake.calls == run
    fake.run("test")  # wants those of the tests too
    assert [*install, "requirements-dev.txt"] in fake.calls
    assert fake.calls[-1][:3] == [".venv", "-m", "pytest"]
    fake.run()
    assert fake.calls == run
    write(fake.root / "requirements.txt", "torch==2.14.0\n")
    fake.run()
    assert [*install, "requirements.txt"] in fake.calls


def test_active_torch_that_is_not_the_pinned_one_is_named(fake):
    for version, named in (("2.12.0+cu130", True), ("2.13.0+cpu", False)):
        fake.set_torch(version)
        said = fake.run().stderr
        assert (version in said and "2.13.0" in said) if named else not said
        assert fake.calls[-1][0] == "train_gpt.py"


def test_help_installs_nothing(fake):
    fake.set_torch("2.10.1")
    assert "./run.sh test" in fake.run("--help").stdout and not fake.calls
    fake.set_torch("2.13.0")
    fake.run("--seed", "1", "--help")
    assert fake.calls == [["train_gpt.py", "--help"]]


NAMES = " ".join(RECORDS)
REFUSED = [  # words, the active Python, what is said
    ("", "python3.9", "needs Python 3.11 or newer, and python3.9 is Python 3.9.6: name one"),
    ("", "/no/such/python", "/no/such/python is none"),
    ("tests", sys.executable, "tests: give test, sample, or flags"),
    ("test -x tests/no.py::test_it", sys.executable, "no tests/no.py::test_it in"),
    ("--seed 3 --record Wide", sys.executable, "--record NAME comes before"),
    ("--record", sys.executable, f"--record NAME: name one of {NAMES}\n"),
    *((f"--record {name} --seed 3", sys.executable, f"name one of {NAMES}\n")
      for name in ("Wid", "Twice", "''", "'*'", "a_tool.py"))]


@pytest.mark.parametrize(("words", "python", "said"), REFUSED)
def test_what_cannot_run_is_refused_in_one_line_before_the_set_up(fake, words, python, said):
    fake.set_torch("2.10.1")
    errors = fake.run(*shlex.split(words), PYTHON=python, code=2).stderr
    assert said in errors and errors.count("\n") == 1 and not fake.calls


def test_a_record_runs_in_place_of_the_root_and_through_links(fake):
    script = "records/2024-01-01_Wide/train_gpt.py"
    fake.plan("4 3 4 9", "records/2024-01-01_Wide")
    for name in ("Wide", "2024-01-01_Wide", "2024-01-01_Wide/"):
        fake.run("--record", name, "--seed", "3")
        *launch, path, flag, seed = fake.calls[-1]
        assert launch[-1] == "--nproc_per_node=3" and [flag, seed] == ["--seed", "3"]
        assert Path(path) == Path(script)
    fake.plan(NO_GPU, "records/2024-01-01_Wide")
    beside = fake.folder / "else where" / "run"
    (fake.folder / "link").symlink_to(fake.root / "run.sh")
    beside.symlink_to("../link")
    fake.run("--record", "Wide", "--seed", "3", path=beside)
    assert fake.calls[-1] == [script, *POCKET.split(), "--seed", "3"]


def test_the_environment_is_set_unless_it_is_already(fake):
    """glibc keeps freed memory. On GPUs the threads are torch's to choose."""
    fake.plan("1 1 1 8")
    fake.run(OMP_NUM_THREADS="")
    found = fake.variables()
    assert found["OMP_NUM_THREADS"] == "" and found["MALLOC_MMAP_MAX_"] == "0"
    assert int(found["MALLOC_TRIM_THRESHOLD_"]) >= 2**30
    given = dict(OMP_NUM_THREADS="7000", MALLOC_TRIM_THRESHOLD_="1000", MALLOC_MMAP_MAX_="9")
    fake.run(**given)
    assert given.items() <= fake.variables().items()


@pytest.mark.parametrize(("flags", "code"), [
    pytest.param(["--fail"], 3, marks=pytest.mark.slow),
    pytest.param(["--die"], 1, marks=pytest.mark.slow),
    ([], 128 + signal.SIGTERM)])
def test_the_exit_code_is_that_of_the_ranks_without_torchruns_traceback(fake, flags, code):
    """Of two ranks that fail or wait for a signal."""
    fake.plan("2 2 2 8")
    run = subprocess.Popen([fake.root / "run.sh", *flags], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, **fake.environment({"RANKS": "2"}))
    try:
        if not flags:
            assert [run.stdout.readline() for _ in range(2)] == ["a rank waits\n"] * 2
            run.send_signal(signal.SIGTERM)
        errors = run.communicate(timeout=60)[1]
    finally:
        run.kill()
    assert run.returncode == code, errors
    assert "Traceback" not in errors and errors.count("\n") < 8, errors
