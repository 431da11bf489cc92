"""Packed sequences against the float64 oracle, on every backend, by the bound of compare.py.

Whatever a call must not read is NaN, and so is the memory that its results come from: see inference_calls.py.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import Backend
from compare import check, check_lse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inference_calls import (
    VarlenCall,
    alone,
    calls,
    inputs,
    on_all,
    on_two,
    result,
    run,
    upload,
)
from reference import same_dtype

import rtflash

HERE = Path(__file__).parent
HEAD_DIMS = (1, 8, 40, 63, 64, 72, 128, 192, 256)
MORE_HEAD_DIMS = (*HEAD_DIMS, 16, 32, 46, 80, 96, 136, 160, 224)
PAGE_SIZES = (1, 2, 3, 7, 16, 64, 256)
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (40, 9)})
# Sequences without queries, without keys, without either, with fewer keys than queries, and plain ones.
MIXED: dict[str, Any] = {
    "lengths_q": (0, 5, 0, 130, 70, 1),
    "lengths_k": (7, 0, 0, 129, 33, 200),
}
UNEQUAL: dict[str, Any] = {
    "lengths_q": (1, 1000, 0, 64, 300, 1, 129, 0, 500),
    "lengths_k": (90, 1000, 40, 64, 20, 1, 400, 0, 500),
}
FEW: dict[str, Any] = {"lengths_q": (40, 1, 0, 20), "lengths_k": (129, 40, 8, 0)}
SHORT: dict[str, Any] = {"lengths_q": (33, 0, 65), "lengths_k": (70, 9, 40)}


@on_all
@calls(*(VarlenCall(head_dim=d, dtype="bf16", causal=True, **SHORT) for d in HEAD_DIMS))
def test_head_dims(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    VarlenCall(causal=True, tail=3, num_splits=3, used_k=(129, 0, 90)),
    VarlenCall(page_size=8, window=(40, 9), head_dim=72, num_splits=1),
    VarlenCall(page_size=16, alibi="batch", softcap=5.0, heads=8, tail=30, num_splits=2, **FEW),
    VarlenCall(heads=8, tail=130, causal=True, num_splits=2, head_dim=128, **FEW),
)
def test_packed_groups_pages_and_splits(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_two
@calls(
    *(
        VarlenCall(head_dim=d, heads=8, causal=causal, tail=tail, **UNEQUAL)
        for d, causal, tail in ((64, False, 0), (128, True, 0), (128, False, 300), (256, True, 9))
    )
)
def test_more_tiles_than_multiprocessors(backend: Backend, call: VarlenCall) -> None:
    """CTAs that stay draw them."""
    run(backend, call)


@on_two
@calls(
    *(VarlenCall(head_dim=d, window=(20, 5), **SHORT) for d in MORE_HEAD_DIMS),
    *(VarlenCall(head_dim=d, heads_k=1, page_size=16, **MIXED) for d in MORE_HEAD_DIMS),
)
def test_more_head_dims(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        VarlenCall(head_dim=d, head_dim_v=dv, causal=True, page_size=page_size, **SHORT)
        for d, dv, page_size in ((192, 128, 0), (64, 256, 16), (40, 17, 0), (1, 64, 3))
    )
)
def test_value_dim_differs(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(VarlenCall(dtype="bf16", **mask, **MIXED) for mask in MASKS),
    *(VarlenCall(alibi="batch", tail=9, **mask, **MIXED) for mask in MASKS),
    VarlenCall(lengths_q=(0, 0), lengths_k=(0, 0)),
    VarlenCall(lengths_q=(0, 0), lengths_k=(0, 0), tail=3),
    VarlenCall(lengths_q=(0, 0), lengths_k=(3, 9)),
    VarlenCall(lengths_q=(3, 9), lengths_k=(0, 0), causal=True),
    VarlenCall(lengths_q=(), lengths_k=()),
    VarlenCall(lengths_q=(64,), lengths_k=(64,), causal=True),
    VarlenCall(lengths_q=(1,) * 9, lengths_k=tuple(range(9)), dtype="bf16"),
)
def test_zero_lengths(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        VarlenCall(
            heads=h, heads_k=hk, lengths_q=q, lengths_k=(3, 0, 5, 300)[: len(q)], causal=True
        )
        for h, hk in ((9, 3), (8, 2))
        for q in ((1, 0, 1), (0, 1, 0, 0), (1, 1, 1, 1))
    )
)
def test_one_query_of_some_sequences(backend: Backend, call: VarlenCall) -> None:
    """Case B38: no short cut for one query may assume that every sequence has it."""
    run(backend, call)


@on_all
@calls(
    *(
        VarlenCall(window=window, causal=causal, dtype="bf16", lengths_k=(129, 40, 257))
        for window, causal in (
            ((0, 0), False),
            ((16, 0), False),
            ((63, 64), False),
            ((-1, 5), False),
            ((5, -1), False),
            ((300, 2), False),
            ((33, 7), True),
        )
    )
)
def test_windows(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        VarlenCall(heads=h, heads_k=hk, **mask)
        for h, hk in ((8, 2), (9, 3), (6, 1))
        for mask in MASKS[:2]
    )
)
def test_grouped_heads(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_two
@calls(
    *(
        VarlenCall(heads=h, heads_k=hk, head_dim=128, dtype="bf16", **mask)
        for h, hk in ((8, 2), (9, 3), (6, 1), (14, 2), (40, 1))
        for mask in MASKS
    )
)
def test_more_grouped_heads(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(VarlenCall(alibi=kind, **mask) for kind in ("heads", "batch") for mask in MASKS),
    *(VarlenCall(softcap=cap, dtype="bf16", scale=0.5, **mask) for cap in (5.0,) for mask in MASKS),
    VarlenCall(alibi="batch", softcap=20.0, causal=True, dtype="bf16", head_dim=40),
    VarlenCall(alibi="signed", causal=True),
    VarlenCall(scale=-0.3, causal=True),
    VarlenCall(scale=0.0),
)
def test_score_terms(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(VarlenCall(used_q=(60, 0, 130), used_k=(1, 40, 0), tail=2, **mask) for mask in MASKS),
    VarlenCall(used_q=(1, 1, 1), causal=True),
    VarlenCall(used_k=(100, 0, 97), page_size=7, dtype="bf16"),
    VarlenCall(used_k=(100, 0, 97), page_size=7, counted=False, causal=True),
    VarlenCall(used_q=(0, 0, 0), used_k=(0, 0, 0), tail=4),
    VarlenCall(slack=1000, causal=True),
)
def test_used_lengths(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(VarlenCall(page_size=size, causal=True, dtype="bf16", **MIXED) for size in PAGE_SIZES),
    *(VarlenCall(page_size=size, window=(20, 4), head_dim=46, **SHORT) for size in (1, 3, 16)),
)
def test_pages(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_two
@calls(
    *(
        VarlenCall(page_size=size, alibi="heads", tail=5, head_dim=128, **mask, **MIXED)
        for size in PAGE_SIZES
        for mask in MASKS
    )
)
def test_more_pages(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


LONG: dict[str, Any] = {"lengths_q": (1, 4, 0, 2), "lengths_k": (700, 5, 3, 0)}


@on_all
@calls(
    *(
        VarlenCall(num_splits=splits, dtype="bf16", **mask, **LONG)
        for splits in (0, 1, 3, 8)
        for mask in MASKS[:2]
    ),
    *(VarlenCall(num_splits=splits, page_size=16, window=(20, 5), **LONG) for splits in (3, 8)),
    VarlenCall(num_splits=3, head_dim=256, head_dim_v=72, causal=True, **MIXED),
    VarlenCall(num_splits=5, alibi="batch", tail=7, used_k=(600, 0, 3, 0), **LONG),
)
def test_splits(backend: Backend, call: VarlenCall) -> None:
    """Case B22: parts that hold no key of a sequence do not count."""
    run(backend, call)


@on_two
@calls(
    *(
        VarlenCall(num_splits=splits, heads=h, heads_k=hk, **mask, **lengths)
        for splits in (0, 1, 2, 3, 8, 64, 256)
        for h, hk in ((8, 2), (9, 3))
        for mask in MASKS
        for lengths in (LONG, MIXED)
    )
)
def test_more_splits(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        VarlenCall(layout=layout, causal=True, lengths_q=(70, 3), lengths_k=(65, 40))
        for layout in ("padded", "bhsd", "packed", "every2", "align4", "align2", "offset2")
    ),
    VarlenCall(layout="bhsd", page_size=16, dtype="bf16", **SHORT),
    VarlenCall(layout="align8", page_size=3, head_dim=40, **SHORT),
)
def test_layouts(backend: Backend, call: VarlenCall) -> None:
    run(backend, call)


@on_all
@calls(
    VarlenCall(num_splits=1, causal=True, dtype="bf16"),
    VarlenCall(num_splits=1, heads=8, alibi="batch", page_size=16, **LONG),
    VarlenCall(num_splits=1, window=(30, 3), used_k=(9, 40, 90), used_q=(90, 1, 7)),
)
def test_bits_do_not_depend_on_the_batch(backend: Backend, call: VarlenCall) -> None:
    given_all = inputs(call)
    together = result(backend, call, upload(backend, call, given_all))
    for b, (first, last) in enumerate(pairwise(given_all["cu_seqlens_q"])):
        apart = result(backend, call, upload(backend, call, alone(call, given_all, b)))
        np.testing.assert_array_equal(apart.out[: last - first], together.out[first:last])
        np.testing.assert_array_equal(apart.lse[:, : last - first], together.lse[:, first:last])
        assert not apart.out[last - first :].any()


@on_all
@pytest.mark.parametrize("kind", ["kv", "qkv"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_packed_tensors(backend: Backend, kind: str, dtype: str) -> None:
    """Keys and values, or all three, in one tensor: the bits of three tensors."""
    call = VarlenCall(dtype=dtype, heads=2, lengths_q=(65, 0, 33), lengths_k=(65, 0, 33), tail=4)
    made = upload(backend, call, inputs(call))
    cu = made["cu_seqlens_q"]
    expected, expected_lse, _ = rtflash.flash_attn_varlen_func(
        made["q"], made["k"], made["v"], cu, cu, 65, 65, causal=True, return_attn_probs=True
    )
    values = {name: backend.to_numpy(made[name]) for name in "qkv"}
    options = {"causal": True, "return_attn_probs": True}
    if kind == "kv":
        kv = backend.make(np.stack([values["k"], values["v"]], axis=1), dtype)
        got = rtflash.flash_attn_varlen_kvpacked_func(made["q"], kv, cu, cu, 65, 65, **options)
    else:
        qkv = backend.make(np.stack(list(values.values()), axis=1), dtype)
        got = rtflash.flash_attn_varlen_qkvpacked_func(qkv, cu, 65, **options)
    np.testing.assert_array_equal(backend.to_numpy(got[0]), backend.to_numpy(expected))
    np.testing.assert_array_equal(backend.to_numpy(got[1]), backend.to_numpy(expected_lse))


@on_all
@pytest.mark.parametrize("layer", ["layer0", "layer5"])
def test_real_activations(backend: Backend, layer: str) -> None:
    """MiniLM's sentences, packed, give the stored answers in one call."""
    data = np.load(HERE / "data" / "minilm_qkv.npz")
    ends = data["cu_seqlens"]
    q, k, v = (backend.make(data[f"{layer}_{name}"][None])[0] for name in "qkv")
    cu, longest = backend.make(ends, "int32"), int(np.diff(ends).max())
    out, lse, _ = rtflash.flash_attn_varlen_func(
        q, k, v, cu, cu, longest, longest, return_attn_probs=True
    )
    got = backend.to_numpy(out)
    for a, b in pairwise(ends):
        plain = same_dtype(*(data[f"{layer}_{name}"][None, a:b] for name in "qkv"), "fp16")
        check(got[a:b], data[f"{layer}_out"][a:b].astype(np.float64), plain[0], "fp16")
    check_lse(backend.to_numpy(lse), data[f"{layer}_lse"].astype(np.float64))


