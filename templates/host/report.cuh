// What a launch is given and what it reports: the structs that rtflash/emulate.py mirrors with
// ctypes, same order, same sizes.
#pragma once

namespace host {

using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

/// Of a byte of a tensor.
enum State : unsigned char {
  kPadding,  // of no element
  kEmpty,    // nobody wrote it
  kHeld,     // there before the launch
  kWritten,  // by a launch
};

/// What a launch may do with a tensor.
enum Access : uint64 {
  kRead,
  kWrite,    // each byte at most once
  kRewrite,  // any number of times
  kUpdate,   // and to be read
};

/// A tensor in global memory: the bytes that the kernel may touch.
struct Buffer {
  const char* name;
  unsigned char* begin;
  uint64 size;
  unsigned char* states;  // [size] a State each
  Access access;
  uint64 bytes_read;
  uint64 bytes_written;
};

/// A (column, head, row, batch) tensor of 16-bit elements, and the box of it that one TMA copies:
/// what lies in a kernel's tensor map, where a GPU's driver has a format of its own.
struct TiledTensor {
  uint64 address;
  uint64 strides[3];  // bytes; of head, row, batch
  uint32 dims[4];
  uint32 box[4];
  uint32 swizzle;  // 0: none; 1: of 64 bytes; 2: of 128
};

/// How often an instruction of a template line ran.
struct Count {
  const char* file;
  const char* instruction;
  uint64 line;
  uint64 threads;    // executions, thread by thread
  uint64 warps;      // executions, warp by warp; of shared-memory and warp instructions
  uint64 conflicts;  // shared-memory cycles beyond what the warps' accesses need without conflicts
};

/// Something that a kernel must not do, at one template line (or a pair of them).
struct Finding {
  const char* what;
  const char* file;
  const char* instruction;
  const char* other_file;  // null: no second line
  const char* other_instruction;
  uint64 address;  // the first time: shared-window or global address
  uint64 times;
  int line;
  int other_line;
  int block;  // the first time
  int thread;
  int other_thread;  // -1: unknown
  int race;          // 1: two threads, one of them writing, and no barrier between
};

struct Launch {
  const void* params;
  Buffer* buffers;
  Count* counts;      // [count_capacity]
  Finding* findings;  // [finding_capacity]
  uint64 seed;
  int blocks;
  int threads;  // of a block
  int shared_bytes;
  int workers;  // OS threads
  int buffer_count;
  int count_capacity;
  int count_count;
  int finding_capacity;
  int finding_count;
};

}  // namespace host
