// Running matrix products on CUDA: `linear`, and the strided batches of general attention.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"
#include "gemm/gpu/own.h"
#include "gemm/gpu/turned_product.h"
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
  key.align_b = std::min(alignment(data.b), product.b->block == kWholeRow ? alignment(data.b_scale) : uint16_t{256});
  key.align_c = std::min({alignment(data.c), alignment(data.sums), alignment(data.copy), alignment(data.bias),
                          alignment(data.norm.gamma), alignment(data.norm.beta)});
  return key;
}

// Returns the part of the epilogue that is left for add_bias_act or add_bias_gate. For the latter the sums are at
// data.sums, not at data.c.
Epilogue run(Context<Cuda>& context, const Product& product, ProductData data) {
  const PlanKey key = key_of(context, product, data);
  const Plan plan = context.plans->get(key, data.bias);
  FTBERT_CHECK(plan.supported, "there is no algorithm for a product of ", in_the_way(context, product));
  if (plan.own) {
    run_own(context, plan.own, product, data);
    return {};
  }
  if (plan.epilogue.after.gate != Gate::none) data.c = data.sums;
  context.plans->run(key, plan, data, context.gemm_workspace, context.stream);
  return plan.epilogue.after;
}

// Returns the epilogue that must run as a separate kernel, and reduces `product` to one that a kernel supports.
template <class T>
Epilogue split_off(Context<Cuda>& context, Product& product, const ProductData& data) {
  const auto supported = [&] { return context.plans->get(key_of(context, product, data), data.bias).supported; };
  if (product.a != DType::e4m3 || supported()) return {};
  product.c = kDType<T>;
  return supported() ? Epilogue{} : std::exchange(product.epilogue, {});
}

// Error where the rows of a are stored in another type than this weight multiplies.
template <class T>
ProductData data_of(const Product& product, const Linear<T>& weights, const Operand& a, void* c) {
  const DType stored = weights.weight.format->numbers;
  const bool bytes = weights.weight.format == &formats::int8;
  return {.a = bytes                   ? static_cast<const void*>(a.byte_rows())
               : stored == DType::e4m3 ? static_cast<const void*>(a.scaled_e4m3())
                                       : a.template as<T>(),
          .b = weights.weight.data,
          .bias = product.epilogue.bias ? weights.bias : nullptr,
          .c = c,
          .a_scale = bytes ? nullptr : a.scale,
          .b_scale = weights.weight.template scales<float>(),
          .stream = kDType<T>};
}

// A product and its ending as one kernel is asked for it.
template <class T>
struct Sentence {
  Product product;  // its m is that of the plan
  ProductData data;
  int64_t rows;  // that are computed
  Made<T> made = {};
  bool in_step = false, cached = false;  // as in PlanKey
  const T* to_quantise = nullptr;        // c, from which a kernel makes what the next product reads
};

template <class T>
PendingNorm pending_on(const Edge<T>& edge) {
  return edge.moments ? PendingNorm{edge.gamma, edge.unscale, edge.moments, edge.pending.eps} : PendingNorm{};
}

