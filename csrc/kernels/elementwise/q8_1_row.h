// One row of floats as Q8_1: int8, and a scale for each 32 neighbours, as the CPU's products with matrices in q8_0 read
// it. Those of a GPU make it by x * (127 / largest), of halves the even one (gemm/gpu/few_rows_storage.cuh).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/format.h"

namespace ftbert::FTBERT_ISA {

// scale = largest / 127, number = x / scale rounded to the nearest, half away from zero; of zeros both are 0. Where a
// number is not finite the scale is NaN, and so is all that comes of the block. Returns the numbers' sum.
inline int32_t store_q8_1_block(const float* x, int8_t* numbers, float* scale) {
  constexpr float kMost = 127;
  float largest = 0, finite = 0;
#pragma omp simd reduction(max : largest) reduction(+ : finite)
  for (int64_t i = 0; i < kQ8Block; ++i) largest = std::max(largest, std::fabs(x[i])), finite += x[i] * 0.0f;
  *scale = finite == 0 ? largest / kMost : std::numeric_limits<float>::quiet_NaN();
  if (!(*scale > 0)) {
    std::fill_n(numbers, kQ8Block, int8_t{0});
    return 0;
  }
  const float divisor = *scale;
  int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < kQ8Block; ++i) {
    // Of the least scales, which are rounded far, a quotient may be beyond 127.
    const float quotient = std::min(std::max(x[i] / divisor, -kMost), kMost);
    const auto whole = static_cast<int32_t>(quotient);
    const float rest = quotient - static_cast<float>(whole);
    const int32_t number = whole + (rest >= 0.5f) - (rest <= -0.5f);
    numbers[i] = static_cast<int8_t>(number);
    sum += number;
  }
  return sum;
}

}  // namespace ftbert::FTBERT_ISA
