"""The tile tables: which tile suits a head_dim and a device. They stand here and nowhere else."""

from __future__ import annotations

from typing import NamedTuple

from .device import KIB, Device
from .spec import MAX_HEAD_DIM


class Tile(NamedTuple):
    """The fields of a Spec that the table chooses."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    q_in_regs: bool = False
    blocks_per_sm: int = 1
    key_warps: int = 1


class Row(NamedTuple):
    """The tiles of head_dims up to `max_head_dim`, those of v up to `max_head_dim_v`.

    `narrow` is for variants that need more registers, where `tile` leaves too few: scores are prescaled, a window masks
    them, or loads are short. `prescaled` is for prescaled scores that are not narrow otherwise; without it they take
    `narrow`.
    """

    max_head_dim: int
    tile: Tile
    narrow: Tile | None = None
    prescaled: Tile | None = None
    max_head_dim_v: int = MAX_HEAD_DIM


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
# For at most so many rows (query positions times heads of a group): warps split the keys, each with a ring of its own.
FEW_ROWS = 16
FEW: dict[int, tuple[Row, ...]] = {
    227 * KIB: (
        Row(64, Tile(16, 128, 4, 4, True, 1, key_warps=4)),
        Row(128, Tile(16, 128, 4, 2, True, 1, key_warps=4)),
        Row(192, Tile(16, 64, 4, 4, True, 1, key_warps=4)),
        Row(256, Tile(16, 64, 4, 3, False, 1, key_warps=4)),
    ),
    163 * KIB: (
        Row(64, Tile(16, 128, 4, 2, True, 2, key_warps=4)),
        Row(128, Tile(16, 64, 4, 2, True, 2, key_warps=4)),
        Row(192, Tile(16, 64, 4, 3, True, 1, key_warps=4)),
        Row(256, Tile(16, 64, 4, 2, False, 1, key_warps=4)),
    ),
    99 * KIB: (
        Row(64, Tile(16, 64, 4, 2, True, 2, key_warps=4)),
        Row(128, Tile(16, 64, 4, 2, True, 1, key_warps=4)),
        Row(192, Tile(16, 32, 2, 3, True, 1, key_warps=2)),
        Row(256, Tile(16, 32, 2, 2, False, 1, key_warps=2)),
    ),
    64 * KIB: (
        Row(128, Tile(16, 64, 4, 1, True, 1, key_warps=4)),
        Row(256, Tile(16, 32, 2, 1, False, 1, key_warps=2)),
    ),
}
# For more rows that fill few tiles, and wherever keys are split or paged.
SOME_ROWS = 64
SOME: dict[int, tuple[Row, ...]] = {
    227 * KIB: (
        Row(64, Tile(64, 64, 4, 2, blocks_per_sm=2)),
        Row(128, Tile(64, 64, 4, 2, blocks_per_sm=2)),
        Row(192, Tile(64, 64, 4, 1, blocks_per_sm=2)),
        Row(256, Tile(64, 64, 4, 1, blocks_per_sm=2)),
    ),
    163 * KIB: (
        Row(64, Tile(64, 64, 4, 2, blocks_per_sm=2)),
        Row(128, Tile(64, 64, 4, 1, blocks_per_sm=2)),
        Row(192, Tile(64, 64, 4, 1, blocks_per_sm=2)),
        Row(256, Tile(64, 48, 4, 1, blocks_per_sm=2)),
    ),
    99 * KIB: (
        Row(64, Tile(64, 64, 4, 2, blocks_per_sm=2)),
        Row(128, Tile(64, 64, 4, 1, blocks_per_sm=2)),
        Row(256, Tile(64, 64, 4, 1)),
    ),
    64 * KIB: (
        Row(128, Tile(64, 64, 4, 1)),
        Row(192, Tile(64, 48, 4, 1)),
        Row(256, Tile(64, 32, 4, 1)),
    ),
}
# For sm_90's own kernel: block_m is 16 rows a warp, three or two warpgroups. `narrow`: rows are packed (the thread that
# loads has few registers) or copied one by one, or scores are prescaled. Chosen by measurement (docs/hopper.md).
HOPPER: dict[int, tuple[Row, ...]] = {
    227 * KIB: (
        Row(64, Tile(192, 128, 12, 2), Tile(128, 128, 8, 2), Tile(192, 96, 12, 2)),
        Row(96, Tile(192, 112, 12, 3), Tile(128, 128, 8, 2)),
        Row(128, Tile(192, 80, 12, 3), Tile(128, 128, 8, 2)),
        Row(192, Tile(192, 80, 12, 3), Tile(128, 96, 8, 2), max_head_dim_v=128),
        Row(192, Tile(128, 112, 8, 2), Tile(128, 96, 8, 2)),
        Row(256, Tile(128, 80, 8, 2), Tile(128, 64, 8, 2), Tile(128, 80, 8, 2)),
    ),
}
Table = dict[int, tuple[Row, ...]]


def tile(
    head_dim: int,
    head_dim_v: int,
    device: Device,
    table: Table = TILES,
    *,
    narrow: bool = False,
    prescaled: bool = False,
) -> Tile:
    """The table's tile for a call's head_dims; `narrow`, `prescaled`: see Row.

    Raises
    ------
    ValueError
        The device has less shared memory than any table.
    """
    widest = max(head_dim, head_dim_v)
    for limit, rows in table.items():
        if device.shared_bytes_per_block >= limit:
            row = next(
                row
                for row in rows
                if widest <= row.max_head_dim and head_dim_v <= row.max_head_dim_v
            )
            if prescaled and not narrow and row.prescaled:
                return row.prescaled
            return ((narrow or prescaled) and row.narrow) or row.tile
    raise ValueError(
        f"{device.name} gives a CTA {device.shared_bytes_per_block} bytes of shared memory; rtflash needs {min(table)}"
    )