// With the residual sum, and the norm of it or what the next product needs of it.
template <class T>
std::optional<Sentence<T>> with_residual(const Linear<T>& weights, const Operand& a, int64_t m, const Ending<T>& wish,
                                         const Operand& out) {
  const auto& [stream, rows, norm, to, read, exchanged] = *wish.residual;
  const Deferral& deferral = wish.deferral;
  const bool scaled = to.copy.scaled();
  T* const x = to.sum ? to.sum : to.normed;
  Epilogue epilogue{.bias = true, .residual = true, .norm = norm.kind};
  if (deferral.by == NormedBy::kernels) {
    const Format* const stored = weights.weight.format;
    if (!exchanged || !exchanged->data || !norm.gamma ||
        (stored->numbers != DType::e4m3 && (stored != kFormat<T> || scaled)))
      return {};
    epilogue.after = to.sum ? After::norm_beside : After::norm;
    const Product product = product_of(weights, m, a, kDType<T>, epilogue);
    T* const normed = scaled ? to.normed : to.only_norm();
    Sentence<T> made{product, data_of(product, weights, a, to.sum ? to.sum : normed), rows};
    made.data.norm = norm_over<void>(norm);
    made.data.copy = scaled ? static_cast<void*>(to.copy.scaled_e4m3()) : to.sum ? normed : nullptr;
    made.data.copy_scale = scaled ? to.copy.scale : nullptr;
    made.data.moments = *exchanged;
    made.made.added = true;
    return made;
  }
  if (deferral.by == NormedBy::moments) {
    epilogue.after = to.sum ? After::moments_beside : After::moments;
    T* const c = to.sum ? to.copy.template as<T>() : out.template as<T>();
    const SumVectors& vectors = read ? weights.ahead_of_norm : weights.unread;
    const Product product = product_of(weights, m, a, kDType<T>, epilogue);
    Sentence<T> made{product, data_of(product, weights, a, c), m};
    if (scaled && product.a != DType::e4m3)
      made.to_quantise = c;
    else if (scaled)
      made.data.copy = to.copy.scaled_e4m3(), made.data.copy_scale = to.copy.scale;
    made.data.by_moments = {.add = vectors.add,
                            .scale = vectors.scale,
                            .gamma = vectors.gamma,
                            .pending = pending_on(stream),
                            .residual = stream.rows.data,
                            .moments = deferral.moments};
    made.made.added = true;
    made.made.rows =
        read ? Edge<T>{scaled ? to.copy : Operand::of(c), norm, deferral.moments, vectors.gamma, vectors.unscale}
             : Edge<T>{Operand::of(to.sum ? x : c), norm};
    return made;
  }
  const Product product = product_of(weights, m, a, kDType<T>, epilogue);
  Sentence<T> made{product, data_of(product, weights, a, x), m};
  made.data.tile_count = deferral.tile_count;
  made.made = {.rows = {Operand::of(x), norm}, .added = true};
  return made;
}

// With the norm that is pending on a, or with heads.
template <class T>
std::optional<Sentence<T>> with_norm_or_heads(const Linear<T>& weights, const Edge<T>& a, int64_t m, int64_t rows,
                                              const Ending<T>& wish, const Operand& out) {
  const NormedBy by = wish.deferral.by;
  const Epilogue epilogue{.bias = wish.bias, .activation = wish.activation, .gate = wish.gate};
  if (by == NormedBy::kernels && (!wish.heads || weights.weight.format->block > 0 ||
                                  m > kMostElements / std::max(weights.weight.n, weights.weight.k)))
    return {};
  const bool narrow = out.scaled() && weights.weight.format->numbers == DType::e4m3;
  const Operand to = out.scaled() && !narrow ? Operand::of(static_cast<T*>(out.data)) : out;
  const Product product = product_of(weights, m, a.rows, to.dtype(), epilogue);
  void* const c = narrow ? static_cast<void*>(to.scaled_e4m3()) : to.template as<T>();
  Sentence<T> made{product, data_of(product, weights, a.rows, c), m, {{to}}};
  if (by == NormedBy::moments) {
    made.product.before = Before::norm_by_moments;
    made.data.c_scale = to.scale;
    made.data.by_moments = {.add = weights.behind_norm.add,
                            .slope = weights.behind_norm.slope,
                            .scale = weights.behind_norm.scale,
                            .pending = pending_on(a),
                            .moments = wish.deferral.moments};
  } else if (by == NormedBy::reader) {
    if (a.pending) made.product.before = Before::norm_rows;
    made.data.norm = norm_over<void>(a.pending);
    made.data.tile_count = wish.deferral.tile_count;
    made.in_step = true;
  } else {
    made.product.epilogue.heads = head_columns(wish.heads->heads, wish.heads->rules);
    if (!made.product.epilogue.heads) return {};
    made.data.heads = wish.heads->heads, made.data.rules = rules_over<void>(wish.heads->rules);
    made.rows = rows, made.cached = wish.heads->cached, made.made.heads = true;
  }
  return made;
}

// Runs a sentence where one kernel of ours does all of it.
template <class T>
bool run_whole(const Context<Cuda>& context, Sentence<T>& all) {
  PlanKey key = key_of(context, all.product, all.data);
  key.in_step = all.in_step, key.cached = all.cached;
  const OwnChoice own = context.plans->own(key, all.data.bias);
  if (!own) return false;
  all.product.m = all.rows;
  run_own(context, own, all.product, all.data);
  return true;
}

