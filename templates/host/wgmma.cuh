// wgmma: products of a warpgroup that run by themselves, from shared memory, between the
// instruction and the wait that covers it.
//
// A product reads its operands and changes its accumulators as late as it may: at the wait. Until
// then the accumulators' registers hold poison. Each warp computes its own 16 of the 64 rows, reads
// those rows of A and all of B, and waits for itself; the four warps must issue the same.
#pragma once

#include <cstring>

#include "mbarrier.cuh"
#include "memory.cuh"
#include "order.cuh"
#include "warp.cuh"

namespace host {

constexpr int kDeep = 16;                // of a product's inner dimension
constexpr int kMostColumns = 256;        // of B
constexpr uint32 kRunning = 0x80000000;  // with a product's number: it still reads the chunk

// A signalling NaN: what a thread computes from it is another number.
constexpr uint32 kRegisterPoison = 0xffbadbad;

constexpr const char* kAccumulatorTouched = "accumulator touched in flight";
constexpr const char* kOtherProduct = "warps of the warpgroup issue other wgmma";

/// A matrix in shared memory as a descriptor says it: 8 rows of `pitch` bytes are a pattern.
struct Matrix {
  uint32 start;
  uint32 slab;  // from pitch to pitch of columns
  uint32 step;  // from 8 rows to 8 rows
  int pitch;    // 128 or 64; 0: another swizzle

  explicit Matrix(uint64 descriptor)
      : start((descriptor & 0x3fff) << 4),
        slab((descriptor >> 16 & 0x3fff) << 4),
        step((descriptor >> 32 & 0x3fff) << 4),
        pitch(descriptor >> 62 == 1   ? 128
              : descriptor >> 62 == 2 ? 64
                                      : 0) {}

  /// The address of the element of a row and a column, counted from `start`.
  uint32 element(int row, int column) const {
    const int columns = pitch / kTensorElement;
    const uint32 plain = start + column / columns * slab + row / kPatternRows * step +
                         row % kPatternRows * pitch + column % columns * kTensorElement;
    return swizzled(plain, pitch);
  }
};

/// Bits of a descriptor that must be 0: those between the fields, and the base offset.
constexpr uint64 kNoField = 0x3fffc000c000c000;

/// What is wrong with a descriptor of rows that are the inner dimension (`transposed`), or of rows
/// of 16 elements of it; null: nothing.
inline const char* wrong_descriptor(uint64 descriptor, bool transposed) {
  const Matrix matrix(descriptor);
  if (descriptor & kNoField || matrix.pitch == 0) return "not a descriptor of a swizzled matrix";
  const uint32 pattern = kPatternRows * matrix.pitch;
  const uint32 column = matrix.start % matrix.pitch;
  if ((matrix.start - column) % pattern != 0 || matrix.step % pattern != 0) {
    return "a descriptor that is off the swizzle pattern";
  }
  const bool leaves = transposed ? column != 0 : column % (kDeep * kTensorElement) != 0;
  return leaves ? "a descriptor that is off the slab" : nullptr;
}

/// Warp `warp` of a warpgroup reads 16 bytes; until the product ends, nobody may write them.
void Worker::read_async(uint32 address, int warp, uint32 number, uint16 site) {
  if (!within_shared(address, kChunkBytes, site)) return;
  const uint32 first = (address - kSharedBase) / kGranule;
  const Toucher who = whole_warp(warp, true);
  for (uint32 i = first; i < first + kChunkGranules; ++i) {
    check_after_write(i, who, false, site);
    shadows[i].read_site = site;
  }
  products[first / kChunkGranules * warps.size() + warp] = kRunning | number;
}

/// The chunks of 16 bytes that a warp's part of a product reads: whether of A, the row among the
/// warp's, the first column, the address.
template <class Visit>
inline void visit_chunks(const Product& product, int warp, int columns, Visit visit) {
  const int half = kChunkBytes / kTensorElement;
  const Matrix a(product.a);
  for (int row = 0; row < 16 && !product.from_registers; ++row) {
    for (int k = 0; k < kDeep; k += half)
      visit(true, row, k, a.element(warp % kWarpgroup * 16 + row, k));
  }
  const Matrix b(product.b);
  const int rows = product.from_registers ? kDeep : columns;
  const int inner = product.from_registers ? columns : kDeep;
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < inner; i += half) visit(false, row, i, b.element(row, i));
  }
}

