"""rtflash.cpu.forward against the float64 oracle, and the contracts that a bound cannot see."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import check, check_lse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import encode
from numpy.typing import NDArray
from reference import attention, rounded, same_dtype, to_float64

from rtflash import cpu, cpu_dense, describe
from rtflash.tensor import View

pytestmark = pytest.mark.filterwarnings("error")

Array = NDArray[Any]
HERE = Path(__file__).parent
UNBOUNDED = 2**31 - 1
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (16, 8)},
    "diagonal": {"window_size": (0, 0)},
    "left_only": {"window_size": (5, -1)},
    "right_only": {"window_size": (-1, 3)},
    "causal_window": {"window_size": (20, 7), "causal": True},
    "unbounded": {"window_size": (UNBOUNDED, UNBOUNDED)},
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few rows, so that short inputs cross many tile and chunk borders."""
    set_tiles(monkeypatch, 16, 8, 2048)


def set_tiles(patch: pytest.MonkeyPatch, rows: int, keys: int, chunk: int) -> None:
    for name, value in (("TILE_M", rows), ("TILE_N", keys), ("CHUNK_ELEMENTS", chunk)):
        patch.setattr(cpu_dense, name, value)


def array(values: Array, dtype: str) -> Array:
    """`values` as float16, or as bf16's bits in uint16."""
    bits = encode(np.asarray(values, np.float32), dtype)
    return bits.view(np.float16) if dtype == "fp16" else bits


