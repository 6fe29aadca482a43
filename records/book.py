"""The ladder as a picture, and as a book: a static site with a page for each record.

`python records/ledger book --out SITE` writes the site, `list --write` the picture.
"""

import difflib
import functools
import re
import shutil
from html import escape
from pathlib import Path
from urllib.parse import urljoin

from ledger import pages
from ledger.logs import LedgerError, read_text
from ledger.records import Record, read_public
from ledger.scripts import above, sections

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · NanoGPT speedrun in one file</title>
<meta name="description" content="{description}">
<meta property="og:title" content="{title}">
<meta property="og:image" content="race.png">
<link rel="stylesheet" href="style.css">
<script src="book.js" defer></script>
</head>
<body>
<header>{header}</header>
<nav>{links}</nav>
<main>
{body}
</main>
<nav>{links}</nav>
</body>
</html>
"""
INDEX = """# The NanoGPT speedrun, record by record

In two years a GPT-2 small that took 45 minutes on eight H100s came to train in 40 seconds. Here are
{count} scripts of that way. Each is a small change of its parent, with its idea, its reason, its
diff and the whole script.

{race}

{story}

<h2 id="ladder">The ladder</h2>

{ladder}

![Published minutes on eight H100s of each public record](ladder.svg)

<h2 id="public">All public records</h2>

{public}
"""
# Where a page has the change: in place of the section that says how to see it
PLACE = re.compile(r"^## See the change\n.*?(?=^<details>|^## |\Z)|(?=^<details>)|\Z", re.M | re.S)
SHADES = {"#000000": "currentColor", "#e3e6e9": "#88888855", "#006ba4": "#3189c9"}  # in the dark
SVG_STYLE = ("<style>svg { color: #1c2126; fill: currentColor } "
             "@media (prefers-color-scheme: dark) { svg { color: #dde2e6 } }</style></svg>")


# ---- The picture ----
def draw_ladder(folder: Path, records: list, path: Path):
    """Minutes of all public records by their number, with names where there is room."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({
            "font.size": 10, "axes.grid": True, "grid.color": "#e3e6e9", "axes.spines.top": False,
            "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "ladder"}):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axis = figure.subplots()
        public = read_public(folder)
        minutes = [float(row["minutes"]) for row in public.values()]
        axis.plot([*public], minutes, ".", color="C7", label="public record")
        scripts = [record for record in records if record.number]
        places = {one.number: float(one.minutes or 45) for one in scripts}
        axis.plot([*places], [*places.values()], "o", color="#006ba4", label="with a script here")
        axis.set(xlabel="number of the public record", ylabel="published minutes on 8×H100",
                 yscale="log", xlim=(0, max([*public, *places, 1]) + 22))
        axis.set_yticks([0.7, 1, 1.5, 2, 3, 5, 10, 20, 40])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.legend(frameon=False)
        figure.draw_without_rendering()  # so that places in it are known
        taken = []
        for one in sorted(scripts, key=lambda one: one.number not in pages.MILESTONES):
            label = f"{one.name}, {one.minutes} min"
            name = axis.annotate(label, (one.number, places[one.number]), (4, 4),
                                 textcoords="offset points", fontsize=7)
            box = name.get_window_extent()
            if any(map(box.overlaps, taken)):
                name.remove()
            else:
                taken.append(box)
        is_png = path.suffix == ".png"
        metadata = {"Software": None} if is_png else {"Date": None}  # equal files again
        figure.savefig(path, dpi=200, transparent=not is_png, metadata=metadata)


# ---- The site ----
def write_book(records: list, out: Path, source: str | None) -> list:
    """Write the site to a folder, and return its pages. Other files are read at `source`."""
    if not records:
        raise LedgerError("no records there, so no pages; give a folder that has")
    if out.is_dir() and any(out.iterdir()) and not (out / "style.css").exists():
        raise LedgerError(f"--out {out}: it has other files; give a folder of its own")
    out.mkdir(parents=True, exist_ok=True)
    folder = records[0].folder.parent
    draw_ladder(folder, records, out / "ladder.svg")
    drawn = read_text(out / "ladder.svg")
    for color, shade in SHADES.items():
        drawn = drawn.replace(color, shade)
    (out / "ladder.svg").write_text(drawn.replace("</svg>", SVG_STYLE), encoding="utf-8")
    style = read_text(Path(__file__).with_suffix(".css"))
    (out / "style.css").write_text(style, encoding="utf-8")

    shutil.copy(Path(__file__).with_suffix(".js"), out)
    race = ""
    if (folder / "race.png").exists():
        shutil.copy(folder / "race.png", out)
        race = ("![Published validation loss against seconds on eight H100s, a curve for each "
                "record](race.png)")

    header = ['<a href="index.html">Home</a>', '<a href="index.html#ladder">Ladder</a>',
              '<a href="index.html#public">All public records</a>']
    story = ""
    if (path := folder.parent / "docs" / "story.md").exists():
        header.append('<a href="story.html">Story</a>')
        story = '<a href="story.html">The story, in five chapters</a>'
    if source:
        header.append(f'<a href="{source}/docs/techniques.md">Techniques</a>')
        header.append(f'<a href="{source.partition("/blob/")[0]}">GitHub</a>')
    blocks = pages.blocks(folder, records)[folder / "README.md"]
    text = INDEX.format(count=len(records), race=race, story=story, ladder=blocks[""],
                        public=blocks[" public"])
    links = ['<a href="#public">All public records</a>', link_to(records[0], "Next", "next")]
    site = {"index": ("The ladder", links, from_markdown(text, folder, None))}
    if story:
        text = from_markdown(read_text(path), path.parent, source and f"{source}/docs/")
        site["story"] = ("The story", [link_to(records[0], "Next", "next")], text)
    for record, following in zip(records, [*records[1:], None]):
        name, links = record.folder.name, ['<a href="index.html">The ladder</a>']
        if record.parent:
            links.append(link_to(record.parent, "Parent", "prev"))
        if following:
            links.append(link_to(following, "Next", "next"))
        else:
            links.append('<a href="index.html#public">Next: all public records</a>')
        address = source and f"{source}/records/{name}/"
        text = read_text(record.folder / "README.md").replace(f"# {name}", f"# {record.name}", 1)
        place = PLACE.search(text)
        before = from_markdown(text[:place.start()], record.folder, address)
        after = from_markdown(text[place.end():], record.folder, address)
        change = change_of(record)
        linked = set(re.findall(r'href="#L(\d+)"', change))
        body = before + change + after + script_of(record, linked)
        site[name] = (record.name, links, body)
    changes = {record.folder.name: record.claim["change"] for record in records}
    for name, (title, links, body) in site.items():
        description = escape(changes.get(name, "The NanoGPT speedrun, record by record"))
        page = PAGE.format(title=escape(title), description=description, body=body,
                           header="\n".join(header), links="\n".join(links))
        (out / f"{name}.html").write_text(page, encoding="utf-8")
    return list(site)


