// numbers, scales = Q8_1 of x: a warp for each block of 32.
#include <algorithm>

#include "core/dispatch.h"
#include "core/format.h"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/elementwise/quantise_q8_1.h"

namespace ftbert {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
static_assert(kQ8Block == 32);

template <class E>
__global__ void __launch_bounds__(kThreads)
    quantise_q8_1_kernel(const E* x, int64_t blocks, int8_t* numbers, float* scales) {
  constexpr float kMost = 127.0f;
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t block = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; block < blocks; block += step) {
    const float number = to_float(x[block * 32 + lane]);
    float largest = fabsf(number);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const bool finite = __all_sync(0xffffffffu, isfinite(number));
    const float scale = largest / kMost;
    // Of the least scales, which are rounded far, a quotient may be beyond 127.
    const float quotient = finite && scale > 0 ? fminf(fmaxf(number / scale, -kMost), kMost) : 0.0f;
    numbers[block * 32 + lane] = static_cast<int8_t>(roundf(quotient));
    if (lane == 0) scales[block] = finite ? scale : __int_as_float(0x7fc00000);
  }
}

}  // namespace

template <class Device, class T>
void quantise_q8_1(Context<Device>& context, const T* x, int64_t rows, int64_t cols, int8_t* numbers, float* scales) {
  const int64_t blocks = rows * cols / kQ8Block;
  if (blocks == 0) return;
  const int64_t room = int64_t{context.sm_count} * (2048 / kThreads);
  launch_kernel(context, "kernel quantise_q8_1", quantise_q8_1_kernel<native_t<T>>,
                static_cast<unsigned>(std::min((blocks + kWarps - 1) / kWarps, room)), kThreads, native(x), blocks,
                numbers, scales);
}

#define FTBERT_INSTANTIATE(T) template void quantise_q8_1(Context<Cuda>&, const T*, int64_t, int64_t, int8_t*, float*);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
