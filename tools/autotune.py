"""`rtflash tune`: time candidate tiles for a shape on the GPU at hand, and keep the winners where select finds them.

A tile is kept for all calls of its GPU, table, dtype, head_dims and mask, whatever their lengths. One that computes
something wrong, spills in any of these calls' variants, or gains next to nothing, is not kept.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from rtflash import artifacts, device, nvrtc, tuned
from rtflash.device import Device
from rtflash.spec import DTYPES, AnySpec
from rtflash.tiles import Tile

from . import bench, chart, trial
from .generate import head_dims
from .screen import (
    PLOTS,
    check_apart,
    check_file,
    check_plot,
    console,
    frameless,
    items,
    one_of,
    try_drawing,
    working,
)
from .served import WINDOWS
from .shapes import Serving, Shape, candidates, launched, serving, siblings
from .tile_times import measure

Row = dict[str, Any]

# A tile takes the place of the table's if it is so much faster; less is within what runs differ by.
LEAST_GAIN = 1.02
LONGEST, MOST = 2**20, 2**12


def faults(specs: Sequence[AnySpec], gpu: Device) -> list[str]:
    """Why each variant must not be used, empty where nothing speaks against it; compiled on all cores, and cached."""
    arch = nvrtc.target_arch(gpu)

    def look(spec: AnySpec) -> str:
        try:
            used = artifacts.artifact(spec, arch).resources
        except artifacts.CompileError as error:
            return f"does not compile, see {error.path}"
        return "spills" if used.spill_stores or used.spill_loads or used.local_bytes else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(look, specs))


def tune(
    shape: Shape, gpu: Device, given: Sequence[Tile]
) -> tuple[Serving, list[Row], Tile | None]:
    """What serves a shape now, a row per tile, and the tile that should take its place; None: none should."""
    now = serving(shape, gpu)
    tiles = candidates(shape, now, gpu, given)
    variants = [(tile, spec) for tile in tiles for spec in launched(shape, now.table, tile, gpu)]
    with working(f"compiling {len(variants)} kernels"):
        reasons = faults([spec for _, spec in variants], gpu)
    dropped = {tile: why for (tile, _), why in zip(variants, reasons, strict=True) if why}
    usable = [tile for tile in tiles if tile not in dropped]
    with working(f"measuring {len(usable)} tiles"):
        times = {**dropped, **measure(shape, now.table, usable)}
    rows = [row_of(shape, now, tile, times[tile]) for tile in tiles]
    return now, rows, winner(shape, now, times, gpu)


def row_of(shape: Shape, now: Serving, tile: Tile, found: float | str) -> Row:
    """What is reported of a tile; "dropped" stands in place of figures."""
    row: Row = {**shape._asdict(), "table": now.table, "tile": trial.label(tile)}
    if isinstance(found, str):
        return row | {"dropped": found}
    return row | {"us": round(found * 1e3, 2), "present": tile == now.tile}


def winner(shape: Shape, now: Serving, times: dict[Tile, float | str], gpu: Device) -> Tile | None:
    """The fastest tile that gains enough and none of whose variants spills; None: the present one stays.

    Without a time of the present one nothing is known to be better.
    """
    measured = {tile: time for tile, time in times.items() if not isinstance(time, str)}
    if now.tile not in measured:
        return None
    for tile, time in sorted(measured.items(), key=lambda item: item[1]):
        if time * LEAST_GAIN > measured[now.tile]:
            return None
        if not any(faults(siblings(shape, now.table, tile, gpu), gpu)):
            return tile
    return None


def show(shape: Shape, rows: Sequence[Row], best: Tile | None) -> None:
    """A table, the fastest tile first; then what was dropped."""
    console.print(f"\n{escape(shape.said())}, table {rows[0]['table']}", style="bold")
    grid = frameless("tile", "us", "speed", "", right=("us", "speed"))
    times = {row["tile"]: row["us"] for row in rows if "us" in row}
    present = next((row["us"] for row in rows if row.get("present")), None)
    for row in sorted(rows, key=lambda row: row.get("us", math.inf)):
        label = row["tile"]
        if label not in times:
            grid.add_row(label, "", "", row["dropped"], style="dim")
            continue
        note = "of the tables" if row["present"] else ""
        if best is not None and label == trial.label(best):
            note = "the best"
        speed = f"{present / row['us']:.3f}" if present else ""
        grid.add_row(label, f"{row['us']:.2f}", speed, note)
    console.print(grid)
    if best is None:
        console.print(f"the tables' tile stays: no other is {LEAST_GAIN:.2f} times as fast")


def plot(rows: Sequence[Row], file: Path) -> None:
    """Speeds over the tables' tile, a panel a shape, into a .png, .svg or .pdf.

    Raises
    ------
    ValueError
        Nothing was measured.
    """
    groups: dict[Shape, list[Row]] = {}
    for row in rows:
        if "us" in row:
            groups.setdefault(Shape(*(row[name] for name in Shape._fields)), []).append(row)
    if not groups:
        raise ValueError("nothing was measured")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    longest = max(map(len, groups.values()))
    figure, axes = pyplot.subplots(
        len(groups), 1, squeeze=False, layout="constrained",
        figsize=(max(6.0, 2 + 0.24 * longest), 3.4 * len(groups)),
    )  # fmt: skip
    for axis, (shape, found) in zip(axes[:, 0], groups.items(), strict=True):
        ordered = sorted(found, key=lambda row: row["us"])
        present = next((row["us"] for row in ordered if row["present"]), ordered[0]["us"])
        colours = ["#5c6f8a" if row["present"] else "#d1495b" for row in ordered]
        axis.bar(range(len(ordered)), [present / row["us"] for row in ordered], color=colours)
        axis.set_xticks(
            range(len(ordered)), [row["tile"] for row in ordered], rotation=90, fontsize=7
        )
        axis.axhline(1, color="#5c6f8a", linewidth=0.8)
        axis.set_ylabel("speed over the tables' tile")
        axis.set_title(shape.said(), fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def whole(value: int, option: str, most: int) -> int:
    """An option that must be in 1..most."""
    if not 1 <= value <= most:
        raise typer.BadParameter(f"{option} is {value}; it must be in 1..{most}")
    return value


def shapes(
    dtype: str,
    dims: Sequence[tuple[int, int]],
    masks: Sequence[str],
    lengths: tuple[int, int],
    batch: int,
    heads: int,
    heads_k: int,
) -> list[Shape]:
    """The shapes that the options name."""
    if heads % heads_k:
        raise typer.BadParameter(
            f"--heads is {heads}; it must be a multiple of --kv-heads, {heads_k}"
        )
    for d, dv in dims:
        if d % 8 or dv % 8:
            raise typer.BadParameter(
                f"--head-dim has {d}x{dv}; both must be multiples of 8: tuned tiles are for rows of whole 16 bytes"
            )
    return [
        Shape(dtype, d, dv, mask, batch, *lengths, heads, heads_k)
        for d, dv in dims
        for mask in masks
    ]


def command(
    head_dim: Annotated[str, typer.Option(help="D, or DxDV where V's differs: 64,192x128")] = "128",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    mask: Annotated[str, typer.Option(help=", ".join(WINDOWS))] = "full,causal",
    seqlen: Annotated[
        int, typer.Option(help="Keys, and without --queries as many queries.")
    ] = 4096,
    queries: Annotated[int, typer.Option(help="Queries, 1 for decoding; 0: as many as keys.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 4,
    heads: Annotated[int, typer.Option(help="Heads of q.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Heads of k and v.")] = 8,
    tile: Annotated[str, typer.Option(help="Time these alone, as m128x64_w4s2_qreg_b2.")] = "",
    keep: Annotated[
        bool, typer.Option("--keep/--dry-run", help="Keep the winners, or only time.")
    ] = True,
    report: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    drawing: Annotated[
        Path | None,
        typer.Option("--plot", help=f"Draw the tiles' speeds here ({', '.join(PLOTS)})."),
    ] = None,
) -> None:
    """Find this GPU's fastest tiles for a shape; later calls use them (RTFLASH_TUNED=0: they do not).

    Minutes for each head_dim and mask. Exits 1 if a tile computes something wrong, 2 if nothing can be measured.
    """
    kind = one_of(dtype, "--dtype", DTYPES)
    keys = whole(seqlen, "--seqlen", LONGEST)
    lengths = whole(queries or keys, "--queries", LONGEST), keys
    sizes = (
        whole(batch, "--batch", MOST),
        whole(heads, "--heads", MOST),
        whole(kv_heads, "--kv-heads", MOST),
    )
    masks = list(dict.fromkeys(items(mask, "--mask", list(WINDOWS))))
    wanted = shapes(kind, list(dict.fromkeys(head_dims(head_dim))), masks, lengths, *sizes)
    try:
        given = [trial.parse_tile(x) for x in (items(tile, "--tile") if tile else [])]
    except ValueError as error:
        raise typer.BadParameter(f"--tile: {error}") from None
    check_apart({"--json": report, "--plot": drawing})
    check_file(report, "--json")
    check_plot(drawing)
    reason = bench.why_not()
    if reason is not None:
        console.print(f"[yellow]Nothing to measure:[/] {escape(reason)}")
        raise typer.Exit(2)
    gpu, done = device.get(0), []
    for shape in wanted:
        try:
            now, rows, best = tune(shape, gpu, given)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        show(shape, rows, best)
        done += rows
        if keep:
            store(shape, now, rows, best, gpu)
    if report is not None:
        chart.save(done, report)
    if drawing is not None:
        try_drawing(lambda: plot(done, drawing))
    if any(row.get("dropped") == trial.WRONG for row in done):
        raise typer.Exit(1)


def store(shape: Shape, now: Serving, rows: Sequence[Row], best: Tile | None, gpu: Device) -> None:
    """Keep the winner in place of an earlier one; without a winner the earlier one goes."""
    key = tuned.Key(
        gpu.name, gpu.arch, now.table, shape.dtype, shape.head_dim, shape.head_dim_v, now.mask
    )
    figures: dict[str, object] = {}
    if best is not None:
        times = {row["tile"]: row["us"] for row in rows if "us" in row}
        label, present = trial.label(best), trial.label(now.tile)
        figures = {"shape": shape.said(), "us": times[label], "us_before": times[present]}
    try:
        path = tuned.store([(key, best, figures)])
    except OSError as error:
        console.print(f"[red]not kept:[/] {escape(str(error))}")
        raise typer.Exit(2) from None
    if best is not None:
        console.print(escape(f"kept in {path}"), soft_wrap=True)
