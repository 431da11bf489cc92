"""The public functions for packed sequences (varlen) and key-value caches."""

from __future__ import annotations

from numbers import Integral, Number
from typing import Any

import numpy as np

from . import describe, tensor
from .api import KV, QKV
from .call import Signature, Window, attend, pair, parts
from .checks import Names
from .describe import PLAIN
from .problem import Problem, Tensors


def _check_varlen(tensors: Tensors, options: tuple[Any, ...], names: Names) -> Problem:
    max_q, max_k, dropout_p, softmax_scale, causal, window_size, softcap, num_splits = options
    return describe.varlen(
        tensors,
        max_q,
        max_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        num_splits=num_splits,
        names=names,
    )


def _check_kvcache(tensors: Tensors, options: tuple[Any, ...], names: Names) -> Problem:
    softmax_scale, causal, window_size, softcap, interleaved, num_splits, counted = options
    return describe.kvcache(
        tensors,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=interleaved,
        num_splits=num_splits,
        counted=counted,
        names=names,
    )


def _varlen(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, slopes: Any, used_q: Any, used_k: Any, table: Any
) -> Tensors:
    return Tensors(q, k, v, slopes, cu_q, cu_k, used_q, used_k, block_table=table)


def _varlen_kv(
    q: Any, kv: Any, cu_q: Any, cu_k: Any, slopes: Any, used_q: Any, used_k: Any
) -> Tensors:
    k, v = parts("kv", kv, 2, "total_k")
    return Tensors(q, k, v, slopes, cu_q, cu_k, used_q, used_k)


def _varlen_qkv(qkv: Any, cu_seqlens: Any, slopes: Any, used_q: Any, used_k: Any) -> Tensors:
    q, k, v = parts("qkv", qkv, 3, "total")
    return Tensors(q, k, v, slopes, cu_seqlens, cu_seqlens, used_q, used_k)


def _kvcache(
    q: Any, k: Any, v: Any, used: Any, k_new: Any, v_new: Any, table: Any, cos: Any = None, sin: Any = None,
    rows: Any = None, pad: Any = None, slopes: Any = None,
) -> Tensors:  # fmt: skip
    return Tensors(
        q, k, v, slopes, None, None, None, used, pad, rows, table, k_new, v_new, cos, sin
    )


def _cached_keys(cache_seqlens: Any) -> int:
    """cache_seqlens, which is no tensor, as an int."""
    length = cache_seqlens
    if type(length) is not int:
        if isinstance(length, bool) or not isinstance(length, Integral):
            raise TypeError(
                f"cache_seqlens is a {type(length).__name__}; it must be an int, or an int32 tensor of q's library"
            )
        length = int(length)
    if length < 0:
        raise ValueError(f"cache_seqlens is {length}; it must be at least 0")
    return length


SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "seqused_q", "seqused_k")
VARLEN = Signature(
    "flash_attn_varlen_func", ("q", "k", "v", *SEQUENCES, "block_table"), 4, _varlen, _check_varlen, PLAIN,
)  # fmt: skip
VARLEN_KV = Signature(
    "flash_attn_varlen_kvpacked_func", ("q", "kv", *SEQUENCES), 3, _varlen_kv, _check_varlen, KV
)
VARLEN_QKV = Signature(
    "flash_attn_varlen_qkvpacked_func", ("qkv", "cu_seqlens", *SEQUENCES[2:]), 2, _varlen_qkv, _check_varlen,
    {
        **QKV, "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens",
        "max_seqlen_q": "max_seqlen", "max_seqlen_k": "max_seqlen",
    },
)  # fmt: skip
CACHE: Names = {
    "k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v", "seqused_k": "cache_seqlens", "leftpad_k":
    "cache_leftpad",
}  # fmt: skip
CACHE_INPUTS = ("q", "k_cache", "v_cache", "cache_seqlens", "k", "v")
RARE = ("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "alibi_slopes")
LSE = "return_softmax_lse"
WITH_CACHE = "flash_attn_with_kvcache"
KVCACHE = Signature(
    WITH_CACHE, (*CACHE_INPUTS, "block_table", *RARE), 3, _kvcache, _check_kvcache, CACHE, wants_lse=LSE,
)  # fmt: skip
# FlashAttention-3 calls the block table page_table.
KVCACHE_PAGES = Signature(
    WITH_CACHE, (*CACHE_INPUTS, "page_table", *RARE), 3, _kvcache, _check_kvcache,
    {**CACHE, "block_table": "page_table"}, wants_lse=LSE,
)  # fmt: skip


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    num_splits: int = 0,
) -> Any:
    """`flash_attn_func` of sequences of different lengths, packed one behind the other.

    Queries of sequence b are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q; its keys likewise. Either may be none.

    What lies on the host is checked. Offsets, lengths and tables on a GPU are not read by the host: the kernels cut
    them off at the ends of the tensors, so that wrong ones give wrong results, and no access outside.

    Parameters
    ----------
    q : (total_q, heads, head_dim), fp16 or bf16, of any library.
    k : (total_k, heads_k, head_dim); with block_table pages (pages, page_size, heads_k, head_dim), which are never
        copied: their inner stride must be 1. Any page_size.
    v : as k, with head_dim_v.
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,). With block_table only the differences of cu_seqlens_k count, and
        None says that seqused_k gives the lengths.
    max_seqlen_q, max_seqlen_k : int, no less than the longest sequence.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic : as flash_attn_func's, for each
        sequence with its own lengths; alibi_slopes (heads,) or (batch, heads).
    return_attn_probs : return (out, softmax_lse, S_dmask).
    block_table : int32 (batch, columns): key i of sequence b is row i % page_size of page block_table[b, i //
        page_size]. Entries past a sequence's length may be anything.
    seqused_q, seqused_k : int32 (batch,): only so many of a sequence's queries, and of its keys, count.
    num_splits : see flash_attn_func.

    Returns
    -------
    out : (total_q, heads, head_dim_v). 0 in rows that see no key, and in rows of no sequence: past
        cu_seqlens_q[-1], or past seqused_q.
    softmax_lse : (heads, total_q) fp32, -inf in the same rows. Only with return_attn_probs.
    S_dmask : None. Only with return_attn_probs.

    Raises
    ------
    As flash_attn_func.
    """
    options = (
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, pair(window_size), softcap, num_splits,
    )  # fmt: skip
    inputs = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, seqused_q, seqused_k, block_table,
    )  # fmt: skip
    out, lse = attend(VARLEN, inputs, options, return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    num_splits: int = 0,
) -> Any:
    """`flash_attn_varlen_func` of keys and values in one tensor; no pages.

    Parameters
    ----------
    q : (total_q, heads, head_dim), fp16 or bf16, of any library.
    kv : (total_k, 2, heads_k, head_dim): keys are kv[:, 0], values kv[:, 1], both read in place.
    cu_seqlens_q, cu_seqlens_k : int32 (batch + 1,).
    max_seqlen_q, max_seqlen_k : int, no less than the longest sequence.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes : as flash_attn_varlen_func's.
    deterministic, return_attn_probs, seqused_q, seqused_k, num_splits : as flash_attn_varlen_func's.

    Returns
    -------
    As flash_attn_varlen_func.

    Raises
    ------
    As flash_attn_func.
    """
    options = (
        max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, pair(window_size), softcap, num_splits,
    )  # fmt: skip
    inputs = (q, kv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, seqused_q, seqused_k)
    out, lse = attend(VARLEN_KV, inputs, options, return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    num_splits: int = 0,
) -> Any:
    """`flash_attn_varlen_func` of queries, keys and values in one tensor; no pages.

    Parameters
    ----------
    qkv : (total, 3, heads, head_dim), fp16 or bf16, of any library: queries are qkv[:, 0], keys and values the next
        two, all read in place.
    cu_seqlens : int32 (batch + 1,), of queries and keys.
    max_seqlen : int, no less than the longest sequence.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes : as flash_attn_varlen_func's.
    deterministic, return_attn_probs, seqused_q, seqused_k, num_splits : as flash_attn_varlen_func's.

    Returns
    -------
    As flash_attn_varlen_func: out (total, heads, head_dim).

    Raises
    ------
    As flash_attn_func.
    """
    options = (
        max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, pair(window_size), softcap, num_splits,
    )  # fmt: skip
    inputs = (qkv, cu_seqlens, alibi_slopes, seqused_q, seqused_k)
    out, lse = attend(VARLEN_QKV, inputs, options, return_attn_probs)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Any = None,
) -> Any:
    """Attention over the keys and values of a cache, after k and v have been written into it (FlashAttention-2).

    New key i of sequence b goes to slot cache_seqlens[b] + i of the cache, which is changed in place (of JAX arrays a
    new one is returned). Attention then sees slots cache_leftpad[b] to cache_seqlens[b] + seqlen_new. With rotary
    tables new keys are rotated before they are written, key i to position cache_seqlens[b] + i; query i is rotated to
    position cache_seqlens[b] + i if the call is causal or has a window (a bound other than -1, however wide), else to
    cache_seqlens[b]. The caches must share no elements with each other, with q, k or v, or with the tensors of lengths,
    indices and tables.

    What lies on the host is checked, an int as cache_seqlens too. Lengths, indices and tables on a GPU are not read by
    the host: there, keys that do not fit the cache, or whose page does not exist, are not written, and nothing is read
    or written outside the tensors. A sequence whose cache_batch_idx is out of range sees no key.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim), fp16 or bf16, of any library.
    k_cache : (batch_cache, seqlen_cache, heads_k, head_dim), any strides but an inner one of 1: it is never copied.
        With block_table pages (pages, page_size, heads_k, head_dim), of any size from 1.
    v_cache : as k_cache, with head_dim_v.
    k, v : (batch, seqlen_new, heads_k, head_dim), (batch, seqlen_new, heads_k, head_dim_v): to be appended; both or
        neither. JAX arrays are never changed: with k the caches are results.
    rotary_cos, rotary_sin : (positions, rotary_dim / 2) of q's dtype; rotary_dim <= head_dim, and a position for each
        slot that a sequence has. Only with k and v. (RoFormer: Su et al., 2021.)
    cache_seqlens : int, or int32 (batch,): keys in the cache before the call, counted from slot 0; None: the whole
        cache.
    cache_batch_idx : int32 (batch,): row of the cache for each sequence; None: row b. Not with block_table. Two
        sequences that append to one row leave either's keys there.
    cache_leftpad : int32 (batch,): slots before a sequence's first key.
    block_table : int32 (batch, columns): slot i of sequence b is row i % page_size of page block_table[b, i //
        page_size]. Entries past a sequence's length may be anything.
    softmax_scale, causal, window_size, softcap, alibi_slopes : as flash_attn_func's; query i of a sequence with n keys
        stands at key i + n - seqlen_q.
    rotary_interleaved : whether columns 2i and 2i + 1 are a pair, or i and i + rotary_dim / 2.
    num_splits : see flash_attn_func.
    return_softmax_lse : return (out, softmax_lse).
    page_table : block_table by FlashAttention-3's name.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v). 0 in rows that see no key.
    softmax_lse : (batch, heads, seqlen_q) fp32, natural logarithm; -inf in the same rows. Only with return_softmax_lse.
    k_cache, v_cache : as the arguments. Only of JAX arrays, with k: the call returns (out, k_cache, v_cache), or (out,
        softmax_lse, k_cache, v_cache), and leaves its arguments as they are.

    Raises
    ------
    As flash_attn_func.
    """
    signature = KVCACHE
    if page_table is not None:
        if block_table is not None:
            raise ValueError("block_table and page_table are both given; they are one thing")
        signature, block_table = KVCACHE_PAGES, page_table
    length = -1
    # Types are compared first: isinstance takes 0.3 us to find that a tensor is no integer.
    if type(cache_seqlens) is not type(q) and isinstance(
        cache_seqlens, (int, str, Number, np.bool_)
    ):
        length, cache_seqlens = _cached_keys(cache_seqlens), None
    options = (
        softmax_scale, causal, pair(window_size), softcap, rotary_interleaved, num_splits, length >= 0,
    )  # fmt: skip
    inputs: tuple[Any, ...] = (q, k_cache, v_cache, cache_seqlens, k, v, block_table)
    # Most calls have none of these, each of which costs 0.1 us even so.
    if not (rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is alibi_slopes is None):
        inputs += (rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes)
    if k is not None and not tensor.dynamo_traces(q) and tensor.framework(q, "q").name == "jax":
        from . import jax_ops

        out, lse, *caches = jax_ops.append(signature, inputs, options, return_softmax_lse, length)
        return (out, lse, *caches) if return_softmax_lse else (out, *caches)
    out, lse = attend(signature, inputs, options, return_softmax_lse, length)
    return (out, lse) if return_softmax_lse else out
