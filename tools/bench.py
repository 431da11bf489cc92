"""rtflash beside its peers on one GPU, in one run: forward, decoding, packed sequences, host overhead.

Rows are flat dicts, one per measured point, with a column per implementation; chart.TITLES says what
the figures of a mode are. Operations are those of the two matrix products, half when causal.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.live import Live
from rich.markup import escape
from rich.text import Text

import rtflash
from rtflash import device
from rtflash.spec import MAX_HEAD_DIM

from . import bench_inference, chart
from .chart import SHAPE_KEYS, Row
from .peers import PEERS, TORCH_DTYPES, Peer, cpu_peers, make_peers
from .roofline import DRAWN as ROOFED
from .roofline import NEEDED as ROOFS_NEED
from .roofline import plot as plot_roofline
from .screen import (
    PLOTS,
    check_apart,
    check_file,
    check_plot,
    console,
    given,
    items,
    numbers,
    try_drawing,
)
from .timing import ROUNDS, medians, turn

MODES = ("fwd", "decode", "varlen", "host")

# Every forward point has the same tokens and model width, as the FlashAttention papers plot it.
TOKENS, WIDTH = 16384, 2048
HOST_CALLS = 200
# At the largest head_dim, a call on the GPU then holds 16 GB, one on the CPU 2 GB.
LONGEST, LONGEST_CPU = 2**20, 2**16
# Options that --cpu would ignore, those that --from would, and those that only some modes heed.
GPU_OPTIONS = ("mode", "peer", "dtype", "plot", "roofline")
MEASURING_OPTIONS = ("mode", "peer", "head_dim", "seqlen", "dtype", "on_cpu")
MODE_OPTIONS = {"head_dim": ("fwd",), "seqlen": ("fwd",), "dtype": ("fwd", "decode", "varlen")}


def why_not() -> str | None:
    """None if the GPU benchmark can run, else why not."""
    reason = device.why_no_gpu()
    if reason is not None:
        return reason
    try:
        import torch
    except ImportError:
        return "The GPU benchmark needs torch, for its timers and its attention: pip install torch."
    return None if torch.cuda.is_available() else "This torch is a build without CUDA."


def machine() -> Iterator[Row]:
    """What the figures were measured on, and a matrix product as the yardstick."""
    import torch

    yield {
        "mode": "machine",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rtflash": rtflash.__version__,
    }
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    milliseconds = medians([Peer("gemm", lambda: a @ b)])["gemm"]
    yield {"gemm bf16 TFLOP/s": round(2 * 8192**3 / milliseconds / 1e9)}


def forward(
    names: Sequence[str],
    dims: Sequence[int],
    seqlens: Sequence[int],
    dtypes: Sequence[str],
    skipped: dict[str, str],
) -> Iterator[Row]:
    """A row of TFLOP/s per dtype, head_dim, mask and length."""
    import torch

    torch.manual_seed(0)
    for dtype, d, causal, s in itertools.product(dtypes, dims, (False, True), seqlens):
        b, h = max(1, TOKENS // s), max(1, WIDTH // d)
        options = {"device": "cuda", "dtype": getattr(torch, TORCH_DTYPES[dtype])}
        q, k, v = (torch.randn(b, s, h, d, **options) for _ in range(3))
        times = medians(make_peers(names, q, k, v, causal, skipped))
        flops = 4 * b * h * s * s * d / (2 if causal else 1)
        shape = dict(zip(SHAPE_KEYS, ("fwd", TORCH_DTYPES[dtype], d, causal, s, b, h), strict=True))
        yield shape | {name: round(flops / ms / 1e9) for name, ms in times.items()}


def host(names: Sequence[str], skipped: dict[str, str]) -> Iterator[Row]:
    """A row: microseconds that a small call costs its thread: a median over rounds of HOST_CALLS each.

    torch's attention is called plainly, without the context manager that chooses its backend.
    """
    import torch

    plain = ["sdpa", *(name for name in names if name not in ("sdpa", "fa2", "cudnn"))]
    q, k, v = (torch.randn(1, 64, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    peers = make_peers(plain, q, k, v, False, skipped)
    times: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for _, peer in itertools.product(range(ROUNDS), peers):
        turn(peer, 20)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            peer.call()
        times[peer.name].append((time.perf_counter() - start) / HOST_CALLS * 1e6)
        torch.cuda.synchronize()
    yield {"mode": "host us/call"} | {n: round(statistics.median(t), 1) for n, t in times.items()}


def cpu(dims: Sequence[int], seqlens: Sequence[int], skipped: dict[str, str]) -> Iterator[Row]:
    """A row of milliseconds per head_dim, mask and length, for 8 fp16 heads on the CPU."""
    rng = np.random.default_rng(0)
    for d, causal, s in itertools.product(dims, (False, True), seqlens):
        q, k, v = rng.standard_normal((3, 1, s, 8, d), np.float32).astype(np.float16)
        peers = cpu_peers(q, k, v, causal, skipped)
        times: dict[str, list[float]] = {peer.name: [] for peer in peers}
        for _, peer in itertools.product(range(ROUNDS + 1), peers):
            start = time.perf_counter()
            peer.call()
            times[peer.name].append((time.perf_counter() - start) * 1e3)
        shape = dict(zip(SHAPE_KEYS, ("cpu ms/call", "float16", d, causal, s, 1, 8), strict=True))
        yield shape | {name: round(statistics.median(t[1:]), 2) for name, t in times.items()}


def command(
    context: typer.Context,
    mode: Annotated[str, typer.Option(help=", ".join(MODES))] = "fwd,host",
    peer: Annotated[str, typer.Option(help=", ".join(PEERS))] = "rtflash,fa2,cudnn,fa3,fa4",
    head_dim: Annotated[
        str, typer.Option(help="Of mode fwd and --cpu; 64,128,256 if not given.")
    ] = "",
    seqlen: Annotated[
        str, typer.Option(help="Likewise; 1024,4096,16384, with --cpu 256,1024.")
    ] = "",
    dtype: Annotated[str, typer.Option(help=", ".join(TORCH_DTYPES))] = "bf16",
    on_cpu: Annotated[bool, typer.Option("--cpu", help="Time the NumPy backend instead.")] = False,
    report: Annotated[
        Path | None, typer.Option("--json", help="Write the rows here, for --from.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help=f"Draw rows of mode {', '.join(chart.DRAWN)} here ({', '.join(PLOTS)}); not with --cpu."
        ),
    ] = None,
    roofline: Annotated[
        Path | None,
        typer.Option(
            help=f"Draw those of {', '.join(ROOFED)} below the GPU's limits here; not with --cpu."
        ),
    ] = None,
    saved: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Show the rows of a --json file instead; may be repeated."),
    ] = None,
) -> None:
    """rtflash beside the attention libraries that import here, in one run on one GPU."""
    dims = numbers(head_dim or "64,128,256", "--head-dim", MAX_HEAD_DIM)
    usual, longest = ("256,1024", LONGEST_CPU) if on_cpu else ("1024,4096,16384", LONGEST)
    seqlens = numbers(seqlen or usual, "--seqlen", longest)
    names, dtypes = items(peer, "--peer", list(PEERS)), items(dtype, "--dtype", list(TORCH_DTYPES))
    modes = items(mode, "--mode", MODES)
    torch_dtypes = [TORCH_DTYPES[name] for name in dtypes]
    if saved and (found := given(context, MEASURING_OPTIONS)):
        raise typer.BadParameter(
            f"--from shows what was measured, and does not go with {', '.join(found)}"
        )
    if on_cpu and (found := given(context, GPU_OPTIONS)):
        raise typer.BadParameter(
            "--cpu times the NumPy backend alone, on fp16 tensors (it computes in fp32 whatever the dtype), and does"
            f" not go with {', '.join(found)}"
        )
    for name, users in MODE_OPTIONS.items():
        if not on_cpu and not {*modes} & {*users} and (found := given(context, [name])):
            raise typer.BadParameter(
                f"{found[0]} is of mode {', '.join(users)}; --mode is {', '.join(modes)}"
            )
    check_apart({"--json": report, "--plot": plot, "--roofline": roofline})
    check_file(report, "--json")
    for option, image, needed in (
        ("--plot", plot, chart.DRAWN),
        ("--roofline", roofline, ROOFS_NEED),
    ):
        if image is not None and not saved and not {*modes} & {*needed}:
            raise typer.BadParameter(
                f"{option} needs rows of mode {' or '.join(needed)}; --mode is {', '.join(modes)}"
            )
        check_plot(image, option)
    skipped: dict[str, str] = {}
    if saved:
        try:
            rows = [row for file in saved for row in chart.load(file)]
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"--from: {error}") from None
        show(rows)
    elif on_cpu:
        rows = collected(cpu(dims, seqlens, skipped), figures=False)
        show(rows)
    else:
        reason = why_not()
        if reason is not None:
            console.print(f"[yellow]Nothing to measure:[/] {escape(reason)}")
            console.print("--cpu times the NumPy backend, --from FILE shows saved rows.")
            raise typer.Exit(2)
        rows = collected(machine())
        show(rows)
        measured = {
            "fwd": forward(names, dims, seqlens, dtypes, skipped),
            "decode": bench_inference.decode(names, torch_dtypes, skipped),
            "varlen": bench_inference.varlen(names, torch_dtypes, skipped),
            "host": host(names, skipped),
        }
        for wanted in [mode for mode in MODES if mode in modes]:
            fresh = collected(measured[wanted])
            show(fresh)
            rows += fresh
    for name, reason in skipped.items():
        console.print(f"[yellow]skipped[/] {name}: {escape(reason)}")
    write(rows, report, plot, roofline)


def collected(rows: Iterator[Row], figures: bool = True) -> list[Row]:
    """The rows; a terminal shows the newest one while the next is measured, without a thread that would disturb it.

    Elsewhere each goes to stderr as it comes: a log has them if the run is cut off. Without `figures`, of a short run,
    only what was measured.
    """
    kept = []
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for row in rows:
            live.update(Text(chart.line(row)), refresh=True)
            if not console.is_terminal:
                shown = row if figures else {key: row[key] for key in SHAPE_KEYS}
                print(chart.line(shown), file=sys.stderr, flush=True)
            kept.append(row)
    return kept


def show(rows: Sequence[Row]) -> None:
    """The rows in their tables; before these, those that belong in none: what was measured on, limits of the run."""
    for row in rows:
        if row.get("mode") not in chart.TITLES:
            console.print(escape(chart.line(row)), style="dim", soft_wrap=True)
    for table in chart.tables(rows):
        console.print(table, "")


def write(
    rows: Sequence[Row], report: Path | None, plot: Path | None, roofline: Path | None
) -> None:
    """The rows as JSON, as a plot and as a roofline, where asked for."""
    if report is not None:
        chart.save(rows, report)
    for draw, image in ((chart.plot, plot), (plot_roofline, roofline)):
        if image is not None and not try_drawing(partial(draw, rows, image)):
            raise typer.Exit(1)
