// Adds up what warps found that split the keys, normalises O and writes it and the LSE.
//
// Each warp leaves its O (fp32, not normalised), its references and its sums in shared memory, over
// the rings. Then a thread takes 4 columns of a row at a time.
#pragma once

#include "output.cuh"

// A row of a warp's O is 8 columns longer than it need be: the 8 bytes that the lanes of half a
// warp write then lie in different banks.
constexpr int kSumPitch = (kHeadDimVPadded + 8) * 4;
constexpr int kSumBytes = kBlockM * kSumPitch;  // of a warp's O
constexpr int kStateBytes = kBlockM * 4;        // of a warp's references, and of its sums
constexpr int kWarpBytes = kSumBytes + 2 * kStateBytes;

/// Leaves the warp's part.
__device__ __forceinline__ void leave_part(const OnlineSoftmax& softmax, const OutputTile& o,
                                           uint32 part_smem, int lane) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = 8 * r + lane / 4;
    if (lane % 4 == 0) {
      const uint32 state = part_smem + kSumBytes + row * 4;
      store_shared_4(state, __builtin_bit_cast(uint32, softmax.reference[r]));
      store_shared_4(state + kStateBytes, __builtin_bit_cast(uint32, softmax.row_sum[r]));
    }
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
      store_shared_8(part_smem + row * kSumPitch + (8 * j + lane % 4 * 2) * 4,
                     __builtin_bit_cast(uint32, o[0][j][2 * r]),
                     __builtin_bit_cast(uint32, o[0][j][2 * r + 1]));
    }
  }
}

/// A row's state over all warps.
struct RowState {
  float weight[kKeyWarps];  // of each warp's O
  float reference;
  float sum;

  __device__ __forceinline__ RowState(uint32 parts_smem, int row) : reference(kLowest), sum(0.f) {
    const uint32 state = parts_smem + kSumBytes + row * 4;
#pragma unroll
    for (int warp = 0; warp < kKeyWarps; ++warp) {
      weight[warp] = __builtin_bit_cast(float, load_shared_4(state + warp * kWarpBytes));
      reference = fmaxf(reference, weight[warp]);
    }
#pragma unroll
    for (int warp = 0; warp < kKeyWarps; ++warp) {
      const uint32 bits = load_shared_4(state + warp * kWarpBytes + kStateBytes);
      weight[warp] = exp2_approx(weight[warp] - reference);
      sum += weight[warp] * __builtin_bit_cast(float, bits);
    }
  }
};

/// Writes up to 4 columns of O.
__device__ __forceinline__ void store_columns(Output* o_gmem, const float (&value)[4], int column) {
  if constexpr (kSplit && kHeadDimV % 4 == 0) {
    const uint32 bits[4] = {
        __builtin_bit_cast(uint32, value[0]), __builtin_bit_cast(uint32, value[1]),
        __builtin_bit_cast(uint32, value[2]), __builtin_bit_cast(uint32, value[3])};
    store_global_16(o_gmem, bits);
  } else if constexpr (!kSplit && kStoreBytes >= 8) {
    store_global_8(o_gmem, pack_elements(value[0], value[1]), pack_elements(value[2], value[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i >= kHeadDimV) break;
      if constexpr (kSplit) {
        store_global_4(o_gmem + i, __builtin_bit_cast(uint32, value[i]));
      } else {
        store_global_2(o_gmem + i, static_cast<uint16>(pack_elements(value[i], 0.f)));
      }
    }
  }
}

/// Writes O and the LSE.
__device__ __forceinline__ void store_result(const Params& params, OnlineSoftmax& softmax,
                                             const OutputTile& o, uint32 parts_smem) {
  const int thread = thread_index();
  softmax.finish();
  // Closes the hazard that a slow warp still reads the Q, K or V that the parts overwrite.
  barrier_cta();
  leave_part(softmax, o, parts_smem + thread / 32 * kWarpBytes, thread % 32);
  // The parts are complete: a row is read by other threads than wrote it.
  barrier_cta();
  const Block block = locate_block(params);
  constexpr int kRowItems = (kHeadDimV + 3) / 4;
  for (int item = thread; item < kBlockM * kRowItems; item += kThreads) {
    const int row = item / kRowItems;
    const int column = (item - row * kRowItems) * 4;
    const OutputRow place(params, block, row);
    if (!place.inside(block)) break;
    const RowState state(parts_smem, row);
    const bool empty = !place.counts || state.sum == 0.f;
    if (column == 0) {
      const float lse = (state.reference + log2_approx(state.sum)) * kLn2;
      store_lse(place.lse_gmem(params, block), empty ? -kInfinity : lse);
    }
    // A partial row that saw no key has the weight 0: it is not read.
    if (kSplit && empty) continue;
    float value[4] = {};
#pragma unroll
    for (int warp = 0; warp < kKeyWarps; ++warp) {
      uint32 bits[4];
      load_shared_16(bits, parts_smem + warp * kWarpBytes + row * kSumPitch + column * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        value[i] += state.weight[warp] * __builtin_bit_cast(float, bits[i]);
      }
    }
    const float inverse = reciprocal_approx(state.sum);
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = empty ? 0.f : value[i] * inverse;
    store_columns(place.o_gmem(params, block) + column, value, column);
  }
  if constexpr (kRagged) clear_rest(params, block, thread);
}
