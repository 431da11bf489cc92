"""dlpack.py: what producers may hand over, byte by byte, and the capsules that rtflash hands out."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from capsules import Producer
from streams import spin

from rtflash import dlpack, memory, streams
from rtflash.dlpack import View
from rtflash.memory import Export

CPU, CUDA = (1, 0), (2, 0)
FP16, BF16, FP32 = (2, 16, 1), (4, 16, 1), (2, 32, 1)
VERSIONS = pytest.mark.parametrize("versioned", [False, True], ids=["unversioned", "versioned"])


def handmade(
    data: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    *,
    byte_offset: int = 0,
    dtype: tuple[int, int, int] = FP16,
    **options: Any,
) -> Producer:
    """A producer over memory that the test keeps alive."""
    code, bits, lanes = dtype
    return Producer(
        None, data, byte_offset, shape, strides, code=code, bits=bits, lanes=lanes, **options
    )


def buffer(elements: int = 64) -> np.ndarray:
    return np.arange(elements, dtype=np.float16)


@VERSIONS
@pytest.mark.parametrize("byte_offset", [0, 2, 6, 16, 34])
def test_case_b15_byte_offset(versioned: bool, byte_offset: int) -> None:
    values = buffer()
    made = handmade(
        values.ctypes.data, (2, 4), (8, 1), byte_offset=byte_offset, versioned=versioned
    )
    view = dlpack.borrow(made, None)
    assert view == (values.ctypes.data + byte_offset, (2, 4), (8, 1), "fp16", -1)
    start = byte_offset // 2
    expected = values[start : start + 16].reshape(2, 8)[:, :4]
    np.testing.assert_array_equal(memory.over_host(view, view), expected)


@VERSIONS
def test_odd_byte_offset(versioned: bool) -> None:
    raw = np.zeros(65, np.uint8)
    raw[1:].view(np.float16)[:] = np.arange(32)
    view = dlpack.borrow(
        handmade(raw.ctypes.data, (4, 8), byte_offset=1, versioned=versioned), None
    )
    assert view.ptr == raw.ctypes.data + 1
    np.testing.assert_array_equal(
        memory.over_host(view, view), np.arange(32, dtype=np.float16).reshape(4, 8)
    )


@VERSIONS
@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3, 4), (12, 4, 1)), ((5, 1, 8), (8, 8, 1)), ((), ())]
)
def test_null_strides_are_row_major(
    versioned: bool, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    view = dlpack.borrow(handmade(buffer().ctypes.data, shape, versioned=versioned), None)
    assert (view.shape, view.strides) == (shape, strides)


def test_negative_strides() -> None:
    values = buffer(12)
    view = dlpack.borrow(handmade(values.ctypes.data, (3, 4), (-4, 1), byte_offset=16), None)
    np.testing.assert_array_equal(memory.over_host(view, view), values.reshape(3, 4)[::-1])
    assert memory.extent(view) == (values.ctypes.data, values.nbytes)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (FP16, "fp16"),
        (BF16, "bf16"),
        (FP32, "fp32"),
        ((2, 64, 1), "float64"),
        ((0, 32, 1), "int32"),
        ((0, 64, 1), "int64"),
        ((1, 16, 1), "uint16"),
        ((6, 8, 1), "bool"),
        ((10, 8, 1), "DLPack type 10 of 8 bits"),
    ],
)
def test_dtypes(dtype: tuple[int, int, int], name: str) -> None:
    assert dlpack.borrow(handmade(buffer().ctypes.data, (2, 2), dtype=dtype), None).dtype == name


@pytest.mark.parametrize(
    ("device", "index"), [((1, 0), -1), ((3, 0), -1), ((2, 1), 1), ((13, 0), 0)], ids=str
)
def test_devices(device: tuple[int, int], index: int) -> None:
    made = handmade(buffer().ctypes.data, (2, 2), device=device)
    assert dlpack.device(made) == index
    assert dlpack.borrow(made, None).device == index


@VERSIONS
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": (10, 0)}, TypeError, r"k is on ROCm \(DLPack device type 10\)"),
        ({"device": (8, 0)}, TypeError, "k is on Metal"),
        ({"device": (99, 0)}, TypeError, "k is on an unknown device"),
        ({"dtype": (2, 16, 4)}, TypeError, "k has elements of 4 lanes"),
        ({"data": 0}, ValueError, r"k has shape \(2, 2\) and no address"),
    ],
    ids=["rocm", "metal", "unknown", "lanes", "null"],
)
def test_refusals_give_the_tensor_back(
    versioned: bool, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    made = handmade(
        **{"data": buffer().ctypes.data, "shape": (2, 2), "versioned": versioned, **options}
    )
    with pytest.raises(error, match=message):
        dlpack.borrow(made, None, "k")
    gc.collect()
    assert made.deleted == 1


def give_back(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


@pytest.mark.parametrize("answer", [None, ("cpu", 0), (1,), BufferError("no"), 1], ids=str)
def test_broken_devices_name_the_argument(answer: Any) -> None:
    producer = type("Broken", (), {"__dlpack_device__": lambda self: give_back(answer)})()
    with pytest.raises(TypeError, match="k's __dlpack_device__ must give two whole numbers"):
        dlpack.device(producer, "k")


def test_a_tensor_that_is_not_exported_is_named() -> None:
    refusal = BufferError("read-only")
    producer = type("Broken", (), {"__dlpack__": lambda self, **_: give_back(refusal)})()
    with pytest.raises(TypeError, match="k's __dlpack__ does not export it: read-only"):
        dlpack.borrow(producer, None, "k")


def test_unknown_major_version() -> None:
    made = handmade(buffer().ctypes.data, (2, 2), version=(2, 1))
    with pytest.raises(TypeError, match=r"v came as DLPack 2\.1"):
        dlpack.borrow(made, None, "v")
    gc.collect()
    assert made.deleted == 1


def test_no_elements_need_no_address() -> None:
    view = dlpack.borrow(handmade(0, (2, 0, 4), byte_offset=3), None)
    assert (view.ptr, view.shape, view.strides) == (0, (2, 0, 4), (0, 4, 1))
    assert memory.over_host(view, view).shape == (2, 0, 4)


def test_read_only_is_accepted() -> None:
    values = buffer(4)
    values.flags.writeable = False
    view = dlpack.borrow(handmade(values.ctypes.data, (4,), flags=1), None)
    assert view.shape == (4,)
    assert view.read_only
    assert not memory.over_host(view, view).flags.writeable
    writable = dlpack.borrow(handmade(values.ctypes.data, (4,), flags=2), None)
    assert memory.over_host(writable, writable).flags.writeable


@VERSIONS
def test_deleter_runs_once_after_the_last_user(versioned: bool) -> None:
    made = handmade(buffer().ctypes.data, (2, 2), versioned=versioned)
    view = dlpack.borrow(made, None)
    array = memory.over_host(view, view)
    part = array[0]
    del view, array
    gc.collect()
    assert made.deleted == 0
    del part
    gc.collect()
    assert made.deleted == 1


@VERSIONS
def test_a_capsule_is_consumed_once(versioned: bool) -> None:
    made = handmade(buffer().ctypes.data, (2, 2), versioned=versioned)
    capsule = made.__dlpack__(**({"max_version": (1, 0)} if versioned else {}))
    _, owner = dlpack.consume(capsule, "q")
    assert f"used_dltensor{'_versioned' * versioned}" in repr(capsule)
    with pytest.raises(ValueError, match="q's __dlpack__ gave a capsule that was consumed before"):
        dlpack.consume(capsule, "q")
    del owner, capsule
    assert made.deleted == 1


def test_not_a_capsule() -> None:
    with pytest.raises(
        TypeError, match="q's __dlpack__ gave 7; it must give a capsule named dltensor"
    ):
        dlpack.consume(7, "q")


@pytest.mark.parametrize(
    ("versioned", "stream", "keywords"),
    [
        (True, None, {"max_version": (1, 0)}),
        (True, 77, {"max_version": (1, 0), "stream": 77}),
        (False, None, {}),
        (False, 77, {"stream": 77}),
        (False, 0, {"stream": 1}),
    ],
)
def test_request(versioned: bool, stream: int | None, keywords: dict[str, Any]) -> None:
    """Keywords that a producer does not know are left out; CUDA's stream 0 goes by the protocol's name for it, 1."""
    made = handmade(buffer().ctypes.data, (2, 2), device=CUDA, versioned=versioned)
    dlpack.borrow(made, stream)
    assert made.keywords == keywords


def test_request_without_stream_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer that takes no stream has its tensor ready for the legacy default stream: ours waits for that one."""
    made = handmade(buffer().ctypes.data, (2, 2), device=(2, 3))
    monkeypatch.setattr(Producer, "__dlpack__", lambda self, give=Producer.__dlpack__: give(self))
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(dlpack, "order", lambda *arguments: calls.append(arguments))
    dlpack.borrow(made, 77)
    assert calls == [(1, 77, 3)]


