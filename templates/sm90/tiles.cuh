// Which tiles a CTA that stays takes, one after the other.
#pragma once

#include "../block.cuh"
#include "ptx.cuh"

// Of a dense call: under a causal mask a pair's last tile and its first are together as long as its
// second last and its second, and so on: all couples take the same time.
constexpr int kCouple = kMask == MaskKind::causal ? 2 : 1;

constexpr TilePlace kNoTile = {-1, -1};

/// The tiles of a dense call. CTA b takes couple b and every params.blocks-th behind it, couple by
/// couple, pair by pair.
struct DenseTiles {
  const Params& params;
  int couple = block_index();
  int taken = 0;  // tiles of the couple

  __device__ __forceinline__ explicit DenseTiles(const Params& params) : params(params) {}

  /// The next tile; kNoTile: there is none.
  __device__ __forceinline__ TilePlace next() {
    const int m_tiles = count_m_tiles(params, params.seqlen_q);
    const int couples = (m_tiles + kCouple - 1) / kCouple;
    if (couple >= params.pairs * couples) return kNoTile;
    const int pair = couple / couples;
    const int first = couple - pair * couples;
    const int last = m_tiles - 1 - first;
    const int m = taken == 0 ? last : first;
    if (++taken == kCouple || first == last) {
      taken = 0;
      couple += params.blocks;
    }
    return {pair, m};
  }
};

/// The tiles of sequences of unequal lengths: sequence by sequence, head by head, the last first.
/// CTA b takes tile b, and then what it draws: the next one that nobody has. Without a counter it
/// takes every params.blocks-th.
struct RaggedTiles {
  const Params& params;
  int drawn;        // the tile to take next, less `shift`
  int batch = -1;   // the sequence at hand
  int m_tiles = 0;  // of each of its heads
  int end = 0;      // its last tile's successor

  __device__ __forceinline__ explicit RaggedTiles(const Params& params)
      : params(params), drawn(block_index() - shift()) {}

  __device__ __forceinline__ int shift() const {
    return params.next_tile == nullptr ? 0 : params.blocks;
  }

  /// The next tile; kNoTile: there is none.
  __device__ __forceinline__ TilePlace next() {
    const int tile = drawn + shift();
    while (tile >= end) {
      if (++batch * params.heads >= params.pairs) return kNoTile;
      m_tiles = count_m_tiles(params, query_rows(params, batch).slots);
      end += m_tiles * params.heads;
    }
    // Drawn now, for it takes a while to arrive.
    drawn = params.next_tile == nullptr ? drawn + params.blocks : atomic_add(params.next_tile, 1);
    const int behind = end - 1 - tile;
    const int heads_behind = behind / m_tiles;
    return {(batch + 1) * params.heads - 1 - heads_behind, behind - heads_behind * m_tiles};
  }
};

template <bool kOfUnequalLengths>
struct TilesOf {
  using Type = DenseTiles;
};
template <>
struct TilesOf<true> {
  using Type = RaggedTiles;
};
using Tiles = TilesOf<kRagged>::Type;
