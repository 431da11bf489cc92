"""rtflash.cpu.run and combine: what the bound of test_varlen.py and test_kvcache.py cannot see."""

from __future__ import annotations

import dataclasses
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from backends import Backend
from compare import check_lse
from inference_calls import CacheCall, VarlenCall, inputs, result, upload
from layouts import encode
from numpy.typing import NDArray
from reference import attention

import rtflash
from rtflash import cpu
from rtflash.problem import Tensors

pytestmark = pytest.mark.filterwarnings("error")

Array = NDArray[Any]
NUMPY = Backend()


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTFLASH_BACKEND", "numpy")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(np.float16)


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 3)}])
def test_bits_are_those_of_dense_calls(options: dict[str, Any]) -> None:
    """However a sequence lies in memory: dense, packed, in a cache, in pages."""
    q, k, v = (
        normal(2, 30, 4, 24, seed=1),
        normal(2, 70, 2, 24, seed=2),
        normal(2, 70, 2, 8, seed=3),
    )
    expected, expected_lse, _ = rtflash.flash_attn_func(q, k, v, return_attn_probs=True, **options)

    packed = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    cu_q, cu_k = ints(0, 30, 60), ints(0, 70, 140)
    out, lse, _ = rtflash.flash_attn_varlen_func(
        *packed, cu_q, cu_k, 30, 70, return_attn_probs=True, **options
    )
    np.testing.assert_array_equal(out.reshape(expected.shape), expected)
    np.testing.assert_array_equal(lse.reshape(4, 2, 30).swapaxes(0, 1), expected_lse)

    table = ints(*np.random.default_rng(0).permutation(20)).reshape(2, 10)
    for size, columns in ((7, 10), (70, 1)):
        pages = [np.empty((20, size, *x.shape[2:]), x.dtype) for x in (k, v)]
        for made, x in zip(pages, (k, v), strict=True):
            made[table[:, :columns]] = x.reshape(2, columns, size, *x.shape[2:])
        out, lse = rtflash.flash_attn_with_kvcache(
            q, *pages, block_table=table[:, :columns], return_softmax_lse=True, **options
        )
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize(
    "call",
    [
        VarlenCall(dtype="bf16", causal=True, page_size=7),
        CacheCall(dtype="bf16", seqlen_new=3, rotary="halves", seqlen_q=3, causal=True),
    ],
)
def test_bf16_bits_and_ml_dtypes_agree(call: VarlenCall | CacheCall) -> None:
    given = inputs(call)
    made = upload(NUMPY, call, given)
    expected = result(NUMPY, call, made)
    if isinstance(call, VarlenCall):
        t = Tensors(
            made["q"], made["k"], made["v"], cu_seqlens_q=made["cu_seqlens_q"],
            cu_seqlens_k=made["cu_seqlens_k"], block_table=made["block_table"],
        )  # fmt: skip
    else:
        made = upload(NUMPY, call, given)
        t = Tensors(
            made["q"], made["k_cache"], made["v_cache"], seqused_k=made["cache_seqlens"],
            k_new=made["k"], v_new=made["v"], rotary_cos=made["rotary_cos"],
            rotary_sin=made["rotary_sin"],
        )  # fmt: skip
    floats = {name: x for name, x in t._asdict().items() if x is not None and x.dtype != np.int32}
    t = t._replace(**{name: x.view(np.uint16) for name, x in floats.items()})
    out, lse = cpu.run(call.problem(), t, -1)
    assert out.dtype == np.uint16
    np.testing.assert_array_equal(out, encode(expected.out, "bf16"))
    np.testing.assert_array_equal(lse, expected.lse)
    for x, cache in zip((t.k, t.v), expected.caches, strict=False):
        np.testing.assert_array_equal(x[~np.isnan(cache)], encode(cache, "bf16")[~np.isnan(cache)])


def test_sequences_that_share_a_page_see_all_new_keys() -> None:
    """What one sequence appends to a page is there before any sequence reads it, whatever their order."""
    k_new, v_new = normal(2, 1, 1, 8, seed=1), normal(2, 1, 1, 8, seed=2)
    pages = [normal(1, 4, 1, 8, seed=seed) for seed in (3, 4)]
    q = normal(2, 1, 1, 8, seed=5)
    table = np.zeros((2, 1), np.int32)
    out = rtflash.flash_attn_with_kvcache(
        q, *pages, k_new, v_new, cache_seqlens=ints(3, 2), block_table=table
    )
    np.testing.assert_array_equal(pages[0][0, 3:1:-1], k_new[:, 0])
    np.testing.assert_array_equal(pages[1][0, 3:1:-1], v_new[:, 0])
    expected = rtflash.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=ints(4, 3), block_table=table
    )
    np.testing.assert_array_equal(out, expected)


def test_append_writes_the_new_slots_only() -> None:
    """Through strides, into the caller's own array; not a byte of another slot changes."""
    buffers = [normal(4, 3, 50, 16, seed=seed) for seed in (1, 2)]
    before = [x.copy() for x in buffers]
    caches = [x.transpose(0, 2, 1, 3)[::2, 10:] for x in buffers]
    k, v = normal(2, 3, 3, 16, seed=3), normal(2, 3, 3, 16, seed=4)
    rtflash.flash_attn_with_kvcache(
        normal(2, 1, 3, 16), *caches, k, v, cache_seqlens=ints(37, 0), cache_batch_idx=ints(1, 0)
    )
    for x, old, new in zip(buffers, before, (k, v), strict=True):
        old[2, :, 47:50] = new[0].swapaxes(0, 1)
        old[0, :, 10:13] = new[1].swapaxes(0, 1)
        np.testing.assert_array_equal(x.view(np.uint16), old.view(np.uint16))


