"""What every attention function does: check, allocate, plan, run.

A call's geometry and options are its key to a Plan: everything that does not depend on addresses, made at the first
such call. Later calls look the plan up, allocate the output, and launch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import build, cpu, device, launch, lengths, select, settings, tensor
from .checks import Names
from .dlpack import row_major
from .problem import ELEMENT_BYTES, Problem, Tensors
from .spec import AnySpec
from .tensor import Framework, View

MARK = 48  # device addresses have fewer bits than this
MAX_PLANS = 4096  # a plan is about 2 KB; a program that meets more geometries starts over

Window = tuple[int, int]


@dataclass(frozen=True, eq=False, slots=True)
class Signature:
    """A public function's tensors.

    Attributes
    ----------
    inputs : what the caller calls them, in the order in which `attend` gets them.
    required : how many of them, from the first on, must not be None.
    arrange : makes Tensors of them, be they Views or NumPy arrays.
    check : makes the Problem of Tensors of Views, the options and `names`; raises where the call is refused.
    names : what the caller calls the fields of Tensors, where that is another name.
    dense : whether every sequence has the same length.
    """

    inputs: tuple[str, ...]
    required: int
    arrange: Callable[..., Tensors]
    check: Callable[[Tensors, tuple[Any, ...], Names], Problem]
    names: Names
    dense: bool = False


class Step(NamedTuple):
    """A launch, but for its addresses and lengths.

    Attributes
    ----------
    head : packs what changes from call to call.
    sources : (place in the head, input, offset in bytes) of every address of an input.
    values : the head's others; what is not known yet is 0.
    rest : of Params.
    """

    kernel: build.Kernel
    grid: select.Grid
    head: struct.Struct
    sources: tuple[tuple[int, int, int], ...]
    values: tuple[int, ...]
    rest: bytes


class Plan(NamedTuple):
    """What a call needs besides addresses.

    Attributes
    ----------
    call : the problem.
    append, forward, combine : the launches, in this order; None: nothing to do.
    partial : elements of the partial outputs and of their LSE, in fp32.
    out_shape, lse_shape, dtype, device : of the result.
    """

    call: Problem
    append: Step | None
    forward: Step | None
    combine: Step | None
    partial: tuple[int, int]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    dtype: str
    device: int


_plans: dict[tuple[Any, ...], Plan] = {}


def pair(window_size: Any) -> Any:
    """A list as the tuple that it should be: options are part of a plan's key."""
    return tuple(window_size) if type(window_size) is list else window_size


def parts(name: str, packed: Any, count: int, axes: str) -> list[Any]:
    """The `count` parts of a packed View or NumPy array along its third axis from the end.

    `axes` names those before.
    """
    shape = packed.shape
    if len(shape) != axes.count(",") + 4 or shape[-3] != count:
        raise ValueError(
            f"{name} has shape {tuple(shape)}; it must be ({axes}, {count}, heads, head_dim)"
        )
    if not isinstance(packed, View):
        return [packed[..., i, :, :] for i in range(count)]
    step = packed.strides[-3] * ELEMENT_BYTES
    return [
        packed._replace(
            ptr=packed.ptr + i * step,
            shape=(*shape[:-3], *shape[-2:]),
            strides=(*packed.strides[:-3], *packed.strides[-2:]),
        )
        for i in range(count)
    ]


def views_of(library: Framework, inputs: tuple[Any, ...], names: tuple[str, ...]) -> list[Any]:
    """The Views of inputs, which must all come from the library of the first one; None where one is not given."""
    kind = type(inputs[0])
    views: list[Any] = []
    for x, name in zip(inputs, names):  # noqa: B905  strict costs 0.1 us
        if x is None:
            views.append(None)
            continue
        if type(x) is not kind and tensor.framework(x, name) is not library:
            raise TypeError(
                f"{name} is a {type(x).__name__}; it must come from the same library as {names[0]} ({library.name})"
            )
        if library.needs_grad(x):
            raise NotImplementedError(
                f"{name} requires grad; rtflash has no backward yet: call it under torch.no_grad(), or detach {name}"
            )
        views.append(library.view(x, name))
    return views


def attend(
    signature: Signature,
    inputs: tuple[Any, ...],
    options: tuple[Any, ...],
    want_lse: bool,
    cache_seqlen: int = -1,
) -> tuple[Any, Any]:
    """(out, lse) of a public function's call.

    Parameters
    ----------
    inputs : tensors of any library, all of one; None where one is not given.
    options : for signature.check; hashable, else the call is checked every time.
    want_lse : on a GPU, lse is None else.
    cache_seqlen : keys that a cache holds of each sequence; -1: not one number for all.
    """
    library = tensor.framework(inputs[0], signature.inputs[0])
    library.refuse_tracing()
    views = views_of(library, inputs, signature.inputs)
    if views[0].device >= 0:
        return on_device(library, signature, inputs, views, options, want_lse, cache_seqlen)
    return on_host(library, signature, inputs, views, options, cache_seqlen)


