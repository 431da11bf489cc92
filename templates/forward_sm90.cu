// Attention forward for Hopper: one warpgroup loads by TMA, the others multiply by wgmma, 64 query
// rows each. The CTAs stay and share the query tiles.
//
//   S = Q K^T;  P = softmax(S * scale);  O = P V
//
// The softmax of a key tile runs while O += P V of the tile before is computed, and while the other
// warpgroups multiply: they take turns to start their products. Tiles flow from right to left, so
// that the sequence's ragged end, which is masked and cleared, comes first. (FlashAttention-3: Shah
// et al., 2024.)
#include "block.cuh"
#include "mask.cuh"
#include "query.cuh"
#include "score.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/mma.cuh"
#include "sm90/pipeline.cuh"

// Registers of a thread that loads and of one that multiplies: at most as many in all as the launch
// gives the CTA, which are 168 a thread with two consumers.
constexpr int kProducerRegisters = kGather ? 72 : kConsumers == 1 ? 56 : kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kGather           ? 216
                                   : kConsumers == 1 ? 256
                                   : kConsumers == 2 ? 232
                                                     : 160;

constexpr int kConsumerRows = 64;  // of a warpgroup

// Where the wait for O += P V of the key tile before stands. In straight code ptxas moves it to
// before the maxima, beside which alone the product then runs; a branch stops it there. Rescaled
// first: behind the branch that rescales O, where ptxas moves it among the first exponentials and
// packs P among the others. Late: behind the loop's branch, after the exponentials. (H200:
// rescaling first is 1 to 4 % faster than either up to head_dim 128; at 192 late is up to 2 %
// faster, at 256 all are level.)
constexpr int kWidest = kHeadDim < kHeadDimV ? kHeadDimV : kHeadDim;
constexpr bool kRescaledFirst = kWidest <= 128;
constexpr bool kLateWait = 128 < kWidest && kWidest <= 192;

// Whether the first key tile's softmax is the loop's too. Prescaled scores make long code of a
// softmax: once instead of twice it compiles in three quarters of the time. Without them calls are
// up to 5 % slower (H200), and with them head_dim 256 spills.
constexpr bool kOneSoftmax = kPrescale && kWidest <= 192;

// Named barriers: kTurnBarrier + c is warpgroup c's turn to multiply; at kRotatedBarrier + c it has
// rotated its queries.
constexpr int kTurnBarrier = 1;
constexpr int kConsumersBarrier = kTurnBarrier + kConsumers;
constexpr int kRotatedBarrier = kConsumersBarrier + 1;

/// What a consumer warpgroup knows of its place.
struct Consumer {
  int index;   // of the warpgroup among the consumers
  int thread;  // among the consumers' threads
  int lane;

  __device__ __forceinline__ explicit Consumer(int warpgroup)
      : index(warpgroup - 1), thread(thread_index() - kWarpgroupThreads), lane(thread % 32) {}

  /// Takes and passes a turn without use.
  __device__ __forceinline__ void let_turn_pass() const {
    await_turn();
    pass_turn();
  }

  /// Tells the producer that the warp has read a buffer.
  __device__ __forceinline__ void release(uint32 empty) const {
    barrier_warp();  // all lanes have: one that still waits would miss the phase
    if (lane == 0) mbarrier_arrive(empty);
  }

  /// Waits for the warpgroup's turn.
  __device__ __forceinline__ void await_turn() const {
    if constexpr (kConsumers > 1) barrier_sync(kTurnBarrier + index, 2 * kWarpgroupThreads);
  }

  /// Passes the turn on to the next warpgroup.
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kConsumers > 1) {
      const int next = index + 1 == kConsumers ? 0 : index + 1;
      barrier_arrive(kTurnBarrier + next, 2 * kWarpgroupThreads);
    }
  }
};

/// Clears the rows of V behind a sequence's last key, if they are part of key tile n and the tensor
/// goes on there: P is 0 in them, but 0 times a stray NaN is NaN. TMA has cleared what lies behind
/// the tensor; what copies row by row has cleared them all. All consumers do it together, once the
/// tile has landed. It is the CTA's first key tile, before which nobody has taken a turn: nobody
/// waits here for one who waits for a turn.
__device__ __forceinline__ void clear_values_behind(const Params& params, const Block& block, int n,
                                                    uint32 v_tile_smem, int thread) {
  const int first = block.seqlen_k - n * kBlockN;
  const bool ends = !kPaged && block.k_begin + block.seqlen_k >= params.k_rows;
  if (kGather || first >= kBlockN || ends) return;
  constexpr int kChunks = ValueTile::kSlabs * ValueTile::kSlabChunks;
  const uint32 zero[4] = {};
  for (int i = first * kChunks + thread; i < kBlockN * kChunks; i += kWarps * 32) {
    const int row = i / kChunks;
    const int slab = i % kChunks / ValueTile::kSlabChunks;
    store_shared_16(v_tile_smem + ValueTile::offset(slab, row, i % ValueTile::kSlabChunks), zero);
  }
  fence_proxy_async();  // the product reads what was cleared
  // No warpgroup multiplies before every thread has cleared its part.
  barrier_sync(kConsumersBarrier, kWarps * 32);
}

