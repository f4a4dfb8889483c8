// The CPU's products go to whatever the caller handed down in the context.
#include "core/check.h"
#include "gemm/gemm.h"

namespace ftbert {

template <>
const float* linear<Cpu, float>(Context<Cpu>& context, const Linear<float>& weights, const float* a, int64_t m,
                                Epilogue epilogue, float* out) {
  return context.gemm->linear(weights, a, m, epilogue, out);
}

template <>
void gemm<Cpu, float, float>(Context<Cpu>& context, const GemmShape& shape, const float* a, const float* b, float* c) {
  context.gemm->gemm(shape, a, b, c);
}

}  // namespace ftbert
