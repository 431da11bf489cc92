"""Attention by the kernels' own source, compiled for the host: every thread runs, checked.

A launch takes the same Spec, grid and Params as on a GPU, and a call the same launches. What a GPU would forgive, or
not show, is an EmulationError that names the template's lines: see docs/emulation.md.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import checks, device, guarded, layouts, select, settings, tensor_map
from .cxx import why_not as why_not
from .dlpack import row_major
from .guarded import READ, REWRITE, UPDATE, WRITE, Guarded, How, output, start, unwritten, view
from .merging import is_aligned
from .other_specs import CombineSpec
from .partials import Combine
from .plan import partials
from .problem import Problem, Tensors
from .report import EmulationError, Outcome, Report, total
from .spec import AnySpec, Spec
from .tensor import needs_copy

Array = NDArray[Any]

ARCH = "sm_90a"
DTYPES = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}


def run_call(
    problem: Problem,
    tensors: Tensors,
    cache_seqlen: int = -1,
    *,
    arch: str = ARCH,
    seed: int = 0,
) -> tuple[Array, Array]:
    """Attention of a checked call over host arrays: `cpu.run`, by the emulated kernels.

    Parameters
    ----------
    problem, tensors, cache_seqlen : as `cpu.run` takes them; dense calls too.
    arch : whose variants to run, one of `device.TYPICAL`.
    seed : of the order in which warps run.

    Returns
    -------
    out : problem.out_shape, of q's dtype, row-major.
    lse : problem.lse_shape float32.

    Raises
    ------
    EmulationError
        A kernel raced, read what nobody wrote, left a tensor, or waited for ever. The cache is then as it was.
    CompileError, RuntimeError
        The templates do not compile for the host; there is no C++ compiler.
    """
    tensors = readable(tensors)
    views = [view(x) for x in tensors[:3]]
    problem = dataclasses.replace(
        problem, align=checks.alignment(*views), boxes=all(map(tensor_map.fits, views))
    )
    spec, grid = select.forward(problem, device.for_arch(arch))
    report = attend(spec, grid, problem, tensors, cache_seqlen, How(seed), True)
    settings.logger().info("%s", report)
    return report.out, report.lse


def run(
    spec: Spec,
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    alibi_slopes: Array | None = None,
    **options: Any,
) -> Report:
    """`run_variant` of a dense call."""
    slopes = None if alibi_slopes is None else np.asarray(alibi_slopes, np.float32)
    return run_variant(spec, problem, Tensors(q, k, v, slopes), **options)


def run_variant(
    spec: Spec,
    problem: Problem,
    tensors: Tensors,
    cache_seqlen: int = -1,
    *,
    splits: int = 1,
    section: int = 1,
    blocks: int = 0,
    seed: int = 0,
    workers: int = 0,
    check: bool = True,
    templates: Path | None = None,
) -> Report:
    """Run a call on one variant of the forward, over host arrays whose inner stride is 1.

    Parameters
    ----------
    spec : the variant; it must fit the problem.
    problem, tensors, cache_seqlen : as `cpu.run` takes them.
    splits : of the keys; with Spec.split.
    section : (batch, head) pairs of a section of the tile order, see block.cuh.
    blocks : CTAs that draw the tiles, of isa 90; 0 = as many as on a GPU.
    seed, workers, templates : see How.
    check : whether a finding raises.

    Raises
    ------
    EmulationError
        If `check`: the report holds findings.
    CompileError, RuntimeError
        As `run_call`.
    """
    grid = select.grid(spec, problem, device.for_arch(ARCH), splits)._replace(section=section)
    if blocks and spec.isa == 90:
        grid = grid._replace(blocks=min(blocks, grid.blocks), draws=True)
    how = How(seed, workers, templates)
    return attend(spec, grid, problem, tensors, cache_seqlen, how, check)


def run_combine(
    call: Combine,
    out_partial: Array,
    lse_partial: Array,
    *,
    seed: int = 0,
    workers: int = 0,
    check: bool = True,
    templates: Path | None = None,
) -> Report:
    """Merge partial results of host arrays: `cpu.combine`, by the emulated kernel.

    Parameters
    ----------
    call : a checked merge.
    out_partial : (splits, *call.rows, heads, head_dim_v).
    lse_partial : (splits, *call.rows, heads) float32.
    seed, workers, check, templates : as `run_variant`.

    Returns
    -------
    Report, whose `out` is of the call's dtype (bf16 as its bits), and whose `lse` is (*call.rows, heads).

    Raises
    ------
    As `run_variant`.
    """
    if needs_copy(view(out_partial)):
        out_partial = out_partial.copy()
    o, sums = Guarded(out_partial), Guarded(lse_partial)
    out = output(call.out_shape, DTYPES[call.dtype])
    lse = output(call.out_shape[:-1], np.float32)
    spec, grid = select.combine(call, is_aligned(o.view))
    outcomes = []
    if grid.blocks > 0:
        rest = layouts.combine_scalars(call, o.view, sums.view, row_major(call.out_shape[:-1]))
        how = How(seed, workers, templates)
        outcomes.append(merge(spec, grid, (o, sums, out, lse), rest, how))
    return finish(spec, out, lse, outcomes, check)


def readable(tensors: Tensors) -> Tensors:
    """The tensors, those copied that a kernel cannot read where they are. (Slopes have a stride.)"""
    return Tensors(*(
        x.copy() if x is not None and name != "alibi_slopes" and needs_copy(view(x)) else x
        for name, x in tensors._asdict().items()
    ))  # fmt: skip


def attend(
    spec: Spec,
    grid: select.Grid,
    problem: Problem,
    tensors: Tensors,
    cache_seqlen: int,
    how: How,
    check: bool,
) -> Report:
    """The launches of a call, as `plan.make` plans them; the caller's cache gets the new keys and values."""
    p = problem
    given = {name: Guarded(x) for name, x in tensors._asdict().items() if x is not None}
    views = Tensors(**{name: tensor.view for name, tensor in given.items()})
    lengths = p.seqlen_q, p.seqlen_k if cache_seqlen < 0 else cache_seqlen + p.seqlen_new
    outcomes = []
    if p.seqlen_new:
        appender, append_grid = select.append(p)
        places = layouts.APPEND_HEAD.pack(*layouts.append_head(views, *lengths))
        uses = inputs(layouts.APPEND, given) | {name: (given[name], REWRITE) for name in "kv"}
        params = places + layouts.append_scalars(p, views)
        outcomes.append(start(appender, append_grid, params, uses, how))

    out, lse = output(p.out_shape, tensors.q.dtype), output(p.lse_shape, np.float32)
    if grid.blocks > 0:  # the numbers of an empty call need not fit into Params
        outcomes += forward(spec, grid, p, given, lengths, (out, lse), how)
    report = finish(spec, out, lse, outcomes, check)
    if p.seqlen_new and p.batch:
        tensors.k[...], tensors.v[...] = given["k"].array, given["v"].array
    return report


