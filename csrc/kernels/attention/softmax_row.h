// Softmax of one row in float, shared by `softmax` and the fused attention.
#pragma once
#include <cstdint>
#include <limits>

#include "device/simd_math.h"

namespace ftbert::FTBERT_ISA {

// x = e^(x - max) over [0, cols); returns the sum, so that the caller can divide where it is cheapest.
inline float exp_row(float* x, int64_t cols) {
  using simd::kLanes, simd::Vector, simd::load;
  const int64_t whole = cols / kLanes * kLanes;
  float most = -std::numeric_limits<float>::infinity();
  if (whole > 0) {
    Vector lanes = load(x);
    for (int64_t c = kLanes; c < whole; c += kLanes) {
      const Vector v = load(x + c);
      lanes = v > lanes ? v : lanes;
    }
    most = simd::largest(lanes);
  }
  for (int64_t c = whole; c < cols; ++c) most = x[c] > most ? x[c] : most;
  Vector lanes = {};
  for (int64_t c = 0; c < whole; c += kLanes) {
    const Vector v = simd::exp(load(x + c) - most);
    simd::store(x + c, v);
    lanes += v;
  }
  for (int64_t c = whole; c < cols; ++c) x[c] = simd::exp(x[c] - most);
  float sum = simd::sum(lanes);
  for (int64_t c = whole; c < cols; ++c) sum += x[c];
  return sum;
}

}  // namespace ftbert::FTBERT_ISA
