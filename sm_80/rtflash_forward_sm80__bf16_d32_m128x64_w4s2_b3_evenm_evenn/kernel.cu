#line 1 "forward_sm80.cu"
// Attention forward with mma.sync, for sm_75 to sm_120: one CTA per query tile, head and batch.
//
//   S = Q K^T;  P = softmax(S * scale);  O = P V
//
// Q is loaded once. K and V flow through shared memory tile by tile from right to left, so that the
// tiles which masks cut come first. S, P and O live in registers; warps split the query rows and
// never exchange anything but barriers. The algorithm is FlashAttention-2's (Dao, 2023).
#line 1 "block.cuh"
// Which part of the problem a CTA works on: blockIdx -> batch, head, query tile and the range of
// key tiles.


#line 1 "params.cuh"
// The kernel's only argument, passed by value. launch.py mirrors it: same order, same sizes.


#line 1 "config.cuh"
// Types, sizes and flags of this variant: the only partial that Jinja fills in.


using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

// fp16 and bf16 values travel as raw bits; ptx.cuh converts them.
using Element = uint16;

// clang-format off
#define KERNEL_NAME rtflash_forward_sm80__bf16_d32_m128x64_w4s2_b3_evenm_evenn
// clang-format on

enum class DType { fp16, bf16 };
enum class MaskKind { full, causal, window };

constexpr int kIsa = 80;  // 75: synchronous copies, m16n8k8; 80: cp.async, m16n8k16
constexpr DType kDType = DType::bf16;
constexpr int kHeadDim = 32;
constexpr int kHeadDimV = 32;
constexpr int kHeadDimPadded = 32;     // columns of a shared row of Q and K
constexpr int kHeadDimVPadded = 32;  // columns of a shared row of V and O

constexpr int kBlockM = 128;  // query rows of a CTA
constexpr int kBlockN = 64;  // keys of a tile
constexpr int kWarps = 4;
constexpr int kThreads = 128;
constexpr int kStages = 2;
constexpr int kBlocksPerSm = 3;
constexpr bool kQInRegisters = false;
constexpr int kSharedBytes = 24576;

constexpr MaskKind kMask = MaskKind::full;
constexpr bool kSoftcap = false;
constexpr bool kAlibi = false;
constexpr bool kPrescale = false;  // scores are scaled before the maximum is taken
constexpr bool kEvenM = true;       // seqlen_q % kBlockM == 0
constexpr bool kEvenN = true;       // seqlen_k % kBlockN == 0

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr int kElementBytes = 2;
constexpr int kLoadBytes = 16;       // widest global load that q, k and v allow
constexpr int kStoreBytes = 16;  // widest global store that o allows

// mma tiles: 16 query rows, 8 keys (or columns of V) wide, 16 deep. ldmatrix.x4 feeds two tiles at
// once.
constexpr int kMmaM = kBlockM / (kWarps * 16);    // m16 tiles of a warp
constexpr int kMmaN = kBlockN / 8;                // n8 tiles of S
constexpr int kMmaK = (kHeadDim + 15) / 16;       // k16 steps of Q K^T
constexpr int kMmaV = (kHeadDimV + 15) / 16 * 2;  // n8 tiles of O
constexpr int kRows = 2 * kMmaM;  // rows of S and O that a thread shares with its quad

// Steps of Q K^T in one piece of straight code. With two m16 tiles a warp, all of a wide head in
// one piece would let the compiler load so many fragments ahead that it spills (NVRTC 13.0
// and 13.5, head_dim 128); with one, pieces cost 3 % (H200, head_dim 256). Q's fragments in
// registers need constant indices.
constexpr int kQueryKeyUnroll = kQInRegisters || kMmaM == 1 || kMmaK < 8 ? kMmaK : 4;

static_assert(kBlockM % (kWarps * 16) == 0, "each warp owns whole m16 tiles");
static_assert(kBlockN % 16 == 0, "P V takes 16 keys a step");
static_assert(kIsa >= 80 || kDType == DType::fp16, "m16n8k8 takes fp16 only");
#line 5 "params.cuh"

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
#line 1 "ptx.cuh"
// One function per PTX instruction (or CUDA intrinsic), no logic. The host target replaces this
// partial. Instructions: https://docs.nvidia.com/cuda/parallel-thread-execution/


#line 6 "ptx.cuh"

/// The 32-bit shared-window address of a pointer into shared memory.
__device__ __forceinline__ uint32 shared_address(const void* pointer_smem) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer_smem));
}

/// The thread's number in its CTA. Volatile, as block_index: what a kernel needs again after its
/// main loop is read again instead of taking a register through the loop.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// The CTA's number in the grid.
__device__ __forceinline__ int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

/// The value, kept by the compiler as the one register it is: not split into its terms, nor summed
/// up anew with others.
__device__ __forceinline__ uint32 opaque(uint32 value) {
  asm("" : "+r"(value));
  return value;
}

/// All threads of the CTA meet; shared memory written before is seen after.
__device__ __forceinline__ void barrier_cta() { __syncthreads(); }

/// Whether any lane of the warp passes true.
__device__ __forceinline__ bool any_lane(bool predicate) {
  return __any_sync(0xffffffffu, predicate);
}

/// The value of the lane whose number differs in the bits of `mask`.
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

/// 2^x; ex2.approx: 2 ulp, denormals flushed.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x); lg2.approx.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x; rcp.approx: 1 ulp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

