// Sums over a query's keys, as attention_decode has them: of a lane, and of four columns.
#pragma once
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

// Sums over several keys in four columns of a head: of 2^(score - largest), and of those times values.
struct FourSums {
  float largest, total = 0, sum[4] = {};

  __device__ void add(float weight, float more, float4 four) {
    total += weight * more;
    sum[0] += weight * four.x, sum[1] += weight * four.y, sum[2] += weight * four.z, sum[3] += weight * four.w;
  }
  __device__ float4 columns() const { return {sum[0], sum[1], sum[2], sum[3]}; }
  // What attention gives; 0 without keys.
  template <class E>
  __device__ void store(E* row, int column) const {
    store_four(sum, total != 0 ? 1 / total : 0, row, column);
  }
};

}  // namespace
}  // namespace ftbert
