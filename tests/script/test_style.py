"""The scripts as files: what fits a screen, what train_gpt.py imports and what that does."""

import ast
import re
import subprocess
import sys

import pytest
from conftest import REPO, SCRIPTS

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


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_and_functions_fit_a_screen(script):
    """The linter leaves out the records."""
    source = (REPO / script).read_text()
    assert max(map(len, source.splitlines())) <= 100
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_import_prints_nothing_reads_no_shard_and_starts_nothing(tmp_path):
    env = {"PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORT_PROBE], cwd=tmp_path, env=env,
                          text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_imports_the_standard_library_and_the_requirements_with_torch_pinned():
    source = (REPO / "train_gpt.py").read_text()
    pairs = re.findall(r"^ *(?:from (\w+)\S* )?import (\w+)", source, re.M)
    imported = {package or module for package, module in pairs}
    lines = (REPO / "requirements.txt").read_text().split()
    pins = dict(re.fullmatch(r"([\w-]+)([=>~]=[\d.]+)", line).groups() for line in lines)
    assert set(pins) == {"torch", "numpy", "tiktoken", "huggingface_hub"}
    assert pins["torch"].startswith("==")
    assert imported - set(sys.stdlib_module_names) <= set(pins)
