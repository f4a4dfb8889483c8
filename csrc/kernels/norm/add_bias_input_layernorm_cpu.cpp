// sum = x + bias + input; out = norm(sum).
#include "device/parallel_cpu.h"
#include "kernels/kernels.h"
#include "kernels/norm/norm_row.h"

namespace ftbert::FTBERT_ISA {

void add_bias_input_layernorm(Context<Cpu>&, const float* x, const float* bias, const float* input,
                              const Norm<float>& norm, int64_t rows, int64_t cols, const Output<float>& out) {
#pragma omp parallel for schedule(static) if (rows * cols > kSerialElements)
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = x + r * cols;
    const float* b = input ? input + r * cols : nullptr;
    // The norm's row holds the sum until it is normalised, unless the caller wants to keep it.
    float* s = (out.sum ? out.sum : out.normed) + r * cols;
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
    norm_row(s, norm, cols, out.normed + r * cols);
  }
}

}  // namespace ftbert::FTBERT_ISA
