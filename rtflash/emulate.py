"""The dense forward by the kernel's own source, compiled for the host: every thread runs, checked.

A launch takes the same Spec, grid and Params as on a GPU. What a GPU would forgive, or not show, is
an EmulationError that names the template's lines: see docs/emulation.md.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from . import cxx, device, launch, select, settings
from . import problem as problems
from .cxx import why_not as why_not
from .problem import Problem
from .report import (
    CBuffer,
    CCount,
    CFinding,
    CLaunch,
    EmulationError,
    Finding,
    Place,
    Report,
    Traffic,
    read_counts,
    read_findings,
)
from .spec import Spec
from .tensor import View, needs_copy

Array = NDArray[Any]

ARCH = "sm_90a"
MAX_COUNTS = 4096
MAX_FINDINGS = 100
# Byte states of a tensor: see struct Buffer.
PADDING, ELEMENT = 0, 1
POISON = 0xFF  # NaN in fp16, bf16 and fp32
GUARD = 1 << 20  # bytes before and after a tensor; the system gives them no memory
ALIGNMENT = 256
POINTERS = launch.POINTER_FIELDS


def forward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    alibi_slopes: Array | None = None,
    *,
    arch: str = ARCH,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Attention of a checked problem over host arrays: `cpu.forward`, by the emulated kernel.

    Parameters
    ----------
    problem, q, k, v, alibi_slopes : as `cpu.forward` takes them.
    arch : whose variant to run, one of `device.TYPICAL`.
    seed : of the order in which warps run.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v), of q's dtype, row-major.
    lse : (batch, heads, seqlen_q) float32.

    Raises
    ------
    EmulationError
        The kernel raced, read what nobody wrote, left a tensor, or waited for ever.
    CompileError, RuntimeError
        The templates do not compile for the host; there is no C++ compiler.
    """
    q, k, v = (x.copy() if needs_copy(view(x)) else x for x in (q, k, v))
    problem = dataclasses.replace(problem, align=problems.alignment(*map(view, (q, k, v))))
    gpu = device.for_arch(arch)
    spec, grid = select.forward(problem, gpu)
    report = run(spec, problem, q, k, v, alibi_slopes, section=grid.section, seed=seed)
    settings.logger().info("%s", report)
    return report.out, report.lse


