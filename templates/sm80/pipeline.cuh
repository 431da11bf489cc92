// The flow of K and V tiles through shared memory, from the last key tile to the first.
//
// kStages 1: one buffer each. V[n] travels while S = Q K[n] is computed, K[n-1] while O += P V[n]
// is: two barriers a tile. kStages 2: two buffers each. K[n-1] and V[n-1] travel during the whole
// of tile n: one barrier a tile.
#pragma once

#include "block.cuh"
#include "sm80/copy.cuh"

struct KeyValuePipeline {
  using KeyCopy = ThreadCopy<KeyTile, kBlockN, kHeadDim>;
  using ValueCopy = ThreadCopy<ValueTile, kBlockN, kHeadDimV>;

  const Params& params;
  const Block& block;
  KeyCopy k_copy;
  ValueCopy v_copy;
  const Element*
      k_gmem;  // this thread's first chunk of the next K tile to load; kPaged: the head's
  const Element* v_gmem;  // first element
  uint32 stage_smem;      // the stage at hand: its K tile, then its V tile
  uint32 all_stages_sum;  // of the addresses of both stages

  static constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;
  static constexpr int kStartGroups = 1;  // groups of copies that `start` closes

  /// The keys and values of a block, from its last tile on; the stages start at `smem`.
  __device__ __forceinline__ KeyValuePipeline(const Params& params, const Block& block, uint32 smem,
                                              int thread)
      : params(params),
        block(block),
        k_copy(thread),
        v_copy(thread),
        stage_smem(smem),
        all_stages_sum(2 * smem + kStageBytes) {
    const Strides& k = params.k_strides;
    const Strides& v = params.v_strides;
    k_gmem = params.k + block.head_k * k.head;
    v_gmem = params.v + block.head_k * v.head;
    if constexpr (!kPaged) {
      const int64 first_key = static_cast<int64>(block.n_end - 1) * kBlockN + block.k_begin;
      k_gmem = k_copy.first_chunk(k_gmem + block.k_batch * k.batch + first_key * k.row, k.row);
      v_gmem = v_copy.first_chunk(v_gmem + block.k_batch * v.batch + first_key * v.row, v.row);
    }
  }

  /// The K tile at hand.
  __device__ __forceinline__ uint32 k_tile() const { return stage_smem; }

  /// The V tile at hand.
  __device__ __forceinline__ uint32 v_tile() const { return stage_smem + KeyTile::kBytes; }

  /// The stage that is filled next.
  __device__ __forceinline__ uint32 next_stage() const {
    return kStages == 2 ? all_stages_sum - stage_smem : stage_smem;
  }

  /// Starts loading K tile n, the one before the last tile that was loaded. Only the first tile
  /// that is loaded, the last of the keys, can be ragged. Its missing rows of V become zero: P is
  /// zero there, but zero times a stray NaN is NaN.
  template <bool kCheckRows>
  __device__ __forceinline__ void load_k(uint32 stage, int n) {
    const int rows = block.seqlen_k - n * kBlockN;
    if constexpr (kPaged) {
      k_copy.load_paged_async(stage, k_gmem, params.k_strides, Pages(params, block.batch),
                              block.k_begin + n * kBlockN, rows);
    } else {
      k_copy.load_async<kCheckRows>(stage, k_gmem, params.k_strides.row, rows);
      k_gmem -= kBlockN * params.k_strides.row;
    }
  }

  template <bool kCheckRows>
  __device__ __forceinline__ void load_v(uint32 stage, int n) {
    const int rows = block.seqlen_k - n * kBlockN;
    if constexpr (kPaged) {
      v_copy.load_paged_async(stage + KeyTile::kBytes, v_gmem, params.v_strides,
                              Pages(params, block.batch), block.k_begin + n * kBlockN, rows);
    } else {
      v_copy.load_async<kCheckRows>(stage + KeyTile::kBytes, v_gmem, params.v_strides.row, rows);
      v_gmem -= kBlockN * params.v_strides.row;
    }
  }

  /// Starts the flow with the last tile.
  __device__ __forceinline__ void start(int n) {
    load_k<!kEvenN>(stage_smem, n);
    load_v<!kEvenN>(stage_smem, n);
    commit_copies();
  }

  /// Before S of tile n: K[n] is there.
  __device__ __forceinline__ void wait_k(int n) {
    // The thread's own copies are done; the barrier makes everyone's visible, and also closes the
    // hazard that a slow warp still reads the V (kStages 2: K and V) of tile n + 1, whose buffer is
    // filled next.
    wait_copies<0>();
    barrier_cta();
    if constexpr (kStages == 1) {
      if (n + 1 < block.n_end) {
        load_v<false>(next_stage(), n);
        commit_copies();
      }
    } else if (n > block.n_begin) {
      load_k<false>(next_stage(), n - 1);
    }
  }

  /// Before O += P V of tile n: V[n] is there.
  __device__ __forceinline__ void wait_v(int n) {
    if constexpr (kStages == 1) {
      // As above; here the hazard is a slow warp that still reads K[n], whose buffer K[n - 1]
      // takes.
      wait_copies<0>();
      barrier_cta();
      if (n > block.n_begin) {
        load_k<false>(next_stage(), n - 1);
        commit_copies();
      }
    } else if (n > block.n_begin) {
      load_v<false>(next_stage(), n - 1);
      commit_copies();
    }
  }

  /// After tile n.
  __device__ __forceinline__ void advance() { stage_smem = next_stage(); }
};