#if __CUDA_ARCH__ >= 800
/// Two floats to packed fp16, `low` in the low half; round to nearest even.
__device__ __forceinline__ uint32 pack_fp16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Two floats to packed bf16, `low` in the low half; round to nearest even.
__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
#else
/// Two floats to packed fp16, `low` in the low half; round to nearest even. (cvt to f16x2 needs
/// sm_80.)
__device__ __forceinline__ uint32 pack_fp16(float low, float high) {
  uint32 packed;
  asm("{\n .reg .b16 lo, hi;\n cvt.rn.f16.f32 lo, %1;\n cvt.rn.f16.f32 hi, %2;\n mov.b32 %0, {lo, "
      "hi};\n}"
      : "=r"(packed)
      : "f"(low), "f"(high));
  return packed;
}
#endif

/// Four 8x8 matrices of 16-bit elements; lane l gives the row address of matrix l/8, row l%8.
__device__ __forceinline__ void ldmatrix_x4(uint32 (&matrices)[4], uint32 address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address_smem));
}

/// As ldmatrix_x4, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&matrices)[4], uint32 address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address_smem));
}

/// d += a b; fp16 operands (16x8, 8x8), fp32 accumulators (16x8).
__device__ __forceinline__ void mma_m16n8k8_fp16(float (&d)[4], uint32 a0, uint32 a1, uint32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

#if __CUDA_ARCH__ >= 800
/// d += a b; fp16 operands (16x16, 16x8), fp32 accumulators (16x8).
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                  uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d += a b; bf16 operands (16x16, 16x8), fp32 accumulators (16x8).
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                  uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 16 bytes to shared memory past L1; bytes from `source_bytes` on are zero.
__device__ __forceinline__ void cp_async_16(uint32 address_smem, const void* source_gmem,
                                            int source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address_smem),
               "l"(source_gmem), "r"(source_bytes)
               : "memory");
}

/// 16 bytes to shared memory past L1.
__device__ __forceinline__ void cp_async_16(uint32 address_smem, const void* source_gmem) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address_smem),
               "l"(source_gmem)
               : "memory");
}

/// 8 bytes to shared memory; bytes from `source_bytes` on are zero.
__device__ __forceinline__ void cp_async_8(uint32 address_smem, const void* source_gmem,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address_smem), "l"(source_gmem),
               "r"(source_bytes)
               : "memory");
}

/// 4 bytes to shared memory; bytes from `source_bytes` on are zero.
__device__ __forceinline__ void cp_async_4(uint32 address_smem, const void* source_gmem,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address_smem), "l"(source_gmem),
               "r"(source_bytes)
               : "memory");
}

/// Closes the thread's open group of cp.async.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending of the thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#endif

/// 16 bytes from global memory, through the read-only path.
__device__ __forceinline__ void load_global_16(uint32 (&value)[4], const void* source_gmem) {
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "l"(source_gmem));
}

/// 4 bytes from global memory, through the read-only path.
__device__ __forceinline__ uint32 load_global_4(const void* source_gmem) {
  uint32 value;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(source_gmem));
  return value;
}

/// One 16-bit element from global memory, through the read-only path.
__device__ __forceinline__ uint16 load_global_2(const void* source_gmem) {
  uint16 value;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(value) : "l"(source_gmem));
  return value;
}

/// 16 bytes to shared memory.
__device__ __forceinline__ void store_shared_16(uint32 address_smem, const uint32 (&value)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address_smem), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

/// 4 bytes to shared memory.
__device__ __forceinline__ void store_shared_4(uint32 address_smem, uint32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_smem), "r"(value) : "memory");
}

/// 16 bytes from shared memory.
__device__ __forceinline__ void load_shared_16(uint32 (&value)[4], uint32 address_smem) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address_smem)
               : "memory");
}

/// 16 bytes to global memory.
__device__ __forceinline__ void store_global_16(void* target_gmem, const uint32 (&value)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target_gmem), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

/// 8 bytes to global memory.
__device__ __forceinline__ void store_global_8(void* target_gmem, uint32 low, uint32 high) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(target_gmem), "r"(low), "r"(high)
               : "memory");
}

/// 4 bytes to global memory.
__device__ __forceinline__ void store_global_4(void* target_gmem, uint32 value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(target_gmem), "r"(value) : "memory");
}

/// 2 bytes to global memory.
__device__ __forceinline__ void store_global_2(void* target_gmem, uint16 value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(target_gmem), "h"(value) : "memory");
}
#line 7 "block.cuh"

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
#line 1 "epilogue.cuh"
// Normalises O and writes it and the LSE.


#line 1 "sm80/copy.cuh"
// Tiles in shared memory, and the copies between them and global memory.
//
// A tile of kTileRows x kColumns elements is stored as slabs of 64 columns (128 bytes a row; 32
// columns where 64 do not divide kColumns), slab after slab. Within a slab the 16-byte chunk c of
// row r lies at chunk c ^ (r % 8) (32 columns: c ^ (r / 2 % 4)): eight rows of one chunk column
// then cover all 32 banks, for ldmatrix and for the copies.


#line 10 "sm80/copy.cuh"

constexpr int kChunkBytes = 16;
constexpr int kChunkElements = kChunkBytes / kElementBytes;

