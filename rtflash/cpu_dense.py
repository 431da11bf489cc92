"""The dense forward on host arrays: tiled online softmax, NumPy. cpu.py runs it for each sequence.

It takes the same tiles as the kernels do. A chunk is a block of batches and kv heads whose keys and
values are converted to fp32 once; within it, a tile of query rows walks over the key tiles that any
of its rows sees, and keeps a running maximum, a running sum and an unnormalised fp32 output per
row. Query heads that share a kv head are rows of the same matrix product, so K and V are never
repeated, and no seqlen_q x seqlen_k array exists. Beyond its result a call needs memory for one
chunk: the fp32 copy of one kv head's visible keys and values, or a few times `CHUNK_ELEMENTS`.

A key hidden by causal or window never reaches the output, whatever its K and V hold, NaN and
infinity included: this is stronger than the kernels' contract, which lets V at such a key reach
rows of the same tile. A visible NaN spreads as in the definition. A row that sees no key, or whose
every visible score is -inf, gives output 0 and LSE -inf.

References: online softmax, Milakov & Gimelshein 2018 (arXiv:1805.02867, algorithm 3); the tiling
and the single division at the end, FlashAttention-2 (Dao 2023, arXiv:2307.08691, algorithm 1);
ALiBi, Press et al. 2021 (arXiv:2108.12409); softcap, Gemma 2 (arXiv:2408.00118, section 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .problem import Problem

Array = NDArray[Any]

# Query rows (over all heads of a group) and keys of a tile. Measured on two x86 cores for head_dim
# 64 and 128: 128 to 512 differ little; below, NumPy's cost per call shows.
TILE_M = 256
TILE_N = 256
# Heads and batches join a chunk until its score tile, or its keys and values, fill so many fp32
# elements (4 MiB, about a core's share of cache).
CHUNK_ELEMENTS = 2**20


class Chunk(NamedTuple):
    """A block of batches x kv heads, its visible keys [first_key, first_key + n) in fp32."""

    keys: Array  # (batches, heads_k, n, head_dim)
    values: Array  # (batches, heads_k, n, head_dim_v)
    first_key: int
    nonfinite: Array  # positions of the keys whose V holds a NaN or infinity in any batch or head
    slopes: Array | None  # (batches, heads_k, group, 1, 1)


def forward(
    problem: Problem, q: Array, k: Array, v: Array, alibi_slopes: Array | None = None
) -> tuple[Array, Array]:
    """Attention of a checked problem over host arrays.

    A pure function, safe in many threads. The same inputs give the same bits, and so does a batch
    whatever the other batches hold. Floating-point warnings are silenced.

    Parameters
    ----------
    problem : what `describe.dense` returned for these arrays.
    q, k, v : (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_k, head_dim) and (batch,
        seqlen_k, heads_k, head_dim_v), with any strides. fp16 as float16; bf16 as
        `ml_dtypes.bfloat16` or as its bits in uint16.
    alibi_slopes : (heads,) or (batch, heads) float32, or None.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v), of q's dtype, row-major.
    lse : (batch, heads, seqlen_q) float32, natural logarithm of the sum of exponentiated scores.
        NaN in a row that sees a score of NaN or +inf, as is its output.
    """
    p = problem
    group = p.heads // p.heads_k
    out = np.empty((p.batch, p.seqlen_q, p.heads, p.head_dim_v), q.dtype)
    lse = np.empty((p.batch, p.heads, p.seqlen_q), np.float32)
    if lse.size == 0:
        return out, lse
    out_grouped = out.reshape(p.batch, p.seqlen_q, p.heads_k, group, p.head_dim_v)
    lse_grouped = lse.reshape(p.batch, p.heads_k, group, p.seqlen_q)
    q_by_head = q.transpose(0, 2, 1, 3)
    rows = tile_rows(p)
    with np.errstate(all="ignore"):
        for batches, heads_k in chunks(p):
            chunk = load_chunk(p, k, v, alibi_slopes, batches, heads_k)
            heads = slice(heads_k.start * group, heads_k.stop * group)
            for first in range(0, p.seqlen_q, rows):
                last = min(first + rows, p.seqlen_q)
                tile = to_float32(q_by_head[batches, heads, first:last])
                tile = tile.reshape(tile.shape[0], -1, group, *tile.shape[2:])
                tile_out, lse_grouped[batches, heads_k, :, first:last] = attend(
                    p, tile, chunk, first
                )
                tile_out = from_float32(tile_out, q.dtype).transpose(0, 3, 1, 2, 4)
                out_grouped[batches, first:last, heads_k] = tile_out
    return out, lse


def tile_rows(problem: Problem) -> int:
    """Query rows of a tile: TILE_M shared by the heads of a group, rows of one product."""
    return max(1, TILE_M // (problem.heads // problem.heads_k))


def chunks(problem: Problem) -> Iterator[tuple[slice, slice]]:
    """(batches, kv heads) blocks that cover the problem, as many heads each as fit."""
    p = problem
    begin, end = visible_keys(p, 0, p.seqlen_q)
    rows = p.heads // p.heads_k * min(tile_rows(p), p.seqlen_q)
    row_elements = p.head_dim + p.head_dim_v
    elements = max(rows * min(TILE_N, p.seqlen_k), max(rows, end - begin) * row_elements)
    pairs = max(1, CHUNK_ELEMENTS // elements)
    step_b, step_h = max(1, pairs // p.heads_k), min(pairs, p.heads_k)
    for batch in range(0, p.batch, step_b):
        for head in range(0, p.heads_k, step_h):
            yield slice(batch, batch + step_b), slice(head, min(head + step_h, p.heads_k))


def load_chunk(
    problem: Problem, k: Array, v: Array, alibi_slopes: Array | None, batches: slice, heads_k: slice
) -> Chunk:
    """The chunk's keys and values, converted; keys that no query sees are not read."""
    begin, end = visible_keys(problem, 0, problem.seqlen_q)
    keys = to_float32(k[batches, begin:end, heads_k].transpose(0, 2, 1, 3))
    values = to_float32(v[batches, begin:end, heads_k].transpose(0, 2, 1, 3))
    nonfinite = begin + np.flatnonzero(~np.isfinite(values).all(axis=(0, 1, 3)))
    slopes = None
    if alibi_slopes is not None:
        by_batch = np.broadcast_to(alibi_slopes, (problem.batch, problem.heads))
        slopes = by_batch.reshape(problem.batch, problem.heads_k, -1, 1, 1)[batches, heads_k]
    return Chunk(keys, values, begin, nonfinite, slopes)


