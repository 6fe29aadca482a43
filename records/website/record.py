"""A record's page: what its README tells, its model, schedule, change and techniques."""

import functools
import re
from html import escape
from pathlib import Path

from ledger import pages
from ledger.logs import read_text
from ledger.records import LABEL, Record
from website.chart import read_curves
from website.code import Notes, change_table, side_of, techniques_of
from website.ideas import ideas_of, name_links
from website.markdown import Renderer, slug
from website.model import model_html
from website.plots import losses_plot, schedule_plots

# Where a page has the change: in place of the section that says how to see it
PLACE = re.compile(r"^## See the change\n.*?(?=^<details>|^## |\Z)|(?=^<details>)|\Z", re.M | re.S)


def record_html(record: Record, ideas: list, renderer: Renderer) -> str:
    """The body of a record's page. `ideas` are all ideas of the site."""
    name, folder = record.folder.name, record.folder
    text = page_of(record).replace(f"# {name}", f"# {record.name}", 1)
    text = re.sub(r"^## Run it\n", f"{run_words(record)}\n", text, count=1, flags=re.M)
    if record.parent:  # on GitHub the link leads to the site
        diff = f"compare.html#a={record.parent.folder.name}&b={name}"
        text = text.replace(f"]({pages.SITE})", f"]({diff})")
    place = PLACE.search(text)
    told = re.sub(r"^## [^\n]*|^```sh\n.*?^```", "", place[0], flags=re.M | re.S)
    notes = Notes(f"{told}\n{sentences_on_lines(text)}")
    scripts = record.script, record.parent and record.parent.script
    known = set()  # terms that the page has explained
    body = "".join([
        with_evidence(record, renderer.html(text[:place.start()], folder, known)),
        "" if "## Run it" in text else renderer.html(run_words(record), folder),
        ideas_of(record, ideas),
        losses_html(record),
        model_html(*scripts),
        schedule_plots(*scripts),
        change_of(record, renderer.html(told, folder), notes),
        techniques_html(record, ideas),
        renderer.html(text[place.end():], folder)])
    return body.replace("</h1>", f"</h1>\n{contents_of(body)}", 1)


def page_of(record: Record) -> str:
    """The record's README, or its name and change where it has none yet."""
    path = record.folder / "README.md"
    if path.exists():
        return read_text(path)
    return f"# {record.folder.name}\n\n**Change.** {record.claim['change']}.\n"


def run_words(record: Record) -> str:
    """Markdown: the commands that train this record."""
    label = LABEL.search(record.folder.name)
    name = str(record.number or label and label[1] or record.folder.name)
    script = f"records/{record.folder.name}/train_gpt.py"
    if record.ladder == "steps":
        script = f"records/optimizers/{record.folder.name}/train_gpt.py"
    rows = " --ngram_rows 377280" if "\n    ngram_rows: int" in record.script else ""
    table = " with a small n-gram table" * bool(rows)
    return f"""## Run it

On one GPU{table}; `run.sh` fetches data, and adds the flags that
[your card](gpus.html#what-fits-your-card) needs:

```sh
./run.sh --record {name}{rows}
```

On a CPU, the small model of bytes:

```sh
python data/pocket.py
python {script} --preset pocket --device cpu
```
"""


def with_evidence(record: Record, html: str) -> str:
    """HTML of a page's head, with how equality was shown below its result."""
    equality = record.claim["equality"]
    how = '<a href="deviations.html#how-equality-was-shown">How it was shown</a>'
    if equality:
        words = (f"Held against what was published, our script differs by at most "
                 f"{equality['largest']:.0e}, relative: {escape(equality['of'])}. {how}.")
    else:
        words = f"No largest difference is kept for this script alone. {how}."
    added = f"<p><strong>Equality.</strong> {words}</p>\n"
    start = html.find("<h2") if "<h2" in html else len(html)
    return html[:start] + added + html[start:]


@functools.cache
def curves_by_step(path: Path) -> dict:
    """{public result: [(step, loss), ...]}, means over the runs of the published logs."""
    return read_curves(path, "result", "step")


def losses_of(record: Record | None) -> list:
    """(step, loss) by time: as the record's page lists them; by steps: of the public logs."""
    if not record:
        return []
    curves = record.folder.parent / "public_curves.csv"
    if record.ladder == "steps":
        return curves_by_step(curves).get(record.result, []) if curves.exists() else []
    part = page_of(record).partition("<summary>Published losses by step</summary>")[2]
    part = part.partition("</details>")[0]
    points = [(int(step), float(loss)) for step, loss in
              re.findall(r"\b(\d+): (\d+\.\d{3,4})\b", part)]
    ends = [place for place, point in enumerate(points[1:], 1) if point[0] <= points[place - 1][0]]
    return points[:ends[0]] if ends else points  # the first of several runs


def losses_html(record: Record) -> str:
    """A plot of the published losses that its page lists, beside those of the record before."""
    ours, before = losses_of(record), record.parent
    if not ours:
        return ""
    while before and not losses_of(before):
        before = before.parent
    source = "the numbers below, under “Published losses by step”"
    if record.ladder == "steps":
        source = "the public logs, means over their runs"
    return losses_plot(ours, losses_of(before), before and before.name, source)


def contents_of(html: str) -> str:
    """Links to the headings of a page."""
    heads = re.findall(r'<h2 id="(.*?)">(.*?)</h2>', html)
    links = [f'<a href="#{anchor}">{title}</a>' for anchor, title in heads]
    return f'<p class="contents">{" · ".join(links)}</p>'


def sentences_on_lines(text: str) -> str:
    """What a page's prose says of lines of code, above its section on the change."""
    parts = re.split(r"^## See the change|^<details>", text, flags=re.M)[0].split("\n\n")
    sentences = [sentence for part in parts if re.match(r"[\w`*]", part)
                 for sentence in re.split(r"(?<=\.)\s+(?=[A-Z`])", part)]
    return " ".join(one for one in sentences if re.search(r"\b(diff|lines?)\b.*`", one, re.S))


def change_of(record: Record, told: str, notes: Notes) -> str:
    """What the record changes of its parent, section by section.

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
                     f'b={record.folder.name}&amp;all=1">The change, with all equal lines</a>')
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
    return "\n".join(parts)


def techniques_html(record: Record, ideas: list) -> str:
    """The table of a script's docstring, as links to ideas and to lines, and the docstring."""
    whole = f"compare.html#b={record.folder.name}"
    parts = [""]
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
    script = side_of(record.script)
    lines = [script.lines[number] for number in script.sections.get("Docstring", [])]
    shown = escape("\n".join(lines))
    parts.append(f"<details><summary>The script's docstring</summary><pre>{shown}</pre></details>")
    return "\n".join(parts)
