// Normalises O and writes it and the LSE, each warp its own rows, straight from registers.
#pragma once

#include "../epilogue.cuh"
#include "ptx.cuh"

/// Exchanges `low` of the lanes with a 1 in `bit` for `high` of the others.
__device__ __forceinline__ void exchange(uint32& low, uint32& high, int bit, int lane) {
  const bool odd = (lane & bit) != 0;
  const float given = __builtin_bit_cast(float, odd ? low : high);
  const uint32 taken = __builtin_bit_cast(uint32, shuffle_xor(given, bit));
  low = odd ? taken : low;
  high = odd ? high : taken;
}

/// Lane t of a quad holds element t of rows 0..3, afterwards elements 0..3 of row t.
__device__ __forceinline__ void transpose_in_quad(uint32 (&value)[4], int lane) {
  exchange(value[0], value[1], 1, lane);
  exchange(value[2], value[3], 1, lane);
  exchange(value[0], value[2], 2, lane);
  exchange(value[1], value[3], 2, lane);
}

/// Sets row r of each lane's O to 0.
__device__ __forceinline__ void clear_row(OutputTile& o, int r) {
#pragma unroll
  for (int j = 0; j < kMmaV; ++j) o[0][j][2 * r] = o[0][j][2 * r + 1] = 0.f;
}

/// Writes row r of each lane's O, times `inverse`: the lanes of a quad write a 16-byte chunk each.
__device__ __forceinline__ void store_row(const OutputTile& o, int r, float inverse,
                                          Element* row_gmem, bool inside, int lane) {
  constexpr int kQuadTiles = 4;
#pragma unroll
  for (int first = 0; first < kMmaV; first += kQuadTiles) {
    uint32 value[4];
#pragma unroll
    for (int i = 0; i < kQuadTiles; ++i) {
      const int j = first + i;
      value[i] =
          j < kMmaV ? pack_elements(o[0][j][2 * r] * inverse, o[0][j][2 * r + 1] * inverse) : 0;
    }
    transpose_in_quad(value, lane);
    const int column = (first + lane % 4) * kChunkElements;
    const int bytes = min(max((kHeadDimV - column) * kElementBytes, 0), kChunkBytes);
    if (inside && bytes > 0) store_chunk(row_gmem + column, value, bytes);
  }
}

/// Writes O and the LSE of the warp's rows of a tile.
__device__ __forceinline__ void store_rows(const Params& params, const Block& block,
                                           OnlineSoftmax& softmax, OutputTile& o, int thread) {
  const int lane = thread % 32;
  const int warp_row = thread / 32 * 16;
  softmax.finish();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const OutputRow place(params, block, warp_row + 8 * r + lane / 4);
    if (kRagged && !place.counts) softmax.row_sum[r] = 0.f;
    if (kSplit) continue;
    const bool empty = softmax.row_sum[r] == 0.f;
    // An empty row has no inverse, and may hold NaN from values that it does not see.
    if (empty) clear_row(o, r);
    const float inverse = empty ? 0.f : reciprocal_approx(softmax.row_sum[r]);
    Element* row_gmem = reinterpret_cast<Element*>(place.o_gmem(params, block));
    store_row(o, r, inverse, row_gmem, place.inside(block), lane);
  }
  if constexpr (kSplit) store_partial(params, block, softmax, o, warp_row, lane);
  store_lse_rows(params, block, softmax, warp_row, lane);
  if constexpr (kRagged) clear_rest(params, block, thread);
}