def visible_keys(problem: Problem, first: int, last: int) -> tuple[int, int]:
    """Keys [begin, end) that at least one of the rows [first, last) sees; (0, 0) if none is."""
    p = problem
    diagonal = p.seqlen_k - p.seqlen_q
    begin, end = 0, p.seqlen_k
    if p.window_left >= 0:
        begin = max(begin, first + diagonal - p.window_left)
    if p.window_right >= 0:
        end = min(end, last + diagonal + p.window_right)
    return (begin, end) if begin < end else (0, 0)


def attend(problem: Problem, q: Array, chunk: Chunk, first: int) -> tuple[Array, Array]:
    """Online softmax of a query tile over its key tiles.

    Parameters
    ----------
    q : (batches, heads_k, group, m, head_dim) float32, query rows [first, first + m).

    Returns
    -------
    out : (batches, heads_k, group, m, head_dim_v) float32, normalised.
    lse : (batches, heads_k, group, m) float32.
    """
    maximum = np.full(q.shape[:-1], -np.inf, np.float32)
    total = np.zeros(q.shape[:-1], np.float32)
    out = np.zeros((*q.shape[:-1], problem.head_dim_v), np.float32)
    begin, end = visible_keys(problem, first, first + q.shape[-2])
    for key in range(begin, end, TILE_N):
        stop = min(key + TILE_N, end)
        scores = tile_scores(problem, q, chunk, first, key, stop)
        visible = tile_mask(problem, first, first + q.shape[-2], key, stop)
        if visible is not None:
            np.copyto(scores, -np.inf, where=~visible)
        new_maximum = np.maximum(maximum, scores.max(axis=-1))
        # The one place of the -inf rule: a row that has seen nothing subtracts 0, so that exp gives
        # 0 and not NaN. The stored maximum stays -inf, so that scores far below zero still count
        # when they come.
        shift = np.where(np.isneginf(new_maximum), np.float32(0), new_maximum)
        scores -= shift[..., None]
        weights = np.exp(scores, out=scores)
        rescale = np.exp(maximum - shift)
        total = total * rescale + weights.sum(axis=-1)
        out *= rescale[..., None]
        out += weighted_values(weights, chunk, key, visible)
        maximum = new_maximum
    out /= np.where(total == 0, np.float32(1), total)[..., None]
    return out, maximum + np.log(total)


