// Running matrix products on CUDA: linear layers with their epilogues, and the strided batches of general attention.
#include <algorithm>
#include <cstdint>

#include "core/check.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "gemm/own/deferred_norm.h"
#include "gemm/own/own.h"
#include "gemm/own/turned_product.h"
#include "gemm/own/wgmma_norm.h"
#include "gemm/plans.h"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// One call's matrices stay below 2^31 elements, and its batch below the 65535 of a grid's z: larger products are cut,
// since what every cuBLASLt algorithm does beyond is not documented.
constexpr int64_t kMostElements = INT32_MAX;
constexpr int64_t kMostBatch = 32768;

// 256, 16, or less: finer steps between would only split the plans. nullptr is aligned.
uint16_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % 256 == 0) return 256;
  if (address % 16 == 0) return 16;
  return static_cast<uint16_t>(address & -address);
}

PlanKey key_of(const Context<Cuda>& context, const Product& product, const ProductData& data) {
  FTBERT_CHECK(context.plans, "a matrix product on CUDA needs Context::plans, see cuda_context");
  PlanKey key{.product = product};
  key.workspace = context.gemm_workspace ? static_cast<int64_t>(context.gemm_workspace_bytes) : 0;
  key.tf32 = product.a == DType::fp32 && context.tf32;
  key.align_a = alignment(data.a);
  key.align_b = alignment(data.b);
  key.align_c = std::min({alignment(data.c), alignment(data.sums), alignment(data.copy), alignment(data.bias),
                          alignment(data.norm.gamma), alignment(data.norm.beta)});
  return key;
}

// Returns the part of the epilogue that is left for add_bias_act or add_bias_gate. For the latter the sums are at
// data.sums, not at data.c.
Epilogue run(Context<Cuda>& context, const Product& product, ProductData data) {
  const PlanKey key = key_of(context, product, data);
  const Plan plan = context.plans->get(key, data.bias);
  FTBERT_CHECK(plan.supported, "cuBLASLt has no algorithm for a product of ", to_string(product.a),
               " with m=", product.m, " n=", product.n, " k=", product.k, " batch=", product.batch);
  if (plan.own) {
    run_own(context, plan.own, product, data);
    return {};
  }
  if (plan.epilogue.after.gate != Gate::none) data.c = data.sums;
  context.plans->run(key, plan, data, context.gemm_workspace, context.stream);
  return plan.epilogue.after;
}

}  // namespace

void check_own(const Context<Cuda>& context, const OwnChoice& own, const Product& product, const ProductData& data) {
  const Epilogue& e = product.epilogue;
  FTBERT_CHECK(own.kernel->supports(gpu_of(context), own.variant, product), "the product ", own.kernel->name, " ",
               own.variant_name(), " cannot do m=", product.m, " n=", product.n, " k=", product.k, " and ",
               e.residual_norm ? "a norm" : to_string(e.activation), e.gate != Gate::none ? " with a gate" : "");
  for (const void* p : {data.a, data.b, data.bias, data.norm.gamma, data.norm.beta, static_cast<const void*>(data.c),
                        static_cast<const void*>(data.copy)})
    FTBERT_CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0,
                 "a product of ftbert's own needs operands aligned to 16 bytes");
}

void run_own(const Context<Cuda>& context, const OwnChoice& own, const Product& product, const ProductData& data) {
  check_own(context, own, product, data);
  own.kernel->run(context, own.variant, product, data);
}

template <class Device, class T>
Operand linear(Context<Device>& context, const Linear<T>& weights, const Operand& a, int64_t m, Epilogue epilogue,
               const Operand& out) {
  check_product_exists(DeviceKind::cuda, kDType<T>, weights.weight, weights.input);
  Product product = product_of(weights, m, a, kDType<T>, epilogue);
  T* const c = out.template as<T>();
  const int64_t n = product.n, k = product.k, cols = product.epilogue.columns(n);
  const bool gated = product.epilogue.gate != Gate::none;
  if (m == 0 || n == 0) return out;
  const T* const from = a.template as<T>();
  const T* const bias = product.epilogue.bias ? weights.bias : nullptr;
  int64_t step = std::max<int64_t>(1, kMostElements / std::max(n, k));
  if (step > 1024) step -= step % 1024;
  for (int64_t first = 0; first < m; first += step) {
    T* const to = c + first * cols;
    T* const sums = gated ? c + m * cols : nullptr;
    product.m = std::min(step, m - first);
    const Epilogue left =
        run(context, product, {.a = from + first * k, .b = weights.weight.data, .bias = bias, .c = to, .sums = sums});
    const T* const bias_left = left.bias ? bias : nullptr;
    if (left.gate != Gate::none)
      add_bias_gate<Device, T>(context, Operand::of(sums), bias_left, left.activation, product.m, cols,
                               Operand::of(to));
    else if (left != Epilogue{})
      add_bias_act<Device, T>(context, to, bias_left, left.activation, product.m, n);
  }
  return out;
}

template <class Device, class T>
Operand wished_by(const Linear<T>&, T* memory) {
  return Operand::of(memory);
}

template <>
int64_t gemm_rows(const Context<Cuda>&, int64_t rows) {
  return cuda_gemm_rows(rows);
}

