"""What the pages name is there: files, headings, flags."""

import dataclasses
import re

import pytest
from conftest import REPO, SCRIPTS, script_module
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
def known_flags():
    """Of all scripts, and what stands in quotation marks in our tools and in run.sh."""
    flags = set(OTHERS)
    for name in SCRIPTS:
        fields = dataclasses.fields(script_module(name).Hyperparameters)
        flags |= {f"--{field.name}" for field in fields}
    for tool in [*REPO.glob("data/*.py"), *REPO.glob("tests/*.py"), *REPO.glob("records/**/*.py")]:
        flags |= set(re.findall(r"[\"'](--[a-z][\w-]*)[\"']", tool.read_text()))
    return flags | set(re.findall(r"--[a-z]+", (REPO / "run.sh").read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_flags_that_a_page_names_exist(page, known_flags):
    text = prose_of(page)
    for block in blocks_of(page):
        for line in block.commands():
            if line.startswith(("python", "./run.sh", "torchrun")):
                text += f"\n{line}"
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= known_flags
