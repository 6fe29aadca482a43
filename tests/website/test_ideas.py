"""Ideas through time: where each came, changed and went, and the lines that show it."""

import re
from dataclasses import replace

import pytest
from conftest import REPO
from ledger import records
from ledger.logs import LedgerError
from website.code import hunks_of, place_of, side_of, techniques_of
from website.ideas import (
    Idea,
    chart_row,
    hunks_with,
    idea_html,
    name_links,
    own_lines,
    part_of,
    ranges,
    read_ideas,
    trace_all,
)
from website.model import model_of
from whole_ladder import find_ladder


@pytest.fixture(scope="module")
def ladder():
    return find_ladder()


@pytest.fixture(scope="module")
def ideas(ladder):
    found = read_ideas(REPO / "docs/techniques.md", REPO / "records/website/ideas.toml")
    trace_all(found, ladder)
    return found


@pytest.mark.slow
def test_each_idea_changes_lines_where_its_row_says(ideas, ladder):
    """And each technique that a docstring names has a page."""
    assert len({idea.page for idea in ideas}) == len(ideas) > 100
    for idea in ideas:
        kinds = {step.record.folder.name: step.kind for step in idea.steps}
        if idea.lines:
            assert kinds[idea.records[0]] == "came", idea.name
            assert all(kinds[name] in ("came", "changed") for name in idea.records), idea.name
    named = {technique for record in ladder
             for technique, _ in techniques_of(record.script)}
    for technique in named:
        rest = re.sub("<a.*?</a>", "", name_links(technique, ideas))
        assert not rest.strip(", "), technique


def test_an_idea_comes_changes_and_goes(tmp_path):
    """Neither comments nor the pocket's values count, nor what precedes its first record."""
    sources = [
        '"""Doc: smear."""\nx = 1\n', "x = smear(1)\n", "y = 2\nx = smear(1)  # a comment\n",
        "x = smear(2)\n", "POCKET = dict(\n    smear=1,\n)\nx = 2\n"]
    known, parent = [], None
    for number, source in enumerate(["x = smear(0)\n", *sources]):
        folder = tmp_path / f"2026-01-0{number + 1}_R{number}"
        folder.mkdir()
        (folder / "train_gpt.py").write_text(source)
        claim = {"published": None, "change": "", "parent": None}
        known.append(parent := records.Record(folder, claim, parent))
    idea = Idea("S", "Smear", "What.", "By", "–", "[#2](../records/2026-01-02_R1)", "f",
                re.compile("smear"), ["Smear"], {})
    trace_all([idea], known)
    assert [(step.kind, step.numbers) for step in idea.steps] == [
        ("came", [0]), ("same", [1]), ("changed", [0]), ("gone", [])]
    page = idea_html(idea, known[-1], lambda text: text)
    assert re.findall('<h3 id="(.*?)">(.) ', page) == [
        ("2026-01-03_R2", "+"), ("2026-01-05_R4", "±"), ("2026-01-06_R5", "−")]
    assert 'compare.html#b=2026-01-04_R3&amp;line=2">R3</a>' in page
    assert "3 scripts have it, from R2 to R4." in page
    assert "newest script" not in page and "No later" not in page  # it went
    trace_all([branch := replace(idea, steps=[])], known[:3])
    assert "the newest script, still has these lines" in idea_html(branch, known[2], str)
    assert "No later script builds on R2" in idea_html(branch, known[-1], str)
    row = chart_row(idea, known)
    assert re.findall('class="(.*?)"', row) == ["when", "", "came", "same", "changed", "gone"]
    assert ranges([1, 2, 3, 7]) == "2-4,8"


def test_a_technique_is_read_in_the_root_only_where_the_root_has_it(ideas, ladder):
    (root,) = (record for record in ladder if record.number == 53)
    linked = [idea for idea in ideas if idea.lines and "(../train_gpt.py" in idea.function]
    assert len(linked) > 30
    for idea in linked:
        assert any(step.record is root and step.kind != "gone" for step in idea.steps), idea.name