@pytest.mark.parametrize("kind", ["interleaved", "halves"])
def test_columns_that_are_not_rotated_keep_their_bits(kind: str) -> None:
    """Case B30(a), and a NaN with a payload in what is only copied."""
    cache = [np.zeros((1, 4, 1, 64), np.float16) for _ in "kv"]
    k, v = normal(1, 1, 1, 64, seed=1), normal(1, 1, 1, 64, seed=2)
    k[..., 40] = np.array([0x7E55], np.uint16).view(np.float16)
    cos, sin = np.cos([[2.0] * 4] * 4), np.sin([[2.0] * 4] * 4)
    rtflash.flash_attn_with_kvcache(
        normal(1, 1, 1, 64), *cache, k, v, cos.astype(np.float16), sin.astype(np.float16),
        cache_seqlens=2, rotary_interleaved=kind == "interleaved",
    )  # fmt: skip
    got = cache[0][0, 2, 0]
    np.testing.assert_array_equal(got[8:].view(np.uint16), k[0, 0, 0, 8:].view(np.uint16))
    one, two = (0, 1) if kind == "interleaved" else (0, 4)
    x, y = (float(k[0, 0, 0, i]) for i in (one, two))
    assert float(got[one]) == pytest.approx(x * np.cos(2) - y * np.sin(2), abs=2e-3)
    assert float(got[two]) == pytest.approx(y * np.cos(2) + x * np.sin(2), abs=2e-3)


def test_same_bits_again_and_in_threads() -> None:
    call = VarlenCall(causal=True, page_size=3, heads=8)
    made = upload(NUMPY, call, inputs(call))
    expected = result(NUMPY, call, made)
    with ThreadPoolExecutor(8) as pool:
        for again in pool.map(lambda _: result(NUMPY, call, made), range(16)):
            np.testing.assert_array_equal(again.out, expected.out)
            np.testing.assert_array_equal(again.lse, expected.lse)


def test_memory_does_not_grow_with_keys_before_the_window() -> None:
    """2048 pages of 16 slots, 16 MiB; 100 keys are seen."""
    pages = normal(2048, 16, 4, 64)
    table = np.arange(2048, dtype=np.int32)[None]
    q = normal(1, 1, 4, 64)
    tracemalloc.start()
    try:
        rtflash.flash_attn_with_kvcache(q, pages, pages, block_table=table, window_size=(99, 0))
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


def parts(*cuts: int, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """Partial out (splits, b, s, h, dv) and lse (splits, b, s, h) of key ranges between cuts; the whole's."""
    q, k, v = (
        np.random.default_rng(seed + i).standard_normal((2, 5, 3, 8), np.float32) for i in range(3)
    )
    k, v = np.tile(k, (1, 4, 1, 1)), np.tile(v, (1, 4, 1, 1)) + np.arange(20)[:, None, None]
    each = [attention(q, k[:, a:b], v[:, a:b]) for a, b in pairwise(cuts)]
    out, lse = attention(q, k, v)
    return (
        np.stack([x for x, _ in each]).astype(np.float32),
        np.stack([x.swapaxes(1, 2) for _, x in each]).astype(np.float32),
        out,
        lse.swapaxes(1, 2),
    )


@pytest.mark.parametrize("cuts", [(0, 20), (0, 7, 20), (0, 0, 1, 1, 5, 20, 20)])
def test_combine(cuts: tuple[int, ...]) -> None:
    """Parts merge to the whole; a part without keys does not count, even if its values are NaN."""
    out_partial, lse_partial, out, lse = parts(*cuts)
    out_partial[np.isneginf(lse_partial)] = np.nan
    got, got_lse = cpu.combine(out_partial, lse_partial)
    assert got.dtype == got_lse.dtype == np.float32
    np.testing.assert_allclose(got, out, rtol=1e-5, atol=1e-5)
    check_lse(got_lse, lse, atol=1e-5)


def test_combine_of_nothing_and_of_nonfinite_values() -> None:
    out = np.array(
        [[[1.0], [2.0], [np.nan], [3.0], [np.nan]], [[3.0], [np.nan], [np.nan], [4.0], [1.0]]]
    )
    lse = np.array(
        [[-1e30, 0.0, -np.inf, np.nan, 0.0], [-1e30, -np.inf, -np.inf, 0.0, 0.0]], np.float32
    )
    got, got_lse = cpu.combine(out.astype(np.float32), lse)
    np.testing.assert_allclose(got[:, 0], [2.0, 2.0, 0.0, np.nan, np.nan])
    np.testing.assert_allclose(got_lse, [-1e30, 0.0, -np.inf, np.nan, np.log(2)], rtol=1e-6)


def test_combine_of_packed_halves() -> None:
    out_partial, lse_partial, out, lse = parts(0, 7, 20)
    got, got_lse = cpu.combine(out_partial[:, 0].astype(np.float16), lse_partial[:, 0])
    np.testing.assert_allclose(got, out[0], rtol=2e-3)
    check_lse(got_lse, lse[0], atol=1e-5)


def test_no_sequence_and_no_row() -> None:
    call = VarlenCall(lengths_q=(2,), lengths_k=(3,)).problem()
    none = dataclasses.replace(call, batch=0, total_q=0, total_k=0)
    q, k = np.zeros((0, 4, 64), np.float16), np.zeros((0, 2, 64), np.float16)
    out, lse = cpu.run(none, Tensors(q, k, k, cu_seqlens_q=ints(0), cu_seqlens_k=ints(0)))
    assert out.shape == (0, 4, 64)
    assert lse.shape == (4, 0)
