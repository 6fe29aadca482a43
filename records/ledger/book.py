"""The ladder as a book: a static site with an index and a page for each record."""

import ast
import io
import re
import tokenize
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest
from pathlib import Path

import numpy as np
from ledger import pages
from ledger.diff import BANNER, diff_sources, own_part, sections
from ledger.logs import LedgerError, read_log, read_text, seed_files
from ledger.public import TARGET
from ledger.table import RULES, Record
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

CHANGE = re.compile(r"^## See the change\n.*?(?=^<details>|^## |\Z)|(?=^<details>)|\Z", re.M | re.S)
LOSSES = re.compile(r"<summary>Published losses by step</summary>(.*?)</details>", re.S)
PIECE = re.compile(r"<span.*?</span>|[^<]+")  # of a line that pygments coloured
COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
GAP = '<tr class="gap">' + 2 * '<td class="number"></td><td></td>' + "</tr>"
PRICE = "<p>+{added} −{removed} lines, {more:+,} tokens; {tokens:,} tokens of its own.</p>"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="stylesheet" href="style.css"></head>
<body><nav>{links}</nav>
<main>
{body}
</main></body>
</html>
"""
INDEX = """# The ladder, record by record

A speedrun trains a language model to a fixed quality, as fast as possible. Here are {count} records
of the public run on eight H100s. Each is a script of its own, and a small change of its parent. Its
page has the idea, the reason, the formulas, the change beside the parent's lines, and the curves.

![Published minutes of each record on eight H100s, on a logarithmic axis](ladder.svg)

{front}

## Evidence

{evidence}
"""
NIGHT = "@media (prefers-color-scheme: dark) {"
SVG = f"svg {{ color: #1c2126; fill: currentColor }} {NIGHT} svg {{ color: #dde2e6 }} }}\n"


def write_book(records: list, out: Path, source: str | None):
    """Write the site to a folder, and return its pages. Other files are read at `source`."""
    if not records:
        raise LedgerError("no records there, so no pages; give a folder that has")
    out.mkdir(parents=True, exist_ok=True)
    day = HtmlFormatter(style="xcode").get_token_style_defs(".code")
    night = HtmlFormatter(style="github-dark").get_token_style_defs(".code")
    own = read_text(Path(__file__).with_suffix(".css"))
    style = "\n".join([own, *day, NIGHT, *night, "}\n"])
    (out / "style.css").write_text(style, encoding="utf-8")
    save_svg(pages.ladder_figure(records, width=6), out / "ladder.svg")
    text = INDEX.format(count=len(records), front=pages.linked(records, "", *pages.FRONT),
                        evidence=pages.linked(records, "", *pages.LADDER) + "\n" + pages.LADDER[2])
    folder = records[0].folder.parent
    save_page(out / "index.html", "The ladder", "", from_markdown(text, folder, folder, source))
    found = ["index.html"]
    for record in records:
        found.append(f"{record.folder.name}.html")
        links = '<a href="index.html">The ladder</a>'
        for other in records:
            if other is record.parent:
                links += link_to("Parent", other)
            elif other.parent is record:
                links += link_to("Next", other)
        text = read_text(record.folder / "README.md")
        place = CHANGE.search(text)
        before, after = (from_markdown(part, record.folder, folder, source)
                         for part in (text[:place.start()], text[place.end():]))
        body = before + change_of(record) + curves_of(record, out) + after
        save_page(out / found[-1], record.folder.name, links, body)
    return found


def link_to(word: str, record: Record) -> str:
    return f'<a href="{record.folder.name}.html">{word}: {pages.ladder_row(record)["name"]}</a>'


def save_page(path: Path, title: str, links: str, body: str):
    path.write_text(PAGE.format(title=title, links=links, body=body), encoding="utf-8")


def from_markdown(text: str, here: Path, records: Path, source: str | None) -> str:
    """HTML of the Markdown of a file in `here`, with links that lead somewhere from the site."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        for child in token.children or ():
            link = child.attrs.get("href", "://")
            path, mark, place = link.partition("#")
            path = (here / path).resolve()
            if (path / "record.json").exists():
                child.attrs["href"] = f"{path.name}.html"
            elif "://" not in link and source:
                path = path.relative_to(records.resolve().parent)
                child.attrs["href"] = f"{source}/{path}{mark}{place}"
            elif "://" not in link:
                del child.attrs["href"]  # its words stay, as plain text
    return parser.renderer.render(tokens, parser.options, {})


