// fp16 and bf16 values to and from float.
#pragma once

#include "ptx.cuh"

/// Two floats as packed elements, `low` in the low half.
__device__ __forceinline__ uint32 pack_elements(float low, float high) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kDType == DType::bf16) return pack_bf16(low, high);
#endif
  return pack_fp16(low, high);
}

/// The value of an element of type kFrom.
template <DType kFrom>
__device__ __forceinline__ float element_to_float(Element x) {
  if constexpr (kFrom == DType::bf16) {
    return __builtin_bit_cast(float, static_cast<uint32>(x) << 16);
  }
  return fp16_to_float(x);
}
