// The list of our kernels.
#include "gemm/gpu/own.h"

namespace ftbert {

std::span<const OwnKernel* const> own_kernels() {
  static constexpr const OwnKernel* kKernels[] = {&wgmma_persistent, &wgmma_tile, &wgmma_layernorm,
                                                  &wgmma_prenorm,    &few_rows,   &wgmma_q8_0};
  return kKernels;
}

bool has_kernel(const Gpu& gpu, const Product& product) {
  for (const OwnKernel* own : own_kernels())
    for (size_t i = 0; i < own->variants.size(); ++i)
      if (own->supports(gpu, static_cast<int>(i), product)) return true;
  return false;
}

std::string in_the_way(const Gpu& gpu, const Product& product) {
  const auto without = [&](auto change) {
    Product rest = product;
    change(rest);
    return rest != product && has_kernel(gpu, rest);
  };
  const auto member = [&]() -> std::string {
    if (without([](Product& p) { p.epilogue.norm = NormKind::layer; })) return "this norm";
    if (without([](Product& p) { p.before = Before::nothing; })) return "the norm of its rows";
    if (without([](Product& p) { p.epilogue.heads = {}; })) return "what becomes of its heads";
    if (without([](Product& p) { p.epilogue.after = After::nothing; })) return "what it leaves of the residual sum";
    if (without([](Product& p) { p = p.alone(); })) return "the residual, or one of several norms";
    if (without([](Product& p) { p.epilogue.gate = Gate::none; })) return "its gate";
    if (without([](Product& p) { p.epilogue.activation = Activation::none; })) return "its activation";
    if (without([](Product& p) { p.c = DType::fp16; }) || without([](Product& p) { p.c = DType::bf16; }))
      return "the type of its result";
    return "its types or sizes";
  };
  const auto text = [](auto value) { return std::string(to_string(value)); };
  const Epilogue& e = product.epilogue;
  return "m=" + std::to_string(product.m) + " n=" + std::to_string(product.n) + " k=" + std::to_string(product.k) +
         " batch=" + std::to_string(product.batch) + ", " + text(product.a) + " by " + std::string(product.b->name) +
         " in " + text(product.c) + ", activation " + text(e.activation) + (e.gate != Gate::none ? " and a gate" : "") +
         (has_kernel(gpu, product) ? "" : ": no kernel of ours does " + member() + " beside the rest");
}

OwnChoice find_own(std::string_view kernel, std::string_view variant) {
  for (const OwnKernel* own : own_kernels())
    for (size_t i = 0; own->name == kernel && i < own->variants.size(); ++i)
      if (own->variants[i].name() == variant) return {own, static_cast<int>(i)};
  return {};
}

}  // namespace ftbert
