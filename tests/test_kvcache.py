"""Caches against the float64 oracle, on every backend, by the bound of compare.py; the cache itself bit for bit.

Whatever a call must not read is NaN, and so is the memory that its results come from: see inference_calls.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inference_calls import (
    CacheCall,
    Expected,
    Result,
    alone,
    calls,
    hold,
    inputs,
    on_all,
    on_two,
    result,
    run,
    upload,
)
from reference import attention, same_dtype

import rtflash

HEAD_DIMS = (1, 8, 40, 63, 64, 72, 128, 192, 256)
MORE_HEAD_DIMS = (*HEAD_DIMS, 16, 32, 46, 80, 96, 136, 160, 224)
PAGE_SIZES = (1, 2, 3, 7, 16, 64, 256)
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (40, 9)})
GROUPS = ((8, 2), (9, 3), (6, 1), (4, 4))
ROTARIES = ("interleaved", "halves")


@on_all
@calls(
    *(
        CacheCall(head_dim=d, dtype="bf16", heads=6, heads_k=2, lengths=(129, 0, 70))
        for d in HEAD_DIMS
    ),
    *(
        CacheCall(head_dim=d, head_dim_v=dv, seqlen_q=3, causal=True, page_size=page_size)
        for d, dv, page_size in ((192, 128, 0), (64, 256, 16), (40, 17, 0), (1, 64, 3))
    ),
)
def test_head_dims(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_all
@calls(
    CacheCall(seqlen_q=40, heads=8, lengths=(129, 40, 90), causal=True, num_splits=1),
    CacheCall(seqlen_q=20, heads=8, lengths=(160, 40, 90), causal=True, page_size=16),
    CacheCall(seqlen_q=40, heads=8, lengths=(129, 0, 90), page_size=8, num_splits=3),
    CacheCall(seqlen_q=70, heads=6, window=(40, 9), page_size=24, head_dim=72, num_splits=1),
    CacheCall(seqlen_q=200, capacity=300, lengths=(300, 7, 250), page_size=64, dtype="bf16"),
    CacheCall(seqlen_q=80, seqlen_new=80, page_size=16, causal=True, rotary="interleaved", rotary_dim=64,
              lengths=(100, 40, 90), num_splits=1),
    CacheCall(seqlen_q=80, seqlen_new=80, heads=8, causal=True, rotary="halves", rotary_dim=24,
              lengths=(100, 40, 90), num_splits=2),
    CacheCall(seqlen_q=80, leftpad=(9, 0, 1), causal=True, num_splits=2),
    CacheCall(seqlen_q=80, leftpad=(9, 0, 1), causal=True, page_size=16),
    CacheCall(seqlen_q=130, lengths=(70, 0, 5), head_dim=256, page_size=3),
    CacheCall(seqlen_q=80, lengths=(129, 40, 90), head_dim=192, causal=True, page_size=5, heads=8),
    CacheCall(seqlen_q=70, seqlen_new=70, lengths=(100, 40, 90), page_size=1, causal=True, rotary="halves",
              rotary_dim=32, num_splits=2),
    CacheCall(seqlen_q=80, rows=5, batch_idx=(4, 0, 2), lengths=77, head_dim=40, head_dim_v=32, num_splits=3),
)  # fmt: skip
def test_many_queries(backend: Backend, call: CacheCall) -> None:
    """Chunks of a prompt, on Hopper by its own kernel: packed groups, pages, rotated queries, split keys."""
    run(backend, call)


@on_two
@calls(
    *(
        CacheCall(head_dim=d, seqlen_q=sq, page_size=page_size, causal=True)
        for d in MORE_HEAD_DIMS
        for sq in (1, 20)
        for page_size in (0, 16)
    )
)
def test_more_head_dims(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        CacheCall(seqlen_q=sq, causal=True, heads=h, heads_k=hk, dtype="bf16")
        for sq, (h, hk) in (
            *((1, group) for group in GROUPS),
            *((sq, (8, 2)) for sq in (2, 3, 4, 5, 16, 17, 65, 130)),
            *((sq, (9, 3)) for sq in (4, 6, 40)),
        )
    )
)
def test_query_lengths_and_groups(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_two
@calls(
    *(
        CacheCall(seqlen_q=sq, heads=h, heads_k=hk, head_dim=128, **mask)
        for sq in (1, 2, 5, 17, 64, 130)
        for h, hk in (*GROUPS, (40, 2))
        for mask in MASKS
    )
)
def test_more_query_lengths_and_groups(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(CacheCall(lengths=lengths, heads=8) for lengths in (0, 1, 57, 200, None)),
    CacheCall(lengths=(0, 0, 0), causal=True, seqlen_q=2),
    CacheCall(batch=0, lengths=(), rows=2),
    CacheCall(batch=0, lengths=None),
    CacheCall(seqlen_q=0),
    CacheCall(capacity=0, lengths=(0, 0, 0)),
    CacheCall(capacity=0, lengths=None),
    CacheCall(lengths=(3, 40, 200), seqlen_q=20, causal=True),
    CacheCall(lengths=None, page_size=16, capacity=48, seqlen_q=4, causal=True),
    CacheCall(rows=7),
)
def test_lengths(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        CacheCall(seqlen_q=sq, window=window, causal=causal, heads=8, dtype="bf16")
        for sq in (1, 4)
        for window, causal in (((2, 0), False), ((2, 0), True), ((0, 0), False), ((70, 5), False))
    ),
    CacheCall(window=(-1, 3), seqlen_q=30),
    CacheCall(window=(3, -1), seqlen_q=30),
    *(
        CacheCall(seqlen_q=sq, alibi=kind, heads=8, **mask)
        for sq, kind, mask in (
            (1, "heads", MASKS[1]),
            (1, "batch", MASKS[2]),
            (5, "batch", MASKS[1]),
            (33, "heads", MASKS[0]),
        )
    ),
    *(CacheCall(seqlen_q=sq, softcap=5.0, scale=0.5, dtype="bf16", **MASKS[1]) for sq in (1, 6)),
    CacheCall(seqlen_q=2, scale=-0.3, causal=True),
    CacheCall(seqlen_q=2, scale=0.0, alibi="batch", softcap=2.0),
    CacheCall(seqlen_q=2, alibi="signed", heads=8, causal=True),
)
def test_score_terms(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(CacheCall(page_size=size, heads=8, dtype="bf16", causal=True) for size in PAGE_SIZES),
    *(CacheCall(page_size=size, seqlen_q=20, causal=True, head_dim=46) for size in (1, 3, 16, 64)),
    CacheCall(page_size=16, page_name="page_table", lengths=(129, 0, 16)),
    CacheCall(page_size=2, lengths=77, window=(9, 0), heads=8),
    CacheCall(page_size=16, layout="bhsd", heads=8),
)
def test_pages(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_two
@calls(
    *(
        CacheCall(page_size=size, seqlen_q=sq, heads=8, head_dim=128, alibi="heads", **mask)
        for size in PAGE_SIZES
        for sq in (1, 5, 70)
        for mask in MASKS
    )
)
def test_more_pages(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_all
@calls(
    *(CacheCall(leftpad=(3, 40, 0), seqlen_q=sq, heads=8, **MASKS[1]) for sq in (1, 9)),
    CacheCall(leftpad=(100, 40, 1), lengths=(129, 60, 1), window=(20, 3), seqlen_q=4),
    CacheCall(leftpad=(3, 17, 64), lengths=(129, 40, 70), page_size=16, causal=True, seqlen_q=2),
    CacheCall(leftpad=(3, 17, 64), lengths=90, page_size=3, dtype="bf16"),
    CacheCall(batch_idx=(4, 0, 2), rows=5, heads=8),
    CacheCall(batch_idx=(1, 1, 0), rows=2, lengths=(80, 80, 9), seqlen_q=3, causal=True),
    CacheCall(batch_idx=(4, 0, 2), rows=5, leftpad=(9, 0, 1), alibi="batch", dtype="bf16"),
)
def test_left_padding_and_rows(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


APPEND: dict[str, Any] = {"lengths": (20, 0, 70), "heads": 8}


@on_all
@calls(
    *(
        CacheCall(seqlen_new=new, seqlen_q=new, rotary=rotary, dtype=dtype, causal=True, **APPEND)
        for new in (1, 3, 130)
        for rotary, dtype in (("", "fp16"), ("interleaved", "bf16"), ("halves", "fp16"))
    ),
    *(
        CacheCall(seqlen_new=1, rotary=rotary, rotary_dim=rotary_dim, head_dim=64, **APPEND)
        for rotary in ROTARIES
        for rotary_dim in (2, 8, 30)
    ),
    *(CacheCall(seqlen_new=2, seqlen_q=5, rotary=rotary, **APPEND) for rotary in ROTARIES),
    *(
        CacheCall(seqlen_new=3, seqlen_q=2, rotary="halves", window=w, **APPEND)
        for w in ((9, 0), (-1, 2), (2**29, -1), (2**31 - 1, 2**31 - 1))
    ),
    *(
        CacheCall(
            seqlen_new=new, page_size=size, rotary=rotary, dtype="bf16", causal=True, **APPEND
        )
        for new, size, rotary in (
            (1, 1, "interleaved"),
            (1, 16, "halves"),
            (3, 2, "halves"),
            (130, 7, ""),
            (130, 64, "interleaved"),
        )
    ),
    CacheCall(seqlen_new=3, lengths=50, rotary="interleaved", heads=8, seqlen_q=3, causal=True),
    CacheCall(seqlen_new=3, lengths=0, capacity=3),
    CacheCall(seqlen_new=1, lengths=(199, 0, 198)),
    CacheCall(seqlen_new=2, leftpad=(3, 0, 66), rotary="halves", causal=True, seqlen_q=2, **APPEND),
    CacheCall(seqlen_new=2, leftpad=(3, 0, 66), page_size=16, rotary="halves", **APPEND),
    CacheCall(seqlen_new=2, batch_idx=(4, 0, 2), rows=5, rotary="interleaved", **APPEND),
    CacheCall(seqlen_new=3, head_dim=63, head_dim_v=9, rotary="interleaved", **APPEND),
    CacheCall(seqlen_new=3, head_dim=46, rotary="halves", dtype="bf16", num_splits=3, **APPEND),
    CacheCall(seqlen_new=2, layout="bhsd", rotary="halves", **APPEND),
    CacheCall(seqlen_new=2, layout="align2", head_dim=40, **APPEND),
    CacheCall(seqlen_new=2, softcap=4.0, alibi="batch", rotary="halves", causal=True, **APPEND),
    CacheCall(seqlen_new=2, seqlen_q=0, **APPEND),
    CacheCall(seqlen_new=1, batch=0, lengths=()),
)
def test_append(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_two
@calls(
    *(
        CacheCall(
            seqlen_new=new, seqlen_q=sq, page_size=size, rotary=rotary, head_dim=d, **mask, **APPEND
        )
        for new, sq in ((1, 1), (3, 3), (2, 9))
        for size in (0, 1, 7, 64)
        for rotary in ("", *ROTARIES)
        for mask in MASKS
        for d in (64, 128)
    )
)
def test_more_appends(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


LONG: dict[str, Any] = {"lengths": (700, 5, 0), "capacity": 1000, "heads": 8}


@on_all
@calls(
    *(
        CacheCall(num_splits=splits, seqlen_q=sq, causal=True, dtype="bf16", **LONG)
        for splits in (0, 1, 3, 8)
        for sq in (1, 4)
    ),
    *(CacheCall(num_splits=splits, window=(2, 0), lengths=(10, 200, 3)) for splits in (1, 4)),
    *(CacheCall(num_splits=splits, page_size=16, heads=9, heads_k=3) for splits in (3, 8)),
    CacheCall(num_splits=256, head_dim=128, **LONG),
    CacheCall(num_splits=7, seqlen_q=70, head_dim=40, alibi="batch", softcap=3.0, **LONG),
    CacheCall(num_splits=8, page_size=1, leftpad=(650, 2, 0), seqlen_q=2, **LONG),
)
def test_splits(backend: Backend, call: CacheCall) -> None:
    """Cases B22, B39: parts that hold no key, or lie outside of the window, do not count."""
    run(backend, call)


@on_two
@calls(
    *(
        CacheCall(
            num_splits=splits, seqlen_q=sq, heads=h, heads_k=hk, page_size=size, lengths=(700, 5, 0),
            capacity=1000, **mask,
        )
        for splits in (0, 1, 2, 3, 8, 64)
        for sq in (1, 6)
        for h, hk in GROUPS
        for size in (0, 16)
        for mask in MASKS
    )
)  # fmt: skip
def test_more_splits(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_all
@calls(
    CacheCall(layout="bhsd", heads=8),
    CacheCall(layout="padded", seqlen_q=5, causal=True),
    CacheCall(layout="every2", dtype="bf16"),
    CacheCall(layout="align8", head_dim=40),
    CacheCall(layout="align2", seqlen_q=9),
    CacheCall(layout="offset4"),
)
def test_layouts(backend: Backend, call: CacheCall) -> None:
    run(backend, call)


@on_all
@calls(
    CacheCall(num_splits=1, dtype="bf16", **LONG),
    CacheCall(num_splits=1, seqlen_q=5, page_size=16, causal=True, alibi="batch", **LONG),
    CacheCall(num_splits=1, batch_idx=(2, 0, 3), rows=4, leftpad=(9, 1, 0), heads=9, heads_k=3),
)
def test_bits_do_not_depend_on_the_batch(backend: Backend, call: CacheCall) -> None:
    given_all = inputs(call)
    together = result(backend, call, upload(backend, call, given_all))
    for b in range(call.batch):
        apart = result(backend, call, upload(backend, call, alone(call, given_all, b)))
        np.testing.assert_array_equal(apart.out[0], together.out[b])
        np.testing.assert_array_equal(apart.lse[0], together.lse[b])


@on_all
@pytest.mark.parametrize("page_size", [0, 16])
def test_steps_equal_one_causal_pass(backend: Backend, page_size: int) -> None:
    """A prompt, then one token after the other, through a cache: the rows of one causal call."""
    prompt, steps = (20, 5) if backend.name == "emulated" else (70, 64)
    whole = CacheCall(
        batch=2, seqlen_q=prompt + steps, causal=True, lengths=0, seqlen_new=prompt + steps,
        capacity=160, page_size=page_size, dtype="bf16", heads=8,
    )  # fmt: skip
    tensors = inputs(whole)
    made = upload(backend, whole, tensors)
    caches = (made["k_cache"], made["v_cache"])
    table = made.get("block_table")
    outs, lses = [], []
    for first, last in ((0, prompt), *((t, t + 1) for t in range(prompt, prompt + steps))):
        out, lse, *new = rtflash.flash_attn_with_kvcache(
            made["q"][:, first:last], *caches, made["k"][:, first:last], made["v"][:, first:last],
            cache_seqlens=first, block_table=table, causal=True, return_softmax_lse=True,
        )  # fmt: skip
        caches = new or caches
        outs.append(backend.to_numpy(out))
        lses.append(backend.to_numpy(lse))
    qkv = tensors["q"], tensors["k"], tensors["v"]
    plain = same_dtype(*qkv, whole.dtype, causal=True)
    got = Result(np.concatenate(outs, axis=1), np.concatenate(lses, axis=2))
    out, lse = attention(*qkv, causal=True)
    # No cache is expected here: test_append holds it.
    hold(
        whole,
        got._replace(caches=(np.zeros(1),) * 2),
        Expected(out, lse, plain, (np.zeros(1),) * 2),
    )


@st.composite
def any_call(draw: st.DrawFn) -> CacheCall:
    """Random lengths, zero among them, places, new keys and options."""
    batch, capacity = draw(st.integers(0, 4)), draw(st.sampled_from((0, 1, 5, 40)))
    page_size = draw(st.sampled_from((0, 0, 1, 2, 3, 16)))
    slots = -(-capacity // page_size) * page_size if page_size else capacity
    seqlen_new = draw(st.integers(0, min(4, slots)))
    length = st.integers(0, slots - seqlen_new)
    lengths: Any = tuple(draw(length) for _ in range(batch))
    kind = draw(st.sampled_from(["array", "int", "full"]))
    if kind == "int" or (kind == "full" and seqlen_new):
        lengths = draw(length)
    elif kind == "full":
        lengths = None
    used = [slots if lengths is None else lengths if isinstance(lengths, int) else None] * batch
    pads = tuple(
        draw(st.integers(0, n if n is not None else lengths[b])) for b, n in enumerate(used)
    )
    rows = draw(st.integers(batch, batch + 2))
    heads_k, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = draw(st.integers(1, 20))
    rotary = draw(st.sampled_from(["", *ROTARIES])) if seqlen_new and head_dim > 1 else ""
    bound = st.integers(-1, 45)
    return CacheCall(
        heads=heads_k * group,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=draw(st.integers(1, 20)),
        dtype=draw(st.sampled_from(["fp16", "bf16"])),
        causal=draw(st.booleans()),
        window=(draw(bound), draw(bound)),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        alibi=draw(st.sampled_from(["", "heads", "batch"])),
        num_splits=draw(st.sampled_from([0, 1, 3])),
        batch=batch,
        seqlen_q=draw(st.integers(0, 6)),
        lengths=lengths,
        capacity=capacity,
        page_size=page_size,
        page_name=draw(st.sampled_from(["block_table", "page_table"])),
        leftpad=pads if draw(st.booleans()) else (),
        rows=rows,
        batch_idx=() if page_size else tuple(draw(st.permutations(range(rows)))[:batch]),
        seqlen_new=seqlen_new,
        rotary=rotary,
        rotary_dim=2 * draw(st.integers(1, head_dim // 2)) if rotary else 0,
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_call())
def test_any_call(call: CacheCall) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RTFLASH_BACKEND", "numpy")
        run(Backend(), call)


def test_lengths_in_a_list_are_refused_by_name() -> None:
    """The message says what may be given instead; cache_seqlens may be an int too."""
    q, cache = np.zeros((1, 1, 1, 8), np.float16), np.zeros((1, 4, 1, 8), np.float16)
    with pytest.raises(TypeError, match=r"cache_seqlens is a list; it must be an int, or a tensor"):
        rtflash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=[2])
    with pytest.raises(TypeError, match=r"cache_leftpad is a tuple; it must be a tensor"):
        rtflash.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=2, cache_leftpad=(1,))
