// CUDA errors as ftbert::Error: what failed, where, and what a user can do about it.
#pragma once
#include <cuda_runtime_api.h>

namespace ftbert {

// `what`: the call's text, or the kernel's name. Clears the runtime's last error, so that the next call starts clean.
[[noreturn]] void throw_cuda_error(cudaError_t error, const char* what, const char* file, int line);

inline void cuda_check(cudaError_t error, const char* what, const char* file, int line) {
  if (error != cudaSuccess) [[unlikely]]
    throw_cuda_error(error, what, file, line);
}

}  // namespace ftbert

#define FTBERT_CUDA_CHECK(call) ::ftbert::cuda_check((call), #call, __FILE__, __LINE__)
