"""NumPy and CuPy arrays over memory that somebody else owns."""

from __future__ import annotations

from typing import Any

import numpy as np

from .dlpack import Export, View, itemsize
from .streams import keep
from .tensor_base import bits_dtype


class HostMemory:
    """NumPy's array interface over an address; arrays made of it keep it, and so `owner`."""

    def __init__(self, view: View, owner: object) -> None:
        dtype = bits_dtype(view.dtype)
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (view.ptr, False),
            "shape": view.shape,
            "strides": tuple(stride * dtype.itemsize for stride in view.strides),
            "typestr": dtype.str,
        }


def over_host(view: View, owner: object) -> np.ndarray[Any, Any]:
    """Host memory as a NumPy array (bf16 as bits) that keeps `owner` alive."""
    if 0 in view.shape:
        return np.empty(view.shape, bits_dtype(view.dtype))
    return np.asarray(HostMemory(view, owner))


def over_device(view: View, owner: object, dtype: np.dtype[Any]) -> Any:
    """Device memory as a CuPy array of `dtype` that keeps `owner` alive.

    Elements of another size add an innermost dimension: uint8 over fp16 has shape (*view.shape, 2).
    """
    import cupy

    size = itemsize(view.dtype)
    first, length = extent(view)
    memory = cupy.cuda.UnownedMemory(first, length, owner, view.device)
    pointer = cupy.cuda.MemoryPointer(memory, view.ptr - first)
    shape, strides = tuple(view.shape), tuple(stride * size for stride in view.strides)
    if dtype.itemsize != size:
        shape, strides = (*shape, size // dtype.itemsize), (*strides, dtype.itemsize)
    return cupy.ndarray(shape, dtype, pointer, strides)


def extent(view: View) -> tuple[int, int]:
    """Lowest address of a non-empty View's elements, and the bytes from there to the end of the last one."""
    size = itemsize(view.dtype)
    spans = [(n - 1) * stride * size for n, stride in zip(view.shape, view.strides, strict=True)]
    return view.ptr + sum(span for span in spans if span < 0), size + sum(
        abs(span) for span in spans
    )


def packed(view: View, owner: object) -> Any:
    """A row-major copy of device memory as CuPy bytes (*shape, itemsize), on CuPy's current stream.

    Bytes need no alignment, and no dtype that CuPy would have to know.
    """
    return over_device(view, owner, np.dtype(np.uint8)).copy(order="C")


def packed_export(view: View, stream: int) -> Export:
    """A row-major copy of device memory, made on `stream`, which must be CuPy's current one."""
    import cupy

    with cupy.cuda.Device(view.device):
        array = packed(view, view).view(bits_dtype(view.dtype)).reshape(view.shape)
    keep(view, stream, view.device)
    return Export(array, view.dtype, view.device, stream)
