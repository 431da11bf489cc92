// Attention forward with mma.sync, for sm_75 to sm_120: one CTA per query tile, head and batch.
//
//   S = Q K^T;  P = softmax(S * scale);  O = P V
//
// Q is loaded once. K and V flow through shared memory tile by tile from right to left, so that the
// tiles which masks cut come first. S, P and O live in registers; warps split the query rows and
// never exchange anything but barriers. The algorithm is FlashAttention-2's (Dao, 2023). For a few
// rows (decoding) the warps split the keys instead, and add their results up at the end.
#include "block.cuh"
#include "mask.cuh"
#include "query.cuh"
#include "score.cuh"
//% if key_warps == 1
#include "epilogue.cuh"
#include "sm80/pipeline.cuh"
//% else
#include "epilogue_keys.cuh"
#include "sm80/ring.cuh"
//% endif

/// Starts the copy of the CTA's query tile, as a group of its own.
__device__ __forceinline__ void copy_query(const Params& params, const Block& block, uint32 q_smem,
                                           int thread) {
  if constexpr (kRotary != RotaryKind::none) {
    store_rotated_query<kBlockM, kThreads>(params, block, q_smem, 0, thread);
  } else {
    load_query_async<kThreads>(params, block, q_smem, thread);
  }
  commit_copies();
}

/// One k16 step of Q as operand A: lane l addresses row l % 16, chunk l / 16.
__device__ __forceinline__ void load_query(QueryFragment& q, uint32 lane_smem, int k) {
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
    ldmatrix_x4(q[m], QueryTile::ldmatrix_address(lane_smem, m, k));
  }
}

/// S += Q K^T for the warp's rows and one key tile. K is stored [key][column], which is what
/// operand B wants.
__device__ __forceinline__ void multiply_query_key(ScoreTile& s, uint32 q_lane_smem,
                                                   QueryFragment (&q_fragments)[kMmaK],
                                                   uint32 k_lane_smem) {
#pragma unroll kQueryKeyUnroll
  for (int k = 0; k < kMmaK; ++k) {
    QueryFragment q_loaded;
    if constexpr (!kQInRegisters) load_query(q_loaded, q_lane_smem, k);
    QueryFragment& q = kQInRegisters ? q_fragments[k] : q_loaded;
#pragma unroll
    for (int j = 0; j < kMmaN; j += 2) {
      uint32 b[4];
      ldmatrix_x4(b, KeyTile::ldmatrix_address(k_lane_smem, j / 2, k));
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        mma_16x8x16(s[m][j], q[m], b[0], b[1]);
        mma_16x8x16(s[m][j + 1], q[m], b[2], b[3]);
      }
    }
  }
}

/// O += P V, P exponentiated 16 keys at a time just before it is used. V is stored [key][column]:
/// transposed on the way.
__device__ __forceinline__ void multiply_probability_value(OutputTile& o, OnlineSoftmax& softmax,
                                                           const ScoreTile& s, uint32 v_lane_smem) {
#pragma unroll
  for (int k = 0; k < kWarpKeys / 16; ++k) {
    uint32 p[kMmaM][4];
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) softmax.exponentiate(p[m], s, m, k);
#pragma unroll
    for (int j = 0; j < kMmaV; j += 2) {
      uint32 b[4];
      ldmatrix_x4_trans(b, ValueTile::ldmatrix_address(v_lane_smem, k, j / 2));
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        mma_16x8x16(o[m][j], p[m], b[0], b[1]);
        mma_16x8x16(o[m][j + 1], p[m], b[2], b[3]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    KERNEL_NAME(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared_smem[];
  const uint32 q_smem = shared_address(shared_smem);
  const int thread = thread_index();
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int warp_row = warp / kKeyWarps * 16 * kMmaM;
  const Block block = locate_block(params);
  if (kRagged && row_position(params, block.m_begin) >= block.q_slots) return;

  // ldmatrix: where this lane's row and 16-byte chunk of a 16x16 tile of Q and V, and of K, lie.
  const uint32 q_lane_smem = opaque(q_smem + QueryTile::offset(0, warp_row + lane % 16, lane / 16));
  const uint32 k_lane = opaque(KeyTile::offset(0, lane / 16 * 8 + lane % 8, lane / 8 % 2));
  const uint32 v_lane = opaque(ValueTile::offset(0, lane % 16, lane / 16));

  KeyValuePipeline pipeline(params, block, q_smem + QueryTile::kBytes, thread);
  QueryFragment q_fragments[kMmaK];
  if (block.n_begin < block.n_end) {
    copy_query(params, block, q_smem, thread);
    pipeline.start(block.n_end - 1);
    if constexpr (kQInRegisters || kKeyWarps > 1) {
      wait_copies<KeyValuePipeline::kStartGroups>();  // Q's; what is newer may still travel
      barrier_cta();                                  // every thread's part of Q is there
    }
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int k = 0; k < kMmaK; ++k) load_query(q_fragments[k], q_lane_smem, k);
    }
  }

  const int first_row = block.m_begin + warp_row + lane / 4;
  const int first_column = warp % kKeyWarps * kWarpKeys + lane % 4 * 2;
  const Mask mask(params, block, block.m_begin, block.m_begin + kBlockM, first_row, first_column);
  const Score score(params, block, first_row, first_column);
  OnlineSoftmax softmax(score.exponent_scale());
  OutputTile o = {};

  for (int n = block.n_end - 1; n >= block.n_begin; --n) {
    ScoreTile s = {};
    pipeline.wait_k(n);
    multiply_query_key(s, q_lane_smem, q_fragments, pipeline.k_tile() + k_lane);
    score.apply(s, n);
    if (mask.cuts(n)) mask.apply(s, n);
    softmax.update(s, o);
    pipeline.wait_v(n);
    multiply_probability_value(o, softmax, s, pipeline.v_tile() + v_lane);
    pipeline.advance();
  }
  store_result(params, softmax, o, q_smem);
}
