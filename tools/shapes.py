"""Shapes to tune for: which table serves them now, with which tile, and which others are worth a try."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import typer

from rtflash import listed, select, tuned
from rtflash.device import Device
from rtflash.problem import Problem
from rtflash.spec import AnySpec, Spec
from rtflash.tiles import Tile

from . import trial
from .served import WINDOWS


class Shape(NamedTuple):
    """Calls to tune for; the fields are Problem's, and `mask` a key of WINDOWS."""

    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int

    def problem(self) -> Problem:
        """A dense call of row-major tensors."""
        left, right = WINDOWS[self.mask]
        sizes = {name: getattr(self, name) for name in self._fields if name != "mask"}
        return Problem(
            **sizes,
            softmax_scale=self.head_dim**-0.5,
            window_left=left,
            window_right=right,
            softcap=0.0,
            alibi=False,
            align=16,
            boxes=True,
        )

    def said(self) -> str:
        """The shape in words."""
        dims = (
            f"{self.head_dim}"
            if self.head_dim == self.head_dim_v
            else f"{self.head_dim}x{self.head_dim_v}"
        )
        return (
            f"{self.dtype} d {dims} {self.mask}, batch {self.batch}, {self.seqlen_q} queries, {self.seqlen_k} keys,"
            f" heads {self.heads}/{self.heads_k}"
        )


class Serving(NamedTuple):
    """What serves a shape now: the table's name, the mask that its kernel has, and the tile."""

    table: str
    mask: str
    tile: Tile


def tile_of(spec: Spec) -> Tile:
    """A variant's tile."""
    return Tile(**{name: getattr(spec, name) for name in Tile._fields})


def serving(shape: Shape, gpu: Device) -> Serving:
    """What serves a shape by the tables alone.

    Raises
    ------
    ValueError
        Hopper's kernel with packed rows, whose tile is not tuned.
    """
    with tuned.ignored():
        spec, _ = select.forward(shape.problem(), gpu)
    if spec.isa == 90 and spec.pack_gqa:
        raise ValueError(
            f"{shape.seqlen_q} queries of {shape.heads // shape.heads_k} heads a key head share Hopper's tiles, which"
            " are not tuned; tune for more queries, or for one"
        )
    table = "many"
    if spec.isa == 90:
        table = "hopper"
    elif spec.pack_gqa:
        table = "few" if spec.key_warps > 1 else "some"
    return Serving(table, spec.mask, tile_of(spec))


def launched(shape: Shape, table: str, tile: Tile, gpu: Device) -> list[AnySpec]:
    """The variants that a shape launches with a tile."""
    spec, grid = forward_of(shape, table, tile, gpu)
    merge = select.combine(select.splits_combine(shape.problem(), grid.splits), True)[0]
    return [spec, merge] if spec.split else [spec]


def forward_of(shape: Shape, table: str, tile: Tile, gpu: Device) -> tuple[Spec, select.Grid]:
    """What a shape would run on if a table had the tile."""
    with tuned.forced({table: tile}):
        return select.forward(shape.problem(), gpu)


def siblings(shape: Shape, table: str, tile: Tile, gpu: Device) -> list[Spec]:
    """The variants of all calls that would get the tile."""
    places: list[dict[str, Any]] = [{}, listed.PACKED]
    if table != "many":
        places += [listed.PAGED, listed.APPENDED]
    found: dict[Spec, None] = {}
    with tuned.forced({table: tile}):
        for more in places:
            call = dataclasses.replace(shape.problem(), **more)
            found.update(
                dict.fromkeys(listed.variants(select.variant(call, gpu, tuned.NAMES[table])))
            )
    return list(found)


def candidates(shape: Shape, now: Serving, gpu: Device, given: Sequence[Tile]) -> list[Tile]:
    """The present tile, then those to try: `given`, or else all that may fit."""
    others = given or trial.candidates(shape.head_dim, gpu, now.table, shape.head_dim_v)
    fitting = []
    for tile in others:
        try:
            spec = tuned.spec_of(
                now.table, gpu.major, shape.dtype, shape.head_dim, shape.head_dim_v, now.mask, tile
            )
        except ValueError as error:
            if given:
                raise typer.BadParameter(
                    f"--tile: {trial.label(tile)} cannot serve {shape.said()}: {error}"
                ) from None
            continue
        needed, most = spec.shared_bytes, gpu.shared_bytes_per_block
        if needed > most and given:
            raise typer.BadParameter(
                f"--tile: {trial.label(tile)} needs {needed} bytes of shared memory for {shape.said()}; on {gpu.name}"
                f" it must be at most {most}"
            )
        # A tile may be so large that another table serves the shape.
        if needed <= most and tile == tile_of(forward_of(shape, now.table, tile, gpu)[0]):
            fitting.append(tile)
    return list(dict.fromkeys([now.tile, *fitting]))
