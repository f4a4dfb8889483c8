// Asks the driver whether it can load this build's kernels on the current device.
#pragma once
#include <cuda_runtime_api.h>

namespace ftbert {

cudaError_t probe_kernel_image();

}  // namespace ftbert
