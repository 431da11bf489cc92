// The state of an OS thread that runs blocks, one after another.
#pragma once

#include <vector>

#include "context.cuh"
#include "runtime.cuh"

namespace host {

// Where the window of a block's shared memory starts: not at 0, which stray addresses hit, and
// aligned to no more than the 128 bytes that kernels ask for.
constexpr uint32 kSharedBase = 1024 + 128;

// Shared memory's state is kept for each 4 bytes, the least that an instruction of the twins
// touches.
constexpr int kGranule = 4;
constexpr int kBanks = 32;
constexpr int kMaxSites = 1024;
constexpr const char* kBarrier = "bar.sync";

/// A copy that cp.async has issued and no wait has covered.
struct Copy {
  uint32 address;
  int bytes;
  int group;  // the thread's count of commits when it was issued
  uint16 site;
  unsigned char data[16];
};

struct Thread {
  Context context;
  std::vector<Copy> copies;  // oldest first
  int commits;               // groups closed
};

/// The accesses to shared memory that a warp's lanes make with one instruction.
struct Group {
  uint16 site;
  int bytes;
  uint32 lanes;  // which take part
  uint32 addresses[kWarpSize];
};

struct Warp {
  // Lanes as bits: at `meeting`, at a barrier, ended. The others can run.
  uint32 waiting;
  uint32 at_barrier;
  uint32 ended;
  void (*compute)(const Meeting&);
  Meeting meeting;
  Site barrier;               // of some lane at_barrier
  std::vector<Group> groups;  // accesses since the warp last met
  uint32 group_count;
  uint32 next_group[kWarpSize];
  uint32 turn;   // the lane that runs first
  uint32 epoch;  // of its last barrier, its own or the CTA's

  uint32 ready() const { return ~(waiting | at_barrier | ended); }
};

/// Who touched a granule of shared memory last, and the epoch of its warp then. Epochs count the
/// barriers of all blocks, of warps and CTAs together: one before the block's first means never.
struct Shadow {
  uint32 write_epoch;
  uint32 read_epoch;
  uint16 writer;  // thread; with kInFlight: a cp.async's bytes, not there yet
  uint16 reader;  // thread; with kSeveral: not the only lane in its warp's epoch; with kWarps:
                  // other warps, too, since the CTA's barrier
  uint16 write_site;
  uint16 read_site;
};
constexpr uint16 kInFlight = 0x8000;
constexpr uint16 kSeveral = 0x8000;
constexpr uint16 kWarps = 0x4000;
constexpr uint16 kThread = 0x3fff;

struct Worker {
  explicit Worker(const Launch& launch, void (*kernel)(const void*));
  ~Worker();

  const Launch& launch;
  void (*kernel)(const void*);
  int block = 0;
  int current = 0;  // the running thread
  uint64 random = 0;
  bool stopped = false;  // the block cannot go on
  int arrived = 0;       // threads at the barrier

  Context scheduler;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned char* stacks;

  std::vector<unsigned char> shared;
  std::vector<Shadow> shadows;
  uint32 barriers = 0;     // so far, of warps and CTAs
  uint32 epoch = 0;        // of the CTA's last barrier
  uint32 block_epoch = 0;  // of the block's start

  std::vector<Buffer> buffers;
  std::size_t last_buffer = 0;  // touched last
  std::vector<Count> counts;
  std::vector<uint16> count_slots;  // hash table: 1 + index in counts
  std::vector<Finding> findings;

  // Scheduling.
  void run_block(int index);
  void leave();
  void hand_over(int next);
  int pick_lane(int warp) const;
  int next_thread();
  void meet(const char* instruction, void (*compute)(const Meeting&), void* operands, Site site);
  void barrier(Site site);
  void order_warp(int warp);
  void order_block();
  void end_thread();
  uint32 draw(uint32 below);

  // Memory.
  bool within_shared(uint32 address, int bytes, uint16 site);
  bool ordered(uint32 then, int thread) const;
  void note_reader(Shadow& shadow, bool whole_warp) const;
  void read_shared(uint32 address, int bytes, uint16 site, bool whole_warp, void* value);
  void write_shared(uint32 address, int bytes, uint16 site, bool in_flight);
  void load_shared_rows(const Meeting& meeting, const uint32 (&addresses)[kWarpSize],
                        uint16 (&rows)[kWarpSize][8]);
  void copy_async(uint32 address, int bytes, const void* source, int source_bytes, uint16 site);
  void land_copies(int pending);
  bool aligned(const void* pointer, int bytes, uint16 site);
  Buffer* buffer_of(const void* pointer, int bytes);
  bool touch_global(const void* pointer, int bytes, bool write, uint16 site);

  // Counts and findings.
  uint16 site_index(const char* instruction, Site site);
  uint16 count(const char* instruction, Site site);
  void join_group(uint32 address, int bytes, uint16 site);
  void count_groups(Warp& warp);
  void find(const char* what, uint16 site, int other_site, uint64 address, int other_thread,
            bool race);
  void add_to(Launch& launch) const;
};

/// Of the running OS thread.
extern thread_local Worker* worker;

}  // namespace host
