"""Hooks of mkdocs: what makes pages that are written for GitHub a site.

README.md, CHANGELOG.md and LICENSE lie above docs/: they become pages here, and links to them and from them are
turned. A comment `<!-- ::: rtflash.name -->`, which GitHub does not show, becomes the description of that name.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "start.md", "CHANGELOG.md": "changes.md", "LICENSE": "license.md"}
LINK = re.compile(r"(\]\()(?!https?:)([^)#\s]+)")
DESCRIBED = re.compile(r"^<!-- (::: [\w.]+) -->$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """The pages from above docs/."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        if not name.endswith(".md"):
            text = f"# {name.capitalize()}\n\n```text\n{text}```\n"
        files.append(File.generated(config, page, content=turned(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page of docs/, as the site has it."""
    described = DESCRIBED.sub(r"\1", markdown)
    if page.file.src_uri in PAGES.values():
        return described
    return turned(described, posixpath.join("docs", posixpath.dirname(page.file.src_uri)))


def turned(text: str, folder: str) -> str:
    """A text whose links, from a folder of the repository, lead to the site's pages."""

    def turn(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        place = PAGES.get(target) or posixpath.relpath(target, "docs")
        return link[1] + posixpath.relpath(place, posixpath.relpath(folder or "docs", "docs"))

    return LINK.sub(turn, text)
