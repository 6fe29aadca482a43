"""run.sh in a copy of the repository whose scripts only write down what they are called with.

Packages come from wheels that are made here. Nothing is downloaded or trained.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from conftest import REPO

# A script of the copy, or launch.py, which would start it. It ends with the code that the variable
# of its name has.
NOTE = """import json, os, sys
words = sys.argv
if words[0].endswith("launch.py") and words[1][0] != "-":
    words = words[1:]
name = os.path.relpath(words[0], os.environ["REPO"])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([name, *words[1:]]) + "\\n")
with open(os.environ["CALLS"] + ".env", "w") as variables:
    json.dump(dict(os.environ, PREFIX=sys.prefix), variables)
if name == "data/plan.py":
    print("a greeting of sitecustomize")
    for line in open(os.environ["CALLS"] + ".plan").read().splitlines():
        print("answer:", line)
    sys.exit()
print(os.getcwd(), flush=True)
sys.exit(int(os.environ.get(os.path.basename(name).removesuffix(".py"), 0)))
"""
SCRIPTS = ["train_gpt.py", "records/2024-01-01_Wide/train_gpt.py",
           *(f"data/{name}.py" for name in "plan pocket fineweb prefixes sample launch".split())]
RECORDS = ["2024-01-01_Wide", "2024-01-02_WideHead", "2024-01-03_Twice", "2024-01-04_Twice",
           "2024-01-05_7b_Head"]
POCKET = ["train_gpt.py", *"--preset pocket --save_every 120".split()]
METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: {}\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


class FakeRepo:
    """A repository with run.sh in it, in a path with spaces, and what its last run called."""

    def __init__(self, folder, python):
        self.folder, self.root, self.stubs = folder, folder / "a clone", folder / "stubs"
        for name in SCRIPTS:
            write(self.root / name, NOTE)
        for name in RECORDS:
            write(self.root / "records" / name / "train_gpt.py", NOTE)
        for name in "run.sh", "data/machine.py":
            shutil.copy(REPO / name, self.root / name)
        write(self.root / "requirements.txt", "torch==2.13.0\n")
        write(self.root / "requirements-dev.txt", "")
        write(folder / "else where" / "notes", "")
        self.calls_file = folder / "calls"
        self.variables = dict(os.environ, PYTHON=str(python), PYTHONPATH=str(self.stubs),
                              PATH=f"{self.stubs / 'bin'}:{os.environ['PATH']}",
                              CALLS=str(self.calls_file), REPO=str(self.root))
        self.set_torch("2.13.0")

    def set_torch(self, version):
        """Make `version` the one that the active Python has."""
        write(self.stubs / "torch-0.dist-info" / "METADATA", METADATA.format(version))

    def plan(self, text, driver="580.65.06"):
        """Make this a machine with GPUs, and `text` what plan.py says."""
        write(self.stubs / "bin" / "nvidia-smi", f"#!/bin/sh\necho {driver}")
        write(self.folder / "calls.plan", text)

    def start(self, *args, start=(), **env):
        return subprocess.Popen([*(start or [self.root / "run.sh"]), *args], text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                cwd=self.folder / "else where", env=self.variables | env)

    def run(self, *args, code=0, **options):
        """Run run.sh from another folder, by `start` or by itself; its exit code is `code`."""
        self.calls_file.write_text("")
        run = self.start(*args, **options)
        printed, errors = run.communicate(timeout=100)
        assert run.returncode == code, errors
        self.calls = [json.loads(call) for call in self.calls_file.read_text().splitlines()]
        if self.calls:
            self.seen = json.loads((self.folder / "calls.env").read_text())
        return printed, errors


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    """A Python without packages."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture
def fake(tmp_path, bare_python):
    return FakeRepo(tmp_path, bare_python)


# ---- What is run ----


