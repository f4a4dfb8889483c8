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

void add_bias_act(Context<Cpu>&, float* x, const float* bias, Activation activation, int64_t rows, int64_t cols) {
  switch (activation) {
    case Activation::none: return run<Activation::none>(x, bias, rows, cols);
    case Activation::gelu_erf: return run<Activation::gelu_erf>(x, bias, rows, cols);
    case Activation::gelu_tanh: return run<Activation::gelu_tanh>(x, bias, rows, cols);
    case Activation::relu: return run<Activation::relu>(x, bias, rows, cols);
    case Activation::silu: return run<Activation::silu>(x, bias, rows, cols);
    case Activation::tanh: return run<Activation::tanh>(x, bias, rows, cols);
  }
}

}  // namespace ftbert::FTBERT_ISA
