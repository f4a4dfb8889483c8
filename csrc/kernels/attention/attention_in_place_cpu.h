// Attention of one query in float that reads keys and values where they lie: of few queries it takes longer to move
// them.
#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/attention/attention_formats_cpu.h"

namespace ftbert::FTBERT_ISA {

// out [V * simd::kLanes] = the sum of scores[j] * row j of `values`, of two keys at a time.
template <int V>
void add_values(const float* scores, const float* values, int64_t stride, int64_t length, float inverse, float* out) {
  simd::Vector even[V] = {}, odd[V] = {};
  int64_t j = 0;
  for (; j + 2 <= length; j += 2, values += 2 * stride) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
      even[i] += scores[j] * simd::load(values + i * simd::kLanes);
      odd[i] += scores[j + 1] * simd::load(values + stride + i * simd::kLanes);
    }
  }
  for (int i = 0; i < V; ++i) {
    if (j < length) even[i] += scores[j] * simd::load(values + i * simd::kLanes);
    simd::store(out + i * simd::kLanes, (even[i] + odd[i]) * inverse);
  }
}

// One query at `place` against keys [length, head_size] and values likewise. queries [head_size] and scores [length, up
// to whole Vectors] are scratch; policy.exp makes probabilities of scores, as in attention_cpu.cpp.
template <class Policy>
void attend_in_place(const float* q, const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* queries,
                     float* scores, const Policy& policy, int64_t place, int64_t length, int64_t head_size, float scale,
                     float* out) {
  FloatFormat::pack_scaled(q, scale, head_size, queries);
  const int64_t wide = head_size / simd::kLanes * simd::kLanes;
  for (int64_t j = 0; j < length; j += simd::kLanes) {
    const float* rows[simd::kLanes];  // behind the last key that one again: nobody reads its score
    for (int i = 0; i < simd::kLanes; ++i) rows[i] = k + std::min(j + i, length - 1) * k_stride;
    simd::Vector sums[simd::kLanes] = {};
    for (int64_t d = 0; d < wide; d += simd::kLanes) {
      const simd::Vector x = simd::load(queries + d);
#pragma GCC unroll 16
      for (int i = 0; i < simd::kLanes; ++i) sums[i] += x * simd::load(rows[i] + d);
    }
    simd::store(scores + j, add_across(sums));
    for (int64_t d = wide; d < head_size; ++d)
      for (int i = 0; i < simd::kLanes; ++i) scores[j + i] += queries[d] * rows[i][d];
  }
  const float inverse = 1.0f / policy.exp(scores, place, length);
  int64_t d = 0;
  for (; d + 4 * simd::kLanes <= head_size; d += 4 * simd::kLanes)
    add_values<4>(scores, v + d, v_stride, length, inverse, out + d);
  for (; d + simd::kLanes <= head_size; d += simd::kLanes)
    add_values<1>(scores, v + d, v_stride, length, inverse, out + d);
  for (; d < head_size; ++d) {
    float sum = 0.0f;
    for (int64_t j = 0; j < length; ++j) sum += scores[j] * v[j * v_stride + d];
    out[d] = sum * inverse;
  }
}

}  // namespace ftbert::FTBERT_ISA
