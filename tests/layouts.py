"""Where test inputs lie in memory: encodings of fp16 and bf16, and strided layouts inside a buffer of NaN.

A layout is made once with NumPy, as a flat buffer plus offset and strides in elements, and every framework views the
same buffer. All that is not an input element is NaN, so that a read of padding or past an end shows in the output.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from rtflash import tensor_map
from rtflash.tensor import View

# 0x7fff is a NaN in fp16 and in bf16, and 0x7fff7fff one in fp32.
NAN_BITS = 0x7FFF
# Elements of NaN before and after a tensor, a multiple of 16 bytes; more than the 256 rows of 256 that a tile may hold.
GUARD = 1 << 16


class Embedded(NamedTuple):
    """A tensor inside a flat buffer: offset and strides count elements."""

    buffer: NDArray
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def encode(values: NDArray, dtype: str) -> NDArray:
    """fp32 values rounded to the nearest even "fp16" or "bf16", as uint16 bits."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), NAN_BITS, rounded).astype(np.uint16)


def decode(bits: NDArray, dtype: str) -> NDArray:
    """uint16 bits of "fp16" or "bf16" as fp32 values."""
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pitch(head_dim: int, residue: int, modulus: int) -> int:
    """The least row pitch that holds head_dim and is `residue` modulo `modulus`."""
    return head_dim + (residue - head_dim) % modulus


def strides_of(layout: str, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Strides of a (batch, seqlen, heads, head_dim) tensor in the named layout."""
    batch, seqlen, heads, dim = shape
    rows = {
        "padded": pitch(dim, 0, 8) + 8,
        "align8": pitch(dim, 4, 8),
        "align4": pitch(dim, 2, 4),
        "align2": pitch(dim, 1, 2),
    }
    if layout in rows:
        row = rows[layout]
        return ((seqlen + 1) * heads * row, heads * row, row, 1)
    return {
        "bhsd": (heads * seqlen * dim, dim, seqlen * dim, 1),
        "sbhd": (heads * dim, batch * heads * dim, dim, 1),
        "packed": (seqlen * 3 * heads * dim, 3 * heads * dim, dim, 1),
        "every2": (seqlen * 2 * heads * dim, 2 * heads * dim, dim, 1),
        "reversed": (seqlen * heads * dim, -heads * dim, dim, 1),
        "shared_heads": (seqlen * dim, dim, 0, 1),
        "shared_batch": (0, heads * dim, dim, 1),
        "inner2": (seqlen * heads * 2 * dim, heads * 2 * dim, 2 * dim, 2),
        "inner_reversed": (seqlen * heads * dim, heads * dim, dim, -1),
    }.get(layout, (seqlen * heads * dim, heads * dim, dim, 1))


# Base address relative to 16 bytes, in elements: 8, 4 and 2 bytes.
OFFSETS = {"offset8": 4, "offset4": 2, "offset2": 1}
NEGATIVE = ("reversed", "inner_reversed")
COPIED = ("inner2", "inner_reversed")
LAYOUTS = (
    *(
        "bshd",
        "bhsd",
        "sbhd",
        "packed",
        "padded",
        "every2",
        "reversed",
        "shared_heads",
        "shared_batch",
    ),
    *("align8", "align4", "align2", "offset8", "offset4", "offset2", "inner2", "inner_reversed"),
)


def shared_axes(layout: str) -> tuple[int, ...]:
    """Axes of stride 0, along which the values must be equal."""
    return {"shared_heads": (2,), "shared_batch": (0,)}.get(layout, ())


def repeat(values: NDArray, layout: str) -> NDArray:
    """The values with the first slice repeated along every axis of stride 0."""
    for axis in shared_axes(layout):
        first = values.take(range(min(1, values.shape[axis])), axis)
        values = np.broadcast_to(first, values.shape)
    return values


def embed(values: NDArray, layout: str = "bshd") -> Embedded:
    """Put a (batch, seqlen, heads, head_dim) array of bits or fp32 into a buffer of NaN, in the named layout."""
    shape = values.shape
    strides = strides_of(layout, shape)
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 0]
    below = -sum(step for step in reach if step < 0)
    above = sum(step for step in reach if step > 0) + 1
    offset = GUARD + -(-below // 8) * 8 + OFFSETS.get(layout, 0)
    fill = NAN_BITS if values.dtype == np.uint16 else math.nan
    buffer = np.full(offset + above + GUARD, fill, values.dtype)
    if values.size:
        first = values[
            tuple(slice(0, 1) if axis in shared_axes(layout) else slice(None) for axis in range(4))
        ]
        view = as_strided(buffer[offset:], first.shape, [s * buffer.itemsize for s in strides])
        view[...] = first
    return Embedded(buffer, offset, shape, strides)


def fits_tma(layout: str, shape: tuple[int, int, int, int]) -> bool:
    """Whether TMA can copy from an input; an inner-strided one is copied first."""
    strides = strides_of("bshd" if layout in COPIED else layout, shape)
    return tensor_map.fits(View(0, shape, strides, "fp16", -1))


def alignment(layout: str, shape: tuple[int, int, int, int]) -> int:
    """Bytes (16, 8, 4 or 2) that divide the address and every used stride; an inner-strided input is copied first."""
    strides = strides_of("bshd" if layout in COPIED else layout, shape)
    used = [stride for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    return 2 * math.gcd(8, OFFSETS.get(layout, 0), *used)
