// The kernel's only argument, passed by value. launch.py mirrors it: same order, same sizes.
#pragma once

#include "config.cuh"

/// Strides of a (batch, seqlen, heads, head_dim) tensor in elements; the inner stride is 1.
struct Strides {
  int64 batch;
  int64 row;
  int64 head;
};

struct Params {
  const Element* q;           // (batch, seqlen_q, heads, kHeadDim)
  const Element* k;           // (batch, seqlen_k, heads / group, kHeadDim)
  const Element* v;           // (batch, seqlen_k, heads / group, kHeadDimV)
  Element* o;                 // (batch, seqlen_q, heads, kHeadDimV)
  float* lse;                 // (batch, heads, seqlen_q), row-major; null: not wanted
  const float* alibi_slopes;  // (batch, heads) by the two strides below
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  int64 alibi_batch_stride;
  int64 alibi_head_stride;
  int seqlen_q;
  int seqlen_k;
  int heads;         // query heads
  int group;         // query heads of a key head
  int head_batches;  // batch * heads
  int section;       // (batch, head) pairs that a section of the tile order holds, see block.cuh
  int window_left;   // keys seen before and after the query's own position; unbounded: seqlen_q +
                     // seqlen_k
  int window_right;
  float score_scale;  // softmax_scale * log2(e); with softcap 2 * log2(e) * softmax_scale / softcap
  float softcap_log2;  // softcap * log2(e)
};
