// Running matrix products on CUDA: linear layers with their epilogues, and the strided batches of general attention.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/check.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "gemm/gpu/deferred_norm.h"
#include "gemm/gpu/own.h"
#include "gemm/gpu/turned_product.h"
#include "gemm/hopper/few_rows.h"
#include "gemm/hopper/wgmma_norm.h"
#include "gemm/hopper/wgmma_q8_0.h"
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
  key.align_b =
      std::min(alignment(data.b), product.b_scales == Granularity::row ? alignment(data.b_scale) : uint16_t{256});
  key.align_c = std::min({alignment(data.c), alignment(data.sums), alignment(data.copy), alignment(data.bias),
                          alignment(data.norm.gamma), alignment(data.norm.beta)});
  return key;
}

// Returns the part of the epilogue that is left for add_bias_act or add_bias_gate. For the latter the sums are at
// data.sums, not at data.c.
Epilogue run(Context<Cuda>& context, const Product& product, ProductData data) {
  const PlanKey key = key_of(context, product, data);
  const Plan plan = context.plans->get(key, data.bias);
  FTBERT_CHECK(plan.supported, "there is no algorithm for a product of ", to_string(product.a), " with m=", product.m,
               " n=", product.n, " k=", product.k, " batch=", product.batch);
  if (plan.own) {
    run_own(context, plan.own, product, data);
    return {};
  }
  if (plan.epilogue.after.gate != Gate::none) data.c = data.sums;
  context.plans->run(key, plan, data, context.gemm_workspace, context.stream);
  return plan.epilogue.after;
}

// What of a product no kernel does while it stores the result as wished; `product` becomes one that there is.
template <class T>
Epilogue split_off(const Context<Cuda>& context, Product& product) {
  if (product.a != DType::e4m3 || guess_product(gpu_of(context), product)) return {};
  product.c = kDType<T>;
  return guess_product(gpu_of(context), product) ? Epilogue{} : std::exchange(product.epilogue, {});
}

// The rows of a in the type that this weight multiplies; Error where they are stored in another.
template <class T>
const void* operand_of(const Linear<T>& weights, const Operand& a) {
  return weights.weight.dtype == DType::e4m3 ? a.scaled_e4m3() : static_cast<const void*>(a.template as<T>());
}

// A weight in Q8_0 that no kernel multiplies by as it is.
template <class T>
Operand linear_dequantised(const Context<Cuda>& context, const Linear<T>& weights, const Operand& a, int64_t m,
                           Epilogue epilogue, const Operand& out) {
  const size_t bytes = weight_scratch_bytes(context, weights, m);
  FTBERT_CHECK(context.weight_scratch && context.weight_scratch_bytes >= bytes, "a product of ", m,
               " rows by a matrix in q8_0 needs ", bytes, " bytes of Context::weight_scratch");
  dequantise_q8_0(context, weights.weight, kDType<T>, context.weight_scratch);
  Linear<T> plain = weights;
  plain.weight = {.data = context.weight_scratch, .dtype = kDType<T>, .n = weights.weight.n, .k = weights.weight.k};
  Context<Cuda> behind = context;
  behind.overlap = false;
  return linear(behind, plain, a, m, epilogue, out);
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
  if (product.a != DType::e4m3) return;
  FTBERT_CHECK(data.a_scale && data.b_scale && (product.c != DType::e4m3 || data.c_scale),
               "a product of E4M3 needs the scales of its operands, and of a result in E4M3");
  FTBERT_CHECK(product.b_scales != Granularity::row || reinterpret_cast<uintptr_t>(data.b_scale) % 16 == 0,
               "a product of ftbert's own needs scales aligned to 16 bytes");
}

void run_own(const Context<Cuda>& context, const OwnChoice& own, const Product& product, const ProductData& data) {
  check_own(context, own, product, data);
  own.kernel->run(context, own.variant, product, data);
}

