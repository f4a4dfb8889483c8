// x = act(x + bias), in place or to E4M3.
#include "core/check.h"
#include "core/dispatch.h"
#include "device/activation.cuh"
#include "device/column_walk.cuh"
#include "device/e4m3_rows.cuh"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kRows = 4;  // rows a thread has in flight

// Out: nothing, or E4m3Rows.
template <Activation kActivation, int W, class E, class... Out>
__global__ void __launch_bounds__(kColumnThreads)
    add_bias_act_kernel(E* x, const E* bias, int64_t rows, int packs, Out... out) {
  using Pack = Packed<E, W>;
  wait_for_inputs();
  const ColumnWalk walk(packs);
  if (walk.idle()) return;
  float b[W] = {};
  if (bias != nullptr) Pack::load(bias + walk.pack * W).to_floats(b);
  const int64_t cols = int64_t{packs} * W;
  E* column = x + walk.pack * W;
  (out.read_scale(), ...);
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
      if constexpr (sizeof...(Out) == 0) put(v, column, row * cols);
      (put(v, out, row * cols + walk.pack * W), ...);
    }
  }
}

}  // namespace

template <class Device, class T>
void add_bias_act(Context<Device>& context, T* x, const T* bias, Activation activation, int64_t rows, int64_t cols,
                  const Operand& out) {
  if (rows == 0 || cols == 0) return;
  if (!bias && activation == Activation::none) return out ? quantise<Device, T>(context, x, rows, cols, out) : void();
  FTBERT_CHECK(cols < (1 << 30), "add_bias_act: a row has at most 2^30 elements, got ", cols);
  const auto launch = [&]<int W, class... Out>(const Out&... to) {
    const int64_t packs = cols / W;
    const unsigned blocks = column_blocks(rows, packs, kRows, context.sm_count);
    with_activation(activation, [&](auto kind) {
      launch_overlapped(context, "kernel add_bias_act",
                        add_bias_act_kernel<decltype(kind)::value, W, native_t<T>, Out...>, blocks, kColumnThreads, 0,
                        1, native(x), native(bias), rows, packs, to...);
    });
  };
  const bool wide =
      vectorizable(kWidth<T>, cols, x, bias) && vectorizable(kWidth<T>, cols, static_cast<const uint8_t*>(out.data));
  with_rows<T>(out, [&](const auto&... to) {
    with_width<kWidth<T>>(wide, [&]<int W>() { launch.template operator()<W>(to...); });
  });
}

FTBERT_INSTANTIATE_CUDA(add_bias_act, Cuda)

}  // namespace ftbert
