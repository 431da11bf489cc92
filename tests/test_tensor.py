"""tensor.py: every library's tensors as Views, and results back in it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from streams import spin

from rtflash import memory, tensor
from rtflash.dlpack import View, row_major
from rtflash.memory import Export
from rtflash.tensor_base import numpy_dtype

BF16_ONES = 0x3F80


def run(code: str, **environment: str) -> str:
    """Output of a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Lent:
    """A DLPack producer of a library that has no `from_dlpack`."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.export = Export(array, dtype)

    def __dlpack__(self, **keywords: Any) -> object:
        return self.export.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.export.__dlpack_device__()


# Recognition


@pytest.mark.parametrize("x", [None, 3.0, [[1.0]], "q", np.float16(1), object()], ids=type)
def test_not_a_tensor(x: Any) -> None:
    with pytest.raises(TypeError, match=r"^k is a .*; it must be a torch\.Tensor, jax\.Array"):
        tensor.framework(x, "k")


def test_a_framework_is_one_object() -> None:
    class Sub(np.ndarray):
        pass

    x = np.zeros(3, np.float16)
    assert tensor.framework(x) is tensor.framework(x.view(Sub)) is tensor.framework(x)
    assert tensor.framework(x).name == "numpy"


@pytest.mark.parametrize("library", ["numpy", "torch", "producer"])
def test_threads_that_meet_a_library_first_get_one_object(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """Otherwise q and k of one library would be refused as of two."""

    class Slow(Lent):
        def __array_namespace__(self, api_version: str | None = None) -> Any:
            time.sleep(0.001)
            return np

    def fresh() -> Any:
        if library == "torch":
            return pytest.importorskip("torch").ones(1)
        values = np.zeros(1, np.float16)
        return values if library == "numpy" else type("Fresh", (Slow,), {})(values, "fp16")

    threads = 8
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(20):
                monkeypatch.setattr(tensor, "_by_type", {})
                monkeypatch.setattr(tensor, "_by_library", {})
                x, barrier = fresh(), threading.Barrier(threads)

                def meet(_: int, x: Any = x, barrier: Any = barrier) -> Any:
                    barrier.wait(60)
                    return tensor.framework(x)

                assert len({id(found) for found in list(pool.map(meet, range(threads)))}) == 1
    finally:
        sys.setswitchinterval(interval)


def test_masked_array() -> None:
    with pytest.raises(TypeError, match=r"v is a .*MaskedArray, whose mask would be ignored"):
        tensor.framework(np.ma.zeros(3), "v")


def test_nothing_is_imported_for_numpy() -> None:
    code = """
        import sys, numpy
        from rtflash import tensor
        x = numpy.zeros((2, 3), numpy.float16)
        tensor.framework(x).view(x)
        print([name for name in ("torch", "jax", "cupy") if name in sys.modules])
    """
    assert run(code) == "[]"


# Views and copies


@pytest.mark.parametrize(
    ("shape", "strides", "ptr", "dtype", "copy"),
    [
        ((2, 3, 4, 8), (96, 32, 8, 1), 64, "bf16", False),
        ((2, 3, 4, 8), (0, -32, 8, 1), 66, "bf16", False),
        ((2, 3, 4, 8), (96, 32, 8, 2), 64, "bf16", True),
        ((2, 3, 4, 8), (96, 32, 8, -1), 64, "bf16", True),
        ((2, 3, 4, 8), (96, 32, 8, 0), 64, "bf16", True),
        ((2, 3, 4, 1), (96, 32, 8, 7), 64, "bf16", False),
        ((2, 3, 4, 8), (96, 32, 8, 1), 65, "bf16", True),
        ((2, 3, 4, 1), (96, 32, 8, 1), 65, "bf16", True),
        ((0, 3, 4, 8), (96, 32, 8, 2), 65, "bf16", False),
        ((8,), (1,), 66, "fp32", True),
        ((), (), 64, "fp32", False),
    ],
)
def test_needs_copy(shape: Any, strides: Any, ptr: int, dtype: str, copy: bool) -> None:
    assert tensor.needs_copy(View(ptr, shape, strides, dtype, 0)) is copy


def test_numpy_views() -> None:
    base = np.zeros((4, 6, 8), np.float16)
    fw = tensor.framework(base)
    assert fw.view(base) == (base.ctypes.data, (4, 6, 8), (48, 8, 1), "fp16", -1)
    turned = base[::-1, ::2]
    assert fw.view(turned) == (turned.ctypes.data, (4, 3, 8), (-48, 16, 1), "fp16", -1)
    assert fw.view(np.broadcast_to(base[0], (5, 6, 8))).strides == (0, 8, 1)
    assert fw.view(np.zeros((), np.int32))[1:] == ((), (), "int32", -1)
    assert fw.view(np.zeros((0, 3), np.float32)).shape == (0, 3)
    base.flags.writeable = False
    assert fw.view(base).ptr == base.ctypes.data
    assert [fw.view(np.zeros(1, kind)).dtype for kind in ("f4", "f8", "i8", "?", "O")] == [
        *("fp32", "float64", "int64", "bool", "object")
    ]


def test_numpy_byte_order_and_odd_strides() -> None:
    swapped = np.zeros(3, np.dtype(np.float16).newbyteorder())
    with pytest.raises(TypeError, match=r"q has byte order .*; it must be native"):
        tensor.framework(swapped).view(swapped, "q")
    records = np.zeros(4, [("x", "f2"), ("y", "u1")])["x"]
    with pytest.raises(ValueError, match=r"q has strides \(3,\) in bytes"):
        tensor.framework(records).view(records, "q")
    assert tensor.framework(records).view(records[:1]).shape == (1,)


def test_numpy_contiguous() -> None:
    x = np.arange(24, dtype=np.float16).reshape(4, 6)[:, ::2]
    fw = tensor.framework(x)
    packed = fw.contiguous(x)
    assert not tensor.needs_copy(fw.view(packed))
    np.testing.assert_array_equal(packed, x)
    raw = np.zeros(65, np.uint8)[1:].view(np.float16)
    assert tensor.needs_copy(fw.view(raw))
    assert not tensor.needs_copy(fw.view(fw.contiguous(raw)))


def test_case_b41_numpy_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.ones((2, 3), ml_dtypes.bfloat16)
    fw = tensor.framework(x)
    assert fw.view(x).dtype == "bf16"
    assert fw.host(x) is x
    assert fw.from_host(x, "bf16") is not None
    assert fw.from_host(x.view(np.uint16), "bf16").dtype == ml_dtypes.bfloat16
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="pip install ml_dtypes"):
        fw.from_host(x.view(np.uint16), "bf16")


# PyTorch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_torch_views(torch: Any) -> None:
    x = torch.zeros(4, 6, 8, dtype=torch.bfloat16)
    fw = tensor.framework(x)
    assert fw.view(x) == (x.data_ptr(), (4, 6, 8), (48, 8, 1), "bf16", -1)
    turned = x.transpose(0, 1)[1:]
    assert fw.view(turned) == (x.data_ptr() + 16, (5, 4, 8), (8, 48, 1), "bf16", -1)
    assert fw.view(x[:1].expand(7, 6, 8)).strides == (0, 8, 1)
    assert fw.view(torch.zeros(0, 3, dtype=torch.float16)) == (0, (0, 3), (3, 1), "fp16", -1)
    assert fw.view(torch.tensor(1.0)).shape == ()
    kinds = (torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64)
    assert [fw.view(torch.ones(1, dtype=kind)).dtype for kind in kinds] == [
        *("fp32", "float64", "int32", "bool", "complex64")
    ]


def test_torch_subclasses(torch: Any) -> None:
    class Sub(torch.Tensor):
        pass

    x = torch.zeros(2, 3)
    parameter = torch.nn.Parameter(x)
    assert (
        tensor.framework(x) is tensor.framework(parameter) is tensor.framework(x.as_subclass(Sub))
    )
    with torch.no_grad():
        assert tensor.framework(parameter).view(parameter).ptr == x.data_ptr()


def kinds_without_plain_memory(torch: Any) -> dict[str, Any]:
    square, parts = torch.eye(4), [torch.ones(2), torch.ones(3)]
    return {
        "sparse_coo": square.to_sparse(),
        "sparse_csr": square.to_sparse_csr(),
        "nested": torch.nested.nested_tensor(parts),
        "NestedTensor": torch.nested.nested_tensor(parts, layout=torch.jagged),
        "meta": torch.empty(2, device="meta"),
        "resolve_neg": torch.ones(2, dtype=torch.complex64).conj().imag,
        "zero tensor": torch._efficientzerotensor((2,)),
        "functional": torch._to_functional_tensor(torch.ones(2)),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "word",
    [
        *("sparse_coo", "sparse_csr", "nested", "NestedTensor", "meta"),
        *("resolve_neg", "zero tensor", "functional"),
    ],
)
def test_torch_tensors_without_plain_memory(torch: Any, word: str) -> None:
    x = kinds_without_plain_memory(torch)[word]
    with pytest.raises(TypeError, match=f"^q .*{word}"):
        tensor.framework(x, "q").view(x, "q")


@pytest.mark.filterwarnings("ignore")
def test_torch_dtypes_of_other_kinds(torch: Any) -> None:
    """Left to the check of dtypes: nothing reads through these."""
    quantized = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8)
    conjugate = torch.ones(2, dtype=torch.complex64).conj()
    assert tensor.framework(quantized).view(quantized).dtype == "quint8"
    assert tensor.framework(conjugate).view(conjugate).dtype == "complex64"


def test_torch_transforms(torch: Any) -> None:
    def call(x: Any) -> Any:
        tensor.framework(x).view(x, "q")
        return x

    with pytest.raises(TypeError, match=r"q has no memory of its own \(a torch\.func transform"):
        torch.func.vmap(call)(torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"q has no memory of its own \(a torch\.func transform"):
        torch.func.grad(lambda x: call(x).sum())(torch.ones(3))


def test_torch_other_devices(torch: Any) -> None:
    fake = types.SimpleNamespace(device=types.SimpleNamespace(type="mps"), is_cuda=False)
    with pytest.raises(TypeError, match=r"q is on .*mps.*; it must be on a CUDA device or the CPU"):
        tensor.framework(torch.ones(1)).checked_view(fake, "q")  # type: ignore[attr-defined]


def test_torch_contiguous(torch: Any) -> None:
    x = torch.arange(48, dtype=torch.bfloat16).reshape(2, 4, 6)[..., ::2].requires_grad_()
    fw = tensor.framework(x)
    packed = fw.contiguous(x)
    assert not tensor.needs_copy(fw.view(packed))
    assert not packed.requires_grad
    assert torch.equal(packed, x)
    raw = bytearray(64)
    odd = torch.frombuffer(raw, dtype=torch.float16, count=20, offset=1).view(5, 4)[:, ::3]
    odd.copy_(torch.arange(10).view(5, 2))
    assert odd.data_ptr() % 2 == 1
    packed = fw.contiguous(odd)
    assert not tensor.needs_copy(fw.view(packed))
    assert torch.equal(packed, torch.arange(10, dtype=torch.float16).view(5, 2))


@pytest.mark.parametrize("with_ml_dtypes", [False, True])
def test_torch_host(torch: Any, monkeypatch: pytest.MonkeyPatch, with_ml_dtypes: bool) -> None:
    """No copy either way; bf16 travels as bits where ml_dtypes is missing."""
    if with_ml_dtypes:
        pytest.importorskip("ml_dtypes")
    else:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    fw = tensor.framework(torch.ones(1))
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        x = torch.ones(3, 4, dtype=dtype, requires_grad=True).transpose(0, 1)
        array = fw.host(x)
        assert (array.ctypes.data, array.shape) == (x.data_ptr(), (4, 3))
        if name == "bf16":
            assert array.dtype == (numpy_dtype("bf16") if with_ml_dtypes else np.uint16)
        back = fw.from_host(np.ascontiguousarray(array), name)
        assert back.dtype == dtype
        assert torch.equal(back, x)
    assert fw.from_host(fw.host(torch.ones(0, 2, dtype=torch.bfloat16)), "bf16").shape == (0, 2)


def test_torch_outputs(torch: Any) -> None:
    fw = tensor.framework(torch.ones(1))
    out = fw.empty((2, 3), "bf16", -1)
    assert (out.dtype, out.shape, out.device.type) == (torch.bfloat16, (2, 3), "cpu")
    assert fw.pointer(out) == out.data_ptr()
    assert fw.result(out) is out
    assert fw.hold(0, 0, ()) is None


def test_torch_needs_grad(torch: Any) -> None:
    fw, x = tensor.framework(torch.ones(1)), torch.ones(1, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"^k requires grad"):
        fw.view(x, "k")
    assert fw.view(x.detach()).shape == (1,)
    with torch.no_grad():
        assert fw.view(x).shape == (1,)


def test_torch_inputs_at_once(torch: Any) -> None:
    """`see` gives the parts of the Views that `view` gives, or leaves tensors that it does not take to `view`."""
    fw = tensor.framework(torch.ones(1))
    q = torch.ones(24, dtype=torch.bfloat16)[1:].as_strided((2, 3), (4, 2))
    lengths = torch.ones(3, dtype=torch.int32)
    fw.view(q)
    seen = fw.see((q, None, lengths))
    assert seen == (
        [q.data_ptr(), 0, lengths.data_ptr()],
        [
            (q.data_ptr() % 16, (2, 3), (4, 2), "bf16", -1),
            None,
            (lengths.data_ptr() % 16, (3,), (1,), "int32", -1),
        ],
        (),
    )
    imaginary = torch.ones(3, dtype=torch.complex64).conj().imag
    others = (torch.ones(0), torch.ones(1, requires_grad=True), imaginary, np.ones(1), "q")
    for x in others:
        assert fw.see((q, x)) is None
    assert tensor.framework(np.ones(1)).see((np.ones(1),)) is None


# JAX


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.fixture
def cpu(jax: Any) -> Any:
    """JAX's CPU device made the default."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield jax