def run(
    spec: Spec,
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    alibi_slopes: Array | None = None,
    *,
    section: int = 1,
    seed: int = 0,
    workers: int = 0,
    check: bool = True,
    templates: Path | None = None,
) -> Report:
    """Run one variant over host arrays whose inner stride is 1.

    Parameters
    ----------
    spec : the variant; it must fit the problem.
    problem, q, k, v, alibi_slopes : as `cpu.forward` takes them.
    section : (batch, head) pairs of a section of the tile order, see block.cuh.
    seed : of the order in which warps run.
    workers : OS threads that run blocks; 0 = as many as there are cores.
    check : whether a finding raises.
    templates : their folder; None = the installed one.

    Raises
    ------
    EmulationError
        If `check`: the report holds findings.
    CompileError, RuntimeError
        As `cxx.library`.
    """
    p = problem
    out = np.empty((p.batch, p.seqlen_q, p.heads, p.head_dim_v), q.dtype)
    lse = np.empty((p.batch, p.heads, p.seqlen_q), np.float32)
    tensors = {"q": q, "k": k, "v": v, "o": out, "lse": lse}
    if alibi_slopes is not None:
        tensors["alibi_slopes"] = np.asarray(alibi_slopes, np.float32)
    blocks = -(-p.seqlen_q // spec.block_m) * p.batch * p.heads
    grid = select.Grid(
        blocks=blocks, threads=spec.threads, shared_bytes=spec.shared_bytes, section=section
    )
    placed = {name: Guarded(x, written=name in ("o", "lse")) for name, x in tensors.items()}
    pointers = [placed[name].array.ctypes.data if name in placed else 0 for name in POINTERS]
    slopes = view(tensors["alibi_slopes"]) if "alibi_slopes" in tensors else None
    params = launch.POINTERS.pack(*pointers)
    params += launch.scalars(p, grid, view(q), view(k), view(v), slopes)
    report = start(spec, grid, params, placed, seed, workers, templates)
    if check and report.findings:
        raise EmulationError(report)
    return report


def start(
    spec: Spec,
    grid: select.Grid,
    params: bytes,
    tensors: dict[str, Guarded],
    seed: int,
    workers: int,
    templates: Path | None,
) -> Report:
    """Launch; `tensors` by the names of Params' pointers."""
    buffers = (CBuffer * len(tensors))()
    for buffer, (name, tensor) in zip(buffers, tensors.items(), strict=True):
        buffer.name, buffer.begin = name.encode(), tensor.begin
        buffer.size, buffer.valid = tensor.states.size, tensor.states.ctypes.data
        buffer.writable = tensor.written
    counts, findings = (CCount * MAX_COUNTS)(), (CFinding * MAX_FINDINGS)()
    packed = ctypes.create_string_buffer(params, len(params))
    described = CLaunch(
        params=ctypes.addressof(packed),
        buffers=buffers,
        counts=counts,
        findings=findings,
        seed=seed,
        blocks=grid.blocks,
        threads=grid.threads,
        shared_bytes=grid.shared_bytes,
        workers=workers or os.cpu_count() or 1,
        buffer_count=len(buffers),
        count_capacity=MAX_COUNTS,
        finding_capacity=MAX_FINDINGS,
    )
    if grid.blocks > 0:
        cxx.library(spec, templates).rtflash_launch(ctypes.addressof(described))
    found = read_findings(described)
    for name, tensor in tensors.items():
        unwritten = int((tensor.states == ELEMENT).sum()) if tensor.written else 0
        if unwritten:
            what = f"{unwritten} bytes of an output that nobody wrote"
            found.append(Finding(what, Place("", 0, name)))
    return Report(
        spec=spec,
        out=tensors["o"].array.copy(),
        lse=tensors["lse"].array.copy(),
        findings=tuple(found),
        counts=tuple(read_counts(described)),
        traffic={b.name.decode(): Traffic(b.bytes_read, b.bytes_written) for b in buffers},
    )


class Guarded:
    """A copy of a tensor, far from every other one, with poison between its elements.

    Strides are the same, and so is the address modulo ALIGNMENT.

    Attributes
    ----------
    array : the copy; poison if the kernel is to write it.
    written : whether it is.
    begin : address of the first byte of any element.
    states : of each byte from `begin` on, see struct Buffer.
    """

    def __init__(self, array: Array, written: bool) -> None:
        reach = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
        below = -sum(step for step in reach if step < 0)
        above = sum(step for step in reach if step > 0) + array.itemsize
        size = below + above if array.size else 0
        memory = np.empty(size + 2 * GUARD + ALIGNMENT, np.uint8)
        first = GUARD + (array.ctypes.data - below - memory.ctypes.data - GUARD) % ALIGNMENT
        inside = memory[first : first + size]
        inside[...] = POISON
        self.written = written
        self.begin = inside.ctypes.data
        self.states = np.full(size, PADDING, np.uint8)
        self.array = np.ndarray(array.shape, array.dtype, memory, first + below, array.strides)
        if size:
            as_strided(self.states[below:], (*array.shape, array.itemsize), (*array.strides, 1))[
                ...
            ] = ELEMENT
            if not written:
                self.array[...] = array


def view(array: Array) -> View:
    """The array's View, strides in elements."""
    strides = tuple(step // array.itemsize for step in array.strides)
    dtype = {2: "fp16", 4: "fp32"}[array.itemsize]  # or as wide
    return View(array.ctypes.data, array.shape, strides, dtype, -1)
