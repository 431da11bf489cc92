"""Public bug reports of this field as inputs with known answers, on every backend (list and sources: docs/cases.md).

A query or key of zeros makes all logits 0, so that the output is a plain mean and LSE = ln(number of visible keys).
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from backends import ALL_BACKENDS, EMULATED, Backend, params
from calls import Call, arrays, solved
from capsules import CUDA, HOST, Producer
from compare import check
from layouts import NEGATIVE, decode, encode
from numpy.typing import NDArray
from reference import attention, same_dtype
from streams import capture, side_stream

import rtflash
from rtflash import artifacts, cxx

on_all = pytest.mark.parametrize("backend", ALL_BACKENDS, indirect=True)

# Relative error of one rounding to the dtype.
ULP = {"fp16": 2.0**-10, "bf16": 2.0**-7}


def attend(
    backend: Backend, q: NDArray, k: NDArray, v: NDArray, dtype: str = "fp16", **options: Any
) -> tuple[NDArray, NDArray]:
    """Output and LSE as fp32, from fp32 values."""
    q, k, v = (backend.make(x, dtype) for x in (q, k, v))
    backend.poison(2 * math.prod(q.shape[:3]) * v.shape[3], 4 * math.prod(q.shape[:3]))
    out, lse, _ = rtflash.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    return backend.to_numpy(out), backend.to_numpy(lse)


def ramp(seqlen: int, heads: int = 1, head_dim: int = 64, batch: int = 1) -> NDArray:
    """v with v_j = j in every element."""
    return np.broadcast_to(
        np.arange(seqlen, dtype=np.float32)[:, None, None], (batch, seqlen, heads, head_dim)
    ).copy()


def zeros(*shape: int) -> NDArray:
    return np.zeros(shape, np.float32)


def close(got: NDArray, wanted: Any, dtype: str = "fp16") -> None:
    np.testing.assert_allclose(
        got, np.broadcast_to(wanted, got.shape), rtol=ULP[dtype], atol=ULP[dtype] / 4
    )


def close_lse(got: NDArray, wanted: Any) -> None:
    np.testing.assert_allclose(got, np.broadcast_to(wanted, got.shape), rtol=2e-6, atol=2e-6)


@on_all
def test_case_b01_negative_scale_picks_the_smaller_logit(backend: Backend) -> None:
    q, k = zeros(1, 1, 1, 8), zeros(1, 2, 1, 8)
    q[..., 0], k[0, 1, 0, 0] = 1, 200
    v = np.random.default_rng(1).standard_normal((1, 2, 1, 8), np.float32)
    out, lse = attend(backend, q, k, v, softmax_scale=-1.0)
    np.testing.assert_array_equal(out[0, 0, 0], v[0, 0, 0].astype(np.float16).astype(np.float32))
    assert lse.item() == 0.0


@pytest.mark.parametrize("scale", [-1.0, 0.0])
@on_all
def test_case_b01_scale_without_sign_under_a_causal_mask(backend: Backend, scale: float) -> None:
    k, v = np.random.default_rng(2).standard_normal((2, 1, 3, 1, 8), np.float32)
    out, lse = attend(backend, zeros(1, 3, 1, 8), k, v, softmax_scale=scale, causal=True)
    close(out[0, :, 0], np.cumsum(v[0, :, 0], 0) / np.arange(1, 4)[:, None])
    close_lse(lse[0, 0], np.log([1, 2, 3]))


@pytest.mark.parametrize("backend", params("torch-cuda", "cupy"), indirect=True)
def test_case_b04_graph_after_a_warm_up(backend: Backend) -> None:
    first, second = (
        np.random.default_rng(i).standard_normal((3, 1, 64, 2, 64), np.float32) for i in (0, 1)
    )
    q, k, v = (backend.make(x) for x in first)
    with side_stream(backend) as stream:
        rtflash.flash_attn_func(q, k, v)
        stream.synchronize()
    with capture(backend) as captured:
        out = rtflash.flash_attn_func(q, k, v)
    q[...] = backend.make(second[0])
    backend.synchronize()
    captured.replay()
    np.testing.assert_array_equal(
        backend.to_numpy(out), attend(backend, second[0], first[1], first[2])[0]
    )


@pytest.mark.parametrize("backend", params("torch-cuda", "cupy"), indirect=True)
def test_case_b04_cold_capture_says_to_warm_up(backend: Backend) -> None:
    # Head sizes that no other test uses: their kernels are not loaded.
    dim = {"torch-cuda": 186, "cupy": 188}[backend.name]
    values = np.random.default_rng(2).standard_normal((3, 1, 64, 2, dim), np.float32)
    q, k, v = (backend.make(x) for x in values)
    backend.synchronize()
    with pytest.raises(RuntimeError, match=r"(?i)warm"), capture(backend):
        rtflash.flash_attn_func(q, k, v)
    out = backend.to_numpy(rtflash.flash_attn_func(q, k, v))
    with capture(backend) as captured:
        again = rtflash.flash_attn_func(q, k, v)
    captured.replay()
    np.testing.assert_array_equal(backend.to_numpy(again), out)
    q, k, v = (decode(encode(x, "fp16"), "fp16") for x in values)
    check(out, attention(q, k, v)[0], same_dtype(q, k, v, "fp16"), "fp16")


@on_all
def test_case_b05_all_logits_far_below_zero(backend: Backend) -> None:
    q, k = np.full((1, 88, 14, 64), 5, np.float32), np.full((1, 448, 2, 64), -5, np.float32)
    out, lse = attend(backend, q, k, np.ones_like(k), "bf16", causal=True)
    np.testing.assert_array_equal(out, np.ones_like(out))
    close_lse(lse[0], -200 + np.log(361 + np.arange(88)))


@pytest.mark.parametrize(
    "shape", [(65536, 1, 1, 16), (1, 1, 65536, 16), (70000, 1, 2, 16)], ids=str
)
@on_all
def test_case_b09_more_than_65535_batches_or_heads(
    backend: Backend, shape: tuple[int, int, int, int]
) -> None:
    if backend.name == EMULATED:  # 65536 tiles take half a minute, and the limit is CUDA's
        shape = tuple(min(n, 999) for n in shape)
    q, k, v = np.random.default_rng(3).standard_normal((3, *shape), np.float32)
    out, _ = attend(backend, q, k, v)
    np.testing.assert_array_equal(out, v.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("per_batch", [False, True])
@on_all
def test_case_b12_alibi_distance_and_lse(backend: Backend, per_batch: bool) -> None:
    slopes = np.array([[1.0, 0.0], [2.0, 1.0]] if per_batch else [1.0, 0.0], np.float32)
    k, v = zeros(2, 4, 2, 64), np.zeros((2, 4, 2, 64), np.float32)
    v[..., :4] = np.eye(4)[:, None]
    causal, causal_lse = attend(
        backend, zeros(2, 1, 2, 64), k, v, causal=True, alibi_slopes=backend.make(slopes, "fp32")
    )
    close(causal[0, 0, 0, :4], [0.0321, 0.0871, 0.2369, 0.6439])
    close_lse(np.round(causal_lse[0, 0], 4), 0.4402)
    close(causal[0, 0, 1, :4], 0.25)
    full, full_lse = attend(
        backend, zeros(2, 2, 2, 64), k, v, alibi_slopes=backend.make(slopes, "fp32")
    )
    close(full[0, 0, 0, :4], [0.0723, 0.1966, 0.5344, 0.1966])
    close_lse(np.round(full_lse[0, 0, 0], 4), 0.6265)
    if per_batch:
        weights = np.exp(-2.0 * np.arange(3, -1, -1))
        close(causal[1, 0, 0, :4], weights / weights.sum())
        close_lse(causal_lse[1, 0], np.log(weights.sum()))
        close(full[1, 0, 1, :4], full[0, 0, 0, :4])


@pytest.mark.parametrize("byte_offset", [128, 2], ids=["one row", "2 bytes"])
@pytest.mark.parametrize("strided", [True, False], ids=["strides", "no strides"])
@pytest.mark.parametrize("versioned", [True, False], ids=["versioned", "unversioned"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("backend", params("numpy", "cupy"), indirect=True)
def test_case_b15_byte_offset(
    backend: Backend, dtype: str, versioned: bool, strided: bool, byte_offset: int
) -> None:
    """A producer of base + offset, which has no library of its own: the result is NumPy's or CuPy's."""
    shape, strides = (1, 9, 1, 64), (576, 64, 64, 1) if strided else None
    values = np.random.default_rng(7).standard_normal((3, 640), np.float32)
    buffers = [backend.upload(encode(x, dtype), dtype) for x in values]
    skipped = byte_offset // 2
    producers = [
        Producer(
            buffer,
            buffer.data.ptr if backend.on_gpu else buffer.ctypes.data,
            byte_offset,
            shape,
            strides,
            device=(CUDA, 0) if backend.on_gpu else (HOST, 0),
            versioned=versioned,
            code=2 if dtype == "fp16" else 4,
        )
        for buffer in buffers
    ]
    out = rtflash.flash_attn_func(producers[0], producers[1], producers[2])
    sliced = [backend.make(x[skipped : skipped + 576].reshape(shape), dtype) for x in values]
    assert backend.owns(out, sliced[0])
    assert backend.dtype_name(out) == backend.dtype_name(sliced[0])
    np.testing.assert_array_equal(
        backend.to_numpy(out), backend.to_numpy(rtflash.flash_attn_func(*sliced))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("damage", ["empty", "first half", "random"])
def test_case_b16_damaged_cache_files(damage: str, tmp_path: Path) -> None:
    whole = processes.run(64, tmp_path)
    assert whole["compilations"] == 1
    files = [path for path in tmp_path.glob("rtflash_*/*") if path.is_file()]
    assert {path.name for path in files} >= {"kernel.cu", "kernel.cubin", "spec.json"}
    for path in files:
        data = path.read_bytes()
        damaged = {
            "empty": b"",
            "first half": data[: len(data) // 2],
            "random": os.urandom(len(data)),
        }
        path.write_bytes(damaged[damage])
    again, third = processes.run(64, tmp_path), processes.run(64, tmp_path)
    assert again["digest"] == whole["digest"] == third["digest"]
    assert again["compilations"] == 1
    assert len(again["warnings"]) <= 1
    assert third["compilations"] == 0
    assert not third["warnings"]


@pytest.mark.parametrize("backend", params("torch-cuda", "cupy"), indirect=True)
def test_case_b17_side_stream(backend: Backend) -> None:
    """50 of 50 tries see inputs that the same stream writes after a long wait; the call returns before they exist."""
    tries = np.random.default_rng(8).standard_normal((2, 3, 1, 64, 2, 64), np.float32)
    fresh = [[backend.make(x) for x in values] for values in tries]
    wanted = [attend(backend, *values)[0] for values in tries]
    q, k, v = (backend.make(zeros(1, 64, 2, 64)) for _ in range(3))
    backend.synchronize()
    early = 0  # calls that came back before their inputs existed
    for i in range(50):
        with side_stream(backend) as stream:
            stream.sleep()
            for target, source in zip((q, k, v), fresh[i % 2], strict=True):
                target[...] = source
            out = rtflash.flash_attn_func(q, k, v)
            early += not stream.is_done()
            stream.synchronize()
            np.testing.assert_array_equal(backend.to_numpy(out), wanted[i % 2], err_msg=f"try {i}")
    assert early > 0, "every call waited for its inputs"


@pytest.mark.parametrize("backend", params("torch-cuda"), indirect=True)
def test_case_b17_torch_while_cupy_has_another_stream(backend: Backend) -> None:
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        test_case_b17_side_stream(backend)


@pytest.mark.parametrize(
    "layouts",
    [("bshd", "every2", "bshd"), ("packed",) * 3, ("bhsd",) * 3, ("inner2",) * 3],
    ids="-".join,
)
@on_all
def test_case_b29_layouts_equal_contiguous_copies(
    backend: Backend, layouts: tuple[str, str, str]
) -> None:
    equal_to_contiguous(backend, layouts)


@pytest.mark.parametrize(
    "layouts", [("reversed",) * 3, ("bshd", "inner_reversed", "reversed")], ids="-".join
)
@pytest.mark.parametrize("backend", params("numpy", "cupy"), indirect=True)
def test_case_b29_negative_strides(backend: Backend, layouts: tuple[str, str, str]) -> None:
    assert set(layouts) & set(NEGATIVE)
    equal_to_contiguous(backend, layouts)


def equal_to_contiguous(backend: Backend, layouts: tuple[str, str, str]) -> None:
    if backend.strides == "none":
        pytest.skip(f"{backend.name} has row-major arrays only")
    call = Call(97, 97, layouts=layouts, causal=True)
    values, expected = solved(call)
    strided = arrays(backend, call, values)[:3]
    plain = arrays(backend, dataclasses.replace(call, layouts=("bshd",) * 3), values)[:3]
    out, copied = (
        backend.to_numpy(rtflash.flash_attn_func(*x, causal=True)) for x in (strided, plain)
    )
    # On a Hopper, what TMA cannot copy is served by another kernel, whose sums round otherwise.
    if call.problem().boxes or backend.name in ("numpy", "torch-cpu"):
        np.testing.assert_array_equal(out, copied)
    check(out, expected.out, expected.same_dtype, "fp16")
    check(copied, expected.out, expected.same_dtype, "fp16")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [1, 8, 40, 46, 72, 80, 96, 136, 256])
@on_all
def test_case_b31_head_dim_and_its_default_scale(
    backend: Backend, head_dim: int, dtype: str
) -> None:
    """q = 1, key 0 = 1, key 1 = 0: the scaled logits are sqrt(head_dim) and 0."""
    q, k = np.ones((1, 1, 1, head_dim), np.float32), zeros(1, 2, 1, head_dim)
    k[0, 0] = 1
    v = zeros(1, 2, 1, head_dim)
    v[0, 0] = 1
    out, lse = attend(backend, q, k, v, dtype)
    logit = math.sqrt(head_dim)
    close(out, 1 / (1 + math.exp(-logit)), dtype)
    close_lse(lse, logit + math.log1p(math.exp(-logit)))
    if head_dim == 40 and dtype == "fp16":
        assert abs(out[0, 0, 0, 0] - 0.9982) < 5e-4


@pytest.mark.parametrize("dims", [(257, 64), (64, 257), (257, 257), (0, 64)], ids=str)
@on_all
def test_case_b31_head_dim_out_of_range(backend: Backend, dims: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="head_dim"):
        attend(backend, zeros(1, 1, 1, dims[0]), zeros(1, 2, 1, dims[0]), zeros(1, 2, 1, dims[1]))


@pytest.mark.gpu
def test_case_b34_eight_processes_and_an_empty_cache(tmp_path: Path) -> None:
    workers = [processes.start(64, tmp_path) for _ in range(8)]
    reports = [processes.finish(worker) for worker in workers]
    assert len({report["digest"] for report in reports}) == 1
    assert sum(report["compilations"] for report in reports) == 1
    assert not [report["warnings"] for report in reports if report["warnings"]]
    assert len(list(tmp_path.glob("rtflash_*"))) == 1
    assert not list(tmp_path.glob(".*.new-*"))
    assert not list(tmp_path.glob(".*.old-*"))


@pytest.mark.gpu
def test_case_b34_one_is_killed_while_it_compiles(tmp_path: Path) -> None:
    victim = processes.start(128, tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".*.lock")) and time.monotonic() < deadline:
        time.sleep(0.002)
    others = [processes.start(128, tmp_path) for _ in range(7)]
    time.sleep(0.1)
    victim.kill()
    victim.communicate()
    reports = [processes.finish(worker) for worker in others]
    assert len({report["digest"] for report in reports}) == 1
    start = time.monotonic()
    last = processes.run(128, tmp_path)
    assert last["compilations"] == 0
    assert last["digest"] == reports[0]["digest"]
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("kind", ["same", "different"])
@on_all
def test_case_b35_first_calls_from_16_threads(
    backend: Backend, kind: str, monkeypatch: Any, tmp_path: Any
) -> None:
    """All results are right and each variant is compiled once."""
    compiler = cxx if backend.name == EMULATED else artifacts

    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path))
    # Head sizes that no other test uses: the memory cache of this process is empty for them.
    dims = [50] if kind == "same" else [52, 54, 56, 58]
    if backend.name != "torch-cuda":
        others = {"cupy": 50, "jax-cuda": 100, EMULATED: 150}
        dims = [dim + others.get(backend.name, 0) for dim in dims]
    prepared = []
    for i in range(16):
        call = Call(33, 65, heads=1, heads_k=1, batch=1, head_dim=dims[i % len(dims)])
        values, expected = solved(call)
        prepared.append((arrays(backend, call, values)[:3], expected))
    before = compiler.compile_count
    start, results = threading.Barrier(16), [None] * 16

    def work(i: int) -> None:
        start.wait()
        results[i] = rtflash.flash_attn_func(*prepared[i][0])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, (_, expected) in zip(results, prepared, strict=True):
        check(backend.to_numpy(result), expected.out, expected.same_dtype, "fp16")
    compiles = backend.on_gpu or backend.name == EMULATED
    assert compiler.compile_count - before == (len(set(dims)) if compiles else 0)


SPELLINGS: tuple[tuple[str, list[Any]], ...] = (
    ("softmax_scale", [1, 1.0, np.float32(1), np.float64(1), np.int64(1)]),
    ("softmax_scale", [0.125, np.float32(0.125), np.float16(0.125), None]),
    ("softcap", [2, 2.0, np.float32(2), np.int32(2)]),
    ("softcap", [0, 0.0, np.float64(0)]),
    ("dropout_p", [0, 0.0, np.float32(0)]),
    ("window_size", [(5, 3), (np.int64(5), np.int32(3)), [5, 3]]),
    ("window_size", [(-1, -1), (np.int64(-1), -1)]),
    ("causal", [True, 1, np.bool_(True)]),
    ("causal", [False, 0]),
)


@pytest.mark.parametrize(("name", "spellings"), SPELLINGS)
@on_all
def test_case_b37_every_spelling_of_a_number(
    backend: Backend, name: str, spellings: list[Any]
) -> None:
    values, _ = solved(Call())
    q, k, v, _ = arrays(backend, Call(), values)
    wanted, *others = (
        backend.to_numpy(rtflash.flash_attn_func(q, k, v, **{name: value})) for value in spellings
    )
    for spelling, got in zip(spellings[1:], others, strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=f"{name}={spelling!r}")
    if name in ("softmax_scale", "softcap", "window_size", "causal"):
        default = backend.to_numpy(rtflash.flash_attn_func(q, k, v))
        is_default = spellings[0] in (0.125, 0, False) or spellings[0] == (-1, -1)
        assert np.array_equal(wanted, default) == is_default


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
@on_all
def test_case_b37_device_scalars_are_refused(backend: Backend, name: str) -> None:
    """Reading one would block the host; NumPy's 0-d arrays are refused alike, so that code moves between devices."""
    q = backend.make(zeros(1, 4, 1, 16))
    scalar = backend.make(zeros(1)[0], "fp32")
    if not backend.on_gpu:
        scalar = np.array(0.0)
    with pytest.raises(TypeError, match=name):
        rtflash.flash_attn_func(q, q, q, **{name: scalar})


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@on_all
def test_case_b40_window_edges(backend: Backend, dtype: str) -> None:
    q, v = zeros(1, 8, 1, 64), ramp(8)
    rows = np.arange(8)

    def means(**options: Any) -> NDArray:
        return attend(backend, q, q, v, dtype, **options)[0][0, :, 0, 0]

    np.testing.assert_array_equal(means(window_size=(0, 0)), rows)
    close(means(window_size=(1, 0)), np.maximum(rows - 0.5, 0), dtype)
    close(means(window_size=(3, 0)), (rows + np.maximum(rows - 3, 0)) / 2, dtype)
    causal = means(causal=True)
    close(causal, rows / 2, dtype)
    for options in (
        {"window_size": (7, 0)},
        {"window_size": (-1, 0)},
        {"window_size": (7, 5), "causal": True},
    ):
        np.testing.assert_array_equal(means(**options), causal, err_msg=str(options))
    close(means(window_size=(0, -1)), (rows + 7) / 2, dtype)
    close(means(window_size=(2**31 - 1, 2**31 - 1)), 3.5, dtype)


