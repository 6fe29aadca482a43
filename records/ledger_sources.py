"""Sources: what is in a script, by section and by name, and what changed between two."""

import ast
import copy
import difflib
import functools
import html
import operator
import re

# Sections that every record has in common, byte for byte; all others are a record's own.
SHARED = ("Data", "Distributed and logging", "Checkpoints", "Validation")

def split_files(source: str) -> dict[str, str]:
    """The files that a public log joined, by name; the first has the name train_gpt.py."""
    rule = r"(?:# ?)?[-=#]{10,}\n"
    parts = re.split(rf"^{rule}#? ?([\w./-]+\.py)\n{rule}", source, flags=re.M)
    return dict(zip(["train_gpt.py", *parts[1::2]], parts[::2]))


@functools.lru_cache(maxsize=64)
def parse(source: str) -> ast.Module | None:
    """The syntax tree, not to be changed, or None where this Python cannot read the source."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def statements(source: str) -> list[ast.stmt]:
    tree = parse(source)
    return tree.body if tree else []


def assignment(node: ast.stmt) -> tuple[str, ast.expr] | None:
    """(name, value) of `name = value` and `name: type = value`."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]), node.value
    if isinstance(node, ast.AnnAssign) and node.value:
        return ast.unparse(node.target), node.value
    return None


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
             ast.Pow: operator.pow, ast.BitOr: operator.or_}


class Unknown(Exception):
    """An expression whose value cannot be told without running the source."""


def evaluate(node: ast.expr, names: dict):
    """The value of literals, known names, arithmetic, collections, `dict(…)` and `x[key]`.

    Nothing of the source is run. Raises Unknown where it would have to be.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.Attribute(value=ast.Name(id="args")) if node.attr in names:
            return names[node.attr]
        case ast.UnaryOp(op=ast.USub()):
            return -evaluate(node.operand, names)
        case ast.BinOp() if type(node.op) in OPERATORS:
            sides = evaluate(node.left, names), evaluate(node.right, names)
            if isinstance(node.op, ast.Pow) and max(map(abs, sides)) > 1000:
                raise Unknown  # no log makes the ledger compute for hours
            return OPERATORS[type(node.op)](*sides)
        case ast.Tuple() | ast.List():
            items = [evaluate(item, names) for item in node.elts]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        case ast.Dict():
            pairs = [({evaluate(key, names): evaluate(value, names)} if key
                      else evaluate(value, names)) for key, value in zip(node.keys, node.values)]
            return {name: value for pair in pairs for name, value in pair.items()}
        case ast.Call(func=ast.Name(id="dict")):
            found = dict(*(evaluate(item, names) for item in node.args))
            for keyword in node.keywords:
                value = evaluate(keyword.value, names)
                found |= {keyword.arg: value} if keyword.arg else value
            return found
        case ast.Subscript():
            return evaluate(node.value, names)[evaluate(node.slice, names)]
    raise Unknown


def known(node: ast.expr, names: dict):
    """`evaluate`, or None where the value cannot be told."""
    try:
        return evaluate(node, names)
    except (Unknown, TypeError, ValueError, KeyError, IndexError, ArithmeticError):
        return None


def values(source: str) -> dict[str, object]:
    """The module's names, and those of `class Hyperparameters`, whose values can be told."""
    found = {}
    for node in statements(split_files(source)["train_gpt.py"]):
        is_settings = isinstance(node, ast.ClassDef) and node.name == "Hyperparameters"
        for name, value in filter(None, map(assignment, node.body if is_settings else [node])):
            if (told := known(value, found)) is not None:
                found[name] = told
    return found


@functools.lru_cache(maxsize=64)
def preset_values(source: str, preset: str) -> dict[str, object] | None:
    """Hyperparameter: value under a preset, not to be changed; None without such a preset.

    A value that cannot be told without running the source is None.
    """
    found, fields = values(source), {}
    for node in statements(source):
        if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters":
            fields = {name: known(value, found)
                      for name, value in filter(None, map(assignment, node.body))}
        target = assignment(node) if isinstance(node, ast.Assign) else None
        if target and re.match(r"PRESETS\[.*\]$", target[0]):  # PRESETS["lab"] = …
            key = known(node.targets[0].slice, found)
            found.get("PRESETS", {})[key] = known(target[1], found)
    presets = found.get("PRESETS") or {}
    return None if presets.get(preset) is None else fields | presets[preset]


