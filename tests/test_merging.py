"""merge_attention_states and flash_attn_combine on every backend, against float64.

A part that saw no key of a row (LSE -inf) holds NaN there: it must not count.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from backends import EMULATED, Backend
from compare import check, check_lse
from inference_calls import on_all
from layouts import decode, encode
from numpy.typing import NDArray
from reference import attention, same_dtype

import rtflash

DTYPES = ("fp16", "bf16", "fp32")
# Relative error of the result: one rounding to the dtype; in fp32 that of the exponentials.
ERROR = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 1e-5}
NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def exact(x: NDArray, dtype: str) -> NDArray:
    """Values that the dtype holds."""
    return x if dtype == "fp32" else decode(encode(x, dtype), dtype)


def parts(splits: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> tuple[NDArray, ...]:
    """Outputs (splits, *rows, heads, dim) and LSE, heads last; a third of the parts saw no key, and none of row 0's."""
    random = np.random.default_rng(seed)
    out = exact(random.standard_normal((splits, *shape), np.float32), dtype)
    lse = (random.standard_normal(out.shape[:-1]) * 5).astype(np.float32)
    empty = random.random(lse.shape) < 1 / 3
    empty.reshape(splits, -1)[:, :1] = True
    lse[empty], out[empty] = -math.inf, math.nan
    return out, lse


def merged(out: NDArray, lse: NDArray) -> tuple[NDArray, NDArray]:
    """The float64 result of parts along the first axis."""
    seen = ~np.isneginf(lse)
    maximum = np.where(seen.any(0), lse.max(0, initial=-np.inf), 0).astype(np.float64)
    weights = np.exp(lse - maximum)
    total = weights.sum(0)
    values = np.where(seen[..., None], out, 0).astype(np.float64)
    mean = (values * weights[..., None]).sum(0) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return mean, maximum + np.log(total)


def hold(backend: Backend, got: tuple[Any, Any], wanted: tuple[Any, Any], dtype: str) -> None:
    """Assert values, dtypes and whose arrays they are."""
    assert all(backend.owns(x, x) for x in got)
    assert [backend.dtype_name(x) for x in got] == [NAMES[dtype], "float32"]
    out, lse = map(backend.to_numpy, got)
    np.testing.assert_allclose(out, wanted[0], rtol=ERROR[dtype], atol=1e-5)
    check_lse(lse, wanted[1], atol=1e-5)


def heads_first(lse: NDArray) -> NDArray:
    return np.ascontiguousarray(np.swapaxes(lse, -1, -2))


def poison(backend: Backend, out: NDArray) -> None:
    rows = out[0].size
    backend.poison(4 * rows, 2 * rows, 4 * rows // max(1, out.shape[-1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [(2, 5, 3, 64), (1, 9, 2, 17), (1, 1, 1, 1), (2, 3, 2, 256), (11, 3, 64), (7, 2, 63)],
    ids=str,
)
@on_all
def test_merge(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    out, lse = parts(2, shape, dtype)
    tensors = []
    for o, sums in zip(out, lse, strict=True):
        tensors += [backend.make(o, dtype), backend.make(heads_first(sums), "fp32")]
    poison(backend, out)
    wanted, wanted_lse = merged(out, lse)
    got = rtflash.merge_attention_states(*tensors)
    hold(backend, got, (wanted, heads_first(wanted_lse)), dtype)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (0, 2, 8)], ids=str)
