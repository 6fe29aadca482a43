"""The contract between a record and the harness, which stands at the banner, is what the code does.
"""

import ast
import builtins
import re

import pytest
from record_folders import RECORDS

BANNER = "\n# ==== Harness"
ASKED, OFFERED = "# What it asks of a record:", "# What a record may use of it:"


def parts_of(path):
    """The trees of a script above and below its banner, and the text of the contract."""
    source = (path / "train_gpt.py").read_text("utf-8")
    above, _, below = source.partition(BANNER)
    contract = below[: below.index("\nimport ")]
    return ast.parse(above), ast.parse(below.partition("\n")[2]), contract


def defined(tree):
    """Names of a module's own definitions, and those that it imports."""
    own, imported = set(), set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            own |= {name.id for name in ast.walk(node)
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return own, imported


def used(tree):
    return {node.id for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_record_and_harness_use_what_the_contract_names(path):
    above, below, contract = parts_of(path)
    asked, offered = contract.split(OFFERED)
    asked = set(re.findall(r"\w+", asked.split(ASKED)[1]))
    offered, of_run = (set(re.findall(r"\w+", part)) for part in offered.split("of `run`:"))
    mine, _ = defined(above)
    its, imported = defined(below)
    from_record = used(below) & mine - set(dir(builtins))
    assert from_record - {"SCRIPT", "SOURCE"} <= asked
    from_harness = used(above) & (its | imported) - defined(above)[1]
    assert from_harness <= offered
    members = {node.attr for node in ast.walk(above) if isinstance(node, ast.Attribute)
               and isinstance(node.value, ast.Name) and node.value.id == "run"}
    assert members <= of_run


def test_nothing_stands_in_the_contract_that_no_record_uses():
    used_of_run = set()
    for path in RECORDS:
        above, below, contract = parts_of(path)
        used_of_run |= {node.attr for node in ast.walk(above) if isinstance(node, ast.Attribute)
                        and isinstance(node.value, ast.Name) and node.value.id == "run"}
    assert set(re.findall(r"\w+", contract.split("of `run`:")[1])) == used_of_run


# Of most records these functions are the same to the byte. Those that differ, and why:
REASONS = {
    "order_blocks": {},
    "dense_mask": {"2024-": "blocks are larger", "2025-0": "the same"},
    "flex_mask": {"2024-": "blocks of keys, not tokens, are counted back", "2025-0": "the same"},
    "FP8Product": {"92h": "scales of each layer", "92i": "the same", "92j": "the same"},
    "to_fp8": {"92h": "scales of each layer", "92i": "the same", "92j": "the same"},
    "round_up": {},
    "compile_on_gpu": {},
    "consecutive_rows": {},
}


@pytest.mark.parametrize("name", REASONS)
def test_what_most_records_share_is_the_same_in_all_without_a_reason(name):
    versions = {}
    for path in RECORDS:
        source = (path / "train_gpt.py").read_text("utf-8").partition(BANNER)[0]
        for node in ast.parse(source).body:
            if getattr(node, "name", None) == name:
                versions.setdefault(ast.get_source_segment(source, node), []).append(path.name)
    most = max(versions.values(), key=len)
    for members in versions.values():
        if members is not most:
            for member in members:
                assert any(part in member for part in REASONS[name]), f"{name} of {member} differs"