# What the model of a record shows of an idea, by the idea's name
SHOWN = {
    "Value embeddings": lambda rows, source: any(row.get("table") is not None for row in rows),
    "Value tables of their own": lambda rows, source: "values.get" in source and len(
        tables := [row["table"] for row in rows if row.get("table") is not None]) == len(
            {*tables}) > 3,
    "No first MLP": lambda rows, source: len(rows) == 12 and not rows[0]["count"],
    "MLPs by layer": lambda rows, source: max(row["count"] for row in rows) > 1,
    "Value residual": lambda rows, source: re.search(
        r"def forward\(self, x, .*first_values", source) is not None,
    "Exclusive self-attention (XSA)": lambda rows, source: any(
        "xsa" in row["flags"] for row in rows)}


@pytest.mark.slow
def test_an_idea_is_where_the_models_show_it(ideas, ladder):
    known = {idea.name: {step.record.folder.name for step in idea.steps if step.kind != "gone"}
             for idea in ideas}
    for record in ladder:
        rows = model_of(record.script).rows
        for name, is_in in SHOWN.items():
            assert is_in(rows, record.script) == (record.folder.name in known[name]), (
                name, record.name)


def test_heads_are_wide_until_they_are_narrower(ideas):
    having = {idea.name: {step.record.folder.name for step in idea.steps if step.kind != "gone"}
              for idea in ideas}
    narrow = having["Queries and keys of 96 channels"] | having["Heads of half the width"]
    wide = having["Wide heads"]
    assert len(narrow) > 10 and not wide & narrow
    assert wide | narrow == having["QK-norm"]  # which all have from #5 on


@pytest.mark.slow
def test_an_ideas_lines_are_shown_by_places_and_no_place_is_left_out(ideas):
    """Each place of a change by which an idea came or went is there, or linked."""
    count = 0
    for idea in ideas:
        for step in idea.steps:
            if step.kind not in ("came", "gone") or not step.record.parent:
                continue
            old, new = side_of(step.record.parent.script), side_of(step.record.script)
            shown, others = hunks_with(step)
            places = sum(len(hunks_of(old, new, title)) for title in new.sections | old.sections
                         if title != "Docstring")
            names = {re.sub("<.*?>", "", link) for link in others}
            assert shown or step.kind == "gone", (idea.name, step.record.name)
            assert len(shown) + len(names) <= places
            linked = re.findall(r"#(change-[\w-]+)", "".join([*shown, *others]))
            assert len({*linked}) == len(linked)
            count += len(shown)
    assert count > 200


@pytest.mark.slow
def test_the_function_that_a_row_names_is_shown_where_its_idea_came(ideas):
    """If the record changed that function at all."""
    checked = 0
    for idea in ideas:
        name = re.match(r"\[`([\w.]+)`", idea.function)[1]
        came = next((step for step in idea.steps if step.kind == "came"), None)
        if came and came.record.parent:
            shown, others = ("".join(parts) for parts in hunks_with(came))
            named = re.compile(rf">{re.escape(name)}(\.\w+)?<")
            for number in came.numbers:
                shown += f">{place_of(came.record.script, number)}<"
            assert named.search(shown) or not named.search(others), (idea.name, name)
            checked += named.search(shown) is not None
    assert checked > 30


def test_a_row_of_a_table_changes_only_by_the_part_that_is_the_ideas():
    pattern = re.compile(r"\btable=\d")
    rows = ['Layer("L", table=0),', 'Layer("S", table=1, xsa=True),  # a note']
    source = "class Layer:\n    pass\n" + "".join(f"{row}\n" for row in rows)
    parts = [part_of(line, pattern, row) for line in own_lines(source) if "table" in line
             for _, row in own_lines(source)[line]]
    assert parts == [(0, "table=0"), (1, "table=1")]
    assert part_of(rows[1], pattern, 1) == part_of('Layer("P", table=1),', pattern, 1)
    assert part_of(rows[1], pattern, 1) != part_of('Layer("S", table=2, xsa=True),', pattern, 1)
    assert part_of("x = values[table=1]", pattern, 0) == ("x = values[table=1]",)


def test_a_technique_without_a_rule_is_named(tmp_path):
    (tmp_path / "page.md").write_text("| New idea | a | b | c | d | e |\n")
    (tmp_path / "ideas.toml").write_text("")
    with pytest.raises(LedgerError, match="New idea"):
        read_ideas(tmp_path / "page.md", tmp_path / "ideas.toml")


