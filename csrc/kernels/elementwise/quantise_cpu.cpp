// out = E4M3 of x / scale, or byte rows of x.
#include <algorithm>
#include <bit>

#include "device/parallel_cpu.h"
#include "kernels/elementwise/byte_row.h"
#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {
namespace {

// The nearest number of E4M3, of two equally near the even one; beyond 448 that, NaN of NaN.
uint8_t e4m3_bits(float x) {
  constexpr uint32_t kMost = std::bit_cast<uint32_t>(448.0f), kLeastNormal = std::bit_cast<uint32_t>(0x1p-6f);
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80;
  const uint32_t most = std::min(bits & 0x7fffffff, kMost);
  // Three bits of the mantissa stay; exponents begin at 2^-6 instead of 2^-126.
  const uint32_t normal = ((most + 0x7ffff + (most >> 20 & 1)) >> 20) - (120 << 3);
  // Multiples of 2^-9: the last place of 2^14.
  const uint32_t below =
      std::bit_cast<uint32_t>(std::bit_cast<float>(most) + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t number = most < kLeastNormal ? below : normal;
  return static_cast<uint8_t>(sign | (x == x ? number : 0x7f));
}

}  // namespace

void quantise(Context<Cpu>&, const float* x, int64_t rows, int64_t cols, const Operand& out) {
  auto* const to = static_cast<uint8_t*>(out.data);
  if (out.format == &formats::byte_rows) {
#pragma omp parallel for schedule(static) if (rows * cols > kSerialElements)
    for (int64_t r = 0; r < rows; ++r) store_byte_row(x + r * cols, cols, out.scale, to + r * byte_row_bytes(cols));
    return;
  }
  const float scale = *out.scale;
#pragma omp parallel for schedule(static) if (rows * cols > kSerialElements)
  for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
    for (int64_t c = r * cols; c < (r + 1) * cols; ++c) to[c] = e4m3_bits(x[c] / scale);
  }
}

}  // namespace ftbert::FTBERT_ISA
