"""A roofline of benchmark rows: TFLOP/s over the operations for each byte that must cross HBM at least once.

Those bytes are q, k and v, read once, and o, written once. Between two roofs a kernel can only be as
fast as the lower one (Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import chart
from .bench_inference import ELEMENT_BYTES, HEADS, HEADS_K
from .chart import COLOURS, Row, implementations, kind, length

DRAWN = ("fwd", "decode")
NEEDED = ("fwd",)  # one query has its place on a line, which is no picture
MARKERS = "os^Dv<>pX*"
FAINT = COLOURS["torch-FA2"]
GREY = "#6b6b6b"


class Limits(NamedTuple):
    """What bounds a GPU; None is not known."""

    tflops: float | None
    gbps: float | None


# By the GPU's name: 16-bit products without sparsity (132 SMs * 4096 operations a cycle at 1.83 GHz) and
# the memory's bandwidth, of nvidia.com/en-us/data-center/h200 and /h100 (SXM; products there with sparsity: half).
DATASHEETS = {
    "NVIDIA H200": Limits(989, 4800),
    "NVIDIA H100 80GB HBM3": Limits(989, 3350),
}


class Point(NamedTuple):
    """A row's place: operations a byte, and TFLOP/s of rtflash and of the best of the others."""

    intensity: float
    tflops: float
    others: float | None
    row: Row


def datasheet(rows: Sequence[Row]) -> Limits:
    """The limits of the GPU that the rows name."""
    named = (row["gpu"] for row in rows if row.get("mode") == "machine" and "gpu" in row)
    return DATASHEETS.get(str(next(named, "")), Limits(None, None))


def measured(rows: Sequence[Row]) -> Limits:
    """The matrix product and the copy that `bench` times in the same run as its rows; the first ones count."""
    return Limits(*(next((row[key] for row in rows if key in row), None) for key in chart.LIMITS))


def intensity(row: Row) -> float:
    """Operations for each byte; batch and head_dim cancel."""
    s = row["s"]
    if row["mode"] == "decode":
        return 4 * HEADS * s / (ELEMENT_BYTES * (2 * HEADS_K * s + 2 * HEADS))
    return 4 * s * s / (2 if row["causal"] else 1) / (ELEMENT_BYTES * 4 * s)


def points(rows: Sequence[Row]) -> Iterator[Point]:
    """The rows that have a place: figures of decoding are fractions of the copy, without which they have none."""
    copy = measured(rows).gbps
    for row in rows:
        if row.get("mode") not in DRAWN or not row.get("rtflash"):
            continue
        unit = 1.0
        if row["mode"] == "decode":
            if copy is None:
                continue
            # The fraction counts bytes of K and V alone; 4 operations for each of their elements and query head.
            unit = copy / 1e3 * 4 * HEADS / (2 * HEADS_K * ELEMENT_BYTES)
        names = [name for name in implementations([row]) if name != "rtflash"]
        others = max((row[name] for name in names if row[name]), default=None)
        best = None if others is None else others * unit
        yield Point(intensity(row), row["rtflash"] * unit, best, row)


def plot(rows: Sequence[Row], file: Path) -> None:
    """The roofs with the rows of modes fwd and decode below them, into a .png, .svg or .pdf.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        There is no row of a mode in NEEDED.
    """
    found = list(points(rows))
    forward = [point for point in found if point.row["mode"] in NEEDED]
    if not forward:
        raise ValueError(f"there are no rows of mode {', '.join(NEEDED)} to plot")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(12.5, 5), layout="constrained")
    grid = figure.add_gridspec(1, 2, width_ratios=[1, 1.2])
    whole, near = axes = [figure.add_subplot(part) for part in grid]
    frame(whole, found, 3, 2.5)
    frame(near, forward, 1.4, 1.3)
    places(near, forward)
    limits = datasheet(rows), measured(rows)
    for axis in axes:
        roofs(axis, *limits)
        scatter(axis, found, *((4, 0) if axis is whole else (7, 6)))
        axis.set_xlabel("FLOP for each byte of q, k, v and o")
    whole.set_ylabel("TFLOP/s")
    name_slopes(whole, *limits)
    name_flats(near, *limits)
    if len(forward) < len(found):
        last = max((p for p in found if p.row["mode"] == "decode"), key=lambda p: p.intensity)
        text = f"one query, {HEADS} heads over {HEADS_K}\n(decoding)"
        whole.text(last.intensity * 1.5, last.tflops, text, va="center", fontsize=9)
    (left, right), (low, high) = near.get_xlim(), near.get_ylim()
    whole.indicate_inset((left, low, right - left, high - low), edgecolor=GREY)
    near.set_title("nearer: rtflash right of its tick, the best of the others left", fontsize=10)
    figure.suptitle(f"Roofline, {found[0].row['dtype']}{chart.of_gpu(rows)}")
    handles, names = legend(found)
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def frame(axis: Any, found: Sequence[Point], aside: float, above: float) -> None:
    """Two logarithmic axes around the points, with a free factor on either side of them."""
    xs = [point.intensity for point in found]
    ys = [y for point in found for y in (point.tflops, point.others) if y]
    axis.set(xscale="log", yscale="log", xlim=(min(xs) / aside, max(xs) * aside))
    axis.set_ylim(min(ys) / above, max(ys) * above)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_axisbelow(True)
    axis.grid(axis="y", color="#e8e8e8")