@pytest.mark.parametrize("window", [(-1, -3), (-2, 0), (-3, -3)], ids=str)
@on_all
def test_case_b40_other_negative_bounds(backend: Backend, window: tuple[int, int]) -> None:
    x = backend.make(zeros(1, 8, 1, 64))
    with pytest.raises(ValueError, match="window_size"):
        rtflash.flash_attn_func(x, x, x, window_size=window)


@on_all
def test_case_b41_bfloat16_in_and_out(backend: Backend) -> None:
    x = backend.make(ramp(5), "bf16")
    out, lse, _ = rtflash.flash_attn_func(
        backend.make(zeros(1, 5, 1, 64), "bf16"), x, x, return_attn_probs=True
    )
    assert backend.dtype_name(out) == "bfloat16"
    assert backend.owns(out, x)
    np.testing.assert_array_equal(backend.to_numpy(out), np.full((1, 5, 1, 64), 2.0))
    close_lse(backend.to_numpy(lse), math.log(5))


@pytest.mark.parametrize("backend", params("torch-cpu", "torch-cuda"), indirect=True)
def test_case_b41_bfloat16_without_ml_dtypes(backend: Backend) -> None:
    """bf16 travels as bits: neither NumPy nor CuPy needs to know it."""
    device = "cuda" if backend.on_gpu else "cpu"
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "ml_dtypes":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, rtflash
x = torch.arange(5, dtype=torch.bfloat16, device="{device}")[None, :, None, None].expand(1, 5, 2, 64)
out = rtflash.flash_attn_func(torch.zeros_like(x), x, x)
assert out.dtype == torch.bfloat16 and out.device == x.device
assert (out == 2).all()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=processes.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("backend", params("jax-cpu", "jax-cuda"), indirect=True)
def test_case_b43_jax_arrays(backend: Backend, dtype: str) -> None:
    """Size-1 axes, k and v the same array: right after indexing, and the inputs stay usable."""
    import jax.numpy as jnp

    for shape in ((2, 1, 4, 64), (1, 5, 1, 64)):
        q, x = np.random.default_rng(4).standard_normal((2, *shape), np.float32)
        q, x = backend.make(q, dtype), backend.make(x, dtype)
        out = rtflash.flash_attn_func(q, x, x)
        assert out.shape == shape
        assert backend.owns(out, q)
        wanted = attention(backend.to_numpy(q), backend.to_numpy(x), backend.to_numpy(x))[0]
        picked = [float(out[0, 0, 0, i]) for i in range(0, 64, 9)]
        close(np.array(picked), wanted[0, 0, 0, ::9], dtype)
        close(np.asarray(out + 0, np.float32), wanted, dtype)
        assert np.isfinite(float(jnp.sum(q.astype(jnp.float32)) + jnp.sum(x.astype(jnp.float32))))


