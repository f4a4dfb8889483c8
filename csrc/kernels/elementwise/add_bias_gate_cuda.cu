// out = act(gate + bias) * (up + bias): gate and up are the even and the odd columns of x.
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

constexpr int kRows = 2;  // rows a thread has in flight, each 32 bytes

// A thread has W columns of out, made of 2 * W of x.
// Out: nothing, or E4m3Rows in the place of out.
template <Activation kActivation, int W, class E, class... Out>
__global__ void __launch_bounds__(kColumnThreads)
    add_bias_gate_kernel(const E* x, const E* bias, int64_t rows, int packs, E* out, Out... e4m3) {
  using Pack = Packed<E, W>;
  wait_for_inputs();
  const ColumnWalk walk(packs);
  if (walk.idle()) return;
  const auto load = [](const E* from, Pack(&to)[2]) { to[0] = Pack::load(from), to[1] = Pack::load(from + W); };
  const int64_t cols = int64_t{packs} * W, column = int64_t{walk.pack} * W;
  float b[2 * W] = {};
  if (bias != nullptr) {
    Pack pack[2];
    load(bias + 2 * column, pack);
    to_floats(pack, b);
  }
  (e4m3.read_scale(), ...);
  for (int64_t first = walk.row; first < rows; first += kRows * walk.step) {
    Pack pack[kRows][2];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i * walk.step;
      if (row < rows) load(x + 2 * (row * cols + column), pack[i]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i * walk.step;
      if (row >= rows) break;
      float v[2 * W];
      to_floats(pack[i], v);
#pragma unroll
      for (int w = 0; w < 2 * W; ++w) v[w] += b[w];
      float gated[W];
#pragma unroll
      for (int w = 0; w < W; ++w) gated[w] = activate<kActivation, E>(v[2 * w]) * v[2 * w + 1];
      if constexpr (sizeof...(Out) == 0) put(gated, out, row * cols + column);
      (put(gated, e4m3, row * cols + column), ...);
    }
  }
}

}  // namespace

template <class Device, class T>
void add_bias_gate(Context<Device>& context, const Operand& x, const T* bias, Activation activation, int64_t rows,
                   int64_t cols, const Operand& out) {
  if (rows == 0 || cols == 0) return;
  FTBERT_CHECK(cols < (1 << 30), "add_bias_gate: a row has at most 2^30 elements, got ", cols);
  const T* const from = x.template as<T>();
  T* const to = out.scaled() ? nullptr : out.template as<T>();
  const auto launch = [&]<int W, class... Out>(const Out&... e4m3) {
    const int64_t packs = cols / W;
    const unsigned blocks = column_blocks(rows, packs, kRows, context.sm_count);
    with_activation(activation, [&](auto kind) {
      launch_overlapped(context, "kernel add_bias_gate",
                        add_bias_gate_kernel<decltype(kind)::value, W, native_t<T>, Out...>, blocks, kColumnThreads, 0,
                        1, native(from), native(bias), rows, packs, native(to), e4m3...);
    });
  };
  const bool wide = vectorizable(kWidth<T>, cols, from, bias, to) &&
                    vectorizable(kWidth<T>, cols, static_cast<const uint8_t*>(out.data));
  with_rows<T>(out.scaled() ? out : Operand(), [&](const auto&... e4m3) {
    with_width<kWidth<T>>(wide, [&]<int W>() { launch.template operator()<W>(e4m3...); });
  });
}

FTBERT_INSTANTIATE_CUDA(add_bias_gate, Cuda)

}  // namespace ftbert
