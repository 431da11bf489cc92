"""Attention on host arrays by NumPy, the default where there is no GPU: dense, packed, in caches, and merging.

A sequence that has its own length, or lies in a cache, is a dense call (cpu_dense.py) of its own on its rows alone.
So nothing outside of them, NaN included, reaches its result, and its bits are the same whatever the batch. All new
keys and values are written before the first sequence is computed: sequences that share a page see each other's.

References: merging by LSE, FlashAttention-2 (Dao 2023, arXiv:2307.08691, section 2.3.1); rotary embedding, Su et al.
2021 (arXiv:2104.09864, section 3.2; the halves in place of pairs: GPT-NeoX), at FlashAttention's positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from . import lengths, settings
from .cpu_dense import Array, forward, from_float32, to_float32, visible_keys
from .problem import Problem, Tensors

__all__ = ["combine", "forward", "from_float32", "note", "run", "to_float32"]


def note(call: object) -> None:
    """Log that a call runs here."""
    settings.logger().debug("%s runs on NumPy: its tensors are in host memory", call)


def run(problem: Problem, tensors: Tensors, cache_seqlen: int = -1) -> tuple[Array, Array]:
    """Attention of a checked call over host arrays, sequence by sequence, after new keys are appended in place.

    Safe in many threads that do not append to the same cache. Floating-point warnings are silenced.

    Parameters
    ----------
    problem : what `describe.varlen` or `describe.kvcache` returned for these tensors.
    tensors : arrays that passed `lengths.check`, with any strides; fp16 as float16, bf16 as `ml_dtypes.bfloat16` or as
        its bits in uint16. k and v are written if there is k_new.
    cache_seqlen : keys that the cache holds of each sequence, without the new ones; -1: seqused_k says it, or the
        cache is full.

    Returns
    -------
    out : problem.out_shape, of q's dtype, row-major. 0 in rows that see no key and in rows of no sequence.
    lse : problem.lse_shape float32, natural logarithm; -inf in the same rows.
    """
    out = np.zeros(problem.out_shape, tensors.q.dtype)
    lse = np.full(problem.lse_shape, -np.inf, np.float32)
    cached = cached_keys(problem, tensors, cache_seqlen)
    ends = np.minimum(cached + problem.seqlen_new, lengths.key_slots(problem, tensors))
    with np.errstate(all="ignore"):
        if problem.seqlen_new:
            append(problem, tensors, cached)
        for b in range(problem.batch):
            rows = query_rows(tensors, b)
            q = tensors.q[rows]
            if problem.rotary != "none":
                # Without a mask no query is nearer to a key than another: all take the first one's position.
                step = 0 if problem.mask == "full" else 1
                q = rotate(problem, tensors, q, cached[b] + step * np.arange(len(q)))
            out[rows], own_lse = attend(problem, tensors, q, b, ends[b])
            # Packed: (heads, total_q); else (batch, heads, seqlen_q).
            (lse[:, rows] if problem.total_q >= 0 else lse[rows])[...] = own_lse
    return out, lse


def cached_keys(problem: Problem, tensors: Tensors, cache_seqlen: int) -> Array:
    """(batch,) slots of each sequence that are in use before new keys come; those of the left padding count."""
    if cache_seqlen >= 0:
        return np.full(problem.batch, cache_seqlen)
    if tensors.seqused_k is not None:
        return tensors.seqused_k.astype(np.int64)
    return lengths.key_slots(problem, tensors)


def query_rows(tensors: Tensors, b: int) -> int | slice:
    """Index of sequence b's queries in q and in the output."""
    if tensors.cu_seqlens_q is None:
        return b
    first, last = (int(offset) for offset in tensors.cu_seqlens_q[b : b + 2])
    if tensors.seqused_q is not None:
        last = min(last, first + int(tensors.seqused_q[b]))
    return slice(first, last)


