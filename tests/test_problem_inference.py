"""What varlen, cache and merge calls may be: shapes and dtypes by Views, what host arrays hold by calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from fake_gpu import LIBRARY, FakeGpu, Library, view

import rtflash
from rtflash import (
    ahead,
    build,
    call,
    describe,
    device,
    inference,
    layouts,
    lengths,
    listed,
    merging,
    partials,
    plan,
    problem,
    select,
    tensor,
)
from rtflash.dlpack import Borrowed
from rtflash.other_specs import AppendSpec
from rtflash.problem import Tensors
from rtflash.tensor import Framework, View


def ints(*shape: int, **options: Any) -> View:
    return view(*shape, dtype="int32", **options)


# Batch 3, GQA 4 over 2, head_dim 64 and 32.
VARLEN = Tensors(
    q=view(10, 4, 64),
    k=view(20, 2, 64),
    v=view(20, 2, 32),
    cu_seqlens_q=ints(4),
    cu_seqlens_k=ints(4),
)
PAGED = VARLEN._replace(k=view(7, 16, 2, 64), v=view(7, 16, 2, 32), block_table=ints(3, 5))
CACHE = Tensors(q=view(3, 2, 4, 64), k=view(4, 40, 2, 64), v=view(4, 40, 2, 32), seqused_k=ints(3))
APPEND = CACHE._replace(k_new=view(3, 2, 2, 64), v_new=view(3, 2, 2, 32))
ROTARY = APPEND._replace(rotary_cos=view(40, 16), rotary_sin=view(40, 16))
PAGED_CACHE = CACHE._replace(k=view(7, 16, 2, 64), v=view(7, 16, 2, 32), block_table=ints(3, 5))


def varlen(tensors: Tensors, max_q: Any = 6, max_k: Any = 8, **options: Any) -> problem.Problem:
    return describe.varlen(tensors, max_q, max_k, **options)


def kvcache(tensors: Tensors, **options: Any) -> problem.Problem:
    return describe.kvcache(tensors, names=inference.CACHE, **options)


def test_varlen() -> None:
    made = varlen(VARLEN, causal=True, num_splits=3)
    assert made == problem.Problem(
        batch=3,
        seqlen_q=6,
        seqlen_k=8,
        heads=4,
        heads_k=2,
        head_dim=64,
        head_dim_v=32,
        dtype="fp16",
        softmax_scale=0.125,
        window_left=-1,
        window_right=0,
        softcap=0.0,
        alibi=False,
        align=16,
        boxes=True,
        total_q=10,
        total_k=20,
        ragged=True,
        num_splits=3,
        max_seqlen_q=6,
    )
    assert made.out_shape == (10, 4, 32)
    assert made.lse_shape == (4, 10)


def test_varlen_with_pages() -> None:
    made = varlen(PAGED, max_k=100)
    assert (made.total_k, made.page_size, made.columns, made.pages) == (-1, 16, 5, 7)
    assert made.seqlen_k == 80
    assert varlen(PAGED._replace(cu_seqlens_k=None, seqused_k=ints(3))).ragged


def test_bounds_larger_than_the_tensors_are_no_lengths() -> None:
    """A caller may know no better bound than the model's limit."""
    made = varlen(VARLEN, 2**31 - 1, np.int64(2**40))
    assert (made.seqlen_q, made.seqlen_k) == (10, 20)
    assert type(made.seqlen_k) is int


