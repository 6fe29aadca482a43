"""The site in a browser: widths, contrast, tab stops, filter, keys, comparisons, no error."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
from conftest import PATIENCE, REPO
from ledger.scripts import above
from test_site import copy_some, write
from website.build import PAGE
from website.ideas import chart_html, read_ideas, trace_all
from whole_ladder import find_ladder

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DARK = "--blink-settings=preferredColorScheme=0"
pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(not BROWSER, reason="there is no Chromium here")]


def try_in_browser(site: Path, *flags: str, **wanted) -> dict:
    """What tried.js finds in the site; its page has the site's pages in frames."""
    script = (REPO / "tests/website/tried.js").read_text()
    page = site / "tried.html"
    page.write_text(f"<!DOCTYPE html><body><script>const WANTED = {json.dumps(wanted)};\n"
                    f"{script}</script></body>")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000",
             "--allow-file-access-from-files", "--enable-logging=stderr", "--dump-dom", *flags]
    done = subprocess.run([BROWSER, *words, f"file://{page}"], capture_output=True, text=True,
                          timeout=PATIENCE)
    page.unlink()
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(unescape(re.search('<pre id="found">(.*?)</pre>', done.stdout)[1]))
    assert "error" not in found, found
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(the site, names of its first, second and last record), with long words in the second."""
    folder = tmp_path_factory.mktemp("browser")
    ladder = find_ladder()
    chosen = [ladder[place] for place in (0, 1, 2, -1)]
    copy_some(chosen, folder)
    names = [record.folder.name for record in chosen]
    with (folder / "records" / names[1] / "README.md").open("a") as file:
        long = {name: name * 80 for name in ("head", "word", "code", "cell")}
        file.write("\n## {head}\n\n{word} `{code}`\n\n| {cell} |\n|---|\n".format(**long))
    write(folder / "site", str(folder / "records"))
    whole = read_ideas(REPO / "docs/techniques.md", REPO / "records/website/ideas.toml")
    trace_all(whole, ladder)
    (folder / "site/chart.html").write_text(PAGE.format(
        title="", description="", header="", links="", footer="", body=chart_html(whole, ladder)))
    return folder / "site", names


def kinds_of(names):
    """A page of each kind."""
    kinds = ["index", "ladder", "optimizers", "run-it", "gpus", "ideas", "idea-smear", "techniques",
             "glossary", "compare", "chart", "2026-06-11_o36_MuonTuned", names[1], names[-1]]
    return [f"{kind}.html" for kind in kinds]


@pytest.mark.parametrize("flags", [[], [DARK]], ids=["light", "dark"])
def test_all_words_can_be_read(built, flags):
    """Contrast of 4.5, as WCAG AA asks, marked lines and changed words included."""
    site, names = built
    pages = [*kinds_of(names), f"compare.html#a={names[0]}&b={names[-1]}",
             f"compare.html#b={names[-1]}&line=1-400"]
    found = try_in_browser(site, *flags, pages=[], contrast=pages)
    assert found["isDark"] == bool(flags)
    assert found["faint"] == {}


def test_a_browser_shows_the_site(built):
    """No page is wider than its window; filter, keys, links of the picture, comparisons work."""
    site, names = built
    first, second, third = names[0], names[1], names[-1]
    pages = kinds_of(names)
    widths = [320, 375, 1024, 1280]
    found = try_in_browser(site, first=first, third=third, widths=widths, pages=pages, contrast=[])
    assert len(found["wider"]) == len(widths) * len(pages)
    assert {page: wider for page, wider in found["wider"].items() if wider > 0} == {}
    for page, tabs in found["tabs"].items():
        assert tabs["first"] == "Skip to the text" and tabs["before"] < 15, page
    assert re.fullmatch(r"\d of \d+, in both tables", found["filter"]) and found["hidden"] > 80
    assert len(found["points"]) == 92 and f"{third}.html" not in found["points"]
    assert [found["clicked"], *found["keys"]] == [f"{first}.html", f"{second}.html",
                                                  f"{first}.html"]

    folder = site.parent / "records"
    scripts = {name: above((folder / name / "train_gpt.py").read_text()).splitlines()
               for name in names}
    for side, name, other in ("old", first, third), ("new", third, first):
        missing = {number for number, line in enumerate(scripts[name], 1)
                   if line not in scripts[other]}
        assert missing and set(found[side]) >= missing
    assert found["marked"] == ["L30", "L31", "L40"]
    assert found["gaps"] == 0 and found["shown"] > len(scripts[third])  # with all lines: all lines
    assert "compared with" in found["title"] and found["title"].count(" · ") == 1
    assert "o36 MuonTuned, compared with o12 Muon" in found["newest"]
    assert "No script here is called nothing." in found["unknown"]
    start, count = int(found["gap"]["new"]), int(found["gap"]["count"])
    assert found["unfolded"] == scripts[second][start - 1:start - 1 + count]