def places(axis: Any, found: Sequence[Point]) -> None:
    """A tick for each intensity, with the lengths and masks that have it."""
    kinds: dict[float, list[str]] = {}
    for point in found:
        name = f"{length(point.row['s'])} {kind(point.row['causal'])}"
        if name not in kinds.setdefault(point.intensity, []):
            kinds[point.intensity].append(name)
    axis.set_xticks([*kinds], ["\n".join([f"{x:g}", *names]) for x, names in kinds.items()])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_minor_formatter(lambda y, _: f"{y:g}")
    axis.grid(axis="y", which="minor", color="#e8e8e8")


def roofs(axis: Any, *limits: Limits) -> None:
    """The datasheet's roof, dashed, and the measured one; either may lack a side."""
    left, right = axis.get_xlim()
    for (tflops, gbps), style in zip(limits, ("--", "-"), strict=True):
        ridge = tflops * 1e3 / gbps if tflops and gbps else None
        if gbps:
            end = ridge or right
            axis.plot([left, end], [left * gbps / 1e3, end * gbps / 1e3], style, color=GREY, lw=1)
        if tflops:
            axis.plot([ridge or left, right], [tflops, tflops], style, color=GREY, lw=1)


def name_slopes(axis: Any, datasheet: Limits, measured: Limits) -> None:
    """The bandwidths along their lines: the datasheet's above it, the copy's below."""
    bottom = axis.get_ylim()[0]
    options = {"rotation_mode": "anchor", "transform_rotates_text": True, "fontsize": 9}
    for (_, gbps), text, side in (
        (datasheet, "memory, datasheet", "bottom"),
        (measured, "copy, measured", "top"),
    ):
        if gbps:
            x, y = 8 * bottom * 1e3 / gbps, 8 * bottom * (1.12 if side == "bottom" else 1 / 1.12)
            angle = math.degrees(math.atan2(y, x))
            label = f"{text}: {gbps / 1e3:.3g} TB/s"
            axis.text(x, y, label, va=side, rotation=angle, color=GREY, **options)


def name_flats(axis: Any, datasheet: Limits, measured: Limits) -> None:
    """The tensor cores' peak and the matrix product above their lines, on the left, where points are low."""
    left = axis.get_xlim()[0] * 1.2
    for (tflops, _), text in (
        (datasheet, "tensor cores, datasheet"),
        (measured, "GEMM of 8192, measured"),
    ):
        if tflops:
            label = f"{text}: {tflops:g} TFLOP/s"
            axis.text(left, tflops, label, va="bottom", fontsize=9, color=GREY)


def markers(found: Sequence[Point]) -> dict[int, str]:
    """A marker for each head_dim."""
    dims = sorted({point.row["d"] for point in found})
    return {d: MARKERS[index % len(MARKERS)] for index, d in enumerate(dims)}


def look(marker: str, colour: str, causal: bool, size: float) -> dict[str, Any]:
    """How a point is drawn: hollow when causal."""
    fill = "white" if causal else colour
    return {"marker": marker, "ms": size, "mec": colour, "mfc": fill, "ls": "", "zorder": 3}


def scatter(axis: Any, found: Sequence[Point], size: float, aside: float) -> None:
    """The points: the others' best below rtflash's, and points (1/72 inch) aside of their place."""
    from matplotlib.transforms import ScaledTranslation

    shapes = markers(found)
    series = (("others", FAINT, -aside), ("tflops", COLOURS["rtflash"], aside))
    for name, colour, shift in series:
        move = ScaledTranslation(shift / 72, 0, axis.figure.dpi_scale_trans)
        for point in found:
            if value := getattr(point, name):
                style = look(shapes[point.row["d"]], colour, point.row["causal"], size)
                axis.plot([point.intensity], [value], transform=axis.transData + move, **style)


def legend(found: Sequence[Point]) -> tuple[list[Any], list[str]]:
    """Handles and names: who, head_dim, mask."""
    from matplotlib.lines import Line2D

    ours = COLOURS["rtflash"]
    styles = {
        "rtflash": look("s", ours, False, 7),
        "best of the others": look("s", FAINT, False, 7),
    }
    styles |= {
        f"head_dim {d}": look(marker, GREY, False, 7) for d, marker in markers(found).items()
    }
    if any(point.row["causal"] for point in found):
        styles["causal"] = look("o", GREY, True, 7)
    return [Line2D([], [], **style) for style in styles.values()], [*styles]
