"""Public bug reports on packed sequences, caches and split keys, with known answers, on every backend (docs/cases.md).

Where lengths, offsets and tables lie on a GPU, the host does not read them: instead of a refusal the cases expect that
nothing outside the tensors is read or written. Tensors lie inside buffers of NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from backends import EMULATED, Backend, params
from compare import check, check_lse
from inference_calls import ROTARY_LSE_ATOL, CacheCall, calls, on_all, run
from layouts import decode, encode
from numpy.typing import NDArray
from reference import attention, rotated, same_dtype
from streams import side_stream
from test_cases import ULP, close, close_lse, ramp, zeros

import rtflash

PATHS = ("varlen", "cache", "pages")
on_paths = pytest.mark.parametrize("path", PATHS)
MARKER = 7.0


def ints(backend: Backend, *values: Any) -> Any:
    return backend.make(np.array(values), "int32")


def packed(backend: Backend, x: NDArray, dtype: str = "fp16") -> Any:
    """(rows, heads, head_dim) inside a buffer of NaN."""
    return backend.make(x[None], dtype)[0]


def paged(x: NDArray, page_size: int, fill: float = math.nan) -> tuple[NDArray, NDArray]:
    """Pages of a (batch, slots, heads, head_dim) cache in another order, one of them unused, and their table."""
    batch, slots = x.shape[:2]
    columns = -(-slots // page_size)
    table = 1 + np.random.default_rng(slots).permutation(batch * columns).reshape(batch, columns)
    pages = np.full((batch * columns + 1, page_size, *x.shape[2:]), fill, np.float32)
    whole = np.full((batch, columns * page_size, *x.shape[2:]), fill, np.float32)
    whole[:, :slots] = x
    pages[table] = whole.reshape(batch, columns, page_size, *x.shape[2:])
    return pages, table


def attend(
    backend: Backend,
    path: str,
    q: NDArray,
    k: NDArray,
    v: NDArray,
    dtype: str = "fp16",
    lengths: Any = None,
    **options: Any,
) -> tuple[NDArray, NDArray]:
    """Output and LSE of a dense call's fp32 values by another function, in the dense call's shapes.

    `lengths`: keys of each sequence that count, only in a cache; what lies behind them is the caller's.
    """
    (batch, seqlen_q, heads, _), seqlen_k = q.shape, k.shape[1]
    rows = batch * seqlen_q * heads
    if path == "varlen":
        cu_q, cu_k = (ints(backend, *np.arange(batch + 1) * n) for n in (seqlen_q, seqlen_k))
        tensors = [packed(backend, np.concatenate(x), dtype) for x in (q, k, v)]
        backend.poison(2 * rows * v.shape[3], 4 * rows)
        out, lse, _ = rtflash.flash_attn_varlen_func(
            *tensors, cu_q, cu_k, seqlen_q, seqlen_k, return_attn_probs=True, **options
        )
        out, lse = backend.to_numpy(out), backend.to_numpy(lse)
        return out.reshape(*q.shape[:3], -1), lse.reshape(heads, batch, seqlen_q).swapaxes(0, 1)
    if lengths is None:
        lengths = (seqlen_k,) * batch
        more = [(0, 0), (0, 9), (0, 0), (0, 0)]
        k, v = (np.pad(x, more, constant_values=math.nan) for x in (k, v))
    if path == "pages":
        (k, table), (v, _) = paged(k, 16), paged(v, 16)
        options["block_table"] = backend.make(table, "int32")
    tensors = [backend.make(x, dtype) for x in (q, k, v)]
    backend.poison(2 * rows * v.shape[3], 4 * rows)
    out, lse = rtflash.flash_attn_with_kvcache(
        *tensors, cache_seqlens=ints(backend, *lengths), return_softmax_lse=True, **options
    )
    return backend.to_numpy(out), backend.to_numpy(lse)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("junk", [math.nan, math.inf])
@on_all
def test_case_b02_junk_behind_the_used_slots(
    backend: Backend, junk: float, path: str, splits: int
) -> None:
    constants = np.array([1.5, -2.0], np.float32)
    q, k = np.random.default_rng(0).standard_normal((2, 2, 128, 1, 64), np.float32)
    q, v = q[:, :1], np.broadcast_to(constants[:, None, None, None], k.shape).copy()
    for b, used in enumerate((1, 3)):
        k[b, used:] = v[b, used:] = junk
    out, lse = attend(backend, path, q, k, v, lengths=(1, 3), num_splits=splits)
    np.testing.assert_array_equal(out, np.broadcast_to(constants[:, None, None, None], out.shape))
    q, k = (decode(encode(x, "fp16"), "fp16") for x in (q, k))
    for b, used in enumerate((1, 3)):
        own = slice(b, b + 1)
        check_lse(lse[own], attention(q[own], k[own, :used], v[own, :used])[1])


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("path", ["varlen", "decode"])
@on_all
def test_case_b09_more_than_65535_sequences(backend: Backend, path: str, splits: int) -> None:
    batch = 70000 if path == "varlen" else 65536
    if not backend.on_gpu:  # the limit is CUDA's
        batch = 999
    q, k, v = np.random.default_rng(3).standard_normal((3, batch, 1, 1, 16), np.float32)
    path = path if path == "varlen" else "cache"
    out, lse = attend(backend, path, q, k, v, num_splits=splits)
    np.testing.assert_array_equal(out, v.astype(np.float16).astype(np.float32))
    assert np.isfinite(lse).all()


def written(returned: Any, caches: list[Any]) -> list[Any]:
    """[out, k_cache, v_cache] of an append: JAX's caches are returned, others changed."""
    return list(returned) if isinstance(returned, tuple) else [returned, *caches]


