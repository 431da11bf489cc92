"""Candidate tiles: which there are, their labels, their variants, and compiling these."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from rtflash import artifacts, select, tuned
from rtflash.device import KIB, Device
from rtflash.hopper import SM90_SHARED_BYTES
from rtflash.spec import ALIGNMENTS, ELEMENT_BYTES, WARP_SIZE, Spec, padded_head_dim
from rtflash.tiles import Tile

WRONG = "wrong result"
TILE = re.compile(r"m(\d+)x(\d+)_w(\d+)(k?)s(\d+)(_qreg)?(?:_b(\d+))?")
TABLES = {"many": select.TILES, "few": select.FEW}
# block_m, block_n, warps, stages, q_in_regs of candidates for a table.
SIZES = {
    "many": ((64, 128), (32, 64, 96, 128), (4, 8), (1, 2), (False, True)),
    "few": ((16,), (32, 64, 128, 256), (2, 4, 8), (1, 2, 3, 4), (False, True)),
    "some": ((32, 64, 128), (32, 64, 96, 128), (2, 4, 8), (1, 2), (False, True)),
}
# block_m, block_n, warps, stages of candidates for Hopper's own kernel.
HOPPER_SIZES = [
    (16 * warps, block_n, warps, stages)
    for warps, block_n, stages in itertools.product((8, 12), range(64, 192, 16), (2, 3))
]
# Registers that a thread of two and of three warpgroups that multiply can claim: see templates/forward_sm90.cu.
HOPPER_REGISTERS = {8: 232, 12: 160}
# Of these, what it needs beside its parts of O and S: the most with which the tables' tiles pass.
HOPPER_OTHER_REGISTERS = 28
# Registers of an SM and of a thread, on every architecture so far.
SM_REGISTERS, MAX_REGISTERS = 64 * KIB, 255
# Registers of a thread beside its parts of O, S and Q: the least with which a tile did not spill, measured on sm_90a.
OTHER_REGISTERS = 39


def label(tile: Tile) -> str:
    """The tile as --tile takes it."""
    flags = "_qreg" * tile.q_in_regs + f"_b{tile.blocks_per_sm}" * (tile.blocks_per_sm > 1)
    keys = "k" if tile.key_warps > 1 else ""
    return f"m{tile.block_m}x{tile.block_n}_w{tile.warps}{keys}s{tile.stages}{flags}"


def parse_tile(text: str) -> Tile:
    """The tile of that label; ValueError for anything else."""
    match = TILE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no tile; one looks like m128x64_w4s2_qreg_b2, or m16x128_w4ks2 where warps split the keys"
        )
    m, n, warps, stages = (int(number) for number in match.group(1, 2, 3, 5))
    key_warps = warps if match[4] else 1
    return Tile(m, n, warps, stages, match[6] is not None, int(match[7] or 1), key_warps)


def make_spec(
    tile: Tile, head_dim: int, chip: Device, dtype: str, causal: bool, seqlen: int
) -> Spec:
    """The tile's variant for contiguous tensors with `seqlen` queries and keys, or with one query."""
    few = tile.key_warps > 1
    return Spec(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim,
        isa=80 if chip.major >= 8 else 75,
        mask="causal" if causal else "full",
        even_m=not few and seqlen % tile.block_m == 0,
        even_n=not few and seqlen % tile.block_n == 0,
        align=next(a for a in ALIGNMENTS if head_dim * ELEMENT_BYTES % a == 0),
        pack_gqa=few,
        **tile._asdict(),
    )


def residents(shared_bytes: int, chip: Device) -> int:
    """CTAs that fit an SM's shared memory, of which sm_80 and newer keep 1 KB for each (CUDA programming guide)."""
    reserved = KIB if chip.major >= 8 else 0
    return (chip.shared_bytes_per_block + reserved) // max(1, shared_bytes + reserved)


def padded_bytes(shared_bytes: int, chip: Device, gpu: Device) -> int:
    """The least dynamic shared memory with which no more CTAs share an SM of `gpu` than of `chip`."""
    padded = shared_bytes
    while residents(padded, gpu) > residents(shared_bytes, chip):
        padded = (padded // KIB + 1) * KIB
    return padded


def candidates(
    head_dim: int, chip: Device, rows: str = "many", head_dim_v: int | None = None
) -> list[Tile]:
    """The table's tile, then all that fit the chip's shared memory and, by estimate, its registers.

    Of values of blocks_per_sm that allow a thread as many registers, only the greatest is worth a try. `rows`: one of
    tuned.NAMES.
    """
    dims = head_dim, head_dim if head_dim_v is None else head_dim_v
    present = select.tile(*dims, chip, tuned.NAMES[rows])
    if rows == "hopper":
        return list(dict.fromkeys([present, *hopper_candidates(*dims)]))
    found: dict[tuple[object, ...], Tile] = {}
    for size, blocks in itertools.product(itertools.product(*SIZES[rows]), (1, 2, 3)):
        tile = Tile(*size, blocks, size[2] if rows == "few" else 1)
        try:
            spec = make_spec(tile, max(dims), chip, "fp16", False, 1)
        except ValueError:
            continue
        # Of a warp's rows: O and Q (two values in a register) are padded_head_dim wide, S as its part of block_n.
        width = padded_head_dim(max(dims)) * (1.5 if tile.q_in_regs else 1.0)
        width += tile.block_n / tile.key_warps
        needed = tile.block_m * width / (spec.row_warps * WARP_SIZE) + OTHER_REGISTERS
        limit = min(MAX_REGISTERS, SM_REGISTERS // (spec.threads * blocks))
        if needed <= limit and residents(spec.shared_bytes, chip) >= blocks:
            found[(*size, limit)] = tile
    return list(dict.fromkeys([present, *found.values()]))


def hopper_candidates(head_dim: int, head_dim_v: int) -> list[Tile]:
    """Tiles of Hopper's own kernel that fit its shared memory and, by estimate, its registers."""
    found = []
    for size in HOPPER_SIZES:
        tile = Tile(*size)
        spec = tuned.spec_of("hopper", 9, "bf16", head_dim, head_dim_v, "full", tile)
        # A warpgroup's 64 rows: O, S, and S again as 16-bit operands.
        needed = padded_head_dim(head_dim_v) / 2 + tile.block_n * 0.75 + HOPPER_OTHER_REGISTERS
        if needed <= HOPPER_REGISTERS[tile.warps] and spec.shared_bytes <= SM90_SHARED_BYTES:
            found.append(tile)
    return found


def compile_all(
    specs: Iterable[Spec], chip: Device, arch: str
) -> dict[Spec, artifacts.Artifact | str]:
    """Each variant compiled, on all cores; or why it is no candidate."""

    def make(spec: Spec) -> artifacts.Artifact | str:
        if spec.shared_bytes > chip.shared_bytes_per_block:
            return "too much shared memory"
        try:
            made = artifacts.compile(spec, arch)
        except artifacts.CompileError as error:
            return f"does not compile, see {error.path}"
        return "spills" if made.resources.spill_stores or made.resources.spill_loads else made

    wanted = list(dict.fromkeys(specs))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(wanted, pool.map(make, wanted), strict=True))
