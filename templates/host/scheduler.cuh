// Runs the threads of a block as fibers of one OS thread.
//
// A thread runs until it comes to a warp instruction, a barrier or its end; then another lane of
// its warp goes on, and, when the warp has met, sometimes another warp, as the seed draws.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "counts.cuh"
#include "mbarrier.cuh"
#include "memory.cuh"
#include "order.cuh"
#include "wgmma.cuh"

namespace host {

thread_local Worker* worker = nullptr;

namespace {

// printf alone takes several KiB; without optimisation a thread's tiles take tens.
constexpr std::size_t kStackBytes = 256 << 10;

// Stacks that start at equal addresses modulo the cache's size would evict one another.
constexpr std::size_t kStackColour = 9 * 64;
constexpr std::size_t kStackColours = 32;

// After a warp instruction another warp goes on with this probability, one in.
constexpr uint32 kWarpTurn = 8;

void run_thread() {
  worker->kernel(worker->launch.params);
  worker->end_thread();
}

}  // namespace

Worker::Worker(const Launch& given, void (*given_kernel)(const void*))
    : launch(given),
      kernel(given_kernel),
      threads(given.threads),
      warps(given.threads / kWarpSize),
      shared(given.shared_bytes),
      shadows(given.shared_bytes / kGranule + 1),
      reads(shadows.size() * warps.size()),
      row_size(static_cast<int>(threads.size() + warps.size()) + kMaxMbarriers),
      rows(threads.size() * row_size),
      issues((warps.size() + kWarpgroup - 1) / kWarpgroup),
      buffers(given.buffers, given.buffers + given.buffer_count),
      count_slots(4 * kMaxSites) {
  for (Buffer& buffer : buffers) buffer.bytes_read = buffer.bytes_written = 0;
  stacks = static_cast<unsigned char*>(mmap(nullptr, threads.size() * kStackBytes,
                                            PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0));
  const long page = sysconf(_SC_PAGESIZE);
  // A stack that overflows meets a page that faults.
  for (std::size_t i = 0; i < threads.size(); ++i) {
    mprotect(stacks + i * kStackBytes, page, PROT_NONE);
  }
}

Worker::~Worker() { munmap(stacks, threads.size() * kStackBytes); }

/// A number below `below` (xorshift64*: Vigna, 2016).
uint32 Worker::draw(uint32 below) {
  random ^= random >> 12;
  random ^= random << 25;
  random ^= random >> 27;
  return static_cast<uint32>((random * 0x2545f4914f6cdd1dull >> 32) * below >> 32);
}

void Worker::run_block(int index) {
  block = index;
  stopped = false;
  arrived = 0;
  random = (launch.seed + 1) * 0x9e3779b97f4a7c15ull + (index + 1) * 0xd1b54a32d192ed03ull;
  random |= 1;
  start_clocks();
  std::memset(shared.data(), kPoison, shared.size());
  for (Warp& warp : warps) reset_warp(warp);
  for (NamedBarrier& barrier : named) barrier.threads = 0;
  for (std::vector<Issue>& each : issues) each.clear();
  give_registers();
  for (std::size_t i = 0; i < threads.size(); ++i) {
    threads[i].copies.clear();
    threads[i].commits = 0;
    threads[i].fences.clear();
    threads[i].init_fences.clear();
    const std::size_t colour = i % kStackColours * kStackColour;
    make_context(threads[i].context, stacks + (i + 1) * kStackBytes - colour, kStackBytes - colour,
                 run_thread);
  }
  current = draw(launch.threads);
  switch_context(scheduler, threads[current].context);
  if (!stopped) end_block();
  for (Warp& warp : warps) count_groups(warp);
}

void Worker::reset_warp(Warp& warp) {
  warp.waiting = warp.at_barrier = warp.held = warp.ended = 0;
  warp.turn = draw(kWarpSize);
  warp.diverged = false;
  warp.stale = true;
  warp.products.clear();
  warp.accumulators.clear();
  warp.product_commits = 0;
  warp.product_count = 0;
  warp.registers_fenced = false;
  warp.wanted = 0;
  warp.registers_set = false;
}

/// Lets another thread run; returns when this one's turn comes.
void Worker::leave() {
  const int from = current;
  const int next = stopped ? -1 : next_thread();
  if (next < 0) {
    switch_context(threads[from].context, scheduler);
  } else {
    hand_over(next);
  }
}

void Worker::hand_over(int next) {
  const int from = current;
  if (next == from) return;
  current = next;
  switch_context(threads[from].context, threads[next].context);
}

/// A lane of a warp that can run, as a thread.
int Worker::pick_lane(int warp) const {
  const uint32 ready = warps[warp].ready();
  const uint32 turn = warps[warp].turn;
  const uint32 rotated = ready >> turn | ready << (kWarpSize - turn) % kWarpSize;
  return warp * kWarpSize + (__builtin_ctz(rotated) + turn) % kWarpSize;
}

/// The thread that goes on when the running one cannot; -1: the block is over.
int Worker::next_thread() {
  const int own = current / kWarpSize;
  if (warps[own].ready() != 0) return pick_lane(own);
  if (warps[own].waiting != 0 && warps[own].held == 0) {
    const Meeting& meeting = warps[own].meeting;
    const bool at_barrier = warps[own].at_barrier != 0;
    find(
        at_barrier ? "lanes of the warp wait at a barrier instead" : "lanes of the warp have ended",
        site_index(meeting.instruction, meeting.site),
        at_barrier ? site_index(kBarrier, warps[own].barrier) : -1, 0, -1, false);
    stopped = true;
    return -1;
  }
  const int warp_count = static_cast<int>(warps.size());
  const int first = draw(warp_count);
  for (int i = 0; i < warp_count; ++i) {
    const int warp = (first + i) % warp_count;
    if (warps[warp].ready() != 0) return pick_lane(warp);
  }
  report_waiting();
  return -1;
}

/// What to say of a thread that is held for ever.
const char* Worker::waits_for(const Thread& thread, const Warp& warp) const {
  if (thread.held_by != kAtMbarrier) return thread.held_by;
  for (const Mbarrier& each : mbarriers) {
    if (each.address == thread.held_address && each.missing == 0) {
      return "waits for other bytes than an mbarrier expects";
    }
  }
  return warp.held == ~warp.ended ? kAtMbarrier
                                  : "waits for ever at an mbarrier that lanes of the warp passed";
}

/// Nobody can run: reports who waits for what.
void Worker::report_waiting() {
  bool held = false;
  for (std::size_t i = 0; i < threads.size(); ++i) {
    if (!(warps[i / kWarpSize].held >> i % kWarpSize & 1)) continue;
    held = stopped = true;
    current = static_cast<int>(i);
    const Thread& thread = threads[i];
    find(waits_for(thread, warps[i / kWarpSize]), thread.held_at, -1, thread.held_address, -1,
         false);
  }
  for (const Warp& warp : warps) {
    if (warp.at_barrier == 0) continue;
    find(held ? "waits for ever at the barrier of the block"
              : "threads of the block end without the barrier",
         site_index(kBarrier, warp.barrier), -1, 0, -1, false);
    stopped = true;
    break;
  }
}

/// A thread goes on no sooner than its bit in Warp::held is cleared.
void Worker::hold(int thread, const char* why, uint16 site, uint64 address) {
  warps[thread / kWarpSize].held |= 1u << thread % kWarpSize;
  threads[thread].held_by = why;
  threads[thread].held_at = site;
  threads[thread].held_address = address;
}

void Worker::hold_warp(int warp, const char* why, uint16 site, uint64 address) {
  for (int lane = 0; lane < kWarpSize; ++lane) hold(warp * kWarpSize + lane, why, site, address);
}

void Worker::meet(const char* instruction, void (*compute)(const Meeting&), void* operands,
                  Site site) {
  Warp& warp = warps[current / kWarpSize];
  Meeting& meeting = warp.meeting;
  if (warp.waiting == 0) {
    meeting.instruction = instruction;
    meeting.site = site;
    meeting.warp = current / kWarpSize;
  } else if (meeting.instruction != instruction || meeting.site.line != site.line ||
             meeting.site.file != site.file) {
    find("lanes of the warp wait at another instruction", site_index(instruction, site),
         site_index(meeting.instruction, meeting.site), 0, -1, false);
    stopped = true;
    leave();
  }
  const int lane = current % kWarpSize;
  meeting.operands[lane] = operands;
  warp.waiting |= 1u << lane;
  if (warp.waiting != ~0u) {
    leave();
    return;
  }
  count_groups(warp);
  Count& count = counts[site_index(instruction, site)];
  count.threads += kWarpSize;
  ++count.warps;
  compute(meeting);
  warp.waiting = 0;
  warp.turn = draw(kWarpSize);
  if (warp.held != 0) {
    leave();
  } else {
    take_turns();
  }
}

/// Now and then another warp goes on.
void Worker::take_turns() {
  if (draw(kWarpTurn) != 0) return;
  const int other = draw(static_cast<uint32>(warps.size()));
  if (warps[other].ready() != 0) hand_over(pick_lane(other));
}

void Worker::barrier(Site site) {
  Warp& warp = warps[current / kWarpSize];
  warp.at_barrier |= 1u << current % kWarpSize;
  warp.barrier = site;
  ++counts[site_index(kBarrier, site)].threads;
  if (++arrived < launch.threads) {
    leave();
    return;
  }
  arrived = 0;
  order_block();
  for (Warp& each : warps) {
    each.at_barrier = 0;
    count_groups(each);
  }
  hand_over(pick_lane(draw(static_cast<uint32>(warps.size()))));
}

/// The block is over: what must not be left.
void Worker::end_block() {
  for (int index = 0; index < static_cast<int>(warps.size()); ++index) {
    const Warp& warp = warps[index];
    current = index * kWarpSize;
    for (const Product& product : warp.products) {
      find(product.group < warp.product_commits ? "wgmma that nobody waits for"
                                                : "wgmma that nobody commits",
           product.site, -1, 0, -1, false);
    }
    const std::vector<Issue>& all = issues[index / kWarpgroup];
    if (warp.product_count < all.size()) {
      find(kOtherProduct, all[warp.product_count].site, -1, 0, -1, false);
    }
    const Warp& first = warps[index / kWarpgroup * kWarpgroup];
    if (warp.registers != first.registers) {
      const uint16 site = warp.registers_set ? warp.registers_site : first.registers_site;
      find("not all warps of a warpgroup", site, -1, 0, -1, false);
    }
  }
  for (const Mbarrier& each : mbarriers) {
    for (const BulkCopy& copy : each.bulk_copies) {
      find("copy that nobody waits for", copy.site, -1, copy.address, -1, false);
    }
  }
}

void Worker::end_thread() {
  warps[current / kWarpSize].ended |= 1u << current % kWarpSize;
  leave();
}

}  // namespace host
