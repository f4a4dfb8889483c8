// [count, heads, seq, head_size] -> [tokens, width], dropping padding.
#include <cstring>

#include "kernels/kernels.h"

namespace ftbert {

template <>
void transpose<Cpu, float>(Context<Cpu>&, const Heads& heads, const float* x, const Sequences& sequences, float* out) {
  const int64_t seq = sequences.max_k;
  const int32_t* const cu = sequences.cu_q;
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t b = 0; b < sequences.count; ++b)
    for (int64_t h = 0; h < heads.count; ++h)
      for (int64_t s = 0; s < cu[b + 1] - cu[b]; ++s)
        std::memcpy(out + ((cu[b] + s - sequences.first_q) * heads.count + h) * heads.size,
                    x + ((b * heads.count + h) * seq + s) * heads.size, heads.size * sizeof(float));
}

}  // namespace ftbert
