"""What the pages name is there: files, headings, flags."""

import re

import pytest
from conftest import REPO
from page_text import PAGES, blocks_of, prose_of

# Flags of programs that are not ours, as far as the pages name them
OTHERS = set("""--local-addr --shm-size --standalone --nproc_per_node --nnodes --rdzv_backend
    --rdzv_endpoint --max-restarts --shutdown-timeout --signals-to-handle --random-order
    --help""".split())


def links_of(page):
    """(file, heading) of each link to this project; both may be empty."""
    elsewhere = r"https?:|(?:\.\./){2,}(?:actions|deployments|issues)"
    links = re.findall(rf"\]\((?!{elsewhere})([^)\s]*)\)", prose_of(page))
    parts = (link.partition("#") for link in links)
    return [((REPO / page).parent / path if path else REPO / page, heading)
            for path, _, heading in parts]


def headings_of(page):
    """The headings as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for target, heading in links_of(page):
        assert target.exists()
        if target.suffix != ".py":  # there it is a line, of which the ledger takes care
            assert not heading or heading in headings_of(target)


def test_the_files_that_contributing_lists_are_there():
    tree = next(block for block in blocks_of("CONTRIBUTING.md") if block.language == "text")
    for line in tree.text.splitlines():
        assert (REPO / line.split()[0]).exists()


@pytest.fixture(scope="module")
def flags():
    """Those that a program of the project names, and the settings of its scripts."""
    found = set(OTHERS)
    files = [REPO / "run.sh", REPO / "train_gpt.py"]
    for pattern in "data/*.py", "tests/*.py", "records/**/*.py":
        files += REPO.glob(pattern)
    for file in files:
        text = file.read_text()
        found.update(re.findall(r"[ \"'](--[\w-]+)(?=[ \"')])", text))
        found.update(f"--{name}" for name in re.findall(r"^    (\w+): ", text, re.MULTILINE))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_a_page_names_exist(page, flags):
    text = prose_of(page)
    for block in blocks_of(page):
        for line in block.commands():
            if line.startswith(("python", "./run.sh", "torchrun")):
                text += f"\n{line}"
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= flags