template <int kTileRows, int kColumns>
struct SharedTile {
  static constexpr int kSlabColumns = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kSlabChunks = kSlabColumns / kChunkElements;
  static constexpr int kSlabs = kColumns / kSlabColumns;
  static constexpr int kPitch = kSlabColumns * kElementBytes;  // bytes of a slab's row
  static constexpr int kSlabBytes = kTileRows * kPitch;
  static constexpr int kBytes = kSlabs * kSlabBytes;

  /// Where chunk `chunk` of a slab lies in row `row`.
  static __device__ __forceinline__ int swizzled(int row, int chunk) {
    return kSlabColumns == 64 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
  }

  /// Byte offset of a chunk of a slab.
  static __device__ __forceinline__ int offset(int slab, int row, int chunk) {
    return slab * kSlabBytes + row * kPitch + swizzled(row, chunk) * kChunkBytes;
  }

  /// A lane's address moved down by 16 `rows16` and right by 16 `columns16`. The swizzle is an
  /// exclusive or of the address, so a compile-time column costs at most one instruction.
  static __device__ __forceinline__ uint32 ldmatrix_address(uint32 lane_smem, int rows16,
                                                            int columns16) {
    const int chunk = 2 * columns16;
    return (lane_smem ^ (chunk % kSlabChunks * kChunkBytes)) + chunk / kSlabChunks * kSlabBytes +
           rows16 * 16 * kPitch;
  }
};

using QueryTile = SharedTile<kBlockM, kHeadDimPadded>;
using KeyTile = SharedTile<kBlockN, kHeadDimPadded>;
using ValueTile = SharedTile<kBlockN, kHeadDimVPadded>;
using OutputStage = SharedTile<kBlockM, kHeadDimVPadded>;

/// A chunk to shared memory element by element, zero from `bytes` on.
__device__ __forceinline__ void copy_chunk_elements(uint32 target_smem, const Element* source_gmem,
                                                    int bytes) {
  uint32 value[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32 low = 4 * i < bytes ? load_global_2(source_gmem + 2 * i) : 0;
    const uint32 high = 4 * i + 2 < bytes ? load_global_2(source_gmem + 2 * i + 1) : 0;
    value[i] = low | high << 16;
  }
  store_shared_16(target_smem, value);
}

/// A chunk to shared memory, zero from `bytes` on; asynchronous where the hardware and the
/// alignment allow. `kWhole`: all 16 bytes are there.
template <bool kWhole>
__device__ __forceinline__ void copy_chunk_async(uint32 target_smem, const Element* source_gmem,
                                                 int bytes) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kIsa >= 80 && kLoadBytes == 16) {
    if constexpr (kWhole) {
      cp_async_16(target_smem, source_gmem);
    } else {
      cp_async_16(target_smem, source_gmem, bytes);
    }
    return;
  }
  if constexpr (kIsa >= 80 && kLoadBytes >= 4) {
#pragma unroll
    for (int piece = 0; piece < kChunkBytes; piece += kLoadBytes) {
      const int left = min(max(bytes - piece, 0), kLoadBytes);
      const Element* source = source_gmem + piece / kElementBytes;
      if constexpr (kLoadBytes == 8) {
        cp_async_8(target_smem + piece, source, left);
      } else {
        cp_async_4(target_smem + piece, source, left);
      }
    }
    return;
  }
#endif
  if (kLoadBytes == 16 && (kWhole || bytes == kChunkBytes)) {
    uint32 value[4];
    load_global_16(value, source_gmem);
    store_shared_16(target_smem, value);
  } else {
    copy_chunk_elements(target_smem, source_gmem, bytes);
  }
}

/// What one thread moves between a global matrix (rows `row_stride` elements apart, kDim columns)
/// and a tile: in every slab the same chunk of the rows row, row + kRowStep, ... so that
/// neighbouring threads touch neighbouring chunks.
template <class Tile, int kTileRows, int kDim>
struct ThreadCopy {
  static constexpr int kRowStep = kThreads / Tile::kSlabChunks;
  static constexpr int kPasses = (kTileRows + kRowStep - 1) / kRowStep;
  static constexpr bool kRagged = kTileRows % kRowStep != 0;
  // Narrow loads make long code: unrolled, an odd head_dim would take seconds to compile.
  static constexpr int kPassUnroll = kLoadBytes == kChunkBytes ? kPasses : 1;
  static_assert(kRowStep % 8 == 0, "the swizzle of a thread's chunk is the same in all its rows");

  int row;
  int chunk;
  uint32 offset;  // of the thread's first chunk in the tile

  __device__ __forceinline__ explicit ThreadCopy(int thread)
      : row(thread / Tile::kSlabChunks),
        chunk(thread % Tile::kSlabChunks),
        offset(opaque(Tile::offset(0, row, chunk))) {}

  /// Byte offset of the thread's chunk of slab `slab` in pass `pass`.
  __device__ __forceinline__ uint32 tile_offset(int slab, int pass) const {
    return offset + slab * Tile::kSlabBytes + pass * kRowStep * Tile::kPitch;
  }

  /// Bytes of the thread's chunk in slab `slab` that lie before column kDim.
  __device__ __forceinline__ int valid_bytes(int slab) const {
    const int first = slab * Tile::kSlabColumns + chunk * kChunkElements;
    return min(max((kDim - first) * kElementBytes, 0), kChunkBytes);
  }