/// Writes the warpgroup's rows of Q, rotated.
__device__ __forceinline__ void rotate_query(const Params& params, const Block& block,
                                             uint32 q_smem, const Consumer& self) {
  store_rotated_query<kConsumerRows, kWarpgroupThreads>(
      params, block, q_smem, self.index * kConsumerRows, self.thread % kWarpgroupThreads);
  fence_proxy_async();  // the product reads what was written
  barrier_sync(kRotatedBarrier + self.index, kWarpgroupThreads);
}

/// Scales, caps and biases S, masks it (where kMayCut), and takes its maxima in. Returns whether O
/// must be rescaled, by `factor`.
template <bool kMayCut>
__device__ __forceinline__ bool take_scores(ScoreTile& s, int n, const Score& score,
                                            const Mask& mask, OnlineSoftmax& softmax,
                                            float (&factor)[kRows]) {
  score.apply(s, n);
  if constexpr (kMayCut) {
    if (mask.cuts(n)) mask.apply(s, n);
  }
  return softmax.grow(s, factor);
}

/// P as operand A.
__device__ __forceinline__ void pack_probabilities(ProbabilityFragment& p, const ScoreTile& s) {
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[k][i] = pack_elements(s[0][2 * k + i / 2][i % 2 * 2], s[0][2 * k + i / 2][i % 2 * 2 + 1]);
    }
  }
}

/// Lets tile n of K and V pass that others need.
__device__ __forceinline__ void skip_tile(const Params& params, const Block& block,
                                          const SharedMemory& smem, const Consumer& self,
                                          RingPlace<kStages>& ring, int n) {
  // A buffer may be released once it is full: earlier, the release could count for the round
  // before.
  mbarrier_wait(smem.k_full(ring.stage), ring.round);
  self.release(smem.k_empty(ring.stage));
  mbarrier_wait(smem.v_full(ring.stage), ring.round);
  clear_values_behind(params, block, n, smem.v + ring.stage * ValueTile::kBytes, self.thread);
  self.release(smem.v_empty(ring.stage));
  ring.advance();
}

/// A warpgroup's work on one tile of query rows: O += P V of each key tile runs beside S = Q K^T of
/// the next and the softmax of it.
struct TileWork {
  const SharedMemory& smem;
  const Consumer& self;
  RingPlace<kStages>& ring;  // K's place; V's is one behind
  uint64 q_tile;             // descriptors; k, v: of the first stage
  uint64 k_tiles;
  uint64 v_tiles;
  const Mask& mask;
  const Score& score;
  OnlineSoftmax& softmax;
  OutputTile& o;
  ScoreTile s;  // of the tile at hand, then its probabilities
  ProbabilityFragment p;
  float factor[kRows];
  bool outgrown;
  uint32 v_empty;  // of the values that a product reads; 0: none runs

  /// Starts S = Q K^T of the tile at hand.
  __device__ __forceinline__ void start_scores() {
    pin(s);
    wgmma_fence();
    multiply_query_key_async(s, q_tile, k_tiles + (ring.stage * KeyTile::kBytes >> 4));
  }

  /// Starts O += P V of a tile.
  __device__ __forceinline__ void start_output(const RingPlace<kStages>& place) {
    mbarrier_wait(smem.v_full(place.stage), place.round);
    pin(o);
    wgmma_fence();
    multiply_probability_value_async(o, p, v_tiles + (place.stage * ValueTile::kBytes >> 4));
    v_empty = smem.v_empty(place.stage);
  }

  /// Waits for O += P V, if it runs.
  __device__ __forceinline__ void finish_output() {
    wgmma_wait<0>();
    pin(o);
    if (v_empty != 0) self.release(v_empty);
  }

  /// S of the first key tile: no product runs beside it.
  __device__ __forceinline__ void first_scores() {
    mbarrier_wait(smem.k_full(ring.stage), ring.round);
    start_scores();
    wgmma_wait<0>();
    pin(s);
    self.release(smem.k_empty(ring.stage));
    v_empty = 0;
  }

  /// S of the next key tile, and O += P V of the one at hand, which goes on.
  __device__ __forceinline__ void next_scores() {
    if constexpr (kLateWait) take_probabilities();
    const RingPlace<kStages> before = ring;
    ring.advance();
    mbarrier_wait(smem.k_full(ring.stage), ring.round);
    self.await_turn();
    start_scores();
    start_output(before);
    self.pass_turn();
    wgmma_wait<1>();
    pin(s);
    self.release(smem.k_empty(ring.stage));
  }

  /// P of key tile n, whose S is there. kRescales: O may hold something, or is the 0 of a first
  /// tile that the loop serves too.
  template <bool kMayCut, bool kRescales>
  __device__ __forceinline__ void exponentiate(int n) {
    outgrown = take_scores<kMayCut>(s, n, score, mask, softmax, factor) && kRescales;
    if (kRescaledFirst && outgrown) {
      wgmma_wait<0>();
      pin(o);
      softmax.rescale_by(factor, o);
      outgrown = false;
    }
    softmax.exponentiate(s);
    if constexpr (!kLateWait) take_probabilities();
  }

