// out = norm(sum over ranks of x + bias + input), each rank reading the parts of all: a one-shot all-reduce, bias,
// residual and norm in one kernel.
#include "core/check.h"
#include "core/cuda_check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/peers.cuh"
#include "kernels/kernels.h"
#include "kernels/norm/norm_row.cuh"

namespace ftbert {
namespace {

// The sum of this thread's packs of a row, by rank, so that every rank adds in the same order.
template <class Shape, class E>
__device__ void add_parts(const PeerParts& all, int64_t at, int cols, int lane,
                          float (&x)[Shape::kPacks][Shape::kWidth]) {
  constexpr int W = Shape::kWidth, P = Shape::kPacks;
  Packed<E, W> packs[2][P];  // under way at once
  const auto load = [&](int rank, Packed<E, W>(&to)[P]) {
    load_row<Shape>(static_cast<const E*>(all.parts[rank]) + at, cols, lane, to);
  };
  load(0, packs[0]);
  load(1, packs[1]);
#pragma unroll
  for (int i = 0; i < P; ++i) {
    float y[W];
    packs[0][i].to_floats(x[i]);
    packs[1][i].to_floats(y);
#pragma unroll
    for (int w = 0; w < W; ++w) x[i][w] += y[w];
  }
#pragma unroll 1
  for (int rank = 2; rank < all.size; ++rank) {
    load(rank, packs[0]);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float y[W];
      packs[0][i].to_floats(y);
#pragma unroll
      for (int w = 0; w < W; ++w) x[i][w] += y[w];
    }
  }
}

// Copy: nothing, or E4m3Rows, and then out may be null. sum and out may alias input.
template <class Shape, class E, class Rule, class... Copy>
__global__ void __launch_bounds__(Shape::kMaxThreads, 1)
    all_reduce_layernorm_kernel(const PeerParts parts, const E* bias, const E* input, const E* gamma, const E* beta,
                                float eps, int64_t rows, int cols, E* sum, E* out, float offset, Copy... copy) {
  constexpr int W = Shape::kWidth, P = Shape::kPacks;
  const Rule rule{eps, offset};
  const PeerMeeting others(parts);
  wait_for_inputs();
  (copy.read_scale(), ...);
  RowWalk<Shape> walk;
  Packed<E, W> b[P], g[P], h[P];
  load_row<Shape>(bias, cols, walk.lane, b);
  load_row<Shape>(gamma, cols, walk.lane, g);
  load_row<Shape>(beta, cols, walk.lane, h);
  Packed<E, W> c[P];  // of the next row; the first comes while the others are awaited
  const auto load_input = [&] {
    load_row<Shape>(input && walk.row < rows ? input + walk.row * cols : nullptr, cols, walk.lane, c);
  };
  load_input();
  others.meet();
  while (walk.row < rows) {
    const int64_t at = walk.row * cols;
    float x[P][W];
    add_parts<Shape, E>(parts, at, cols, walk.lane, x);
    const auto first = [&](int i, float (&of_x)[W]) {
#pragma unroll
      for (int w = 0; w < W; ++w) of_x[w] = x[i][w];
    };
    norm_packs<Shape>(first, b, c, g, h, !std::is_same_v<Rule, NoRule>, rule, cols, walk.lane, sum ? sum + at : nullptr,
                      out, at, copy...);
    walk.row += walk.step;
    load_input();
  }
}

// Few shapes: a sum over GPUs takes longer than what a better one saves.
template <int kWidth, class Launch>
void with_shape(int64_t cols, const Launch& launch) {
  const int64_t packs = cols / kWidth;
  if (packs <= 128) return launch(RowShape<kWidth, 32, 4>());
  if (packs <= 256) return launch(RowShape<kWidth, 128, 2>());
  launch(RowShape<kWidth, 256, 4>());
}

}  // namespace

template <class T>
void add_bias_input_layernorm(Context<Cuda>& context, const PartialSums<T>& x, const T* bias, const T* input,
                              const Norm<T>& norm, int64_t rows, int64_t cols, const Output<T>& to) {
  if (rows == 0 || cols == 0) return;
  const Operand copy = to.copy.scaled() ? to.copy : Operand();
  T *const sum = to.sum, *const out = copy ? to.normed : to.only_norm();
  FTBERT_CHECK(adds_parts<T>(cols) && vectorizable(kWidth<T>, cols, bias, input, norm.gamma, norm.beta, sum, out) &&
                   vectorizable(kWidth<T>, cols, static_cast<const uint8_t*>(copy.data)),
               "a sum over ranks: expected rows and vectors that begin at 16 bytes, of up to 16 KiB, got ", cols,
               " columns");
  with_rows<T>(copy, [&]<class... Copy>(const Copy&... beside) {
    with_shape<kWidth<T>>(cols, [&]<class Shape>(Shape) {
      with_norm_rule(norm, [&]<class Rule>() {
        const auto kernel = all_reduce_layernorm_kernel<Shape, native_t<T>, Rule, Copy...>;
        int fitting = 0;
        FTBERT_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, kernel, Shape::kMaxThreads, 0));
        RowLaunch on = row_launch<Shape>(rows, context.sm_count);
        on.blocks = std::min(on.blocks, static_cast<unsigned>(fitting * context.sm_count));
        launch_overlapped(context, "kernel all_reduce_layernorm", kernel, on.blocks, on.threads, 0, 1,
                          static_cast<const PeerParts&>(x), native(bias), native(input), native(norm.gamma),
                          native(norm.beta), norm.eps, rows, cols, native(sum), native(out), norm.offset, beside...);
      });
    });
  });
}

#define FTBERT_INSTANTIATE(T)                                                                                       \
  template void add_bias_input_layernorm(Context<Cuda>&, const PartialSums<T>&, const T*, const T*, const Norm<T>&, \
                                         int64_t, int64_t, const Output<T>&);
FTBERT_CUDA_TYPES(FTBERT_INSTANTIATE)

}  // namespace ftbert
