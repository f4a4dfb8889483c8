// y = norm(x + residual), with the sum, mean and 1 / deviation of each row for the backward pass.
#pragma once
#include "kernels/norm/training_rows.cuh"

namespace ftbert {
namespace {

template <class Rows>
struct ForwardArguments {
  Rows x, residual, sum, out;
  Vector gamma, beta;
  float *mean, *rstd;
  int64_t rows;
  int cols;
  float eps, offset;

  explicit ForwardArguments(const NormForward& norm)
      : x(norm.x),
        residual(norm.residual),
        sum(norm.sum),
        out(norm.out),
        gamma(norm.gamma),
        beta(norm.beta),
        mean(norm.mean),
        rstd(norm.rstd),
        rows(norm.rows),
        cols(static_cast<int>(norm.cols)),
        eps(norm.eps),
        offset(norm.offset) {}
};

// kCentred: LayerNorm. Shared memory: gamma, beta (LayerNorm's) [kCols], rows of x, rows of residual.
template <class Rows, bool kCentred, class Shape>
__global__ void __launch_bounds__(Shape::kForwardThreads, 1)
    norm_forward_kernel(const __grid_constant__ ForwardArguments<Rows> of) {
  constexpr int P = Shape::kPacks, W = Shape::kWidth, kStages = Shape::kStages;
  using Sum = GroupSum<Shape::kThreads, Shape::kForwardThreads / Shape::kThreads>;
  extern __shared__ uint4 memory[];
  __shared__ float partial[Sum::kFloats];
  float* const gamma = reinterpret_cast<float*>(memory);
  float* const beta = gamma + Shape::kCols;
  uint4* const staged = memory + (kCentred ? 2 : 1) * Shape::kCols / 4;
  const int cols = of.cols;
  const float inverse = 1.0f / cols;
  GroupWalk<Shape> walk;
  Sum sum_of_group(partial, walk.group);
  const int groups = blockDim.x / Shape::kThreads;
  const RowFeed<Rows, Shape> x(of.x, staged, walk);
  const RowFeed<Rows, Shape> residual(of.residual, staged + groups * (Shape::kGroupBytes / 16), walk);
  const auto start = [&](int stage, int64_t row) {
    x.start(stage, row, row < of.rows, cols, walk);
    if (of.residual) residual.start(stage, row, row < of.rows, cols, walk);
    copy_async_commit();
  };

  wait_for_inputs();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) start(stage, walk.row + stage * walk.step);
  SharedVector<Shape>::fill(gamma, cols, [&](int col) { return gamma_at(of.gamma, col, of.offset); });
  if constexpr (kCentred) SharedVector<Shape>::fill(beta, cols, [&](int col) { return of.beta.at(col, 0); });
  __syncthreads();

  int stage = 0;
  for (; walk.warp_row < of.rows; walk.row += walk.step, walk.warp_row += walk.step) {
    const bool real = walk.row < of.rows;
    const int64_t at = walk.row * cols;
    float v[P][W], total = 0;
    copy_async_wait<kStages - 1>();
#pragma unroll
    for (int i = 0; i < P; ++i) {
      x.read(stage, i, walk.row, real, cols, walk, v[i]);
      if (of.residual) {
        float r[W];
        residual.read(stage, i, walk.row, real, cols, walk, r);
#pragma unroll
        for (int w = 0; w < W; ++w) v[i][w] += r[w];
        of.sum.round(v[i]);
        if (real && walk.col(i) < cols) of.sum.store(at + walk.col(i), v[i]);
      }
#pragma unroll
      for (int w = 0; w < W; ++w) total += kCentred ? v[i][w] : v[i][w] * v[i][w];
    }
    start(stage, walk.row + kStages * walk.step);
    stage = stage + 1 == kStages ? 0 : stage + 1;

    // Two passes for a variance: E[x^2] - mean^2 cancels where a row's mean is large against its spread.
    total = sum_of_group(total);
    float mean = 0, squares = total;
    if constexpr (kCentred) {
      mean = total * inverse;
      squares = 0;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (walk.col(i) < cols) {
#pragma unroll
          for (int w = 0; w < W; ++w) squares += (v[i][w] - mean) * (v[i][w] - mean);
        }
      }
      squares = sum_of_group(squares);
    }
    const float rstd = rsqrtf(squares * inverse + of.eps);
    if (!real) continue;
    if (walk.lane == 0) {
      if constexpr (kCentred) of.mean[walk.row] = mean;
      of.rstd[walk.row] = rstd;
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (walk.col(i) >= cols) break;
      float g[W], b[W] = {};
      SharedVector<Shape>::read(gamma, i, walk, g);
      if constexpr (kCentred) SharedVector<Shape>::read(beta, i, walk, b);
#pragma unroll
      for (int w = 0; w < W; ++w) v[i][w] = (v[i][w] - mean) * rstd * g[w] + b[w];
      of.out.store(at + walk.col(i), v[i]);
    }
  }
  copy_async_wait<0>();
}

