// Shared and global memory: who may touch which bytes when, bank conflicts, copies in flight.
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

/// `reader`: the thread, or kSeveral for the lanes of a warp together.
void Worker::read_shared(uint32 address, int bytes, uint16 site, int reader, void* value) {
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
    } else if (shadow.write_epoch == epoch && writer != reader) {
      find("race", site, shadow.write_site, at, writer, true);
    }
    if (shadow.read_epoch != epoch) {
      shadow.read_epoch = epoch;
      shadow.reader = static_cast<uint16>(reader);
    } else if (shadow.reader != reader) {
      shadow.reader |= kSeveral;
    }
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
    } else if (shadow.write_epoch == epoch && writer != current) {
      find("race", site, shadow.write_site, at, writer, true);
    }
    if (shadow.read_epoch == epoch && shadow.reader != current) {
      const int reader = shadow.reader & kSeveral ? -1 : shadow.reader;
      find("race", site, shadow.read_site, at, reader, true);
    }
    shadow.write_epoch = epoch;
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
    read_shared(addresses[lane], 16, site, kSeveral, rows[lane]);
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
      shadows[i].write_epoch = epoch;
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

/// Whether the bytes belong to elements of a tensor that may be read (or written); counts them.
bool Worker::touch_global(const void* pointer, int bytes, bool write, uint16 site) {
  const auto* first = static_cast<const unsigned char*>(pointer);
  const char* what = "outside the tensors";
  for (Buffer& buffer : buffers) {
    const std::uintptr_t offset = first - buffer.begin;
    if (first < buffer.begin || offset + bytes > buffer.size) continue;
    unsigned char* valid = buffer.valid + offset;
    if (std::memchr(valid, 0, bytes) != nullptr) {
      what = "between the elements of a tensor";
    } else if (write != (buffer.writable != 0)) {
      what = write ? "write to an input" : "read of an output";
    } else {
      if (write) {
        if (std::memchr(valid, 2, bytes) != nullptr) {
          find("output written twice", site, -1, reinterpret_cast<std::uintptr_t>(pointer), -1,
               false);
        }
        std::memset(valid, 2, bytes);
      }
      (write ? buffer.bytes_written : buffer.bytes_read) += bytes;
      return true;
    }
  }
  find(what, site, -1, reinterpret_cast<std::uintptr_t>(pointer), -1, false);
  return false;
}

}  // namespace host
