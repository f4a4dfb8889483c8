// Sums of products of E4M3, whatever kernel has them: their scales, and results in E4M3 again.
#pragma once
#include "core/types.h"
#include "device/activation.cuh"
#include "device/e4m3.cuh"
#include "device/vector.cuh"
#include "gemm/gpu/own.h"

namespace ftbert {
namespace {

// They lie on the device and are read, as the bias, before the kernel ahead has ended.
struct E4m3Scales {
  const float* a_scale;  // one
  const float* b_scale;  // one, or one for each of B's rows
  bool b_by_rows;
  const float* c_scale;  // one, where C is E4M3: what is stored is multiplied by its reciprocal
};

inline E4m3Scales scales_of(const Product& p, const ProductData& data) {
  return {data.a_scale, data.b_scale, p.b_scales == Granularity::row, data.c_scale};
}

// What the sums of W columns from `column` on are multiplied by before they get the bias.
template <int W>
__device__ void load_scales(const E4m3Scales& scales, int column, float (&scale)[W]) {
  const float a = *scales.a_scale;
  if (scales.b_by_rows) {
    Packed<float, W>::load(scales.b_scale + column).to_floats(scale);
  } else {
    const float b = *scales.b_scale;
#pragma unroll
    for (int w = 0; w < W; ++w) scale[w] = b;
  }
#pragma unroll
  for (int w = 0; w < W; ++w) scale[w] *= a;
}

// The sums of E4M3 operands with their scales and the bias; factors: of two columns scale, bias, scale, bias.
template <int kEights>
__device__ void apply_factors(float (&sum)[kEights][4], const float4* factors) {
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const float4 of = factors[j * 4 + threadIdx.x % 4];
    sum[j][0] = sum[j][0] * of.x + of.y, sum[j][1] = sum[j][1] * of.z + of.w;
    sum[j][2] = sum[j][2] * of.x + of.y, sum[j][3] = sum[j][3] * of.z + of.w;
  }
}

// C in E4M3, with a gate half as many as v, which was rounded to E; inverse: what they are multiplied by before they
// are rounded again.
template <class E, Activation kActivation, Gate kGate, int kSums>
__device__ auto pack_e4m3(const float (&v)[kSums], float inverse) {
  constexpr int kCount = kGate == Gate::pairs ? kSums / 2 : kSums;
  Packed<uint32_t, kCount / 4> packed;
  uint32_t* const words = reinterpret_cast<uint32_t*>(&packed.bits);
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    float x[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int j = i * 4 + w;
      if constexpr (kGate == Gate::pairs)
        x[w] = inverse * (activate<kActivation, E>(v[2 * j]) * v[2 * j + 1]);
      else
        x[w] = inverse * activate<kActivation, E>(v[j]);
    }
    words[i] = to_e4m3(x[0], x[1], x[2], x[3]);
  }
  return packed;
}

}  // namespace
}  // namespace ftbert
