// Normalises O and writes it and the LSE.
#pragma once

#include "block.cuh"
#include "sm80/copy.cuh"
#include "softmax.cuh"

/// Writes the LSE of the warp's rows, the first of them `warp_row` in the CTA.
__device__ __forceinline__ void store_lse(const Params& params, const Block& block,
                                          const OnlineSoftmax& softmax, int warp_row, int lane) {
  // The four lanes of a quad hold the same rows: the first one writes.
  if (params.lse == nullptr || lane % 4 != 0) return;
  const int64 pair = static_cast<int64>(block.batch) * params.heads + block.head;
  float* lse_gmem = params.lse + pair * params.seqlen_q + block.m_begin;
  const int rows = params.seqlen_q - block.m_begin;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = warp_row + 8 * r + lane / 4;
    if (kEvenM || row < rows) {
      store_global_4(lse_gmem + row, __builtin_bit_cast(uint32, softmax.lse(r)));
    }
  }
}

/// Puts the warp's rows of O, normalised, into the stage.
__device__ __forceinline__ void stage_output(const OnlineSoftmax& softmax, const OutputTile& o,
                                             uint32 stage_smem, int warp_row, int lane) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool empty = softmax.row_sum[r] == 0.f;
    const float inverse = reciprocal_approx(softmax.row_sum[r]);
    const int row = warp_row + 8 * r + lane / 4;
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
      const int i = r % 2 * 2;
      const uint32 pair = pack_elements(o[r / 2][j][i] * inverse, o[r / 2][j][i + 1] * inverse);
      const int slab = j / OutputStage::kSlabChunks;
      const int chunk = j % OutputStage::kSlabChunks;
      // An empty row has no inverse, and may hold NaN from values that it does not see.
      store_shared_4(stage_smem + OutputStage::offset(slab, row, chunk) + lane % 4 * 4,
                     empty ? 0 : pair);
    }
  }
}

/// Writes O and the LSE. O goes through shared memory (over Q, K and V), so that the stores to
/// global memory are wide and in order. Everything about the CTA's place is computed again: see
/// thread_index().
__device__ __forceinline__ void store_result(const Params& params, OnlineSoftmax& softmax,
                                             const OutputTile& o, uint32 stage_smem) {
  const int thread = thread_index();
  const int lane = thread % 32;
  const int warp_row = thread / 32 * 16 * kMmaM;
  softmax.finish();
  // Closes the hazard that a slow warp still reads the Q, K or V that the stage overwrites.
  barrier_cta();
  stage_output(softmax, o, stage_smem, warp_row, lane);
  const Block block = locate_block(params);
  store_lse(params, block, softmax, warp_row, lane);
  // The stage is complete: its rows are read by other threads than wrote them.
  barrier_cta();

  const ThreadCopy<OutputStage, kBlockM, kHeadDimV> copy(thread);
  const Strides& strides = params.o_strides;
  Element* o_gmem = params.o + block.batch * strides.batch + block.head * strides.head +
                    (block.m_begin + copy.row) * strides.row + copy.chunk * kChunkElements;
  const int rows = params.seqlen_q - block.m_begin;
#pragma unroll
  for (int pass = 0; pass < copy.kPasses; ++pass) {
    const int row = copy.row + pass * copy.kRowStep;
    if (copy.kRagged && row >= kBlockM) break;
    if (!kEvenM && row >= rows) break;
#pragma unroll
    for (int slab = 0; slab < OutputStage::kSlabs; ++slab) {
      const bool whole = (slab + 1) * OutputStage::kSlabColumns <= kHeadDimV;
      const int bytes = copy.valid_bytes(slab);
      if (!whole && bytes == 0) continue;  // nothing is staged there
      uint32 value[4];
      load_shared_16(value, stage_smem + copy.tile_offset(slab, pass));
      store_chunk(o_gmem + slab * OutputStage::kSlabColumns, value, bytes);
    }
    o_gmem += copy.kRowStep * strides.row;
  }
}
