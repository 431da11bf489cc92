"""Benchmark rows as tables in the terminal, a plot and a JSON file."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.markup import escape

from .screen import frameless

Row = dict[str, Any]

# What a row was measured on; every other key is an implementation.
SHAPE_KEYS = ("mode", "dtype", "d", "causal", "s", "b", "h")

TITLES = {
    "fwd": "forward, TFLOP/s (more is better)",
    "decode": "one query, fraction of a copy's bandwidth (more is better)",
    "decode us": "the same, us (less is better)",
    "cache": "one query, time over that with a plain cache (less is better)",
    "varlen": "packed sequences of random lengths up to s, TFLOP/s (more is better)",
    "host us/call": "time of the caller's thread in a small call, us (less is better)",
    "cpu ms/call": "forward on the CPU, ms (less is better)",
}
MORE_IS_BETTER = ("fwd", "decode", "varlen")
LIMITS = ("gemm bf16 TFLOP/s", "copy GB/s")  # rows of their own, of the same run
DRAWN = MORE_IS_BETTER
COLOURS = {"rtflash": "#d1495b", "torch-FA2": "#a8b5c8", "cuDNN": "#5c6f8a", "FA3": "#2f3e55"}
SPARE_COLOURS = ("#7a9e87", "#c2a878", "#8f7aa6", "#b0a8a0")


def tables(rows: Sequence[Row]) -> Iterator[Group]:
    """Title, table and summary for each mode that is there."""
    for mode in TITLES:
        chosen = [row for row in rows if row.get("mode") == mode]
        if chosen:
            yield table(chosen, mode)


def table(rows: Sequence[Row], mode: str) -> Group:
    """The rows of one mode; the best of each row is bold."""
    names = implementations(rows)
    shapes = [key for key in SHAPE_KEYS[1:] if any(key in row for row in rows)]
    headers = [*map(header, shapes), *names]
    best = max if mode in MORE_IS_BETTER else min
    ratios = [ratio(row) for row in rows if mode in MORE_IS_BETTER]
    known = [value for value in ratios if value is not None]
    if known:
        headers.append("rtflash/FA2")
    headers = [escape(text) for text in headers]
    grid = frameless(*headers, right=headers)
    for index, row in enumerate(rows):
        top = best((row[name] for name in names if row.get(name) is not None), default=None)
        values = [row.get(name) for name in names]
        cells = ["-" if v is None else f"[bold]{v}[/]" if v == top else f"{v}" for v in values]
        if known:
            cells.append("-" if ratios[index] is None else f"{ratios[index]:.2f}")
        grid.add_row(*(escape(kind(row.get(key, ""))) for key in shapes), *cells)
    if not known:
        return Group(TITLES[mode], grid)
    summary = f"rtflash/FA2: median {statistics.median(known):.2f}, least {min(known):.2f}"
    return Group(TITLES[mode], grid, summary)


def line(row: Row) -> str:
    """A row that is in no table, or not yet."""
    return ", ".join(f"{header(key)} {kind(value)}" for key, value in row.items())


def header(key: str) -> str:
    """What a key of a row is called where `kind` words its value."""
    return "mask" if key == "causal" else key


def kind(value: object) -> str:
    """A cell of what was measured."""
    return {True: "causal", False: "full"}[value] if isinstance(value, bool) else f"{value}"


def implementations(rows: Sequence[Row]) -> list[str]:
    """The implementations measured in `rows`, in order of first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row if key not in SHAPE_KEYS))


def ratio(row: Row) -> float | None:
    """rtflash's speed over torch's FlashAttention-2, None where one is missing."""
    ours, theirs = row.get("rtflash"), row.get("torch-FA2")
    return ours / theirs if ours and theirs else None


class Panel(NamedTuple):
    """Rows side by side: a group of bars for each."""

    title: str
    unit: str
    places: list[str]
    rows: list[Row]


def panels(rows: Sequence[Row]) -> list[list[Panel]]:
    """The lines of a plot: forward rows as a line per mask and a panel per head_dim, other modes as a panel each."""
    chosen = {mode: [row for row in rows if row.get("mode") == mode] for mode in DRAWN}
    forward = chosen["fwd"]
    dims = sorted({row["d"] for row in forward})
    lines = []
    for causal in sorted({row["causal"] for row in forward}):
        line = []
        for d in dims:
            found = [row for row in forward if (row["d"], row["causal"]) == (d, causal)]
            places = [length(row["s"]) for row in found]
            line.append(Panel(f"head_dim {d}, {kind(causal)}", "TFLOP/s", places, found))
        lines.append(line)
    if found := chosen["decode"]:
        places = [f"{row['b']} x {length(row['s'])}" for row in found]
        lines.append([Panel("one query, batch x keys", "of copy bandwidth", places, found)])
    if found := chosen["varlen"]:
        places = [f"head_dim {row['d']}, {kind(row['causal'])}" for row in found]
        lines.append([Panel("packed sequences of random lengths", "TFLOP/s", places, found)])
    return lines


