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
def sections(source: str) -> dict:
    """Title: (line numbers, lines), by the headings of our scripts."""
    found, title = {}, "(docstring and imports)"
    for number, line in enumerate(source.splitlines(), 1):
        if match := HEADING.fullmatch(line):
            title = match[1]
        numbers, lines = found.setdefault(title, ([], []))
        numbers.append(number)
        lines.append(line)
    return found


@functools.cache  # each page of records tells the same changes
def diff_sources(a: str, b: str) -> dict:
    """Section: what changed in it from source `a` to source `b`, in groups with lines around each.

    A group is a list of pairs, the old lines and the new ones, each as {number: line}. Lines that
    stayed are equal in both, up to their numbers.
    """
    before, after = sections(a), sections(b)
    found = {}
    for title in after | before:
        old_numbers, old = before.get(title, ([], []))
        numbers, new = after.get(title, ([], []))
        groups = []
        # Not difflib.unified_diff, whose autojunk aligns no line that is frequent in a section.
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for group in matcher.get_grouped_opcodes():
            pairs = []
            for _, i, i_end, j, j_end in group:
                pairs.append((dict(zip(old_numbers[i:i_end], old[i:i_end])),
                              dict(zip(numbers[j:j_end], new[j:j_end]))))
            groups.append(pairs)
        if groups:
            found[title] = groups
    return found


def stayed(old: dict, new: dict) -> bool:
    return [*old.values()] == [*new.values()]


def count_lines(groups: list) -> str:
    """How many lines came and went."""
    changed = [pair for group in groups for pair in group if not stayed(*pair)]
    removed, added = (sum(map(len, lines)) for lines in zip(*changed))
    return f"+{added} −{removed}"


def count_changes(a: str, b: str) -> str:
    groups = diff_sources(a, b).values()
    return count_lines(sum(groups, [])) if groups else "+0 −0"


def unified(groups: list):
    """Lines as a unified diff has them."""
    for group in groups:
        old, new = group[0]
        # 0 where the file has no such section
        yield f"@@ -{min(old, default=0)} +{min(new, default=0)} @@"
        for old, new in group:
            if stayed(old, new):
                yield from (f" {line}" for line in old.values())
            else:
                yield from (f"-{line}" for line in old.values())
                yield from (f"+{line}" for line in new.values())


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
    source = read_text(script)
    try:
        meaning(source)  # raises where it is no Python
        if "\ndef parse_args(" not in source:
            return {}  # it might train at once
        return apart(read_settings, script, flags)
    except (LedgerError, BrokenProcessPool, SyntaxError) as error:
        raise LedgerError(f"{script.parent.name}/{script.name}: {error}") from None
