"""PyTorch, NumPy and CuPy: their tensors' addresses and strides are read directly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .dlpack import View
from .memory import packed
from .tensor_base import ALIGN, SHORT_NAMES, Framework, Seen, bfloat16, numpy_dtype, short_name

# Only views of complex tensors are negated lazily, and no complex type has such parts.
NEVER_NEGATED = {"bf16", "int32"}

MAX_PATTERNS = 4096  # a pattern is a few hundred bytes on the host

# Dispatch modes that record operations or fake their results; others (counters, profilers) run them.
TRACERS = {"FakeTensorMode", "FunctionalTensorMode", "ProxyTorchDispatchMode"}
# Tensors whose operations are recorded or faked, mode or not.
RECORDED = {"FakeTensor", "FunctionalTensor"}


def no_backward(name: str) -> NotImplementedError:
    """What is raised for an input that requires grad."""
    return NotImplementedError(
        f"{name} requires grad; rtflash has no backward yet: call it under torch.no_grad(), or detach {name}"
    )


class Torch(Framework):
    """PyTorch: memory is read directly (CPU and CUDA)."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.forward_ad = torch.autograd.forward_ad
        self.dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
        self.tracing_state: Callable[[], Any] = torch._C._get_tracing_state
        types = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        names = {value: str(value).removeprefix("torch.") for value in types}
        self.short_names = {value: SHORT_NAMES.get(name, name) for value, name in names.items()}
        self.dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        self.indices = {torch.device("cpu"): -1}  # devices join as tensors on them are met
        self.devices = {-1: torch.device("cpu")}
        self.empty_like = torch.empty_like
        self.elements: dict[tuple[str, int], Any] = {}
        self.patterns = functools.lru_cache(MAX_PATTERNS)(self.pattern)
        self.grad_enabled = torch.is_grad_enabled
        self.raw_stream: Callable[[int], int] = getattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: torch.cuda.current_stream(index).cuda_stream,
        )

    def see(self, inputs: tuple[Any, ...]) -> Seen | None:
        if self.forward_ad._current_level >= 0:
            return None
        kind, short_names, indices = type(inputs[0]), self.short_names, self.indices
        addresses: list[int] = []
        geometry: list[Any] = []
        try:
            for x in inputs:
                if x is None:
                    addresses.append(0)
                    geometry.append(None)
                    continue
                ptr, dtype = x.data_ptr(), short_names[x.dtype]
                if (
                    type(x) is not kind
                    or (x.requires_grad and self.grad_enabled())
                    or ptr == 0
                    or (dtype not in NEVER_NEGATED and x.is_neg())
                ):
                    return None
                addresses.append(ptr)
                geometry.append((ptr % ALIGN, x.shape, x.stride(), dtype, indices[x.device]))
        except (AttributeError, KeyError, RuntimeError):
            return None
        return addresses, geometry, ()

    def view(self, x: Any, name: str = "tensor") -> View:
        seen = self.see((x,))
        if seen is None:
            return self.checked_view(x, name)
        (ptr,), ((_, *fields),), _ = seen
        return View(ptr, *fields)

    def checked_view(self, x: Any, name: str) -> View:
        """`view` of a tensor that `see` does not take: it is empty, on a device that was not met yet, or of no use."""
        torch = self.torch
        where = f"ROCm ({x.device})" if x.is_cuda and torch.version.hip else x.device
        if x.device.type not in ("cpu", "cuda") or (x.is_cuda and torch.version.hip):
            raise TypeError(f"{name} is on {where}; it must be on a CUDA device or the CPU")
        if x.is_nested or x.layout != torch.strided:
            kind = "nested" if x.is_nested else x.layout
            raise TypeError(f"{name} is a {kind} tensor; it must be dense (torch.strided)")
        if x.is_neg():
            raise TypeError(f"{name} is negated lazily; pass {name}.resolve_neg()")
        try:
            ptr = x.data_ptr()
        except RuntimeError:
            ptr = 0
        if ptr == 0 and x.numel() > 0:
            raise TypeError(
                f"{name} has no memory of its own (a torch.func transform, a functional or zero tensor); rtflash"
                " must be called outside of those for now"
            )
        if self.needs_grad(x):
            raise no_backward(name)
        index = x.get_device()
        self.indices[x.device], self.devices[index] = index, x.device
        return View(ptr, x.shape, x.stride(), self.short_names[x.dtype], index)

    def contiguous(self, x: Any) -> Any:
        x, size = x.detach(), x.element_size()
        if x.data_ptr() % size == 0:
            return x.contiguous()
        # Elements that straddle their natural boundary are legal for byte accesses only.
        raw = self.torch.empty(0, dtype=self.torch.uint8, device=x.device)
        strides = (*(stride * size for stride in x.stride()), 1)
        raw.set_(x.untyped_storage(), x.storage_offset() * size, (*x.shape, size), strides)
        packed = raw.clone(memory_format=self.torch.contiguous_format)
        return packed.view(x.dtype).reshape(x.shape)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        return self.empty_like(self.patterns(shape, dtype, device))

    def allocator(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        return functools.partial(self.empty_like, self.patterns(shape, dtype, device))

    def pattern(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """What `empty_like` makes a tensor of, in less host time than torch.empty takes with a dtype and a device.

        All patterns of a dtype and device are one element, expanded.
        """
        place = {"dtype": self.dtypes[dtype], "device": self.devices[device]}
        if 0 in shape:
            return self.torch.empty(shape, **place)
        element = self.elements.get((dtype, device))
        if element is None:
            element = self.elements[dtype, device] = self.torch.empty(1, **place)
        return element.expand(shape)

    def pointer(self, out: Any) -> int:
        try:
            return out.data_ptr()
        except RuntimeError:
            raise TypeError(
                "rtflash was called inside a torch.func transform (grad, jvp); it must be called outside for now"
            ) from None

    def stream(self, device: int) -> int:
        return self.raw_stream(device)

    def is_recording(self) -> bool:
        if self.tracing_state() is not None:
            return True
        if not self.dispatch_modes():
            return False
        modes = self.torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return not TRACERS.isdisjoint(type(mode).__name__ for mode in modes)

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        x = x.detach()
        if x.dtype != self.torch.bfloat16:
            return x.numpy()
        return x.view(self.torch.int16).numpy().view(bfloat16() or np.uint16)

    def from_host(self, array: np.ndarray[Any, Any], dtype: str, like: Any = None) -> Any:
        if dtype != "bf16":
            return self.torch.from_numpy(array)
        return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)

    def needs_grad(self, x: Any) -> bool:
        """Whether the caller expects gradients of what is computed from x."""
        if x.requires_grad and self.grad_enabled():
            return True
        forward_ad = self.forward_ad
        return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


class Recorded(Torch):
    """PyTorch's fake and functional tensors, which have no memory."""

    def is_recording(self) -> bool:
        return True


class Numpy(Framework):
    """NumPy: host only."""

    name = "numpy"

    def view(self, x: Any, name: str = "tensor") -> View:
        try:
            dtype = short_name(x.dtype)
        except TypeError as error:
            raise TypeError(f"{name} has {error}") from None
        size = x.itemsize or 1
        if any(n > 1 and stride % size for n, stride in zip(x.shape, x.strides, strict=True)):
            raise ValueError(
                f"{name} has strides {x.strides} in bytes; they must be multiples of its {size}-byte elements:"
                f" pass numpy.ascontiguousarray({name})"
            )
        strides = tuple(stride // size for stride in x.strides)
        return View(x.__array_interface__["data"][0], x.shape, strides, dtype, -1)

    def contiguous(self, x: Any) -> Any:
        return np.require(x, requirements=("C", "A"))

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        return np.asarray(x)

    def from_host(self, array: np.ndarray[Any, Any], dtype: str, like: Any = None) -> Any:
        return array.view(numpy_dtype(dtype))


class Cupy(Framework):
    """CuPy: memory is read directly; work goes to CuPy's current stream of the tensors' device."""

    name = "cupy"

    def __init__(self) -> None:
        import cupy

        if cupy.cuda.runtime.is_hip:
            raise TypeError("CuPy is built for ROCm; rtflash needs CUDA")
        self.cupy = cupy

    def view(self, x: Any, name: str = "tensor") -> View:
        size = x.itemsize or 1
        strides = tuple(stride // size for stride in x.strides)
        return View(x.data.ptr, x.shape, strides, short_name(x.dtype), x.data.device_id)

    def contiguous(self, x: Any) -> Any:
        with self.cupy.cuda.Device(x.data.device_id):
            return packed(self.view(x), x).view(x.dtype).reshape(x.shape)

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        with self.cupy.cuda.Device(device):
            return self.cupy.empty(shape, numpy_dtype(dtype))

    def pointer(self, out: Any) -> int:
        return out.data.ptr

    def stream(self, device: int) -> int:
        return self.cupy.cuda.get_current_stream(device).ptr
