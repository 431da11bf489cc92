"""torch.compile, torch.export, make_fx, fake tensors: a call is recorded as an operator, which gives eager's bits."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import processes
import pytest
from backends import Backend, params
from streams import side_stream

import rtflash

torch = pytest.importorskip("torch")
# Inductor imports setuptools, which takes the place of distutils, and fails to once other tests have run.
with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401

on_both = pytest.mark.parametrize("backend", params("torch-cpu", "torch-cuda"), indirect=True)
HEADS, HEADS_K, DIM, SLOTS = 4, 2, 32, 24


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Inputs:
    """Tensors of every public function."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.random = backend, np.random.default_rng(0)
        self.q, self.k, self.v = (
            self.normal(2, 5, HEADS),
            self.normal(2, 7, 2),
            self.normal(2, 7, 2),
        )
        self.packed_q, self.packed_k = self.normal(9, HEADS), self.normal(11, 2)
        self.cu_q, self.cu_k = self.int32(0, 4, 9), self.int32(0, 6, 11)
        self.k_cache, self.v_cache = self.normal(2, SLOTS, 2), self.normal(2, SLOTS, 2)
        self.k_new, self.v_new = self.normal(2, 5, 2), self.normal(2, 5, 2)
        self.cos, self.sin = (self.normal(SLOTS, 1)[:, 0, :8].contiguous() for _ in range(2))
        self.table = self.int32(*range(12)).reshape(2, 6)
        self.slopes = backend.make(self.random.random(HEADS), "fp32")
        self.lses = [backend.make(self.random.random((2, HEADS, 5)), "fp32") for _ in range(2)]

    def normal(self, *shape: int) -> Any:
        values = self.random.standard_normal((*shape, DIM))
        return self.backend.make(values).contiguous()

    def int32(self, *values: int) -> Any:
        return self.backend.make(np.array(values), "int32")

    def caches(self) -> tuple[Any, Any]:
        return self.k_cache.clone(), self.v_cache.clone()

    def pages(self) -> tuple[Any, Any]:
        return tuple(x.reshape(-1, 4, 2, DIM) for x in self.caches())

    def partial(self) -> tuple[Any, Any]:
        return torch.stack([self.q, self.q + 1]).float(), torch.stack(self.lses).mT


def dense(x: Inputs) -> Any:
    return rtflash.flash_attn_func(
        x.q, x.k, x.v, causal=True, window_size=[3, 0], softcap=2.0, alibi_slopes=x.slopes,
        return_attn_probs=True,
    )  # fmt: skip


def strided(x: Inputs) -> Any:
    q, k = x.q.transpose(1, 2).contiguous().transpose(1, 2), x.k.repeat(1, 2, 1, 1)[:, ::2]
    return rtflash.flash_attn_func(q, k, x.v[..., ::2])


def no_batch(x: Inputs) -> Any:
    return rtflash.flash_attn_func(x.q[:0], x.k[:0], x.v[:0], return_attn_probs=True)


def no_keys(x: Inputs) -> Any:
    return rtflash.flash_attn_func(x.q, x.k[:, :0], x.v[:, :0], return_attn_probs=True)


def kvpacked(x: Inputs) -> Any:
    return rtflash.flash_attn_kvpacked_func(x.q, torch.stack([x.k, x.v], 2), causal=True)


def qkvpacked(x: Inputs) -> Any:
    qkv = torch.stack([x.q, x.q + 1, x.q + 2], 2)
    return rtflash.flash_attn_qkvpacked_func(qkv, softmax_scale=0.3)


def varlen(x: Inputs) -> Any:
    return rtflash.flash_attn_varlen_func(
        x.packed_q, x.packed_k, x.packed_k + 1, x.cu_q, x.cu_k, 5, 6, causal=True,
        seqused_k=x.int32(3, 2), return_attn_probs=True,
    )  # fmt: skip


def varlen_pages(x: Inputs) -> Any:
    return rtflash.flash_attn_varlen_func(
        x.packed_q, *x.pages(), x.cu_q, None, 5, SLOTS, block_table=x.table,
        seqused_k=x.int32(7, SLOTS),
    )  # fmt: skip


