"""Kernel launch: packs `struct Params` of params.cuh and launches on the caller's stream. Nothing here synchronises."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from typing import TYPE_CHECKING

from .problem import Problem
from .tensor import View

if TYPE_CHECKING:
    from .build import Kernel
    from .select import Grid

# struct Params, field by field in its order; tests compile params.cuh and compare offsets.
POINTER_FIELDS = ("q", "k", "v", "o", "lse", "alibi_slopes")
STRIDE_FIELDS = (
    *(f"{tensor}_strides.{axis}" for tensor in "qkvo" for axis in ("batch", "row", "head")),
    "alibi_batch_stride",
    "alibi_head_stride",
)
INT_FIELDS = (
    "seqlen_q",
    "seqlen_k",
    "heads",
    "group",
    "head_batches",
    "section",
    "window_left",
    "window_right",
)
FLOAT_FIELDS = ("score_scale", "softcap_log2")
POINTERS = struct.Struct(f"<{len(POINTER_FIELDS)}Q")
SCALARS = struct.Struct(f"<{len(STRIDE_FIELDS)}q{len(INT_FIELDS)}i{len(FLOAT_FIELDS)}f")
PARAMS_BYTES = POINTERS.size + SCALARS.size

LOG2_E = math.log2(math.e)


def scalars(
    problem: Problem, grid: Grid, q: View, k: View, v: View, alibi_slopes: View | None
) -> bytes:
    """Everything of Params but the pointers; the output is row-major."""
    out_row = problem.heads * problem.head_dim_v
    out_strides = (problem.seqlen_q * out_row, out_row, problem.head_dim_v)
    slope_strides = (0, 0) if alibi_slopes is None else (0, *used_strides(alibi_slopes))[-2:]
    unbounded = problem.seqlen_q + problem.seqlen_k
    left, right = (
        unbounded if bound < 0 else min(bound, unbounded)
        for bound in (problem.window_left, problem.window_right)
    )
    scale = problem.softmax_scale * LOG2_E
    if problem.softcap:
        scale *= 2.0 / problem.softcap
    return SCALARS.pack(
        *(stride for view in (q, k, v) for stride in used_strides(view)[:3]),
        *out_strides,
        *slope_strides,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.heads,
        problem.heads // problem.heads_k,
        problem.batch * problem.heads,
        grid.section,
        left,
        right,
        scale,
        problem.softcap * LOG2_E,
    )


def refuse_capture(stream: int, name: str) -> None:
    """Raise RuntimeError if a CUDA graph is being captured on the stream: loading a module is illegal then."""
    from cupy_backends.cuda.api import runtime

    if runtime.streamIsCapturing(stream):
        raise RuntimeError(
            f"{name} is not compiled and loaded yet, which cannot be done while a CUDA graph is captured;"
            " make one call with these options before the capture (or use rtflash.warmup)"
        )


def used_strides(view: View) -> tuple[int, ...]:
    """A View's strides, 0 for an axis of one element: what stands there means nothing, and may be misaligned."""
    return tuple(
        stride if size > 1 else 0 for size, stride in zip(view.shape, view.strides, strict=True)
    )


class _Arguments(threading.local):
    """This thread's Params, the argument pointers that the driver reads before a launch returns, and the driver."""

    def __init__(self) -> None:
        from cupy_backends.cuda.api import driver, runtime

        self.launch_kernel = driver.launchKernel
        self.get_device, self.set_device = runtime.getDevice, runtime.setDevice
        self.params = (ctypes.c_uint64 * (-(-PARAMS_BYTES // 8)))()
        self.scalars = memoryview(self.params).cast("B")[POINTERS.size : PARAMS_BYTES]
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.address = ctypes.addressof(self._pointers)
        self.devices: set[int] = set()  # devices whose context this thread has made current once


@functools.cache
def _arguments() -> _Arguments:
    return _Arguments()


def launch(
    kernel: Kernel, grid: Grid, pointers: tuple[int, ...], packed: bytes, stream: int, device: int
) -> None:
    """Launch a kernel; returns at once.

    Parameters
    ----------
    pointers : device addresses in the order of POINTER_FIELDS; 0 = null.
    packed : `scalars(...)`.
    stream : raw CUstream of `device`.
    device : CUDA index; the current device is the same afterwards.
    """
    arguments = _arguments()
    POINTERS.pack_into(arguments.params, 0, *pointers)
    arguments.scalars[:] = packed
    previous = arguments.get_device()
    if previous != device or device not in arguments.devices:
        # A thread's first CUDA call must make the device's context current; cuLaunchKernel does not.
        arguments.set_device(device)
        arguments.devices.add(device)
    try:
        arguments.launch_kernel(
            kernel.function,
            grid.blocks, 1, 1,
            grid.threads, 1, 1,
            grid.shared_bytes,
            stream,
            arguments.address,
            0,
        )  # fmt: skip
    finally:
        if previous != device:
            arguments.set_device(previous)