def plot(rows: Sequence[Row], file: Path) -> None:
    """Bars of the modes in DRAWN, into a .png or .svg.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        There is no row to draw.
    """
    lines = panels(rows)
    if not lines:
        raise ValueError(f"there are no rows of mode {', '.join(DRAWN)} to plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [row for line in lines for panel in line for row in panel.rows]
    names = implementations(drawn)
    spare = itertools.cycle(SPARE_COLOURS)
    colours = {name: COLOURS.get(name) or next(spare) for name in names}
    widest = max(map(len, lines))
    width = math.lcm(*map(len, lines))
    figure = pyplot.figure(
        figsize=(max(5.2, 2 + 3.2 * widest), 0.8 + 2.6 * len(lines)), layout="constrained"
    )
    grid = figure.add_gridspec(len(lines), width)
    for number, line in enumerate(lines):
        first = None
        for column, panel in enumerate(line):
            span = width // len(line)
            place = grid[number, column * span : (column + 1) * span]
            axis = figure.add_subplot(place, sharey=first)
            first = first or axis
            axis.set_title(panel.title, fontsize=10)
            draw(axis, panel, colours)
            axis.tick_params(labelleft=column == 0)
            if column == 0:
                axis.set_ylabel(panel.unit)
    figure.suptitle(f"Attention forward, {drawn[0]['dtype']}{of_gpu(rows)}")
    bars = [zip(*axis.get_legend_handles_labels(), strict=True) for axis in figure.axes]
    shown = {label: handle for handle, label in itertools.chain.from_iterable(bars)}
    names = [name for name in names if name in shown]  # matplotlib passes "" and "_x" over
    handles = [shown[name] for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def of_gpu(rows: Sequence[Row]) -> str:
    """The GPU as the end of a title, empty where no row names it."""
    return next((f", {row['gpu']}" for row in rows if "gpu" in row), "")


def draw(axis: Any, panel: Panel, colours: dict[str, str]) -> None:
    """One panel: a group of bars per place, a bar per implementation."""
    names = implementations(panel.rows)
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        shift = (index - (len(names) - 1) / 2) * width
        places = [place + shift for place in range(len(panel.rows))]
        heights = [row.get(name) or 0 for row in panel.rows]
        axis.bar(places, heights, width * 0.92, label=name, color=colours[name])
    axis.set_xticks(range(len(panel.rows)), panel.places)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    axis.grid(axis="y", color="#e8e8e8")


def length(tokens: int) -> str:
    """A sequence length as people write it: 16384 -> 16k."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens}"


def save(rows: Sequence[Row], file: Path) -> None:
    """Write the rows as JSON, one a line."""
    lines = ",\n ".join(json.dumps(row) for row in rows)
    file.write_text(f"[{lines}]\n", encoding="utf-8")


def load(file: Path) -> list[Row]:
    """The rows that `save` wrote.

    Raises
    ------
    OSError, ValueError
        The file cannot be read, or holds something else.
    """
    data = file.read_bytes()
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file} holds no list of benchmark rows")
    if not all(is_positive(row[key]) for row in rows for key in LIMITS if key in row):
        raise ValueError(f"{file} says that {' or '.join(LIMITS)} is no number above 0")
    measured = [row for row in rows if row.get("mode") in list(TITLES)]
    if not measured or not all(map(is_complete, measured)):
        raise ValueError(
            f"{file} holds no rows that `rtflash bench --json` writes, or some without their shape and figures"
        )
    return rows


def is_complete(row: Row) -> bool:
    """Whether a row has figures, all of them numbers or None, and what a plot asks of a row that it draws."""
    figures = [row[name] for name in implementations([row])]
    shape = [row.get(key) for key in ("dtype", "d", "causal", "s", "b")]
    kinds = (str, int, bool, int, int)
    return (
        any(figure is not None for figure in figures)
        and all(figure is None or is_positive(figure) for figure in figures)
        and (row["mode"] not in DRAWN or all(map(isinstance, shape, kinds)))
        and all(is_positive(row[key]) for key in ("d", "s", "b") if key in row)
    )


def is_positive(value: object) -> bool:
    """Whether a value of a row is a number above 0 that a plot can place."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**63
