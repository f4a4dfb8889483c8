// Where a call's tokens come to lie in a cache of keys and values, and their way there. All that depends on lengths is
// read from the device, so that launches recorded once serve every position.
#include <climits>
#include <cstdint>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 128;

// A block a sequence; one more for the tokens past the last.
__global__ void __launch_bounds__(kThreads)
    cache_places_kernel(CacheSlots slots, const int32_t* cu_seqlens, int count, int most, CachePlaces to) {
  wait_for_inputs();
  const int i = static_cast<int>(blockIdx.x);
  if (i == count) {
#pragma unroll 1
    for (int t = cu_seqlens[count] + static_cast<int>(threadIdx.x); t < most; t += kThreads)
      to.positions[t] = 0, to.rows[t] = -1;
    return;
  }
  const int slot = slots.index[i], first = slot * static_cast<int>(slots.positions), length = slots.lengths[slot];
  const int begin = cu_seqlens[i], end = cu_seqlens[i + 1];
#pragma unroll 1
  for (int t = begin + static_cast<int>(threadIdx.x); t < end; t += kThreads) {
    to.positions[t] = length + t - begin;
    to.rows[t] = first + length + t - begin;
  }
  if (threadIdx.x == 0) {
    to.begin_k[i] = first;
    to.end_k[i] = first + length + end - begin;
  }
}

__global__ void __launch_bounds__(kThreads) cache_grow_kernel(CacheSlots slots, int count, CachePlaces places) {
  wait_for_inputs();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < count) slots.lengths[slots.index[i]] = places.end_k[i] - places.begin_k[i];
}

// A block a token. Widths in 16 bytes: from `first` on in a row of qkv there are keys, then values.
__global__ void __launch_bounds__(kThreads)
    store_keys_values_kernel(const uint4* qkv, int64_t stride, int64_t first, int width, const int32_t* rows,
                             int64_t cache_rows, uint4* keys, uint4* values) {
  wait_for_inputs();
  const int64_t token = blockIdx.x, row = rows[token];
  if (row < 0 || row >= cache_rows) return;
  const uint4* const from = qkv + token * stride + first;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
    keys[row * width + i] = from[i];
    values[row * width + i] = from[width + i];
  }
}

}  // namespace

template <>
void cache_places<Cuda>(Context<Cuda>& context, const CacheSlots& slots, const int32_t* cu_seqlens, int64_t count,
                        int64_t most, const CachePlaces& to) {
  launch_overlapped(context, "kernel cache_places", cache_places_kernel, dim3(static_cast<unsigned>(count + 1)),
                    kThreads, 0, 1, slots, cu_seqlens, static_cast<int>(count), static_cast<int>(most), to);
}

template <>
void cache_grow<Cuda>(Context<Cuda>& context, const CacheSlots& slots, int64_t count, const CachePlaces& places) {
  if (count == 0) return;
  launch_overlapped(context, "kernel cache_grow", cache_grow_kernel,
                    dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), kThreads, 0, 1, slots,
                    static_cast<int>(count), places);
}

template <class Device, class T>
void store_keys_values(Context<Device>& context, const Heads& heads, const T* qkv, int64_t tokens,
                       const CacheRows<T>& cache) {
  if (tokens == 0) return;
  constexpr int64_t kInVector = sizeof(uint4) / sizeof(T);
  const auto aligned = [](const T* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(uint4) == 0; };
  FTBERT_CHECK(
      heads.width() % kInVector == 0 && heads.kv_width() % kInVector == 0 && aligned(qkv) && aligned(cache.keys) &&
          aligned(cache.values),
      "a cache of keys and values on a GPU is written 16 bytes at a time: rows must begin at multiples of that");
  FTBERT_CHECK(tokens <= INT_MAX, "store_keys_values: too many tokens, ", tokens);
  launch_overlapped(context, "kernel store_keys_values", store_keys_values_kernel, dim3(static_cast<unsigned>(tokens)),
                    kThreads, 0, 1, reinterpret_cast<const uint4*>(qkv), heads.qkv_width() / kInVector,
                    heads.width() / kInVector, static_cast<int>(heads.kv_width() / kInVector), cache.rows, cache.count,
                    reinterpret_cast<uint4*>(cache.keys), reinterpret_cast<uint4*>(cache.values));
}

#define FTBERT_INSTANTIATE(T) \
  template void store_keys_values<Cuda, T>(Context<Cuda>&, const Heads&, const T*, int64_t, const CacheRows<T>&);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
