"""(Problem, Device) -> (Spec, Grid): which variant a call runs with, and over how many CTAs."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from . import settings, tuned
from .device import Device
from .other_specs import AppendSpec, CombineSpec
from .problem import Combine, Problem
from .spec import ALIGNMENTS, ELEMENT_BYTES, MAX_SPLITS, Spec
from .tiles import FEW, FEW_ROWS, HOPPER, SOME, SOME_ROWS, TILES, Table, Tile, tile

# A scale that is not a normal positive fp32 number, even times log2(e), is applied before the masks: -inf * 0 is NaN.
LEAST_SCALE = 2.0**-125
# So is one from here on. Left to the exponential, the rounding of maximum * scale stays in the exponent, 2^-24 of the
# score: past about 2^28 that makes probabilities too great for fp16, past 2^31 for fp32. (Of this scale q.k may be
# 2^12.)
GREAT_SCALE = 2.0**16
WIDEST_LOAD = max(ALIGNMENTS)
BOX_UNIT = 8  # rows of a box of TMA's: of one swizzle pattern
# Up to this head_dim, copies element by element are more than a warpgroup can do (H200: 0.7 of the other kernel at 33,
# 1.5 at 129). By pages they take more registers than it has.
NARROW = 64
MAX_BLOCKS = 2**31 - 1  # CUDA's limit of gridDim.x
# A grid that fills so much of the GPU is not split, and neither does a split pay that leaves a part fewer keys than
# this. (FlashAttention-2's num_splits_heuristic; its 0.85 for NEARLY_BEST measured 7 % slower, H200, batch 1.)
FULL_ENOUGH = 0.8
NEARLY_BEST = 0.95
LEAST_KEYS = 256
# Sequences of unknown lengths get so many waves of CTAs that a long one does not end alone, as long as a part keeps so
# many keys (H200: batch 16 of random lengths 5 % faster, 8 times 32k 18 %; equal lengths cost up to 7 %).
RAGGED_WAVES = 4
RAGGED_KEYS = 2048
# Tiles of packed rows are smaller, and slower where as many of their rows are filled.
PACKED_SPEED = 0.75
SOME_SPEED = 0.4  # of SOME's tiles beside HOPPER's, both full (H200: 0.35 to 0.6, pages included)


class Grid(NamedTuple):
    """A launch: CTAs, threads and dynamic shared bytes of each.

    Attributes
    ----------
    section : (batch, head) pairs of a section of the tile order, see block.cuh.
    splits : of the keys.
    draws : whether the CTAs draw their tiles from a counter, see sm90/tiles.cuh.
    """

    blocks: int
    threads: int
    shared_bytes: int
    section: int = 1
    splits: int = 1
    draws: bool = False


def is_hopper(device: Device) -> bool:
    """Whether the device has the instructions of sm_90a, and the shared memory that HOPPER counts on."""
    return (device.major, device.minor) == (9, 0) and device.shared_bytes_per_block >= min(HOPPER)


def why_not_hopper(problem: Problem, device: Device) -> str | None:
    """None where the kernel for Hopper serves calls with many queries, else the reason as one sentence."""
    if not is_hopper(device):
        return f"{device.name} is no Hopper: it has no wgmma."
    if problem.align < 4 and (
        problem.page_size or max(problem.head_dim, problem.head_dim_v) <= NARROW
    ):
        return "One warpgroup is too few to copy pages or short rows element by element."
    if -(-problem.seqlen_q // 64) * problem.batch * problem.heads > MAX_BLOCKS // 4:
        return "Its tiles are numbered in 32 bits, which these are too many for."
    return None


def why_not_tma(problem: Problem) -> str | None:
    """None where TMA can read q, k and v, else the reason as one sentence: rows are copied one by one then."""
    if problem.page_size % BOX_UNIT:
        return f"TMA copies pages by whole {BOX_UNIT} slots."
    if problem.page_size and problem.leftpad:
        return "TMA copies pages from their first slot on, wherever a sequence begins."
    if problem.align < WIDEST_LOAD or not problem.boxes:
        return "TMA copies only from addresses and by strides in whole 16 bytes above 0, and no empty tensor."
    return None


def forward(problem: Problem, device: Device) -> tuple[Spec, Grid]:
    """The variant and the grid of a forward call.

    With num_splits 1 neither depends on the batch, and so no bit of the result does; of packed sequences it does where
    their total or max_seqlen_q differs.

    Raises
    ------
    ValueError
        The device cannot run the call.
    """
    if device.major < 8 and problem.dtype == "bf16":
        raise ValueError(
            f"q is bf16 on {device.name} (sm_{device.major}{device.minor}); bf16 needs sm_80, use fp16"
        )
    table = table_of(problem, device)
    spec = variant(problem, device, table)
    if spec.gather:
        settings.logger().info("copied row by row, not by TMA: %s", why_not_tma(problem))
    splits = 1 if table is TILES else split_count(problem, spec, device)
    if splits > 1:
        spec = as_split(spec)
    return spec, grid(spec, problem, device, splits)


def variant(problem: Problem, device: Device, table: Table) -> Spec:
    """The variant, unsplit, that a table has for a call."""
    p = problem
    prescale = p.softcap > 0 or p.alibi or not LEAST_SCALE <= p.softmax_scale < GREAT_SCALE
    dims = p.head_dim, p.head_dim_v
    gather = False
    if table is HOPPER:
        pack = can_pack(p, tile(*dims, device, table, narrow=True))
        gather = why_not_tma(p) is not None
        narrow = pack or gather
    else:
        pack = table is not TILES
        narrow = p.mask == "window" or p.align < WIDEST_LOAD
    isa = 90 if table is HOPPER else 80 if device.major >= 8 else 75
    # Lengths that a device array may say, or of packed rows, are taken as uneven; isa 90 gains nothing by even ones.
    even = isa != 90 and not (pack or p.ragged or p.cache_batch or p.page_size)
    # What a single query sees ends with the last key under any right bound.
    mask = "full" if pack and p.seqlen_q == 1 and p.window_left < 0 else p.mask
    chosen = None
    if not prescale and p.align == WIDEST_LOAD and not (table is HOPPER and (pack or gather)):
        chosen = tuned.tile(table, device, p.dtype, *dims, mask)
    if chosen is None:
        chosen = tile(*dims, device, table, narrow=narrow, prescaled=prescale)
    even_m = even and p.seqlen_q % chosen.block_m == 0
    even_n = even and p.seqlen_k % chosen.block_n == 0
    return make_spec(
        p.dtype, p.head_dim, p.head_dim_v, chosen, isa, mask,
        p.softcap > 0, p.alibi, prescale, even_m, even_n, p.align, pack, p.ragged, p.page_size > 0, p.rotary,
        gather,
    )  # fmt: skip


def can_pack(problem: Problem, tile: Tile) -> bool:
    """Whether tiles that one head does not fill hold the same positions of all heads of a group."""
    group = problem.heads // problem.heads_k
    return group > 1 and problem.seqlen_q < tile.block_m and tile.block_m % group == 0


@functools.lru_cache(4096)
def make_spec(
    dtype: str, head_dim: int, head_dim_v: int, tile: Tile, isa: int, mask: str, softcap: bool, alibi: bool,
    prescale: bool, even_m: bool, even_n: bool, align: int, pack_gqa: bool, ragged: bool, paged: bool, rotary: str,
    gather: bool,
) -> Spec:  # fmt: skip
    """A Spec by its fields, made once: it takes longer to make than to find."""
    return Spec(
        dtype, head_dim, head_dim_v, *tile[:4], isa=isa, q_in_regs=tile.q_in_regs,
        blocks_per_sm=tile.blocks_per_sm, key_warps=tile.key_warps, mask=mask, softcap=softcap, alibi=alibi,
        prescale=prescale, even_m=even_m, even_n=even_n, align=align, pack_gqa=pack_gqa, ragged=ragged,
        paged=paged, rotary=rotary, gather=gather,
    )  # fmt: skip


def grid(spec: Spec, problem: Problem, device: Device, splits: int = 1) -> Grid:
    """The grid of a variant for a call.

    Raises
    ------
    ValueError
        It would have more CTAs than CUDA launches, or more tiles or rows than the kernels can count.
    """
    blocks = query_tiles(spec, problem) * splits
    made = f"batch {problem.batch} x heads {problem.heads} x seqlen_q {problem.seqlen_q}"
    made += f" x {splits} splits" if splits > 1 else ""
    if spec.isa < 90 and blocks > MAX_BLOCKS:
        raise ValueError(f"{made} makes {blocks} CTAs; CUDA launches at most {MAX_BLOCKS}")
    # Its CTAs stay; each counts past the last tile, by a draw of its own that finds none.
    most_tiles = MAX_BLOCKS - device.sm_count
    if spec.isa == 90 and blocks > most_tiles:
        raise ValueError(
            f"{made} makes {blocks} tiles; Hopper's kernel counts at most {most_tiles}, in 32 bits"
        )
    group = problem.heads // problem.heads_k if spec.pack_gqa else 1
    if problem.seqlen_q * group > MAX_BLOCKS:
        raise ValueError(
            f"seqlen_q {problem.seqlen_q} x {group} heads of q per head of k make {problem.seqlen_q * group} rows;"
            f" the kernels count at most {MAX_BLOCKS}"
        )
    pairs = section(problem, device, spec.isa)
    if spec.pack_gqa:
        pairs = max(1, pairs // (problem.heads // problem.heads_k))
    most = device.sm_count if spec.isa == 90 else blocks
    return Grid(
        min(blocks, most), spec.threads, spec.shared_bytes, pairs, splits, draws=blocks > most
    )


def query_tiles(spec: Spec, problem: Problem) -> int:
    """Tiles of query rows of all heads and sequences, the longest that one can be."""
    rows, heads = problem.seqlen_q, problem.heads
    if spec.pack_gqa:
        rows, heads = rows * (heads // problem.heads_k), problem.heads_k
    return -(-rows // spec.block_m) * problem.batch * heads


@functools.lru_cache(4096)
def as_split(spec: Spec) -> Spec:
    """The variant that writes partial results."""
    return dataclasses.replace(spec, split=True, even_m=False, even_n=False)


def table_of(problem: Problem, device: Device) -> Table:
    """The table whose tiles suit a call."""
    rows = problem.seqlen_q * (problem.heads // problem.heads_k)
    if rows <= FEW_ROWS:
        return FEW
    if rows <= SOME_ROWS:
        return SOME
    packed = variant(problem, device, SOME)
    reason = why_not_hopper(problem, device)
    if reason is None:
        # A group that fills no tile of Hopper's leaves most of it empty, and reads keys once a head.
        main = variant(problem, device, HOPPER)
        better = filled(problem.seqlen_q, main) < SOME_SPEED * filled(rows, packed)
        alone = problem.seqlen_q < main.block_m and not main.pack_gqa
        return SOME if alone and problem.heads > problem.heads_k and better else HOPPER
    if is_hopper(device):
        settings.logger().info("not the kernel for Hopper: %s", reason)
    if problem.page_size or problem.rotary != "none":
        return SOME
    main = variant(problem, device, TILES)
    better = filled(problem.seqlen_q, main) < PACKED_SPEED * filled(rows, packed)
    if problem.seqlen_q < main.block_m and better:
        return SOME
    if problem.num_splits != 1 and split_count(problem, packed, device) > 1:
        full = is_full(query_tiles(main, problem), device, 1)
        return SOME if problem.num_splits or not full else TILES
    return TILES


def filled(rows: int, spec: Spec) -> float:
    """The part of a grid's tile rows that rows fill."""
    return rows / (-(-rows // spec.block_m) * spec.block_m)


def is_full(blocks: int, device: Device, blocks_per_sm: int) -> bool:
    """Whether so many CTAs keep the GPU busy."""
    return blocks >= FULL_ENOUGH * device.sm_count * blocks_per_sm


def split_count(problem: Problem, spec: Spec, device: Device) -> int:
    """How many parts the keys are split into: what the caller says, or else a heuristic of shapes and capacities.

    FlashAttention-2's: the fewest parts whose last wave of CTAs leaves the GPU nearly as full as the best number does.
    """
    if problem.num_splits:
        return problem.num_splits
    tiles = query_tiles(spec, problem)
    slots = device.sm_count * spec.blocks_per_sm
    keys = problem.seqlen_k
    if problem.window_left >= 0:
        right = problem.window_right if problem.window_right >= 0 else keys
        keys = min(keys, problem.window_left + problem.seqlen_q + right)
    most = min(MAX_SPLITS, slots, keys // max(LEAST_KEYS, spec.block_n))
    if tiles == 0 or most <= 1:
        return 1
    ragged = 1
    if problem.ragged and problem.batch > 1:
        ragged = max(1, min(MAX_SPLITS, RAGGED_WAVES * slots // tiles, keys // RAGGED_KEYS))
    if is_full(tiles, device, spec.blocks_per_sm):
        return ragged
    return max(ragged, fewest_full(tiles, slots, most))


@functools.lru_cache(4096)
def fewest_full(tiles: int, slots: int, most: int) -> int:
    """The fewest splits, at most `most`, whose last wave is nearly as full as the best number's."""
    waves = [tiles * splits / slots for splits in range(1, most + 1)]
    fullness = [n / math.ceil(n) for n in waves]
    return 1 + next(i for i, n in enumerate(fullness) if n >= NEARLY_BEST * max(fullness))


def combine(call: Combine, aligned: bool) -> tuple[CombineSpec, Grid]:
    """The variant and the grid that merge partial results; `aligned`: rows of fp32 start at multiples of 16 bytes.

    Raises
    ------
    ValueError
        It would have more CTAs than CUDA launches.
    """
    vector = 4 if aligned and call.partial == "fp32" and call.head_dim_v % 4 == 0 else 1
    spec = CombineSpec(call.dtype, call.partial, vector)
    blocks = math.prod(call.rows) * call.heads
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"{math.prod(call.rows)} rows x {call.heads} heads are too many; at most {MAX_BLOCKS} can be merged"
        )
    return spec, Grid(blocks, spec.threads, spec.shared_bytes)


def splits_combine(problem: Problem, splits: int) -> Combine:
    """The merge after a split forward: its partial results have the shape of the output."""
    return Combine(
        splits, problem.out_shape[:-2], problem.heads, problem.head_dim_v, "fp32", problem.dtype
    )


def append(problem: Problem) -> tuple[AppendSpec, Grid]:
    """The variant and the grid that write new keys and values into a cache.

    Raises
    ------
    ValueError
        It would have more CTAs than CUDA launches.
    """
    spec = AppendSpec(problem.dtype, problem.rotary)
    blocks = problem.batch * problem.seqlen_new * problem.heads_k
    if blocks > MAX_BLOCKS:
        raise ValueError(
            f"batch {problem.batch} x {problem.seqlen_new} new keys x {problem.heads_k} heads of k are too many;"
            f" at most {MAX_BLOCKS} can be appended"
        )
    return spec, Grid(blocks, spec.threads, spec.shared_bytes)


def section(problem: Problem, device: Device, isa: int) -> int:
    """(batch, query head) pairs of a section of the tile order; 1 where tiles are equally long.

    The most, by a power of two of key heads, whose keys and values fit L2 in Hopper's kernel (on an H200 0 to 3 %
    faster than half of it) and half of L2 in the other. Three key heads were up to 9 % slower than two or four.
    """
    if problem.mask == "full":
        return 1
    pair_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ELEMENT_BYTES
    room = device.l2_bytes // (1 if isa == 90 else 2)
    fitting = max(1, room // max(1, pair_bytes))
    heads_k = 1 << (fitting.bit_length() - 1)
    pairs = heads_k * (problem.heads // problem.heads_k)
    return max(1, min(pairs, problem.batch * problem.heads))