def test_caches() -> None:
    made = kvcache(CACHE)
    assert (made.batch, made.cache_batch, made.seqlen_q, made.seqlen_k) == (3, 4, 2, 40)
    assert (made.ragged, made.seqlen_new, made.rotary, made.page_size) == (True, 0, "none", 0)
    made = kvcache(ROTARY, rotary_interleaved=False)
    assert (made.seqlen_new, made.rotary) == (2, "halves")
    assert (made.rotary_dim, made.positions) == (32, 40)
    assert kvcache(ROTARY).rotary == "interleaved"
    made = kvcache(PAGED_CACHE._replace(leftpad_k=ints(3)))
    assert (made.cache_batch, made.seqlen_k, made.pages) == (0, 80, 7)
    assert made.lse_shape == (3, 4, 2)
    # An int as cache_seqlens is no tensor.
    assert not kvcache(APPEND._replace(seqused_k=None), counted=True).ragged


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"causal": True}, (-1, -1, "full")),
        ({"window_size": (5, 3)}, (5, -1, "window")),
        ({"window_size": (5, 0), "causal": True}, (5, -1, "window")),
    ],
)
def test_one_query_has_no_right_bound(options: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    one = CACHE._replace(q=view(3, 1, 4, 64))
    for made in (kvcache(one, **options), varlen(VARLEN, 1, **options)):
        assert (made.window_left, made.window_right, made.mask) == wanted
    assert kvcache(CACHE, causal=True).mask == "causal"


REFUSALS: dict[str, tuple[type[Exception], str, Any]] = {
    "int64 offsets": (
        TypeError,
        r"^cu_seqlens_q is int64; it must be int32$",
        lambda: varlen(VARLEN._replace(cu_seqlens_q=view(4, dtype="int64"))),
    ),
    "int64 table": (
        TypeError,
        "^block_table is int64",
        lambda: kvcache(PAGED_CACHE._replace(block_table=view(3, 5, dtype="int64"))),
    ),
    "int64 lengths": (
        TypeError,
        "^cache_seqlens is int64",
        lambda: kvcache(CACHE._replace(seqused_k=view(3, dtype="int64"))),
    ),
    "fp32 tables": (
        TypeError,
        "rotary_cos is fp32, rotary_sin is fp32; they must have one dtype",
        lambda: kvcache(
            ROTARY._replace(
                rotary_cos=view(40, 16, dtype="fp32"), rotary_sin=view(40, 16, dtype="fp32")
            )
        ),
    ),
    "new keys' dtype": (
        TypeError,
        "^q is fp16, k is bf16; they must have one dtype",
        lambda: kvcache(APPEND._replace(k_new=view(3, 2, 2, 64, dtype="bf16"))),
    ),
    "max_seqlen as a float": (TypeError, "max_seqlen_q is a float", lambda: varlen(VARLEN, 6.0)),
    "max_seqlen as an array": (
        TypeError,
        "max_seqlen_k is a ndarray",
        lambda: varlen(VARLEN, 6, np.array([8])),
    ),
    "negative max_seqlen": (
        ValueError,
        "^max_seqlen_q is -1; it must be at least 0$",
        lambda: varlen(VARLEN, -1),
    ),
    "dense q": (
        ValueError,
        r"^q has shape \(3, 2, 4, 64\); it must be \(total, heads, head_dim\)$",
        lambda: varlen(VARLEN._replace(q=view(3, 2, 4, 64))),
    ),
    "packed k with a table": (
        ValueError,
        r"k has shape \(20, 2, 64\); it must be \(pages, page_size, heads, head_dim\)",
        lambda: varlen(VARLEN._replace(block_table=ints(3, 5))),
    ),
    "offsets of another batch": (
        ValueError,
        r"^cu_seqlens_k has shape \(5,\); with cu_seqlens_q \(4,\) it must be \(4,\)$",
        lambda: varlen(VARLEN._replace(cu_seqlens_k=ints(5))),
    ),
    "no offsets": (
        ValueError,
        r"^cu_seqlens_q has shape \(0,\); it must be \(batch \+ 1,\)",
        lambda: varlen(VARLEN._replace(cu_seqlens_q=ints(0), cu_seqlens_k=ints(0))),
    ),
    "no keys' offsets": (
        ValueError,
        "^cu_seqlens_k is None; it must be given where there is no block_table$",
        lambda: varlen(VARLEN._replace(cu_seqlens_k=None)),
    ),
    "pages without lengths": (
        ValueError,
        "^cu_seqlens_k and seqused_k are None; with block_table one of them must give the keys' lengths$",
        lambda: varlen(PAGED._replace(cu_seqlens_k=None)),
    ),
    "used of another batch": (
        ValueError,
        r"^seqused_q has shape \(4,\); it must be \(3,\)$",
        lambda: varlen(VARLEN._replace(seqused_q=ints(4))),
    ),
    "a table of another batch": (
        ValueError,
        r"^block_table has shape \(2, 5\); it must be \(3, columns\)$",
        lambda: varlen(PAGED._replace(block_table=ints(2, 5))),
    ),
    "empty pages": (
        ValueError,
        "pages must have at least 1 row",
        lambda: varlen(PAGED._replace(k=view(7, 0, 2, 64), v=view(7, 0, 2, 32))),
    ),
    "strided pages": (
        ValueError,
        r"^k has strides \(.*, 2\); the last, .* never copied: allocate it with head_dim innermost$",
        lambda: varlen(PAGED._replace(k=view(7, 16, 2, 64, step=2))),
    ),
    "strided cache": (
        ValueError,
        r"^v_cache has strides \(.*, 2\); the last, head_dim's, must be 1",
        lambda: kvcache(CACHE._replace(v=view(4, 40, 2, 32, step=2))),
    ),
    "a cache between elements": (
        ValueError,
        "^k_cache has address 0x101; it must be a multiple of its 2-byte elements, .* allocate it ",
        lambda: kvcache(CACHE._replace(k=view(4, 40, 2, 64, ptr=257))),
    ),
    "a cache of fewer sequences": (
        ValueError,
        "^k_cache has room for 2 sequences; without cache_batch_idx .* q's 3$",
        lambda: kvcache(CACHE._replace(k=view(2, 40, 2, 64), v=view(2, 40, 2, 32))),
    ),
    "indices and pages": (
        ValueError,
        "^cache_batch_idx and block_table are both given",
        lambda: kvcache(PAGED_CACHE._replace(cache_batch_idx=ints(3))),
    ),
    "v without k": (
        ValueError,
        "^k is None and v is not",
        lambda: kvcache(APPEND._replace(k_new=None)),
    ),
    "new values' shape": (
        ValueError,
        r"^v has shape \(3, 2, 2, 64\); with v_cache \(4, 40, 2, 32\) it must be \(3, 2, 2, 32\)$",
        lambda: kvcache(APPEND._replace(v_new=view(3, 2, 2, 64))),
    ),
    "an append to an expanded cache": (
        ValueError,
        r"^v_cache has shape \(4, 40, 2, 32\) and strides \(0, 64, 32, 1\); with k no stride .* may be 0",
        lambda: kvcache(APPEND._replace(v=APPEND.v._replace(strides=(0, 64, 32, 1)))),
    ),
    "an append to heads that are one": (
        ValueError,
        r"^k_cache has shape .* with k no stride .* may be 0",
        lambda: kvcache(APPEND._replace(k=APPEND.k._replace(strides=(2560, 64, 0, 1)))),
    ),
    "an append to one page": (
        ValueError,
        r"^k_cache has shape .* with k no stride .* may be 0",
        lambda: kvcache(
            APPEND._replace(
                k=PAGED.k._replace(strides=(0, 128, 64, 1)), v=PAGED.v, block_table=ints(3, 5)
            )
        ),
    ),
    "no length": (
        ValueError,
        "^cache_seqlens is None; with k it must be given",
        lambda: kvcache(APPEND._replace(seqused_k=None)),
    ),
    "more new keys than slots": (
        ValueError,
        "^k has 41 new keys; the cache has room for 40",
        lambda: kvcache(APPEND._replace(k_new=view(3, 41, 2, 64), v_new=view(3, 41, 2, 32))),
    ),
    "cos without sin": (
        ValueError,
        "^rotary_sin is None and rotary_cos is not",
        lambda: kvcache(ROTARY._replace(rotary_sin=None)),
    ),
    "sin of another shape": (
        ValueError,
        "^rotary_sin has shape",
        lambda: kvcache(ROTARY._replace(rotary_sin=view(40, 8))),
    ),
    "rotary without new keys": (
        ValueError,
        "^k is None; with rotary_cos it must be given$",
        lambda: kvcache(ROTARY._replace(k_new=None, v_new=None)),
    ),
    "a table that is too wide": (
        ValueError,
        "rotary_dim 66; that must be in 2..64",
        lambda: kvcache(ROTARY._replace(rotary_cos=view(40, 33), rotary_sin=view(40, 33))),
    ),
    "a table that is too short": (
        ValueError,
        "^rotary_cos has 39 positions; it must have one for each of the 40 keys",
        lambda: kvcache(ROTARY._replace(rotary_cos=view(39, 16), rotary_sin=view(39, 16))),
    ),
    "lengths on the host": (
        ValueError,
        "cache_seqlens on the host; all must be on one device",
        lambda: kvcache(CACHE._replace(seqused_k=ints(3, device=-1))),
    ),
    "splits": (ValueError, "num_splits is 300", lambda: varlen(VARLEN, num_splits=300)),
    "interleaved": (
        TypeError,
        "rotary_interleaved is a str",
        lambda: kvcache(ROTARY, rotary_interleaved="yes"),
    ),
    "dropout": (NotImplementedError, "dropout_p", lambda: varlen(VARLEN, dropout_p=0.5)),
    "partial LSE": (
        ValueError,
        r"^lse_partial has shape \(3, 2, 4, 5\); it must be \(3, 2, 5, 4\)$",
        lambda: partials.combine(view(3, 2, 5, 4, 8), view(3, 2, 4, 5, dtype="fp32")),
    ),
    "partial LSE's dtype": (
        TypeError,
        "^lse_partial is fp16; it must be fp32$",
        lambda: partials.combine(view(3, 2, 5, 4, 8), view(3, 2, 5, 4)),
    ),
    "too many parts": (
        ValueError,
        "number of splits is 257; it must be in 1..256",
        lambda: partials.combine(view(257, 5, 4, 8), view(257, 5, 4, dtype="fp32")),
    ),
    "a strided result": (
        ValueError,
        "^out has strides .* it must be row-major$",
        lambda: partials.combine(
            view(3, 5, 4, 8), view(3, 5, 4, dtype="fp32"), view(5, 4, 8, step=2)
        ),
    ),
    "a result between elements": (
        ValueError,
        "^out has address 0x102; it must be a multiple of its 4-byte elements$",
        lambda: partials.combine(
            view(3, 5, 4, 8),
            view(3, 5, 4, dtype="fp32"),
            view(5, 4, 8, dtype="fp32", ptr=258),
        ),
    ),
    "LSE to merge": (
        ValueError,
        r"^lse_b has shape \(2, 5, 4\); it must be \(2, 4, 5\)$",
        lambda: partials.merge(
            view(2, 5, 4, 8),
            view(2, 4, 5, dtype="fp32"),
            view(2, 5, 4, 8),
            view(2, 5, 4, dtype="fp32"),
        ),
    ),
}


@pytest.mark.parametrize("name", list(REFUSALS))
def test_refusals(name: str) -> None:
    error, message, make = REFUSALS[name]
    with pytest.raises(error, match=message):
        make()


MANY = 2**31
MANY_PAGES = view(MANY, 16, 2, 64)
MANY_SLOTS = view(7, MANY, 2, 64)
TOO_LONG: dict[str, tuple[str, Any]] = {
    "rows of q": ("q", lambda: varlen(VARLEN._replace(q=view(MANY, 4, 64)))),
    "rows of k": ("k", lambda: varlen(VARLEN._replace(k=view(MANY, 2, 64), v=view(MANY, 2, 64)))),
    "pages": ("k", lambda: varlen(PAGED._replace(k=MANY_PAGES, v=MANY_PAGES))),
    "rows of a page": (
        "k",
        lambda: varlen(PAGED._replace(k=MANY_SLOTS, v=MANY_SLOTS, block_table=ints(3, 0))),
    ),
    "pages of a cache": (
        "k_cache",
        lambda: kvcache(PAGED_CACHE._replace(k=MANY_PAGES, v=MANY_PAGES)),
    ),
    "rows of a cache's page": (
        "k_cache",
        lambda: kvcache(PAGED_CACHE._replace(k=MANY_SLOTS, v=MANY_SLOTS, block_table=ints(3, 0))),
    ),
    "rows of a cache": (
        "k_cache",
        lambda: kvcache(CACHE._replace(k=view(MANY, 40, 2, 64), v=view(MANY, 40, 2, 64))),
    ),
    "positions": (
        "rotary_cos",
        lambda: kvcache(ROTARY._replace(rotary_cos=view(MANY, 16), rotary_sin=view(MANY, 16))),
    ),
    "heads of an empty call": (
        "q",
        lambda: describe.dense(view(1, 0, MANY, 8), view(1, 5, 1, 8), view(1, 5, 1, 8)),
    ),
    "sequences of an empty call": (
        "kv",
        lambda: describe.dense(
            view(MANY, 0, 1, 8), *[view(MANY, 5, 1, 8)] * 2, names={"k": "kv", "v": "kv"}
        ),
    ),
}


@pytest.mark.parametrize("name", list(TOO_LONG))
def test_sizes_that_the_kernels_cannot_count(name: str) -> None:
    """They are int32 in Params."""
    argument, make = TOO_LONG[name]
    with pytest.raises(
        ValueError, match=rf"\b{argument} has shape \(.*; each size must be below 2\^31"
    ):
        make()


def test_as_many_rows_as_the_kernels_can_count() -> None:
    """Params holds them."""
    q, k, pages = view(MANY - 1, 1, 8), view(MANY - 1, 1, 8), view(MANY - 1, 16, 1, 8)
    offsets, table = ints(4), ints(3, 5)
    for tensors in (
        Tensors(q, k, k, cu_seqlens_q=offsets, cu_seqlens_k=offsets),
        Tensors(q, pages, pages, cu_seqlens_q=offsets, cu_seqlens_k=offsets, block_table=table),
    ):
        call = varlen(tensors)
        for arch in ("sm_80", "sm_90a"):
            gpu = device.for_arch(arch)
            spec, grid = select.forward(call, gpu)
            assert layouts.forward_scalars(call, grid, spec, tensors)


def test_expanded_rows_on_the_host_are_refused_as_on_a_gpu() -> None:
    many = np.broadcast_to(zeros(1, 1, 8), (MANY, 1, 8))
    few, offsets = zeros(5, 1, 8), int32(0, 5)
    for q, k, name in ((many, few, "q"), (few, many, "k")):
        with pytest.raises(
            ValueError, match=rf"\b{name} has shape \(2147483648, 1, 8\); each size "
        ):
            rtflash.flash_attn_varlen_func(q, k, k, offsets, offsets, 5, 5)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint16", "float64", "bool"])
def test_merges_take_no_other_dtype(dtype: str) -> None:
    """Of no tensor that they read or write."""
    parts = {"out_partial": view(3, 5, 4, 8), "lse_partial": view(3, 5, 4, dtype="fp32")}
    states = {name: view(5, 4, 8) for name in ("out_a", "out_b")}
    states |= {name: view(4, 5, dtype="fp32") for name in ("lse_a", "lse_b")}
    for make, given in (
        (partials.combine, parts | {"out": view(5, 4, 8)}),
        (partials.merge, states),
    ):
        make(**given)
        for name, x in given.items():
            wanted = "fp32" if "lse" in name else "fp16, bf16 or fp32"
            with pytest.raises(TypeError, match=f"^{name} is {dtype}; it must be {wanted}$"):
                make(**given | {name: x._replace(dtype=dtype)})


def test_strides_that_mean_nothing() -> None:
    """A cache may be read whatever its strides, and an axis of one element has none."""
    expanded = (0, 64, 32, 1)
    kvcache(CACHE._replace(v=CACHE.v._replace(strides=expanded)))
    one = {"q": view(1, 2, 4, 64), "k": view(1, 40, 2, 64), "seqused_k": ints(1)}
    new = {"k_new": view(1, 2, 2, 64), "v_new": view(1, 2, 2, 32)}
    kvcache(APPEND._replace(**one, **new, v=View(256, (1, 40, 2, 32), expanded, "fp16", 0)))


@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (-1, 2**29), (2**29, -1)], ids=str)
def test_a_window_that_hides_nothing_still_says_how_queries_are_rotated(
    window: tuple[int, int],
) -> None:
    assert kvcache(ROTARY, window_size=window).mask == "window"
    assert kvcache(ROTARY, window_size=window, causal=True).mask == "causal"
    assert kvcache(APPEND, window_size=window).mask == "full"
    assert kvcache(ROTARY, window_size=(-1, -1)).mask == "full"
    assert kvcache(ROTARY, window_size=np.array([-1, -1])).mask == "full"


