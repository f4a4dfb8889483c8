// The vectors of deferred_norm.h, made once a model.
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "gemm/gpu/deferred_norm.h"

namespace ftbert {
namespace {

// A warp for each of the weight's rows.
template <class E>
__global__ void correction_vectors_kernel(const E* weight, const E* bias, const float* gamma, const E* beta, int n,
                                          int k, float* add, float* slope) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= n) return;
  float with_gamma = 0, with_beta = 0;
  for (int i = lane; gamma && i < k; i += 32) {
    const float w = to_float(weight[static_cast<int64_t>(row) * k + i]);
    with_gamma += w * gamma[i];
    if (beta) with_beta += w * to_float(beta[i]);
  }
  with_gamma = reduce<32>(with_gamma, Sum());
  with_beta = reduce<32>(with_beta, Sum());
  if (lane == 0) add[row] = (bias ? to_float(bias[row]) : 0.0f) + with_beta, slope[row] = with_gamma;
}

// One warp.
template <class E>
__global__ void sum_vectors_kernel(const E* bias, const E* beta, const E* gamma, int n, float* add, float* scaled,
                                   float* unscale, float offset, bool keep) {
  const int lane = threadIdx.x;
  const auto value = [&](int i) { return (bias ? to_float(bias[i]) : 0.0f) + (beta ? to_float(beta[i]) : 0.0f); };
  float sum = 0, largest = 0;
  const auto gamma_of = [&](int i) { return gamma ? to_float(gamma[i]) + offset : 1.0f; };
  for (int i = lane; i < n; i += 32) {
    sum += value(i);
    largest = fmaxf(largest, fabsf(gamma_of(i)));
  }
  const float mean = keep ? 0.0f : reduce<32>(sum, Sum()) / static_cast<float>(n);
  largest = reduce<32>(largest, Max());
  int exponent = 0;
  if (gamma && largest > 0 && isfinite(largest)) frexpf(largest, &exponent);
  for (int i = lane; i < n; i += 32) {
    add[i] = value(i) - mean;
    scaled[i] = ldexpf(gamma_of(i), -exponent);
  }
  if (lane == 0) *unscale = ldexpf(1, exponent);
}

template <class Run>
void with_element(DType dtype, const Run& run) {
  dtype == DType::fp16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace

void make_sum_vectors(const Context<Cuda>& context, DType dtype, const void* bias, const void* beta, const void* gamma,
                      float offset, bool keep, int64_t n, float* add, float* scaled, float* unscale) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    const auto of = [](const void* pointer) { return static_cast<const E*>(pointer); };
    launch_kernel(context, "kernel make_sum_vectors", sum_vectors_kernel<E>, 1, 32, of(bias), of(beta), of(gamma), n,
                  add, scaled, unscale, offset, keep);
  });
}

void make_correction_vectors(const Context<Cuda>& context, DType dtype, const void* weight, const void* bias,
                             const float* gamma, const void* beta, int64_t n, int64_t k, float* add, float* slope) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    const auto of = [](const void* pointer) { return static_cast<const E*>(pointer); };
    launch_kernel(context, "kernel make_correction_vectors", correction_vectors_kernel<E>, (n + 7) / 8, 256, of(weight),
                  of(bias), gamma, of(beta), n, k, add, slope);
  });
}

}  // namespace ftbert
