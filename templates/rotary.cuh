// Rotary position embedding (Su et al., 2021) of the first 2 * rotary_half columns of a row.
#pragma once

#include "element.cuh"
#include "params.cuh"

struct Rotary {
  const Element* cos_gmem;  // (rotary_half) of the row's position
  const Element* sin_gmem;
  int half;

  /// Positions past the tables take their last row.
  __device__ __forceinline__ Rotary(const Params& params, int position) : half(params.rotary_half) {
    const int64 row = min(max(position, 0), params.positions - 1);
    cos_gmem = params.rotary_cos + row * params.rotary_cos_stride;
    sin_gmem = params.rotary_sin + row * params.rotary_sin_stride;
  }

  /// Element `column` of the rotated row.
  __device__ __forceinline__ float rotated(const Element* row_gmem, int column) const {
    const float own = element_to_float<kDType>(load_global_2(row_gmem + column));
    if (column >= 2 * half) return own;
    const bool interleaved = kRotary == RotaryKind::interleaved;
    const bool second = interleaved ? column % 2 : column >= half;
    const int pair = interleaved ? column / 2 : column - (second ? half : 0);
    const int partner = interleaved ? column ^ 1 : column + (second ? -half : half);
    const float other = element_to_float<kDType>(load_global_2(row_gmem + partner));
    const float cosine = element_to_float<kDType>(load_global_2(cos_gmem + pair));
    const float sine = element_to_float<kDType>(load_global_2(sin_gmem + pair));
    return own * cosine + (second ? other : -other) * sine;
  }
};
