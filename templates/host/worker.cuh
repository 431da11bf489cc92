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
constexpr int kWarpgroup = 4;       // warps
constexpr int kMaxMbarriers = 64;   // of a block
constexpr int kNamedBarriers = 16;  // number 0 is the CTA's
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
  uint32 clock;              // of what it does now: see order.cuh
  // Clocks at its fences, ascending: what it did until then is known to the asynchronous proxy.
  std::vector<uint32> fences;
  std::vector<uint32> init_fences;
  // While it is held: by what, at which instruction.
  const char* held_by;
  uint16 held_at;
  uint64 held_address;
};

/// The accesses to shared memory that a warp's lanes make with one instruction.
struct Group {
  uint16 site;
  int bytes;
  uint32 lanes;  // which take part
  uint32 addresses[kWarpSize];
};

/// Accumulators of a warp while wgmma are in flight on them.
struct Accumulator {
  float* lanes[kWarpSize];    // where the lanes have them, poison for now
  int tiles;                  // m16n8 tiles
  int in_flight;              // wgmma
  bool touched;               // the registers are not poison any more
  std::vector<float> values;  // [16][8 tiles]
};

/// A warp's part of a wgmma that no wait has covered: 16 rows.
struct Product {
  uint64 a, b;  // descriptors
  bool add;
  bool bf16;
  bool from_registers;  // A, and B is stored [k][column]
  std::size_t accumulator;
  int group;  // the warp's count of commits when it was issued
  uint32 number;
  uint16 site;
  const uint32* operands[kWarpSize];  // A's registers, and what they held
  uint32 values[kWarpSize][4];
};

struct Warp {
  // Lanes as bits: at `meeting`, at a barrier of the CTA, held by something else, ended. The others
  // can run.
  uint32 waiting;
  uint32 at_barrier;
  uint32 held;
  uint32 ended;
  Meeting meeting;
  Site barrier;               // of some lane at_barrier
  std::vector<Group> groups;  // accesses since the warp last met
  uint32 group_count;
  uint32 next_group[kWarpSize];
  uint32 turn;  // the lane that runs first

  // Order: see order.cuh.
  uint32 base;                 // clock up to which its lanes know each other
  bool diverged;               // a lane may know what the others do not
  bool stale;                  // so may `common` be
  std::vector<uint32> common;  // what all lanes know

  // wgmma: see wgmma.cuh.
  std::vector<Product> products;  // in flight, oldest first
  std::vector<Accumulator> accumulators;
  int product_commits;
  uint32 product_count;  // so far
  uint32 read_clock;     // of the last products' reads
  bool registers_fenced;
  int registers;  // of a thread
  int wanted;     // that it waits for; 0: none
  bool registers_set;
  uint16 registers_site;

  uint32 ready() const { return ~(waiting | at_barrier | held | ended); }
};

/// Who wrote a granule of shared memory, and at which clock.
struct Shadow {
  uint32 write_clock;
  uint16 writer;  // thread; with kInFlight: a cp.async's bytes, not there yet; with kObject: an
                  // mbarrier; with kByCopies: the copies that mbarrier's phase waits for
  uint16 write_site;
  uint16 read_site;
};
constexpr uint16 kInFlight = 0x8000;
constexpr uint16 kByCopies = 0x4000;
constexpr uint16 kObject = 0x2000;
constexpr uint16 kIndex = 0x1fff;

/// Bytes that TMA copies to shared memory.
struct BulkCopy {
  uint32 address;
  uint16 site;
  std::vector<unsigned char> data;
};

/// An mbarrier: see mbarrier.cuh.
struct Mbarrier {
  uint32 address;
  int count;     // arrivals that complete a phase
  int missing;   // of them, in this phase
  int64 bytes;   // expected in this phase and not there
  uint32 phase;  // how many are complete
  uint32 clock;  // of the phase, which its copies carry
  int maker;     // the thread, its clock and line
  uint32 made;
  uint16 site;
  std::vector<BulkCopy> bulk_copies;  // in flight
  std::vector<int> waiting;           // threads
  std::vector<uint32> gathered;       // what those who arrived in this phase know
  std::vector<uint32> released;       // and those of the last one
};

/// Threads that meet at a named barrier, warp by warp.
struct NamedBarrier {
  int threads;  // that complete it; 0: nobody has come
  int arrived;
  uint32 warps;    // that came
  uint32 waiting;  // that wait
  uint16 site;     // of the first to come
  std::vector<uint32> gathered;
};

/// A wgmma as the first warp of a warpgroup issued it.
struct Issue {
  uint16 site;
  uint64 a, b;
  bool add;
};

