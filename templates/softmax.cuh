// Online softmax over key tiles (Milakov and Gimelshein, 2018), in powers of two.
//
// A thread shares its kRows rows with the three other lanes of its quad: row r of the thread is m16
// tile r / 2, half r % 2. The one rule for -inf: a row's reference starts at the lowest finite
// float, so that a hidden score, -inf, gives the probability 0 and never -inf minus -inf. A row
// that sees no key ends with sum 0, output 0 and LSE -inf.
#pragma once

#include "sm80/mma.cuh"

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
      tile_max[r] = row_max(s, r) * scale;
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

  /// `update`, but for O, which a product may still be adding to: returns whether a row of the warp
  /// must be rescaled, each lane's rows by `factor`. A row's factor depends on no other row, which
  /// may be another sequence's.
  __device__ __forceinline__ bool grow(const ScoreTile& s, float (&factor)[kRows]) {
    bool outgrown = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float tile_max = row_max(s, r) * scale;
      const bool grows = tile_max - reference[r] > kRescaleThreshold;
      const float grown = grows ? tile_max : reference[r];
      factor[r] = exp2_approx(reference[r] - grown);
      reference[r] = grown;
      row_sum[r] *= factor[r];
      outgrown |= grows;
    }
    return any_lane(outgrown);
  }

  /// O times `factor`.
  static __device__ __forceinline__ void rescale_by(const float (&factor)[kRows], OutputTile& o) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kMmaV; ++j) {
        o[r / 2][j][r % 2 * 2] *= factor[r];
        o[r / 2][j][r % 2 * 2 + 1] *= factor[r];
      }
    }
  }

  /// Scores to probabilities, in place; adds them to the sums. (Chains of additions half as long as
  /// two sums': 2 to 3 % faster at head_dim 64 on an H200.)
  __device__ __forceinline__ void exponentiate(ScoreTile& s) {
    float sums[4] = {row_sum[0], 0.f, row_sum[1], 0.f};
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[0][j][i] = exp2_approx(fmaf(s[0][j][i], scale, -reference[i / 2]));
        sums[i] += s[0][j][i];
      }
    }
    row_sum[0] = sums[0] + sums[1];
    row_sum[1] = sums[2] + sums[3];
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
    return row_sum[r] == 0.f ? -kInfinity : (reference[r] + log2_approx(row_sum[r])) * kLn2;
  }

 private:
  /// The highest score of row r in a tile.
  static __device__ __forceinline__ float row_max(const ScoreTile& s, int r) {
    float highest = -kInfinity;
#pragma unroll
    for (int j = 0; j < kMmaN; ++j) {
      highest = fmaxf(highest, fmaxf(s[r / 2][j][r % 2 * 2], s[r / 2][j][r % 2 * 2 + 1]));
    }
    highest = fmaxf(highest, shuffle_xor(highest, 1));
    return fmaxf(highest, shuffle_xor(highest, 2));
  }

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
