// What attention_decode does with the sums over a query's keys: of a lane, of neighbouring lanes, of several blocks.
#pragma once
#include <cstdint>

#include "device/vector.cuh"

namespace ftbert {
namespace {

// 2^x. Of 16-bit elements subnormal results do not count.
template <class E>
__device__ float decode_exp2(float x) {
  return sizeof(E) == 2 ? fast_exp2(x) : exp2f(x);
}

// Columns [4 * column, 4 * column + 4) of a row of results.
template <class E>
__device__ void store_four(const float (&sum)[4], float factor, E* row, int column) {
  float scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scaled[i] = sum[i] * factor;
  Packed<E, 4>::from_floats(scaled).store(row + 4 * column);
}

// One query's running softmax over the keys that a lane has seen.
template <int kNumbers>
struct RunningSum {
  float largest = -1e30f, total = 0, sum[kNumbers] = {};

  __device__ void scale(float factor) {
    total *= factor;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) sum[i] *= factor;
  }
};

// Of two vectors that neighbouring lanes hold. All lanes of the warp come.
template <int kLanes, int kNumbers>
__device__ float dot_of_lanes(const float (&x)[kNumbers], const float (&y)[kNumbers]) {
  float dot = 0;
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) dot += x[i] * y[i];
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, offset);
  return dot;
}

// How many have arrived before. By a thread whose block has a barrier before it and behind it: what blocks have stored
// before they arrive, those that arrive later can read behind it.
__device__ inline int arrive_at(int32_t* arrivals) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  return before;
}

}  // namespace
}  // namespace ftbert
