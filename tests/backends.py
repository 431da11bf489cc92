"""The frameworks that the tests run on: how to make, read and poison their arrays."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from layouts import NAN_BITS, Embedded, decode, embed, encode
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

HOST = ("numpy", "torch-cpu", "jax-cpu")
EMULATED = "emulated"
GPU = ("torch-cuda", "cupy", "jax-cuda")


def params(*names: str) -> list[Any]:
    """pytest parameters for the named backends; those on a GPU carry the marker `gpu`, emulated ones `emulated`."""
    marks = {EMULATED: pytest.mark.emulated, **dict.fromkeys(GPU, pytest.mark.gpu)}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


ALL_BACKENDS = params(*HOST, EMULATED, *GPU)
GPU_BACKENDS = params(*GPU)


class Backend:
    """A framework on a device. Arrays are made from fp32 values (or int32) and read back as fp32."""

    name = "numpy"
    module = "numpy"
    on_gpu = False
    # "any", "positive" (no negative strides) or "none" (row-major only)
    strides = "any"

    def make(self, values: NDArray, dtype: str = "fp16", layout: str = "bshd") -> Any:
        """An array of `dtype` ("fp16", "bf16", "fp32", "int32").

        4-D ones, but for int32, lie inside a buffer of NaN in the named layout.
        """
        if dtype == "int32":
            return self.upload(np.array(values, np.int32), dtype)
        values = np.asarray(values, np.float32)
        bits = values if dtype == "fp32" else encode(values, dtype)
        if values.ndim == 4 and self.strides != "none":
            return self.view(embed(bits, layout), dtype)
        return self.upload(bits, dtype)

    def upload(self, bits: NDArray, dtype: str) -> Any:
        """A row-major array of these bits."""
        return bits.view(numpy_dtype(dtype))

    def view(self, embedded: Embedded, dtype: str) -> Any:
        """The strided view of an uploaded buffer."""
        flat = self.upload(embedded.buffer, dtype)
        strides = [stride * flat.itemsize for stride in embedded.strides]
        return as_strided(flat[embedded.offset :], embedded.shape, strides)

    def to_numpy(self, array: Any) -> NDArray:
        """The values as fp32."""
        return np.asarray(array).astype(np.float32)

    def owns(self, array: Any, like: Any) -> bool:
        """Whether `array` is of this framework, on the device of `like`, and row-major."""
        return type(array) is np.ndarray and bool(array.flags.c_contiguous)

    def dtype_name(self, array: Any) -> str:
        """The dtype's name, "float16" say."""
        return str(array.dtype).removeprefix("torch.")

    def poison(self, *byte_counts: int) -> None:
        """Leave free blocks of these sizes filled with NaN where the allocator takes the next arrays from."""
        blocks = [np.full(max(1, count // 2), NAN_BITS, np.uint16) for count in byte_counts]
        del blocks

    def fresh(self, elements: int) -> Any:
        """An uninitialised fp16 array."""
        return np.empty(elements, np.float16)

    def synchronize(self) -> None:
        """Wait for the device."""


class Emulated(Backend):
    """NumPy arrays, through the kernels compiled for the host (the fixture sets RTFLASH_BACKEND)."""

    name = EMULATED


class Torch(Backend):
    module = "torch"
    strides = "positive"

    def __init__(self, device: str) -> None:
        self.device = device
        self.name = f"torch-{device}"
        self.on_gpu = device == "cuda"

    def upload(self, bits: NDArray, dtype: str) -> Any:
        import torch

        wanted = {
            "fp16": torch.float16,
            "bf16": torch.bfloat16,
            "fp32": torch.float32,
            "int32": torch.int32,
        }[dtype]
        integers = torch.from_numpy(bits.view(np.int32 if bits.itemsize == 4 else np.int16))
        return integers.to(self.device).view(wanted)

    def view(self, embedded: Embedded, dtype: str) -> Any:
        return self.upload(embedded.buffer, dtype).as_strided(
            embedded.shape, embedded.strides, embedded.offset
        )

    def to_numpy(self, array: Any) -> NDArray:
        return array.detach().float().cpu().numpy()

    def owns(self, array: Any, like: Any) -> bool:
        import torch

        return type(array) is torch.Tensor and array.device == like.device and array.is_contiguous()

    def poison(self, *byte_counts: int) -> None:
        import torch

        blocks = [
            torch.full((max(1, count // 2),), NAN_BITS, dtype=torch.int16, device=self.device)
            for count in byte_counts
            for _ in range(3)
        ]
        del blocks

    def fresh(self, elements: int) -> Any:
        import torch

        return torch.empty(elements, dtype=torch.float16, device=self.device)

    def synchronize(self) -> None:
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()


class Cupy(Backend):
    name = "cupy"
    module = "cupy"
    on_gpu = True

    def upload(self, bits: NDArray, dtype: str) -> Any:
        import cupy

        return cupy.asarray(bits).view(numpy_dtype(dtype))

    def view(self, embedded: Embedded, dtype: str) -> Any:
        from cupy.lib.stride_tricks import as_strided as cupy_as_strided

        flat = self.upload(embedded.buffer, dtype)
        strides = tuple(stride * flat.itemsize for stride in embedded.strides)
        return cupy_as_strided(flat[embedded.offset :], embedded.shape, strides)

    def to_numpy(self, array: Any) -> NDArray:
        import cupy

        if str(array.dtype) != "bfloat16":
            return cupy.asnumpy(array).astype(np.float32)
        return decode(cupy.asnumpy(array.view(np.uint16)), "bf16")

    def owns(self, array: Any, like: Any) -> bool:
        import cupy

        return (
            isinstance(array, cupy.ndarray)
            and array.device == like.device
            and array.flags.c_contiguous
        )

    def poison(self, *byte_counts: int) -> None:
        import cupy

        blocks = [
            cupy.full(max(1, count // 2), NAN_BITS, np.uint16)
            for count in byte_counts
            for _ in range(3)
        ]
        del blocks

    def fresh(self, elements: int) -> Any:
        import cupy

        return cupy.empty(elements, np.float16)

    def synchronize(self) -> None:
        import cupy

        cupy.cuda.runtime.deviceSynchronize()


class Jax(Backend):
    module = "jax"
    strides = "none"

    def __init__(self, device: str) -> None:
        self.platform = device
        self.name = f"jax-{device}"
        self.on_gpu = device == "cuda"

    def upload(self, bits: NDArray, dtype: str) -> Any:
        import jax

        device = jax.devices("cuda" if self.on_gpu else "cpu")[0]
        return jax.device_put(bits.view(numpy_dtype(dtype)), device)

    def owns(self, array: Any, like: Any) -> bool:
        import jax

        return isinstance(array, jax.Array) and array.devices() == like.devices()

    def poison(self, *byte_counts: int) -> None:
        blocks = [
            self.upload(np.full(max(1, count // 2), NAN_BITS, np.uint16), "fp16")
            for count in byte_counts
            for _ in range(3)
        ]
        for block in blocks:
            block.block_until_ready()
            block.delete()

    def fresh(self, elements: int) -> Any:
        import jax.numpy

        return jax.numpy.empty(elements, np.float16)

    def synchronize(self) -> None:
        import jax

        jax.effects_barrier()


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy's dtype of "fp16", "bf16" (of ml_dtypes), "fp32", "int32"; skips the test where ml_dtypes is missing."""
    if dtype == "bf16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype({"fp16": np.float16, "fp32": np.float32, "int32": np.int32}[dtype])


def backend(name: str) -> Backend:
    """The named backend; skips the test where its framework, or the GPU part of it, is missing."""
    made = {
        "numpy": lambda: Backend(),
        EMULATED: lambda: Emulated(),
        "torch-cpu": lambda: Torch("cpu"),
        "torch-cuda": lambda: Torch("cuda"),
        "cupy": lambda: Cupy(),
        "jax-cpu": lambda: Jax("cpu"),
        "jax-cuda": lambda: Jax("cuda"),
    }[name]()
    if importlib.util.find_spec(made.module) is None:
        pytest.skip(f"{made.module} is not installed")
    if name == "torch-cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
    if name == "jax-cuda":
        import jax

        try:
            jax.devices("cuda")
        except RuntimeError as error:
            pytest.skip(f"this JAX has no CUDA: {str(error).splitlines()[0]}")
    return made
