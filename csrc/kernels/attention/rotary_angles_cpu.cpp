// amplitude * (cosine, sine) of each token's position * frequency, by the length of its sequence, [tokens, pairs, 2].
#include <cmath>
#include <vector>

#include "device/parallel_cpu.h"
#include "kernels/kernels.h"

namespace ftbert {

template <>
void rotary_angles<Cpu>(Context<Cpu>&, const double* frequencies, int64_t pairs, double amplitude,
                        const Stretch& stretch, const int32_t* positions, const int32_t* cu_seqlens, int64_t count,
                        int64_t tokens, float* table, int32_t* rows) {
  std::vector<double> of(pairs);
  for (int64_t s = 0; s < count; ++s) {
    const int64_t first = cu_seqlens[s], length = cu_seqlens[s + 1] - first;
    const double over = static_cast<double>(length) / static_cast<double>(stretch.trained) - 1;
    for (int64_t i = 0; i < pairs; ++i) {
      const double share = static_cast<double>(i) / static_cast<double>(pairs - 1);
      of[i] = frequencies[i] * (over > 0 ? std::pow(1 + stretch.factor * over, -share) : 1);
    }
#pragma omp parallel for schedule(static) if (length * pairs > kSerialElements)
    for (int64_t t = first; t < first + length; ++t) {
      float* const row = table + 2 * t * pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<double>(positions[t]) * of[i];
        row[2 * i] = static_cast<float>(amplitude * std::cos(angle));
        row[2 * i + 1] = static_cast<float>(amplitude * std::sin(angle));
      }
      rows[t] = static_cast<int32_t>(t);
    }
  }
  for (int64_t t = cu_seqlens[count]; t < tokens; ++t) {
    for (int64_t i = 0; i < 2 * pairs; ++i) table[2 * t * pairs + i] = 0;
    rows[t] = static_cast<int32_t>(t);
  }
}

}  // namespace ftbert
