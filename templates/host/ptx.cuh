// The twin of ../ptx.cuh for the host: the same functions, each doing in C++ what its instruction
// does. `site`, never passed, is the template line that calls. What several lanes or the memory
// take part in goes to the runtime under the instruction's name.
#pragma once

#include "config.cuh"
#include "cuda.cuh"
#include "launch.cuh"
#include "runtime.cuh"

using host::Site;

__device__ __forceinline__ uint32 shared_address(const void* pointer_smem) {
  return host::shared_address(pointer_smem);
}

__device__ __forceinline__ int thread_index() { return host::thread_index(); }

__device__ __forceinline__ int block_index() { return host::block_index(); }

__device__ __forceinline__ uint32 opaque(uint32 value) { return value; }

__device__ __forceinline__ void barrier_cta(Site site = Site::here()) { host::barrier_cta(site); }

__device__ __forceinline__ void barrier_warp(Site site = Site::here()) { host::barrier_warp(site); }

__device__ __forceinline__ bool any_lane(bool predicate, Site site = Site::here()) {
  host::Vote operands = {predicate, false};
  host::meet("vote.any", host::vote_any, &operands, site);
  return operands.any;
}

__device__ __forceinline__ float shuffle_xor(float value, int mask, Site site = Site::here()) {
  host::Shuffle operands = {value, 0.f, mask};
  host::meet("shfl.bfly", host::shuffle_xor, &operands, site);
  return operands.result;
}

__device__ __forceinline__ int shuffle_index(int value, int lane, Site site = Site::here()) {
  host::ShuffleIndex operands = {value, 0, lane};
  host::meet("shfl.idx", host::shuffle_index, &operands, site);
  return operands.result;
}

__device__ __forceinline__ float exp2_approx(float x) { return host::exp2_approx(x); }

__device__ __forceinline__ float log2_approx(float x) { return host::log2_approx(x); }

__device__ __forceinline__ float reciprocal_approx(float x) { return host::reciprocal_approx(x); }

__device__ __forceinline__ float fp16_to_float(uint16 x) { return host::from_fp16(x); }

__device__ __forceinline__ uint32 pack_fp16(float low, float high) {
  return host::to_fp16(low) | static_cast<uint32>(host::to_fp16(high)) << 16;
}

__device__ __forceinline__ void ldmatrix_x4(uint32 (&matrices)[4], uint32 address_smem,
                                            Site site = Site::here()) {
  host::LoadMatrix operands = {matrices, address_smem};
  host::meet("ldmatrix.x4", host::ldmatrix_x4, &operands, site);
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&matrices)[4], uint32 address_smem,
                                                  Site site = Site::here()) {
  host::LoadMatrix operands = {matrices, address_smem};
  host::meet("ldmatrix.x4.trans", host::ldmatrix_x4_trans, &operands, site);
}

__device__ __forceinline__ void mma_m16n8k8_fp16(float (&d)[4], uint32 a0, uint32 a1, uint32 b0,
                                                 Site site = Site::here()) {
  host::Multiply operands = {d, {a0, a1}, {b0}};
  host::meet("mma.m16n8k8", host::mma_m16n8k8_fp16, &operands, site);
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
  return host::to_bf16(low) | static_cast<uint32>(host::to_bf16(high)) << 16;
}

__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                  uint32 b1, Site site = Site::here()) {
  host::Multiply operands = {d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  host::meet("mma.m16n8k16", host::mma_m16n8k16_fp16, &operands, site);
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                  uint32 b1, Site site = Site::here()) {
  host::Multiply operands = {d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  host::meet("mma.m16n8k16", host::mma_m16n8k16_bf16, &operands, site);
}

__device__ __forceinline__ void cp_async_16(uint32 address_smem, const void* source_gmem,
                                            int source_bytes, Site site = Site::here()) {
  host::copy_async("cp.async.16", address_smem, 16, source_gmem, source_bytes, site);
}

__device__ __forceinline__ void cp_async_16(uint32 address_smem, const void* source_gmem,
                                            Site site = Site::here()) {
  host::copy_async("cp.async.16", address_smem, 16, source_gmem, 16, site);
}

__device__ __forceinline__ void cp_async_8(uint32 address_smem, const void* source_gmem,
                                           int source_bytes, Site site = Site::here()) {
  host::copy_async("cp.async.8", address_smem, 8, source_gmem, source_bytes, site);
}

__device__ __forceinline__ void cp_async_4(uint32 address_smem, const void* source_gmem,
                                           int source_bytes, Site site = Site::here()) {
  host::copy_async("cp.async.4", address_smem, 4, source_gmem, source_bytes, site);
}

__device__ __forceinline__ void cp_async_commit(Site site = Site::here()) {
  host::commit_copies(site);
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait(Site site = Site::here()) {
  host::wait_copies(kPending, site);
}
#endif

__device__ __forceinline__ void load_global_16(uint32 (&value)[4], const void* source_gmem,
                                               Site site = Site::here()) {
  host::load_global("ld.global.16", value, source_gmem, 16, site);
}

__device__ __forceinline__ uint32 load_global_4(const void* source_gmem, Site site = Site::here()) {
  uint32 value;
  host::load_global("ld.global.4", &value, source_gmem, 4, site);
  return value;
}

__device__ __forceinline__ uint16 load_global_2(const void* source_gmem, Site site = Site::here()) {
  uint16 value;
  host::load_global("ld.global.2", &value, source_gmem, 2, site);
  return value;
}

__device__ __forceinline__ void store_shared_16(uint32 address_smem, const uint32 (&value)[4],
                                                Site site = Site::here()) {
  host::store_shared("st.shared.16", address_smem, value, 16, site);
}

__device__ __forceinline__ void store_shared_8(uint32 address_smem, uint32 low, uint32 high,
                                               Site site = Site::here()) {
  const uint32 value[2] = {low, high};
  host::store_shared("st.shared.8", address_smem, value, 8, site);
}

__device__ __forceinline__ void store_shared_4(uint32 address_smem, uint32 value,
                                               Site site = Site::here()) {
  host::store_shared("st.shared.4", address_smem, &value, 4, site);
}

__device__ __forceinline__ void load_shared_16(uint32 (&value)[4], uint32 address_smem,
                                               Site site = Site::here()) {
  host::load_shared("ld.shared.16", value, address_smem, 16, site);
}

__device__ __forceinline__ uint32 load_shared_4(uint32 address_smem, Site site = Site::here()) {
  uint32 value;
  host::load_shared("ld.shared.4", &value, address_smem, 4, site);
  return value;
}

__device__ __forceinline__ void store_global_16(void* target_gmem, const uint32 (&value)[4],
                                                Site site = Site::here()) {
  host::store_global("st.global.16", target_gmem, value, 16, site);
}

__device__ __forceinline__ void store_global_8(void* target_gmem, uint32 low, uint32 high,
                                               Site site = Site::here()) {
  const uint32 value[2] = {low, high};
  host::store_global("st.global.8", target_gmem, value, 8, site);
}

__device__ __forceinline__ void store_global_4(void* target_gmem, uint32 value,
                                               Site site = Site::here()) {
  host::store_global("st.global.4", target_gmem, &value, 4, site);
}

__device__ __forceinline__ void store_global_2(void* target_gmem, uint16 value,
                                               Site site = Site::here()) {
  host::store_global("st.global.2", target_gmem, &value, 2, site);
}