@pytest.mark.parametrize(("flags", "data", "first"), [
    ("--run_id=ab --val_files x", [["data/pocket.py"]], POCKET),
    ("--preset=pocket --seed 3", [["data/pocket.py"]], POCKET[:1]),
    ("--train_files mine/*.bin", [], POCKET),
    ("--run_id x --resume auto", [["data/pocket.py"]], POCKET),
    ("--seed 3 --resume=x.pt", [], POCKET[:1])])  # a checkpoint has its data already
def test_without_a_gpu_it_trains_the_pocket(fake, flags, data, first):
    fake.run(*flags.split(), OMP_NUM_THREADS="7")
    assert fake.calls == [*data, [*first, *flags.split()]]
    assert fake.seen["OMP_NUM_THREADS"] == "7"


def test_on_gpus_it_does_what_the_plan_says(fake):
    data = [["data/prefixes.py"], ["data/fineweb.py", "25"]]
    launch = ["data/launch.py", "--standalone", "--local-addr=127.0.0.1", "--nproc_per_node=2"]
    script = str(fake.root / "train_gpt.py")
    run = [*launch, script, "--shorten", "2"]
    fake.plan("3 2 --shorten 2\nprefixes.py\nfineweb.py 25")
    fake.run("--seed", "3", OMP_NUM_THREADS="", MALLOC_MMAP_MAX_="9")
    assert fake.calls == [["data/plan.py", script, "--seed", "3"], *data, [*run, "--seed", "3"]]
    assert fake.seen["OMP_NUM_THREADS"] == ""  # torch's to choose
    assert int(fake.seen["MALLOC_TRIM_THRESHOLD_"]) >= 2**30
    assert fake.seen["MALLOC_MMAP_MAX_"] == "9"
    fake.run("--resume=x.pt")
    assert fake.calls[1:] == [[*run, "--resume=x.pt"]]
    fake.run(prefixes="2", code=2)  # data that cannot be made end the run
    assert fake.calls[1:] == data[:1]
    fake.run("--device", "cpu")
    assert fake.calls[-1] == [*POCKET, "--device", "cpu"]
    (fake.folder / "calls.plan").unlink()  # as with wrong flags
    fake.run(code=1)
    assert len(fake.calls) == 1


def test_words_the_folder_and_the_exit_code_are_handed_on(fake):
    flags = ["--val_files", "two  words", "--run_id=a b"]
    printed, _ = fake.run(*flags, train_gpt="75", code=75)
    assert fake.calls[-1] == [*POCKET, *flags]
    assert printed.splitlines()[-1] == str(fake.folder / "else where")
    fake.run("sample", "--prompt", "two  words")
    assert fake.calls == [["data/sample.py", "--prompt", "two  words"]]
    write(fake.root / "tests" / "test_it.py", "")  # may be named
    write(fake.stubs / "pytest.py", NOTE)
    words = ["-k", "muon or adam", "tests/test_it.py::test_a", "--deselect=no.py"]
    printed, _ = fake.run("test", *words)
    assert fake.calls[0] == ["data/pocket.py"] and fake.calls[1][-4:] == words
    assert printed.splitlines()[-1] == str(fake.root)


def test_a_record_runs_in_place_of_the_root_through_links_and_any_shell(fake):
    beside = fake.folder / "else where" / "run"
    (fake.folder / "link").symlink_to(fake.root / "run.sh")
    beside.symlink_to("../link")
    script, *flags = POCKET
    for start in [beside], ["sh", beside], ["bash", "--posix", beside]:
        fake.run("--record", "Wide", "--seed", "3", start=start)
        assert fake.calls[-1] == [f"records/{RECORDS[0]}/{script}", *flags, "--seed", "3"]
    fake.plan("1 1 --shorten 2")
    fake.run("--record", "2024-01-01_Wide/")
    assert Path(fake.calls[0][1]) == fake.root / "records" / RECORDS[0] / script
    assert fake.calls[-1] == [f"records/{RECORDS[0]}/{script}", "--shorten", "2"]


@pytest.mark.parametrize(("name", "folder"), [
    ("7", RECORDS[1]), ("#7", RECORDS[1]), ("7b", RECORDS[4]), ("Head", RECORDS[4]),
    ("7b_Head", RECORDS[4]), (RECORDS[0], RECORDS[0])])
