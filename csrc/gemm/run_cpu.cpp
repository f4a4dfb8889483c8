// The door to the CPU's products (cpu/kernel.h).
#include <algorithm>
#include <cstring>

#include "gemm/cpu/kernel.h"
#include "gemm/gemm.h"

namespace ftbert {

template <>
int64_t gemm_rows(const Context<Cpu>& context, int64_t rows) {
  return context.products->rows(rows);
}

namespace {

// In as many products as gemm_rows says, with all of the result in plain memory.
Operand linear_in_one_piece(Context<Cpu>& context, const Linear<float>& linear, const Operand& a, int64_t m,
                            Epilogue epilogue, const Operand& out) {
  const int64_t cols = epilogue.columns(linear.weight.n);
  Operand all = out;
  for (int64_t first = 0; first < m;) {
    const int64_t rows = gemm_rows(context, m - first), count = std::min(rows, m - first);
    Operand part = all.from(first, cols);
    const Operand made =
        run_kernel(context, linear, a.from(first, linear.weight.k), rows, epilogue, part, /*in_one_piece=*/true);
    if (first == 0 && count == m) return made;
    all.format = made.format;  // also of the rows that follow
    const int64_t row_bytes = cols * bytes_of(made.dtype());
    if (made.data != part.data) {
      const auto* source = static_cast<const char*>(made.data);
      auto* to = static_cast<char*>(part.data);
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * row_bytes, source + i * row_bytes, row_bytes);
    }
    first += count;
  }
  return all;
}

}  // namespace

template <>
Made<float> linear<Cpu, float>(Context<Cpu>& context, const Linear<float>& linear, const Edge<float>& a, int64_t m,
                               const Ending<float>& wish, const Operand& out) {
  const Epilogue epilogue{.bias = wish.bias && !wish.residual, .activation = wish.activation, .gate = wish.gate};
  if (wish.in_one_piece) return {{linear_in_one_piece(context, linear, a.rows, m, epilogue, out)}};
  return {{run_kernel(context, linear, a.rows, m, epilogue, out, /*in_one_piece=*/false)}};
}

template <>
void gemm<Cpu, float, float>(Context<Cpu>& context, const Product& product, const float* a, const float* b, float* c) {
  context.products->gemm(product, a, b, c);
}

}  // namespace ftbert
