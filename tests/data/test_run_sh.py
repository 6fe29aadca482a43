"""run.sh in a copy of the repository whose script, data makers, torch and .venv write down calls.

Nothing is installed, downloaded or trained: each stub appends its name and arguments to a file.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO

RECORD = """import json, os, sys
def record(name, *args):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(json.dumps([name, *args]) + "\\n")
"""

# The part of the script that run.sh imports; test_plan_reads_the_script holds it to the real one.
SCRIPT = """import argparse, record, os, sys
class UserError(Exception): pass
class Parser(argparse.ArgumentParser):
    def error(self, message): raise UserError(message)
def parse_args(argv):
    parser = Parser(allow_abbrev=False)
    parser.add_argument("--preset", default="record")
    parser.add_argument("--sequences_per_step", type=int, default=8)
    parser.add_argument("--train_files", default="data/fineweb10B/fineweb_train_*.bin")
    parser.add_argument("--seed", type=int)
    for name in ("resume", "run_id", "val_files"):
        parser.add_argument(f"--{name}", default="")
    cfg = parser.parse_args(argv)
    if cfg.preset != "record": cfg.train_files = f"data/{cfg.preset}/{cfg.preset}_train_*.bin"
    return cfg
if __name__ == "__main__":
    record.record("train_gpt", *sys.argv[1:])
    print(os.getcwd())
    sys.exit(int(os.environ.get("SCRIPT_STATUS", "0")))
"""

VENV_PYTHON = """import os, record, sys
if sys.argv[1] == "-c": sys.exit(print(0))
record.record("venv", *sys.argv[1:])
if sys.argv[1:4] == ["-m", "pip", "install"] and "-r" in sys.argv:
    if os.environ.get("PIP_FAILS"): sys.exit("ERROR: No matching distribution found for torch")