def link_to(record: Record, word: str, rel: str) -> str:
    return f'<a rel="{rel}" href="{record.folder.name}.html">{word}: {record.name}</a>'


def from_markdown(text: str, folder: Path, address: str | None) -> str:
    """HTML of a page's Markdown, whose links lead somewhere from the site, or are plain words.

    `address` is where the files of the page's folder are read, and ends with a slash.
    """
    from markdown_it import MarkdownIt  # which no verb but `book` needs

    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    for token in tokens:
        for child in token.children or ():
            if child.type == "link_open":
                link = child.attrs["href"]
                path = (folder / link).resolve()
                if (path / "record.json").exists():
                    child.attrs["href"] = f"{path.name}.html"
                elif address and "://" not in link:
                    child.attrs["href"] = urljoin(address, link)
                is_dead = child.attrs["href"] == link and "://" not in link
            if child.type in ("link_open", "link_close"):
                child.hidden = is_dead
    return parser.renderer.render(tokens, parser.options, {})


@functools.cache
def coloured(source: str) -> list:
    """The lines of a source as HTML, in the colours of Pygments."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    lexer = PythonLexer(stripnl=False, ensurenl=False)
    return highlight(source, lexer, HtmlFormatter(nowrap=True)).split("\n")


def numbered_sections(source: str) -> dict:
    """Title: its lines, and how many lines of the source stand before them."""
    found, before = {}, 0
    for title, lines in sections(source).items():
        found[title] = lines, before
        before += len(lines)
    return found


def row(kind: str, old, new, code: str) -> str:
    """A line of a diff: its numbers in the parent and in the script, its code."""
    target = f'<a href="#L{new}">{new}</a>' if new else ""
    start = f'<tr class="{kind}">' if kind else "<tr>"
    return f"{start}<td>{old}</td><td>{target}</td><td>{code}</td></tr>"


def change_of(record: Record) -> str:
    """What the record changes of its parent, section by section, with stable ids."""
    if not record.parent:
        return ""
    new_source, old_source = above(record.script), above(record.parent.script)
    new_code, old_code = coloured(new_source), coloured(old_source)
    script, parent = numbered_sections(new_source), numbered_sections(old_source)
    parts = ['<h2 id="change">The change</h2>']
    for title in script | parent:
        old, old_before = parent.get(title, ([], 0))
        new, new_before = script.get(title, ([], 0))
        if old == new or title == "Docstring":
            continue
        slug = re.sub(r"\W+", "-", title.lower())
        parts.append(f'<h3 id="change-{slug}">{escape(title)}</h3>')
        # Not difflib's own table, whose autojunk aligns no line that is frequent in a section.
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for number, group in enumerate(matcher.get_grouped_opcodes(3), 1):
            rows = []
            for tag, i, i_end, j, j_end in group:
                if tag == "equal":
                    for index in range(i_end - i):
                        a, b = old_before + i + index, new_before + j + index
                        rows.append(row("", a + 1, b + 1, new_code[b]))
                    continue
                for a in range(old_before + i, old_before + i_end):
                    rows.append(row("sub", a + 1, "", old_code[a]))
                for b in range(new_before + j, new_before + j_end):
                    rows.append(row("add", "", b + 1, new_code[b]))
            body = "\n".join(rows)
            parts.append(f'<table class="diff" id="{slug}-{number}"><tbody>{body}</tbody></table>')
    return "\n".join(parts)


def script_of(record: Record, linked: set) -> str:
    """The record's own part of its script, whole, with anchors where it is linked."""
    lines = []
    for number, line in enumerate(above(record.script).splitlines(), 1):
        line = escape(line)
        if str(number) in linked or line.startswith(("def ", "class ", "# ----")):
            line = f'<a id="L{number}"></a>{line}'
        lines.append(line)
    text = "\n".join(lines)
    return ('<h2 id="script">The script above the harness</h2>\n'
            f'<pre class="script" tabindex="0">{text}</pre>')
