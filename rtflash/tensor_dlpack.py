"""JAX and all other libraries: their tensors come and go through DLPack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import dlpack, streams
from .dlpack import Borrowed, View
from .memory import Export, over_device, over_host, packed_export
from .tensor_base import Framework, bfloat16, bits_dtype, numpy_dtype
from .tensor_direct import Numpy


class Producer(Framework):
    """Any other library, by DLPack: memory and stream of its device outputs are CuPy's.

    Parameters
    ----------
    give : the library's own `from_dlpack`; None: results are CuPy or NumPy arrays.
    """

    def __init__(self, name: str, give: Callable[[Export], Any] | None) -> None:
        self.name = name
        self.give = give

    def view(self, x: Any, name: str = "tensor") -> View:
        index = dlpack.device(x, name)
        return dlpack.borrow(x, self.stream(index) if index >= 0 else None, name)

    def contiguous(self, x: Any) -> Any:
        view = self.view(x)
        if view.device < 0:
            array = np.require(over_host(view, view), requirements=("C", "A"))
            return Export(array, view.dtype)
        return packed_export(view, self.stream(view.device))

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        import cupy

        with cupy.cuda.Device(device):
            if self.give is None:
                return cupy.empty(shape, numpy_dtype(dtype))
            return Export(cupy.empty(shape, bits_dtype(dtype)), dtype, device, self.stream(device))

    def pointer(self, out: Any) -> int:
        array = out.array if isinstance(out, Export) else out
        return array.data.ptr

    def stream(self, device: int) -> int:
        import cupy

        return cupy.cuda.get_current_stream(device).ptr

    def hold(self, stream: int, device: int, views: Sequence[View]) -> None:
        streams.keep(views, stream, device)

    def result(self, out: Any) -> Any:
        return out if self.give is None else self.give(out)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        view = self.view(x)
        array = over_host(view, view)
        return array.view(bfloat16() or np.uint16) if view.dtype == "bf16" else array

    def from_host(self, array: np.ndarray[Any, Any], dtype: str, like: Any = None) -> Any:
        if self.give is None:
            return array.view(numpy_dtype(dtype))
        return self.give(Export(array.view(bits_dtype(dtype)), dtype))


class Jax(Framework):
    """JAX; all but `is_traced` for concrete arrays.

    On a GPU, work goes to a stream of XLA's that exists for outside work. It waits for the inputs as DLPack exports
    them, and XLA's own stream waits for it in `hold`; the host waits for neither.
    """

    name = "jax"

    def __init__(self) -> None:
        import jax

        self.jax = jax
        self.numpy = Numpy()
        self.devices: dict[int, Any] = {}  # CUDA index -> jax.Device of the tensors seen there
        self.streams: dict[Any, int] = {}
        self.tokens: dict[int, Any] = {}  # CUDA index -> one float of CuPy's
        self.read = jax.jit(lambda token: token + 1)
        self.tracer = jax.core.Tracer

    def is_traced(self, inputs: tuple[Any, ...]) -> bool:
        return any(isinstance(x, self.tracer) for x in inputs)

    def view(self, x: Any, name: str = "tensor") -> View:
        if isinstance(x, Export):
            return dlpack.borrow(x, x.stream, name)
        if x.is_deleted():
            raise ValueError(
                f"{name} is a JAX array that was deleted or donated; it must still hold its values"
            )
        devices = x.devices()
        if len(devices) != 1:
            raise ValueError(
                f"{name} is spread over {len(devices)} devices; it must lie on one, as each of"
                f" {name}.addressable_shards does"
            )
        (device,) = devices
        if device.platform not in ("cpu", "gpu"):
            raise TypeError(f"{name} is on {device}; it must be on a CUDA device or the CPU")
        if device.platform == "gpu":
            view = dlpack.borrow(x, self.stream_of(device), name)
            if view.device >= 0:
                self.devices[view.device] = device
                return view
        array = np.asarray(x)
        # XLA can split the host into several devices (xla_force_host_platform_device_count), apart like any others.
        place = -1 - device.id if device.platform == "cpu" else -1
        view = Borrowed(*self.numpy.view(array, name)[:4], place)
        view.owner = array
        return view

    def stream_of(self, device: Any) -> int:
        """XLA hands out its streams for outside work in turn; a device's first one is kept, so calls stay in order."""
        if device not in self.streams:
            self.streams[device] = device.get_stream_for_external_ready_events()
        return self.streams[device]

    def contiguous(self, x: Any) -> Any:
        view = self.view(x)
        if view.device < 0:
            return x
        stream = self.stream(view.device)
        with streams.cupy_stream(stream):
            return packed_export(view, stream)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        jax, place = self.jax, self.devices[device]
        new = jax.lax.empty if hasattr(jax.lax, "empty") else jax.numpy.empty
        with jax.ensure_compile_time_eval(), jax.default_device(place):
            array = new(shape, numpy_dtype(dtype))
        if 0 in shape:
            return array
        stream = self.stream(device)
        # The stream waits until XLA's earlier use of this memory is over.
        view = dlpack.borrow(array, stream)
        return Export(over_device(view, (array, view), bits_dtype(dtype)), dtype, device, stream)

    def pointer(self, out: Any) -> int:
        return out.array.data.ptr if isinstance(out, Export) else 0

    def stream(self, device: int) -> int:
        return self.stream_of(self.devices[device])

    def hold(self, stream: int, device: int, views: Sequence[View]) -> None:
        """Make XLA's stream wait for the launch, as it reuses memory (dropped or donated) in its own order only.

        XLA waits for what it imports once it reads it, so it is given a token to read. Keeping the views instead would
        make XLA refuse to have the inputs donated.
        """
        import cupy

        if device not in self.tokens:
            with cupy.cuda.Device(device):
                self.tokens[device] = cupy.zeros(1, np.float32)
        with self.jax.ensure_compile_time_eval():
            token = Export(self.tokens[device], "fp32", device, stream)
            self.read(self.jax.dlpack.from_dlpack(token))

    def result(self, out: Any) -> Any:
        if not isinstance(out, Export):
            return out
        with self.jax.ensure_compile_time_eval():
            return self.jax.dlpack.from_dlpack(out)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def from_host(self, array: np.ndarray[Any, Any], dtype: str, like: Any = None) -> Any:
        jax = self.jax
        place = jax.local_devices(backend="cpu")[0]
        if like is not None:
            # Host memory of a GPU's (pinned_host) stays such.
            kind, (device,) = like.sharding.memory_kind, like.devices()
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        with jax.ensure_compile_time_eval():
            # Explicit: jax.transfer_guard("disallow") forbids the transfers that nobody wrote down.
            return jax.device_put(array.view(numpy_dtype(dtype)), place)
