// What kernels and choices ask of a GPU, found out once in a process. No CUDA header.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

namespace ftbert {

// Plain numbers: gemm/tuner/c_calls.cpp takes one from Python, whose GPUs may be imagined ones.
struct Gpu {
  int32_t capability = 0;          // that counts, 10 * major + minor: gpu_level
  int32_t sm_count = 0;            // multiprocessors
  int32_t device_capability = 0;   // the GPU's own
  int32_t warpgroups = 0;          // 1: code for sm_90a runs, on a Hopper; Hopper's kernels are launched there alone
  int32_t shared_bytes = 0;        // of shared memory, that a block can ask for
  int32_t shared_bytes_of_sm = 0;  // a multiprocessor's
  int32_t clock_khz = 0;           // the multiprocessors' highest
  int64_t l2_bytes = 0;            // of the L2 cache
  double bandwidth = 0;            // bytes a second of the memory; 0: the driver does not tell
};

// The compute capability whose kernels and choices a process has on a GPU, and why it is less than the GPU's, or "".
// code: the compute capability for which the code that runs there was compiled. PTX for 8.0 runs on a Hopper, without
// the waits of early starts and without clusters. wish: FTBERT_MAX_GPU, or "". Error for a wish that is no level, and
// where the code is for more than the wish: kernels that Hopper never runs have no body in its code.
struct GpuLevel {
  int capability;
  std::string why;
};
GpuLevel gpu_level(int device, int code, std::string_view wish);

// The GPU with no more than GPUs of this capability have. Clock, caches and rates stay.
Gpu held_to(Gpu gpu, int capability);

// 90: "9.0".
std::string capability_text(int capability);
// "9.0", or "9.0 (held to 8.0)".
std::string capability_text(const Gpu& gpu);

}  // namespace ftbert
