// Launches whose start overlaps the end of the kernel ahead of them (programmatic dependent launch, Hopper on): in a
// forward pass of some hundred kernels of a few microseconds, what lies between two of them counts.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "core/context.h"
#include "core/cuda_check.h"

namespace ftbert {

// The two halves of wait_for_inputs.
__device__ inline void grid_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void grid_let_go() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Every kernel that `launch_overlapped` launches comes here before it touches memory that other kernels write or read
// (prefetching aside, and what is there earlier: weights, keys that earlier steps have stored, counts of a kernel that
// is not the one ahead): it waits until all that the kernels ahead have written is there, then lets the kernel behind
// take the room that becomes free. That one waits here in turn. (A compiler may take a load through a const
// __restrict__ pointer for one that nothing changes, and move it up; nvcc 13.0 moves none in these kernels.)
//
// As each lets the next one start only after its own wait, all before the kernel ahead have ended when a kernel starts.
// A kernel whose time is that of the memory may let go later, for what the kernel behind asks for comes at the expense
// of its own: attention_decode.cuh, and gemm/hopper/few_rows.cuh, where the warp that asks for weights waits when it
// has asked for all. What two kernels of one kind count in must differ, then; the third may count where the first did.
__device__ inline void wait_for_inputs() {
  grid_wait();
  grid_let_go();
}

// kernel<<<blocks, threads, 0, stream>>>(args...), checked under `name`. Does not wait for the kernel.
template <class... Parameters, class... Arguments>
void launch_kernel(const Context<Cuda>& context, const char* name, void (*kernel)(Parameters...), unsigned blocks,
                   unsigned threads, Arguments... arguments) {
  kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(context.stream)>>>(static_cast<Parameters>(arguments)...);
  cuda_check(cudaGetLastError(), name, __FILE__, __LINE__);
}

// Which blocks of a grid may count on each other's presence: neighbours (in x) of a cluster, or all.
struct Presence {
  int cluster = 1;
  bool all = false;
  bool large_l1 = false;
  Presence(int cluster, bool all = false) : cluster(cluster), all(all) {}
  // For kernels that stream tensors larger than the caches: loads in flight wait in L1, which the driver then sizes.
  static Presence streaming() {
    Presence presence(1);
    presence.large_l1 = true;
    return presence;
  }
};

// A block has 48 KB of shared memory without a launch that asks for more. Kernels declare up to 16 of these themselves.
constexpr size_t kUnasked = 32 << 10;

// Bytes of shared memory beside a kernel's own. most: what other launches of the same kernel, of other threads too, may
// ask for.
struct SharedBytes {
  size_t size, most;
  SharedBytes(size_t size) : SharedBytes(size, size) {}
  SharedBytes(size_t size, size_t most) : size(size), most(most) {}
};

// How many clusters of `cluster` blocks the GPU holds at a time, of blocks with these threads and shared bytes: fewer
// than its multiprocessors would hold, since those of a cluster are neighbours.
template <class... Parameters>
int clusters_at_once(const char* name, void (*kernel)(Parameters...), unsigned threads, size_t shared, int cluster) {
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)), name,
             __FILE__, __LINE__);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  cuda_check(cudaOccupancyMaxActiveClusters(&count, kernel, &config), name, __FILE__, __LINE__);
  return count;
}

// kernel<<<grid, threads, shared, stream>>>(args...), checked under `name`. The kernel must call wait_for_inputs() or
// grid_wait(): its blocks may be there before the kernel ahead has ended.
template <class... Parameters, class... Arguments>
void launch_overlapped(const Context<Cuda>& context, const char* name, void (*kernel)(Parameters...), dim3 grid,
                       unsigned threads, SharedBytes shared, Presence presence, Arguments... arguments) {
  if (shared.most > kUnasked)
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared.most)),
               name, __FILE__, __LINE__);
  cudaLaunchAttribute attributes[4]{};
  unsigned count = 0;
  if (context.capability >= 90 && context.overlap) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (context.capability >= 90 && context.overlap && !presence.large_l1) {
    // A multiprocessor divides its memory between L1 cache and shared memory, and for another division has to be empty.
    // All kernels that overlap have the same division. Else a kernel with little shared memory keeps a large kernel
    // behind it from starting early: 192x768x3072, LayerNorm and the next product took 12.5 us, with one division 9.8
    // (H200).
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  }
  if (presence.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(presence.cluster);
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (presence.all) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared.size;
  config.stream = static_cast<cudaStream_t>(context.stream);
  config.attrs = attributes;
  config.numAttrs = count;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), name, __FILE__, __LINE__);
}

}  // namespace ftbert
