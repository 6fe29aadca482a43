"""run.sh in a copy of the repository where each script, torch and .venv write down their calls.

Nothing is installed, downloaded or trained.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

import train_gpt

STUB = """import json, os, sys
from pathlib import Path
def record(name, *args):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps([name, *args]) + "\\n")
if __name__ == "__main__":
    record(Path(__file__).stem, *sys.argv[1:])
    print(os.getcwd())
    sys.exit(int(os.environ.get(Path(__file__).stem, 0)))
"""
# What run.sh imports from the script; test_the_stub_means_what_the_script_means holds it to that.
SCRIPT = """import argparse
class UserError(Exception): pass
def parse_args(argv):
    if "--sede" in argv: raise UserError
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--preset", default="record")
    parser.add_argument("--sequences_per_step", type=int, default=8)
    parser.add_argument("--train_files", default="data/fineweb10B/fineweb_train_*.bin")
    cfg, _ = parser.parse_known_args(argv)
    if cfg.preset != "record": cfg.train_files = f"data/{cfg.preset}/{cfg.preset}_train_*.bin"
    return cfg
"""
VENV_PYTHON = """import os, sys
from pytest import record
if sys.argv[1] == "-c": sys.exit(print(0))
record("venv", *sys.argv[1:])
if sys.argv[1:4] == ["-m", "pip", "install"] and "-r" in sys.argv:
    if os.environ.get("PIP_FAILS"): sys.exit("ERROR: No matching distribution found for torch")
