// The flow of K and V to warps that split the keys: every warp has a ring of kStages tiles of its
// own, of kWarpKeys keys each, from the last key tile to the first. No warp waits for another.
//
// While tile n is multiplied, the kStages - 1 tiles before it travel.
#pragma once

#include "block.cuh"
#include "sm80/copy.cuh"

struct KeyValuePipeline {
  using KeyCopy = ThreadCopy<KeyTile, kWarpKeys, kHeadDim, 32>;
  using ValueCopy = ThreadCopy<ValueTile, kWarpKeys, kHeadDimV, 32>;

  const Params& params;
  const Block& block;
  KeyCopy k_copy;
  ValueCopy v_copy;
  const Element* k_gmem;  // this lane's first chunk of the next K tile to load; kPaged: the head's
  const Element* v_gmem;  // first element
  int next;               // the tile that is loaded next
  int warp_key;           // first of the warp's keys in a tile
  uint32 ring_smem;
  uint32 stage;       // byte offset in the ring of the tile at hand
  uint32 next_stage;  // and of the tile that is loaded next
  int page;           // kPaged: the page of key `lane` of the tile that is loaded next

  static constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kStartGroups = kStages - 1;  // groups of copies that `start` closes

  /// The keys and values of a block, from its last tile on; the rings start at `smem`.
  __device__ __forceinline__ KeyValuePipeline(const Params& params, const Block& block, uint32 smem,
                                              int thread)
      : params(params),
        block(block),
        k_copy(thread % 32),
        v_copy(thread % 32),
        next(block.n_end - 1),
        warp_key(thread / 32 * kWarpKeys),
        ring_smem(smem + thread / 32 * kRingBytes),
        stage(0),
        next_stage(0),
        page(-1) {
    const Strides& k = params.k_strides;
    const Strides& v = params.v_strides;
    k_gmem = params.k + block.head_k * k.head;
    v_gmem = params.v + block.head_k * v.head;
    if constexpr (kPaged) {
      look_up(thread % 32);
    } else {
      const int64 first_key = static_cast<int64>(next) * kBlockN + warp_key + block.k_begin;
      k_gmem = k_copy.first_chunk(k_gmem + block.k_batch * k.batch + first_key * k.row, k.row);
      v_gmem = v_copy.first_chunk(v_gmem + block.k_batch * v.batch + first_key * v.row, v.row);
    }
  }

  /// The K tile at hand.
  __device__ __forceinline__ uint32 k_tile() const { return ring_smem + stage; }

  /// The V tile at hand.
  __device__ __forceinline__ uint32 v_tile() const { return ring_smem + stage + KeyTile::kBytes; }

  /// Starts the flow with the last tiles.
  __device__ __forceinline__ void start(int) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_next();
  }

  /// Before S of tile n: its K and V are there.
  __device__ __forceinline__ void wait_k(int) {
    // Closes the hazard that a slow lane still reads the tile whose stage is filled next.
    barrier_warp();
    load_next();
    wait_copies<kStages - 1>();
    // The lane's own copies are there; this makes those of the others visible.
    barrier_warp();
  }

  /// Before O += P V of tile n: nothing more to wait for.
  __device__ __forceinline__ void wait_v(int) {}

  /// After tile n.
  __device__ __forceinline__ void advance() { stage = after(stage); }

 private:
  static __device__ __forceinline__ uint32 after(uint32 stage) {
    return stage + kStageBytes == kRingBytes ? 0 : stage + kStageBytes;
  }

  /// Looks up the page of this lane's key of tile `next`, well before it is needed.
  __device__ __forceinline__ void look_up(int lane) {
    const int key = next * kBlockN + warp_key + lane;
    page = -1;
    if (next >= block.n_begin && lane < kWarpKeys && key < block.seqlen_k) {
      page = Pages(params, block.batch).page_of(block.k_begin + key);
    }
  }

  /// Starts loading tile `next`, if there is one, and closes the group of its copies. Any tile may
  /// lack rows for this warp.
  __device__ __forceinline__ void load_next() {
    if (next >= block.n_begin) {
      const int key = next * kBlockN + warp_key;
      const uint32 k_smem = ring_smem + next_stage;
      const uint32 v_smem = k_smem + KeyTile::kBytes;
      if constexpr (kPaged) {
        load_pages(k_copy, k_smem, k_gmem, params.k_strides, block.k_begin + key);
        load_pages(v_copy, v_smem, v_gmem, params.v_strides, block.k_begin + key);
      } else {
        k_copy.load_async<true>(k_smem, k_gmem, params.k_strides.row, block.seqlen_k - key);
        v_copy.load_async<true>(v_smem, v_gmem, params.v_strides.row, block.seqlen_k - key);
        k_gmem -= kBlockN * params.k_strides.row;
        v_gmem -= kBlockN * params.v_strides.row;
      }
      --next;
      next_stage = after(next_stage);
      if constexpr (kPaged) look_up(thread_index() % 32);
    }
    commit_copies();
  }

  /// Starts loading a tile whose first row is in slot `slot`; lane l holds the page of its row l.
  template <class Copy>
  __device__ __forceinline__ void load_pages(const Copy& copy, uint32 tile_smem,
                                             const Element* head_gmem, const Strides& strides,
                                             int slot) const {
    const Pages pages(params, block.batch);
#pragma unroll
    for (int pass = 0; pass < Copy::kPasses; ++pass) {
      const int row = copy.row + pass * Copy::kRowStep;
      const int row_page = shuffle_index(page, row);
      const int64 offset = pages.row_offset(row_page, slot + row, strides);
      copy.template load_row_async<true>(tile_smem, pass,
                                         head_gmem + offset + copy.chunk * kChunkElements,
                                         pages.exists(row_page));
    }
  }
};
