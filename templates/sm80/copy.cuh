// Tiles in shared memory, and the copies between them and global memory.
//
// A tile of kTileRows x kColumns elements is stored as slabs of 64 columns (128 bytes a row; 32
// columns where 64 do not divide kColumns), slab after slab. Within a slab the 16-byte chunk c of
// row r lies at chunk c ^ (r % 8) (32 columns: c ^ (r / 2 % 4)): eight rows of one chunk column
// then cover all 32 banks, for ldmatrix and for the copies.
#pragma once

#include "pages.cuh"

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
using KeyTile = SharedTile<kWarpKeys, kHeadDimPadded>;  // of the keys that a warp multiplies
using ValueTile = SharedTile<kWarpKeys, kHeadDimVPadded>;
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

/// What one of kCopyThreads threads moves between a global matrix (rows `row_stride` elements
/// apart, kDim columns) and a tile: in every slab the same chunk of the rows row, row + kRowStep,
/// ... so that neighbouring threads touch neighbouring chunks.
template <class Tile, int kTileRows, int kDim, int kCopyThreads = kThreads>
struct ThreadCopy {
  static constexpr int kRowStep = kCopyThreads / Tile::kSlabChunks;
  static constexpr int kPasses = (kTileRows + kRowStep - 1) / kRowStep;
  static constexpr bool kPartialPass = kTileRows % kRowStep != 0;
  // Narrow loads make long code: unrolled, an odd head_dim would take seconds to compile.
  static constexpr int kPassUnroll = kLoadBytes == kChunkBytes ? kPasses : 1;
  static_assert(kRowStep % 4 == 0, "the swizzle of a thread's chunk is the same in all its rows");

  int row;
  int chunk;
  uint32 offset;  // of the thread's first chunk in the tile

  __device__ __forceinline__ explicit ThreadCopy(int thread)
      : row(thread / Tile::kSlabChunks),
        chunk(thread % Tile::kSlabChunks),
        offset(opaque(Tile::offset(0, row, chunk))) {}

  /// Byte offset of the thread's chunk of slab `slab` in pass `pass`.
  __device__ __forceinline__ uint32 tile_offset(int slab, int pass) const {
    // A swizzle repeats every 8 rows; 4 rows down it differs in one bit of the chunk.
    const uint32 swizzle = kRowStep % 8 == 4 && pass % 2 == 1 ? 4 * kChunkBytes : 0;
    return (offset ^ swizzle) + slab * Tile::kSlabBytes + pass * kRowStep * Tile::kPitch;
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

  /// Starts copying a row whose chunk for this thread is `source_gmem`. Columns from kDim up to the
  /// next multiple of 16 become zero, and so does a row that is not valid where kCheckRow.
  template <bool kCheckRow>
  __device__ __forceinline__ void load_row_async(uint32 tile_smem, int pass,
                                                 const Element* source_gmem, bool valid) const {
#pragma unroll
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      const uint32 target = tile_smem + tile_offset(slab, pass);
      const Element* source = source_gmem + slab * Tile::kSlabColumns;
      const bool whole = (slab + 1) * Tile::kSlabColumns <= kDim;
      if (whole && !kCheckRow) {
        copy_chunk_async<true>(target, source, kChunkBytes);
      } else if (whole ||
                 slab * Tile::kSlabColumns + chunk * kChunkElements < (kDim + 15) / 16 * 16) {
        copy_chunk_async<false>(target, source, !kCheckRow || valid ? valid_bytes(slab) : 0);
      }
    }
  }

  /// Starts copying the tile whose first chunk for this thread is `source_gmem`; where kCheckRows,
  /// rows from `rows` on become zero.
  template <bool kCheckRows>
  __device__ __forceinline__ void load_async(uint32 tile_smem, const Element* source_gmem,
                                             int64 row_stride, int rows) const {
#pragma unroll kPassUnroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int tile_row = row + pass * kRowStep;
      if (kPartialPass && tile_row >= kTileRows) break;
      load_row_async<kCheckRows>(tile_smem, pass, source_gmem, tile_row < rows);
      source_gmem += kRowStep * row_stride;
    }
  }

  /// Starts copying a tile of paged rows, the first of them in slot `slot`, of a head whose first
  /// element in page 0 is `head_gmem`. Rows from `rows` on, and those of no page, become zero.
  __device__ __forceinline__ void load_paged_async(uint32 tile_smem, const Element* head_gmem,
                                                   const Strides& strides, const Pages& pages,
                                                   int slot, int rows) const {
#pragma unroll kPassUnroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int tile_row = row + pass * kRowStep;
      if (kPartialPass && tile_row >= kTileRows) break;
      const int page = tile_row < rows ? pages.page_of(slot + tile_row) : -1;
      const int64 offset = pages.row_offset(page, slot + tile_row, strides);
      load_row_async<true>(tile_smem, pass, head_gmem + offset + chunk * kChunkElements,
                           pages.exists(page));
    }
  }
};

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
