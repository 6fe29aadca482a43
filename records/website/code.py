"""Scripts as HTML: coloured lines, and what changed between two, section by section."""

import ast
import bisect
import difflib
import functools
import json
import re
from html import escape

from ledger.scripts import HEADING, above, titles

# Pygments' kinds of tokens that get a colour, and the class that style.css has for each
COLORS = {"Comment": "c", "Literal.String": "s", "Literal.Number": "n", "Keyword": "k",
          "Operator.Word": "k", "Name.Function": "f", "Name.Class": "f", "Name.Decorator": "f"}
MOST_WORDS = 600  # of a replaced block whose words are compared: it takes the square of the time
ALIKE = 0.4  # the least ratio of blocks whose changed words are marked


def words_of(source: str) -> list:
    """For each line of a source its words, with the class of each: [[(class, word), ...], ...]."""
    parts = [[]]
    for line in source.splitlines():
        if HEADING.fullmatch(line) or line.startswith(("def ", "class ")):
            parts.append([])
        parts[-1].append(line)
    return [words for lines in parts if lines for words in words_in("\n".join(lines))]


@functools.cache  # most functions of a script are those of the one before
def words_in(part: str) -> list:
    from pygments.lexers import PythonLexer  # which no verb but `site` needs

    lines = [[]]
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    for kind, text in lexer.get_tokens(part):
        name = str(kind).removeprefix("Token.")
        color = next((COLORS[start] for start in COLORS if name.startswith(start)), "")
        first, *rest = text.split("\n")
        lines[-1] += [(color, word) for word in split(first)]
        lines += [[(color, word) for word in split(part)] for part in rest]
    return lines


def split(text: str) -> list:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def colored(words: list, marked: tuple = ()) -> str:
    """HTML of a line; `marked` are the indices of words that changed."""
    runs = []  # of words that look alike
    for index, (color, word) in enumerate(words):
        look = (color, index in marked)
        if runs and (runs[-1][0] == look or word.isspace() and not runs[-1][0][1]):
            runs[-1][1].append(word)
        else:
            runs.append((look, [word]))
    html = ""
    for (color, is_marked), texts in runs:
        part = escape("".join(texts), quote=False)
        part = f'<span class="{color}">{part}</span>' if color else part
        html += f"<mark>{part}</mark>" if is_marked else part
    return html


def changed_words(old: list, new: list) -> tuple:
    """For the lines of two blocks, the indices of words that only one of the blocks has."""
    def flat(lines):
        return [(row, index, word) for row, words in enumerate(lines)
                for index, (_, word) in enumerate(words) if not word.isspace()]

    marks = [set() for _ in old], [set() for _ in new]
    before, after = flat(old), flat(new)
    if not 0 < max(len(before), len(after)) <= MOST_WORDS:
        return marks
    matcher = difflib.SequenceMatcher(
        None, [word for *_, word in before], [word for *_, word in after], autojunk=False)
    if matcher.ratio() < ALIKE:
        return marks
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            for found, words in (marks[0], before[i:i_end]), (marks[1], after[j:j_end]):
                for row, index, _ in words:
                    found[row].add(index)
    return marks


@functools.cache
def side_of(source: str) -> "Side":
    return Side(source)


class Side:
    """One script of a change: by the title of a section, the numbers of its lines."""

    def __init__(self, source: str):
        source = above(source)
        self.lines, self.words, self.sections = source.splitlines(), words_of(source), {}
        for number, title in enumerate(titles(source)):
            self.sections.setdefault(title, []).append(number)

    def cell(self, name: str, numbers: list, marks: list, own: list = ()) -> str:
        """A cell of lines; `marks` are the words of each that changed, `own` an idea's lines."""
        lines = []
        for number, marked in zip(numbers, marks):
            kind = ' class="own"' if number in own else ""
            lines.append(f'<div{kind} data-n="{number + 1}">'
                         f"{colored(self.words[number], marked)}</div>")
        return f'<td class="{name}">{"".join(lines)}</td>'


