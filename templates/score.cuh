// Raw score q.k -> score in units of log2(e), for variants that cannot leave the scale to the
// exponential.
#pragma once

#include "block.cuh"
#include "sm80/mma.cuh"

// Rows of a lane that stand for themselves: packed rows have a position and a head each, others
// follow from the first.
constexpr int kOwnRows = kPackGqa ? kRows : 1;

struct Score {
  float scale;                 // Params::score_scale
  float softcap_log2;          // Params::softcap_log2
  float slope_log2[kOwnRows];  // ALiBi slope * log2(e)
  int diagonal[kOwnRows];      // key position of the row, minus this lane's first column

  __device__ __forceinline__ Score(const Params& params, const Block& block, int first_row,
                                   int first_column)
      : scale(params.score_scale), softcap_log2(params.softcap_log2) {
    if constexpr (kAlibi) {
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        const int row = first_row + 8 * r;
        const int position = row_position(params, row);
        const int head = block.head + (kPackGqa ? row - position * params.group.value : 0);
        const float* slope_gmem = params.alibi_slopes + block.batch * params.alibi_batch_stride +
                                  head * params.alibi_head_stride;
        slope_log2[r] = kLog2E * __builtin_bit_cast(float, load_global_4(slope_gmem));
        diagonal[r] = position + block.seqlen_k - block.seqlen_q - first_column;
      }
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
            const int r = 2 * m + i / 2;
            const int own = kPackGqa ? r : 0;
            const int row = kPackGqa ? 0 : 8 * r;
            // Whole numbers, in fp32 exact below 2^24: one conversion a row.
            const float first = static_cast<float>(diagonal[own] + row - n * kBlockN);
            s[m][j][i] =
                score(s[m][j][i], slope_log2[own], first - static_cast<float>(8 * j + i % 2));
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
  __device__ __forceinline__ float score(float raw, float slope, float distance) const {
    float x = raw * scale;
    if constexpr (kSoftcap) {
      x = softcap_log2 * hyperbolic_tangent(x);
    }
    if constexpr (kAlibi) x -= slope * fabsf(distance);
    return x;
  }
};
