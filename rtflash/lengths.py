"""Lengths, offsets, indices and tables on the host: what they hold is checked before any work; and caches' memory.

Those on a device are never read by the host: the kernels cut them off at the tensors' ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import Names, refuse
from .problem import Problem, Tensors

Array = NDArray[Any]

# Of np.shares_memory, about a millisecond; strides that nest, those of any layout in use, need 1. (Any: its stubs take
# no bound.)
MAX_WORK: Any = 10**4


def check_length(problem: Problem, cache_seqlen: int, name: str = "cache_seqlens") -> None:
    """Raise ValueError unless a cache that holds `cache_seqlen` keys of each sequence has room for the new ones."""
    most = longest_cached(problem, problem.seqlen_k)
    if not 0 <= cache_seqlen <= most:
        raise ValueError(f"{name} is {cache_seqlen}; {within(0, most)}{reason(problem)}")


def within(low: int, high: int) -> str:
    """What an entry must be; the range may be empty."""
    return f"it must be in {low}..{high}" if low <= high else "nothing fits"


def longest_cached(problem: Problem, room: int | Array) -> Any:
    """The most keys that sequences with `room` slots may have before the call's own are appended."""
    most = room - problem.seqlen_new
    if problem.rotary != "none":
        # Queries are rotated to the positions from there on, all to the first one if nothing hides keys from them.
        queries = min(problem.seqlen_q, 1) if problem.mask == "full" else problem.seqlen_q
        last = problem.positions - max(queries, problem.seqlen_new)
        most = min(most, last) if isinstance(most, int) else np.minimum(most, last)
    return most


def reason(problem: Problem) -> str:
    """What leaves less than a sequence's slots."""
    new = problem.seqlen_new
    parts = [f"{new} new key{'s' * (new > 1)}"] if new else []
    if problem.rotary != "none":
        parts.append(f"{problem.seqlen_q} queries and {problem.positions} rotary positions")
    return f" with {' and '.join(parts)}" if parts else ""


def check(problem: Problem, tensors: Tensors, cache_seqlen: int, names: Names) -> None:
    """Check what the arrays of a call on the host hold.

    Parameters
    ----------
    problem, tensors, cache_seqlen : a call whose shapes are right; `tensors` are NumPy arrays.
    names : what the caller calls them.

    Raises
    ------
    ValueError
        Offsets that decrease or do not fit the rows, lengths beyond what holds them, indices of no page or no row of
        the cache, a cache that shares memory with what is appended or with the other; the message lists every reason.
    """
    if cache_seqlen >= 0:
        check_length(problem, cache_seqlen, names.get("seqused_k", "seqused_k"))
    reasons = offset_reasons(problem, tensors, names)
    if not reasons:
        reasons = query_reasons(problem, tensors, names)
        slots = key_slots(problem, tensors)
        used = np.full(problem.batch, cache_seqlen) if cache_seqlen >= 0 else slots
        if tensors.seqused_k is not None:
            used = tensors.seqused_k.astype(np.int64)
            most = longest_cached(problem, slots)
            reasons += outside(tensors, names, "seqused_k", 0, most, reason(problem))
        given = cache_seqlen >= 0 or tensors.seqused_k is not None
        keys = np.clip(used + problem.seqlen_new, 0, slots) if given else slots
        reasons += longest_reasons(problem, tensors, names, keys)
        # Of lengths below 0 there is a reason already.
        pads = np.maximum(used, 0)
        reasons += outside(tensors, names, "leftpad_k", 0, pads, ", the keys that it is part of")
        rows = "" if problem.cache_batch else f": {names.get('k', 'k')} has no row"
        reasons += outside(tensors, names, "cache_batch_idx", 0, problem.cache_batch - 1, rows)
        reasons += overlap_reasons(tensors, names)
        if not reasons:
            reasons = table_reasons(problem, tensors, names, keys)
    # Packed tensors share offsets and bounds.
    refuse(list(dict.fromkeys(reasons)))


def key_slots(problem: Problem, tensors: Tensors) -> Array:
    """(batch,) slots that each sequence has for keys."""
    if tensors.cu_seqlens_k is not None:
        return np.diff(tensors.cu_seqlens_k.astype(np.int64))
    room = problem.columns * problem.page_size if problem.page_size else problem.seqlen_k
    return np.full(problem.batch, room)


