"""Ideas through time: which scripts have each technique of docs/techniques.md, and in which lines.

ideas.toml has how the lines of a technique are found.
"""

import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ledger.logs import LedgerError, read_text
from ledger.records import Record
from ledger.scripts import above, titles
from website.code import hunks_of, place_of, rows_of, side_of
from website.markdown import slug

LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
CELLS = ("name", "what", "by", "effect", "here", "function")
# A row of a table of the script, of which an idea has only what its expression finds
ROW = re.compile(r'("[\w ,]+": |)([A-Z]\w+)\(.*\),?|(\w+=[^,]+, ?)+')
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
    ends: dict  # folders of records without it, though such lines are there, and why
    untraced: str = ""  # why it has no lines
    steps: list = field(default_factory=list)  # of the records, from its first on

    @property
    def page(self) -> str:
        words = re.sub(r"[^a-z0-9]+", "-", self.name.lower().replace("²", "2"))
        return f"idea-{words.strip('-')}"

    @property
    def having(self) -> list:
        """The records that have it."""
        return [step.record for step in self.steps if step.kind != "gone"]

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
        ideas.append(Idea(section, *cells, pattern, names, rule.get("ends", {}),
                          rule.get("untraced", "")))
    return ideas


# ---- Its lines ----
def own_lines(source: str) -> dict:
    """By line, where it is: [(number, how many such rows are above), ...].

    Of what a technique may be in: the part above the banner, without the docstring and the
    pocket's values.
    """
    source = above(source)
    found, is_pocket, rows = {}, False, Counter()
    for number, (title, line) in enumerate(zip(titles(source), source.splitlines())):
        is_pocket |= line.startswith("POCKET = ")
        if title != "Docstring" and not is_pocket:
            kind = re.match(r"\s*([A-Z]\w+)\(", line)
            found.setdefault(line, []).append((number, rows[kind and kind[1]]))
            rows[kind and kind[1]] += 1
        is_pocket &= line != ")"
    return found


def part_of(line: str, pattern: re.Pattern, row: int) -> tuple:
    """What is an idea's in a line: all of its code, or of a table's row the arguments it is in."""
    code = re.sub(r"(^|\s)#.*", "", line)
    found = ROW.fullmatch(code.strip())
    if not found:
        return (code.strip(),)
    matches = [match.span() for match in pattern.finditer(code)]
    parts = [word[0].strip(" ()") for word in re.finditer("[^,]+", code)
             if any(start < word.end() and word.start() < end for start, end in matches)]
    return (found[1] or row if found[2] else None, *parts)


def trace_all(ideas: list, records: list):
    """Fill in what becomes of each idea in each record, held to its parent."""
    scripts = [(record, own_lines(record.script)) for record in records]
    distinct = {line for _, lines in scripts for line in lines}
    for idea in ideas:
        if idea.lines:
            trace(idea, scripts, {line for line in distinct if idea.lines.search(line)})


def trace(idea: Idea, scripts: list, matches: set):
    """Fill in an idea's steps. `scripts` are of (record, `own_lines`); `matches` its lines."""
    known, ended = {}, set()  # (number, part) of its lines, by the record's folder; where it ended
    for record, lines in scripts:
        name, parent = record.folder.name, record.parent and record.parent.folder.name
        if name < idea.records[0]:
            continue
        if name in idea.ends or parent in ended:
            ended.add(name)
        ours = sorted((number, part_of(line, idea.lines, row))
                      for line in (() if name in ended else matches)
                      for number, row in lines.get(line, ()))
        theirs = known.get(parent, [])
        known[name] = ours
        if not ours and not theirs:
            continue
        before, after = (Counter(part for _, part in some) for some in (theirs, ours))
        kind = "same" if before == after else "changed"
        if not theirs or not ours:
            kind = "came" if ours else "gone"
        left = [number for number, part in theirs if before[part] > after[part]]
        new = [number for number, part in ours if after[part] > before[part]]
        idea.steps.append(Step(record, kind, [number for number, _ in ours], left, new))


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


def step_html(step: Step, why: str = "") -> str:
    """What a record does to an idea: where it is, and each place of the change that has of it."""
    record = step.record
    parts = [f'<h3 id="{record.folder.name}">{SIGNS[step.kind]} '
             f'<a href="{record.folder.name}.html">{escape(record.name)}</a>: {step.kind}</h3>']
    places = {}
    for number in step.numbers:
        places.setdefault(place_of(record.script, number), []).append(number)
    links = [link_to_lines(record, numbers, name) for name, numbers in places.items()]
    if links:
        parts.append(f"<p>Its lines here: {', '.join(links)}.</p>")
    if why:
        parts.append(f"<p>{escape(why)}</p>")
    shown, others = hunks_with(step)
    if shown:
        parts.append(f'<table class="diff">{"".join(shown)}</table>')
    if others and step.kind != "changed":
        parts.append(f"<p>The record also changed: {', '.join(others)}.</p>")
    return "\n".join(parts)


