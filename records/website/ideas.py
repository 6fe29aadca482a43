"""Ideas through time: which scripts have each technique of docs/techniques.md, and in which lines.

ideas.toml has how the lines of a technique are found.
"""

import bisect
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ledger.logs import LedgerError, read_text
from ledger.records import Record
from ledger.scripts import above, titles
from website.code import definitions, side_of

LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
CELLS = ("name", "what", "by", "effect", "here", "function")
# What becomes of an idea in a record: the sign of its cell in the chart
SIGNS = {"came": "+", "changed": "±", "gone": "−"}


@dataclass
class Idea:
    """A row of docs/techniques.md; its cells are Markdown."""

    section: str
    name: str
    what: str
    by: str
    effect: str
    here: str
    function: str
    lines: re.Pattern | None
    named: list
    steps: list = field(default_factory=list)  # of the records, from its first on

    @property
    def page(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.name.lower().replace("²", "2"))
        return f"idea-{words.strip('-')}"

    @property
    def records(self) -> list:
        """Names of the folders in which it is shown; they sort by date."""
        return sorted(path.rpartition("/")[2] for _, path in LINK.findall(self.here))


@dataclass
class Step:
    """An idea in a record."""

    record: Record
    kind: str  # came, changed, same or gone
    numbers: list  # of its lines in the script, from 0
    left: list  # lines of the parent that it has no more
    new: list  # its lines that the parent has not


def read_ideas(page: Path, rules: Path) -> list:
    """The ideas of docs/techniques.md, in its order. Raises LedgerError where a rule is missing."""
    known = tomllib.loads(read_text(rules))
    ideas, section = [], ""
    for line in read_text(page).splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = line.strip("| ").split(" | ")
        is_row = line.startswith("| ") and len(cells) == len(CELLS)
        if not is_row or cells[0] == "Technique":
            continue
        if cells[0] not in known:
            raise LedgerError(f"{rules.name} lacks {cells[0]!r}, a technique of {page.name}; "
                              "add its lines")
        rule = known[cells[0]]
        pattern = re.compile(rule["lines"]) if "lines" in rule else None
        names = [cells[0], *rule.get("named", [])]
        ideas.append(Idea(section, *cells, lines=pattern, named=names))
    return ideas


# ---- Its lines ----
def own_lines(source: str) -> dict:
    """By line its numbers, of what a technique may be in: the part above the banner.

    Neither the docstring nor the pocket's values count.
    """
    source = above(source)
    found, is_pocket = {}, False
    for number, (title, line) in enumerate(zip(titles(source), source.splitlines())):
        is_pocket |= line.startswith("POCKET = ")
        if title != "Docstring" and not is_pocket:
            found.setdefault(line, []).append(number)
        is_pocket &= line != ")"
    return found


def code_of(line: str) -> str:
    """A line without its comment and its place."""
    return re.sub(r"(^|\s)#.*", "", line).strip()


def trace_all(ideas: list, records: list):
    """Fill in what becomes of each idea in each record, held to its parent."""
    scripts = [(record, own_lines(record.script)) for record in records]
    distinct = {line for _, lines in scripts for line in lines}
    for idea in ideas:
        if idea.lines:
            trace(idea, scripts, {line for line in distinct if idea.lines.search(line)})


def trace(idea: Idea, scripts: list, matches: set):
    """Fill in an idea's steps. `scripts` are of (record, `own_lines`); `matches` its lines."""
    known = {}  # lines by the record's folder
    for record, lines in scripts:
        if record.folder.name < idea.records[0]:
            continue
        ours = sorted((number, line) for line in matches for number in lines.get(line, ()))
        theirs = known.get(record.parent and record.parent.folder.name, [])
        known[record.folder.name] = ours
        before = Counter(code_of(line) for _, line in theirs)
        after = Counter(code_of(line) for _, line in ours)
        if not ours and not theirs:
            continue
        kind = "same" if before == after else "changed"
        if not theirs or not ours:
            kind = "came" if ours else "gone"
        left = [number for number, line in theirs if before[code_of(line)] > after[code_of(line)]]
        new = [number for number, line in ours if after[code_of(line)] > before[code_of(line)]]
        idea.steps.append(Step(record, kind, [number for number, _ in ours], left, new))


def place_of(source: str, number: int) -> str:
    """The function or class around a line; else the section that it is in."""
    spans = definitions(source)
    starts = [start for start, *_ in spans]
    for start, end, name in spans[:bisect.bisect_right(starts, number)][::-1]:
        if start <= number <= end:
            return name
    return titles(above(source))[number]


def ranges(numbers: list) -> str:
    """Numbers of lines from 1, for an address: neighbours are joined."""
    parts = []
    for number in numbers:
        if parts and parts[-1][1] == number:
            parts[-1][1] = number + 1
        else:
            parts.append([number + 1, number + 1])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in parts)


def link_to_lines(record: Record, numbers: list, word: str) -> str:
    """A link to lines of a record's script, which the page marks."""
    address = f"compare.html#b={record.folder.name}&amp;line={ranges(numbers)}"
    return f'<a href="{address}">{escape(word)}</a>'


# ---- Pages ----
def short(record: Record) -> str:
    return record.name.partition(" ")[0]


