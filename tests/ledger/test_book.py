"""The ladder as a book: each record has its page, its place and its change; no link is dead."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlparse
from xml.etree import ElementTree

import pytest
from conftest import REPO
from fake_records import NEWEST, PARENT, edit, make_records
from ledger import book, records
from ledger.__main__ import main

THIRD = "2026-03-03_Third"
SOURCE = "https://example.org/blob/main/"
VOID = {"meta", "link", "img", "br", "hr"}  # elements without an end
VIEWPORT = {"name": "viewport", "content": "width=device-width, initial-scale=1"}


class Page(HTMLParser):
    """What a page links to and shows; its tags are balanced, or it fails."""

    def __init__(self, path: Path):
        super().__init__()
        self.open, self.links, self.tags = [], [], []
        self.rows = []
        self.text = ""
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

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open:
            self.rows[-1][1][-1] += data


def write(out, *words):
    assert main(["book", *words, "--out", str(out)]) == 0
    return {path.stem: Page(path) for path in out.glob("*.html")}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The first record and some of the newest, their pages and scripts, and a page of docs/."""
    root = tmp_path_factory.mktemp("project")
    for pattern in ("2024-10-14*", "2026-07-13*", "2026-08-0*", "2026-08-30_92a*"):
        for folder in (REPO / "records").glob(pattern):
            shutil.copytree(folder, root / "records" / folder.name)
    (root / "docs").mkdir()
    shutil.copy(REPO / book.AFTER, root / book.AFTER)
    return root


@pytest.fixture(scope="module")
def real(project):
    return records.find_records(project / "records")[0]


@pytest.fixture(scope="module")
def site(project, tmp_path_factory):
    """(folder, pages by name) of the book of these records."""
    out = tmp_path_factory.mktemp("site")
    return out, write(out, str(project / "records"), "--source", SOURCE.rstrip("/"))


def test_pages_are_whole(site, real):
    """Fit for a telephone, without scripts, without links that lead nowhere."""
    out, pages = site
    names = [record.folder.name for record in real]
    assert pages.keys() == {*names, "index", "after-53"}
    links = {"ladder.svg", "after-53.html", *(f"{name}.html" for name in names)}
    assert links <= set(pages["index"].links)
    text = (REPO / "docs/after-53.md").read_text()
    assert len(pages["after-53"].rows) == len(re.findall(r"^\|(?!-)", text, re.M))
    assert "2026-08-03_NarrowHeads.html" in pages["after-53"].links
    for name, page in pages.items():
        tags = [tag for tag, _ in page.tags]
        assert not {"script", "iframe", "object"} & set(tags), name
        assert tags.count("h1") == 1 and ("meta", VIEWPORT) in page.tags, name
        for tag, attrs in page.tags:
            assert not any(attr.startswith("on") for attr in attrs), name
            assert tag != "img" or attrs["alt"], name
        for link in page.links:
            address = urlparse(link)
            assert address.scheme == "https" or (out / address.path).is_file(), (name, link)
            if link.startswith(SOURCE):
                assert (REPO / address.path.removeprefix("/blob/main/")).exists(), (name, link)
    light, dark = (out / "style.css").read_text().split("@media (prefers-color-scheme: dark)")[1:]
    assert ".code .k {" in light and ".code .k {" in dark
    for picture in out.glob("*.svg"):
        ElementTree.fromstring(picture.read_text())
        assert "prefers-color-scheme: dark" in picture.read_text()


def test_a_page_has_the_whole_change_and_nothing_else(site, real):
    """Both scripts without the lines that it marks are the same; shown lines have their numbers."""
    for record in real:
        name = record.folder.name
        new = record.script.splitlines()
        old = record.parent.script.splitlines() if record.parent else []
        kept_old, kept_new = dict(enumerate(old, 1)), dict(enumerate(new, 1))
        rows = [row for row in site[1][name].rows if row[0] in ("same", "changed")]
        assert rows
        for kind, (old_number, old_code, new_number, new_code) in rows:
            for number, code, kept in ((old_number, old_code, kept_old),
                                       (new_number, new_code, kept_new)):
                if number:
                    line = kept.pop(int(number)) if kind == "changed" else kept[int(number)]
                    assert code == line, name
        if record.parent:
            assert [*kept_old.values()] == [*kept_new.values()], name
        else:  # all above the banner is shown
            assert next(filter(None, kept_new.values())).startswith("# ===="), name
        readme = (record.folder / "README.md").read_text()
        why = re.search(r"^## Why\n\n\W*(\w[\w ,]+)", readme, re.M)
        words = " ".join(site[1][name].text.split())
        assert why[1] in words and "## " not in words and "records/ledger diff" not in words, name


def test_curves_are_those_of_the_readme_and_the_logs(real):
    first = real[0]
    ((steps, losses),) = book.published(first)
    assert (steps[0], losses[0]) == (500, 3.9188)
    assert (steps[-1], losses[-1]) == (5100, 3.2741)
    ends = sorted(log.val_loss for log in first.logs if log.preset == "pocket")
    assert sorted(losses[-1] for _, losses in book.pocket(first)) == ends


def test_links_lead_to_pages_to_the_source_or_nowhere_and_code_is_text(tmp_path):
    """Of records without runs that share a parent, and a script with what looks like HTML."""
    fakes = make_records(tmp_path)
    shutil.copytree(fakes / NEWEST, fakes / THIRD)
    edit(fakes / THIRD / "train_gpt.py", "loss=1.5", "loss=1.4")
    links = f"[a](../{PARENT}) [b](../../docs/x.md#y) [c](https://example.net/d)"
    edit(fakes / NEWEST / "README.md", "End.", links)
    hostile = "x = '</td></table><script>alert(1)</script>&amp;'"
    edit(fakes / NEWEST / "train_gpt.py", "# ---- Training", f"{hostile}\n\n# ---- Training")
    edit(fakes / NEWEST / "train_gpt.py", "A run's log", "<b>A run & log")
    pages = write(tmp_path / "bare", str(fakes))
    assert "Next: Second\nNext: Third" in pages[PARENT].text
    assert "Parent: #5 First\nBeside: Second" in pages[THIRD].text
    assert not any("after-53" in link for page in pages.values() for link in page.links)
    assert f"{PARENT}.html" in pages[THIRD].links and "+3 −3 lines" in pages[THIRD].text
    page = pages[NEWEST]
    assert {f"{PARENT}.html", "https://example.net/d"} <= set(page.links)
    assert not [link for link in page.links if "x.md" in link] and "a b c" in page.text
    assert hostile in page.text and "<b>A run & log" in page.text
    assert not {"script", "b"} & {tag for tag, _ in page.tags}
    page = write(tmp_path / "full", str(fakes), "--source", "https://example.org/main")[NEWEST]
    assert "https://example.org/main/docs/x.md#y" in page.links
