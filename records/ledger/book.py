"""The ladder as a book: a static site with a page for each record, and what came after #53."""

import ast
import io
import re
import statistics
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest
from pathlib import Path
from urllib.parse import urljoin

from ledger import pages
from ledger.logs import LedgerError, read_text
from ledger.records import RULES, Record
from ledger.scripts import above, count_changes, count_lines, diff_sources
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

SHADES = {"#000000": "currentColor", "#e3e6e9": "#88888855", "#006ba4": "#3189c9"}  # in the book
SVG_STYLE = ("svg { color: #1c2126; fill: currentColor } "
             "@media (prefers-color-scheme: dark) { svg { color: #dde2e6 } }\n")
HERE = Path(__file__).parent
PLACE = re.compile(r"^## See the change\n.*?(?=^<details>|^## |\Z)|(?=^<details>)|\Z", re.M | re.S)
LOSSES = re.compile(r"<summary>Published losses by step</summary>(.*?)</details>", re.S)
PIECE = re.compile(r"<span.*?</span>|[^<]+")  # of a line that pygments coloured
GREY = "#8a9299"
NONE = "", " "  # in the place of a line
AFTER = "docs/after-53.md"  # a page of the project, and of the book where the project has it
HOME = '<a href="index.html">The ladder</a>\n'
INDEX = """# The ladder, record by record

A speedrun trains a language model to a fixed quality, as fast as possible. Here are {} scripts:
records of the public run on eight H100s, and steps between them. Each is a small change of its
parent. Its page has the idea, the reason, the formulas, the change beside the parent's lines, and
the curves.

![Published minutes of each record on eight H100s, on a logarithmic axis](ladder.svg)

{}

## Evidence

{}
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
    folder = records[0].folder.parent
    text = INDEX.format(
        len(records), pages.front_block(records, ""), pages.records_block(records))
    path, links = folder.parent / AFTER, ""
    found = []
    if path.exists():
        links = f'<a href="{path.stem}.html">What came after #53</a>\n'
        body = from_markdown(read_text(path), path.parent, source and f"{source}/docs/")
        found.append(save_page(out / f"{path.stem}.html", HOME, body))
    found.append(save_page(out / "index.html", links, from_markdown(text, folder)))
    for record in records:
        name = record.folder.name
        address = source and f"{source}/records/{name}/"
        text = read_text(record.folder / "README.md")
        place = PLACE.search(text)
        before = from_markdown(text[:place.start()], record.folder, address)
        after = from_markdown(text[place.end():], record.folder, address)
        body = before + change_of(record) + curves_of(record, out) + after
        found.append(save_page(out / f"{name}.html", HOME + place_of(record, records), body))
    return found


def place_of(record: Record, records: list) -> str:
    """Links to its parent, to those beside it, of the same parent, and to those that come next."""
    links = ""
    for other in records:
        if other is record.parent:
            word = "Parent"
        elif other.parent is record:
            word = "Next"
        elif other is not record and record.parent and other.parent is record.parent:
            word = "Beside"
        else:
            continue
        links += f'<a href="{other.folder.name}.html">{word}: {other.name}</a>\n'
    return links


def save_page(path: Path, links: str, body: str) -> str:
    page = read_text(HERE / "book.html").format(title=path.stem, links=links, body=body)
    path.write_text(page, encoding="utf-8")
    return path.name


def from_markdown(text: str, folder: Path, address: str | None = None) -> str:
    """HTML of a page's Markdown, with links that lead somewhere from the site.

    `address` is where the files of the page's folder are read, and ends with a slash.
    """
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        for child in token.children or ():
            link = child.attrs.get("href", "://")
            path = (folder / link).resolve()
            if (path / "record.json").exists() or (path.match(AFTER) and path.exists()):
                child.attrs["href"] = f"{path.stem}.html"
            elif address and "://" not in link:
                child.attrs["href"] = urljoin(address, link)
            elif "://" not in link:
                del child.attrs["href"]  # its words stay, as plain text
    return parser.renderer.render(tokens, parser.options, {})


# ---- The change, side by side ----
def change_of(record: Record) -> str:
    """What the record changes of its parent; of the first one, the whole script."""
    script, parent = above(record.script), above(record.parent.script) if record.parent else ""
    words = escape(ast.get_docstring(ast.parse(script)) or "")
    parts = [
        "<h2>The change</h2>" if parent else '<h2 class="whole">The script</h2>',
        f"<p>{count_changes(parent, script)} lines.</p>",
        f"<details><summary>The script's docstring</summary><pre>{words}</pre></details>"]
    left, right = coloured(parent), coloured(script)
    for title, groups in diff_sources(parent, script).items():
        rows = ""
        for group in groups:
            rows += row("same", NONE, NONE)  # a gap
            for equal, old, new in group:
                kind = "same" if equal else "changed"
                for i, j in zip_longest(old, new):
                    rows += row(kind, left.get(i, NONE), right.get(j, NONE))
        parts.append(f"<h3>{title}: {count_lines(groups)}</h3>")
        parts.append(f'<div class="code" tabindex="0"><table>{rows}</table></div>')
    return "\n".join(parts)


def coloured(source: str) -> dict:
    """Number: (it, the HTML of its line)."""
    source = "\n".join(source.splitlines())
    text = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return {line[0]: line for line in enumerate(text.split("\n"), 1)}


def row(kind: str, old: tuple, new: tuple) -> str:
    """A row of the diff: the parent's line, and the record's beside it."""
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


# ---- Curves ----
def curves_of(record: Record, out: Path) -> str:
    """Pictures of the record's losses, public and on the pocket, where there are any."""
    found = ""
    for kind, preset, words in (
            (published, "record", "Published validation loss, beside the parent's"),
            (pocket, "pocket", "Loss on the pocket, each run, beside the parent's")):
        curves = {one.name: kind(one) for one in (record, record.parent) if one}
        if curves[record.name]:
            name = f"{record.folder.name}-{kind.__name__}.svg"
            save_svg(curves_figure(curves, float(RULES[preset]["target_loss"])), out / name)
            found += (f'<figure><img src="{name}" alt="{words}"><figcaption>{words}</figcaption>'
                      "</figure>")
    return f"<h2>Curves</h2>\n{found}\n" if found else ""


