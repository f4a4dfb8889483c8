// How blocks that have different columns of the same rows tell each other the mean and the squared deviations of
// theirs: through global memory, without flags or fences.
#pragma once
#include <cstdint>

#include "device/vector.cuh"
#include "kernels/norm/norm_rule.cuh"

namespace ftbert {
namespace {

// A tile's moments in one access, marked with the product's turn in what squares do not need: the sign, and the last
// seven of 23 bits. 0 is nobody's mark.
inline constexpr uint32_t kMark = 0x8000007fu, kMarks = 255;

__device__ inline uint64_t pack_moments(float mean, float squares, uint32_t mark) {
  return static_cast<uint64_t>((__float_as_uint(squares) & ~kMark) | mark) << 32 | __float_as_uint(mean);
}
__device__ inline bool has_mark(uint64_t moments, uint32_t mark) {
  return (static_cast<uint32_t>(moments >> 32) & kMark) == mark;
}
__device__ inline float mean_of(uint64_t moments) { return __uint_as_float(static_cast<uint32_t>(moments)); }
__device__ inline float squares_of(uint64_t moments) {
  return __uint_as_float(static_cast<uint32_t>(moments >> 32) & ~kMark);
}
__device__ inline void tell(uint64_t* to, uint64_t moments) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(moments) : "memory");
}
__device__ inline uint64_t look(const uint64_t* from) {
  uint64_t moments;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(moments) : "l"(from) : "memory");
  return moments;
}

// The mean of two rows of n columns, eight apart, and what the norm multiplies their deviations by, when all tiles of
// them have told their moments; of rules that are not centred 0, and what it multiplies the rows by. The four lanes of
// a row look at one tile in four, up to kLooks each. work: columns (tiles side by side), mark, eps, row_inverse (1 /
// n).
template <int kTileN, int kLooks, class Rule, class Work>
__device__ void row_moments_of(const Work& work, const uint64_t* moments, float (&mean)[2], float (&scale)[2]) {
  const int mine = threadIdx.x % 4;
  uint64_t seen[2][kLooks];
  bool all;
  do {
    all = true;
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kLooks; ++i)
        if (mine + 4 * i < work.columns) seen[r][i] = look(moments + r * 8 * work.columns + mine + 4 * i);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < kLooks; ++i) all &= mine + 4 * i >= work.columns || has_mark(seen[r][i], work.mark);
  } while (!all);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kLooks; ++i)
      if (mine + 4 * i < work.columns) total += mean_of(seen[r][i]);
    mean[r] = Rule::kCentred ? reduce<4>(total, Sum()) * (kTileN * work.row_inverse) : 0;
#pragma unroll
    for (int i = 0; i < kLooks; ++i)
      if (mine + 4 * i < work.columns) {
        const float d = mean_of(seen[r][i]) - mean[r];
        squares += Rule::kCentred ? squares_of(seen[r][i]) + kTileN * d * d : squares_of(seen[r][i]);
      }
    scale[r] = inverse_root_mean<4>(squares, work.row_inverse, work.eps);
  }
}

}  // namespace
}  // namespace ftbert
