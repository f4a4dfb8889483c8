// The list of our kernels.
#include "gemm/gpu/own.h"

namespace ftbert {

std::span<const OwnKernel* const> own_kernels() {
  static constexpr const OwnKernel* kKernels[] = {&wgmma_persistent, &wgmma_tile, &wgmma_layernorm,
                                                  &wgmma_prenorm,    &few_rows,   &wgmma_q8_0};
  return kKernels;
}

OwnChoice find_own(std::string_view kernel, std::string_view variant) {
  for (const OwnKernel* own : own_kernels())
    for (size_t i = 0; own->name == kernel && i < own->variants.size(); ++i)
      if (own->variants[i].name() == variant) return {own, static_cast<int>(i)};
  return {};
}

}  // namespace ftbert
