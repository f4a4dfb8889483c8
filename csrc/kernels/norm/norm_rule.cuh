// What norms make of a row's numbers, as types: a kernel is compiled for each rule that it runs.
#pragma once
#include "core/norm.h"
#include "device/vector.cuh"

namespace ftbert {

// 1 / sqrt(mean + eps) of the squares that kThreads threads have summed, each its part. inverse: 1 / their number.
template <int kThreads>
__device__ float inverse_root_mean(float squares, float inverse, float eps) {
  return rsqrtf(reduce<kThreads>(squares, Sum()) * inverse + eps);
}

struct NormNumbers {
  float eps, offset;
};

// apply: of a number, of centred rules its distance from the mean.
struct LayerRule : NormNumbers {
  static constexpr bool kCentred = true;  // squares are of distances from the mean

  template <class E>
  __device__ float apply(float distance, float scale, float gamma, float beta) const {
    return distance * scale * gamma + beta;
  }
};

// A kernel without a norm.
struct NoRule : LayerRule {};

// A number, of LayerNorm its distance from the mean; LayerNorm's offset is 0.
template <class E>
__device__ float normed(const NormNumbers& numbers, bool round_before_gamma, float x, float scale, float gamma,
                        float beta) {
  float y = x * scale;
  if (round_before_gamma) y = to_float(from_float<E>(y));
  return y * (gamma + numbers.offset) + beta;
}

template <NormRounding kRounding>
struct RmsRule : NormNumbers {
  static constexpr bool kCentred = false;

  template <class E>
  __device__ float apply(float x, float scale, float gamma, float beta) const {
    return normed<E>(*this, kRounding == NormRounding::before_gamma, x, scale, gamma, beta);
  }
};

// run.operator()<Rule>() for the norm's.
template <class T, class Run>
void with_norm_rule(const Norm<T>& norm, const Run& run) {
  if (norm.kind == NormKind::none) return run.template operator()<NoRule>();
  if (norm.kind == NormKind::layer) return run.template operator()<LayerRule>();
  if constexpr (sizeof(T) < sizeof(float))  // a float is the same rounded
    if (norm.rounding == NormRounding::before_gamma)
      return run.template operator()<RmsRule<NormRounding::before_gamma>>();
  run.template operator()<RmsRule<NormRounding::once>>();
}

}  // namespace ftbert
