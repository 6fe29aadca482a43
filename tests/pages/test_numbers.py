"""Numbers on the pages: columns add up, and a card's time is the same wherever it stands."""

import re

import pytest
from conftest import REPO
from page_text import PAGES, prose_of

NUMBER = re.compile(r"[\d.,]+")
# A time of a card, as the pages write it
TIME = re.compile(r"([\d.]+ (?:minutes|hours)) on an? ((?:RTX |)\w+)")


def tables_of(page):
    """Tables of a page as rows of cells, without the line below the heading."""
    for table in re.findall(r"(?:^\|.*\n)+", prose_of(page), re.M):
        rows = [[cell.strip() for cell in line.strip("| ").split("|")]
                for line in table.splitlines()]
        yield [row for row in rows if set("".join(row)) - set(":- ")]


def sums_of(page):
    """(what is added, the sum that the page gives), for each column of a table with a sum."""
    for rows in tables_of(page):
        if rows[-1][0].lower() in ("sum", "total", "all"):
            for column in [*zip(*rows[1:])][1:]:
                yield [float(NUMBER.fullmatch(cell)[0].replace(",", "")) for cell in column[:-1]], (
                    column[-1])


def test_columns_add_up():
    found = [(page, *each) for page in PAGES for each in sums_of(page)]
    assert len(found) >= 3
    for page, numbers, total in found:
        place = 10 ** -len(total.partition(".")[2])
        rounding = 0.06 * len(numbers) + place / 2
        assert sum(numbers) == pytest.approx(float(total), abs=rounding), (page, total)


def test_a_cards_time_is_that_of_the_table_of_cards():
    """And it stands nowhere else than there and in the README's table."""
    (cards,) = (rows for rows in tables_of("docs/gpus.md") if rows[0][0] == "Card")
    times = {row[1]: row[-1].removeprefix("over ") for row in cards[1:]}
    quoted = [(page, *found) for page in PAGES for found in TIME.findall(prose_of(page))]
    assert {page for page, *_ in quoted} == {"README.md"}
    for page, time, card in quoted:
        assert times[card] == time, (page, card)
    text = (REPO / "README.md").read_text()
    (modelled,) = (rows for rows in tables_of("docs/gpus.md") if "Minutes, modelled" in rows[0])
    minutes = {row[0].split()[0]: row[1] for row in modelled[1:]}
    assert f"| #53 | 27 GiB | {minutes['#53']} minutes |" in text
    assert f"| {minutes['92h']} minutes on H100s |" in text
