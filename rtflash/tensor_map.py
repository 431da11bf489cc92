"""TMA's view of a tensor: what the driver's CUtensorMap says of it, for isa 90.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from typing import Any

from .spec import ELEMENT_BYTES, Spec, slab_columns
from .tensor import View

BYTES = 128
ALIGNMENT = 64
MAX_STRIDE = 2**40  # bytes
STRIDE_UNIT = 16  # bytes; of addresses too
STRIDE_UNIT_ELEMENTS = STRIDE_UNIT // ELEMENT_BYTES
MAX_ADDRESSES = 128  # encoded maps that a TensorMap keeps, 200 bytes each: layers of a model

# CUtensorMapDataType, ...Swizzle by the bytes of a row of its pattern, ...L2promotion.
DATA_TYPES = {"fp16": 6, "bf16": 9}
SWIZZLES = {64: 2, 128: 3}
PROMOTION_256B = 3


def fits(view: View) -> bool:
    """Whether TMA can copy from a tensor at a fit address: no axis is empty, strides are above 0 in whole 16 bytes."""
    *steps, _ = zip(view.shape, view.strides, strict=True)
    return view.shape[-1] > 0 and all(
        size == 1
        or (
            size > 1
            and 0 < stride * ELEMENT_BYTES < MAX_STRIDE
            and stride % STRIDE_UNIT_ELEMENTS == 0
        )
        for size, stride in steps
    )


class TensorMap:
    """The map of (..., rows, heads, columns) in boxes of `rows` rows of `heads` heads and a slab of columns.

    Attributes
    ----------
    dims, box : columns, heads, rows, batches.
    strides : bytes from head to head, row to row, batch to batch.
    swizzle : bytes of a row of a slab, which is a row of the swizzle's pattern.
    """

    def __init__(self, view: View, rows: int, heads: int = 1) -> None:
        *batches, length, all_heads, columns = view.shape
        self.dtype = view.dtype
        self.dims = (columns, all_heads, length, *(batches or (1,)))
        steps = (view.strides[-2], view.strides[-3], *(view.strides[:-3] or (0,)))
        # An axis of one element has a stride that nobody uses, but that must be one.
        self.strides = tuple(
            STRIDE_UNIT if size == 1 else step * ELEMENT_BYTES
            for size, step in zip(self.dims[1:], steps, strict=True)
        )
        slab = slab_columns(columns)
        self.box = (slab, heads, rows, 1)
        self.swizzle = slab * ELEMENT_BYTES
        self._encoded: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        """The driver's map of the tensor at an address.

        Raises
        ------
        RuntimeError
            The driver refuses it.
        """
        found = self._encoded.get(address)
        if found is None:
            if len(self._encoded) >= MAX_ADDRESSES:
                self._encoded.clear()
            found = self._encoded[address] = self.encode(address)
        return found

    def encode(self, address: int) -> bytes:
        """`at`, by the driver."""
        memory = (ctypes.c_char * (BYTES + ALIGNMENT))()
        place = -ctypes.addressof(memory) % ALIGNMENT
        code = driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(memory) + place),
            DATA_TYPES[self.dtype],
            len(self.dims),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * 4)(*self.dims),
            (ctypes.c_uint64 * 3)(*self.strides),
            (ctypes.c_uint32 * 4)(*self.box),
            (ctypes.c_uint32 * 4)(1, 1, 1, 1),
            0,  # not interleaved
            SWIZZLES[self.swizzle],
            PROMOTION_256B,
            0,  # zero outside
        )
        if code != 0:
            raise RuntimeError(
                f"cuTensorMapEncodeTiled returns {code} for dims {self.dims}, strides {self.strides}, box {self.box}"
            )
        return memory.raw[place : place + BYTES]


def maps(spec: Spec, group: int, q: View, k: View, v: View) -> tuple[TensorMap, ...]:
    """The maps of q, k and v; `group`: query heads of a key head, which with pack_gqa make a tile's rows together."""
    heads = group if spec.pack_gqa else 1
    rows = box_rows(spec, k.shape[-3])
    return TensorMap(q, spec.block_m // heads, heads), TensorMap(k, rows), TensorMap(v, rows)


def box_rows(spec: Spec, page_size: int) -> int:
    """Rows of a box of keys: of a tile, or those that divide tiles and pages alike."""
    return math.gcd(spec.block_n, page_size) if spec.paged else spec.block_n


@functools.cache
def driver() -> Any:
    """The CUDA driver."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