def step_html(step: Step) -> str:
    """What a record does to an idea: where it is, and the lines that came and went."""
    record = step.record
    parts = [f'<h3 id="{record.folder.name}">{SIGNS[step.kind]} '
             f'<a href="{record.folder.name}.html">{escape(record.name)}</a>: {step.kind}</h3>']
    places = {}
    for number in step.numbers:
        places.setdefault(place_of(record.script, number), []).append(number)
    links = [link_to_lines(record, numbers, name) for name, numbers in places.items()]
    if links:
        parts.append(f"<p>In {', '.join(links)}.</p>")
    old = side_of(record.parent.script if record.parent else "")
    new = side_of(record.script)
    cells = [side.cell(name, numbers, [()] * len(numbers))
             for name, side, numbers in (("old", old, step.left), ("new", new, step.new))]
    parts.append(f'<table class="diff"><tr class="changed">{"".join(cells)}</tr></table>')
    return "\n".join(parts)


def idea_html(idea: Idea, newest: Record, render) -> str:
    """An idea's page. `render` makes HTML of Markdown; `newest` is the last record of all."""
    page = (f"# {idea.name}\n\n{idea.what}\n\n**By** {idea.by}\n\n"
            f"**Published effect.** {idea.effect}\n\n**First here** {idea.here}\n\n"
            f"**Begin reading at** {idea.function}\n")
    parts = [render(page), '<h2 id="lines">Its lines through time</h2>']
    if not idea.steps:
        return "\n".join([*parts, "<p>None of the scripts here has lines of its own.</p>"])
    having = [step.record for step in idea.steps if step.kind != "gone"]
    parts.append(f"<p>{len(having)} scripts have it, from {escape(having[0].name)} to "
                 f"{escape(having[-1].name)}. "
                 "A plus is where it came, ± where its lines changed, a minus where it went. "
                 "Between these the lines are the same, but for comments.</p>")
    same = []
    for step in [*idea.steps, None]:
        if step and step.kind == "same":
            same.append(step)
            continue
        if same:
            links = [link_to_lines(one.record, one.numbers, short(one.record)) for one in same]
            parts.append(f"<p>The same in {', '.join(links)}.</p>")
            same = []
        if step:
            parts.append(step_html(step))
    last = idea.steps[-1]
    if last.record is newest and last.kind != "gone":
        parts.append("<p>The newest script has it.</p>")
    elif last.kind != "gone":
        parts.append(f"<p>No later script is a change of {escape(last.record.name)}.</p>")
    return "\n".join(parts)


def chart_row(idea: Idea, records: list) -> str:
    """A row of the chart: a cell for what a record does, a long one for all between."""
    steps = {step.record.folder.name: step for step in idea.steps}
    cells, run = [], []  # of like cells: [class, how many]
    for record in records:
        name = record.folder.name
        step = steps.get(name)
        kind = step.kind if step else "came" if not idea.lines and name in idea.records else ""
        if kind not in SIGNS:
            if run and run[0] == kind:
                run[1] += 1
            else:
                run = [kind, 1]
                cells.append(run)
            continue
        run = []
        address = f"{idea.page}.html#{name}" if step else f"{name}.html"
        cells.append((kind, f'<a href="{address}" title="{escape(idea.name)}: {kind} in '
                            f'{escape(record.name)}">{SIGNS[kind]}</a>'))
    html = "".join(
        f'<td class="{kind}" colspan="{more}"></td>' if isinstance(more, int)
        else f'<td class="{kind}">{more}</td>' for kind, more in cells)
    return (f'<tr><th scope="row"><a href="{idea.page}.html">{escape(idea.name)}</a></th>'
            f"{html}</tr>")


def chart_html(ideas: list, records: list) -> str:
    """The page of all ideas against all records."""
    heads = "".join(f'<th scope="col"><a href="{record.folder.name}.html" '
                    f'title="{escape(record.name)}">{short(record)}</a></th>' for record in records)
    parts = ['<h1>Ideas through time</h1>\n<p>A row is an idea, a column a record, oldest first. '
             'A bar is where scripts have it: <b>+</b> where it came, <b>±</b> where its lines '
             'changed, <b>−</b> where it went. Names lead to what an idea does, who found it and '
             'its lines, signs to what changed there. <a href="techniques.html">All on one '
             'page</a>.</p>', f'<table class="chart"><thead><tr><td></td>{heads}</tr></thead>']
    section = None
    for idea in ideas:
        if idea.section != section:
            parts.append("</tbody>" * (section is not None))
            section = idea.section
            parts.append(f'<tbody><tr><th class="section" colspan="{len(records) + 1}" '
                         f'scope="rowgroup">{escape(section)}</th></tr>')
        parts.append(chart_row(idea, records))
    return "\n".join([*parts, "</tbody></table>"])


def ideas_of(record: Record, ideas: list) -> str:
    """A line on a record's page: which ideas came and went there."""
    parts = []
    for kind, words in dict(came="New here", gone="Gone").items():
        links = [f'<a href="{idea.page}.html#{record.folder.name}">{escape(idea.name)}</a>'
                 for idea in ideas for step in idea.steps
                 if step.record is record and step.kind == kind]
        links += [f'<a href="{idea.page}.html">{escape(idea.name)}</a>' for idea in ideas
                  if kind == "came" and not idea.steps and record.folder.name in idea.records]
        if links:
            parts.append(f"<b>{words}:</b> {', '.join(links)}.")
    return f"<p>{' '.join(parts)}</p>" if parts else ""


def name_links(row: str, ideas: list) -> str:
    """HTML of a row of a docstring's table, whose techniques lead to their pages."""
    pages = {name.lower(): idea.page for idea in ideas for name in idea.named}
    if not pages:
        return escape(row)
    names = "|".join(map(re.escape, sorted(pages, key=len, reverse=True)))

    def link(found):
        return f'<a href="{pages[found[0].lower()]}.html">{escape(found[0])}</a>'

    return re.sub(rf"(?<!\w)({names})(?!\w)", link, row, flags=re.I)
