"""The website: each record has its page, its place and its change; no link is dead."""

import importlib.util
import json
import re
import shutil
from html import escape, unescape
from html.parser import HTMLParser
from urllib.parse import parse_qsl, urlparse
from xml.etree import ElementTree

import pytest
from conftest import REPO
from fake_records import NEWEST, PARENT, edit, make_records
from ledger import records
from ledger.__main__ import main
from ledger.scripts import above, sections
from website.build import DOCS, NAME, PACKAGES, ladder_picture, with_row_ids
from website.code import Notes, Side, change_table, scripts_data, techniques_of
from website.ideas import read_ideas
from website.model import ROW, STARTS, TOKENS, TOP, model_html, model_of
from website.plots import points_of, schedule_of, schedule_plots
from website.record import sentences_on_lines
from whole_ladder import find_ladder

THIRD = "2026-03-03_Third"
NAMESPACE = "{http://www.w3.org/2000/svg}"
STEPS = {"2026-05-03_o12_Muon": dict(result=12, steps=3325, val_loss=3.279, n=20),
         "2026-06-11_o36_MuonTuned": dict(result=36, steps=3250, val_loss=3.2787, n=10)}
LOSSES = """<details>
<summary>Published losses by step</summary>

125: 4.5, 250: 4.1, 500: 3.8101, 1000: 3.612, 3250: 3.2787.

</details>
"""
SOURCE = "https://example.org/blob/main"
VOID = {"meta", "link", "img", "br", "hr", "wbr", "input"}  # elements without an end