def varlen_kvpacked(x: Inputs) -> Any:
    kv = torch.stack([x.packed_k, x.packed_k + 1], 1)
    return rtflash.flash_attn_varlen_kvpacked_func(
        x.packed_q, kv, x.cu_q, x.cu_k, 5, 6, num_splits=1
    )


def varlen_qkvpacked(x: Inputs) -> Any:
    qkv = torch.stack([x.packed_q, x.packed_q + 1, x.packed_q + 2], 1)
    return rtflash.flash_attn_varlen_qkvpacked_func(qkv, x.cu_q, 5, seqused_q=x.int32(4, 2))


def cache(x: Inputs) -> Any:
    return rtflash.flash_attn_with_kvcache(
        x.q, *x.caches(), cache_seqlens=x.int32(7, 9), return_softmax_lse=True
    )


def cache_of_one_length(x: Inputs) -> Any:
    return rtflash.flash_attn_with_kvcache(x.q, *x.caches(), cache_seqlens=7, num_splits=2)


def cache_pages(x: Inputs) -> Any:
    return rtflash.flash_attn_with_kvcache(x.q, *x.pages(), cache_seqlens=7, page_table=x.table)


def append(x: Inputs) -> Any:
    k_cache, v_cache = x.caches()
    out = rtflash.flash_attn_with_kvcache(
        x.q, k_cache, v_cache, x.k_new, x.v_new, x.cos, x.sin, x.int32(7, 9), causal=True
    )
    return out, k_cache, v_cache


def append_in_pages(x: Inputs) -> Any:
    k_pages, v_pages = x.pages()
    out, lse = rtflash.flash_attn_with_kvcache(
        x.q, k_pages, v_pages, x.k_new, x.v_new, cache_seqlens=3, block_table=x.table,
        return_softmax_lse=True,
    )  # fmt: skip
    return out, lse, k_pages + 1, v_pages


def merge(x: Inputs) -> Any:
    return rtflash.merge_attention_states(x.q, x.lses[0], x.q + 1, x.lses[1])


def combine(x: Inputs) -> Any:
    return rtflash.flash_attn_combine(*x.partial(), out_dtype="bf16")


def combine_into(x: Inputs) -> Any:
    out = torch.zeros_like(x.q)
    got, lse = rtflash.flash_attn_combine(*x.partial(), out=out)
    return got + 1, lse, out


CALLS = (
    dense, strided, no_batch, no_keys, kvpacked, qkvpacked, varlen, varlen_pages, varlen_kvpacked,
    varlen_qkvpacked, cache, cache_of_one_length, cache_pages, append, append_in_pages, merge, combine,
    combine_into,
)  # fmt: skip


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize(
    "dtype", ["fp32", "float32", "bfloat16", "torch.float16", torch.bfloat16, np.float16]
)
def test_the_result_of_a_merge_has_a_dtype_by_any_of_its_names(dtype: Any) -> None:
    def merged(out_partial: Any, lse_partial: Any) -> Any:
        return rtflash.flash_attn_combine(out_partial, lse_partial, out_dtype=dtype)

    parts = torch.randn(2, 3, 5, 4, 8), torch.randn(2, 3, 5, 4)
    assert_same(compiled(merged)(*parts), merged(*parts))


def assert_same(got: Any, wanted: Any) -> None:
    """Equal bits, layouts and places."""
    got, wanted = (x if isinstance(x, tuple) else (x,) for x in (got, wanted))
    for ours, eager in zip(got, wanted, strict=True):
        assert type(ours) is type(eager)
        if eager is not None:
            assert (ours.dtype, ours.device, ours.stride()) == (
                eager.dtype, eager.device, eager.stride(),
            )  # fmt: skip
            assert torch.equal(ours, eager)


@on_both
@pytest.mark.parametrize("function", CALLS)
def test_a_compiled_call_is_one_graph_and_gives_the_same_bits(
    backend: Backend, function: Callable[[Inputs], Any]
) -> None:
    assert_same(compiled(function)(Inputs(backend)), function(Inputs(backend)))


