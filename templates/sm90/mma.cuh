// Matrix products of a warpgroup by wgmma: 64 query rows, fp32 accumulation.
//
// Warp w of the warpgroup holds rows 16 w to 16 w + 15 of S and O, each lane as in an m16n8
// accumulator tile (sm80/mma.cuh). P, packed, is operand A as it stands; Q, K and V are read from
// shared memory by descriptors: 8 rows of a slab are one swizzle pattern.
#pragma once

#include "../sm80/copy.cuh"
#include "../softmax.cuh"
#include "ptx.cuh"

/// One k16 step of P as operand A.
using ProbabilityFragment = uint32[kBlockN / 16][4];

/// The descriptor of a tile: start, the stride from slab to slab (which counts where columns are
/// the outer dimension), the stride from 8 rows to 8 rows, and the swizzle.
template <class Tile>
__device__ __forceinline__ uint64 tile_descriptor(uint32 tile_smem) {
  constexpr uint64 kSwizzle = Tile::kSlabColumns == 64 ? 1 : 2;
  return tile_smem >> 4 | static_cast<uint64>(Tile::kSlabBytes >> 4) << 16 |
         static_cast<uint64>(8 * Tile::kPitch >> 4) << 32 | kSwizzle << 62;
}

/// What k16 step k along the columns adds to a tile's descriptor.
template <class Tile>
__device__ __forceinline__ uint64 column_step(int k) {
  constexpr int kSlabSteps = Tile::kSlabColumns / 16;
  return (k % kSlabSteps * 16 * kElementBytes + k / kSlabSteps * Tile::kSlabBytes) >> 4;
}

/// Starts S = Q K^T of the warpgroup's rows and a key tile.
__device__ __forceinline__ void multiply_query_key_async(ScoreTile& s, uint64 q, uint64 k_tile) {
#pragma unroll
  for (int k = 0; k < kMmaK; ++k) {
    wgmma_scores(s, q + column_step<QueryTile>(k), k_tile + column_step<KeyTile>(k), k != 0);
  }
  wgmma_commit();
}

/// Starts O += P V. V is stored [key][column]: a k16 step is 16 rows.
__device__ __forceinline__ void multiply_probability_value_async(OutputTile& o,
                                                                 const ProbabilityFragment& p,
                                                                 uint64 v_tile) {
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    wgmma_output(o, p[k], v_tile + (k * 16 * ValueTile::kPitch >> 4));
  }
  wgmma_commit();
}
