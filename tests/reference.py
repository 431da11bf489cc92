"""Oracles: naive attention in NumPy, straight from the definition. Nothing here knows rtflash.

`attention` is the truth (float64, a head's whole score matrix, no tiling over keys). `same_dtype`
is what a framework's plain fp16 or bf16 evaluation gives, each intermediate rounded to the dtype:
its error is the yardstick of the accuracy bound in compare.py.
"""

from __future__ import annotations

from typing import Any

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
