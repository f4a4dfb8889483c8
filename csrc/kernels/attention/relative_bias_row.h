// The relative position bias added to a row of scores, shared by `softmax` and the fused attention.
#pragma once
#include <algorithm>
#include <cstdint>

namespace ftbert::FTBERT_ISA {

// scores[j] += table[clamp(column(j) - column(query), -farthest, farthest)] for the keys j of one sequence.
// table: of one head, moved so that table[0] is distance 0. columns [length] or nullptr: those in the sequence.
inline void add_relative_bias(const float* table, int64_t farthest, const int32_t* columns, int64_t query,
                              int64_t length, float* scores) {
  if (columns) {
    const int64_t column = columns[query];
    for (int64_t j = 0; j < length; ++j) {
      const int64_t distance = columns[j] - column;
      scores[j] += table[distance < -farthest ? -farthest : distance > farthest ? farthest : distance];
    }
    return;
  }
  const float* row = table - query;
  const int64_t begin = std::clamp<int64_t>(query - farthest, 0, length);
  const int64_t end = std::clamp<int64_t>(query + farthest + 1, begin, length);
  for (int64_t j = 0; j < begin; ++j) scores[j] += table[-farthest];
#pragma omp simd
  for (int64_t j = begin; j < end; ++j) scores[j] += row[j];
  for (int64_t j = end; j < length; ++j) scores[j] += table[farthest];
}

}  // namespace ftbert::FTBERT_ISA
