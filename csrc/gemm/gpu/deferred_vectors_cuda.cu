// The vectors of deferred_norm.h, made once a model.
#include <type_traits>

#include "device/e4m3.cuh"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "gemm/gpu/deferred_norm.h"

namespace ftbert {
namespace {

__device__ float number(e4m3_t x) { return static_cast<float>(x); }
template <class E>
__device__ float number(E x) {
  return to_float(x);
}

__device__ float scale_of(const float* scales, int row) { return scales == nullptr ? 1.0f : scales[row]; }

// A warp for each of the weight's rows, W. scales: of them, or nullptr.
template <class W, class E>
__global__ void correction_vectors_kernel(const W* weight, const float* scales, const E* bias, const float* gamma,
                                          const E* beta, int n, int k, float* add, float* slope) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= n) return;
  float with_gamma = 0, with_beta = 0;
  for (int i = lane; gamma && i < k; i += 32) {
    const float w = number(weight[static_cast<int64_t>(row) * k + i]);
    with_gamma += w * gamma[i];
    if (beta) with_beta += w * to_float(beta[i]);
  }
  const float scale = scale_of(scales, row);
  with_gamma = scale * reduce<32>(with_gamma, Sum());
  with_beta = scale * reduce<32>(with_beta, Sum());
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

__global__ void product_scales_kernel(const float* scales, const float* input, int n, float* made) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row < n) made[row] = scales[row] * *input;
}

// One block of kScaleWarps warps. scales: of the weight's rows, or nullptr.
constexpr int kScaleWarps = 32;
template <class W, class E>
__global__ void copy_scale_kernel(const E* gamma, const E* beta, const W* weight, const float* scales, int n, int k,
                                  const float* read, const float* next, const float* unscale, float* scale) {
  constexpr float kLargest = 448, kDeviations = 6, kRoom = 4;
  __shared__ float of_warps[kScaleWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  float norms = 0;  // of the weight's rows, squared
  for (int row = warp; row < n; row += kScaleWarps) {
    float squares = 0;
    for (int i = lane; i < k; i += 32) {
      const float w = number(weight[static_cast<int64_t>(row) * k + i]);
      squares += w * w;
    }
    const float by = scale_of(scales, row);
    norms += by * by * reduce<32>(squares, Sum());
  }
  if (lane == 0) of_warps[warp] = norms;
  __syncthreads();
  if (warp > 0) return;
  norms = reduce<32>(of_warps[lane], Sum());
  float squares = 0, total = 0;
  for (int i = lane; i < n; i += 32) {
    const float g = to_float(gamma[i]), b = to_float(beta[i]);
    squares += g * g + b * b, total += b;
  }
  const float inverse = 1.0f / static_cast<float>(n), mean = inverse * reduce<32>(total, Sum());
  const float of_rows = inverse * reduce<32>(squares, Sum()) - mean * mean;
  const float of_read = read ? kLargest / kDeviations * *read : 1.0f,
              variance = of_rows + inverse * norms * of_read * of_read;
  // Where the rows are zeros or no numbers, so is what is stored, by whatever scale.
  const float deviation = variance > 0 && isfinite(variance) ? sqrtf(variance) : 1.0f;
  if (lane == 0) *scale = *next * (kRoom * deviation) / *unscale;
}

template <class Run>
void with_element(DType dtype, const Run& run) {
  dtype == DType::fp16 ? run(__half()) : run(__nv_bfloat16());
}

// run(its numbers, its scales or nullptr) of a weight of 16 bits, E, or in E4M3.
template <class E, class Run>
void with_numbers(const Matrix& weight, const Run& run) {
  if (weight.format->numbers == DType::e4m3)
    run(static_cast<const e4m3_t*>(weight.data), weight.scales<float>());
  else
    run(static_cast<const E*>(weight.data), static_cast<const float*>(nullptr));
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

void make_correction_vectors(const Context<Cuda>& context, DType dtype, const Matrix& weight, const void* bias,
                             const float* gamma, const void* beta, float* add, float* slope) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    const auto of = [](const void* pointer) { return static_cast<const E*>(pointer); };
    with_numbers<E>(weight, [&](const auto* numbers, const float* scales) {
      using W = std::remove_cvref_t<decltype(*numbers)>;
      launch_kernel(context, "kernel make_correction_vectors", correction_vectors_kernel<W, E>, (weight.n + 7) / 8, 256,
                    numbers, scales, of(bias), gamma, of(beta), weight.n, weight.k, add, slope);
    });
  });
}

void make_product_scales(const Context<Cuda>& context, const Matrix& weight, const float* input, float* scales) {
  launch_kernel(context, "kernel make_product_scales", product_scales_kernel, (weight.n + 255) / 256, 256,
                weight.scales<float>(), input, weight.n, scales);
}

void make_copy_scale(const Context<Cuda>& context, DType dtype, const void* gamma, const void* beta,
                     const Matrix& weight, const float* read, const float* next, const float* unscale, float* scale) {
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    with_numbers<E>(weight, [&](const auto* numbers, const float* scales) {
      using W = std::remove_cvref_t<decltype(*numbers)>;
      launch_kernel(context, "kernel make_copy_scale", copy_scale_kernel<W, E>, 1, 32 * kScaleWarps,
                    static_cast<const E*>(gamma), static_cast<const E*>(beta), numbers, scales, weight.n, weight.k,
                    read, next, unscale, scale);
    });
  });
}

}  // namespace ftbert
