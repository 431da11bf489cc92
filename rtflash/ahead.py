"""warmup: kernels compiled and loaded before the first call needs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import build, describe, device, listed
from .dlpack import row_major
from .problem import Problem
from .spec import ROTARIES
from .tensor import View

PAGE_SIZE = 16  # no variant knows it; that it is a multiple of 8 matters to Hopper's kernel


class Inference(NamedTuple):
    """Calls of inference beside the dense ones.

    Attributes
    ----------
    varlen : flash_attn_varlen_func.
    decode : flash_attn_with_kvcache, with lengths in a tensor or not, and dense calls with few queries.
    paged : those two with a block table.
    append, rotary : flash_attn_with_kvcache with k and v, and rotary tables: one of ROTARIES.
    """

    varlen: bool = False
    decode: bool = False
    paged: bool = False
    append: bool = False
    rotary: str = "none"


def warmup(
    head_dim: int,
    dtype: str = "bf16",
    *,
    head_dim_v: int | None = None,
    causal: bool = False,
    window: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    device_index: int = 0,
    varlen: bool = False,
    kvcache: bool = False,
    paged: bool = False,
    append: bool = False,
    rotary: str = "none",
    group: int = 1,
    strided: bool = False,
) -> list[str]:
    """Compile and load, ahead of the first call, the variants that lengths choose among: four of dense calls.

    A softmax_scale that is not positive, or from 2^16 on, is another variant, which is compiled at its first call.

    Parameters
    ----------
    head_dim, head_dim_v : of q and k, and of v; head_dim_v None = head_dim.
    dtype : "fp16" or "bf16".
    causal, window, softcap, alibi : the features of the calls to come, on tensors as aligned as row-major ones.
    device_index : CUDA index.
    varlen, kvcache : whether flash_attn_varlen_func, flash_attn_with_kvcache will be called as well, the latter with
        lengths in a tensor.
    paged : those with a block table; needs varlen or kvcache.
    append : flash_attn_with_kvcache with k and v; needs kvcache.
    rotary : and with rotary tables: "interleaved" or "halves", as rotary_interleaved says.
    group : query heads of a key head.
    strided : on Hopper, what TMA cannot read too: strides of 0 or less, pages of no multiple of 8 slots, cache_leftpad
        with pages, tensors without elements.

    Returns
    -------
    names : of the variants.

    Raises
    ------
    TypeError, ValueError
        A dtype, head_dim or option that the kernels do not take; an option that would do nothing.
    RuntimeError
        There is no GPU that can be used.
    """
    from concurrent.futures import ThreadPoolExecutor

    if rotary not in ROTARIES:
        raise ValueError(f"rotary is {rotary!r}; it must be one of {', '.join(ROTARIES)}")
    if rotary != "none" and not append:
        raise ValueError(f"append is {append!r}; with rotary {rotary!r} it must be True")
    if append and not kvcache:
        raise ValueError(f"kvcache is {kvcache!r}; with append it must be True")
    if paged and not (varlen or kvcache):
        raise ValueError(
            f"varlen is {varlen!r}, kvcache is {kvcache!r}; with paged one of them must be True"
        )
    if rotary != "none" and head_dim < 2:
        raise ValueError(f"head_dim is {head_dim}; with rotary {rotary!r} it must be at least 2")

    def view(*shape: int, of: str = dtype) -> View:
        return View(0, shape, row_major(shape), of, device_index)

    dims = (head_dim, head_dim if head_dim_v is None else head_dim_v)
    slopes = view(group, of="fp32") if alibi else None
    options = {
        "causal": causal,
        "window_size": (1, 1) if window else (-1, -1),
        "softcap": float(softcap),
    }
    q, k, v = (view(1, 2, n, d) for n, d in ((group, dims[0]), (1, dims[0]), (1, dims[1])))
    try:
        gpu = device.get(device_index)
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            f"{error} warmup compiles for a GPU that is there and loads the kernels on it; without one, `rtflash"
            " generate` renders and compiles them for any architecture"
        ) from error
    dense = describe.dense(q, k, v, alibi_slopes=slopes, **options)  # type: ignore[arg-type]
    wanted = Inference(varlen, kvcache, paged, append, rotary)
    specs: dict[Any, None] = {}
    for call in (dense, dataclasses.replace(dense, boxes=False)) if strided else (dense,):
        for described in (call, *inference_calls(call, wanted)):
            specs.update(dict.fromkeys(listed.every_variant(described, gpu)))
    with ThreadPoolExecutor() as pool:
        return [
            kernel.spec.name for kernel in pool.map(lambda spec: build.kernel(spec, gpu), specs)
        ]


def inference_calls(dense: Problem, wanted: Inference) -> Iterator[Problem]:
    """Calls whose `listed.every_variant` are all that inference can need beside a dense call."""
    placed = dataclasses.replace(dense, ragged=True, page_size=PAGE_SIZE if wanted.paged else 0)
    if wanted.varlen:
        yield placed
    if wanted.decode:
        yield dense
        # A single query has no right bound: it would hide nothing.
        one = dataclasses.replace(placed, seqlen_q=1, window_right=-1)
        # Where an int says all lengths, rows are ragged only by pages.
        for call in (placed, one, *([dense] if wanted.append and not wanted.paged else [])):
            new = call.seqlen_q if wanted.append else 0
            yield dataclasses.replace(call, seqlen_new=new, rotary=wanted.rotary)
