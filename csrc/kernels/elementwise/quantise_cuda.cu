// out = E4M3 of x / scale, or byte rows of x.
#include <algorithm>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/byte_rows.cuh"
#include "device/e4m3_rows.cuh"
#include "device/launch.cuh"
#include "device/row_shape.cuh"
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

template <class E>
void to_e4m3_rows(const Context<Cuda>& context, const E* x, int64_t count, const Operand& out) {
  const E4m3Rows to(out);
  // 16 bytes of out at a time; a matrix has no end of a row.
  constexpr int kWide = 16;
  const bool wide = reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(to.data) % kWide == 0;
  with_width<kWide>(wide, [&]<int W>() {
    const int64_t blocks = (count / W + kThreads - 1) / kThreads, room = int64_t{context.sm_count} * (2048 / kThreads);
    launch_overlapped(context, "kernel quantise", quantise_kernel<W, E>,
                      static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, room)), kThreads, 0, 1, x, count, to);
  });
}

template <class Shape, class E>
__global__ void __launch_bounds__(Shape::kMaxThreads)
    byte_rows_kernel(const E* x, int64_t rows, int cols, ByteRows out) {
  using Pack = Packed<E, Shape::kWidth>;
  wait_for_inputs();
  for (RowWalk<Shape> walk; walk.row < rows; walk.row += walk.step) {
    const E* const from = x + walk.row * cols;
    out.begin_row(walk.row);
    if constexpr (Shape::kPacks > 0) {
      float numbers[Shape::kPacks][Shape::kWidth] = {};
#pragma unroll
      for (int i = 0; i < Shape::kPacks; ++i) {
        const int col = (i * Shape::kThreads + walk.lane) * Shape::kWidth;
        if (col < cols) Pack::load(from + col).to_floats(numbers[i]);
      }
      store_byte_row<Shape>(out, numbers, cols, walk.lane);
    } else {
      const auto value = [&](int col, float (&numbers)[Shape::kWidth]) { Pack::load(from + col).to_floats(numbers); };
      store_long_byte_row<Shape>(out, value, cols, walk.lane);
    }
  }
}

template <class E>
void to_byte_rows(const Context<Cuda>& context, const E* x, int64_t rows, int64_t cols, const Operand& out) {
  const ByteRows to(out, cols);
  FTBERT_CHECK(cols < (1 << 30), "quantise: a row has at most 2^30 elements, got ", cols);
  const bool wide = vectorizable(kWidth<E>, cols, x) && is_wide(out);
  with_row_shape<kWidth<E>>(wide, cols, [&]<class Shape>(Shape) {
    const RowLaunch on = row_launch<Shape>(rows, context.sm_count);
    launch_overlapped(context, "kernel quantise", byte_rows_kernel<Shape, E>, on.blocks, on.threads, 0, 1, x, rows,
                      static_cast<int>(cols), to);
  });
}

}  // namespace

template <class Device, class T>
void quantise(Context<Device>& context, const T* x, int64_t rows, int64_t cols, const Operand& out) {
  if (out.format != &formats::byte_rows) {
    out.scaled_e4m3();  // or an error
    if (rows * cols > 0) to_e4m3_rows(context, native(x), rows * cols, out);
    return;
  }
  if constexpr (sizeof(T) == 2) {
    if (rows * cols > 0) to_byte_rows(context, native(x), rows, cols, out);
  } else {
    throw Error("rows of " + std::string(to_string(kDType<T>)) + " are not stored as byte rows on a GPU");
  }
}

FTBERT_INSTANTIATE_CUDA(quantise, Cuda)

}  // namespace ftbert
