"""Oracles: naive attention in NumPy, straight from the definition. Nothing here knows rtflash.

`attention` is the truth (float64, a head's whole score matrix, no tiling over keys). `same_dtype`
is what a framework's plain fp16 or bf16 evaluation gives, each intermediate rounded to the dtype:
its error is the yardstick of the accuracy bound in compare.py. `varlen` and `kvcache` pick every
sequence's rows one by one and hand them to `attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# Query rows of a head evaluated at once: bounds the memory of a long sequence, changes no value.
ROWS = 1024


def to_float64(x: Array) -> Array:
    """fp16, fp32, `ml_dtypes.bfloat16`, or bf16 as raw uint16 bits, exactly."""
    if x.dtype == np.uint16:
        x = (x.astype(np.uint32) * np.uint32(65536)).view(np.float32)
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32).astype(np.float64)


def rounded(x: Array, dtype: str) -> Array:
    """`x` rounded to the nearest "fp16" or "bf16", ties to even, and returned as float64.

    bf16 has 8 significant bits; its subnormals share the spacing 2^-133, and what rounds beyond
    255 * 2^120, its largest finite value, becomes infinite.
    """
    x = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        if dtype == "fp16":
            return x.astype(np.float16).astype(np.float64)
        _, exponent = np.frexp(x)
        spacing = np.ldexp(1.0, np.maximum(exponent - 8, -133))
        result = np.where(np.isfinite(x), np.rint(x / spacing) * spacing, x)
        return np.where(np.abs(result) > np.ldexp(255.0, 120), np.copysign(np.inf, x), result)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    dtype: str | None = None,
) -> tuple[Array, Array]:
    """Attention head by head: exact in float64, or each step rounded to `dtype` if one is given.

    Parameters
    ----------
    q, k, v : (b, sq, h, d), (b, sk, hk, d), (b, sk, hk, dv), of any dtype that `to_float64` takes.
    alibi_slopes : (h,) or (b, h).

    Returns
    -------
    out : (b, sq, h, dv) float64. 0 where no key is seen, or where every seen score is -inf.
    lse : (b, h, sq) float64, natural logarithm. -inf in the same rows; NaN where a seen score is
        NaN or +inf.
    """

    def step(x: Array) -> Array:
        return x if dtype is None else rounded(x, dtype)

    q, k, v = to_float64(q), to_float64(k), to_float64(v)
    (batch, seqlen_q, heads, dim), (_, seqlen_k, heads_k, dim_v) = q.shape, v.shape
    scale = dim**-0.5 if softmax_scale is None else float(softmax_scale)
    out = np.zeros((batch, seqlen_q, heads, dim_v))
    lse = np.full((batch, heads, seqlen_q), -np.inf)
    slopes = np.zeros((batch, heads))
    if alibi_slopes is not None:
        slopes[:] = alibi_slopes
    with np.errstate(all="ignore"):
        for b, h, block in np.ndindex(batch, heads, -(-seqlen_q // ROWS)):
            rows = np.arange(block * ROWS, min((block + 1) * ROWS, seqlen_q))
            kv_head = h // (heads // heads_k)
            key, value = k[b, :, kv_head], v[b, :, kv_head]
            # Exact: scale the product. Rounded: scale the keys first, as FlashAttention's tests do.
            product = q[b, rows, h] @ (key if dtype is None else step(key * scale)).T
            scores = product * scale if dtype is None else step(product)
            if softcap > 0:
                scores = step(step(np.tanh(step(scores / softcap))) * softcap)
            own = rows[:, None] + seqlen_k - seqlen_q
            if alibi_slopes is not None:
                scores = step(scores + step(-slopes[b, h] * np.abs(own - np.arange(seqlen_k))))
            seen = is_seen(own, seqlen_k, window_size[0], 0 if causal else window_size[1])
            probabilities, lse[b, h, rows] = softmax(np.where(seen, scores, -np.inf))
            out[b, rows, h] = step(weighted_sum(step(probabilities), value, seen))
    return out, lse


def same_dtype(q: Array, k: Array, v: Array, dtype: str, **options: Any) -> Array:
    """The output of a plain evaluation in "fp16" or "bf16", (b, sq, h, dv) as float64.

    Keys times scale, scores, every score term, probabilities and output are rounded; the sums of a
    matrix product and of the softmax are not, as on a GPU. `options` are those of `attention`.
    """
    return attention(q, k, v, dtype=dtype, **options)[0]


def is_seen(own: Array, seqlen_k: int, left: int, right: int) -> Array:
    """(rows, seqlen_k) booleans: own - left <= j <= own + right; a bound of -1 does not bound."""
    key = np.arange(seqlen_k)
    seen = np.ones((len(own), seqlen_k), bool)
    if left != -1:
        seen &= own - left <= key
    if right != -1:
        seen &= key <= own + right
    return seen


def softmax(scores: Array) -> tuple[Array, Array]:
    """Softmax over the last axis and the logarithm of its sum; a row of -inf gives 0 and -inf."""
    maximum = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    maximum = np.where(maximum == -np.inf, 0.0, maximum)
    exponentials = np.exp(scores - maximum)
    total = exponentials.sum(axis=-1, keepdims=True)
    return exponentials / np.where(total == 0, 1.0, total), (maximum + np.log(total))[..., 0]


def weighted_sum(probabilities: Array, value: Array, seen: Array) -> Array:
    """probabilities @ value over the seen keys only: an unseen key's 0 * NaN does not count."""
    finite = np.isfinite(value).all(axis=1)
    result = probabilities[:, finite] @ value[finite]
    for j in np.flatnonzero(~finite):
        rows = seen[:, j]
        result[rows] += probabilities[rows, j, None] * value[j]
    return result


def varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    *,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    block_table: Array | None = None,
    alibi_slopes: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Attention of packed sequences.

    Parameters
    ----------
    q : (total_q, h, d); sequence b has rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]), of which the
        first seqused_q[b] count.
    k, v : (total_k, hk, d or dv), or with block_table pages (pages, page_size, hk, d or dv), whose
        keys are counted by the differences of cu_seqlens_k, or fill the table if that is None; of
        them the first seqused_k[b] count.
    block_table : (b, columns).
    alibi_slopes : (h,) or (b, h).
    options : those of `attention`; with `dtype` the plain evaluation.

    Returns
    -------
    out : (total_q, h, dv) float64. 0 in rows of no sequence too.
    lse : (h, total_q) float64. -inf in the same rows.
    """
    q, k, v = to_float64(q), to_float64(k), to_float64(v)
    batch, (total, heads, _) = len(cu_seqlens_q) - 1, q.shape
    out, lse = np.zeros((total, heads, v.shape[-1])), np.full((heads, total), -np.inf)
    for b in range(batch):
        rows = range(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        if seqused_q is not None:
            rows = rows[: seqused_q[b]]
        if cu_seqlens_k is not None:
            keys = range(cu_seqlens_k[b + 1] - cu_seqlens_k[b])
        else:
            keys = range(block_table.shape[1] * k.shape[1])
        if seqused_k is not None:
            keys = keys[: seqused_k[b]]
        if block_table is None:
            places = [(cu_seqlens_k[b] + j,) for j in keys]
        else:
            places = [paged(block_table[b], k.shape[1], j) for j in keys]
        own_out, own_lse = attention(
            q[None, rows],
            pick(k, places)[None],
            pick(v, places)[None],
            alibi_slopes=slopes_of(alibi_slopes, b),
            **options,
        )
        out[rows], lse[:, rows] = own_out[0], own_lse[0]
    return out, lse


class Cached(NamedTuple):
    """Result of a call on a cache, and what the cache must hold after it."""

    out: Array  # (b, sq, h, dv)
    lse: Array  # (b, h, sq)
    k_cache: Array
    v_cache: Array


def kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    dtype: str,
    *,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: Array | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | None = None,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    plain: bool = False,
    **options: Any,
) -> Cached:
    """Attention over a cache, after k and v are appended to a copy of it. All results are float64.

    New key i of sequence b goes to slot cache_seqlens[b] + i, if the cache has that slot. Rotated
    keys and queries are rounded to `dtype`, as a cache and a matrix product's input are. Queries
    are rotated to positions cache_seqlens[b] + i if keys are hidden from them by causal or window,
    else all to cache_seqlens[b].

    Parameters
    ----------
    q : (b, sq, h, d).
    k_cache, v_cache : (rows, slots, hk, d or dv), or with block_table (pages, page_size, ...).
    dtype : "fp16" or "bf16", what the tensors hold.
    k, v : (b, new, hk, d or dv).
    rotary_cos, rotary_sin : (positions, rotary_dim / 2).
    cache_seqlens : (b,), without the new keys, with the left padding; None: all slots are in use.
    plain : whether the plain evaluation in `dtype` is wanted.
    options : those of `attention`.
    """
    q, k_cache, v_cache = to_float64(q), to_float64(k_cache).copy(), to_float64(v_cache).copy()
    batch, seqlen_q = q.shape[:2]
    slots = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    lengths = np.full(batch, slots) if cache_seqlens is None else cache_seqlens
    new = 0 if k is None else k.shape[1]

    def place(b: int, slot: int) -> tuple[int, int]:
        if block_table is not None:
            return paged(block_table[b], k_cache.shape[1], slot)
        return (b if cache_batch_idx is None else cache_batch_idx[b], slot)

    def turned(x: Array, positions: Array) -> Array:
        if rotary_cos is None:
            return x
        cos, sin = to_float64(rotary_cos)[positions], to_float64(rotary_sin)[positions]
        return rotated(x, cos, sin, rotary_interleaved, dtype)

    for b, i in np.ndindex(batch, new):
        slot = lengths[b] + i
        if slot < slots:
            k_cache[place(b, slot)] = turned(to_float64(k[b, i : i + 1]), [slot])[0]
            v_cache[place(b, slot)] = to_float64(v[b, i])
    out, lse = np.zeros((*q.shape[:3], v_cache.shape[-1])), np.zeros((batch, q.shape[2], seqlen_q))
    for b in range(batch):
        first = 0 if cache_leftpad is None else cache_leftpad[b]
        places = [place(b, slot) for slot in range(first, min(lengths[b] + new, slots))]
        steps = np.arange(seqlen_q) if causal or tuple(window_size) != (-1, -1) else 0
        own_q = turned(q[b], np.broadcast_to(lengths[b] + steps, seqlen_q))
        own_out, own_lse = attention(
            own_q[None],
            pick(k_cache, places)[None],
            pick(v_cache, places)[None],
            causal=causal,
            window_size=window_size,
            alibi_slopes=slopes_of(alibi_slopes, b),
            dtype=dtype if plain else None,
            **options,
        )
        out[b], lse[b] = own_out[0], own_lse[0]
    return Cached(out, lse, k_cache, v_cache)


def paged(table: Array, page_size: int, slot: int) -> tuple[int, int]:
    """Page and row of a sequence's slot."""
    return table[slot // page_size], slot % page_size


def pick(x: Array, places: list[tuple[int, ...]]) -> Array:
    """(n, heads, dim) rows of x at the given places."""
    return np.array([x[place] for place in places]).reshape(len(places), *x.shape[-2:])


def slopes_of(alibi_slopes: Array | None, b: int) -> Array | None:
    """(h,) slopes of sequence b."""
    return alibi_slopes if alibi_slopes is None or alibi_slopes.ndim == 1 else alibi_slopes[b]


def rotated(x: Array, cos: Array, sin: Array, interleaved: bool, dtype: str) -> Array:
    """x (n, heads, d) float64 with its first pairs of columns turned by the angles (n, pairs), rounded to dtype.

    Pair i is columns (2i, 2i + 1) if interleaved, else (i, i + pairs).
    """
    result, pairs = x.copy(), cos.shape[1]
    for i in range(pairs):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        turn = cos[:, i] + 1j * sin[:, i]
        product = (x[:, :, one] + 1j * x[:, :, two]) * turn[:, None]
        result[:, :, one] = rounded(product.real, dtype)
        result[:, :, two] = rounded(product.imag, dtype)
    return result