def tile_scores(problem: Problem, q: Array, chunk: Chunk, first: int, key: int, stop: int) -> Array:
    """Scores (batches, heads_k, group, m, n) of a query tile and keys [key, stop), not masked."""
    keys = chunk.keys[:, :, key - chunk.first_key : stop - chunk.first_key]
    rows = q.reshape(*q.shape[:2], -1, q.shape[-1])
    scores = (rows @ keys.swapaxes(-1, -2)).reshape(*q.shape[:-1], stop - key)
    scores *= np.float32(problem.softmax_scale)
    if problem.softcap > 0:
        scores /= np.float32(problem.softcap)
        np.tanh(scores, out=scores)
        scores *= np.float32(problem.softcap)
    if chunk.slopes is not None:
        own = np.arange(first, first + q.shape[-2])[:, None] + problem.seqlen_k - problem.seqlen_q
        scores -= chunk.slopes * np.abs(own - np.arange(key, stop)).astype(np.float32)
    return scores


def tile_mask(problem: Problem, first: int, last: int, key: int, stop: int) -> Array | None:
    """(rows, keys) booleans, True where the row sees the key; None if all rows see all keys."""
    p = problem
    diagonal = p.seqlen_k - p.seqlen_q
    cut_left = p.window_left >= 0 and key < last - 1 + diagonal - p.window_left
    cut_right = p.window_right >= 0 and stop - 1 > first + diagonal + p.window_right
    if not (cut_left or cut_right):
        return None
    distance = np.arange(key, stop) - np.arange(first, last)[:, None] - diagonal
    visible = np.ones(distance.shape, bool)
    if cut_left:
        visible &= distance >= -p.window_left
    if cut_right:
        visible &= distance <= p.window_right
    return visible


def weighted_values(weights: Array, chunk: Chunk, key: int, visible: Array | None) -> Array:
    """weights @ V for the keys from `key` on, without the 0 * NaN of a hidden key.

    Parameters
    ----------
    weights : (batches, heads_k, group, m, n) float32, 0 where hidden.
    visible : (m, n) booleans, or None if every row sees every key.
    """
    stop = key + weights.shape[-1]
    values = chunk.values[:, :, key - chunk.first_key : stop - chunk.first_key]
    rows = weights.reshape(*weights.shape[:2], -1, weights.shape[-1])
    bad = chunk.nonfinite[(chunk.nonfinite >= key) & (chunk.nonfinite < stop)] - key
    if visible is None or bad.size == 0:
        return (rows @ values).reshape(*weights.shape[:-1], -1)
    bad_values = np.where(np.isfinite(values[:, :, bad]), np.float32(0), values[:, :, bad])
    finite_values = np.where(np.isfinite(values), values, np.float32(0))
    result = (rows @ finite_values).reshape(*weights.shape[:-1], -1)
    for index, column in enumerate(bad):
        seen = visible[:, column]
        bad_value = bad_values[:, :, None, None, index]
        result[..., seen, :] += weights[..., seen, column, None] * bad_value
    return result


def to_float32(x: Array) -> Array:
    """fp16, or bf16 as `ml_dtypes.bfloat16` or uint16 bits, as row-major float32. Exact."""
    if x.dtype == np.float16:
        return x.astype(np.float32, order="C")
    bits = x.view(np.uint16).astype(np.uint32, order="C")
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def from_float32(x: Array, dtype: np.dtype[Any]) -> Array:
    """float32 rounded to nearest even: to float16, or to bf16 as the 2-byte `dtype` holds it.

    NaN stays NaN (quiet, sign and upper payload kept); values beyond the largest finite number
    become infinite.
    """
    if dtype == np.float16:
        return x.astype(np.float16)
    bits = np.ascontiguousarray(x).view(np.uint32)
    upper = bits >> np.uint32(16)
    # Half of the last kept bit, less one where that bit is even: ties carry into odd values only.
    rounded = (bits + np.uint32(0x7FFF) + (upper & np.uint32(1))) >> np.uint32(16)
    quiet_nan = upper | np.uint32(0x0040)
    return np.where(np.isnan(x), quiet_nan, rounded).astype(np.uint16).view(dtype)
