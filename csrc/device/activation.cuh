// Activations in float, as add_bias_act, add_bias_gate and our products apply them.
#pragma once
#include "core/types.h"
#include "device/vector.cuh"

namespace ftbert {

// x * Phi(x) for 16-bit results: x or 0, less |x| times Phi(-|x|), and that is 2 to a polynomial of |x|, fitted on
// [0, 6.5] for its relative error, 6e-6; the last coefficient takes it to 0 beyond. Of all values 1 in 1000 rounds to
// another half than the true one. Half the instructions of erff, which alone kept add_bias_act from the memory's speed,
// and one of the slow ones (2^x) where a polynomial of a reciprocal times a Gaussian takes two.
__device__ inline float gelu_erf_16bit(float x) {
  const float z = fminf(fabsf(x), 65504.0f);  // infinite times zero would not be a number
  float log2_tail = -1.76032324e-6f;
  log2_tail = log2_tail * z + 6.00019739e-5f;
  log2_tail = log2_tail * z - 9.17044061e-4f;
  log2_tail = log2_tail * z + 8.4510725e-3f;
  log2_tail = log2_tail * z - 5.38355261e-2f;
  log2_tail = log2_tail * z - 0.458597898f;
  log2_tail = log2_tail * z - 1.1511941f;
  log2_tail = log2_tail * z - 1.0f;
  return max_or_nan(x, 0.0f) - z * fast_exp2(log2_tail);
}

// 1 / (1 + e^-x), for 16-bit results: the relative error is 2^-21 near 0 and grows with -x, to 2^-17 at -88.
__device__ inline float sigmoid_16bit(float x) { return fast_reciprocal(1.0f + fast_exp2(-1.442695041f * x)); }

// E: the element type of the result.
template <Activation kActivation, class E>
__device__ float activate(float x) {
  if constexpr (kActivation == Activation::gelu_erf && sizeof(E) == 2) {
    return gelu_erf_16bit(x);
  } else if constexpr (kActivation == Activation::gelu_erf) {
    return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  } else if constexpr (kActivation == Activation::gelu_tanh && sizeof(E) == 2) {
    return x * sigmoid_16bit(1.5957691216057308f * (x + 0.044715f * x * x * x));
  } else if constexpr (kActivation == Activation::gelu_tanh) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  } else if constexpr (kActivation == Activation::quick_gelu && sizeof(E) == 2) {
    return x * sigmoid_16bit(1.702f * x);
  } else if constexpr (kActivation == Activation::quick_gelu) {
    return x / (1.0f + expf(-1.702f * x));
  } else if constexpr (kActivation == Activation::relu) {
    return x < 0.0f ? 0.0f : x;  // NaN stays NaN, as in torch
  } else if constexpr (kActivation == Activation::silu && sizeof(E) == 2) {
    return x * sigmoid_16bit(x);
  } else if constexpr (kActivation == Activation::silu) {
    return x / (1.0f + expf(-x));
  } else if constexpr (kActivation == Activation::tanh) {
    return tanhf(x);
  } else {
    static_assert(kActivation == Activation::none, "an activation without a formula");
    return x;
  }
}

// Of eight elements.
template <Activation kActivation, class E>
__device__ Packed<E, 8> activate_pack(const Packed<E, 8>& pack) {
  if constexpr (kActivation == Activation::none) return pack;
  float v[8];
  pack.to_floats(v);
#pragma unroll
  for (int w = 0; w < 8; ++w) v[w] = activate<kActivation, E>(v[w]);
  return Packed<E, 8>::from_floats(v);
}

// activation(x[2i]) * x[2i + 1]
template <Activation kActivation, class E, int kCount>
__device__ Packed<E, kCount> gate_pairs(const float (&x)[2 * kCount]) {
  float v[kCount];
#pragma unroll
  for (int w = 0; w < kCount; ++w) v[w] = activate<kActivation, E>(x[2 * w]) * x[2 * w + 1];
  return Packed<E, kCount>::from_floats(v);
}

}  // namespace ftbert
