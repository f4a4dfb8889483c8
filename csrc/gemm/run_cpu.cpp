// The CPU's products go to the object that the caller handed down in the context.
#include <algorithm>
#include <cstring>

#include "gemm/gemm.h"

namespace ftbert {

template <>
Operand linear<Cpu, float>(Context<Cpu>& context, const Linear<float>& linear, const Operand& a, int64_t m,
                           Epilogue epilogue, float* out, DType as) {
  return context.products->linear(linear, a, m, epilogue, out, as, /*in_one_piece=*/false);
}

// A product in bf16 rounds its operands, so that it reads what was stored in bf16 as it is.
template <>
DType operand_dtype<Cpu, float>(const Matrix& weight) {
  return weight.dtype;
}

template <>
int64_t gemm_rows(const Context<Cpu>& context, int64_t rows) {
  return context.products->rows(rows);
}

template <>
Operand linear_all<Cpu, float>(Context<Cpu>& context, const Linear<float>& linear, const Operand& a, int64_t m,
                               Epilogue epilogue, float* out, DType as) {
  const float* const from = a.as<float>();
  for (int64_t first = 0; first < m;) {
    const int64_t rows = gemm_rows(context, m - first), count = std::min(rows, m - first);
    const int64_t row_bytes = linear.weight.n * bytes_of(as);
    char* const to = reinterpret_cast<char*>(out) + first * row_bytes;
    const Operand made = context.products->linear(linear, Operand::of(from + first * linear.weight.k), rows, epilogue,
                                                  to, as, /*in_one_piece=*/true);
    if (first == 0 && count == m) return made;
    as = made.dtype;  // also of the chunks that follow
    const int64_t made_bytes = linear.weight.n * bytes_of(as);
    if (const auto* source = static_cast<const char*>(made.data); source != to) {
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * made_bytes, source + i * made_bytes, made_bytes);
    }
    first += count;
  }
  return {out, as};
}

template <>
bool linear_layernorm<Cpu, float>(Context<Cpu>&, const Linear<float>&, const Operand&, int64_t, const Norm<float>&,
                                  int64_t, NormMoments&, float*) {
  return false;
}

template <>
void gemm<Cpu, float, float>(Context<Cpu>& context, const Product& product, const float* a, const float* b, float* c) {
  context.products->gemm(product, a, b, c);
}

}  // namespace ftbert
