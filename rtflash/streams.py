"""Order between CUDA streams by events, without blocking the host. Streams are raw handles, devices CUDA indices."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from typing import Any

LEGACY_STREAM = 1  # cudaStreamLegacy, the stream that 0 also means; DLPack forbids 0


def order(first: int, then: int, index: int) -> None:
    """Make CUDA stream `then` wait for the work that stream `first` of device `index` now holds."""
    if (first or LEGACY_STREAM) == (then or LEGACY_STREAM):
        return
    import cupy

    with cupy.cuda.Device(index):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, first)
        cupy.cuda.runtime.streamWaitEvent(then, event.ptr)


class Handle:
    """A stream by its raw handle, in the form that libraries exchange streams in.

    https://nvidia.github.io/cuda-python/cuda-core/latest/interoperability.html#cuda-stream-protocol
    """

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream


def cupy_stream(stream: int) -> Any:
    """CuPy's object for a raw stream; inside `with`, CuPy works on that stream."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(Handle(stream))
    return cupy.cuda.ExternalStream(stream)  # CuPy before 14


# Device index -> (event, object) in launch order.
_kept: dict[int, deque[tuple[Any, object]]] = {}
_kept_lock = threading.Lock()


def keep(owner: object, stream: int, index: int) -> None:
    """Keep `owner` alive until the work that the stream now holds has run.

    A producer may reuse memory as soon as it is given back, on streams that know nothing of ours. What is done is
    dropped by the next call, so the last call's owners stay a little longer.
    """
    import cupy

    if cupy.cuda.runtime.streamIsCapturing(stream):
        return  # a graph's inputs are its owner's to keep, for as long as it is replayed
    with cupy.cuda.Device(index):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, stream)
    done = []
    with _kept_lock:
        kept = _kept.setdefault(index, deque())
        kept.append((event, owner))
        while len(kept) > 1 and kept[0][0].done:
            done.append(kept.popleft())
    done.clear()  # outside the lock: producers' deleters run here


atexit.register(_kept.clear)