def test_every_reason_is_listed() -> None:
    wrong = ROTARY._replace(
        v=view(4, 40, 2, 300), rotary_sin=None, seqused_k=ints(2), cache_batch_idx=ints(5)
    )
    with pytest.raises(ValueError, match="the call is refused") as caught:
        kvcache(wrong, softcap=-1.0, num_splits=-1)
    for part in (
        "v_cache has head_dim 300",
        "rotary_sin is None",
        "cache_seqlens has shape (2,)",
        "cache_batch_idx has shape (5,)",
        "softcap",
        "num_splits",
    ):
        assert part in str(caught.value)


# What host arrays hold. Small calls that are right, and one change that makes each wrong.
def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float16)


def int32(*values: Any) -> Any:
    return np.array(values, np.int32)


def packed_call(**changes: Any) -> Any:
    """Queries (2, 0, 3), keys (1, 4, 0) of 5 and 6 rows."""
    given = {
        "q": zeros(5, 2, 8),
        "k": zeros(6, 1, 8),
        "v": zeros(6, 1, 8),
        "cu_seqlens_q": int32(0, 2, 2, 5),
        "cu_seqlens_k": int32(0, 1, 5, 5),
        "max_seqlen_q": 3,
        "max_seqlen_k": 4,
    }
    return rtflash.flash_attn_varlen_func(**{**given, **changes})


