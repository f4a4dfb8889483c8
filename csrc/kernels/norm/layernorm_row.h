// The norm of one row in float, shared by the kernels that end in one.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/norm.h"

namespace ftbert::FTBERT_ISA {

// out = norm(x) over cols. Two passes: the row is in L1. out may be x.
inline void norm_row(const float* x, const Norm<float>& norm, int64_t cols, float* out) {
  const float *const gamma = norm.gamma, *const beta = norm.beta;
  if (norm.kind == NormKind::none) {
    if (out != x) std::memcpy(out, x, cols * sizeof(float));
    return;
  }
  if (norm.kind == NormKind::rms) {
    float square = 0;
#pragma omp simd reduction(+ : square)
    for (int64_t c = 0; c < cols; ++c) square += x[c] * x[c];
    const float scale = 1.0f / std::sqrt(square / static_cast<float>(cols) + norm.eps);
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = x[c] * scale * (gamma[c] + norm.offset);
    return;
  }
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < cols; ++c) sum += x[c];
  const float mean = sum / static_cast<float>(cols);
  float square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t c = 0; c < cols; ++c) square += (x[c] - mean) * (x[c] - mean);
  const float scale = 1.0f / std::sqrt(square / static_cast<float>(cols) + norm.eps);
  if (beta) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = (x[c] - mean) * scale * gamma[c] + beta[c];
  } else {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = (x[c] - mean) * scale * gamma[c];
  }
}

}  // namespace ftbert::FTBERT_ISA