// The product alone, in parts where it is too large for one, and behind it what of the epilogue it did not do.
template <class T>
Operand linear_alone(Context<Cuda>& context, const Linear<T>& weights, const Operand& a, int64_t m, Epilogue epilogue,
                     const Operand& out) {
  const bool e4m3 = weights.weight.format->numbers == DType::e4m3, narrow = e4m3 && out.dtype() == DType::e4m3;
  FTBERT_CHECK(out.dtype() != DType::e4m3 || (out.format == &formats::e4m3_tensor && out.scale),
               "a result in e4m3 needs one scale");
  Operand made = out.scaled() && !narrow ? Operand::of(static_cast<T*>(out.data)) : out;
  if (!narrow) made.template as<T>();
  const int64_t n = weights.weight.n, k = weights.weight.k;
  if (m == 0 || n == 0) return made;
  int64_t step = std::max<int64_t>(1, kMostElements / std::max(n, k));
  if (step > 1024) step -= step % 1024;
  const int64_t cols = epilogue.columns(n);
  Product product = product_of(weights, std::min(step, m), a, made.dtype(), epilogue);
  ProductData data = data_of(product, weights, a, made.data);
  if (epilogue.gate != Gate::none) data.sums = static_cast<T*>(out.data) + m * cols;
  data.c_scale = made.scale;
  const T* const bias = static_cast<const T*>(data.bias);
  const Epilogue split = split_off<T>(context, product, data);
  if (product.c != made.dtype()) made = Operand::of(static_cast<T*>(out.data)), data.c_scale = nullptr;
  if (!product.epilogue.bias) data.bias = nullptr;
  const char* const from = static_cast<const char*>(data.a);
  for (int64_t first = 0; first < m; first += step) {
    product.m = std::min(step, m - first);
    data.a = from + a.format->bytes(first, k);
    T* const to = reinterpret_cast<T*>(static_cast<char*>(made.data) + first * cols * bytes_of(made.dtype()));
    data.c = split.gate == Gate::none ? to : data.sums;
    const Epilogue after = run(context, product, data);
    const Epilogue& left = split == Epilogue{} ? after : split;
    const T* const bias_left = left.bias ? bias : nullptr;
    if (left.gate != Gate::none)
      add_bias_gate<Cuda, T>(context, Operand::of(static_cast<const T*>(data.sums)), bias_left, left.activation,
                             product.m, cols, Operand::of(to));
    else if (left != Epilogue{})
      add_bias_act<Cuda, T>(context, to, bias_left, left.activation, product.m, n);
  }
  return made;
}

// The same by a weight in Q8_0 that no kernel multiplies by as it is.
template <class T>
Operand linear_dequantised(const Context<Cuda>& context, const Linear<T>& weights, const Operand& a, int64_t m,
                           Epilogue epilogue, const Operand& out) {
  const size_t bytes = weight_scratch_bytes(context, weights, m);
  FTBERT_CHECK(context.weight_scratch && context.weight_scratch_bytes >= bytes, "a product of ", m,
               " rows by a matrix in q8_0 needs ", bytes, " bytes of Context::weight_scratch");
  dequantise_q8_0(context, weights.weight, kDType<T>, context.weight_scratch);
  Linear<T> plain = weights;
  plain.weight = {.data = context.weight_scratch, .format = kFormat<T>, .n = weights.weight.n, .k = weights.weight.k};
  Context<Cuda> behind = context;
  behind.overlap = false;
  return linear_alone(behind, plain, a, m, epilogue, out);
}

}  // namespace

void run_own(const Context<Cuda>& context, const OwnChoice& own, const Product& product, const ProductData& data) {
  FTBERT_CHECK(own.kernel->can(context, own.variant, product), "the product ", own.kernel->name, " ",
               own.variant_name(), " cannot do ", in_the_way(context, product));
  for (const void* p : {data.a, data.b, data.bias, data.norm.gamma, data.norm.beta, static_cast<const void*>(data.c),
                        static_cast<const void*>(data.copy)})
    FTBERT_CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0,
                 "a product of ftbert's own needs operands aligned to 16 bytes");
  FTBERT_CHECK(!product.epilogue.heads || product.n == data.heads.qkv_width(), "the product ", own.kernel->name, " ",
               own.variant_name(), " cannot turn heads of ", data.heads.size, " in n=", product.n);
  FTBERT_CHECK(!data.rules.rotation || data.rules.positions, "rotary: there is a table, but no positions given");
  FTBERT_CHECK(product.a != DType::e4m3 || (data.a_scale && data.b_scale && (product.c != DType::e4m3 || data.c_scale)),
               "a product of E4M3 needs the scales of its operands, and of a result in E4M3");
  FTBERT_CHECK(product.b->block != kWholeRow || (data.b_scale && reinterpret_cast<uintptr_t>(data.b_scale) % 16 == 0),
               "a product of ftbert's own needs scales aligned to 16 bytes");
  own.kernel->run(context, own.variant, product, data);
}

