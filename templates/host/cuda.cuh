// CUDA's vocabulary for a C++ compiler: keywords, and the functions that NVRTC knows by itself. No
// standard header: a variant compiles the faster.
#pragma once

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

// `extern __shared__` names bytes that nothing may touch: a kernel passes their address to
// shared_address() and goes on with shared-window addresses, which the runtime checks.
#define __shared__

extern "C" {
float fabsf(float);
float fmaxf(float, float);
float fmaf(float, float, float);
int printf(const char*, ...);
}

inline int min(int a, int b) { return b < a ? b : a; }
inline int max(int a, int b) { return a < b ? b : a; }
