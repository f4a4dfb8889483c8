// Activations in float, as add_bias_act and the fused products apply them.
#pragma once
#include "core/types.h"
#include "kernels/vector.cuh"

namespace ftbert {

// x * Phi(x) for 16-bit results: 1 - erf as a polynomial times a Gaussian (Abramowitz & Stegun 7.1.26, absolute error
// of erf 1.5e-7, a thousandth of a half's rounding). Half the instructions of erff, which alone kept add_bias_act from
// the memory's speed. Written from |x| and the complement, so that the negative tail keeps its relative accuracy.
__device__ inline float gelu_erf_16bit(float x) {
  const float z = fabsf(x);
  const float t = fast_reciprocal(1.0f + 0.23164189f * z);  // 0.3275911 / sqrt(2)
  // -1/2 times the polynomial
  const float polynomial =
      t * (-0.127414796f + t * (0.142248368f + t * (-0.7107068705f + t * (0.7265760135f + t * -0.5307027145f))));
  // log2(e) / 2. Infinite times zero would not be a number.
  return fmaxf(x, 0.0f) + fminf(z, 65504.0f) * (polynomial * fast_exp2(-0.72134752f * x * x));
}

// E: the element type of the result.
template <Activation kActivation, class E>
__device__ float activate(float x) {
  if constexpr (kActivation == Activation::gelu_erf && sizeof(E) == 2) {
    return gelu_erf_16bit(x);
  } else if constexpr (kActivation == Activation::gelu_erf) {
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  } else if constexpr (kActivation == Activation::gelu_tanh) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  } else if constexpr (kActivation == Activation::relu) {
    return x < 0.0f ? 0.0f : x;  // NaN stays NaN, as in torch
  } else if constexpr (kActivation == Activation::silu) {
    return x / (1.0f + expf(-x));
  } else if constexpr (kActivation == Activation::tanh) {
    return tanhf(x);
  } else {
    return x;
  }
}

}  // namespace ftbert