def hyperparameters(source: str) -> dict[str, str]:
    """Field: value, both as written, of `class Hyperparameters` and, as preset.field, PRESETS."""
    found = {}
    for node in statements(split_files(source)["train_gpt.py"]):
        if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters":
            fields = filter(None, map(assignment, node.body))
            found |= {name: ast.unparse(value) for name, value in fields}
        elif (pair := assignment(node)) and pair[0] == "PRESETS" and isinstance(pair[1], ast.Dict):
            for preset, call in zip(pair[1].keys, pair[1].values):
                for keyword in getattr(call, "keywords", ()):
                    found[f"{preset.value}.{keyword.arg}"] = ast.unparse(keyword.value)
    return found


def definitions(source: str) -> dict[str, str]:
    """Functions, classes, methods and constants of a source by name, free of its layout.

    Left out is what `hyperparameters` tells.
    """
    found = {}

    def add(nodes, prefix):
        rest = []
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + node.name] = ast.dump(node)
            elif isinstance(node, ast.ClassDef):
                shell = list(map(ast.dump, (*node.decorator_list, *node.bases, *node.keywords)))
                attributes = add(node.body, f"{prefix}{node.name}.")
                found[prefix + node.name] = repr(
                    shell if node.name == "Hyperparameters" else shell + attributes)
            else:
                rest.append(ast.dump(node))
        return rest

    for file, text in split_files(source).items():
        prefix = "" if file == "train_gpt.py" else f"{file}: "
        nodes = statements(text)
        add(nodes, prefix)
        constants = dict(filter(None, map(assignment, nodes)))
        found |= {prefix + name: ast.dump(value) for name, value in constants.items()
                  if name != "PRESETS"}
    return found


def banners(lines: list[str]) -> dict[int, str]:
    """Index: title of each banner, `# ---- Title ---` or three lines (rule, title, rule)."""
    rule, found = re.compile(r"# ?-{20,}"), {}
    one_line = re.compile(r"# ?-{2,} (\w.*?)(?: \(the same in every record\))? -{3,}")
    for i, line in enumerate(lines):
        if title := one_line.fullmatch(line):
            found[i] = title[1]
        elif (rule.fullmatch(line) and len(lines) > i + 2 and rule.fullmatch(lines[i + 2])
              and re.fullmatch(r"# \w.*", lines[i + 1])):
            found[i] = lines[i + 1].removeprefix("# ")
    return found


def sections(source: str, by_banner: bool) -> dict[str, list[tuple[int, str]]]:
    """Title: its (line number, line)s, by banners or else by top-level functions and classes."""
    found, start = {}, 1
    for file, text in split_files(source).items():
        prefix = "" if file == "train_gpt.py" else f"{file}: "
        lines, nodes = text.removesuffix("\n").split("\n") if text else [], statements(text)
        owners, end = ["(module level)"] * len(lines), 0
        if by_banner:
            titles = banners(lines)
            for index in range(len(lines)):
                owners[index] = titles.get(index, owners[index - 1] if index else owners[0])
        else:
            for node in nodes:  # what stands above a definition belongs to it
                owner = getattr(node, "name", "(module level)")
                owners[end:node.end_lineno] = [owner] * (node.end_lineno - end)
                end = node.end_lineno
        if nodes and ast.get_docstring(ast.Module(nodes, [])) is not None:
            owners[:nodes[0].end_lineno] = ["Docstring"] * nodes[0].end_lineno
        for index, (owner, line) in enumerate(zip(owners, lines), start):
            found.setdefault(prefix + owner, []).append((index, line))
        start += len(lines) + 3  # the name of a joined file, between its rules
    return found


def section_texts(source: str) -> dict[str, str]:
    """Title: text of each section between banners, without the docstring above them."""
    titles = banners(source.split("\n")).values()
    return {title: "\n".join(line for _, line in lines).strip("\n")
            for title, lines in sections(source, by_banner=True).items() if title in titles}


