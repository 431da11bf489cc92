// The kernels' only arguments, passed by value. layouts.py mirrors them: same order, same sizes.
#pragma once

#include "config.cuh"

/// Strides of a (batch, seqlen, heads, head_dim) tensor in elements; the inner stride is 1. A
/// packed (rows, heads, head_dim) tensor has batch stride 0. Of pages (pages, page_size, heads,
/// head_dim), `batch` is the stride from page to page.
struct Strides {
  int64 batch;
  int64 row;
  int64 head;
};

/// What numbers in [0, 2^31) are divided by, without a division.
struct Divisor {
  int value;
  uint32 multiplier;  // ceil(2^(31 + shift) / value)
  int shift;          // ceil(log2(value))
};

/// Where the sequences lie; each array may be null.
struct Sequences {
  const int* cu_seqlens_q;  // (batch + 1): sequence b has rows [b], [b + 1) of packed q
  const int* cu_seqlens_k;  // (batch + 1): and of packed k and v; with pages only the lengths count
  const int* seqused_q;     // (batch): queries that count
  const int* seqused_k;     // (batch): keys that count, before new ones
  const int* leftpad_k;     // (batch): slots before the first key
  const int* cache_batch_idx;  // (batch): row of the cache
  const int* block_table;      // (batch, columns): the page of every page_size slots
};

//% if isa == 90
/// Where and how a (column, head, row, batch) tensor lies, and the box of it that one TMA copies:
/// the driver's CUtensorMap.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};
//% endif

//% if kernel == "forward"
struct Params {
  //% if isa == 90 and not gather
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
  //% endif
  //% if isa == 90
  int* next_tile;  // counts the tiles that CTAs drew, from 0; null: see sm90/tiles.cuh
  //% endif
  const Element* q;           // (batch, seqlen_q, heads, kHeadDim)
  const Element* k;           // (batch, seqlen_k, heads / group, kHeadDim)
  const Element* v;           // (batch, seqlen_k, heads / group, kHeadDimV)
  Output* o;                  // ([splits], batch, seqlen_q, heads, kHeadDimV)
  float* lse;                 // ([splits], batch, heads, seqlen_q); null: not wanted
  const float* alibi_slopes;  // (batch, heads) by the two strides below
  const Element* rotary_cos;  // (positions, rotary_half)
  const Element* rotary_sin;
  Sequences sequences;
  int seqlen_q;  // the longest sequence's
  int seqlen_k;  // of every sequence, or the most that one has room for
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  int64 o_split_stride;
  int64 lse_split_stride;
  int64 lse_batch_stride;
  int64 lse_head_stride;
  int64 alibi_batch_stride;
  int64 alibi_head_stride;
  int64 rotary_cos_stride;
  int64 rotary_sin_stride;
  int64 table_stride;  // between rows of the block table
  int heads;           // query heads
  Divisor group;       // query heads of a key head
  int pairs;           // (batch, head) pairs; with kPackGqa (batch, key head)
  int section;         // pairs that a section of the tile order holds, see block.cuh
  int splits;
  int blocks;       // CTAs of the grid; isa 90
  int window_left;  // keys seen before and after the query's own position; unbounded: seqlen_q +
                    // seqlen_k
  int window_right;
  int total_q;  // rows of packed q
  int k_rows;   // rows of k and v: of every batch, or packed
  int k_batch;  // sequences that the cache has room for
  Divisor page_size;
  int pages;
  int box_rows;       // rows of a page that are copied at once; isa 90
  int seqlen_new;     // new keys of every sequence, beyond seqused_k
  int positions;      // rows of the rotary tables
  int rotary_half;    // pairs of columns that are rotated
  int rotate_by_row;  // whether a query stands at its own position rather than at the first's
  float score_scale;  // softmax_scale * log2(e); with softcap 2 * log2(e) * softmax_scale / softcap
  float softcap_log2;  // softcap * log2(e)
};
//% endif

//% if kernel == "combine"
struct Params {
  const void* o_partial;     // (splits, batch, seqlen, heads, head_dim)
  const float* lse_partial;  // (splits, batch, heads, seqlen) by the strides below
  void* o;                   // (batch, seqlen, heads, head_dim), row-major
  float* lse;                // (batch, heads, seqlen) by the strides below; null: not wanted
  int64 o_split_stride;      // in elements
  Strides o_partial_strides;
  int64 lse_split_stride;
  Strides lse_partial_strides;
  Strides lse_strides;
  int seqlen;
  int heads;
  int head_dim;
  int splits;
};
//% endif

//% if kernel == "append"
struct Params {
  const Element* k_new;  // (batch, seqlen_new, heads, head_dim)
  const Element* v_new;  // (batch, seqlen_new, heads, head_dim_v)
  Element* k;            // (cache rows, slots, heads, head_dim), or pages
  Element* v;
  const Element* rotary_cos;  // (positions, rotary_half)
  const Element* rotary_sin;
  Sequences sequences;
  int seqlen_q;  // not used here
  int seqlen_k;  // as the forward's
  Strides k_new_strides;
  Strides v_new_strides;
  Strides k_strides;
  Strides v_strides;
  int64 rotary_cos_stride;
  int64 rotary_sin_stride;
  int64 table_stride;
  int seqlen_new;
  int heads;
  int head_dim;
  int head_dim_v;
  int slots;    // of a sequence
  int k_batch;  // sequences that the cache has room for
  Divisor page_size;
  int pages;
  int positions;    // rows of the rotary tables
  int rotary_half;  // pairs of columns that are rotated
};
//% endif
