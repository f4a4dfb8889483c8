// out = E4M3 of x / scale.
#include <algorithm>

#include "core/dispatch.h"
#include "device/e4m3_rows.cuh"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 256;

// A thread takes kWide elements where both x and out are aligned to that, and of the rest a single element. Divides, so
// that the result is that of the quotient.
template <int W, class E>
__global__ void __launch_bounds__(kThreads) quantise_kernel(const E* x, int64_t count, E4m3Rows out) {
  constexpr int kLoads = W < kWidth<E> ? 1 : W / kWidth<E>, kLoad = W / kLoads;
  wait_for_inputs();
  const float scale = *out.scale;
  const int64_t packs = count / W, step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < packs; i += step) {
    Packed<E, kLoad> pack[kLoads];
#pragma unroll
    for (int l = 0; l < kLoads; ++l) pack[l] = Packed<E, kLoad>::load(x + i * W + l * kLoad);
    float v[W];
    to_floats(pack, v);
#pragma unroll
    for (int w = 0; w < W; ++w) v[w] /= scale;
    store_e4m3(v, 1.0f, out.data + i * W);
  }
  for (int64_t i = packs * W + first; i < count; i += step) {
    const float v[1] = {to_float(x[i]) / scale};
    store_e4m3(v, 1.0f, out.data + i);
  }
}

}  // namespace

template <class Device, class T>
void quantise(Context<Device>& context, const T* x, int64_t rows, int64_t cols, const Operand& out) {
  const E4m3Rows to(out);
  const int64_t count = rows * cols;
  if (count == 0) return;
  // 16 bytes of out at a time; a matrix has no end of a row.
  constexpr int kWide = 16;
  const bool wide = reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(to.data) % kWide == 0;
  with_width<kWide>(wide, [&]<int W>() {
    const int64_t blocks = (count / W + kThreads - 1) / kThreads, room = int64_t{context.sm_count} * (2048 / kThreads);
    launch_overlapped(context, "kernel quantise", quantise_kernel<W, native_t<T>>,
                      static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, room)), kThreads, 0, 1, native(x), count,
                      to);
  });
}

FTBERT_INSTANTIATE_CUDA(quantise, Cuda)

}  // namespace ftbert
