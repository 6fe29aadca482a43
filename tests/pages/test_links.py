"""The pages' links, pictures and file tree: what they name is there."""

import fnmatch
import re

import pytest
from conftest import REPO
from page_text import PAGES, headings_of, links_of, path_from, prose_of, text_of, tracked_files

FILES = tracked_files()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for path, heading in links_of(page):
        target = path_from(page, path).resolve() if path else REPO / page
        assert target.exists(), path
        known = headings_of(str(target.relative_to(REPO))) if heading else {""}
        assert heading in known, f"{path}#{heading}"


@pytest.mark.parametrize("page", PAGES)
def test_files_named_in_the_text_exist(page):
    """Paths in backticks that begin with a folder of the project, or are files of its root."""
    named = re.findall(r"`((?:data|docs|records|tests)/[\w./]*|\.ci/run|run\.sh)`", prose_of(page))
    made = {"data/pocket/", "data/fineweb10B/", "docs/pocket/", "data/pocket", "data/fineweb10B"}
    for path in set(named) - made:
        assert (REPO / path).exists() or path_from(page, path).exists(), path


def test_every_page_is_reached_from_the_front_page():
    reached = ["README.md"]
    for page in reached:  # which grows meanwhile
        for path, _ in links_of(page):
            target = path_from(page, path).resolve()
            target = target / "README.md" if target.is_dir() else target
            name = str(target.relative_to(REPO))
            if name in PAGES and name not in reached:
                reached.append(name)
    assert sorted(reached) == PAGES


def test_the_file_tree_has_every_folder_and_each_file_of_the_root():
    tree = re.search(r"<!-- files: begin -->\n```text\n(.*?)```", text_of("CONTRIBUTING.md"), re.S)
    named = [line.split()[0] for line in tree[1].splitlines()]
    assert all((REPO / name).is_dir() == name.endswith("/") for name in named)
    assert {name for name in named if not name.endswith("/")} <= set(FILES)
    known = [*named, "*.md", "LICENSE", ".gitignore", ".github/*", "pyproject.toml",
             "requirements-dev.txt", "tests/conftest.py", "tests/*_baseline.py"]
    patterns = {name + "*" if name.endswith("/") else name for name in known}
    lost = [name for name in FILES if not any(fnmatch.fnmatch(name, one) for one in patterns)]
    assert lost == []