@pytest.mark.parametrize("shape", [(2, 1, 4, 64), (1, 5, 1, 64), (0, 2, 1, 64)])
def test_case_b43_jax_on_the_host(cpu: Any, shape: tuple[int, ...]) -> None:
    jnp = cpu.numpy
    x = jnp.ones(shape, jnp.bfloat16)
    fw = tensor.framework(x)
    view = fw.view(x)
    assert (view.shape, view.dtype, view.device) == (shape, "bf16", -1)
    assert 0 in shape or view.strides == row_major(shape)
    array = fw.host(x)
    assert array.dtype == numpy_dtype("bf16")
    back = fw.from_host(array * 2, "bf16")
    assert back.dtype == x.dtype
    assert back.devices() == x.devices()
    np.testing.assert_array_equal(np.asarray(back + x), np.asarray(x) * 3)
    assert np.asarray(x).shape == shape


def test_jax_view_is_in_place(cpu: Any) -> None:
    x = cpu.numpy.ones((2, 3), cpu.numpy.float16)
    assert tensor.framework(x).view(x).ptr == x.unsafe_buffer_pointer()


def test_jax_deleted(cpu: Any) -> None:
    x = cpu.numpy.ones(3)
    x.delete()
    with pytest.raises(ValueError, match="k is a JAX array that was deleted or donated"):
        tensor.framework(x).view(x, "k")


