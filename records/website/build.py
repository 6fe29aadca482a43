"""The ladder as a website with a page for each record and each idea.

`python records/ledger site --out SITE` writes it.
"""

import re
import shutil
from html import escape
from pathlib import Path
from urllib.parse import urljoin

from ledger import pages
from ledger.logs import LedgerError, read_text
from ledger.records import Record
from website.code import scripts_data
from website.ideas import chart_html, idea_html, read_ideas, trace_all
from website.ladder import ladder_svg
from website.markdown import Renderer
from website.record import record_html

NAME = "A NanoGPT speedrun in one file"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<meta name="description" content="{description}">
<meta property="og:title" content="{title}">
<meta property="og:description" content="{description}">
<meta property="og:type" content="website">
{preview}
<link rel="icon" href="icon.svg">
<link rel="stylesheet" href="style.css">
<script src="site.js" defer></script>
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
ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">
<path d="M2 2C4 10 8 13 14 13" fill="none" stroke="#3189c9" stroke-width="2.5"></path></svg>
"""
INDEX = """# {name}

In two years a GPT-2 small that took 45 minutes on eight H100s came to train in 40 seconds. Here are
{count} scripts of that way. Each is a small change of its parent, with its idea, its reason, its
diff and the whole script.

{race}

LADDER

STORY

<h2 id="ladder">The ladder, record by record</h2>

{ladder}

## All public records

{public}
"""
COMPARE = """<h1>Two scripts side by side</h1>
<p class="choice"><label>Before: <select id="a"><option value="">none, the whole script</option>
{options}</select></label>
<label>After: <select id="b">{options}</select></label>
<label><input type="checkbox" id="all"> all lines</label>
<label>Line: <input id="line" size="9" placeholder="30-41"></label></p>
<p>Copy the address to share this view. Click a line to include it.</p>
<noscript><p>This page needs JavaScript. Each record's page shows its change without it.</p>
</noscript>
<div id="shown"></div>
<script src="scripts.js"></script>
<script src="compare.js"></script>
"""
RACE = "![Published validation loss against seconds, a curve for each record](../docs/race.png)"


# ---- The site ----
def write_site(
    records: list, out: Path, source: str | None = None, address_of_site: str | None = None
) -> list:
    """Write the site to a folder, and return its pages.

    Other files are read at `source`. The site itself is read at `address_of_site`: previews of
    links need it.
    """
    if not records:
        raise LedgerError("no records there, so no pages; give a folder that has")
    if out.is_dir() and any(out.iterdir()) and not (out / "style.css").exists():
        raise LedgerError(f"--out {out}: it has other files; give a folder of its own")
    out.mkdir(parents=True, exist_ok=True)
    folder = records[0].folder.parent.resolve()
    style = read_text(Path(__file__).with_name("style.css"))
    (out / "style.css").write_text(style, encoding="utf-8")
    (out / "icon.svg").write_text(ICON, encoding="utf-8")
    for name in ("site.js", "compare.js"):
        (out / name).write_text(read_text(Path(__file__).with_name(name)), encoding="utf-8")
    data = scripts_data({record.folder.name: record.script for record in records})
    (out / "scripts.js").write_text(data, encoding="utf-8")

    docs = folder.parent / "docs"
    renderer = Renderer(folder.parent, source, names_of(records))
    race = (docs / "race.png").exists()
    if race:
        shutil.copyfile(docs / "race.png", out / "race.png")
    story = story_html(docs / "story.md", renderer) if (docs / "story.md").exists() else ""
    site, ideas = {"index": front_page(records, folder, race, story, renderer)}, []
    if (docs / "techniques.md").exists():
        ideas = read_ideas(docs / "techniques.md", Path(__file__).with_name("ideas.toml"))
        site |= idea_pages(ideas, records, docs, renderer)
    options = "\n".join(
        f'<option value="{one.folder.name}" '
        f'data-parent="{one.parent.folder.name if one.parent else ""}">{escape(one.name)}</option>'
        for one in records)
    site["compare"] = ("Compare", "Any two of the scripts side by side, or one as a whole",
                       ['<a href="index.html">The ladder</a>'], COMPARE.format(options=options))
    for before, record, after in zip([None, *records], records, [*records[1:], None]):
        site[record.folder.name] = (record.name, record.claim["change"],
                                    links_of(before, record, after),
                                    record_html(record, ideas, renderer))
    header = header_of(site, story, source)
    preview = ""
    if race:
        picture = urljoin(f"{(address_of_site or '').rstrip('/')}/", "race.png").lstrip("/")
        preview = (f'<meta property="og:image" content="{escape(picture)}">\n'
                   '<meta name="twitter:card" content="summary_large_image">')
    for name, (title, description, links, body) in site.items():
        title = f"{title} · {NAME}" if title else NAME
        page = PAGE.format(title=escape(title), description=escape(description), header=header,
                           preview=preview, links="\n".join(links), body=body)
        (out / f"{name}.html").write_text(page, encoding="utf-8")
    return list(site)


def names_of(records: list) -> dict:
    """The site's pages and pictures by the file or folder that they are of."""
    folder = records[0].folder.parent.resolve()
    docs, root = folder.parent / "docs", folder.parent / "train_gpt.py"
    names = {folder / "README.md": "index.html", docs / "story.md": "index.html#story",
             docs / "techniques.md": "techniques.html"}
    if (docs / "race.png").exists():
        names[docs / "race.png"] = "race.png"
    newest = read_text(root) if root.exists() else None
    for record in records:
        home, name = record.folder.resolve(), record.folder.name
        names[home] = f"{name}.html"
        names[home / "train_gpt.py"] = f"compare.html#b={name}"
        if record.script == newest:
            names[root] = f"compare.html#b={name}"
    return names


