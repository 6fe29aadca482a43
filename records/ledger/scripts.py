"""Scripts: what their source means, what changed between two, and what they say of themselves."""

import ast
import difflib
import functools
import multiprocessing
import re
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType

from ledger.logs import LedgerError, read_text

BANNER = "\n# ==== "  # between a record's own part of its script and the harness
HEADING = re.compile(r"# [-=]{2,} (\w.*?) ?[-=]{3,}")  # of our sections, and the harness's banner


# ---- What a source means ----
def above(source: str) -> str:
    """A record's own part of its script."""
    return source.partition(BANNER)[0]


@functools.cache
def meaning(source: str) -> str:
    """A source without comments, docstrings and imports: runs of equal ones are equal."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    kept = []
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            kept.append(ast.dump(node))
    return "\n".join(kept)


def imports_of(source: str) -> set:
    """The modules that a source imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


# ---- What changed ----
def sections(source: str):
    """Title: (line numbers, lines), by the headings of our scripts."""
    found, title = defaultdict(lambda: ([], [])), "(docstring and imports)"
    for number, line in enumerate(source.splitlines(), 1):
        if match := HEADING.fullmatch(line):
            title = match[1]
        found[title][0].append(number)
        found[title][1].append(line)
    return found


def changes(old: list, new: list):
    """Groups of opcodes, with some equal lines around each, as a unified diff has them."""
    # Not difflib.unified_diff, whose autojunk aligns no line that is frequent in a long section.
    return difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes()


def diff_section(title: str, before: tuple, after: tuple):
    """How many lines came and went, and the lines as a unified diff has them."""
    lines, count = [], Counter()
    (numbers, old), (new_numbers, new) = before, after
    for group in changes(old, new):
        _, i, _, j, _ = group[0]
        # 0 where the file has no such section
        lines.append(f"@@ -{[*numbers, 0][i]} +{[*new_numbers, 0][j]} @@")
        for tag, i, i_end, j, j_end in group:
            parts = {"-": old[i:i_end], "+": new[j:j_end]}
            if tag == "equal":
                parts = {" ": old[i:i_end]}
            for sign, part in parts.items():
                count[sign] += len(part)
                lines += [sign + line for line in part]
    return {"title": title, "added": count["+"], "removed": count["-"], "lines": lines}


@functools.cache  # each page of records tells the same changes
def diff_sources(a: str, b: str):
    """What changed from source `a` to source `b`, as numbers and lines."""
    before, after = sections(a), sections(b)
    found = {"added": 0, "removed": 0, "sections": []}
    for title in after | before:
        section = diff_section(title, before[title], after[title])
        if section["lines"]:
            found["sections"].append(section)
            found["added"] += section["added"]
            found["removed"] += section["removed"]
    return found


# ---- What a script says of itself, by being run ----
def apart(function, *what):
    """What `function(*what)` returns in a fresh process, where a script can do as it likes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # seconds, which are spent once
    with ProcessPoolExecutor(1, context) as fresh:
        return fresh.submit(function, *what).result()


def load_script(script: Path) -> ModuleType:
    """A script that was run, though not as the main program. Only in a process of its own."""
    module = sys.modules["record"] = ModuleType("record")  # where dataclasses look for it
    module.__file__ = str(script)
    exec(compile(read_text(script), script, "exec"), vars(module))
    return module


def flag_words(flags: dict):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def read_settings(script: Path, words: list) -> dict:
    """A script's hyperparameters, as headers show them. Raises LedgerError."""
    try:
        module = load_script(script)
        cfg = module.parse_args(words)
        return {name: module.show(value) for name, value in vars(cfg).items()}
    except BaseException as error:  # whatever the script raises
        raise LedgerError(str(error) or repr(error)) from None


@functools.cache
def ask(script: Path, source: str, *words) -> dict:
    """What `read_settings` finds, once for each source and flags. Raises LedgerError."""
    try:
        meaning(source)  # raises where it is no Python
        if "\ndef parse_args(" not in source:
            return {}  # it might train at once
        return apart(read_settings, script, list(words))
    except (LedgerError, BrokenProcessPool, SyntaxError) as error:
        raise LedgerError(f"{script.parent.name}/{script.name}: {error}") from None


def settings_of(script: Path, flags: dict) -> dict:
    """A script's hyperparameters with these flags. Raises LedgerError."""
    return ask(script, read_text(script), *flag_words(flags))
