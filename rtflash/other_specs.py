"""The variants of the kernels beside the forward: CombineSpec, AppendSpec."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .spec import DTYPES, MAX_HEAD_DIM, MAX_SPLITS, ROTARIES, WARP_SIZE, field_texts

COMBINE_WARPS = 4
APPEND_THREADS = 128


@dataclass(frozen=True, slots=True)
class CombineSpec:
    """The kernel that merges partial results of the same rows by their LSE: a CTA a row, whose warps share the splits.

    Attributes
    ----------
    dtype : "fp16", "bf16" or "fp32", of the result.
    partial : dtype of the partial results.
    vector : columns that a lane loads at once: 4 (fp32, aligned to 16 bytes) or 1.
    """

    dtype: str
    partial: str = "fp32"
    vector: int = 4

    def __post_init__(self) -> None:
        for field in ("dtype", "partial"):
            if getattr(self, field) not in (*DTYPES, "fp32"):
                raise ValueError(
                    f"CombineSpec.{field} is {getattr(self, field)!r}; it must be fp16, bf16 or fp32"
                )
        if self.vector not in ((1, 4) if self.partial == "fp32" else (1,)):
            raise ValueError(
                f"CombineSpec.vector is {self.vector!r}; it must be 1, or 4 for fp32 partial results"
            )

    @property
    def name(self) -> str:
        """As Spec.name."""
        return f"rtflash_combine__{self.partial}_{self.dtype}_v{self.vector}"

    @property
    def kernel_file(self) -> str:
        """The template that holds the kernel."""
        return "combine.cu"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return COMBINE_WARPS * WARP_SIZE

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: the weight of each split, and each warp's sum of O, in fp32."""
        return (MAX_SPLITS + COMBINE_WARPS * MAX_HEAD_DIM) * 4

    def variables(self) -> dict[str, str]:
        """As Spec.variables."""
        return field_texts(self) | {
            "name": self.name,
            "kernel": "combine",
            "isa": "0",
            "warps": str(COMBINE_WARPS),
            "threads": str(self.threads),
            "max_splits": str(MAX_SPLITS),
            "max_head_dim": str(MAX_HEAD_DIM),
        }

    def to_dict(self) -> dict[str, object]:
        """Field values, for `spec.json`."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class AppendSpec:
    """The kernel that writes new keys, rotated, and values into a cache: a CTA a new key and head.

    Attributes
    ----------
    dtype : "fp16" or "bf16".
    rotary : as Spec.rotary, of the keys.
    """

    dtype: str
    rotary: str = "none"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"AppendSpec.dtype is {self.dtype!r}; it must be one of {DTYPES}")
        if self.rotary not in ROTARIES:
            raise ValueError(f"AppendSpec.rotary is {self.rotary!r}; it must be one of {ROTARIES}")

    @property
    def name(self) -> str:
        """As Spec.name."""
        rotary = "" if self.rotary == "none" else f"_rotary_{self.rotary}"
        return f"rtflash_append__{self.dtype}{rotary}"

    @property
    def kernel_file(self) -> str:
        """The template that holds the kernel."""
        return "append.cu"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return APPEND_THREADS

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return 0

    def variables(self) -> dict[str, str]:
        """As Spec.variables."""
        return field_texts(self) | {
            "name": self.name,
            "kernel": "append",
            "isa": "0",
            "threads": str(self.threads),
        }

    def to_dict(self) -> dict[str, object]:
        """Field values, for `spec.json`."""
        return dataclasses.asdict(self)
