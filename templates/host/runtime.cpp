// The part of the host target that does not depend on the variant: OS threads that run blocks, and
// what runtime.cuh offers.
#include "runtime.cuh"

#include <atomic>
#include <thread>

#include "counts.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "order.cuh"
#include "scheduler.cuh"
#include "warp.cuh"
#include "warpgroup.cuh"
#include "wgmma.cuh"

// What kernels declare as `extern __shared__`: addresses to hand to shared_address(), no memory.
constexpr std::size_t kLargestPage = 1 << 16;
alignas(kLargestPage) unsigned char shared_smem[4 * kLargestPage];

namespace host {

namespace {

/// Makes a kernel that touches shared memory otherwise than by the twins' functions fault.
bool forbid_shared_memory() {
  const auto begin = reinterpret_cast<std::uintptr_t>(shared_smem);
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = (begin + page - 1) / page * page;
  const std::uintptr_t last = (begin + sizeof(shared_smem)) / page * page;
  return mprotect(reinterpret_cast<void*>(first), last - first, PROT_NONE) == 0;
}

}  // namespace

int thread_index() { return worker->current; }

int block_index() { return worker->block; }

void barrier_cta(Site site) { worker->barrier(site); }

void barrier_warp(Site site) {
  const auto order = [](const Meeting& meeting) { worker->order_warp(meeting.warp); };
  worker->meet("bar.warp.sync", order, nullptr, site);
}

void meet(const char* instruction, void (*compute)(const Meeting&), void* operands, Site site) {
  worker->meet(instruction, compute, operands, site);
}

uint32 shared_address(const void* pointer_smem) {
  return kSharedBase +
         static_cast<uint32>(static_cast<const unsigned char*>(pointer_smem) - shared_smem);
}

void load_shared(const char* instruction, void* value, uint32 address, int bytes, Site site) {
  const uint16 index = worker->count(instruction, site);
  worker->join_group(address, bytes, index);
  worker->read_shared(address, bytes, index, false, value);
}

void store_shared(const char* instruction, uint32 address, const void* value, int bytes,
                  Site site) {
  const uint16 index = worker->count(instruction, site);
  if (!worker->within_shared(address, bytes, index)) return;
  worker->join_group(address, bytes, index);
  worker->write_shared(address, bytes, index, false);
  std::memcpy(worker->shared.data() + (address - kSharedBase), value, bytes);
}

void load_global(const char* instruction, void* value, const void* source, int bytes, Site site) {
  const uint16 index = worker->count(instruction, site);
  if (worker->aligned(source, bytes, index) && worker->touch_global(source, bytes, false, index)) {
    std::memcpy(value, source, bytes);
  } else {
    std::memset(value, kPoison, bytes);
  }
}

void store_global(const char* instruction, void* target, const void* value, int bytes, Site site) {
  const uint16 index = worker->count(instruction, site);
  if (worker->aligned(target, bytes, index) && worker->touch_global(target, bytes, true, index)) {
    std::memcpy(target, value, bytes);
  }
}

int atomic_add(int* target, int value, Site site) {
  const uint16 index = worker->count("atom.add", site);
  const bool usable = worker->aligned(target, sizeof(int), index) &&
                      worker->touch_global(target, sizeof(int), false, index) &&
                      worker->touch_global(target, sizeof(int), true, index);
  return usable ? __atomic_fetch_add(target, value, __ATOMIC_RELAXED) : 0;
}

void copy_async(const char* instruction, uint32 address, int bytes, const void* source,
                int source_bytes, Site site) {
  worker->copy_async(address, bytes, source, source_bytes, worker->count(instruction, site));
}

void commit_copies(Site site) {
  worker->count("cp.async.commit_group", site);
  ++worker->threads[worker->current].commits;
}

void wait_copies(int pending, Site site) {
  worker->count("cp.async.wait_group", site);
  worker->land_copies(pending);
}

void mbarrier_init(uint32 address, int count, Site site) {
  worker->make_mbarrier(address, count, worker->count("mbarrier.init", site));
}

void mbarrier_arrive(const char* instruction, uint32 address, int bytes, Site site) {
  const uint16 index = worker->count(instruction, site);
  const int mbarrier = worker->mbarrier_at(address, index);
  if (mbarrier >= 0) worker->arrive(mbarrier, bytes, index);
}

void mbarrier_wait(uint32 address, int parity, Site site) {
  const uint16 index = worker->count("mbarrier.try_wait", site);
  const int mbarrier = worker->mbarrier_at(address, index);
  if (mbarrier >= 0) worker->wait_mbarrier(mbarrier, parity, index);
}

void fence_proxy(const char* instruction, bool init, Site site) {
  worker->count(instruction, site);
  worker->fence(init);
}

void load_tensor(uint32 address, const void* map, uint32 barrier, const int (&at)[4], Site site) {
  const uint16 index = worker->count("cp.async.bulk.tensor", site);
  const int mbarrier = worker->mbarrier_at(barrier, index);
  if (mbarrier < 0) return;
  worker->load_tensor(address, *static_cast<const TiledTensor*>(map), mbarrier, at, index);
}

void launch(Launch& launch, void (*kernel)(const void*)) {
  static const bool forbidden = forbid_shared_memory();
  (void)forbidden;
  std::atomic<int> next_block = 0;
  std::vector<Worker*> workers;
  for (int i = 0; i < std::max(1, std::min(launch.workers, launch.blocks)); ++i) {
    workers.push_back(new Worker(launch, kernel));
  }
  const auto work = [&](Worker* own) {
    worker = own;
    for (int block = next_block++; block < launch.blocks; block = next_block++) {
      own->run_block(block);
    }
    worker = nullptr;
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < workers.size(); ++i) others.emplace_back(work, workers[i]);
  work(workers[0]);
  for (std::thread& other : others) other.join();
  for (Worker* own : workers) {
    own->add_to(launch);
    delete own;
  }
}

}  // namespace host