def outside(
    tensors: Tensors, names: Names, field: str, low: int, high: Any, because: str = ""
) -> list[str]:
    """Why the first entry of a (batch,) array that is not in low..high is refused, if there is one."""
    values = getattr(tensors, field)
    if values is None:
        return []
    high = np.broadcast_to(high, values.shape)
    bad = np.flatnonzero((values < low) | (values > high))
    if bad.size == 0:
        return []
    b, name = bad[0], names.get(field, field)
    return [f"{name}[{b}] is {values[b]}; {within(low, high[b])}{because}"]


def offset_reasons(problem: Problem, tensors: Tensors, names: Names) -> list[str]:
    """Why offsets are refused. Of those of pages' keys only the differences count."""
    reasons = []
    fields = (("cu_seqlens_q", "q", problem.total_q), ("cu_seqlens_k", "k", problem.total_k))
    for field, of, rows in fields:
        offsets, name = getattr(tensors, field), names.get(field, field)
        if offsets is None:
            continue
        falls = np.flatnonzero(offsets[1:] < offsets[:-1])
        if falls.size:
            b = falls[0] + 1
            reasons.append(
                f"{name}[{b}] is {offsets[b]}, after {offsets[b - 1]}; it must not decrease"
            )
        if rows >= 0 and offsets[0] != 0:
            reasons.append(f"{name}[0] is {offsets[0]}; it must be 0")
        if rows >= 0 and offsets[-1] > rows:
            reasons.append(
                f"{name}[{offsets.size - 1}] is {offsets[-1]}; it must be at most {rows}, the rows of"
                f" {names.get(of, of)}"
            )
    return reasons


def query_reasons(problem: Problem, tensors: Tensors, names: Names) -> list[str]:
    """Why the queries' lengths are refused."""
    if tensors.cu_seqlens_q is None:
        return []
    rows = np.diff(tensors.cu_seqlens_q.astype(np.int64))
    reasons = outside(tensors, names, "seqused_q", 0, rows, ", the rows of its sequence")
    if rows.size and rows.max() > problem.max_seqlen_q:
        name = names.get("max_seqlen_q", "max_seqlen_q")
        reasons.append(
            f"{name} is {problem.max_seqlen_q}; it must be at least {rows.max()}, as long as the longest sequence"
        )
    return reasons


def longest_reasons(problem: Problem, tensors: Tensors, names: Names, keys: Array) -> list[str]:
    """Why `keys` of each sequence are more than the call has room for."""
    if tensors.cu_seqlens_q is None or keys.size == 0 or keys.max() <= problem.seqlen_k:
        return []
    room = problem.columns * problem.page_size
    if problem.page_size and keys.max() > room:
        name = names.get("block_table", "block_table")
        return [f"{name} has room for {room} keys of a sequence; the longest has {keys.max()}"]
    name = names.get("max_seqlen_k", "max_seqlen_k")
    return [
        f"{name} is {problem.seqlen_k}; it must be at least {keys.max()}, as long as the longest sequence"
    ]


def table_reasons(problem: Problem, tensors: Tensors, names: Names, keys: Array) -> list[str]:
    """Why entries of the block table that slots in use need are refused; others may be anything."""
    table = tensors.block_table
    if table is None:
        return []
    first = np.zeros_like(keys) if tensors.leftpad_k is None else tensors.leftpad_k.astype(np.int64)
    column, size = np.arange(problem.columns), problem.page_size
    last = np.where(first < keys, keys, 0)
    needed = (column >= first[:, None] // size) & (column * size < last[:, None])
    bad = np.argwhere(needed & ((table < 0) | (table >= problem.pages)))
    if bad.size == 0:
        return []
    name, (b, j) = names.get("block_table", "block_table"), bad[0]
    none = "" if problem.pages else f": {names.get('k', 'k')} has no page"
    return [
        f"{name}[{b}, {j}] is {table[b, j]}, and keys of sequence {b} lie there;"
        f" {within(0, problem.pages - 1)}{none}"
    ]


def overlap_reasons(tensors: Tensors, names: Names) -> list[str]:
    """Which arrays of an append share elements with a cache that is written, as far as NumPy soon knows."""
    if tensors.k_new is None or tensors.k_new.size == 0:
        return []
    pairs = ("k", "v"), ("k", "k_new"), ("k", "v_new"), ("v", "k_new"), ("v", "v_new")
    return [
        f"{names.get(one, one)} and {names.get(other, other)} share memory; they must not, since a cache is written"
        for one, other in pairs
        if share(getattr(tensors, one), getattr(tensors, other))
    ]


def share(one: Array, other: Array) -> bool:
    """Whether arrays have an element in common; False where that is too hard to tell."""
    try:
        return np.shares_memory(one, other, max_work=MAX_WORK)
    except RuntimeError:  # NumPy's TooHardError
        return False
