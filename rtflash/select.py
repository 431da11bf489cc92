"""(Problem, Device) -> (Spec, Grid): which tile a call runs with. The tile tables stand here and nowhere else."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

from .device import Device
from .problem import Problem
from .spec import ALIGNMENTS, ELEMENT_BYTES, Spec

KIB = 1024
# A scale that is not a normal positive fp32 number, even times log2(e), is applied before the masks: -inf * 0 is NaN.
LEAST_SCALE = 2.0**-125
WIDEST_LOAD = max(ALIGNMENTS)
MAX_BLOCKS = 2**31 - 1  # CUDA's limit of gridDim.x


class Tile(NamedTuple):
    """The fields of a Spec that the table chooses."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    q_in_regs: bool = False
    blocks_per_sm: int = 1


class Row(NamedTuple):
    """The tiles of head_dims up to `max_head_dim`.

    `narrow` is for variants that need more registers, where `tile` leaves too few: scores are prescaled, a window masks
    them, or loads are short.
    """

    max_head_dim: int
    tile: Tile
    narrow: Tile | None = None


class Grid(NamedTuple):
    """A launch: CTAs, threads and dynamic shared bytes of each; (batch, head) pairs of a section (block.cuh)."""

    blocks: int
    threads: int
    shared_bytes: int
    section: int


# By the least shared memory that a CTA can have: sm_90, 100, 103 | sm_80, 87 | sm_86, 89, 120 | sm_75.
# Chosen by measurement on an H200 with tools/tune.py (docs/benchmarks/tiles_h200.json); for the smaller limits with
# shared memory padded, so that as many CTAs share an SM as there would, and for sm_75 with its instructions.
TILES: dict[int, tuple[Row, ...]] = {
    227 * KIB: (
        Row(32, Tile(128, 64, 4, 2, blocks_per_sm=3)),
        Row(64, Tile(128, 64, 4, 2, q_in_regs=True, blocks_per_sm=2)),
        Row(96, Tile(128, 64, 4, 2, blocks_per_sm=2)),
        Row(128, Tile(128, 64, 4, 2, blocks_per_sm=2), Tile(128, 48, 4, 2, blocks_per_sm=2)),
        Row(160, Tile(64, 64, 4, 2, q_in_regs=True, blocks_per_sm=2)),
        Row(192, Tile(64, 64, 4, 1, q_in_regs=True, blocks_per_sm=2)),
        Row(224, Tile(128, 64, 8, 1, q_in_regs=True), Tile(64, 64, 4, 1, blocks_per_sm=2)),
        Row(256, Tile(128, 128, 8, 1), Tile(128, 96, 8, 1)),
    ),
    163 * KIB: (
        Row(32, Tile(128, 64, 4, 2, blocks_per_sm=3)),
        Row(64, Tile(128, 64, 4, 2, q_in_regs=True, blocks_per_sm=2)),
        Row(96, Tile(128, 64, 4, 2, blocks_per_sm=2)),
        Row(128, Tile(128, 64, 4, 1, blocks_per_sm=2), Tile(128, 48, 4, 1, blocks_per_sm=2)),
        Row(160, Tile(64, 64, 4, 1, q_in_regs=True, blocks_per_sm=2)),
        Row(192, Tile(64, 64, 4, 1, q_in_regs=True, blocks_per_sm=2)),
        Row(224, Tile(128, 64, 8, 1, q_in_regs=True), Tile(128, 64, 8, 1)),
        Row(256, Tile(64, 48, 4, 1, q_in_regs=True, blocks_per_sm=2), Tile(128, 64, 8, 1)),
    ),
    99 * KIB: (
        Row(32, Tile(128, 64, 4, 2, blocks_per_sm=3)),
        Row(64, Tile(128, 64, 4, 2, q_in_regs=True, blocks_per_sm=2)),
        Row(96, Tile(128, 64, 4, 1, blocks_per_sm=2)),
        Row(128, Tile(128, 32, 4, 1, blocks_per_sm=2)),
        Row(160, Tile(128, 64, 8, 1, q_in_regs=True)),
        Row(192, Tile(128, 64, 8, 1, q_in_regs=True), Tile(128, 64, 8, 1)),
        Row(224, Tile(128, 48, 8, 1, q_in_regs=True), Tile(128, 48, 8, 1)),
        Row(256, Tile(64, 64, 4, 1)),
    ),
    64 * KIB: (
        Row(32, Tile(128, 64, 4, 1, blocks_per_sm=2)),
        Row(64, Tile(128, 64, 4, 1, blocks_per_sm=2)),
        Row(128, Tile(128, 64, 8, 1)),
        Row(192, Tile(64, 48, 4, 1, q_in_regs=True), Tile(64, 48, 4, 1)),
        Row(256, Tile(64, 32, 4, 1)),
    ),
}