  /// The thread's first chunk of a matrix.
  __device__ __forceinline__ const Element* first_chunk(const Element* matrix_gmem,
                                                        int64 row_stride) const {
    return matrix_gmem + row * row_stride + chunk * kChunkElements;
  }

  /// Starts copying the tile whose first chunk for this thread is `source_gmem`. Columns from kDim
  /// up to the next multiple of 16 become zero, and so do rows from `rows` on where kCheckRows.
  template <bool kCheckRows>
  __device__ __forceinline__ void load_async(uint32 tile_smem, const Element* source_gmem,
                                             int64 row_stride, int rows) const {
#pragma unroll kPassUnroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int tile_row = row + pass * kRowStep;
      if (kRagged && tile_row >= kTileRows) break;
      const bool row_valid = !kCheckRows || tile_row < rows;
#pragma unroll
      for (int slab = 0; slab < Tile::kSlabs; ++slab) {
        const uint32 target = tile_smem + tile_offset(slab, pass);
        const Element* source = source_gmem + slab * Tile::kSlabColumns;
        const bool whole = (slab + 1) * Tile::kSlabColumns <= kDim;
        if (whole && !kCheckRows) {
          copy_chunk_async<true>(target, source, kChunkBytes);
        } else if (whole ||
                   slab * Tile::kSlabColumns + chunk * kChunkElements < (kDim + 15) / 16 * 16) {
          copy_chunk_async<false>(target, source, row_valid ? valid_bytes(slab) : 0);
        }
      }
      source_gmem += kRowStep * row_stride;
    }
  }
};

/// A chunk from registers to global memory, its first `bytes` bytes, in stores as wide as o's rows
/// allow.
__device__ __forceinline__ void store_chunk(Element* target_gmem, const uint32 (&value)[4],
                                            int bytes) {
  if constexpr (kStoreBytes == 16) {
    if (bytes == kChunkBytes) store_global_16(target_gmem, value);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Element* target = target_gmem + 2 * i;
      if constexpr (kStoreBytes == 8) {
        if (i % 2 == 0 && 4 * i < bytes) store_global_8(target, value[i], value[i + 1]);
      } else if constexpr (kStoreBytes == 4) {
        if (4 * i < bytes) store_global_4(target, value[i]);
      } else {
        if (4 * i < bytes) store_global_2(target, static_cast<uint16>(value[i]));
        if (4 * i + 2 < bytes) store_global_2(target + 1, static_cast<uint16>(value[i] >> 16));
      }
    }
  }
}
#line 1 "softmax.cuh"
// Online softmax over key tiles (Milakov and Gimelshein, 2018), in powers of two.
//
// A thread shares its kRows rows with the three other lanes of its quad: row r of the thread is m16
// tile r / 2, half r % 2. The one rule for -inf: a row's reference starts at the lowest finite
// float, so that a hidden score, -inf, gives the probability 0 and never -inf minus -inf. A row
// that sees no key ends with sum 0, output 0 and LSE -inf.


#line 1 "sm80/mma.cuh"
// Matrix products of a warp on 16x8x16 tiles, fp32 accumulation.
//
// Lane l of a warp, g = l / 4, t = l % 4, holds
//   accumulator (16x8): [0], [1] = row g, columns 2t, 2t+1; [2], [3] = row g + 8, the same columns
//   operand A (16x16), 4 registers of 2 elements: rows g, g+8, g, g+8; columns 2t.. (first two),
//   2t+8.. (last two) operand B (16x8), 2 registers of 2 elements: rows 2t.. and 2t+8.., column g
// so that two neighbouring accumulator tiles, packed, are an operand A as they stand: P never
// leaves the registers.


#line 12 "sm80/mma.cuh"

/// Two floats as packed elements, `low` in the low half.
__device__ __forceinline__ uint32 pack_elements(float low, float high) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kDType == DType::bf16) return pack_bf16(low, high);
#endif
  return pack_fp16(low, high);
}

/// d += a b for one 16x8 tile over 16 of the inner dimension.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                            uint32 b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kDType == DType::bf16) {
    mma_m16n8k16_bf16(d, a, b0, b1);
    return;
  }
  if constexpr (kIsa >= 80) {
    mma_m16n8k16_fp16(d, a, b0, b1);
    return;
  }
#endif
  mma_m16n8k8_fp16(d, a[0], a[1], b0);
  mma_m16n8k8_fp16(d, a[2], a[3], b1);
}

/// O (registers) in fp32: m16 tile, n8 tile, the four values of an accumulator.
using OutputTile = float[kMmaM][kMmaV][4];

/// S (registers), later P: m16 tile, n8 tile, the four values of an accumulator.
using ScoreTile = float[kMmaM][kMmaN][4];

/// One k16 step of Q for the warp's rows, as operand A.
using QueryFragment = uint32[kMmaM][4];
#line 10 "softmax.cuh"

constexpr float kLowest = -3.4028234663852886e38f;

// O is rescaled only when a maximum has grown by more than this many powers of two; until then the
// probabilities may reach 2^8, which fp32 sums and 16-bit operands hold without loss (the threshold
// of FlashAttention-4).
constexpr float kRescaleThreshold = 8.f;

struct OnlineSoftmax {
  float scale;             // of the exponent, log2 units per score; positive
  float reference[kRows];  // log2 units: probabilities are 2^(score * scale - reference)
  float row_sum[kRows];    // this lane's part of the sum of probabilities