def test_a_record_is_named_by_its_number_its_label_or_the_end_of_its_name(fake, name, folder):
    write(fake.root / "records" / RECORDS[1] / "record.json",
          '{"published": {"number": 7, "n": 75}}')
    write(fake.root / "records" / RECORDS[0] / "record.json",
          '{"published": {"number": 75, "n": 7}}')
    for words in ["--record", name], [f"--record={name}"]:
        fake.run(*words, "--seed", "3")
        assert fake.calls[-1][0] == f"records/{folder}/train_gpt.py"
        assert fake.calls[-1][-2:] == ["--seed", "3"]


def test_help_installs_nothing(fake):
    fake.run("--seed", "1", "--help")
    assert fake.calls == [["train_gpt.py", "--help"]]
    fake.set_torch("2.10.1")
    assert "./run.sh test" in fake.run("--help")[0] and not fake.calls


@pytest.mark.parametrize(("words", "said"), [
    ("tests", "tests: give test, sample, or flags"),
    ("test -x tests/no.py::test_it", "no tests/no.py::test_it in"),
    ("--seed 3 --record Wide", "--record NAME comes before"),
    ("--record", "--record NAME: 0 records have this name; give a number such as 53, "),
    ("--record 54", "--record 54: 0 records have this name; give a number"),
    ("--record=Twice", "--record Twice: 2 records have this name; give a number")])
def test_wrong_words_are_refused_in_one_line(fake, words, said):
    _, errors = fake.run(*shlex.split(words), code=2)
    assert said in errors and errors.count("\n") == 1 and not fake.calls


def test_a_python_that_is_not_there_is_named(fake):
    _, errors = fake.run(PYTHON="/no/python", code=2)
    assert errors == "run.sh: PYTHON=/no/python: no such program\n" and not fake.calls


def test_a_path_of_python_is_taken_from_the_current_folder(fake):
    write(fake.root / "tests" / "test_it.py", "")
    write(fake.stubs / "pytest.py", NOTE)
    beside = os.path.relpath(fake.variables["PYTHON"], fake.folder / "else where")
    fake.run("test", "tests/test_it.py", PYTHON=beside)
    assert fake.calls[-1][-1] == "tests/test_it.py"


def test_a_folder_with_an_end_of_line_is_refused(fake):
    odd = fake.folder / "odd\n"
    fake.root.rename(odd)
    _, errors = fake.run(start=[odd / "run.sh"], code=2)
    assert "a folder's name has an end of line: rename it" in errors and not fake.calls


def test_what_a_sitecustomize_prints_is_no_answer(fake):
    write(fake.stubs / "sitecustomize.py", "print('welcome to the cluster', end='')")
    fake.run(OMP_NUM_THREADS="")
    assert fake.calls[-1] == POCKET
    assert sys.platform != "linux" or fake.seen["OMP_NUM_THREADS"].isdigit()


def test_each_stage_is_a_line_and_what_to_type_next_is_handed_on(fake):
    _, errors = fake.run("--seed", "3")
    assert "run.sh: data: data/pocket.py\n" in errors
    assert "run.sh: training: train_gpt.py --preset pocket" in errors
    assert fake.seen["RUN_SH_NEXT"].startswith(f"Next: {fake.root / 'run.sh'} sample --prompt")
    fake.run("--preset", "pocket")  # which saves nothing
    assert "sample" not in fake.seen["RUN_SH_NEXT"]


def test_an_interrupt_while_a_program_is_asked_ends_it(fake):
    """That one ends by itself, and run.sh would take it for an answer."""
    python = fake.folder / "python"
    write(python, f"#!{sys.executable}\nimport sys, time\n"
                  f"open({str(fake.folder / 'asked')!r}, 'w')\n"
                  "try: time.sleep(9)\nexcept KeyboardInterrupt: sys.exit(130)\n")
    run = fake.start(start=["setsid", fake.root / "run.sh"], PYTHON=str(python))
    while not (fake.folder / "asked").exists():
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 130 and not fake.calls_file.exists()


