// Sums over the threads that share a row, where several such groups are in a block and go at their own pace.
#pragma once
#include "device/vector.cuh"

namespace ftbert {

// Of groups of kThreads neighbours (a power of two), at most kMaxGroups (15 of more than a warp: a hardware barrier
// each) in a block. Every thread gets the same bits.
template <int kThreads, int kMaxGroups>
class GroupSum {
  static constexpr int kWarps = kThreads / 32, kMostValues = 2;  // kWarps: 0 where a warp holds several groups
  static_assert((kThreads & (kThreads - 1)) == 0 && (kThreads <= 32 || kMaxGroups <= 15));

 public:
  static constexpr int kFloats = kThreads > 32 ? kMaxGroups * 2 * kMostValues * kWarps : 1;

  // shared: float[kFloats]
  __device__ GroupSum(float* shared, int group) : partial_(shared + group * 2 * kMostValues * kWarps), group_(group) {}

  template <int kValues>
  __device__ void operator()(float (&x)[kValues]) {
    static_assert(kValues <= kMostValues);
#pragma unroll
    for (int offset = kThreads < 32 ? kThreads / 2 : 16; offset > 0; offset /= 2)
#pragma unroll
      for (int v = 0; v < kValues; ++v) x[v] += __shfl_xor_sync(0xffffffffu, x[v], offset);
    if constexpr (kThreads > 32) {
      // Two rounds in turns, so that one barrier is enough: who writes has passed that of the round between.
      float* const mine = partial_ + round_ * kMostValues * kWarps;
      round_ ^= 1;
      const int lane = threadIdx.x % 32, warp = threadIdx.x % kThreads / 32;
      if (lane == 0)
#pragma unroll
        for (int v = 0; v < kValues; ++v) mine[v * kWarps + warp] = x[v];
      asm volatile("bar.sync %0, %1;" ::"r"(group_ + 1), "n"(kThreads) : "memory");
#pragma unroll
      for (int v = 0; v < kValues; ++v) x[v] = mine[v * kWarps + lane % kWarps];
#pragma unroll
      for (int offset = kWarps / 2; offset > 0; offset /= 2)
#pragma unroll
        for (int v = 0; v < kValues; ++v) x[v] += __shfl_xor_sync(0xffffffffu, x[v], offset);
    }
  }

  __device__ float operator()(float x) {
    float one[1] = {x};
    (*this)(one);
    return one[0];
  }

 private:
  float* partial_;
  int group_, round_ = 0;
};

}  // namespace ftbert
