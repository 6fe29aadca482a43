"""Scripts: what their source means, what changed between two, and what they say of themselves."""

import ast
import difflib
import functools
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from ledger.logs import LedgerError, read_text
from shards import load_script

BANNER = "\n# ==== "  # between a record's own part of its script and the harness
HEADING = re.compile(r"# [-=]{2,} (\w.*?) ?[-=]{3,}")  # of our sections, and the harness's banner


# ---- What a source means ----
def above(source: str) -> str:
    """A record's own part of its script."""
    return source.partition(BANNER)[0]


@functools.cache
def meaning(source: str) -> str:
    """A source without comments, docstrings and unused imports: runs of equal ones are equal."""
    tree, used = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.add(node.id)
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    imports, kept = [], []
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            kept.append(ast.dump(node))
            continue
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            if name in used:
                imports.append(f"{getattr(node, 'module', '')} {alias.name} {name}")
    return "\n".join([*sorted(imports), *kept])


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
def sections(source: str) -> dict:
    """Title: {number: line}, by the headings of our scripts."""
    found, title = {}, "(docstring and imports)"
    for number, line in enumerate(source.splitlines(), 1):
        if match := HEADING.fullmatch(line):
            title = match[1]
        found.setdefault(title, {})[number] = line
    return found


@functools.cache  # each page of records tells the same changes
def diff_sources(a: str, b: str) -> dict:
    """Section: what changed in it from source `a` to source `b`, in groups with lines around each.

    A group is a list of (whether they are equal, old lines, new ones), each as {number: line}.
    """
    before, after, found = sections(a), sections(b), {}
    for title in after | before:
        old, new = before.get(title, {}), after.get(title, {})
        # Not difflib.unified_diff, whose autojunk aligns no line that is frequent in a section.
        matcher = difflib.SequenceMatcher(None, [*old.values()], [*new.values()], autojunk=False)
        old, new = list(old.items()), list(new.items())
        for group in matcher.get_grouped_opcodes():
            parts = []
            for tag, i, i_end, j, j_end in group:
                parts.append((tag == "equal", dict(old[i:i_end]), dict(new[j:j_end])))
            found.setdefault(title, []).append(parts)
    return found


def unified(groups: list):
    """Lines as a unified diff has them."""
    lines = []
    for group in groups:
        _, old, new = group[0]
        # 0 where the file has no such section
        lines.append(f"@@ -{min(old, default=0)} +{min(new, default=0)} @@")
        for equal, old, new in group:
            lines += [f"{' ' if equal else '-'}{line}" for line in old.values()]
            if not equal:
                lines += [f"+{line}" for line in new.values()]
    return lines


def count_lines(groups: list) -> str:
    """How many lines came and went."""
    text = "\n".join(["", *unified(groups)])
    added, removed = text.count("\n+"), text.count("\n-")
    return f"+{added} −{removed}"


def count_changes(a: str, b: str) -> str:
    return count_lines(sum(diff_sources(a, b).values(), []))


# ---- What a script says of itself, by being run ----
def apart(function, *what):
    """What `function(*what)` returns in a fresh process, where a script can do as it likes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # seconds, which are spent once
    with ProcessPoolExecutor(1, context) as fresh:
        return fresh.submit(function, *what).result()


def flag_words(flags: dict):
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def read_settings(script: Path, flags: dict) -> dict:
    """A script's hyperparameters, as headers show them. Raises LedgerError."""
    try:
        module = load_script(script)
        cfg = module.parse_args(flag_words(flags))
        return {name: module.show(value) for name, value in vars(cfg).items()}
    except BaseException as error:  # whatever the script raises
        raise LedgerError(str(error) or repr(error)) from None


@functools.cache
def settings_of(script: Path, /, **flags) -> dict:
    """A script's hyperparameters with these flags, by its own parser. Raises LedgerError."""
    try:
        source = read_text(script)
        ast.parse(source)
        if "\ndef parse_args(" not in source:
            return flags  # it might train at once
        return apart(read_settings, script, flags)
    except (LedgerError, BrokenProcessPool, SyntaxError) as error:
        raise LedgerError(f"{script.parent.name}/{script.name}: {error}") from None
