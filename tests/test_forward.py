"""The dense forward against the float64 oracle, on every backend, by the bound of compare.py.

Inputs lie in buffers of NaN and the memory of outputs is poisoned, so a read of padding, a read past an end and an
unwritten element each fail a test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from backends import ALL_BACKENDS, GPU_BACKENDS, Backend
from calls import Call, arrays, poison, run, solved
from compare import check
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layouts import LAYOUTS, NEGATIVE, encode

import rtflash

LENGTHS = (1, 63, 64, 65, 97, 128, 129, 1025)
HEAD_DIMS = (1, 8, 16, 32, 40, 46, 63, 64, 72, 80, 96, 128, 136, 160, 192, 224, 256)
BOTTOM = 2**31 - 1

on_all = pytest.mark.parametrize("backend", ALL_BACKENDS, indirect=True)
on_gpu = pytest.mark.parametrize("backend", GPU_BACKENDS, indirect=True)


def calls(*given: Call) -> Any:
    """Parametrize a test over distinct calls, each under its own id."""
    return pytest.mark.parametrize("call", [pytest.param(c, id=c.id) for c in dict.fromkeys(given)])


@on_all
@calls(
    *(Call(head_dim=d, dtype="bf16", causal=True) for d in HEAD_DIMS),
    *(Call(head_dim=d, dtype="fp16") for d in HEAD_DIMS),
    *(Call(256, 256, head_dim=d, dtype="bf16", heads_k=1) for d in HEAD_DIMS),
)
def test_head_dims(backend: Backend, call: Call) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        Call(head_dim=d, head_dim_v=dv, dtype=dtype, causal=dtype == "bf16")
        for d, dv in ((192, 128), (64, 256), (40, 17), (128, 64), (256, 1), (1, 64))
        for dtype in ("fp16", "bf16")
    )
)
def test_value_dim_differs(backend: Backend, call: Call) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        Call(sq, sk, dtype="bf16", heads_k=1, batch=1, causal=causal)
        for causal in (False, True)
        for sq in LENGTHS
        for sk in LENGTHS
    ),
    *(
        Call(sq, sk, head_dim=128, heads=1, heads_k=1, causal=causal)
        for causal in (False, True)
        for sq, sk in ((64, 128), (128, 64), (65, 129), (1, 1025), (256, 256), (1025, 63))
    ),
)
def test_lengths(backend: Backend, call: Call) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        Call(sq, sk, head_dim=d, layouts=(layout,) * 3, batch=2, heads=2, heads_k=2, causal=causal)
        for layout in ("shared_batch", "align8", "align4", "align2")
        for d, sq, sk, causal in ((256, 130, 70, False), (192, 200, 200, True), (72, 65, 300, True))
    ),
    Call(130, 0, head_dim=256),
    Call(130, 0, head_dim=64, causal=True),
)
def test_many_rows_that_are_copied_one_by_one(backend: Backend, call: Call) -> None:
    """On Hopper, where TMA cannot read them."""
    run(backend, call)


WINDOWS = (
    *(
        (0, 0),
        (1, 0),
        (0, 1),
        (16, 0),
        (63, 64),
        (64, 63),
        (128, 128),
        (-1, 0),
        (-1, 5),
        (5, -1),
        (300, 2),
    ),
    *((7, 10**6), (BOTTOM, BOTTOM), (BOTTOM, 0), (3, BOTTOM)),
)


@on_all
@calls(
    *(
        Call(sq, sk, dtype="bf16", window=window, heads_k=1)
        for window in WINDOWS
        for sq, sk in ((65, 129), (129, 65), (128, 128), (1, 97), (200, 333))
    ),
    *(Call(200, 200, window=(16, right), causal=True) for right in (-1, 0, 5)),
    *(
        Call(130, 257, head_dim=128, head_dim_v=64, window=(33, 7), dtype=dtype)
        for dtype in ("fp16", "bf16")
    ),
)
def test_windows(backend: Backend, call: Call) -> None:
    run(backend, call)


MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (40, 9)})


@on_all
@calls(
    *(
        Call(head_dim=d, softcap=cap, magnitude=3.0, dtype=dtype, **mask)
        for d, dtype in ((64, "bf16"), (128, "fp16"))
        for cap in (0.5, 5.0, 50.0, 1e5, 2.0**60)
        for mask in MASKS
    )
)
def test_softcap(backend: Backend, call: Call) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        Call(sq, sk, head_dim=d, alibi=kind, dtype=dtype, heads=4, heads_k=2, **mask)
        for d, dtype in ((64, "bf16"), (40, "fp16"))
        for kind in ("heads", "batch")
        for sq, sk in ((97, 129), (129, 97))
        for mask in MASKS
    ),
    *(Call(alibi="batch", softcap=20.0, magnitude=3.0, **mask) for mask in MASKS),
    *(Call(97, 129, alibi="signed", heads=4, heads_k=2, **mask) for mask in MASKS),
)
def test_alibi(backend: Backend, call: Call) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        Call(heads=h, heads_k=hk, head_dim=d, causal=d == 128)
        for d in (64, 128)
        for h, hk in ((8, 2), (6, 3), (5, 1), (9, 3), (14, 2), (3, 3))
    )
)
def test_grouped_heads(backend: Backend, call: Call) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        Call(scale=scale, causal=causal, dtype=dtype)
        for scale in (0.0, -1.0, -0.3, 1e-50, 0.01, 1.0)
        for causal, dtype in ((False, "fp16"), (True, "bf16"))
    )
)
def test_scale(backend: Backend, call: Call) -> None:
    run(backend, call)


@on_all
@calls(
    *(
        Call(head_dim=d, dtype=dtype, layouts=(layout,) * 3, causal=True)
        for d, dtype in ((64, "bf16"), (40, "fp16"))
        for layout in LAYOUTS
    ),
    *(
        Call(65, 97, head_dim=d, heads=4, layouts=layouts)
        for d in (64, 46)
        for layouts in (
            ("bhsd", "every2", "bshd"),
            ("bshd", "padded", "shared_heads"),
            ("inner2", "bshd", "inner2"),
            ("bshd", "bshd", "offset2"),
            ("align4", "bhsd", "align8"),
            ("reversed", "bshd", "inner_reversed"),
        )
    ),
)
def test_strides(backend: Backend, call: Call) -> None:
    needed = set(call.layouts) - {"bshd"}
    if backend.strides == "none" and needed:
        pytest.skip(f"{backend.name} has row-major arrays only")
    if backend.strides == "positive" and needed & set(NEGATIVE):
        pytest.skip(f"{backend.name} has no negative strides")
    run(backend, call)


@on_all
@calls(
    *(
        call
        for d in (32, 64, 96, 128, 160, 192, 224, 256)
        for call in (
            Call(256, 384, head_dim=d, heads_k=1, causal=True),
            Call(200, 150, head_dim=d, window=(70, 9), softcap=9.0, alibi="batch", dtype="bf16"),
            Call(65, 97, head_dim=d - 1, causal=True, scale=-0.2, dtype="bf16"),
        )
    )
)
def test_every_tile(backend: Backend, call: Call) -> None:
    """A call with few predicates, one with every score term, and one of odd rows, at each tile of the table."""
    run(backend, call)


@on_gpu
@calls(
    Call(3000, 4096, batch=1, heads=1, heads_k=1, head_dim=128, dtype="bf16", causal=True),
    Call(2048, 4096, batch=1, heads=2, heads_k=1, head_dim=64, dtype="bf16"),
    Call(1000, 3001, batch=1, head_dim=256, dtype="bf16", causal=True),
    Call(3001, 1000, batch=1, head_dim=80, dtype="fp16", causal=True),
    Call(2048, 2048, batch=1, head_dim=128, dtype="bf16", window=(511, 0)),
    Call(1, 16384, batch=1, heads=8, heads_k=2, head_dim=128, dtype="bf16", causal=True),
)
def test_long(backend: Backend, call: Call) -> None:
    run(backend, call)


@on_all
@pytest.mark.parametrize("magnitude", [8.0, 30.0])
@calls(*(Call(head_dim=d, causal=True, dtype="bf16", heads_k=1) for d in (64, 128)))
def test_peaked_scores(backend: Backend, call: Call, magnitude: float) -> None:
    """Scores in the hundreds: one key takes nearly all the weight, and the running maximum moves often."""
    run(backend, dataclasses.replace(call, magnitude=magnitude))


@on_all
def test_defaults_return_the_output_alone(backend: Backend) -> None:
    call = Call()
    values, expected = solved(call)
    q, k, v, _ = arrays(backend, call, values)
    poison(backend, call)
    out = rtflash.flash_attn_func(q, k, v)
    assert backend.owns(out, q)
    check(backend.to_numpy(out), expected.out, expected.same_dtype, "fp16")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("packed", ["qkv", "kv"])
@on_all
def test_packed_functions_equal_the_plain_one(backend: Backend, packed: str, dtype: str) -> None:
    bits = encode(np.random.default_rng(3).standard_normal((2, 65, 3, 2, 64), np.float32), dtype)
    q, k, v = (backend.upload(bits[:, :, i].copy(), dtype) for i in range(3))
    options: dict[str, Any] = {"causal": True, "return_attn_probs": True}
    if packed == "qkv":
        results = rtflash.flash_attn_qkvpacked_func(backend.upload(bits, dtype), **options)
    else:
        kv = backend.upload(bits[:, :, 1:].copy(), dtype)
        results = rtflash.flash_attn_kvpacked_func(q, kv, **options)
    plain = rtflash.flash_attn_func(q, k, v, **options)
    assert backend.owns(results[0], q)
    assert results[2] is plain[2] is None
    for got, wanted in zip(results[:2], plain[:2], strict=True):
        np.testing.assert_array_equal(backend.to_numpy(got), backend.to_numpy(wanted))


@on_all
def test_inputs_are_left_alone(backend: Backend) -> None:
    call = Call(
        causal=True,
        layouts=("padded", "bhsd", "every2") if backend.strides != "none" else ("bshd",) * 3,
    )
    values, _ = solved(call)
    q, k, v, _ = arrays(backend, call, values)
    rtflash.flash_attn_func(q, k, v, causal=True)
    for given_array, wanted in zip((q, k, v), values[:3], strict=True):
        np.testing.assert_array_equal(backend.to_numpy(given_array), wanted)


@pytest.mark.parametrize("hidden", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@on_all
def test_keys_hidden_by_a_mask_may_hold_anything(
    backend: Backend, head_dim: int, dtype: str, hidden: float
) -> None:
    """A NaN or an infinity in K at a key hidden by causal or window reaches no row that does not see it."""
    shape = (1, 100, 2, head_dim)
    clean = np.random.default_rng(5).standard_normal(shape, np.float32)
    q, k, v = (backend.make(x, dtype) for x in (clean[:, ::-1], clean, clean[..., ::-1]))
    after, before = clean.copy(), clean.copy()
    after[:, 60:], before[:, :30] = hidden, hidden
    for spoiled, rows, window in (
        (after, slice(0, 60), (-1, 0)),
        (before, slice(50, 100), (20, 0)),
        (after, slice(0, 40), (-1, 20)),
    ):
        wanted = rtflash.flash_attn_func(q, k, v, window_size=window)
        out = rtflash.flash_attn_func(q, backend.make(spoiled, dtype), v, window_size=window)
        np.testing.assert_array_equal(
            backend.to_numpy(out)[:, rows], backend.to_numpy(wanted)[:, rows]
        )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@on_all
def test_visible_nan_spreads_as_in_the_definition(backend: Backend, value: float) -> None:
    """A NaN in q spoils its own row alone; a NaN or an infinity in V at a visible key reaches all rows that see it."""
    random = np.random.default_rng(6)
    q, k, v = (random.standard_normal((1, 33, 1, 64), np.float32) for _ in range(3))
    v[0, 4, 0, 7] = value
    out = backend.to_numpy(rtflash.flash_attn_func(*(backend.make(x) for x in (q, k, v))))
    assert np.array_equal(out[0, :, 0, 7], np.full(33, value), equal_nan=True)
    assert np.isfinite(np.delete(out, 7, axis=3)).all()
    q[0, 9] = np.nan
    late, key = backend.make(q), backend.make(k)
    out, lse, _ = rtflash.flash_attn_func(late, key, key, return_attn_probs=True)
    spoiled = np.isnan(backend.to_numpy(lse)[0, 0])
    assert spoiled.nonzero()[0].tolist() == [9]
    assert np.isnan(backend.to_numpy(out)[0, 9]).all()


@on_all
def test_poison_reaches_new_outputs(backend: Backend) -> None:
    """The helper works: memory that was poisoned is what the framework hands out next."""
    if not backend.on_gpu:
        pytest.skip("the host's allocator hands out what it likes")
    backend.poison(1 << 16)
    assert np.isnan(backend.to_numpy(backend.fresh(1 << 15))).mean() > 0.9


# Feature sets that the tests above compile already, so that hypothesis adds few variants of its own.
FEATURES: tuple[dict[str, Any], ...] = (
    {"dtype": "bf16"},
    {"dtype": "bf16", "causal": True},
    {"dtype": "bf16", "window": (0, 0)},
    {"dtype": "fp16"},
    {"dtype": "fp16", "scale": -0.3},
    {"dtype": "bf16", "scale": -0.3, "causal": True},
    {"dtype": "fp16", "head_dim": 40, "causal": True},
    {"dtype": "bf16", "head_dim": 136, "causal": True},
    {"dtype": "bf16", "head_dim": 192, "head_dim_v": 128, "causal": True},
    {"dtype": "fp16", "head_dim": 256},
    {"dtype": "bf16", "softcap": 5.0, "magnitude": 3.0},
    {"dtype": "fp16", "head_dim": 40, "alibi": "batch"},
    {"dtype": "fp16", "head_dim": 40, "alibi": "heads", "causal": True},
)


@st.composite
def drawn_calls(draw: st.DrawFn) -> Call:
    """Any lengths, heads, batch, window and layouts on one of FEATURES."""
    features = dict(draw(st.sampled_from(FEATURES)))
    length = st.integers(0, 20) | st.integers(1, 300) | st.sampled_from(LENGTHS[:-1])
    groups, heads_k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    bound = st.integers(-1, 300)
    if "window" in features:
        features["window"] = draw(st.tuples(bound, bound))
    layouts = st.sampled_from([x for x in LAYOUTS if not x.startswith(("align", "offset"))])
    return Call(
        seqlen_q=draw(length),
        seqlen_k=draw(length),
        heads=groups * heads_k,
        heads_k=heads_k,
        batch=draw(st.integers(0, 3)),
        layouts=draw(st.tuples(layouts, layouts, layouts)),
        **features,
    )


@on_all
@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(call=drawn_calls())
def test_any_call(backend: Backend, call: Call) -> None:
    if backend.strides == "none":
        call = dataclasses.replace(call, layouts=("bshd",) * 3)
    assume(backend.strides == "any" or not set(call.layouts) & set(NEGATIVE))
    run(backend, call)