# ---- The set-up ----


@pytest.fixture
def wheels(fake):
    """A repository whose packages are missing, and what pip needs to find them."""
    for version in "2.13.0", "2.14.0":
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(fake.folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("torch/__init__.py", "")
            wheel.writestr(f"{info}/METADATA", METADATA.format(version))
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                                            "Tag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    del fake.variables["PYTHONPATH"]
    fake.variables |= dict(PIP_CONFIG_FILE=os.devnull, PIP_NO_INDEX="1",
                           PIP_FIND_LINKS=str(fake.folder), UV_NO_INDEX="1",
                           UV_FIND_LINKS=str(fake.folder))
    return fake


@pytest.mark.slow
def test_a_set_up_holds_in_spite_of_pips_settings_and_of_what_is_taken_out(wheels):
    elsewhere = wheels.folder / "elsewhere"
    venv = wheels.root / ".venv"
    (wheels.folder / "pip.conf").write_text(f"[global]\ntarget = {elsewhere}\n")
    settings = dict(PIP_TARGET=str(elsewhere), PIP_PREFIX=str(elsewhere), PIP_DRY_RUN="1",
                    PIP_USER="1", PIP_PYTHON="/no/python")
    wheels.run(**settings)
    assert wheels.seen["PREFIX"] == str(venv) and wheels.calls[-1] == POCKET
    assert "setting up" not in wheels.run()[1]  # it is set up once

    [torch] = venv.glob("lib/*/site-packages/torch")
    for path in torch.parent.glob("torch*"):  # by hand
        shutil.rmtree(path)
    assert "setting up" in wheels.run(PIP_CONFIG_FILE=str(wheels.folder / "pip.conf"))[1]
    assert (torch / "__init__.py").exists() and not elsewhere.exists()
    write(wheels.root / "requirements.txt", "torch==2.14.0\n")
    wheels.run()
    assert [path.name for path in torch.parent.glob("torch-*")] == ["torch-2.14.0.dist-info"]

    write(wheels.root / "requirements.txt", "torch==2.15.0\n")
    last = wheels.run(code=2)[1].splitlines()[-1]
    assert "No matching distribution" in last and "pip-errors.txt" in last
    write(wheels.root / "requirements.txt", "torch==2.14.0\n")
    assert "setting up" not in wheels.run(PIP_FIND_LINKS="")[1]  # what was there still is
    shutil.rmtree(torch)  # which pip does not notice
    last = wheels.run(code=2)[1].splitlines()[-1]
    assert f"{venv} lacks packages" in last and "remove it" in last and not wheels.calls


def person(venv, *flags):
    """A .venv that a person made, with a file of theirs."""
    subprocess.run([sys.executable, "-m", "venv", *flags, venv], check=True)
    (venv / "mine").write_text("of a person")


def make_plain_folder(venv):
    write(venv / "mine", "of a person")


def make_venv_of_an_old_python(venv):
    write(venv / "mine", "of a person")
    write(venv / "bin" / "python", "#!/bin/sh\n[ $1 = -c ] && echo answer: False\nexit 1")


@pytest.mark.parametrize("make", [make_plain_folder, make_venv_of_an_old_python])
def test_a_folder_that_it_did_not_make_is_never_cleared(wheels, make):
    venv = wheels.root / ".venv"
    make(venv)
    said = wheels.run(code=2)[1].splitlines()[-1]
    assert f"{venv} was not made by run.sh" in said and "PYTHON=/path/to/python" in said
    assert (venv / "mine").read_text() == "of a person"


def test_a_link_is_not_followed_to_clear_or_to_install(wheels):
    theirs = wheels.folder / "theirs"
    person(theirs, "--without-pip")
    (wheels.root / ".venv").symlink_to(theirs)
    before = sorted(theirs.rglob("*"))
    said = wheels.run(code=2)[1].splitlines()[-1]
    assert ".venv is a link, and what it leads to lacks packages: install requirements.txt" in said
    assert sorted(theirs.rglob("*")) == before


@pytest.mark.slow
def test_an_environment_without_pip_is_used_and_one_of_its_own_is_made_anew(wheels):
    venv = wheels.root / ".venv"
    person(venv, "--without-pip")
    wheels.run()
    assert wheels.seen["PREFIX"] == str(venv) and wheels.calls[-1] == POCKET
    assert (venv / "mine").exists() and not (venv / "made-by-run.sh").exists()
    shutil.rmtree(venv)
    wheels.run()
    assert (venv / "made-by-run.sh").exists()
    (venv / "bin" / "python").unlink()  # as where the system's Python was replaced
    (venv / "of the old one").touch()
    wheels.run()
    assert wheels.calls[-1] == POCKET and not (venv / "of the old one").exists()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed")
def test_uv_installs_where_it_is_there(wheels):
    person(wheels.root / ".venv", "--without-pip")
    wheels.run()
    assert wheels.calls[-1] == POCKET
    assert not list((wheels.root / ".venv").glob("lib/*/site-packages/pip"))
    write(wheels.root / "requirements.txt", "torch==99.0\n")
    assert "could not install" in wheels.run(code=2)[1].splitlines()[-1]


@pytest.mark.slow
def test_set_ups_at_once_wait_for_each_other_and_one_that_is_killed_is_made_anew(wheels):
    wheels.calls_file.write_text("")
    two = [wheels.start() for _ in range(2)]
    said = [run.communicate(timeout=100)[1] for run in two]
    assert [run.returncode for run in two] == [0, 0], said
    assert sorted("setting up" in errors for errors in said) == [False, True]
    write(wheels.root / "requirements.txt", "torch==2.14.0\n")
    run = wheels.start(start=["setsid", wheels.root / "run.sh"])
    while not (wheels.root / ".venv" / "unfinished").exists():
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=60)
    (wheels.root / ".venv" / "of the killed one").touch()
    wheels.run()
    assert wheels.calls[-1] == POCKET
    venv = wheels.root / ".venv"
    assert not (venv / "unfinished").exists() and not (venv / "of the killed one").exists()


