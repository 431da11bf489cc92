"""Problem: one attention call, checked. Every refusal names the argument, what it was and what it must be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from .spec import ALIGNMENTS, DTYPES, ELEMENT_BYTES, MAX_HEAD_DIM
from .tensor import View

# Query and key positions are int32 in the kernels, and their sums with a window bound must not overflow.
MAX_SEQLEN = 2**29
# Bound of softmax_scale, softcap and 1 / softcap: the kernels' fp32 products of them stay finite.
MAX_FACTOR = 2.0**60


@dataclass(frozen=True, slots=True)
class Problem:
    """Shapes and features of a dense attention call.

    Attributes
    ----------
    batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v : sizes of q (batch, seqlen_q, heads, head_dim),
        k (batch, seqlen_k, heads_k, head_dim) and v (batch, seqlen_k, heads_k, head_dim_v).
    dtype : "fp16" or "bf16".
    softmax_scale : factor of q.k before the softmax; any finite number.
    window_left, window_right : keys seen before and after a query's own bottom-right position; -1 = unbounded.
        Causal is window_right == 0.
    softcap : cap of cap * tanh(score / cap); 0 = off.
    alibi : whether -slope * abs(distance) is added.
    align : bytes of the widest load that the addresses and strides of q, k, v allow.
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

    @property
    def mask(self) -> str:
        """The Spec's mask: "full", "causal" or "window"."""
        if self.window_left == -1 and self.window_right in (-1, 0):
            return "causal" if self.window_right == 0 else "full"
        return "window"


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
) -> Problem:
    """Check a dense call and describe it.

    Raises
    ------
    TypeError
        An option is not a number, or a dtype is not one that the kernels take.
    ValueError
        Shapes, devices or option values do not fit; the message lists every reason.
    NotImplementedError
        dropout_p > 0.
    """
    dropout = real("dropout_p", dropout_p)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout_p is {dropout_p!r}; it must be in [0, 1)")
    if dropout > 0.0:
        raise NotImplementedError(
            f"dropout_p is {dropout_p!r}; rtflash has no dropout yet, pass 0.0"
        )
    cap = real("softcap", softcap)
    left, right = window("window_size", window_size, truth("causal", causal))
    check_dtypes(q, k, v, alibi_slopes)
    reasons = shape_reasons(q, k, v, alibi_slopes)
    if cap != 0.0 and not 1.0 / MAX_FACTOR <= cap <= MAX_FACTOR:
        reasons.append(f"softcap is {softcap!r}; it must be 0 (off) or in 2^-60..2^60")
    scale = 1.0 if softmax_scale is None else real("softmax_scale", softmax_scale)
    if not abs(scale) <= MAX_FACTOR:
        reasons.append(f"softmax_scale is {softmax_scale!r}; it must be in -2^60..2^60")
    refuse(reasons)
    if softmax_scale is None:
        scale = q.shape[3] ** -0.5
    return Problem(
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        heads=q.shape[2],
        heads_k=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        softmax_scale=scale,
        window_left=left,
        window_right=right,
        softcap=cap,
        alibi=alibi_slopes is not None,
        align=alignment(q, k, v),
    )


def refuse(reasons: list[str]) -> None:
    """Raise ValueError with every reason, if there is one."""
    if reasons:
        raise ValueError(
            "\n".join(reasons)
            if len(reasons) == 1
            else "\n - ".join(["the call is refused:", *reasons])
        )


def real(name: str, value: object) -> float:
    """`value` as a float; a TypeError names it. A device array is refused, since reading it would block the host."""
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    raise TypeError(
        f"{name} is a {type(value).__name__};"
        " it must be a number on the host (int, float, NumPy scalar)"
    )


def truth(name: str, value: Any) -> bool:
    """`value` as a bool; a TypeError names it. Arrays are refused, since reading one may block the host."""
    if isinstance(value, (Integral, np.bool_)):
        return bool(value)
    raise TypeError(f"{name} is a {type(value).__name__}; it must be True or False")