def tile(head_dim: int, device: Device, narrow: bool = False) -> Tile:
    """The table's tile for the wider of a call's two head_dims; `narrow`: see Row.

    Raises
    ------
    ValueError
        The device has less shared memory than any table.
    """
    for limit, table in TILES.items():
        if device.shared_bytes_per_block >= limit:
            row = next(row for row in table if head_dim <= row.max_head_dim)
            return row.narrow or row.tile if narrow else row.tile
    raise ValueError(
        f"{device.name} gives a CTA {device.shared_bytes_per_block} bytes of shared memory; rtflash needs {min(TILES)}"
    )


def forward(problem: Problem, device: Device) -> tuple[Spec, Grid]:
    """The variant and the grid of a dense forward call.

    Raises
    ------
    ValueError
        The device cannot run the call.
    """
    isa = 80 if device.major >= 8 else 75
    if isa < 80 and problem.dtype == "bf16":
        raise ValueError(
            f"q is bf16 on {device.name} (sm_{device.major}{device.minor}); bf16 needs sm_80, use fp16"
        )
    prescale = problem.softcap > 0 or problem.alibi or problem.softmax_scale < LEAST_SCALE
    narrow = prescale or problem.mask == "window" or problem.align < WIDEST_LOAD
    chosen = tile(max(problem.head_dim, problem.head_dim_v), device, narrow)
    spec = Spec(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        isa=isa,
        mask=problem.mask,
        softcap=problem.softcap > 0,
        alibi=problem.alibi,
        prescale=prescale,
        even_m=problem.seqlen_q % chosen.block_m == 0,
        even_n=problem.seqlen_k % chosen.block_n == 0,
        align=problem.align,
        **chosen._asdict(),
    )
    blocks = -(-problem.seqlen_q // spec.block_m) * problem.batch * problem.heads
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"batch {problem.batch} x heads {problem.heads} x seqlen_q {problem.seqlen_q} makes {blocks} CTAs;"
            f" CUDA launches at most {MAX_BLOCKS}"
        )
    return spec, Grid(blocks, spec.threads, spec.shared_bytes, section(problem, device))


def section(problem: Problem, device: Device) -> int:
    """(batch, query head) pairs whose keys and values fill half of L2; 1 where tiles are equally long.

    (FlashAttention-3's scheduler: 32 of 50 MB.)
    """
    if problem.mask == "full":
        return 1
    pair_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES
    fitting = max(1, device.l2_bytes // 2 // max(1, pair_bytes))
    heads_k = 1 << (fitting.bit_length() - 1)
    pairs = heads_k * (problem.heads // problem.heads_k)
    return max(1, min(pairs, problem.batch * problem.heads))


def variants(spec: Spec) -> list[Spec]:
    """The four variants that lengths choose among: each length even or not."""
    return [
        dataclasses.replace(spec, even_m=even_m, even_n=even_n)
        for even_m, even_n in itertools.product((True, False), repeat=2)
    ]


TABLE_FEATURES: tuple[tuple[str, dict[str, float]], ...] = (
    ("full", {}),
    ("causal", {}),
    ("window", {}),
    *((mask, feature) for mask in ("full", "causal", "window")
      for feature in ({"softcap": 30.0}, {"alibi": 1.0}, {"softcap": 30.0, "alibi": 1.0}, {"scale": -1.0})),
)  # fmt: skip


def table_specs(device: Device) -> list[Spec]:
    """What the table makes on a device: every tile with each mask, dtype and evenness, and with each feature."""
    specs: dict[Spec, None] = {}
    for head_dim in sorted({row.max_head_dim for table in TILES.values() for row in table}):
        for dtype in ("fp16", "bf16") if device.major >= 8 else ("fp16",):
            for mask, features in TABLE_FEATURES:
                window = {"full": (-1, -1), "causal": (-1, 0), "window": (128, 16)}[mask]
                problem = Problem(
                    batch=1,
                    seqlen_q=1,
                    seqlen_k=1,
                    heads=1,
                    heads_k=1,
                    head_dim=head_dim,
                    head_dim_v=head_dim,
                    dtype=dtype,
                    softmax_scale=features.get("scale", 1.0),
                    window_left=window[0],
                    window_right=window[1],
                    softcap=features.get("softcap", 0.0),
                    alibi="alibi" in features,
                    align=16,
                )
                spec, _ = forward(problem, device)
                specs.update(dict.fromkeys([spec] if features else variants(spec)))
    return list(specs)
