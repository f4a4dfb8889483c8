// The norm of one row in float, shared by the kernels that end in one.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/norm.h"
#include "device/simd_math.h"

namespace ftbert::FTBERT_ISA {

// The sum of term(x[c]) over [0, cols); term takes vectors and floats. Four sums at a time: one alone waits for itself.
template <class Term>
inline float sum_row(const float* x, int64_t cols, Term&& term) {
  using simd::kLanes, simd::load, simd::Vector;
  Vector sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= cols; c += 4 * kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i] += term(load(x + c + i * kLanes));
  }
  for (; c + kLanes <= cols; c += kLanes) sums[0] += term(load(x + c));
  float sum = simd::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; c < cols; ++c) sum += term(x[c]);
  return sum;
}

// 1 / sqrt(mean of squares + eps). In parts: what is added to a long sum of squares, which only grows, loses its last
// bits the same way each time (9000 numbers: 8e-7 of the result).
inline float rms_scale(const float* x, int64_t cols, float eps) {
  constexpr int64_t kPart = 1024;
  double total = 0;
  for (int64_t first = 0; first < cols; first += kPart) {
    const int64_t end = first + kPart < cols ? first + kPart : cols;
    total += sum_row(x + first, end - first, [](auto v) { return v * v; });
  }
  return 1.0f / std::sqrt(static_cast<float>(total / static_cast<double>(cols)) + eps);
}

inline void rms_row(const float* x, const Norm<float>& norm, int64_t cols, float* out) {
  const float *const gamma = norm.gamma, *const beta = norm.beta, offset = norm.offset;
  const float scale = rms_scale(x, cols, norm.eps);
  if (beta) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = x[c] * scale * (gamma[c] + offset) + beta[c];
  } else {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = x[c] * scale * (gamma[c] + offset);
  }
}

// Two passes: the row is in L1.
inline void layernorm_row(const float* x, const Norm<float>& norm, int64_t cols, float* out) {
  const float *const gamma = norm.gamma, *const beta = norm.beta;
  const float mean = sum_row(x, cols, [](auto v) { return v; }) / static_cast<float>(cols);
  const float square = sum_row(x, cols, [mean](auto v) { return (v - mean) * (v - mean); });
  const float scale = 1.0f / std::sqrt(square / static_cast<float>(cols) + norm.eps);
  if (beta) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = (x[c] - mean) * scale * gamma[c] + beta[c];
  } else {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = (x[c] - mean) * scale * gamma[c];
  }
}

// out = norm(x) over cols. out may be x. A float is the same under both roundings.
inline void norm_row(const float* x, const Norm<float>& norm, int64_t cols, float* out) {
  switch (norm.kind) {
    case NormKind::none:
      if (out != x) std::memcpy(out, x, cols * sizeof(float));
      return;
    case NormKind::layer: return layernorm_row(x, norm, cols, out);
    case NormKind::rms: return rms_row(x, norm, cols, out);
  }
}

}  // namespace ftbert::FTBERT_ISA
