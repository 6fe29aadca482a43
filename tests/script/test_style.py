"""The scripts as files: what fits a screen, and what train_gpt.py imports."""

import ast
import re
import sys

import pytest
from conftest import REPO, SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_and_functions_fit_a_screen(script):
    """The linter leaves out the records. What is below their banner is the root's."""
    source = (REPO / script).read_text()
    if script != SCRIPTS[0]:
        source = source.partition("# ==== Harness")[0]
    assert max(map(len, source.splitlines())) <= 100
    tree = ast.parse(source)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for owner in (tree, *classes):
        for node in owner.body:
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, node.name


def test_it_imports_the_standard_library_and_the_requirements_with_torch_pinned():
    source = (REPO / "train_gpt.py").read_text()
    pairs = re.findall(r"^ *(?:from (\w+)\S* )?import (\w+)", source, re.M)
    imported = {package or module for package, module in pairs}
    lines = (REPO / "requirements.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)([=>~]=[\d.]+)", lines, re.M))
    assert set(pins) == {"torch", "numpy", "tiktoken", "huggingface_hub"}
    assert pins["torch"].startswith("==")
    assert imported - set(sys.stdlib_module_names) <= set(pins)
