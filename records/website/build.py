"""The ladders as a website: a page for each record, each idea and each page of docs/.

`python records/ledger site --out SITE` writes it.
"""

import importlib.util
import re
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path

from ledger import pages
from ledger.logs import LedgerError, read_text
from ledger.records import Record, read_public
from website.chart import ladder_svg
from website.code import scripts_data
from website.front import FRONT
from website.ideas import chart_html, idea_html, read_ideas, trace_all
from website.markdown import Renderer, picture, slug
from website.record import record_html

HERE = Path(__file__).parent
NAME = "A NanoGPT speedrun in one file"
PACKAGES = ("torch", "markdown_it", "pygments")  # which no other verb needs
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
<link rel="icon" href="icon.svg">
<link rel="stylesheet" href="style.css">
<script src="site.js" defer></script>
</head>
<body id="top">
<a class="skip" href="#main">Skip to the text</a>
<header><nav aria-label="Site">{header}</nav></header>
<nav aria-label="Neighbours">{links}</nav>
<main id="main">
{body}
</main>
<nav aria-label="Neighbours, again">{links} <a href="#top">To the top</a></nav>
<footer>{footer}</footer>
</body>
</html>
"""
ICON = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">
<path d="M2 2C4 10 8 13 14 13" fill="none" stroke="#3189c9" stroke-width="2.5"></path></svg>
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
# Pages of the repository that the site has: name, file, word in a list of links
DOCS = (("gpus", "docs/gpus.md", "GPUs"), ("resume", "docs/resume.md", "Save and resume"),
        ("deviations", "docs/deviations.md", "Deviations"),
        ("after-53", "docs/after-53.md", "After #53"),
        ("own-optimizer", "docs/optimizers.md", "An optimizer of your own"),
        ("data", "data/README.md", "Your own text"),
        ("contributing", "CONTRIBUTING.md", "Contributing"),
        ("glossary", "docs/glossary.md", "Glossary"))
# Parts of README that are a page of their own
RUN_PARTS = ("Run it", "Try an idea", "Your own text", "Compared with modded-nanogpt")
LADDERS = {"time": ("ladder", "Ladder"), "steps": ("optimizers", "Optimizers")}


@dataclass
class Page:
    """A page of the site: its title, what it is about, links to its neighbours, its HTML."""

    title: str
    about: str
    links: list
    body: str


class Site:
    """What all pages share: the records of both ladders, ideas, and how links are made."""

    def __init__(self, records: list, source: str | None):
        self.by_time = [record for record in records if record.ladder == "time"]
        self.by_steps = [record for record in records if record.ladder == "steps"]
        self.records, self.source = records, source
        first = records[0].folder.resolve().parent
        self.folder = first.parent if records[0].ladder == "steps" else first
        self.root = self.folder.parent
        self.docs = {name: self.root / file for name, file, _ in DOCS
                     if (self.root / file).exists()}
        techniques, self.ideas = self.root / "docs/techniques.md", []
        if techniques.exists():
            self.ideas = read_ideas(techniques, HERE / "ideas.toml")
            trace_all(self.ideas, self.by_time)
        names = {"index", "compare", *self.docs, *(record.folder.name for record in records),
                 *(idea.page for idea in self.ideas)}
        names |= {page for ladder, (page, _) in LADDERS.items()
                  if any(record.ladder == ladder for record in records)}
        names |= {"ideas", "techniques"} if self.ideas else set()
        names |= {"run-it"} if (self.root / "README.md").exists() else set()
        self.renderer = Renderer(self.root, source, self.names_of_files(names), names,
                                 self.terms())

    def names_of_files(self, pages: set) -> dict:
        """The site's pages by the file or folder that they are of."""
        root, docs = self.root, self.root / "docs"
        names = {self.folder / "README.md": "ladder.html", docs / "story.md": "index.html#story",
                 docs / "techniques.md": "techniques.html", root / "README.md": "run-it.html",
                 self.folder / "optimizers": "optimizers.html",
                 self.folder / "optimizers/README.md": "optimizers.html"}
        names |= {path: f"{name}.html" for name, path in self.docs.items()}
        names = {path: name for path, name in names.items()
                 if name.partition(".html")[0] in pages}
        newest = root / "train_gpt.py"
        newest = read_text(newest) if newest.exists() else None
        for record in self.records:
            home, name = record.folder.resolve(), record.folder.name
            names[home] = f"{name}.html"
            names[home / "train_gpt.py"] = f"compare.html#b={name}"
            if record.script == newest:
                names[root / "train_gpt.py"] = f"compare.html#b={name}"
        return names

    def terms(self) -> dict:
        """Where words are explained that stand in bold in the glossary and among the ideas."""
        found = {}
        if "glossary" in self.docs:
            for term in re.findall(r"\*\*(.+?)\*\*", read_text(self.docs["glossary"])):
                found[term.lower()] = f"glossary.html#{slug(term)}"
        for idea in self.ideas:
            for term in re.findall(r"\*\*(.+?)\*\*", idea.what):
                found.setdefault(term.lower(), f"{idea.page}.html")
        return found