def test_case_b43_jax_traced(cpu: Any) -> None:
    """A traced value is JAX's like any other."""
    x = cpu.numpy.ones((2, 3))

    def call(y: Any) -> Any:
        assert tensor.framework(y, "q") is tensor.framework(x)
        return y.sum()

    for transform in (cpu.jit, cpu.grad, cpu.vmap):
        transform(call)(x)


def test_jax_concrete_values_inside_jit(cpu: Any) -> None:
    """A concrete array that a traced function closes over is still concrete; so is the result."""
    x = cpu.numpy.ones((2, 3))

    @cpu.jit
    def call(y: Any) -> Any:
        fw = tensor.framework(x)
        return y + fw.from_host(fw.host(x) * 4, "fp32")

    np.testing.assert_array_equal(call(x), np.full((2, 3), 5, np.float32))


def test_jax_host_devices_are_apart(jax: Any) -> None:
    """The host as two devices of XLA's: different places in a View, results beside their inputs, no silent transfer."""
    code = """
        import jax, numpy
        from rtflash import tensor
        first, second = (jax.device_put(numpy.ones((4, 3), numpy.float16), d) for d in jax.devices())
        fw = tensor.framework(first)
        print([fw.view(x).device for x in (first, second)])
        with jax.transfer_guard("disallow"):
            outs = [fw.from_host(fw.host(x) * 2, "fp16", x) for x in (first, second)]
        print(*(out.devices() == x.devices() for out, x in zip(outs, (first, second))))
    """
    flags = "--xla_force_host_platform_device_count=2"
    lines = run(code, JAX_PLATFORMS="cpu", XLA_FLAGS=flags).splitlines()
    assert lines == ["[-1, -2]", "True True"]