def change_of(record: Record) -> str:
    """What the record changes of its parent, side by side, and what that costs."""
    script = record.script.partition(BANNER)[0]
    parent = record.parent.script.partition(BANNER)[0] if record.parent else ""
    changed = diff_sources(parent, script)
    tokens = count_tokens(script)
    before, after = sections(parent), sections(script)
    docstring = escape(ast.get_docstring(ast.parse(script)) or "")
    parts = [
        "<h2>The change</h2>" if parent else "<h2>The script</h2>",
        PRICE.format(tokens=tokens, more=tokens - count_tokens(parent), **changed),
        f"<details><summary>The script's docstring</summary><pre>{docstring}</pre></details>"]
    for section in changed["sections"]:
        old, new = before[section["title"]], after[section["title"]]
        left, right = coloured(parent, old), coloured(script, new)
        rows = []
        for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes():
            rows.append(GAP)
            for _, i, i_end, j, j_end in group:
                for pair in zip_longest(left[i:i_end], right[j:j_end], fillvalue=("", "")):
                    rows.append(row(*pair))
        parts.append("<h3>{title}: +{added} −{removed}</h3>".format(**section))
        parts.append(f'<div class="code" tabindex="0"><table>{"".join(rows)}</table></div>')
    return "\n".join(parts)


def count_tokens(source: str) -> int:
    """Names, numbers, strings and operators of a record's own part, without docstrings."""
    count, before = 0, None
    for token in tokenize.generate_tokens(io.StringIO(own_part(source)).readline):
        docstring = token.type == tokenize.STRING and before == tokenize.INDENT
        count += token.type in COUNTED and not docstring
        before = token.type
    return count


def coloured(source: str, section: list):
    """(its number in the source, its HTML) of each line of a section."""
    first = source.splitlines().index(section[0]) + 1 if section else 1
    text = highlight("\n".join(section), PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return list(enumerate(text.split("\n"), first))


def row(old: tuple, new: tuple) -> str:
    """A row of the diff: the parent's line, and the record's beside it."""
    cells = ""
    for side, (number, line), (_, other) in (("old", old, new), ("new", new, old)):
        kind = side if number else f"{side} none"
        code = marked(PIECE.findall(line), PIECE.findall(other))
        cells += f'<td class="number {kind}">{number}</td><td class="{kind}">{code}</td>'
    return f'<tr class="same">{cells}</tr>' if old[1] == new[1] else f"<tr>{cells}</tr>"


def marked(pieces: list, others: list) -> str:
    """A line in which is marked what a line much like it has not."""
    matcher = SequenceMatcher(None, others, pieces, autojunk=False)
    if matcher.ratio() < 0.5:
        return "".join(pieces)
    code = ""
    for tag, _, _, start, end in matcher.get_opcodes():
        words = "".join(pieces[start:end])
        code += words if tag == "equal" or not words else f"<mark>{words}</mark>"
    return code


def curves_of(record: Record, out: Path) -> str:
    """Pictures of the record's losses in public and on the pocket, where there are any."""
    found = ""
    for read, (target, words) in CURVES.items():
        path = out / f"{record.folder.name}-{read.__name__}.svg"
        if len(read(record)):
            save_svg(figure_of(record, read, target), path)
            image = f'<img src="{path.name}" alt="{words}, beside the parent\'s">'
            found += f"<figure>{image}<figcaption>{words}</figcaption></figure>\n"
    return "<h2>Curves</h2>" * bool(found) + found


def published(record: Record):
    """(step, loss) by the record's README, as of one run, without step 0."""
    text = LOSSES.search(read_text(record.folder / "README.md"))
    found = re.findall(r"\b([1-9]\d*):\s+(\d+\.\d+)", text[1]) if text else []
    return np.array([found] if found else [], float)


def pocket(record: Record):
    """(step, loss) of each run that the record has on the pocket."""
    logs = [read_log(path) for path in seed_files(record.folder, "loss")]
    return np.array([pages.curve_of(log)[:, :2] for log in logs])


CURVES = {
    published: (TARGET, "Published validation loss by step, in nats per token"),
    pocket: (float(RULES["pocket"]["target_loss"]), "Loss on the pocket by step, in nats per byte")}


def figure_of(record: Record, read, target: float):
    """The record's losses, and its parent's in grey: the mean of the runs and their range."""
    figure, (axis,) = pages.picture(1, 3.6, width=6)
    for one, color in ((record.parent, "#888888"), (record, "C0")):
        curves = read(one) if one else []
        if len(curves):
            steps, losses = curves[0, :, 0], curves[:, :, 1]
            name = pages.ladder_row(one)["name"]
            axis.plot(steps, losses.mean(axis=0), "-o", color=color, markersize=3, label=name)
            axis.fill_between(steps, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.2)
            axis.set_ylim(top=losses[:, len(steps) // 10:].max() * 1.02)  # the first are untrained
    axis.axhline(target, color="#888888", linestyle=(0, (2, 2)))
    axis.set(xlabel="steps", ylabel="loss")
    axis.legend()
    return figure


def save_svg(figure, path: Path):
    """A picture whose words are text, and whose black is light where the page is dark."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    head, style, rest = text.getvalue().partition('<style type="text/css">')
    for old, new in (("#000000", "currentColor"), ("#e3e6e9", "#88888855"), ("#006ba4", "#3189c9")):
        rest = rest.replace(old, new)
    path.write_text(head + style + SVG + rest, encoding="utf-8")
