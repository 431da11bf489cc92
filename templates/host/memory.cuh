// Shared and global memory: who may touch which bytes when, copies in flight.
#pragma once

#include <cstring>

#include "worker.cuh"

namespace host {

// What memory holds that nobody wrote: NaN in fp16, bf16 and fp32.
constexpr int kPoison = 0xff;

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

/// Whether a barrier lies between what `thread` did in its warp's epoch `then` and now: one of the
/// CTA, or, for a lane of the running thread's warp, one of the warp.
bool Worker::ordered(uint32 then, int thread) const {
  const int warp = current / kWarpSize;
  return then < (thread / kWarpSize == warp ? warps[warp].epoch : epoch);
}

/// Adds the running thread, or its whole warp, to those who read.
void Worker::note_reader(Shadow& shadow, bool whole_warp) const {
  const auto reader = static_cast<uint16>(whole_warp ? current | kSeveral : current);
  const int known = shadow.reader & kThread;
  if (shadow.read_epoch >= epoch) {
    // Another warp's earlier reads stay unordered with what a third one does.
    if (shadow.reader & kWarps || known / kWarpSize != current / kWarpSize) {
      shadow.reader |= kWarps;
      return;
    }
    if (!ordered(shadow.read_epoch, known)) {
      if (shadow.reader != reader) shadow.reader |= kSeveral;
      return;
    }
  }
  shadow.read_epoch = warps[current / kWarpSize].epoch;
  shadow.reader = reader;
}

/// `whole_warp`: the lanes of the warp read together.
void Worker::read_shared(uint32 address, int bytes, uint16 site, bool whole_warp, void* value) {
  if (!within_shared(address, bytes, site)) {
    std::memset(value, kPoison, bytes);
    return;
  }
  const uint32 offset = address - kSharedBase;
  for (uint32 i = offset / kGranule; i < (offset + bytes) / kGranule; ++i) {
    Shadow& shadow = shadows[i];
    const uint32 at = kSharedBase + i * kGranule;
    const int writer = shadow.writer & ~kInFlight;
    if (shadow.write_epoch < block_epoch) {
      find("read of shared memory that nobody wrote", site, -1, at, -1, false);
    } else if (shadow.writer & kInFlight) {
      find("read before a wait covers the copy", site, shadow.write_site, at, writer, false);
    } else if ((whole_warp || writer != current) && !ordered(shadow.write_epoch, writer)) {
      find("race", site, shadow.write_site, at, writer, true);
    }
    note_reader(shadow, whole_warp);
    shadow.read_site = site;
  }
  std::memcpy(value, shared.data() + offset, bytes);
}

/// Notes that the running thread writes; `in_flight`: by a copy that arrives later.
void Worker::write_shared(uint32 address, int bytes, uint16 site, bool in_flight) {
  const uint32 offset = address - kSharedBase;
  for (uint32 i = offset / kGranule; i < (offset + bytes) / kGranule; ++i) {
    Shadow& shadow = shadows[i];
    const uint32 at = kSharedBase + i * kGranule;
    const int writer = shadow.writer & ~kInFlight;
    if (shadow.write_epoch >= block_epoch && shadow.writer & kInFlight) {
      find("write before a wait covers the copy", site, shadow.write_site, at, writer, false);
    } else if (writer != current && !ordered(shadow.write_epoch, writer)) {
      find("race", site, shadow.write_site, at, writer, true);
    }
    const int reader = shadow.reader & kThread;
    const bool after =
        shadow.reader & kWarps ? shadow.read_epoch < epoch : ordered(shadow.read_epoch, reader);
    if (shadow.reader != current && !after) {
      find("race", site, shadow.read_site, at, reader == shadow.reader ? reader : -1, true);
    }
    shadow.write_epoch = warps[current / kWarpSize].epoch;
    shadow.writer = static_cast<uint16>(current | (in_flight ? kInFlight : 0));
    shadow.write_site = site;
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
      shadows[i].write_epoch = warps[current / kWarpSize].epoch;
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
  if (buffer.access != kRead) return "read of an output";
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
