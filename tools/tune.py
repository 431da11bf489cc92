"""Time candidate tiles on this GPU beside FlashAttention-2: the measurement behind the tables of rtflash/select.py.

usage: python tools/tune.py [--head-dim 64,128] [--tile m128x64_w4s2_qreg_b2,...] [--shared 99] [--json FILE]

Exit status 1 if a candidate computes something wrong, 2 if nothing can be measured. A head_dim takes about two minutes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

if not __package__:  # run as a script: rtflash is beside tools/, installed or not
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rtflash import build, device, launch, select
from rtflash.__main__ import import_tool
from rtflash.device import KIB, Device
from rtflash.problem import dense
from rtflash.select import Grid, Tile
from rtflash.spec import ALIGNMENTS, ELEMENT_BYTES, MAX_HEAD_DIM, Spec, padded_head_dim
from rtflash.tensor import framework

bench, chart, peers, screen = (import_tool(name) for name in ("bench", "chart", "peers", "screen"))

Row = dict[str, Any]
MASKS = {"full": False, "causal": True}
WRONG = "wrong result"
SMALLER = {163: "sm_80", 99: "sm_86", 64: "sm_75"}  # KB of shared memory that a CTA can have there
TILE = re.compile(r"m(\d+)x(\d+)_w(\d+)s(\d+)(_qreg)?(?:_b(\d+))?")
# Registers of an SM and of a thread, on every architecture so far.
SM_REGISTERS, MAX_REGISTERS = 64 * KIB, 255
# Registers of a thread beside its parts of O, S and Q: the least with which a tile did not spill, measured on sm_90a.
OTHER_REGISTERS = 39


def label(tile: Tile) -> str:
    """The tile as --tile takes it."""
    flags = "_qreg" * tile.q_in_regs + f"_b{tile.blocks_per_sm}" * (tile.blocks_per_sm > 1)
    return f"m{tile.block_m}x{tile.block_n}_w{tile.warps}s{tile.stages}{flags}"


def parse_tile(text: str) -> Tile:
    """The tile of that label; ValueError for anything else."""
    match = TILE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no tile; one looks like m128x64_w4s2_qreg_b2")
    m, n, warps, stages = (int(number) for number in match.group(1, 2, 3, 4))
    return Tile(m, n, warps, stages, match[5] is not None, int(match[6] or 1))


def make_spec(
    tile: Tile, head_dim: int, chip: Device, dtype: str, causal: bool, seqlen: int
) -> Spec:
    """The tile's variant for contiguous tensors with `seqlen` queries and keys."""
    return Spec(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        isa=80 if chip.major >= 8 else 75,
        mask="causal" if causal else "full",
        even_m=seqlen % tile.block_m == 0,
        even_n=seqlen % tile.block_n == 0,
        align=next(a for a in ALIGNMENTS if head_dim * ELEMENT_BYTES % a == 0),
        **tile._asdict(),
    )


def residents(shared_bytes: int, chip: Device) -> int:
    """CTAs that fit an SM's shared memory, of which sm_80 and newer keep 1 KB for each (CUDA programming guide)."""
    reserved = KIB if chip.major >= 8 else 0
    return (chip.shared_bytes_per_block + reserved) // (shared_bytes + reserved)


