"""Time tiles of `tiles.FEW` for one query over a cache, beside cuDNN and FlashAttention-2; part of tools/tune.py."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rtflash import nvrtc, plan, select
from rtflash.describe import dense
from rtflash.device import KIB, Device
from rtflash.problem import Tensors
from rtflash.spec import MAX_HEAD_DIM
from rtflash.tensor import framework
from rtflash.tiles import Row as TableRow
from rtflash.tiles import Tile

from . import trial
from .bench_inference import CACHE_SHAPES, ELEMENT_BYTES, cache
from .chart import Row
from .peers import TORCH_DTYPES, Peer, make_peers
from .timing import copy_bandwidth, graph_medians


@contextlib.contextmanager
def in_table(tile: Tile) -> Iterator[None]:
    """Within, calls of few rows take this tile, whatever their head_dim and device.

    (select imports FEW by name, so it is select's that is replaced; that of tiles would change nothing.)
    """
    kept = select.FEW
    select.FEW = {0: (TableRow(MAX_HEAD_DIM, tile),)}
    try:
        yield
    finally:
        select.FEW = kept


def make_call(tile: Tile, q: Any, k: Any, v: Any, num_splits: int = 0) -> Callable[[], Any]:
    """A function that queues a dense call with the tile, and its merge if keys are split, and returns the output."""
    library = framework(q)
    views = [library.view(x) for x in (q, k, v)]
    with in_table(tile):
        problem = dense(*views, num_splits=num_splits)
        made = plan.make(library, Tensors, problem, views)
    out = made.new_out()

    def queue() -> Any:
        plan.run(made, library, [view.ptr for view in views], views, out, None, -1)
        return library.result(out)

    return queue


def is_right(tile: Tile, d: int, dtype: str) -> bool:
    """Whether results, of whole and of split keys, agree with float64; `dtype`: torch's name."""
    import torch

    for keys, num_splits in ((1, 1), (1000, 1), (1000, 3)):
        q, k, v = cache(2, keys, dtype, d)
        out = make_call(tile, q, k, v, num_splits)()
        wide_k, wide_v = (x.double().repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), wide_k) * d**-0.5
        expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide_v)
        bound = 2 * torch.finfo(q.dtype).eps * (1 + expected.abs())
        if not ((out.double() - expected).abs() <= bound).all():
            return False
    return True


def judge(tiles: Iterable[Tile], d: int, dtype: str, gpu: Device) -> dict[Tile, Row]:
    """What each tile needs, or under "dropped" why it is no candidate; `dtype`: "bf16" or "fp16"."""
    specs = {}
    for tile in tiles:
        spec = trial.make_spec(tile, d, gpu, dtype, False, 1)
        specs[tile] = spec, dataclasses.replace(spec, split=True)
    compiled = trial.compile_all(itertools.chain(*specs.values()), gpu, nvrtc.target_arch(gpu))
    judged: dict[Tile, Row] = {}
    for tile, variants in specs.items():
        registers = []
        for made in map(compiled.__getitem__, variants):
            if isinstance(made, str):
                judged[tile] = {"dropped": made}
                break
            registers.append(made.resources.registers)
        else:
            shared_kb = variants[0].shared_bytes // KIB
            sound = is_right(tile, d, TORCH_DTYPES[dtype])
            figures = {"registers": max(registers), "shared_kb": shared_kb}
            judged[tile] = figures if sound else {"dropped": trial.WRONG}
    return judged


def measure(d: int, tiles: list[Tile], dtype: str, gpu: Device) -> Iterator[Row]:
    """A row per shape and tile of head_dim d, the table's first; "dropped" stands in place of figures.

    Figures are the fraction of a copy's bandwidth at which the cache is read, and microseconds.
    """
    judged = judge(tiles, d, dtype, gpu)
    bandwidth = copy_bandwidth()
    for b, s in CACHE_SHAPES:
        q, k, v = cache(b, s, TORCH_DTYPES[dtype], d)
        others = make_peers(["cudnn", "fa2"], q, k, v, False, {})
        cache_bytes = (k.numel() + v.numel()) * ELEMENT_BYTES
        for tile, found in judged.items():
            row = {"d": d, "b": b, "s": s, "tile": trial.label(tile)} | found
            if "dropped" in found:
                yield row
                continue
            times = graph_medians([Peer("of copy", make_call(tile, q, k, v)), *others], {})
            row |= {"us": round(times["of copy"] * 1e3, 2), "present": tile == tiles[0]}
            yield row | {n: round(cache_bytes / t * 1e3 / bandwidth, 3) for n, t in times.items()}