def test_one_stream_needs_no_event() -> None:
    """Nothing is recorded, so neither CuPy nor a GPU is needed."""
    streams.order(5, 5, 0)
    streams.order(0, 1, 0)


def test_cupy_stream() -> None:
    pytest.importorskip("cupy")
    assert streams.cupy_stream(12345).ptr == 12345


@VERSIONS
@pytest.mark.parametrize(
    ("name", "code", "dtype"),
    [("fp16", 2, np.float16), ("bf16", 4, np.uint16), ("fp32", 2, np.float32)],
)
def test_export(versioned: bool, name: str, code: int, dtype: type) -> None:
    array = np.arange(12, dtype=dtype).reshape(3, 4)
    export = Export(array, name)
    capsule = export.__dlpack__(max_version=(1, 1) if versioned else None)
    assert ('"dltensor_versioned"' in repr(capsule)) == versioned
    tensor, owner = dlpack.consume(capsule, "out")
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (
        code,
        array.itemsize * 8,
        1,
    )
    assert (tensor.device.device_type, tensor.device.device_id) == export.__dlpack_device__() == CPU
    assert dlpack.describe(tensor, "out") == View(array.ctypes.data, (3, 4), (4, 1), name, -1)
    del owner


@VERSIONS
@pytest.mark.parametrize("consumed", [False, True])
def test_export_keeps_its_memory_no_longer_than_needed(versioned: bool, consumed: bool) -> None:
    array = np.arange(12, dtype=np.uint16)
    alive = weakref.ref(array)
    capsule: object = Export(array, "bf16").__dlpack__(max_version=(1, 0) if versioned else None)
    if consumed:
        tensor, owner = dlpack.consume(capsule, "out")
        capsule = owner
        del tensor, owner
    del array
    gc.collect()
    assert alive() is not None
    del capsule
    gc.collect()
    assert alive() is None


