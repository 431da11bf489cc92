// Which scores of a tile are hidden: keys past the end, after the causal limit, outside the window.
#pragma once

#include "params.cuh"
#include "sm80/mma.cuh"

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
