// Order: who knows what of whom, by vector clocks.
//
// Each thread has a clock, which goes on whenever others may learn what the thread has done: at its
// arrivals at barriers and mbarriers. What it does bears the clock's reading. A row says up to
// which reading its thread knows each other one, and
//   the products of each warp, whose reads of shared memory the warp has waited for,
//   the copies of each mbarrier, up to the phase that the thread has waited for.
// An access is ordered after another if the thread knows that one's reading. All clocks draw from
// one row of numbers: a barrier of the CTA, after which everybody knows all readings so far, and
// those of a warp, after which its lanes know each other's, need keep but one number, `base`.
#pragma once

#include <algorithm>

#include "worker.cuh"

namespace host {

// Clocks share a word with a lane's number: see note_reader.
constexpr uint32 kLastClock = 1u << 25;

uint32 Worker::tick() { return ++newest; }

/// Up to which of its clock's readings `thread` is known.
uint32 Worker::known(const Toucher& who, int thread) const {
  if (thread == who.thread) return threads[thread].clock;
  const uint32 least = thread / kWarpSize == who.warp ? warps[who.warp].base : base;
  return std::max(least, who.row[thread]);
}

/// Whether what `thread` did at `then` lies before what `who` does now.
bool Worker::ordered(const Toucher& who, int thread, uint32 then) const {
  return then <= base || then <= known(who, thread);
}

/// Whether what some lanes of `warp` did until `then` does.
bool Worker::ordered_warp(const Toucher& who, int warp, uint32 then) const {
  if (then <= base || (warp == who.warp && then <= warps[warp].base)) return true;
  if (warp == who.warp) return false;
  const uint32* lanes = who.row + warp * kWarpSize;
  return *std::min_element(lanes, lanes + kWarpSize) >= then;
}

/// Whether `who` knows of a fence of `thread` after `then`.
bool Worker::fenced(const Toucher& who, int thread, uint32 then,
                    std::vector<uint32> Thread::* fences) const {
  const std::vector<uint32>& all = threads[thread].*fences;
  const auto after = std::lower_bound(all.begin(), all.end(), known(who, thread));
  return after != all.begin() && after[-1] >= then;
}

Toucher Worker::running_thread() { return {current, current / kWarpSize, row(current), false}; }

/// All lanes of a warp together: it knows what all of them do.
Toucher Worker::whole_warp(int index, bool asynchronous) {
  Warp& warp = warps[index];
  if (warp.stale) {
    const uint32* first = row(index * kWarpSize);
    warp.common.assign(first, first + row_size);
    for (int lane = 1; lane < kWarpSize && warp.diverged; ++lane) {
      const uint32* own = row(index * kWarpSize + lane);
      for (int i = 0; i < row_size; ++i) warp.common[i] = std::min(warp.common[i], own[i]);
    }
    warp.stale = false;
  }
  return {-1, index, warp.common.data(), asynchronous};
}

/// Adds what a thread has done and knows.
void Worker::release(int thread, std::vector<uint32>& gathered) {
  const uint32* own = row(thread);
  for (int i = 0; i < row_size; ++i) gathered[i] = std::max(gathered[i], own[i]);
  const int warp = thread / kWarpSize;
  for (int lane = warp * kWarpSize; lane < (warp + 1) * kWarpSize; ++lane) {
    gathered[lane] = std::max(gathered[lane], warps[warp].base);
  }
  gathered[thread] = threads[thread].clock;
  uint32& products = gathered[products_of(warp)];
  products = std::max(products, warps[warp].read_clock);
  newest = std::max(newest, ++threads[thread].clock);
}

/// A thread learns what others released.
void Worker::acquire(int thread, const std::vector<uint32>& released) {
  uint32* own = row(thread);
  for (int i = 0; i < row_size; ++i) own[i] = std::max(own[i], released[i]);
  Warp& warp = warps[thread / kWarpSize];
  warp.diverged = warp.stale = true;
}

/// What the running thread did until now is known to the asynchronous proxy.
void Worker::fence(bool init) {
  Thread& thread = threads[current];
  (init ? thread.init_fences : thread.fences).push_back(thread.clock);
  newest = std::max(newest, ++thread.clock);
}

/// What the warp's lanes do from now on is ordered after what they did, and they know the same.
void Worker::order_warp(int index) {
  Warp& warp = warps[index];
  const int first = index * kWarpSize;
  if (warp.diverged) {
    uint32* all = row(first);
    for (int lane = 1; lane < kWarpSize; ++lane) {
      const uint32* own = row(first + lane);
      for (int i = 0; i < row_size; ++i) all[i] = std::max(all[i], own[i]);
    }
    for (int lane = 1; lane < kWarpSize; ++lane) std::copy_n(all, row_size, row(first + lane));
    warp.diverged = false;
    warp.stale = true;
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    warp.base = std::max(warp.base, threads[first + lane].clock);
  }
  for (int lane = 0; lane < kWarpSize; ++lane) threads[first + lane].clock = warp.base + 1;
  newest = std::max(newest, warp.base + 1);
}

/// What the block's threads do from now on is ordered after what they did.
void Worker::order_block() {
  base = newest;
  newest = base + 1;
  for (Thread& thread : threads) thread.clock = newest;
  for (Warp& warp : warps) warp.base = warp.read_clock = base;
  // Copies are known by the phases that somebody has waited for.
  for (int m = 0; m < static_cast<int>(mbarriers.size()); ++m) {
    uint32 last = 0;
    for (std::size_t i = 0; i < threads.size(); ++i) last = std::max(last, row(i)[copies_of(m)]);
    for (std::size_t i = 0; i < threads.size(); ++i) row(i)[copies_of(m)] = last;
  }
  for (Warp& warp : warps) warp.stale = true;
}

/// A block begins: nothing in it has happened.
void Worker::start_clocks() {
  if (newest > kLastClock) {
    std::fill(shadows.begin(), shadows.end(), Shadow());
    std::fill(reads.begin(), reads.end(), 0u);
    std::fill(products.begin(), products.end(), 0u);
    std::fill(rows.begin(), rows.end(), 0u);
    newest = 0;
  }
  mbarriers.clear();
  order_block();
  block_start = base;
}

}  // namespace host
