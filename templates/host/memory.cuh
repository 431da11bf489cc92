// Shared and global memory: who may touch which bytes when, copies in flight.
#pragma once

#include <cstring>

#include "order.cuh"
#include "worker.cuh"

namespace host {

// What memory holds that nobody wrote: NaN in fp16, bf16 and fp32.
constexpr int kPoison = 0xff;

// The last read of a granule by a warp: a clock, whether other lanes have read it, too, a lane.
constexpr int kReaderBits = 6;
constexpr uint32 kReaders = 1u << kReaderBits;
constexpr uint32 kSeveral = kWarpSize;

// wgmma reads 16 bytes at least.
constexpr int kChunkBytes = 16;
constexpr int kChunkGranules = kChunkBytes / kGranule;

constexpr const char* kRace = "race";
constexpr const char* kUnwritten = "read of shared memory that nobody wrote";
constexpr const char* kReadEarly = "read before a wait covers the copy";
constexpr const char* kWrittenEarly = "write before a wait covers the copy";
constexpr const char* kUnfenced = "no proxy fence after an ordinary write";
constexpr const char* kMbarrierTouched = "an mbarrier's bytes touched otherwise";

bool Worker::within_shared(uint32 address, int bytes, uint16 site) {
  const uint32 offset = address - kSharedBase;
  if (address < kSharedBase || offset + bytes > static_cast<uint32>(launch.shared_bytes)) {
    find("outside shared memory", site, -1, address, -1, false);
    return false;
  }
  if (address % bytes != 0) {
    find("misaligned in shared memory", site, -1, address, -1, false);
    return false;
  }
  return true;
}

/// What is wrong with touching a granule after the write that it holds; null: nothing.
const char* Worker::after_write(const Shadow& shadow, const Toucher& who, bool write) const {
  if (shadow.write_clock <= block_start) return write ? nullptr : kUnwritten;
  const char* early = write ? kWrittenEarly : kReadEarly;
  if (shadow.writer & kInFlight) return early;
  if (shadow.writer & kObject) return kMbarrierTouched;
  if (shadow.writer & kByCopies) {
    const int index = shadow.writer & kIndex;
    if (who.row[copies_of(index)] >= shadow.write_clock) return nullptr;
    return shadow.write_clock == mbarriers[index].clock ? early : kRace;
  }
  if (shadow.writer != who.thread && !ordered(who, shadow.writer, shadow.write_clock)) return kRace;
  if (who.asynchronous && !fenced(who, shadow.writer, shadow.write_clock, &Thread::fences)) {
    return kUnfenced;
  }
  return nullptr;
}

bool Worker::check_after_write(uint32 granule, const Toucher& who, bool write, uint16 site) {
  const Shadow& shadow = shadows[granule];
  const char* what = after_write(shadow, who, write);
  if (what == nullptr) return true;
  const bool by_thread = what != kUnwritten && !(shadow.writer & (kObject | kByCopies));
  find(what, site, what == kUnwritten ? -1 : shadow.write_site, kSharedBase + granule * kGranule,
       by_thread ? shadow.writer & kIndex : -1, what == kRace);
  return false;
}

/// Reports reads of a granule that a write by `who` collides with.
void Worker::check_after_reads(uint32 granule, const Toucher& who, uint16 site) {
  const int warp_count = static_cast<int>(warps.size());
  const uint32 at = kSharedBase + granule * kGranule;
  const uint32* last = reads.data() + granule * static_cast<std::size_t>(warp_count);
  for (int warp = 0; warp < warp_count; ++warp) {
    const uint32 then = last[warp] >> kReaderBits;
    if (then <= base) continue;
    const bool several = last[warp] & kSeveral;
    const int reader = warp * kWarpSize + static_cast<int>(last[warp] % kWarpSize);
    const bool after = several ? ordered_warp(who, warp, then)
                               : reader == who.thread || ordered(who, reader, then);
    if (!after) find(kRace, site, shadows[granule].read_site, at, several ? -1 : reader, true);
  }
  if (products.empty()) return;
  const std::size_t chunk = granule / kChunkGranules;
  for (int warp = 0; warp < warp_count; ++warp) {
    const uint32 then = products[chunk * warp_count + warp];
    if (then <= base || then <= who.row[products_of(warp)]) continue;
    if (warp == who.warp && then <= warps[warp].read_clock) continue;
    find(kRace, site, shadows[granule].read_site, at, -1, true);
  }
}

/// Adds the running thread, or its whole warp, to those who read: a clock, and the lane or that it
/// is not the only one since.
void Worker::note_reader(uint32 granule, bool whole_warp) {
  const int warp = current / kWarpSize;
  uint32& last = reads[granule * warps.size() + warp];
  const uint32 then = last >> kReaderBits;
  const auto lane = static_cast<uint32>(current % kWarpSize);
  bool several = whole_warp;
  if (then > warps[warp].base && last % kReaders != lane) {
    several |=
        last & kSeveral || !ordered(running_thread(), warp * kWarpSize + last % kWarpSize, then);
  }
  last = std::max(threads[current].clock, several ? then : 0) << kReaderBits |
         (several ? kSeveral : 0) | lane;
}

/// `whole_warp`: the lanes of the warp read together.
void Worker::read_shared(uint32 address, int bytes, uint16 site, bool together, void* value) {
  if (!within_shared(address, bytes, site)) {
    std::memset(value, kPoison, bytes);
    return;
  }
  const uint32 offset = address - kSharedBase;
  Toucher who = running_thread();
  if (together) who.thread = -1;
  for (uint32 i = offset / kGranule; i < (offset + bytes) / kGranule; ++i) {
    check_after_write(i, who, false, site);
    note_reader(i, together);
    shadows[i].read_site = site;
  }
  std::memcpy(value, shared.data() + offset, bytes);
}

/// Notes that the running thread writes; `in_flight`: by a copy that arrives later.
void Worker::write_shared(uint32 address, int bytes, uint16 site, bool in_flight) {
  const uint32 offset = address - kSharedBase;
  const Toucher who = running_thread();
  for (uint32 i = offset / kGranule; i < (offset + bytes) / kGranule; ++i) {
    check_after_write(i, who, true, site);
    check_after_reads(i, who, site);
    if (shadows[i].writer & kObject && shadows[i].write_clock > block_start) continue;
    shadows[i].write_clock = threads[current].clock;
    shadows[i].writer = static_cast<uint16>(current | (in_flight ? kInFlight : 0));
    shadows[i].write_site = site;
  }
}

/// A row of 16 bytes from each lane's address.
void Worker::load_shared_rows(const Meeting& meeting, const uint32 (&addresses)[kWarpSize],
                              uint16 (&rows)[kWarpSize][8]) {
  const uint16 site = site_index(meeting.instruction, meeting.site);
  Group group = {site, 16, ~0u, {}};
  const int last = current;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    group.addresses[lane] = addresses[lane];
    current = meeting.warp * kWarpSize + lane;
    // A row goes to four lanes, and nothing but a barrier orders their reads with other accesses.
    read_shared(addresses[lane], 16, site, true, rows[lane]);
  }
  current = last;
  counts[site].conflicts += bank_conflicts(group);
}

