// Copies into shared memory by TMA.
#pragma once

#include "../block.cuh"
#include "../sm80/copy.cuh"
#include "ptx.cuh"

// Threads that load. Of pages a warp: to find them one after the other would take too long.
constexpr int kLoaders = kPaged ? 32 : 1;
constexpr int kHanders = 1;  // that tell the consumers

/// Meeting of those that load.
__device__ __forceinline__ void barrier_loaders() {
  if constexpr (kLoaders > 1) barrier_warp();
}

/// Starts the copy of a tile: a box for each slab of its columns. Its barrier expects the bytes.
template <class Tile>
__device__ __forceinline__ void load_tile(uint32 tile_smem, const TensorMap& map, uint32 full,
                                          int head, int row, int batch) {
  mbarrier_arrive_expect(full, Tile::kBytes);
#pragma unroll
  for (int slab = 0; slab < Tile::kSlabs; ++slab) {
    tma_load(tile_smem + slab * Tile::kSlabBytes, &map, full, slab * Tile::kSlabColumns, head, row,
             batch);
  }
}

/// Starts the copy of key tile n by pages, in boxes of as many rows as divide pages and tiles
/// alike. What no key needs, or no page holds, becomes zero: TMA finds nothing behind the last
/// page.
template <class Tile>
__device__ __forceinline__ void load_tile_by_pages(const Params& params, uint32 tile_smem,
                                                   const TensorMap& map, uint32 full,
                                                   const Block& block, int n, int lane) {
  if (lane == 0) mbarrier_arrive_expect(full, Tile::kBytes);
  barrier_loaders();
  const Pages pages(params, block.batch);
#pragma unroll 1
  for (int row = lane * params.box_rows; row < kBlockN; row += kLoaders * params.box_rows) {
    const int slot = n * kBlockN + row;
    const int page = slot < block.seqlen_k ? pages.page_of(slot) : pages.pages;
    const int page_row = pages.row_of(slot);
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      tma_load(tile_smem + slab * Tile::kSlabBytes + row * Tile::kPitch, &map, full,
               slab * Tile::kSlabColumns, block.head_k, page_row, page);
    }
  }
}

/// Copies by TMA, which tells the consumers itself. The first of several threads acts alone where
/// one is enough.
struct Copies {
  const Params& params;
  int thread;  // of those that load

  __device__ __forceinline__ explicit Copies(const Params& params)
      : params(params), thread(kLoaders > 1 ? thread_index() : 0) {
    prefetch_tensor_map(&params.q_map);
    prefetch_tensor_map(&params.k_map);
    prefetch_tensor_map(&params.v_map);
  }

  /// Starts the copy of a query tile.
  __device__ __forceinline__ void start_query(uint32 tile_smem, uint32 full, const Block& block) {
    if (thread > 0) return;
    const bool packed = kRagged && params.sequences.cu_seqlens_q != nullptr;
    load_tile<QueryTile>(tile_smem, params.q_map, full, block.head,
                         block.q_begin + row_position(params, block.m_begin),
                         packed ? 0 : block.batch);
  }

  /// Starts the copy of key tile n of K.
  __device__ __forceinline__ void start_k(uint32 tile_smem, uint32 full, const Block& block,
                                          int n) {
    start_keys<KeyTile>(tile_smem, params.k_map, full, block, n);
  }

  /// Of V.
  __device__ __forceinline__ void start_v(uint32 tile_smem, uint32 full, const Block& block,
                                          int n) {
    start_keys<ValueTile>(tile_smem, params.v_map, full, block, n);
  }

  /// Hands over a buffer that holds nothing.
  __device__ __forceinline__ void hand_over(uint32 full) {
    barrier_loaders();  // all have waited for it: one that still waits would miss the phase
    if (thread == 0) mbarrier_arrive(full);
  }

  __device__ __forceinline__ void flush() {}

 private:
  template <class Tile>
  __device__ __forceinline__ void start_keys(uint32 tile_smem, const TensorMap& map, uint32 full,
                                             const Block& block, int n) {
    if constexpr (kPaged) {
      load_tile_by_pages<Tile>(params, tile_smem, map, full, block, n, thread);
    } else {
      // Packed k and v have no batches.
      const bool packed = kRagged && params.sequences.cu_seqlens_k != nullptr;
      load_tile<Tile>(tile_smem, map, full, block.head_k, block.k_begin + n * kBlockN,
                      packed ? 0 : block.k_batch);
    }
  }
};
