"""The ladder as a book: a static site with a page for each record and each idea.

`python records/ledger book --out SITE` writes it.
"""

import re
import shutil
from html import escape
from pathlib import Path
from urllib.parse import urljoin

from book_code import Notes, change_table, scripts_data, side_of, techniques_of
from book_ideas import chart_html, idea_html, ideas_of, name_links, read_ideas, trace_all
from book_ladder import ladder_svg
from book_model import model_html
from book_plots import schedule_plots
from ledger import pages
from ledger.logs import LedgerError, read_text
from ledger.records import Record

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
INDEX = """# {name}

In two years a GPT-2 small that took 45 minutes on eight H100s came to train in 40 seconds. Here are
{count} scripts of that way. Each is a small change of its parent, with its idea, its reason, its
diff and the whole script.

{race}

LADDER

{story}

<h2 id="ladder">The ladder, record by record</h2>

{ladder}

## All public records

{public}
"""
COMPARE = """<h1>Two records side by side</h1>
<p><label>Before: <select id="a"><option value="">none, the whole script</option>{options}</select>
</label> <label>After: <select id="b">{options}</select></label></p>
<p>The page's address is a link to what it shows. A click on a line puts it into the address.</p>
<noscript><p>This page needs JavaScript. Each record's page shows its change without it.</p>
</noscript>
<div id="shown"></div>
<script src="scripts.js"></script>
<script src="compare.js"></script>
"""
RACE = "![Published validation loss against seconds, a curve for each record](race.png)"
# Where a page has the change: in place of the section that says how to see it
PLACE = re.compile(r"^## See the change\n.*?(?=^<details>|^## |\Z)|(?=^<details>)|\Z", re.M | re.S)


