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
    links = re.findall(r"\]\((?!https?:|\.\./\.\./actions)([^)\s]*)\)", prose_of(page))
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
        assert not heading or heading in headings_of(target)


def test_the_files_that_contributing_lists_are_there():
    tree = next(block for block in blocks_of("CONTRIBUTING.md") if block.language == "text")
    for line in tree.text.splitlines():
        assert (REPO / line.split()[0]).exists()


@pytest.fixture(scope="module")
def tools():
    """The text of all that has flags."""
    files = [REPO / "run.sh", REPO / "train_gpt.py"]
    for pattern in "data/*.py", "tests/*.py", "records/**/*.py":
        files += REPO.glob(pattern)
    return "\n".join(file.read_text() for file in files)


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_a_page_names_exist(page, tools):
    text = prose_of(page)
    for block in blocks_of(page):
        for line in block.commands():
            if line.startswith(("python", "./run.sh", "torchrun")):
                text += f"\n{line}"
    for flag in set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - OTHERS:
        field = rf"^    {flag[2:]}: "  # of a script
        assert re.search(rf"{field}|[ \"']{flag}[ \"')]", tools, re.MULTILINE), flag
