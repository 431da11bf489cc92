// Which part of the problem a tile is: its number -> sequence, head, rows and the range of key
// tiles.
//
// Rows are query positions; with kPackGqa row i is position i / group of head i % group of the
// group, so that all query heads of a key head share one read of its keys.
#pragma once

#include "divide.cuh"

constexpr int kNoBatch = -1;  // there is no more work

struct alignas(16) Block {
  int batch;
  int head;     // query head; with kPackGqa the group's first
  int head_k;   // its key head
  int split;    // which part of the keys
  int m_begin;  // first row
  int n_begin;  // key tiles [n_begin, n_end), in tiles of kBlockN; empty: no key is visible
  int n_end;
  int seqlen_q;  // of the sequence
  int seqlen_k;
  int q_begin;    // the sequence's first row in packed q and o
  int q_slots;    // positions from there on that are its to write: seqlen_q or more
  int k_begin;    // the row of its first key in k and v
  int k_batch;    // the row of its batch in k and v
  int unused[3];  // 64 bytes in all
};

/// The query position of a row.
__device__ __forceinline__ int row_position(const Params& params, int row) {
  return kPackGqa ? divide(row, params.group) : row;
}

/// Heads of which each has tiles of its own: key heads with kPackGqa, query heads without.
__device__ __forceinline__ int tiled_heads(const Params& params) {
  return kPackGqa ? divide(params.heads, params.group) : params.heads;
}

/// Entry `index` of an int array.
__device__ __forceinline__ int load_int(const int* array_gmem, int64 index) {
  return static_cast<int>(load_global_4(array_gmem + index));
}

/// Where the queries of sequence `batch` lie in packed q. Offsets that lie outside the tensor are
/// cut off there.
struct QueryRows {
  int begin;
  int length;
  int slots;  // positions from `begin` on that are the sequence's to write: `length` or more
};

__device__ __forceinline__ QueryRows query_rows(const Params& params, int batch) {
  const int* offsets = params.sequences.cu_seqlens_q;
  if (offsets == nullptr) return {0, params.seqlen_q, params.seqlen_q};
  const int begin = min(max(load_int(offsets, batch), 0), params.total_q);
  const int end = min(max(load_int(offsets, batch + 1), begin), params.total_q);
  const bool last =
      // rows behind the last sequence are its to write
      (batch + 1) * tiled_heads(params) == params.pairs;
  return {begin, end - begin, (last ? params.total_q : end) - begin};
}

/// Finds the block's sequence. Offsets and lengths that lie outside the tensors are cut off there,
/// so that a malformed array can give wrong results but no access outside.
__device__ __forceinline__ void place_sequence(const Params& params, Block& block) {
  const Sequences& given = params.sequences;
  const int b = block.batch;
  const QueryRows rows = query_rows(params, b);
  block.q_begin = rows.begin;
  block.seqlen_q = rows.length;
  block.q_slots = rows.slots;
  if (given.seqused_q != nullptr) {
    block.seqlen_q = min(max(load_int(given.seqused_q, b), 0), block.seqlen_q);
  }
  if (given.cu_seqlens_k != nullptr) {
    const int first = load_int(given.cu_seqlens_k, b);
    const int begin = kPaged ? first : min(max(first, 0), params.k_rows);
    const int room = kPaged ? params.seqlen_k : params.k_rows - begin;
    block.k_begin = kPaged ? 0 : begin;
    block.seqlen_k = min(max(load_int(given.cu_seqlens_k, b + 1) - begin, 0), room);
  }
  if (given.seqused_k != nullptr) {
    const int used = load_int(given.seqused_k, b) + params.seqlen_new;
    block.seqlen_k = min(max(used, 0), block.seqlen_k);
  }
  if (given.leftpad_k != nullptr) {
    const int pad = min(max(load_int(given.leftpad_k, b), 0), block.seqlen_k);
    block.k_begin += pad;
    block.seqlen_k -= pad;
  }
  if (given.cache_batch_idx != nullptr) {
    block.k_batch = load_int(given.cache_batch_idx, b);
    if (static_cast<uint32>(block.k_batch) >= static_cast<uint32>(params.k_batch)) {
      block.k_batch = block.seqlen_k = 0;
    }
  }
}

/// Key tiles [begin, end).
struct KeyTiles {
  int begin;
  int end;
};