def paged_packed_call(**changes: Any) -> Any:
    """3 pages of 4 rows; sequence 0 has 1 key, sequence 1 has 7; offsets need not start at 0."""
    given = {
        "k": zeros(3, 4, 1, 8),
        "v": zeros(3, 4, 1, 8),
        "cu_seqlens_q": int32(0, 2, 5),
        "cu_seqlens_k": int32(9, 10, 17),
        "max_seqlen_k": 8,
        "block_table": int32([2, -1], [1, 0]),
    }
    return packed_call(**{**given, **changes})


def cache_call(**changes: Any) -> Any:
    """A cache of 16 slots for 3 sequences, 2 of which are used."""
    cache = zeros(3, 16, 1, 8)
    given = {
        "q": zeros(2, 1, 2, 8),
        "k_cache": cache,
        "v_cache": cache.copy(),
        "cache_seqlens": int32(3, 16),
        "cache_batch_idx": int32(2, 0),
    }
    return rtflash.flash_attn_with_kvcache(**{**given, **changes})


def append_call(new: int = 1, **changes: Any) -> Any:
    """As `cache_call`, with `new` keys for each sequence."""
    keys = zeros(2, new, 1, 8)
    given = {"k": keys, "v": keys, "cache_seqlens": int32(3, 15)}
    return cache_call(**{**given, **changes})


def paged_call(**changes: Any) -> Any:
    """Pages of 4, lengths 3 and 7 (case B11 (d)): the -1 is in an unused column."""
    given = {
        "k_cache": zeros(3, 4, 1, 8),
        "v_cache": zeros(3, 4, 1, 8),
        "cache_seqlens": int32(3, 7),
        "cache_batch_idx": None,
        "block_table": int32([0, -1], [1, 2]),
    }
    return cache_call(**{**given, **changes})


NEW = {"k": zeros(2, 1, 1, 8), "v": zeros(2, 1, 1, 8)}
TABLES = {"rotary_cos": zeros(16, 2), "rotary_sin": zeros(16, 2)}