# ---- The site ----
def write_book(
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
    style = read_text(Path(__file__).with_suffix(".css"))
    (out / "style.css").write_text(style, encoding="utf-8")

    for name in ("book.js", "compare.js"):
        (out / name).write_text(read_text(Path(__file__).with_name(name)), encoding="utf-8")
    data = scripts_data({record.folder.name: record.script for record in records})
    (out / "scripts.js").write_text(data, encoding="utf-8")

    docs = folder.parent / "docs"
    names = {record.folder.resolve(): f"{record.folder.name}.html" for record in records}
    names |= {folder / "README.md": "index.html", docs / "story.md": "index.html#story",
              docs / "techniques.md": "techniques.html"}
    root = folder.parent / "train_gpt.py"
    for record in records:
        names[record.folder.resolve() / "train_gpt.py"] = f"compare.html#b={record.folder.name}"
        if root.exists() and read_text(root) == record.script:
            names[root] = f"compare.html#b={record.folder.name}"
    race = story = ""
    if (folder / "race.png").exists():
        shutil.copyfile(folder / "race.png", out / "race.png")
        names[folder / "race.png"] = "race.png"
        race = RACE
    if (docs / "story.md").exists():
        title, _, chapters = read_text(docs / "story.md").partition("\n")
        chapters = re.sub(r"^!\[.*?\]\(.*?\)\n", "", chapters, flags=re.M)  # it stands above
        story = f'<h2 id="story">{escape(title.removeprefix("# "))}</h2>\n' + from_markdown(
            re.sub("^## ", "### ", chapters, flags=re.M), docs, source and f"{source}/docs/", names)
    blocks = pages.blocks(folder, records)[folder / "README.md"]
    texts = INDEX.format(name=NAME, count=len(records), race=race, ladder=blocks[""],
                         story="STORY", public=blocks[" public"]).split("STORY\n")
    address = source and f"{source}/{folder.name}/"
    body = story.join(from_markdown(text, folder, address, names) for text in texts)
    drawn = f'<div class="wide">{ladder_svg(folder, records)}</div>'
    body = with_row_ids(body).replace("<p>LADDER</p>", drawn)
    links = ['<a href="#all-public-records">All public records</a>',
             link_to(records[0], "Next", "next")]
    description = f"{len(records)} scripts, each a small change of its parent, with the reason"
    site = {"index": ("", description, links, body)}
    if (docs / "techniques.md").exists():
        body = from_markdown(read_text(docs / "techniques.md"), docs,
                             source and f"{source}/docs/", names)
        site["techniques"] = ("Techniques", "All techniques, each with its effect and its first "
                              "record", ['<a href="ideas.html">Ideas through time</a>'], body)
    ideas = []
    if (docs / "techniques.md").exists():
        ideas = read_ideas(docs / "techniques.md", Path(__file__).with_name("ideas.toml"))
        site |= idea_pages(ideas, records, lambda text: from_markdown(
            text, docs, source and f"{source}/docs/", names))
        techniques = site["techniques"]
        site["techniques"] = *techniques[:3], with_idea_links(techniques[3], ideas)
    options = "".join(f'<option value="{record.folder.name}">{escape(record.name)}</option>'
                      for record in records)
    site["compare"] = ("Compare", "Any two of the scripts side by side, or one as a whole",
                       ['<a href="index.html">The ladder</a>'], COMPARE.format(options=options))
    for before, record, after in zip([None, *records], records, [*records[1:], None]):
        name = record.folder.name
        links = [link_to(before, "Previous", "prev") if before
                 else '<a href="index.html" rel="prev">Previous: the ladder</a>']
        if record.parent and record.parent is not before:
            links.append(link_to(record.parent, "Parent"))
        links.append(link_to(after, "Next", "next") if after
                     else '<a href="index.html#all-public-records">Next: all public records</a>')
        address = source and f"{source}/{folder.name}/{name}/"
        text = read_text(record.folder / "README.md").replace(f"# {name}", f"# {record.name}", 1)
        if record.parent:  # GitHub has no other way to its diff
            diff = f"compare.html#a={record.parent.folder.name}&b={name}"
            names[(record.folder / pages.BOOK).resolve()] = diff
        place = PLACE.search(text)
        top = from_markdown(text[:place.start()], record.folder, address, names)
        rest = from_markdown(text[place.end():], record.folder, address, names)
        told = re.sub(r"^## [^\n]*|^```sh\n.*?^```", "", place[0], flags=re.M | re.S)
        scripts = record.script, record.parent and record.parent.script
        pictures = model_html(*scripts) + schedule_plots(*scripts)
        body = (top + ideas_of(record, ideas) + pictures
                + change_of(record, ideas, from_markdown(told, record.folder, address, names),
                            Notes(told + "\n" + sentences_on_lines(text))) + rest)
        body = body.replace("</h1>", f"</h1>\n{contents_of(body)}", 1)
        site[name] = (record.name, record.claim["change"], links, body)
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


def contents_of(html: str) -> str:
    """Links to the headings of a page."""
    heads = re.findall(r'<h2 id="(.*?)">(.*?)</h2>', html)
    links = [f'<a href="#{anchor}">{title}</a>' for anchor, title in heads]
    return f'<p class="contents">{" · ".join(links)}</p>'


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


def idea_pages(ideas: list, records: list, render) -> dict:
    """The chart of ideas and a page for each. `render` makes HTML of Markdown."""
    trace_all(ideas, records)
    site = {"ideas": ("Ideas", "Which scripts have which idea, and where each went",
                      ['<a href="techniques.html">All techniques on one page</a>'],
                      chart_html(ideas, records))}
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


def slug(title: str) -> str:
    """A heading's id, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def from_markdown(text: str, folder: Path, address: str | None, names: dict) -> str:
    """HTML of a page's Markdown, whose links lead somewhere from the site, or are plain words.

    `address` is where the files of the page's folder are read, and ends with a slash. `names` has
    the site's pages and pictures by the file or folder that they are of. Headings get ids.
    """
    from markdown_it import MarkdownIt  # which no verb but `book` needs

    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(text)
    for token, following in zip(tokens, [*tokens[1:], None]):
        if token.type == "heading_open":
            words = [child.content for child in following.children]
            token.attrs["id"] = slug("".join(words))
        is_dead = False
        for child in token.children or ():
            if child.type == "link_open":
                child.attrs["href"] = link = on_site(child.attrs["href"], folder, address, names)
                is_dead = "://" not in link and link[:1] != "#" and ".html" not in link
            elif child.type == "image":
                child.attrs["src"] = on_site(child.attrs["src"], folder, address, names)
            if child.type in ("link_open", "link_close"):
                child.hidden = is_dead
    return parser.renderer.render(tokens, parser.options, {})


def on_site(link: str, folder: Path, address: str | None, names: dict) -> str:
    """Where a link of a page in a folder leads from the site."""
    path, _, fragment = link.partition("#")
    name = names.get((folder / path).resolve()) if path else None
    if name and "compare.html#" in name:  # the fragment is a line
        return f"{name}&line={fragment[1:]}" if fragment else name
    if name:
        return f"{name.partition('#')[0]}#{fragment}" if fragment else name
    if "://" in link or not path or not address:
        return link
    return urljoin(address, link)


def sentences_on_lines(text: str) -> str:
    """What a page's prose says of lines of code, above its section on the change."""
    parts = re.split(r"^## See the change|^<details>", text, flags=re.M)[0].split("\n\n")
    sentences = [sentence for part in parts if re.match(r"[\w`*]", part)
                 for sentence in re.split(r"(?<=\.)\s+(?=[A-Z`])", part)]
    return " ".join(one for one in sentences if re.search(r"\b(diff|lines?)\b.*`", one, re.S))


def change_of(record: Record, ideas: list, told: str, notes: Notes) -> str:
    """What the record changes of its parent, section by section, and where its techniques are.

    `told` is what its page says of all lines; `notes` stand at the places that they are about.
    """
    script = side_of(record.script)
    whole = f"compare.html#b={record.folder.name}"
    links = [f'<a href="{whole}">The whole script</a>']
    parts = ['<h2 id="change">The script</h2>']
    parent = side_of("")
    if record.parent:
        parts = ['<h2 id="change">The change</h2>']
        parent = side_of(record.parent.script)
        links.append(f'<a href="compare.html#a={record.parent.folder.name}&amp;'
                     f'b={record.folder.name}">This change with all lines between</a>')
    parts.append(f"<p>{' · '.join(links)}</p>{told}")
    for title in script.sections | parent.sections:
        lines = [[side.lines[number] for number in side.sections.get(title, [])]
                 for side in (script, parent)]
        if title == "Docstring" or lines[0] == lines[1]:
            continue
        anchor = f"change-{slug(title)}"
        parts.append(f'<h3 id="{anchor}">{escape(title)}</h3>')
        if record.parent:
            parts.append(change_table(parent, script, title, anchor, notes))
        else:
            numbers = script.sections[title]
            cell = script.cell("new", numbers, [()] * len(numbers))
            parts.append(f'<table class="diff alone"><tr>{cell}</tr></table>')
    rows = techniques_of(record.script)
    if rows:
        parts.append('<h2 id="techniques">Techniques in the script</h2>\n<table>'
                     "<thead><tr><th>Technique</th><th>Where it is</th></tr></thead><tbody>")
        for technique, places in rows:
            names = [f'<a href="{whole}&amp;line={line}">{escape(name)}</a>' if line
                     else escape(name) for name, line in places]
            parts.append(f"<tr><td>{name_links(technique, ideas)}</td>"
                         f"<td>{', '.join(names)}</td></tr>")
        parts.append("</tbody></table>")
    docstring = script.sections.get("Docstring", [])
    shown = escape("\n".join(script.lines[number] for number in docstring))
    parts.append(f"<details><summary>The script's docstring</summary><pre>{shown}</pre></details>")
    return "\n".join(parts)