"""
TORCHRUN = """from pytest import record
def parse_args(words): return words
def run(words): record("torchrun", *words)
"""
FILES = {
    "a clone/requirements.txt": "torch==2.13.0\n",
    "a clone/requirements-dev.txt": "-r requirements.txt\n",
    "a clone/train_gpt.py": SCRIPT + STUB,
    "a clone/data/pocket.py": STUB,
    "a clone/data/fineweb.py": STUB,
    "a clone/data/sample.py": STUB,
    "a clone/.venv/bin/python": '#!/bin/sh\nexec "$PYTHON" "$STUBS/venv_python.py" "$@"\n',
    "stubs/pytest.py": STUB,
    "stubs/venv_python.py": VENV_PYTHON,
    "stubs/torch/__init__.py": "from torch import cuda",
    "stubs/torch/cuda.py": "import os\ndef device_count(): return int(os.environ['GPUS'])",
    "stubs/torch/distributed/run.py": TORCHRUN,
    "stubs/torch/distributed/elastic/multiprocessing/errors.py": "ChildFailedError = OSError",
    "stubs/bin/nvidia-smi": "#!/bin/sh\n",
    "stubs/bin/python3.9": '#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.6; exit 1',
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

    def run(self, *args, gpus=0, code=0, **env):
        """Run run.sh from another folder; its exit code is `code`, its calls are in self.calls."""
        calls = self.folder / "calls"
        calls.write_text("")
        env = dict(PATH=f"{self.stubs / 'bin'}:{os.environ['PATH']}", PYTHON=sys.executable,
                   PYTHONPATH=self.stubs, STUBS=self.stubs, CALLS=calls, GPUS=str(gpus)) | env
        done = subprocess.run([self.root / "run.sh", *args], cwd=self.folder / "else where",
                              env=os.environ | env, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        self.calls = [json.loads(line) for line in calls.read_text().splitlines()]
        return done

    def called(self, name):
        """The arguments of each call of `name` in the last run."""
        return [args for caller, *args in self.calls if caller == name]

    def pip_installs(self):
        """The last words of each call of pip that installs."""
        return [args[3:] for args in self.called("venv") if args[:3] == ["-m", "pip", "install"]]


@pytest.fixture
def fake(tmp_path):
    return FakeRepo(tmp_path)


POCKET = "--preset pocket --save_every 240"
PLANS = [  # GPUs, flags, the data that are made, processes, flags that are put first
    # Without a CUDA device
    (0, "--run_id=ab --val_files x", "pocket", 1, POCKET),
    (0, "--preset pocket --seed 3", "pocket", 1, ""),
    (0, "--preset=pocket --seed 3", "pocket", 1, ""),
    (0, "--train_files mine/*.bin", "", 1, POCKET),
    # A checkpoint brings its preset and its data; a run that goes on keeps its own.
    (0, "--resume logs/x/step-000240.pt", "", 1, ""),
    (1, "--seed 3 --resume=logs/x/step-000240.pt --val_files x", "", 1, ""),
    (0, "--run_id x --resume auto", "pocket", 1, POCKET),
    (0, "--run_id x --resume=auto", "pocket", 1, POCKET),
    # With CUDA devices: the processes divide the sequences of a step.
    (1, "--seed 1", "fineweb", 1, ""),
    (3, "", "fineweb", 2, ""),
    (6, "", "fineweb", 4, ""),
    (8, "", "fineweb", 8, ""),
    (8, "--sequences_per_step 12", "fineweb", 6, ""),
    (4, "--preset pocket", "pocket", 1, ""),
    (1, "--train_files mine/*.bin", "", 1, ""),
    # Wrong flags reach the script before any download.
    (8, "--sede 3", "", 1, "")]


@pytest.mark.parametrize(("gpus", "flags", "data", "processes", "first"), PLANS)
def test_a_run_makes_its_data_and_starts_its_processes(fake, gpus, flags, data, processes, first):
    said = fake.run(*flags.split(), gpus=gpus).stderr
    call = ["train_gpt"]
    if processes > 1:
        script = str(fake.root / "train_gpt.py")
        call = ["torchrun", "--standalone", f"--nproc_per_node={processes}", script]
    made = [[data]] if data else []
    assert fake.calls == [*made, [*call, *first.split(), *flags.split()]]
    idle = 1 < processes < gpus
    assert f"{processes} of {gpus} GPUs" in said if idle else said == ""


def test_words_the_folder_and_the_exit_code_are_handed_on(fake):
    flags = ["--val_files", "two  words", "--run_id=a b"]
    printed = fake.run(*flags, train_gpt="75", code=75).stdout
    assert fake.called("train_gpt") == [[*POCKET.split(), *flags]]
    assert printed.splitlines()[-1] == str(fake.folder / "else where")
    fake.run("sample", "--prompt", "two  words")
    assert fake.calls == [["sample", "--prompt", "two  words"]]
    printed = fake.run("test", "-k", "muon or adam").stdout
    words = "-n auto --maxprocesses 8 -k".split()
    assert fake.calls == [["pocket"], ["pytest", *words, "muon or adam"]]
    assert printed.splitlines()[-1] == str(fake.root)


@pytest.mark.parametrize("flags", ["", "--preset pocket --sequences_per_step 4"])
def test_the_stub_means_what_the_script_means(flags):
    stub = {"__name__": "stub"}
    exec(SCRIPT, stub)
    ours, real = stub["parse_args"](flags.split()), train_gpt.parse_args(flags.split())
    assert vars(ours).items() <= vars(real).items()
    with pytest.raises(train_gpt.UserError):
        train_gpt.parse_args(["--sede", "3"])


def test_missing_packages_are_installed_once(fake):
    fake.set_torch("2.10.1")
    last = fake.run(PIP_FAILS="1", code=2).stderr.splitlines()[-1]  # and is not taken for done
    assert "No matching distribution found for torch" in last and "check the network" in last
    assert fake.called("venv")[-1][:3] == ["-m", "pip", "install"]
    packages = fake.root / ".venv/lib/python3.11/site-packages"
    write(packages / "whole-1.dist-info" / "INSTALLER", "pip\n")
    write(packages / "cut-1.dist-info" / "METADATA", "")
    script, data = str(fake.root / "train_gpt.py"), str(fake.root / "data" / "pocket.py")
    fake.run()
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]
    assert fake.pip_installs()[-1] == ["-r", str(fake.root / "requirements.txt")]
    assert fake.called("venv")[-1][0] == script
    fake.run()
    assert fake.called("venv") == [[data], [script, *POCKET.split()]]
    fake.run("test")  # wants those of the tests too
    assert fake.pip_installs()[-1] == ["-r", str(fake.root / "requirements-dev.txt")]
    assert fake.called("venv")[-1][:2] == ["-m", "pytest"]
    for args in (["test"], []):
        fake.run(*args)
        assert not fake.pip_installs()
    write(fake.root / "requirements.txt", "torch==2.14.0\n")
    fake.run()
    assert fake.pip_installs()


def test_active_torch_that_is_not_the_pinned_one_is_named(fake):
    fake.set_torch("2.12.0+cu130")
    said = fake.run().stderr
    assert "2.12.0+cu130" in said and "2.13.0" in said
    assert fake.called("train_gpt") and not fake.called("venv")
    fake.set_torch("2.13.0+cpu")
    assert fake.run().stderr == ""


@pytest.mark.parametrize(("name", "said"), [
    ("python3.9", "Python 3.9.6"), ("/no/such/python", "no /no/such/python here")])
def test_old_and_missing_pythons_are_refused_in_one_line(fake, name, said):
    errors = fake.run(PYTHON=name, code=2).stderr
    assert errors.count("\n") == 1 and said in errors and "3.11" in errors and not fake.calls


def test_help_installs_nothing(fake):
    fake.set_torch("2.10.1")
    assert "./run.sh test" in fake.run("--help").stdout and not fake.calls
    fake.set_torch("2.13.0")
    fake.run("--seed", "1", "--help")
    assert fake.calls == [["train_gpt", "--help"]]