@pytest.mark.parametrize("backend", params("jax-cpu", "jax-cuda"), indirect=True)
def test_case_b43_traced_values(backend: Backend) -> None:
    import jax

    x = backend.make(zeros(1, 4, 1, 16))
    out = jax.jit(rtflash.flash_attn_func)(x, x, x)
    np.testing.assert_array_equal(backend.to_numpy(out), zeros(1, 4, 1, 16))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (3, 3)}, {"softcap": 4.0}], ids=str
)
@on_all
def test_case_b50_empty_work(backend: Backend, options: dict[str, Any]) -> None:
    out, lse = attend(
        backend, zeros(0, 4, 2, 64), zeros(0, 4, 2, 64), zeros(0, 4, 2, 64), **options
    )
    assert out.shape == (0, 4, 2, 64)
    assert lse.shape == (0, 2, 4)
    out, lse = attend(
        backend, zeros(2, 0, 2, 64), zeros(2, 4, 1, 64), zeros(2, 4, 1, 32), **options
    )
    assert out.shape == (2, 0, 2, 32)
    assert lse.shape == (2, 2, 0)
    out, lse = attend(
        backend,
        np.ones((2, 3, 2, 64), np.float32),
        zeros(2, 0, 2, 64),
        zeros(2, 0, 2, 16),
        **options,
    )
    np.testing.assert_array_equal(out, zeros(2, 3, 2, 16))
    np.testing.assert_array_equal(lse, np.full((2, 2, 3), -np.inf))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@on_all