@on_all
def test_merge_of_no_row(backend: Backend, shape: tuple[int, ...]) -> None:
    out = backend.make(np.zeros(shape))
    lse = backend.make(heads_first(np.zeros(shape[:-1])), "fp32")
    got = rtflash.merge_attention_states(out, lse, out, lse)
    assert [tuple(x.shape) for x in got] == [shape, tuple(lse.shape)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "layouts", [("bhsd", "bhsd"), ("bhsd", "bshd"), ("inner2", "padded"), ("align2", "align2")],
    ids=str,
)  # fmt: skip
@on_all
def test_merge_of_strided_tensors(backend: Backend, layouts: tuple[str, str], dtype: str) -> None:
    """The LSE are transposed views."""
    if backend.strides == "none":
        pytest.skip(f"{backend.name} has row-major arrays only")
    out, lse = parts(2, (2, 5, 3, 24), dtype)
    tensors = []
    for o, sums, layout in zip(out, lse, layouts, strict=True):
        tensors += [backend.make(o, dtype, layout), backend.make(sums, "fp32").swapaxes(1, 2)]
    wanted, wanted_lse = merged(out, lse)
    got = rtflash.merge_attention_states(*tensors)
    hold(backend, got, (wanted, heads_first(wanted_lse)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@on_all
def test_a_part_without_keys_changes_no_bit(backend: Backend, dtype: str) -> None:
    random = np.random.default_rng(2)
    out = backend.make(random.standard_normal((2, 5, 3, 24), np.float32), dtype)
    lse = backend.make(random.standard_normal((2, 3, 5), np.float32), "fp32")
    nothing = backend.make(np.full((2, 5, 3, 24), math.nan), dtype)
    minus = backend.make(np.full((2, 3, 5), -math.inf), "fp32")
    for tensors in ((out, lse, nothing, minus), (nothing, minus, out, lse)):
        got = rtflash.merge_attention_states(*tensors)
        np.testing.assert_array_equal(backend.to_numpy(got[0]), backend.to_numpy(out))
        np.testing.assert_allclose(backend.to_numpy(got[1]), backend.to_numpy(lse), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("prefix", [1, 64, 100])
@on_all
def test_prefix_and_suffix(backend: Backend, prefix: int, dtype: str) -> None:
    """All queries see a shared prefix, and of the keys behind it those that the causal mask leaves."""
    random = np.random.default_rng(3)
    q, k, v = (
        exact(random.standard_normal((2, n, h, 64), np.float32), dtype)
        for n, h in ((40, 6), (prefix + 40, 2), (prefix + 40, 2))
    )
    made = [backend.make(x, dtype) for x in (q, k, v)]
    first, first_lse, _ = rtflash.flash_attn_func(
        made[0], *(x[:, :prefix] for x in made[1:]), return_attn_probs=True
    )
    rest, rest_lse, _ = rtflash.flash_attn_func(
        made[0], *(x[:, prefix:] for x in made[1:]), causal=True, return_attn_probs=True
    )
    out, lse = rtflash.merge_attention_states(first, first_lse, rest, rest_lse)
    expected, expected_lse = attention(q, k, v, causal=True)
    check(backend.to_numpy(out), expected, same_dtype(q, k, v, dtype, causal=True), dtype)
    check_lse(backend.to_numpy(lse), expected_lse)


@on_all
def test_prefix_of_packed_sequences(backend: Backend) -> None:
    """Sequences of different lengths over one prefix; one of them has no query, one no key of its own."""
    lengths_q, lengths_k, prefix = np.array([7, 0, 20, 3]), np.array([9, 4, 20, 0]), 50
    random = np.random.default_rng(4)
    q, k, v = (
        exact(random.standard_normal((n, 2, 64), np.float32), "fp16")
        for n in (lengths_q.sum(), prefix + lengths_k.sum(), prefix + lengths_k.sum())
    )
    cu_q, cu_k = (np.cumsum([0, *n]) for n in (lengths_q, lengths_k))
    made = [backend.make(x[None])[0] for x in (q, k, v)]
    total = int(cu_q[-1])
    shared = [backend.make(np.array([0, n]), "int32") for n in (total, prefix)]
    own = [backend.make(cu, "int32") for cu in (cu_q, cu_k)]
    states = []
    for keys, cu, longest in (
        (slice(prefix), shared, (total, prefix)),
        (slice(prefix, None), own, (20, 20)),
    ):
        states += rtflash.flash_attn_varlen_func(
            made[0], *(x[keys] for x in made[1:]), *cu, *longest, return_attn_probs=True
        )[:2]  # fmt: skip
    out, lse = map(backend.to_numpy, rtflash.merge_attention_states(*states))
    for b, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        if rows == 0:
            continue
        row, key = slice(cu_q[b], cu_q[b] + rows), slice(cu_k[b], cu_k[b] + keys)
        tensors = [
            q[None, row], *(np.concatenate([x[:prefix], x[prefix:][key]])[None] for x in (k, v))
        ]  # fmt: skip
        expected, expected_lse = attention(*tensors)
        check(out[None, row], expected, same_dtype(*tensors, "fp16"), "fp16")
        check_lse(lse[None, :, row], expected_lse)


@pytest.mark.parametrize("dim", [1, 17, 64, 130, 256])
@pytest.mark.parametrize("splits", [1, 2, 3, 33, 256])
@on_all
def test_combine(backend: Backend, splits: int, dim: int) -> None:
    if backend.name == EMULATED and (splits, dim) not in ((1, 64), (3, 17), (33, 130), (256, 256)):
        pytest.skip("takes long")
    out, lse = parts(splits, (2, 3, 2, dim), "fp32", splits)
    made = backend.make(out, "fp32"), backend.make(lse, "fp32")
    poison(backend, out)
    hold(backend, rtflash.flash_attn_combine(*made), merged(out, lse), "fp32")


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("partial", DTYPES)
@on_all
def test_combine_dtypes(backend: Backend, partial: str, out_dtype: str) -> None:
    """By name and by the library's own dtype; packed shapes."""
    out, lse = parts(5, (9, 3, 20), partial)
    made = backend.make(out, partial), backend.make(lse, "fp32")
    own = backend.make(np.zeros(1), out_dtype).dtype
    for given in (out_dtype, own):
        got = rtflash.flash_attn_combine(*made, out_dtype=given)
        hold(backend, got, merged(out, lse), out_dtype)
    hold(backend, rtflash.flash_attn_combine(*made), merged(out, lse), partial)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 3, 24), (6, 3, 24)], ids=str)
