"""The emulated instructions of sm_90a: TMA, mbarriers, wgmma and named barriers do what they must, and their misuse is
found and named.
"""

from __future__ import annotations

import dataclasses
import shutil
import struct
from pathlib import Path
from typing import Any

import inference_calls
import numpy as np
import pytest
from backends import EMULATED, backend
from inference_calls import VarlenCall
from layouts import decode, encode

from rtflash import render
from rtflash.guarded import READ, WRITE, Guarded, How, output, start, tensor_map
from rtflash.report import Outcome
from rtflash.select import Grid
from rtflash.spec import Spec, padded_head_dim

pytestmark = [pytest.mark.emulated]

SPEC = Spec("bf16", 128, 128, block_m=128, block_n=64, warps=8, stages=2, isa=90)
PARAMS_BYTES = 2048  # more than Params has


def templates_of(folder: Path, text: str) -> Path:
    """A copy of the templates whose kernel is `text`."""
    shutil.copytree(render.default_folder(), folder)
    (folder / SPEC.kernel_file).write_text(text, encoding="utf-8")
    return folder


def map_of(tensor: Guarded, box: tuple[int, int, int, int]) -> bytes:
    """The tensor map of a (batch, row, head, column) tensor, swizzled as wide as its box."""
    batches, rows, heads, columns = tensor.array.shape
    batch, row, head, _ = tensor.array.strides
    dims, strides = (columns, heads, rows, batches), (head, row, batch)
    return tensor_map(tensor.view.ptr, dims, strides, box, box[0] * 2)


def run(
    spec: Spec,
    templates: Path,
    q: Any,
    k: Any,
    v: Any,
    boxes: tuple[tuple[int, int, int, int], ...],
    result: tuple[int, ...],
    case: int = 0,
    seed: int = 0,
) -> tuple[Outcome, Any]:
    """Run one block. The kernel finds `case` in params.alibi_slopes, and writes fp32 to params.lse."""
    given = {name: Guarded(x) for name, x in (("q", q), ("k", k), ("v", v))}
    out, o = output(result, np.float32), output((1,), np.uint16)
    maps = b"".join(map_of(x, box) for x, box in zip(given.values(), boxes, strict=True))
    pointers = [x.view.ptr for x in (*given.values(), o, out)]
    params = (maps + struct.pack("<7Q", 0, *pointers, case)).ljust(PARAMS_BYTES, b"\0")
    grid = Grid(1, spec.threads, spec.shared_bytes, 1, 1)
    uses = {name: (x, READ) for name, x in given.items()} | {"o": (o, WRITE), "lse": (out, WRITE)}
    return start(spec, grid, params, uses, How(seed, 1, templates)), out.array


HEAD = """#include "sm90/ptx.cuh"
constexpr int kPitch = kHeadDimPadded % 64 == 0 ? 128 : 64;  // bytes of a slab's row
constexpr int kPitchV = kHeadDimVPadded % 64 == 0 ? 128 : 64;
constexpr int kSlabs = kHeadDimPadded * 2 / kPitch;
constexpr int kSlabsV = kHeadDimVPadded * 2 / kPitchV;
constexpr uint32 kQ = 0, kK = kBlockM * kHeadDimPadded * 2;
constexpr uint32 kKBytes = kBlockN * kHeadDimPadded * 2, kVBytes = kBlockN * kHeadDimVPadded * 2;
constexpr uint32 kBarriers = kK + kStages * (kKBytes + kVBytes);

__device__ inline uint64 descriptor(uint32 address, int pitch, uint32 slab_bytes) {
  return address >> 4 | static_cast<uint64>(slab_bytes >> 4) << 16 |
         static_cast<uint64>(8 * pitch >> 4) << 32 | static_cast<uint64>(pitch == 128 ? 1 : 2) << 62;
}

/// The steps of 16 columns of rows that start at `address`, of a tile of `rows`.
__device__ inline Descriptors<kMmaK> steps(uint32 address, int rows) {
  const int slab_steps = kPitch / 32;
  Descriptors<kMmaK> found;
  for (int k = 0; k < kMmaK; ++k) {
    found.of_step[k] = descriptor(
        address + k / slab_steps * rows * kPitch + k % slab_steps * 32, kPitch, 16);
  }
  return found;
}

__device__ inline void scores(float (&s)[1][kMmaN][4], uint32 a, uint32 b) {
  wgmma_fence();
  wgmma_scores(s, steps(a, kBlockM), steps(b, kBlockN));
  wgmma_commit();
}

template <int kTiles>
__device__ inline void write(const Params& params, const float (&d)[1][kTiles][4], int thread) {
  for (int i = 0; i < 4 * kTiles; ++i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
    const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    store_global_4(params.lse + row * 8 * kTiles + column,
                   __builtin_bit_cast(uint32, d[0][i / 4][i % 4]));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL_NAME(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_smem[];
  const uint32 smem = (shared_address(shared_smem) + 1023) / 1024 * 1024;
  const uint32 full = smem + kBarriers, empty = full + 8 * kStages, once = empty + 8 * kStages;
  const int warpgroup = warp_uniform(thread_index() / kWarpgroupThreads);
  const int thread = thread_index() - kWarpgroupThreads;
  if (thread_index() == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(full + 8 * i, 1);
    for (int i = 0; i < kStages; ++i) mbarrier_init(empty + 8 * i, kWarps);
    mbarrier_init(once, 1);
    fence_mbarrier_init();
  }
  barrier_cta();
"""

