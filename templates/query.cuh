// Query rows in global memory, and rotated in shared memory.
#pragma once

#include "block.cuh"
#include "rotary.cuh"
#include "sm80/copy.cuh"

/// Row `row` of the CTA's query tile in global memory.
__device__ __forceinline__ const Element* query_row(const Params& params, const Block& block,
                                                    int row) {
  const Strides& strides = params.q_strides;
  const int position = row_position(params, block.m_begin + row);
  const int head =
      block.head + (kPackGqa ? block.m_begin + row - position * params.group.value : 0);
  return params.q + block.batch * strides.batch + head * strides.head +
         static_cast<int64>(block.q_begin + position) * strides.row;
}

/// Starts the copy of the CTA's query tile; `thread` is one of kTogether that do.
template <int kTogether>
__device__ __forceinline__ void load_query_async(const Params& params, const Block& block,
                                                 uint32 q_smem, int thread) {
  const ThreadCopy<QueryTile, kBlockM, kHeadDim, kTogether> copy(thread);
  if constexpr (kPackGqa) {
#pragma unroll
    for (int pass = 0; pass < copy.kPasses; ++pass) {
      const int row = copy.row + pass * copy.kRowStep;
      if (copy.kPartialPass && row >= kBlockM) break;
      const bool valid = row_position(params, block.m_begin + row) < block.seqlen_q;
      const Element* q_gmem = query_row(params, block, row) + copy.chunk * kChunkElements;
      copy.template load_row_async<true>(q_smem, pass, q_gmem, valid);
    }
  } else {
    const int64 stride = params.q_strides.row;
    const Element* q_gmem = copy.first_chunk(query_row(params, block, 0), stride);
    copy.template load_async<!kEvenM>(q_smem, q_gmem, stride, block.seqlen_q - block.m_begin);
  }
}

/// Writes rows [first, first + kCount) of the CTA's query tile rotated; `thread` is one of
/// kTogether that do. Without a causal mask or a window all queries stand at the position of the
/// first new key. (FlashAttention's rule.)
template <int kCount, int kTogether>
__device__ __forceinline__ void store_rotated_query(const Params& params, const Block& block,
                                                    uint32 q_smem, int first, int thread) {
  constexpr int kRowChunks = QueryTile::kSlabs * QueryTile::kSlabChunks;
  const int* used = params.sequences.seqused_k;
  const int cached =
      used != nullptr ? load_int(used, block.batch) : params.seqlen_k - params.seqlen_new;
#pragma unroll 1
  for (int i = thread; i < kCount * kRowChunks; i += kTogether) {
    const int row = first + i / kRowChunks;
    const int chunk = i % kRowChunks;
    const int position = row_position(params, block.m_begin + row);
    const bool valid = position < block.seqlen_q;
    const Element* row_gmem = query_row(params, block, valid ? row : 0);
    const Rotary rotary(params, cached + (params.rotate_by_row ? position : 0));
    uint32 value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = chunk * kChunkElements + 2 * j;
      const bool low = valid && column < kHeadDim;
      const bool high = valid && column + 1 < kHeadDim;
      value[j] = pack_elements(low ? rotary.rotated(row_gmem, column) : 0.f,
                               high ? rotary.rotated(row_gmem, column + 1) : 0.f);
    }
    const int slab = chunk / QueryTile::kSlabChunks;
    store_shared_16(q_smem + QueryTile::offset(slab, row, chunk % QueryTile::kSlabChunks), value);
  }
}
