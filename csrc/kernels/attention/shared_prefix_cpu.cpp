// Sequences behind a common prefix: where their keys lie, and the prefix's before each of them.
#include <cstdint>
#include <cstring>

#include "device/parallel_cpu.h"
#include "kernels/kernels.h"

namespace ftbert {

template <>
void shared_prefix_places<Cpu>(Context<Cpu>&, const int32_t* cu_seqlens, int64_t count, int64_t prefix, int64_t,
                               const CachePlaces& to) {
  const auto before = static_cast<int32_t>(prefix);
  for (int32_t i = 0; i < count; ++i) {
    const int32_t begin = cu_seqlens[i], end = cu_seqlens[i + 1];
    for (int32_t t = begin; t < end; ++t) {
      to.positions[t] = t - begin + (i > 0 ? before : 0);
      to.rows[t] = i * before + t;
    }
    to.begin_k[i] = i > 0 ? (i - 1) * before + begin : 0;
    to.end_k[i] = i * before + end;
  }
}

template <>
void repeat_prefix<Cpu, float>(Context<Cpu>&, int64_t width, int64_t prefix, const int32_t* begins, int64_t count,
                               int64_t rows, float* keys, float* values) {
  const size_t bytes = prefix * width * sizeof(float);
#pragma omp parallel for if (count * prefix * width > kSerialElements)
  for (int64_t i = 0; i < count; ++i) {
    if (begins[i] < prefix || begins[i] > rows - prefix) continue;
    std::memcpy(keys + begins[i] * width, keys, bytes);
    std::memcpy(values + begins[i] * width, values, bytes);
  }
}

}  // namespace ftbert