  __device__ __forceinline__ explicit OnlineSoftmax(float exponent_scale) : scale(exponent_scale) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      reference[r] = kLowest;
      row_sum[r] = 0.f;
    }
  }

  /// Takes the maxima of a score tile in, and rescales O and the sums where a maximum has outgrown
  /// its reference.
  __device__ __forceinline__ void update(const ScoreTile& s, OutputTile& o) {
    float tile_max[kRows];
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float row_max = -kInfinity;
#pragma unroll
      for (int j = 0; j < kMmaN; ++j) {
        row_max = fmaxf(row_max, fmaxf(s[r / 2][j][r % 2 * 2], s[r / 2][j][r % 2 * 2 + 1]));
      }
      row_max = fmaxf(row_max, shuffle_xor(row_max, 1));
      tile_max[r] = fmaxf(row_max, shuffle_xor(row_max, 2)) * scale;
      outgrown |= tile_max[r] - reference[r] > kRescaleThreshold;
    }
    if (any_lane(outgrown)) rescale(tile_max, o);
  }

  /// The probabilities of 16 keys, n8 tiles 2k and 2k + 1 of m16 tile m, as operand A; adds them to
  /// the sums.
  __device__ __forceinline__ void exponentiate(uint32 (&p)[4], const ScoreTile& s, int m, int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 2 * m + i % 2;
      const float (&pair)[4] = s[m][2 * k + i / 2];
      const float low = exp2_approx(fmaf(pair[i % 2 * 2], scale, -reference[r]));
      const float high = exp2_approx(fmaf(pair[i % 2 * 2 + 1], scale, -reference[r]));
      row_sum[r] += low + high;
      p[i] = pack_elements(low, high);
    }
  }

  /// Completes the sums over the quad.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      row_sum[r] += shuffle_xor(row_sum[r], 1);
      row_sum[r] += shuffle_xor(row_sum[r], 2);
    }
  }

  /// Natural logarithm of the row's sum of exponentials; -inf for a row that saw no key.
  __device__ __forceinline__ float lse(int r) const {
    constexpr float kLn2 = 0.6931471805599453f;
    return row_sum[r] == 0.f ? -kInfinity : (reference[r] + log2_approx(row_sum[r])) * kLn2;
  }

 private:
  __device__ __forceinline__ void rescale(const float (&tile_max)[kRows], OutputTile& o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float grown = fmaxf(reference[r], tile_max[r]);
      const float factor = exp2_approx(reference[r] - grown);
      reference[r] = grown;
      row_sum[r] *= factor;
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
        o[r / 2][j][r % 2 * 2] *= factor;
        o[r / 2][j][r % 2 * 2 + 1] *= factor;
      }
    }
  }
};
#line 7 "epilogue.cuh"

/// Writes the LSE of the warp's rows, the first of them `warp_row` in the CTA.
__device__ __forceinline__ void store_lse(const Params& params, const Block& block,
                                          const OnlineSoftmax& softmax, int warp_row, int lane) {
  // The four lanes of a quad hold the same rows: the first one writes.
  if (params.lse == nullptr || lane % 4 != 0) return;
  const int64 pair = static_cast<int64>(block.batch) * params.heads + block.head;
  float* lse_gmem = params.lse + pair * params.seqlen_q + block.m_begin;
  const int rows = params.seqlen_q - block.m_begin;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int row = warp_row + 8 * r + lane / 4;
    if (kEvenM || row < rows) {
      store_global_4(lse_gmem + row, __builtin_bit_cast(uint32, softmax.lse(r)));
    }
  }
}

/// Puts the warp's rows of O, normalised, into the stage.
__device__ __forceinline__ void stage_output(const OnlineSoftmax& softmax, const OutputTile& o,
                                             uint32 stage_smem, int warp_row, int lane) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool empty = softmax.row_sum[r] == 0.f;
    const float inverse = reciprocal_approx(softmax.row_sum[r]);
    const int row = warp_row + 8 * r + lane / 4;
#pragma unroll
    for (int j = 0; j < kMmaV; ++j) {
      const int i = r % 2 * 2;
      const uint32 pair = pack_elements(o[r / 2][j][i] * inverse, o[r / 2][j][i + 1] * inverse);
      const int slab = j / OutputStage::kSlabChunks;
      const int chunk = j % OutputStage::kSlabChunks;
      // An empty row has no inverse, and may hold NaN from values that it does not see.
      store_shared_4(stage_smem + OutputStage::offset(slab, row, chunk) + lane % 4 * 4,
                     empty ? 0 : pair);
    }
  }
}