class Notes:
    """A page's sentences about which lines are which, each once at a place that it is about."""

    def __init__(self, text: str):
        # A name of the code stands in backticks. Links and emphasis are for the page alone.
        sentences = re.split(r"(?<=\.)\s+(?=[A-Z`])", " ".join(text.split()))
        self.left = [(sentence, name) for sentence in sentences
                     for name in re.findall(r"`([^`]+)`", sentence)]

    def take(self, lines: list) -> str:
        """HTML of the sentences that name something in these changed lines."""
        code = "\n".join(lines)
        found = [(sentence, name) for sentence, name in self.left
                 if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", code)]
        self.left = [one for one in self.left if one not in found]
        html = ""
        for sentence in dict.fromkeys(sentence for sentence, _ in found):
            names = [name for other, name in found if other == sentence]
            html += f"<p>{in_code(sentence, names)}</p>"
        return html


def in_code(sentence: str, marked: list) -> str:
    """HTML of a sentence of Markdown, with what stands in backticks as code."""
    sentence = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", sentence)
    parts = [escape(part) for part in sentence.split("`")]
    for place in range(1, len(parts), 2):
        name = f"<code>{parts[place]}</code>"
        parts[place] = f"<mark>{name}</mark>" if parts[place] in map(escape, marked) else name
    return "".join(parts)


def gap(old: list, new: list) -> str:
    """A row in place of equal lines, which a button can show: site.js makes it."""
    if not new:
        return ""
    return (f'\n<tbody class="gap" data-old="{old[0] + 1}" data-new="{new[0] + 1}" '
            f'data-count="{len(new)}"></tbody>')


@functools.cache  # a record's page and those of its ideas show them
def hunks_of(old: Side, new: Side, title: str) -> list:
    """The places of a section that changed, with equal lines around.

    A place is of blocks: (is it equal, numbers of the old lines, numbers of the new ones).
    """
    before, after = old.sections.get(title, []), new.sections.get(title, [])
    matcher = difflib.SequenceMatcher(None, [old.lines[number] for number in before],
                                      [new.lines[number] for number in after], autojunk=False)
    return [[(tag == "equal", before[i:i_end], after[j:j_end])
             for tag, i, i_end, j, j_end in group] for group in matcher.get_grouped_opcodes()]


def rows_of(old: Side, new: Side, hunk: list, left: list = (), came: list = ()) -> str:
    """A place's rows: equal lines on both sides, or what was replaced and by what.

    `left` and `came` are lines of an idea, which are marked.
    """
    html = ""
    for is_equal, theirs, ours in hunk:
        marks = [()] * len(theirs), [()] * len(ours)
        if not is_equal and theirs and ours:
            marks = changed_words([old.words[number] for number in theirs],
                                  [new.words[number] for number in ours])
        html += (f'\n<tr class="{"equal" if is_equal else "changed"}">'
                 f'{old.cell("old", theirs, marks[0], left)}'
                 f'{new.cell("new", ours, marks[1], came)}</tr>')
    return html


def change_table(old: Side, new: Side, title: str, anchor: str, notes: Notes | None = None) -> str:
    """What a section's change is: a part of the table for each place, which has an id."""
    before, after = old.sections.get(title, []), new.sections.get(title, [])
    html = '<table class="diff">'
    end = end_before = 0
    for place, hunk in enumerate(hunks_of(old, new, title), 1):
        theirs, ours = ([number for block in hunk for number in block[side]] for side in (1, 2))
        start_before, start = (numbers.index(some[0]) if some else last for numbers, some, last in
                               ((before, theirs, end_before), (after, ours, end)))
        html += gap(before[end_before:start_before], after[end:start])
        end_before, end = start_before + len(theirs), start + len(ours)
        html += f'\n<tbody id="{anchor}-{place}">'
        lines = [side.lines[number] for is_equal, *block in hunk if not is_equal
                 for side, numbers in ((new, block[1]), (old, block[0])) for number in numbers]
        if notes and (words := notes.take(lines)):
            html += f'\n<tr class="note"><td colspan="2">{words}</td></tr>'
        html += f"{rows_of(old, new, hunk)}</tbody>"
    return html + gap(before[end_before:], after[end:]) + "</table>"


# ---- All scripts, for the browser ----
def scripts_data(sources: dict) -> str:
    """JavaScript with all scripts by name: each distinct line once, and which lines a script has.

    `SCRIPTS[name].runs` has [first, count] of LINES; `sections` has [title, first line from 0].
    """
    ids, scripts = {}, {}
    for name, source in sources.items():
        own = above(source) + "\n"
        runs = []
        for line in map(colored, words_of(source)):
            number = ids.setdefault(line, len(ids))
            if runs and sum(runs[-1]) == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        heads = []
        for number, title in enumerate(titles(own)):
            if not heads or heads[-1][0] != title:
                heads.append([title, number])
        heads.append(["Harness", len(own.splitlines())])
        scripts[name] = {"runs": runs, "sections": heads}
    lines = json.dumps([*ids], ensure_ascii=False, separators=(",", ":"))
    return (f"const LINES = {lines};\n"
            f"const SCRIPTS = {json.dumps(scripts, separators=(',', ':'))};\n")


@functools.cache
def definitions(source: str) -> list:
    """(first line from 0, last line, name) of functions, classes and their methods, in order."""
    found = []

    def add(nodes, owner):
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                name = f"{owner}{node.name}"
                found.append((node.lineno - 1, node.end_lineno - 1, name))
                if isinstance(node, ast.ClassDef):
                    add(node.body, f"{name}.")

    add(ast.parse(source).body, "")
    return found


def place_of(source: str, number: int) -> str:
    """The function or class around a line; else the section that it is in."""
    spans = definitions(source)
    starts = [start for start, *_ in spans]
    for start, end, name in spans[:bisect.bisect_right(starts, number)][::-1]:
        if start <= number <= end:
            return name
    return titles(above(source))[number]


def techniques_of(source: str) -> list:
    """The docstring's rows: (technique, [(name of a function, its line or None), ...])."""
    places = {name: start + 1 for start, _, name in definitions(source)}
    docstring = source.partition('"""')[2].partition('"""')[0]
    table = docstring.partition("\nTechnique ")[2]
    rows = []
    for line in table.partition("\n\n")[0].splitlines()[1:]:
        technique, _, names = line.partition("  ")
        if names.strip():
            names = [name.strip() for name in names.split(",")]
            rows.append((technique, [(name, places.get(name)) for name in names]))
    return rows
