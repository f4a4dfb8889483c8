// How the sums of a warp's products lie in its registers, behind mma.sync.m16n8 and behind wgmma alike: float
// [accumulators][4], an accumulator of 16 rows by eight columns. A lane has two of these rows, eight apart, and of each
// two columns side by side, [2 * r + c]. Four neighbouring lanes have a row.
#pragma once
#include <cstdint>

namespace ftbert {

// threadIdx.x, read anew: the compiler keeps nothing that follows from it in registers, of which kernels that need it
// once a tile would have too few.
__device__ inline uint32_t thread_anew() {
  uint32_t thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

struct Fragment {
  // A lane's first row, and its first column of each eight.
  static __device__ int row() { return static_cast<int>(threadIdx.x) % 32 / 4; }
  static __device__ int column() { return static_cast<int>(threadIdx.x) % 4 * 2; }

  // f(j, r, x, y) of all pairs: x is at row() + 8 * r, 8 * j + column(), and y in the next column.
  template <int kEights, class F>
  static __device__ void each_pair(float (&sums)[kEights][4], const F& f) {
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) f(j, r, sums[j][2 * r], sums[j][2 * r + 1]);
  }
};

}  // namespace ftbert
