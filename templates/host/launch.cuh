// Where emulate.py enters a variant's library. The kernel itself comes later in the source.
#pragma once

#include "params.cuh"
#include "runtime.cuh"

extern "C" void KERNEL_NAME(const Params params);

/// Runs the kernel of this variant.
extern "C" __attribute__((visibility("default"))) void rtflash_launch(host::Launch* launch) {
  host::launch(*launch,
               [](const void* params) { KERNEL_NAME(*static_cast<const Params*>(params)); });
}