def hunks_with(step: Step) -> tuple:
    """(the places of a record's change that have of an idea, links to all others)."""
    new = side_of(step.record.script)
    shown, others = [], []
    if not step.record.parent:  # all lines are new: those alone, by their functions
        places = {}
        for number in step.new:
            places.setdefault(place_of(step.record.script, number), []).append(number)
        for name, numbers in places.items():
            cell = new.cell("new", numbers, [()] * len(numbers))
            shown.append(f'<tbody><tr class="note"><th>{escape(name)}</th></tr>'
                         f'<tr class="changed">{cell}</tr></tbody>')
        return shown, others
    old = side_of(step.record.parent.script)
    for title in new.sections | old.sections:
        if title == "Docstring":
            continue
        for place, hunk in enumerate(hunks_of(old, new, title), 1):
            theirs, ours = ([number for is_equal, *block in hunk if not is_equal
                             for number in block[side]] for side in (0, 1))
            name = (place_of(step.record.script, ours[0]) if ours
                    else place_of(step.record.parent.script, theirs[0]))
            address = f"{step.record.folder.name}.html#change-{slug(title)}-{place}"
            link = f'<a href="{address}">{escape(name)}</a>'
            if {*step.left} & {*theirs} or {*step.new} & {*ours}:
                rows = rows_of(old, new, hunk, step.left, step.new)
                shown.append(f'<tbody><tr class="note"><th colspan="2">{link}</th></tr>{rows}'
                             "</tbody>")
            elif link not in others:
                others.append(link)
    return shown, others


def idea_html(idea: Idea, newest: Record, render) -> str:
    """An idea's page. `render` makes HTML of Markdown; `newest` is the last record of all."""
    page = (f"# {idea.name}\n\n{idea.what}\n\n**By** {idea.by}\n\n"
            f"**Published effect.** {idea.effect}\n\n**First here** {idea.here}\n\n"
            f"**Begin reading at** {idea.function}\n")
    parts = [render(page), '<h2 id="lines">Its lines through time</h2>']
    if not idea.steps:
        return "\n".join([*parts, f"<p>{escape(idea.untraced)}</p>"])
    parts.append(f"<p>{having_words(idea)} A plus is where it came, ± where its lines changed, a "
                 "minus where it went. Between these the lines are the same, but for comments. A "
                 "bar marks the idea's own lines; those around it are of the same place.</p>")
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
            parts.append(step_html(step, idea.ends.get(step.record.folder.name, "")))
    last = idea.steps[-1]
    if last.record is newest and last.kind != "gone":
        parts.append(f"<p>{escape(newest.name)}, the newest script, still has these lines.</p>")
    elif last.kind != "gone":
        parts.append(f"<p>No later script builds on {escape(last.record.name)}.</p>")
    return "\n".join(parts)


def having_words(idea: Idea) -> str:
    """How many scripts have an idea, the first and the last."""
    first, last = idea.having[0].name, idea.having[-1].name
    if first == last:
        return f"One script has it: {escape(first)}."
    return f"{len(idea.having)} scripts have it, from {escape(first)} to {escape(last)}."


def chart_row(idea: Idea, records: list) -> str:
    """A row of the chart: a cell for what a record does, a long one for all between."""
    steps = {step.record.folder.name: step for step in idea.steps}
    cells, run = [], []  # of like cells: [class, how many]
    for record in records:
        name = record.folder.name
        step = steps.get(name)
        kind = step.kind if step else ""
        if not idea.lines and name >= idea.records[0]:
            kind = "came" if name in idea.records else "untraced"
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
    when = having_words(idea) if idea.steps else escape(idea.untraced)
    return (f'<tr><th scope="row"><a href="{idea.page}.html">{escape(idea.name)}</a>'
            f'<span class="when">{when}</span></th>{html}</tr>')


def chart_html(ideas: list, records: list) -> str:
    """The page of all ideas against all records."""
    heads = "".join(f'<th scope="col"><a href="{record.folder.name}.html" '
                    f'title="{escape(record.name)}">{short(record)}</a></th>' for record in records)
    parts = ['<h1>Ideas through time</h1>\n<p>Each name leads to what the idea does, who found it '
             'and its lines. <span class="wide-only">Columns are records, oldest first. A bar is '
             'where scripts have the idea: <b>+</b> where it came, <b>±</b> where its lines '
             'changed, <b>−</b> where it went; a dotted line where it is not traced, nothing where '
             'scripts lack it. Signs lead to what changed there.</span> <a href="techniques.html">'
             'All ideas on one page</a>.</p>',
             f'<table class="chart"><thead><tr><td></td>{heads}</tr></thead>']
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
