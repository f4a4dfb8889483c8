// softmax(scale * score + relative bias) over the keys of each row's own sequence; 0 past its length.
#include <cstring>

#include "kernels/attention/relative_bias_row.h"
#include "kernels/attention/softmax_row.h"
#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {

void softmax(Context<Cpu>&, const float* scores, const int32_t* cu_seqlens, float scale, RelativeBias<float> relative,
             int64_t batch, int64_t heads, int64_t seq, float* probabilities) {
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t length = cu_seqlens[b + 1] - cu_seqlens[b];
      const int32_t* column = relative.columns ? relative.columns + cu_seqlens[b] : nullptr;
      for (int64_t s = 0; s < seq; ++s) {
        const int64_t offset = ((b * heads + h) * seq + s) * seq;
        const float* in = scores + offset;
        float* out = probabilities + offset;
        if (s >= length) {
          std::memset(out, 0, seq * sizeof(float));
          continue;
        }
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) out[j] = in[j] * scale;
        if (relative.table) {
          const float* bias = relative.table + h * (2 * relative.span - 1) + relative.span - 1;
          add_relative_bias(bias, relative.span - 1, column, s, length, out);
        }
        const float inverse = 1.0f / exp_row(out, length);
#pragma omp simd
        for (int64_t j = 0; j < length; ++j) out[j] *= inverse;
        std::memset(out + length, 0, (seq - length) * sizeof(float));
      }
    }
  }
}

}  // namespace ftbert::FTBERT_ISA
