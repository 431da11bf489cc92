"""Launch kernels on the caller's stream."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .layouts import PARAMS_BYTES

if TYPE_CHECKING:
    from .build import Kernel
    from .select import Grid

COUNTER_BYTES = 4  # of Params.next_tile


def refuse_capture(stream: int, name: str) -> None:
    """Raise RuntimeError if a CUDA graph is being captured on the stream: loading a module is illegal then."""
    from cupy_backends.cuda.api import runtime

    if runtime.streamIsCapturing(stream):
        raise RuntimeError(
            f"{name} is not compiled and loaded yet, which cannot be done while a CUDA graph is captured;"
            " make one call with these options before the capture (or use rtflash.warmup)"
        )


class Step(NamedTuple):
    """A launch, but for what changes from call to call.

    Attributes
    ----------
    kernel : what is launched.
    shape : what the driver wants to know beside Params and stream: function, blocks, threads, shared bytes.
    pack : writes Params into a buffer.
    pick : the head of Params from the numbers of a call.
    rest : of Params, what layouts.*_scalars packed.
    """

    kernel: Kernel
    shape: tuple[int, ...]
    pack: Callable[..., None]
    pick: Callable[[Sequence[int]], Sequence[int]]
    rest: bytes


def step(
    kernel: Kernel,
    grid: Grid,
    head: struct.Struct,
    pick: Callable[[Sequence[int]], Sequence[int]],
    rest: bytes,
) -> Step:
    """A Step; `head`: one of layouts.*_HEAD, which packs what `pick` gives."""
    shape = (kernel.function, grid.blocks, 1, 1, grid.threads, 1, 1, grid.shared_bytes)
    return Step(kernel, shape, whole(head, len(rest)).pack_into, pick, rest)


@functools.cache
def whole(head: struct.Struct, rest: int) -> struct.Struct:
    """Packs Params: a head, and behind it so many bytes."""
    return struct.Struct(f"{head.format}{rest}s")


class _Arguments:
    """A thread's Params, the argument pointers that the driver reads before a launch returns, and the driver."""

    def __init__(self) -> None:
        from cupy_backends.cuda.api import driver, runtime

        self.launch_kernel = driver.launchKernel
        self.get_device, self.set_device = runtime.getDevice, runtime.setDevice
        self.memset = runtime.memsetAsync
        self.params = (ctypes.c_uint64 * (-(-PARAMS_BYTES // 8)))()
        self.bytes = memoryview(self.params).cast("B")
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.address = ctypes.addressof(self._pointers)
        self.devices: set[int] = set()  # devices whose context this thread has made current once


_thread = threading.local()


def _arguments() -> _Arguments:
    """This thread's."""
    try:
        return _thread.arguments
    except AttributeError:
        _thread.arguments = _Arguments()
        return _thread.arguments


def launch(
    kernel: Kernel,
    grid: Grid,
    head: struct.Struct,
    values: Sequence[int],
    rest: bytes,
    stream: int,
    device: int,
) -> None:
    """Launch a kernel once.

    Parameters
    ----------
    head, values : one of layouts.*_HEAD, and what it packs: device addresses (0 = null) and lengths.
    rest, stream, device : see Step and `run`.
    """
    run((step(kernel, grid, head, tuple, rest),), values, stream, device)


def run(
    steps: Sequence[Step], numbers: Sequence[int], stream: int, device: int, counter: int = 0
) -> None:
    """Launch kernels one behind the other; returns at once.

    Parameters
    ----------
    numbers : what the steps pick from.
    stream : raw CUstream of `device`.
    device : CUDA index; the current device is the same afterwards.
    counter : address of an int32 that is set to 0 first; 0: there is none.
    """
    arguments = _arguments()
    previous = arguments.get_device()
    if previous != device or device not in arguments.devices:
        # A thread's first CUDA call must make the device's context current; cuLaunchKernel does not.
        arguments.set_device(device)
        arguments.devices.add(device)
    try:
        if counter:
            arguments.memset(counter, 0, COUNTER_BYTES, stream)
        for _, shape, pack, pick, rest in steps:
            pack(arguments.bytes, 0, *pick(numbers), rest)
            arguments.launch_kernel(*shape, stream, arguments.address, 0)
    finally:
        if previous != device:
            arguments.set_device(previous)