# Keys from row -3 on: those before the first and behind the last are 0.
SCORES = """
  if (warpgroup == 0) {
    release_registers<24>();
    if (thread_index() != 0) return;
    mbarrier_arrive_expect(once, (kBlockM + kBlockN) * kHeadDimPadded * 2);
    for (int i = 0; i < kSlabs; ++i) {
      tma_load(smem + kQ + i * kBlockM * kPitch, &params.q_map, once, i * kPitch / 2, 1, 37, 1);
      tma_load(smem + kK + i * kBlockN * kPitch, &params.k_map, once, i * kPitch / 2, 0, -3, 1);
    }
    return;
  }
  claim_registers<240>();
  float s[1][kMmaN][4];
  mbarrier_wait(once, 0);
  scores(s, smem + kQ + (warpgroup - 1) * 64 * kPitch, smem + kK);
  wgmma_wait<0>();
  write(params, s, thread);
}
"""

# O = P V of 64 keys, and then of 64 more onto it; P, 128 x 128, is the first rows of q.
OUTPUT = """
  if (warpgroup == 0) {
    if (thread_index() != 0) return;
    mbarrier_arrive_expect(once, 2 * kVBytes);
    for (int i = 0; i < 2 * kSlabsV; ++i) {
      tma_load(smem + i * kBlockN * kPitchV, &params.v_map, once, i % kSlabsV * kPitchV / 2, 0,
               i / kSlabsV * kBlockN, 0);
    }
    return;
  }
  uint32 p[2][4][4];
  for (int k = 0; k < 8; ++k) {
    for (int i = 0; i < 4; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
      p[k / 4][k % 4][i] = load_global_4(params.q + row * 128 + 16 * k + thread % 4 * 2 + i / 2 * 8);
    }
  }
  float o[1][kMmaV][4] = {};
  mbarrier_wait(once, 0);
  for (int tile = 0; tile < 2; ++tile) {
    Descriptors<4> v;
    for (int k = 0; k < 4; ++k) {
      v.of_step[k] =
          descriptor(smem + tile * kVBytes + k * 16 * kPitchV, kPitchV, kBlockN * kPitchV);
    }
    wgmma_fence();
    wgmma_output(o, p[tile], v);
    wgmma_commit();
  }
  wgmma_wait<1>();
  wgmma_wait<0>();
  write(params, o, thread);
}
"""

