// What the warp instructions compute, the conversions and the approximate functions.
#pragma once

#include <cmath>

#include "worker.cuh"

namespace host {

inline uint32 bits_of(float x) { return __builtin_bit_cast(uint32, x); }
inline float float_of(uint32 bits) { return __builtin_bit_cast(float, bits); }

constexpr uint32 kInfinityBits = 0x7f800000;
constexpr uint32 kSign = 0x80000000;

/// cvt.f32.f16: exact.
float from_fp16(uint16 value) {
  const uint32 magnitude = (value & 0x7fffu) << 13;
  // The product rebiases the exponent; it normalises subnormals, too.
  const uint32 finite = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32 bits = magnitude >= 0x0f800000 ? magnitude | kInfinityBits : finite;
  return float_of(bits | (value & 0x8000u) << 16);
}

inline float from_bf16(uint16 value) { return float_of(static_cast<uint32>(value) << 16); }

/// cvt.rn.f16.f32: to nearest, ties to even; NaN becomes 0x7fff.
uint16 to_fp16(float x) {
  const uint32 magnitude = bits_of(x) & ~kSign;
  const uint32 sign = bits_of(x) >> 16 & 0x8000;
  if (magnitude > kInfinityBits) return 0x7fff;
  // From 65520 on, halfway between the largest number and 2^16.
  if (magnitude >= 0x477ff000) return static_cast<uint16>(sign | 0x7c00);
  if (magnitude < 0x38800000) {
    // Below 2^-14 numbers are multiples of 2^-24, the last place of 0.5.
    return static_cast<uint16>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  const uint32 rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16>(sign | (rounded - 0x38000000) >> 13);
}

/// cvt.rn.bf16.f32: to nearest, ties to even; NaN becomes 0x7fff.
uint16 to_bf16(float x) {
  const uint32 bits = bits_of(x);
  if ((bits & ~kSign) > kInfinityBits) return 0x7fff;
  return static_cast<uint16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// .ftz: a subnormal counts as zero of its sign.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

// The .approx instructions to the host's precision: within their bounds, not their bits.
float exp2_approx(float x) { return flush(std::exp2(flush(x))); }
float log2_approx(float x) { return std::log2(flush(x)); }
float reciprocal_approx(float x) { return flush(1.f / flush(x)); }

void vote_any(const Meeting& meeting) {
  bool any = false;
  for (int lane = 0; lane < kWarpSize; ++lane) any |= meeting.lane<Vote>(lane).predicate;
  for (int lane = 0; lane < kWarpSize; ++lane) meeting.lane<Vote>(lane).any = any;
}

void shuffle_xor(const Meeting& meeting) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    Shuffle& own = meeting.lane<Shuffle>(lane);
    own.result = meeting.lane<Shuffle>((lane ^ own.mask) & (kWarpSize - 1)).value;
  }
}

void shuffle_index(const Meeting& meeting) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    ShuffleIndex& own = meeting.lane<ShuffleIndex>(lane);
    own.result = meeting.lane<ShuffleIndex>(own.lane & (kWarpSize - 1)).value;
  }
}

/// Row r of matrix i comes from the address of lane 8 i + r. Lane l gets the elements 2 (l % 4) and
/// the next of row l / 4; transposed, of column l / 4.
template <bool kTransposed>
inline void load_matrix(const Meeting& meeting) {
  uint32 addresses[kWarpSize];
  uint16 rows[kWarpSize][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    addresses[lane] = meeting.lane<LoadMatrix>(lane).address;
  }
  worker->load_shared_rows(meeting, addresses, rows);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int major = lane / 4;
    const int minor = lane % 4 * 2;
    uint32* matrices = meeting.lane<LoadMatrix>(lane).matrices;
    for (int i = 0; i < 4; ++i) {
      const uint16(*matrix)[8] = rows + 8 * i;
      const uint32 low = kTransposed ? matrix[minor][major] : matrix[major][minor];
      const uint32 high = kTransposed ? matrix[minor + 1][major] : matrix[major][minor + 1];
      matrices[i] = low | high << 16;
    }
  }
}

void ldmatrix_x4(const Meeting& meeting) { load_matrix<false>(meeting); }
void ldmatrix_x4_trans(const Meeting& meeting) { load_matrix<true>(meeting); }

/// Lane l, g = l / 4, t = l % 4: a[i] holds row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the
/// next; b[i] rows 2 t + 8 i and the next of column g; d[i] row g + 8 (i / 2), column 2 t + i % 2.
///
/// Products of 16-bit numbers are exact in fp32. Their sum is taken in fp32 to nearest, onto d, in
/// the order of the inner dimension; the hardware's order and rounding are its own.
template <int kDeep, float (*kConvert)(uint16)>
inline void multiply(const Meeting& meeting) {
  float a[16][kDeep];
  float b[kDeep][8];
  float d[16][8];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const Multiply& own = meeting.lane<Multiply>(lane);
    const int g = lane / 4;
    const int t = lane % 4 * 2;
    for (int i = 0; i < kDeep / 4; ++i) {
      a[g + i % 2 * 8][t + i / 2 * 8] = kConvert(static_cast<uint16>(own.a[i]));
      a[g + i % 2 * 8][t + i / 2 * 8 + 1] = kConvert(static_cast<uint16>(own.a[i] >> 16));
    }
    for (int i = 0; i < kDeep / 8; ++i) {
      b[t + 8 * i][g] = kConvert(static_cast<uint16>(own.b[i]));
      b[t + 8 * i + 1][g] = kConvert(static_cast<uint16>(own.b[i] >> 16));
    }
    for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][t + i % 2] = own.d[i];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < kDeep; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* own = meeting.lane<Multiply>(lane).d;
    for (int i = 0; i < 4; ++i) own[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

void mma_m16n8k8_fp16(const Meeting& meeting) { multiply<8, from_fp16>(meeting); }
void mma_m16n8k16_fp16(const Meeting& meeting) { multiply<16, from_fp16>(meeting); }
void mma_m16n8k16_bf16(const Meeting& meeting) { multiply<16, from_bf16>(meeting); }

}  // namespace host
