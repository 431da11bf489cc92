"""Times of tiles on the GPU at hand, for `rtflash tune`; those that compute something wrong have none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rtflash import device, plan, select, tuned
from rtflash.describe import dense
from rtflash.problem import Tensors
from rtflash.tensor import framework
from rtflash.tiles import SOME_ROWS, Tile

from . import trial
from .peers import TORCH_DTYPES, Peer
from .served import WINDOWS
from .shapes import Shape, tile_of
from .timing import graph_medians


def make_call(
    table: str, tile: Tile, qkv: Sequence[Any], window: tuple[int, int], num_splits: int = 0
) -> Callable[[], Any]:
    """A function that queues a call with the tile and returns the output."""
    library = framework(qkv[0])
    views = [library.view(x) for x in qkv]
    problem = dense(*views, window_size=window, num_splits=num_splits)
    with tuned.forced({table: tile}):
        spec, _ = select.forward(problem, device.get(views[0].device))
        made = plan.make(library, Tensors, problem, views)
    if tile_of(spec) != tile:
        raise ValueError(f"{problem} does not run on the table {table}, which is being tuned")
    out = made.new_out()

    def queue() -> Any:
        plan.run(made, library, [view.ptr for view in views], views, out, None, -1)
        return library.result(out)

    return queue


def random_inputs(shape: Shape) -> list[Any]:
    """q, k and v on the GPU."""
    import torch

    options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, TORCH_DTYPES[shape.dtype])}
    return [
        torch.randn(shape.batch, rows, heads, dim, **options)
        for rows, heads, dim in (
            (shape.seqlen_q, shape.heads, shape.head_dim),
            (shape.seqlen_k, shape.heads_k, shape.head_dim),
            (shape.seqlen_k, shape.heads_k, shape.head_dim_v),
        )
    ]


def is_right(shape: Shape, table: str, tile: Tile) -> bool:
    """Whether small calls of uneven lengths, with keys whole and, in tables for it, split, agree with float64."""
    import torch

    group = shape.heads // shape.heads_k
    packed = table in ("few", "some")
    splits = (1,) if table == "many" else (1, 3)
    rows = min(shape.seqlen_q, max(1, SOME_ROWS // group)) if packed else 2 * tile.block_m + 7
    for tiles in (1, 11):
        keys = tiles * tile.block_n - 7
        window = (keys // 3, 0) if shape.mask == "window" else WINDOWS[shape.mask]
        small = shape._replace(batch=2, seqlen_q=rows, seqlen_k=keys, heads=2 * group, heads_k=2)
        qkv = random_inputs(small)
        expected = in_float64(qkv, window)
        bound = 2 * torch.finfo(qkv[0].dtype).eps * (1 + expected.abs())
        for num_splits in splits:
            out = make_call(table, tile, qkv, window, num_splits)()
            if not ((out.double() - expected).abs() <= bound).all():
                return False
    return True


def in_float64(qkv: Sequence[Any], window: tuple[int, int]) -> Any:
    """Attention of torch tensors, on their device."""
    import torch

    q, k, v = qkv
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    left, right = (rows + keys if size < 0 else size for size in window)
    wide_k, wide_v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), wide_k) * q.shape[-1] ** -0.5
    own = torch.arange(rows, device=q.device)[:, None] + keys - rows
    distance = torch.arange(keys, device=q.device)[None] - own
    scores.masked_fill_((distance > right) | (distance < -left), -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), wide_v)


def measure(shape: Shape, table: str, tiles: Sequence[Tile]) -> dict[Tile, float | str]:
    """Milliseconds of a call with each tile, whose kernels are compiled, on this GPU; or why a tile is out.

    Calls take turns, in CUDA graphs: the GPU's time, whatever the host needs.
    """
    import torch

    torch.manual_seed(0)
    found: dict[Tile, float | str] = {}
    qkv, calls = random_inputs(shape), []
    for tile in tiles:
        if is_right(shape, table, tile):
            calls.append(Peer(trial.label(tile), make_call(table, tile, qkv, WINDOWS[shape.mask])))
        else:
            found[tile] = trial.WRONG
    skipped: dict[str, str] = {}
    times = graph_medians(calls, skipped)
    reason = next(iter(skipped.values()), "not measured")
    return {tile: found.get(tile, times.get(trial.label(tile), reason)) for tile in tiles}