def test_jax_sharded(jax: Any) -> None:
    code = """
        import jax, numpy
        from rtflash import tensor
        mesh = jax.sharding.Mesh(numpy.array(jax.devices()), "x")
        x = jax.device_put(numpy.ones((4, 3)), jax.NamedSharding(mesh, jax.P("x")))
        part = x.addressable_shards[1].data
        print(tensor.framework(part).view(part).shape)
        try:
            tensor.framework(x).view(x, "k")
        except ValueError as error:
            print(error)
    """
    flags = "--xla_force_host_platform_device_count=2"
    first, second = run(code, JAX_PLATFORMS="cpu", XLA_FLAGS=flags).splitlines()
    assert first == "(2, 3)"
    assert "k is spread over 2 devices; it must lie on one" in second


# Other libraries


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_producer_without_a_library(dtype: str) -> None:
    pytest.importorskip("ml_dtypes")
    bits = np.arange(12, dtype=np.uint32 if dtype == "fp32" else np.uint16).reshape(3, 4)
    values = bits if dtype == "bf16" else bits.view(np.float32 if dtype == "fp32" else np.float16)
    x = Lent(values.T, dtype)
    fw = tensor.framework(x)
    assert fw.view(x) == (values.ctypes.data, (4, 3), (1, 4), dtype, -1)
    np.testing.assert_array_equal(fw.host(x), values.T.view(numpy_dtype(dtype)))
    packed = fw.contiguous(x)
    assert not tensor.needs_copy(fw.view(packed))
    np.testing.assert_array_equal(fw.host(packed), fw.host(x))
    back = fw.from_host(np.ascontiguousarray(values), dtype)
    assert type(back) is np.ndarray
    assert back.dtype == numpy_dtype(dtype)