def padded_bytes(shared_bytes: int, chip: Device, gpu: Device) -> int:
    """The least dynamic shared memory with which no more CTAs share an SM of `gpu` than of `chip`."""
    padded = shared_bytes
    while residents(padded, gpu) > residents(shared_bytes, chip):
        padded = (padded // KIB + 1) * KIB
    return padded


def candidates(head_dim: int, chip: Device) -> list[Tile]:
    """The table's tile, then all that fit the chip's shared memory and, by estimate, its registers.

    Of values of blocks_per_sm that allow a thread as many registers, only the greatest is worth a try.
    """
    present = select.tile(head_dim, chip)
    found: dict[tuple[object, ...], Tile] = {}
    sizes = itertools.product((64, 128), (32, 64, 96, 128), (4, 8), (1, 2), (False, True))
    for size, blocks in itertools.product(sizes, (1, 2, 3)):
        tile = Tile(*size, blocks)
        try:
            spec = make_spec(tile, head_dim, chip, "fp16", False, 1)
        except ValueError:
            continue
        # Of a thread: O and Q (two values in a register) are padded_head_dim wide, S is block_n wide.
        width = padded_head_dim(head_dim) * (1.5 if tile.q_in_regs else 1.0) + tile.block_n
        needed = tile.block_m * width / spec.threads + OTHER_REGISTERS
        limit = min(MAX_REGISTERS, SM_REGISTERS // (spec.threads * blocks))
        if needed <= limit and residents(spec.shared_bytes, chip) >= blocks:
            found[(*size, limit)] = tile
    return list(dict.fromkeys([present, *found.values()]))


def make_call(kernel: build.Kernel, shared: int, gpu: Device, qkv: list[Any]) -> Callable[[], Any]:
    """A function that queues the kernel and returns (out, lse), NaN before. The caller keeps q, k and v."""
    import torch

    q, k, v = (framework(x).view(x) for x in qkv)
    problem = dense(q, k, v, causal=kernel.spec.mask == "causal")
    blocks = -(-problem.seqlen_q // kernel.spec.block_m) * problem.batch * problem.heads
    grid = Grid(blocks, kernel.spec.threads, shared, select.section(problem, gpu))
    out = torch.full_like(qkv[0], math.nan)
    lse = out.new_full((problem.batch, problem.heads, problem.seqlen_q), math.nan).float()
    pointers = (q.ptr, k.ptr, v.ptr, out.data_ptr(), lse.data_ptr(), 0)
    packed = launch.scalars(problem, grid, q, k, v, None)
    stream = torch.cuda.current_stream().cuda_stream

    def call() -> Any:
        launch.launch(kernel, grid, pointers, packed, stream, gpu.index)
        return out, lse

    return call


def is_right(kernel: build.Kernel, shared: int, gpu: Device) -> bool:
    """Whether the kernel agrees with float64 on small shapes, among them grouped heads and rows without keys."""
    import torch

    spec = kernel.spec
    options = {"device": "cuda", "dtype": getattr(torch, bench.DTYPES[spec.dtype])}
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


def compile_all(specs: Iterable[Spec], chip: Device, arch: str) -> dict[Spec, build.Artifact | str]:
    """Each variant compiled, on all cores; or why it is no candidate."""

    def make(spec: Spec) -> build.Artifact | str:
        if spec.shared_bytes > chip.shared_bytes_per_block:
            return "too much shared memory"
        try:
            made = build.compile(spec, arch)
        except build.CompileError as error:
            return f"does not compile, see {error.path}"
        return "spills" if made.resources.spill_stores or made.resources.spill_loads else made

    wanted = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(wanted, pool.map(make, wanted), strict=True))


def load(made: build.Artifact | str, chip: Device, gpu: Device) -> tuple[build.Kernel, int] | str:
    """The kernel, checked, and its shared bytes as padded; or why it is no candidate."""
    if isinstance(made, str):
        return made
    kernel, shared = build.load(made, gpu), padded_bytes(made.spec.shared_bytes, chip, gpu)
    kernel.raw.max_dynamic_shared_size_bytes = shared
    return (kernel, shared) if is_right(kernel, shared, gpu) else WRONG


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
    specs = [make_spec(tile, d, chip, dtype, causal, s) for causal, s, tile in points]
    # A table's tile serves all lengths, so its variant for odd ones must be usable, too.
    odd = [dataclasses.replace(spec, even_m=False, even_n=False) for spec in specs]
    compiled = compile_all([*specs, *odd], chip, build.target_arch(gpu))
    loaded = {spec: load(made, chip, gpu) for spec, made in compiled.items()}
    shape: tuple[bool, int] | None = None
    for (causal, s, tile), spec, odd_spec in zip(points, specs, odd, strict=True):
        b, h = max(1, bench.TOKENS // s), max(1, bench.WIDTH // d)
        if shape != (causal, s):
            shape = causal, s
            options = {"device": "cuda", "dtype": getattr(torch, bench.DTYPES[dtype])}
            qkv = [torch.randn(b, s, h, d, **options) for _ in range(3)]
            fa2 = peers.make_peers(["fa2"], *qkv, causal, {})
        row: Row = {"d": d, "causal": causal, "s": s, "tile": label(tile)}
        found = loaded[odd_spec] if isinstance(loaded[odd_spec], str) else loaded[spec]
        if isinstance(found, str):
            yield row | {"dropped": found}
            continue
        kernel, shared = found
        times = bench.medians([peers.Peer("tile", make_call(kernel, shared, gpu, qkv)), *fa2])
        rate = {n: 4 * b * h * s * s * d / (1 + causal) / ms / 1e9 for n, ms in times.items()}
        yield row | {
            "padded_kb": shared // KIB if shared > spec.shared_bytes else None,
            "tflops": round(rate["tile"], 1),
            "fa2": round(rate["torch-FA2"], 1) if fa2 else None,
            "registers": kernel.resources.registers,
            "shared_kb": spec.shared_bytes // KIB,
            "present": tile == tiles[0],
        }


def show(rows: list[Row]) -> None:
    """A table per head_dim, mask and length, the fastest tile first; then what was dropped."""
    keys = ("tflops", "fa2", "of fa2", "registers", "shared_kb", "padded_kb")
    for (d, causal, s), group in itertools.groupby(
        rows, lambda row: (row["d"], row["causal"], row["s"])
    ):
        table = screen.frameless("tile", *keys, "", right=keys)
        screen.console.print(f"\nd {d}, {'causal' if causal else 'full'}, seqlen {s}", style="bold")
        for row in sorted(group, key=lambda row: -row.get("tflops", 0)):
            if "dropped" in row:
                table.add_row(row["tile"], *[""] * len(keys), row["dropped"], style="dim")
                continue
            cells = row | {"of fa2": f"{row['tflops'] / row['fa2']:.3f}" if row["fa2"] else None}
            texts = ["" if cells[key] is None else str(cells[key]) for key in keys]
            table.add_row(row["tile"], *texts, "in the table" if row["present"] else "")
        screen.console.print(table)


def command(
    head_dim: Annotated[str, typer.Option()] = "32,64,96,128,160,192,224,256",
    mask: Annotated[str, typer.Option(help=", ".join(MASKS))] = "full,causal",
    seqlen: Annotated[str, typer.Option()] = "1024,4096,16384",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    tile: Annotated[str, typer.Option(help="Only these and the table's, with commas.")] = "",
    shared: Annotated[int, typer.Option(help="KB of a smaller GPU: 163, 99 or 64.")] = 0,
    report: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Time tiles here. With --shared, padding lets as many CTAs share an SM as on the smaller GPU."""
    dims = screen.numbers(head_dim, "--head-dim", MAX_HEAD_DIM)
    seqlens = screen.numbers(seqlen, "--seqlen", bench.LONGEST)
    masks = screen.items(mask, "--mask", list(MASKS))
    if dtype not in bench.DTYPES:
        raise typer.BadParameter(f"--dtype is {dtype!r}; it must be bf16 or fp16")
    try:
        given = [parse_tile(x) for x in (screen.items(tile, "--tile") if tile else [])]
    except ValueError as error:
        raise typer.BadParameter(f"--tile: {error}") from None
    if shared and shared not in SMALLER:
        raise typer.BadParameter(f"--shared is {shared}; it must be one of {list(SMALLER)}")
    reason = bench.why_not()
    if reason is not None:
        screen.console.print(f"Nothing to measure: {reason}", markup=False)
        raise typer.Exit(2)
    gpu = device.get(0)
    chip = device.for_arch(SMALLER[shared]) if shared else gpu
    if chip.shared_bytes_per_block > gpu.shared_bytes_per_block:
        raise typer.BadParameter(f"--shared is {shared}, more than {gpu.name} has")
    rows: list[Row] = []
    try:
        for d in dims:
            tiles = candidates(d, chip)
            if given:
                tiles = list(dict.fromkeys([tiles[0], *given]))
            done = list(measure(d, tiles, masks, seqlens, dtype, chip, gpu))
            show(done)
            rows += done
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if report is not None:
        machine = next(bench.machine()) | {"mode": "tiles", "dtype": dtype, "shared": shared}
        chart.save([machine, *rows], report)
    if any(row.get("dropped") == WRONG for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(command)