# What pip says before it calls an index that it cannot reach one without packages
LOST = """WARNING: Retrying (Retry(total=0)) after connection broken by 'ProxyError('No proxy.', \
NewConnectionError('<pip.HTTPSConnection object at 0x7f>: Connection refused'))': /simple/torch/
"""


@pytest.mark.parametrize(("pip_says", "said"), [
    (f"{LOST}ERROR: No matching distribution found for torch==2.13.0",
     "no network, or a wrong proxy or index: "
     "ProxyError('No proxy.', NewConnectionError('Connection refused'))"),
    (f"{LOST}ERROR: ResolutionImpossible: for help visit",  # where pip has a constraint as well
     "no network, or a wrong proxy or index: ProxyError"),
    (f"{LOST}ERROR: [Errno 28] No space left on device", "ERROR: [Errno 28] No space left"),
    ("ERROR: No matching distribution found for torch==2.13.0", "ERROR: No matching distribution"),
    ("error: no wheel\n  ├─▶ of torch\n  ╰─▶ connection refused", "╰─▶ connection refused"),  # uv's
    ("", "is the disk full?")])
def test_why_pip_could_not_install_is_one_line(fake, pip_says, said):
    fake.set_torch("2.10.1")
    venv = fake.root / ".venv"
    write(venv / "pip-says", pip_says)
    write(venv / "bin" / "python",
          f'#!/bin/sh\n[ "$*" != "-m pip --version" ] || exit 0\n'
          f'[ "$1" = -m ] || exec {fake.variables["PYTHON"]} "$@"\n'
          f'cat {shlex.quote(str(venv / "pip-says"))} >&2; exit 1\n')
    (venv / "made-by-run.sh").touch()
    _, errors = fake.run(PATH=os.defpath, code=2)
    setting_up, *other_index, last = errors.splitlines()
    assert "packages: setting up" in setting_up
    assert all("trying the package index" in line for line in other_index)
    assert f"pip could not install requirements.txt ({said}" in last
    assert f"; all that it said is in {venv}/pip-errors.txt. A Python that has" in last
    assert not (venv / "unfinished").exists() and not fake.calls


