// Copies into shared memory where TMA cannot read: small pages, odd strides.
#pragma once

#include "../query.cuh"
#include "ptx.cuh"

// A warpgroup copies; every thread hands over what it has copied.
constexpr int kLoaders = kWarpgroupThreads;
constexpr int kHanders = kLoaders;
constexpr int kLoadersBarrier = 15;  // named; the consumers' are the first ones

/// Meeting of those that load.
__device__ __forceinline__ void barrier_loaders() { barrier_sync(kLoadersBarrier, kLoaders); }

/// Copies row by row. Every thread starts its part of a tile, and tells the consumers of it when it
/// has landed: that is, when it has started its part of the next.
struct Copies {
  const Params& params;
  int thread = thread_index();  // of those that load
  uint32 handed = 0;            // the mbarrier of what is on its way; 0: nothing is

  __device__ __forceinline__ explicit Copies(const Params& params) : params(params) {}

  /// Starts the copy of a query tile.
  __device__ __forceinline__ void start_query(uint32 tile_smem, uint32 full, const Block& block) {
    load_query_async<kLoaders>(params, block, tile_smem, thread);
    hand_over(full);
  }

  /// Starts the copy of key tile n of K.
  __device__ __forceinline__ void start_k(uint32 tile_smem, uint32 full, const Block& block,
                                          int n) {
    start_keys<KeyTile, kHeadDim>(tile_smem, params.k, params.k_strides, full, block, n);
  }

  /// Of V.
  __device__ __forceinline__ void start_v(uint32 tile_smem, uint32 full, const Block& block,
                                          int n) {
    start_keys<ValueTile, kHeadDimV>(tile_smem, params.v, params.v_strides, full, block, n);
  }

  /// Hands over what was copied before, once it has landed; what was started since will be next.
  __device__ __forceinline__ void hand_over(uint32 full) {
    commit_copies();
    if (handed != 0) {
      wait_copies<1>();
      fence_proxy_async();  // wgmma reads what was written
      mbarrier_arrive(handed);
    }
    handed = full;
  }

  /// Hands over what is held back.
  __device__ __forceinline__ void flush() {
    if (handed == 0) return;
    wait_copies<0>();
    fence_proxy_async();
    mbarrier_arrive(handed);
    handed = 0;
  }

 private:
  /// What no key needs, or no page holds, becomes zero.
  template <class Tile, int kColumns>
  __device__ __forceinline__ void start_keys(uint32 tile_smem, const Element* matrix_gmem,
                                             const Strides& strides, uint32 full,
                                             const Block& block, int n) {
    const ThreadCopy<Tile, kBlockN, kColumns, kLoaders> copy(thread);
    const int rows = block.seqlen_k - n * kBlockN;
    const int first = block.k_begin + n * kBlockN;
    const Element* head_gmem = matrix_gmem + block.head_k * strides.head;
    if constexpr (kPaged) {
      copy.load_paged_async(tile_smem, head_gmem, strides, Pages(params, block.batch), first, rows);
    } else {
      head_gmem += block.k_batch * strides.batch + static_cast<int64>(first) * strides.row;
      const Element* first_gmem = copy.first_chunk(head_gmem, strides.row);
      copy.template load_async<true>(tile_smem, first_gmem, strides.row, rows);
    }
    hand_over(full);
  }
};