def test_producer_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is made by the `from_dlpack` of the array-API namespace, else of the top module."""

    class Ours(Lent):
        pass

    class Theirs(Lent):
        def __array_namespace__(self, api_version: str | None = None) -> Any:
            return types.SimpleNamespace(from_dlpack=lambda export: ("namespace", export))

    library = types.ModuleType("some_library")
    library.from_dlpack = lambda export: ("module", export)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_library", library)
    Ours.__module__ = "some_library.arrays"
    values = np.arange(6, dtype=np.uint16)
    for kind, word in ((Ours, "module"), (Theirs, "namespace")):
        fw = tensor.framework(kind(values, "bf16"))
        where, export = fw.from_host(values, "bf16")
        assert where == word
        assert (export.array.ctypes.data, export.dtype) == (values.ctypes.data, "bf16")


def test_producer_on_another_device() -> None:
    class Elsewhere(Lent):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 8, 0

    x = Elsewhere(np.zeros(3, np.float16), "fp16")
    with pytest.raises(TypeError, match=r"q is on Metal \(DLPack device type 8\)"):
        tensor.framework(x).view(x, "q")


# On a GPU: `copy` stands for a launch, in the order of calls that api.py makes.


def copy(x: Any) -> Any:
    """A kernel's place taken by a copy on the stream that the library names."""
    import cupy

    fw = tensor.framework(x)
    view = fw.view(x)
    if tensor.needs_copy(view):
        x = fw.contiguous(x)
        view = fw.view(x)
    assert view.device == 0
    out = fw.empty(tuple(view.shape), view.dtype, view.device)
    stream = fw.stream(view.device)
    size = int(np.prod(view.shape)) * (4 if view.dtype == "fp32" else 2)
    if size:
        cupy.cuda.runtime.memcpyAsync(fw.pointer(out), view.ptr, size, 3, stream)
    fw.hold(stream, view.device, [view])
    return fw.result(out)


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_torch(torch: Any, dtype: str) -> None:
    x = torch.randn(2, 3, 4, 64, device="cuda").to(getattr(torch, dtype)).transpose(0, 2)
    fw = tensor.framework(x)
    view = fw.view(x)
    assert view == (
        x.data_ptr(),
        x.shape,
        x.stride(),
        {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, "fp32"),
        0,
    )
    out = fw.empty((2, 3), view.dtype, 0)
    assert (out.device, out.dtype, tuple(out.shape)) == (x.device, x.dtype, (2, 3))
    assert torch.equal(copy(x.contiguous()), x.contiguous())
    assert torch.equal(fw.contiguous(x[..., ::2]), x[..., ::2])
    assert fw.view(torch.empty(0, 3, device="cuda")).device == 0


