"""The pages of the project, and what stands in them: fenced blocks, links, headings."""

import re
import shlex
from typing import NamedTuple

from conftest import REPO, project_files

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (\S[^\n]*) -->\n\Z")
FILES = project_files()
PAGES = [name for name in FILES if name.endswith(".md") and ".github/" not in name]


class Block(NamedTuple):
    page: str
    language: str
    text: str
    is_run: bool

    def commands(self) -> list[str]:
        """The lines of a shell's block, without comments' lines."""
        if self.language != "sh":
            return []
        return [line for line in self.text.splitlines() if shlex.split(line, comments=True)]


def prose_of(page: str) -> str:
    """The page without fenced blocks and comments."""
    text = (REPO / page).read_text()
    text = FENCE.sub("", text)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def blocks_of(page: str) -> list[Block]:
    text = (REPO / page).read_text()
    found = []
    for match in FENCE.finditer(text):
        is_run = not NOT_RUN.search(text, 0, match.start())
        found.append(Block(page, match[1], match[2], is_run))
    return found
