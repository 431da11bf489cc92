// Counting: instructions, bank conflicts, findings.
#pragma once

#include <algorithm>

#include "worker.cuh"

namespace host {

/// The number of an instruction at a line.
uint16 Worker::site_index(const char* instruction, Site site) {
  const std::uintptr_t mixed = (reinterpret_cast<std::uintptr_t>(instruction) * 31 +
                                reinterpret_cast<std::uintptr_t>(site.file)) *
                                   31 +
                               site.line;
  const std::size_t slots = count_slots.size();
  for (std::size_t slot = mixed * 0x9e3779b97f4a7c15ull >> 52; true; ++slot) {
    uint16& found = count_slots[slot % slots];
    if (found == 0) {
      if (counts.size() == kMaxSites) return kMaxSites - 1;
      counts.push_back({site.file, instruction, static_cast<uint64>(site.line), 0, 0, 0});
      found = static_cast<uint16>(counts.size());
      return found - 1;
    }
    const Count& count = counts[found - 1];
    if (count.line == static_cast<uint64>(site.line) && count.file == site.file &&
        count.instruction == instruction) {
      return found - 1;
    }
  }
}

/// Counts an execution by the running thread.
uint16 Worker::count(const char* instruction, Site site) {
  const uint16 index = site_index(instruction, site);
  ++counts[index].threads;
  return index;
}

/// Notes the running thread's access for the count of bank conflicts: the n-th time that a lane
/// comes to an instruction, since its warp last met, it takes part in the n-th group.
void Worker::join_group(uint32 address, int bytes, uint16 site) {
  Warp& warp = warps[current / kWarpSize];
  const int lane = current % kWarpSize;
  const auto open = [&](uint32 i) {
    return warp.groups[i].site == site && !(warp.groups[i].lanes >> lane & 1);
  };
  uint32 i = warp.next_group[lane];
  if (i >= warp.group_count || !open(i)) {
    for (i = 0; i < warp.group_count && !open(i);) ++i;
  }
  if (i == warp.group_count) {
    if (warp.groups.size() == i) warp.groups.emplace_back();
    warp.groups[i].site = site;
    warp.groups[i].bytes = bytes;
    warp.groups[i].lanes = 0;
    ++warp.group_count;
  }
  warp.groups[i].lanes |= 1u << lane;
  warp.groups[i].addresses[lane] = address;
  warp.next_group[lane] = i + 1;
}

/// Cycles beyond one for each phase: a phase is as many lanes as touch 128 bytes, and a bank gives
/// one of its words a cycle, to any number of lanes.
uint32 bank_conflicts(const Group& group) {
  const int phase_lanes = std::min(kWarpSize, kBanks * kGranule / group.bytes);
  const int lane_words = group.bytes / kGranule;
  uint32 conflicts = 0;
  for (int first = 0; first < kWarpSize; first += phase_lanes) {
    uint32 words[kBanks][kWarpSize];
    uint32 word_count[kBanks] = {};
    uint32 most = 1;
    for (int lane = first; lane < first + phase_lanes; ++lane) {
      if (!(group.lanes >> lane & 1)) continue;
      for (int i = 0; i < lane_words; ++i) {
        const uint32 word = group.addresses[lane] / kGranule + i;
        const uint32 bank = word % kBanks;
        uint32* seen = words[bank];
        if (std::find(seen, seen + word_count[bank], word) != seen + word_count[bank]) continue;
        seen[word_count[bank]++] = word;
        most = std::max(most, word_count[bank]);
      }
    }
    conflicts += most - 1;
  }
  return conflicts;
}

/// Counts the accesses of a warp that has met, or ended.
void Worker::count_groups(Warp& warp) {
  for (uint32 i = 0; i < warp.group_count; ++i) {
    Count& count = counts[warp.groups[i].site];
    ++count.warps;
    count.conflicts += bank_conflicts(warp.groups[i]);
  }
  if (warp.group_count > 0) {
    warp.group_count = 0;
    std::fill_n(warp.next_group, kWarpSize, 0u);
  }
}

inline bool same(const Finding& a, const Finding& b) {
  return a.what == b.what && a.instruction == b.instruction && a.file == b.file &&
         a.line == b.line && a.other_instruction == b.other_instruction &&
         a.other_file == b.other_file && a.other_line == b.other_line;
}

inline bool same(const Count& a, const Count& b) {
  return a.instruction == b.instruction && a.file == b.file && a.line == b.line;
}

/// Reports what the running thread does at `site`, each pair of sites once.
void Worker::find(const char* what, uint16 site, int other_site, uint64 address, int other_thread,
                  bool race) {
  const Count& here = counts[site];
  Finding finding = {what, here.file, here.instruction, nullptr,      nullptr, address, 1, 0,
                     0,    block,     current,          other_thread, race};
  finding.line = static_cast<int>(here.line);
  if (other_site >= 0) {
    finding.other_file = counts[other_site].file;
    finding.other_instruction = counts[other_site].instruction;
    finding.other_line = static_cast<int>(counts[other_site].line);
  }
  for (Finding& known : findings) {
    if (same(known, finding)) {
      ++known.times;
      return;
    }
  }
  findings.push_back(finding);
}

/// Adds the worker's counts and findings to the report.
void Worker::add_to(Launch& report) const {
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    report.buffers[i].bytes_read += buffers[i].bytes_read;
    report.buffers[i].bytes_written += buffers[i].bytes_written;
  }
  for (const Count& count : counts) {
    int i = 0;
    while (i < report.count_count && !same(report.counts[i], count)) ++i;
    if (i == report.count_capacity) continue;
    if (i == report.count_count) {
      report.counts[report.count_count++] = count;
      continue;
    }
    report.counts[i].threads += count.threads;
    report.counts[i].warps += count.warps;
    report.counts[i].conflicts += count.conflicts;
  }
  for (const Finding& finding : findings) {
    int i = 0;
    while (i < report.finding_count && !same(report.findings[i], finding)) ++i;
    if (i == report.finding_capacity) continue;
    if (i == report.finding_count) {
      report.findings[report.finding_count++] = finding;
      continue;
    }
    Finding& known = report.findings[i];
    const uint64 times = known.times + finding.times;
    if (finding.block < known.block) known = finding;
    known.times = times;
  }
}

}  // namespace host