/// What touches shared memory: a thread, or (thread < 0) all lanes of a warp.
struct Toucher {
  int thread;
  int warp;
  const uint32* row;  // what it knows of others
  bool asynchronous;
};

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
  std::vector<uint32> reads;     // [granule][warp]: the last read of a lane, see note_reader
  std::vector<uint32> products;  // [chunk][warp]: the last wgmma's; empty before the first

  uint32 newest = 0;       // of all clocks
  uint32 base = 0;         // what all threads know of all: see order.cuh
  uint32 block_start = 0;  // base at the block's start
  int row_size;
  std::vector<uint32> rows;  // [thread][row_size]

  std::vector<Mbarrier> mbarriers;
  NamedBarrier named[kNamedBarriers];
  std::vector<std::vector<Issue>> issues;  // by warpgroup
  int free_registers = 0;

  std::vector<Buffer> buffers;
  std::size_t last_buffer = 0;  // touched last
  std::vector<Count> counts;
  std::vector<uint16> count_slots;  // hash table: 1 + index in counts
  std::vector<Finding> findings;

  // Scheduling.
  void run_block(int index);
  void reset_warp(Warp& warp);
  void end_block();
  void leave();
  void hand_over(int next);
  void take_turns();
  int pick_lane(int warp) const;
  int next_thread();
  const char* waits_for(const Thread& thread, const Warp& warp) const;
  void report_waiting();
  void hold(int thread, const char* why, uint16 site, uint64 address);
  void hold_warp(int warp, const char* why, uint16 site, uint64 address);
  void meet(const char* instruction, void (*compute)(const Meeting&), void* operands, Site site);
  void barrier(Site site);
  void end_thread();
  uint32 draw(uint32 below);

  // Order.
  uint32* row(int thread) { return rows.data() + thread * static_cast<std::size_t>(row_size); }
  int products_of(int warp) const { return static_cast<int>(threads.size()) + warp; }
  int copies_of(int mbarrier) const {
    return static_cast<int>(threads.size() + warps.size()) + mbarrier;
  }
  uint32 tick();
  uint32 known(const Toucher& who, int thread) const;
  bool ordered(const Toucher& who, int thread, uint32 then) const;
  bool ordered_warp(const Toucher& who, int warp, uint32 then) const;
  bool fenced(const Toucher& who, int thread, uint32 then,
              std::vector<uint32> Thread::* fences) const;
  Toucher running_thread();
  Toucher whole_warp(int warp, bool asynchronous);
  void release(int thread, std::vector<uint32>& gathered);
  void acquire(int thread, const std::vector<uint32>& released);
  void fence(bool init);
  void order_warp(int warp);
  void order_block();
  void start_clocks();

  // Memory.
  bool within_shared(uint32 address, int bytes, uint16 site);
  const char* after_write(const Shadow& shadow, const Toucher& who, bool write) const;
  bool check_after_write(uint32 granule, const Toucher& who, bool write, uint16 site);
  void check_after_reads(uint32 granule, const Toucher& who, uint16 site);
  void note_reader(uint32 granule, bool whole_warp);
  void read_shared(uint32 address, int bytes, uint16 site, bool whole_warp, void* value);
  void write_shared(uint32 address, int bytes, uint16 site, bool in_flight);
  void load_shared_rows(const Meeting& meeting, const uint32 (&addresses)[kWarpSize],
                        uint16 (&rows)[kWarpSize][8]);
  void copy_async(uint32 address, int bytes, const void* source, int source_bytes, uint16 site);
  void land_copies(int pending);
  bool aligned(const void* pointer, int bytes, uint16 site);
  Buffer* buffer_of(const void* pointer, int bytes);
  bool touch_global(const void* pointer, int bytes, bool write, uint16 site);

  // mbarriers and TMA.
  void make_mbarrier(uint32 address, int count, uint16 site);
  int mbarrier_at(uint32 address, uint16 site);
  void arrive(int index, int64 bytes, uint16 site);
  void wait_mbarrier(int index, int parity, uint16 site);
  void count_arrival(int index, uint16 site);
  void land(int index);
  void complete_phase(int index);
  void load_tensor(uint32 address, const TiledTensor& map, int index, const int (&at)[4],
                   uint16 site);
  bool fits(uint32 address, const TiledTensor& map, int bytes, uint16 site);
  void write_async(uint32 address, int bytes, int index, uint16 site);

  // Named barriers and registers of warpgroups.
  void come_to_barrier(const Meeting& meeting, int id, int count, bool wait);
  void set_registers(const Meeting& meeting, int count, bool claim);
  void give_registers();

  // wgmma.
  void issue_product(const Meeting& meeting);
  void wait_products(const Meeting& meeting, int pending);
  void check_issue(const Meeting& meeting, uint16 site);
  void read_async(uint32 address, int warp, uint32 number, uint16 site);
  std::size_t accumulator_of(const Meeting& meeting, uint16 site);
  void check_poison(Accumulator& accumulator, uint16 site, uint16 product_site);
  void land_product(Warp& warp, int index, const Product& product, uint16 site);

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
