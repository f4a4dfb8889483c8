// One vector a sequence from its packed tokens: cls, last, mean, mean_sqrt_len or max; optionally of unit length.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/kernels.h"

namespace ftbert::FTBERT_ISA {

void pooling(Context<Cpu>&, const float* hidden, const int32_t* cu_seqlens, int64_t batch, int64_t cols,
             PoolingMode mode, bool normalize, float* out) {
#pragma omp parallel for schedule(dynamic)
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t begin = cu_seqlens ? cu_seqlens[b] : b, length = cu_seqlens ? cu_seqlens[b + 1] - begin : 1;
    const float* rows = hidden + begin * cols;
    float* sum = out + b * cols;
    if (length == 0) {
      std::memset(sum, 0, cols * sizeof(float));
      continue;
    }
    const bool one = mode == PoolingMode::cls || mode == PoolingMode::last;
    std::memcpy(sum, rows + (mode == PoolingMode::last ? length - 1 : 0) * cols, cols * sizeof(float));
    for (int64_t t = 1; t < (one ? 1 : length); ++t) {
      const float* row = rows + t * cols;
      if (mode == PoolingMode::max) {
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) sum[c] = std::max(sum[c], row[c]);
      } else {
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) sum[c] += row[c];
      }
    }
    float scale = 1.0f;
    if (mode == PoolingMode::mean) scale = 1.0f / static_cast<float>(length);
    if (mode == PoolingMode::mean_sqrt_len) scale = 1.0f / std::sqrt(static_cast<float>(length));
    if (normalize) {
      float square = 0;
#pragma omp simd reduction(+ : square)
      for (int64_t c = 0; c < cols; ++c) square += sum[c] * sum[c];
      scale /= std::max(std::sqrt(square) * scale, 1e-12f);  // torch.nn.functional.normalize's eps
    }
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) sum[c] *= scale;
  }
}

}  // namespace ftbert::FTBERT_ISA
