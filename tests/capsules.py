"""Hand-made DLPack capsules: a producer with a base address and a byte_offset, versioned or not.

Structures: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from typing import Any

CUDA, HOST = 2, 1
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


# What a capsule's consumer may still read, by the address of its structure, until it calls the deleter.
_alive: dict[int, tuple[Any, ...]] = {}
_delete = DELETER(lambda address: _alive.pop(address, None) and None)


class Producer:
    """A DLPack producer over memory that `owner` keeps alive.

    `strides` None means NULL, row-major. `code` is 2 for fp16 and 4 for bf16.
    """

    def __init__(
        self,
        owner: Any,
        base: int,
        byte_offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        *,
        device: tuple[int, int],
        versioned: bool,
        code: int = 2,
    ) -> None:
        self.owner, self.device, self.versioned = owner, device, versioned
        self.streams: list[Any] = []
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(shape))(*strides)
        pointer = (
            ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)) if self._strides else None
        )
        self._tensor = Tensor(
            base, *device, len(shape), DataType(code, 16, 1), self._shape, pointer, byte_offset
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, **keywords: Any) -> Any:
        """A new capsule. An unversioned producer knows no keyword but `stream`, as before DLPack 1.0."""
        if keywords and not self.versioned:
            raise TypeError(f"__dlpack__() got unexpected keyword arguments {sorted(keywords)}")
        self.streams.append(stream)
        managed: Any
        if self.versioned and keywords.get("max_version") is not None:
            managed, name = (
                ManagedVersioned(1, 0, None, _delete, 0, self._tensor),
                b"dltensor_versioned",
            )
        else:
            managed, name = Managed(self._tensor, None, _delete), b"dltensor"
        address = ctypes.addressof(managed)
        _alive[address] = (managed, name, self)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(address, name, None)
