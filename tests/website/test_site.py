"""The website: each record has its page, its place and its change; no link is dead."""

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qsl, urlparse
from xml.etree import ElementTree

import pytest
from conftest import REPO
from fake_records import NEWEST, PARENT, edit, make_records
from ledger import records
from ledger.__main__ import main
from ledger.scripts import above, sections
from website.build import NAME, with_row_ids
from website.code import Notes, Side, change_table, scripts_data, techniques_of
from website.ideas import read_ideas
from website.ladder import ladder_svg
from website.model import ROW, STARTS, TOKENS, TOP, model_html, model_of
from website.plots import points_of, schedule_of, schedule_plots
from website.record import sentences_on_lines
from whole_ladder import find_ladder

THIRD = "2026-03-03_Third"
SOURCE = "https://example.org/blob/main"
VOID = {"meta", "link", "img", "br", "hr", "wbr", "input"}  # elements without an end
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


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


@pytest.mark.slow
def test_the_site_of_some_records_is_whole(tmp_path, ladder):
    """Their pages have no dead link, ids that differ, a way home, and each changed line."""
    for record in ladder[-4:]:
        shutil.copytree(record.folder, tmp_path / "records" / record.folder.name)
    shutil.copy(REPO / "records/public.toml", tmp_path / "records")
    shutil.copytree(REPO / "docs", tmp_path / "docs")
    ideas = read_ideas(REPO / "docs/techniques.md", REPO / "records/website/ideas.toml")
    others = {"index", "techniques", "compare", "ideas", *(idea.page for idea in ideas)}
    out = tmp_path / "site"
    pages = write(out, str(tmp_path / "records"), "--source", SOURCE)
    known = {one.folder.name: one for one in records.find_records(tmp_path / "records")}
    assert pages.keys() == {*known, *others}
    for name, following in zip(["index", *known], [*known, "index"]):
        page = (out / f"{name}.html").read_text()
        assert re.findall(r'href="([\w-]+)\.html[^>]*>Next: ', page) == 2 * [following]
        title = f"{known[name].name} · {NAME}" if name in known else NAME
        assert f"<title>{title}</title>" in page
        assert f'<meta property="og:title" content="{title}">' in page
        if name in known:
            assert '<a href="#model">The model</a>' in page
            parent = known[name].parent
            diff = f"compare.html#a={parent.folder.name}&b={name}" if parent else None
            assert [link for link in pages[name].links if link.startswith("compare.html#a=")] == (
                [diff, f"{diff}&all=1"] if parent else [])
            assert f'<meta name="description" content="{known[name].claim["change"]}">' in page
    for name, following in zip(known, [*known][1:]):
        assert f'{name}.html" rel="prev"' in (out / f"{following}.html").read_text()
        assert f'{following}.html" rel="next"' in (out / f"{name}.html").read_text()
    assert {f"{name}.html" for name in known} <= set(pages["index"].links)
    lines = set(pages["index"].text.splitlines())
    assert lines >= {f"#{number}" for number in range(1, 93)}
    for idea in ideas:
        if idea.records[-1] in known:
            assert idea.records[-1] in pages[idea.page].ids, idea.name
            assert f"{idea.page}.html#{idea.records[-1]}" in pages["ideas"].links, idea.name
    for name, page in pages.items():
        assert not {"iframe", "object"} & set(page.tags), name
        assert page.tags.count("nav") == 2 and "meta" in page.tags, name
        assert name not in {*known, "index"} or page.text.count("Next: ") == 2, name
        assert {"index.html", "https://example.org"} <= set(page.links), name
        assert len(page.ids) == len(set(page.ids)), name
        for link in page.links:
            address = urlparse(link)
            file = out / (address.path or f"{name}.html")
            assert address.scheme == "https" or file.is_file(), (name, link)
            target = pages.get(file.stem)
            if file.stem == "compare":
                wanted = dict(parse_qsl(address.fragment))
                assert {wanted.get("a", name), wanted.get("b", name)} <= {*known, *others}, link
                continue
            assert not address.fragment or address.scheme or address.fragment in target.ids, link
            if link.startswith(SOURCE):
                assert (REPO / address.path.removeprefix("/blob/main/")).exists(), (name, link)
    for name, record in known.items():
        readme = (record.folder / "README.md").read_text()
        why = re.search(r"^## Why\n\n\W*(\w[\w ,]+)", readme, re.M)
        words = " ".join(pages[name].text.split())
        assert why[1] in words and "## " not in words and "records/ledger diff" not in words, name
        script = sections(above(record.script))
        parent = sections(above(record.parent.script)) if record.parent else {}
        shown = {line.rstrip() for line in pages[name].text.splitlines()}
        for title in (script.keys() | parent.keys()) - {"Docstring"}:
            old, new = set(parent.get(title, [])), set(script.get(title, []))
            assert {line.rstrip() for line in old ^ new} <= shown, (name, title)
    assert max(path.stat().st_size for path in out.glob("*.html")) < 250_000
    assert "prefers-color-scheme: dark" in (out / "style.css").read_text()


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