# ---- The site ----
def write_site(records: list, out: Path, source: str | None = None) -> list:
    """Write the site to a folder, and return its pages. Other files are read at `source`."""
    for package in PACKAGES:  # before half a minute of work
        if not importlib.util.find_spec(package):
            raise ImportError(f"No module named {package!r}")
    if not records:
        raise LedgerError("no records there, so no pages; give a folder that has")
    if out.is_dir() and any(out.iterdir()) and not (out / "style.css").exists():
        raise LedgerError(f"--out {out}: it has other files; give a folder of its own")
    site = Site(records, source)
    written = pages_of(site)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("style.css", "site.js", "compare.js"):
        (out / name).write_text(read_text(HERE / name), encoding="utf-8")
    (out / "icon.svg").write_text(ICON, encoding="utf-8")
    data = scripts_data({record.folder.name: record.script for record in records})
    (out / "scripts.js").write_text(data, encoding="utf-8")
    footer = footer_of(site)
    for name, page in written.items():
        title = f"{page.title} · {NAME}" if page.title else NAME
        html = PAGE.format(title=escape(title), description=escape(page.about),
                           header=header_of(site, name), links="\n".join(page.links),
                           body=page.body, footer=footer)
        (out / f"{name}.html").write_text(html, encoding="utf-8")
    return list(written)


def pages_of(site: Site) -> dict:
    """All pages by their names."""
    found = {"index": front_page(site)}
    blocks = pages.blocks(site.folder, site.records)
    if site.by_time:
        found["ladder"] = ladder_page(site, blocks, site.by_time, "The ladder")
    if site.by_steps:
        found["optimizers"] = ladder_page(site, blocks, site.by_steps, "Optimizers")
    if "run-it" in site.renderer.pages:
        found["run-it"] = run_page(site)
    for name, path in site.docs.items():
        text = read_text(path)
        title = re.match("# (.*)", text)[1]
        html = as_cards(site.renderer.html(text, path.parent))
        if name == "glossary":  # its words are where links lead
            html = re.sub("<strong>(.+?)</strong>",
                          lambda term: f'<strong id="{slug(term[1])}">{term[1]}</strong>', html)
        found[name] = Page(title, title, [], with_contents(html))
    if site.ideas:
        found |= idea_pages(site)
    found["compare"] = compare_page(site)
    for ladder in site.by_time, site.by_steps:
        for before, record, after in zip([None, *ladder], ladder, [*ladder[1:], None]):
            found[record.folder.name] = Page(
                record.name, record.claim["change"], links_of(before, record, after),
                record_html(record, site.ideas, site.renderer))
    return found


def front_page(site: Site) -> Page:
    """What this is and how it came about; the race, the ladder as a picture, the story."""
    text = FRONT.format(count=len(site.by_time))
    body = [site.renderer.html(text, site.folder)]
    if race := picture(site.root / "docs/race.svg"):
        body.append(f'<h2 id="race">The race</h2>\n{race}')
    if site.by_time:
        body.append('<h2 id="ladder">The ladder</h2>\n<p>Each dot is a public record; blue ones '
                    'have a script here. <a href="ladder.html">The table</a> has the same.</p>'
                    f'<div class="wide">{ladder_picture(site.folder, site.by_time)}</div>')
    if (story := site.root / "docs/story.md").exists():
        title, _, chapters = read_text(story).partition("\n")
        chapters = re.sub(r"^!\[.*?\]\(.*?\)\n", "", chapters, flags=re.M)  # it stands above
        chapters = re.sub("^## ", "### ", chapters, flags=re.M)
        body.append(f'<h2 id="story">{escape(title.removeprefix("# "))}</h2>\n'
                    f"{site.renderer.html(chapters, story.parent, set())}")
    about = f"{len(site.records)} scripts, each a change of its parent, with the reason"
    first = site.records[0]
    return Page("", about, [link_to(first, "Next", "next")], "\n".join(body))