template <class Device, class T>
Made<T> linear(Context<Device>& context, const Linear<T>& weights, const Edge<T>& a, int64_t m, const Ending<T>& wish,
               const Operand& out) {
  check_product_exists(context, weights);
  const int64_t rows = m;
  if (wish.in_one_piece && wish.deferral.by != NormedBy::reader) m = product_rows(context, weights, rows);
  if constexpr (kNormInsideProducts<Device, T>) {
    std::optional<Sentence<T>> whole;
    if (rows > 0 && weights.weight.n > 0)
      whole = wish.residual ? with_residual(weights, a.rows, m, wish, out)
                            : with_norm_or_heads(weights, a, m, rows, wish, out);
    if (whole && run_whole(context, *whole)) {
      if (whole->product.epilogue.normed()) ++wish.residual->exchanged->turn;
      if (whole->to_quantise)
        quantise<Device, T>(context, whole->to_quantise, m, weights.weight.n, whole->made.rows.rows);
      return whole->made;
    }
    FTBERT_CHECK(!whole || wish.deferral.by == NormedBy::kernels, "a norm was left to a product of ",
                 in_the_way(context, whole->product));
  }
  const Epilogue epilogue{.bias = wish.bias && !wish.residual, .activation = wish.activation, .gate = wish.gate};
  if (weight_scratch_bytes(context, weights, m) > 0)
    return {.rows = {linear_dequantised(context, weights, a.rows, m, epilogue, out)}};
  return {.rows = {linear_alone(context, weights, a.rows, m, epilogue, out)}};
}

template <>
int64_t gemm_rows(const Context<Cuda>&, int64_t rows) {
  return cuda_gemm_rows(rows);
}

template <class T>
int64_t product_rows(const Context<Cuda>& context, const Linear<T>& linear, int64_t rows) {
  return linear.weight.format->block > 0 && rows <= kMostFewRows ? rows : gemm_rows(context, rows);
}

template <class T>
size_t weight_scratch_bytes(const Context<Cuda>& context, const Linear<T>& linear, int64_t rows) {
  const Matrix& w = linear.weight;
  if (w.format->block <= 0 || rows == 0 || has_kernel(context, product_of(linear, rows, {}))) return 0;
  return static_cast<size_t>(w.n * w.k) * sizeof(half_t);
}

template <class T>
bool is_one_kernel(const Context<Cuda>& context, const Linear<T>& linear, const Product& product) {
  return static_cast<bool>(context.plans->own(key_of(context, product, {.b = linear.weight.data}), linear.bias));
}

template <class Device, class T, class C>
void gemm(Context<Device>& context, const Product& product, const T* a, const T* b, C* c) {
  FTBERT_CHECK(product.a == kDType<T> && product.b == kFormat<T> && product.c == kDType<C>,
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

#define FTBERT_INSTANTIATE(T)                                                                          \
  template Made<T> linear(Context<Cuda>&, const Linear<T>&, const Edge<T>&, int64_t, const Ending<T>&, \
                          const Operand&);                                                             \
  template int64_t product_rows(const Context<Cuda>&, const Linear<T>&, int64_t);                      \
  template size_t weight_scratch_bytes(const Context<Cuda>&, const Linear<T>&, int64_t);               \
  template bool is_one_kernel(const Context<Cuda>&, const Linear<T>&, const Product&);                 \
  template void gemm(Context<Cuda>&, const Product&, const T*, const T*, float*);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)
template void gemm(Context<Cuda>&, const Product&, const half_t*, const half_t*, half_t*);
template void gemm(Context<Cuda>&, const Product&, const bfloat16_t*, const bfloat16_t*, bfloat16_t*);

}  // namespace ftbert
