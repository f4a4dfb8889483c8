// Vectors of the instruction set's width; exp, erf and tanh in float, free of branches and calls, so that the compiler
// vectorises the loops around them.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#ifdef __AVX2__
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 means its own header's undefined operands
#endif
#include <immintrin.h>
#endif

#include "core/types.h"

namespace ftbert::FTBERT_ISA::simd {

// As many floats as a register holds: wider vectors compile everywhere, and where they do not fit a register each
// operation goes through memory (attention took 20 times as long so, with 16 lanes on AVX2).
#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
using Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias)) = float;

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// f over all lanes, in a tree. Through an array: lanes of a Vector by index are slow.
template <class F>
inline float reduce(Vector v, F&& f) {
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] = f(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// e^x: 2^n * e^r, |r| <= ln2/2, polynomial of Cephes' expf (moshier.net/cephes). Within 2 ulp; 0 below -87.3.
inline float exp(float x) {
  const float clamped = std::min(std::max(x, -87.3365f), 88.7228f);
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low mantissa bits.
  const float shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = p * r * r + r + 1.0f;
  const float scale = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return x < -87.3365f ? 0.0f : y * scale;
}

#ifdef __AVX512F__
// The same for 16, infinity above 88.7: rounding and the power of two are an instruction each.
inline Vector exp(Vector v) {
  const __m512 x = reinterpret_cast<__m512>(v);
  const auto all = [](float value) { return _mm512_set1_ps(value); };
  const __mmask16 kept = _mm512_cmp_ps_mask(x, all(-87.3365f), _CMP_NLT_UQ);  // a NaN, too
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504088896341f)), 0);
  const __m512 r = _mm512_fmadd_ps(n, all(2.12194440e-4f), _mm512_fnmadd_ps(n, all(0.693359375f), x));
  __m512 p = _mm512_fmadd_ps(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, all(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, all(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, all(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, all(5.0000001201e-1f));
  p = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), all(1.0f));
  return reinterpret_cast<Vector>(_mm512_maskz_scalef_ps(kept, p, n));
}
inline float largest(Vector v) { return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v)); }
inline float sum(Vector v) { return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v)); }
#else
// The same steps over all lanes.
inline Vector exp(Vector x) {
  using Whole __attribute__((vector_size(sizeof(Vector)))) = int32_t;
  const Vector low = Vector{} - 87.3365f, high = Vector{} + 88.7228f;
  const Vector above = x < low ? low : x, clamped = above > high ? high : above;
  const Vector n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const Vector r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const Vector y = p * r * r + r + 1.0f;
  const Whole exponent = (__builtin_convertvector(n, Whole) + 127) << 23;
  return x < low ? Vector{} : y * reinterpret_cast<Vector>(exponent);
}
inline float largest(Vector v) {
  return reduce(v, [](float a, float b) { return a > b ? a : b; });
}
inline float sum(Vector v) {
  return reduce(v, [](float a, float b) { return a + b; });
}
#endif

// Rounded to nearest, ties to even.
inline uint16_t bf16_bits(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
  return static_cast<uint16_t>((x == x ? rounded : bits | 0x400000) >> 16);
}

// Rational minimax approximation on [-4, 4], where erf saturates in float (the one Eigen uses). Within 3e-7.
inline float erf(float x) {
  const float c = std::min(std::max(x, -4.0f), 4.0f), s = c * c;
  float p = -2.72614225801306e-10f;
  p = p * s + 2.77068142495902e-08f;
  p = p * s + -2.10102402082508e-06f;
  p = p * s + -5.69250639462346e-05f;
  p = p * s + -7.34990630326855e-04f;
  p = p * s + -2.95459980854025e-03f;
  p = p * s + -1.60960333262415e-02f;
  float q = -1.45660718464996e-05f;
  q = q * s + -2.13374055278905e-04f;
  q = q * s + -1.68282697438203e-03f;
  q = q * s + -7.37332916720468e-03f;
  q = q * s + -1.42647390514189e-02f;
  return c * p / q;
}

inline float tanh(float x) {
  const float c = std::min(std::max(x, -10.0f), 10.0f);
  // Near 0 the quotient below cancels; the odd series is exact to float there.
  const float s = c * c;
  const float small = c * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315))));
  const float e = exp(2.0f * c);
  return s < 0.03f ? small : (e - 1.0f) / (e + 1.0f);
}

template <Activation activation>
inline float activate(float x) {
  if constexpr (activation == Activation::gelu_erf) {
    return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f));
  } else if constexpr (activation == Activation::gelu_tanh) {
    return 0.5f * x * (1.0f + tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  } else if constexpr (activation == Activation::quick_gelu) {
    return x / (1.0f + exp(-1.702f * x));
  } else if constexpr (activation == Activation::relu) {
    return x < 0.0f ? 0.0f : x;
  } else if constexpr (activation == Activation::silu) {
    return x / (1.0f + exp(-x));
  } else if constexpr (activation == Activation::tanh) {
    return tanh(x);
  } else {
    static_assert(activation == Activation::none, "an activation without a formula");
    return x;
  }
}

}  // namespace ftbert::FTBERT_ISA::simd

namespace ftbert::FTBERT_ISA {

inline constexpr int kPanelWidth = 2 * simd::kLanes;  // columns that panel_product holds in registers

}  // namespace ftbert::FTBERT_ISA
