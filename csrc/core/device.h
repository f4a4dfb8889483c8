// What the core must know of a GPU. device_cuda.cu, or device_none.cpp in a build without CUDA; no CUDA header here.
#pragma once
#include <cstring>
#include <string>

#include "core/context.h"

namespace ftbert {

// What this build or this machine lacks to run on a GPU; "" where it can.
std::string why_no_cuda();

// The context of one call on `stream` (cudaStream_t) of `device`, which must be the thread's current device while
// kernels run. Throws when the build has no code for that GPU. The GEMM workspace is left for the caller to give.
Context<Cuda> cuda_context(int device, void* stream);

// Why the capability that counts is less than the device's own (gpu_level), or "". Throws as cuda_context.
std::string why_held(int device);

// On a GPU launched on the context's stream.
void copy_on_device(const Context<Cuda>& context, const void* from, void* to, size_t bytes);
inline void copy_on_device(const Context<Cpu>&, const void* from, void* to, size_t bytes) {
  std::memcpy(to, from, bytes);
}

// Zeros, launched likewise.
void clear_on_device(const Context<Cuda>& context, void* at, size_t bytes);
inline void clear_on_device(const Context<Cpu>&, void* at, size_t bytes) { std::memset(at, 0, bytes); }

// What every function of a GPU says in a build without CUDA.
inline constexpr const char* kNoCuda =
    "this build of ftbert has no CUDA: install its wheel for GPUs (+cu130), or rebuild with FTBERT_CUDA=ON (needs "
    "nvcc)";

}  // namespace ftbert