/// All four warps of a warpgroup issue the same products, all lanes of a warp with the same
/// descriptors.
void Worker::check_issue(const Meeting& meeting, uint16 site) {
  const GroupMultiply& first = meeting.lane<GroupMultiply>(0);
  for (int lane = 1; lane < kWarpSize; ++lane) {
    const GroupMultiply& own = meeting.lane<GroupMultiply>(lane);
    if (own.a != first.a || own.b != first.b || own.add != first.add) {
      find("lanes of the warp have other operands", site, -1, 0, -1, false);
    }
  }
  Warp& warp = warps[meeting.warp];
  std::vector<Issue>& all = issues[meeting.warp / kWarpgroup];
  if (warp.product_count == all.size()) {
    all.push_back({site, first.a, first.b, first.add});
    return;
  }
  const Issue& issue = all[warp.product_count];
  if (issue.site != site || issue.a != first.a || issue.b != first.b || issue.add != first.add) {
    find(kOtherProduct, site, issue.site, 0, -1, false);
  }
}

/// The accumulators that the lanes name: those in flight, or new ones, whose registers are taken.
std::size_t Worker::accumulator_of(const Meeting& meeting, uint16 site) {
  std::vector<Accumulator>& all = warps[meeting.warp].accumulators;
  const GroupMultiply& first = meeting.lane<GroupMultiply>(0);
  std::size_t index = 0;
  while (index < all.size() && all[index].lanes[0] != first.d) ++index;
  if (index == all.size()) all.emplace_back();
  Accumulator& found = all[index];
  if (found.in_flight > 0) {
    check_poison(found, site, warps[meeting.warp].products.back().site);
    return index;
  }
  found.tiles = first.tiles;
  found.touched = false;
  found.values.resize(16 * 8 * found.tiles);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    float* registers = meeting.lane<GroupMultiply>(lane).d;
    found.lanes[lane] = registers;
    for (int i = 0; i < 4 * found.tiles; ++i) {
      const int row = lane / 4 + i % 4 / 2 * 8;
      found.values[row * 8 * found.tiles + i / 4 * 8 + lane % 4 * 2 + i % 2] = registers[i];
      std::memcpy(registers + i, &kRegisterPoison, sizeof(float));
    }
  }
  return index;
}

/// Finds accumulators that are not poison any more. They may be another variable's memory by now,
/// and nothing is written to them.
void Worker::check_poison(Accumulator& accumulator, uint16 site, uint16 product_site) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < 4 * accumulator.tiles && !accumulator.touched; ++i) {
      const void* own = accumulator.lanes[lane] + i;
      accumulator.touched = std::memcmp(own, &kRegisterPoison, sizeof(float)) != 0;
      if (accumulator.touched) find(kAccumulatorTouched, site, product_site, 0, -1, false);
    }
  }
}

void Worker::issue_product(const Meeting& meeting) {
  Warp& warp = warps[meeting.warp];
  const uint16 site = site_index(meeting.instruction, meeting.site);
  const GroupMultiply& first = meeting.lane<GroupMultiply>(0);
  const bool from_registers = first.a_registers != nullptr;
  if (static_cast<int>(warps.size()) % kWarpgroup != 0) {
    find("not all warps of a warpgroup", site, -1, 0, -1, false);
    return;
  }
  if (!warp.registers_fenced) {
    find("no wgmma.fence since the last wait", site, -1, 0, -1, false);
    warp.registers_fenced = true;
  }
  check_issue(meeting, site);
  ++warp.product_count;
  const char* wrong = from_registers ? nullptr : wrong_descriptor(first.a, false);
  if (wrong == nullptr) wrong = wrong_descriptor(first.b, from_registers);
  if (wrong != nullptr) {
    find(wrong, site, -1, 0, -1, false);
    return;
  }
  Product product = {first.a, first.b, first.add, first.bf16, from_registers, 0, 0,
                     0,       site,    {},        {}};
  product.accumulator = accumulator_of(meeting, site);
  ++warp.accumulators[product.accumulator].in_flight;
  product.group = warp.product_commits;
  product.number = warp.product_count;
  for (int lane = 0; lane < kWarpSize && from_registers; ++lane) {
    product.operands[lane] = meeting.lane<GroupMultiply>(lane).a_registers;
    std::memcpy(product.values[lane], product.operands[lane], sizeof(product.values[lane]));
  }
  if (products.empty()) products.resize((shadows.size() / kChunkGranules + 1) * warps.size());
  visit_chunks(product, meeting.warp, 8 * first.tiles, [&](bool, int, int, uint32 address) {
    read_async(address, meeting.warp, product.number, site);
  });
  warp.products.push_back(product);
}

