"""Any library's tensor as a View, and its Framework: pointers, allocator, current stream.

Libraries are recognised by the names in a type's bases, so none is imported that the caller has not brought along.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from . import dlpack
from .dlpack import View
from .memory import Export
from .tensor_base import Framework
from .tensor_direct import RECORDED, Cupy, Numpy, Recorded, Torch
from .tensor_dlpack import Jax, Producer

__all__ = ["Framework", "View", "dynamo_traces", "framework", "is_recorded", "needs_copy"]

ACCEPTED = (
    "a torch.Tensor, jax.Array, cupy.ndarray, numpy.ndarray or another object with __dlpack__ and"
    " __dlpack_device__"
)


def needs_copy(view: View) -> bool:
    """Whether a kernel cannot read a tensor in place: its inner stride is not 1, or its address splits an element."""
    if view.strides[-1:] == (1,) and view.ptr % 4 == 0:
        return False
    if not view.shape or 0 in view.shape:
        return False
    strided = view.strides[-1] != 1 and view.shape[-1] != 1
    return strided or view.ptr % dlpack.itemsize(view.dtype) != 0


def dynamo_traces(x: Any) -> bool:
    """Whether torch.compile is tracing this very code, with x one of its tensors: it cannot follow a call to the end.

    Dynamo can follow this, though.
    """
    compiler = sys.modules.get("torch.compiler")
    return (
        compiler is not None
        and compiler.is_dynamo_compiling()
        and isinstance(x, sys.modules["torch"].Tensor)
    )


def is_recorded(x: Any, name: str) -> bool:
    """Whether torch records, or fakes, what is done to x at the moment: torch_ops.py is to be asked instead."""
    return dynamo_traces(x) or framework(x, name).is_recording()


_by_type: dict[type, Framework] = {}
_by_library: dict[type[Framework], Framework] = {}
_lock = threading.RLock()  # of both; a library asked for its from_dlpack may come back here


def framework(x: Any, name: str = "tensor") -> Framework:
    """The Framework of x's type. Two tensors are of one library iff theirs is the same object.

    Raises
    ------
    TypeError
        x is no tensor, or one without memory (torch's fake tensors); `name` names it.
    """
    found = _by_type.get(type(x))
    if found is None:
        with _lock:
            found = _by_type.get(type(x))
            if found is None:
                found = _by_type[type(x)] = recognise(x, name)
    return found


def recognise(x: Any, name: str) -> Framework:
    """`framework` for a type that was not met before."""
    kind: Any = type(x)
    shown = (
        f"{kind.__module__}.{kind.__qualname__}"
        if kind.__module__ != "builtins"
        else kind.__qualname__
    )
    for base in kind.__mro__:
        match base.__module__.partition(".")[0], base.__name__:
            case "torch", "Tensor":
                if kind.__name__ in RECORDED:
                    return only(Recorded)
                if kind.__torch_dispatch__ is not base.__torch_dispatch__:
                    raise TypeError(
                        f"{name} is a {shown}, which has no plain memory; it must be a plain torch.Tensor"
                    )
                return only(Torch)
            case "numpy", "MaskedArray":
                raise TypeError(
                    f"{name} is a {shown}, whose mask would be ignored; it must be a plain numpy.ndarray"
                )
            case "numpy", "ndarray":
                return only(Numpy)
            case "cupy", "ndarray":
                return only(Cupy)
            case ("jax" | "jaxlib", "ArrayImpl") | ("jax", "Tracer"):
                return only(Jax)
    if not (hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")):
        raise TypeError(f"{name} is a {shown}; it must be {ACCEPTED}")
    return Producer(shown, own_from_dlpack(x))


def only(library: type[Framework]) -> Framework:
    """The one instance of a library's Framework; to be called under the lock."""
    if library not in _by_library:
        _by_library[library] = library()
    return _by_library[library]


def own_from_dlpack(producer: Any) -> Callable[[Export], Any] | None:
    """`from_dlpack` of the library that a tensor comes from: its array-API namespace's, else its top module's."""
    if hasattr(producer, "__array_namespace__"):
        return getattr(producer.__array_namespace__(), "from_dlpack", None)
    root = type(producer).__module__.partition(".")[0]
    return None if root == "__main__" else getattr(sys.modules.get(root), "from_dlpack", None)


def renew_lock() -> None:
    """A process forked while another thread holds the lock would wait for it for ever."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_lock)