# The sum of Q K^T over seven tiles of keys, in a ring; the warpgroups take turns.
RING = """
  constexpr int kTiles = 7;
  if (warpgroup == 0) {
    release_registers<24>();
    if (thread_index() != 0) return;
    mbarrier_arrive_expect(once, kBlockM * kHeadDimPadded * 2);
    for (int i = 0; i < kSlabs; ++i) {
      tma_load(smem + kQ + i * kBlockM * kPitch, &params.q_map, once, i * kPitch / 2, 0, 0, 0);
    }
    for (int n = 0; n < kTiles; ++n) {
      const int stage = n % kStages;
      mbarrier_wait(empty + 8 * stage, n / kStages % 2 ^ 1);
      mbarrier_arrive_expect(full + 8 * stage, kKBytes);
      for (int i = 0; i < kSlabs; ++i) {
        tma_load(smem + kK + stage * kKBytes + i * kBlockN * kPitch, &params.k_map,
                 full + 8 * stage, i * kPitch / 2, 0, n * kBlockN, 0);
      }
    }
    return;
  }
  claim_registers<240>();
  float s[1][kMmaN][4], sum[1][kMmaN][4] = {};
  mbarrier_wait(once, 0);
  if (warpgroup == 2) barrier_arrive(1, 256);
  for (int n = 0; n < kTiles; ++n) {
    const int stage = n % kStages;
    mbarrier_wait(full + 8 * stage, n / kStages % 2);
    barrier_sync(warpgroup, 256);
    scores(s, smem + kQ + (warpgroup - 1) * 64 * kPitch, smem + kK + stage * kKBytes);
    barrier_arrive(3 - warpgroup, 256);
    wgmma_wait<0>();
    if (thread % 32 == 0) mbarrier_arrive(empty + 8 * stage);
    for (int i = 0; i < 4 * kMmaN; ++i) sum[0][i / 4][i % 4] += s[0][i / 4][i % 4];
  }
  write(params, sum, thread);
}
"""


