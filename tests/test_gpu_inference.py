"""What calls on packed sequences, caches and partial results do besides their arithmetic, on a GPU (see also
test_gpu_runtime.py): graphs with other lengths, streams, memory, compilations, bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
from backends import Torch
from streams import side_stream
from test_gpu_runtime import compilations, normal

import rtflash

pytestmark = pytest.mark.gpu
CAPACITY = 1024
LENGTHS = ((5, 700, 0), (1023, 1, 64), (333, 334, 335))
KINDS = ("decode", "int", "append", "pages", "varlen", "split varlen", "merge", "combine")


def int32(torch: Any, *values: Any) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Cache:
    """A decode step of three sequences: query, new key and value, rotary tables and a cache, contiguous or of pages."""

    def __init__(self, torch: Any, page_size: int = 0, seed: int = 0) -> None:
        rows = (3 * CAPACITY // page_size, page_size) if page_size else (3, CAPACITY)
        self.q, *_ = normal(torch, 3, 1, 8, 64, seed=seed)
        _, self.k, self.v = normal(torch, 3, 1, 2, 64, seed=seed)
        _, self.k_cache, self.v_cache = normal(torch, *rows, 2, 64, seed=seed)
        self.lengths = int32(torch, *LENGTHS[0])
        angles = torch.rand((CAPACITY, 32), device="cuda") * 6
        self.tables = [x.bfloat16() for x in (angles.cos(), angles.sin())]
        self.options: dict[str, Any] = {}
        if page_size:
            order = torch.randperm(rows[0], device="cuda").int()
            self.options["block_table"] = order.reshape(3, -1)

    @property
    def data(self) -> tuple[Any, ...]:
        """What a call reads, but for its lengths and places."""
        return self.q, self.k, self.v, self.k_cache, self.v_cache

    def step(self, **options: Any) -> tuple[Any, Any]:
        """Append the new key and value, rotated, and attend."""
        return rtflash.flash_attn_with_kvcache(
            self.q, self.k_cache, self.v_cache, self.k, self.v, *self.tables, cache_seqlens=self.lengths,
            causal=True, return_softmax_lse=True, **self.options, **options,
        )  # fmt: skip


def workload(torch: Any, kind: str) -> Callable[[], Any]:
    """A call of one of KINDS, whose inputs are there."""
    if kind in ("append", "pages"):
        cache = Cache(torch, 16 if kind == "pages" else 0)
        return lambda: cache.step(num_splits=4)
    q, k, v = normal(torch, 3, CAPACITY, 8, 64)
    k, v, one = k[:, :, :2], v[:, :, :2], q[:, :1]
    if kind in ("decode", "int"):
        lengths: Any = 700 if kind == "int" else int32(torch, *LENGTHS[0])
        return lambda: rtflash.flash_attn_with_kvcache(
            one, k, v, cache_seqlens=lengths, num_splits=4, return_softmax_lse=True
        )
    if kind == "merge":
        lse = torch.randn((3, 8, CAPACITY), device="cuda")
        return lambda: rtflash.merge_attention_states(q, lse, q + 0, lse + 0)
    if kind == "combine":
        partial = torch.randn((5, 3, 7, 8, 64), device="cuda")
        sums = torch.randn((5, 3, 7, 8), device="cuda")
        return lambda: rtflash.flash_attn_combine(partial, sums, out_dtype="bf16")
    packed = [x.reshape(-1, *x.shape[2:])[:1000] for x in (q, k, v)]
    cu_q, cu_k = int32(torch, 0, 5, 5, 60), int32(torch, 0, 700, 710, 1000)
    splits = 4 if kind == "split varlen" else 1
    return lambda: rtflash.flash_attn_varlen_func(
        packed[0][:60], *packed[1:], cu_q, cu_k, 55, 700, causal=True, num_splits=splits, return_attn_probs=True
    )[:2]  # fmt: skip


@pytest.mark.parametrize("splits", [0, 1, 4])
@pytest.mark.parametrize("page_size", [0, 16])
def test_graph_of_a_decode_step_follows_lengths_and_data(
    torch: Any, page_size: int, splits: int
) -> None:
    """Lengths, table and data are read at each replay; the cache is the same, too."""
    cache = Cache(torch, page_size)
    cache.step(num_splits=splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cache.step(num_splits=splits)
    for turn, lengths in enumerate((*LENGTHS, LENGTHS[0])):
        fresh = Cache(torch, page_size, seed=turn + 1)
        for target, source in zip(cache.data, fresh.data, strict=True):
            target.copy_(source)
        cache.lengths.copy_(int32(torch, *lengths))
        fresh.lengths, fresh.tables = cache.lengths, cache.tables
        if page_size:
            cache.options["block_table"].copy_(fresh.options["block_table"])
        graph.replay()
        torch.cuda.synchronize()
        wanted = fresh.step(num_splits=splits)
        for got, own in zip((*captured, *cache.data), (*wanted, *fresh.data), strict=True):
            assert torch.equal(got, own), turn


@pytest.mark.parametrize("splits", [0, 1, 4])
def test_graph_of_packed_sequences_follows_offsets_and_data(torch: Any, splits: int) -> None:
    tensors = [x[0] for x in normal(torch, 1, 600, 4, 64)]
    offsets = [int32(torch, 0, 20, 20, 60), int32(torch, 0, 500, 540, 600)]

    def call(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        return rtflash.flash_attn_varlen_func(
            q[:60], k, v, cu_q, cu_k, 60, 600, causal=True, num_splits=splits, return_attn_probs=True
        )[:2]  # fmt: skip

    call(*tensors, *offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*tensors, *offsets)
    others = (
        ((0, 1, 59, 60), (0, 1, 1, 600)),
        ((0, 0, 0, 60), (0, 10, 10, 599)),
        ((0, 7, 9, 50), (0, 0, 300, 301)),
    )
    for turn, places in enumerate(others):  # fmt: skip
        fresh = [x[0] for x in normal(torch, 1, 600, 4, 64, seed=turn + 1)]
        new = [int32(torch, *place) for place in places]
        for target, source in zip((*tensors, *offsets), (*fresh, *new), strict=True):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        for got, own in zip(captured, call(*fresh, *new), strict=True):
            assert torch.equal(got, own), turn


def test_cold_capture_of_a_decode_step_says_to_warm_up(torch: Any) -> None:
    """Any of its three kernels may be missing; afterwards the call works."""
    # A head size that no other test uses.
    q, k, v = (x[:, :n] for x, n in zip(normal(torch, 2, 64, 4, 182), (1, 64, 64), strict=True))
    lengths = int32(torch, 3, 4)

    def call() -> Any:
        return rtflash.flash_attn_with_kvcache(q, k, v, q, q, cache_seqlens=lengths, num_splits=2)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"(?i)warm"), torch.cuda.graph(graph):
        call()
    wanted = call()
    again = torch.cuda.CUDAGraph()
    with torch.cuda.graph(again):
        out = call()
    again.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_no_synchronisation_by_torch(torch: Any, kind: str) -> None:
    call = workload(torch, kind)
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_no_blocking_function_of_the_runtime_is_called(
    torch: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import cupy

    call = workload(torch, kind)
    call()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a blocking CUDA function was called")

    for name in ("deviceSynchronize", "streamSynchronize", "eventSynchronize", "memcpy", "malloc"):
        monkeypatch.setattr(cupy.cuda.runtime, name, refuse)
    call()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_returns_while_its_stream_is_busy(torch: Any, kind: str) -> None:
    """No length is read back, whichever tensors hold them."""
    call = workload(torch, kind)
    wanted = [x.clone() for x in call()]
    torch.cuda.synchronize()
    with side_stream(Torch("cuda")) as stream:
        call()  # gives torch's allocator memory for this stream, which it may wait for
        stream.synchronize()
        stream.sleep()
        got = call()
        assert not stream.is_done()
        stream.synchronize()
        assert all(torch.equal(x, own) for x, own in zip(got, wanted, strict=True))


@pytest.mark.parametrize("kind", ["decode", "append", "split varlen"])
def test_workspace_of_split_keys_comes_from_torch(torch: Any, kind: str) -> None:
    """fp32 outputs and LSE of the parts, in one allocation that is given back; nothing from CuPy."""
    import cupy

    call, splits = workload(torch, kind), 4
    call()
    torch.cuda.synchronize()
    pool = cupy.get_default_memory_pool().total_bytes()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    out, lse = call()
    after = torch.cuda.memory_stats()

    def grown(what: str, since: str = "current") -> int:
        return after[f"requested_bytes.all.{what}"] - before[f"requested_bytes.all.{since}"]

    results = 2 * out.numel() + 4 * lse.numel()
    assert grown("current") == results
    assert grown("peak") - results == splits * 4 * (out.numel() + lse.numel())
    assert after["allocation.all.allocated"] - before["allocation.all.allocated"] == 3
    assert cupy.get_default_memory_pool().total_bytes() == pool


@pytest.mark.parametrize("seqlen_q", [1, 5, 40])
@pytest.mark.parametrize("page_size", [0, 16])
def test_one_split_gives_the_same_bits_whatever_the_batch(
    torch: Any, page_size: int, seqlen_q: int
) -> None:
    q, k, v = normal(torch, 64, 512, 8, 128)
    q, k, v = q[:, :seqlen_q], k[:, :, :2].contiguous(), v[:, :, :2].contiguous()
    lengths = torch.randint(0, 513, (64,), device="cuda").int()
    table = None
    if page_size:
        k, v = (x.reshape(-1, page_size, 2, 128) for x in (k, v))
        table = torch.arange(len(k), device="cuda").int().reshape(64, -1)

    def call(first: int, last: int) -> Any:
        places = {} if table is None else {"block_table": table[first:last]}
        keys = (k, v) if page_size else (k[first:last], v[first:last])
        return rtflash.flash_attn_with_kvcache(
            q[first:last], *keys, cache_seqlens=lengths[first:last], causal=True, num_splits=1,
            return_softmax_lse=True, **places,
        )  # fmt: skip

    out, lse = call(0, 64)
    for first, last in ((0, 1), (63, 64), (7, 12), (0, 33), (0, 64)):
        got = call(first, last)
        assert torch.equal(got[0], out[first:last])
        assert torch.equal(got[1], lse[first:last])


@pytest.mark.parametrize(("way", "dim"), [("int", 84), ("tensor", 88)])
def test_decoding_compiles_two_variants_at_most(torch: Any, way: str, dim: int) -> None:
    """Split or not, whatever the lengths, capacities, batch and heads, and the merge, which knows no head size."""
    q, k, v = normal(torch, 8, 4096, 8, 64)
    rtflash.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=9, num_splits=2)
    q, k, v = normal(torch, 8, 4096, 16, dim)
    random = np.random.default_rng(0)

    def all_lengths() -> None:
        for capacity in (1, 2, 64, 129, 1000, 4096):
            for batch, heads, heads_k in ((1, 8, 2), (8, 8, 8), (8, 16, 1), (3, 9, 3)):
                for _ in range(4):
                    length = random.integers(0, capacity + 1, batch)
                    keys = (x[:batch, :capacity, :heads_k] for x in (k, v))
                    used = int(length[0]) if way == "int" else int32(torch, *length.tolist())
                    rtflash.flash_attn_with_kvcache(
                        q[:batch, :1, :heads], *keys, cache_seqlens=used, causal=True
                    )

    assert 1 <= compilations(all_lengths) <= 2


@pytest.mark.parametrize("paged", [False, True])
def test_warmup_leaves_nothing_to_compile(torch: Any, paged: bool) -> None:
    dim = 90 if paged else 92
    rtflash.warmup(
        dim, "bf16", causal=True, varlen=True, kvcache=True, paged=paged, append=True, rotary="halves", group=4
    )  # fmt: skip
    q, k, v = normal(torch, 4, 1024, 8, dim)
    k, v = k[:, :, :2].contiguous(), v[:, :, :2].contiguous()
    cos = sin = torch.zeros((1024, dim // 2), dtype=torch.bfloat16, device="cuda")
    lengths = int32(torch, 1, 100, 0, 800)
    cu_q, cu_k = int32(torch, 0, 5, 400, 400, 1000), int32(torch, 0, 5, 800, 900, 1024)
    packed = [x.reshape(-1, *x.shape[2:])[:1024] for x in (q, k, v)]
    options: dict[str, Any] = {}
    keys = packed[1:]
    if paged:
        pages = [x.reshape(-1, 16, 2, dim) for x in (k, v)]
        keys, options = (
            pages,
            {"block_table": torch.arange(256, device="cuda").int().reshape(4, 64)},
        )

    def calls() -> None:
        for rows in (1, 2, 9, 40, 200):
            for splits in (0, 1, 3):
                rtflash.flash_attn_with_kvcache(
                    q[:, :rows], *(pages if paged else (k, v)), k[:, :rows], v[:, :rows], cos, sin, lengths,
                    causal=True, rotary_interleaved=False, num_splits=splits, **options,
                )  # fmt: skip
        for splits in (0, 1, 3):
            rtflash.flash_attn_varlen_func(
                packed[0], *keys, cu_q, cu_k, 1000, 1024, causal=True, num_splits=splits, **options
            )

    assert compilations(calls) == 0


SECOND_PROCESS = """
import json, cupy, numpy as np, rtflash
from rtflash import artifacts
x = cupy.ones((3, 700, 2, 64), np.float16)
lengths = cupy.asarray([3, 600, 0], np.int32)
for batch in (3, 1):
    for splits in (1, 4):
        out, lse = rtflash.flash_attn_with_kvcache(
            x[:batch, :1], x[:batch], x[:batch], x[:batch, 5:6], x[:batch, 6:7], cache_seqlens=lengths[:batch],
            num_splits=splits, return_softmax_lse=True)
        rtflash.flash_attn_combine(out[None].astype(np.float32), lse[None].swapaxes(2, 3))
print(json.dumps({"compilations": artifacts.compile_count, "first": float(lse[0, 0, 0])}))
"""


def test_a_second_process_compiles_nothing(torch: Any, tmp_path: Path) -> None:
    """Decode whole and split, append, merge and combine: five kernels, whatever the batch."""
    reports = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SECOND_PROCESS],
            env=processes.environment(RTFLASH_CACHE_DIR=str(tmp_path)),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout.splitlines()[-1]))
    assert [report["compilations"] for report in reports] == [5, 0]
    # Four equal keys: q.k / 8 = 8.
    assert reports[0]["first"] == reports[1]["first"] == pytest.approx(8 + np.log(4), abs=1e-4)
