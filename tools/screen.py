"""What the commands share: the console, plain tables, units for people, options that are lists."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.table import Table

# A pipe or a log has no width: rather long lines there than wrapped tables.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def frameless(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without frame; the columns named in `right` are right-aligned."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(columns))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1024:.0f} KB" if count < 10 * 1024**2 else f"{count / 1024**2:.0f} MB"


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def rate(flops: float) -> str:
    """Operations a second in the unit that suits them."""
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.3g} GFLOP/s"


def items(text: str, option: str, allowed: Sequence[str] = ()) -> list[str]:
    """The items of an option that is a list with commas.

    Raises
    ------
    typer.BadParameter
        The list is empty, or an item is not allowed.
    """
    found = [item for item in re.split(r"[,\s]+", text) if item]
    if not found or (allowed and not set(found) <= set(allowed)):
        wanted = f"out of {', '.join(allowed)}" if allowed else "a list with commas"
        raise typer.BadParameter(f"{option} is {text!r}; it must be {wanted}")
    return found


def numbers(text: str, option: str) -> list[int]:
    """The positive whole numbers of an option that is a list with commas."""
    found = items(text, option)
    if not all(item.isdecimal() and int(item) > 0 for item in found):
        raise typer.BadParameter(f"{option} is {text!r}; it must be whole numbers with commas")
    return [int(item) for item in found]
