// A kernel that is never launched: whether it can be loaded tells whether the build has code for the GPU.
// The driver's answer, unlike a comparison of version numbers, also covers PTX compiled at start.
#include "core/device_probe.h"

namespace ftbert {
namespace {
__global__ void probe_kernel() {}
}  // namespace

cudaError_t probe_kernel_image() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, probe_kernel);
}

}  // namespace ftbert