"""


class FakeRepo:
    """A repository with run.sh in it, in a path with spaces, and what its last run called."""

    def __init__(self, folder):
        self.root, self.stubs = folder / "a clone", folder / "some stubs"
        self.elsewhere, self.calls_file = folder / "else where", folder / "calls"
        for name in ("data", ".venv/bin"):
            (self.root / name).mkdir(parents=True)
        self.elsewhere.mkdir()
        shutil.copy(REPO / "run.sh", self.root)
        self.write("requirements.txt", "torch==2.13.0\n")
        self.write("requirements-dev.txt", "-r requirements.txt\n")
        self.write("train_gpt.py", SCRIPT)
        for name in ("pocket", "fineweb"):
            self.write(f"data/{name}.py", f"import record; record.record({name!r})")
        self.write("data/sample.py", "import record, sys; record.record('sample', *sys.argv[1:])")
        self.stub("record.py", RECORD)
        self.stub("torch/__init__.py", "from torch import cuda")
        self.stub("torch/cuda.py", "import os\ndef device_count(): return int(os.environ['GPUS'])")
        recording = "import os, record, sys; record.record"
        self.stub("torch/distributed/run.py", "import record\ndef parse_args(words): return words\n"
                  "def run(words): record.record('torchrun', *words)\n")
        self.stub("torch/distributed/elastic/multiprocessing/errors.py",
                  "class ChildFailedError(Exception): pass")
        self.stub("pytest.py", f"{recording}('pytest', os.getcwd(), *sys.argv[1:])")
        self.stub("venv_python.py", VENV_PYTHON)
        self.set_torch("2.13.0")
        self.program(self.stubs / "bin" / "nvidia-smi", "exit 0")
        self.program(self.root / ".venv/bin/python",
                     f'exec "{sys.executable}" "{self.stubs}/venv_python.py" "$@"')

    def write(self, name, text):
        (self.root / name).write_text(text)

    def stub(self, name, text):
        path = self.stubs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def program(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def set_torch(self, version):
        """Make `version` the one that the active Python has."""
        self.stub("torch-0.dist-info/METADATA", f"Name: torch\nVersion: {version}\n")

    def run(self, *args, gpus=0, **env):
        """Run run.sh from another folder; returns the process, its calls are in self.calls."""
        self.calls_file.write_text("")
        process = subprocess.run(
            [self.root / "run.sh", *args],
            cwd=self.elsewhere,
            env={
                **os.environ,
                "PATH": f"{self.stubs / 'bin'}:{os.environ['PATH']}",
                "PYTHON": sys.executable,
                "PYTHONPATH": str(self.stubs),
                "CALLS": str(self.calls_file),
                "GPUS": str(gpus),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.calls = [json.loads(line) for line in self.calls_file.read_text().splitlines()]
        return process

    def called(self, name):
        """The arguments of each call of `name` in the last run."""
        return [args for caller, *args in self.calls if caller == name]

    def pip_installs(self):
        return [args for args in self.called("venv") if args[:3] == ["-m", "pip", "install"]]


POCKET = ["--preset", "pocket", "--save_every", "240"]


@pytest.fixture
def fake(tmp_path):
    return FakeRepo(tmp_path)


# Without a CUDA device


def test_flags_are_handed_on_in_the_current_folder(fake):
    flags = ["--seed", "3", "--val_files", "two  words", "--run_id=a b"]
    process = fake.run(*flags)
    assert process.returncode == 0, process.stderr
    assert fake.calls == [["pocket"], ["train_gpt", *POCKET, *flags]]
    assert process.stdout.strip() == str(fake.elsewhere)


def test_sampling_makes_no_data_and_takes_the_flags_as_they_are(fake):
    process = fake.run("sample", "--prompt", "two  words")
    assert process.returncode == 0, process.stderr
    assert fake.calls == [["sample", "--prompt", "two  words"]]


@pytest.mark.parametrize("flags", [["--preset", "pocket"], ["--preset=record"]])
def test_a_named_preset_is_kept(fake, flags):
    fake.run(*flags, "--seed", "3")
    assert fake.called("train_gpt") == [[*flags, "--seed", "3"]]


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("flags", [
    ["--resume", "logs/x/step-000240.pt"],
    ["--resume=logs/x/step-000240.pt", "--val_files", "a val"],
    ["--seed", "3", "--resume", "a checkpoint.pt"],
])  # fmt: skip
def test_a_checkpoint_brings_its_preset_and_its_data(fake, flags, gpus):
    process = fake.run(*flags, gpus=gpus)
    assert process.returncode == 0, process.stderr
    assert fake.calls == [["train_gpt", *flags]]


@pytest.mark.parametrize("resume", [["--resume", "auto"], ["--resume=auto"]])
def test_a_run_that_goes_on_keeps_its_preset(fake, resume):
    fake.run("--run_id", "x", *resume)
    assert fake.calls == [["pocket"], ["train_gpt", *POCKET, "--run_id", "x", *resume]]


def test_exit_code_is_handed_on(fake):
    assert fake.run(SCRIPT_STATUS="75").returncode == 75


def test_torch_is_not_asked_where_no_driver_is(fake):
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("a driver is here")
    fake.stub("torch/cuda.py", "raise SystemExit('torch was imported')")
    (fake.stubs / "bin" / "nvidia-smi").unlink()
    assert fake.run().returncode == 0


# With CUDA devices


@pytest.mark.parametrize(
    "gpus, flags, processes",
    [
        (3, [], 2),
        (5, [], 4),
        (6, [], 4),
        (8, [], 8),
        (8, ["--sequences_per_step", "12"], 6),
        (4, ["--sequences_per_step=3"], 3),
    ],
)
def test_processes_divide_the_sequences_of_a_step(fake, gpus, flags, processes):
    process = fake.run(*flags, gpus=gpus)
    launch = ["--standalone", f"--nproc_per_node={processes}", str(fake.root / "train_gpt.py")]
    assert fake.calls == [["fineweb"], ["torchrun", *launch, *flags]], process.stderr
    assert (f"{processes} of {gpus} GPUs" in process.stderr) == (processes < gpus)


def test_one_gpu_runs_the_script_itself(fake):
    fake.run("--seed", "1", gpus=1)
    assert fake.calls == [["fineweb"], ["train_gpt", "--seed", "1"]]


def test_pocket_on_gpus_is_one_process_without_fineweb(fake):
    fake.run("--preset", "pocket", gpus=4)
    assert fake.calls == [["pocket"], ["train_gpt", "--preset", "pocket"]]


@pytest.mark.parametrize("gpus", [0, 1])
def test_own_data_needs_no_other(fake, gpus):
    fake.run("--train_files", "mine/*.bin", gpus=gpus)
    assert [name for name, *_ in fake.calls] == ["train_gpt"]


def test_wrong_flags_reach_the_script_before_any_download(fake):
    process = fake.run("--sede", "3", gpus=8, SCRIPT_STATUS="2")
    assert fake.calls == [["train_gpt", "--sede", "3"]]
    assert process.returncode == 2 and process.stderr == ""


def test_plan_reads_the_script():
    """What run.sh imports from the script is there, and means what the stub above says."""
    import train_gpt

    cfg = train_gpt.parse_args(["--sequences_per_step", "4"])
    assert (cfg.preset, cfg.sequences_per_step) == ("record", 4)
    assert "fineweb" in cfg.train_files
    cfg = train_gpt.parse_args(["--preset", "pocket"])
    assert cfg.preset == "pocket" and "pocket" in cfg.train_files
    cfg = train_gpt.parse_args(["--resume", "a.pt", "--run_id", "x", "--val_files", "y"])
    assert (cfg.resume, cfg.run_id, cfg.val_files) == ("a.pt", "x", "y")
    with pytest.raises(train_gpt.UserError):
        train_gpt.parse_args(["--sede", "3"])


# Set-up


def test_tests_run_in_the_repository_with_the_arguments(fake):
    fake.run("test", "-k", "muon or adam")
    words = ["pytest", str(fake.root), "-n", "auto", "-k", "muon or adam"]
    assert fake.calls == [["pocket"], words]


def test_missing_packages_are_installed_once(fake):
    fake.set_torch("2.10.1")
    assert fake.run().returncode == 0
    assert fake.pip_installs()[-1][3:] == ["-r", str(fake.root / "requirements.txt")]
    assert fake.called("venv")[-1][0] == str(fake.root / "train_gpt.py")

    fake.run()
    assert fake.called("venv") == [
        [str(fake.root / "data" / "pocket.py")],
        [str(fake.root / "train_gpt.py"), *POCKET],
    ]

    fake.write("requirements.txt", "torch==2.14.0\n")
    fake.run()
    assert fake.pip_installs()


def test_packages_of_the_tests_are_installed_beside_those_of_training(fake):
    fake.set_torch("2.10.1")
    fake.run()
    fake.run("test")
    assert fake.pip_installs()[-1][3:] == ["-r", str(fake.root / "requirements-dev.txt")]
    assert fake.called("venv")[-1][:2] == ["-m", "pytest"]
    fake.run("test")
    fake.run()
    assert not fake.pip_installs()


def test_failed_install_is_one_line_and_not_taken_for_done(fake):
    fake.set_torch("2.10.1")
    process = fake.run(PIP_FAILS="1")
    assert process.returncode == 2
    assert "No matching distribution found for torch" in process.stderr.splitlines()[-1]
    assert "check the network" in process.stderr.splitlines()[-1]
    assert fake.called("venv")[-1][:3] == ["-m", "pip", "install"]
    fake.run()
    assert fake.pip_installs()


def test_package_that_was_cut_short_is_installed_anew(fake):
    packages = fake.root / ".venv/lib/python3.11/site-packages"
    for name in ("cut-1.dist-info", "whole-1.dist-info"):
        (packages / name).mkdir(parents=True)
    (packages / "whole-1.dist-info" / "INSTALLER").write_text("pip\n")
    fake.set_torch("2.10.1")
    fake.run()
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_active_torch_that_is_not_the_pinned_one_is_named(fake):
    fake.set_torch("2.12.0+cu130")
    process = fake.run()
    assert "2.12.0+cu130" in process.stderr and "2.13.0" in process.stderr
    assert fake.called("train_gpt") and not fake.called("venv")
    fake.set_torch("2.13.0+cpu")
    assert fake.run().stderr == ""


def test_old_python_is_refused_in_one_line(fake):
    old = fake.stubs / "bin" / "python3.9"
    fake.program(old, '[ "$1" = -V ] && echo Python 3.9.6; exit 1')
    process = fake.run(PYTHON=str(old))
    assert process.returncode == 2 and not fake.calls
    assert len(process.stderr.splitlines()) == 1
    assert "Python 3.9.6" in process.stderr and "3.11" in process.stderr


def test_missing_python_is_one_line(fake):
    process = fake.run(PYTHON="/no/such/python")
    assert process.returncode == 2 and not fake.calls
    assert len(process.stderr.splitlines()) == 1 and "/no/such/python" in process.stderr


def test_help_installs_nothing(fake):
    fake.set_torch("2.10.1")
    process = fake.run("--help")
    assert process.returncode == 0 and not fake.calls
    assert "./run.sh test" in process.stdout
    fake.set_torch("2.13.0")
    fake.run("--seed", "1", "--help")
    assert fake.calls == [["train_gpt", "--help"]]