WRONG_CONTENTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    # Case B52.
    "keys past the rows": (
        packed_call,
        {"cu_seqlens_k": int32(0, 1, 5, 20), "max_seqlen_k": 20},
        r"^cu_seqlens_k\[3\] is 20; it must be at most 6, the rows of k$",
    ),
    "queries past the rows": (
        packed_call,
        {"cu_seqlens_q": int32(0, 2, 2, 6)},
        r"^cu_seqlens_q\[3\] is 6; it must be at most 5, the rows of q$",
    ),
    "first offset": (
        packed_call,
        {"cu_seqlens_q": int32(1, 2, 2, 5)},
        r"^cu_seqlens_q\[0\] is 1; it must be 0$",
    ),
    "decreasing": (
        packed_call,
        {"cu_seqlens_k": int32(0, 4, 3, 5)},
        r"^cu_seqlens_k\[2\] is 3, after 4; it must not decrease$",
    ),
    "negative": (
        packed_call,
        {"cu_seqlens_k": int32(0, -1, 3, 5)},
        r"^cu_seqlens_k\[1\] is -1, after 0",
    ),
    "max_seqlen_q": (
        packed_call,
        {"max_seqlen_q": 2},
        "^max_seqlen_q is 2; it must be at least 3, as long as the longest sequence$",
    ),
    "max_seqlen_k": (
        packed_call,
        {"max_seqlen_k": 3},
        "^max_seqlen_k is 3; it must be at least 4, as long as the longest sequence$",
    ),
    "more queries used": (
        packed_call,
        {"seqused_q": int32(2, 1, 3)},
        r"^seqused_q\[1\] is 1; it must be in 0..0, the rows of its sequence$",
    ),
    "more keys used": (
        packed_call,
        {"seqused_k": int32(1, 5, 0)},
        r"^seqused_k\[1\] is 5; it must be in 0..4$",
    ),
    "keys beyond the table": (
        paged_packed_call,
        {"cu_seqlens_k": int32(0, 1, 10), "max_seqlen_k": 9},
        "^block_table has room for 8 keys of a sequence; the longest has 9$",
    ),
    "decreasing with pages": (
        paged_packed_call,
        {"cu_seqlens_k": int32(0, 8, 7)},
        r"^cu_seqlens_k\[2\] is 7, after 8",
    ),
    "a page that is not there": (
        paged_packed_call,
        {"block_table": int32([2, -1], [1, 3])},
        r"^block_table\[1, 1\] is 3, and keys of sequence 1 lie there; it must be in 0..2$",
    ),
    "negative length": (
        cache_call,
        {"cache_seqlens": int32(-1, 3)},
        r"^cache_seqlens\[0\] is -1; it must be in 0..16$",
    ),
    "length past the cache": (
        cache_call,
        {"cache_seqlens": int32(3, 17)},
        r"^cache_seqlens\[1\] is 17; it must be in 0..16$",
    ),
    "int past the cache": (cache_call, {"cache_seqlens": 17}, "^cache_seqlens is 17"),
    "negative int": (cache_call, {"cache_seqlens": -1}, "^cache_seqlens is -1"),
    "row of the cache": (
        cache_call,
        {"cache_batch_idx": int32(2, 3)},
        r"^cache_batch_idx\[1\] is 3; it must be in 0..2$",
    ),
    "negative row": (
        cache_call,
        {"cache_batch_idx": int32(-1, 0)},
        r"^cache_batch_idx\[0\] is -1",
    ),
    "pad": (
        cache_call,
        {"cache_leftpad": int32(4, 0)},
        r"^cache_leftpad\[0\] is 4; it must be in 0..3, the keys that it is part of$",
    ),
    # Case B11 (a), (b), (c).
    "append past the cache": (
        append_call,
        {"cache_seqlens": int32(3, 16)},
        r"^cache_seqlens\[1\] is 16; it must be in 0..15 with 1 new key$",
    ),
    "append past the cache, int": (
        append_call,
        {"cache_seqlens": np.int64(16)},
        "^cache_seqlens is 16; it must be in 0..15 with 1 new key$",
    ),
    "append past the pages": (
        paged_call,
        {"cache_seqlens": int32(3, 8), **NEW},
        r"^cache_seqlens\[1\] is 8; it must be in 0..7",
    ),
    "append to no page": (
        paged_call,
        {"cache_seqlens": int32(4, 6), **NEW},
        r"^block_table\[0, 1\] is -1, and keys of sequence 0 lie there",
    ),
    "one page too many": (
        paged_call,
        {"block_table": int32([0, -1], [1, 3])},
        r"^block_table\[1, 1\] is 3",
    ),
    "page_table": (
        paged_call,
        {"block_table": None, "page_table": int32([0, -1], [-1, 2])},
        r"^page_table\[1, 0\] is -1",
    ),
    "both tables": (
        paged_call,
        {"page_table": int32([0, -1], [-1, 2])},
        "block_table and page_table are both given",
    ),
    "a cache without rows": (
        cache_call,
        {"k_cache": zeros(0, 16, 1, 8), "v_cache": zeros(0, 16, 1, 8)},
        r"^cache_batch_idx\[0\] is 2; nothing fits: k_cache has no row$",
    ),
    "a cache without pages": (
        paged_call,
        {"k_cache": zeros(0, 4, 1, 8), "v_cache": zeros(0, 4, 1, 8)},
        r"^block_table\[0, 0\] is 0, .*; nothing fits: k_cache has no page$",
    ),
    "a table without columns": (
        paged_call,
        {"block_table": np.zeros((2, 0), np.int32)},
        r"^cache_seqlens\[0\] is 3; it must be in 0..0$",
    ),
    "no position for so many queries": (
        append_call,
        {"q": zeros(2, 20, 2, 8), "causal": True, **TABLES},
        r"^cache_seqlens\[0\] is 3; nothing fits with 1 new key and 20 queries and 16 rotary positions",
    ),
    "no position for so many queries, int": (
        append_call,
        {"q": zeros(2, 20, 2, 8), "causal": True, "cache_seqlens": 3, **TABLES},
        "^cache_seqlens is 3; nothing fits with 1 new key and 20 queries",
    ),
    "a pad of a negative length": (
        cache_call,
        {"cache_seqlens": int32(-1, 3), "cache_leftpad": int32(0, 0)},
        r"^cache_seqlens\[0\] is -1; it must be in 0..16$",
    ),
    # Queries stand at positions up to 15 + 3.
    "queries past the table": (
        append_call,
        {"q": zeros(2, 4, 2, 8), "causal": True, **TABLES},
        r"^cache_seqlens\[1\] is 15; it must be in 0..12 with 1 new key and 4 queries and 16 rotary positions",
    ),
}


@pytest.mark.parametrize("name", list(WRONG_CONTENTS))
def test_contents_are_checked(name: str) -> None:
    make, changes, message = WRONG_CONTENTS[name]
    make()
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_several_wrong_contents_are_listed() -> None:
    with pytest.raises(ValueError, match="the call is refused") as caught:
        packed_call(cu_seqlens_q=int32(1, 3, 2, 5), cu_seqlens_k=int32(0, 1, 5, 7))
    for part in ("cu_seqlens_q[2] is 2", "cu_seqlens_q[0] is 1", "cu_seqlens_k[3] is 7"):
        assert part in str(caught.value)


def test_packed_tensors_are_named() -> None:
    with pytest.raises(ValueError, match=r"^cu_seqlens\[1\] is 6; it must be at most 5, .* qkv$"):
        rtflash.flash_attn_varlen_qkvpacked_func(zeros(5, 3, 1, 8), int32(0, 6), 6)
    with pytest.raises(ValueError, match=r"^max_seqlen is 2; it must be at least 5"):
        rtflash.flash_attn_varlen_qkvpacked_func(zeros(5, 3, 1, 8), int32(0, 5), 2)
    with pytest.raises(ValueError, match=r"^qkv has shape \(5, 1, 8\); it must be \(total, 3, "):
        rtflash.flash_attn_varlen_qkvpacked_func(zeros(5, 1, 8), int32(0, 5), 5)
    with pytest.raises(TypeError, match=r"^cu_seqlens is a NoneType"):
        rtflash.flash_attn_varlen_qkvpacked_func(zeros(5, 3, 1, 8), None, 5)
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[1\] is 6; .* the rows of kv$"):
        rtflash.flash_attn_varlen_kvpacked_func(
            zeros(4, 1, 8), zeros(5, 2, 1, 8), int32(0, 4), int32(0, 6), 4, 6
        )


@pytest.mark.parametrize("changes", [{}, {"cache_seqlens": 16}], ids=["array", "int"])
def test_a_refused_append_writes_nothing(changes: dict[str, Any]) -> None:
    """Case B11 (a): the cache is the first 16 rows of a longer buffer."""
    buffers = [np.full((3, 32, 1, 8), 7, np.float16) for _ in range(2)]
    with pytest.raises(ValueError, match="cache_seqlens"):
        append_call(
            k_cache=buffers[0][:, :16],
            v_cache=buffers[1][:, :16],
            **{"cache_seqlens": int32(3, 16), **changes},
        )
    assert all((buffer == 7).all() for buffer in buffers)