def values(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    """Small numbers, as bits and as fp64."""
    bits = encode(random.standard_normal(shape).astype(np.float32), dtype)
    return bits, decode(bits, dtype).astype(np.float64)


def pitch(head_dim: int) -> int:
    """Columns of a slab."""
    return 64 if padded_head_dim(head_dim) % 64 == 0 else 32


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 96, 128])
def test_scores_of_tiles_that_tma_copies(tmp_path: Path, head_dim: int, dtype: str) -> None:
    spec = dataclasses.replace(SPEC, dtype=dtype, head_dim=head_dim)
    random = np.random.default_rng(head_dim)
    q, q_exact = values(random, (2, 200, 3, head_dim), dtype)
    k, k_exact = values(random, (2, 41, 2, head_dim), dtype)
    columns = pitch(head_dim)
    boxes = ((columns, 1, 128, 1), (columns, 1, 64, 1), (columns, 1, 64, 1))
    templates = templates_of(tmp_path / "templates", HEAD + SCORES)
    outcome, got = run(spec, templates, q, k, k, boxes, (128, 64))
    keys = np.zeros((64, head_dim))
    keys[3:44] = k_exact[1, :, 0]
    wanted = q_exact[1, 37:165, 1] @ keys.T
    assert outcome.findings == []
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    assert outcome.traffic["q"].read == 128 * head_dim * 2
    assert outcome.traffic["k"].read == 41 * head_dim * 2


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
def test_output_of_tiles_that_tma_copies(tmp_path: Path, head_dim: int) -> None:
    spec = dataclasses.replace(SPEC, head_dim_v=head_dim)
    random = np.random.default_rng(head_dim)
    p, p_exact = values(random, (1, 128, 1, 128), "bf16")
    v, v_exact = values(random, (1, 128, 1, head_dim), "bf16")
    columns = pitch(head_dim)
    boxes = ((64, 1, 64, 1), (64, 1, 64, 1), (columns, 1, 64, 1))
    templates = templates_of(tmp_path / "templates", HEAD + OUTPUT)
    width = -(-head_dim // 16) * 16
    outcome, got = run(spec, templates, p, p, v, boxes, (128, width))
    assert outcome.findings == []
    np.testing.assert_allclose(got[:, :head_dim], p_exact[0, :, 0] @ v_exact[0, :, 0], atol=1e-4)


def test_a_ring_of_tiles(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    q, q_exact = values(random, (1, 128, 1, 128), "bf16")
    k, k_exact = values(random, (1, 7 * 64, 1, 128), "bf16")
    templates = templates_of(tmp_path / "templates", HEAD + RING)
    boxes = ((64, 1, 128, 1), (64, 1, 64, 1), (64, 1, 64, 1))
    wanted = q_exact[0, :, 0] @ k_exact[0, :, 0].reshape(7, 64, 128).sum(0).T
    results = [run(SPEC, templates, q, k, k, boxes, (128, 64), seed=seed) for seed in range(6)]
    for outcome, got in results:
        assert outcome.findings == []
        np.testing.assert_allclose(got, wanted, atol=1e-3)
        np.testing.assert_array_equal(got, results[0][1])
        assert outcome.counts == results[0][0].counts


# Small kernels that each do one thing, each a case of a switch. `tile` has room for 64 rows of 64 elements.

TILE_BYTES = 64 * 64 * 2
COPY = f"mbarrier_arrive_expect(once, {TILE_BYTES}); load(tile, once);"
LOADED = f"if (first) {{ {COPY} }} mbarrier_wait(once, 0);"
FENCED = "wgmma_fence(); wgmma_scores(s, all(d), all(d));"
STARTED = f"{FENCED} wgmma_commit();"
PRODUCT = f"{STARTED} wgmma_wait<0>();"
TWICE = "wgmma_fence(); wgmma_output(o, p, {{b, b, b, b}}); wgmma_commit();"
FILLED = "for (int i = thread_index(); i < 512; i += kThreads) store_shared_16(tile + 16 * i, v);"
OWN = "tile + 16 * thread_index()"
AGAIN = f"{{ mbarrier_arrive_expect(full, {TILE_BYTES}); load(tile, full); }}"

CLEAN = {
    "product": f"{LOADED} if (group) {{ {PRODUCT} }}",
    "read of what TMA copies": f"{LOADED} load_shared_16(v, {OWN});",
    "ordinary writes, fence, barrier, product": (
        f"{FILLED} fence_proxy_async(); barrier_cta(); if (group) {{ {PRODUCT} }}"
    ),
    "ordinary writes, fence, named barrier, product": (
        f"if (warpgroup == 0) {{ for (int i = thread_index(); i < 512; i += 128) store_shared_16(tile + 16 * i, v);"
        f" fence_proxy_async(); barrier_arrive(3, 256); }} else if (group) {{ barrier_sync(3, 256); {PRODUCT} }}"
    ),
    "reads, fence, barrier, copy": (
        f"{FILLED} fence_proxy_async(); barrier_cta(); load_shared_16(v, {OWN}); barrier_cta(); {LOADED}"
    ),
    "an mbarrier between a write and a read": (
        f"if (warpgroup == 0) {{ store_shared_16({OWN}, v); mbarrier_arrive(many); }}"
        f" else {{ mbarrier_wait(many, 0); load_shared_16(v, {OWN} - 2048 * warpgroup); }}"
    ),
    "a lane arrives for its warp": (
        f"if (warpgroup == 0) {{ store_shared_16({OWN}, v); barrier_warp(); if (lane == 0) mbarrier_arrive(four); }}"
        f" else {{ mbarrier_wait(four, 0); load_shared_16(v, {OWN} - 2048 * warpgroup); }}"
    ),
    "a lane waits for its warp": (
        f"if (first) {{ {COPY} }} if (group) {{"
        f" if (lane == 0) mbarrier_wait(once, 0); barrier_warp(); {PRODUCT} }}"
    ),
    "a buffer used again": (
        f"{LOADED} if (group) {{ {PRODUCT} if (lane == 0) mbarrier_arrive(four); }}"
        f" if (first) {{ mbarrier_wait(four, 0); {AGAIN} }} if (group) {{ mbarrier_wait(full, 0); {PRODUCT} }}"
    ),
    "a barrier of the CTA for what one thread waited for": (
        f"if (first) {{ {COPY} mbarrier_wait(once, 0); }} barrier_cta(); if (group) {{ {PRODUCT} }}"
    ),
    "two products at once": (
        f"{LOADED} if (group) {{ {STARTED} {TWICE} wgmma_wait<1>(); s[0][0][0] = 1.f; wgmma_wait<0>(); }}"
    ),
    "registers move": "if (warpgroup == 0) release_registers<24>(); else claim_registers<240>();",
    "outside the tensor is 0": (
        f"if (first) {{ mbarrier_arrive_expect(once, {TILE_BYTES}); tma_load(tile, &params.k_map, once, 0, 5, 0, 0);"
        " } mbarrier_wait(once, 0); if (load_shared_4(tile + 4 * thread_index()) != 0) barrier_sync(0, 0);"
    ),
}
RACE = "race"
EARLY = "read before a wait covers the copy"
NO_FENCE = "no proxy fence after an ordinary write"
FAULTS: dict[str, tuple[str, str | set[str]]] = {
    # mbarriers.
    "wait at nothing": ("mbarrier_wait(smem, 0);", "mbarrier that nobody initialised"),
    "arrive at nothing": ("mbarrier_arrive(smem);", "mbarrier that nobody initialised"),
    "initialised twice": ("if (first) mbarrier_init(once, 1);", "mbarrier initialised twice"),
    "no arrival counts": ("if (first) mbarrier_init(tile, 0);", "count of an mbarrier"),
    "misaligned mbarrier": (
        "if (first) mbarrier_init(tile + 4, 1);",
        "misaligned in shared memory",
    ),
    "used before a barrier": (
        "if (first) mbarrier_init(tile, kThreads); mbarrier_arrive(tile);",
        {RACE, "mbarrier that nobody initialised"},
    ),
    "too many arrivals": (
        f"if (first) {{ mbarrier_arrive_expect(once, {TILE_BYTES}); mbarrier_arrive(once); load(tile, once); }}"
        " mbarrier_wait(once, 0);",
        "more arrivals than the mbarrier counts",
    ),
    "too few arrivals": ("mbarrier_wait(once, 0);", "waits for ever at an mbarrier"),
    "no parity": (f"{LOADED} mbarrier_wait(once, 2);", "parity that is neither 0 nor 1"),
    "the next phase": (
        f"{LOADED} mbarrier_wait(once, 0); mbarrier_wait(once, 1);",
        "waits for ever at an mbarrier",
    ),
    "more bytes expected": (
        f"if (first) {{ mbarrier_arrive_expect(once, {TILE_BYTES} + 16); load(tile, once); }} mbarrier_wait(once, 0);",
        "waits for other bytes than an mbarrier expects",
    ),
    "fewer bytes expected": (
        f"if (first) {{ mbarrier_arrive_expect(once, {TILE_BYTES} - 16); load(tile, once); }} mbarrier_wait(once, 0);",
        "waits for other bytes than an mbarrier expects",
    ),
    "no bytes expected": (
        "if (first) { load(tile, once); mbarrier_arrive(once); } mbarrier_wait(once, 0);",
        {
            "phase complete before its bytes are there",
            "waits for other bytes than an mbarrier expects",
        },
    ),
    "an mbarrier read": ("load_shared_4(once);", "an mbarrier's bytes touched otherwise"),
    "an mbarrier written": (
        "store_shared_4(once, 0);",
        {RACE, "an mbarrier's bytes touched otherwise"},
    ),
    "no fence after the initialisation": (
        f"if (first) mbarrier_init(tile + {TILE_BYTES}, 1); barrier_cta(); if (first) {{ mbarrier_arrive_expect(tile +"
        f" {TILE_BYTES}, {TILE_BYTES}); load(tile, tile + {TILE_BYTES}); }} mbarrier_wait(tile + {TILE_BYTES}, 0);",
        "no fence after an mbarrier's initialisation",
    ),
    "a fence before the initialisation": (
        f"fence_mbarrier_init(); if (first) mbarrier_init(tile + {TILE_BYTES}, 1); barrier_cta(); if (first) {{"
        f" mbarrier_arrive_expect(tile + {TILE_BYTES}, {TILE_BYTES}); load(tile, tile + {TILE_BYTES}); }}"
        f" mbarrier_wait(tile + {TILE_BYTES}, 0);",
        "no fence after an mbarrier's initialisation",
    ),
    # Order.
    "arrive, write": (
        f"if (warpgroup == 0) {{ mbarrier_arrive(many); store_shared_16({OWN}, v); }}"
        f" else {{ mbarrier_wait(many, 0); load_shared_16(v, {OWN} - 2048 * warpgroup); }}",
        {RACE, "read of shared memory that nobody wrote"},
    ),
    "a lane arrives alone": (
        f"if (warpgroup == 0) {{ store_shared_16({OWN}, v); if (lane == 0) mbarrier_arrive(four); }}"
        f" else {{ mbarrier_wait(four, 0); load_shared_16(v, {OWN} - 2048 * warpgroup); }}",
        {RACE, "read of shared memory that nobody wrote"},
    ),
    "an arrival learns nothing": (
        f"if (warpgroup == 0) {{ store_shared_16({OWN}, v); barrier_sync(3, kThreads); }}"
        f" else {{ barrier_arrive(3, kThreads); load_shared_16(v, {OWN} - 2048 * warpgroup); }}",
        {RACE, "read of shared memory that nobody wrote"},
    ),
    # Named barriers.
    "number 0": ("barrier_sync(0, kThreads);", "no named barrier has this number"),
    "number 16": ("barrier_sync(16, kThreads);", "no named barrier has this number"),
    "part of a warp": ("barrier_sync(1, 48);", "count of a named barrier"),
    "more than the block": ("barrier_sync(1, kThreads + 32);", "count of a named barrier"),
    "two counts": (
        "if (warpgroup == 0) { barrier_arrive(1, kThreads); } else { barrier_arrive(1, 256); }",
        "another count of threads at a named barrier",
    ),
    "twice": (
        "barrier_arrive(1, kThreads); barrier_arrive(1, kThreads);",
        "a warp comes to a named barrier twice",
    ),
    "too few": ("if (group) barrier_sync(1, 256);", "waits for ever at a named barrier"),
    "half of a warp": ("if (lane < 16) barrier_sync(1, kThreads);", "lanes of the warp have ended"),
    "others at the barrier of the block": (
        "if (group) { barrier_sync(1, 256); } else { barrier_cta(); }",
        {"waits for ever at a named barrier", "waits for ever at the barrier of the block"},
    ),
    # TMA.
    "off the pattern": (
        f"if (first) {{ mbarrier_arrive_expect(once, {TILE_BYTES}); load(tile + 128, once); }} mbarrier_wait(once, 0);",
        {"misaligned swizzle pattern", "waits for other bytes than an mbarrier expects"},
    ),
    "off 128 bytes": (
        f"if (first) {{ mbarrier_arrive_expect(once, {TILE_BYTES}); load(tile + 64, once); }} mbarrier_wait(once, 0);",
        {"misaligned in shared memory", "waits for other bytes than an mbarrier expects"},
    ),
    "past the end": (
        f"if (first) {{ mbarrier_arrive_expect(once, {TILE_BYTES}); load(smem + 229376, once); }}"
        " mbarrier_wait(once, 0);",
        {"outside shared memory", "waits for other bytes than an mbarrier expects"},
    ),
    "a map that is none": (
        f"if (first) {{ mbarrier_arrive_expect(once, {TILE_BYTES}); tma_load(tile, reinterpret_cast<const TensorMap*>("
        "&params.q_strides), once, 0, 0, 0, 0); } mbarrier_wait(once, 0);",
        {
            "not a tensor map",
            "waits for other bytes than an mbarrier expects",
            "misaligned tensor map",
        },
    ),
    "read before the wait": (
        f"if (first) {{ {COPY} load_shared_16(v, tile); mbarrier_wait(once, 0); }}",
        EARLY,
    ),
    "write before the wait": (
        f"if (first) {{ {COPY} store_shared_16(tile, v); mbarrier_wait(once, 0); }}",
        "write before a wait covers the copy",
    ),
    "copied twice": (
        f"if (first) {{ mbarrier_arrive_expect(once, 2 * {TILE_BYTES}); load(tile, once); load(tile, once); }}"
        " mbarrier_wait(once, 0);",
        "write before a wait covers the copy",
    ),
    "another thread waits": (
        f"{LOADED.replace('mbarrier_wait', 'if (!group) mbarrier_wait')} if (group) load_shared_16(v, tile);",
        {RACE, EARLY, "read of shared memory that nobody wrote"},
    ),
    "nobody waits": (
        f"if (first) {{ {COPY} }}",
        "copy that nobody waits for",
    ),
    "copied over what others read": (
        f"{LOADED} load_shared_16(v, {OWN}); if (first) {AGAIN} mbarrier_wait(full, 0);",
        {RACE, EARLY},
    ),
    "copied over ordinary writes": (
        f"{FILLED} barrier_cta(); {LOADED}",
        NO_FENCE,
    ),
    # wgmma.
    "no wait for TMA": (
        f"if (first) {{ {COPY} }} barrier_cta();"
        f" if (group) {{ {PRODUCT} }} mbarrier_wait(once, 0);",
        {RACE, EARLY},
    ),
    "one lane waits": (
        f"if (first) {{ {COPY} }} if (group) {{"
        f" if (lane == 0) mbarrier_wait(once, 0); {PRODUCT} }}",
        RACE,
    ),
    "nobody wrote": (f"if (group) {{ {PRODUCT} }}", "read of shared memory that nobody wrote"),
    "ordinary writes, barrier": (f"{FILLED} barrier_cta(); if (group) {{ {PRODUCT} }}", NO_FENCE),
    "ordinary writes, barrier, fence": (
        f"{FILLED} barrier_cta(); fence_proxy_async(); if (group) {{ {PRODUCT} }}",
        NO_FENCE,
    ),
    "ordinary writes, fence": (
        f"if (group) {{ for (int i = thread; i < 512; i += 128) store_shared_16(tile + 16 * i, v); fence_proxy_async();"
        f" {PRODUCT} }}",
        {RACE, "read of shared memory that nobody wrote"},
    ),
    "written in flight": (
        f"{LOADED} if (group) {{ {STARTED} store_shared_16(tile + 16 * thread, v); wgmma_wait<0>(); }}",
        RACE,
    ),
    "copied over in flight": (
        f"{LOADED} if (group) {{ {STARTED} if (lane == 0) mbarrier_arrive(four); wgmma_wait<0>(); }}"
        f" if (first) {{ mbarrier_wait(four, 0); {AGAIN} }} mbarrier_wait(full, 0);",
        RACE,
    ),
    "one warp of four arrives": (
        f"{LOADED} if (group) {{ {PRODUCT} if (thread == 0) mbarrier_arrive(two); }}"
        f" if (first) {{ mbarrier_wait(two, 0); {AGAIN} }} mbarrier_wait(full, 0);",
        RACE,
    ),
    "no fence": (
        f"{LOADED} if (group) {{ {PRODUCT.removeprefix('wgmma_fence();')} }}",
        "no wgmma.fence since the last wait",
    ),
    "no fence after a wait": (
        f"{LOADED} if (group) {{ {PRODUCT} {PRODUCT.removeprefix('wgmma_fence();')} }}",
        "no wgmma.fence since the last wait",
    ),
    "accumulator set": (
        f"{LOADED} if (group) {{ {STARTED} s[0][0][0] = 0.f; wgmma_wait<0>(); }}",
        "accumulator touched in flight",
    ),
    "accumulator scaled": (
        f"{LOADED} if (group) {{ {TWICE} for (int j = 0; j < kMmaV; ++j) o[0][j][1] *= 2.f; wgmma_wait<0>(); }}",
        "accumulator touched in flight",
    ),
    "accumulator scaled between products": (
        f"{LOADED} if (group) {{ {TWICE} o[0][1][1] *= 2.f; {TWICE} wgmma_wait<0>(); }}",
        "accumulator touched in flight",
    ),
    "wait for an older group": (
        f"{LOADED} if (group) {{ {STARTED} {TWICE} wgmma_wait<1>(); o[0][0][0] = 1.f; wgmma_wait<0>(); }}",
        "accumulator touched in flight",
    ),
    "operand set": (
        f"{LOADED} if (group) {{ {TWICE} p[0][3] = 1; wgmma_wait<0>(); }}",
        "operand register rewritten in flight",
    ),
    "no commit": (
        f"{LOADED} if (group) {{ {FENCED} wgmma_wait<0>(); }}",
        "wgmma that nobody commits",
    ),
    "no wait": (f"{LOADED} if (group) {{ {STARTED} }}", "wgmma that nobody waits for"),
    "one warp": (
        f"{LOADED} if (group && thread < 32) {{ {PRODUCT} }}",
        "warps of the warpgroup issue other wgmma",
    ),
    "other products": (
        f"{LOADED} if (group) {{ {PRODUCT.replace('all(d));', 'all(d + 2 * (thread < 32)));')} }}",
        "warps of the warpgroup issue other wgmma",
    ),
    "other lanes": (
        f"{LOADED} if (group) {{ {PRODUCT.replace('all(d));', 'all(d + 2 * (lane < 7)));')} }}",
        "lanes of the warp have other operands",
    ),
    "no swizzle": (
        f"{LOADED} if (group) {{ d &= ~(3ull << 62); {PRODUCT} }}",
        "not a descriptor of a swizzled matrix",
    ),
    "a row off": (
        f"{LOADED} if (group) {{ d += 128 >> 4; {PRODUCT} }}",
        "a descriptor that is off the swizzle pattern",
    ),
    "half a step off": (
        f"{LOADED} if (group) {{ d += 1; {PRODUCT} }}",
        "a descriptor that is off the slab",
    ),
    "a column off": (
        f"{LOADED} if (group) {{ b += 2; {TWICE} wgmma_wait<0>(); }}",
        "a descriptor that is off the slab",
    ),
    # Registers.
    "no unit": ("if (warpgroup == 0) release_registers<42>();", "count of registers"),
    "too few registers": ("if (warpgroup == 0) release_registers<16>();", "count of registers"),
    "too many registers": (
        "if (warpgroup == 0) { release_registers<40>(); } else { claim_registers<240>(); }",
        "waits for ever for registers",
    ),
    "more left": ("if (warpgroup == 0) release_registers<200>();", "more registers left than held"),
    "fewer claimed": (
        "if (warpgroup == 0) claim_registers<24>();",
        "fewer registers claimed than held",
    ),
    "one warp of registers": (
        "if (thread_index() < 32) release_registers<24>();",
        "not all warps of a warpgroup",
    ),
}
CASES = """
  if (thread_index() == 0) {
    mbarrier_init(once + 8, kWarpgroupThreads);
    mbarrier_init(once + 16, 4);
    mbarrier_init(once + 24, 1);
    fence_mbarrier_init();
  }
  barrier_cta();
  const uint32 many = once + 8, four = once + 16, two = once + 24, tile = smem + kK;
  const bool first = thread_index() == 0, group = warpgroup == 1;
  const int lane = thread_index() % 32;
  const auto load = [&](uint32 target, uint32 barrier, Site site = Site::here()) {
    tma_load(target, &params.k_map, barrier, 0, 0, 0, 0, site);
  };
  const auto all = [](uint64 d) { return Descriptors<kMmaK>{{d, d, d, d, d, d, d, d}}; };
  uint64 d = descriptor(tile, 128, 16), b = descriptor(tile, 128, 0);
  float s[1][kMmaN][4] = {}, o[1][kMmaV][4] = {};
  uint32 p[4][4] = {}, v[4] = {};
  switch (reinterpret_cast<uint64>(params.alibi_slopes)) {
"""
BODIES = [*CLEAN.values(), *(body for body, _ in FAULTS.values())]
PRELUDE = HEAD.count("\n") + CASES.count("\n") + 1


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Templates with one kernel of all BODIES: body i is case i, on line PRELUDE + i."""
    text = "".join(f"case {i}: {{ {body} }} break;\n" for i, body in enumerate(BODIES))
    folder = tmp_path_factory.mktemp("cases") / "templates"
    return templates_of(folder, f"{HEAD}{CASES}{text}}}\n}}\n")


def run_body(templates: Path, body: str, seed: int) -> Outcome:
    """Run one of BODIES."""
    x = encode(np.ones((1, 128, 1, 128), np.float32), "bf16")
    boxes = ((64, 1, 64, 1),) * 3
    outcome, _ = run(SPEC, templates, x, x, x, boxes, (1,), BODIES.index(body), seed)
    return outcome


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_where_nothing_is_wrong(cases: Path, name: str) -> None:
    for seed in range(4):
        assert run_body(cases, CLEAN[name], seed).findings == []


@pytest.mark.parametrize("name", FAULTS)
def test_misdeeds_are_found(cases: Path, name: str) -> None:
    """Of several findings, those that depend on the order of warps need not all be there."""
    body, what = FAULTS[name]
    wanted = {what} if isinstance(what, str) else what
    for seed in range(4):
        findings = run_body(cases, body, seed).findings
        got = {found.what for found in findings}
        assert got <= wanted
        assert bool(got) == bool(wanted)
        for found in findings:
            assert found.place.file == SPEC.kernel_file
            assert found.place.line == PRELUDE + BODIES.index(body)
            assert found.race == (found.what == RACE)


def test_lanes_that_find_pages_meet_at_tiles_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RTFLASH_BACKEND", "emulate")
    inference_calls.run(
        backend(EMULATED),
        VarlenCall(
            heads=2,
            heads_k=1,
            head_dim=192,
            num_splits=2,
            lengths_q=(65,),
            lengths_k=(2,),
            page_size=16,
        ),
    )