@pytest.mark.parametrize("way", ["tensor", "int"])
@on_all
def test_case_b11_append_past_the_cache(backend: Backend, way: str) -> None:
    buffers = [backend.make(np.full((1, 32, 1, 64), MARKER), "fp16") for _ in range(2)]
    caches = [buffer[:, :16] for buffer in buffers]
    q, new = backend.make(zeros(1, 1, 1, 64)), backend.make(zeros(1, 1, 1, 64) + 3)

    def append() -> Any:
        length = 16 if way == "int" else ints(backend, 16)
        return rtflash.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=length)

    if way == "int" or not backend.on_gpu:
        with pytest.raises(ValueError, match=r"cache_seqlens.* is 16; it must be in 0\.\.15"):
            append()
    else:
        close(backend.to_numpy(written(append(), caches)[0]), MARKER)
    for buffer in buffers:
        np.testing.assert_array_equal(backend.to_numpy(buffer), np.full((1, 32, 1, 64), MARKER))


@pytest.mark.parametrize(
    ("table", "lengths"),
    [([[2, 0]], [32]), ([[1, 3]], [17]), ([[1, -1]], [17]), ([[-1, 1]], [17])],
    ids=["past the table", "no page", "-1", "an earlier -1"],
)
@on_all
def test_case_b11_append_where_no_page_is(
    backend: Backend, table: list[list[int]], lengths: list[int]
) -> None:
    """Two columns of pages of 16 slots, three pages. A key that no page holds is not written."""
    pages = [backend.make(np.full((3, 16, 1, 64), MARKER), "fp16") for _ in range(2)]
    q, new = backend.make(zeros(1, 1, 1, 64)), backend.make(zeros(1, 1, 1, 64) + 3)
    wanted = np.full((3, 16, 1, 64), MARKER)

    def append() -> Any:
        return rtflash.flash_attn_with_kvcache(
            q, *pages, new, new, cache_seqlens=ints(backend, *lengths), block_table=ints(backend, *table)
        )  # fmt: skip

    if not backend.on_gpu:
        name = "cache_seqlens" if lengths == [32] else "block_table"
        with pytest.raises(ValueError, match=name):
            append()
    else:
        out, *pages = written(append(), pages)
        assert np.isfinite(backend.to_numpy(out)).all()
        if table[0][1] == 1:
            wanted[1, 1] = 3
    for x in pages:
        np.testing.assert_array_equal(backend.to_numpy(x), wanted)