@pytest.mark.slow
def test_an_index_that_cannot_be_reached_is_told_and_the_next_call_goes_on(wheels):
    refused = dict(PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_RETRIES="1")
    refused |= dict.fromkeys(["PIP_NO_INDEX", "PIP_FIND_LINKS"], "")
    last = wheels.run(code=2, PATH=os.defpath, **refused)[1].splitlines()[-1]
    assert "no network, or a wrong proxy or index: NewConnectionError" in last
    assert "Connection refused" in last and not wheels.calls
    wheels.run()
    assert wheels.calls[-1] == POCKET


@pytest.mark.parametrize(("old_python", "said"), [
    ('[ "$1" = -V ] && echo Python 3.9', "needs Python 3.11 or newer, and {} is Python 3.9: name"),
    ('[ "$1" != -m ] && exec {bare} "$@"; echo as ensurepip is not; exit 1',
     "install its venv module"),
    ('[ "$1" != -m ] && exec {bare} "$@"; echo; echo Error: Read-only; exit 1',
     ".venv: Error: Read-only"),
    ("echo 'Fatal Python error: PYTHONHASHSEED must be' >&2; exit 1",
     "{} does not start: Fatal Python error: PYTHONHASHSEED must be")])
def test_a_python_that_will_not_do_has_its_reason(fake, old_python, said):
    """Nor where PYTHONOPTIMIZE leaves asserts out."""
    fake.set_torch("2.10.1")
    python = fake.folder / "python"
    write(python, "#!/bin/sh\n" + old_python.replace("{bare}", fake.variables["PYTHON"]))
    _, errors = fake.run(PYTHON=str(python), PYTHONOPTIMIZE="1", code=2)
    assert said.format(python) in errors.splitlines()[-1] and not fake.calls


def test_a_driver_that_is_too_old_is_told_before_gigabytes_are_fetched(fake):
    fake.plan("1 1", driver="550.54.15")
    fake.run()
    assert fake.calls[-1] == ["train_gpt.py"]  # a torch that is there may be for this driver
    fake.set_torch("2.10.1")
    _, errors = fake.run(code=2)
    assert "driver is 550.54.15, and torch needs 580 or newer" in errors
    assert errors.count("\n") == 1 and not fake.calls


# ---- What is around it ----


def test_an_active_torch_that_is_not_pinned_is_named_unless_streams_are_closed(fake):
    assert "using torch" not in fake.run()[1]
    fake.set_torch("2.12.0+cu130")
    for closed in "", "2>&-", "<&- >&- 2>&-":
        _, said = fake.run(start=["bash", "-c", f'"$1" {closed}', "", fake.root / "run.sh"])
        assert fake.calls[-1] == POCKET
        assert bool(closed) != ("torch 2.12.0+cu130 of" in said and "pins 2.13.0" in said)


def test_kernels_are_kept_where_their_folder_can_be_made(fake):
    cache = fake.folder / "home" / ".cache"
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):  # torch sets the second itself
        fake.variables.pop(name, None)
    for home, kept in ("home", str(cache / "train_gpt")), ("calls", None):  # which is no folder
        fake.run(HOME=str(fake.folder / home))
        assert fake.seen.get("TORCHINDUCTOR_CACHE_DIR") == kept
    fake.run(TORCHINDUCTOR_CACHE_DIR="mine")
    assert fake.seen["TORCHINDUCTOR_CACHE_DIR"] == "mine"


def test_what_the_tests_need_takes_no_newer_torch_or_triton_back():
    wanted = (REPO / "requirements-dev.txt").read_text()
    assert not re.search(r"^(torch\b|-|[\w-]+==)", wanted, re.MULTILINE)
