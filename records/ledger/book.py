"""The ladder as a book: a static site with an index and a page for each record."""

import ast
import io
import re
import tokenize
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest
from pathlib import Path
from urllib.parse import urljoin

import numpy as np
from ledger import pages
from ledger.diff import BANNER, diff_sources, sections
from ledger.logs import LedgerError, read_log, read_text
from ledger.public import TARGET
from ledger.table import RULES, Record
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

SHADES = {"#000000": "currentColor", "#e3e6e9": "#88888855", "#006ba4": "#3189c9"}  # in the book
SVG_STYLE = ("svg { color: #1c2126; fill: currentColor } "
             "@media (prefers-color-scheme: dark) { svg { color: #dde2e6 } }\n")
POCKET_TARGET = float(RULES["pocket"]["target_loss"])
HERE = Path(__file__).parent
PLACE = re.compile(r"^## See the change\n.*?(?=^<details>|^## |\Z)|(?=^<details>)|\Z", re.M | re.S)
LOSSES = re.compile(r"<summary>Published losses by step</summary>(.*?)</details>", re.S)
PIECE = re.compile(r"<span.*?</span>|[^<]+")  # of a line that pygments coloured
COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
PRICE = "<p>+{added} −{removed} lines, {more:+,} tokens; {tokens:,} tokens of its own.</p>"
HEADING = "<h3>{title}: +{added} −{removed}</h3>"
NONE = "", " "  # in the place of a line
FIGURE = '<figure><img src="{name}" alt="{words}"><figcaption>{words}</figcaption></figure>'
INDEX = """# The ladder, record by record

A speedrun trains a language model to a fixed quality, as fast as possible. Here are {} records of
the public run on eight H100s. Each is a script of its own, and a small change of its parent. Its
page has the idea, the reason, the formulas, the change beside the parent's lines, and the curves.

![Published minutes of each record on eight H100s, on a logarithmic axis](ladder.svg)
"""


def write_book(records: list, out: Path, source: str | None):
    """Write the site to a folder, and return its pages. Other files are read at `source`."""
    if not records:
        raise LedgerError("no records there, so no pages; give a folder that has")
    out.mkdir(parents=True, exist_ok=True)
    style = read_text(HERE / "book.css")
    for name, place in (("xcode", "/* light */"), ("github-dark", "/* dark */")):
        colours = HtmlFormatter(style=name).get_token_style_defs(".code")
        style = style.replace(place, "\n".join(colours))
    (out / "style.css").write_text(style, encoding="utf-8")
    save_svg(pages.ladder_figure(records, width=6), out / "ladder.svg")
    body = from_markdown(INDEX.format(len(records)), out)
    folder = records[0].folder.parent
    for heading, place in (("", folder.parent), ("## Evidence\n\n", folder)):
        _, text, _ = pages.split_block(place / "README.md")
        body += from_markdown(heading + text, place)
    found = [save_page(out / "index.html", "", body)]
    for record in records:
        links = '<a href="index.html">The ladder</a>\n'
        for other in records:
            if other is record.parent:
                links += link_to("Parent", other)
            elif other.parent is record:
                links += link_to("Next", other)
        text = read_text(record.folder / "README.md")
        place = PLACE.search(text)
        before = from_markdown(text[:place.start()], record.folder, source)
        after = from_markdown(text[place.end():], record.folder, source)
        body = before + change_of(record) + curves_of(record, out) + after
        found.append(save_page(out / f"{record.folder.name}.html", links, body))
    return found


def link_to(word: str, record: Record) -> str:
    name = pages.name_of(record)
    return f'<a href="{record.folder.name}.html">{word}: {name}</a>\n'


def save_page(path: Path, links: str, body: str) -> str:
    page = read_text(HERE / "book.html").format(title=path.stem, links=links, body=body)
    path.write_text(page, encoding="utf-8")
    return path.name


