"""Checked calls: tensors and options -> Problem. Every refusal names the argument, what it was and what it must be."""

from __future__ import annotations

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
from .problem import Problem, Tensors
from .spec import MAX_SPLITS
from .tensor import View

PLAIN: Names = MappingProxyType({})


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
        reasons += checks.size_reasons(tensors, names)
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
    reasons += checks.size_reasons(tensors, names)
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
    reasons += checks.size_reasons(tensors, names)
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