class Page(HTMLParser):
    """What a page links to and shows; its tags are balanced, or it fails."""

    def __init__(self, path):
        super().__init__()
        self.open, self.links, self.tags, self.ids, self.text = [], [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        assert not any(name.startswith("on") for name in attrs)
        assert attrs.get("href" if tag == "a" else "alt" if tag == "img" else "", True)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        self.text += "\n" * (tag in ("td", "div"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag
        self.text += "\n" * (tag in ("td", "div"))

    def handle_data(self, data):
        self.text += data


def write(out, *words):
    assert main(["site", *words, "--out", str(out)]) == 0
    return {path.stem: Page(path) for path in out.glob("*.html")}


@pytest.fixture(scope="module")
def ladder():
    return find_ladder()


def copy_some(ladder, folder):
    """The last records and two of the other ladder, with the pages of the repository."""
    for record in ladder:
        shutil.copytree(record.folder, folder / "records" / record.folder.name)
    parent = None
    for name, claim in STEPS.items():
        home = folder / "records/optimizers" / name
        shutil.copytree(REPO / "records/optimizers" / name, home, dirs_exist_ok=True)
        published = dict(claim, hardware="8×H100", source="records/track_3_optimization")
        (home / "record.json").write_text(json.dumps(dict(
            change="Muon & more", parent=parent, published=published,
            equality=dict(largest=2e-12, of="20 steps"))))
        (home / "README.md").write_text(f"# {name}\n\n**Change.** Muon.\n\n## Why\n\nRare "
                                        f"directions.\n\n## See the change\n\n{LOSSES}")
        parent = name
    for name in ("README.md", "CONTRIBUTING.md", "data/README.md", "records/public.toml",
                 "records/README.md", "records/public_curves.csv", "records/optimizers/README.md",
                 "records/optimizers/public.csv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, folder / name)
    shutil.copytree(REPO / "docs", folder / "docs")


@pytest.fixture(scope="module")
def some(tmp_path_factory, ladder):
    """The site of some records: (its folder, pages by name, records by name)."""
    folder = tmp_path_factory.mktemp("some")
    copy_some(ladder[-4:], folder)
    pages = write(folder / "site", str(folder / "records"), "--source", SOURCE)
    known = {one.folder.name: one for one in records.find_records(folder / "records")}
    return folder / "site", pages, known


@pytest.mark.slow
def test_each_page_has_neighbours_a_title_and_a_way_home(some):
    out, pages, known = some
    files = {file for _, file, _ in DOCS} | {"docs/story.md", "docs/techniques.md"}
    assert {f"docs/{path.name}" for path in (REPO / "docs").glob("*.md")} <= files
    ideas = read_ideas(REPO / "docs/techniques.md", REPO / "records/website/ideas.toml")
    assert pages.keys() == {*known, *(name for name, *_ in DOCS), *(idea.page for idea in ideas),
                            "index", "ladder", "optimizers", "ideas", "techniques", "run-it",
                            "compare"}
    by_time = [name for name, one in known.items() if one.ladder == "time"]
    by_steps = [name for name in known if name not in by_time]
    for page, names in ("ladder", by_time), ("optimizers", by_steps):
        for before, name, after in zip([page, *names], names, [*names[1:], page]):
            html = (out / f"{name}.html").read_text()
            assert html.count(f'<a href="{before}.html" rel="prev">') == 2, name
            assert html.count(f'<a href="{after}.html" rel="next">') == 2, name
            assert html.count("aria-current") == 0
            assert f"<title>{known[name].name} · {NAME}</title>" in html
            assert f'content="{escape(known[name].claim["change"])}">' in html
        assert {f"{name}.html" for name in names} <= set(pages[page].links)
    assert f"<title>{NAME}</title>" in (out / "index.html").read_text()
    assert set(pages["ladder"].text.splitlines()) >= {f"#{number}" for number in range(1, 93)}
    for idea in ideas:
        if idea.records[-1] in known:
            assert idea.records[-1] in pages[idea.page].ids, idea.name
            assert f"{idea.page}.html#{idea.records[-1]}" in pages["ideas"].links, idea.name
    for name, page in pages.items():
        assert not {"iframe", "object"} & set(page.tags), name
        assert page.tags.count("nav") == 3 and "meta" in page.tags, name
        assert {"index.html", "run-it.html", "glossary.html"} <= set(page.links), name
        assert len(page.ids) == len(set(page.ids)), name
    assert max(path.stat().st_size for path in out.glob("*.html")) < 300_000


@pytest.mark.slow
def test_no_link_is_dead(some):
    out, pages, known = some
    for name, page in pages.items():
        for link in page.links:
            address = urlparse(link)
            file = out / (address.path or f"{name}.html")
            assert address.scheme == "https" or file.is_file(), (name, link)
            if file.stem == "compare":
                wanted = dict(parse_qsl(address.fragment))
                assert {wanted.get("a"), wanted.get("b")} <= {*known, None}, (name, link)
            elif address.fragment and not address.scheme:
                assert address.fragment in pages[file.stem].ids, (name, link)
            elif link.startswith(SOURCE):
                assert (REPO / address.path.removeprefix("/blob/main/")).exists(), (name, link)


@pytest.mark.slow
def test_a_records_page_has_its_reason_its_commands_its_evidence_and_each_changed_line(some):
    out, pages, known = some
    for name, record in known.items():
        readme = (record.folder / "README.md").read_text()
        why = re.search(r"^## Why\n\n\W*(\w[\w ,]+)", readme, re.M)
        words = " ".join(pages[name].text.split())
        assert why[1] in words and "## " not in words and "records/ledger diff" not in words, name
        place = f"{record.folder.relative_to(out.parent)}/train_gpt.py"
        label = record.name.split()[0].lstrip("#")
        assert f"./run.sh --record {label}" in words, name
        assert f"python {place} --preset pocket --device cpu" in words, name
        assert "As the parent" not in words and "As in the parent" not in words, name
        if equality := record.claim["equality"]:
            assert f"{equality['largest']:.0e}, relative: {equality['of']}." in words, name
        if record.parent:
            diff = f"compare.html#a={record.parent.folder.name}&b={name}"
            assert {diff, f"{diff}&all=1"} >= {
                link for link in pages[name].links if link.startswith("compare.html#a=")}
            assert f"{diff}&all=1" in pages[name].links
        assert ("Published losses" in words) == ("Published losses by step" in readme), name
        script = sections(above(record.script))
        parent = sections(above(record.parent.script)) if record.parent else {}
        shown = {line.rstrip() for line in pages[name].text.splitlines()}
        for title in (script.keys() | parent.keys()) - {"Docstring"}:
            old, new = set(parent.get(title, [])), set(script.get(title, []))
            assert {line.rstrip() for line in old ^ new} <= shown, (name, title)


@pytest.mark.slow
def test_the_first_screen_says_how_by_whom_and_what_no_gpu_has_shown(some):
    out, pages, _ = some
    html = " ".join((out / "index.html").read_text().split())
    first = html[html.index("<main"):html.index('id="race"')]
    paragraph = first[:first.index("</p>")]
    assert "KellerJordan/modded-nanogpt" in paragraph and "Keller Jordan" in paragraph
    assert "39.9 seconds" in paragraph and "No GPU has run our scripts yet" in first
    assert first.count("<li>") == 5 and "65 billion parameters" in first
    ideas = {link for link in pages["index"].links if link.startswith("idea-")}
    assert len(ideas) > 10
    tokens = (19560 * 524288) / 328.7e6  # of #1, whose batch was llm.c's, and of #92
    assert f"{tokens:.0f} times fewer tokens" in first
    assert f"{45 * 60 / 39.9:.0f} times faster" in first
    assert f"{45 * 60 / 39.9 / tokens:.1f} times less time" in first


@pytest.mark.slow
def test_words_that_a_page_does_not_explain_lead_to_the_glossary(some):
    out, pages, known = some
    terms = {link for name in known for link in pages[name].links if "glossary.html#" in link}
    assert len(terms) > 8
    assert {link.partition("#")[2] for link in terms} <= set(pages["glossary"].ids)
    for name, page in pages.items():
        assert not re.search(r"\b(the|this) book\b", page.text), name


def test_links_lead_to_pages_to_the_source_or_are_words_and_code_is_text(tmp_path):
    """Of records without runs that share a parent, and a script with what looks like HTML."""
    fakes = make_records(tmp_path)
    shutil.copytree(fakes / NEWEST, fakes / THIRD)
    edit(fakes / THIRD / "train_gpt.py", "loss: float = 1.5", "loss: float = 1.4")
    links = f"[a](../{PARENT}) [b](../../docs/x.md#y) [c](https://example.net/d)"
    edit(fakes / NEWEST / "README.md", "End.", links)
    hostile = "x = '</td></table><script>alert(1)</script>&amp;'"
    edit(fakes / NEWEST / "train_gpt.py", "# ---- Training", f"{hostile}\n\n# ---- Training")
    edit(fakes / NEWEST / "train_gpt.py", "A run's log", "<b>A run & log")
    pages = write(tmp_path / "bare", str(fakes))
    assert "Next: Third" in pages[NEWEST].text  # which stands beside it
    assert "Parent: #5 First" in pages[THIRD].text and f"{PARENT}.html" in pages[THIRD].links
    page = pages[NEWEST]
    assert {f"{PARENT}.html", "https://example.net/d"} <= set(page.links)
    assert not [link for link in page.links if "x.md" in link] and "a b c" in page.text
    assert hostile in page.text and "<b>A run & log" in page.text
    assert page.tags.count("script") == 1 and "site.js" in page.links
    page = write(tmp_path / "full", str(fakes), "--source", "https://example.org/main")[NEWEST]
    assert "https://example.org/main/docs/x.md#y" in page.links
    assert main(["site", str(fakes), "--out", str(fakes)]) == 2  # among other files


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_is_missing_is_told_before_anything_is_written(
        tmp_path, package, monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name: None if name == package else found(name))
    assert main(["site", str(make_records(tmp_path)), "--out", str(tmp_path / "site")]) == 2
    assert package in capsys.readouterr().err and not (tmp_path / "site").exists()


def test_the_front_page_has_the_story_and_the_race_where_they_are(tmp_path):
    fakes = make_records(tmp_path)
    (fakes.parent / "docs").mkdir()
    (fakes.parent / "docs/race.svg").write_text("<svg class='race'></svg>")
    link = f"[a](../{fakes.name}/{PARENT})"
    story = f"# Fast & faster\n\n![x](race.svg)\n\n## 1. Go\n\n{link}"
    (fakes.parent / "docs/story.md").write_text(story)
    pages = write(tmp_path / "site", str(fakes))
    front = pages["index"]
    assert {"story", "1-go"} <= set(front.ids) and "Fast & faster" in front.text
    assert front.tags.count("svg") == 2 and front.links.count(f"{PARENT}.html") > 1


def test_a_change_shows_old_lines_then_new_ones_with_numbers_and_marked_words():
    old = '"""Doc."""\n\n# ---- Model ----\na = 1\nrate = low + 2  # slow\nb = 3\nc = 4\n'
    new = old.replace("low + 2  # slow\nb = 3", "high + 2  # slow\nb = [3 < 4]\nd = 5")
    table = change_table(Side(old), Side(new), "Model", "m")
    assert re.findall(r'id="(.*?)"', table) == ["m-1"]
    row = r'<tr class="(\w+)"><td class="old">(.*?)</td><td class="new">(.*?)</td>'
    rows = re.findall(row, table)
    numbers = [re.findall(r'data-n="(\d+)"', before + after) for _, before, after in rows]
    assert [kind for kind, *_ in rows] == ["equal", "changed", "equal"]
    assert numbers == [["3", "4"] * 2, ["5", "6", "5", "6", "7"], ["7", "8"]]
    _, before, after = rows[1]
    assert "<mark>low</mark>" in before and "<mark>high</mark>" in after and "&lt;" in after
    assert '<span class="c"># slow</span>' in before and "<mark>rate" not in before + after


def test_sentences_stand_where_their_names_change_and_gaps_where_lines_are_equal():
    head = "# ---- Model ----\n" + "".join(f"x{number} = 0\n" for number in range(9))
    old = head + "tied = 1\n" + head.replace("x", "y") + "loose = 1\n"
    new = old.replace("tied = 1", "tied = 2").replace("loose = 1", "loose = 2")
    told = "`tied` is [one](x.md) idea & `loose` another. `untied` is none. `tie` is none."
    table = change_table(Side(old), Side(new), "Model", "m",
                                   Notes(told))
    notes = re.findall('<tr class="note">.*?<p>(.*?)</p></td>', table)
    first, second = [f"<mark><code>{name}</code></mark>" for name in ("tied", "loose")]
    assert notes == [f"{first} is one idea &amp; <code>loose</code> another.",
                     f"<code>tied</code> is one idea &amp; {second} another."]
    gaps = re.findall('data-old="(.*?)" data-new="(.*?)" data-count="(.*?)"', table)
    assert gaps == [("1", "1", "7"), ("15", "15", "4")]


def test_sentences_on_lines_are_of_prose():
    text = ("# P\n\nWhy. The diff has it in a line: `tied`. No `code`.\n\n    a line `x`\n\n"
            "## See the change\n\nThe line `y`.\n")
    assert sentences_on_lines(text) == "The diff has it in a line: `tied`."


MODELS = {  # of the layers: skips, what is saved, the windows whose mask is not the parent's
    "2024-06-06_AdamW": ([], [], []),
    "2024-11-19_FlexAttention": ([(5 - pair, 6 + pair) for pair in range(6)], [], [""]),
    "2025-12-22_MultiTokenPrediction": ([(3, 6)], [7], []),
    "2026-01-07_PairedHeads": ([(3, 6)], [7], ["P"]),
    "2026-08-30_92d_FiveStages": ([(3, 6)], [7], ["L", "P", "S"])}


@pytest.mark.slow
def test_a_model_is_drawn_as_its_script_builds_it(ladder):
    known = {one.folder.name: one for one in ladder}
    for name, (skips, saved, changed) in MODELS.items():
        record = known[name]
        model = model_of(record.script)
        parent = record.parent and model_of(record.parent.script)
        old = parent.masks if parent else {}
        assert (model.skips, model.saved) == (skips, saved), name
        assert changed == sorted(window for window, first in model.masks.items()
                                 if old.get(window) != first), name
        drawn = model_html(record.script, record.parent and record.parent.script)
        ElementTree.fromstring(f"<div>{drawn}</div>")
        assert ('id="mask"' in drawn) == bool(changed), name
        for first in model.masks.values():  # no token reads a later one, or another document
            share = len(first) // TOKENS
            starts = [share * start for start in STARTS]
            assert all(max(start for start in starts if start <= at) <= key <= at
                       for at, key in enumerate(first)), name
    rows = model.rows
    assert [row["table"] for row in rows] == [None, 0, 1, *5 * [None], 2, None, 3]
    assert [row["count"] for row in rows] == [*7 * [1], 0, 2, 1, 1]
    assert not rows[4]["attention"] and "xsa" in rows[1]["flags"] and rows[1]["gated_table"]
    assert "<rect class=\"new\"" not in drawn and "Unchanged from the parent" in drawn
    assert model_html("x = 1", None) == ""
    changed = known["2026-08-30_92a_MlpsByLayer"]
    drawn = model_html(changed.script, changed.parent.script)
    tops = [int(top) for top in re.findall('<rect class="new" x="0" y="(.*?)"', drawn)]
    assert [(top - TOP) // ROW for top in tops] == [7, 8]


def test_each_script_can_be_made_of_the_data_and_each_technique_is_where_it_says():
    folders = [REPO / "records" / name for name in
               ("2025-12-21_SmoothedScalars", "2025-12-22_MultiTokenPrediction")]
    sources = {folder.name: (folder / "train_gpt.py").read_text() for folder in folders}
    lines, scripts = scripts_data(sources).strip().splitlines()
    lines = json.loads(lines.removeprefix("const LINES = ").removesuffix(";"))
    scripts = json.loads(scripts.removeprefix("const SCRIPTS = ").removesuffix(";"))
    for name, source in sources.items():
        shown = [lines[first + more] for first, count in scripts[name]["runs"]
                 for more in range(count)]
        shown = [unescape(re.sub("<.*?>", "", line)) for line in shown]
        assert shown == source.splitlines(), name
        heads = dict(scripts[name]["sections"])
        assert shown[heads["Model"]].startswith("# ---- Model")
        assert shown[heads["Harness"]].startswith("# ==== Harness")
        rows = dict(techniques_of(source))
        places = [place for row in rows.values() for place in row]
        assert len(rows) > 10 and dict(rows["ReLU²"])["MLP"]
        for place, line in places:
            assert line is None or place.split(".")[-1] in shown[line - 1], place
        assert sum(line is None for _, line in places) < 5


@pytest.mark.slow
def test_windows_are_plotted_in_tokens(ladder):
    """Scripts from #16 to 29a count them in blocks."""
    tops = {}
    for record in ladder:
        _, values = schedule_of(record.script)
        if windows := [max(values[name]) for name in ("window", "long_window") if name in values]:
            tops[record.name] = max(windows)
            before = tops.get(record.parent.name)
            assert not before or 0.7 < max(windows) / before < 1.5, record.name
    assert len(tops) > 60 and all(1024 < top < 2048 for top in tops.values()), tops


def test_a_schedule_is_drawn_from_its_script_beside_its_parents():
    names = ["2025-12-21_SmoothedScalars", "2025-12-22_MultiTokenPrediction"]
    old, new = [(REPO / "records" / name / "train_gpt.py").read_text() for name in names]
    steps, values = schedule_of(new)
    assert steps == 1920 and values["lr_factor"][0] == 1 and max(values["seq_len"]) == 49152
    drawn = schedule_plots(new, old)
    assert drawn.count("<svg") == 5 and "dashed" in drawn
    assert values["tokens"][-1] == 8 * 49152
    assert 'class="theirs"' not in schedule_plots(new, new)
    assert schedule_plots("x = 1", None) == ""
    assert points_of([0, 1, 2, 3, 3, 3]) == [(0, 0), (3, 3), (5, 3)]


@pytest.mark.slow
def test_the_picture_has_names_only_where_there_is_room(tmp_path):
    """Of all public numbers, as if each had a script here."""
    shutil.copy(REPO / "records/public.toml", tmp_path)
    known = []
    for number, row in records.read_public(tmp_path).items():
        claim = {"published": {"number": number}, "change": "", "parent": None}
        folder = tmp_path / f"{row['date']}_Name{number}"
        known.append(records.Record(folder, claim, minutes=row["minutes"]))
    drawn = ladder_picture(tmp_path, known)
    named = set(re.findall(r">#(\d+) Name\d+, [\d.]+ min<", drawn))
    assert {"2", "92", "53"} <= named and 12 < len(named) < 60


def test_each_point_of_the_ladder_is_a_link(tmp_path):
    """To a record's page, or else to its row in the table of all public records."""
    row = '{number = 7, date = "2024-10-18", minutes = "12.0", idea = "a < b", by = "@a"}'
    (tmp_path / "public.toml").write_text(f"record = [{row}]")
    claim = {"published": {"number": 9}, "change": "x & y", "parent": None}
    one = records.Record(tmp_path / "2024-11-06_Name", claim, minutes="8.2")
    drawn = ElementTree.fromstring(ladder_picture(tmp_path, [one]))
    assert drawn.get("role") is None  # which would hide the links
    links = {link.get("href"): link[0].text for link in drawn.iter(f"{NAMESPACE}a")}
    assert links == {"ladder.html#public-7": "#7, 12.0 min: a < b",
                     "2024-11-06_Name.html": "#9 Name, 8.2 min: x & y"}
    rows = '<tr>\n<td><a href="x">#7</a></td></tr><tr>\n<td>#9</td></tr><tr>\n<td>#9 A</td></tr>'
    assert re.findall('id="(.*?)"', with_row_ids(rows)) == ["public-7", "public-9"]
