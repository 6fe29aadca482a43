"""HTML of the repository's Markdown, whose links lead to the site's pages or to its source."""

import re
from pathlib import Path
from urllib.parse import urljoin


def slug(title: str) -> str:
    """A heading's id, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


class Renderer:
    """Makes HTML of pages of the repository at `root`.

    `source` is where its files are read, or None: then links to them are plain words. `names` has
    the site's pages and pictures by the file or folder that they are of.
    """

    def __init__(self, root: Path, source: str | None, names: dict):
        self.root, self.source, self.names = root, source, names

    def html(self, text: str, folder: Path) -> str:
        """HTML of Markdown that stands in a folder. Headings get ids."""
        from markdown_it import MarkdownIt  # which no verb but `site` needs

        parser = MarkdownIt("commonmark").enable("table")
        tokens = parser.parse(text)
        for token, following in zip(tokens, [*tokens[1:], None]):
            if token.type == "heading_open":
                words = [child.content for child in following.children]
                token.attrs["id"] = slug("".join(words))
            is_dead = False
            for child in token.children or ():
                if child.type == "link_open":
                    child.attrs["href"] = link = self.on_site(child.attrs["href"], folder)
                    is_dead = "://" not in link and link[:1] != "#" and ".html" not in link
                elif child.type == "image":
                    child.attrs["src"] = self.on_site(child.attrs["src"], folder)
                if child.type in ("link_open", "link_close"):
                    child.hidden = is_dead
        return parser.renderer.render(tokens, parser.options, {})

    def on_site(self, link: str, folder: Path) -> str:
        """Where a link of a page in a folder leads from the site."""
        path, _, fragment = link.partition("#")
        name = self.names.get((folder / path).resolve()) if path else None
        if name and "compare.html#" in name:  # the fragment is a line
            return f"{name}&line={fragment[1:]}" if fragment else name
        if name:
            return f"{name.partition('#')[0]}#{fragment}" if fragment else name
        if "://" in link or path in ("", "compare.html") or not self.source:
            return link
        place = folder.resolve().relative_to(self.root).as_posix()
        return urljoin(f"{self.source}/{place}/", link)
