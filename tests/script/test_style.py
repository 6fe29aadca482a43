"""train_gpt.py as a file: its sections, how dense it is, what it imports and what that does."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter

from conftest import REPO

SOURCE = (REPO / "train_gpt.py").read_text()
TREE = ast.parse(SOURCE)
NODES = list(ast.walk(TREE))
MOST = {
    "record": 7_500,  # tokens above the banner: names, numbers, strings, operators, no docstrings
    "harness": 4_700,  # tokens below it
    "tokens a line": 10.5,  # of those that have any
    "packed": 5,  # comprehensions, conditional expressions and := in a hundred statements
    "pairs": 10,  # statements of the kind `a, b = x, y`
    "wide": 0.08,  # share of lines of more than 90 columns
    "widest": 100,  # columns
    "longest function": 50,  # lines
    "positional arguments": 6}
LEAST = {"comments": 0.2}  # a line that has tokens

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


@functools.cache
def measures():
    words = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
    documentable = ast.Module | ast.ClassDef | ast.FunctionDef
    documented, tokens, comments = set(), Counter(), 0
    for node in NODES:
        if isinstance(node, documentable) and ast.get_docstring(node):
            documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline):
        comments += token.type == tokenize.COMMENT
        if token.type in words and token.start[0] not in documented:
            tokens[token.start[0]] += 1
    banner = SOURCE[: SOURCE.index("\n# ==== Harness")].count("\n") + 2  # its line
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    packed = sum(isinstance(x, comprehensions | ast.IfExp | ast.NamedExpr) for x in NODES)
    widths = [len(line) for line in SOURCE.splitlines()]
    functions = [node for node in NODES if isinstance(node, ast.FunctionDef)]
    return {
        "record": sum(count for line, count in tokens.items() if line < banner),
        "harness": sum(count for line, count in tokens.items() if line > banner),
        "tokens a line": tokens.total() / len(tokens),
        "packed": 100 * packed / sum(isinstance(node, ast.stmt) for node in NODES),
        "pairs": sum(isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
                     and isinstance(node.targets[0], ast.Tuple) for node in NODES),
        "wide": sum(width > 90 for width in widths) / len(widths),
        "widest": max(widths),
        "comments": comments / len(tokens),
        "longest function": max(f.end_lineno - f.lineno + 1 for f in functions),
        "positional arguments": max(len(f.args.posonlyargs + f.args.args) for f in functions)}


def test_the_script_is_not_dense():
    for measure, value in measures().items():
        assert LEAST.get(measure, 0) <= value <= MOST.get(measure, value), measure


def test_import_prints_nothing_reads_no_shard_and_starts_nothing(tmp_path):
    env = {"PYTHONPATH": str(REPO), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", IMPORT_PROBE], cwd=tmp_path, env=env,
                          text=True, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_imports_the_standard_library_and_the_requirements_with_torch_pinned():
    pairs = re.findall(r"^ *(?:from (\w+)\S* )?import (\w+)", SOURCE, re.M)
    imported = {package or module for package, module in pairs}
    lines = (REPO / "requirements.txt").read_text().split()
    pins = dict(re.fullmatch(r"([\w-]+)([=>~]=[\d.]+)", line).groups() for line in lines)
    assert set(pins) == {"torch", "numpy", "tiktoken", "huggingface_hub"}
    assert pins["torch"] == "==2.13.0"
    assert imported - set(sys.stdlib_module_names) <= set(pins)
