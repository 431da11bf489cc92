"""DLPack by ctypes: borrow a producer's tensor as a View.

Structures and constants are those of dlpack.h 1.0 (https://dmlc.github.io/dlpack/latest/c_api.html), the protocol
that of https://dmlc.github.io/dlpack/latest/python_spec.html. Nothing here blocks the host.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from .streams import LEGACY_STREAM, order

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
HOST_TYPES = (CPU, CUDA_HOST)
CUDA_TYPES = (CUDA, CUDA_MANAGED)
OTHER_TYPES = {
    4: "OpenCL",
    7: "Vulkan",
    8: "Metal",
    9: "VPI",
    10: "ROCm",
    11: "ROCm host",
    12: "an extension device",
    14: "oneAPI",
    15: "WebGPU",
    16: "Hexagon",
    17: "MAIA",
    18: "Trainium",
}

# (DLDataTypeCode, bits) of one lane.
DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    (2, 16): "fp16",
    (2, 32): "fp32",
    (2, 64): "float64",
    (4, 16): "bf16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
}
CODES = {name: code for code, name in DTYPES.items()}

MAX_VERSION = (1, 0)
READ_ONLY = 1  # of a versioned tensor's flags


class View(NamedTuple):
    """Where a tensor's elements are, and of what kind. Nothing is owned.

    Attributes
    ----------
    ptr : address of the first element, byte offsets included; 0 is possible where there are no elements.
    shape : sizes (any tuple type; torch's is torch.Size).
    strides : steps in elements; those of size-1 dimensions mean nothing.
    dtype : "fp16", "bf16", "fp32", else as NumPy would say ("int32", "float64", "bool").
    device : CUDA device index; -1 = host (-1 - i: device i of JAX's that are all the host).
    """

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int


class Borrowed(View):
    """A View that keeps `owner`, the object whose memory it shows, alive; `read_only`: nobody may write there."""

    owner: object
    read_only: bool = False


class DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class DLPackVersion(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("version", DLPackVersion),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )


def _immortal(value: Any) -> Any:
    """`value`, never freed: C code may still hold its address while the interpreter shuts down."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return value


# Capsules by their structure: name, name once consumed (a capsule keeps the name's address), structure.
VERSIONED = (b"dltensor_versioned", _immortal(b"used_dltensor_versioned"), DLManagedTensorVersioned)
UNVERSIONED = (b"dltensor", _immortal(b"used_dltensor"), DLManagedTensor)

# A deleter runs with the GIL held, as it does when a capsule's own destructor calls it.
DELETER = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_capsule_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


class Managed:
    """A consumed capsule's tensor: the producer's deleter is called once, when this is collected."""

    __slots__ = ("address", "delete", "read_only")

    def __init__(self, address: int, deleter: int | None, read_only: bool = False) -> None:
        self.address = address
        self.read_only = read_only
        self.delete = DELETER(deleter) if deleter else None

    def __del__(self) -> None:
        if self.delete is not None:
            self.delete(self.address)


def device(producer: Any, name: str = "tensor") -> int:
    """The CUDA index of the device that holds a producer's tensor; -1 = host memory, pinned memory included.

    Raises
    ------
    TypeError
        Another kind of device, or none that the producer can tell.
    """
    try:
        kind, index = map(int, producer.__dlpack_device__())
    except (TypeError, ValueError, BufferError) as error:
        raise TypeError(
            f"{name}'s __dlpack_device__ must give two whole numbers, the device's type and index: {error}"
        ) from error
    return device_index(kind, index, name)


def device_index(kind: int, index: int, name: str) -> int:
    """CUDA index of a DLPack device, -1 = host."""
    if kind in CUDA_TYPES:
        return index
    if kind in HOST_TYPES:
        return -1
    known = OTHER_TYPES.get(kind, "an unknown device")
    raise TypeError(
        f"{name} is on {known} (DLPack device type {kind}); it must be on a CUDA device or the host"
    )


def borrow(producer: Any, stream: int | None, name: str = "tensor") -> Borrowed:
    """View a producer's tensor in place.

    Parameters
    ----------
    producer : an object with `__dlpack__` and `__dlpack_device__`.
    stream : the CUDA stream that will read the tensor: it waits for the producer's work. None for host tensors.
    name : the argument's name, for errors.

    Returns
    -------
    Borrowed
        Keeps the tensor alive; once it is dropped the producer may reuse the memory, see `streams.keep`.

    Raises
    ------
    TypeError
        A device or an element that is not one number (lanes), an object that `__dlpack__` should not return, or a
        tensor that the producer does not export.
    ValueError
        A capsule that was consumed before, or a tensor with elements and no address.
    """
    try:
        capsule = request(producer, stream, name)
    except BufferError as error:
        raise TypeError(f"{name}'s __dlpack__ does not export it: {error}") from error
    tensor, managed = consume(capsule, name)
    view = Borrowed(*describe(tensor, name))
    view.owner, view.read_only = managed, managed.read_only
    return view


def request(producer: Any, stream: int | None, name: str) -> object:
    """A producer's capsule, asked for in the newest form that the producer understands."""
    ordered = {} if stream is None else {"stream": stream or LEGACY_STREAM}
    for keywords in ({**ordered, "max_version": MAX_VERSION}, ordered):
        try:
            return producer.__dlpack__(**keywords)
        except TypeError:
            continue
    capsule = producer.__dlpack__()
    if stream is not None:
        # A producer that is given no stream prepares its tensor for the legacy default stream.
        order(LEGACY_STREAM, stream, device(producer, name))
    return capsule


def consume(capsule: object, name: str) -> tuple[DLTensor, Managed]:
    """Take a capsule's tensor over: the capsule is renamed, the deleter is ours to call."""
    for unused, used, structure in (VERSIONED, UNVERSIONED):
        if not _capsule_is(capsule, unused):
            continue
        address = _capsule_pointer(capsule, unused)
        _capsule_rename(capsule, used)
        struct: Any = structure.from_address(address)
        versioned = structure is DLManagedTensorVersioned
        managed = Managed(address, struct.deleter, versioned and bool(struct.flags & READ_ONLY))
        if versioned and struct.version.major != MAX_VERSION[0]:
            version = f"{struct.version.major}.{struct.version.minor}"
            raise TypeError(f"{name} came as DLPack {version}; its major version must be 1")
        return struct.dl_tensor, managed
    if any(_capsule_is(capsule, used) for _, used, _ in (VERSIONED, UNVERSIONED)):
        raise ValueError(
            f"{name}'s __dlpack__ gave a capsule that was consumed before; a new one is needed"
        )
    raise TypeError(
        f"{name}'s __dlpack__ gave {capsule!r}; it must give a capsule named dltensor or dltensor_versioned"
    )


def describe(tensor: DLTensor, name: str) -> View:
    """A DLTensor's fields as a View."""
    index = device_index(tensor.device.device_type, tensor.device.device_id, name)
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    if lanes != 1:
        raise TypeError(f"{name} has elements of {lanes} lanes; they must be single numbers")
    ndim = tensor.ndim
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    strides = tuple(tensor.strides[:ndim]) if ndim and tensor.strides else row_major(shape)
    if not tensor.data and 0 not in shape:
        raise ValueError(f"{name} has shape {shape} and no address; it must have memory")
    dtype = DTYPES.get((code, bits), f"DLPack type {code} of {bits} bits")
    ptr = tensor.data + tensor.byte_offset if tensor.data else 0
    return View(ptr, shape, strides, dtype, index)


def is_read_only(view: View) -> bool:
    """Whether a View's producer says that it must not be written."""
    return isinstance(view, Borrowed) and view.read_only


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a packed array whose last index is the fastest."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def itemsize(dtype: str) -> int:
    """Bytes of an element of a View's dtype."""
    return CODES[dtype][1] // 8


def address(producer: Any) -> int:
    """Address of a producer's first element, 0 where there is none; nothing is taken over, and nothing waited for."""
    capsule = producer.__dlpack__()  # frees the structure when it goes
    pointer = _capsule_pointer(capsule, UNVERSIONED[0])
    return ctypes.c_void_p.from_address(pointer).value or 0


def relabel(capsule: object, dtype: str, device: tuple[int, int]) -> object:
    """A fresh capsule, its element type and device corrected to a View's dtype of the same size and a DLPack device."""
    for name, _, structure in (VERSIONED, UNVERSIONED):
        if _capsule_is(capsule, name):
            struct: Any = structure.from_address(_capsule_pointer(capsule, name))
            struct.dl_tensor.dtype.code = CODES[dtype][0]
            struct.dl_tensor.device = DLDevice(*device)
    return capsule
