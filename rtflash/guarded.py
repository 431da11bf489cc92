"""Tensors of which an emulated kernel may touch what it must touch and no byte more; and its launch."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from . import cxx, select
from .report import (
    CBuffer,
    CCount,
    CFinding,
    CLaunch,
    Finding,
    Outcome,
    Place,
    Traffic,
    read_counts,
    read_findings,
)
from .spec import AnySpec
from .tensor import View

Array = NDArray[Any]

MAX_COUNTS = 4096
MAX_FINDINGS = 100
# What a kernel may do with a tensor, and states of a byte: see report.cuh.
READ, WRITE, REWRITE, UPDATE = 0, 1, 2, 3
PADDING, EMPTY, HELD = 0, 1, 2
POISON = 0xFF  # NaN in fp16, bf16 and fp32
GUARD = 1 << 20  # bytes before and after a tensor; the system gives them no memory
ALIGNMENT = 256
PARAMS_ALIGNMENT = 64  # of Params that hold tensor maps
# struct TiledTensor of report.cuh, in the 128 bytes of a tensor map.
TENSOR_MAP = struct.Struct("<4Q9I60x")
SWIZZLES = {0: 0, 64: 1, 128: 2}  # by bytes


class How(NamedTuple):
    """How kernels run.

    Attributes
    ----------
    seed : of the order in which warps run.
    workers : OS threads that run blocks; 0 = as many as there are cores.
    templates : their folder; None = the installed one.
    """

    seed: int = 0
    workers: int = 0
    templates: Path | None = None


class Guarded:
    """A copy of a tensor, far from every other one, with poison between its elements.

    Strides are the same, and so is the address modulo ALIGNMENT.

    Attributes
    ----------
    array : the copy; poison without `values`.
    begin : address of the first byte of any element.
    states : of each byte from `begin` on, see report.cuh.
    """

    def __init__(self, array: Array, values: bool = True) -> None:
        reach = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
        below = -sum(step for step in reach if step < 0)
        above = sum(step for step in reach if step > 0) + array.itemsize
        size = below + above if array.size else 0
        memory = np.empty(size + 2 * GUARD + ALIGNMENT, np.uint8)
        first = GUARD + (array.ctypes.data - below - memory.ctypes.data - GUARD) % ALIGNMENT
        inside = memory[first : first + size]
        inside[...] = POISON
        self.begin = inside.ctypes.data
        self.states = np.full(size, PADDING, np.uint8)
        self.array = np.ndarray(array.shape, array.dtype, memory, first + below, array.strides)
        if size:
            steps = (*array.strides, 1)
            elements = as_strided(self.states[below:], (*array.shape, array.itemsize), steps)
            elements[...] = HELD if values else EMPTY
            if values:
                self.array[...] = array

    @property
    def view(self) -> View:
        """The copy's View."""
        return view(self.array)


def output(shape: tuple[int, ...], dtype: Any) -> Guarded:
    """A row-major tensor that a kernel is to write."""
    return Guarded(np.empty(shape, dtype), values=False)


def unwritten(name: str, tensor: Guarded) -> list[Finding]:
    """What to say of an output of which some bytes were not written."""
    count = int((tensor.states == EMPTY).sum())
    what = f"{count} bytes of an output that nobody wrote"
    return [Finding(what, Place("", 0, name))] if count else []


def view(array: Array) -> View:
    """The array's View, strides in elements."""
    strides = tuple(step // array.itemsize for step in array.strides)
    dtype = {2: "fp16", 4: "fp32"}[array.itemsize]  # or as wide
    return View(array.ctypes.data, array.shape, strides, dtype, -1)


def tensor_map(
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> bytes:
    """What an emulated kernel finds where a GPU's finds the driver's tensor map.

    Parameters
    ----------
    address : of the tensor, whose elements have 2 bytes.
    dims, box : columns, heads, rows, batches.
    strides : bytes from head to head, row to row, batch to batch.
    swizzle : bytes of a row of its pattern: 0 (none), 64 or 128.
    """
    return TENSOR_MAP.pack(address, *strides, *dims, *box, SWIZZLES[swizzle])


def start(
    spec: AnySpec,
    grid: select.Grid,
    params: bytes,
    tensors: Mapping[str, tuple[Guarded, int]],
    how: How,
) -> Outcome:
    """Launch a kernel, if it has any CTA.

    Parameters
    ----------
    params : its Params, with addresses of the tensors.
    tensors : by the names that the report gives them, and which of READ, ... applies.

    Raises
    ------
    CompileError, RuntimeError
        As `cxx.library`.
    """
    buffers = (CBuffer * len(tensors))()
    for buffer, (name, (tensor, use)) in zip(buffers, tensors.items(), strict=True):
        buffer.name, buffer.begin = name.encode(), tensor.begin
        buffer.size, buffer.states = tensor.states.size, tensor.states.ctypes.data
        buffer.access = use
    counts, findings = (CCount * MAX_COUNTS)(), (CFinding * MAX_FINDINGS)()
    # The kernel copies whole multiples of the alignment.
    memory = np.zeros(len(params) + 2 * PARAMS_ALIGNMENT, np.uint8)
    packed = memory[-memory.ctypes.data % PARAMS_ALIGNMENT :][: len(params)]
    packed[...] = np.frombuffer(params, np.uint8)
    described = CLaunch(
        params=packed.ctypes.data,
        buffers=buffers,
        counts=counts,
        findings=findings,
        seed=how.seed,
        blocks=grid.blocks,
        threads=grid.threads,
        shared_bytes=grid.shared_bytes,
        workers=how.workers or os.cpu_count() or 1,
        buffer_count=len(buffers),
        count_capacity=MAX_COUNTS,
        finding_capacity=MAX_FINDINGS,
    )
    if grid.blocks > 0:
        cxx.library(spec, how.templates).rtflash_launch(ctypes.addressof(described))
    traffic = {b.name.decode(): Traffic(b.bytes_read, b.bytes_written) for b in buffers}
    return Outcome(read_findings(described), read_counts(described), traffic)
