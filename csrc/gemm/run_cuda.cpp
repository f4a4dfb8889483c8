// Running matrix products on CUDA: linear layers with their epilogues, and the strided batches of general attention.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "gemm/gemm.h"
#include "gemm/own/deferred_norm.h"
#include "gemm/own/own.h"
#include "gemm/own/wgmma.h"
#include "gemm/own/wgmma_layernorm.h"
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

void set_memory(const Context<Cuda>& context, GemmKey& key, const void* a, const void* b, const void* c,
                const void* bias) {
  key.workspace = context.gemm_workspace ? static_cast<int64_t>(context.gemm_workspace_bytes) : 0;
  key.tf32 = key.dtype == DType::fp32 && context.tf32;
  key.align_a = alignment(a);
  key.align_b = alignment(b);
  key.align_c = std::min(alignment(c), alignment(bias));
}

// What `run` has left to be done.
enum class Left { all, bias_and_activation, nothing };

// bias and activation are for what the plan fuses: key.epilogue in cuBLASLt, all of it in a product of our own.
Left run(Context<Cuda>& context, GemmKey key, const void* a, const void* b, const void* bias, Activation activation,
         void* c) {
  FTBERT_CHECK(context.plans, "a matrix product on CUDA needs Context::plans, see cuda_context");
  const bool plain = key.epilogue == CUBLASLT_EPILOGUE_DEFAULT;
  const void* cublas_bias = plain ? nullptr : bias;
  set_memory(context, key, a, b, c, bias);
  GemmPlan plan = context.plans->get(key, cublas_bias);
  if (!plan.supported) return Left::all;
  if (plan.fused >= 0) {
    run_fused_gemm(context, plan.fused, {key.m, key.n, key.k, key.dtype, activation, a, b, bias, c});
    return Left::nothing;
  }
  if (cublas_bias)
    FTBERT_CUBLAS_CHECK(
        cublasLtMatmulDescSetAttribute(&plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)));
  const float one = 1.0f, zero = 0.0f;
  FTBERT_CUBLAS_CHECK(cublasLtMatmul(context.plans->handle, &plan.operation, &one, b, &plan.b, a, &plan.a, &zero, c,
                                     &plan.c, c, &plan.c, &plan.algorithm, context.gemm_workspace,
                                     static_cast<size_t>(key.workspace), static_cast<cudaStream_t>(context.stream)));
  return plain && (bias || activation != Activation::none) ? Left::bias_and_activation : Left::nothing;
}

void check_ran(Left left, const GemmKey& key) {
  FTBERT_CHECK(left != Left::all, "cuBLASLt has no algorithm for a product of ", to_string(key.dtype),
               " with m=", key.m, " n=", key.n, " k=", key.k, " batch=", key.batch);
}

}  // namespace

// cuBLASLt's GELU is the tanh form with an approximate tanh: good for 16-bit outputs of gelu_tanh models, never for erf
// or fp32.
FusedEpilogue fuse_epilogue(bool bias, Activation activation, DType dtype) {
  if (activation == Activation::none) return {bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT, true};
  if (activation == Activation::relu) return {bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU, true};
  if (activation == Activation::gelu_tanh && dtype != DType::fp32)
    return {bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU, true};
  // The bias waits for add_bias_act, which adds it in float.
  return {};
}

template <class Device, class T>
const T* linear(Context<Device>& context, const Linear<T>& weights, const T* a, int64_t m, Epilogue epilogue, T* out) {
  const int64_t n = weights.n, k = weights.k;
  if (m == 0 || n == 0) return out;
  const T* bias = epilogue.bias ? weights.bias : nullptr;
  const FusedEpilogue fused = fuse_epilogue(bias != nullptr, epilogue.activation, kDType<T>);
  int64_t step = std::max<int64_t>(1, kMostElements / std::max(n, k));
  if (step > 1024) step -= step % 1024;
  for (int64_t first = 0; first < m; first += step) {
    const T* in = a + first * k;
    T* to = out + first * n;
    GemmKey key{.m = std::min(step, m - first), .n = n, .k = k, .epilogue = fused.epilogue, .dtype = kDType<T>};
    if (!fused.whole) key.after = epilogue.activation;
    Left left = run(context, key, in, weights.weight, bias, epilogue.activation, to);
    if (left == Left::all) {  // not with this epilogue
      key.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
      key.after = epilogue.activation;
      left = run(context, key, in, weights.weight, bias, epilogue.activation, to);
    }
    check_ran(left, key);
    if (left == Left::bias_and_activation) add_bias_act<Device, T>(context, to, bias, epilogue.activation, key.m, n);
  }
  return out;
}

template <>
int64_t gemm_rows(const Context<Cuda>&, int64_t rows) {
  return cuda_gemm_rows(rows);
}

