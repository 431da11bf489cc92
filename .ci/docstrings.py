"""A Griffe extension: docstrings of the project's style as Markdown.

A parameter is "name : text", and the text goes on in indented lines. NumPy's parsers take its first line for a type.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

from griffe import Extension

SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}$", re.MULTILINE)


class Markdown(Extension):
    """Turns every docstring before it is parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """A docstring whose sections are lists."""
    text, *sections = SECTION.split(docstring)
    named = zip(sections[::2], sections[1::2], strict=True)
    parts = [f"**{title}**\n\n" + "\n".join(items(body)) for title, body in named]
    return "\n\n".join([text.strip(), *parts])


def items(body: str) -> Iterator[str]:
    """The items of a section as a list: a line that is not indented begins one."""
    starts = itertools.accumulate(not line.startswith(" ") for line in body.strip().splitlines())
    lines = zip(starts, body.strip().splitlines(), strict=True)
    for _, item in itertools.groupby(lines, key=lambda pair: pair[0]):
        first, *others = (line.strip() for _, line in item)
        names, colon, said = first.partition(" : ")
        names = ", ".join(f"`{name}`" for name in names.split(", ")) if colon or others else names
        said = " ".join([said, *others]).strip()
        yield f"- {names}: {said}" if said else f"- {names}"
