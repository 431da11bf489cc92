// Matrix products of a warpgroup by wgmma: 64 query rows, fp32 accumulation.
//
// Warp w of the warpgroup holds rows 16 w to 16 w + 15 of S and O, each lane as in an m16n8
// accumulator tile (sm80/mma.cuh). P, packed, is operand A as it stands; Q, K and V are read from
// shared memory by descriptors: 8 rows of a slab are one swizzle pattern.
#pragma once

#include "../sm80/copy.cuh"
#include "../softmax.cuh"
#include "ptx.cuh"

/// P as operand A, by k16 steps.
using ProbabilityFragment = uint32[kBlockN / 16][4];

/// The descriptor of a tile: start, the stride from slab to slab (which counts where columns are
/// the outer dimension), the stride from 8 rows to 8 rows, and the swizzle.
template <class Tile>
__device__ __forceinline__ uint64 tile_descriptor(uint32 tile_smem) {
  constexpr uint64 kSwizzle = Tile::kSlabColumns == 64 ? 1 : 2;
  return tile_smem >> 4 | static_cast<uint64>(Tile::kSlabBytes >> 4) << 16 |
         static_cast<uint64>(8 * Tile::kPitch >> 4) << 32 | kSwizzle << 62;
}

/// The descriptors of a tile's k16 steps along the columns.
template <class Tile>
__device__ __forceinline__ Descriptors<kMmaK> column_steps(uint64 tile) {
  constexpr int kSlabSteps = Tile::kSlabColumns / 16;
  Descriptors<kMmaK> steps;
#pragma unroll
  for (int k = 0; k < kMmaK; ++k) {
    steps.of_step[k] =
        tile + ((k % kSlabSteps * 16 * kElementBytes + k / kSlabSteps * Tile::kSlabBytes) >> 4);
  }
  return steps;
}

/// Starts S = Q K^T of the warpgroup's rows and a key tile.
__device__ __forceinline__ void multiply_query_key_async(ScoreTile& s, uint64 q, uint64 k_tile) {
  wgmma_scores(s, column_steps<QueryTile>(q), column_steps<KeyTile>(k_tile));
  wgmma_commit();
}

/// Starts O += P V. V is stored [key][column]: a k16 step is 16 rows.
__device__ __forceinline__ void multiply_probability_value_async(OutputTile& o,
                                                                 const ProbabilityFragment& p,
                                                                 uint64 v_tile) {
  Descriptors<kBlockN / 16> steps;
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    steps.of_step[k] = v_tile + (k * 16 * ValueTile::kPitch >> 4);
  }
  wgmma_output(o, p, steps);
  wgmma_commit();
}
