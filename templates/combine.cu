// Merges partial results of the same rows: O = sum of O_s exp(LSE_s - LSE), LSE = log sum
// exp(LSE_s).
//
// One CTA for each row and head; its warps share the parts. A part whose weight is 0, such as one
// that saw no key (LSE -inf), is not read: nothing need have been written there. A row whose every
// part is empty is 0, with LSE -inf. (FlashAttention's split-KV: Dao et al., 2023.)
#include "element.cuh"
#include "params.cuh"

constexpr int kLaneSplits = kMaxSplits / 32;

/// kVector columns of a partial row.
__device__ __forceinline__ void load_columns(float (&x)[kVector], const void* row_gmem,
                                             int column) {
  if constexpr (kPartial != DType::fp32) {
    x[0] =
        element_to_float<kPartial>(load_global_2(static_cast<const Element*>(row_gmem) + column));
  } else if constexpr (kVector == 4) {
    uint32 bits[4];
    load_global_16(bits, static_cast<const float*>(row_gmem) + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __builtin_bit_cast(float, bits[i]);
  } else {
    const uint32 bits = load_global_4(static_cast<const float*>(row_gmem) + column);
    x[0] = __builtin_bit_cast(float, bits);
  }
}

/// The weights of all parts into shared memory; returns the LSE of the row. Every warp computes the
/// same, and the first one writes.
__device__ __forceinline__ float weigh_parts(const Params& params, const float* lse_gmem,
                                             uint32 weights_smem, int warp, int lane) {
  float lse[kLaneSplits];
  float largest = -kInfinity;
#pragma unroll
  for (int j = 0; j < kLaneSplits; ++j) {
    const int split = 32 * j + lane;
    lse[j] = -kInfinity;
    if (split < params.splits) {
      const uint32 bits = load_global_4(lse_gmem + split * params.lse_split_stride);
      lse[j] = __builtin_bit_cast(float, bits);
    }
    largest = fmaxf(largest, lse[j]);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    largest = fmaxf(largest, shuffle_xor(largest, mask));
  }
  // -inf minus -inf is NaN.
  const float reference = largest == -kInfinity ? 0.f : largest;
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < kLaneSplits; ++j) {
    lse[j] = exp2_approx((lse[j] - reference) * kLog2E);
    sum += lse[j];
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  const float inverse = sum == 0.f ? 0.f : 1.f / sum;
  if (warp == 0) {
#pragma unroll
    for (int j = 0; j < kLaneSplits; ++j) {
      const int split = 32 * j + lane;
      if (split < params.splits) {
        // 0 * NaN is NaN, and a part without keys is not to be read beside another one's NaN.
        const float weight = lse[j] == 0.f ? 0.f : lse[j] * inverse;
        store_shared_4(weights_smem + 4 * split, __builtin_bit_cast(uint32, weight));
      }
    }
  }
  return sum == 0.f ? -kInfinity : reference + log2_approx(sum) * kLn2;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL_NAME(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) unsigned char shared_smem[];
  const uint32 weights_smem = shared_address(shared_smem);
  const uint32 sums_smem = weights_smem + kMaxSplits * 4;
  const int thread = thread_index();
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int head = block_index() % params.heads;
  const int row = block_index() / params.heads;  // over all batches
  const int batch = row / params.seqlen;
  const int position = row - batch * params.seqlen;

  const Strides& lse_in = params.lse_partial_strides;
  const float* lse_gmem =
      params.lse_partial + batch * lse_in.batch + position * lse_in.row + head * lse_in.head;
  const float lse = weigh_parts(params, lse_gmem, weights_smem, warp, lane);
  if (thread == 0 && params.lse != nullptr) {
    const Strides& lse_out = params.lse_strides;
    float* target =
        params.lse + batch * lse_out.batch + position * lse_out.row + head * lse_out.head;
    store_global_4(target, __builtin_bit_cast(uint32, lse));
  }
  // The weights are there.
  barrier_cta();

  constexpr int kPartialBytes = kPartial == DType::fp32 ? 4 : kElementBytes;
  const Strides& o_in = params.o_partial_strides;
  const unsigned char* o_gmem =
      static_cast<const unsigned char*>(params.o_partial) +
      kPartialBytes * (batch * o_in.batch + position * o_in.row + head * o_in.head);
  for (int column = lane * kVector; column < params.head_dim; column += 32 * kVector) {
    float sum[kVector] = {};
#pragma unroll 4
    for (int split = warp; split < params.splits; split += kWarps) {
      const uint32 bits = load_shared_4(weights_smem + 4 * split);
      const float weight = __builtin_bit_cast(float, bits);
      if (weight == 0.f) continue;
      float part[kVector];
      load_columns(part, o_gmem + kPartialBytes * split * params.o_split_stride, column);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] += weight * part[i];
    }
    const uint32 sum_smem = sums_smem + 4 * (warp * kMaxHeadDim + column);
    if constexpr (kVector == 4) {
      const uint32 bits[4] = {
          __builtin_bit_cast(uint32, sum[0]), __builtin_bit_cast(uint32, sum[1]),
          __builtin_bit_cast(uint32, sum[2]), __builtin_bit_cast(uint32, sum[3])};
      store_shared_16(sum_smem, bits);
    } else {
      store_shared_4(sum_smem, __builtin_bit_cast(uint32, sum[0]));
    }
  }
  // Each warp's sum is there.
  barrier_cta();
  const int64 out = (static_cast<int64>(row) * params.heads + head) * params.head_dim;
  for (int column = thread; column < params.head_dim; column += kThreads) {
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      const uint32 bits = load_shared_4(sums_smem + 4 * (part * kMaxHeadDim + column));
      sum += __builtin_bit_cast(float, bits);
    }
    if constexpr (kDType == DType::fp32) {
      store_global_4(static_cast<float*>(params.o) + out + column, __builtin_bit_cast(uint32, sum));
    } else {
      store_global_2(static_cast<Element*>(params.o) + out + column,
                     static_cast<Element>(pack_elements(sum, 0.f)));
    }
  }
}