@pytest.mark.gpu
def test_gpu_torch_odd_address(torch: Any) -> None:
    raw = torch.arange(129, dtype=torch.uint8, device="cuda")
    view = View(raw.data_ptr() + 1, (4, 8), (16, 2), "fp16", 0)
    odd = torch.from_dlpack(Export(memory.over_device(view, raw, np.dtype(np.float16)), "fp16", 0))
    fw = tensor.framework(odd)
    assert fw.view(odd).ptr % 2 == 1
    packed = fw.contiguous(odd)
    assert not tensor.needs_copy(fw.view(packed))
    expected = raw[1:].cpu().view(torch.float16).view(4, 16)[:, ::2]
    assert torch.equal(packed.cpu().view(torch.int16), expected.contiguous().view(torch.int16))


@pytest.mark.gpu
def test_gpu_case_b17_torch_streams(torch: Any, cupy: Any) -> None:
    """The launch follows torch's current stream, whatever CuPy's is; the host does not wait."""
    x = torch.zeros(1 << 20, dtype=torch.bfloat16, device="cuda")
    fw = tensor.framework(x)
    assert fw.stream(0) == torch.cuda.current_stream().cuda_stream
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for attempt in range(10):
        with torch.cuda.stream(side), cupy.cuda.Stream(non_blocking=True):
            assert fw.stream(0) == side.cuda_stream
            spin(side.cuda_stream)
            x.fill_(attempt + 1)
            out = copy(x)
        assert attempt == 0 or not side.query()
        side.synchronize()
        assert out.unique().tolist() == [attempt + 1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_gpu_cupy(cupy: Any, dtype: str) -> None:
    if dtype == "bf16":
        pytest.importorskip("ml_dtypes")
    bits = cupy.arange(2 * 3 * 64, dtype=cupy.uint32 if dtype == "fp32" else cupy.uint16)
    x = bits.view(numpy_dtype(dtype)).reshape(2, 3, 64)
    fw = tensor.framework(x)
    assert fw.view(x[:, ::-1]) == (x[:, ::-1].data.ptr, (2, 3, 64), (192, -64, 1), dtype, 0)
    for part in (x, x[..., ::2], x[..., ::-1]):
        out = copy(part)
        assert (out.dtype, out.shape, out.flags.c_contiguous) == (x.dtype, part.shape, True)
        np.testing.assert_array_equal(out.view(bits.dtype).get(), part.view(bits.dtype).get())


@pytest.mark.gpu
def test_gpu_case_b17_cupy_streams(cupy: Any) -> None:
    x = cupy.zeros(1 << 20, cupy.float16)
    fw = tensor.framework(x)
    side = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    for attempt in range(10):
        with side:
            assert fw.stream(0) == side.ptr
            spin(side.ptr)
            x.fill(attempt + 1)
            out = copy(x)
        assert attempt == 0 or not side.done
        side.synchronize()
        assert set(out.get().tolist()) == {attempt + 1}


@pytest.mark.gpu
def test_gpu_producer(cupy: Any, torch: Any) -> None:
    """An unknown library's device tensor: read on CuPy's current stream; results are its own, else CuPy's."""

    class Plain(Lent):
        pass

    class OfTorch(Lent):
        def __array_namespace__(self, api_version: str | None = None) -> Any:
            return types.SimpleNamespace(from_dlpack=torch.from_dlpack)

    theirs = cupy.cuda.Stream(non_blocking=True)
    side = cupy.cuda.Stream(non_blocking=True)
    for kind in (Plain, OfTorch):
        for _ in range(10):
            with theirs:
                bits = cupy.zeros((4, 1 << 16), cupy.uint16)
                spin(theirs.ptr)
                bits.fill(BF16_ONES)
            x = kind.__new__(kind)
            x.export = Export(bits[:, ::2], "bf16", 0, theirs.ptr)
            with side:
                out = copy(x)
            del x, bits
            side.synchronize()
            cupy.cuda.runtime.deviceSynchronize()
            assert type(out) is (torch.Tensor if kind is OfTorch else cupy.ndarray)
            got = (
                out.view(torch.uint16).cpu().numpy()
                if kind is OfTorch
                else out.view(cupy.uint16).get()
            )
            assert got.shape == (4, 1 << 15)
            assert set(np.unique(got)) == {BF16_ONES}


def busy_jax(jax: Any, value: float, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of `value` that is only ready after some 50 ms of matrix products."""

    @jax.jit
    def make(seed: Any) -> Any:
        product = jax.lax.fori_loop(0, 60, lambda _, m: (m @ seed) / 8192, seed)
        return jax.numpy.broadcast_to(product[0, 0] * value, shape).astype(dtype)

    seed = jax.numpy.ones((8192, 8192), jax.numpy.bfloat16)
    make(seed).block_until_ready()
    return make(seed)


@pytest.fixture
def gpu_jax(jax: Any) -> Any:
    try:
        place = jax.local_devices(backend="gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"no JAX for CUDA: {error}")
    with jax.default_device(place):
        yield jax


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1, 4, 64), (1, 5, 1, 64), (0, 3, 1, 64), (4, 1000, 8, 64)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gpu_case_b43_jax(gpu_jax: Any, shape: tuple[int, ...], dtype: str) -> None:
    jnp = gpu_jax.numpy
    x = gpu_jax.random.normal(gpu_jax.random.key(0), shape).astype(dtype)
    out = copy(x)
    assert (type(out), out.dtype, out.shape, out.devices()) == (
        type(x),
        x.dtype,
        shape,
        x.devices(),
    )
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))
    assert bool(jnp.array_equal(out + x, x * 2))
    view = tensor.framework(out).view(out)
    assert 0 in shape or view.strides == row_major(shape)
    assert not x.is_deleted()


@pytest.mark.gpu
def test_gpu_jax_order(gpu_jax: Any) -> None:
    """Inputs that are computed late, results that are read at once, and a host that waits for neither."""
    jnp = gpu_jax.numpy
    for attempt in range(10):
        x = busy_jax(gpu_jax, attempt + 1, (1 << 20,), jnp.bfloat16)
        out = copy(x)
        assert attempt == 0 or not x.is_ready()
        total = (out.astype(jnp.float32) - (attempt + 1)).sum()
        assert attempt == 0 or not x.is_ready()
        del x, out
        assert float(total) == 0


@pytest.mark.gpu
def test_gpu_jax_late_writes(gpu_jax: Any) -> None:
    """XLA waits for our stream: the result is read at once while the launch still queues behind other work of ours."""
    jnp = gpu_jax.numpy
    x = jnp.ones(1 << 20, jnp.bfloat16)
    fw = tensor.framework(x)
    fw.view(x)
    for attempt in range(10):
        spin(fw.stream(0))
        out = copy(x * (attempt + 1))
        assert float((out.astype(jnp.float32) - (attempt + 1)).sum()) == 0


@pytest.mark.gpu
def test_gpu_jax_memory_is_not_reused_early(gpu_jax: Any) -> None:
    """Inputs and results are dropped at once, and others take their memory, while the launches still queue."""
    jnp = gpu_jax.numpy
    x = jnp.ones(1, jnp.float16)
    fw = tensor.framework(x)
    fw.view(x)
    kept = []
    for i in range(200):
        if i % 50 == 0:
            spin(fw.stream(0))
        x = jnp.full((1 << 20,), i, jnp.float16)
        first = copy(x)
        copy(x)
        kept.append((i, first[:: 1 << 12]))
        del x, first
        jnp.full((1 << 20,), -1, jnp.float16)
    for i, values in kept:
        np.testing.assert_array_equal(np.asarray(values), np.full(256, i, np.float16))


@pytest.mark.gpu
def test_gpu_jax_donation(gpu_jax: Any) -> None:
    """An input may be donated right after the call, and is overwritten only after the launch has read it."""
    jnp = gpu_jax.numpy
    overwrite = gpu_jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    x = jnp.ones(1 << 20, jnp.bfloat16)
    fw = tensor.framework(x)
    fw.view(x)
    for i in range(10):
        x = jnp.full((1 << 20,), i, jnp.bfloat16)
        spin(fw.stream(0))
        out = copy(x)
        assert not x.is_deleted()
        minus_one = overwrite(x)
        assert x.is_deleted()
        assert float((out.astype(jnp.float32) - i).sum()) == 0
        assert float((minus_one.astype(jnp.float32) + 1).sum()) == 0


@pytest.mark.gpu
def test_gpu_jax_one_stream(gpu_jax: Any) -> None:
    x = gpu_jax.numpy.ones(3)
    fw = tensor.framework(x)
    assert len({(fw.view(x), fw.stream(0))[1] for _ in range(8)}) == 1
