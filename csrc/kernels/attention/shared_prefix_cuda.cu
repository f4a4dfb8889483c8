// Sequences behind a common prefix: where their keys lie, and the prefix's before each of them.
#include <algorithm>
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
    places_kernel(const int32_t* cu_seqlens, int count, int prefix, int most, CachePlaces to) {
  wait_for_inputs();
  const int i = static_cast<int>(blockIdx.x);
  if (i == count) {
#pragma unroll 1
    for (int t = cu_seqlens[count] + static_cast<int>(threadIdx.x); t < most; t += kThreads)
      to.positions[t] = 0, to.rows[t] = -1;
    return;
  }
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

}  // namespace

template <>
void shared_prefix_places<Cuda>(Context<Cuda>& context, const int32_t* cu_seqlens, int64_t count, int64_t prefix,
                                int64_t most, const CachePlaces& to) {
  launch_overlapped(context, "kernel shared_prefix_places", places_kernel, dim3(static_cast<unsigned>(count + 1)),
                    kThreads, 0, 1, cu_seqlens, static_cast<int>(count), static_cast<int>(prefix),
                    static_cast<int>(most), to);
}

template <class Device, class T>
void repeat_prefix(Context<Device>& context, int64_t width, int64_t prefix, const int32_t* begins, int64_t count,
                   int64_t rows, T* keys, T* values) {
  if (prefix == 0 || width == 0) return;
  constexpr int64_t kInVector = sizeof(uint4) / sizeof(T), kMostBlocks = 65535;
  const auto aligned = [](const T* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(uint4) == 0; };
  FTBERT_CHECK(width % kInVector == 0 && aligned(keys) && aligned(values),
               "a cache of keys and values on a GPU is written 16 bytes at a time: rows must begin at multiples of "
               "that");
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

#define FTBERT_INSTANTIATE(T) \
  template void repeat_prefix<Cuda, T>(Context<Cuda>&, int64_t, int64_t, const int32_t*, int64_t, int64_t, T*, T*);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
