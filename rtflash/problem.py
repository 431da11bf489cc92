"""Problem: one attention call, checked. Every refusal names the argument, what it was and what it must be."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from . import checks, tensor_map
from .cache_checks import (
    append_reasons,
    cache_reasons,
    page_sizes,
    room,
    rotary_reasons,
    rotary_sizes,
    sequence_reasons,
)
from .checks import INTEGERS, MAX_FACTOR, MAX_SEQLEN, Names, alignment, refuse
from .partials import Combine, combine, merge
from .spec import ELEMENT_BYTES, MAX_SPLITS
from .tensor import View

__all__ = [
    "ELEMENT_BYTES",
    "MAX_FACTOR",
    "MAX_SEQLEN",
    "Combine",
    "Problem",
    "Tensors",
    "alignment",
    "combine",
    "dense",
    "kvcache",
    "merge",
    "varlen",
]

PLAIN: Names = MappingProxyType({})


class Tensors(NamedTuple):
    """The tensors of a call: Views on a device, NumPy arrays on the host. None: not given.

    Attributes
    ----------
    q : (batch, seqlen_q, heads, head_dim), or with cu_seqlens_q (total_q, heads, head_dim).
    k, v : keys and values (batch, seqlen_k, heads_k, head_dim), with cu_seqlens_k (total_k, heads_k, head_dim); or the
        whole cache (cache_batch, rows, heads_k, head_dim); or with block_table pages (pages, page_size, heads_k,
        head_dim). v's last size is head_dim_v.
    alibi_slopes : fp32 (heads,) or (batch, heads).
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,): sequence b has rows [b] to [b + 1) of what is packed. With
        block_table only the differences of cu_seqlens_k count.
    seqused_q, seqused_k : int32 (batch,): how many of a sequence's rows, and of its keys without new ones, count.
    leftpad_k : int32 (batch,): slots before a sequence's first key; seqused_k includes them.
    cache_batch_idx : int32 (batch,): the row of the cache that a sequence uses.
    block_table : int32 (batch, columns): the page of each page_size slots of a sequence.
    k_new, v_new : (batch, seqlen_new, heads_k, head_dim), (..., head_dim_v): written to slots seqused_k[b] + i.
    rotary_cos, rotary_sin : (positions, rotary_dim / 2), of q's dtype.
    """

    q: Any
    k: Any
    v: Any
    alibi_slopes: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    leftpad_k: Any = None
    cache_batch_idx: Any = None
    block_table: Any = None
    k_new: Any = None
    v_new: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes and features of an attention call. Addresses and what lies on a device are no part of it.

    Attributes
    ----------
    batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v : sizes of q (batch, seqlen_q, heads, head_dim),
        k (batch, seqlen_k, heads_k, head_dim) and v (batch, seqlen_k, heads_k, head_dim_v). Where sequences have their
        own lengths, seqlen_q and seqlen_k are the most that one can have.
    dtype : "fp16" or "bf16".
    softmax_scale : factor of q.k before the softmax; any finite number.
    window_left, window_right : keys seen before and after a query's own bottom-right position; -1 = unbounded.
        Causal is window_right == 0. With lengths of their own, sequences of at most one query have no right bound: it
        would hide nothing.
    softcap : cap of cap * tanh(score / cap); 0 = off.
    alibi : whether -slope * abs(distance) is added.
    align : bytes of the widest load that the addresses and strides of q, k, v allow.
    boxes : whether TMA can copy q, k and v.
    total_q, total_k : rows of packed q, and of packed k and v; -1: not packed.
    ragged : whether any of `checks.INTEGERS` is given.
    page_size, columns, pages : slots of a page, columns of the block table, and how many pages there are; 0: no pages.
    cache_batch : rows of a cache without pages; 0: no such cache.
    seqlen_new : keys appended to each sequence.
    rotary : "none", or the pairs of columns that are rotated: "interleaved" (2i, 2i + 1), "halves" (i, i + rotary_dim
        / 2).
    rotary_dim, positions : columns that are rotated, rows of the tables.
    num_splits : parts of the keys that are computed apart and merged: 1 = off, 2..256, 0 = a heuristic decides.
    leftpad : whether slots before a sequence's first key are left out.
    max_seqlen_q : of packed q, what the caller says that no sequence exceeds; seqlen_q is at least 1 all the same, and
        no more than total_q.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    alibi: bool
    align: int
    boxes: bool = False
    total_q: int = -1
    total_k: int = -1
    ragged: bool = False
    page_size: int = 0
    columns: int = 0
    pages: int = 0
    cache_batch: int = 0
    seqlen_new: int = 0
    rotary: str = "none"
    rotary_dim: int = 0
    positions: int = 0
    num_splits: int = 0
    leftpad: bool = False
    max_seqlen_q: int = -1

    @property
    def mask(self) -> str:
        """The Spec's mask: "full", "causal" or "window"."""
        if self.window_left == -1 and self.window_right in (-1, 0):
            return "causal" if self.window_right == 0 else "full"
        return "window"

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        rows = (self.total_q,) if self.total_q >= 0 else (self.batch, self.seqlen_q)
        return (*rows, self.heads, self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the LSE: (batch, heads, seqlen_q), packed (heads, total_q)."""
        if self.total_q >= 0:
            return (self.heads, self.total_q)
        return (self.batch, self.heads, self.seqlen_q)


class Options(NamedTuple):
    """Options of every call, read; `reasons`: why some are refused."""

    scale: float | None
    left: int
    right: int
    cap: float
    splits: int
    reasons: list[str]


def options(
    softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, num_splits: Any
) -> Options:
    """The options that every call has. A wrong type, or a window that is none, raises at once."""
    cap = checks.real("softcap", softcap)
    left, right = checks.window("window_size", window_size, checks.truth("causal", causal))
    reasons = []
    if cap != 0.0 and not 1.0 / MAX_FACTOR <= cap <= MAX_FACTOR:
        reasons.append(f"softcap is {softcap!r}; it must be 0 (off) or in 2^-60..2^60")
    scale = None if softmax_scale is None else checks.real("softmax_scale", softmax_scale)
    if scale is not None and not abs(scale) <= MAX_FACTOR:
        reasons.append(f"softmax_scale is {softmax_scale!r}; it must be in -2^60..2^60")
    splits = checks.integer("num_splits", num_splits)
    reasons += checks.between("num_splits", splits, 0, MAX_SPLITS)
    return Options(scale, left, right, cap, splits, reasons)


def describe(tensors: Tensors, given: Options, **sizes: Any) -> Problem:
    """The Problem of checked tensors."""
    q, k, v = tensors.q, tensors.k, tensors.v
    return Problem(
        heads=q.shape[-2],
        heads_k=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=q.dtype,
        softmax_scale=q.shape[-1] ** -0.5 if given.scale is None else given.scale,
        window_left=given.left,
        window_right=-1 if sizes.get("ragged") and sizes["seqlen_q"] == 1 else given.right,
        softcap=given.cap,
        alibi=tensors.alibi_slopes is not None,
        align=alignment(q, k, v),
        boxes=all(map(tensor_map.fits, (q, k, v))),
        leftpad=tensors.leftpad_k is not None,
        num_splits=given.splits,
        **sizes,
    )


def dense(
    q: View,
    k: View,
    v: View,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: View | None = None,
    num_splits: int = 0,
    names: Names = PLAIN,
) -> Problem:
    """Check a dense call and describe it.

    `names` says what the caller calls the tensors, here and below.

    Raises
    ------
    TypeError
        An option is not a number, or a dtype is not one that the kernels take.
    ValueError
        Shapes, devices or option values do not fit; the message lists every reason.
    NotImplementedError
        dropout_p > 0.
    """
    checks.no_dropout(dropout_p)
    given = options(softmax_scale, causal, window_size, softcap, num_splits)
    tensors = Tensors(q, k, v, alibi_slopes)
    checks.check_dtypes(tensors, names)
    axes = ("batch", "seqlen", "heads", "head_dim")
    reasons = checks.rank_reasons(tensors, names, dict.fromkeys(checks.CORE, axes))
    if not reasons:
        batch = q.shape[0]
        reasons = checks.attention_reasons(tensors, names, batch, (batch, "seqlen_k"))
        for name, x in checks.named(tensors, names, checks.CORE).items():
            reasons += checks.between(f"{name}'s seqlen", x.shape[1], 0, MAX_SEQLEN)
        reasons += checks.device_reasons(checks.named(tensors, names))
    refuse(reasons + given.reasons)
    return describe(tensors, given, batch=batch, seqlen_q=q.shape[1], seqlen_k=k.shape[1])


def varlen(
    tensors: Tensors,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
    names: Names = PLAIN,
) -> Problem:
    """Check a call on packed sequences and describe it: shapes only, for what the arrays hold see lengths.py.

    Raises as `dense` does.
    """
    checks.no_dropout(dropout_p)
    given = options(softmax_scale, causal, window_size, softcap, num_splits)
    longest = {
        names.get(field, field): checks.integer(names.get(field, field), value)
        for field, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    }
    checks.check_dtypes(tensors, names)
    paged = tensors.block_table is not None
    packed = ("total", "heads", "head_dim")
    places = ("pages", "page_size") if paged else ("total_k",)
    reasons = checks.rank_reasons(
        tensors,
        names,
        {
            "q": packed,
            **dict.fromkeys("kv", (*places, *packed[1:]) if paged else packed),
            "cu_seqlens_q": ("batch + 1",),
            "block_table": ("batch", "columns"),
        },
    )
    if reasons:
        refuse(reasons + given.reasons)
    batch = tensors.cu_seqlens_q.shape[0] - 1
    if batch < 0:
        reasons.append(
            f"{names.get('cu_seqlens_q', 'cu_seqlens_q')} has shape (0,); it must be (batch + 1,)"
        )
    if tensors.cu_seqlens_k is None and not paged:
        reasons.append("cu_seqlens_k is None; it must be given where there is no block_table")
    elif tensors.cu_seqlens_k is None and tensors.seqused_k is None:
        reasons.append(
            "cu_seqlens_k and seqused_k are None; with block_table one of them must give the keys' lengths"
        )
    reasons += checks.attention_reasons(tensors, names, batch, places)
    reasons += checks.mismatch(tensors, names, "cu_seqlens_k", (batch + 1,), "cu_seqlens_q")
    reasons += sequence_reasons(tensors, names, batch)
    for name, value in longest.items():
        if value < 0:
            reasons.append(f"{name} is {value}; it must be at least 0")
    total_q, rows = tensors.q.shape[0], room(tensors)
    if batch == 0 and total_q > 0:
        name = names.get("cu_seqlens_q", "cu_seqlens_q")
        reasons.append(
            f"{name} has shape (1,), no sequence, and there are {total_q} rows of queries"
        )
    # No sequence is longer than the tensor that holds it, whatever bound the caller knows. Rows of no sequence are
    # still to be cleared.
    seqlen_q, seqlen_k = min(max(max_seqlen_q, 1), total_q), min(max_seqlen_k, rows)
    for name, value in zip(longest, (seqlen_q, seqlen_k), strict=False):
        reasons += [] if value < 0 else checks.between(name, value, 0, MAX_SEQLEN)
    reasons += checks.device_reasons(checks.named(tensors, names))
    refuse(reasons + given.reasons)
    return describe(
        tensors,
        given,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        total_q=total_q,
        total_k=-1 if paged else rows,
        ragged=True,
        max_seqlen_q=int(max_seqlen_q),
        **page_sizes(tensors),
    )


def kvcache(
    tensors: Tensors,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    counted: bool = False,
    names: Names = PLAIN,
) -> Problem:
    """Check a call on a key-value cache and describe it: shapes only, for what the arrays hold see lengths.py.

    `counted`: cache_seqlens is one int for all sequences, and so no tensor. Raises as `dense` does.
    """
    given = options(softmax_scale, causal, window_size, softcap, num_splits)
    unbounded = (given.left, given.right) == (-1, -1)
    if unbounded and tensors.rotary_cos is not None and tuple(window_size) != (-1, -1):
        # A window that hides nothing is still one: it says to which positions queries are rotated.
        given = given._replace(right=MAX_SEQLEN)
    interleaved = checks.truth("rotary_interleaved", rotary_interleaved)
    checks.check_dtypes(tensors, names)
    paged = tensors.block_table is not None
    places = ("pages", "page_size") if paged else ("batch_cache", "seqlen_cache")
    cached = (*places, "heads_k", "head_dim")
    new = ("batch", "seqlen_new", "heads_k", "head_dim")
    reasons = checks.rank_reasons(
        tensors,
        names,
        {
            "q": ("batch", "seqlen_q", "heads", "head_dim"),
            **dict.fromkeys("kv", cached),
            **dict.fromkeys(("k_new", "v_new"), new),
            **dict.fromkeys(("rotary_cos", "rotary_sin"), ("positions", "rotary_dim / 2")),
            "block_table": ("batch", "columns"),
        },
    )
    if reasons:
        refuse(reasons + given.reasons)
    q, batch = tensors.q, tensors.q.shape[0]
    reasons += checks.attention_reasons(tensors, names, batch, places)
    reasons += sequence_reasons(tensors, names, batch)
    reasons += cache_reasons(tensors, names, batch)
    reasons += append_reasons(tensors, names, counted)
    reasons += rotary_reasons(tensors, names)
    reasons += checks.between("q's seqlen", q.shape[1], 0, MAX_SEQLEN)
    reasons += checks.between("the cache's capacity", room(tensors), 0, MAX_SEQLEN)
    reasons += checks.device_reasons(checks.named(tensors, names))
    refuse(reasons + given.reasons)
    return describe(
        tensors,
        given,
        batch=batch,
        seqlen_q=q.shape[1],
        seqlen_k=room(tensors),
        ragged=any(getattr(tensors, field) is not None for field in INTEGERS),
        cache_batch=0 if paged else tensors.k.shape[0],
        seqlen_new=0 if tensors.k_new is None else tensors.k_new.shape[1],
        **page_sizes(tensors),
        **rotary_sizes(tensors, interleaved),
    )