def test_export_lends_in_place_only() -> None:
    export = Export(buffer(), "fp16")
    with pytest.raises(BufferError, match="without a copy"):
        export.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="without a copy"):
        export.__dlpack__(dl_device=CUDA)
    export.__dlpack__(copy=False, dl_device=CPU)


def test_consumer_errors_survive() -> None:
    """A destructor or deleter in Python would run while NumPy's error is on its way, and swallow it."""
    with pytest.raises((RuntimeError, BufferError), match=r"(?i)dtype"):
        np.from_dlpack(Export(np.zeros(4, np.uint16), "bf16"))
    with pytest.raises(TypeError, match="divmod expected 2 arguments"):
        divmod(np.from_dlpack(Export(buffer(), "fp16")), 1, 2)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_export_to_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    array = np.arange(12, dtype=np.float32 if name == "fp32" else np.uint16).reshape(3, 4)
    got = torch.from_dlpack(Export(array, name))
    assert got.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[name]
    assert (got.data_ptr(), tuple(got.shape), got.stride()) == (array.ctypes.data, (3, 4), (4, 1))


def test_export_to_jax() -> None:
    jax = pytest.importorskip("jax")
    array = np.array([[0x3F80, 0x4000], [0x4040, 0x4080]], np.uint16)  # 1, 2, 3, 4
    got = jax.dlpack.from_dlpack(Export(array, "bf16"))
    assert got.dtype == jax.numpy.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), [[1, 2], [3, 4]])