def published(record: Record):
    """(steps, losses) by the record's README, of one run, without step 0."""
    text = "".join(LOSSES.findall(read_text(record.folder / "README.md")))
    points = re.findall(r"\b([1-9]\d*):\s+(\d+\.\d+)", text)
    if not points:
        return []
    steps, losses = zip(*points)
    return [(list(map(int, steps)), list(map(float, losses)))]


def pocket(record: Record):
    """(steps, losses) of each run that the record has on the pocket, of one setting.

    Of the training in 50 pieces, and of the last validation.
    """
    runs = [logs for logs in record.runs().values() if logs[0].preset == "pocket"]
    curves = []
    for log in max(runs, key=len, default=[]):
        train = sorted(log.train.items())
        size = max(1, len(train) // 50)
        steps, losses = [], []
        for last in range(size, len(train) + 1, size):
            steps.append(train[last - 1][0])
            losses.append(statistics.fmean(loss for _, (loss, _) in train[last - size : last]))
        curves.append(([*steps, log.last_step], [*losses, log.val_loss]))
    return curves


def curves_figure(curves: dict, target: float):
    """Losses of runs over their steps, by name."""
    figure, axis = pages.new_figure(4.5, 6)
    losses = [target]
    for index, (name, runs) in enumerate(curves.items()):
        for number, (steps, loss) in enumerate(runs):
            losses += loss[len(loss) // 10:]  # the first are of the untrained model
            axis.plot(steps, loss, "-o", color=f"C{index}", alpha=0.4 + 0.6 / len(runs),
                      markevery=[-1], label=None if number else name)
    low, high = min(losses), max(losses)
    margin = max(high - low, 0.01) * 0.06
    axis.axhline(target, color=GREY, linestyle=(0, (2, 2)))
    axis.set(xlabel="steps", ylabel="loss (nats per token; point: validation)",
             ylim=(low - margin, high + margin))
    figure.legend(loc="outside upper center", ncols=2)
    return figure


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