def test_the_front_page_has_the_story_and_the_race_where_they_are(tmp_path):
    fakes = make_records(tmp_path)
    (fakes.parent / "docs").mkdir()
    (fakes.parent / "docs/race.png").write_bytes(b"a picture")
    link = f"[a](../{fakes.name}/{PARENT})"
    story = f"# Fast & faster\n\n![x](race.png)\n\n## 1. Go\n\n{link}"
    (fakes.parent / "docs/story.md").write_text(story)
    pages = write(tmp_path / "site", str(fakes))
    front = pages["index"]
    assert {"story", "1-go"} <= set(front.ids) and "Fast & faster" in front.text
    assert front.links.count("race.png") == 1 and front.links.count(f"{PARENT}.html") > 1
    assert (tmp_path / "site/race.png").read_bytes() == b"a picture"
    assert "index.html#story" in pages[NEWEST].links


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
    assert "<rect class=\"new\"" not in drawn and "As in the parent." in drawn
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
    drawn = ladder_svg(tmp_path, known)
    named = set(re.findall(r">#(\d+) Name\d+, [\d.]+ min<", drawn))
    assert {"2", "92", "53"} <= named and 12 < len(named) < 60


def test_each_point_of_the_ladder_is_a_link(tmp_path):
    """To a record's page, or else to its row in the table of all public records."""
    row = '{number = 7, date = "2024-10-18", minutes = "12.0", idea = "a < b", by = "@a"}'
    (tmp_path / "public.toml").write_text(f"record = [{row}]")
    claim = {"published": {"number": 9}, "change": "x & y", "parent": None}
    one = records.Record(tmp_path / "2024-11-06_Name", claim, minutes="8.2")
    drawn = ElementTree.fromstring(ladder_svg(tmp_path, [one]))
    links = {link.get("href"): link[0].text for link in drawn.iter("a")}
    assert links == {"#public-7": "#7, 12.0 min: a < b",
                     "2024-11-06_Name.html": "#9 Name, 8.2 min: x & y"}
    rows = '<tr>\n<td><a href="x">#7</a></td></tr><tr>\n<td>#9</td></tr><tr>\n<td>#9 A</td></tr>'
    assert re.findall('id="(.*?)"', with_row_ids(rows)) == ["public-7", "public-9"]


def try_in_browser(site: Path, **wanted) -> dict:
    """What tried.js finds in the site; its page has the site's pages in frames."""
    script = (REPO / "tests/website/tried.js").read_text()
    page = site / "tried.html"
    page.write_text(f"<!DOCTYPE html><body><script>const WANTED = {json.dumps(wanted)};\n"
                    f"{script}</script></body>")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000",
             "--allow-file-access-from-files", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([BROWSER, *words, f"file://{page}"], capture_output=True, text=True,
                          timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(unescape(re.search('<pre id="found">(.*?)</pre>', done.stdout)[1]))
    assert "error" not in found, found
    return found


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="there is no Chromium here")
def test_a_browser_shows_the_site(tmp_path, ladder):
    """No page is wider than its window; filter, keys, links of the picture, comparisons work."""
    names = [ladder[place].folder.name for place in (0, 1, -1)]
    for name in names:
        shutil.copytree(REPO / "records" / name, tmp_path / "records" / name)
    for name in ("records/public.toml", "docs/race.png", "docs/techniques.md", "docs/story.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    first, second, third = names
    with (tmp_path / "records" / second / "README.md").open("a") as file:
        long = {name: name * 80 for name in ("head", "word", "code", "cell")}
        file.write("\n## {head}\n\n{word} `{code}`\n\n| {cell} |\n|---|\n".format(**long))
    site = tmp_path / "site"
    pages = write(site, str(tmp_path / "records"))
    kinds = ["index", "ideas", "idea-smear", "techniques", second, third, "compare"]
    found = try_in_browser(site, first=first, third=third, widths=[320, 375, 1280],
                           pages=[f"{kind}.html" for kind in kinds])
    assert len(found["wider"]) == 3 * len(kinds)
    assert {page: wider for page, wider in found["wider"].items() if wider > 0} == {}
    assert found["filter"] == "1 of 3" and found["hidden"] > 80
    assert len(found["points"]) == 92 and f"{third}.html" not in found["points"]
    assert {link[1:] for link in found["points"] if link[0] == "#"} <= set(pages["index"].ids)
    assert [found["clicked"], *found["keys"]] == [f"{first}.html", f"{second}.html",
                                                  f"{first}.html"]

    scripts = {name: above((tmp_path / "records" / name / "train_gpt.py").read_text()).splitlines()
               for name in names}
    for side, name, other in ("old", first, third), ("new", third, first):
        missing = {number for number, line in enumerate(scripts[name], 1)
                   if line not in scripts[other]}
        assert missing and set(found[side]) >= missing
    assert found["marked"] == ["L30", "L31", "L40"]
    start, count = int(found["gap"]["new"]), int(found["gap"]["count"])
    assert found["unfolded"] == scripts[second][start - 1:start - 1 + count]