/// Writes O and the LSE. O goes through shared memory (over Q, K and V), so that the stores to
/// global memory are wide and in order. Everything about the CTA's place is computed again: see
/// thread_index().
__device__ __forceinline__ void store_result(const Params& params, OnlineSoftmax& softmax,
                                             const OutputTile& o, uint32 stage_smem) {
  const int thread = thread_index();
  const int lane = thread % 32;
  const int warp_row = thread / 32 * 16 * kMmaM;
  softmax.finish();
  // Closes the hazard that a slow warp still reads the Q, K or V that the stage overwrites.
  barrier_cta();
  stage_output(softmax, o, stage_smem, warp_row, lane);
  const Block block = locate_block(params);
  store_lse(params, block, softmax, warp_row, lane);
  // The stage is complete: its rows are read by other threads than wrote them.
  barrier_cta();

  const ThreadCopy<OutputStage, kBlockM, kHeadDimV> copy(thread);
  const Strides& strides = params.o_strides;
  Element* o_gmem = params.o + block.batch * strides.batch + block.head * strides.head +
                    (block.m_begin + copy.row) * strides.row + copy.chunk * kChunkElements;
  const int rows = params.seqlen_q - block.m_begin;
#pragma unroll
  for (int pass = 0; pass < copy.kPasses; ++pass) {
    const int row = copy.row + pass * copy.kRowStep;
    if (copy.kRagged && row >= kBlockM) break;
    if (!kEvenM && row >= rows) break;
#pragma unroll
    for (int slab = 0; slab < OutputStage::kSlabs; ++slab) {
      const bool whole = (slab + 1) * OutputStage::kSlabColumns <= kHeadDimV;
      const int bytes = copy.valid_bytes(slab);
      if (!whole && bytes == 0) continue;  // nothing is staged there
      uint32 value[4];
      load_shared_16(value, stage_smem + copy.tile_offset(slab, pass));
      store_chunk(o_gmem + slab * OutputStage::kSlabColumns, value, bytes);
    }
    o_gmem += copy.kRowStep * strides.row;
  }
}
#line 1 "mask.cuh"
// Which scores of a tile are hidden: keys past the end, after the causal limit, outside the window.


#line 6 "mask.cuh"

struct Mask {
  int cut_right;  // key tiles that end beyond this key hide some key from the CTA's first row
  int cut_left;   // key tiles that start before this key hide some key from its last row
  int end;        // keys of the sequence                                   } counted from
  int row_end;    // this lane's first row sees the keys before this one    } this lane's
  int row_begin;  // and from this one on                                   } first column

  /// `m_begin`: the CTA's first row. `first_row`, `first_column`: this lane's first row and column
  /// in S.
  __device__ __forceinline__ Mask(const Params& params, int m_begin, int first_row,
                                  int first_column) {
    const int shift = params.seqlen_k - params.seqlen_q;
    const int right = kMask == MaskKind::causal ? 0 : params.window_right;
    cut_right = kMask == MaskKind::full ? params.seqlen_k
                                        : min(params.seqlen_k, m_begin + shift + right + 1);
    cut_left = m_begin + kBlockM - 1 + shift - params.window_left;
    end = params.seqlen_k - first_column;
    row_end = first_row + shift + right + 1 - first_column;
    row_begin = first_row + shift - params.window_left - first_column;
  }

  /// Whether key tile n holds a key that some row must not see.
  __device__ __forceinline__ bool cuts(int n) const {
    if (kMask == MaskKind::full && kEvenN) return false;
    return (n + 1) * kBlockN > cut_right || (kMask == MaskKind::window && n * kBlockN < cut_left);
  }

  /// Sets the hidden scores of key tile n to -inf. Column numbers are compile-time constants here,
  /// compared with a limit that carries the lane's own column.
  __device__ __forceinline__ void apply(ScoreTile& s, int n) const {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * m + 8 * half;
        // Causal rows of the sequence end before the keys do: seqlen_k needs no check of its own.
        const int limit = kMask == MaskKind::full     ? end
                          : kMask == MaskKind::causal ? row_end + row
                                                      : min(end, row_end + row);
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = 8 * j + i;
            const bool hidden =
                column >= limit - n * kBlockN ||
                (kMask == MaskKind::window && column < row_begin + row - n * kBlockN);
            if (hidden) s[m][j][2 * half + i] = -kInfinity;
          }
        }
      }
    }
  }
};
#line 1 "score.cuh"
// Raw score q.k -> score in units of log2(e), for variants that cannot leave the scale to the
// exponential.


#line 7 "score.cuh"

struct Score {
  float scale;         // Params::score_scale
  float softcap_log2;  // Params::softcap_log2
  float slope_log2;    // ALiBi slope * log2(e)
  int diagonal;        // key position of this lane's first row, minus this lane's first column

  __device__ __forceinline__ Score(const Params& params, int batch, int head, int first_row,
                                   int first_column)
      : scale(params.score_scale),
        softcap_log2(params.softcap_log2),
        slope_log2(0.f),
        diagonal(first_row + params.seqlen_k - params.seqlen_q - first_column) {
    if constexpr (kAlibi) {
      constexpr float kLog2E = 1.4426950408889634f;
      const float* slope_gmem =
          params.alibi_slopes + batch * params.alibi_batch_stride + head * params.alibi_head_stride;
      slope_log2 = kLog2E * __builtin_bit_cast(float, load_global_4(slope_gmem));
    }
  }

  /// What the exponential still multiplies its argument by.
  __device__ __forceinline__ float exponent_scale() const { return kPrescale ? 1.f : scale; }

