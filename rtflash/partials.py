"""Combine: partial results of the same rows that are to be merged, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import checks
from .checks import refuse, shape_text
from .dlpack import itemsize
from .spec import DTYPES, MAX_HEAD_DIM, MAX_SPLITS
from .tensor import View, needs_copy
from .tensor_base import SHORT_NAMES

FLOATS = (*DTYPES, "fp32")


@dataclass(frozen=True, slots=True)
class Combine:
    """Shapes of a merge: `splits` partial outputs (*rows, heads, head_dim_v) and their LSE.

    Attributes
    ----------
    splits : partial results of each row.
    rows : (batch, seqlen), or (total,) of packed sequences.
    heads, head_dim_v : of each.
    partial : dtype of the partial outputs.
    dtype : of the result.
    """

    splits: int
    rows: tuple[int, ...]
    heads: int
    head_dim_v: int
    partial: str
    dtype: str

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return (*self.rows, self.heads, self.head_dim_v)


def combine(
    out_partial: View, lse_partial: View, out: View | None = None, out_dtype: str | None = None
) -> Combine:
    """Check a call of flash_attn_combine and describe it.

    Parameters
    ----------
    out_partial, lse_partial : (splits, batch, seqlen, heads, head_dim_v) and (splits, batch, seqlen, heads), or
        (splits, total, ...).
    out : where the result goes.
    out_dtype : of the result; None: out's, else out_partial's.

    Raises
    ------
    TypeError
        A dtype is not one that the kernels take.
    ValueError
        Shapes or devices do not fit; the message lists every reason.
    """
    outs = {"out_partial": out_partial}
    if out is not None:
        outs["out"] = out
    lses = {"lse_partial": lse_partial}
    dtypes(outs, lses)
    shape = out_partial.shape
    if len(shape) not in (4, 5):
        refuse([
            f"out_partial has shape {shape_text(shape)}; it must be (splits, batch, seqlen, heads, head_dim) or"
            " (splits, total, heads, head_dim)"
        ])  # fmt: skip
    dtype = out_dtype or (out_partial if out is None else out).dtype
    reasons = checks.between("out_partial's number of splits", shape[0], 1, MAX_SPLITS)
    reasons += checks.between("out_partial's head_dim", shape[-1], 1, MAX_HEAD_DIM)
    reasons += shape_reasons("lse_partial", lse_partial, shape[:-1])
    if out is not None:
        reasons += shape_reasons("out", out, shape[1:])
        if out.dtype != dtype:
            reasons.append(f"out is {out.dtype}; with out_dtype it must be {dtype}")
        if not is_row_major(out):
            reasons.append(f"out has strides {shape_text(out.strides)}; it must be row-major")
        elif needs_copy(out):
            reasons.append(
                f"out has address {out.ptr:#x}; it must be a multiple of its {itemsize(out.dtype)}-byte elements"
            )
    refuse(reasons + checks.device_reasons(outs | lses))
    return Combine(shape[0], tuple(shape[1:-2]), shape[-2], shape[-1], out_partial.dtype, dtype)


def merge(out_a: View, lse_a: View, out_b: View, lse_b: View) -> Combine:
    """Check a call of merge_attention_states and describe it; raises as `combine` does.

    Parameters
    ----------
    out_a, out_b : (batch, seqlen, heads, head_dim_v), or (total, heads, head_dim_v).
    lse_a, lse_b : (batch, heads, seqlen), or (heads, total).
    """
    outs, lses = {"out_a": out_a, "out_b": out_b}, {"lse_a": lse_a, "lse_b": lse_b}
    dtypes(outs, lses)
    if out_a.dtype != out_b.dtype:
        raise TypeError(f"out_a is {out_a.dtype}, out_b is {out_b.dtype}; they must have one dtype")
    shape = out_a.shape
    if len(shape) not in (3, 4):
        refuse([
            f"out_a has shape {shape_text(shape)}; it must be (batch, seqlen, heads, head_dim) or (total, heads,"
            " head_dim)"
        ])  # fmt: skip
    *rows, heads, dim = shape
    reasons = checks.between("out_a's head_dim", dim, 1, MAX_HEAD_DIM)
    reasons += shape_reasons("out_b", out_b, shape)
    for name, x in lses.items():
        reasons += shape_reasons(name, x, (*rows[:-1], heads, rows[-1]))
    refuse(reasons + checks.device_reasons(outs | lses))
    return Combine(2, tuple(rows), heads, dim, out_a.dtype, out_a.dtype)


def dtypes(outs: Mapping[str, View], lses: Mapping[str, View]) -> None:
    """Raise TypeError unless outputs are fp16, bf16 or fp32, and LSE are fp32."""
    for name, x in outs.items():
        if x.dtype not in FLOATS:
            raise TypeError(f"{name} is {x.dtype}; it must be fp16, bf16 or fp32")
    for name, x in lses.items():
        if x.dtype != "fp32":
            raise TypeError(f"{name} is {x.dtype}; it must be fp32")


def shape_reasons(name: str, x: View, wanted: tuple[int, ...]) -> list[str]:
    """Why a shape is refused, if it is."""
    if tuple(x.shape) == tuple(wanted):
        return []
    return [f"{name} has shape {shape_text(x.shape)}; it must be {shape_text(tuple(wanted))}"]


def is_row_major(x: View) -> bool:
    """Whether elements, if there are any, follow one another without gaps."""
    if 0 in x.shape:
        return True
    step = 1
    for size, stride in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def dtype_name(name: str, value: Any) -> str:
    """A View's dtype for "fp16", "bf16", "fp32" or a library's own dtype; a TypeError names it."""
    text = (
        value
        if isinstance(value, str)
        else getattr(value, "name", getattr(value, "__name__", value))
    )
    word = str(text).rpartition(".")[2]
    found = SHORT_NAMES.get(word, word)
    if found not in FLOATS:
        raise TypeError(f"{name} is {value!r}; it must be fp16, bf16 or fp32")
    return found
