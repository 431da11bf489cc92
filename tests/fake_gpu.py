"""A GPU that is not there: its tensors are Views, and a launch is noted down."""

from __future__ import annotations

import ctypes
import math
import struct
import types
from typing import Any, NamedTuple

import pytest

from rtflash import build, call, device, launch, layouts, tensor, tensor_map
from rtflash.other_specs import AppendSpec, CombineSpec
from rtflash.spec import AnySpec, Spec
from rtflash.tensor import Framework, View
from rtflash.tensor_map import TensorMap

LAYOUTS: dict[type, layouts.Layout] = {
    CombineSpec: layouts.COMBINE,
    AppendSpec: layouts.APPEND,
}
STREAM = 7
FIRST = 2**40  # address of what a Library allocates first


def view(*shape: int, dtype: str = "fp16", device: int = 0, ptr: int = 256, step: int = 1) -> View:
    """A View whose axes follow one another, the inner one with a stride of `step` elements."""
    strides = tuple(step * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return View(ptr, shape, strides, dtype, device)


class Library(Framework):
    """A library whose tensors are Views, on a device that is not there.

    Attributes
    ----------
    made : what it allocated, in its order; no two share an address, nor with any tensor below FIRST.
    """

    name = "none"

    def __init__(self) -> None:
        self.made: list[View] = []
        self.next = FIRST

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        self.made.append(view(*shape, dtype=dtype, device=device, ptr=self.next))
        self.next += 256 + (4 * math.prod(shape) // 256 + 1) * 256
        return self.made[-1]

    def contiguous(self, x: Any) -> Any:
        return self.empty(x.shape, x.dtype, 0)

    def view(self, x: Any, name: str = "tensor") -> View:
        return x

    def pointer(self, out: Any) -> int:
        return out.ptr

    def stream(self, device: int) -> int:
        return STREAM


LIBRARY = Library()


def encoded(address: int) -> bytes:
    """Stands for the driver's tensor map of the tensor at an address."""
    return address.to_bytes(tensor_map.BYTES, "little")


class Launched(NamedTuple):
    """A launch: its variant, CTAs, threads and shared bytes, and its Params by field."""

    spec: AnySpec
    shape: tuple[int, int, int]
    params: dict[str, float]


class FakeGpu:
    """An H100 as device 0, while a test runs. Public functions take Views as tensors on it.

    Attributes
    ----------
    launched : what was launched, in its order.
    cleared : (address, launches before) of every counter that was set to 0.
    made : what LIBRARY allocated, in its order.
    current : CUDA's current device.
    was_set : every device that was made current.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = device.for_arch("sm_90a")
        self.cleared: list[tuple[int, int]] = []
        self.launched: list[Launched] = []
        self.made = LIBRARY.made = []
        self.current = 0
        self.was_set: list[int] = []
        self.kernels: list[build.Kernel] = []
        params = (ctypes.c_uint64 * (-(-layouts.PARAMS_BYTES // 8)))()
        self.arguments = types.SimpleNamespace(
            bytes=memoryview(params).cast("B"),
            address=ctypes.addressof(params),
            devices=set(),
            get_device=lambda: self.current,
            set_device=self.set_device,
            launch_kernel=self.launch_kernel,
            memset=self.memset,
        )
        monkeypatch.setattr(TensorMap, "encode", lambda _, address: encoded(address))
        monkeypatch.setitem(tensor._by_type, View, LIBRARY)
        monkeypatch.setattr(call, "_plans", {})
        monkeypatch.setattr(device, "get", lambda index: gpu)
        monkeypatch.setattr(build, "is_loaded", lambda spec, gpu: True)
        monkeypatch.setattr(build, "kernel", self.kernel)
        monkeypatch.setattr(launch, "_thread", types.SimpleNamespace(arguments=self.arguments))

    def set_device(self, index: int) -> None:
        self.current = index
        self.was_set.append(index)

    def kernel(self, spec: AnySpec, gpu: device.Device) -> build.Kernel:
        self.kernels.append(build.Kernel(spec, None, len(self.kernels), None))  # type: ignore[arg-type]
        return self.kernels[-1]

    def memset(self, address: int, value: int, count: int, stream: int) -> None:
        assert (value, count, stream) == (0, launch.COUNTER_BYTES, STREAM)
        self.cleared.append((address, len(self.launched)))

    def launch_kernel(self, function: int, *rest: int) -> None:
        blocks, _, _, threads, _, _, shared, stream, address, _ = rest
        assert (stream, address) == (STREAM, self.arguments.address)
        spec = self.kernels[function].spec
        layout = layouts.forward(spec) if isinstance(spec, Spec) else LAYOUTS[type(spec)]
        form = layout.head.format + layout.rest.format.removeprefix("<")
        values = struct.unpack_from(form, self.arguments.bytes)
        params = dict(zip(layout.fields, values, strict=True))
        self.launched.append(Launched(spec, (blocks, threads, shared), params))
