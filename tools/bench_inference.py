"""Rows of `rtflash bench --mode decode,varlen`: one query over a cache, and packed sequences."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import rtflash

from .chart import SHAPE_KEYS, Row
from .peers import Peer, answers, make_peers, reason
from .timing import copy_bandwidth, graph_medians, medians

# (batch, keys) of calls with one query, of which the GPU's memory can hold the least to the most.
DECODE_SHAPES = ((1, 8192), (1, 131072), (16, 8192), (64, 4096), (128, 8192))
# Those whose cache is also read in pages, and appended to.
CACHE_SHAPES = ((16, 8192), (64, 4096))
PAGE_SIZES = (1, 16, 256)
HEADS, HEADS_K, HEAD_DIM, ELEMENT_BYTES = 32, 8, 128, 2
# Packed sequences of random lengths, heads * head_dim = WIDTH as in mode fwd.
SEQUENCES, LONGEST, WIDTH, DIMS = 64, 4096, 2048, (64, 128)


def decode(names: Sequence[str], dtypes: Sequence[str], skipped: dict[str, str]) -> Iterator[Row]:
    """The copy's GB/s; then per dtype and shape the fraction of it at which the cache is read, and microseconds.

    All are timed as CUDA graphs. A copy writes as much as it reads, so reading alone can be faster.

    Parameters
    ----------
    names : keys of PEERS.
    dtypes : torch's names.
    skipped : collects why a peer is left out.
    """
    bandwidth = copy_bandwidth()
    yield {"copy GB/s": round(bandwidth / 1e9)}
    for dtype, (b, s) in itertools.product(dtypes, DECODE_SHAPES):
        q, k, v = cache(b, s, dtype)
        times = graph_medians(make_peers(names, q, k, v, False, skipped), skipped)
        cache_bytes = (k.numel() + v.numel()) * ELEMENT_BYTES
        fraction = {n: cache_bytes / ms * 1e3 / bandwidth for n, ms in times.items()}
        yield shape("decode", dtype, b, s) | {n: round(x, 3) for n, x in fraction.items()}
        yield shape("decode us", dtype, b, s) | {n: round(t * 1e3, 1) for n, t in times.items()}
        if (b, s) in CACHE_SHAPES:
            yield shape("cache", dtype, b, s) | cache_ratios(q, k, v, skipped)


def shape(mode: str, dtype: str, b: int, s: int) -> Row:
    """What a row of one query was measured on."""
    return dict(zip(SHAPE_KEYS, (mode, dtype, HEAD_DIM, False, s, b, HEADS), strict=True))


def cache(b: int, s: int, dtype: str, d: int = HEAD_DIM) -> tuple[Any, Any, Any]:
    """(q, k, v) of one query for each of b sequences of s keys; `dtype`: torch's name."""
    import torch

    options = {"device": "cuda", "dtype": getattr(torch, dtype)}
    q = torch.randn(b, 1, HEADS, d, **options)
    k, v = (torch.randn(b, s, HEADS_K, d, **options) for _ in range(2))
    return q, k, v


def cache_ratios(q: Any, k: Any, v: Any, skipped: dict[str, str]) -> dict[str, float]:
    """Time with a cache of pages in random order, and with an append and rotary, over that with a plain cache."""
    import torch

    b, s = k.shape[:2]
    full = torch.full((b,), s, device="cuda", dtype=torch.int32)
    attend = partial(rtflash.flash_attn_with_kvcache, q)
    peers = [Peer("plain", partial(attend, k, v, cache_seqlens=full))]
    for size in PAGE_SIZES:
        table = torch.randperm(b * s // size, device="cuda").int().reshape(b, -1)
        pages = [x.view(-1, size, HEADS_K, HEAD_DIM) for x in (k, v)]
        call = partial(attend, *pages, cache_seqlens=full, block_table=table)
        peers.append(Peer(f"pages of {size}", call))
    new = [torch.randn_like(x[:, :1]) for x in (k, v)]
    tables = [torch.randn(s, HEAD_DIM // 2, device="cuda", dtype=q.dtype) for _ in range(2)]
    append = partial(attend, k, v, *new, *tables, cache_seqlens=full - 1, causal=True)
    peers.append(Peer("append, rotary", append))
    times = graph_medians(peers, skipped)
    plain = times.pop("plain")
    return {name: round(time / plain, 3) for name, time in times.items()}


def varlen(names: Sequence[str], dtypes: Sequence[str], skipped: dict[str, str]) -> Iterator[Row]:
    """A row of TFLOP/s per dtype, head_dim and mask, on SEQUENCES random lengths in 1..LONGEST.

    "dense" is rtflash on as many sequences of one length with as many operations; "torch-FA2" is the kernel under
    PyTorch's SDPA, called on packed sequences.
    """
    import torch

    draw = random.Random(0)
    lengths = [draw.randint(1, LONGEST) for _ in range(SEQUENCES)]
    squares = sum(n * n for n in lengths)
    even = round((squares / SEQUENCES) ** 0.5)
    offsets = [0, *itertools.accumulate(lengths)]
    cu = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    most = max(lengths)
    flash = torch.ops.aten._flash_attention_forward
    for dtype, d, causal in itertools.product(dtypes, DIMS, (False, True)):
        h = WIDTH // d
        options = {"device": "cuda", "dtype": getattr(torch, dtype)}
        q, k, v = (torch.randn(offsets[-1], h, d, **options) for _ in range(3))
        packed = (q, k, v, cu, cu, most, most)
        dense_q, dense_k, dense_v = (
            torch.randn(SEQUENCES, even, h, d, **options) for _ in range(3)
        )
        dense = partial(rtflash.flash_attn_func, dense_q, dense_k, dense_v, causal=causal)
        peers = [
            Peer("rtflash", partial(rtflash.flash_attn_varlen_func, *packed, causal=causal)),
            Peer("dense", dense),
        ]
        if "fa2" in names:
            theirs = Peer("torch-FA2", partial(flash, *packed, 0.0, causal, False))
            try:
                peers.append(answers(theirs))
            except (RuntimeError, TypeError) as error:
                skipped.setdefault("fa2 on packed sequences", reason(error))
        times = medians(peers)
        flops = dict.fromkeys(times, 4 * h * d * squares / (1 + causal))
        flops["dense"] = 4 * h * d * SEQUENCES * even**2 / (1 + causal)
        row = dict(zip(SHAPE_KEYS, ("varlen", dtype, d, causal, most, SEQUENCES, h), strict=True))
        yield row | {n: round(flops[n] / ms / 1e9) for n, ms in times.items()}
