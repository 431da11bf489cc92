"""Framework: what a call needs of an array library; and element types by their names in a View."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .dlpack import View

SHORT_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
LONG_NAMES = {short: long for long, short in SHORT_NAMES.items()}


def bfloat16() -> np.dtype[Any] | None:
    """NumPy's dtype for bf16, which the package ml_dtypes defines; None without it."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return np.dtype(ml_dtypes.bfloat16)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a View's dtype; TypeError for bf16 without ml_dtypes."""
    if name != "bf16":
        return np.dtype(LONG_NAMES.get(name, name))
    found = bfloat16()
    if found is None:
        raise TypeError("NumPy and CuPy know bf16 through ml_dtypes only: pip install ml_dtypes")
    return found


def bits_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype that carries a View's dtype everywhere: raw bits for bf16."""
    return np.dtype(np.uint16) if name == "bf16" else numpy_dtype(name)


@functools.cache
def short_name(dtype: np.dtype[Any]) -> str:
    """A View's dtype for a NumPy dtype; TypeError for foreign byte order."""
    if not dtype.isnative:
        raise TypeError(
            f"byte order {dtype.byteorder!r} of {dtype}; it must be native: x.astype(x.dtype.newbyteorder('='))"
        )
    return SHORT_NAMES.get(dtype.name, dtype.name)


# A call's inputs: addresses, 0 for None; (address % ALIGN, shape, strides, dtype, device), None for None; and what must
# be held until `hold`.
Seen = tuple[list[int], list[Any], Sequence[View]]
ALIGN = 16  # bytes of the widest load


class Framework:
    """What a call needs of the library that its tensors come from.

    A call goes: `see`, or else `view` per input; `empty` and `pointer` per output; `stream`; launch; `hold`; `result`
    per output. On the host: `host` per input; `from_host` per output. A `device` is a CUDA index, a `dtype` a View's.
    """

    name = ""

    def is_recording(self) -> bool:
        """Whether the library records operations at the moment, or fakes their results, instead of running them.

        It would not record ours: see torch_ops.py.
        """
        return False

    def is_traced(self, inputs: tuple[Any, ...]) -> bool:
        """Whether any of a call's inputs has no memory, because a transformation of JAX's traces it: see jax_ops.py."""
        return False

    def see(self, inputs: tuple[Any, ...]) -> Seen | None:
        """A call's inputs at once, where there is a shorter way than `view` of each and nothing unusual about any.

        None: ask `view`. (Views are a third of a call's host time.)
        """
        return None

    def view(self, x: Any, name: str = "tensor") -> View:
        """Where x's elements are. A View of a JAX array or DLPack tensor keeps it alive: hold on to it until `hold`.

        Raises
        ------
        TypeError
            x has no plain memory, or lies on a device that is neither CUDA nor the host; `name` names it.
        ValueError
            A deleted or sharded array, or a capsule that was consumed before.
        NotImplementedError
            The caller expects gradients of what is computed from x.
        """
        raise NotImplementedError

    def contiguous(self, x: Any) -> Any:
        """A copy of x that `needs_copy` is content with, made on the current stream; for `view` and `host`."""
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: str, device: int) -> Any:
        """A row-major output of the library's own allocator, for `pointer` and `result`."""
        raise NotImplementedError

    def allocator(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], Any]:
        """What makes such outputs, for many calls."""
        return functools.partial(self.empty, shape, dtype, device)

    def pointer(self, out: Any) -> int:
        """Address of an output that `empty` made."""
        raise NotImplementedError

    def stream(self, device: int) -> int:
        """Raw CUstream to launch on: the library's current one; 0 = the legacy default stream."""
        raise NotImplementedError

    def hold(self, stream: int, device: int, views: Sequence[View]) -> None:
        """After a launch: see to it that what `views` borrow is not reused before the stream has run it.

        Nothing to do where memory is reused in stream order (PyTorch, CuPy).
        """

    def result(self, out: Any) -> Any:
        """What the caller gets for an output, ordered after the stream's work."""
        return out

    def host(self, x: Any) -> np.ndarray[Any, Any]:
        """A host tensor as a NumPy view, waiting for it; bf16 as ml_dtypes.bfloat16, else as its bits in uint16."""
        raise NotImplementedError

    def from_host(self, array: np.ndarray[Any, Any], dtype: str, like: Any = None) -> Any:
        """A fresh NumPy array (bf16 as `host` gives it) in the caller's library, without a copy where it can be.

        It is put where `like`, a tensor of the library, lies; that matters where a library has several host devices.
        """
        raise NotImplementedError
