"""The public functions that merge partial results by their LSE."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import cpu, device, dlpack, launch, layouts, partials, select, settings, tensor
from .call import host, views_of
from .partials import Combine
from .plan import ready
from .tensor import Framework, View, needs_copy

Array = NDArray[Any]


def merge_attention_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Attention over two sets of keys from its results over each: a shared prefix and the rest, or two devices' parts.

    lse = log(exp(lse_a) + exp(lse_b)), out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse), in fp32. (Splitting the
    softmax over keys: FlashAttention-2, Dao, 2023.)

    Parameters
    ----------
    out_a, out_b : (batch, seqlen_q, heads, head_dim_v), or packed (total_q, heads, head_dim_v): fp16, bf16 or fp32, of
        any library. Of rows that saw no key, whose LSE is -inf, the values do not count, NaN included.
    lse_a, lse_b : fp32 (batch, heads, seqlen_q), or (heads, total_q), as the attention functions return them.

    Returns
    -------
    out : as out_a; 0 in rows that saw no key in either.
    lse : as lse_a; -inf in the same rows.

    Raises
    ------
    TypeError, ValueError
        Names the argument, what it was and what it must be; before any work.
    NotImplementedError
        An input that requires grad while grad mode is on.
    """
    names = ("out_a", "lse_a", "out_b", "lse_b")
    if tensor.is_recorded(out_a, names[0]):
        from . import torch_ops

        return torch_ops.merge(out_a, lse_a, out_b, lse_b)
    library, views = _see((out_a, lse_a, out_b, lse_b), names)
    call = partials.merge(*views)
    if library.is_traced((out_a, lse_a, out_b, lse_b)):
        from . import jax_ops

        return jax_ops.merge(call, out_a, lse_a, out_b, lse_b)
    if views[0].device >= 0:
        return _merge_on_device(library, call, (out_a, lse_a, out_b, lse_b), views)
    parts = [host(library, x) for x in (out_a, lse_a, out_b, lse_b)]
    lses = np.stack([np.moveaxis(x, -2, -1) for x in parts[1::2]])
    out, lse = _on_host(call, np.stack(parts[::2]), lses)
    lse = np.ascontiguousarray(np.moveaxis(lse, -1, -2))
    return library.from_host(out, call.dtype, out_a), library.from_host(lse, "fp32", out_a)


def flash_attn_combine(
    out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None
) -> tuple[Any, Any]:
    """Merge the results of any number of parts of the keys (FlashAttention-3's function and shapes).

    Note that the LSE have their heads last, other than those of the attention functions.

    Parameters
    ----------
    out_partial : (splits, batch, seqlen_q, heads, head_dim_v), or packed (splits, total_q, heads, head_dim_v): fp32
        (fp16 and bf16 are taken too), of any library; 1 to 256 splits. Of rows that saw no key in a part, whose LSE is
        -inf, the values do not count.
    lse_partial : fp32 (splits, batch, seqlen_q, heads), or (splits, total_q, heads).
    out : row-major tensor that the result is written to.
    out_dtype : "fp16", "bf16", "fp32" or the library's own dtype; None: out's, else out_partial's.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v).
    lse : (batch, seqlen_q, heads), or (total_q, heads).

    Raises
    ------
    As merge_attention_states.
    """
    inputs = out_partial, lse_partial, out
    if tensor.is_recorded(out_partial, "out_partial"):
        from . import torch_ops

        return torch_ops.combine(out_partial, lse_partial, out, out_dtype)
    library, views = _see(inputs, ("out_partial", "lse_partial", "out"))
    dtype = None if out_dtype is None else partials.dtype_name("out_dtype", out_dtype)
    if out is not None and library.name == "jax":
        raise TypeError("out is a JAX array, which cannot be written; it must be None")
    call = partials.combine(views[0], views[1], views[2], dtype)
    if library.is_traced(inputs):
        from . import jax_ops

        return jax_ops.combine(call, out_partial, lse_partial)
    target = None if out is None or views[2].device >= 0 else library.host(out)
    writable = target is None or target.flags.writeable
    if not writable or (out is not None and dlpack.is_read_only(views[2])):
        raise ValueError("out is read-only; it must be writable")
    if views[0].device >= 0:
        return _combine_on_device(library, call, inputs, views)
    made, lse = _on_host(call, host(library, out_partial), host(library, lse_partial))
    given_lse = library.from_host(lse, "fp32", out_partial)
    if target is None:
        return library.from_host(made, call.dtype, out_partial), given_lse
    target[...] = made.view(target.dtype)
    return out, given_lse


def _see(inputs: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Framework, list[Any]]:
    """The inputs' library and their Views; all but `out` must be given."""
    for x, name in zip(inputs, names, strict=True):
        if x is None and name != "out":
            tensor.framework(x, name)  # raises: None is no tensor
    library = tensor.framework(inputs[0], names[0])
    if library.is_traced(inputs):
        from . import jax_ops

        return library, jax_ops.views_of(inputs, names)
    return library, views_of(library, inputs, names)


