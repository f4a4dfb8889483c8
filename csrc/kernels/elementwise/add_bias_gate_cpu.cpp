// out = act(gate + bias) * (up + bias): gate and up are the even and the odd columns of x.
#include "core/check.h"
#include "device/parallel_cpu.h"
#include "device/simd_math.h"
#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {
namespace {

// Column c of a row's gate and up.
struct FloatPairs {
  const float* row;
  float gate(int64_t c) const { return row[2 * c]; }
  float up(int64_t c) const { return row[2 * c + 1]; }
};
// A pair is 32 bits, of which up is the upper half.
struct Bf16Pairs {
  using Pair __attribute__((may_alias)) = uint32_t;
  const Pair* row;
  float gate(int64_t c) const { return std::bit_cast<float>(row[c] << 16); }
  float up(int64_t c) const { return std::bit_cast<float>(row[c] & 0xffff0000u); }
};

void store(float x, float* to) { *to = x; }
void store(float x, bfloat16_t* to) { to->bits = simd::bf16_bits(x); }

template <Activation activation, class Pairs, class Out>
void run_row(const Pairs& x, const float* bias, int64_t cols, Out* out) {
  if (bias) {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c)
      store(simd::activate<activation>(x.gate(c) + bias[2 * c]) * (x.up(c) + bias[2 * c + 1]), out + c);
  } else {
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) store(simd::activate<activation>(x.gate(c)) * x.up(c), out + c);
  }
}

template <class Pairs, class Out>
void run(const Operand& x, const float* bias, Activation activation, int64_t rows, int64_t cols, Out* out) {
  const auto* const from = static_cast<const char*>(x.data);
  const int64_t row_bytes = 2 * cols * bytes_of(x.dtype);
  with_activation(activation, [&](auto kind) {
#pragma omp parallel for schedule(static) if (2 * rows * cols > kSerialElements)
    for (int64_t r = 0; r < rows; ++r)
      run_row<kind()>(Pairs{reinterpret_cast<decltype(Pairs::row)>(from + r * row_bytes)}, bias, cols, out + r * cols);
  });
}

template <class Pairs>
void run_into(const Operand& x, const float* bias, Activation activation, int64_t rows, int64_t cols,
              const Operand& out) {
  if (out.dtype == DType::bf16)
    run<Pairs>(x, bias, activation, rows, cols, out.as<bfloat16_t>());
  else
    run<Pairs>(x, bias, activation, rows, cols, out.as<float>());
}

}  // namespace

void add_bias_gate(Context<Cpu>&, const Operand& x, const float* bias, Activation activation, int64_t rows,
                   int64_t cols, const Operand& out) {
  if (x.dtype == DType::bf16) {
    x.as<bfloat16_t>();  // or an error
    return run_into<Bf16Pairs>(x, bias, activation, rows, cols, out);
  }
  x.as<float>();
  run_into<FloatPairs>(x, bias, activation, rows, cols, out);
}

}  // namespace ftbert::FTBERT_ISA