template <class Device, class T>
const T* linear_in_pieces(Context<Device>& context, const Linear<T>& weights, const T* a, int64_t m, Epilogue epilogue,
                          T* out) {
  return linear(context, weights, a, gemm_rows(context, m), epilogue, out);
}

template <class Device, class T>
void linear_layernorm(Context<Device>& context, const Linear<T>& weights, const T* a, int64_t m,
                      const ResidualNorm<T>& norm, int64_t rows, T* product, T* x) {
  const int64_t n = weights.n, k = weights.k;
  if (rows == 0 || n == 0) return;
  if constexpr (!std::is_same_v<T, float>) {
    if (norm.moments && context.plans) {
      GemmKey key{.m = m, .n = n, .k = k, .dtype = kDType<T>, .layernorm = true};
      set_memory(context, key, a, weights.weight, x, weights.bias);
      key.align_c = std::min({key.align_c, alignment(norm.gamma), alignment(norm.beta)});
      const GemmPlan plan = context.plans->get(key, nullptr);
      if (plan.norm >= 0) {
        run_norm_gemm(context, plan.norm,
                      {rows, n, k, kDType<T>, norm.eps, a, weights.weight, weights.bias, norm.gamma, norm.beta, x,
                       norm.moments->data, norm.moments->count, norm.moments->turn++});
        return;
      }
    }
  }
  const T* made = linear(context, weights, a, m, {}, product);
  add_bias_input_layernorm<Device, T>(context, made, weights.bias, x, norm.gamma, norm.beta, norm.eps, rows, n, nullptr,
                                      x);
}

template <class T>
int few_variant(const Context<Cuda>& context, const Linear<T>& weights, int64_t m, Epilogue epilogue) {
  FTBERT_CHECK(context.plans, "a matrix product on CUDA needs Context::plans, see cuda_context");
  const FusedEpilogue fused = fuse_epilogue(epilogue.bias, epilogue.activation, kDType<T>);
  GemmKey key{.m = m, .n = weights.n, .k = weights.k, .epilogue = fused.epilogue, .dtype = kDType<T>};
  if (!fused.whole) key.after = epilogue.activation;
  set_memory(context, key, nullptr, weights.weight, nullptr, nullptr);
  const bool cublas_bias = key.epilogue != CUBLASLT_EPILOGUE_DEFAULT;
  return few_place(context.plans->get(key, cublas_bias ? weights.bias : nullptr).fused);
}

template <class Device, class T, class C>
void gemm(Context<Device>& context, const GemmShape& shape, const T* a, const T* b, C* c) {
  const auto [m, n, k, batch, b_transposed] = shape;
  if (m == 0 || n == 0 || batch == 0) return;
  const int64_t largest = std::max({m * n, m * k, n * k, int64_t{1}});
  const int64_t step = std::clamp<int64_t>(kMostElements / largest, 1, kMostBatch);
  for (int64_t first = 0; first < batch; first += step) {
    const GemmKey key{.m = m,
                      .n = n,
                      .k = k,
                      .batch = std::min(step, batch - first),
                      .dtype = kDType<T>,
                      .float_out = std::is_same_v<C, float>,
                      .b_transposed = b_transposed};
    check_ran(run(context, key, a + first * m * k, b + first * n * k, nullptr, Activation::none, c + first * m * n),
              key);
  }
}

#define FTBERT_INSTANTIATE(T)                                                                                          \
  template const T* linear(Context<Cuda>&, const Linear<T>&, const T*, int64_t, Epilogue, T*);                         \
  template const T* linear_in_pieces(Context<Cuda>&, const Linear<T>&, const T*, int64_t, Epilogue, T*);               \
  template void linear_layernorm(Context<Cuda>&, const Linear<T>&, const T*, int64_t, const ResidualNorm<T>&, int64_t, \
                                 T*, T*);
FTBERT_INSTANTIATE(float)
FTBERT_INSTANTIATE(half_t)
FTBERT_INSTANTIATE(bfloat16_t)
#undef FTBERT_INSTANTIATE
template int few_variant(const Context<Cuda>&, const Linear<half_t>&, int64_t, Epilogue);
template int few_variant(const Context<Cuda>&, const Linear<bfloat16_t>&, int64_t, Epilogue);
template void gemm(Context<Cuda>&, const GemmShape&, const float*, const float*, float*);
template void gemm(Context<Cuda>&, const GemmShape&, const half_t*, const half_t*, half_t*);
template void gemm(Context<Cuda>&, const GemmShape&, const half_t*, const half_t*, float*);
template void gemm(Context<Cuda>&, const GemmShape&, const bfloat16_t*, const bfloat16_t*, bfloat16_t*);
template void gemm(Context<Cuda>&, const GemmShape&, const bfloat16_t*, const bfloat16_t*, float*);

}  // namespace ftbert
