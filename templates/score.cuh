// Raw score q.k -> score in units of log2(e), for variants that cannot leave the scale to the
// exponential.
#pragma once

#include "params.cuh"
#include "sm80/mma.cuh"

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
