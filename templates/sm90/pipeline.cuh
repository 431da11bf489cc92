// Shared memory, its barriers, and the producer that fills it.
//
// Q has a ring of kQueryStages buffers, K and V of kStages each. A buffer has two mbarriers:
// `full`, which the producer's copies complete, and `empty`, at which each consumer warp arrives
// when it has read it. With Q comes the place of its tile, so that only the producer looks for
// work.
#pragma once

#include "../sm80/copy.cuh"
#include "ptx.cuh"
#include "tiles.cuh"

constexpr uint32 kTileAlignment = 1024;  // of the widest swizzle pattern
constexpr int kMbarrierBytes = 8;

// A tile's place is written before its Q has a buffer, and read until the tile is stored, long
// after its Q has been released: two places more than buffers of Q.
constexpr int kPlaces = kQueryStages + 2;
constexpr int kPlaceBytes = 64;

/// A place in a ring of kSize buffers, and how often the ring has been gone round, modulo 2.
template <int kSize>
struct RingPlace {
  int stage = 0;
  int round = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kSize) {
      stage = 0;
      round ^= 1;
    }
  }
};

/// Addresses in shared memory.
struct SharedMemory {
  uint32 q;  // kQueryStages tiles
  uint32 k;  // kStages tiles
  uint32 v;
  uint32 places;    // kPlaces
  uint32 barriers;  // full and empty of each buffer of q, k, v

  __device__ __forceinline__ explicit SharedMemory(uint32 start)
      : q((start + kTileAlignment - 1) / kTileAlignment * kTileAlignment),
        k(q + kQueryStages * QueryTile::kBytes),
        v(k + kStages * KeyTile::kBytes),
        places(v + kStages * ValueTile::kBytes),
        barriers(places + kPlaces * kPlaceBytes) {}

  __device__ __forceinline__ uint32 full(int buffer) const {
    return barriers + 2 * buffer * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32 empty(int buffer) const {
    return full(buffer) + kMbarrierBytes;
  }
  __device__ __forceinline__ uint32 q_full(int stage) const { return full(stage); }
  __device__ __forceinline__ uint32 q_empty(int stage) const { return empty(stage); }
  __device__ __forceinline__ uint32 k_full(int stage) const { return full(kQueryStages + stage); }
  __device__ __forceinline__ uint32 k_empty(int stage) const { return empty(kQueryStages + stage); }
  __device__ __forceinline__ uint32 v_full(int stage) const {
    return full(kQueryStages + kStages + stage);
  }
  __device__ __forceinline__ uint32 v_empty(int stage) const {
    return empty(kQueryStages + kStages + stage);
  }

  /// Makes the barriers. One thread; the others must not use them before a barrier of the CTA.
  __device__ __forceinline__ void init_barriers() const {
#pragma unroll
    for (int i = 0; i < kQueryStages + 2 * kStages; ++i) {
      mbarrier_init(full(i), 1);        // the producer
      mbarrier_init(empty(i), kWarps);  // the consumers
    }
    fence_mbarrier_init();
  }
};

static_assert(kTileAlignment + kQueryStages * QueryTile::kBytes +
                      kStages * (KeyTile::kBytes + ValueTile::kBytes) + kPlaces * kPlaceBytes +
                      2 * (kQueryStages + 2 * kStages) * kMbarrierBytes <=
                  kSharedBytes,
              "Spec.shared_bytes");

/// A Block as it lies in shared memory.
struct BlockWords {
  uint32 words[4][4];
};
static_assert(sizeof(Block) == kPlaceBytes && sizeof(BlockWords) == kPlaceBytes, "bit for bit");

__device__ __forceinline__ void store_block(uint32 place_smem, const Block& block) {
  const BlockWords words = __builtin_bit_cast(BlockWords, block);
#pragma unroll
  for (int i = 0; i < 4; ++i) store_shared_16(place_smem + 16 * i, words.words[i]);
}

__device__ __forceinline__ Block load_block(uint32 place_smem) {
  BlockWords words;
#pragma unroll
  for (int i = 0; i < 4; ++i) load_shared_16(words.words[i], place_smem + 16 * i);
  return __builtin_bit_cast(Block, words);
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

// Threads that load: to find the pages of a tile one after the other would take too long.
constexpr int kLoaders = kPaged ? 32 : 1;

/// Meeting of those that load.
__device__ __forceinline__ void barrier_loaders() {
  if constexpr (kLoaders > 1) barrier_warp();
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
    const int page_row = slot % params.page_size;
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      tma_load(tile_smem + slab * Tile::kSlabBytes + row * Tile::kPitch, &map, full,
               slab * Tile::kSlabColumns, block.head_k, page_row, page);
    }
  }
}