// A row too long for registers, a block a row: the same passes, each reading the row again (from L2).
template <class Rows, bool kCentred>
__global__ void __launch_bounds__(kLongThreads, 2)
    norm_forward_long(const __grid_constant__ ForwardArguments<Rows> of) {
  constexpr int W = Rows::kWidth;
  const float inverse = 1.0f / of.cols;
  wait_for_inputs();
  for (int64_t row = blockIdx.x; row < of.rows; row += gridDim.x) {
    const int64_t at = row * of.cols;
    const Rows& source = of.residual ? of.sum : of.x;
    const auto each = [&](auto&& visit) {
#pragma unroll 2
      for (int col = threadIdx.x * W; col < of.cols; col += kLongThreads * W) visit(col);
    };
    float total = 0, mean = 0, v[W];
    each([&](int col) {
      of.x.load(at + col, v);
      if (of.residual) {
        float r[W];
        of.residual.load(at + col, r);
#pragma unroll
        for (int w = 0; w < W; ++w) v[w] += r[w];
        of.sum.round(v);
        of.sum.store(at + col, v);
      }
#pragma unroll
      for (int w = 0; w < W; ++w) total += kCentred ? v[w] : v[w] * v[w];
    });
    float squares = reduce<kLongThreads>(total, Sum());
    if constexpr (kCentred) {
      mean = squares * inverse;
      squares = 0;
      each([&](int col) {
        source.load(at + col, v);
#pragma unroll
        for (int w = 0; w < W; ++w) squares += (v[w] - mean) * (v[w] - mean);
      });
      squares = reduce<kLongThreads>(squares, Sum());
    }
    const float rstd = rsqrtf(squares * inverse + of.eps);
    if (threadIdx.x == 0) {
      if constexpr (kCentred) of.mean[row] = mean;
      of.rstd[row] = rstd;
    }
    each([&](int col) {
      source.load(at + col, v);
#pragma unroll
      for (int w = 0; w < W; ++w)
        v[w] = (v[w] - mean) * rstd * gamma_at(of.gamma, col + w, of.offset) + (kCentred ? of.beta.at(col + w, 0) : 0);
      of.out.store(at + col, v);
    });
  }
}

// false: no kernel holds such rows.
template <class Rows, bool kCentred>
bool launch_forward(Context<Cuda>& context, const NormForward& norm) {
  const ForwardArguments<Rows> arguments(norm);
  return with_training_shape<Rows::kWidth, Rows::kPlain>(norm.cols, [&]<class Shape>(Shape) {
    const size_t group = Rows::kStaged ? Shape::kGroupBytes * (norm.residual ? 2 : 1) : 0;
    return 0 < launch_over_rows<Shape>(context, "kernel norm_forward", norm_forward_kernel<Rows, kCentred, Shape>,
                                       Shape::kForwardThreads, norm.rows, group,
                                       (kCentred ? 2 : 1) * Shape::kCols * sizeof(float), arguments);
  });
}

template <class Rows, bool kCentred>
void launch_forward_long(Context<Cuda>& context, const NormForward& norm) {
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(norm.rows, int64_t{4} * context.sm_count));
  launch_overlapped(context, "kernel norm_forward_long", norm_forward_long<Rows, kCentred>, dim3(blocks), kLongThreads,
                    0, 1, ForwardArguments<Rows>(norm));
}

}  // namespace

template <class T>
bool norm_forward_plain(Context<Cuda>& context, const NormForward& norm) {
  using Rows = PlainRows<native_t<T>>;
  return norm.kind == NormKind::layer ? launch_forward<Rows, true>(context, norm)
                                      : launch_forward<Rows, false>(context, norm);
}

}  // namespace ftbert
