// One function per PTX instruction (or CUDA intrinsic), no logic. The host target replaces this
// partial. Instructions: https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "config.cuh"

/// The 32-bit shared-window address of a pointer into shared memory.
__device__ __forceinline__ uint32 shared_address(const void* pointer_smem) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer_smem));
}

/// The thread's number in its CTA. Volatile, as block_index: what a kernel needs again after its
/// main loop is read again instead of taking a register through the loop.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// The CTA's number in the grid.
__device__ __forceinline__ int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

/// The value, kept by the compiler as the one register it is: not split into its terms, nor summed
/// up anew with others.
__device__ __forceinline__ uint32 opaque(uint32 value) {
  asm("" : "+r"(value));
  return value;
}

/// All threads of the CTA meet; shared memory written before is seen after.
__device__ __forceinline__ void barrier_cta() { __syncthreads(); }

/// All lanes of the warp meet; shared memory that one wrote before is seen by the others after.
__device__ __forceinline__ void barrier_warp() { __syncwarp(); }

/// Whether any lane of the warp passes true.
__device__ __forceinline__ bool any_lane(bool predicate) {
  return __any_sync(0xffffffffu, predicate);
}

/// The value of the lane whose number differs in the bits of `mask`.
__device__ __forceinline__ float shuffle_xor(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

/// The value of lane `lane`.
__device__ __forceinline__ int shuffle_index(int value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

/// 2^x; ex2.approx: 2 ulp, denormals flushed.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// log2(x); lg2.approx.
__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x; rcp.approx: 1 ulp.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The value of an fp16.
__device__ __forceinline__ float fp16_to_float(uint16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

#if __CUDA_ARCH__ >= 800
/// Two floats to packed fp16, `low` in the low half; round to nearest even.
__device__ __forceinline__ uint32 pack_fp16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/// Two floats to packed bf16, `low` in the low half; round to nearest even.
__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
#else
/// Two floats to packed fp16, `low` in the low half; round to nearest even. (cvt to f16x2 needs
/// sm_80.)
__device__ __forceinline__ uint32 pack_fp16(float low, float high) {
  uint32 packed;
  asm("{\n .reg .b16 lo, hi;\n cvt.rn.f16.f32 lo, %1;\n cvt.rn.f16.f32 hi, %2;\n mov.b32 %0, {lo, "
      "hi};\n}"
      : "=r"(packed)
      : "f"(low), "f"(high));
  return packed;
}
#endif

/// Four 8x8 matrices of 16-bit elements; lane l gives the row address of matrix l/8, row l%8.
__device__ __forceinline__ void ldmatrix_x4(uint32 (&matrices)[4], uint32 address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address_smem));
}

/// As ldmatrix_x4, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&matrices)[4], uint32 address_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address_smem));
}

/// d += a b; fp16 operands (16x8, 8x8), fp32 accumulators (16x8).
__device__ __forceinline__ void mma_m16n8k8_fp16(float (&d)[4], uint32 a0, uint32 a1, uint32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

#if __CUDA_ARCH__ >= 800
/// d += a b; fp16 operands (16x16, 16x8), fp32 accumulators (16x8).
__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                  uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d += a b; bf16 operands (16x16, 16x8), fp32 accumulators (16x8).
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                  uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 16 bytes to shared memory past L1; bytes from `source_bytes` on are zero.
__device__ __forceinline__ void cp_async_16(uint32 address_smem, const void* source_gmem,
                                            int source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address_smem),
               "l"(source_gmem), "r"(source_bytes)
               : "memory");
}

/// 16 bytes to shared memory past L1.
__device__ __forceinline__ void cp_async_16(uint32 address_smem, const void* source_gmem) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address_smem),
               "l"(source_gmem)
               : "memory");
}

/// 8 bytes to shared memory; bytes from `source_bytes` on are zero.
__device__ __forceinline__ void cp_async_8(uint32 address_smem, const void* source_gmem,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address_smem), "l"(source_gmem),
               "r"(source_bytes)
               : "memory");
}

/// 4 bytes to shared memory; bytes from `source_bytes` on are zero.
__device__ __forceinline__ void cp_async_4(uint32 address_smem, const void* source_gmem,
                                           int source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address_smem), "l"(source_gmem),
               "r"(source_bytes)
               : "memory");
}

/// Closes the thread's open group of cp.async.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending of the thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#endif

/// 16 bytes from global memory, through the read-only path.
__device__ __forceinline__ void load_global_16(uint32 (&value)[4], const void* source_gmem) {
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "l"(source_gmem));
}

/// 4 bytes from global memory, through the read-only path.
__device__ __forceinline__ uint32 load_global_4(const void* source_gmem) {
  uint32 value;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(source_gmem));
  return value;
}

/// One 16-bit element from global memory, through the read-only path.
__device__ __forceinline__ uint16 load_global_2(const void* source_gmem) {
  uint16 value;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(value) : "l"(source_gmem));
  return value;
}

/// 16 bytes to shared memory.
__device__ __forceinline__ void store_shared_16(uint32 address_smem, const uint32 (&value)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address_smem), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

/// 8 bytes to shared memory.
__device__ __forceinline__ void store_shared_8(uint32 address_smem, uint32 low, uint32 high) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address_smem), "r"(low), "r"(high)
               : "memory");
}

/// 4 bytes to shared memory.
__device__ __forceinline__ void store_shared_4(uint32 address_smem, uint32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address_smem), "r"(value) : "memory");
}

/// 16 bytes from shared memory.
__device__ __forceinline__ void load_shared_16(uint32 (&value)[4], uint32 address_smem) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "r"(address_smem)
               : "memory");
}

/// 4 bytes from shared memory.
__device__ __forceinline__ uint32 load_shared_4(uint32 address_smem) {
  uint32 value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address_smem) : "memory");
  return value;
}

/// 16 bytes to global memory.
__device__ __forceinline__ void store_global_16(void* target_gmem, const uint32 (&value)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(target_gmem), "r"(value[0]),
               "r"(value[1]), "r"(value[2]), "r"(value[3])
               : "memory");
}

/// 8 bytes to global memory.
__device__ __forceinline__ void store_global_8(void* target_gmem, uint32 low, uint32 high) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(target_gmem), "r"(low), "r"(high)
               : "memory");
}

/// 4 bytes to global memory.
__device__ __forceinline__ void store_global_4(void* target_gmem, uint32 value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(target_gmem), "r"(value) : "memory");
}

/// 2 bytes to global memory.
__device__ __forceinline__ void store_global_2(void* target_gmem, uint16 value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(target_gmem), "h"(value) : "memory");
}