  /// Scales, caps and biases the scores of key tile n.
  __device__ __forceinline__ void apply(ScoreTile& s, int n) const {
    if constexpr (kPrescale) {
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int distance = diagonal - n * kBlockN + 16 * m + 8 * (i / 2) - 8 * j - i % 2;
            s[m][j][i] = score(s[m][j][i], distance);
          }
        }
      }
    }
  }

 private:
  /// tanh(y) of x = 2 log2(e) y. tanh.approx has only 11 bits. 1 - 2 / (e^2y + 1) is off by 1e-7,
  /// which near 0 is too much of the result: there the series of tanh, cut after y^5, is as exact
  /// as fp32.
  static __device__ __forceinline__ float hyperbolic_tangent(float x) {
    constexpr float kHalfLn2 = 0.34657359027997264f;
    const float y = x * kHalfLn2;
    const float square = y * y;
    const float series = y * (1.f + square * (square * (2.f / 15.f) - 1.f / 3.f));
    const float quotient = 1.f - 2.f * reciprocal_approx(exp2_approx(x) + 1.f);
    return square < 0.01f ? series : quotient;
  }

  /// `distance`: the query's position minus the key's.
  __device__ __forceinline__ float score(float raw, int distance) const {
    float x = raw * scale;
    if constexpr (kSoftcap) {
      x = softcap_log2 * hyperbolic_tangent(x);
    }
    if constexpr (kAlibi) x -= slope_log2 * static_cast<float>(abs(distance));
    return x;
  }
};
#line 1 "sm80/pipeline.cuh"
// The flow of K and V tiles through shared memory, from the last key tile to the first.
//
// kStages 1: one buffer each. V[n] travels while S = Q K[n] is computed, K[n-1] while O += P V[n]
// is: two barriers a tile. kStages 2: two buffers each. K[n-1] and V[n-1] travel during the whole
// of tile n: one barrier a tile.


#line 10 "sm80/pipeline.cuh"

/// Closes the thread's group of copies.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  if constexpr (kIsa >= 80) cp_async_commit();
#endif
}

/// Waits until at most kPending of the thread's groups are in flight.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
#if __CUDA_ARCH__ >= 800
  if constexpr (kIsa >= 80) cp_async_wait<kPending>();
#endif
}

struct KeyValuePipeline {
  using KeyCopy = ThreadCopy<KeyTile, kBlockN, kHeadDim>;
  using ValueCopy = ThreadCopy<ValueTile, kBlockN, kHeadDimV>;

  const Params& params;
  KeyCopy k_copy;
  ValueCopy v_copy;
  const Element* k_gmem;  // this thread's first chunk of the next K tile to load
  const Element* v_gmem;
  int n_begin;  // the key tiles
  int n_end;
  uint32 stage_smem;      // the stage at hand: its K tile, then its V tile
  uint32 all_stages_sum;  // of the addresses of both stages

  static constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;

  /// The keys and values of a block, from its last tile on; the stages start at `smem`.
  __device__ __forceinline__ KeyValuePipeline(const Params& params, const Block& block, uint32 smem,
                                              int thread)
      : params(params),
        k_copy(thread),
        v_copy(thread),
        n_begin(block.n_begin),
        n_end(block.n_end),
        stage_smem(smem),
        all_stages_sum(2 * smem + kStageBytes) {
    const int64 first_key = static_cast<int64>(block.n_end - 1) * kBlockN;
    const Strides& k = params.k_strides;
    const Strides& v = params.v_strides;
    k_gmem = k_copy.first_chunk(
        params.k + block.batch * k.batch + block.head_k * k.head + first_key * k.row, k.row);
    v_gmem = v_copy.first_chunk(
        params.v + block.batch * v.batch + block.head_k * v.head + first_key * v.row, v.row);
  }

  /// The K tile at hand.
  __device__ __forceinline__ uint32 k_tile() const { return stage_smem; }

  /// The V tile at hand.
  __device__ __forceinline__ uint32 v_tile() const { return stage_smem + KeyTile::kBytes; }

  /// The stage that is filled next.
  __device__ __forceinline__ uint32 next_stage() const {
    return kStages == 2 ? all_stages_sum - stage_smem : stage_smem;
  }

  /// Only the first tile that is loaded, the last of the keys, can be ragged. Its missing rows of V
  /// become zero: P is zero there, but zero times a stray NaN is NaN.
  template <bool kCheckRows>
  __device__ __forceinline__ void load_k(uint32 stage, int rows) {
    k_copy.load_async<kCheckRows>(stage, k_gmem, params.k_strides.row, rows);
    k_gmem -= kBlockN * params.k_strides.row;
  }

  template <bool kCheckRows>
  __device__ __forceinline__ void load_v(uint32 stage, int rows) {
    v_copy.load_async<kCheckRows>(stage + KeyTile::kBytes, v_gmem, params.v_strides.row, rows);
    v_gmem -= kBlockN * params.v_strides.row;
  }

  /// Starts the flow with the last tile.
  __device__ __forceinline__ void start(int n) {
    const int rows = params.seqlen_k - n * kBlockN;
    load_k<!kEvenN>(stage_smem, rows);
    load_v<!kEvenN>(stage_smem, rows);
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
      if (n + 1 < n_end) {
        load_v<false>(next_stage(), kBlockN);
        commit_copies();
      }
    } else if (n > n_begin) {
      load_k<false>(next_stage(), kBlockN);
    }
  }

  /// Before O += P V of tile n: V[n] is there.
  __device__ __forceinline__ void wait_v(int n) {
    if constexpr (kStages == 1) {
      // As above; here the hazard is a slow warp that still reads K[n], whose buffer K[n - 1]
      // takes.
      wait_copies<0>();
      barrier_cta();
      if (n > n_begin) {
        load_k<false>(next_stage(), kBlockN);
        commit_copies();
      }
    } else if (n > n_begin) {
      load_v<false>(next_stage(), kBlockN);
      commit_copies();
    }
  }

  /// After tile n.
  __device__ __forceinline__ void advance() { stage_smem = next_stage(); }
};
#line 13 "forward_sm80.cu"

