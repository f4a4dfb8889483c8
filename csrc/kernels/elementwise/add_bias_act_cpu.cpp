// x = act(x + bias), row by row.
#include "device/parallel_cpu.h"
#include "device/simd_math.h"
#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {
namespace {

template <Activation activation>
void run(float* x, const float* bias, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static) if (rows * cols > kSerialElements)
  for (int64_t r = 0; r < rows; ++r) {
    float* row = x + r * cols;
    if (bias) {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) row[c] = simd::activate<activation>(row[c] + bias[c]);
    } else {
#pragma omp simd
      for (int64_t c = 0; c < cols; ++c) row[c] = simd::activate<activation>(row[c]);
    }
  }
}

}  // namespace

void add_bias_act(Context<Cpu>&, float* x, const float* bias, Activation activation, int64_t rows, int64_t cols,
                  const Operand&) {
  with_activation(activation, [&](auto kind) { run<kind()>(x, bias, rows, cols); });
}

}  // namespace ftbert::FTBERT_ISA
