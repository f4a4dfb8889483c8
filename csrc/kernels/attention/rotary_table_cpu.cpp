// amplitude * (cosine, sine) of position * frequency, [positions, pairs, 2].
#include <cmath>

#include "device/parallel_cpu.h"
#include "kernels/kernels.h"

namespace ftbert {

template <>
void rotary_table<Cpu>(Context<Cpu>&, const double* frequencies, int64_t pairs, double amplitude, int64_t positions,
                       float* table) {
#pragma omp parallel for schedule(static) if (positions * pairs > kSerialElements)
  for (int64_t position = 0; position < positions; ++position) {
    float* const row = table + 2 * position * pairs;
    for (int64_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(position) * frequencies[i];
      row[2 * i] = static_cast<float>(amplitude * std::cos(angle));
      row[2 * i + 1] = static_cast<float>(amplitude * std::sin(angle));
    }
  }
}

}  // namespace ftbert