def test_read_only_caches() -> None:
    cache = zeros(3, 16, 1, 8)
    cache.flags.writeable = False
    cache_call(k_cache=cache)
    with pytest.raises(ValueError, match=r"^k_cache is read-only"):
        append_call(k_cache=cache)


def test_a_read_only_result_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_on_host", None)
    out = zeros(5, 4, 8)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out is read-only"):
        rtflash.flash_attn_combine(zeros(3, 5, 4, 8), np.zeros((3, 5, 4), np.float32), out)


BUFFER = zeros(3, 2, 16, 2, 32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BUFFER[:, 0, :, :, :8], BUFFER[:, 0, :, :, :8]),
        (BUFFER[:, 0, :, :, :8], BUFFER[:, 0, :, :, 7:15]),
        (BUFFER[:2, 0, :, :, :8], BUFFER[1:, 0, :, :, :8]),
        (BUFFER[:, 0, :, :, :8], BUFFER[:, 0, ::-1, :, :8]),
    ],
    ids=["same", "a column", "a row", "backwards"],
)
def test_caches_that_share_memory(one: Any, other: Any) -> None:
    """They may be read, not appended to."""
    changes = {"q": zeros(1, 1, 2, 8), "cache_seqlens": int32(3), "cache_batch_idx": int32(0)}
    new = {"k": zeros(1, 1, 2, 8), "v": zeros(1, 1, 2, 8)}
    cache_call(k_cache=one, v_cache=other, **changes)
    with pytest.raises(ValueError, match=r"^k_cache and v_cache share memory; they must not"):
        cache_call(k_cache=one, v_cache=other, **changes, **new)


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_new_keys_in_a_cache(cache: str, name: str) -> None:
    caches = {"k_cache": zeros(3, 16, 1, 8), "v_cache": zeros(3, 16, 1, 8)}
    append_call(**caches)
    for length in (int32(3, 15), 3):
        with pytest.raises(ValueError, match=f"^{cache} and {name} share memory; they must not"):
            append_call(**caches, **{name: caches[cache][:2, 4:5]}, cache_seqlens=length)


@pytest.mark.parametrize("layout", ["bs2hd", "2bshd", "b2shd", "bsh2d", "bhs2d"])
def test_caches_that_lie_between_each_other(layout: str) -> None:
    """Keys and values in one tensor share bounds and no element."""
    sizes = {"b": 3, "s": 16, "2": 2, "h": 2, "d": 32}
    order = [layout.index(axis) for axis in "2bshd"]
    k, v = np.zeros([sizes[axis] for axis in layout], np.float16).transpose(order)
    new = np.ones((2, 1, 2, 32), np.float16)
    append_call(q=zeros(2, 1, 2, 32), k_cache=k, v_cache=v, k=new, v=2 * new)
    for x, value in ((k, 1), (v, 2)):
        assert x.sum() == x[[2, 0], [3, 15]].sum() == value * new.size


