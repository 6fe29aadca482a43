"""The ladder as a picture, and as a book: a static site with a page for each record.

`python records/ledger book --out SITE` writes the site, `list --write` the picture.
"""

import difflib
import re
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
<title>{title}</title>
<link rel="stylesheet" href="style.css">
</head>
<body>
<nav>{links}</nav>
<main>
{body}
</main>
<nav>{links}</nav>
</body>
</html>
"""
INDEX = """# The ladder, record by record

Here are {count} scripts that train a language model to a fixed quality, each a small change of its
parent. A page has the idea, the reason, and the change beside the parent's lines.

{ladder}

![Published minutes on eight H100s of each public record](ladder.svg)

<h2 id="public">All public records</h2>

{public}
"""
# Where a page has the change: in place of the section that says how to see it
PLACE = re.compile(r"^## See the change\n.*?(?=^<details>|^## |\Z)|(?=^<details>)|\Z", re.M | re.S)
# What HtmlDiff's tables have beside lines; its numbers would be those of a section
CLUTTER = re.compile(
    r'<td class="diff_(next|header)".*?</td>|<colgroup></colgroup>| (nowrap|rules)="\w+"')
LONG = re.compile(r"[^\s<>&]{40,}")  # what a narrow page would break anywhere
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

    blocks = pages.blocks(folder, records)[folder / "README.md"]
    text = INDEX.format(count=len(records), ladder=blocks[""], public=blocks[" public"])
    links = ['<a href="#public">All public records</a>', link_to(records[0], "Next")]
    site = {"index": ("The ladder", links, from_markdown(text, folder, None))}
    for record, following in zip(records, [*records[1:], None]):
        name, links = record.folder.name, ['<a href="index.html">The ladder</a>']
        if record.parent:
            links.append(link_to(record.parent, "Parent"))
        if following:
            links.append(link_to(following, "Next"))
        else:
            links.append('<a href="index.html#public">Next: all public records</a>')
        address = source and f"{source}/records/{name}/"
        text = read_text(record.folder / "README.md").replace(f"# {name}", f"# {record.name}", 1)
        place = PLACE.search(text)
        before = from_markdown(text[:place.start()], record.folder, address)
        after = from_markdown(text[place.end():], record.folder, address)
        site[name] = (record.name, links, before + change_of(record) + after)
    for name, (title, links, body) in site.items():
        page = PAGE.format(title=title, links="\n".join(links), body=body)
        (out / f"{name}.html").write_text(page, encoding="utf-8")
    return list(site)


def link_to(record: Record, word: str) -> str:
    return f'<a href="{record.folder.name}.html">{word}: {record.name}</a>'


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


def change_of(record: Record) -> str:
    """What the record changes of its parent, section by section; of the first, the script."""
    script = sections(above(record.script))
    parent = sections(above(record.parent.script)) if record.parent else {}
    docstring = escape("\n".join(script.pop("Docstring", [])))
    parent.pop("Docstring", None)
    parts = ["<h2>The change</h2>" if record.parent else "<h2>The script</h2>"]
    for title in script | parent:
        old, new = parent.get(title, []), script.get(title, [])
        if old == new:
            continue
        parts.append(f"<h3>{title}</h3>")
        if record.parent:
            shown = difflib.HtmlDiff().make_table(old, new, context=True, numlines=3)
            shown = CLUTTER.sub("", shown).replace("&nbsp;", " ")  # long lines may break
            parts.append(LONG.sub(lambda word: re.sub(r"([(.])", r"\1<wbr>", word[0]), shown))
        else:
            code = escape("\n".join(new))
            parts.append(f'<pre tabindex="0">{code}</pre>')
    parts.append(f"<details><summary>The script's docstring</summary><pre>{docstring}</pre>"
                 "</details>")
    return "\n".join(parts)
