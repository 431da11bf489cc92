"""Plan: everything of a call on a GPU that depends on no address; made once, and run at every such call."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from . import build, device, launch, layouts, lengths, select, settings, tensor_map
from .dlpack import row_major
from .problem import Problem, Tensors
from .spec import AnySpec, Spec
from .tensor import Framework, View
from .tensor_map import TensorMap

# The numbers of a call, which its launches pick from: 0, these, behind them the inputs' addresses and Plan.shifts.
# (Tensor maps are no numbers, but stand among them.)
OUT, LSE, WORKSPACE, SEQLEN_Q, SEQLEN_K, Q_MAP, K_MAP, V_MAP, INPUTS = range(1, 10)
MAPS = Q_MAP, K_MAP, V_MAP
# While a plan is made, a number's place times this stands for it, give or take an offset below half of this.
MARK = 2**48
OUTPUTS = OUT * MARK, LSE * MARK
LENGTHS = SEQLEN_Q * MARK, SEQLEN_K * MARK
NO_MAPS = (None,) * len(MAPS)
MAP_MARKS = tuple(place * MARK for place in MAPS)


class Launch(NamedTuple):
    """A launch to be; `head`: one of layouts.*_HEAD; `marks`: what it packs; `rest`: what layouts.*_scalars packed."""

    spec: AnySpec
    grid: select.Grid
    head: struct.Struct
    marks: Sequence[int]
    rest: bytes


class Plan(NamedTuple):
    """What a call needs besides its numbers.

    Attributes
    ----------
    call : the problem.
    longest : the most keys that an int may say a cache holds of each sequence, see lengths.check_length.
    device : CUDA index.
    new_out, new_lse : make the outputs.
    new_workspace : makes what a split forward writes and combine reads, and behind it the counter of tiles; None:
        neither is needed.
    counter : bytes from the workspace's start to the counter, which starts at 0; -1: there is none.
    steps : the launches in their order: append, forward, combine, but for those that have nothing to do.
    shifts : (place, offset) of numbers that are another one plus an offset.
    maps : of q, k and v, where the forward copies by TMA, and what picks their addresses.
    """

    call: Problem
    longest: int
    device: int
    new_out: Callable[[], Any]
    new_lse: Callable[[], Any]
    new_workspace: Callable[[], Any] | None = None
    counter: int = -1
    steps: tuple[launch.Step, ...] = ()
    shifts: tuple[tuple[int, int], ...] = ()
    maps: tuple[TensorMap, ...] = ()
    mapped: Callable[[Sequence[int]], tuple[int, ...]] = tuple


def make(
    library: Framework,
    arrange: Callable[..., Tensors],
    call: Problem,
    views: Sequence[View | None],
) -> Plan:
    """Choose the variants of a checked call, and compile and load them.

    `arrange` makes Tensors of `views`, those of the inputs.
    """
    tensors = arrange(*views)
    marked = arrange(*(v and v._replace(ptr=i * MARK) for i, v in enumerate(views, INPUTS)))
    index = tensors.q.device
    gpu, stream = device.get(index), library.stream(index)
    spec, grid = select.forward(call, gpu)
    settings.logger().debug("%s runs on %s, %s", call, spec.name, grid)
    launches = append_launch(call, tensors, marked) if call.seqlen_new else []
    if grid.blocks > 0:
        launches += forward_launches(call, spec, grid, tensors, marked)
    shifts: dict[tuple[int, int], int] = {}
    first = INPUTS + len(views)
    steps = tuple(
        launch.step(
            ready(x.spec, gpu, stream), x.grid, x.head, picker(x.marks, shifts, first), x.rest
        )
        for x in launches
        if x.grid.blocks > 0
    )
    maps: tuple[TensorMap, ...] = ()
    mapped: Callable[[Sequence[int]], tuple[int, ...]] = tuple
    if spec.isa == 90 and not spec.gather:
        maps = tensor_map.maps(spec, call.heads // call.heads_k, *tensors[:3])
        mapped = picker([view.ptr for view in marked[:3]], shifts, first)
    elements = workspace_elements(call, spec, grid)
    return Plan(
        call,
        max(lengths.longest_cached(call, call.seqlen_k), -1),
        index,
        library.allocator(call.out_shape, call.dtype, index),
        library.allocator(call.lse_shape, "fp32", index),
        library.allocator((elements,), "fp32", index) if elements else None,
        4 * partial_elements(call, spec, grid) if grid.draws else -1,
        steps,
        tuple(shifts),
        maps,
        mapped,
    )


def workspace_elements(call: Problem, spec: Spec, grid: select.Grid) -> int:
    """How many elements, of four bytes, a forward needs besides its tensors; see Plan.new_workspace."""
    return partial_elements(call, spec, grid) + grid.draws


def append_launch(call: Problem, tensors: Tensors, marked: Tensors) -> list[Launch]:
    """What writes new keys and values into the cache."""
    spec, grid = select.append(call)
    head = layouts.append_head(marked, *LENGTHS)
    scalars = layouts.append_scalars(call, tensors)
    return [Launch(spec, grid, layouts.APPEND_HEAD, head, scalars)]


def forward_launches(
    call: Problem, spec: Spec, grid: select.Grid, tensors: Tensors, marked: Tensors
) -> list[Launch]:
    """The forward, and after a split one the merge of what it writes into the workspace."""
    scalars = layouts.forward_scalars(call, grid, spec, tensors)
    o, lse = partials(call, grid.splits, tensors.q.device, WORKSPACE * MARK)
    written = (o.ptr, lse.ptr) if spec.split else OUTPUTS
    head: tuple[int, ...] = layouts.forward_head(marked, *written, *LENGTHS)
    if spec.isa == 90:
        counter = WORKSPACE * MARK + 4 * partial_elements(call, spec, grid) if grid.draws else 0
        head = *(() if spec.gather else MAP_MARKS), counter, *head
    launches = [Launch(spec, grid, layouts.forward(spec).head, head, scalars)]
    if spec.split:
        merge = select.splits_combine(call, grid.splits)
        combiner, combine_grid = select.combine(merge, True)
        rest = layouts.combine_scalars(merge, o, lse, lse.strides[1:])
        launches.append(
            Launch(combiner, combine_grid, layouts.COMBINE_HEAD, written + OUTPUTS, rest)
        )
    return launches


def partial_elements(call: Problem, spec: Spec, grid: select.Grid) -> int:
    """fp32 elements of the workspace that a split forward writes and combine reads."""
    rows = math.prod(call.out_shape) + math.prod(call.lse_shape)
    return grid.splits * rows if spec.split else 0


def picker(
    marks: Sequence[int], shifts: dict[tuple[int, int], int], first: int
) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """What picks the numbers that `marks` stand for.

    `shifts`: the places, from `first` on, of those that are another one plus an offset; it is added to.
    """
    places = []
    for mark in marks:
        place = (mark + MARK // 2) // MARK
        offset = mark - place * MARK
        if offset:
            place = shifts.setdefault((place, offset), first + len(shifts))
        places.append(place)
    return itemgetter(*places)


def ready(spec: AnySpec, gpu: device.Device, stream: int) -> build.Kernel:
    """The loaded kernel; refused where loading it would break a capture."""
    if not build.is_loaded(spec, gpu):
        launch.refuse_capture(stream, spec.name)
    return build.kernel(spec, gpu)


def partials(call: Problem, splits: int, index: int, address: int = 0) -> tuple[View, View]:
    """The partial outputs (splits, *out_shape) of a split call, and behind them their LSE, as a split's of lse_shape.

    The LSE is shown with its heads last.
    """
    shape = (splits, *call.out_shape)
    o = View(address, shape, row_major(shape), "fp32", index)
    *rows, heads, last = (splits, *call.lse_shape)
    *steps, head, step = row_major((splits, *call.lse_shape))
    behind = address + 4 * math.prod(shape)
    return o, View(behind, (*rows, last, heads), (*steps, step, head), "fp32", index)


def run(
    plan: Plan,
    library: Framework,
    addresses: Sequence[int],
    held: Sequence[View],
    out: Any,
    lse: Any,
    cache_seqlen: int,
) -> None:
    """Launch a call.

    Parameters
    ----------
    addresses, held : of the inputs, see Seen.
    out, lse : of Plan.new_out and new_lse; lse None: not wanted.
    cache_seqlen : see call.attend.
    """
    if not plan.steps:
        return
    workspace = None if plan.new_workspace is None else plan.new_workspace()
    stream = library.stream(plan.device)
    launch_at(
        plan,
        addresses,
        library.pointer(out),
        0 if lse is None else library.pointer(lse),
        0 if workspace is None else library.pointer(workspace),
        cache_seqlen,
        stream,
    )
    if held:
        library.hold(stream, plan.device, held)


def launch_at(
    plan: Plan,
    addresses: Sequence[int],
    out: int,
    lse: int,
    workspace: int,
    cache_seqlen: int,
    stream: int,
) -> None:
    """Launch a call whose outputs and workspace, if there is any, are at these addresses; lse 0: not wanted."""
    call, _, index, _, _, _, counter, steps, shifts, maps, mapped = plan
    numbers: list[Any] = [
        0,
        out,
        lse,
        workspace,
        call.seqlen_q,
        call.seqlen_k if cache_seqlen < 0 else cache_seqlen + call.seqlen_new,
        *NO_MAPS,
        *addresses,
    ]
    for place, offset in shifts:
        numbers.append(max(numbers[place] + offset, 0))  # an input without elements may be at 0
    if maps:
        numbers[Q_MAP:INPUTS] = [
            x.at(address) for x, address in zip(maps, mapped(numbers), strict=True)
        ]
    launch.run(steps, numbers, stream, index, 0 if counter < 0 else workspace + counter)
