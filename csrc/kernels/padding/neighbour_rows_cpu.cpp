// Rows of a token's neighbours in its sequence beside each other, as a convolution over columns reads them.
#include <cstring>

#include "kernels/kernels.h"

namespace ftbert {

template <>
void neighbour_rows<Cpu, float>(Context<Cpu>&, const float* x, const Sequences& sequences, const int32_t* columns,
                                int64_t kernel, int64_t cols, float* out) {
  const int32_t* const cu = sequences.cu_q;
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < sequences.count; ++b) {
    for (int64_t t = cu[b]; t < cu[b + 1]; ++t) {
      float* to = out + (t - sequences.first_q) * kernel * cols;
      for (int64_t o = -(kernel / 2); o <= kernel / 2; ++o, to += cols) {
        int64_t from = t + o;
        if (columns)  // which ascend: with gaps the neighbour is nearer, or there is none
          for (; from != t && (from < cu[b] || from >= cu[b + 1] || columns[from] != columns[t] + o);)
            from += from < t ? 1 : -1;
        if (from >= cu[b] && from < cu[b + 1] && (o == 0 || from != t))
          std::memcpy(to, x + (from - sequences.first_q) * cols, cols * sizeof(float));
        else
          std::memset(to, 0, cols * sizeof(float));
      }
    }
  }
}

}  // namespace ftbert
