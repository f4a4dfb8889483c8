// out = act(gate + bias) * (up + bias): gate and up are the even and the odd columns of x.
#include "device/parallel_cpu.h"
#include "device/simd_math.h"
#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {
namespace {

// Column c of a row's gate and up. kWords: elements of `row` to a pair.
struct FloatPairs {
  static constexpr int64_t kWords = 2;
  const float* row;
  float gate(int64_t c) const { return row[2 * c]; }
  float up(int64_t c) const { return row[2 * c + 1]; }
};
// A pair is 32 bits, of which up is the upper half.
struct Bf16Pairs {
  static constexpr int64_t kWords = 1;
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
void run(const void* x, const float* bias, Activation activation, int64_t rows, int64_t cols, void* out) {
  const auto* const from = static_cast<decltype(Pairs::row)>(x);
  auto* const to = static_cast<Out*>(out);
  with_activation(activation, [&](auto kind) {
#pragma omp parallel for schedule(static) if (2 * rows * cols > kSerialElements)
    for (int64_t r = 0; r < rows; ++r)
      run_row<kind()>(Pairs{from + r * Pairs::kWords * cols}, bias, cols, to + r * cols);
  });
}

template <class Pairs>
void run_into(const Operand& x, const float* bias, Activation activation, int64_t rows, int64_t cols,
              const Operand& out) {
  const auto kind = out.dtype() == DType::bf16 ? run<Pairs, bfloat16_t> : run<Pairs, float>;
  kind(x.data, bias, activation, rows, cols, out.data);
}

}  // namespace

void add_bias_gate(Context<Cpu>&, const Operand& x, const float* bias, Activation activation, int64_t rows,
                   int64_t cols, const Operand& out) {
  const auto kind = x.dtype() == DType::bf16 ? run_into<Bf16Pairs> : run_into<FloatPairs>;
  kind(x, bias, activation, rows, cols, out);
}

}  // namespace ftbert::FTBERT_ISA
