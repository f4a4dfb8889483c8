// Which GPUs run the kernels for Hopper. No CUDA header.
#pragma once
#include <string_view>

namespace ftbert {

// Warpgroup instructions exist on capability 9.0 alone, and only in code compiled for sm_90a.
inline bool has_warpgroups(int capability) {
  return capability == 90 && std::string_view(FTBERT_CUDA_ARCHS_STRING).find("90a") != std::string_view::npos;
}

}  // namespace ftbert
