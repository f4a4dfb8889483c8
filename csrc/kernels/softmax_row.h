// Softmax of one row in float, shared by `softmax` and the fused attention.
#pragma once
#include <cstdint>
#include <limits>

#include "kernels/simd_math.h"

namespace ftbert {

// x = e^(x - max) over [0, cols); returns the sum, so that the caller can divide where it is cheapest.
inline float exp_row(float* x, int64_t cols) {
  float most = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : most)
  for (int64_t c = 0; c < cols; ++c) most = x[c] > most ? x[c] : most;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < cols; ++c) {
    x[c] = simd::exp(x[c] - most);
    sum += x[c];
  }
  return sum;
}

}  // namespace ftbert
