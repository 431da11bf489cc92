// Switching between the stacks of a block's threads: all within one OS thread, a few nanoseconds.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace host {

// The labels of the assembly below need the object format's prefix.
#ifdef __APPLE__
#define RTFLASH_SYMBOL(name) "_" name
#else
#define RTFLASH_SYMBOL(name) name
#endif

#if defined(__x86_64__) || defined(__aarch64__)

/// A suspended thread: its stack pointer, above which lie the registers that calls preserve.
using Context = void*;

/// Saves the running thread in `from` and resumes `to`.
extern "C" void rtflash_switch_context(Context* from, Context to) __asm__(
    RTFLASH_SYMBOL("rtflash_switch_context"));

inline void switch_context(Context& from, Context& to) { rtflash_switch_context(&from, to); }

#if defined(__x86_64__)
__asm__(".text\n" RTFLASH_SYMBOL("rtflash_switch_context") R"(:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

/// Makes `context` start `entry`, which never returns, on a stack that ends at `top`.
inline void make_context(Context& context, unsigned char* top, std::size_t, void (*entry)()) {
  auto* slot = reinterpret_cast<std::uintptr_t*>(reinterpret_cast<std::uintptr_t>(top) & ~15ull);
  // A function finds the stack 8 bytes off a multiple of 16, as after a call.
  *--slot = 0;
  *--slot = reinterpret_cast<std::uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--slot = 0;
  context = slot;
}
#else
__asm__(".text\n.balign 4\n" RTFLASH_SYMBOL("rtflash_switch_context") R"(:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");

/// Makes `context` start `entry`, which never returns, on a stack that ends at `top`.
inline void make_context(Context& context, unsigned char* top, std::size_t, void (*entry)()) {
  auto* slot = reinterpret_cast<std::uintptr_t*>(reinterpret_cast<std::uintptr_t>(top) & ~15ull);
  slot -= 20;
  for (int i = 0; i < 20; ++i) slot[i] = 0;
  slot[11] = reinterpret_cast<std::uintptr_t>(entry);  // x30
  context = slot;
}
#endif

#else

using Context = ucontext_t;

inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }

/// Makes `context` start `entry`, which never returns, on the `size` bytes before `top`.
inline void make_context(Context& context, unsigned char* top, std::size_t size, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = top - size;
  context.uc_stack.ss_size = size;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

#endif

}  // namespace host
