"""What describe.py checks of sequences with lengths of their own: pages, caches, appended keys, rotary tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import checks
from .checks import Names, mismatch, shape_text
from .spec import ELEMENT_BYTES
from .tensor import needs_copy

if TYPE_CHECKING:
    from .problem import Tensors


def room(tensors: Tensors) -> int:
    """The most keys that one sequence can have, by the shapes of k and block_table."""
    if tensors.block_table is not None:
        return tensors.block_table.shape[1] * tensors.k.shape[1]
    return tensors.k.shape[-3]


def page_sizes(tensors: Tensors) -> dict[str, Any]:
    """The Problem's fields that describe pages."""
    if tensors.block_table is None:
        return {}
    pages, page_size = tensors.k.shape[:2]
    return {"page_size": page_size, "columns": tensors.block_table.shape[1], "pages": pages}


def sequence_reasons(tensors: Tensors, names: Names, batch: int) -> list[str]:
    """Why what gives each sequence its length and place is refused."""
    reasons = []
    for field in ("seqused_q", "seqused_k", "leftpad_k", "cache_batch_idx"):
        reasons += mismatch(tensors, names, field, (batch,))
    reasons += mismatch(tensors, names, "block_table", (batch, "columns"))
    if tensors.block_table is not None:
        reasons += in_place_reasons(tensors, names)
        if tensors.k.shape[1] == 0:
            reasons.append(
                f"{names.get('k', 'k')} has shape {shape_text(tensors.k.shape)}; its pages must have at least 1 row"
            )
    return reasons


def in_place_reasons(tensors: Tensors, names: Names) -> list[str]:
    """Why keys and values that must not be copied cannot be read, or written, where they are."""
    reasons = []
    for name, x in checks.named(tensors, names, ("k", "v")).items():
        if not needs_copy(x):
            continue
        if x.strides[-1] != 1 and x.shape[-1] != 1:
            reasons.append(
                f"{name} has strides {shape_text(x.strides)}; the last, head_dim's, must be 1, and a cache is never"
                " copied: allocate it with head_dim innermost"
            )
        else:
            reasons.append(
                f"{name} has address {x.ptr:#x}; it must be a multiple of its {ELEMENT_BYTES}-byte elements, and a"
                " cache is never copied: allocate it as a tensor of its own dtype"
            )
    return reasons


def cache_reasons(tensors: Tensors, names: Names, batch: int) -> list[str]:
    """Why the sequences cannot lie in the cache."""
    if tensors.block_table is not None:
        if tensors.cache_batch_idx is None:
            return []
        table = names.get("block_table", "block_table")
        return [f"cache_batch_idx and {table} are both given; with {table} it must be None"]
    reasons = in_place_reasons(tensors, names)
    rows = tensors.k.shape[0]
    if tensors.cache_batch_idx is None and rows < batch:
        reasons.append(
            f"{names.get('k', 'k')} has room for {rows} sequences; without cache_batch_idx it must have room for q's"
            f" {batch}"
        )
    return reasons


def append_reasons(tensors: Tensors, names: Names, counted: bool) -> list[str]:
    """Why new keys and values cannot be appended. `counted`: the sequences' length is an int."""
    new, values = tensors.k_new, tensors.v_new
    k, v = names.get("k_new", "k_new"), names.get("v_new", "v_new")
    if new is None and values is None:
        return []
    if new is None or values is None:
        missing, there = (k, v) if new is None else (v, k)
        return [f"{missing} is None and {there} is not; both must be given, or neither"]
    batch, (heads_k, dim) = tensors.q.shape[0], tensors.k.shape[-2:]
    reasons = mismatch(tensors, names, "k_new", (batch, "seqlen_new", heads_k, dim), "k")
    wanted = (batch, new.shape[1], heads_k, tensors.v.shape[-1])
    reasons += mismatch(tensors, names, "v_new", wanted, "v")
    if 0 not in new.shape:
        reasons += shared_row_reasons(tensors, names)
    if new.shape[1] > room(tensors):
        reasons.append(
            f"{k} has {new.shape[1]} new keys; the cache has room for {room(tensors)} of a sequence"
        )
    if tensors.seqused_k is None and not counted:
        length = names.get("seqused_k", "seqused_k")
        reasons.append(
            f"{length} is None; with {k} it must be given: new keys are written behind that many"
        )
    return reasons


def shared_row_reasons(tensors: Tensors, names: Names) -> list[str]:
    """Why a cache cannot be written whose strides put several of its rows at one place (an expanded tensor)."""
    new = names.get("k_new", "k_new")
    return [
        f"{name} has shape {shape_text(x.shape)} and strides {shape_text(x.strides)}; with {new} no stride of a longer"
        " axis may be 0: rows that are one in memory cannot be written apart"
        for name, x in checks.named(tensors, names, ("k", "v")).items()
        if 0 not in x.shape
        and any(n > 1 and step == 0 for n, step in zip(x.shape, x.strides, strict=True))
    ]


def rotary_reasons(tensors: Tensors, names: Names) -> list[str]:
    """Why the rotary tables are refused."""
    cos, sin = tensors.rotary_cos, tensors.rotary_sin
    if cos is None and sin is None:
        return []
    if cos is None or sin is None:
        missing, there = ("cos", "sin") if cos is None else ("sin", "cos")
        return [
            f"rotary_{missing} is None and rotary_{there} is not; both must be given, or neither"
        ]
    reasons = mismatch(tensors, names, "rotary_sin", cos.shape, "rotary_cos")
    if tensors.k_new is None:
        name = names.get("k_new", "k_new")
        reasons.append(f"{name} is None; with rotary_cos it must be given")
    positions, half = cos.shape
    dim = tensors.q.shape[-1]
    if not 2 <= 2 * half <= dim:
        reasons.append(
            f"rotary_cos has shape {shape_text(cos.shape)}, for rotary_dim {2 * half}; that must be in 2..{dim},"
            " q's head_dim"
        )
    if positions < room(tensors):
        reasons.append(
            f"rotary_cos has {positions} positions; it must have one for each of the {room(tensors)} keys that a"
            " sequence has room for"
        )
    return reasons


def rotary_sizes(tensors: Tensors, interleaved: bool) -> dict[str, Any]:
    """The Problem's fields that describe rotation."""
    cos = tensors.rotary_cos
    if cos is None:
        return {}
    return {
        "rotary": "interleaved" if interleaved else "halves",
        "rotary_dim": 2 * cos.shape[1],
        "positions": cos.shape[0],
    }