def from_markdown(text: str, folder: Path, source: str | None = None) -> str:
    """HTML of a record's Markdown, with links that lead somewhere from the site."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        for child in token.children or ():
            link = child.attrs.get("href", "://")
            path = (folder / link).resolve()
            if (path / "record.json").exists():
                child.attrs["href"] = f"{path.name}.html"
            elif source and "://" not in link:
                child.attrs["href"] = urljoin(f"{source}/records/{folder.name}/", link)
            elif "://" not in link:
                del child.attrs["href"]  # its words stay, as plain text
    return parser.renderer.render(tokens, parser.options, {})


def change_of(record: Record) -> str:
    """What the record changes of its parent, side by side, and what that costs."""
    script = record.script.partition(BANNER)[0]
    parent = record.parent.script.partition(BANNER)[0] if record.parent else ""
    changed = diff_sources(parent, script)
    tokens = count_tokens(script)
    words = escape(ast.get_docstring(ast.parse(script)) or "")
    parts = [
        "<h2>The change</h2>" if parent else '<h2 class="whole">The script</h2>',
        PRICE.format(tokens=tokens, more=tokens - count_tokens(parent), **changed),
        f"<details><summary>The script's docstring</summary><pre>{words}</pre></details>"]
    before, after = sections(parent), sections(script)
    for section in changed["sections"]:
        title = section["title"]
        (numbers, old), (new_numbers, new) = before[title], after[title]
        left, right = coloured(numbers, old), coloured(new_numbers, new)
        rows = ""
        for group in SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes():
            rows += row(NONE, NONE)  # a gap
            for _, i, i_end, j, j_end in group:
                for lines in zip_longest(left[i:i_end], right[j:j_end], fillvalue=NONE):
                    rows += row(*lines)
        parts.append(HEADING.format(**section))
        parts.append(f'<div class="code" tabindex="0"><table>{rows}</table></div>')
    return "\n".join(parts)


def count_tokens(source: str) -> int:
    """Names, numbers, strings and operators of a record's own part."""
    tokens = tokenize.generate_tokens(io.StringIO(source.partition(BANNER)[0]).readline)
    return sum(token.type in COUNTED for token in tokens)


def coloured(numbers: list, section: list):
    """(its number in the source, its HTML) of each line of a section."""
    form = HtmlFormatter(nowrap=True)
    text = highlight("\n".join(section), PythonLexer(stripnl=False), form)
    return list(zip(numbers, text.split("\n")))


def row(old: tuple, new: tuple) -> str:
    """A row of the diff: the parent's line, and the record's beside it."""
    kind = "same" if old[1] == new[1] else "changed"
    return f'<tr class="{kind}">{cells("old", old, new)}{cells("new", new, old)}</tr>'


def cells(side: str, line: tuple, other: tuple) -> str:
    """A line's number and its code, in which is marked what a line much like it has not."""
    number, code = line
    pieces, others = PIECE.findall(code), PIECE.findall(other[1])
    matcher = SequenceMatcher(None, others, pieces, autojunk=False)
    if 0.5 < matcher.ratio() < 1:
        code = ""
        for tag, _, _, start, end in matcher.get_opcodes():
            words = "".join(pieces[start:end])
            code += f"<mark>{words}</mark>" if words and tag != "equal" else words
    kind = side if number else f"{side} none"
    return f'<td class="number {kind}">{number}</td><td class="{kind}">{code}</td>'


def curves_of(record: Record, out: Path) -> str:
    """Pictures of the record's losses, public and on the pocket, where there are any."""
    found = ""
    for kind, (target, words) in CURVES.items():
        name = f"{record.folder.name}-{kind.__name__}.svg"
        curves = {pages.name_of(record): kind(record)}
        if record.parent:
            curves[pages.name_of(record.parent)] = kind(record.parent)
        if curves[pages.name_of(record)]:
            figure = pages.curves_figure(curves, target, panels=["steps"], width=6)
            save_svg(figure, out / name)
            found += FIGURE.format(name=name, words=words)
    return f"<h2>Curves</h2>\n{found}\n" if found else ""


def published(record: Record):
    """(loss, step) by the record's README, of one run, without step 0."""
    text = "".join(LOSSES.findall(read_text(record.folder / "README.md")))
    found = re.findall(r"\b([1-9]\d*):\s+(\d+\.\d+)", text)
    if not found:
        return []
    return [np.array(found, float)[:, ::-1]]


def pocket(record: Record):
    """(loss, step) of each run that the record has on the pocket."""
    logs = [read_log(path) for path in sorted(record.folder.glob("logs/**/pocket*/seed-*.txt"))]
    return [pages.curve_of(log)[:, :2] for log in logs]


def save_svg(figure, path: Path):
    """A picture for the book: its words are text, and its black is light where the page is dark."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    head, style, rest = text.getvalue().partition('<style type="text/css">')
    for color, shade in SHADES.items():
        rest = rest.replace(color, shade)
    path.write_text(head + style + SVG_STYLE + rest, encoding="utf-8")


CURVES = {
    published: (TARGET, "Published validation loss, beside the parent's"),
    pocket: (POCKET_TARGET, "Loss on the pocket, each run, beside the parent's")}
