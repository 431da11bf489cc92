"""Problem: one attention call, as its kernels and its grid need to know it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .partials import Combine

__all__ = ["Combine", "Problem", "Tensors"]


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
    boxes: bool
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
