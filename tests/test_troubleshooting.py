"""docs/troubleshooting.md and the messages in the sources: each has to know of the other.

A message is a string that is raised, warned of, logged as a warning or printed in red or yellow. One that says what
an argument "must" be needs no line of its own on the page, nor do the command line's words about an option. Every
other one needs a fragment in the first column of a table, where `...` stands for what the program fills in; and every
fragment must be part of a message, so that the page does not tell of errors that are gone.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"

if not PAGE.exists():
    pytest.skip("not run from a checkout", allow_module_level=True)

HOLE = "\0"
# Letters that a message or a fragment has at least.
LEAST_LETTERS = 5
# Letters from which on a message needs a fragment: shorter ones only introduce others.
MANY_LETTERS = 10
# Messages that one fragment may stand for: there must be no catch-all.
MOST_MESSAGES = 4
# Functions that raise, or warn of, what another one worded, or what the function around them words anew.
PASSED_ON = {
    "rtflash/cache.py:warn_once",
    "rtflash/checks.py:refuse",
    "rtflash/cxx.py:find",
    "rtflash/device.py:get",
    "rtflash/dump.py:keep",
    "rtflash/dump.py:ptx",
    "rtflash/lengths.py:check_length",
    "rtflash/render.py:make_environment.load",
    "rtflash/tensor_direct.py:Numpy.view",
    "rtflash/torch_ops.py:refuse",
    "rtflash/tuned.py:read_row",
}
WARNINGS = ("warn", "warning", "warn_once", "error", "exit")
# Words of functions that give reasons instead of raising them.
REASONS = re.compile(r"_reasons$|^why_(?!not_hopper|not_tma)|^misfit$|^find$|^get$|^within$")


class Message(NamedTuple):
    """A message of the sources; what the program fills in is HOLE."""

    where: str
    line: int
    text: str

    @property
    def explains_itself(self) -> bool:
        return re.search(r"\bmust\b", self.text) is not None


def literal(node: ast.AST) -> str:
    """The text of a string expression."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[sd.\df]+", HOLE, text)
        case ast.JoinedStr(values=parts):
            return "".join(map(literal, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return literal(left) + literal(right)
    return HOLE


def letters(text: str) -> int:
    return len(re.findall(r"[A-Za-z]", text))


def name_of(call: ast.expr) -> str:
    """The last part of what is called."""
    return ast.unparse(call).rpartition(".")[2]


class Finder(ast.NodeVisitor):
    """Collects a module's messages, and where something is raised that has no words of its own."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.scope: list[str] = []
        self.classes: list[str] = []
        self.messages: list[Message] = []
        self.without: list[str] = []

    @property
    def where(self) -> str:
        return f"{self.module}:{'.'.join(self.scope) or '<module>'}"

    def add(self, node: ast.expr, text: str) -> None:
        if letters(text) >= LEAST_LETTERS:
            self.messages.append(Message(self.where, node.lineno, text))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(re.search(r"(Error|Warning)$", ast.unparse(base)) for base in node.bases):
            self.classes.append(node.name)
        self.inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scope.append(node.name)
        if REASONS.search(node.name):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            for text in itertools.chain.from_iterable(map(whole_strings, body)):
                self.add(text, literal(text))
        self.scope.pop()
        self.inside(node)

    def inside(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        self.scope.append(node.name)
        self.generic_visit(node)
        self.scope.pop()

    def visit_Call(self, node: ast.Call) -> None:
        name = name_of(node.func)
        texts = [literal(x) for x in node.args]
        words = max(texts, key=letters, default="")
        if re.fullmatch(r"[A-Z]\w+(Error|NotFound)", name) or name in WARNINGS:
            # Our own classes word their messages themselves; the page has them by name.
            own = name in OWN
            if letters(words) >= LEAST_LETTERS:
                self.add(node, words)
            elif node.args and not own and name != "exit":
                self.without.append(self.where)
        elif name == "append" and texts and ast.unparse(node.func) == "reasons.append":
            self.add(node, texts[0])
        elif name == "print" and re.match(r"\[(red|yellow)\]", words):
            self.add(node, re.sub(r"\[/?\w*\]", "", words))
        elif name == "print" and "sys.stderr" in ast.unparse(node):
            self.add(node, words)
        self.generic_visit(node)


def whole_strings(node: ast.AST) -> Iterator[ast.expr]:
    """The strings of a statement that are no parts of others and have several words."""
    if isinstance(node, (ast.Constant, ast.JoinedStr)):
        if literal(node).count(" ") > 0:
            yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from whole_strings(child)


def sources() -> list[Path]:
    return sorted(path for name in ("rtflash", "tools") for path in (ROOT / name).rglob("*.py"))


def finders() -> Iterator[Finder]:
    for path in sources():
        finder = Finder(path.relative_to(ROOT).as_posix())
        finder.visit(ast.parse(path.read_text(encoding="utf-8")))
        yield finder


def own_classes() -> set[str]:
    """Names of the exceptions that the sources define."""
    defined = re.compile(r"^class (\w+(?:Error|Warning))\(", re.M)
    return {
        name for path in sources() for name in defined.findall(path.read_text(encoding="utf-8"))
    }


OWN = own_classes()
FOUND = list(finders())
MESSAGES = [message for finder in FOUND for message in finder.messages]
TEXT = PAGE.read_text(encoding="utf-8")
TABLES = re.findall(r"^\| (?:message|pattern) \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.M)
CELLS = [row.split(" | ")[0] for table in TABLES for row in table.splitlines()]
FRAGMENTS = [fragment for cell in CELLS for fragment in re.findall(r"`(.+?)`", cell)]


def has(message: str, fragment: str) -> bool:
    """Whether a fragment, in which "..." stands for anything, is part of a message."""
    pieces = [re.escape(piece.strip()) for piece in fragment.split("...") if piece.strip()]
    return re.search(".*".join(pieces), message, re.S) is not None


def not_told_of(messages: list[Message]) -> list[str]:
    """The messages that the page lacks, each with its place."""
    return sorted(
        f"{message.where}:{message.line}: {message.text.replace(HOLE, '...')}"
        for message in messages
        if letters(message.text) >= MANY_LETTERS
        and not message.explains_itself
        and not any(has(message.text, fragment) for fragment in FRAGMENTS)
    )


def test_every_message_is_on_the_page_or_explains_itself() -> None:
    missing = not_told_of(MESSAGES)
    assert not missing, "put these into a table of docs/troubleshooting.md:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    "statement",
    [
        "raise RuntimeError(f'the {thing} has gone missing')",
        "raise RuntimeError('a new trouble ' f'with {thing}') from None",
        "warnings.warn('a new trouble', RuntimeWarning)",
        "log.warning('a new trouble with %s', thing)",
        "reasons.append('a new trouble')",
        "console.print('[red]a new trouble[/]')",
        "print('a new trouble', file=sys.stderr)",
    ],
)
def test_a_new_message_would_be_missed(statement: str) -> None:
    finder = Finder("new.py")
    finder.visit(ast.parse(f"def work(thing):\n    {statement}\n"))
    assert len(not_told_of(finder.messages)) == 1


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_every_fragment_is_part_of_a_message(fragment: str) -> None:
    assert letters(fragment) >= LEAST_LETTERS
    found = {message.text for message in MESSAGES if has(message.text, fragment)}
    assert found
    assert len([text for text in found if "must" not in text]) <= MOST_MESSAGES


def test_only_known_functions_raise_what_others_worded() -> None:
    found = {where for finder in FOUND for where in finder.without}
    assert sorted(found) == sorted(PASSED_ON)


def test_every_exception_of_ours_is_on_the_page() -> None:
    assert {name for finder in FOUND for name in finder.classes} == OWN
    for name in OWN:
        assert re.search(rf"`(?:\w+\.)*{name}`", TEXT), name
    for name in re.findall(r"`(?:\w+\.)*(\w+Error)`", TEXT):
        assert name in OWN or hasattr(builtins, name), name
