// E4M3, eight bits of floating point: 448 is the largest number, and there is no infinity. One instruction converts two
// numbers from capability 89 on; before it cuda_fp8.h computes the same.
#pragma once
#include <cuda_fp8.h>

#include <cstdint>

namespace ftbert {

using e4m3_t = __nv_fp8_e4m3;

// The nearest numbers, of two equally near the even one; beyond 448 that, NaN of NaN. x in the low byte.
__device__ inline uint16_t to_e4m3(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, __NV_E4M3);
}

// In the order of memory.
__device__ inline uint32_t to_e4m3(float x, float y, float z, float w) {
  return to_e4m3(x, y) | static_cast<uint32_t>(to_e4m3(z, w)) << 16;
}
__device__ inline uint32_t to_e4m3(const float4& v) { return to_e4m3(v.x, v.y, v.z, v.w); }

// Exact.
__device__ inline float2 from_e4m3(uint16_t pair) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
}
__device__ inline float4 from_e4m3(uint32_t four) {
  const float2 low = from_e4m3(static_cast<uint16_t>(four)), high = from_e4m3(static_cast<uint16_t>(four >> 16));
  return {low.x, low.y, high.x, high.y};
}

}  // namespace ftbert
