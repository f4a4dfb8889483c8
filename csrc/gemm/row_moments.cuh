// How blocks that have different columns of the same rows tell each other the mean and the squared deviations of
// theirs: through global memory, without flags or fences.
#pragma once
#include <cstdint>

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

// Over the four lanes that share a row.
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace
}  // namespace ftbert