def _on_host(call: Combine, out_partial: Array, lse_partial: Array) -> tuple[Array, Array]:
    """(out of the call's dtype, lse) of stacked parts."""
    if settings.get().backend == "emulate":
        from . import emulate

        report = emulate.run_combine(call, out_partial, lse_partial)
        settings.logger().info("%s", report)
        return report.out, report.lse
    cpu.note(call)
    if call.partial != "fp32":
        out_partial = cpu.to_float32(out_partial)
    out, lse = cpu.combine(out_partial, lse_partial)
    if call.dtype != "fp32":
        half = np.dtype(np.float16 if call.dtype == "fp16" else np.uint16)
        out = cpu.from_float32(out, half)
    return out, lse


def _merge_on_device(
    library: Framework, call: Combine, inputs: tuple[Any, ...], views: list[View]
) -> tuple[Any, Any]:
    """merge_attention_states on a GPU: the two parts are read where they are, one a stride behind the other."""
    outs, lses = stacked(views[0], views[2]), stacked(views[1], views[3])
    if outs is None or needs_copy(outs):
        copies = library.contiguous(inputs[0]), inputs[1], library.contiguous(inputs[2]), inputs[3]
        return _merge_on_device(library, call, copies, list(map(library.view, copies)))
    if lses is None or lses.ptr % 4:
        copies = inputs[0], library.contiguous(inputs[1]), inputs[2], library.contiguous(inputs[3])
        return _merge_on_device(library, call, copies, list(map(library.view, copies)))
    index = views[0].device
    out = library.empty(call.out_shape, call.dtype, index)
    lse = library.empty(views[1].shape, "fp32", index)
    total = call.rows[-1]
    strides = (call.heads * total, 1, total)[-len(call.rows) - 1 :]
    run_combine(
        library, call, outs, heads_last(lses), library.pointer(out), library.pointer(lse), strides, views,
    )  # fmt: skip
    return library.result(out), library.result(lse)


def _combine_on_device(
    library: Framework, call: Combine, inputs: tuple[Any, ...], views: list[View]
) -> tuple[Any, Any]:
    """flash_attn_combine on a GPU."""
    if needs_copy(views[0]) or views[1].ptr % 4:
        copies = (*map(library.contiguous, inputs[:2]), inputs[2])
        views = [*map(library.view, copies[:2]), views[2]]
        return _combine_on_device(library, call, copies, views)
    out, index = inputs[2], views[0].device
    made = library.empty(call.out_shape, call.dtype, index) if out is None else None
    lse = library.empty((*call.rows, call.heads), "fp32", index)
    address = views[2].ptr if made is None else library.pointer(made)
    strides = (call.rows[-1] * call.heads, call.heads, 1)[-len(call.rows) - 1 :]
    run_combine(
        library, call, views[0], views[1], address, library.pointer(lse), strides, views
    )  # fmt: skip
    return out if made is None else library.result(made), library.result(lse)


def stacked(a: View, b: View) -> View | None:
    """Two tensors as one with a first axis of 2; None where no stride leads from one to the other."""
    size = dlpack.itemsize(a.dtype)
    same = 0 in a.shape or all(
        n == 1 or x == y for n, x, y in zip(a.shape, a.strides, b.strides, strict=True)
    )
    if not same or (b.ptr - a.ptr) % size:
        return None
    return a._replace(shape=(2, *a.shape), strides=((b.ptr - a.ptr) // size, *a.strides))


def heads_last(lse: View) -> View:
    """(splits, batch, heads, seqlen) or (splits, heads, total) with the heads last."""
    (*shape, heads, rows), (*strides, head, row) = lse.shape, lse.strides
    return lse._replace(shape=(*shape, rows, heads), strides=(*strides, row, head))


def is_aligned(partial: View) -> bool:
    """Whether rows of fp32 start at multiples of 16 bytes."""
    return not any(n % 4 for n in partial.strides[:-1]) and partial.ptr % 16 == 0


def run_combine(
    library: Framework,
    call: Combine,
    out_partial: View,
    lse_partial: View,
    out: int,
    lse: int,
    lse_strides: tuple[int, ...],
    views: list[View],
) -> None:
    """Launch the combine kernel.

    Parameters
    ----------
    out_partial : (splits, *call.rows, heads, head_dim_v), inner stride 1.
    lse_partial : (splits, *call.rows, heads), any strides.
    out, lse : addresses; out is row-major.
    lse_strides : of lse, in the order of (*call.rows, heads).
    views : of the inputs, for `library.hold`.
    """
    index = views[0].device
    spec, grid = select.combine(call, is_aligned(out_partial))
    if grid.blocks == 0:
        return
    stream = library.stream(index)
    kernel = ready(spec, device.get(index), stream)
    rest = layouts.combine_scalars(call, out_partial, lse_partial, lse_strides)
    values = (out_partial.ptr, lse_partial.ptr, out, lse)
    launch.launch(kernel, grid, layouts.COMBINE_HEAD, values, rest, stream, index)
    library.hold(stream, index, views)