def story_html(path: Path, renderer: Renderer) -> str:
    """The story's chapters, below a heading."""
    title, _, chapters = read_text(path).partition("\n")
    chapters = re.sub(r"^!\[.*?\]\(.*?\)\n", "", chapters, flags=re.M)  # it stands above
    chapters = re.sub("^## ", "### ", chapters, flags=re.M)
    return (f'<h2 id="story">{escape(title.removeprefix("# "))}</h2>\n'
            f"{renderer.html(chapters, path.parent)}")


def front_page(
    records: list, folder: Path, has_race: bool, story: str, renderer: Renderer
) -> tuple:
    """The race, the ladder as a picture, the story, the ladder and all public records."""
    blocks = pages.blocks(folder, records)[folder / "README.md"]
    text = INDEX.format(name=NAME, count=len(records), race=RACE if has_race else "",
                        ladder=blocks[""], public=blocks[" public"])
    body = with_row_ids(renderer.html(text, folder))
    drawn = f'<div class="wide">{ladder_svg(folder, records)}</div>'
    body = body.replace("<p>LADDER</p>", drawn).replace("<p>STORY</p>", story)
    links = ['<a href="#all-public-records">All public records</a>',
             link_to(records[0], "Next", "next")]
    description = f"{len(records)} scripts, each a small change of its parent, with the reason"
    return "", description, links, body


def links_of(before: Record | None, record: Record, after: Record | None) -> list:
    """The ways from a record's page to its neighbours and its parent."""
    links = [link_to(before, "Previous", "prev") if before
             else '<a href="index.html" rel="prev">Previous: the ladder</a>']
    if record.parent and record.parent is not before:
        links.append(link_to(record.parent, "Parent"))
    links.append(link_to(after, "Next", "next") if after
                 else '<a href="index.html#all-public-records">Next: all public records</a>')
    return links


def with_row_ids(html: str) -> str:
    """Each row of a table that begins with a public record's number gets an id."""
    return re.sub(r"<tr>(?=\n<td>(?:<a [^>]*>)?#(\d+)(?:</a>)?</td>)", r'<tr id="public-\1">', html)


def with_idea_links(html: str, ideas: list) -> str:
    """The table of techniques, whose names lead to their pages."""
    for idea in ideas:
        name = escape(idea.name, quote=False)
        html = html.replace(f"<tr>\n<td>{name}</td>",
                            f'<tr>\n<td><a href="{idea.page}.html">{name}</a></td>')
    return html


def idea_pages(ideas: list, records: list, docs: Path, renderer: Renderer) -> dict:
    """The page of all techniques, the chart of ideas and a page for each."""
    def render(text):
        return renderer.html(text, docs)

    trace_all(ideas, records)
    techniques = with_idea_links(render(read_text(docs / "techniques.md")), ideas)
    site = {"ideas": ("Ideas", "Which scripts have which idea, and where each went",
                      ['<a href="techniques.html">All techniques on one page</a>'],
                      chart_html(ideas, records)),
            "techniques": ("Techniques", "All techniques, each with its effect and its first "
                           "record", ['<a href="ideas.html">Ideas through time</a>'], techniques)}
    for before, idea, after in zip([None, *ideas], ideas, [*ideas[1:], None]):
        links = ['<a href="ideas.html">All ideas</a>']
        for other, word, rel in (before, "Previous", "prev"), (after, "Next", "next"):
            if other:
                links.append(f'<a href="{other.page}.html" rel="{rel}">{word}: '
                             f"{escape(other.name)}</a>")
        what = re.sub(r"\[(.+?)\]\(.+?\)|[*`]", r"\1", idea.what)
        site[idea.page] = (idea.name, what, links, idea_html(idea, records[-1], render))
    return site


def header_of(site: dict, story: str, source: str | None) -> str:
    """Links that stand on each page. The repository is where `source` has its files."""
    links = [("index.html", NAME), ("index.html#ladder", "Ladder")]
    if story:
        links.append(("index.html#story", "Story"))
    if "techniques" in site:
        links += [("ideas.html", "Ideas"), ("techniques.html", "Techniques")]
    links.append(("compare.html", "Compare"))
    if source and "/blob/" in source:
        links.append((source.partition("/blob/")[0], "GitHub"))
    return "\n".join(f'<a href="{escape(link)}">{word}</a>' for link, word in links)


def link_to(record: Record, word: str, rel: str = "") -> str:
    rel = rel and f' rel="{rel}"'
    return f'<a href="{record.folder.name}.html"{rel}>{word}: {escape(record.name)}</a>'
