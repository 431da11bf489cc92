"""Side streams and CUDA graph capture, alike for PyTorch and CuPy."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from backends import Backend

from rtflash.streams import cupy_stream

# Clock cycles: 100 ms at 2 GHz, far above any call's host time, also where 14 processes test at a time.
SLEEP_CYCLES = 200_000_000


class SideStream:
    """A stream that is current, and can be kept busy."""

    def __init__(
        self,
        sleep: Callable[[], None],
        is_done: Callable[[], bool],
        synchronize: Callable[[], None],
    ) -> None:
        self.sleep, self.is_done, self.synchronize = sleep, is_done, synchronize


class Captured:
    """A captured graph; `replay` runs it and waits for its end."""

    replay: Callable[[], None]


@contextlib.contextmanager
def side_stream(backend: Backend) -> Iterator[SideStream]:
    """Make a new non-blocking stream the framework's current one."""
    if backend.module == "torch":
        import torch

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield SideStream(
                functools.partial(torch.cuda._sleep, SLEEP_CYCLES), stream.query, stream.synchronize
            )
    else:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            sleep = functools.partial(spin, stream.ptr, SLEEP_CYCLES)
            yield SideStream(sleep, lambda: stream.done, stream.synchronize)


def spin(stream: int, cycles: int = 100_000_000) -> None:
    """Keep a stream, given by its raw handle, busy for a number of clock cycles; the default takes about 50 ms."""
    with cupy_stream(stream):
        spin_kernel()((1,), (1,), (cycles,))


@functools.cache
def spin_kernel() -> Any:
    import cupy

    return cupy.RawKernel(
        'extern "C" __global__ void spin(long long n) { long long s = clock64(); while (clock64() - s < n) {} }',
        "spin",
    )


@contextlib.contextmanager
def capture(backend: Backend) -> Iterator[Captured]:
    """Capture what runs inside on the framework's current stream."""
    captured = Captured()
    if backend.module == "torch":
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield captured

        def replay() -> None:
            graph.replay()
            torch.cuda.synchronize()

        captured.replay = replay
    else:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            try:
                yield captured
            finally:
                made = stream.end_capture()

        def launch() -> None:
            made.launch(stream)
            stream.synchronize()

        captured.replay = launch
