"""What the commands share: the console, plain tables, units for people, options that are lists."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import typer
from rich.console import Console, ConsoleOptions
from rich.markup import escape
from rich.segment import Segment
from rich.status import Status
from rich.table import Table

# Columns that no table fills.
WIDE = 10_000
PLOTS = (".png", ".svg", ".pdf")

# A pipe or a log has no width: rather long lines there than wrapped tables. A closed stdout is None.
terminal = sys.stdout is not None and sys.stdout.isatty()
console = Console(width=None if terminal else 120, highlight=False)


def frameless(*columns: str, right: Sequence[str] = (), whole: Sequence[str] = ()) -> Table:
    """A table without frame; the columns in `right` are right-aligned, the cells of those in `whole` never broken."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(columns))
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            overflow="ignore" if name in whole else "fold",
            no_wrap=name in whole,
        )
    return table


class Named:
    """A table whose rows have names that are never broken: at the rows' ends if all fit there, else above the rows."""

    def __init__(self, title: str, *columns: str, right: Sequence[str]) -> None:
        self.names = [title]
        self.table = frameless(*columns, right=right)

    def add_row(self, name: str, *cells: str) -> None:
        self.names.append(name)
        self.table.add_row(*cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        rows = console.render_lines(self.table, options.update(width=WIDE), pad=False)
        width = Segment.get_line_length(rows[0]) + 2 + max(map(len, self.names))
        beside = width <= options.max_width or not console.is_terminal
        for name, row in zip(self.names, rows, strict=True):
            yield from [*row, Segment(f"  {name}")] if beside else [Segment(f"{name}\n"), *row]
            yield Segment.line()


def working(what: str) -> Status:
    """A line that says on a terminal what takes long; its spinner is one that every terminal can show."""
    return console.status(what, spinner="line")


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
    if not found:
        raise typer.BadParameter(f"{option} is {text!r}; it must be a list with commas")
    if wrong := [item for item in found if allowed and item not in allowed]:
        raise typer.BadParameter(
            f"{option} has {wrong[0]!r}; it must be one of {', '.join(allowed)}"
        )
    return found


def one_of(text: str, option: str, allowed: Collection[str]) -> str:
    """An option that is one of several words; BadParameter if it is not."""
    if text not in allowed:
        raise typer.BadParameter(f"{option} is {text!r}; it must be one of {', '.join(allowed)}")
    return text


def numbers(text: str, option: str, most: int) -> list[int]:
    """The whole numbers, 1..most, of an option that is a list with commas."""
    found = items(text, option)
    digits = len(str(most))
    if not all(
        re.fullmatch(rf"\d{{1,{digits}}}", item) and 0 < int(item) <= most for item in found
    ):
        raise typer.BadParameter(
            f"{option} is {text!r}; it must be whole numbers in 1..{most} with commas"
        )
    return [int(item) for item in found]


def given(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Which of a command's options stand on the command line, as "--head-dim"."""
    options = {str(option.name): option.opts[0] for option in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in names}
    return [
        options[name]
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]


def check_file(file: Path | None, option: str) -> None:
    """BadParameter if a file that the work will end in cannot be written."""
    try:
        if file is None or (file.exists() and not (file.is_file() or file.is_dir())):
            return  # opening a pipe twice would end it
        if not file.parent.exists():
            raise typer.BadParameter(f"{option}: there is no folder {file.parent}")
        there = os.path.lexists(file)
        file.open("ab").close()
        if not there:
            file.unlink()
    except OSError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def check_folder(folder: Path | None, option: str) -> None:
    """BadParameter if no file can be written in a folder; it is made if it is missing."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def check_plot(plot: Path | None, option: str = "--plot") -> None:
    """BadParameter if a plot that the work will end in cannot be drawn or written."""
    if plot is None:
        return
    if plot.suffix not in PLOTS:
        raise typer.BadParameter(f"{option} is {plot}; it must end in one of {', '.join(PLOTS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter(f"{option} needs matplotlib: pip install matplotlib")
    check_file(plot, option)


def check_apart(files: Mapping[str, Path | None]) -> None:
    """BadParameter if two options name one file, of which only the last one written would stay."""
    found: dict[str, str] = {}
    for option, file in files.items():
        if file is None or (file.exists() and not file.is_file()):
            continue
        other = found.setdefault(os.path.realpath(file), option)
        if other != option:
            raise typer.BadParameter(f"{other} and {option} are both {file}; they must differ")


def try_drawing(draw: Callable[[], None]) -> bool:
    """Draw; where nothing can be drawn, say so. Whether something was."""
    try:
        draw()
    except (ImportError, ValueError) as error:
        console.print(f"[red]no plot:[/] {escape(str(error))}")
        return False
    return True
