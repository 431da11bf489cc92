// Where results go, for both epilogues.
#pragma once

#include "block.cuh"
#include "sm80/copy.cuh"
#include "softmax.cuh"

/// A row of the CTA's tile as O and the LSE know it.
struct OutputRow {
  int position;  // in the sequence
  int head;
  bool counts;  // whether it is a query; a row that is not, but is the sequence's to write, is 0

  __device__ __forceinline__ OutputRow(const Params& params, const Block& block, int row)
      : position(row_position(params, block.m_begin + row)),
        head(block.head + (kPackGqa ? block.m_begin + row - position * params.group.value : 0)),
        counts(kEvenM || position < block.seqlen_q) {}

  /// Whether the row is the CTA's to write.
  __device__ __forceinline__ bool inside(const Block& block) const {
    return kEvenM || position < block.q_slots;
  }

  __device__ __forceinline__ Output* o_gmem(const Params& params, const Block& block) const {
    const Strides& strides = params.o_strides;
    return params.o + block.split * params.o_split_stride + block.batch * strides.batch +
           head * strides.head + static_cast<int64>(block.q_begin + position) * strides.row;
  }

  /// Null where no LSE is wanted.
  __device__ __forceinline__ float* lse_gmem(const Params& params, const Block& block) const {
    if (params.lse == nullptr) return nullptr;
    return params.lse + block.split * params.lse_split_stride +
           block.batch * params.lse_batch_stride + head * params.lse_head_stride + block.q_begin +
           position;
  }
};

/// Writes the LSE of a row, if it is wanted.
__device__ __forceinline__ void store_lse(float* lse_gmem, float lse) {
  if (lse_gmem != nullptr) store_global_4(lse_gmem, __builtin_bit_cast(uint32, lse));
}

/// Clears what belongs to no query and lies past the rows of the grid: the rest of the packed rows
/// after the last sequence (and of a sequence that is longer than seqlen_q says).
__device__ __forceinline__ void clear_rest(const Params& params, const Block& block, int thread) {
  const int group = kPackGqa ? params.group.value : 1;
  const int end = block.q_slots * group - block.m_begin;
  const int covered = (params.seqlen_q * group + kBlockM - 1) / kBlockM * kBlockM;
  if (block.m_begin + kBlockM < covered) return;
  for (int row = kBlockM + thread / 32; row < end; row += kWarps) {
    const OutputRow place(params, block, row);
    if (thread % 32 == 0) store_lse(place.lse_gmem(params, block), -kInfinity);
    if constexpr (!kSplit) {
      for (int column = thread % 32; column < kHeadDimV; column += 32) {
        store_global_2(place.o_gmem(params, block) + column, 0);
      }
    }
  }
}
