// Shared memory, its barriers, and the producer that fills it.
//
// Q has a ring of kQueryStages buffers, K and V of kStages each. A buffer has two mbarriers:
// `full`, which the producer's copies complete, and `empty`, at which each consumer warp arrives
// when it has read it. With Q comes the place of its tile, so that only the producer looks for
// work.
#pragma once

#include "tiles.cuh"
//% if gather
#include "rows.cuh"
//% else
#include "boxes.cuh"
//% endif

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
      mbarrier_init(full(i), kHanders);  // the producer
      mbarrier_init(empty(i), kWarps);   // the consumers
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

/// The producer: finds the CTA's tiles, and copies Q, K and V as buffers become free. Its first
/// thread finds them.
struct Producer {
  const Params& params;
  const SharedMemory& smem;
  Copies copies;
  RingPlace<kQueryStages> q;
  RingPlace<kPlaces> place;
  RingPlace<kStages> k;
  RingPlace<kStages> v;  // up to one key tile behind

  __device__ __forceinline__ Producer(const Params& params, const SharedMemory& smem)
      : params(params), smem(smem), copies(params) {}

  // A ring's first round finds its buffers empty: the phase before the first counts as done.

  __device__ __forceinline__ void load_k(int n) {
    mbarrier_wait(smem.k_empty(k.stage), k.round ^ 1);
    copies.start_k(smem.k + k.stage * KeyTile::kBytes, smem.k_full(k.stage), noted(), n);
    k.advance();
  }

  __device__ __forceinline__ void load_v(int n) {
    mbarrier_wait(smem.v_empty(v.stage), v.round ^ 1);
    copies.start_v(smem.v + v.stage * ValueTile::kBytes, smem.v_full(v.stage), noted(), n);
    v.advance();
  }

  /// The tile's place, which is read as needed: registers are few.
  __device__ __forceinline__ Block noted() const {
    return load_block(smem.places + place.stage * kPlaceBytes);
  }

  /// Hands the tile to the consumers, with Q if it sees any key and is not to be rotated.
  __device__ __forceinline__ void load_q() {
    const Block block = noted();
    // What releases Q may need what is held back, which no copy of K has pushed on.
    if (block.n_begin >= block.n_end) copies.flush();
    mbarrier_wait(smem.q_empty(q.stage), q.round ^ 1);
    const uint32 full = smem.q_full(q.stage);
    if (kRotary == RotaryKind::none && block.n_begin < block.n_end) {
      copies.start_query(smem.q + q.stage * QueryTile::kBytes, full, block);
    } else {
      copies.hand_over(full);
    }
    q.advance();
  }

  __device__ __forceinline__ void run() {
    const bool first = copies.thread == 0;
    Tiles tiles(params);
#pragma unroll 1
    while (true) {
      // The place of kPlaces tiles before has been read: the tile was stored before the one behind
      // it released its Q.
      if (first) store_block(smem.places + place.stage * kPlaceBytes, tiles.block());
      barrier_loaders();
      const Block block = noted();
      if (block.batch == kNoBatch) break;
      const int n_begin = block.n_begin;
      const int n_last = max(block.n_end, n_begin) - 1;
      // K before Q, whose buffer is free later; then each K before the V of the tile before.
#pragma unroll 1
      for (int n = n_last; n >= n_begin - 1; --n) {
        if (n >= n_begin) load_k(n);
        if (n == n_last) {
          load_q();
        } else {
          load_v(n + 1);
        }
        if (first && n == min(n_begin, n_last)) tiles.draw();
      }
      place.advance();
    }
    load_q();
    copies.flush();
  }
};