/// The producer: one thread finds the CTA's tiles, and copies Q, K and V as buffers become free. Of
/// pages a warp does, whose first lane acts alone where one is enough.
struct Producer {
  const Params& params;
  const SharedMemory& smem;
  int lane;
  RingPlace<kQueryStages> q;
  RingPlace<kPlaces> place;
  RingPlace<kStages> ring;  // of V; K is up to one key tile ahead

  __device__ __forceinline__ Producer(const Params& params, const SharedMemory& smem)
      : params(params), smem(smem), lane(kLoaders > 1 ? thread_index() : 0) {
    prefetch_tensor_map(&params.q_map);
    prefetch_tensor_map(&params.k_map);
    prefetch_tensor_map(&params.v_map);
  }

  // A ring's first round finds its buffers empty: the phase before the first counts as done.

  __device__ __forceinline__ void load_k(int n, const RingPlace<kStages>& at) const {
    mbarrier_wait(smem.k_empty(at.stage), at.round ^ 1);
    load_keys<KeyTile>(smem.k + at.stage * KeyTile::kBytes, params.k_map, smem.k_full(at.stage), n);
  }

  __device__ __forceinline__ void load_v(int n) {
    mbarrier_wait(smem.v_empty(ring.stage), ring.round ^ 1);
    load_keys<ValueTile>(smem.v + ring.stage * ValueTile::kBytes, params.v_map,
                         smem.v_full(ring.stage), n);
    ring.advance();
  }

  /// Notes the tile's place, from where it is read as needed: registers are few. That of kPlaces
  /// tiles before has been read: the tile was stored before the one behind it released its Q.
  __device__ __forceinline__ void note(const Block& block) const {
    if (lane == 0) store_block(smem.places + place.stage * kPlaceBytes, block);
    barrier_loaders();
  }

  __device__ __forceinline__ Block noted() const {
    return load_block(smem.places + place.stage * kPlaceBytes);
  }

  /// Hands the tile to the consumers, with Q if it sees any key and is not to be rotated.
  __device__ __forceinline__ void load_q() {
    mbarrier_wait(smem.q_empty(q.stage), q.round ^ 1);
    barrier_loaders();  // one that still waits would miss the phase
    const Block block = noted();
    if (lane > 0) {
      // The first lane does it.
    } else if (kRotary == RotaryKind::none && block.n_begin < block.n_end) {
      const bool packed = kRagged && params.sequences.cu_seqlens_q != nullptr;
      load_tile<QueryTile>(smem.q + q.stage * QueryTile::kBytes, params.q_map, smem.q_full(q.stage),
                           block.head, block.q_begin + row_position(params, block.m_begin),
                           packed ? 0 : block.batch);
    } else {
      mbarrier_arrive(smem.q_full(q.stage));
    }
    q.advance();
  }

  /// Starts the copy of key tile n of K or V.
  template <class Tile>
  __device__ __forceinline__ void load_keys(uint32 tile_smem, const TensorMap& map, uint32 full,
                                            int n) const {
    const Block block = noted();
    if constexpr (kPaged) {
      load_tile_by_pages<Tile>(params, tile_smem, map, full, block, n, lane);
    } else {
      // Packed k and v have no batches.
      const bool packed = kRagged && params.sequences.cu_seqlens_k != nullptr;
      load_tile<Tile>(tile_smem, map, full, block.head_k, block.k_begin + n * kBlockN,
                      packed ? 0 : block.k_batch);
    }
  }

  __device__ __forceinline__ void run() {
    Tiles tiles(params, lane);
#pragma unroll 1
    for (Work work = tiles.work(); work.tile.pair >= 0; work = tiles.work()) {
      const Block block = locate_block(params, work.tile, work.split);
      note(block);
      const int n_begin = block.n_begin;
      int n = block.n_end - 1;
      // K first: its buffers are free before Q's is.
      if (n >= n_begin) load_k(n, ring);
      load_q();
      if (n <= n_begin) tiles.draw();
#pragma unroll 1
      for (; n > n_begin; --n) {
        if (n == n_begin + 1) tiles.draw();
        RingPlace<kStages> next = ring;
        next.advance();
        load_k(n - 1, next);
        load_v(n);
      }
      if (n == n_begin) load_v(n);
      place.advance();
    }
    Block stop = {};
    stop.batch = kNoBatch;
    note(stop);
    load_q();
  }
};