def on_device(
    library: Framework,
    signature: Signature,
    inputs: tuple[Any, ...],
    views: list[Any],
    options: tuple[Any, ...],
    want_lse: bool,
    cache_seqlen: int,
) -> tuple[Any, Any]:
    """(out, lse) of a call on a GPU: look the plan up, allocate, launch."""
    # Of the addresses, only the alignment is part of the plan.
    geometry: list[Any] = [signature, options]
    for view in views:
        if view is None:
            geometry.append(None)
        else:
            geometry += (view.ptr % 16, view[1:])
    key = tuple(geometry)
    try:
        plan, keep = _plans.get(key), True
    except TypeError:
        # An option without a hash: a NumPy array as window_size, or something that the checks refuse.
        plan, keep = None, False
    if plan is None:
        call = check(signature, inputs, views, options)
        if any(map(must_copy, views, signature.inputs)):
            inputs = tuple(
                library.contiguous(x) if must_copy(view, name) else x
                for x, view, name in zip(inputs, views, signature.inputs, strict=True)
            )
            views = [None if x is None else library.view(x) for x in inputs]
            return on_device(library, signature, inputs, views, options, want_lse, cache_seqlen)
        plan = make_plan(library, signature, call, views)
        if keep:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
    if cache_seqlen >= 0:
        lengths.check_length(plan.call, cache_seqlen)

    out = library.empty(plan.out_shape, plan.dtype, plan.device)
    lse = library.empty(plan.lse_shape, "fp32", plan.device) if want_lse else None
    run_plan(library, plan, views, out, lse, cache_seqlen)
    return library.result(out), lse if lse is None else library.result(lse)


def check(
    signature: Signature,
    inputs: tuple[Any, ...],
    views: list[Any],
    options: tuple[Any, ...],
) -> Problem:
    """The Problem of a call whose shapes, dtypes, devices and options are right."""
    for x, name in zip(inputs[: signature.required], signature.inputs, strict=False):
        if x is None:
            tensor.framework(x, name)  # raises: None is no tensor
    return signature.check(signature.arrange(*views), options, signature.names)


def must_copy(view: View | None, name: str) -> bool:
    """Whether the kernels cannot read an input where it is. Slopes have a stride, so only their address counts."""
    if view is None:
        return False
    return view.ptr % 4 != 0 if name == "alibi_slopes" else tensor.needs_copy(view)


def make_plan(
    library: Framework, signature: Signature, call: Problem, views: list[View | None]
) -> Plan:
    """Choose the variants of a checked call on a GPU, and compile and load them."""
    tensors = signature.arrange(*views)
    # Inputs at addresses that tell which input it is, to learn where the head's addresses come from.
    marked = (v and v._replace(ptr=i << MARK) for i, v in enumerate(views, 1))
    places = signature.arrange(*marked)
    index = tensors.q.device
    gpu = device.get(index)
    stream = library.stream(index)
    spec, grid = select.forward(call, gpu)
    forward = combine = append = None
    if grid.blocks > 0:
        kernel = ready(spec, gpu, stream)
        scalars = launch.forward_scalars(call, grid, spec.pack_gqa, tensors)
        head = launch.forward_head(places, 0, 0, call.seqlen_q, 0)
        forward = step(kernel, grid, launch.FORWARD_HEAD, head, scalars)
        if spec.split:
            merge = select.splits_combine(call, grid.splits)
            o, lse = partials(call, grid.splits, index)
            combiner, combine_grid = select.combine(merge, True)
            scalars = launch.combine_scalars(merge, o, lse, heads_last_strides(call))
            kernel = ready(combiner, gpu, stream)
            combine = step(kernel, combine_grid, launch.COMBINE_HEAD, (), scalars)
    if call.seqlen_new:
        appender, append_grid = select.append(call)
        if append_grid.blocks > 0:
            scalars = launch.append_scalars(call, tensors)
            head = launch.append_head(places, call.seqlen_q, 0)
            kernel = ready(appender, gpu, stream)
            append = step(kernel, append_grid, launch.APPEND_HEAD, head, scalars)
    partial = (math.prod(call.out_shape), math.prod(call.lse_shape))
    return Plan(
        call, append, forward, combine, partial, call.out_shape, call.lse_shape, call.dtype, index
    )


def step(
    kernel: build.Kernel,
    grid: select.Grid,
    head: struct.Struct,
    values: tuple[int, ...],
    rest: bytes,
) -> Step:
    """A Step of a head whose addresses are marked."""
    sources = tuple(
        (place, (value >> MARK) - 1, value & ((1 << MARK) - 1))
        for place, value in enumerate(values)
        if value >> MARK
    )
    plain = tuple(0 if value >> MARK else value for value in values)
    return Step(kernel, grid, head, sources, plain, rest)