template <class Device, class T>
Operand linear(Context<Device>& context, const Linear<T>& weights, const Operand& a, int64_t m, Epilogue epilogue,
               const Operand& out) {
  check_product_exists(context, weights);
  if (weight_scratch_bytes(context, weights, m) > 0) return linear_dequantised(context, weights, a, m, epilogue, out);
  const bool e4m3 = weights.weight.dtype == DType::e4m3, narrow = e4m3 && out.dtype == DType::e4m3;
  FTBERT_CHECK(out.dtype != DType::e4m3 || (out.per == Granularity::tensor && out.scale),
               "a result in e4m3 needs one scale");
  Operand made = out.dtype == DType::e4m3 && !narrow ? Operand::of(static_cast<T*>(out.data)) : out;
  if (!narrow) made.template as<T>();
  const int64_t n = weights.weight.n, k = weights.weight.k;
  if (m == 0 || n == 0) return made;
  Product product = product_of(weights, m, a, made.dtype, epilogue);
  const bool has_bias = product.epilogue.bias, gated = epilogue.gate != Gate::none;
  const int64_t cols = epilogue.columns(n);
  const Epilogue split = split_off<T>(context, product);
  if (product.c != made.dtype) made = Operand::of(static_cast<T*>(out.data));
  const char* const from = static_cast<const char*>(operand_of(weights, a));
  char* const c = static_cast<char*>(made.data);
  const T* const bias = has_bias ? weights.bias : nullptr;
  int64_t step = std::max<int64_t>(1, kMostElements / std::max(n, k));
  if (step > 1024) step -= step % 1024;
  for (int64_t first = 0; first < m; first += step) {
    char* const stored = c + first * cols * bytes_of(made.dtype);
    T* const to = reinterpret_cast<T*>(stored);
    T* const sums = gated ? static_cast<T*>(out.data) + m * cols : nullptr;
    product.m = std::min(step, m - first);
    const Epilogue after = run(context, product,
                               {.a = from + first * k * bytes_of(product.a),
                                .b = weights.weight.data,
                                .bias = product.epilogue.bias ? bias : nullptr,
                                .c = stored,
                                .sums = sums,
                                .a_scale = a.scale,
                                .b_scale = weights.weight.scale,
                                .c_scale = made.scale,
                                .stream = kDType<T>});
    const Epilogue& left = split == Epilogue{} ? after : split;
    const T* const bias_left = left.bias ? bias : nullptr;
    if (left.gate != Gate::none)
      add_bias_gate<Device, T>(context, Operand::of(sums), bias_left, left.activation, product.m, cols,
                               Operand::of(to));
    else if (left != Epilogue{})
      add_bias_act<Device, T>(context, to, bias_left, left.activation, product.m, n);
  }
  return made;
}

template <class Device, class T>
Operand wished_by(const Linear<T>& next, T* memory) {
  if (next.weight.dtype != DType::e4m3 || !next.input) return Operand::of(memory);
  return {.data = memory, .dtype = DType::e4m3, .scale = next.input->scale, .per = next.input->per};
}

template <>
int64_t gemm_rows(const Context<Cuda>&, int64_t rows) {
  return cuda_gemm_rows(rows);
}

template <class Device, class T>
Operand linear_all(Context<Device>& context, const Linear<T>& weights, const Operand& a, int64_t m, Epilogue epilogue,
                   const Operand& out) {
  return linear(context, weights, a, product_rows(context, weights, m), epilogue, out);
}

template <class Device, class T>
bool linear_norm(Context<Device>& context, const Linear<T>& weights, const Operand& a, int64_t m, const Norm<T>& norm,
                 int64_t rows, ExchangedMoments& moments, const Output<T>& to) {
  const ResidualNorm where = to.sum ? ResidualNorm::next : ResidualNorm::result;
  check_product_exists(context, weights);
  const bool e4m3 = weights.weight.dtype == DType::e4m3, scaled = to.copy.scaled();
  if (!moments.data || !contains_norm(where, norm) || (!e4m3 && (weights.weight.dtype != kDType<T> || scaled)))
    return false;
  Product whole = product_of(weights, m, a, kDType<T>, {.bias = true, .residual_norm = where});
  T* const normed = scaled ? to.normed : to.only_norm();
  void* const copy = scaled ? static_cast<void*>(to.copy.scaled_e4m3()) : to.sum ? normed : nullptr;
  const ProductData data{.a = operand_of(weights, a),
                         .b = weights.weight.data,
                         .bias = weights.bias,
                         .c = to.sum ? to.sum : normed,
                         .a_scale = a.scale,
                         .b_scale = weights.weight.scale,
                         .stream = kDType<T>,
                         .norm = {norm.kind, norm.gamma, norm.beta, norm.eps, norm.offset, norm.rounding},
                         .copy = copy,
                         .copy_scale = scaled ? to.copy.scale : nullptr,
                         .moments = moments};
  const PlanKey key = key_of(context, whole, data);
  const OwnChoice own = context.plans->get(key, nullptr).own;
  if (!own) return false;
  whole.m = rows;
  run_own(context, own, whole, data);
  ++moments.turn;
  return true;
}