void Worker::copy_async(uint32 address, int bytes, const void* source, int source_bytes,
                        uint16 site) {
  if (source_bytes < 0 || source_bytes > bytes) {
    find("cp.async of more bytes than it copies", site, -1, address, -1, false);
    return;
  }
  if (!within_shared(address, bytes, site) || !aligned(source, bytes, site)) return;
  Copy copy = {address, bytes, threads[current].commits, site, {}};
  if (source_bytes > 0) {
    if (touch_global(source, source_bytes, false, site)) {
      std::memcpy(copy.data, source, source_bytes);
    } else {
      std::memset(copy.data, kPoison, source_bytes);
    }
  }
  write_shared(address, bytes, site, true);
  std::memset(shared.data() + (address - kSharedBase), kPoison, bytes);
  join_group(address, bytes, site);
  threads[current].copies.push_back(copy);
}

/// The running thread's copies arrive, but those of its newest `pending` groups and of the open
/// one.
void Worker::land_copies(int pending) {
  Thread& thread = threads[current];
  std::size_t landed = 0;
  for (const Copy& copy : thread.copies) {
    if (copy.group >= thread.commits - pending) break;
    const uint32 offset = copy.address - kSharedBase;
    std::memcpy(shared.data() + offset, copy.data, copy.bytes);
    for (uint32 i = offset / kGranule; i < (offset + copy.bytes) / kGranule; ++i) {
      shadows[i].write_clock = threads[current].clock;
      shadows[i].writer = static_cast<uint16>(current);
      shadows[i].write_site = copy.site;
    }
    ++landed;
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + landed);
}

bool Worker::aligned(const void* pointer, int bytes, uint16 site) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  if (address % bytes != 0) find("misaligned in global memory", site, -1, address, -1, false);
  return address % bytes == 0;
}

/// The tensor that holds the bytes; null: none.
Buffer* Worker::buffer_of(const void* pointer, int bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const std::size_t index = (last_buffer + i) % buffers.size();
    const auto begin = reinterpret_cast<std::uintptr_t>(buffers[index].begin);
    if (address < begin || address - begin + bytes > buffers[index].size) continue;
    last_buffer = index;
    return &buffers[index];
  }
  return nullptr;
}

/// Why bytes in these states must not be read (or written); null: they may.
inline const char* refusal(const Buffer& buffer, const unsigned char* states, int bytes,
                           bool write) {
  const auto any = [&](State state) { return std::memchr(states, state, bytes) != nullptr; };
  if (any(kPadding)) return "between the elements of a tensor";
  if (write) {
    if (buffer.access == kRead) return "write to an input";
    return buffer.access == kWrite && any(kWritten) ? "output written twice" : nullptr;
  }
  if (buffer.access == kWrite || buffer.access == kRewrite) return "read of an output";
  return any(kEmpty) ? "read of global memory that nobody wrote" : nullptr;
}

/// Whether the bytes may be read (or written); counts them.
bool Worker::touch_global(const void* pointer, int bytes, bool write, uint16 site) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  Buffer* buffer = buffer_of(pointer, bytes);
  if (buffer == nullptr) {
    find("outside the tensors", site, -1, address, -1, false);
    return false;
  }
  unsigned char* states =
      buffer->states + (address - reinterpret_cast<std::uintptr_t>(buffer->begin));
  if (const char* what = refusal(*buffer, states, bytes, write)) {
    find(what, site, -1, address, -1, false);
    return false;
  }
  if (write) std::memset(states, kWritten, bytes);
  (write ? buffer->bytes_written : buffer->bytes_read) += bytes;
  return true;
}

}  // namespace host
