"""Time candidate tiles on this GPU beside FlashAttention-2: the measurement behind the tables of rtflash/tiles.py.

usage: python tools/tune.py [--head-dim 64,128] [--tile m128x64_w4s2_qreg_b2,...] [--shared 99] [--json FILE]
       python tools/tune.py --rows few [--head-dim 64,128] [--tile m16x128_w4ks2_qreg,...] [--json FILE]

The second form is for the tiles of decoding, `tiles.FEW`: fractions of a copy's bandwidth.

Exit status 1 if a candidate computes something wrong, 2 if nothing can be measured. A head_dim takes about two minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

if not __package__:  # run as a script: rtflash is beside tools/, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rtflash import artifacts, build, device, launch, layouts, nvrtc, select
from rtflash.__main__ import import_tool
from rtflash.describe import dense
from rtflash.device import KIB, Device
from rtflash.problem import Tensors
from rtflash.spec import MAX_HEAD_DIM, Spec
from rtflash.tensor import framework
from rtflash.tiles import Tile

bench, chart, peers, screen = (import_tool(name) for name in ("bench", "chart", "peers", "screen"))
timing, trial, tune_decode = (import_tool(name) for name in ("timing", "trial", "tune_decode"))

Row = dict[str, Any]
MASKS = {"full": False, "causal": True}
SMALLER = {163: "sm_80", 99: "sm_86", 64: "sm_75"}  # KB of shared memory that a CTA can have there
# Options that --rows few has no use for.
MANY_OPTIONS = ("mask", "seqlen", "shared")


def make_call(kernel: build.Kernel, shared: int, gpu: Device, qkv: list[Any]) -> Callable[[], Any]:
    """A function that queues the kernel and returns (out, lse), NaN before. The caller keeps q, k and v."""
    import torch

    spec, tensors = forward_spec(kernel), Tensors(*(framework(x).view(x) for x in qkv))
    problem = dense(*tensors[:3], causal=spec.mask == "causal")
    grid = select.grid(spec, problem, gpu)._replace(shared_bytes=shared)
    out = torch.full_like(qkv[0], math.nan)
    lse = out.new_full((problem.batch, problem.heads, problem.seqlen_q), math.nan).float()
    lengths = problem.seqlen_q, problem.seqlen_k
    head = layouts.forward_head(tensors, out.data_ptr(), lse.data_ptr(), *lengths)
    rest = layouts.forward_scalars(problem, grid, spec, tensors)
    stream = torch.cuda.current_stream().cuda_stream

    def call() -> Any:
        launch.launch(kernel, grid, layouts.FORWARD.head, head, rest, stream, gpu.index)
        return out, lse

    return call


def forward_spec(kernel: build.Kernel) -> Spec:
    """The variant of a forward kernel."""
    assert isinstance(kernel.spec, Spec)
    return kernel.spec


def is_right(kernel: build.Kernel, shared: int, gpu: Device) -> bool:
    """Whether the kernel agrees with float64 on small shapes, among them grouped heads and rows without keys."""
    import torch

    spec = forward_spec(kernel)
    options = {"device": "cuda", "dtype": getattr(torch, peers.TORCH_DTYPES[spec.dtype])}
    rows = 2 * spec.block_m + (0 if spec.even_m else 7)
    for tiles in (1, 11):
        keys = tiles * spec.block_n - (0 if spec.even_n else 7)
        q = torch.randn(2, rows, 4, spec.head_dim, **options)
        k, v = (torch.randn(2, keys, 2, spec.head_dim, **options) for _ in range(2))
        out, lse = make_call(kernel, shared, gpu, [q, k, v])()
        wide_k, wide_v = (x.double().repeat_interleave(2, 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), wide_k) * spec.head_dim**-0.5
        if spec.mask == "causal":
            hidden = torch.ones(rows, keys, device="cuda", dtype=torch.bool).triu(keys - rows + 1)
            scores.masked_fill_(hidden, -math.inf)
        weights = scores.softmax(-1).nan_to_num()  # a row without keys is 0
        expected = torch.einsum("bhqk,bkhd->bqhd", weights, wide_v)
        bound = 2 * torch.finfo(q.dtype).eps * (1 + expected.abs())
        same_lse = torch.isclose(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-3)
        if not ((out.double() - expected).abs() <= bound).all() or not same_lse.all():
            return False
    return True


def load(
    made: artifacts.Artifact | str, chip: Device, gpu: Device
) -> tuple[build.Kernel, int] | str:
    """The kernel, checked, and its shared bytes as padded; or why it is no candidate."""
    if isinstance(made, str):
        return made
    kernel, shared = build.load(made, gpu), trial.padded_bytes(made.spec.shared_bytes, chip, gpu)
    kernel.raw.max_dynamic_shared_size_bytes = shared
    return (kernel, shared) if is_right(kernel, shared, gpu) else trial.WRONG


def measure(
    d: int,
    tiles: list[Tile],
    masks: list[str],
    seqlens: list[int],
    dtype: str,
    chip: Device,
    gpu: Device,
) -> Iterator[Row]:
    """A row per mask, length and tile of head_dim d, the table's first; "dropped" stands in place of figures."""
    import torch

    points = [(MASKS[name], s, tile) for name in masks for s in seqlens for tile in tiles]
    specs = [trial.make_spec(tile, d, chip, dtype, causal, s) for causal, s, tile in points]
    # A table's tile serves all lengths, so its variant for odd ones must be usable, too.
    odd = [dataclasses.replace(spec, even_m=False, even_n=False) for spec in specs]
    compiled = trial.compile_all([*specs, *odd], chip, nvrtc.target_arch(gpu))
    loaded = {spec: load(made, chip, gpu) for spec, made in compiled.items()}
    shape: tuple[bool, int] | None = None
    for (causal, s, tile), spec, odd_spec in zip(points, specs, odd, strict=True):
        b, h = max(1, bench.TOKENS // s), max(1, bench.WIDTH // d)
        if shape != (causal, s):
            shape = causal, s
            options = {"device": "cuda", "dtype": getattr(torch, peers.TORCH_DTYPES[dtype])}
            qkv = [torch.randn(b, s, h, d, **options) for _ in range(3)]
            fa2 = peers.make_peers(["fa2"], *qkv, causal, {})
        row: Row = {"d": d, "causal": causal, "s": s, "tile": trial.label(tile)}
        found = loaded[odd_spec] if isinstance(loaded[odd_spec], str) else loaded[spec]
        if isinstance(found, str):
            yield row | {"dropped": found}
            continue
        kernel, shared = found
        times = timing.medians([peers.Peer("tile", make_call(kernel, shared, gpu, qkv)), *fa2])
        rate = {n: 4 * b * h * s * s * d / (1 + causal) / ms / 1e9 for n, ms in times.items()}
        yield row | {
            "padded_kb": shared // KIB if shared > spec.shared_bytes else None,
            "tflops": round(rate["tile"], 1),
            "fa2": round(rate["torch-FA2"], 1) if fa2 else None,
            "registers": kernel.resources.registers,
            "shared_kb": spec.shared_bytes // KIB,
            "present": tile == tiles[0],
        }


def show_few(rows: list[Row]) -> None:
    """A table per head_dim and shape, the fastest tile first; then what was dropped."""
    keys = ("of copy", "us", "cuDNN", "torch-FA2", "registers", "shared_kb")
    for (d, b, s), group in itertools.groupby(rows, lambda row: (row["d"], row["b"], row["s"])):
        screen.console.print(f"\nd {d}, one query, batch {b}, {s} keys", style="bold")
        print_tiles(sorted(group, key=lambda row: -row.get("of copy", 0)), keys)


def print_tiles(rows: list[Row], keys: tuple[str, ...]) -> None:
    """Rows in their order, a column per key."""
    table = screen.frameless("tile", *keys, "", right=keys)
    for row in rows:
        if "dropped" in row:
            table.add_row(row["tile"], *[""] * len(keys), row["dropped"], style="dim")
            continue
        texts = ["" if row.get(key) is None else str(row[key]) for key in keys]
        table.add_row(row["tile"], *texts, "in the table" if row["present"] else "")
    screen.console.print(table)


def show(rows: list[Row]) -> None:
    """A table per head_dim, mask and length, the fastest tile first; then what was dropped."""
    keys = ("tflops", "fa2", "of fa2", "registers", "shared_kb", "padded_kb")
    for (d, causal, s), group in itertools.groupby(
        rows, lambda row: (row["d"], row["causal"], row["s"])
    ):
        screen.console.print(f"\nd {d}, {'causal' if causal else 'full'}, seqlen {s}", style="bold")
        ordered = sorted(group, key=lambda row: -row.get("tflops", 0))
        ratios = [
            row | ({"of fa2": f"{row['tflops'] / row['fa2']:.3f}"} if row.get("fa2") else {})
            for row in ordered
        ]
        print_tiles(ratios, keys)


def command(
    context: typer.Context,
    head_dim: Annotated[str, typer.Option()] = "32,64,96,128,160,192,224,256",
    mask: Annotated[str, typer.Option(help=", ".join(MASKS))] = "full,causal",
    seqlen: Annotated[str, typer.Option()] = "1024,4096,16384",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    rows: Annotated[str, typer.Option(help="Of queries: many, or few for decoding.")] = "many",
    tile: Annotated[str, typer.Option(help="Only these and the table's, with commas.")] = "",
    shared: Annotated[int, typer.Option(help="KB of a smaller GPU: 163, 99 or 64.")] = 0,
    report: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Time tiles here. With --shared, padding lets as many CTAs share an SM as on the smaller GPU."""
    dims = screen.numbers(head_dim, "--head-dim", MAX_HEAD_DIM)
    seqlens = screen.numbers(seqlen, "--seqlen", bench.LONGEST)
    masks = screen.items(mask, "--mask", list(MASKS))
    screen.one_of(dtype, "--dtype", peers.TORCH_DTYPES)
    screen.one_of(rows, "--rows", trial.TABLES)
    few = rows == "few"
    if few and (found := screen.given(context, MANY_OPTIONS)):
        raise typer.BadParameter(f"--rows few does not go with {', '.join(found)}")
    try:
        given = [trial.parse_tile(x) for x in (screen.items(tile, "--tile") if tile else [])]
    except ValueError as error:
        raise typer.BadParameter(f"--tile: {error}") from None
    if any((x.key_warps > 1) != few for x in given):
        raise typer.BadParameter(
            "--tile: with --rows few each must be one whose warps split the keys (w4k), else none"
        )
    if shared and shared not in SMALLER:
        raise typer.BadParameter(
            f"--shared is {shared}; it must be one of {', '.join(map(str, SMALLER))}"
        )
    screen.check_file(report, "--json")
    reason = bench.why_not()
    if reason is not None:
        screen.console.print(f"Nothing to measure: {reason}", markup=False)
        raise typer.Exit(2)
    gpu = device.get(0)
    chip = device.for_arch(SMALLER[shared]) if shared else gpu
    if chip.shared_bytes_per_block > gpu.shared_bytes_per_block:
        raise typer.BadParameter(f"--shared is {shared}; it must be less than {gpu.name} has")
    done: list[Row] = []
    try:
        for d in dims:
            tiles = trial.candidates(d, chip, rows)
            if given:
                tiles = list(dict.fromkeys([tiles[0], *given]))
            if few:
                found_rows = list(tune_decode.measure(d, tiles, dtype, gpu))
            else:
                found_rows = list(measure(d, tiles, masks, seqlens, dtype, chip, gpu))
            (show_few if few else show)(found_rows)
            done += found_rows
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if report is not None:
        machine = next(bench.machine()) | {"mode": "tiles", "dtype": dtype, "shared": shared}
        chart.save([machine, *done], report)
    if any(row.get("dropped") == trial.WRONG for row in done):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(command)