@pytest.mark.gpu
@VERSIONS
@pytest.mark.parametrize("byte_offset", [0, 2, 128, 8])
def test_gpu_case_b15_byte_offset(versioned: bool, byte_offset: int) -> None:
    import cupy

    values = cupy.arange(256, dtype=cupy.uint16).view(cupy.float16)
    made = handmade(
        values.data.ptr, (2, 64), device=CUDA, byte_offset=byte_offset, versioned=versioned
    )
    view = dlpack.borrow(made, cupy.cuda.get_current_stream().ptr)
    assert view.ptr == values.data.ptr + byte_offset
    got = memory.over_device(view, view, np.dtype(np.float16))
    start = byte_offset // 2
    cupy.testing.assert_array_equal(
        got.view(cupy.uint16), cupy.arange(start, start + 128, dtype=cupy.uint16).reshape(2, 64)
    )
    assert made.keywords["stream"] == 1
    del view
    assert made.deleted == 0
    del got
    assert made.deleted == 1


@pytest.mark.gpu
@pytest.mark.parametrize("byte_offset", [1, 2, 3])
@pytest.mark.parametrize("strides", [(64, 1), (128, 2), (-64, 1)])
def test_gpu_packed_copies(byte_offset: int, strides: tuple[int, int]) -> None:
    """Any alignment and any strides, negative ones included."""
    import cupy

    raw = np.random.default_rng(0).integers(0, 256, 1024, np.uint8)
    there = cupy.asarray(raw)
    first = byte_offset + (128 if strides[0] < 0 else 0)
    made = handmade(there.data.ptr, (2, 64), strides, device=CUDA, byte_offset=first, dtype=BF16)
    view = dlpack.borrow(made, 0)
    got = memory.packed_export(view, cupy.cuda.get_current_stream().ptr)
    assert got.array.flags.c_contiguous
    host = View(raw.ctypes.data + first, view.shape, view.strides, "bf16", -1)
    np.testing.assert_array_equal(got.array.get(), memory.over_host(host, raw))


@pytest.mark.gpu
def test_gpu_order_and_export_to_torch() -> None:
    """A consumer on another stream sees what ours writes late, and the host waits for neither."""
    cupy, torch = pytest.importorskip("cupy"), pytest.importorskip("torch")
    ours = cupy.cuda.Stream(non_blocking=True)
    theirs = torch.cuda.Stream()
    spin(ours.ptr, 1000)
    torch.zeros(1, device="cuda")
    for attempt in range(10):
        with ours:
            array = cupy.zeros(1 << 20, cupy.uint16)
            spin(ours.ptr)
            array.fill(0x3F80)
        with torch.cuda.stream(theirs):
            got = torch.from_dlpack(Export(array, "bf16", 0, ours.ptr))
            total = got.float().sum()
        assert attempt == 0 or not ours.done  # the first one compiles
        theirs.synchronize()
        assert total.item() == 1 << 20


@pytest.mark.gpu
def test_gpu_keep() -> None:
    """An owner stays until the stream has passed the launch, then goes with a later call."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    owners = [buffer(), buffer()]
    alive = [weakref.ref(owner) for owner in owners]
    spin(stream.ptr)
    streams.keep(owners.pop(0), stream.ptr, 0)
    streams.keep(buffer(), stream.ptr, 0)
    assert alive[0]() is not None
    stream.synchronize()
    streams.keep(owners.pop(0), stream.ptr, 0)
    assert alive[0]() is None
    assert alive[1]() is not None
