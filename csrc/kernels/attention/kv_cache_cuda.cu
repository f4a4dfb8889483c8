// Where a call's keys and values come to lie, in a cache or behind a common prefix, and their way there. All that
// depends on lengths is read from the device, so that launches recorded once serve every position.
#include <algorithm>
#include <climits>
#include <cstdint>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 128;

// Kernels of places have a block a sequence, and one more for the tokens past the last: whether this is that one.
__device__ bool ends_places(const int32_t* cu_seqlens, int count, int most, const CachePlaces& to) {
  if (static_cast<int>(blockIdx.x) != count) return false;
#pragma unroll 1
  for (int t = cu_seqlens[count] + static_cast<int>(threadIdx.x); t < most; t += kThreads)
    to.positions[t] = 0, to.rows[t] = -1;
  return true;
}

__global__ void __launch_bounds__(kThreads)
    cache_places_kernel(CacheSlots slots, const int32_t* cu_seqlens, int count, int most, CachePlaces to) {
  wait_for_inputs();
  const int i = static_cast<int>(blockIdx.x);
  if (ends_places(cu_seqlens, count, most, to)) return;
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

__global__ void __launch_bounds__(kThreads)
    shared_prefix_places_kernel(const int32_t* cu_seqlens, int count, int prefix, int most, CachePlaces to) {
  wait_for_inputs();
  const int i = static_cast<int>(blockIdx.x);
  if (ends_places(cu_seqlens, count, most, to)) return;
  const int begin = cu_seqlens[i], end = cu_seqlens[i + 1], before = i > 0 ? prefix : 0;
#pragma unroll 1
  for (int t = begin + static_cast<int>(threadIdx.x); t < end; t += kThreads) {
    to.positions[t] = before + t - begin;
    to.rows[t] = i * prefix + t;
  }
  if (threadIdx.x == 0) {
    to.begin_k[i] = i > 0 ? (i - 1) * prefix + begin : 0;
    to.end_k[i] = i * prefix + end;
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

constexpr int kVectors = 2;    // of keys, and of values, that a thread reads at once
constexpr int kSequences = 8;  // to whose rows it writes them

// Block (x, y): a part of the prefix to so many sequences. vectors: of the prefix's keys, in 16 bytes.
__global__ void __launch_bounds__(kThreads)
    repeat_prefix_kernel(int64_t width, int prefix, int64_t vectors, const int32_t* begins, int count, int64_t rows,
                         uint4* keys, uint4* values) {
  wait_for_inputs();
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kVectors) + threadIdx.x;
  uint4 k[kVectors], v[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    if (const int64_t at = first + j * kThreads; at < vectors) k[j] = keys[at], v[j] = values[at];
  const int last = min(count, (static_cast<int>(blockIdx.y) + 1) * kSequences);
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.y) * kSequences; i < last; ++i) {
    const int64_t begin = begins[i];
    if (begin < prefix || begin > rows - prefix) continue;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (const int64_t at = first + j * kThreads; at < vectors)
        keys[begin * width + at] = k[j], values[begin * width + at] = v[j];
  }
}

void check_wide(bool wide) {
  FTBERT_CHECK(
      wide, "a cache of keys and values on a GPU is written 16 bytes at a time: rows must begin at multiples of that");
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
  constexpr int64_t kInVector = kWidth<T>;
  check_wide(heads.width() % kInVector == 0 &&
             vectorizable(kInVector, heads.kv_width(), qkv, cache.keys, cache.values));
  FTBERT_CHECK(tokens <= INT_MAX, "store_keys_values: too many tokens, ", tokens);
  launch_overlapped(context, "kernel store_keys_values", store_keys_values_kernel, dim3(static_cast<unsigned>(tokens)),
                    kThreads, 0, 1, reinterpret_cast<const uint4*>(qkv), heads.qkv_width() / kInVector,
                    heads.width() / kInVector, static_cast<int>(heads.kv_width() / kInVector), cache.rows, cache.count,
                    reinterpret_cast<uint4*>(cache.keys), reinterpret_cast<uint4*>(cache.values));
}

template <>
void shared_prefix_places<Cuda>(Context<Cuda>& context, const int32_t* cu_seqlens, int64_t count, int64_t prefix,
                                int64_t most, const CachePlaces& to) {
  launch_overlapped(context, "kernel shared_prefix_places", shared_prefix_places_kernel,
                    dim3(static_cast<unsigned>(count + 1)), kThreads, 0, 1, cu_seqlens, static_cast<int>(count),
                    static_cast<int>(prefix), static_cast<int>(most), to);
}

template <class Device, class T>
void repeat_prefix(Context<Device>& context, int64_t width, int64_t prefix, const int32_t* begins, int64_t count,
                   int64_t rows, T* keys, T* values) {
  if (prefix == 0 || width == 0) return;
  constexpr int64_t kInVector = kWidth<T>, kMostBlocks = 65535;
  check_wide(vectorizable(kInVector, width, keys, values));
  FTBERT_CHECK(prefix <= INT_MAX && count <= INT_MAX, "repeat_prefix: too many tokens, ", prefix, ", or sequences, ",
               count);
  const int64_t vectors = prefix * (width / kInVector);
  const auto parts = static_cast<unsigned>((vectors + kThreads * kVectors - 1) / (kThreads * kVectors));
  for (int64_t first = 0; first < count; first += kMostBlocks * kSequences) {
    const int64_t some = std::min(count - first, kMostBlocks * kSequences);
    launch_overlapped(context, "kernel repeat_prefix", repeat_prefix_kernel,
                      dim3(parts, static_cast<unsigned>((some + kSequences - 1) / kSequences)), kThreads, 0, 1,
                      width / kInVector, static_cast<int>(prefix), vectors, begins + first, static_cast<int>(some),
                      rows, reinterpret_cast<uint4*>(keys), reinterpret_cast<uint4*>(values));
  }
}

FTBERT_INSTANTIATE_CUDA(store_keys_values, Cuda)
FTBERT_INSTANTIATE_CUDA(repeat_prefix, Cuda)

}  // namespace ftbert
