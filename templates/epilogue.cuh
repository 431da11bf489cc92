// Normalises O and writes it and the LSE, where warps split the query rows.
#pragma once

#include "output.cuh"

/// Writes the LSE of the warp's rows, the first of them `warp_row` in the CTA.
__device__ __forceinline__ void store_lse_rows(const Params& params, const Block& block,
                                               const OnlineSoftmax& softmax, int warp_row,
                                               int lane) {
  // The four lanes of a quad hold the same rows: the first one writes.
  if (params.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const OutputRow place(params, block, warp_row + 8 * r + lane / 4);
    if (place.inside(block)) store_lse(place.lse_gmem(params, block), softmax.lse(r));
  }
}

/// Writes the warp's rows of O, normalised, in fp32.
__device__ __forceinline__ void store_partial(const Params& params, const Block& block,
                                              const OnlineSoftmax& softmax, const OutputTile& o,
                                              int warp_row, int lane) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const OutputRow place(params, block, warp_row + 8 * r + lane / 4);
    // A row that saw no key has the weight 0: it is not read.
    if (!place.inside(block) || softmax.row_sum[r] == 0.f) continue;
    const float inverse = reciprocal_approx(softmax.row_sum[r]);
    float* o_gmem = reinterpret_cast<float*>(place.o_gmem(params, block)) + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
      const int column = 8 * j + lane % 4 * 2;
      const uint32 low = __builtin_bit_cast(uint32, o[r / 2][j][r % 2 * 2] * inverse);
      const uint32 high = __builtin_bit_cast(uint32, o[r / 2][j][r % 2 * 2 + 1] * inverse);
      if (kHeadDimV % 2 == 0) {
        if (column < kHeadDimV) store_global_8(o_gmem + 8 * j, low, high);
      } else {
        if (column < kHeadDimV) store_global_4(o_gmem + 8 * j, low);
        if (column + 1 < kHeadDimV) store_global_4(o_gmem + 8 * j + 1, high);
      }
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

/// Writes the staged rows of O, in stores as wide as o allows.
__device__ __forceinline__ void store_stage(const Params& params, const Block& block,
                                            uint32 stage_smem, int thread) {
  const ThreadCopy<OutputStage, kBlockM, kHeadDimV> copy(thread);
#pragma unroll
  for (int pass = 0; pass < copy.kPasses; ++pass) {
    const int row = copy.row + pass * copy.kRowStep;
    if (copy.kPartialPass && row >= kBlockM) break;
    const OutputRow place(params, block, row);
    if (!place.inside(block)) break;
    Element* o_gmem =
        reinterpret_cast<Element*>(place.o_gmem(params, block)) + copy.chunk * kChunkElements;
#pragma unroll
    for (int slab = 0; slab < OutputStage::kSlabs; ++slab) {
      const bool whole = (slab + 1) * OutputStage::kSlabColumns <= kHeadDimV;
      const int bytes = copy.valid_bytes(slab);
      if (!whole && bytes == 0) continue;  // nothing is staged there
      uint32 value[4];
      load_shared_16(value, stage_smem + copy.tile_offset(slab, pass));
      store_chunk(o_gmem + slab * OutputStage::kSlabColumns, value, bytes);
    }
  }
}

/// Writes O and the LSE. O goes through shared memory (over Q, K and V), so that the stores to
/// global memory are wide and in order; partial results go straight. Everything about the CTA's
/// place is computed again: see thread_index().
__device__ __forceinline__ void store_result(const Params& params, OnlineSoftmax& softmax,
                                             const OutputTile& o, uint32 stage_smem) {
  const int thread = thread_index();
  const int lane = thread % 32;
  const int warp_row = thread / 32 * 16 * kMmaM;
  softmax.finish();
  if constexpr (!kSplit && !kRagged) {
    // Closes the hazard that a slow warp still reads the Q, K or V that the stage overwrites.
    barrier_cta();
    stage_output(softmax, o, stage_smem, warp_row, lane);
  }
  const Block block = locate_block(params);
  if constexpr (kRagged) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const OutputRow place(params, block, warp_row + 8 * r + lane / 4);
      if (!place.counts) softmax.row_sum[r] = 0.f;
    }
    if constexpr (!kSplit) {
      // As above.
      barrier_cta();
      stage_output(softmax, o, stage_smem, warp_row, lane);
    }
  }
  store_lse_rows(params, block, softmax, warp_row, lane);
  if constexpr (kSplit) {
    store_partial(params, block, softmax, o, warp_row, lane);
  } else {
    // The stage is complete: its rows are read by other threads than wrote them.
    barrier_cta();
    store_stage(params, block, stage_smem, thread);
  }
  if constexpr (kRagged) clear_rest(params, block, thread);
}
