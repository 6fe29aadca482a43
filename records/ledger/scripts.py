"""Scripts: what their source means and sets, what changed between two. No script is run here."""

import ast
import contextlib
import difflib
import functools
import os
import re
import subprocess
from pathlib import Path

from ledger.logs import LedgerError, read_log, read_text

BANNER = "\n# ==== "  # between a record's own part of its script and the harness
HEADING = re.compile(r"# [-=]{2,} (\w.*?) ?[-=]{3,}")  # of our sections, and the harness's banner


# ---- What a source means ----
def source_of(operand: str) -> str:
    """The source of a script, of a record's folder, or in a log. Raises LedgerError."""
    path = Path(operand)
    if path.is_dir():
        path /= "train_gpt.py"
    source = read_text(path) if path.suffix == ".py" else read_log(path).source
    if source is None:
        raise LedgerError(f"{operand} has no source; give a script, or a log that has one")
    return source


def above(source: str) -> str:
    """A record's own part of its script."""
    return source.partition(BANNER)[0]


def below(source: str) -> str:
    """The harness."""
    return source.partition(BANNER)[2]


def drop_docstrings(node):
    if ast.get_docstring(node, clean=False) is not None:
        del node.body[0]
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            drop_docstrings(child)


@functools.cache
def meaning(source: str) -> str:
    """A source without comments and docstrings."""
    tree = ast.parse(source.encode())  # as Python reads it, if a comment names its encoding
    drop_docstrings(tree)
    return ast.dump(tree)


def is_same(source: str, other: str) -> bool:
    """Whether two scripts are one record's: above the banner they mean the same."""
    source, other = above(source), above(other)
    return source == other or meaning(source) == meaning(other)


@functools.cache
def settings_of(source: str, preset: str) -> dict:
    """The settings of a script's preset that flags may change, by name, as headers show them."""
    found = {}
    for node in ast.parse(above(source).encode()).body:
        pairs = []
        if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters":
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            pairs = [(part.target.id, part.value) for part in fields]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets) == preset.upper():
            pairs = [(word.arg, word.value) for word in node.value.keywords]
        for name, value in pairs:
            with contextlib.suppress(ValueError):  # a table: it is edited, and no flag
                found[name] = str(ast.literal_eval(value))
    return found


# ---- What git knows ----
@functools.cache
def ask_git(folder: Path, *words) -> str:
    """What git says in a folder; nothing where it knows nothing.

    Variables by which git is sent elsewhere are left out. In a worktree's hook git sets them.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(["git", "-C", str(folder), *words], env=own, text=True, check=True,
                              capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def git(home: Path, *words) -> str:
    """What git says of the repository with this root; nothing where it is a part of another."""
    is_root = ask_git(home, "rev-parse", "--show-prefix") == "\n"
    return ask_git(home, *words) if is_root else ""


def history_reaches(commit: str | None, home: Path) -> bool:
    """Whether git has the whole history of the repository at `home`, and this commit in it."""
    if git(home, "rev-parse", "--is-shallow-repository") != "false\n":
        return False
    return commit is None or git(home, "merge-base", commit, "HEAD").strip() == commit


def versions(script: Path, home: Path, harness: str):
    """Yield what a script was when it had this harness, newest first, as far as git knows.

    Of a merge the branch that was merged does not count: there a cheat may come and go.
    """
    name = script.relative_to(home).as_posix()
    for commit in git(home, "log", "--first-parent", "--format=%H", "--", name).split():
        version = git(home, "show", f"{commit}:{name}")
        if harness and below(version) == harness:
            yield version


# ---- What changed ----
def titles(source: str) -> list:
    """For each line the title of its section, by the headings of our scripts.

    The docstring is a section of its own.
    """
    docstring = re.match(r'(#!.*\n)?"""[\s\S]*?"""\n', source)
    last = docstring[0].count("\n") if docstring else 0
    found, title = [], "Docstring"
    for number, line in enumerate(source.splitlines()):
        heading = HEADING.fullmatch(line)
        if heading or number == last:
            title = heading[1] if heading else "Imports"
        found.append(title)
    return found


def sections(source: str) -> dict:
    """Title: its lines."""
    found = {}
    for title, line in zip(titles(source), source.splitlines()):
        found.setdefault(title, []).append(line)
    return found


@functools.cache  # each page of records tells the same changes
def diff_sources(a: str, b: str) -> dict:
    """Section: the lines of a unified diff from source `a` to source `b`, without line numbers."""
    before, after, found = sections(a), sections(b), {}
    for title in after | before:
        old, new = before.get(title, []), after.get(title, [])
        # Not difflib.unified_diff, whose autojunk aligns no line that is frequent in a section.
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for group in matcher.get_grouped_opcodes():
            lines = found.setdefault(title, [])
            lines.append("@@")
            for tag, i, i_end, j, j_end in group:
                if tag == "equal":
                    lines += [f" {line}" for line in old[i:i_end]]
                else:
                    lines += [f"-{line}" for line in old[i:i_end]]
                    lines += [f"+{line}" for line in new[j:j_end]]
    return found


def count_changes(*sections: list) -> str:
    """How many lines of a diff came and went."""
    signs = [line[0] for lines in sections for line in lines]
    added, removed = map(signs.count, "+-")
    return f"+{added} −{removed}"
