// Which scores of a tile are hidden: keys past the end, after the causal limit, outside the window.
#pragma once

#include "score.cuh"

struct Mask {
  int cut_right;  // key tiles that end beyond this key hide some key from the first of the rows
  int cut_left;   // key tiles that start before this key hide some key from their last
  int end;        // keys of the sequence                           } counted from
  int keys_end[kOwnRows];    // the row sees the keys before this one          } this lane's
  int keys_begin[kOwnRows];  // and from this one on                           } first column

  /// `row_begin`, `row_end`: the rows that are masked together. `first_row`, `first_column`: this
  /// lane's first row and column in S.
  __device__ __forceinline__ Mask(const Params& params, const Block& block, int row_begin,
                                  int row_end, int first_row, int first_column) {
    const int shift = block.seqlen_k - block.seqlen_q;
    const int right = kMask == MaskKind::causal ? 0 : params.window_right;
    const int first = row_position(params, row_begin) + shift;
    cut_right = kMask == MaskKind::full ? block.seqlen_k : min(block.seqlen_k, first + right + 1);
    const int last = row_position(params, row_end - 1) + shift;
    cut_left = last - params.window_left;
    end = block.seqlen_k - first_column;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const int own = row_position(params, first_row + 8 * r) + shift - first_column;
      keys_end[r] = own + right + 1;
      keys_begin[r] = own - params.window_left;
    }
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
        const int own = kPackGqa ? 2 * m + half : 0;
        const int row = kPackGqa ? 0 : 16 * m + 8 * half;
        // Causal rows of the sequence end before the keys do: seqlen_k needs no check of its own.
        const int limit = kMask == MaskKind::full     ? end
                          : kMask == MaskKind::causal ? keys_end[own] + row
                                                      : min(end, keys_end[own] + row);
#pragma unroll
        for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = 8 * j + i;
            const bool hidden =
                column >= limit - n * kBlockN ||
                (kMask == MaskKind::window && column < keys_begin[own] + row - n * kBlockN);
            if (hidden) s[m][j][2 * half + i] = -kInfinity;
          }
        }
      }
    }
  }
};