/// Starts the copy of the CTA's query tile, as a group of its own.
__device__ __forceinline__ void copy_query(const Params& params, const Block& block, uint32 q_smem,
                                           int thread) {
  const Strides& strides = params.q_strides;
  const ThreadCopy<QueryTile, kBlockM, kHeadDim> copy(thread);
  const Element* q_gmem = params.q + block.batch * strides.batch + block.head * strides.head +
                          block.m_begin * strides.row;
  copy.load_async<!kEvenM>(q_smem, copy.first_chunk(q_gmem, strides.row), strides.row,
                           params.seqlen_q - block.m_begin);
  commit_copies();
}

/// One k16 step of Q as operand A: lane l addresses row l % 16, chunk l / 16.
__device__ __forceinline__ void load_query(QueryFragment& q, uint32 lane_smem, int k) {
#pragma unroll
  for (int m = 0; m < kMmaM; ++m) {
    ldmatrix_x4(q[m], QueryTile::ldmatrix_address(lane_smem, m, k));
  }
}

/// S += Q K^T for the warp's rows and one key tile. K is stored [key][column], which is what
/// operand B wants.
__device__ __forceinline__ void multiply_query_key(ScoreTile& s, uint32 q_lane_smem,
                                                   QueryFragment (&q_fragments)[kMmaK],
                                                   uint32 k_lane_smem) {
#pragma unroll kQueryKeyUnroll
  for (int k = 0; k < kMmaK; ++k) {
    QueryFragment q_loaded;
    if constexpr (!kQInRegisters) load_query(q_loaded, q_lane_smem, k);
    QueryFragment& q = kQInRegisters ? q_fragments[k] : q_loaded;
#pragma unroll
    for (int j = 0; j < kMmaN; j += 2) {
      uint32 b[4];
      ldmatrix_x4(b, KeyTile::ldmatrix_address(k_lane_smem, j / 2, k));
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        mma_16x8x16(s[m][j], q[m], b[0], b[1]);
        mma_16x8x16(s[m][j + 1], q[m], b[2], b[3]);
      }
    }
  }
}

/// O += P V, P exponentiated 16 keys at a time just before it is used. V is stored [key][column]:
/// transposed on the way.
__device__ __forceinline__ void multiply_probability_value(OutputTile& o, OnlineSoftmax& softmax,
                                                           const ScoreTile& s, uint32 v_lane_smem) {
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    uint32 p[kMmaM][4];
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) softmax.exponentiate(p[m], s, m, k);
#pragma unroll
    for (int j = 0; j < kMmaV; j += 2) {
      uint32 b[4];
      ldmatrix_x4_trans(b, ValueTile::ldmatrix_address(v_lane_smem, k, j / 2));
#pragma unroll
      for (int m = 0; m < kMmaM; ++m) {
        mma_16x8x16(o[m][j], p[m], b[0], b[1]);
        mma_16x8x16(o[m][j + 1], p[m], b[2], b[3]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    KERNEL_NAME(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared_smem[];
  const uint32 q_smem = shared_address(shared_smem);
  const int thread = thread_index();
  const int lane = thread % 32;
  const int warp_row = thread / 32 * 16 * kMmaM;
  const Block block = locate_block(params);

  // ldmatrix: where this lane's row and 16-byte chunk of a 16x16 tile of Q and V, and of K, lie.
  const uint32 q_lane_smem = opaque(q_smem + QueryTile::offset(0, warp_row + lane % 16, lane / 16));
  const uint32 k_lane = opaque(KeyTile::offset(0, lane / 16 * 8 + lane % 8, lane / 8 % 2));
  const uint32 v_lane = opaque(ValueTile::offset(0, lane % 16, lane / 16));

  KeyValuePipeline pipeline(params, block, q_smem + QueryTile::kBytes, thread);
  QueryFragment q_fragments[kMmaK];
  if (block.n_begin < block.n_end) {
    copy_query(params, block, q_smem, thread);
    pipeline.start(block.n_end - 1);
    if constexpr (kQInRegisters) {
      wait_copies<1>();  // Q's group; the newer one, of K and V, may still travel
      barrier_cta();     // every thread's part of Q is there
#pragma unroll
      for (int k = 0; k < kMmaK; ++k) load_query(q_fragments[k], q_lane_smem, k);
    }
  }

  const int first_row = block.m_begin + warp_row + lane / 4;
  const int first_column = lane % 4 * 2;
  const Mask mask(params, block.m_begin, first_row, first_column);
  const Score score(params, block.batch, block.head, first_row, first_column);
  OnlineSoftmax softmax(score.exponent_scale());
  OutputTile o = {};

  for (int n = block.n_end - 1; n >= block.n_begin; --n) {
    ScoreTile s = {};
    pipeline.wait_k(n);
    multiply_query_key(s, q_lane_smem, q_fragments, pipeline.k_tile() + k_lane);
    score.apply(s, n);
    if (mask.cuts(n)) mask.apply(s, n);
    softmax.update(s, o);
    pipeline.wait_v(n);
    multiply_probability_value(o, softmax, s, pipeline.v_tile() + v_lane);
    pipeline.advance();
  }
  store_result(params, softmax, o, q_smem);
}
