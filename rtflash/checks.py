"""What describe.py checks of options and tensors. A refusal names the argument, what it was and what it must be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from .spec import ALIGNMENTS, DTYPES, ELEMENT_BYTES, MAX_HEAD_DIM
from .tensor import View

if TYPE_CHECKING:
    from .problem import Tensors

# What the caller calls a field of Tensors, where that is another name.
Names = Mapping[str, str]
# Tensors that hold several others along their third axis from the end, and how many.
PACKED = {"kv": 2, "qkv": 3}
CORE = ("q", "k", "v")
INTEGERS = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad_k", "cache_batch_idx", "block_table",
)  # fmt: skip

# Query and key positions are int32 in the kernels, and their sums with a window bound must not overflow.
MAX_SEQLEN = 2**29
# Sizes, and so the numbers of rows and pages, are int32 in the kernels.
SIZES_END = 2**31
# Bound of softmax_scale, softcap and 1 / softcap: the kernels' fp32 products of them stay finite.
MAX_FACTOR = 2.0**60


def refuse(reasons: list[str]) -> None:
    """Raise ValueError with every reason, if there is one."""
    if reasons:
        raise ValueError(
            "\n".join(reasons)
            if len(reasons) == 1
            else "\n - ".join(["the call is refused:", *reasons])
        )


def real(name: str, value: object) -> float:
    """`value` as a float; a TypeError names it.

    Truth values are refused, and device arrays, since reading one would block the host.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf  # type: ignore[operator]
    raise TypeError(
        f"{name} is a {kind(value)}; it must be a number on the host (int, float, NumPy scalar)"
    )


def integer(name: str, value: object) -> int:
    """`value` as an int; a TypeError names it. Arrays are refused, as by `real`."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise TypeError(
        f"{name} is a {kind(value)}; it must be an integer on the host (int, NumPy scalar)"
    )


def truth(name: str, value: Any) -> bool:
    """`value` as a bool; 0 and 1 are taken too.

    Raises
    ------
    TypeError
        Another type. Arrays are refused, since reading one may block the host.
    ValueError
        Another number.
    """
    if not isinstance(value, (Integral, np.bool_)):
        raise TypeError(f"{name} is a {kind(value)}; it must be True or False")
    if value not in (0, 1):
        raise ValueError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def kind(value: object) -> str:
    """The type of an option's value, and what to do where jax.jit put it in the place of the caller's."""
    name = type(value).__name__
    return f"{name} (jax.jit: name it in static_argnames)" if name.endswith("Tracer") else name


def window(name: str, value: Any, causal: bool) -> tuple[int, int]:
    """(left, right) of a window, with causal folded in as right == 0; bounds beyond every sequence are unbounded."""
    one_axis = isinstance(value, tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)
    if not one_axis or len(value) != 2:
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


def between(name: str, value: int, low: int, high: int) -> list[str]:
    """Why an integer is refused, if it is."""
    return (
        [] if low <= value <= high else [f"{name} is {value}; it must be in {low}..{bound(high)}"]
    )


def bound(value: int) -> str:
    """A bound as a reader would write it."""
    return (
        f"2^{value.bit_length() - 1}" if value >= 2**20 and value & (value - 1) == 0 else f"{value}"
    )


def no_dropout(value: Any) -> None:
    """Raise unless dropout_p is 0.

    Raises
    ------
    TypeError, ValueError
        It is no number, or not in [0, 1).
    NotImplementedError
        It is above 0.
    """
    dropout = real("dropout_p", value)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout_p is {value!r}; it must be in [0, 1)")
    if dropout > 0.0:
        raise NotImplementedError(f"dropout_p is {value!r}; rtflash has no dropout yet, pass 0.0")


def listed(words: list[str]) -> str:
    """Words joined as in a sentence."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def named(tensors: Tensors, names: Names, fields: tuple[str, ...] | None = None) -> dict[str, View]:
    """The given tensors by what the caller calls them; parts of one packed tensor appear once."""
    pairs = zip(tensors._fields, tensors, strict=True)
    return {
        names.get(field, field): x
        for field, x in pairs
        if x is not None and (fields is None or field in fields)
    }