def forward(
    spec: Spec,
    grid: select.Grid,
    problem: Problem,
    given: dict[str, Guarded],
    lengths: tuple[int, int],
    results: tuple[Guarded, Guarded],
    how: How,
) -> list[Outcome]:
    """Launch the forward, and after a split one the merge; `results`: out and lse."""
    p, views = problem, Tensors(**{name: tensor.view for name, tensor in given.items()})
    written = dict(zip(("o", "lse"), results, strict=True))
    if spec.split:
        shapes = {"o_partial": p.out_shape, "lse_partial": p.lse_shape}
        written = {name: output((grid.splits, *shapes[name]), np.float32) for name in shapes}
    o, sums = written.values()
    values = layouts.forward_head(views, o.view.ptr, sums.view.ptr, *lengths)
    counter = Guarded(np.zeros(1, np.int32)) if grid.draws else None
    head: tuple[Any, ...] = values
    if spec.isa == 90:
        maps = () if spec.gather else emulated_maps(spec, p, views)
        head = *maps, 0 if counter is None else counter.view.ptr, *values
    params = layouts.forward(spec).head.pack(*head) + layouts.forward_scalars(p, grid, spec, views)
    uses = inputs(layouts.FORWARD, given) | {name: (x, WRITE) for name, x in written.items()}
    if counter is not None:
        uses["next_tile"] = counter, UPDATE
    outcomes = [start(spec, grid, params, uses, how)]
    if spec.split:
        call = select.splits_combine(p, grid.splits)
        combiner, combine_grid = select.combine(call, True)
        o_partial, lse_partial = partials(p, grid.splits, -1)
        rest = layouts.combine_scalars(call, o_partial, lse_partial, lse_partial.strides[1:])
        outcomes.append(merge(combiner, combine_grid, (o, sums, *results), rest, how))
    return outcomes


def emulated_maps(spec: Spec, problem: Problem, views: Tensors) -> list[bytes]:
    """The tensor maps of q, k and v, as the host target reads them."""
    maps = tensor_map.maps(spec, problem.heads // problem.heads_k, *views[:3])
    return [
        guarded.tensor_map(view.ptr, x.dims, x.strides, x.box, x.swizzle)
        for view, x in zip(views[:3], maps, strict=True)
    ]


def inputs(layout: layouts.Layout, given: dict[str, Guarded]) -> dict[str, tuple[Guarded, int]]:
    """The tensors that a kernel's Params point to, to be read."""
    names = {field.removeprefix("sequences.") for field in layout.pointers}
    return {name: (tensor, READ) for name, tensor in given.items() if name in names}


def merge(
    spec: CombineSpec,
    grid: select.Grid,
    tensors: tuple[Guarded, Guarded, Guarded, Guarded],
    rest: bytes,
    how: How,
) -> Outcome:
    """Launch the combine kernel; `tensors`: those of layouts.COMBINE.pointers, in their order."""
    head = layouts.COMBINE_HEAD.pack(*(tensor.view.ptr for tensor in tensors))
    uses = zip(tensors, (READ, READ, WRITE, WRITE), strict=True)
    return start(
        spec, grid, head + rest, dict(zip(layouts.COMBINE.pointers, uses, strict=True)), how
    )


def finish(
    spec: AnySpec, out: Guarded, lse: Guarded, outcomes: list[Outcome], check: bool
) -> Report:
    """The report of launches that had to write all of `out` and `lse`; raises if `check` and there are findings."""
    missing = [found for name, x in (("o", out), ("lse", lse)) for found in unwritten(name, x)]
    report = total(spec, out.array.copy(), lse.array.copy(), outcomes, missing)
    if check and report.findings:
        raise EmulationError(report)
    return report
