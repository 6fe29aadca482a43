"""The ladder as a book: each record has its page and its change there, and no link is dead."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlparse
from xml.etree import ElementTree

import pytest
from conftest import REPO
from fake_records import NEWEST, PARENT, edit, make_records
from ledger import book, table
from ledger.__main__ import main

RECORDS = table.find_records(REPO / "records")
NAMES = [record.folder.name for record in RECORDS]
VOID = {"meta", "link", "img", "br", "hr"}  # elements without an end


class Page(HTMLParser):
    """What a page links to and shows; its tags are balanced, or it fails."""

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.links, self.tags, self.rows, self.text = [], [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append((attrs.get("class"), []))
        if tag == "td":
            self.rows[-1][1].append("")

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open:
            self.rows[-1][1][-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    assert main(["book", "--out", str(out), "--source", "https://example.org/blob/main"]) == 0
    return out


@pytest.fixture
def fakes(tmp_path):
    """Three fake records without runs: the last two have one parent."""
    folder = make_records(tmp_path)
    third = folder / "2026-03-03_Third"
    shutil.copytree(folder / NEWEST, third)
    edit(third / "train_gpt.py", "both(1.5)", "both(1.4)")
    return folder


def write(folder, out, *flags):
    assert main(["book", str(folder), "--out", str(out), *flags]) == 0
    return {path.stem: Page(path) for path in out.glob("*.html")}


def test_every_record_has_a_page_and_the_index_leads_to_it(site):
    assert sorted(path.stem for path in site.glob("*.html")) == sorted([*NAMES, "index"])
    links = Page(site / "index.html").links
    assert {f"{name}.html" for name in NAMES} <= set(links) and "ladder.svg" in links
    assert len([link for link in links if link == f"{NAMES[-1]}.html"]) > 1  # ladder and evidence


@pytest.mark.parametrize("name", ["index", *NAMES])
def test_pages_are_whole(site, name):
    """Balanced tags, fit for a telephone, without scripts, without links that lead nowhere."""
    page = Page(site / f"{name}.html")
    tags = [tag for tag, _ in page.tags]
    assert not {"script", "iframe", "object"} & set(tags) and tags.count("h1") == 1
    assert ("html", {"lang": "en"}) in page.tags
    viewport = {"name": "viewport", "content": "width=device-width, initial-scale=1"}
    assert ("meta", viewport) in page.tags
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    for link in page.links:
        address = urlparse(link)
        assert address.scheme == "https" or (site / address.path).is_file(), link
        if link.startswith("https://example.org/blob/main/"):
            assert (REPO / address.path.removeprefix("/blob/main/")).exists(), link
    assert all(attrs["alt"] for tag, attrs in page.tags if tag == "img")


def test_the_style_has_a_dark_form_and_the_pictures_are_svg(site):
    style = (site / "style.css").read_text()
    assert style.count("{") == style.count("}") and "url(" not in style
    light, dark = style.split("@media (prefers-color-scheme: dark)")[1:]
    assert "--page: #14181c" in light and ".code .k {" in light and ".code .k {" in dark
    pictures = list(site.glob("*.svg"))
    assert len(pictures) > len(NAMES)
    for picture in pictures:
        text = picture.read_text()
        ElementTree.fromstring(text)
        assert "prefers-color-scheme: dark" in text and "#000000" not in text


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_a_page_has_the_whole_change_and_nothing_else(site, record):
    """Both scripts without the lines that it marks are the same; shown lines have their numbers."""
    new = record.script.splitlines()
    old = record.parent.script.splitlines() if record.parent else []
    kept = {"old": dict(enumerate(old, 1)), "new": dict(enumerate(new, 1))}
    banner = next(number for number, line in kept["new"].items() if line.startswith("# ===="))
    seen = 0
    for kind, cells in Page(site / f"{record.folder.name}.html").rows:
        if kind not in ("same", "changed"):
            continue
        for side, lines, number, code in (("old", old, *cells[:2]), ("new", new, *cells[2:])):
            if number:
                assert code == lines[int(number) - 1]
                seen += 1
                if kind == "changed":
                    del kept[side][int(number)]
    assert seen
    if record.parent:
        assert [*kept["old"].values()] == [*kept["new"].values()]
    else:
        shown = [line for number, line in kept["new"].items() if number < banner]
        assert not any(shown)


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_a_page_has_the_words_of_the_readme_and_the_price(site, record):
    page = Page(site / f"{record.folder.name}.html")
    words = " ".join(page.text.split())
    readme = (record.folder / "README.md").read_text()
    why = re.search(r"^## Why\n\n\W*(\w[\w ,]+)", readme, re.M)[1]
    assert why in words and "## " not in words and "records/ledger diff" not in words
    if record.parent:
        front = (REPO / "README.md").read_text()
        changed = re.search(rf"\(records/{record.folder.name}\).* (\+\d+ −\d+) ", front)[1]
        assert f"{changed} lines" in words


def test_published_losses_are_those_of_the_readme():
    by_name = {record.folder.name: book.published(record) for record in RECORDS}
    (run,) = by_name["2025-11-10_CautiousWD"]
    assert run.shape == (9, 2) and run[-1].tolist() == [3.2784, 2245]
    (run,) = by_name["2024-10-14_ModernArch"]
    assert run[:7:6].tolist() == [[3.9188, 500], [3.414, 3500]]
    assert by_name["2025-05-30_ShardedOptimizers"] == []


def test_curves_are_beside_the_parents(site):
    first, second = (site / f"{name}-pocket.svg" for name in NAMES[:2])
    assert "#8 UntieEmbed" not in first.read_text()
    assert "#8 UntieEmbed" in second.read_text() and "#5 ModernArch" in second.read_text()
    runs = book.pocket(RECORDS[0])
    texts = [path.read_text() for path in RECORDS[0].folder.glob("logs/pocket-*/seed-*.txt")]
    ends = sorted(float(re.findall(r"^val_loss: (.*)", text, re.M)[-1]) for text in texts)
    assert sorted(run[-1, 0] for run in runs) == pytest.approx(ends, abs=1e-4)


def test_records_without_runs_may_share_a_parent(fakes, tmp_path):
    pages = write(fakes, tmp_path / "site")
    assert {f"{NEWEST}.html", "2026-03-03_Third.html"} <= set(pages[PARENT].links)
    for name in (NEWEST, "2026-03-03_Third"):
        assert f"{PARENT}.html" in pages[name].links
        assert "Curves" not in pages[name].text and "+2 −2 lines" in pages[name].text
    assert not [*(tmp_path / "site").glob("*-pocket.svg")]


def test_links_lead_to_pages_to_the_source_or_nowhere(fakes, tmp_path):
    path = fakes / NEWEST / "README.md"
    edit(path, "End.", f"[a](../{PARENT}) [b](../../docs/x.md#y) [c](https://example.net/d)")
    page = write(fakes, tmp_path / "bare")[NEWEST]
    assert {f"{PARENT}.html", "https://example.net/d"} <= set(page.links)
    assert not [link for link in page.links if "x.md" in link] and "a b c" in page.text
    page = write(fakes, tmp_path / "full", "--source", "https://example.org/main")[NEWEST]
    assert "https://example.org/main/docs/x.md#y" in page.links


def test_code_is_shown_as_it_is(fakes, tmp_path):
    """What looks like HTML in a script or its docstring is text on the page."""
    hostile = "x = '</td></table><script>alert(1)</script>&amp;'"
    edit(fakes / NEWEST / "train_gpt.py", "# ---- Model", f"{hostile}\n\n# ---- Model")
    edit(fakes / NEWEST / "train_gpt.py", "What else", "<b>What & else")
    page = write(fakes, tmp_path / "site")[NEWEST]
    assert hostile in page.text and "<b>What & else" in page.text
    assert not {"script", "b"} & {tag for tag, _ in page.tags}


def test_a_folder_without_records_has_no_book(tmp_path, capsys):
    assert main(["book", str(tmp_path), "--out", str(tmp_path / "site")]) == 2
    assert capsys.readouterr().err == (
        "ledger: no records there, so no pages; give a folder that has\n")
    assert not (tmp_path / "site").exists()