template <class Device, class T>
Operand linear_all(Context<Device>& context, const Linear<T>& weights, const Operand& a, int64_t m, Epilogue epilogue,
                   const Operand& out) {
  return linear(context, weights, a, gemm_rows(context, m), epilogue, out);
}

template <class Device, class T>
bool linear_norm(Context<Device>& context, const Linear<T>& weights, const Operand& a, int64_t m, const Norm<T>& norm,
                 int64_t rows, ExchangedMoments& moments, const Output<T>& to) {
  const ResidualNorm where = to.sum ? ResidualNorm::next : ResidualNorm::result;
  if (!moments.data || !contains_norm(where, norm)) return false;
  check_product_exists(DeviceKind::cuda, kDType<T>, weights.weight, weights.input);
  Product whole = product_of(weights, m, {.bias = true, .residual_norm = where});
  T* const normed = to.only_norm();
  const ProductData data{.a = a.template as<T>(),
                         .b = weights.weight.data,
                         .bias = weights.bias,
                         .c = to.sum ? to.sum : normed,
                         .norm = {norm.kind, norm.gamma, norm.beta, norm.eps, norm.offset, norm.rounding},
                         .copy = to.sum ? normed : nullptr,
                         .moments = moments};
  const PlanKey key = key_of(context, whole, data);
  const OwnChoice own = context.plans->get(key, nullptr).own;
  if (!own) return false;
  whole.m = rows;
  run_own(context, own, whole, data);
  ++moments.turn;
  return true;
}

template <class Device, class T>
bool linear_turned(Context<Device>& context, const Linear<T>& weights, const Operand& a, int64_t rows,
                   const Heads& heads, const HeadRules<T>& rules, const Operand& out) {
  check_product_exists(DeviceKind::cuda, kDType<T>, weights.weight, weights.input);
  Product product = product_of(weights, gemm_rows(context, rows), a, kDType<T>, {.bias = true});
  if (rows == 0 || product.m > kMostElements / std::max(product.n, product.k)) return false;  // `linear` cuts it
  const ProductData data{
      .a = a.template as<T>(), .b = weights.weight.data, .bias = weights.bias, .c = out.template as<T>()};
  const OwnChoice chosen = context.plans->get(key_of(context, product, data), data.bias).own;
  const OwnChoice own = turning(gpu_of(context), chosen, product, heads, rules);
  if (!own) return false;
  product.m = rows;
  run_turned(context, own, product, data, heads, rules);
  return true;
}

template <class T>
int wgmma_tile_variant(const Context<Cuda>& context, const Linear<T>& weights, int64_t m, Epilogue epilogue) {
  const PlanKey key = key_of(context, product_of(weights, m, epilogue), {.b = weights.weight.data});
  const OwnChoice own = context.plans->get(key, weights.bias).own;
  return own.kernel == &wgmma_tile ? own.variant : -1;
}

template <class Device, class T, class C>
void gemm(Context<Device>& context, const Product& product, const T* a, const T* b, C* c) {
  FTBERT_CHECK(product.a == kDType<T> && product.b == kDType<T> && product.c == kDType<C>,
               "a batch of products is described by other types than those of its matrices");
  const int64_t m = product.m, n = product.n, k = product.k;
  if (m == 0 || n == 0 || product.batch == 0) return;
  const int64_t largest = std::max({m * n, m * k, n * k, int64_t{1}});
  const int64_t step = std::clamp<int64_t>(kMostElements / largest, 1, kMostBatch);
  for (int64_t first = 0; first < product.batch; first += step) {
    Product some = product;
    some.batch = std::min(step, product.batch - first);
    run(context, some, {.a = a + first * m * k, .b = b + first * n * k, .c = c + first * m * n});
  }
}

#define FTBERT_INSTANTIATE(T)                                                                                       \
  template Operand linear(Context<Cuda>&, const Linear<T>&, const Operand&, int64_t, Epilogue, const Operand&);     \
  template Operand wished_by<Cuda, T>(const Linear<T>&, T*);                                                        \
  template Operand linear_all(Context<Cuda>&, const Linear<T>&, const Operand&, int64_t, Epilogue, const Operand&); \
  template bool linear_norm(Context<Cuda>&, const Linear<T>&, const Operand&, int64_t, const Norm<T>&, int64_t,     \
                            ExchangedMoments&, const Output<T>&);                                                   \
  template int wgmma_tile_variant(const Context<Cuda>&, const Linear<T>&, int64_t, Epilogue);                       \
  template void gemm(Context<Cuda>&, const Product&, const T*, const T*, float*);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)
template bool linear_turned(Context<Cuda>&, const Linear<half_t>&, const Operand&, int64_t, const Heads&,
                            const HeadRules<half_t>&, const Operand&);
template bool linear_turned(Context<Cuda>&, const Linear<bfloat16_t>&, const Operand&, int64_t, const Heads&,
                            const HeadRules<bfloat16_t>&, const Operand&);
template void gemm(Context<Cuda>&, const Product&, const half_t*, const half_t*, half_t*);
template void gemm(Context<Cuda>&, const Product&, const bfloat16_t*, const bfloat16_t*, bfloat16_t*);

}  // namespace ftbert