def shape_text(shape: tuple[object, ...], name: str = "") -> str:
    """A shape; that of the tensor that the caller passed where `name` is a packed one's."""
    if name in PACKED:
        shape = (*shape[:-2], PACKED[name], *shape[-2:])
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def check_dtypes(tensors: Tensors, names: Names) -> None:
    """Raise TypeError unless all are fp16 or all bf16, slopes fp32, and lengths, indices and tables int32."""
    core = named(tensors, names, CORE)
    wrong = [f"{name} is {x.dtype}" for name, x in core.items() if x.dtype not in DTYPES]
    if wrong:
        raise TypeError(
            f"{', '.join(wrong)}; {listed(list(core))} must be fp16 or bf16 (cast {'it' if len(core) == 1 else 'them'}"
            " first)"
        )
    alike = core | named(tensors, names, ("k_new", "v_new", "rotary_cos", "rotary_sin"))
    if len({x.dtype for x in alike.values()}) > 1:
        (first, wanted), *others = ((name, x.dtype) for name, x in alike.items())
        odd = ", ".join(f"{name} is {dtype}" for name, dtype in others if dtype != wanted)
        raise TypeError(f"{first} is {wanted}, {odd}; they must have one dtype (cast first)")
    for fields, dtype in ((("alibi_slopes",), "fp32"), (INTEGERS, "int32")):
        for name, x in named(tensors, names, fields).items():
            if x.dtype != dtype:
                raise TypeError(f"{name} is {x.dtype}; it must be {dtype}")


def rank_reasons(tensors: Tensors, names: Names, axes: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Which of the fields in `axes` do not have those axes."""
    reasons = []
    for field, wanted in axes.items():
        x, name = getattr(tensors, field), names.get(field, field)
        if x is not None and len(x.shape) != len(wanted):
            reasons.append(
                f"{name} has shape {shape_text(x.shape, name)}; it must be {shape_text(wanted, name)}"
            )
    return reasons


def mismatch(
    tensors: Tensors, names: Names, field: str, wanted: tuple[int | str, ...], beside: str = ""
) -> list[str]:
    """Why a field's shape is refused, if it is: a size in `wanted` that is a word may be anything.

    `beside` is the field that asks for these sizes.
    """
    x: View | None = getattr(tensors, field)
    if x is None or (
        len(x.shape) == len(wanted)
        and all(isinstance(w, str) or w == n for w, n in zip(wanted, x.shape, strict=True))
    ):
        return []
    name, other = names.get(field, field), names.get(beside, beside)
    because = f"with {other} {shape_text(getattr(tensors, beside).shape, other)} " if beside else ""
    return [
        f"{name} has shape {shape_text(x.shape, name)}; {because}it must be {shape_text(wanted, name)}"
    ]


def attention_reasons(
    tensors: Tensors, names: Names, batch: int, places: tuple[int | str, ...]
) -> list[str]:
    """Why q, k, v and the slopes do not fit together.

    Parameters
    ----------
    tensors : their ranks are right.
    batch : sequences.
    places : what stands before heads and head_dim in k's shape.
    """
    q, k, v = tensors.q, tensors.k, tensors.v
    names_of = {field: names.get(field, field) for field in CORE}
    (heads, dim), heads_k = q.shape[-2:], k.shape[-2]
    reasons = mismatch(tensors, names, "k", (*places, "heads_k", dim), "q")
    if v.shape[:-1] != k.shape[:-1]:
        reasons += mismatch(tensors, names, "v", (*k.shape[:-1], "head_dim_v"), "k")
    counts = {names_of["q"]: heads, names_of["k"]: heads_k}
    if 0 in counts.values():
        reasons += [
            f"{x} has 0 heads; it must have at least 1" for x, n in counts.items() if n == 0
        ]
    elif heads % heads_k != 0:
        reasons.append(
            f"{names_of['q']} has {heads} heads and {names_of['k']} has {heads_k};"
            f" {names_of['q']}'s must be a multiple of {names_of['k']}'s"
        )
    dims = {names_of["q"]: dim, names_of["v"]: v.shape[-1]}
    for name, size in dims.items():
        if not 1 <= size <= MAX_HEAD_DIM:
            reasons.append(f"{name} has head_dim {size}; it must be in 1..{MAX_HEAD_DIM}")
    slopes = tensors.alibi_slopes
    if slopes is not None and slopes.shape not in ((heads,), (batch, heads)):
        reasons.append(
            f"alibi_slopes has shape {shape_text(slopes.shape)}; it must be ({heads},) or ({batch}, {heads})"
        )
    return reasons


def size_reasons(tensors: Tensors, names: Names) -> list[str]:
    """Which of the tensors are longer along an axis than the kernels can count."""
    return [
        f"{name} has shape {shape_text(x.shape, name)}; each size must be below {bound(SIZES_END)}"
        for name, x in named(tensors, names).items()
        if max(x.shape, default=0) >= SIZES_END
    ]


def device_reasons(places: Mapping[str, View]) -> list[str]:
    """Why tensors on these devices cannot be used together, if they cannot."""
    if len({x.device for x in places.values()}) <= 1:
        return []
    each = ", ".join(f"{name} on {place(x.device)}" for name, x in places.items())
    return [f"{each}; all must be on one device"]


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
