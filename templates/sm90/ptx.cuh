// One function per PTX instruction of sm_90a, or per product of them, no logic. The host target
// replaces this partial. Instructions: https://docs.nvidia.com/cuda/parallel-thread-execution/
#pragma once

#include "../params.cuh"
#include "../ptx.cuh"

/// The value of lane 0, which the compiler then knows to be the same in the whole warp.
__device__ __forceinline__ int warp_uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

/// Adds to a number in global memory, which other CTAs add to too; returns what it was.
__device__ __forceinline__ int atomic_add(int* target_gmem, int value) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(target_gmem), "r"(value)
               : "memory");
  return before;
}

/// Gives registers back to the CTA's pool, down to kRegisters a thread. All warps of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Takes registers from the CTA's pool, up to kRegisters a thread; waits until they are there.
template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// `threads` threads meet at named barrier `id` (1..15): those that sync wait, those that arrive do
/// not. Shared memory written before is seen after by those that sync.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// See barrier_sync.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Makes an mbarrier whose phases complete with `count` arrivals and the bytes that are expected.
__device__ __forceinline__ void mbarrier_init(uint32 barrier_smem, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_smem), "r"(count)
               : "memory");
}

/// Makes initialised mbarriers known to the asynchronous proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// Arrives once.
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier_smem) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_smem) : "memory");
}

/// Arrives once, and has the phase wait for `bytes` bytes too.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32 barrier_smem, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_smem),
               "r"(bytes)
               : "memory");
}

/// Waits until the phase of parity `parity` is complete.
__device__ __forceinline__ void mbarrier_wait(uint32 barrier_smem, int parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again;\n}" ::"r"(barrier_smem),
      "r"(parity)
      : "memory");
}

/// Makes the thread's writes to shared memory visible to wgmma and TMA.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Fetches a tensor map ahead of its first use.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Copies the box at (column, head, row, batch) of a tensor to shared memory, zero outside the
/// tensor; its bytes count as arrived at the mbarrier.
__device__ __forceinline__ void tma_load(uint32 target_smem, const TensorMap* map,
                                         uint32 barrier_smem, int column, int head, int row,
                                         int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target_smem),
      "l"(map), "r"(barrier_smem), "r"(column), "r"(head), "r"(row), "r"(batch)
      : "memory");
}

/// Orders register writes before the wgmma that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// Closes the warpgroup's open group of wgmma.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most kPending of the warpgroup's newest groups run.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps accumulators where they are at this point: the compiler moves nothing of them across.
template <int kTiles>
__device__ __forceinline__ void pin(float (&d)[1][kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[0][j][i])::"memory");
  }
}

/// Matrices in shared memory: a descriptor of each k16 step.
template <int kSteps>
struct Descriptors {
  uint64 of_step[kSteps];
};

// All steps of a product are one statement, which names every register of the accumulator for each:
// that compiles up to a twelfth faster than a statement a step.
// clang-format off
#define WGMMA_SCORES(a, b, add) \
  "wgmma.mma_async.sync.aligned.m64" SCORE_SHAPE "k16.f32." WGMMA_TYPES \
  " {" SCORE_REGISTERS "}, " a ", " b ", " add ", 1, 1, 0, 0;\n"
#define WGMMA_OUTPUT(a, b) \
  "wgmma.mma_async.sync.aligned.m64" OUTPUT_SHAPE "k16.f32." WGMMA_TYPES \
  " {" OUTPUT_REGISTERS "}, {" a "}, " b ", 1, 1, 1, 1;\n"
// clang-format on

/// Starts S = A B^T: m64 x kBlockN x 16 kMmaK. A and B in shared memory, both [row][k].
__device__ __forceinline__ void wgmma_scores(float (&d)[1][kMmaN][4], const Descriptors<kMmaK>& a,
                                             const Descriptors<kMmaK>& b) {
  asm volatile(SCORE_STEPS(WGMMA_SCORES) : SCORE_ACCUMULATOR(d) : SCORE_OPERANDS(a, b));
}

/// Starts O += A B: m64 x (8 kMmaV) x kBlockN. A in registers; B in shared memory, stored
/// [k][column].
__device__ __forceinline__ void wgmma_output(float (&d)[1][kMmaV][4],
                                             const uint32 (&a)[kBlockN / 16][4],
                                             const Descriptors<kBlockN / 16>& b) {
  asm volatile(OUTPUT_STEPS(WGMMA_OUTPUT) : OUTPUT_ACCUMULATOR(d) : OUTPUT_OPERANDS(a, b));
}