@pytest.mark.parametrize("new", [0, 1])
@on_all
def test_case_b11_columns_that_are_not_used(backend: Backend, new: int) -> None:
    table, lengths = [[0, -1], [1, 2]], [3, 7]
    k = np.full((3, 4, 1, 64), math.nan, np.float32)
    v = k.copy()
    for b, length in enumerate(lengths):
        for j in range(length):
            k[table[b][j // 4], j % 4] = 0
            v[table[b][j // 4], j % 4] = j
    k, v = backend.make(k), backend.make(v)
    appended = {"k": zeros(2, 1, 1, 64), "v": ramp(2).swapaxes(0, 1)}
    options = {name: backend.make(x) for name, x in appended.items()} if new else {}
    out, lse, *caches = rtflash.flash_attn_with_kvcache(
        backend.make(zeros(2, 1, 1, 64)), k, v, cache_seqlens=ints(backend, *lengths),
        block_table=ints(backend, *table), return_softmax_lse=True, **options,
    )  # fmt: skip
    k, v = caches or (k, v)
    for b, (length, total) in enumerate(zip(lengths, (0 + 1 + 2, 21 + new), strict=True)):
        close(backend.to_numpy(out)[b], total / (length + new))
        close_lse(backend.to_numpy(lse)[b], math.log(length + new))
    if new:
        np.testing.assert_array_equal(backend.to_numpy(v)[[0, 2], 3, 0, 0], [0, 1])


@pytest.mark.parametrize("per_batch", [False, True])
@on_paths
@on_all
def test_case_b12_alibi_distance_and_lse(backend: Backend, path: str, per_batch: bool) -> None:
    slopes = np.array([[1.0, 0.0], [2.0, 1.0]] if per_batch else [1.0, 0.0], np.float32)
    k, v = zeros(2, 4, 2, 64), zeros(2, 4, 2, 64)
    v[..., :4] = np.eye(4)[:, None]
    given = {"alibi_slopes": backend.make(slopes, "fp32")}
    causal, causal_lse = attend(backend, path, zeros(2, 1, 2, 64), k, v, causal=True, **given)
    close(causal[0, 0, 0, :4], [0.0321, 0.0871, 0.2369, 0.6439])
    close_lse(np.round(causal_lse[0, 0], 4), 0.4402)
    close(causal[0, 0, 1, :4], 0.25)
    full, full_lse = attend(backend, path, zeros(2, 2, 2, 64), k, v, **given)
    close(full[0, 0, 0, :4], [0.0723, 0.1966, 0.5344, 0.1966])
    close_lse(np.round(full_lse[0, 0, 0], 4), 0.6265)
    if per_batch:
        weights = np.exp(-2.0 * np.arange(3, -1, -1))
        close(causal[1, 0, 0, :4], weights / weights.sum())
        close_lse(causal_lse[1, 0], np.log(weights.sum()))
        close(full[1, 0, 1, :4], full[0, 0, 0, :4])


@pytest.mark.parametrize("kind", ["decode", "combine"])
@pytest.mark.parametrize("backend", params("torch-cuda", "cupy"), indirect=True)
def test_case_b17_combine_on_a_side_stream(backend: Backend, kind: str) -> None:
    """50 of 50 tries see inputs that the same stream writes after a long wait."""
    random = np.random.default_rng(8)
    if kind == "decode":
        shapes: list[tuple[int, ...]] = [(2, 1, 8, 64), (2, 700, 2, 64), (2, 700, 2, 64)]
        dtypes = ["fp16"] * 3

        def call(*x: Any) -> Any:
            return rtflash.flash_attn_with_kvcache(*x, cache_seqlens=600, num_splits=4)
    else:
        shapes, dtypes = [(5, 2, 33, 4, 64), (5, 2, 33, 4)], ["fp32"] * 2

        def call(*x: Any) -> Any:
            return rtflash.flash_attn_combine(*x)[0]

    tries = [[random.standard_normal(shape, np.float32) for shape in shapes] for _ in range(2)]
    fresh = [
        [backend.make(x, dtype) for x, dtype in zip(values, dtypes, strict=True)]
        for values in tries
    ]
    wanted = [backend.to_numpy(call(*values)) for values in fresh]
    assert not np.array_equal(*wanted)
    targets = [
        backend.make(np.zeros(shape, np.float32), dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    backend.synchronize()
    early = 0
    for i in range(50):
        with side_stream(backend) as stream:
            stream.sleep()
            for target, source in zip(targets, fresh[i % 2], strict=True):
                target[...] = source
            out = call(*targets)
            early += not stream.is_done()
            stream.synchronize()
            np.testing.assert_array_equal(backend.to_numpy(out), wanted[i % 2], err_msg=f"try {i}")
    assert early > 0, "every call waited for its inputs"


def hold_splits(one: tuple[NDArray, NDArray], many: tuple[NDArray, NDArray]) -> None:
    """Assert that results of split and of whole keys are equal but for rounding, and hold no NaN."""
    assert not any(np.isnan(x).any() for x in (*one, *many))
    np.testing.assert_allclose(many[0], one[0], rtol=ULP["fp16"], atol=ULP["fp16"])
    np.testing.assert_allclose(many[1], one[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", ["dense", *PATHS])
@on_all
def test_case_b22_more_splits_than_keys(backend: Backend, path: str, causal: bool) -> None:
    q, k, v = np.random.default_rng(4).standard_normal((3, 2, 5, 2, 64), np.float32)
    q = q[:, 1:]
    if path != "dense":
        one, many = (
            attend(backend, path, q, k, v, num_splits=n, causal=causal) for n in (1, 8)
        )  # fmt: skip
    else:
        tensors = [backend.make(x) for x in (q, k, v)]
        one, many = (
            tuple(map(backend.to_numpy, rtflash.flash_attn_func(
                *tensors, num_splits=n, causal=causal, return_attn_probs=True
            )[:2]))
            for n in (1, 8)
        )  # fmt: skip
    hold_splits(one, many)


@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("path", PATHS[1:])
@on_all
def test_case_b22_splits_of_uneven_lengths(backend: Backend, path: str, seqlen_q: int) -> None:
    q, k, v = np.random.default_rng(5).standard_normal((3, 3, 720, 2, 64), np.float32)
    lengths = (0, 1, 700)
    for b, used in enumerate(lengths):
        k[b, used:] = v[b, used:] = math.nan
    one, many = (
        attend(
            backend, path, q[:, :seqlen_q], k, v, lengths=lengths, num_splits=n, causal=seqlen_q > 1
        )
        for n in (1, 16)
    )
    hold_splits(one, many)
    for out, lse in (one, many):
        assert not out[0].any()
        assert np.isneginf(lse[0]).all()
        # Of four queries only the last sees the only key.
        assert np.isfinite(lse[1, :, -1]).all()
        assert np.isneginf(lse[1, :, :-1]).all()
        np.testing.assert_array_equal(out[1, -1], v[1, 0].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("path", PATHS[1:])
@on_all
def test_case_b25_lse_of_grouped_heads(backend: Backend, path: str, splits: int) -> None:
    lengths = (2, 8, 300)
    q, k, v = zeros(3, 1, 8, 64), zeros(3, 304, 2, 64), ramp(304, 2, batch=3)
    q[..., 0], k[..., 0] = 2 * np.arange(8), 1
    _, lse = attend(backend, path, q, k, v, lengths=lengths, num_splits=splits)
    assert lse.shape == (3, 8, 1)
    close_lse(lse[..., 0], np.arange(8) / 4 + np.log(lengths)[:, None])


@pytest.mark.parametrize("splits", [1, 3])
@on_all
def test_case_b25_merged_halves(backend: Backend, splits: int) -> None:
    """A key range in two calls; two of the three sequences have no key in the second."""
    lengths, cut = np.array([2, 8, 300]), 150
    q, k, v = np.random.default_rng(6).standard_normal((3, 3, 304, 8, 64), np.float32)
    q, k, v = backend.make(q[:, :1]), backend.make(k[:, :, :2]), backend.make(v[:, :, :2])
    options = {"num_splits": splits, "return_softmax_lse": True}

    def part(first: int, last: int) -> Any:
        own = ints(backend, *np.clip(lengths, first, last) - first)
        keys = (k[:, first:last], v[:, first:last])
        return rtflash.flash_attn_with_kvcache(q, *keys, cache_seqlens=own, **options)

    whole, halves = part(0, 304), (part(0, cut), part(cut, 304))
    merged = rtflash.merge_attention_states(*halves[0], *halves[1])
    hold_splits(
        tuple(map(backend.to_numpy, whole)), tuple(map(backend.to_numpy, merged))
    )  # fmt: skip
    # Nobody need ask for the LSE.
    silent = rtflash.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=ints(backend, *lengths), num_splits=splits
    )
    np.testing.assert_array_equal(backend.to_numpy(silent), backend.to_numpy(whole[0]))


@on_all
@calls(
    *(
        CacheCall(
            rotary=rotary, rotary_dim=8, seqlen_new=2, lengths=(20, 0, 7), capacity=40, page_size=size
        )
        for rotary in ("interleaved", "halves")
        for size in (0, 16)
    )
)  # fmt: skip
def test_case_b30_few_rotated_columns(backend: Backend, call: CacheCall) -> None:
    """Cached columns 8..63 are the new key's, bit for bit."""
    run(backend, call)


@pytest.mark.parametrize("way", ["tensor", "int"])
@pytest.mark.parametrize(
    ("dim", "table", "capacity"),
    [(16, (40, 16), 40), (64, (8, 4), 40), (64, (9, 4), 9), (64, (40, 0), 40)],
    ids=["too wide", "too short", "short for the queries", "no column"],
)
@on_all
def test_case_b30_tables_that_do_not_fit(
    backend: Backend, dim: int, table: tuple[int, int], capacity: int, way: str
) -> None:
    caches = [backend.make(zeros(1, capacity, 1, dim)) for _ in range(2)]
    new = backend.make(zeros(1, 1, 1, dim) + 1)
    cos, sin = (backend.make(x + zeros(*table)) for x in (1, 0))
    queries = backend.make(zeros(1, 2 if capacity == 9 else 1, 1, dim))
    length = 8 if way == "int" else ints(backend, 8)

    def append() -> Any:
        return rtflash.flash_attn_with_kvcache(
            queries, *caches, new, new, cos, sin, cache_seqlens=length, causal=True
        )

    if capacity == 9 and way == "tensor" and backend.on_gpu:
        append()  # lengths that the host does not read: a position past the table is not read either
        return
    with pytest.raises(ValueError, match=r"rotary"):
        append()
    assert not any(backend.to_numpy(cache).any() for cache in caches)


@pytest.mark.parametrize("head_dim", [1, 8, 40, 46, 72, 80, 96, 136, 256])
@pytest.mark.parametrize("path", PATHS[:2])
@on_all
def test_case_b31_head_dim_and_its_default_scale(
    backend: Backend, path: str, head_dim: int
) -> None:
    q, k, v = np.ones((1, 1, 1, head_dim), np.float32), *zeros(2, 1, 2, 1, head_dim)
    k[0, 0] = v[0, 0] = 1
    out, lse = attend(backend, path, q, k, v)
    logit = math.sqrt(head_dim)
    close(out, 1 / (1 + math.exp(-logit)))
    close_lse(lse, logit + math.log1p(math.exp(-logit)))
    if head_dim == 40:
        assert abs(out[0, 0, 0, 0] - 0.9982) < 5e-4


@pytest.mark.parametrize("dims", [(257, 64), (64, 257), (0, 64)], ids=str)
@on_paths
@on_all
def test_case_b31_head_dim_out_of_range(backend: Backend, path: str, dims: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="head_dim"):
        attend(
            backend,
            path,
            *(zeros(1, n, 1, d) for n, d in zip((1, 2, 2), (dims[0], *dims), strict=True)),
        )


@on_all
def test_case_b37_every_spelling_of_a_length(backend: Backend) -> None:
    q, k, v = np.random.default_rng(9).standard_normal((3, 2, 40, 2, 64), np.float32)
    q, k, v = backend.make(q[:, :1]), backend.make(k), backend.make(v)

    def call(length: Any, **options: Any) -> NDArray:
        return backend.to_numpy(
            rtflash.flash_attn_with_kvcache(q, k, v, cache_seqlens=length, **options)
        )

    wanted = call(ints(backend, 7, 7))
    assert not np.array_equal(wanted, call(8))
    for spelling in (7, np.int64(7), np.int32(7), np.uint8(7)):
        np.testing.assert_array_equal(call(spelling), wanted)
    for options in ({"num_splits": np.int64(2)}, {"num_splits": 2}):
        np.testing.assert_array_equal(call(7, **options), call(ints(backend, 7, 7), **options))
    for wrong in (True, 7.0, np.float32(7)):
        with pytest.raises(TypeError, match="cache_seqlens"):
            call(wrong)
    # A tensor without axes: reading it would block the host.
    with pytest.raises((TypeError, ValueError), match="cache_seqlens"):
        call(ints(backend, 7)[0] if backend.on_gpu else np.array(7, np.int32))


@on_all
def test_case_b38_one_query_of_some_sequences(backend: Backend) -> None:
    def means(lengths_q: Any, lengths_k: Any) -> NDArray:
        cu_q, cu_k = (ints(backend, 0, *np.cumsum(n)) for n in (lengths_q, lengths_k))
        total = sum(lengths_k)
        q, k = zeros(sum(lengths_q), 9, 64), zeros(total, 3, 64)
        q, k, v = (packed(backend, x) for x in (q, k, ramp(total, 3)[0]))
        out, lse, _ = rtflash.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 1, max(lengths_k), causal=True, return_attn_probs=True
        )
        visible = [n for n, rows in zip(lengths_k, lengths_q, strict=True) if rows]
        close_lse(backend.to_numpy(lse), np.log(visible))
        return backend.to_numpy(out)

    out = means((1, 0, 1), (3, 0, 5))
    close(out[0], 1.0)
    close(out[1], 5.0)
    close(means((0, 1, 0, 0), (2, 4, 0, 3)), 3.5)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("path", PATHS[1:])
@on_all
def test_case_b39_window_of_one_query(
    backend: Backend, path: str, causal: bool, splits: int
) -> None:
    """The second sequence is so long that whole parts lie before the window."""
    lengths = (10, 1500)
    k, v = zeros(2, 1510, 2, 64), ramp(1510, 2, batch=2)
    for b, used in enumerate(lengths):
        k[b, used:] = v[b, used:] = math.nan
    out, lse = attend(
        backend, path, zeros(2, 1, 8, 64), k, v, lengths=lengths, window_size=(2, 0), causal=causal,
        num_splits=splits,
    )  # fmt: skip
    close(out[0], 8.0)
    close(out[1], 1498.0)
    close_lse(lse, math.log(3))


@on_all
def test_case_b52_offsets_of_int64(backend: Backend) -> None:
    if backend.module == "jax":
        pytest.skip("JAX makes int32 of int64")
    q = packed(backend, zeros(2, 1, 64))
    wide = np.array([0, 2])
    if backend.module == "torch":
        import torch

        wide = torch.tensor([0, 2], device=q.device)
    elif backend.module == "cupy":
        import cupy

        wide = cupy.array(wide)
    right = ints(backend, 0, 2)
    for cu_q, cu_k, name in ((wide, right, "cu_seqlens_q"), (right, wide, "cu_seqlens_k")):
        with pytest.raises(TypeError, match=f"{name} is int64; it must be int32"):
            rtflash.flash_attn_varlen_func(q, q, q, cu_q, cu_k, 2, 2)
    with pytest.raises(TypeError, match="seqused_k is int64"):
        rtflash.flash_attn_varlen_func(q, q, q, right, right, 2, 2, seqused_k=wide[1:])
    cache = backend.make(zeros(1, 4, 1, 64))
    with pytest.raises(TypeError, match="cache_seqlens is int64"):
        rtflash.flash_attn_with_kvcache(cache, cache, cache, cache_seqlens=wide[1:])


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "longest", "name", "wanted"),
    [
        ((0, 2), (0, 20), (2, 20), "cu_seqlens_k", (0.5, 0.5)),
        ((0, 20), (0, 2), (20, 2), "cu_seqlens_q", (0.5, 0.5)),
        ((0, 2), (1, 2), (2, 2), "cu_seqlens_k", (1, 1)),
        ((0, 1, 2), (0, 2, 1), (1, 2), "cu_seqlens_k", (0.5, 0)),
        ((0, 2, 1), (0, 1, 2), (2, 1), "cu_seqlens_q", (0, 0)),
        ((0, 2), (-5, 2), (2, 2), "cu_seqlens_k", (0.5, 0.5)),
        ((0, 2), (0, 2), (2, 1), "max_seqlen_k", None),
        ((0, 2), (0, 2), (1, 2), "max_seqlen_q", None),
    ],
    ids=str,
)
@on_all
def test_case_b52_malformed_offsets(
    backend: Backend, cu_q: Any, cu_k: Any, longest: Any, name: str, wanted: Any
) -> None:
    """Two queries, two keys with values 0 and 1. `wanted`: what offsets cut off at the tensors' ends give."""
    q, k, v = (packed(backend, x) for x in (zeros(2, 1, 64), zeros(2, 1, 64), ramp(2)[0]))

    def call() -> Any:
        backend.poison(2 * 128, 8)
        return rtflash.flash_attn_varlen_func(
            q, k, v, ints(backend, *cu_q), ints(backend, *cu_k), *longest
        )

    if not backend.on_gpu:
        with pytest.raises(ValueError, match=name):
            call()
        return
    out = backend.to_numpy(call())
    if wanted is not None:
        close(out[:, 0, 0], wanted)


@pytest.mark.parametrize("backend", params("torch-cuda", "cupy", "jax-cuda"), indirect=True)
def test_case_b52_offsets_on_the_cpu(backend: Backend) -> None:
    q, offsets = packed(backend, zeros(2, 1, 64)), np.array([0, 2], np.int32)
    right = ints(backend, 0, 2)
    if backend.module == "torch":
        import torch

        offsets = torch.from_numpy(offsets)
    elif backend.module == "jax":
        import jax

        offsets = jax.device_put(offsets, jax.devices("cpu")[0])
    with pytest.raises((TypeError, ValueError), match="cu_seqlens_k"):
        rtflash.flash_attn_varlen_func(q, q, q, right, offsets, 2, 2)


@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("way", ["tensor", "int"])
@on_all
def test_generation_equals_one_causal_pass(
    backend: Backend, way: str, page_size: int, rotary: str
) -> None:
    """A prompt of P tokens, then one after the other, rotated and appended: the rows of one causal call."""
    prompt, steps = (20, 3) if backend.name == EMULATED else (70, 64)
    batch, tokens, heads, heads_k, dim, dtype = 2, prompt + steps, 8, 2, 64, "fp16"
    random = np.random.default_rng(10)

    def exact(x: NDArray) -> NDArray:
        return decode(encode(x, dtype), dtype)

    q, k, v = (
        exact(random.standard_normal((batch, tokens, h, dim), np.float32))
        for h in (heads, heads_k, heads_k)
    )
    angles = np.arange(144)[:, None] * random.random(dim // 2)
    cos, sin = exact(np.cos(angles)), exact(np.sin(angles))
    caches = np.full((2, batch, 144, heads_k, dim), math.nan, np.float32)
    options: dict[str, Any] = {}
    if page_size:
        pages, table = paged(caches[0], page_size)
        caches, options["block_table"] = np.stack([pages, pages]), backend.make(table, "int32")
    made = [backend.make(x, dtype) for x in (*caches, cos, sin)]
    tensors = [backend.make(x, dtype) for x in (q, k, v)]
    outs, lses = [], []
    for first, last in ((0, prompt), *((t, t + 1) for t in range(prompt, tokens))):
        own = [x[:, first:last] for x in tensors]
        out, lse, *caches = rtflash.flash_attn_with_kvcache(
            own[0], *made[:2], *own[1:], *made[2:], causal=True, return_softmax_lse=True,
            cache_seqlens=first if way == "int" else ints(backend, first, first),
            rotary_interleaved=rotary == "interleaved", **options,
        )  # fmt: skip
        made[:2] = caches or made[:2]
        outs.append(backend.to_numpy(out))
        lses.append(backend.to_numpy(lse))

    tables = cos[:tokens], sin[:tokens]
    turned = [
        np.stack([rotated(row.astype(np.float64), *tables, rotary == "interleaved", dtype) for row in x])
        for x in (q, k)
    ]  # fmt: skip
    dense, dense_lse, _ = rtflash.flash_attn_func(
        *(backend.make(x, dtype) for x in (*turned, v)), causal=True, return_attn_probs=True
    )
    expected, expected_lse = attention(*turned, v, causal=True)
    plain = same_dtype(*turned, v, dtype, causal=True)
    check(np.concatenate(outs, axis=1), expected, plain, dtype)
    check_lse(np.concatenate(lses, axis=2), expected_lse, atol=ROTARY_LSE_ATOL)
    check(backend.to_numpy(dense), expected, plain, dtype)
    check_lse(backend.to_numpy(dense_lse), expected_lse)

    k_cache, v_cache = map(backend.to_numpy, made[:2])
    if page_size:
        k_cache, v_cache = (x[table].reshape(batch, -1, heads_k, dim) for x in (k_cache, v_cache))
    np.testing.assert_array_equal(v_cache[:, :tokens], v)
    np.testing.assert_allclose(k_cache[:, :tokens], turned[1], rtol=ULP[dtype], atol=1e-6)
    assert np.isnan(k_cache[:, tokens:]).all()