def test_inputs_of_two_libraries() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"cache_seqlens is a Tensor; .* same library as q"):
        cache_call(cache_seqlens=torch.zeros(2, dtype=torch.int32))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(plan, addresses, lse, cache_seqlen) of each launch; nothing is compiled."""
    found: list[tuple[Any, ...]] = []

    def make(library: Framework, arrange: Any, made: Any, views: Any) -> plan.Plan:
        new_out, new_lse = (
            library.allocator(shape, "fp32", 0) for shape in (made.out_shape, made.lse_shape)
        )
        return plan.Plan(made, lengths.longest_cached(made, made.seqlen_k), 0, new_out, new_lse)

    def run(
        made: Any, library: Any, addresses: Any, held: Any, out: Any, lse: Any, length: int
    ) -> None:
        found.append((made, inference.KVCACHE.arrange(*addresses), lse, length))

    monkeypatch.setattr(call, "_plans", {})
    monkeypatch.setattr(plan, "make", make)
    monkeypatch.setattr(plan, "run", run)
    return found


def decode(length: int, **changes: Any) -> Any:
    """A call of flash_attn_with_kvcache on a GPU, from where its inputs are Views."""
    t = APPEND._replace(**{"seqused_k": None, **changes})
    views = [
        t.q, t.k, t.v, t.seqused_k, t.k_new, t.v_new, t.block_table, t.rotary_cos, t.rotary_sin, t.cache_batch_idx,
        t.leftpad_k, t.alibi_slopes,
    ]  # fmt: skip
    options = (None, True, (-1, -1), 0.0, True, 0, length >= 0)
    seen = call.seen_of(views)
    return call.on_device(LIBRARY, inference.KVCACHE, tuple(views), seen, options, True, length)


def test_a_decode_loop_makes_one_plan(launches: list[tuple[Any, ...]]) -> None:
    for length in range(30):
        decode(length, k=view(4, 40, 2, 64, ptr=1024 * (length + 1)))
    assert len({id(plan) for plan, *_ in launches}) == 1
    assert [length for *_, length in launches] == list(range(30))
    assert launches[7][1].k == 8 * 1024
    assert launches[0][2].shape == (3, 4, 2)


def test_an_int_is_checked_at_every_call(launches: list[tuple[Any, ...]]) -> None:
    decode(38)
    with pytest.raises(ValueError, match=r"cache_seqlens is 39; it must be in 0..38"):
        decode(39)
    with pytest.raises(ValueError, match="cache_seqlens is None"):
        decode(-1)
    assert len(launches) == 1


def test_what_cannot_be_read_in_place_is_copied_but_a_cache(
    launches: list[tuple[Any, ...]],
) -> None:
    made = LIBRARY.made = []
    decode(3, q=view(3, 2, 4, 64, step=2), k_new=view(3, 2, 2, 64, step=2))
    copies = [x.ptr for x in made[:2]]
    assert [launches[0][1].q, launches[0][1].k, launches[0][1].k_new] == [copies[0], 256, copies[1]]
    made.clear()
    decode(-1, seqused_k=ints(3, ptr=258))
    assert launches[1][1].seqused_k == made[0].ptr
    with pytest.raises(ValueError, match="a cache is never copied"):
        decode(3, k=view(4, 40, 2, 64, step=2))


def test_problems_can_be_compared() -> None:
    """A Problem is a plan's geometry: equal calls are equal, and it can be a key."""
    assert kvcache(CACHE) == kvcache(CACHE)
    assert len({kvcache(CACHE), kvcache(CACHE), kvcache(CACHE, causal=True)}) == 2
    assert dataclasses.replace(varlen(VARLEN), num_splits=2) != varlen(VARLEN)


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(call, out_partial, lse_partial, lse_strides) of each launch of the combine kernel."""
    found: list[tuple[Any, ...]] = []

    def run(
        library: Any, made: Any, out_partial: Any, lse_partial: Any, out: int, lse: int, strides: Any, views: Any
    ) -> None:  # fmt: skip
        found.append((made, out_partial, lse_partial, strides))

    monkeypatch.setattr(merging, "run_combine", run)
    return found


def states(*rows: int, second: int = 4096, **options: Any) -> tuple[list[View], problem.Combine]:
    """Outputs and LSE of two parts, the second of which lies `second` bytes behind the first."""
    lse = (*rows[:-1], 4, rows[-1])
    views = []
    for ptr in (256, 256 + second):
        views.append(view(*rows, 4, 8, ptr=ptr, **options))
        views.append(view(*lse, dtype="fp32", ptr=ptr))
    return views, partials.merge(*views)


@pytest.mark.parametrize("rows", [(2, 5), (5,)], ids=str)
def test_merged_states_are_read_where_they_are(
    merges: list[tuple[Any, ...]], rows: tuple[int, ...]
) -> None:
    views, made = states(*rows)
    out, lse = merging._merge_on_device(Library(), made, tuple(views), views)
    ((_, outs, lses, strides),) = merges
    assert (outs.ptr, outs.shape, outs.strides[0]) == (256, (2, *rows, 4, 8), 2048)
    assert (lses.ptr, lses.shape) == (256, (2, *rows, 4))
    assert lses.strides == (1024, *((20,) if len(rows) == 2 else ()), 1, 5)
    assert strides == lses.strides[1:]
    assert (out.shape, lse.shape) == (views[0].shape, views[1].shape)


@pytest.mark.parametrize("options", [{"step": 2}, {"second": 4097}], ids=["stride", "address"])
def test_states_that_no_stride_joins_are_copied(
    merges: list[tuple[Any, ...]], options: dict[str, Any]
) -> None:
    views, made = states(2, 5, **options)
    library = Library()
    merging._merge_on_device(library, made, tuple(views), views)
    copies = [x for x in library.made if x.shape == views[0].shape]
    first, second = copies[0].ptr, copies[1].ptr
    assert merges[0][1].ptr == first
    assert merges[0][1].strides == ((second - first) // 2, 160, 32, 8, 1)


@pytest.mark.parametrize("rows", [(2, 5), (5,)], ids=str)
def test_parts_are_combined_where_they_are(
    merges: list[tuple[Any, ...]], rows: tuple[int, ...]
) -> None:
    views = [view(3, *rows, 4, 8, dtype="fp32"), view(3, *rows, 4, dtype="fp32"), None]
    made = partials.combine(views[0], views[1], None, "bf16")
    out, lse = merging._combine_on_device(Library(), made, tuple(views), views)
    assert merges == [(made, views[0], views[1], (20, 4, 1)[-len(rows) - 1 :])]
    assert (out.shape, out.dtype, lse.shape) == ((*rows, 4, 8), "bf16", (*rows, 4))
    given = view(*rows, 4, 8)
    made = partials.combine(views[0], views[1], given)
    out, _ = merging._combine_on_device(Library(), made, (*views[:2], given), [*views[:2], given])
    assert out is given


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_what_calls_ahead_need_is_listed(arch: str) -> None:
    """Lengths in an int with rotation; a window that is open to the left, of which one query sees no bound."""
    gpu = device.for_arch(arch)
    row = dataclasses.replace(listed.table_problem(64, 64, "fp16", "causal", {}), heads=4)
    open_left = dataclasses.replace(listed.table_problem(64, 64, "fp16", "window", {}), heads=4)
    wanted = ahead.Inference(decode=True, append=True, rotary="halves")
    for dense, calls in (
        (row, [dataclasses.replace(row, seqlen_new=n, seqlen_q=n, rotary="halves") for n in (1, 7, 900)]),
        (open_left, [dataclasses.replace(open_left, window_left=-1, seqlen_q=n) for n in (1, 7, 900)]),
    ):  # fmt: skip
        described = [dense, *ahead.inference_calls(dense, wanted)]
        known = {spec for one in described for spec in listed.every_variant(one, gpu)}
        for made in calls:
            for batch, keys in ((1, 4096), (64, 300)):
                spec, _ = select.forward(dataclasses.replace(made, batch=batch, seqlen_k=keys), gpu)
                assert spec in known, spec.name


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotary", ["none", "interleaved", "halves"])
def test_warmup_describes_calls_that_are_allowed(
    monkeypatch: pytest.MonkeyPatch, paged: bool, rotary: str
) -> None:
    """One varlen call, and cache calls of many queries and of one; whatever they need is compiled once."""
    met: list[problem.Problem] = []
    monkeypatch.setattr(device, "get", lambda index: device.for_arch("sm_90a"))
    monkeypatch.setattr(
        build, "kernel", lambda spec, gpu: dataclasses.make_dataclass("K", ["spec"])(spec)
    )
    every = listed.every_variant

    def variants(made: problem.Problem, gpu: device.Device) -> list[Any]:
        met.append(made)
        return every(made, gpu)

    monkeypatch.setattr(listed, "every_variant", variants)
    names = rtflash.warmup(
        65, causal=True, alibi=True, group=4, varlen=True, kvcache=True, paged=paged, append=True, rotary=rotary
    )  # fmt: skip
    needed = {spec.name for made in met for spec in every(made, device.for_arch("sm_90a"))}
    assert len(names) == len(set(names))
    assert set(names) == needed
    assert not met[0].ragged
    met = [made for made in met if made.ragged]
    assert [made.seqlen_q for made in met] == [2, 2, 1]
    assert [made.mask for made in met] == ["causal", "causal", "full"]
    assert all(made.alibi and made.heads == 4 for made in met)
    assert {made.page_size for made in met} == {16 if paged else 0}
    assert [made.rotary for made in met] == ["none", rotary, rotary]
    with pytest.raises(ValueError, match="append is False"):
        rtflash.warmup(64, kvcache=True, rotary="halves")
    with pytest.raises(ValueError, match="kvcache is False; with append it must be True"):
        rtflash.warmup(64, append=True)
    with pytest.raises(ValueError, match="with paged one of them must be True"):
        rtflash.warmup(64, paged=True)
    with pytest.raises(ValueError, match="rotary is 'yes'"):
        rtflash.warmup(64, kvcache=True, append=True, rotary="yes")
    with pytest.raises(
        ValueError, match="head_dim is 1; with rotary 'halves' it must be at least 2"
    ):
        rtflash.warmup(1, kvcache=True, append=True, rotary="halves")


def test_warmup_without_a_gpu_names_what_works() -> None:
    if device.why_no_gpu() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(
        RuntimeError, match=r"^[CT].*\. warmup compiles for a GPU .* `rtflash generate` "
    ):
        rtflash.warmup(64)


def test_states_without_rows_are_merged(merges: list[tuple[Any, ...]]) -> None:
    """No copy gives tensors without elements other strides."""
    views, made = states(0, 5)
    views[2] = views[2]._replace(strides=(1, 2, 3, 1))
    merging._merge_on_device(Library(), made, tuple(views), views)
    assert len(merges) == 1


def test_rows_of_no_sequence_are_refused() -> None:
    q, k = np.ones((5, 2, 8), np.float16), np.ones((0, 2, 8), np.float16)
    none = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q has shape \\(1,\\), no sequence"):
        rtflash.flash_attn_varlen_func(q, k, k, none, none, 0, 0)


@pytest.mark.parametrize("batch", [2, 3])
def test_no_more_splits_than_the_combine_kernel_merges(batch: int) -> None:
    """One key head and a million slots: whole multiples of the GPU would be more parts than that."""
    tensors = Tensors(
        q=view(batch, 1, 8, 128),
        k=view(100, 16, 1, 128),
        v=view(100, 16, 1, 128),
        seqused_k=ints(batch),
        block_table=ints(batch, 65536),
    )
    assert select.forward(kvcache(tensors), device.for_arch("sm_80"))[1].splits == 256


def test_tensors_without_elements_have_any_strides() -> None:
    """NumPy 2.4 gives them strides of 0."""
    empty = APPEND._replace(
        k=view(0, 40, 2, 64)._replace(strides=(0, 0, 0, 0)),
        v=view(0, 40, 2, 32)._replace(strides=(0, 0, 0, 0)),
        q=view(0, 2, 4, 64),
        seqused_k=ints(0),
        k_new=view(0, 2, 2, 64),
        v_new=view(0, 2, 2, 32),
    )
    assert describe.kvcache(empty).batch == 0
    expanded = view(4, 40, 2, 64)._replace(strides=(0, 128, 64, 1))
    nothing = APPEND._replace(k=expanded, k_new=view(3, 0, 2, 64), v_new=view(3, 0, 2, 32))
    assert describe.kvcache(nothing).seqlen_new == 0
    out = view(5, 0, 4, 64, dtype="fp32")._replace(strides=(0, 0, 0, 0))
    parts = view(2, 5, 0, 4, 64, dtype="fp32"), view(2, 5, 0, 4, dtype="fp32")
    assert partials.combine(*parts, out).rows == (5, 0)


def test_read_only_caches_with_nothing_to_append() -> None:
    cache = zeros(3, 16, 1, 8)
    cache.flags.writeable = False
    append_call(k_cache=cache, v_cache=cache, k=zeros(2, 0, 1, 8), v=zeros(2, 0, 1, 8))


def test_no_query_heads() -> None:
    with pytest.raises(ValueError, match=r"^q has 0 heads; it must have at least 1$"):
        rtflash.flash_attn_func(zeros(1, 4, 0, 8), zeros(1, 4, 1, 8), zeros(1, 4, 1, 8))
    with pytest.raises(ValueError, match=r"^qkv has 0 heads; it must have at least 1$"):
        rtflash.flash_attn_qkvpacked_func(zeros(1, 4, 3, 0, 8))


def test_a_bound_of_0_is_shown_as_the_caller_gave_it() -> None:
    with pytest.raises(ValueError, match=r"^max_seqlen is 0; it must be at least 5, [^\n]*$"):
        rtflash.flash_attn_varlen_qkvpacked_func(zeros(5, 3, 1, 8), int32(0, 5), 0)
    with pytest.raises(ValueError, match=r"^max_seqlen_q is 0; it must be at least 4"):
        packed_call(max_seqlen_q=0, cu_seqlens_q=int32(0, 4, 4, 5))


@pytest.mark.parametrize("value", [3.0, "3", True, np.bool_(True), np.float32(3)], ids=repr)
def test_a_length_is_an_int_or_a_tensor(value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"^cache_seqlens is a {kind}; .* int, or an int32 tensor"):
        cache_call(cache_seqlens=value)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("where", [-1, 0], ids=["host", "device"])
def test_read_only_exports(monkeypatch: pytest.MonkeyPatch, name: str, where: int) -> None:
    """Bit 0 of a DLPack tensor's flags: a cache may be read, not appended to."""
    caches = {"k_cache": zeros(3, 16, 1, 8), "v_cache": zeros(3, 16, 1, 8)}
    new = zeros(2, 1, 1, 8)
    x = caches[name]
    if where < 0:
        x.flags.writeable = False
        given = [Lent(a) for a in (zeros(2, 1, 2, 8), *caches.values(), new, new, int32(3, 15))]
    else:
        gpu = FakeGpu(monkeypatch)
        monkeypatch.setitem(tensor._by_type, Borrowed, LIBRARY)
        given = [lent_view(2, 1, 2, 8), *(lent_view(3, 16, 1, 8) for _ in range(2))]
        given += [lent_view(2, 1, 1, 8), lent_view(2, 1, 1, 8), lent_view(2, dtype="int32")]
        given[1 + list(caches).index(name)].read_only = True
    q, k_cache, v_cache, k, v, used = given
    rtflash.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=used)
    with pytest.raises(
        ValueError, match=rf"^{name} is read-only; it must be writable: k is written"
    ):
        rtflash.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used)
    if where == 0:
        assert AppendSpec not in {type(launched.spec) for launched in gpu.launched}
        given[1 + list(caches).index(name)].read_only = False
        rtflash.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used)


def test_read_only_results() -> None:
    out = zeros(5, 4, 8)
    parts = Lent(zeros(3, 5, 4, 8)), Lent(np.zeros((3, 5, 4), np.float32))
    rtflash.flash_attn_combine(*parts, Lent(out))
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out is read-only; it must be writable$"):
        rtflash.flash_attn_combine(*parts, Lent(out))


def test_read_only_results_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setitem(tensor._by_type, Borrowed, LIBRARY)
    parts = lent_view(3, 5, 4, 8), lent_view(3, 5, 4, dtype="fp32")
    out = lent_view(5, 4, 8)
    rtflash.flash_attn_combine(*parts, out)
    assert len(gpu.launched) == 1
    out.read_only = True
    with pytest.raises(ValueError, match=r"^out is read-only; it must be writable$"):
        rtflash.flash_attn_combine(*parts, out)
    assert len(gpu.launched) == 1


class Lent:
    """A NumPy array as another library's tensor."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)


def lent_view(*shape: int, dtype: str = "fp16") -> Borrowed:
    return Borrowed(*view(*shape, dtype=dtype))
