// The CPU's products go to whatever the caller handed down in the context.
#include <algorithm>

#include "gemm/gemm.h"
#include "kernels/kernels.h"

namespace ftbert {

template <>
const float* linear<Cpu, float>(Context<Cpu>& context, const Linear<float>& weights, const float* a, int64_t m,
                                Epilogue epilogue, float* out) {
  return context.gemm->linear(weights, a, m, epilogue, out);
}

template <>
int64_t gemm_rows(const Context<Cpu>& context, int64_t rows) {
  return context.gemm->rows(rows);
}

template <>
const float* linear_in_pieces<Cpu, float>(Context<Cpu>& context, const Linear<float>& weights, const float* a,
                                          int64_t m, Epilogue epilogue, float* out) {
  const bool in_bf16 =
      epilogue.for_attention && context.bf16 && attention_reads_bf16() && context.gemm->leaves_bf16(weights);
  epilogue.for_attention = in_bf16;
  context.gemm->bf16_at = in_bf16 ? out : nullptr;
  const int64_t n = in_bf16 ? weights.n / 2 : weights.n;  // floats' places in a row
  for (int64_t first = 0; first < m;) {
    const int64_t rows = gemm_rows(context, m - first), count = std::min(rows, m - first);
    float* to = out + first * n;
    const float* made = linear(context, weights, a + first * weights.k, rows, epilogue, to);
    if (first == 0 && count == m) return made;
    if (made != to) {
#pragma omp parallel for schedule(static)
      for (int64_t i = 0; i < count; ++i) std::copy(made + i * n, made + (i + 1) * n, to + i * n);
    }
    first += count;
  }
  return out;
}

template <>
void linear_layernorm<Cpu, float>(Context<Cpu>& context, const Linear<float>& weights, const float* a, int64_t m,
                                  const ResidualNorm<float>& norm, int64_t rows, float* product, float* x) {
  const float* made = linear(context, weights, a, m, {}, product);
  add_bias_input_layernorm<Cpu, float>(context, made, weights.bias, x, norm.gamma, norm.beta, norm.eps, rows, weights.n,
                                       nullptr, x);
}

template <>
void gemm<Cpu, float, float>(Context<Cpu>& context, const GemmShape& shape, const float* a, const float* b, float* c) {
  context.gemm->gemm(shape, a, b, c);
}

}  // namespace ftbert
