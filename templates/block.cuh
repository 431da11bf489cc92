// Which part of the problem a CTA works on: blockIdx -> batch, head, query tile and the range of
// key tiles.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

struct Block {
  int batch;
  int head;     // query head
  int head_k;   // its key head
  int m_begin;  // first query row
  int n_begin;  // key tiles [n_begin, n_end), in tiles of kBlockN; empty: no key is visible
  int n_end;
};

/// Tile order: the (batch, head) pairs are cut into sections of `params.section` whose keys and
/// values fit L2 together. Within a section all pairs take their last query tile first: under a
/// causal mask the longest work then starts first. With section 1 the tiles of one pair follow one
/// another. (LPT within L2 sections: FlashAttention-3.)
__device__ __forceinline__ Block locate_block(const Params& params) {
  const int m_tiles = (params.seqlen_q + kBlockM - 1) / kBlockM;
  const int section_tiles = params.section * m_tiles;
  const int index = block_index();
  const int section = index / section_tiles;
  const int in_section = index - section * section_tiles;
  const int pairs = min(params.section, params.head_batches - section * params.section);
  const int m = in_section / pairs;
  const int pair = section * params.section + in_section - m * pairs;

  Block block;
  block.batch = pair / params.heads;
  block.head = pair - block.batch * params.heads;
  block.head_k = block.head / params.group;
  block.m_begin = (m_tiles - 1 - m) * kBlockM;
  block.n_begin = 0;
  block.n_end = (params.seqlen_k + kBlockN - 1) / kBlockN;
  if constexpr (kMask != MaskKind::full) {
    // Query row i stands at key i + seqlen_k - seqlen_q (bottom-right) and sees window_right keys
    // beyond it.
    const int shift = params.seqlen_k - params.seqlen_q;
    const int m_end = min(block.m_begin + kBlockM, params.seqlen_q);
    const int right = kMask == MaskKind::causal ? 0 : params.window_right;
    const int keys_end = max(m_end + shift + right, 0);
    block.n_end = min(block.n_end, (keys_end + kBlockN - 1) / kBlockN);
    if constexpr (kMask == MaskKind::window) {
      block.n_begin = max(block.m_begin + shift - params.window_left, 0) / kBlockN;
    }
  }
  return block;
}