// `rotary` reads and stores the heads of queries and keys: 512 x 8192 took 9.1 us (H100).
double rotary_microseconds(int64_t rows, const Heads& heads) {
  const int64_t bytes = 2 * rows * (heads.width() + heads.kv_width()) * static_cast<int64_t>(sizeof(half_t));
  return 2.0 + static_cast<double>(bytes) / 2.6e6;
}

template <class Device, class T>
bool linear_turned(Context<Device>& context, const Linear<T>& weights, const Operand& a, int64_t rows,
                   const Heads& heads, const HeadRules<T>& rules, const CacheRows<T>& cache, const Operand& out) {
  check_product_exists(context, weights);
  Product product = product_of(weights, gemm_rows(context, rows), a, kDType<T>, {.bias = true});
  if (rows == 0 || weights.weight.dtype == DType::q8_0 || product.m > kMostElements / std::max(product.n, product.k))
    return false;  // `linear` cuts it
  const ProductData data{.a = operand_of(weights, a),
                         .b = weights.weight.data,
                         .bias = weights.bias,
                         .c = out.template as<T>(),
                         .a_scale = a.scale,
                         .b_scale = weights.weight.scale,
                         .stream = kDType<T>};
  const PlanKey key = key_of(context, product, data);
  OwnChoice chosen = context.plans->get(key, data.bias).own;
  // For the product alone cuBLASLt is faster, as guessed or measured.
  if (!chosen && !cache && std::min({key.align_a, key.align_b, key.align_c}) >= 16)
    chosen = guess_product(gpu_of(context), product, rotary_microseconds(product.m, heads));
  const OwnChoice own = turning(gpu_of(context), chosen, product, heads, rules);
  if (!own) return false;
  product.m = rows;
  run_turned(context, own, product, data, heads, rules);
  return true;
}

template <class T>
int64_t product_rows(const Context<Cuda>& context, const Linear<T>& linear, int64_t rows) {
  return linear.weight.dtype == DType::q8_0 && rows <= kMostFewRows ? rows : gemm_rows(context, rows);
}

template <class T>
size_t weight_scratch_bytes(const Context<Cuda>& context, const Linear<T>& linear, int64_t rows) {
  const Matrix& w = linear.weight;
  if (w.dtype != DType::q8_0 || rows == 0 || few_rows_supports(gpu_of(context), kDType<T>, rows, w) ||
      wgmma_q8_0_supports(gpu_of(context), kDType<T>, w))
    return 0;
  return static_cast<size_t>(w.n * w.k) * sizeof(half_t);
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
  template int64_t product_rows(const Context<Cuda>&, const Linear<T>&, int64_t);                                   \
  template size_t weight_scratch_bytes(const Context<Cuda>&, const Linear<T>&, int64_t);                            \
  template int wgmma_tile_variant(const Context<Cuda>&, const Linear<T>&, int64_t, Epilogue);                       \
  template void gemm(Context<Cuda>&, const Product&, const T*, const T*, float*);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)
template bool linear_turned(Context<Cuda>&, const Linear<half_t>&, const Operand&, int64_t, const Heads&,
                            const HeadRules<half_t>&, const CacheRows<half_t>&, const Operand&);
template bool linear_turned(Context<Cuda>&, const Linear<bfloat16_t>&, const Operand&, int64_t, const Heads&,
                            const HeadRules<bfloat16_t>&, const CacheRows<bfloat16_t>&, const Operand&);
template void gemm(Context<Cuda>&, const Product&, const half_t*, const half_t*, half_t*);
template void gemm(Context<Cuda>&, const Product&, const bfloat16_t*, const bfloat16_t*, bfloat16_t*);

}  // namespace ftbert
