"""HTML of the repository's Markdown, whose links lead to the site's pages or to its source."""

import re
from pathlib import Path
from urllib.parse import urljoin


def slug(title: str) -> str:
    """A heading's id, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def picture(path: Path) -> str:
    """An SVG as a part of a page, in whose colours it is drawn; nothing where there is none."""
    if path.suffix != ".svg" or not path.exists():
        return ""
    return f'<div class="wide">{path.read_text(encoding="utf-8")}</div>'


class Renderer:
    """Makes HTML of pages of the repository at `root`.

    `source` is where its files are read, or None: then links to them are plain words. `names` has
    the site's pages by the file or folder that they are of, `pages` all its pages without `.html`,
    and `terms` where a term is explained.
    """

    def __init__(self, root: Path, source: str | None, names: dict, pages: set, terms: dict):
        self.root, self.source, self.names, self.pages = root, source, names, pages
        self.terms = terms
        words = "|".join(sorted(map(re.escape, terms), key=len, reverse=True))
        self.term = re.compile(rf"(?<![\w-])({words})(?![\w-])", re.I) if words else None

    def html(self, text: str, folder: Path, known: set | None = None) -> str:
        """HTML of Markdown that stands in a folder. Headings get ids.

        With `known` the first use of each term leads to where it is explained. `known` has the
        terms that a page needs no link for, and takes up those that it has.
        """
        from markdown_it import MarkdownIt  # which no verb but `site` needs

        parser = MarkdownIt("commonmark").enable("table")
        tokens = parser.parse(text)
        for before, token, following in zip([None, *tokens], tokens, [*tokens[1:], None]):
            if token.type == "heading_open":
                words = [child.content for child in following.children]
                token.attrs["id"] = slug("".join(words))
            is_dead = False
            for child in token.children or ():
                if child.type == "link_open":
                    child.attrs["href"] = link = self.on_site(child.attrs["href"], folder)
                    is_dead = not self.is_there(link)
                elif child.type == "image" and (drawn := picture(folder / child.attrs["src"])):
                    child.type, child.content = "html_inline", drawn
                    before.hidden = following.hidden = True  # a block, in place of its paragraph
                if child.type in ("link_open", "link_close"):
                    child.hidden = is_dead
            if known is not None and before and before.type == "paragraph_open":
                self.link_terms(token, known)
        return parser.renderer.render(tokens, parser.options, {})

    def link_terms(self, token, known: set):
        """Lead the first use of each term in a paragraph to where it is explained."""
        from markdown_it.token import Token

        children, is_link = [], False
        for child in token.children:
            is_link = child.type == "link_open" or is_link and child.type != "link_close"
            if child.type != "text" or is_link or not self.term:
                children.append(child)
                continue
            for part in self.term.split(child.content):
                text = Token("text", "", 0, content=part)
                if (term := part.lower()) in self.terms and term not in known:
                    known.add(term)
                    attrs = {"href": self.terms[term], "class": "term"}
                    children += [Token("link_open", "a", 1, attrs=attrs), text,
                                 Token("link_close", "a", -1)]
                else:
                    children.append(text)
        token.children = children

    def is_there(self, link: str) -> bool:
        """Whether the site has this page, or a link leads elsewhere."""
        page, ending, _ = link.partition(".html")
        return "://" in link or link[:1] == "#" or bool(ending) and page in self.pages

    def on_site(self, link: str, folder: Path) -> str:
        """Where a link of a page in a folder leads from the site."""
        path, _, fragment = link.partition("#")
        name = self.names.get((folder / path).resolve()) if path else None
        if name and "compare.html#" in name:  # the fragment is a line
            return f"{name}&line={fragment[1:]}" if fragment else name
        if name:
            return f"{name.partition('#')[0]}#{fragment}" if fragment else name
        if "://" in link or not path or path.removesuffix(".html") in self.pages:
            return link
        if not self.source:
            return link
        place = folder.resolve().relative_to(self.root).as_posix()
        return urljoin(f"{self.source}/{place}/", link)
