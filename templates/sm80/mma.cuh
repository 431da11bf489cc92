// Matrix products of a warp on 16x8x16 tiles, fp32 accumulation.
//
// Lane l of a warp, g = l / 4, t = l % 4, holds
//   accumulator (16x8): [0], [1] = row g, columns 2t, 2t+1; [2], [3] = row g + 8, the same columns
//   operand A (16x16), 4 registers of 2 elements: rows g, g+8, g, g+8; columns 2t.. (first two),
//   2t+8.. (last two) operand B (16x8), 2 registers of 2 elements: rows 2t.. and 2t+8.., column g
// so that two neighbouring accumulator tiles, packed, are an operand A as they stand: P never
// leaves the registers.
#pragma once

#include "element.cuh"

/// d += a b for one 16x8 tile over 16 of the inner dimension.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                            uint32 b1) {
#if __CUDA_ARCH__ >= 800
  if constexpr (kDType == DType::bf16) {
    mma_m16n8k16_bf16(d, a, b0, b1);
    return;
  }
  if constexpr (kIsa >= 80) {
    mma_m16n8k16_fp16(d, a, b0, b1);
    return;
  }
#endif
  mma_m16n8k8_fp16(d, a[0], a[1], b0);
  mma_m16n8k8_fp16(d, a[2], a[3], b1);
}

/// O (registers) in fp32: m16 tile, n8 tile, the four values of an accumulator.
using OutputTile = float[kMmaM][kMmaV][4];

/// S (registers), later P: m16 tile, n8 tile, the four values of an accumulator.
using ScoreTile = float[kMmaM][kMmaN][4];

/// One k16 step of Q for the warp's rows, as operand A.
using QueryFragment = uint32[kMmaM][4];
