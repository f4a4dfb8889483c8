// The list of the CPU's kernels for products by a weight, and the call of one.
#include "kernels/kernels.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "gemm/cpu/kernel.h"

namespace ftbert {
namespace {

std::vector<const CpuKernel*>& registry() {
  static std::vector<const CpuKernel*> kernels = {&float_panels, &int8_panels, &q8_0_panels};
  return kernels;
}

// The first for products by a matrix of this format and of the smallest size that is read.
template <class Fits>
const CpuKernel* find(const Format& weight, const Fits& fits) {
  const Format* const other = weight.other;
  const Product product{.m = 1,
                        .n = weight.rows_of,
                        .k = std::max<int64_t>(weight.columns_of, weight.least_columns),
                        .a = other ? other->numbers : DType::fp32,
                        .b = &weight};
  for (const CpuKernel* kernel : cpu_kernels())
    if (kernel->can(product) && fits(*kernel)) return kernel;
  return nullptr;
}

// Returns the epilogue that must run behind the kernel, and reduces `product` to one that the kernel supports: first
// its result becomes float, then it loses activation and gate, then the bias.
Epilogue split_off(const CpuKernel& kernel, Product& product) {
  const Epilogue whole = product.epilogue;
  if (kernel.can(product)) return {};
  product.c = DType::fp32;
  if (kernel.can(product)) return {};
  product.epilogue = {.bias = whole.bias};
  if (kernel.can(product)) return {.activation = whole.activation, .gate = whole.gate};
  product.epilogue = {};
  FTBERT_CHECK(kernel.can(product), kernel.name, ": no product of ", to_string(product.a), " by ", product.b->name,
               " [", product.n, ", ", product.k, "]");
  return whole;
}

}  // namespace

std::span<const CpuKernel* const> cpu_kernels() { return registry(); }

LibraryKernel::LibraryKernel(const CpuKernel& kernel) { registry().insert(registry().begin(), &kernel); }

const CpuKernel* kernel_for(const Format& weight) {
  return find(weight, [](const CpuKernel& k) { return !k.lacks || !k.lacks(); });
}

const char* lacking_for(const Format& weight) {
  if (kernel_for(weight)) return nullptr;
  const CpuKernel* const kernel = find(weight, [](const CpuKernel&) { return true; });
  return kernel ? kernel->lacks() : nullptr;
}

Operand run_kernel(Context<Cpu>& context, const Linear<float>& linear, const Operand& a, int64_t m, Epilogue epilogue,
                   const Operand& out, bool in_one_piece) {
  const Matrix& w = linear.weight;
  Product product = product_of(linear, m, a, out.dtype(), epilogue);
  const Epilogue left = split_off(*w.kernel, product);
  const int64_t cols = epilogue.columns(w.n);
  auto* const c = static_cast<float*>(out.data);
  float* const sums = c + m * cols;
  const Operand made = w.kernel->run(context, product,
                                     {.a = a,
                                      .b = w.data,
                                      .b_scale = w.scales<float>(),
                                      .bias = product.epilogue.bias ? linear.bias : nullptr,
                                      .c = left.gate == Gate::none ? c : sums,
                                      .sums = sums,
                                      .in_one_piece = in_one_piece});
  const float* const bias = left.bias ? linear.bias : nullptr;
  if (left.gate != Gate::none) {
    add_bias_gate<Cpu, float>(context, made, bias, left.activation, m, cols, Operand::of(c));
    return Operand::of(c);
  }
  if (left != Epilogue{}) add_bias_act<Cpu, float>(context, made.as<float>(), bias, left.activation, m, w.n);
  return made;
}

}  // namespace ftbert
