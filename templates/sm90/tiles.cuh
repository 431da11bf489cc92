// Which tiles a CTA that stays takes, one after the other.
#pragma once

#include "../block.cuh"
#include "ptx.cuh"

constexpr TilePlace kNoTile = {-1, -1};

/// A CTA's tiles. CTA b takes tile b, and then what it draws: the next one that nobody has. Without
/// a counter it takes every params.blocks-th.
///
/// Dense calls number them in sections, see block.cuh; sequences of unequal lengths one by one,
/// each head by head, the last tile first.
struct Tiles {
  const Params& params;
  int drawn;  // the tile at hand or the next, less `shift`
  // Of unequal lengths:
  int batch = -1;   // the sequence at hand
  int m_tiles = 0;  // of each of its heads
  int end = 0;      // its last tile's successor

  __device__ __forceinline__ explicit Tiles(const Params& params)
      : params(params), drawn(block_index() - shift()) {}

  /// Draws the next tile. The number takes a while to arrive; but who draws long before it can
  /// begin keeps the tile from those who could.
  __device__ __forceinline__ void draw() {
    drawn = params.next_tile == nullptr ? drawn + params.blocks : atomic_add(params.next_tile, 1);
  }

  /// The block of what was drawn; kNoBatch: there is nothing more. The splits of a tile follow one
  /// another.
  __device__ __forceinline__ Block block() {
    const int index = drawn + shift();
    const int tile = kSplit ? index / params.splits : index;
    const int split = kSplit ? index - tile * params.splits : 0;
    const TilePlace place = kRagged ? place_in_sequence(tile) : place_of(tile);
    if (place.pair >= 0) return locate_block(params, place, split);
    Block stop = {};
    stop.batch = kNoBatch;
    return stop;
  }

 private:
  __device__ __forceinline__ TilePlace place_of(int tile) const {
    const bool none = tile >= params.pairs * count_m_tiles(params, params.seqlen_q);
    return none ? kNoTile : place_in_section(params, tile);
  }

  __device__ __forceinline__ int shift() const {
    return params.next_tile == nullptr ? 0 : params.blocks;
  }

  __device__ __forceinline__ TilePlace place_in_sequence(int tile) {
    const int heads = tiled_heads(params);
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