def test_case_b50_rows_without_a_key(backend: Backend, dtype: str) -> None:
    out, lse = attend(
        backend, zeros(1, 4, 1, 64), zeros(1, 2, 1, 64), ramp(2) + 1, dtype, causal=True
    )
    np.testing.assert_array_equal(out[0, :, 0, 0], [0, 0, 1, 1.5])
    close_lse(lse[0, 0], [-np.inf, -np.inf, 0, math.log(2)])
    # A whole tile of rows without a key, and a window that lies outside the keys for every row.
    out, lse = attend(
        backend, zeros(1, 300, 1, 64), zeros(1, 2, 1, 64), ramp(2) + 1, dtype, causal=True
    )
    np.testing.assert_array_equal(out[0, :, 0, 0], [*([0] * 298), 1, 1.5])
    assert np.isneginf(lse[0, 0, :298]).all()
    out, lse = attend(
        backend, zeros(1, 4, 1, 64), zeros(1, 300, 1, 64), ramp(300), dtype, window_size=(0, 0)
    )
    np.testing.assert_array_equal(
        out[0, :, 0, 0], [296, 297, 298, 299] if dtype == "fp16" else [296, 296, 298, 300]
    )


@pytest.mark.parametrize("version", [(1, 0), (7, 0), (99, 9)], ids=str)
def test_case_b54_compute_capability_out_of_range(version: tuple[int, int]) -> None:
    from rtflash import device, nvrtc

    pytest.importorskip("cupy")
    gpu = dataclasses.replace(device.for_arch("sm_90"), major=version[0], minor=version[1])
    if version < (7, 5):
        with pytest.raises(RuntimeError, match=r"sm_75|7\.5"):
            nvrtc.target_arch(gpu)
    else:
        newest = max(int(arch.removeprefix("sm_").rstrip("af")) for arch in nvrtc.supported_archs())
        assert nvrtc.target_arch(gpu).rstrip("af") == f"compute_{newest}"


@pytest.mark.parametrize("backend", params("torch-cuda", "cupy"), indirect=True)
def test_case_b54_what_is_cached_is_a_cubin_for_this_gpu(
    backend: Backend, monkeypatch: Any, tmp_path: Any
) -> None:
    from rtflash import device

    monkeypatch.setenv("RTFLASH_CACHE_DIR", str(tmp_path))
    dim = {"torch-cuda": 34, "cupy": 36}[backend.name]
    attend(backend, zeros(1, 3, 1, dim), zeros(1, 3, 1, dim), zeros(1, 3, 1, dim))
    (cubin,) = tmp_path.glob("rtflash_*/kernel.cubin")
    header = cubin.read_bytes()[:64]
    assert header[:4] == b"\x7fELF"
    gpu = device.get(0)
    # CUDA's ELF keeps the SM version in e_flags: bits 8-15 since ABI 8, bits 0-7 before.
    flags = int.from_bytes(header[48:52], "little")
    assert gpu.major * 10 + gpu.minor in (flags & 0xFF, flags >> 8 & 0xFF)
