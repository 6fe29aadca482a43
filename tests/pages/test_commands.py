"""The commands and the Python on the pages run as they stand there, or are marked.

A block of a page runs in a copy of the project, line by line, with further flags where it takes
long, which SMALLER names. Of blocks that differ in the records they name alone, one runs.
"""

import fnmatch
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE, REPO, SCRIPTS, copy_project
from page_text import PAGES, blocks_of

import train_gpt

FEW = "--num_iterations 2 --sequences_per_step 4 --val_tokens 4096 --warmup_steps 0"
FEW_STEPS = "num_iterations=2,sequences_per_step=4,val_tokens=4096,warmup_steps=0"
SMALLER = {  # patterns of commands, and the flags that are added where they run
    "./run.sh": FEW,
    "./run.sh --record o36 --help": "",
    "./run.sh --record o36": FEW,
    "./run.sh sample *": "--tokens 5",
    "python train_gpt.py *": FEW,
    "python records/ledger run *": "--seeds 2",
    "python tests/bench.py turns *": f"{FEW} --seeds 1",
    "python records/*": "", "python data/*": "", "xzcat dump.xz | python data/*": ""}


def form_that_runs(command):
    """The command with its further flags; it has to be known here."""
    known = [flags for pattern, flags in SMALLER.items() if fnmatch.fnmatchcase(command, pattern)]
    assert known, f"{command}: say in SMALLER how it runs, or mark its block"
    if "ledger run" in command:
        command = command.replace("train_gpt.py:", f"train_gpt.py:{FEW_STEPS},")
        command = command.replace("train_gpt.py ", f"train_gpt.py:{FEW_STEPS} ")
        command = re.sub(r"(records/(?:optimizers/)?20[\w-]+)", rf"\1:{FEW_STEPS}", command)
    return f"{command} {known[0]}"


def to_run(language):
    """The different blocks that are run, as parameters of a test."""
    blocks = {}
    for page in PAGES:
        for block in blocks_of(page):
            if block.language == language and block.is_run:
                blocks[re.sub(r"records/(optimizers/)?20\S+", "RECORD", block.text)] = block
    for block in blocks.values():
        yield pytest.param(block, id=f"{block.page}: {block.text.strip()[:60]}")


def run(command, capfd):
    """Run a command as a shell does; what it printed. It has to succeed."""
    capfd.readouterr()
    if command.startswith("python train_gpt.py "):  # in this process, which has imported torch
        code = train_gpt.main(shlex.split(command)[2:])
    else:
        code = subprocess.run(["bash", "-o", "pipefail", "-c", command], timeout=PATIENCE,
                              stdin=subprocess.DEVNULL).returncode
    out, errors = capfd.readouterr()
    assert code == 0, f"{command}\n{out[-2000:]}\n{errors[-2000:]}"
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, pocket_data):
    """Of a run of two steps, in a folder and under a name that the pages have."""
    flags = f"--preset pocket --device cpu --run_id RUN {FEW} --save_every 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("trained"))
        assert train_gpt.main(flags.split()) == 0
        return Path("logs/RUN/step-000002.pt").rename("logs/RUN/step-000120.pt").resolve()


@pytest.fixture
def project(tmp_path, checkpoint, monkeypatch):
    """A copy of the project, in which this process stands, with the checkpoint and the texts that
    the pages name."""
    copy = tmp_path / "project"
    for folder in ("papers", "home/projects"):
        (copy / folder).mkdir(parents=True)
        for number in range(20):
            (copy / folder / f"{number}.py").write_text(f"# {number} is a number.\n" * 500)
    (copy / "novel.txt").write_text("It was a night like any other. " * 2000)
    (copy / "dump.xz").write_bytes(lzma.compress(b"A line of a dump.\n" * 5000))
    copy_project(copy)
    shutil.copytree(checkpoint.parent, copy / "logs" / "RUN")
    monkeypatch.chdir(copy)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(copy / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTHON", raising=False)
    return copy


def test_commands_can_be_pasted_into_zsh():
    """Where one types, it takes no # for the beginning of a comment."""
    commands = {command: page for page in PAGES for block in blocks_of(page)
                for command in block.commands()}
    for script in SCRIPTS:
        docstring = (REPO / script).read_text().split('"""')[1]
        for command in re.findall(r"^    (?=\S*(?:python|torchrun) )(.*)", docstring, re.MULTILINE):
            commands[command] = script
    assert commands
    for command, where in commands.items():
        assert not re.search(r"(^|\s)#", command), f"{where}: {command}"
        assert "torchrun --standalone" not in command or "--local-addr=127.0.0.1" in command, where


@pytest.mark.slow
@pytest.mark.parametrize("block", [*to_run("sh")])
def test_commands_run(block, project, capfd):
    for command in block.commands():
        printed = run(form_that_runs(command), capfd)
        if command == "./run.sh" or command.startswith("python train_gpt.py"):
            assert " val_loss:" in printed


@pytest.mark.slow
@pytest.mark.parametrize("block", [*to_run("python")])
def test_python_runs(block, project):
    exec(block.text, {})
