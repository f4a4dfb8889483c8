// [tokens, qkv_width] + bias -> q, k, v [count, heads, seq, head_size], padding restored as zeros.
#include <cstring>

#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {

void add_qkv_bias(Context<Cpu>&, const Heads& heads, const float* qkv, const float* bias, const Sequences& sequences,
                  float* q, float* k, float* v) {
  const int64_t size = heads.size, seq = sequences.max_k, stride = heads.qkv_width(), shared = heads.count / heads.kv;
  float* const outs[3] = {q, k, v};
  const int64_t first_columns[3] = {0, heads.width(), heads.width() + heads.kv_width()};
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t b = 0; b < sequences.count; ++b) {
    for (int64_t h = 0; h < heads.count; ++h) {
      const int64_t length = sequences.cu_q[b + 1] - sequences.cu_q[b];
      for (int64_t s = 0; s < seq; ++s) {
        for (int which = 0; which < 3; ++which) {
          float* out = outs[which] + ((b * heads.count + h) * seq + s) * size;
          if (s >= length) {
            std::memset(out, 0, size * sizeof(float));
            continue;
          }
          const int64_t column = first_columns[which] + (which == 0 ? h : h / shared) * size;
          const float* in = qkv + (sequences.cu_q[b] + s - sequences.first_q) * stride + column;
          for (int64_t d = 0; d < size; ++d) out[d] = in[d] + (bias ? bias[column + d] : 0.0f);
        }
      }
    }
  }
}

}  // namespace ftbert::FTBERT_ISA