@on_all
def test_combine_into_a_given_tensor(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    out, lse = parts(4, shape, "fp32")
    made = backend.make(out, "fp32"), backend.make(lse, "fp32")
    target = backend.make(np.full(shape, math.nan), dtype)
    if backend.module == "jax":
        with pytest.raises(TypeError, match="out is a JAX array"):
            rtflash.flash_attn_combine(*made, target)
        return
    for options in ({}, {"out_dtype": dtype}):
        got = rtflash.flash_attn_combine(*made, target, **options)
        assert got[0] is target
        hold(backend, got, merged(out, lse), dtype)
    wide = backend.make(np.zeros((*shape[:-1], 48)), dtype)
    for wrong, what in ((wide, "shape"), (wide[..., ::2], "strides")):
        with pytest.raises(ValueError, match=f"^out has {what}"):
            rtflash.flash_attn_combine(*made, wrong)
    with pytest.raises(TypeError, match=r"^out is int32; it must be fp16, bf16 or fp32$"):
        rtflash.flash_attn_combine(*made, backend.make(np.zeros(shape), "int32"))
    other = next(d for d in DTYPES if d != dtype)
    with pytest.raises(ValueError, match=f"out is {dtype}; with out_dtype it must be {other}"):
        rtflash.flash_attn_combine(*made, target, other)


@pytest.mark.parametrize(
    "kind", ["heads first", "splits second", "padded rows", "every other column"]
)
@on_all
def test_combine_of_strided_tensors(backend: Backend, kind: str) -> None:
    if backend.strides == "none":
        pytest.skip(f"{backend.name} has row-major arrays only")
    out, lse = parts(3, (2, 5, 4, 24), "fp32")
    if kind == "heads first":
        made = backend.make(out, "fp32"), backend.make(heads_first(lse), "fp32").swapaxes(-1, -2)
    elif kind == "splits second":
        turned = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (out, lse))
        made = tuple(backend.make(x, "fp32").swapaxes(0, 1) for x in turned)
    else:
        wide = np.full((*out.shape[:-1], 49), math.nan, np.float32)
        columns = slice(1, 25) if kind == "padded rows" else slice(0, 48, 2)
        wide[..., columns] = out
        made = backend.make(wide, "fp32")[..., columns], backend.make(lse, "fp32")
    assert tuple(made[0].shape) == out.shape
    hold(backend, rtflash.flash_attn_combine(*made), merged(out, lse), "fp32")


@pytest.mark.parametrize("cuts", [(70,), (20, 40), (1, 1, 128)], ids=str)
@on_all
def test_combine_of_attention_over_parts(backend: Backend, cuts: tuple[int, ...]) -> None:
    """Parts of the keys, one of which may be empty, equal all of them."""
    random = np.random.default_rng(5)
    q, k, v = (
        exact(random.standard_normal((2, n, 2, 64), np.float32), "fp16") for n in (3, 129, 129)
    )
    made = [backend.make(x) for x in (q, k, v)]
    ends = (0, *cuts, 129)
    results = [
        rtflash.flash_attn_func(
            made[0], made[1][:, a:b], made[2][:, a:b], return_attn_probs=True
        )[:2]
        for a, b in pairwise(ends)
    ]  # fmt: skip
    outs, lses = (np.stack([backend.to_numpy(x) for x in xs]) for xs in zip(*results, strict=True))
    out, lse = rtflash.flash_attn_combine(
        backend.make(outs, "fp16"), backend.make(heads_first(lses), "fp32")
    )
    expected, expected_lse = attention(q, k, v)
    check(backend.to_numpy(out), expected, same_dtype(q, k, v, "fp16"), "fp16")
    check_lse(heads_first(backend.to_numpy(lse)), expected_lse)


@pytest.mark.parametrize("splits", [0, 257])
@on_all
def test_numbers_of_parts_that_are_refused(backend: Backend, splits: int) -> None:
    made = (
        backend.make(np.zeros((splits, 3, 2, 8)), "fp32"),
        backend.make(np.zeros((splits, 3, 2)), "fp32"),
    )
    with pytest.raises(ValueError, match=rf"splits is {splits}; it must be in 1\.\.256"):
        rtflash.flash_attn_combine(*made)


@pytest.mark.parametrize("large", [2.0e38, -2.0e38, 300.0, -300.0])
@on_all
def test_large_lse(backend: Backend, large: float) -> None:
    """The largest LSE is taken off before anything is raised to a power."""
    out = np.random.default_rng(6).standard_normal((3, 4, 2, 16), np.float32)
    lse = np.full(out.shape[:-1], large, np.float32)
    lse[1] = large - abs(large) / 2
    got = rtflash.flash_attn_combine(backend.make(out, "fp32"), backend.make(lse, "fp32"))
    hold(backend, got, merged(out, lse), "fp32")
