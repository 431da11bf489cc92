"""Hand-made DLPack capsules, written byte by byte, apart from rtflash's structures.

Layout: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

CUDA, HOST = 2, 1


class Producer:
    """A DLPack producer over memory that `owner` keeps alive.

    `strides` None means NULL, row-major. An element has the type `code` (2 for fp16, 4 for bf16), `bits` and `lanes`.
    An unversioned producer knows no keyword but `stream`, as before DLPack 1.0. `deleted` counts the deleter's calls,
    `keywords` are those of the last request.
    """

    def __init__(
        self,
        owner: Any,
        base: int,
        byte_offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        *,
        device: tuple[int, int] = (HOST, 0),
        versioned: bool = True,
        version: tuple[int, int] = (1, 0),
        flags: int = 0,
        code: int = 2,
        bits: int = 16,
        lanes: int = 1,
    ) -> None:
        self.owner, self.device, self.versioned = owner, device, versioned
        self.version, self.flags = version, flags
        self.deleted = 0
        self.keywords: dict[str, Any] = {}
        self.arrays = [
            None if values is None else (ctypes.c_int64 * len(values))(*values)
            for values in (shape, strides)
        ]
        addresses = [0 if array is None else ctypes.addressof(array) for array in self.arrays]
        self.tensor = struct.pack(
            "<QiiiBBHQQQ", base, *device, len(shape), code, bits, lanes, *addresses, byte_offset
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        """A new capsule, versioned if the producer is and the consumer says that it understands it."""
        if not self.versioned and keywords.keys() - {"stream"}:
            raise TypeError(f"__dlpack__() got unexpected keyword arguments {sorted(keywords)}")
        self.keywords = keywords
        manager = (0, ctypes.cast(delete, ctypes.c_void_p).value)
        if self.versioned and keywords.get("max_version") is not None:
            name = DLTENSOR_VERSIONED
            packed = struct.pack("<IIQQQ", *self.version, *manager, self.flags) + self.tensor
        else:
            name, packed = DLTENSOR, self.tensor + struct.pack("<QQ", *manager)
        block = ctypes.create_string_buffer(packed, len(packed))
        lent[ctypes.addressof(block)] = (block, self)
        return new_capsule(ctypes.addressof(block), name, None)


# Structure and producer by the structure's address. Never freed: a consumer reads the structure until it calls the
# deleter, and may do that at any later time.
lent: dict[int, tuple[Any, Producer]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def delete(address: int) -> None:
    """The deleter of all capsules."""
    lent[address][1].deleted += 1


# A capsule keeps its name's address.
DLTENSOR, DLTENSOR_VERSIONED = b"dltensor", b"dltensor_versioned"
new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
