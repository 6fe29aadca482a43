"""train_gpt.py as a file: its length, its sections, what importing it does, what it needs."""

import ast
import io
import re
import subprocess
import sys
import tokenize

from conftest import REPO

SCRIPT = REPO / "train_gpt.py"
RECORD = ["Hyperparameters", "Model", "Optimizers", "Schedules", "Training"]
HARNESS = ["Data", "Validation", "Checkpoints", "Ranks and log", "The run", "Command line"]
MOST_TOKENS, MOST_A_LINE = 11_000, 10.5  # names, numbers, strings and operators
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


def docstring_lines(tree):
    """The numbers of the lines that hold docstrings."""
    lines = set()
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            lines.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def test_the_script_is_short_to_read():
    """Measured in what a reader takes in, so that nothing is won by cramming lines."""
    source = SCRIPT.read_text()
    assert [line for line in source.splitlines() if len(line) > 100] == []
    documented = docstring_lines(ast.parse(source))
    words = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    lines = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in words and token.start[0] not in documented:
            lines.append(token.start[0])
    assert len(lines) <= MOST_TOKENS
    assert len(lines) / len(set(lines)) <= MOST_A_LINE


def test_sections_come_in_the_one_order_around_one_banner():
    titles = re.findall("^# (?:-{4}|={4}) (.*?) [-=]+$", SCRIPT.read_text(), re.M)
    (banner,) = re.findall("^# ==== (.*?) =+$", SCRIPT.read_text(), re.M)
    assert banner.startswith("Harness") and titles == [*RECORD, banner, *HARNESS]


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