def ladder_picture(folder: Path, records: list) -> str:
    """All public records, those with a script here by name where there is room."""
    public, points, named = read_public(folder), {}, {}
    for number, row in public.items():
        words = f"#{number}, {row['minutes']} min: {row['idea']}"
        points[number] = (date.fromisoformat(row["date"]).toordinal(), float(row["minutes"]),
                          f"ladder.html#public-{number}", words, False)
    scripts = [record for record in records if record.number]
    for record in sorted(scripts, key=lambda one: one.number not in pages.MILESTONES):
        day = date.fromisoformat(record.folder.name[:10]).toordinal()
        day, minutes, *_ = points.get(record.number, (day, float(record.minutes or 45)))
        words = f"{record.name}, {record.minutes} min"
        address = f"{record.folder.name}.html"
        points[record.number] = (day, minutes, address, f"{words}: {record.claim['change']}", True)
        named[address] = words
    return ladder_svg([*points.values()], named) if points else ""


def ladder_page(site: Site, blocks: dict, records: list, title: str) -> Page:
    """A ladder's README: its records, what the columns mean, and all that is public."""
    path = records[0].folder.resolve().parent / "README.md"
    parts = blocks.get(path) or {"": "", " public": ""}
    text = f"# {title}\n\n{parts['']}\n\n## All public records\n\n{parts[' public']}\n"
    if path.exists():
        text = pages.filled(path, parts)
    html = as_cards(with_row_ids(site.renderer.html(text, path.parent)), "cards long")
    html = html.replace("<table", '<table id="ladder"', 1)
    links = [link_to(records[0], "First", "next")]
    return Page(title, f"{len(records)} scripts, a row each", links, with_contents(html))


def run_page(site: Site) -> Page:
    """What README says of running: what one needs, the table by hardware, own ideas and text."""
    path = site.root / "README.md"
    parts = re.split("^(?=## )", read_text(path), flags=re.M)
    clone = "\n".join(re.findall(r"^```sh\n.*?^```\n", parts[0], re.M | re.S))
    needs = "\n\n".join(part for part in parts[0].split("\n\n") if part.startswith("**"))
    by_title = {part[3:].partition("\n")[0]: part for part in parts[1:]}
    chosen = [by_title[title] for title in RUN_PARTS if title in by_title]
    text = "\n".join(["# Run it\n", clone, needs, "", *chosen])
    text = text.replace("## Run it\n", "## By hardware\n")
    words = [f"[{word}]({file})" for name, file, word in DOCS if name in site.docs]
    text += f"\n## More\n\n{' · '.join(words)}\n"
    if site.source and "/blob/" in site.source:
        text = text.replace("THIS_REPOSITORY", site.source.partition("/blob/")[0])
    return Page("Run it", "How to train a record on the hardware that you have", [],
                with_contents(as_cards(site.renderer.html(text, site.root))))


def compare_page(site: Site) -> Page:
    options = "\n".join(
        f'<option value="{one.folder.name}" '
        f'data-parent="{one.parent.folder.name if one.parent else ""}">{escape(one.name)}</option>'
        for one in site.records)
    return Page("Compare", "Any two of the scripts side by side, or one as a whole", [],
                COMPARE.format(options=options))