@st.composite
def any_call(draw: st.DrawFn) -> VarlenCall:
    """Random lengths, zero among them, and options."""
    batch, length = draw(st.integers(0, 5)), st.sampled_from((0, 0, 1, 2, 7, 40))
    lengths_q, lengths_k = (tuple(draw(length) for _ in range(batch)) for _ in range(2))
    used_q, used_k = (
        draw(st.sampled_from([(), tuple(draw(st.integers(0, n)) for n in lengths)]))
        for lengths in (lengths_q, lengths_k)
    )
    heads_k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    page_size = draw(st.sampled_from((0, 0, 1, 2, 3, 16)))
    bound = st.integers(-1, 45)
    return VarlenCall(
        heads=heads_k * group,
        heads_k=heads_k,
        head_dim=draw(st.integers(1, 20)),
        head_dim_v=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(["fp16", "bf16"])),
        causal=draw(st.booleans()),
        window=(draw(bound), draw(bound)),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        alibi=draw(st.sampled_from(["", "heads", "batch"])),
        num_splits=draw(st.sampled_from([0, 1, 3])),
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        used_q=used_q,
        used_k=used_k,
        tail=draw(st.sampled_from((0, 3))) if lengths_q else 0,
        page_size=page_size,
        counted=not (page_size and used_k) or draw(st.booleans()),
        slack=draw(st.sampled_from((0, 100))),
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_call())
def test_any_call(call: VarlenCall) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RTFLASH_BACKEND", "numpy")
        run(Backend(), call)


@on_all
def test_a_neighbour_changes_no_bit(backend: Backend) -> None:
    """Rows of the sequence behind share a tile of queries with the last rows; they must not share more."""
    random = np.random.default_rng(9)
    m, n = 233, 397
    q, k, v = (random.standard_normal(s) for s in ((2 * m, 4, 64), (2 * n, 2, 64), (2 * n, 2, 64)))
    q *= 3
    other = np.concatenate([q[:m], 8 * random.standard_normal((m, 4, 64))])
    offsets = [backend.make(np.array([0, x, 2 * x]), "int32") for x in (m, n)]
    keys = [backend.make(x, "fp16") for x in (k, v)]
    for causal in (False, True):
        first, second = (
            backend.to_numpy(
                rtflash.flash_attn_varlen_func(
                    backend.make(x, "fp16"), *keys, *offsets, m, n, causal=causal, num_splits=1
                )
            )[:m]
            for x in (q, other)
        )
        np.testing.assert_array_equal(first, second)
