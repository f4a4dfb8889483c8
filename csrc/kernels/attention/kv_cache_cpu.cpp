// Where a call's tokens come to lie in a cache of keys and values, and their way there.
#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace ftbert {

template <>
void cache_places<Cpu>(Context<Cpu>&, const CacheSlots& slots, const int32_t* cu_seqlens, int64_t count, int64_t most,
                       const CachePlaces& to) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t first = slots.index[i] * static_cast<int32_t>(slots.positions),
                  length = slots.lengths[slots.index[i]];
    for (int32_t t = cu_seqlens[i]; t < cu_seqlens[i + 1]; ++t) {
      to.positions[t] = length + t - cu_seqlens[i];
      to.rows[t] = first + to.positions[t];
    }
    to.begin_k[i] = first;
    to.end_k[i] = first + length + cu_seqlens[i + 1] - cu_seqlens[i];
  }
  for (int64_t t = cu_seqlens[count]; t < most; ++t) to.positions[t] = 0, to.rows[t] = -1;
}

template <>
void cache_grow<Cpu>(Context<Cpu>&, const CacheSlots& slots, int64_t count, const CachePlaces& places) {
  for (int64_t i = 0; i < count; ++i) slots.lengths[slots.index[i]] = places.end_k[i] - places.begin_k[i];
}

template <>
void store_keys_values<Cpu, float>(Context<Cpu>&, const Heads& heads, const float* qkv, int64_t tokens,
                                   const CacheRows<float>& cache) {
  const int64_t width = heads.kv_width();
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t row = cache.rows[t];
    if (row < 0 || row >= cache.count) continue;
    const float* const k = qkv + t * heads.qkv_width() + heads.width();
    std::memcpy(cache.keys + row * width, k, width * sizeof(float));
    std::memcpy(cache.values + row * width, k + width, width * sizeof(float));
  }
}

}  // namespace ftbert
