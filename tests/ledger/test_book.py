"""The ladder as a book: each record has its page, its place and its change; no link is dead."""

import re
import shutil
from html.parser import HTMLParser
from urllib.parse import urlparse
from xml.etree import ElementTree

import book
import matplotlib.image
import pytest
from conftest import REPO
from fake_records import NEWEST, PARENT, edit, make_records
from ledger import records
from ledger.__main__ import main
from ledger.scripts import above, sections

THIRD = "2026-03-03_Third"
SOURCE = "https://example.org/blob/main"
VOID = {"meta", "link", "img", "br", "hr", "wbr"}  # elements without an end
draw_ladder = book.draw_ladder


class Page(HTMLParser):
    """What a page links to and shows; its tags are balanced, or it fails."""

    def __init__(self, path):
        super().__init__()
        self.open, self.links, self.tags, self.text = [], [], [], ""
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        assert not any(name.startswith("on") for name in attrs)
        assert attrs.get("href" if tag == "a" else "alt" if tag == "img" else "", True)
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        self.text += "\n" * (tag == "td")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag
        self.text += "\n" * (tag == "td")

    def handle_data(self, data):
        self.text += data


def write(out, *words):
    assert main(["book", *words, "--out", str(out)]) == 0
    return {path.stem: Page(path) for path in out.glob("*.html")}


@pytest.fixture
def drawn(monkeypatch):
    monkeypatch.setattr(book, "draw_ladder", draw_ladder)  # no stand-in of another file


@pytest.mark.slow
def test_the_book_of_some_records_is_whole(drawn, tmp_path):
    """Their pages have no dead link, no script but the book's, and each changed line."""
    for record in records.find_records(REPO / "records")[-4:]:
        shutil.copytree(record.folder, tmp_path / "records" / record.folder.name)
    shutil.copy(REPO / "records/public.toml", tmp_path / "records")
    out = tmp_path / "site"
    pages = write(out, str(tmp_path / "records"), "--source", SOURCE)
    known = {one.folder.name: one for one in records.find_records(tmp_path / "records")}
    assert pages.keys() == {*known, "index"}
    for name, following in zip(["index", *known], [*known, "index"]):
        page = (out / f"{name}.html").read_text()
        assert re.findall(r'href="([\w-]+)\.html[^>]*>Next: ', page) == 2 * [following]
        title = known[name].name if name in known else "The ladder"
        assert f"<title>{title} · " in page
    assert {"ladder.svg", *(f"{name}.html" for name in known)} <= set(pages["index"].links)
    assert 'id="public"' in (out / "index.html").read_text()
    lines = set(pages["index"].text.splitlines())
    assert lines >= {f"#{number}" for number in range(1, 93)}
    for name, page in pages.items():
        assert not {"iframe", "object"} & set(page.tags), name
        assert page.tags.count("script") == 1 and "book.js" in page.links, name
        assert page.tags.count("nav") == 2 and "meta" in page.tags, name
        assert page.text.count("Next: ") == 2, name
        for link in page.links:
            address = urlparse(link)
            file = out / (address.path or f"{name}.html")
            assert address.scheme == "https" or file.is_file(), (name, link)
            if address.fragment and not address.scheme:
                target = (out / (address.path or f"{name}.html")).read_text()
                assert f'id="{address.fragment}"' in target, (name, link)
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
    ElementTree.fromstring((out / "ladder.svg").read_text())
    for file in ("ladder.svg", "style.css"):
        assert "prefers-color-scheme: dark" in (out / file).read_text()


def test_links_lead_to_pages_to_the_source_or_are_words_and_code_is_text(drawn, tmp_path):
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
    assert page.tags.count("script") == 1 and "b" not in page.tags  # the book's own
    page = write(tmp_path / "full", str(fakes), "--source", "https://example.org/main")[NEWEST]
    assert "https://example.org/main/docs/x.md#y" in page.links
    assert main(["book", str(fakes), "--out", str(fakes)]) == 2  # among other files


@pytest.mark.slow
def test_the_picture_has_names_only_where_there_is_room(tmp_path):
    """Of all public numbers, as if each had a script here."""
    shutil.copy(REPO / "records/public.toml", tmp_path)
    known = []
    for number, row in records.read_public(tmp_path).items():
        claim = {"published": {"number": number}, "change": "", "parent": None}
        known.append(records.Record(tmp_path / "2026-01-01_Name", claim, minutes=row["minutes"]))
    draw_ladder(tmp_path, known, tmp_path / "ladder.svg")
    named = set(re.findall(r"#(\d+) Name", (tmp_path / "ladder.svg").read_text()))
    assert {"2", "92", "53"} <= named and 15 < len(named) < 60
    draw_ladder(tmp_path, known, tmp_path / "ladder.png")
    pixels = matplotlib.image.imread(tmp_path / "ladder.png")
    assert pixels.shape[1] == 1800 and pixels[..., :3].std() > 0.02
