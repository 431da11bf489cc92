// What warps do together: named barriers, and registers that warpgroups hand on.
#pragma once

#include <algorithm>

#include "order.cuh"

namespace host {

constexpr int kRegisterFile = 64 << 10;  // of a multiprocessor, in registers
constexpr int kRegisterUnit = 8;         // registers of a thread are a multiple of it
constexpr int kLeastRegisters = 24;
constexpr int kMostRegisters = 256;

/// A warp comes to a named barrier, to wait or not.
void Worker::come_to_barrier(const Meeting& meeting, int id, int count, bool wait) {
  const uint16 site = site_index(meeting.instruction, meeting.site);
  const auto wrong = [&](const char* what, int other) { find(what, site, other, id, -1, false); };
  if (id < 1 || id >= kNamedBarriers) return wrong("no named barrier has this number", -1);
  if (count <= 0 || count % kWarpSize != 0 || count > launch.threads) {
    return wrong("count of a named barrier", -1);
  }
  NamedBarrier& barrier = named[id];
  const uint32 own = 1u << meeting.warp;
  if (barrier.threads == 0) {
    barrier.threads = count;
    barrier.arrived = 0;
    barrier.warps = barrier.waiting = 0;
    barrier.site = site;
    barrier.gathered.assign(row_size, 0);
  } else if (barrier.threads != count) {
    wrong("another count of threads at a named barrier", barrier.site);
  } else if (barrier.warps & own) {
    wrong("a warp comes to a named barrier twice", barrier.site);
  }
  const int first = meeting.warp * kWarpSize;
  if (wait) order_warp(meeting.warp);
  for (int lane = 0; lane < kWarpSize; ++lane) release(first + lane, barrier.gathered);
  barrier.arrived += kWarpSize;
  barrier.warps |= own;
  if (wait) {
    barrier.waiting |= own;
    hold_warp(meeting.warp, "waits for ever at a named barrier", site, id);
  }
  if (barrier.arrived < barrier.threads) return;
  for (int warp = 0; warp < static_cast<int>(warps.size()); ++warp) {
    if (!(barrier.waiting >> warp & 1)) continue;
    for (int lane = 0; lane < kWarpSize; ++lane) acquire(warp * kWarpSize + lane, barrier.gathered);
    warps[warp].diverged = false;  // all knew, and know, the same
    warps[warp].held = 0;
  }
  barrier.threads = 0;
}

/// Every warp has the same share; the CTA's pool is what its warps leave of that, no more.
void Worker::give_registers() {
  const int each = kRegisterFile / launch.threads / kRegisterUnit * kRegisterUnit;
  for (Warp& warp : warps) warp.registers = std::min(each, kMostRegisters);
  free_registers = 0;
}

/// setmaxnreg by a warp.
void Worker::set_registers(const Meeting& meeting, int count, bool claim) {
  Warp& own = warps[meeting.warp];
  const uint16 site = site_index(meeting.instruction, meeting.site);
  own.registers_set = true;
  own.registers_site = site;
  const auto wrong = [&](const char* what) { find(what, site, -1, 0, -1, false); };
  if (count < kLeastRegisters || count > kMostRegisters || count % kRegisterUnit != 0) {
    return wrong("count of registers");
  }
  if (claim ? count < own.registers : count > own.registers) {
    return wrong(claim ? "fewer registers claimed than held" : "more registers left than held");
  }
  own.wanted = count;
  hold_warp(meeting.warp, "waits for ever for registers", site, 0);
  // What one warp leaves, others may have.
  for (bool any = true; any;) {
    any = false;
    for (Warp& warp : warps) {
      const int more = (warp.wanted - warp.registers) * kWarpSize;
      if (warp.wanted == 0 || more > free_registers) continue;
      free_registers -= more;
      warp.registers = warp.wanted;
      warp.wanted = 0;
      warp.held = 0;
      any = true;
    }
  }
}

}  // namespace host
