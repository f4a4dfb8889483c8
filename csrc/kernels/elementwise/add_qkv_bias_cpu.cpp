// [tokens, 3*hidden] + bias -> q, k, v [batch, heads, seq, head_size], padding restored as zeros.
#include <cstring>

#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {

void add_qkv_bias(Context<Cpu>&, const float* qkv, const float* bias, int64_t first_token, const int32_t* cu_seqlens,
                  int64_t batch, int64_t seq, int64_t heads, int64_t head_size, float* q, float* k, float* v) {
  const int64_t hidden = heads * head_size;
  float* const outs[3] = {q, k, v};
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t length = cu_seqlens[b + 1] - cu_seqlens[b];
      for (int64_t s = 0; s < seq; ++s) {
        for (int which = 0; which < 3; ++which) {
          float* out = outs[which] + ((b * heads + h) * seq + s) * head_size;
          if (s >= length) {
            std::memset(out, 0, head_size * sizeof(float));
            continue;
          }
          const int64_t column = which * hidden + h * head_size;
          const float* in = qkv + (cu_seqlens[b] + s - first_token) * 3 * hidden + column;
          for (int64_t d = 0; d < head_size; ++d) out[d] = in[d] + (bias ? bias[column + d] : 0.0f);
        }
      }
    }
  }
}

}  // namespace ftbert::FTBERT_ISA
