"""NumPy and CuPy arrays over memory that somebody else owns, and such arrays lent to any library by DLPack."""

from __future__ import annotations

from typing import Any

import numpy as np

from .dlpack import CPU, CUDA, View, is_read_only, itemsize, relabel
from .streams import LEGACY_STREAM, keep, order
from .tensor_base import bits_dtype

NO_ORDER = -1  # a consumer's stream=-1: it orders the streams itself


class HostMemory:
    """NumPy's array interface over an address; arrays made of it keep it, and so `owner`."""

    def __init__(self, view: View, owner: object) -> None:
        dtype = bits_dtype(view.dtype)
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (view.ptr, is_read_only(view)),
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


class Export:
    """Memory of ours as a DLPack producer: any framework's `from_dlpack` takes it without a copy.

    The capsules are NumPy's or CuPy's own, with the element type corrected where those do not know it (bf16). Their
    destructor and deleter are C code: in Python, one that runs while an exception is on its way would swallow it.

    Parameters
    ----------
    array : numpy.ndarray or cupy.ndarray over the memory, elements as raw bits where the dtype is bf16; kept alive
        until the consumer is done.
    dtype : "fp16", "bf16", ... of the elements.
    index : CUDA device, -1 = host.
    stream : the CUDA stream on which the memory is written; what it holds when a consumer asks is waited for.
    """

    def __init__(self, array: Any, dtype: str, index: int = -1, stream: int = 0) -> None:
        self.array = array
        self.dtype = dtype
        self.index = index
        self.stream = stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self.index < 0 else (CUDA, self.index)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        here = self.__dlpack_device__()
        if copy or (dl_device is not None and (int(dl_device[0]), int(dl_device[1])) != here):
            raise BufferError(
                f"rtflash lends memory where it is, on DLPack device {here}, without a copy"
            )
        if self.index >= 0 and stream != NO_ORDER:
            order(self.stream, stream or LEGACY_STREAM, self.index)
        ordered = {"stream": NO_ORDER} if self.index >= 0 else {}
        try:
            capsule = self.array.__dlpack__(**ordered, max_version=max_version)
        except TypeError:  # NumPy before 2.1, CuPy before 14
            capsule = self.array.__dlpack__(**ordered)
        return relabel(capsule, self.dtype, here)


def packed_export(view: View, stream: int) -> Export:
    """A row-major copy of device memory, made on `stream`, which must be CuPy's current one."""
    import cupy

    with cupy.cuda.Device(view.device):
        array = packed(view, view).view(bits_dtype(view.dtype)).reshape(view.shape)
    keep(view, stream, view.device)
    return Export(array, view.dtype, view.device, stream)