@on_both
@pytest.mark.parametrize("function", CALLS)
def test_opcheck(
    backend: Backend, function: Callable[[Inputs], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own test of the operators that the calls are recorded as."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = Inputs(backend)
    graph = make_fx(lambda: function(x))().graph
    ours = [node for node in graph.nodes if "rtflash" in str(node.target)]
    assert len(ours) == 1
    met: list[Any] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            if operator is ours[0].target:
                met.append(torch.utils._pytree.tree_map(clone, arguments))
            return operator(*arguments, **(options or {}))

    def clone(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    from rtflash import tensor_direct

    monkeypatch.setattr(tensor_direct, "TRACERS", {"Recorder"})
    with Recorder():
        function(x)
    monkeypatch.undo()
    (arguments,) = met
    assert set(torch.library.opcheck(ours[0].target, arguments).values()) == {"SUCCESS"}


def graphs(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> int:
    """How many graphs a compiled function of these arguments has become; its results are eager's."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(function, counter)
    for arguments in calls:
        assert_same(run(*arguments), function(*arguments))
    return counter.frame_count


@on_both
def test_a_hundred_lengths_become_a_few_graphs(backend: Backend) -> None:
    x = Inputs(backend)
    lengths = np.random.default_rng(1).integers(2, 90, (100, 2))

    def attend(q: Any, k: Any) -> Any:
        return rtflash.flash_attn_func(q, k, k, causal=True) * 2

    long_q, long_k = x.normal(2, 90, HEADS), x.normal(2, 90, HEADS_K)
    assert graphs(attend, [(long_q[:, :n], long_k[:, :m]) for n, m in lengths]) <= 3

    def attend_packed(q: Any, k: Any, cu_q: Any, cu_k: Any, most: int) -> Any:
        return rtflash.flash_attn_varlen_func(q, k, k, cu_q, cu_k, most, 90)

    calls = [
        (long_q[0, : n + m], long_k[0], x.int32(0, n, n + m), x.int32(0, m, m + 1), int(max(n, m)))
        for n, m in lengths // 2
    ]
    assert graphs(attend_packed, calls) <= 3


@on_both
def test_an_int_as_length_or_window_becomes_a_few_graphs(backend: Backend) -> None:
    x = Inputs(backend)
    q, k, (k_cache, v_cache) = x.q[:, :1], x.k_new[:, :1], x.caches()

    def step(length: int) -> Any:
        return rtflash.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=length)

    def attend(left: int) -> Any:
        return rtflash.flash_attn_func(x.q, x.k, x.v, window_size=(left, 0))

    assert graphs(step, [(n,) for n in range(SLOTS)]) <= 3
    assert graphs(attend, [(n,) for n in range(-1, 20)]) <= 4


@on_both
def test_inductor_fuses_what_stands_around(backend: Backend) -> None:
    """The default backend, with work before and after the call and a cache that is written."""
    if not backend.on_gpu and not shutil.which("g++"):
        pytest.skip("inductor needs a C++ compiler")
    if backend.on_gpu:
        pytest.importorskip("triton")
    x = Inputs(backend)

    def step(q: Any, k: Any, k_cache: Any, v_cache: Any) -> Any:
        out = rtflash.flash_attn_with_kvcache(-q, k_cache, v_cache, -k, -k, cache_seqlens=3)
        return -out, k_cache.abs()

    ours, eager = x.caches(), x.caches()
    got = torch.compile(step, fullgraph=True)(x.q, x.k_new, *ours)
    assert_same(got, step(x.q, x.k_new, *eager))
    assert_same(ours, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", params("torch-cuda"), indirect=True)
def test_compiled_into_a_cuda_graph(backend: Backend) -> None:
    pytest.importorskip("triton")
    x = Inputs(backend)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return -rtflash.flash_attn_func(-q, k, v, causal=True)

    run = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for turn in range(4):
        q = x.q + turn
        assert_same(run(q, x.k, x.v).clone(), attend(q, x.k, x.v))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", params("torch-cuda"), indirect=True)
def test_a_compiled_call_runs_on_the_current_stream(backend: Backend) -> None:
    x = Inputs(backend)
    run = compiled(lambda q, k, v: rtflash.flash_attn_func(q, k, v))
    wanted = run(x.q, x.k, x.v).clone()
    torch.cuda.synchronize()
    with side_stream(backend) as stream:
        run(x.q, x.k, x.v)
        stream.synchronize()
        stream.sleep()
        got = run(x.q, x.k, x.v)
        assert not stream.is_done()
        stream.synchronize()
        assert torch.equal(got, wanted)


@on_both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_where_no_gradient_is_wanted(backend: Backend, mode: Any) -> None:
    x = Inputs(backend)
    k_cache, v_cache = (torch.nn.Parameter(cached) for cached in x.caches())
    q, k = torch.nn.Parameter(x.q), torch.nn.Parameter(x.k_new)

    def step(q: Any, k: Any) -> Any:
        return rtflash.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=3)

    with mode():
        got = compiled(step)(q, k)
        assert_same(got, step(q, k))
        assert not got.requires_grad
        tensor = q + 0  # an inference tensor in inference_mode
        assert_same(compiled(step)(tensor, k), step(tensor, k))


REFUSED: dict[str, tuple[type[Exception], Callable[[Inputs], Any]]] = {
    "requires_grad": (NotImplementedError, lambda x: rtflash.flash_attn_func(x.q, x.wanted, x.v)),
    "merge": (
        NotImplementedError,
        lambda x: rtflash.merge_attention_states(x.wanted, x.lses[0], x.wanted, x.lses[1]),
    ),
    "dropout": (NotImplementedError, lambda x: rtflash.flash_attn_func(x.q, x.k, x.v, 0.1)),
    "fp32": (TypeError, lambda x: rtflash.flash_attn_func(x.q.float(), x.k.float(), x.v.float())),
    "rank": (ValueError, lambda x: rtflash.flash_attn_func(x.q[0], x.k, x.v)),
    "scalar": (ValueError, lambda x: rtflash.flash_attn_func(x.q.sum(), x.k, x.v)),
    "heads": (ValueError, lambda x: rtflash.flash_attn_func(x.q[:, :, :3], x.k, x.v)),
    "missing": (TypeError, lambda x: rtflash.flash_attn_func(x.q, None, x.v)),
    "window": (
        ValueError,
        lambda x: rtflash.flash_attn_func(x.q, x.k, x.v, window_size=(1, 2, 3)),
    ),
    "length": (
        ValueError,
        lambda x: rtflash.flash_attn_with_kvcache(x.q, *x.caches(), cache_seqlens=SLOTS + 1),
    ),
    "no values": (
        ValueError,
        lambda x: rtflash.flash_attn_with_kvcache(x.q, *x.caches(), x.k_new, cache_seqlens=1),
    ),
    "a dtype that is none": (
        TypeError,
        lambda x: rtflash.flash_attn_combine(*x.partial(), out_dtype=5),  # torch.float16, to torch
    ),
    "another dtype": (
        TypeError,
        lambda x: rtflash.flash_attn_combine(*x.partial(), x.q, "fp64"),
    ),
}


@on_both
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(("error", "function"), REFUSED.values(), ids=REFUSED)
def test_a_compiled_call_is_refused_with_the_same_words(
    backend: Backend, error: type[Exception], function: Callable[[Inputs], Any], fullgraph: bool
) -> None:
    x = Inputs(backend)
    x.wanted = x.k.clone().requires_grad_()  # type: ignore[attr-defined]
    with pytest.raises(error) as eager:
        function(x)
    with pytest.raises(error) as ours:
        torch.compile(function, fullgraph=fullgraph, backend="aot_eager")(x)
    assert str(ours.value) == str(eager.value)


@on_both
def test_nothing_is_detached_silently(backend: Backend) -> None:
    """Nor by a torch.func transform inside a compiled function, nor by a call of the operator itself."""
    x = Inputs(backend)

    def total(q: Any) -> Any:
        return rtflash.flash_attn_func(q, x.k, x.v).sum()

    def tangent(q: Any) -> Any:
        return torch.func.jvp(total, (q,), (q,))

    for transformed in (torch.func.grad(total), tangent):
        with pytest.raises(Exception, match=r"no backward|no memory"):
            compiled(transformed)(x.q)
        with pytest.raises((NotImplementedError, TypeError), match=r"no backward|no memory"):
            transformed(x.q)
    with pytest.raises(NotImplementedError, match="k requires grad"):
        torch.ops.rtflash.flash_attn_func(
            x.q, x.k.clone().requires_grad_(), x.v, None, 0.0, None, False, (-1, -1), 0.0, 0, False
        )


class Block(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return rtflash.flash_attn_func(q, k, v, causal=True) + 1


@on_both
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths(backend: Backend, strict: bool) -> None:
    x = Inputs(backend)
    rows, keys = (torch.export.Dim(name, min=2, max=64) for name in ("rows", "keys"))
    program = torch.export.export(
        Block(), (x.q, x.k, x.v), strict=strict,
        dynamic_shapes=({1: rows}, {1: keys}, {1: keys}),
    )  # fmt: skip
    for q, k in ((x.q, x.k), (x.q[:, :3], x.k_new)):
        assert_same(program.module()(q, k, k), Block()(q, k, k))


@on_both
def test_make_fx_and_jit_trace_record_the_call(backend: Backend) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = Inputs(backend)
    function = functools.partial(rtflash.flash_attn_func, causal=True)
    recorded = [make_fx(function, tracing_mode=mode)(x.q, x.k, x.v) for mode in ("real", "fake")]
    recorded.append(torch.jit.trace(lambda q, k, v: function(q, k, v), (x.q, x.k, x.v)))
    for run in recorded:
        other = x.q * 2
        assert_same(run(other, x.k, x.v), function(other, x.k, x.v))


@on_both
def test_fake_tensors_give_fake_results(backend: Backend) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    x = Inputs(backend)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in (x.q, x.k, x.v)]
        got = [rtflash.flash_attn_func(x.q, x.k, x.v), rtflash.flash_attn_func(*fakes)]
        wanted = fakes[1].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match="k requires grad"):
            rtflash.flash_attn_func(fakes[0], wanted, fakes[2])
        with pytest.raises(TypeError, match="out_dtype is 5; it must be fp16"):
            rtflash.flash_attn_combine(*map(mode.from_tensor, x.partial()), out_dtype=5)
    got.append(rtflash.flash_attn_func(*fakes))
    for out in got:
        assert isinstance(out, FakeTensor)
        assert (out.shape, out.dtype, out.device) == (x.q.shape, x.q.dtype, x.q.device)


def test_arrays_inside_a_compiled_function() -> None:
    """Where the graph breaks, as for any function that torch does not know."""
    q = np.random.default_rng(0).standard_normal((1, 5, 2, 16)).astype(np.float16)

    def attend(x: Any) -> Any:
        return x + 1, rtflash.flash_attn_func(q, q, q)

    _, out = torch.compile(attend, backend="aot_eager")(torch.zeros(2))
    assert type(out) is np.ndarray
    assert np.array_equal(out, rtflash.flash_attn_func(q, q, q))


FIRST_CALL = """
import json, sys
import rtflash
before = "torch" in sys.modules
import torch
q = torch.randn(1, 9, 2, 16).half()
function = lambda q: rtflash.flash_attn_func(q, q, q, causal=True)
eager = function(q) if {eager} else None
loaded = "rtflash.torch_ops" in sys.modules
got = torch.compile(function, fullgraph=True, backend="aot_eager")(q)
print(json.dumps([before, loaded, torch.equal(got, function(q))]))
"""


@pytest.mark.parametrize("eager", [False, True])
def test_nothing_of_torch_is_imported_before_a_compiled_call(eager: bool) -> None:
    """Also where torch comes after rtflash, and where the compiled call is the first one."""
    code = FIRST_CALL.format(eager=eager)
    done = subprocess.run(
        [sys.executable, "-c", code], env=processes.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, False, True]
