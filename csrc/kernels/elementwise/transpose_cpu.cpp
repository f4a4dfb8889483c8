// [batch, heads, seq, head_size] -> [tokens, hidden], dropping padding.
#include <cstring>

#include "kernels/kernels.h"

namespace ftbert {

template <>
void transpose<Cpu, float>(Context<Cpu>&, const float* x, int64_t first_token, const int32_t* cu_seqlens, int64_t batch,
                           int64_t seq, int64_t heads, int64_t head_size, float* out) {
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t s = 0; s < cu_seqlens[b + 1] - cu_seqlens[b]; ++s)
        std::memcpy(out + ((cu_seqlens[b] + s - first_token) * heads + h) * head_size,
                    x + ((b * heads + h) * seq + s) * head_size, head_size * sizeof(float));
}

}  // namespace ftbert
