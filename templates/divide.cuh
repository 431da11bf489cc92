// Division by a Divisor: a product and a shift.
#pragma once

#include "params.cuh"
#include "ptx.cuh"

/// x / by, rounded down, of x in [0, 2^31). (Granlund and Montgomery, 1994.)
__device__ __forceinline__ int divide(int x, const Divisor& by) {
  const uint64 product = static_cast<uint64>(2 * static_cast<uint32>(x)) * by.multiplier;
  return static_cast<int>(static_cast<uint32>(product >> 32) >> by.shift);
}
