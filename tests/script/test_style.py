"""train_gpt.py as a file: its length, its sections, what importing it does, what it needs."""

import ast
import re
import subprocess
import sys

from conftest import REPO

SCRIPT = REPO / "train_gpt.py"
SECTIONS = [
    "Setup",
    "Hyperparameters",
    "Data",
    "Model",
    "Optimizers",
    "Schedules",
    "Distributed and logging",
    "Checkpoints",
    "Validation",
    "Training",
]
RUNTIME_PACKAGES = {"torch", "numpy", "tiktoken", "huggingface_hub"}

# Imports the script and fails where that did more than import modules. What torch itself opens
# while it is imported is out of sight: it is there already.
IMPORT_PROBE = """
import os, sys, signal
import numpy, torch, torch.utils.checkpoint, torch.nn.attention.flex_attention
import torch.distributed as dist
events, handlers = [], [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
sys.addaudithook(lambda event, args: events.append((event, str(args[:1]))))
import train_gpt
print(*[e for e in events if e[0].startswith(("socket.", "subprocess."))], sep="", end="")
print(*[e for e in events if e[0] == "open" and ".py" not in e[1]], sep="", end="")
print(*{"torch._dynamo", "torch._inductor"} & set(sys.modules), sep="", end="")  # seconds of CPU
assert not dist.is_initialized() and not torch.cuda.is_initialized()
assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
assert os.listdir() == [], os.listdir()
"""


def test_script_is_at_most_1200_lines_of_100_columns():
    lines = SCRIPT.read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > 100] == []
    assert len(lines) <= 1200


def test_sections_come_in_the_one_order():
    banners = re.findall("^# -{4} (.*) -+$", SCRIPT.read_text(), re.M)
    assert [title.partition(" (")[0] for title in banners] == SECTIONS
    assert len(set(re.findall("^# -{4} .*$", SCRIPT.read_text(), re.M))) == len(SECTIONS)


def test_import_prints_nothing_reads_no_shard_and_starts_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_script_imports_only_the_standard_library_and_runtime_packages():
    imported = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) <= RUNTIME_PACKAGES


def test_requirements_are_the_runtime_packages_with_torch_pinned():
    lines = (REPO / "requirements.txt").read_text().split()
    pins = dict(re.fullmatch(r"([\w-]+)([=>~]=[\d.]+)", line).groups() for line in lines)
    assert set(pins) == RUNTIME_PACKAGES
    assert pins["torch"] == "==2.13.0"