def normal(shape: tuple[int, ...], dtype: str = "fp16", seed: int = 0) -> Array:
    return array(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def inputs(
    batch: int = 2,
    seqlen_q: int = 97,
    seqlen_k: int = 129,
    heads: int = 2,
    heads_k: int = 2,
    head_dim: int = 32,
    head_dim_v: int | None = None,
    dtype: str = "fp16",
) -> tuple[Array, Array, Array]:
    return (
        normal((batch, seqlen_q, heads, head_dim), dtype, 1),
        normal((batch, seqlen_k, heads_k, head_dim), dtype, 2),
        normal((batch, seqlen_k, heads_k, head_dim_v or head_dim), dtype, 3),
    )


def view(x: Array) -> View:
    names = {"float16": "fp16", "bfloat16": "bf16", "uint16": "bf16", "float32": "fp32"}
    strides = tuple(s // x.itemsize for s in x.strides)
    return View(x.ctypes.data, x.shape, strides, names[x.dtype.name], -1)


def run(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    slopes = options.pop("alibi_slopes", None)
    views = (view(q), view(k), view(v))
    slopes_view = None if slopes is None else view(slopes)
    p = describe.dense(*views, alibi_slopes=slopes_view, **options)
    return cpu.forward(p, q, k, v, slopes)


def verify(q: Array, k: Array, v: Array, **options: Any) -> tuple[Array, Array]:
    """Run, hold the result to the bound, and return it."""
    out, lse = run(q, k, v, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == np.float32
    assert out.flags.c_contiguous
    ref, ref_lse = attention(q, k, v, **options)
    dtype = view(q).dtype
    plain = same_dtype(q, k, v, dtype, **options)
    check(out, ref, plain, dtype, factor=3 if options.get("softcap") else 2)
    check_lse(lse, ref_lse)
    return out, lse


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (1, 129), (129, 1), (63, 65), (65, 63), (97, 129), (129, 97), (300, 513)],
)
def test_masks(seqlen_q: int, seqlen_k: int, mask: str, dtype: str) -> None:
    q, k, v = inputs(seqlen_q=seqlen_q, seqlen_k=seqlen_k, dtype=dtype)
    verify(q, k, v, **MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.usefixtures("small_tiles")
def test_masks_over_many_tiles(mask: str) -> None:
    verify(*inputs(seqlen_q=65, seqlen_k=97, heads=6, heads_k=3, head_dim=8), **MASKS[mask])
    verify(*inputs(seqlen_q=97, seqlen_k=65, heads=6, heads_k=3, head_dim=8), **MASKS[mask])


@pytest.mark.parametrize("seqlen", [1025, 2048])
def test_long(seqlen: int) -> None:
    q, k, v = inputs(1, seqlen, seqlen, 4, 2, 64)
    verify(q, k, v, causal=True)


@pytest.mark.parametrize("head_dim", [1, 8, 40, 46, 63, 72, 96, 136, 256])
@pytest.mark.parametrize("head_dim_v", [None, 17])
def test_head_dims(head_dim: int, head_dim_v: int | None) -> None:
    verify(*inputs(1, head_dim=head_dim, head_dim_v=head_dim_v), causal=True)


@pytest.mark.parametrize(("heads", "heads_k"), [(8, 8), (8, 2), (8, 1), (6, 3), (300, 1)])
def test_grouped_heads(heads: int, heads_k: int) -> None:
    q, k, v = inputs(1, 33, 65, heads, heads_k, 16)
    out, _ = verify(q, k, v, causal=True)
    repeated = (np.repeat(x, heads // heads_k, axis=2) for x in (k, v))
    separate, _ = run(q, *repeated, causal=True)
    np.testing.assert_allclose(out.astype(float), separate.astype(float), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.usefixtures("small_tiles")
def test_alibi(shape: tuple[int, ...], mask: str) -> None:
    slopes = np.linspace(-0.1, 0.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    q, k, v = inputs(heads=4, heads_k=2)
    verify(q, k, v, alibi_slopes=slopes, **MASKS[mask])
    verify(q, k, v, alibi_slopes=slopes, softcap=2.0, **MASKS[mask])


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_softcap(softcap: float, scale: float | None) -> None:
    verify(*inputs(dtype="bf16"), softcap=softcap, softmax_scale=scale, causal=True)


def test_order_of_score_terms() -> None:
    """The cap is put on the scaled score, and ALiBi after it: 2 tanh(3 / 2) - distance."""
    q, v = array(np.ones((1, 1, 1, 1)), "fp16"), array(np.zeros((1, 5, 1, 1)), "fp16")
    k = array(np.full((1, 5, 1, 1), 1.5), "fp16")
    slope = np.ones(1, np.float32)
    _, lse = run(q, k, v, softmax_scale=2.0, softcap=2.0, alibi_slopes=slope, window_size=(4, 0))
    capped = 2 * np.tanh(3 / 2)
    assert lse.item() == pytest.approx(capped + np.log(np.exp(-np.arange(5.0)).sum()), abs=1e-6)


@pytest.mark.parametrize("scale", [-1.0, -0.3, 0.0])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_scale_zero_or_negative(scale: float, mask: str) -> None:
    verify(*inputs(), softmax_scale=scale, **MASKS[mask])


def test_negative_scale_of_a_large_score() -> None:
    """Case B01: the maximum is taken after scaling, so the score of -200 does not win."""
    q, k = np.zeros((1, 1, 1, 8)), np.zeros((1, 2, 1, 8))
    q[..., 0], k[0, 1, 0, 0] = 1, 200
    v = normal((1, 2, 1, 8))
    out, lse = run(array(q, "fp16"), array(k, "fp16"), v, softmax_scale=-1.0)
    np.testing.assert_array_equal(out[0, 0], v[0, 0])
    assert lse.item() == 0.0


@pytest.mark.parametrize("left", [-1, 10])
@pytest.mark.parametrize("tile", [8, 256])
def test_all_scores_far_below_zero(left: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B05: every score is -200; a tile that a row does not see must not make its maximum 0."""
    monkeypatch.setattr(cpu_dense, "TILE_N", tile)
    q = array(np.full((1, 88, 14, 64), 5.0), "bf16")
    k = array(np.full((1, 448, 2, 64), -5.0), "bf16")
    v = array(np.ones((1, 448, 2, 64)), "bf16")
    out, lse = run(q, k, v, causal=True, window_size=(left, 0))
    assert (out == v[0, 0, 0, 0]).all()
    seen = 361 + np.arange(88) if left < 0 else np.full(88, left + 1)
    np.testing.assert_allclose(lse, np.broadcast_to(-200 + np.log(seen), lse.shape), atol=1e-4)


@pytest.mark.parametrize(
    ("window_size", "seen"),
    [
        ((0, 0), lambda i: (i, i)),
        ((1, 0), lambda i: (i - 1, i)),
        ((3, 0), lambda i: (i - 3, i)),
        ((0, 2), lambda i: (i, i + 2)),
        ((7, 0), lambda i: (0, i)),
        ((-1, 0), lambda i: (0, i)),
        ((UNBOUNDED, 0), lambda i: (0, i)),
        ((0, UNBOUNDED), lambda i: (i, 7)),
    ],
)
def test_window_edges(window_size: tuple[int, int], seen: Any) -> None:
    """Case B40: with q = 0 a row is the mean of its first to its last key, both included."""
    q = np.zeros((1, 8, 1, 16), np.float16)
    v = normal((1, 8, 1, 16))
    out, lse = run(q, normal((1, 8, 1, 16)), v, window_size=window_size)
    for i in range(8):
        first, last = max(seen(i)[0], 0), min(seen(i)[1], 7)
        mean = v[0, first : last + 1, 0].astype(float).mean(axis=0)
        np.testing.assert_allclose(out[0, i, 0].astype(float), mean, atol=1e-3)
        assert lse[0, 0, i] == pytest.approx(np.log(last - first + 1), abs=1e-6)


@pytest.mark.usefixtures("small_tiles")
def test_rows_that_see_nothing() -> None:
    q, k, v = inputs(seqlen_q=40, seqlen_k=23)
    out, lse = verify(q, k, v, causal=True)
    assert not out[:, :17].any()
    assert np.isneginf(lse[:, :, :17]).all()
    np.testing.assert_array_equal(out[:, 17], v[:, 0])
    assert np.isfinite(lse[:, :, 17:]).all()
    out, lse = verify(q, k, v, window_size=(-1, 0), softmax_scale=-1.0)
    assert np.isneginf(lse[:, :, :17]).all()


@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((0, 4, 2, 64), (0, 4, 2, 64)),
        ((2, 0, 4, 8), (2, 5, 2, 8)),
        ((2, 3, 4, 8), (2, 0, 2, 8)),
        ((2, 0, 4, 8), (2, 0, 2, 8)),
    ],
)
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_empty_work(q_shape: tuple[int, ...], k_shape: tuple[int, ...], mask: str) -> None:
    out, lse = run(normal(q_shape), normal(k_shape), normal((*k_shape[:3], 5)), **MASKS[mask])
    assert out.shape == (*q_shape[:3], 5)
    assert lse.shape == (q_shape[0], q_shape[2], q_shape[1])
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mask", ["causal", "window", "causal_window"])
@pytest.mark.parametrize("tile", [8, 256])
def test_hidden_keys_do_not_leak(
    mask: str, poison: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K and V that a row does not see leave its bits alone; other rows follow the oracle."""
    set_tiles(monkeypatch, 16, tile, 2**20)
    q, k, v = inputs(seqlen_q=65, seqlen_k=97, heads=4, heads_k=2)
    clean, clean_lse = run(q, k, v, **MASKS[mask])
    k, v = k.copy(), v.copy()
    k[:, 60], v[:, 60], v[1, 75, 1, 3:] = poison, poison, poison
    out, lse = verify(q, k, v, **MASKS[mask])
    options = MASKS[mask]
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    own = np.arange(65) + 97 - 65
    blind = np.ones(65, bool)
    for key in (60, 75):
        blind &= (key > own + right) | ((left >= 0) & (key < own - left))
    assert blind.any()
    assert not blind.all()
    np.testing.assert_array_equal(out[:, blind], clean[:, blind])
    np.testing.assert_array_equal(lse[:, :, blind], clean_lse[:, :, blind])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.usefixtures("small_tiles")
def test_visible_nonfinite_values_spread(which: str, poison: float, dtype: str) -> None:
    tensors = dict(zip("qkv", inputs(dtype=dtype), strict=True))
    tensors[which] = tensors[which].copy()
    tensors[which][0, 33, 1, 2] = array(np.array([poison]), dtype)[0]
    for mask in ("full", "causal", "window"):
        verify(*tensors.values(), **MASKS[mask])


def test_overflow_of_the_output_is_infinite() -> None:
    """A sum beyond the largest fp32 is infinite, silently; the largest bf16 alone stays exact."""
    top = np.full((1, 2, 1, 4), 0x7F7F, np.uint16)
    q = array(np.zeros((1, 1, 1, 4)), "bf16")
    out, _ = run(q, q.repeat(2, axis=1), top)
    assert (to_float64(out) == np.inf).all()
    out, _ = run(q, q, top[:, :1])
    np.testing.assert_array_equal(out, top[:, :1])


def strided_copies(x: Array) -> Iterator[tuple[str, Array]]:
    """Arrays equal to x (batch, seqlen, heads, dim) with other strides."""
    yield "heads_first", np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    yield "every_second_row", np.repeat(x, 2, axis=1)[:, ::2]
    yield "every_second_element", np.repeat(x, 2, axis=3)[..., ::2]
    yield "fused", np.stack([x, x, x], axis=2)[:, :, 1]
    for axis in range(4):
        yield f"reversed_axis_{axis}", np.flip(np.ascontiguousarray(np.flip(x, axis)), axis)
    yield "read_only", np.broadcast_to(x, (1, *x.shape))[0]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_strides_do_not_change_bits(dtype: str) -> None:
    q, k, v = inputs(dtype=dtype, heads=4)
    expected, expected_lse = run(q, k, v, causal=True)
    copies = zip(*(strided_copies(x) for x in (q, k, v)), strict=True)
    for (name, q2), (_, k2), (_, v2) in copies:
        for args in ((q2, k, v), (q, k2, v), (q, k, v2), (q2, k2, v2)):
            out, lse = run(*args, causal=True)
            np.testing.assert_array_equal(out, expected, name)
            np.testing.assert_array_equal(lse, expected_lse, name)


def test_shared_heads_by_stride_zero() -> None:
    q, k, v = inputs(heads=4, heads_k=1)
    one, one_lse = verify(q, k, v)
    wide, wide_lse = verify(q, *(np.broadcast_to(x, (*x.shape[:2], 4, x.shape[3])) for x in (k, v)))
    np.testing.assert_allclose(one.astype(float), wide.astype(float), atol=1e-3)
    np.testing.assert_allclose(one_lse, wide_lse, atol=1e-5)


def test_bf16_bits_and_ml_dtypes_agree() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = inputs(dtype="bf16")
    bits, bits_lse = verify(q, k, v, causal=True)
    out, lse = verify(*(x.view(bfloat16) for x in (q, k, v)), causal=True)
    np.testing.assert_array_equal(out.view(np.uint16), bits)
    np.testing.assert_array_equal(lse, bits_lse)


def test_bf16_to_float32_is_exact() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(cpu.to_float32(bits).astype(np.float64), to_float64(bits))
    back = cpu.from_float32(cpu.to_float32(bits), bits.dtype)
    number = ~np.isnan(to_float64(bits))
    np.testing.assert_array_equal(back[number], bits[number])
    assert np.isnan(to_float64(back[~number])).all()


def test_float32_to_bf16_rounds_to_nearest_even() -> None:
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper[:, None] | lower).view(np.float32)
    got = cpu.from_float32(values, np.dtype(np.uint16))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(to_float64(got), rounded(values, "bf16"))
        theirs = values.astype(pytest.importorskip("ml_dtypes").bfloat16).view(np.uint16)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(got[number], theirs[number])


def test_same_bits_again_in_another_batch_and_in_threads() -> None:
    q, k, v = inputs(batch=5, seqlen_q=130, seqlen_k=300, heads=8, heads_k=2)
    v[0, 200] = np.nan
    out, lse = run(q, k, v, causal=True)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: run(q, k, v, causal=True), range(16)))
    for again, again_lse in results:
        np.testing.assert_array_equal(again, out)
        np.testing.assert_array_equal(again_lse, lse)
    for b in range(5):
        alone, alone_lse = run(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True)
        np.testing.assert_array_equal(alone[0], out[b])
        np.testing.assert_array_equal(alone_lse[0], lse[b])


def peak_bytes(*args: Array, **options: Any) -> int:
    tracemalloc.start()
    try:
        run(*args, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_is_linear_in_the_length() -> None:
    """No 8192 x 8192 fp32 scores (256 MiB), no K and V repeated for 32 heads (64 MiB in fp16)."""
    mebibyte = 2**20
    assert peak_bytes(*inputs(1, 8192, 8192, 1, 1, 16), causal=True) < 24 * mebibyte
    q, k, v = inputs(1, 1, 8192, 32, 1, 64)
    assert peak_bytes(q, k, v) < 24 * mebibyte
    assert peak_bytes(q, k, v, window_size=(100, 0)) < mebibyte


@pytest.mark.parametrize(
    ("mask", "tiles"), [("full", 64), ("causal", 36), ("diagonal", 8), ("window", 22)]
)
def test_hidden_tiles_are_skipped(mask: str, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 32 x 32 that no row sees is never scored: 8 x 8 tiles, half of them and a band."""
    set_tiles(monkeypatch, 32, 32, 2**20)
    scored = []
    tile_scores = cpu_dense.tile_scores
    monkeypatch.setattr(
        cpu_dense, "tile_scores", lambda *args: scored.append(1) or tile_scores(*args)
    )
    run(*inputs(1, 256, 256, 1, 1), **MASKS[mask])
    assert len(scored) <= tiles


@pytest.mark.parametrize("shape", [(65536, 1), (1, 65536)])
def test_many_batches_or_heads(shape: tuple[int, int]) -> None:
    """Case B09: one key, so the output is v bit for bit."""
    batch, heads = shape
    q, k, v = inputs(batch, 1, 1, heads, heads, 16)
    out, _ = run(q, k, v)
    np.testing.assert_array_equal(out, v)


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Array, Array, Array], dict[str, Any], tuple[int, ...]]:
    """Inputs of random shapes and strides, options, and tile sizes."""
    size = st.integers(1, 40)
    batch, heads_k, group = (
        draw(st.integers(0, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    heads, seqlen_q, seqlen_k = heads_k * group, draw(size), draw(st.integers(0, 40))
    head_dim, head_dim_v = draw(size), draw(size)
    dtype = draw(st.sampled_from(["fp16", "bf16"]))
    q, k, v = (
        draw(st.sampled_from([x, *(copy for _, copy in strided_copies(x))]))
        for x in inputs(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v, dtype)
    )
    bound = st.integers(-1, 45)
    options = {
        "causal": draw(st.booleans()),
        "window_size": (draw(bound), draw(bound)),
        "softmax_scale": draw(st.none() | st.floats(-2, 2, width=32)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 3.0])),
    }
    slopes = draw(st.sampled_from([None, (heads,), (batch, heads)]))
    if slopes is not None:
        options["alibi_slopes"] = np.random.default_rng(0).random(slopes, np.float32)
    tiles = (draw(size), draw(size), draw(st.sampled_from([1, 4096, 2**20])))
    return (q, k, v), options, tiles


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls())
def test_any_call(call: tuple[Any, ...]) -> None:
    tensors, options, tiles = call
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, *tiles)
        verify(*tensors, **options)


@pytest.mark.parametrize("layer", ["layer0", "layer5"])
def test_real_activations(layer: str) -> None:
    """MiniLM's sentences, each alone, against the stored answer and the model's own output."""
    data = np.load(HERE / "data" / "minilm_qkv.npz")
    ends = data["cu_seqlens"]
    for span in (slice(a, b) for a, b in pairwise(ends)):
        q, k, v = (data[f"{layer}_{name}"][None, span] for name in "qkv")
        out, lse = verify(q, k, v)
        stored = data[f"{layer}_out"][None, span].astype(np.float64)
        check(out, stored, same_dtype(q, k, v, "fp16"), "fp16")
        check_lse(lse, data[f"{layer}_lse"][None, :, span].astype(np.float64))
        model = data[f"{layer}_model_out"][None, span]
        np.testing.assert_allclose(out, model, atol=4e-3)


def demo_excerpt() -> dict[str, Array]:
    """What rtflash/data/minilm_demo.npz holds: layer 0 of the first three sentences, nothing
    changed.

    To write it anew: `numpy.savez_compressed("rtflash/data/minilm_demo.npz", **demo_excerpt())`.
    """
    sentences = 3
    data = np.load(HERE / "data" / "minilm_qkv.npz")
    ends = data["cu_seqlens"][: sentences + 1]
    excerpt = {name: data[f"layer0_{name}"][: ends[-1]] for name in ("q", "k", "v", "out")}
    note = (
        "Activations of layer 0 of MiniLM, (token, head, head_dim): q, k, v in fp16; out and lse"
        " are the fp32 attention of each sentence cu_seqlens[i]:cu_seqlens[i+1] over itself,"
        " no mask, scale head_dim^-0.5. The first three sentences of rtflash's tests/data/minilm_qkv.npz,"
        " cut by demo_excerpt in tests/test_cpu.py."
    )
    excerpt |= {"lse": data["layer0_lse"][:, : ends[-1]], "cu_seqlens": ends}
    return excerpt | {"note": np.array(note)}


def test_demo_data_is_the_excerpt() -> None:
    path = Path(cpu.__file__).parent / "data" / "minilm_demo.npz"
    assert path.stat().st_size < 250_000
    packed, expected = np.load(path), demo_excerpt()
    assert set(packed) == set(expected)
    for name, values in expected.items():
        assert packed[name].dtype == values.dtype
        np.testing.assert_array_equal(packed[name], values)


def test_bound_refuses_what_it_should() -> None:
    """The bound passes the plain result, and refuses a shift, a misplaced NaN and a wrong LSE."""
    q, k, v = inputs(dtype="bf16")
    ref, ref_lse = attention(q, k, v)
    plain = same_dtype(q, k, v, "bf16")
    check(array(plain, "bf16"), ref, plain, "bf16")
    with pytest.raises(AssertionError, match=r"max\|out - ref\| = .* exceeds .* worst at"):
        check(array(plain + 0.05, "bf16"), ref, plain, "bf16")
    spoiled = array(plain, "bf16")
    spoiled[1, 2, 1, 3] = 0x7FC0
    with pytest.raises(AssertionError, match=r"NaN in 1 places, expected in 0.*\(1, 2, 1, 3\)"):
        check(spoiled, ref, plain, "bf16")
    with pytest.raises(AssertionError, match="shapes differ"):
        check(array(plain, "bf16")[:1], ref, plain, "bf16")
    check_lse(ref_lse.astype(np.float32), ref_lse)
    with pytest.raises(AssertionError, match=r"\|lse - ref\|"):
        check_lse(ref_lse / np.log(2), ref_lse)


def test_oracle_against_torch() -> None:
    """The oracle itself, against another implementation in float64."""
    torch = pytest.importorskip("torch")
    q, k, v = inputs(seqlen_q=129)
    out, _ = attention(q, k, v, causal=True)
    q2, k2, v2 = (torch.from_numpy(to_float64(x)).transpose(1, 2) for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(q2, k2, v2, is_causal=True)
    np.testing.assert_allclose(out, theirs.transpose(1, 2).numpy(), atol=1e-12)