def bound_names(node: ast.stmt) -> set[str]:
    """The names that a statement of a module gives a meaning to."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {name.id for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def nodes_by_section(source: str) -> dict[str, list[ast.stmt]]:
    """Title: its statements."""
    owner = {number: title for title, lines in sections(source, by_banner=True).items()
             for number, _ in lines}
    found = {}
    for node in statements(source):
        found.setdefault(owner[node.lineno], []).append(node)
    return found


def needed_setup(nodes: dict[str, list[ast.stmt]]) -> list[str]:
    """Of the section Setup, the imports and definitions that a record's own sections use."""
    used = {name.id for title, group in nodes.items() if title not in (*SHARED, "Setup")
            for node in group for name in ast.walk(node) if isinstance(name, ast.Name)}
    waiting, kept, found = nodes.get("Setup", []), [], True
    while found:
        found = [node for node in waiting if not bound_names(node) or bound_names(node) & used]
        waiting = [node for node in waiting if node not in found]
        used |= {name.id for node in found for name in ast.walk(node) if isinstance(name, ast.Name)}
        kept += found
    texts = []
    for node in kept:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node = copy.copy(node)
            node.names = [alias for alias in node.names
                          if (alias.asname or alias.name).partition(".")[0] in used]
        texts.append(ast.unparse(node))
    return sorted(texts)


def own_sections(source: str) -> dict[str, str]:
    """Title: what a record's logs are held to, without the sections that all records share.

    Of Setup it is what the others use; of Hyperparameters all but PRESETS, whose values count. A
    source without banners, or one that this Python cannot parse, is held as a whole.
    """
    texts, nodes = section_texts(source), nodes_by_section(source)
    if not texts or not nodes:
        return {"the source": source}
    lines = source.split("\n")
    for node in reversed(nodes.get("Hyperparameters", [])):
        if (pair := assignment(node)) and re.match(r"PRESETS\b", pair[0]):
            del lines[node.lineno - 1:node.end_lineno]
    texts["Hyperparameters"] = section_texts("\n".join(lines)).get("Hyperparameters", "")
    texts["Setup"] = "\n".join(needed_setup(nodes))
    return {title: text for title, text in texts.items() if title not in SHARED}


def rebound(source: str) -> list[str]:
    """Names of the shared sections that a record's own sections give another meaning."""
    nodes = nodes_by_section(source)
    shared = {name for title in SHARED for node in nodes.get(title, [])
              for name in bound_names(node)}
    found = set()
    for node in (node for title in nodes.keys() - set(SHARED) for node in nodes[title]):
        found |= bound_names(node)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Global):
                found |= set(inner.names)
            elif (isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
                  and isinstance(inner.value, ast.Name)):
                found.add(inner.value.id)  # Class.method = …
    return sorted(found & shared)


