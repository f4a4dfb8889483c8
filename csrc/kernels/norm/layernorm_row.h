// LayerNorm of one row in float, shared by the kernels that end in one.
#pragma once
#include <cmath>
#include <cstdint>

namespace ftbert::FTBERT_ISA {

// out = (x - mean) / sqrt(variance + eps) * gamma + beta over cols. Two passes: the row is in L1. out may be x.
inline void layernorm_row(const float* x, const float* gamma, const float* beta, float eps, int64_t cols, float* out) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < cols; ++c) sum += x[c];
  const float mean = sum / static_cast<float>(cols);
  float square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t c = 0; c < cols; ++c) square += (x[c] - mean) * (x[c] - mean);
  const float scale = 1.0f / std::sqrt(square / static_cast<float>(cols) + eps);
#pragma omp simd
  for (int64_t c = 0; c < cols; ++c) out[c] = (x[c] - mean) * scale * gamma[c] + beta[c];
}

}  // namespace ftbert::FTBERT_ISA
