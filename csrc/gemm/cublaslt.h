// Matrix products on CUDA, as the binding and `ftbert info` see them; no CUDA header here.
#pragma once
#include <cstddef>
#include <string>

#include "core/context.h"

namespace ftbert {

// The cuBLASLt handle and the plans of one device: process-wide, made on first use, never destroyed, locked inside.
// cuBLASLt allocates when its handle is made, so the first use must not lie inside a stream capture.
ProductPlans* product_plans(int device);

// Workspace that Context<Cuda>::gemm_workspace should have on this device, 256-byte aligned.
size_t gemm_workspace_bytes(int device);

// "cuBLASLt 13.1.1": of the library loaded, not of the headers. Tuned tables are keyed by it.
std::string gemm_library_version();

}  // namespace ftbert