  /// Ends O += P V; then P of the tile at hand, and O as its maxima want it.
  __device__ __forceinline__ void take_probabilities() {
    finish_output();
    pack_probabilities(p, s);
    if (outgrown) softmax.rescale_by(factor, o);
  }

  /// O += P V of the last key tile.
  __device__ __forceinline__ void finish() {
    if constexpr (kLateWait) take_probabilities();
    start_output(ring);
    finish_output();
    ring.advance();
  }
};

/// The work of a consumer warpgroup.
__device__ __forceinline__ void consume(const Params& params, const SharedMemory& smem,
                                        const Consumer& self) {
  const uint64 q_rows =
      tile_descriptor<QueryTile>(smem.q + self.index * kConsumerRows * QueryTile::kPitch);
  RingPlace<kQueryStages> q;
  RingPlace<kPlaces> place;
  RingPlace<kStages> ring;
  if (self.index == kConsumers - 1) self.pass_turn();  // the first turn is warpgroup 0's

  while (true) {
    mbarrier_wait(smem.q_full(q.stage), q.round);
    const uint32 place_smem = smem.places + place.stage * kPlaceBytes;
    const Block block = load_block(place_smem);
    if (warp_uniform(block.batch) == kNoBatch) break;
    const int row_begin = block.m_begin + self.index * kConsumerRows;
    // The key tiles of the CTA, and those of them that this warpgroup needs. (Branches between
    // products must be such that the compiler knows them to be the same for the warp.)
    const KeyTiles seen = tiles_seen(params, block, row_begin, row_begin + kConsumerRows);
    const int cta_begin = warp_uniform(block.n_begin);
    const int cta_last = warp_uniform(block.n_end) - 1;
    const int n_begin = warp_uniform(max(seen.begin, block.n_begin));
    const int n_end = warp_uniform(min(seen.end, block.n_end));
    const bool idle = row_position(params, row_begin) >= block.seqlen_q || n_begin >= n_end;
    const int n_last = warp_uniform(idle ? cta_begin : n_end) - 1;

    const int first_row = row_begin + self.thread % kWarpgroupThreads / 32 * 16 + self.lane / 4;
    const int first_column = self.lane % 4 * 2;
    Mask mask(params, block, row_begin, row_begin + kConsumerRows, first_row, first_column);
    mask.cut_right = warp_uniform(mask.cut_right);
    mask.cut_left = warp_uniform(mask.cut_left);
    const Score score(params, block, first_row, first_column);
    OnlineSoftmax softmax(score.exponent_scale());
    OutputTile o = {};
#pragma unroll 1
    for (int n = cta_last; n > n_last; --n) {
      skip_tile(params, block, smem, self, ring, n);
      // Every warpgroup takes as many turns as there are key tiles behind the first.
      if (n > cta_begin) self.let_turn_pass();
    }
    if (n_begin <= n_last) {
      if constexpr (kRotary != RotaryKind::none) {
        rotate_query(params, block, smem.q + q.stage * QueryTile::kBytes, self);
      }
      TileWork work{smem,
                    self,
                    ring,
                    q_rows + (q.stage * QueryTile::kBytes >> 4),
                    tile_descriptor<KeyTile>(smem.k),
                    tile_descriptor<ValueTile>(smem.v),
                    mask,
                    score,
                    softmax,
                    o};
      work.first_scores();
      if constexpr (!kOneSoftmax) work.exponentiate<true, false>(n_last);
      // What is cleared must have landed.
      mbarrier_wait(smem.v_full(ring.stage), ring.round);
      clear_values_behind(params, block, n_last, smem.v + ring.stage * ValueTile::kBytes,
                          self.thread);
      if constexpr (kOneSoftmax) {
#pragma unroll 1
        for (int n = n_last;; --n) {
          work.exponentiate<true, true>(n);
          if (n == n_begin) break;
          work.next_scores();
        }
      } else {
#pragma unroll 1
        for (int n = n_last - 1; n >= n_begin; --n) {
          work.next_scores();
          work.exponentiate<kMask != MaskKind::full, true>(n);
        }
      }
      self.release(smem.q_empty(q.stage));
      work.finish();
    } else {
      self.release(smem.q_empty(q.stage));
    }
#pragma unroll 1
    for (int n = min(n_begin, n_last + 1) - 1; n >= cta_begin; --n) {
      skip_tile(params, block, smem, self, ring, n);
      self.let_turn_pass();
    }
    store_rows(params, load_block(place_smem), softmax, o, self.thread);
    q.advance();
    place.advance();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL_NAME(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared_smem[];
  const SharedMemory smem(shared_address(shared_smem));
  const int warpgroup = warp_uniform(thread_index() / kWarpgroupThreads);
  if (thread_index() == 0) smem.init_barriers();
  barrier_cta();  // the barriers are there
  if (warpgroup == 0) {
    release_registers<kProducerRegisters>();
    if (thread_index() < kLoaders) Producer(params, smem).run();
  } else {
    claim_registers<kConsumerRegisters>();
    consume(params, smem, Consumer(warpgroup));
  }
}
