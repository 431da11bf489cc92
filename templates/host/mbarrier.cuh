// mbarriers: phases, arrivals, and the copies that arrive at them by TMA.
//
// What is copied arrives as late as it may: when a thread waits for a phase to which nothing else
// is missing. Until then shared memory holds poison. A phase's copies are known (order.cuh) to
// those who waited for it and to whom these told.
#pragma once

#include <cstring>

#include "memory.cuh"
#include "order.cuh"

namespace host {

constexpr int kMbarrierBytes = 8;
constexpr int kMapAlignment = 64;
constexpr int kBulkAlignment = 128;
constexpr int kPatternRows = 8;  // of a swizzle
constexpr int kTensorElement = 2;
constexpr uint32 kMostBox = 256;  // elements along an axis
constexpr const char* kAtMbarrier = "waits for ever at an mbarrier";

/// Bits 4 and up of an address, xor those of the row of a pattern.
inline uint32 swizzled(uint32 address, int pitch) {
  return address ^ (pitch == 128 ? address >> 3 & 0x70 : address >> 3 & 0x30);
}

void Worker::make_mbarrier(uint32 address, int count, uint16 site) {
  if (!within_shared(address, kMbarrierBytes, site)) return;
  if (count < 1 || count >= 1 << 20) find("count of an mbarrier", site, -1, address, -1, false);
  const auto same = [&](const Mbarrier& each) { return each.address == address; };
  if (std::any_of(mbarriers.begin(), mbarriers.end(), same)) {
    find("mbarrier initialised twice", site, -1, address, -1, false);
    return;
  }
  if (mbarriers.size() == kMaxMbarriers) {
    find("more mbarriers than the emulator has room for", site, -1, address, -1, false);
    return;
  }
  write_shared(address, kMbarrierBytes, site, false);
  for (int i = 0; i < kMbarrierBytes / kGranule; ++i) {
    shadows[(address - kSharedBase) / kGranule + i].writer |= kObject;
  }
  Mbarrier made = {};
  made.address = address;
  made.count = made.missing = count;
  made.clock = tick();
  made.maker = current;
  made.made = threads[current].clock;
  made.site = site;
  made.gathered.resize(row_size);
  made.released.resize(row_size);
  mbarriers.push_back(made);
}

/// The mbarrier that the running thread names; -1: there is none.
int Worker::mbarrier_at(uint32 address, uint16 site) {
  for (std::size_t i = 0; i < mbarriers.size(); ++i) {
    const Mbarrier& found = mbarriers[i];
    if (found.address != address) continue;
    if (!ordered(running_thread(), found.maker, found.made)) {
      find(kRace, site, found.site, address, found.maker, true);
    }
    return static_cast<int>(i);
  }
  find("mbarrier that nobody initialised", site, -1, address, -1, false);
  return -1;
}

/// The running thread arrives, and has the phase wait for so many bytes more.
void Worker::arrive(int index, int64 bytes, uint16 site) {
  // The hardware may have completed the phase before.
  if (mbarriers[index].missing == 0) land(index);
  mbarriers[index].bytes += bytes;
  release(current, mbarriers[index].gathered);
  count_arrival(index, site);
  take_turns();
}

void Worker::count_arrival(int index, uint16 site) {
  Mbarrier& barrier = mbarriers[index];
  if (barrier.missing == 0) {
    find("more arrivals than the mbarrier counts", site, barrier.site, barrier.address, -1, false);
    return;
  }
  --barrier.missing;
  if (barrier.missing > 0) return;
  if (barrier.bytes == 0) {
    complete_phase(index);
  } else if (!barrier.waiting.empty()) {
    land(index);
  }
}

/// What is in flight towards an mbarrier arrives.
void Worker::land(int index) {
  Mbarrier& barrier = mbarriers[index];
  const auto place = [&](uint32 address) { return shared.data() + (address - kSharedBase); };
  for (const BulkCopy& copy : barrier.bulk_copies) {
    std::memcpy(place(copy.address), copy.data.data(), copy.data.size());
    barrier.bytes -= static_cast<int64>(copy.data.size());
  }
  barrier.bulk_copies.clear();
  if (barrier.missing == 0 && barrier.bytes == 0) complete_phase(index);
}

void Worker::complete_phase(int index) {
  Mbarrier& barrier = mbarriers[index];
  for (const BulkCopy& copy : barrier.bulk_copies) {
    find("phase complete before its bytes are there", copy.site, barrier.site, copy.address, -1,
         false);
  }
  barrier.gathered[copies_of(index)] = barrier.clock;
  barrier.released.swap(barrier.gathered);
  std::fill(barrier.gathered.begin(), barrier.gathered.end(), 0u);
  ++barrier.phase;
  barrier.missing = barrier.count;
  barrier.bytes = 0;
  barrier.clock = tick();
  for (const int thread : barrier.waiting) {
    acquire(thread, barrier.released);
    warps[thread / kWarpSize].held &= ~(1u << thread % kWarpSize);
  }
  barrier.waiting.clear();
}

/// The running thread waits for the phase of this parity: the one that runs, or the last one.
void Worker::wait_mbarrier(int index, int parity, uint16 site) {
  Mbarrier& barrier = mbarriers[index];
  if (parity != 0 && parity != 1) {
    find("parity that is neither 0 nor 1", site, -1, barrier.address, -1, false);
  }
  const uint32 phase = barrier.phase;
  if (phase % 2 == static_cast<uint32>(parity & 1)) {
    land(index);
    if (barrier.phase == phase) {
      barrier.waiting.push_back(current);
      hold(current, kAtMbarrier, site, barrier.address);
      leave();
      return;
    }
  }
  acquire(current, barrier.released);
  take_turns();
}

/// Whether a box may be copied to this address.
bool Worker::fits(uint32 address, const TiledTensor& map, int bytes, uint16 site) {
  const auto wrong = [&](const char* what) {
    find(what, site, -1, address, -1, false);
    return false;
  };
  const int pitch = map.swizzle == 0 ? 0 : map.swizzle == 1 ? 64 : 128;
  const int inner = static_cast<int>(map.box[0]) * kTensorElement;
  if (reinterpret_cast<std::uintptr_t>(&map) % kMapAlignment != 0) {
    return wrong("misaligned tensor map");
  }
  const auto none = [](uint32 size) { return size < 1 || size > kMostBox; };
  if (map.swizzle > 2 || inner % kChunkBytes != 0 || std::any_of(map.box, map.box + 4, none)) {
    return wrong("not a tensor map");
  }
  if (pitch != 0 && inner != pitch) return wrong("a box as wide as no row of its swizzle");
  if (address % kBulkAlignment != 0) return wrong("misaligned in shared memory");
  if (address % std::max(1, kPatternRows * pitch) != 0) return wrong("misaligned swizzle pattern");
  const uint32 offset = address - kSharedBase;
  if (address < kSharedBase || offset + bytes > static_cast<uint32>(launch.shared_bytes)) {
    return wrong("outside shared memory");
  }
  return true;
}

/// Starts the copy of a box, row by row: column, then head, row and batch.
void Worker::load_tensor(uint32 address, const TiledTensor& map, int index, const int (&at)[4],
                         uint16 site) {
  const uint32* box = map.box;
  const int inner = static_cast<int>(box[0]) * kTensorElement;
  const int rows = static_cast<int>(box[1] * box[2] * box[3]);
  if (!fits(address, map, inner * rows, site)) return;
  Mbarrier& barrier = mbarriers[index];
  if (!fenced(running_thread(), barrier.maker, barrier.made, &Thread::init_fences) &&
      !fenced(running_thread(), barrier.maker, barrier.made, &Thread::fences)) {
    find("no fence after an mbarrier's initialisation", site, barrier.site, barrier.address,
         barrier.maker, false);
  }
  BulkCopy copy = {address, site, std::vector<unsigned char>(inner * rows)};
  const auto inside = [&](int axis, uint32 i) {
    const int64 coordinate = static_cast<int64>(at[axis]) + i;
    return coordinate >= 0 && coordinate < map.dims[axis];
  };
  const int64 first = std::max(at[0], 0);
  const int64 last = std::min<int64>(static_cast<int64>(at[0]) + box[0], map.dims[0]);
  for (int line = 0; line < rows && first < last; ++line) {
    const uint32 i[3] = {line % box[1], line / box[1] % box[2], line / box[1] / box[2]};
    if (!inside(1, i[0]) || !inside(2, i[1]) || !inside(3, i[2])) continue;
    uint64 source = map.address + first * kTensorElement;
    for (int axis = 0; axis < 3; ++axis) source += (at[axis + 1] + i[axis]) * map.strides[axis];
    const int bytes = static_cast<int>(last - first) * kTensorElement;
    unsigned char row[kMostBox * kTensorElement];
    const auto* pointer = reinterpret_cast<const unsigned char*>(source);
    if (touch_global(pointer, bytes, false, site)) {
      std::memcpy(row, pointer, bytes);
    } else {
      std::memset(row, kPoison, bytes);
    }
    const int begin = static_cast<int>(first - at[0]) * kTensorElement;
    for (int byte = 0; byte < bytes; ++byte) {
      const uint32 plain = line * inner + begin + byte;
      copy.data[map.swizzle == 0 ? plain : swizzled(plain, inner)] = row[byte];
    }
  }
  write_async(address, inner * rows, index, site);
  barrier.bulk_copies.push_back(std::move(copy));
  if (!barrier.waiting.empty()) land(index);
  take_turns();
}

/// Notes that copies which an mbarrier waits for write.
void Worker::write_async(uint32 address, int bytes, int index, uint16 site) {
  Toucher who = running_thread();
  who.asynchronous = true;
  const uint32 offset = address - kSharedBase;
  for (uint32 i = offset / kGranule; i < (offset + bytes) / kGranule; ++i) {
    check_after_write(i, who, true, site);
    check_after_reads(i, who, site);
    shadows[i] = {mbarriers[index].clock, static_cast<uint16>(kByCopies | index), site, site};
  }
  std::memset(shared.data() + offset, kPoison, bytes);
}

}  // namespace host
