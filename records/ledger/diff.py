"""Sources: their parts and sections, and what changed between two of them."""

import ast
import difflib
import functools
import re
from collections import Counter, defaultdict

BANNER = "\n# ==== "  # between a record's own part of its script and the harness
HEADING = re.compile(r"# [-=]{2,} (\w.*?) ?[-=]{3,}")  # of our sections, and the harness's banner
DEFINITION = re.compile(r"(?:async )?(?:def|class) (\w+)")


@functools.cache
def meaning(source: str) -> str:
    """What a log is held to: all above the banner but comments, docstrings and imports."""
    tree = ast.parse(source.partition(BANNER)[0])
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    kept = []
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            kept.append(ast.dump(node))
    return "\n".join(kept)


def split_files(source: str):
    """The files that a public log joined, by name; the first has the name train_gpt.py."""
    rule = r"(?:# ?)?[-=#]{10,}\n"
    parts = re.split(rf"^{rule}#? ?([\w./-]+\.py)\n{rule}", source, flags=re.M)
    return dict(zip(["train_gpt.py", *parts[1::2]], parts[::2]))


def sections(source: str):
    """Title: (line numbers, lines); by our headings, else by definition, and by joined file."""
    by_heading = re.search(rf"^{HEADING.pattern}$", source, re.M)
    found = defaultdict(lambda: ([], []))
    for file, text in split_files(source).items():
        title = "(docstring and imports)" if by_heading else "(module level)"
        for number, line in enumerate(text.splitlines(), 1):
            match = HEADING.fullmatch(line) if by_heading else DEFINITION.match(line)
            if match:
                title = match[1]
            elif not by_heading and re.match(r"[^\s#)\]}]", line):
                title = "(module level)"
            name = title if file == "train_gpt.py" else f"{file}: {title}"
            found[name][0].append(number)
            found[name][1].append(line)
    return found


def diff_section(title: str, before: tuple, after: tuple):
    """How many lines came and went, and the lines as a unified diff has them."""
    lines, count = [], Counter()
    (numbers, old), (new_numbers, new) = before, after
    # Not difflib.unified_diff, whose autojunk aligns no line that is frequent in a long section.
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes():
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
        if not section["lines"]:
            continue
        found["sections"].append(section)
        found["added"] += section["added"]
        found["removed"] += section["removed"]
    return found