def key_slots(tensors: Tensors, x: Array, b: int, first: int, last: int) -> tuple[Any, ...]:
    """Index of slots [first, last) of sequence b in `x`, its keys or values."""
    if tensors.block_table is not None:
        slots, page_size = np.arange(first, last), x.shape[1]
        return tensors.block_table[b, slots // page_size], slots % page_size
    if tensors.cu_seqlens_k is not None:
        start = int(tensors.cu_seqlens_k[b])
        return (slice(start + first, start + last),)
    row = b if tensors.cache_batch_idx is None else int(tensors.cache_batch_idx[b])
    return row, slice(first, last)


def append(problem: Problem, tensors: Tensors, cached: Array) -> None:
    """Write new keys, rotated, and new values to the slots behind the `cached` (batch,) ones."""
    for b in range(problem.batch):
        first, last = int(cached[b]), int(cached[b]) + problem.seqlen_new
        new = tensors.k_new[b]
        if problem.rotary != "none":
            new = rotate(problem, tensors, new, np.arange(first, last))
        for x, rows in ((tensors.k, new), (tensors.v, tensors.v_new[b])):
            x[key_slots(tensors, x, b, first, last)] = rows.view(x.dtype)


def rotate(problem: Problem, tensors: Tensors, x: Array, positions: Array) -> Array:
    """Rows (n, heads, head_dim) rotated to positions (n,): fp32 arithmetic, rounded once; other columns are copied."""
    half, stop = problem.rotary_dim // 2, problem.rotary_dim
    if problem.rotary == "interleaved":
        left, right = slice(0, stop, 2), slice(1, stop, 2)
    else:
        left, right = slice(0, half), slice(half, stop)
    cos = to_float32(tensors.rotary_cos[positions])[:, None]
    sin = to_float32(tensors.rotary_sin[positions])[:, None]
    a, b = to_float32(x[..., left]), to_float32(x[..., right])
    rotated = x.copy()
    rotated[..., left] = from_float32(a * cos - b * sin, x.dtype)
    rotated[..., right] = from_float32(b * cos + a * sin, x.dtype)
    return rotated


def attend(problem: Problem, tensors: Tensors, q: Array, b: int, end: int) -> tuple[Array, Array]:
    """Queries (n, heads, head_dim) of sequence b over its keys, which end at slot `end`.

    Returns
    -------
    out : (n, heads, head_dim_v).
    lse : (heads, n) float32.
    """
    first = 0 if tensors.leftpad_k is None else int(tensors.leftpad_k[b])
    keys = max(int(end) - first, 0)
    own = dataclasses.replace(problem, batch=1, seqlen_q=len(q), seqlen_k=keys)
    # Keys before every query's window are not fetched. Positions count from the last key, so none of them changes.
    hidden, _ = visible_keys(own, 0, len(q))
    own = dataclasses.replace(own, seqlen_k=keys - hidden)
    first += hidden
    k, v = (
        x[key_slots(tensors, x, b, first, first + own.seqlen_k)][None]
        for x in (tensors.k, tensors.v)
    )
    slopes = tensors.alibi_slopes
    if slopes is not None and slopes.ndim == 2:
        slopes = slopes[b]
    out, lse = forward(own, q[None], k, v, slopes)
    return out[0], lse[0]


def combine(out_partial: Array, lse_partial: Array) -> tuple[Array, Array]:
    """Merge results over parts of the keys, weighted by exp(their LSE - the LSE of all), in fp32.

    Parameters
    ----------
    out_partial : (splits, ..., head_dim_v), of any float dtype (bf16 not as uint16 bits). In rows whose LSE is -inf
        the values do not count, NaN included.
    lse_partial : (splits, ...) float32; splits is at least 1.

    Returns
    -------
    out : (..., head_dim_v) float32. 0 in rows that saw no key in any part.
    lse : (...) float32. -inf in the same rows.
    """
    with np.errstate(all="ignore"):
        maximum = lse_partial.max(axis=0)
        shift = np.where(np.isneginf(maximum), np.float32(0), maximum)
        weights = np.exp(lse_partial - shift)
        # Not NaN where another part's LSE is.
        weights[np.isneginf(lse_partial)] = 0
        seen = weights != 0
        total = weights.sum(axis=0)
        weights /= np.where(total == 0, np.float32(1), total)
        out = np.zeros(out_partial.shape[1:], np.float32)
        for part, weight, where in zip(out_partial, weights, seen[..., None], strict=True):
            np.add(out, weight[..., None] * part.astype(np.float32), out=out, where=where)
        return out, np.ascontiguousarray(shift + np.log(total))
