// The first of the largest numbers of each row; -1 where there is none, or it is no finite number.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {

namespace {

// Numbers whose largest is looked for at a time, with vectors; the place is looked for in one such part of a row alone.
constexpr int64_t kPart = 4096;

int64_t first_largest(const float* row, int64_t cols) {
  float most = -std::numeric_limits<float>::infinity();
  int64_t part = 0;
  for (int64_t begin = 0; begin < cols; begin += kPart) {
    const int64_t end = std::min(begin + kPart, cols);
    float largest = -std::numeric_limits<float>::infinity();
    int unordered = 0;
#pragma omp simd reduction(max : largest) reduction(+ : unordered)
    for (int64_t c = begin; c < end; ++c) {
      const float x = row[c];
      largest = x > largest ? x : largest;  // passes over NaN; with std::max GCC 12 makes no vectors of the loop
      unordered += x != x;
    }
    if (unordered) return -1;
    if (largest > most) most = largest, part = begin;
  }
  return std::isfinite(most) ? std::find(row + part, row + cols, most) - row : -1;
}

}  // namespace

void argmax(Context<Cpu>&, const float* logits, int64_t rows, int64_t cols, int64_t* ids) {
#pragma omp parallel for
  for (int64_t row = 0; row < rows; ++row) ids[row] = first_largest(logits + row * cols, cols);
}

}  // namespace ftbert::FTBERT_ISA
