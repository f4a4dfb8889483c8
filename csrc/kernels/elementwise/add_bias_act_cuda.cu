// x = act(x + bias), in place.
#include "core/check.h"
#include "device/activation.cuh"
#include "device/column_walk.cuh"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kRows = 4;  // rows a thread has in flight

template <Activation kActivation, int W, class E>
__global__ void __launch_bounds__(kColumnThreads) add_bias_act_kernel(E* x, const E* bias, int64_t rows, int packs) {
  using Pack = Packed<E, W>;
  wait_for_inputs();
  const ColumnWalk walk(packs);
  if (walk.idle()) return;
  float b[W] = {};
  if (bias != nullptr) Pack::load(bias + walk.pack * W).to_floats(b);
  const int64_t cols = int64_t{packs} * W;
  E* column = x + walk.pack * W;
  for (int64_t first = walk.row; first < rows; first += kRows * walk.step) {
    Pack pack[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i * walk.step;
      if (row < rows) pack[i] = Pack::load(column + row * cols);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i * walk.step;
      if (row >= rows) break;
      float v[W];
      pack[i].to_floats(v);
#pragma unroll
      for (int w = 0; w < W; ++w) v[w] = activate<kActivation, E>(v[w] + b[w]);
      Pack::from_floats(v).store(column + row * cols);
    }
  }
}

}  // namespace

template <class Device, class T>
void add_bias_act(Context<Device>& context, T* x, const T* bias, Activation activation, int64_t rows, int64_t cols) {
  if (rows == 0 || cols == 0 || (!bias && activation == Activation::none)) return;
  FTBERT_CHECK(cols < (1 << 30), "add_bias_act: a row has at most 2^30 elements, got ", cols);
  with_width<kWidth<T>>(vectorizable(kWidth<T>, cols, x, bias), [&]<int W>() {
    const int64_t packs = cols / W;
    const unsigned blocks = column_blocks(rows, packs, kRows, context.sm_count);
    with_activation(activation, [&](auto kind) {
      launch_overlapped(context, "kernel add_bias_act", add_bias_act_kernel<decltype(kind)::value, W, native_t<T>>,
                        blocks, kColumnThreads, 0, 1, native(x), native(bias), rows, packs);
    });
  });
}

template void add_bias_act(Context<Cuda>&, float*, const float*, Activation, int64_t, int64_t);
template void add_bias_act(Context<Cuda>&, half_t*, const half_t*, Activation, int64_t, int64_t);
template void add_bias_act(Context<Cuda>&, bfloat16_t*, const bfloat16_t*, Activation, int64_t, int64_t);

}  // namespace ftbert
