// Where a call's keys and values come to lie, in a cache or behind a common prefix, and their way there.
#include <cstdint>
#include <cstring>

#include "device/parallel_cpu.h"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// Of sequence i: `first` is the first key's row, and `ahead` keys are ahead of its tokens.
void find_places(const int32_t* cu_seqlens, int64_t i, int32_t first, int32_t ahead, const CachePlaces& to) {
  const int32_t begin = cu_seqlens[i], end = cu_seqlens[i + 1];
  for (int32_t t = begin; t < end; ++t) {
    to.positions[t] = ahead + t - begin;
    to.rows[t] = first + to.positions[t];
  }
  to.begin_k[i] = first;
  to.end_k[i] = first + ahead + end - begin;
}

}  // namespace

template <>
void cache_places<Cpu>(Context<Cpu>&, const CacheSlots& slots, const int32_t* cu_seqlens, int64_t count, int64_t most,
                       const CachePlaces& to) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t slot = slots.index[i];
    find_places(cu_seqlens, i, slot * static_cast<int32_t>(slots.positions), slots.lengths[slot], to);
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

template <>
void shared_prefix_places<Cpu>(Context<Cpu>&, const int32_t* cu_seqlens, int64_t count, int64_t prefix, int64_t,
                               const CachePlaces& to) {
  const auto ahead = static_cast<int32_t>(prefix);
  for (int32_t i = 0; i < count; ++i)
    find_places(cu_seqlens, i, i > 0 ? (i - 1) * ahead + cu_seqlens[i] : 0, i > 0 ? ahead : 0, to);
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