/// Eight 16-bit elements of shared memory.
inline void load_chunk(const Worker& worker, uint32 address, bool bf16, float (&values)[8]) {
  uint16 bits[8];
  std::memset(bits, kPoison, sizeof(bits));
  const uint32 offset = address - kSharedBase;
  if (address >= kSharedBase && offset + sizeof(bits) <= worker.shared.size()) {
    std::memcpy(bits, worker.shared.data() + offset, sizeof(bits));
  }
  for (int i = 0; i < 8; ++i) values[i] = bf16 ? from_bf16(bits[i]) : from_fp16(bits[i]);
}

/// A product ends: it reads, multiplies and adds, as mma does (warp.cuh).
void Worker::land_product(Warp& warp, int index, const Product& product, uint16 site) {
  Accumulator& accumulator = warp.accumulators[product.accumulator];
  const int columns = 8 * accumulator.tiles;
  float a[16][kDeep];
  float b[kDeep][kMostColumns];
  const auto take = [&](bool of_a, int row, int column, uint32 address) {
    float chunk[8];
    load_chunk(*this, address, product.bf16, chunk);
    for (int i = 0; i < 8; ++i) {
      (of_a                     ? a[row][column + i]
       : product.from_registers ? b[row][column + i]
                                : b[column + i][row]) = chunk[i];
    }
    // A later product of the warp may read the chunk still.
    const std::size_t read = (address - kSharedBase) / kChunkBytes * warps.size() + index;
    if (read < products.size() && products[read] == (kRunning | product.number)) {
      products[read] = warp.read_clock;
    }
  };
  visit_chunks(product, index, columns, take);
  for (int lane = 0; lane < kWarpSize && product.from_registers; ++lane) {
    const uint32(&values)[4] = product.values[lane];
    if (std::memcmp(product.operands[lane], values, sizeof(values)) != 0) {
      find("operand register rewritten in flight", site, product.site, 0, -1, false);
    }
    for (int i = 0; i < 8; ++i) {
      const auto bits = static_cast<uint16>(values[i / 2] >> i % 2 * 16);
      const int k = lane % 4 * 2 + i / 4 * 8 + i % 2;
      a[lane / 4 + i / 2 % 2 * 8][k] = product.bf16 ? from_bf16(bits) : from_fp16(bits);
    }
  }
  for (int row = 0; row < 16; ++row) {
    float* d = accumulator.values.data() + row * columns;
    if (!product.add) std::fill_n(d, columns, 0.f);
    for (int k = 0; k < kDeep; ++k) {
      for (int column = 0; column < columns; ++column) d[column] += a[row][k] * b[k][column];
    }
  }
  if (--accumulator.in_flight > 0) return;
  check_poison(accumulator, site, product.site);
  for (int lane = 0; lane < kWarpSize && !accumulator.touched; ++lane) {
    for (int i = 0; i < 4 * accumulator.tiles; ++i) {
      const int row = lane / 4 + i % 4 / 2 * 8;
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      accumulator.lanes[lane][i] = accumulator.values[row * columns + column];
    }
  }
}

/// All but the warp's newest `pending` groups, and the open one, end.
void Worker::wait_products(const Meeting& meeting, int pending) {
  Warp& warp = warps[meeting.warp];
  const uint16 site = site_index(meeting.instruction, meeting.site);
  warp.read_clock = tick();
  std::size_t landed = 0;
  for (const Product& product : warp.products) {
    if (product.group >= warp.product_commits - pending) break;
    land_product(warp, meeting.warp, product, site);
    ++landed;
  }
  warp.products.erase(warp.products.begin(), warp.products.begin() + landed);
  warp.registers_fenced = false;
}

void fence_registers(const Meeting& meeting) {
  worker->warps[meeting.warp].registers_fenced = true;
}

void multiply_group(const Meeting& meeting) { worker->issue_product(meeting); }

void commit_group(const Meeting& meeting) { ++worker->warps[meeting.warp].product_commits; }

void wait_groups(const Meeting& meeting) {
  worker->wait_products(meeting, meeting.lane<GroupWait>(0).pending);
}

void set_registers(const Meeting& meeting) {
  const RegisterCount& own = meeting.lane<RegisterCount>(0);
  worker->set_registers(meeting, own.count, own.claim);
}

void come_to_barrier(const Meeting& meeting) {
  const NamedBarrierArrival& own = meeting.lane<NamedBarrierArrival>(0);
  worker->come_to_barrier(meeting, own.id, own.threads, own.wait);
}

}  // namespace host