/// The key tiles of which rows [row_begin, row_end) see some key.
__device__ __forceinline__ KeyTiles tiles_seen(const Params& params, const Block& block,
                                               int row_begin, int row_end) {
  KeyTiles seen = {0, (block.seqlen_k + kBlockN - 1) / kBlockN};
  if constexpr (kMask != MaskKind::full) {
    // Query position i stands at key i + seqlen_k - seqlen_q (bottom-right) and sees window_right
    // keys beyond it.
    const int shift = block.seqlen_k - block.seqlen_q;
    const int end = row_position(params, row_end - 1) + 1;
    const int right = kMask == MaskKind::causal ? 0 : params.window_right;
    const int keys_end = max(min(end, block.seqlen_q) + shift + right, 0);
    seen.end = min(seen.end, (keys_end + kBlockN - 1) / kBlockN);
    if constexpr (kMask == MaskKind::window) {
      const int first = row_position(params, row_begin) + shift;
      seen.begin = max(first - params.window_left, 0) / kBlockN;
    }
  }
  return seen;
}

/// A tile of rows: which (batch, head) pair it belongs to and which of the pair's tiles it is.
struct TilePlace {
  int pair;
  int m;
};

/// The tiles of rows of a pair that has so many query positions; no more than the longest has.
__device__ __forceinline__ int count_m_tiles(const Params& params, int positions) {
  const int rows = min(positions, params.seqlen_q) * (kPackGqa ? params.group.value : 1);
  return (rows + kBlockM - 1) / kBlockM;
}

/// Tile order where each tile has a CTA: the (batch, head) pairs are cut into sections of
/// `params.section` whose keys and values fit L2 together. Within a section all pairs take their
/// last query tile first: under a causal mask the longest work then starts first. With section 1
/// the tiles of one pair follow one another. (LPT within L2 sections: FlashAttention-3.)
__device__ __forceinline__ TilePlace place_in_section(const Params& params, int index) {
  const int m_tiles = count_m_tiles(params, params.seqlen_q);
  const int section_tiles = params.section * m_tiles;
  const int section = index / section_tiles;
  const int in_section = index - section * section_tiles;
  const int pairs = min(params.section, params.pairs - section * params.section);
  const int m = in_section / pairs;
  return {section * params.section + in_section - m * pairs, m_tiles - 1 - m};
}

/// The block of a tile, and of part `split` of its keys.
__device__ __forceinline__ Block locate_block(const Params& params, const TilePlace& place,
                                              int split) {
  const int pair = place.pair;

  Block block;
  const int heads = tiled_heads(params);
  block.batch = pair / heads;
  const int head = pair - block.batch * heads;
  block.head = kPackGqa ? head * params.group.value : head;
  block.head_k = kPackGqa ? head : divide(head, params.group);
  block.split = split;
  block.m_begin = place.m * kBlockM;
  block.seqlen_q = block.q_slots = params.seqlen_q;
  block.seqlen_k = params.seqlen_k;
  block.q_begin = block.k_begin = 0;
  block.k_batch = block.batch;
  if constexpr (kRagged) place_sequence(params, block);

  const KeyTiles seen = tiles_seen(params, block, block.m_begin, block.m_begin + kBlockM);
  block.n_begin = seen.begin;
  block.n_end = seen.end;
  if constexpr (kSplit) {
    // Parts of equal length, but for one tile.
    const int tiles = max(block.n_end - block.n_begin, 0);
    const int part = tiles / params.splits;
    const int longer = tiles - part * params.splits;  // parts that take one tile more
    block.n_begin += block.split * part + min(block.split, longer);
    block.n_end = block.n_begin + part + (block.split < longer ? 1 : 0);
  }
  // Of a tile that lies past the sequence's queries only zeros are written.
  if (kRagged && row_position(params, block.m_begin) >= block.seqlen_q) block.n_end = block.n_begin;
  return block;
}

/// The block of a CTA, where each tile has one: the splits of a tile of rows follow one another.
__device__ __forceinline__ Block locate_block(const Params& params) {
  const int index = block_index();
  const int tile = kSplit ? index / params.splits : index;
  const int split = kSplit ? index - tile * params.splits : 0;
  return locate_block(params, place_in_section(params, tile), split);
}
