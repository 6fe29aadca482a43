"""The pages of the project, and what stands in them: fenced blocks, links, headings, flags."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from conftest import REPO

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (\S[^\n]*) -->\n\Z")


class Block(NamedTuple):
    """A fenced block, and why it is not run: empty where it is."""

    page: str
    language: str
    text: str
    not_run: str

    def commands(self) -> list[str]:
        """The lines of a shell's block, without comments' lines."""
        lines = self.text.splitlines() if self.language == "sh" else []
        return [line for line in lines if shlex.split(line, comments=True)]


def tracked_files() -> list[str]:
    """The project's files; of a copy without git, all that are no caches, logs or data."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, text=True,
                            capture_output=True)
    names = listed.stdout.splitlines()
    if listed.returncode:
        left_out = {".git", ".venv", "__pycache__", "logs", "pocket", "fineweb10B"}
        paths = [path.relative_to(REPO) for path in REPO.rglob("*")]
        names = [str(path) for path in paths if not left_out & set(path.parts)]
    return sorted({name for name in names if (REPO / name).is_file()})


PAGES = [name for name in tracked_files() if name.endswith(".md") and ".github/" not in name]


def text_of(page: str) -> str:
    return (REPO / page).read_text()


def blocks_of(page: str) -> list[Block]:
    text, found = text_of(page), []
    for match in FENCE.finditer(text):
        marker = NOT_RUN.search(text, 0, match.start())
        found.append(Block(page, match[1], match[2], marker[1] if marker else ""))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def prose_of(page: str) -> str:
    """The page without fenced blocks and comments."""
    return COMMENT.sub("", FENCE.sub("", text_of(page)))


def links_of(page: str) -> list[tuple[str, str]]:
    """(path, heading) of each link to this project; the path is empty within a page."""
    links = re.findall(r"\]\((?!https?:|\.\./\.\./actions)([^)\s]*)\)", prose_of(page))
    return [(path, heading) for path, _, heading in (link.partition("#") for link in links)]


def headings_of(page: str) -> set[str]:
    """The headings as links name them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def path_from(page: str, link: str) -> Path:
    return (REPO / page).parent / link
