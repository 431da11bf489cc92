"""What XLA calls when it runs a call of rtflash's, with its buffers and, on a GPU, its stream: see jax_ops.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.buffer_callback import buffer_callback
from jax.interpreters import mlir

from . import call, device, dlpack, plan, select
from .problem import Problem
from .tensor_base import ALIGN, Framework

if TYPE_CHECKING:
    from .jax_ops import Op

# Where shapes are checked there are no addresses yet. XLA aligns its buffers to more than ALIGN bytes.
SOMEWHERE = 256


def lowered(kind: Any) -> Any:
    """A lowering to a callback of `kind`: HostCall or DeviceCall."""

    def lower(*operands: Any, op: Op) -> Any:
        wanted = op.results(operands)
        callback = kind(op, operands)
        results = buffer_callback(
            callback,
            [*wanted, *callback.workspace],
            input_output_aliases={
                place: len(wanted) - 2 + i for i, place in enumerate(op.written())
            },
        )(*operands)
        return results[: len(wanted)]

    return mlir.lower_fun(lower, multiple_results=True)


class HostCall:
    """The callback on the CPU."""

    workspace = ()

    def __init__(self, op: Op, operands: Sequence[Any]) -> None:
        self.op = op

    def __call__(self, context: Any, results: Sequence[Any], *operands: Any) -> None:
        op = self.op
        outs = [np.asarray(x) for x in results]
        arrays = [np.asarray(x) for x in operands]
        for place, cache in zip(op.written(), outs[-2:], strict=False):
            if cache.ctypes.data != arrays[place].ctypes.data:
                cache[...] = arrays[place]
            arrays[place] = cache
        out, lse = call.attend(
            op.signature, tuple(op.spread(arrays)), op.options, True, op.cache_seqlen
        )
        outs[0][...] = out
        if op.want_lse:
            outs[1][...] = lse


class DeviceCall:
    """The callback on a GPU: plans by device, made when the call is compiled or first run there.

    Attributes
    ----------
    workspace : what XLA is asked for besides the results; see Plan.new_workspace.
    read : (operand, input) of what is only read, by their places.
    written : (result, operand, input) of the caches. XLA gives result and operand as one buffer, but where it fuses
        the call with the slices of a scan: then the operand is copied.
    """

    def __init__(self, op: Op, operands: Sequence[Any]) -> None:
        self.op = op
        self.abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        places = [place for place, given in enumerate(op.given) if given]
        caches = op.written()
        self.read = [(i, place) for i, place in enumerate(places) if i not in caches]
        self.written = [(1 + op.want_lse + n, i, places[i]) for n, i in enumerate(caches)]
        indices = [x.local_hardware_id for x in jax.local_devices(backend="cuda")]
        problem = op.problem(operands)
        elements = max(needed(problem, index) for index in indices)
        self.workspace = (jax.ShapeDtypeStruct((elements,), np.float32),) if elements else ()
        self.elements = elements
        self.plans: dict[tuple[int, int], plan.Plan] = {}
        self.make(indices[0], [SOMEWHERE] * len(op.given))

    def make(self, index: int, addresses: Sequence[int], stream: int = 0) -> plan.Plan:
        """The plan for a device and for inputs at addresses aligned as these are."""
        op = self.op
        given = op.views(self.abstract, index)
        views = [
            view and view._replace(ptr=address)
            for view, address in zip(given, addresses, strict=True)
        ]
        problem = call.check(op.signature, tuple(given), views, op.options)
        if needed(problem, index) > self.elements:
            raise RuntimeError(
                f"{op.signature.function} needs {needed(problem, index)} elements of workspace on GPU {index} and"
                f" got {self.elements}; its arrays must lie at multiples of {ALIGN} bytes"
            )
        made = plan.make(Buffers(stream), op.signature.arrange, problem, views)
        self.plans[index, misalignment(addresses)] = made
        return made

    def __call__(self, context: Any, results: Sequence[Any], *operands: Any) -> None:
        stream = context.stream
        outs = [dlpack.address(x) for x in results]
        addresses = [0] * len(self.op.given)
        for i, place in self.read:
            addresses[place] = dlpack.address(operands[i])
        index = operands[0].__dlpack_device__()[1]
        for i, operand, place in self.written:
            addresses[place] = outs[i]
            source = dlpack.address(operands[operand])
            if source != outs[i]:
                copy(source, outs[i], self.abstract[operand], index, stream)
        found = self.plans.get((index, misalignment(addresses)))
        if found is None:
            found = self.make(index, addresses, stream)
        if found.steps:
            lse = outs[1] if self.op.want_lse else 0
            workspace = outs[-1] if self.elements else 0
            plan.launch_at(found, addresses, outs[0], lse, workspace, self.op.cache_seqlen, stream)


def copy(source: int, target: int, of: jax.ShapeDtypeStruct, index: int, stream: int) -> None:
    """Copy a buffer to another one of the same GPU, on a stream."""
    import cupy

    size = of.size * of.dtype.itemsize
    with cupy.cuda.Device(index):
        cupy.cuda.runtime.memcpyAsync(
            target, source, size, cupy.cuda.runtime.memcpyDeviceToDevice, stream
        )


class Buffers(Framework):
    """For a plan whose outputs XLA allocates: only the stream is asked for."""

    def __init__(self, stream: int) -> None:
        self.current = stream

    def stream(self, device: int) -> int:
        return self.current


def needed(problem: Problem, index: int) -> int:
    """Elements of workspace that a call needs on a GPU."""
    return plan.workspace_elements(problem, *select.forward(problem, device.get(index)))


def misalignment(addresses: Sequence[int]) -> int:
    """The bits below ALIGN that any of the addresses has: what a plan depends on."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits % ALIGN
