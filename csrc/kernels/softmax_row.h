// Softmax of one row in float, shared by `softmax` and the fused attention.
#pragma once
#include <cstdint>
#include <limits>

#include "kernels/simd_math.h"

namespace ftbert {

inline constexpr int kLanes = 16;  // one AVX-512 register; narrower machines split it
using Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias)) = float;

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }
inline void store(float* p, Vector v) { *reinterpret_cast<Vector*>(p) = v; }

// Of the lanes, in a tree: a compiler reduces them one after the other, which takes as long as some 60 exponentials.
template <class F>
float reduce(Vector v, F&& f) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] = f(v[i], v[i + half]);
  return v[0];
}

// x = e^(x - max) over [0, cols); returns the sum, so that the caller can divide where it is cheapest.
inline float exp_row(float* x, int64_t cols) {
  const auto larger = [](float a, float b) { return a > b ? a : b; };
  const auto plus = [](float a, float b) { return a + b; };
  const int64_t whole = cols / kLanes * kLanes;
  float most = -std::numeric_limits<float>::infinity();
  if (whole > 0) {
    Vector lanes = load(x);
    for (int64_t c = kLanes; c < whole; c += kLanes) {
      const Vector v = load(x + c);
      lanes = v > lanes ? v : lanes;
    }
    most = reduce(lanes, larger);
  }
  for (int64_t c = whole; c < cols; ++c) most = larger(x[c], most);
#pragma omp simd
  for (int64_t c = 0; c < cols; ++c) x[c] = simd::exp(x[c] - most);
  Vector lanes = {};
  for (int64_t c = 0; c < whole; c += kLanes) lanes += load(x + c);
  float sum = reduce(lanes, plus);
  for (int64_t c = whole; c < cols; ++c) sum += x[c];
  return sum;
}

}  // namespace ftbert
