"""Spec: one kernel variant. A field is here only if it changes the generated code.

Lengths, batch and head counts, strides, scale and window sizes are data (`Params` of params.cuh); of the lengths only
whether they divide the tile (`even_m`, `even_n`) is known to the code.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

DTYPES = ("fp16", "bf16")
MASKS = ("full", "causal", "window")
ISAS = (75, 80)
ALIGNMENTS = (16, 8, 4, 2)
MAX_HEAD_DIM = 256
ELEMENT_BYTES = 2
WARP_SIZE = 32
MMA_M = 16


def padded_head_dim(head_dim: int) -> int:
    """Columns of a shared-memory row: whole slabs of 64 elements (128 bytes), or of 32 where 64 would waste half."""
    return -(-head_dim // 32) * 32


@dataclass(frozen=True, slots=True)
class Spec:
    """A forward kernel, down to its tiles.

    Attributes
    ----------
    dtype : "fp16" or "bf16", of q, k, v and the output.
    head_dim, head_dim_v : true sizes (1..256), padded inside the kernel.
    block_m, block_n : query rows and key rows of a tile.
    warps : warps of a CTA; each owns block_m / warps query rows.
    stages : shared-memory buffers of K and of V (1: two barriers a tile; 2: one barrier a tile).
    isa : 75 = synchronous copies and mma.m16n8k8 (fp16 only); 80 = cp.async and mma.m16n8k16.
    q_in_regs : Q's fragments stay in registers instead of being read from shared memory for every tile.
    blocks_per_sm : resident CTAs that the register allocation must leave room for.
    mask : "full", "causal" (bottom-right) or "window" (two run-time bounds).
    softcap, alibi : score terms.
    prescale : scores are scaled before the maximum is taken (a scale <= 0 needs it; softcap and alibi imply it).
    even_m, even_n : the lengths are multiples of block_m, block_n.
    align : bytes of the widest global load that q, k and v allow.
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
        require(self.warps in (2, 4, 8, 16), "warps", "2, 4, 8 or 16")
        require(
            self.block_m >= MMA_M and self.block_m % (self.warps * MMA_M) == 0,
            "block_m",
            f"a multiple of {MMA_M} rows for each of {self.warps} warps",
        )
        require(self.block_n >= 16 and self.block_n % 16 == 0, "block_n", "a multiple of 16")
        require(self.stages in (1, 2), "stages", "1 or 2")
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

    @property
    def name(self) -> str:
        """The kernel's symbol, its cache folder's prefix and its name in logs and tests. Never parsed back."""
        dim = (
            f"d{self.head_dim}"
            if self.head_dim == self.head_dim_v
            else f"d{self.head_dim}v{self.head_dim_v}"
        )
        tile = f"m{self.block_m}x{self.block_n}_w{self.warps}s{self.stages}"
        flags = [
            *(["qreg"] if self.q_in_regs else []),
            *([f"b{self.blocks_per_sm}"] if self.blocks_per_sm > 1 else []),
            *([self.mask] if self.mask != "full" else []),
            *([flag for flag in ("softcap", "alibi", "prescale") if getattr(self, flag)]),
            *([flag.replace("_", "") for flag in ("even_m", "even_n") if getattr(self, flag)]),
            *([f"align{self.align}"] if self.align != 16 else []),
        ]
        return "_".join([f"rtflash_forward_sm{self.isa}_", self.dtype, dim, tile, *flags])

    @property
    def kernel_file(self) -> str:
        """The template that holds the kernel."""
        return "forward_sm80.cu"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: Q and the K and V buffers; O is staged over them at the end."""
        row_qk = padded_head_dim(self.head_dim) * ELEMENT_BYTES
        row_v = padded_head_dim(self.head_dim_v) * ELEMENT_BYTES
        tiles = self.block_m * row_qk + self.stages * self.block_n * (row_qk + row_v)
        return max(tiles, self.block_m * row_v)

    @property
    def out_align(self) -> int:
        """Bytes of the widest store into a row-major output whose rows hold head_dim_v elements."""
        return next(a for a in ALIGNMENTS if self.head_dim_v * ELEMENT_BYTES % a == 0)

    def variables(self) -> dict[str, str]:
        """What config.cuh may use as ${...}: every field as C++ text, and derived sizes."""

        def text(value: object) -> str:
            return str(value).lower() if isinstance(value, bool) else str(value)

        fields = {f.name: text(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return fields | {
            "name": self.name,
            "head_dim_padded": str(padded_head_dim(self.head_dim)),
            "head_dim_v_padded": str(padded_head_dim(self.head_dim_v)),
            "out_align": str(self.out_align),
            "threads": str(self.threads),
            "shared_bytes": str(self.shared_bytes),
        }

    def to_dict(self) -> dict[str, object]:
        """Field values, for `spec.json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Spec:
        """The Spec that `to_dict` described.

        Raises
        ------
        ValueError
            A field is unknown, missing or impossible.
        """
        try:
            return cls(**values)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(f"not a Spec of this version: {error}") from None
