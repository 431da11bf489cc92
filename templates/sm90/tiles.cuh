// Which tiles a CTA that stays takes, one after the other.
#pragma once

#include "../block.cuh"
#include "ptx.cuh"

constexpr TilePlace kNoTile = {-1, -1};

/// A tile of rows, and which part of the keys.
struct Work {
  TilePlace tile;
  int split;
};

/// A CTA's tiles. CTA b takes tile b, and then what it draws: the next one that nobody has. Without
/// a counter it takes every params.blocks-th.
///
/// Dense calls number them in sections, see block.cuh; sequences of unequal lengths one by one,
/// each head by head, the last tile first.
struct Tiles {
  const Params& params;
  int lane;   // of those that take the same tiles, of which the first draws
  int drawn;  // the tile at hand or the next, less `shift`
  // Of unequal lengths:
  int batch = -1;   // the sequence at hand
  int m_tiles = 0;  // of each of its heads
  int end = 0;      // its last tile's successor

  __device__ __forceinline__ Tiles(const Params& params, int lane)
      : params(params), lane(lane), drawn(block_index() - shift()) {}

  /// Draws the next tile. The number takes a while to arrive; but who draws long before it can
  /// begin keeps the tile from those who could.
  __device__ __forceinline__ void draw() {
    if (params.next_tile == nullptr) {
      drawn += params.blocks;
    } else if (lane == 0) {
      drawn = atomic_add(params.next_tile, 1);
    }
  }

  /// What was drawn; kNoTile: there is nothing more. The splits of a tile follow one another.
  __device__ __forceinline__ Work work() {
    if constexpr (kPaged) drawn = shuffle_index(drawn, 0);
    const int index = drawn + shift();
    const int tile = kSplit ? index / params.splits : index;
    const int split = kSplit ? index - tile * params.splits : 0;
    if constexpr (kRagged) return {place_in_sequence(tile), split};
    if (tile >= params.pairs * count_m_tiles(params, params.seqlen_q)) return {kNoTile, 0};
    return {place_in_section(params, tile), split};
  }

 private:
  __device__ __forceinline__ int shift() const {
    return params.next_tile == nullptr ? 0 : params.blocks;
  }

  __device__ __forceinline__ TilePlace place_in_sequence(int tile) {
    const int heads = kPackGqa ? params.heads / params.group : params.heads;
    while (tile >= end) {
      if (++batch * heads >= params.pairs) return kNoTile;
      m_tiles = count_m_tiles(params, query_rows(params, batch).slots);
      end += m_tiles * heads;
    }
    const int behind = end - 1 - tile;
    const int heads_behind = behind / m_tiles;
    return {(batch + 1) * heads - 1 - heads_behind, behind - heads_behind * m_tiles};
  }
};
