// The twin of ../../sm90/ptx.cuh for the host: see ../ptx.cuh.
#pragma once

#include "../ptx.cuh"
#include "params.cuh"

__device__ __forceinline__ int warp_uniform(int value, Site site = Site::here()) {
  return shuffle_index(value, 0, site);
}

__device__ __forceinline__ int atomic_add(int* target_gmem, int value, Site site = Site::here()) {
  return host::atomic_add(target_gmem, value, site);
}

template <int kRegisters>
__device__ __forceinline__ void release_registers(Site site = Site::here()) {
  host::RegisterCount operands = {kRegisters, false};
  host::meet("setmaxnreg.dec", host::set_registers, &operands, site);
}

template <int kRegisters>
__device__ __forceinline__ void claim_registers(Site site = Site::here()) {
  host::RegisterCount operands = {kRegisters, true};
  host::meet("setmaxnreg.inc", host::set_registers, &operands, site);
}

__device__ __forceinline__ void barrier_sync(int id, int threads, Site site = Site::here()) {
  host::NamedBarrierArrival operands = {id, threads, true};
  host::meet("bar.sync.named", host::come_to_barrier, &operands, site);
}

__device__ __forceinline__ void barrier_arrive(int id, int threads, Site site = Site::here()) {
  host::NamedBarrierArrival operands = {id, threads, false};
  host::meet("bar.arrive.named", host::come_to_barrier, &operands, site);
}

__device__ __forceinline__ void mbarrier_init(uint32 barrier_smem, int count,
                                              Site site = Site::here()) {
  host::mbarrier_init(barrier_smem, count, site);
}

__device__ __forceinline__ void fence_mbarrier_init(Site site = Site::here()) {
  host::fence_proxy("fence.mbarrier_init", true, site);
}

__device__ __forceinline__ void mbarrier_arrive(uint32 barrier_smem, Site site = Site::here()) {
  host::mbarrier_arrive("mbarrier.arrive", barrier_smem, 0, site);
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint32 barrier_smem, int bytes,
                                                       Site site = Site::here()) {
  host::mbarrier_arrive("mbarrier.arrive.expect_tx", barrier_smem, bytes, site);
}

__device__ __forceinline__ void mbarrier_wait(uint32 barrier_smem, int parity,
                                              Site site = Site::here()) {
  host::mbarrier_wait(barrier_smem, parity, site);
}

__device__ __forceinline__ void fence_proxy_async(Site site = Site::here()) {
  host::fence_proxy("fence.proxy.async", false, site);
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap*) {}

__device__ __forceinline__ void tma_load(uint32 target_smem, const TensorMap* map,
                                         uint32 barrier_smem, int column, int head, int row,
                                         int batch, Site site = Site::here()) {
  static_assert(sizeof(host::TiledTensor) <= sizeof(TensorMap), "it lies in a tensor map");
  host::load_tensor(target_smem, map, barrier_smem, {column, head, row, batch}, site);
}

__device__ __forceinline__ void wgmma_fence(Site site = Site::here()) {
  host::meet("wgmma.fence", host::fence_registers, nullptr, site);
}

__device__ __forceinline__ void wgmma_commit(Site site = Site::here()) {
  host::meet("wgmma.commit_group", host::commit_group, nullptr, site);
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait(Site site = Site::here()) {
  host::GroupWait operands = {kPending};
  host::meet("wgmma.wait_group", host::wait_groups, &operands, site);
}

template <int kTiles>
__device__ __forceinline__ void pin(float (&)[1][kTiles][4]) {}

template <int kSteps>
struct Descriptors {
  uint64 of_step[kSteps];
};

__device__ __forceinline__ void wgmma_scores(float (&d)[1][kMmaN][4], const Descriptors<kMmaK>& a,
                                             const Descriptors<kMmaK>& b,
                                             Site site = Site::here()) {
  for (int k = 0; k < kMmaK; ++k) {
    host::GroupMultiply operands = {
        d[0][0], kMmaN, nullptr, a.of_step[k], b.of_step[k], k > 0, kDType == DType::bf16};
    host::meet("wgmma.scores", host::multiply_group, &operands, site);
  }
}

__device__ __forceinline__ void wgmma_output(float (&d)[1][kMmaV][4],
                                             const uint32 (&a)[kBlockN / 16][4],
                                             const Descriptors<kBlockN / 16>& b,
                                             Site site = Site::here()) {
  for (int k = 0; k < kBlockN / 16; ++k) {
    host::GroupMultiply operands = {
        d[0][0], kMmaV, a[k], 0, b.of_step[k], true, kDType == DType::bf16};
    host::meet("wgmma.output", host::multiply_group, &operands, site);
  }
}