def diff_lines(a: list[tuple[int, str]], b: list[tuple[int, str]]) -> list[str]:
    """A unified diff of two sections, its hunks numbered by the lines of the files."""
    old, new, out = [line for _, line in a], [line for _, line in b], []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        spans = [f"{side[low][0] if low < high else 0},{high - low}"
                 for side, low, high in ((a, i1, i2), (b, j1, j2))]
        out.append(f"@@ -{spans[0]} +{spans[1]} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                out += [" " + line for line in old[i1:i2]]
            else:
                out += ["-" + line for line in old[i1:i2]] + ["+" + line for line in new[j1:j2]]
    return out


def diff_sources(a: str, b: str) -> dict:
    """What changed from source `a` to source `b`: a summary, and every section that differs."""
    by_banner = all(banners(split_files(source)["train_gpt.py"].split("\n")) for source in (a, b))
    before, after = sections(a, by_banner), sections(b, by_banner)
    changed = []
    for title in after | before:
        if lines := diff_lines(before.get(title, []), after.get(title, [])):
            signs = [line[0] for line in lines]
            changed.append({"title": title, "added": signs.count("+"),
                            "removed": signs.count("-"), "lines": lines})
    (old_fields, fields), (old, new) = map(hyperparameters, (a, b)), map(definitions, (a, b))
    return {
        "added": sum(section["added"] for section in changed),
        "removed": sum(section["removed"] for section in changed),
        "hyperparameters": [{"name": name, "a": old_fields.get(name), "b": fields.get(name)}
                            for name in old_fields | fields
                            if old_fields.get(name) != fields.get(name)],
        "definitions": {"changed": [n for n in new if n in old and new[n] != old[n]],
                        "added": [n for n in new if n not in old],
                        "removed": [n for n in old if n not in new]},
        "sections": changed,
        "sections_in_all": len(after | before),
        "notes": [f"{side}: this Python cannot parse it, so it has no list of names"
                  for side, source in (("A", a), ("B", b))
                  if None in map(parse, split_files(source).values())],
    }


HTML_STYLE = """
:root { color-scheme: light dark; --fg: #1b1f24; --bg: #fff; --soft: #f3f5f7; --line: #d5dae0;
  --dim: #5b6570; --add: #0b5394; --add-bg: #e3effb; --del: #9c4200; --del-bg: #fdeee0; }
@media (prefers-color-scheme: dark) { :root { --fg: #e4e8ec; --bg: #14171a; --soft: #1d2125;
  --line: #343a40; --dim: #98a2ac; --add: #86bdf5; --add-bg: #14304c; --del: #f5b183;
  --del-bg: #45260f; } }
body { margin: 2.5rem auto; max-width: 64rem; padding: 0 1.2rem; color: var(--fg);
  background: var(--bg); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.3; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
code, pre { font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace; }
table { border-collapse: collapse; } td, th { padding: .25rem 1.2rem .25rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: top; } th { color: var(--dim); }
.add { color: var(--add); } .del { color: var(--del); } .dim { color: var(--dim); }
details { border: 1px solid var(--line); border-radius: 8px; margin: .8rem 0; overflow: hidden; }
summary { cursor: pointer; padding: .5rem .9rem; background: var(--soft); font-weight: 600; }
summary span { font-weight: 400; margin-left: .6rem; }
pre { margin: 0; padding: .5rem 0; overflow-x: auto; }
pre div { padding: 0 .9rem; min-width: max-content; min-height: 1.5em; }
pre .add { background: var(--add-bg); } pre .del { background: var(--del-bg); }
"""


def diff_html(diff: dict, a: str, b: str) -> str:
    """The diff as a page that needs nothing else and follows the reader's light or dark theme."""
    esc, heading = html.escape, f"{html.escape(a)} → {html.escape(b)}"
    count = '<span class="add">+{added}</span> <span class="del">−{removed}</span>'
    kinds = {"+": "add", "-": "del", "@": "dim", " ": ""}
    rows = [f"<tr><td><code>{esc(h['name'])}</code><td class=del><code>{esc(h['a'] or '–')}</code>"
            f"<td class=add><code>{esc(h['b'] or '–')}</code>" for h in diff["hyperparameters"]]
    names = [f"<tr><th>{kind}<td><code>{'<br>'.join(map(esc, found))}</code>"
             for kind, found in diff["definitions"].items() if found]
    page = [f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{heading}</title>",
            "<meta name=viewport content='width=device-width'>", f"<style>{HTML_STYLE}</style>",
            f"<h1>{heading}</h1><p>{count.format(**diff)} lines in {len(diff['sections'])} of "
            f"{diff['sections_in_all']} sections</p>",
            *(f"<p class=dim>{esc(note)}</p>" for note in diff["notes"])]
    if rows:
        page += ["<h2>Hyperparameters</h2><table><tr><th>field<th>A<th>B", *rows, "</table>"]
    if names:
        page += ["<h2>Functions, classes and constants</h2><table>", *names, "</table>"]
    page.append("<h2>Sections</h2>")
    for section in diff["sections"]:
        lines = [f"<div class='{kinds[line[0]]}'>{esc(line)}</div>" for line in section["lines"]]
        title = f"{esc(section['title'])}{count.format(**section)}"
        page += [f"<details open><summary>{title}</summary><pre>", *lines, "</pre></details>"]
    return "".join(page) + "</html>\n"

