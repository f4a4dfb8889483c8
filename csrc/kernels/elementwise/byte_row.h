// One row of floats as a byte row (core/format.h), shared by the kernels that store such.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/format.h"

namespace ftbert::FTBERT_ISA {

// The bytes go from the least number, at most 0, to the largest, at least 0. smooth [cols] or nullptr. Where a
// number is not finite the scale is NaN, and so is all that comes of the row.
inline void store_byte_row(const float* x, int64_t cols, const float* smooth, uint8_t* out) {
  constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: added to a small number it leaves the nearest whole one in the low bits
  float least = 0, most = 0, finite = 0;
  if (smooth) {
#pragma omp simd reduction(min : least) reduction(max : most) reduction(+ : finite)
    for (int64_t c = 0; c < cols; ++c) {
      const float number = x[c] * smooth[c];
      least = std::min(least, number), most = std::max(most, number), finite += number * 0.0f;
    }
  } else {
#pragma omp simd reduction(min : least) reduction(max : most) reduction(+ : finite)
    for (int64_t c = 0; c < cols; ++c)
      least = std::min(least, x[c]), most = std::max(most, x[c]), finite += x[c] * 0.0f;
  }
  float scale = most / 255.0f - least / 255.0f;
  if (!(scale >= std::numeric_limits<float>::min())) scale = 0;  // of zeros
  const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
  const auto zero =
      static_cast<int32_t>(std::bit_cast<uint32_t>(kRound - least * inverse) - std::bit_cast<uint32_t>(kRound));
  const float lowest = static_cast<float>(-zero), highest = static_cast<float>(255 - zero);
  const auto offset = static_cast<uint32_t>(zero);
  const auto byte = [&](float number) {
    const float near = std::min(std::max(number * inverse, lowest), highest) + kRound;
    return static_cast<uint8_t>(std::bit_cast<uint32_t>(near) + offset);
  };
  if (smooth) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = byte(x[c] * smooth[c]);
  } else {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) out[c] = byte(x[c]);
  }
  if (!(finite == 0)) scale = std::numeric_limits<float>::quiet_NaN();
  uint8_t* const end = out + byte_row_bytes(cols) - 8;
  std::fill(out + cols, end, uint8_t{0});
  std::memcpy(end, &scale, sizeof scale);
  std::memcpy(end + 4, &zero, sizeof zero);
}

}  // namespace ftbert::FTBERT_ISA