def idea_pages(site: Site) -> dict:
    """The page of all techniques, the chart of ideas and a page for each."""
    docs, ideas = site.root / "docs", site.ideas

    def render(text):
        return site.renderer.html(text, docs, set())

    techniques = site.renderer.html(read_text(docs / "techniques.md"), docs)
    techniques = with_contents(as_cards(with_idea_links(techniques, ideas), "cards long"))
    found = {"ideas": Page("Ideas", "Which scripts have which idea, and where each went",
                           ['<a href="techniques.html">All techniques on one page</a>'],
                           chart_html(ideas, site.by_time)),
             "techniques": Page("Techniques", "All techniques, each with its effect and its first "
                                "record", ['<a href="ideas.html">Ideas through time</a>'],
                                techniques)}
    for before, idea, after in zip([None, *ideas], ideas, [*ideas[1:], None]):
        links = ['<a href="ideas.html">All ideas</a>']
        for other, word, rel in (before, "Previous", "prev"), (after, "Next", "next"):
            if other:
                links.append(f'<a href="{other.page}.html" rel="{rel}">{word}: '
                             f"{escape(other.name)}</a>")
        what = re.sub(r"\[(.+?)\]\(.+?\)|[*`]", r"\1", idea.what)
        found[idea.page] = Page(idea.name, what, links,
                                idea_html(idea, site.by_time[-1], render))
    return found


# ---- Parts of pages ----
def with_contents(html: str) -> str:
    """A long page with links to its headings, below the first one."""
    heads = re.findall(r'<h2 id="(.*?)">(.*?)</h2>', html)
    links = [f'<a href="#{anchor}">{re.sub("<.*?>", "", title)}</a>' for anchor, title in heads]
    if len(links) < 3:
        return html
    return html.replace("</h1>", f'</h1>\n<p class="contents">{" · ".join(links)}</p>', 1)


def links_of(before: Record | None, record: Record, after: Record | None) -> list:
    """The ways from a record's page to its neighbours and its parent."""
    page, word = LADDERS[record.ladder]
    links = [link_to(before, "Previous", "prev") if before
             else f'<a href="{page}.html" rel="prev">Previous: {word}</a>']
    if record.parent and record.parent is not before:
        links.append(link_to(record.parent, "Parent"))
    links.append(link_to(after, "Next", "next") if after
                 else f'<a href="{page}.html" rel="next">Next: {word}</a>')
    return links


def as_cards(html: str, kind: str = "cards") -> str:
    """Tables whose cells know the heads of their columns: a narrow page has no columns."""
    def name_cells(table):
        heads = [re.sub("<.*?>", "", head) for head in re.findall("<th>(.*?)</th>", table[0])]
        rows = re.split("(?=<tr)", table[0])
        for number, row in enumerate(rows):
            cells = row.split("<td>")
            named = [f'<td data-name="{head}">{cell}' for head, cell in zip(heads, cells[1:])]
            rows[number] = "".join([cells[0], *named])
        return "".join(rows).replace("<table", f'<table class="{kind}"', 1)

    return re.sub("<table>.*?</table>", name_cells, html, flags=re.S)


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


def header_of(site: Site, current: str) -> str:
    """Links that stand on each page. The repository is where `source` has its files."""
    links = [("index", NAME), ("run-it", "Run it"), ("ladder", "Ladder"),
             ("optimizers", "Optimizers"), ("ideas", "Ideas"), ("techniques", "Techniques"),
             ("compare", "Compare"), ("glossary", "Glossary")]
    html = [f'<a href="{page}.html"{" aria-current=page" * (page == current)}>{word}</a>'
            for page, word in links if page in site.renderer.pages]
    if site.source and "/blob/" in site.source:
        html.append(f'<a href="{escape(site.source.partition("/blob/")[0])}">GitHub</a>')
    return "\n".join(html)


def footer_of(site: Site) -> str:
    """More pages; licence, how to cite, and of what the site was made."""
    links = [f'<a href="{name}.html">{word}</a>' for name, _, word in DOCS if name in site.docs]
    for name, word in ("LICENSE", "MIT licence"), ("CITATION.cff", "To cite"):
        links.append(f'<a href="{escape(site.source)}/{name}">{word}</a>' if site.source else word)
    made = f"made {date.today().isoformat()}"
    if commit := re.search(r"/blob/([0-9a-f]{7})", site.source or ""):
        made += f" of commit {commit[1]}"
    return (f"{' · '.join(links)}<br>Ideas and published numbers are those of "
            f'<a href="{pages.UPSTREAM.rstrip("/")}">modded-nanogpt</a> and the people named; all '
            f"code here was written anew. This site was {made}. The keys ← and → lead to the "
            "neighbours.")


def link_to(record: Record, word: str, rel: str = "") -> str:
    rel = rel and f' rel="{rel}"'
    return f'<a href="{record.folder.name}.html"{rel}>{word}: {escape(record.name)}</a>'
