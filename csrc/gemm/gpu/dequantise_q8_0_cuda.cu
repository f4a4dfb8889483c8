// A weight in Q8_0 -> row-major in 16 bits, for products of more rows than few_rows has, on other GPUs than Hopper.
#include "core/format.h"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "gemm/gpu/own.h"

namespace ftbert {
namespace {

constexpr int kThreads = 256;

// A warp has a step of a tile (core/format.h): [8, 64] of out.
template <class E>
__global__ void __launch_bounds__(kThreads)
    dequantise_q8_0_kernel(const int8_t* tiles, const __half* scales, int64_t steps_in_all, int steps, E* out) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t step = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  int4 numbers{};
  float scale[2] = {};
  if (step < steps_in_all) {
    numbers = *reinterpret_cast<const int4*>(tiles + step * kQ8TileRows * kQ8TileDepth + lane * 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = __half2float(scales[(step * 2 + h) * kQ8TileRows + g]);
  }
  wait_for_inputs();  // a product ahead may still read out
  if (step >= steps_in_all) return;
  E* const row = out + (step / steps * kQ8TileRows + g) * steps * kQ8TileDepth + step % steps * kQ8TileDepth;
  const int words[4] = {numbers.x, numbers.y, numbers.z, numbers.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) x[b] = static_cast<float>(static_cast<int8_t>(words[i] >> (8 * b))) * scale[i / 2];
    Packed<E, 4>::from_floats(x).store(row + i * 16 + t * 4);
  }
}

template <class E>
void launch(const Context<Cuda>& context, const Matrix& weight, void* out) {
  const int64_t steps = weight.k / kQ8TileDepth, all = weight.n / kQ8TileRows * steps;
  launch_overlapped(context, "kernel dequantise_q8_0", dequantise_q8_0_kernel<E>,
                    static_cast<unsigned>((all * 32 + kThreads - 1) / kThreads), kThreads, size_t{0}, 1,
                    static_cast<const int8_t*>(weight.data), reinterpret_cast<const __half*>(q8_0_scales(weight)), all,
                    static_cast<int>(steps), static_cast<E*>(out));
}

}  // namespace

void dequantise_q8_0(const Context<Cuda>& context, const Matrix& weight, DType dtype, void* out) {
  dtype == DType::fp16 ? launch<__half>(context, weight, out) : launch<__nv_bfloat16>(context, weight, out);
}

}  // namespace ftbert
