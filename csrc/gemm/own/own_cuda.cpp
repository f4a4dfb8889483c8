// The list of our kernels, and what is checked before one of them runs.
#include <cstdint>

#include "core/check.h"
#include "gemm/own/own.h"

namespace ftbert {

std::span<const OwnKernel* const> own_kernels() {
  static constexpr const OwnKernel* kKernels[] = {&mma_split_k, &wgmma_persistent, &wgmma_tile, &wgmma_layernorm};
  return kKernels;
}

OwnChoice find_own(std::string_view kernel, std::string_view variant) {
  for (const OwnKernel* own : own_kernels())
    for (size_t i = 0; own->name == kernel && i < own->variants.size(); ++i)
      if (own->variants[i].name() == variant) return {own, static_cast<int>(i)};
  return {};
}

void run_own(const Context<Cuda>& context, const OwnChoice& own, const Product& product, const ProductData& data) {
  const Epilogue& e = product.epilogue;
  FTBERT_CHECK(own.kernel->supports(gpu_of(context), own.variant, product), "the product ", own.kernel->name, " ",
               own.variant_name(), " cannot do m=", product.m, " n=", product.n, " k=", product.k, " and ",
               e.residual_norm ? "LayerNorm" : to_string(e.activation));
  for (const void* p : {data.a, data.b, data.bias, data.gamma, data.beta, static_cast<const void*>(data.c)})
    FTBERT_CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0,
                 "a product of ftbert's own needs operands aligned to 16 bytes");
  own.kernel->run(context, own.variant, product, data);
}

}  // namespace ftbert
