// sum = x + bias + input; out = norm(sum), as floats, as byte rows, or as both.
#include <vector>

#include "device/parallel_cpu.h"
#include "kernels/elementwise/byte_row.h"
#include "kernels/kernels.h"
#include "kernels/norm/norm_row.h"

namespace ftbert::FTBERT_ISA {

void add_bias_input_layernorm(Context<Cpu>&, const float* x, const float* bias, const float* input,
                              const Norm<float>& norm, int64_t rows, int64_t cols, const Output<float>& out) {
  auto* const bytes = static_cast<uint8_t*>(out.copy.data);
#pragma omp parallel if (rows * cols > kSerialElements)
  {
    std::vector<float> apart(out.normed ? 0 : cols);  // of a norm that is stored as bytes alone
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const float* a = x + r * cols;
      const float* b = input ? input + r * cols : nullptr;
      float* const normed = out.normed ? out.normed + r * cols : apart.data();
      // The norm's row holds the sum until it is normalised, unless the caller wants to keep it.
      float* s = out.sum ? out.sum + r * cols : normed;
      if (b && bias) {
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) s[c] = a[c] + bias[c] + b[c];
      } else if (b) {
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) s[c] = a[c] + b[c];
      } else if (bias) {
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) s[c] = a[c] + bias[c];
      } else if (s != a) {
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) s[c] = a[c];
      }
      norm_row(s, norm, cols, normed);
      if (bytes) store_byte_row(normed, cols, out.copy.scale, bytes + r * byte_row_bytes(cols));
    }
  }
}

}  // namespace ftbert::FTBERT_ISA
