"""Scripts as HTML: coloured lines, and what changed between two, section by section."""

import difflib
import functools
import re
from html import escape

from ledger.scripts import above, titles

# Pygments' kinds of tokens that get a colour, and the class that style.css has for each
COLORS = {"Comment": "c", "Literal.String": "s", "Literal.Number": "n", "Keyword": "k",
          "Operator.Word": "k", "Name.Function": "f", "Name.Class": "f", "Name.Decorator": "f"}
MOST_WORDS = 600  # of a replaced block whose words are compared: it takes the square of the time
ALIKE = 0.4  # the least ratio of blocks whose changed words are marked


@functools.lru_cache(maxsize=4)  # a script is read for its page and for those of its children
def words_of(source: str) -> list:
    """For each line of a source its words, with the class of each: [[(class, word), ...], ...]."""
    from pygments.lexers import PythonLexer  # which no verb but `book` needs

    lines = [[]]
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    for kind, text in lexer.get_tokens("\n".join(source.splitlines())):
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


class Side:
    """One script of a change: by the title of a section, the numbers of its lines."""

    def __init__(self, source: str):
        source = above(source)
        self.lines, self.words, self.sections = source.splitlines(), words_of(source), {}
        for number, title in enumerate(titles(source)):
            self.sections.setdefault(title, []).append(number)

    def cell(self, name: str, numbers: list, marks: list) -> str:
        lines = [f'<div data-n="{number + 1}">{colored(self.words[number], marked)}</div>'
                 for number, marked in zip(numbers, marks)]
        return f'<td class="{name}">{"".join(lines)}</td>'


def change_table(old: Side, new: Side, title: str, anchor: str) -> str:
    """What a section's change is: a part of the table for each place, which has an id.

    A row is a block of lines: equal ones on both sides, or what was replaced and by what.
    """
    before, after = old.sections.get(title, []), new.sections.get(title, [])
    matcher = difflib.SequenceMatcher(None, [old.lines[number] for number in before],
                                      [new.lines[number] for number in after], autojunk=False)
    html = '<table class="diff">'
    for place, group in enumerate(matcher.get_grouped_opcodes(), 1):
        html += f'\n<tbody id="{anchor}-{place}">'
        for tag, i, i_end, j, j_end in group:
            theirs, ours = before[i:i_end], after[j:j_end]
            marks = [()] * len(theirs), [()] * len(ours)
            if tag == "replace":
                marks = changed_words([old.words[number] for number in theirs],
                                      [new.words[number] for number in ours])
            kind = "equal" if tag == "equal" else "changed"
            html += (f'\n<tr class="{kind}">{old.cell("old", theirs, marks[0])}'
                     f'{new.cell("new", ours, marks[1])}</tr>')
        html += "</tbody>"
    return html + "</table>"
