"""warmup: kernels compiled and loaded before the first call needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import build, describe, device, select
from .dlpack import row_major
from .problem import Problem, Tensors
from .spec import ROTARIES
from .tensor import View

# Sizes of the calls to come that choose among variants, or that no variant knows.
BATCH, LENGTH, PAGE = 2, 4096, 16
POSITIONS = (1, LENGTH)  # queries of a sequence: decoding, and prompts


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
    paged : those with a block table.
    append : flash_attn_with_kvcache with k and v.
    rotary : and with rotary tables: "interleaved" or "halves", as rotary_interleaved says.
    group : query heads of a key head.

    Returns
    -------
    names : of the variants.

    Raises
    ------
    TypeError, ValueError
        A dtype, head_dim or option that the kernels do not take.
    RuntimeError
        There is no GPU that can be used.
    """
    from concurrent.futures import ThreadPoolExecutor

    if rotary not in ROTARIES:
        raise ValueError(f"rotary is {rotary!r}; it must be one of {', '.join(ROTARIES)}")
    if rotary != "none" and not append:
        raise ValueError(f"append is {append!r}; with rotary {rotary!r} it must be True")

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
    specs: dict[Any, None] = dict.fromkeys(select.every_variant(dense, gpu))
    calls: list[Problem] = []
    if varlen:
        calls.append(varlen_call(view, dims, group, slopes, paged, options))
    if kvcache:
        tables = rotary if append else "none"
        calls += kvcache_calls(view, dims, group, slopes, paged, append, tables, options)
    for described in calls:
        specs.update(dict.fromkeys(select.every_variant(described, gpu)))
    with ThreadPoolExecutor() as pool:
        return [
            kernel.spec.name for kernel in pool.map(lambda spec: build.kernel(spec, gpu), specs)
        ]


def varlen_call(
    view: Callable[..., View],
    dims: tuple[int, int],
    group: int,
    slopes: View | None,
    paged: bool,
    options: dict[str, Any],
) -> Problem:
    """A call of flash_attn_varlen_func to come."""
    places = (BATCH * LENGTH // PAGE, PAGE) if paged else (BATCH * LENGTH,)
    tensors = Tensors(
        q=view(BATCH * LENGTH, group, dims[0]),
        k=view(*places, 1, dims[0]),
        v=view(*places, 1, dims[1]),
        alibi_slopes=slopes,
        cu_seqlens_q=view(BATCH + 1, of="int32"),
        cu_seqlens_k=view(BATCH + 1, of="int32"),
        block_table=view(BATCH, LENGTH // PAGE, of="int32") if paged else None,
    )
    return describe.varlen(tensors, LENGTH, LENGTH, **options)


def kvcache_calls(
    view: Callable[..., View],
    dims: tuple[int, int],
    group: int,
    slopes: View | None,
    paged: bool,
    append: bool,
    rotary: str,
    options: dict[str, Any],
) -> list[Problem]:
    """Calls of flash_attn_with_kvcache to come: of one query and of many, with lengths in a tensor."""
    places = (BATCH * LENGTH // PAGE, PAGE) if paged else (BATCH, LENGTH)
    rotated = rotary != "none"
    table = view(LENGTH, max(1, dims[0] // 2)) if rotated else None
    calls = []
    for rows in POSITIONS:
        tensors = Tensors(
            q=view(BATCH, rows, group, dims[0]),
            k=view(*places, 1, dims[0]),
            v=view(*places, 1, dims[1]),
            alibi_slopes=slopes,
            seqused_k=view(BATCH, of="int32"),
            block_table=view(BATCH, LENGTH // PAGE, of="int32") if paged else None,
            k_new=view(BATCH, rows, 1, dims[0]) if append else None,
            v_new=view(BATCH, rows, 1, dims[1]) if append else None,
            rotary_cos=table,
            rotary_sin=table,
        )
        calls.append(
            describe.kvcache(tensors, rotary_interleaved=rotary == "interleaved", **options)
        )
    return calls
