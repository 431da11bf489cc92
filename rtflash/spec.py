"""Spec: one kernel variant. A field is here only if it changes the generated code.

Lengths, batch and head counts, strides, scale and window sizes are data (`Params` of params.cuh); of the lengths only
whether they divide the tile (`even_m`, `even_n`) is known to the code.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

from . import hopper

DTYPES = ("fp16", "bf16")
MASKS = ("full", "causal", "window")
ISAS = (75, 80, 90)
ROTARIES = ("none", "interleaved", "halves")
ALIGNMENTS = (16, 8, 4, 2)
MAX_HEAD_DIM = 256
ELEMENT_BYTES = 2
WARP_SIZE = 32
MMA_M = 16
WARPGROUP = 4  # warps
MAX_SPLITS = 256


def padded_head_dim(head_dim: int) -> int:
    """Columns of a shared-memory row: whole slabs of 64 elements (128 bytes), or of 32 where 64 would waste half."""
    return -(-head_dim // 32) * 32


def slab_columns(head_dim: int) -> int:
    """Columns of a slab."""
    return 64 if padded_head_dim(head_dim) % 64 == 0 else 32


def field_texts(spec: Any) -> dict[str, str]:
    """Every field of a Spec as C++ text."""

    def text(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return {f.name: text(getattr(spec, f.name)) for f in dataclasses.fields(spec)}


class AnySpec(Protocol):
    """What building and launching need of a variant: Spec, CombineSpec or AppendSpec."""

    @property
    def name(self) -> str: ...
    @property
    def kernel_file(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    def variables(self) -> dict[str, str]: ...
    def to_dict(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Spec:
    """A forward kernel, down to its tiles.

    Attributes
    ----------
    dtype : "fp16" or "bf16", of q, k, v and the output.
    head_dim, head_dim_v : true sizes (1..256), padded inside the kernel.
    block_m, block_n : query rows and key rows of a tile.
    warps : warps of a CTA; each owns block_m / warps query rows, or all rows and a part of the keys: see key_warps.
    stages : shared-memory buffers of K and of V (1: two barriers a tile; 2: one barrier a tile; with key_warps > 1:
        tiles of a warp's own ring).
    isa : 75 = synchronous copies and mma.m16n8k8 (fp16 only); 80 = cp.async and mma.m16n8k16; 90 = TMA and wgmma, with
        a warpgroup more than `warps` that loads.
    q_in_regs : Q's fragments stay in registers instead of being read from shared memory for every tile.
    blocks_per_sm : resident CTAs that the register allocation must leave room for.
    mask : "full", "causal" (bottom-right) or "window" (two run-time bounds).
    softcap, alibi : score terms.
    prescale : scores are scaled before the maximum is taken (a scale <= 0, or a great one, needs it; softcap and alibi
        imply it).
    even_m, even_n : the lengths are multiples of block_m, block_n; not told to isa 90, which gains nothing by it.
    align : bytes of the widest global load that q, k and v allow.
    key_warps : 1, or all the warps: they share the query rows and split the keys of a tile, each with its own ring.
    pack_gqa : the query heads of a key head are rows of one tile: row = position * group + head in the group.
    split : the keys of a tile of rows are split over CTAs, which write fp32 partial results for CombineSpec's kernel.
    ragged : lengths and places of the sequences are read from device arrays (varlen, seqused, a cache).
    paged : keys and values are pages, found by a block table.
    rotary : "none", or the pairs of columns in which q is rotated as it is loaded: "interleaved" (2i, 2i + 1), "halves"
        (i, i + rotary_dim / 2).
    gather : with isa 90, q, k and v are copied row by row, by cp.async or narrower, where TMA cannot read them.
    """

    dtype: str
    head_dim: int
    head_dim_v: int
    block_m: int
    block_n: int
    warps: int
    stages: int
    isa: int = 80
    q_in_regs: bool = False
    blocks_per_sm: int = 1
    mask: str = "full"
    softcap: bool = False
    alibi: bool = False
    prescale: bool = False
    even_m: bool = False
    even_n: bool = False
    align: int = 16
    key_warps: int = 1
    pack_gqa: bool = False
    split: bool = False
    ragged: bool = False
    paged: bool = False
    rotary: str = "none"
    gather: bool = False

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, wanted: str) -> None:
            if not ok:
                raise ValueError(f"Spec.{field} is {getattr(self, field)!r}; it must be {wanted}")

        require(self.dtype in DTYPES, "dtype", f"one of {DTYPES}")
        require(self.isa in ISAS, "isa", f"one of {ISAS}")
        require(
            self.isa >= 80 or self.dtype == "fp16", "dtype", "fp16 for isa 75 (bf16 needs sm_80)"
        )
        require(1 <= self.head_dim <= MAX_HEAD_DIM, "head_dim", f"in 1..{MAX_HEAD_DIM}")
        require(1 <= self.head_dim_v <= MAX_HEAD_DIM, "head_dim_v", f"in 1..{MAX_HEAD_DIM}")
        if self.isa == 90:
            require(self.warps in (4, 8, 12), "warps", "4, 8 or 12 for isa 90: whole warpgroups")
            require(self.block_m == self.warps * MMA_M, "block_m", f"{MMA_M} rows a warp")
            require(self.block_n <= 256, "block_n", "at most 256: wgmma's widest")
            require(
                not self.q_in_regs,
                "q_in_regs",
                "False for isa 90: wgmma reads Q from shared memory",
            )
            require(self.key_warps == 1, "key_warps", "1 for isa 90")
            require(self.blocks_per_sm == 1, "blocks_per_sm", "1 for isa 90")
            require(self.align == 16 or self.gather, "align", "16: TMA copies no less")
            require(not self.gather or self.warps == 8, "warps", "8 with gather")
        else:
            require(not self.gather, "gather", "False but for isa 90, where TMA is the rule")
            require(self.warps in (2, 4, 8, 16), "warps", "2, 4, 8 or 16")
        require(self.key_warps in (1, self.warps), "key_warps", f"1 or {self.warps}")
        require(
            self.block_m >= MMA_M and self.block_m % (self.row_warps * MMA_M) == 0,
            "block_m",
            f"a multiple of {MMA_M} rows for each of {self.row_warps} warps",
        )
        require(
            self.block_n >= 16 and self.block_n % (16 * self.key_warps) == 0,
            "block_n",
            f"a multiple of 16 for each of {self.key_warps} warps",
        )
        if self.key_warps > 1:
            require(self.block_n <= WARP_SIZE * self.key_warps, "block_n", "32 keys a warp at most")
            require(1 <= self.stages <= 8, "stages", "in 1..8")
        else:
            least, most = (2, 4) if self.isa == 90 else (1, 2)
            require(least <= self.stages <= most, "stages", f"in {least}..{most}")
        require(
            self.isa >= 80 or self.stages == 1, "stages", "1 for isa 75 (no asynchronous copies)"
        )
        require(self.blocks_per_sm >= 1, "blocks_per_sm", "at least 1")
        require(self.mask in MASKS, "mask", f"one of {MASKS}")
        require(self.align in ALIGNMENTS, "align", f"one of {ALIGNMENTS}")
        require(
            self.prescale or not (self.softcap or self.alibi),
            "prescale",
            "True with softcap or alibi",
        )
        require(self.rotary in ROTARIES, "rotary", f"one of {ROTARIES}")
        uneven = self.pack_gqa or self.split or self.ragged or self.paged or self.key_warps > 1
        uneven |= self.isa == 90
        odd = "False for isa 90, and where lengths are not the call's"
        require(not (uneven and self.even_m), "even_m", odd)
        require(not (uneven and self.even_n), "even_n", odd)

    @property
    def row_warps(self) -> int:
        """Warps along the query rows of a tile."""
        return self.warps // self.key_warps

    @property
    def name(self) -> str:
        """The kernel's symbol, its cache folder's prefix and its name in logs and tests. Never parsed back."""
        dim = (
            f"d{self.head_dim}"
            if self.head_dim == self.head_dim_v
            else f"d{self.head_dim}v{self.head_dim_v}"
        )
        keys = "k" if self.key_warps > 1 else ""
        tile = f"m{self.block_m}x{self.block_n}_w{self.warps}{keys}s{self.stages}"
        flags = [
            *(["qreg"] if self.q_in_regs else []),
            *([f"b{self.blocks_per_sm}"] if self.blocks_per_sm > 1 else []),
            *([self.mask] if self.mask != "full" else []),
            *([flag for flag in ("softcap", "alibi", "prescale") if getattr(self, flag)]),
            *([flag.replace("_", "") for flag in ("even_m", "even_n") if getattr(self, flag)]),
            *([f"align{self.align}"] if self.align != 16 else []),
            *(
                [
                    flag
                    for flag in ("pack_gqa", "split", "ragged", "paged", "gather")
                    if getattr(self, flag)
                ]
            ),
            *([f"rotary_{self.rotary}"] if self.rotary != "none" else []),
        ]
        return "_".join([f"rtflash_forward_sm{self.isa}_", self.dtype, dim, tile, *flags])

    @property
    def kernel_file(self) -> str:
        """The template that holds the kernel."""
        return "forward_sm90.cu" if self.isa == 90 else "forward_sm80.cu"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return (self.warps + (WARPGROUP if self.isa == 90 else 0)) * WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: Q and the K and V buffers; O is staged over them at the end (not by isa 90,
        which keeps barriers behind them)."""
        q, keys = self.tile_bytes
        if self.isa == 90:
            return hopper.shared_bytes(q, keys, self.stages)
        columns_v = padded_head_dim(self.head_dim_v)
        if self.key_warps == 1:
            return max(q + keys, self.block_m * columns_v * ELEMENT_BYTES)
        # O in fp32 (8 columns more than a row has, against bank conflicts), reference and sum, of each warp's rows.
        row_o = (columns_v + 8 + 2) * 4
        return max(q + keys, self.key_warps * self.block_m * row_o)

    @property
    def tile_bytes(self) -> tuple[int, int]:
        """Bytes of Q's tile, and of all buffers of K and V."""
        row_qk = padded_head_dim(self.head_dim) * ELEMENT_BYTES
        row_v = padded_head_dim(self.head_dim_v) * ELEMENT_BYTES
        return self.block_m * row_qk, self.stages * self.block_n * (row_qk + row_v)

    @property
    def q_stages(self) -> int:
        """Buffers of Q that isa 90 has."""
        return hopper.q_stages(*self.tile_bytes, self.stages)

    @property
    def out_align(self) -> int:
        """Bytes of the widest store into a row-major output whose rows hold head_dim_v elements."""
        return next(a for a in ALIGNMENTS if self.head_dim_v * ELEMENT_BYTES % a == 0)

    def variables(self) -> dict[str, str]:
        """What config.cuh may use as ${...}: every field as C++ text, derived sizes, on Hopper operands of wgmma."""
        columns_q, columns_o = (
            -(-dim // MMA_M) * MMA_M for dim in (self.head_dim, self.head_dim_v)
        )
        return field_texts(self) | {
            "name": self.name,
            "kernel": "forward",
            "head_dim_padded": str(padded_head_dim(self.head_dim)),
            "head_dim_v_padded": str(padded_head_dim(self.head_dim_v)),
            "out_align": str(self.out_align),
            "threads": str(self.threads),
            "q_stages": str(self.q_stages),
            "shared_bytes": str(self.shared_bytes),
            **(
                hopper.wgmma_variables(self.dtype, columns_q, self.block_n, columns_o)
                if self.isa == 90
                else {}
            ),
        }

    def to_dict(self) -> dict[str, object]:
        """Field values, for `spec.json`."""
        return dataclasses.asdict(self)