def ready(spec: AnySpec, gpu: device.Device, stream: int) -> build.Kernel:
    """The loaded kernel; refused where loading it would break a capture."""
    if not build.is_loaded(spec, gpu):
        launch.refuse_capture(stream, spec.name)
    return build.kernel(spec, gpu)


def partials(call: Problem, splits: int, index: int, address: int = 0) -> tuple[View, View]:
    """The partial outputs (splits, *out_shape) and behind them their LSE, heads last, of a split call."""

    shape = (splits, *call.out_shape)
    o = View(address, shape, row_major(shape), "fp32", index)
    *rows, heads, last = (splits, *call.lse_shape)
    *steps, head, step = row_major((splits, *call.lse_shape))
    behind = address + 4 * math.prod(shape)
    return o, View(behind, (*rows, last, heads), (*steps, step, head), "fp32", index)


def heads_last_strides(call: Problem) -> tuple[int, ...]:
    """Strides of the LSE, a batch's rows before its heads."""
    return partials(call, 1, -1)[1].strides[1:]


def run_plan(
    library: Framework, plan: Plan, views: list[Any], out: Any, lse: Any, cache_seqlen: int
) -> None:
    """Launch a call.

    Parameters
    ----------
    views : of the inputs.
    out, lse : of library.empty; lse None: not wanted.
    cache_seqlen : see `attend`.
    """
    call, index = plan.call, plan.device
    stream = library.stream(index)
    seqlen_k = call.seqlen_k if cache_seqlen < 0 else cache_seqlen + call.seqlen_new
    if plan.append is not None:
        run_step(plan.append, views, (), seqlen_k, stream, index)
    if plan.forward is not None:
        o, sums = library.pointer(out), 0 if lse is None else library.pointer(lse)
        if plan.combine is None:
            run_step(plan.forward, views, (o, sums), seqlen_k, stream, index)
        else:
            splits = plan.forward.grid.splits
            workspace = library.empty((splits * sum(plan.partial),), "fp32", index)
            part = library.pointer(workspace)
            part_lse = part + 4 * splits * plan.partial[0]
            run_step(plan.forward, views, (part, part_lse), seqlen_k, stream, index)
            kernel, grid, head, _, _, rest = plan.combine
            launch.launch(kernel, grid, head, (part, part_lse, o, sums), rest, stream, index)
    if plan.forward is not None or plan.append is not None:
        library.hold(stream, index, views)


def run_step(
    step: Step,
    views: list[Any],
    outputs: tuple[int, ...],
    seqlen_k: int,
    stream: int,
    index: int,
) -> None:
    """Launch the forward or the append kernel; `outputs`: addresses of the forward's."""
    values = list(step.values)
    for place, view, offset in step.sources:
        values[place] = views[view].ptr + offset
    if outputs:
        values[launch.OUTPUT : launch.OUTPUT + 2] = outputs
    values[-1] = seqlen_k
    launch.launch(step.kernel, step.grid, step.head, values, step.rest, stream, index)


def on_host(
    library: Framework,
    signature: Signature,
    inputs: tuple[Any, ...],
    views: list[Any],
    options: tuple[Any, ...],
    cache_seqlen: int,
) -> tuple[Any, Any]:
    """(out, lse) of a call on host arrays, by NumPy or, if RTFLASH_BACKEND says so, by the emulated kernels."""
    call = check(signature, inputs, views, options)
    tensors = signature.arrange(*(None if x is None else host(library, x) for x in inputs))
    emulated = settings.backend() == "emulate"
    if emulated:
        from . import emulate
    if signature.dense and not emulated:
        out, lse = cpu.forward(call, *tensors[:4])
    else:
        lengths.check(call, tensors, cache_seqlen, signature.names)
        refuse_read_only(tensors, signature.names)
        run = emulate.run_call if emulated else cpu.run
        out, lse = run(call, tensors, cache_seqlen)
    like = inputs[0]
    return library.from_host(out, call.dtype, like), library.from_host(lse, "fp32", like)


def host(library: Framework, x: Any) -> np.ndarray[Any, Any]:
    """A host tensor as a NumPy array; a copy only where its elements are not aligned."""
    return np.require(library.host(x), requirements="A")


def refuse_read_only(tensors: Tensors, names: Names) -> None:
    """Raise ValueError if new keys and values are to be written into arrays that cannot be written."""
    if tensors.k_new is None:
        return
    for field in ("k", "v"):
        if not getattr(tensors, field).flags.writeable:
            raise ValueError(
                f"{names.get(field, field)} is read-only; it must be writable: {names.get('k_new', 'k_new')} is"
                " written into it"
            )
