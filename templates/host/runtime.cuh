// What the twins of the PTX partials ask of the runtime (runtime.cpp), which does not depend on the
// variant and is compiled once.
#pragma once

#include "report.cuh"

namespace host {

constexpr int kWarpSize = 32;

/// A line of a template. As a default argument: the line that calls.
struct Site {
  const char* file;
  int line;

  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

/// A warp's lanes at one instruction, all of them: what each brought.
struct Meeting {
  const char* instruction;
  Site site;
  int warp;
  void* operands[kWarpSize];  // by lane

  /// Lane l's operands.
  template <class Operands>
  Operands& lane(int l) const {
    return *static_cast<Operands*>(operands[l]);
  }
};

/// Runs `kernel` in every thread of every block.
void launch(Launch& launch, void (*kernel)(const void* params));

int thread_index();
int block_index();

/// All threads of the block meet.
void barrier_cta(Site site);

/// All lanes of the warp meet; memory is ordered among them, and not with other warps.
void barrier_warp(Site site);

/// All lanes of the warp meet; the last one calls `compute`, which sees the operands of all and
/// writes results through them.
void meet(const char* instruction, void (*compute)(const Meeting&), void* operands, Site site);

/// The shared-window address of a pointer into the block's shared memory.
uint32 shared_address(const void* pointer_smem);

void load_shared(const char* instruction, void* value, uint32 address, int bytes, Site site);
void store_shared(const char* instruction, uint32 address, const void* value, int bytes, Site site);
void load_global(const char* instruction, void* value, const void* source, int bytes, Site site);
void store_global(const char* instruction, void* target, const void* value, int bytes, Site site);
int atomic_add(int* target, int value, Site site);

/// cp.async: `bytes` to shared memory, those from `source_bytes` on zero, at the wait that covers
/// them.
void copy_async(const char* instruction, uint32 address, int bytes, const void* source,
                int source_bytes, Site site);
void commit_copies(Site site);
void wait_copies(int pending, Site site);

/// mbarriers, by their addresses.
void mbarrier_init(uint32 address, int count, Site site);
void mbarrier_arrive(const char* instruction, uint32 address, int bytes, Site site);
void mbarrier_wait(uint32 address, int parity, Site site);

/// What the thread did until now is known to the asynchronous proxy; `init`: its mbarriers only.
void fence_proxy(const char* instruction, bool init, Site site);

/// TMA: the box at (column, head, row, batch), when the mbarrier's phase is waited for.
void load_tensor(uint32 address, const void* map, uint32 barrier, const int (&at)[4], Site site);

float exp2_approx(float x);
float log2_approx(float x);
float reciprocal_approx(float x);

float from_fp16(uint16 value);
uint16 to_fp16(float x);
uint16 to_bf16(float x);

/// Operands of the warp instructions, and what the instructions compute.
struct Vote {
  bool predicate;
  bool any;
};
void vote_any(const Meeting& meeting);

struct Shuffle {
  float value;
  float result;
  int mask;
};
void shuffle_xor(const Meeting& meeting);

struct ShuffleIndex {
  int value;
  int result;
  int lane;
};
void shuffle_index(const Meeting& meeting);

struct LoadMatrix {
  uint32* matrices;  // [4]
  uint32 address;
};
void ldmatrix_x4(const Meeting& meeting);
void ldmatrix_x4_trans(const Meeting& meeting);

/// d += a b, a 16 x 8 kDeep (two registers for each 8), b 8 kDeep x 8.
struct Multiply {
  float* d;  // [4]
  uint32 a[4];
  uint32 b[2];
};
void mma_m16n8k8_fp16(const Meeting& meeting);
void mma_m16n8k16_fp16(const Meeting& meeting);
void mma_m16n8k16_bf16(const Meeting& meeting);

struct RegisterCount {
  int count;
  bool claim;
};
void set_registers(const Meeting& meeting);

struct NamedBarrierArrival {
  int id;
  int threads;
  bool wait;
};
void come_to_barrier(const Meeting& meeting);

/// A warp's part of d = a b or d += a b of a warpgroup, 64 x 16 and 16 x (8 tiles). Descriptors say
/// where a, [row][k], and b lie: [column][k], or, with a in registers, [k][column].
struct GroupMultiply {
  float* d;  // [tiles][4]
  int tiles;
  const uint32* a_registers;  // [4], or null
  uint64 a;
  uint64 b;
  bool add;
  bool bf16;
};
void fence_registers(const Meeting& meeting);
void multiply_group(const Meeting& meeting);
void commit_group(const Meeting& meeting);

struct GroupWait {
  int pending;
};
void wait_groups(const Meeting& meeting);

}  // namespace host
