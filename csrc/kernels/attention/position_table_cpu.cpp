// A table of positions behind a projection, transposed by heads; and which of its rows each distance reads.
#include <algorithm>

#include "kernels/kernels.h"

namespace ftbert {

template <>
void position_table<Cpu, float>(Context<Cpu>&, const Heads& heads, const float* x, int64_t x_stride, const float* bias,
                                int64_t rows, const PositionProducts<float>& of, float* out) {
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < heads.width(); ++column) {
    float* const to = out + column * of.stride;
    for (int64_t r = 0; r < rows; ++r) to[rows - 1 - r] = x[r * x_stride + column] + (bias ? bias[column] : 0.0f);
    std::fill(to + rows, to + of.stride, 0.0f);
  }
}

template <>
void position_rows<Cpu>(Context<Cpu>&, const int32_t* buckets, int64_t reach, int64_t span, int32_t* out) {
  const auto row = [&](int64_t bucket) {
    return static_cast<int32_t>(std::clamp<int64_t>(span - 1 + bucket, 0, 2 * span - 1));
  };
  for (int64_t d = 0; d <= reach; ++d) out[reach + d] = row(buckets[d]), out[reach - d] = row(-buckets[d]);
}

}  // namespace ftbert