def window(name: str, value: Any, causal: bool) -> tuple[int, int]:
    """(left, right) of a window, with causal folded in as right == 0; bounds beyond every sequence are unbounded."""
    if not isinstance(value, (tuple, np.ndarray)) or len(value) != 2:
        raise ValueError(f"{name} is {value!r}; it must be a pair (left, right)")
    left, right = value
    for side, bound in (("left", left), ("right", right)):
        if isinstance(bound, bool) or not isinstance(bound, Integral):
            raise TypeError(f"{name}'s {side} bound is {bound!r}; it must be an integer")
        if bound < -1:
            raise ValueError(
                f"{name}'s {side} bound is {bound!r}; it must be >= 0, or -1 for unbounded"
            )
    left, right = (-1 if bound >= MAX_SEQLEN else int(bound) for bound in (left, right))
    return left, 0 if causal else right


def check_dtypes(q: View, k: View, v: View, alibi_slopes: View | None) -> None:
    """Raise TypeError unless q, k, v share fp16 or bf16 and the slopes are fp32."""
    wrong = [
        f"{name} is {x.dtype}"
        for name, x in (("q", q), ("k", k), ("v", v))
        if x.dtype not in DTYPES
    ]
    if wrong:
        raise TypeError(f"{', '.join(wrong)}; q, k and v must be fp16 or bf16 (cast them first)")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q is {q.dtype}, k is {k.dtype}, v is {v.dtype}; all three must have one dtype"
        )
    if alibi_slopes is not None and alibi_slopes.dtype != "fp32":
        raise TypeError(f"alibi_slopes is {alibi_slopes.dtype}; it must be fp32")


def shape_reasons(q: View, k: View, v: View, alibi_slopes: View | None) -> list[str]:
    """Why the shapes or devices do not fit together."""
    named = (("q", q), ("k", k), ("v", v))
    reasons = [
        f"{name} has shape {tuple(x.shape)}; it must be (batch, seqlen, heads, head_dim)"
        for name, x in named
        if len(x.shape) != 4
    ]
    if reasons:
        return reasons
    (batch, seqlen_q, heads, dim), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    if k.shape != (batch, seqlen_k, heads_k, dim):
        reasons.append(
            f"k has shape {tuple(k.shape)}; with q {tuple(q.shape)} it must be ({batch}, seqlen_k, heads_k, {dim})"
        )
    if v.shape[:3] != k.shape[:3]:
        reasons.append(
            f"v has shape {tuple(v.shape)}; with k {tuple(k.shape)} it must be"
            f" ({', '.join(map(str, k.shape[:3]))}, head_dim_v)"
        )
    if heads_k == 0:
        reasons.append("k has 0 heads; it must have at least 1")
    elif heads % heads_k != 0:
        reasons.append(f"q has {heads} heads and k has {heads_k}; q's must be a multiple of k's")
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[3] <= MAX_HEAD_DIM:
            reasons.append(f"{name} has head_dim {x.shape[3]}; it must be in 1..{MAX_HEAD_DIM}")
    for name, length in (("q", seqlen_q), ("k", seqlen_k)):
        if length > MAX_SEQLEN:
            reasons.append(f"{name} has seqlen {length}; it must be at most {MAX_SEQLEN}")
    if alibi_slopes is not None and alibi_slopes.shape not in ((heads,), (batch, heads)):
        reasons.append(
            f"alibi_slopes has shape {tuple(alibi_slopes.shape)}; it must be ({heads},) or ({batch}, {heads})"
        )
    devices = {
        name: x.device for name, x in (*named, ("alibi_slopes", alibi_slopes)) if x is not None
    }
    if len(set(devices.values())) > 1:
        places = ", ".join(f"{name} on {place(d)}" for name, d in devices.items())
        reasons.append(f"{places}; all must be on one device")
    return reasons


def place(device: int) -> str:
    """A View's device in words."""
    if device >= 0:
        return f"cuda:{device}"
    return "the host" if device == -1 else f"host device {-1 - device}"


def alignment(*views: View) -> int:
    """Bytes (16, 8, 4 or 2) that divide every address and every used stride of the views."""
    bits = 0
    for view in views:
        bits |= view.ptr
        for size, stride in zip(view.shape[:-1], view.strides[:-1], strict=True):
            if size > 1:
                bits |= stride * ELEMENT_BYTES
    return next((a for a in ALIGNMENTS if bits % a == 0), ALIGNMENTS[-1])
