// The gradients of y = norm(x): one pass over the rows of grad and of x or y, then the sums over rows of each block.
#pragma once
#include "kernels/norm/training_walk.cuh"

namespace ftbert {
namespace {

template <class Rows>
struct BackwardArguments {
  Rows grad, grad_sum, saved, grad_x;
  Vector gamma, beta;
  const float *mean, *rstd;
  float* partials;  // [2, parts of the rows, cols], or nullptr
  int64_t rows;
  int cols;
  float eps, offset;

  explicit BackwardArguments(const NormBackward& norm)
      : grad(norm.grad),
        grad_sum(norm.grad_sum),
        saved(norm.saved),
        grad_x(norm.grad_x),
        gamma(norm.gamma),
        beta(norm.beta),
        mean(norm.mean),
        rstd(norm.rstd),
        partials(norm.partials),
        rows(norm.rows),
        cols(static_cast<int>(norm.cols)),
        eps(norm.eps),
        offset(norm.offset) {}
};

// What is read of a row beside its elements, asked for a row ahead.
template <bool kCentred, bool kFromOutput>
struct RowNumbers {
  float mean = 0, rstd = 0;
  template <class Arguments>
  __device__ RowNumbers(const Arguments& of, int64_t row) {
    if (row >= of.rows) return;
    rstd = of.rstd[row];
    if constexpr (kCentred && !kFromOutput) mean = of.mean[row];
  }
};

// 1 / gamma stays beside gamma where there is room, else it is made for every row.
template <class Shape>
inline constexpr bool kInverseKept = Shape::kPart <= 4096;
template <class Shape, bool kCentred, bool kFromOutput>
inline constexpr int kVectorsKept = 1 + kFromOutput * (kCentred + kInverseKept<Shape>);

// Shared memory: gamma; from the output LayerNorm's beta, 1 / gamma [kPart]; rows of grad, of saved, of grad_sum.
//
// From the output, u = y - beta stands for gamma * x^: mean(a * x^) = mean(grad * u) needs no division, nor does the
// sum of grad * u over rows, which is divided by gamma when all rows are in it. x^ itself is u * (1 / gamma).
template <class Rows, bool kCentred, bool kFromOutput, class Shape>
__global__ void __launch_bounds__(Shape::kMostThreads, 1)
    norm_backward_kernel(const __grid_constant__ BackwardArguments<Rows> of) {
  constexpr int P = Shape::kPacks, W = Shape::kWidth, kStages = Shape::kStages;
  constexpr bool kKept = Shape::kKept;
  using Sum = RowSum<Shape>;
  using Shared = SharedVector<Shape>;
  extern __shared__ uint4 memory[];
  __shared__ __align__(16) float partial[Sum::kFloats];
  float* const gamma = reinterpret_cast<float*>(memory);
  float* const beta = gamma + Shape::kPart;
  float* const inverse_of_gamma = beta + (kCentred ? Shape::kPart : 0);
  uint4* const staged = memory + kVectorsKept<Shape, kCentred, kFromOutput> * Shape::kPart / 4;
  const int groups = blockDim.x / Shape::kThreads, matrix = groups * (Shape::kGroupBytes / 16);
  const float inverse = 1.0f / of.cols;
  GroupWalk<Shape> walk(of.cols);
  Sum sum_of_group(partial, walk.group);
  const RowFeed<Rows, Shape> grad(of.grad, staged, walk), saved(of.saved, staged + matrix, walk);
  const RowFeed<Rows, Shape> grad_sum(of.grad_sum, staged + 2 * matrix, walk);
  const auto start = [&](int stage, int64_t row) {
    grad.start(stage, row, row < of.rows, walk);
    saved.start(stage, row, row < of.rows, walk);
    if (of.grad_sum) grad_sum.start(stage, row, row < of.rows, walk);
    copy_async_commit();
  };

  wait_for_inputs();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) start(stage, walk.row + stage * walk.step);
  RowNumbers<kCentred, kFromOutput> next(of, walk.row);
  const auto with_offset = [&](float x) { return of.gamma.data ? x + of.offset : 1.0f; };
  Shared::fill(gamma, of.gamma, walk, with_offset);
  if constexpr (kFromOutput) {
    if constexpr (kInverseKept<Shape>)
      Shared::fill(inverse_of_gamma, of.gamma, walk, [&](float x) { return inverse_gamma(with_offset(x), of.eps); });
    if constexpr (kCentred) Shared::fill(beta, of.beta, walk, [](float x) { return x; });
  }
  __syncthreads();

  float sum_gamma[P][W] = {}, sum_beta[kCentred ? P : 1][W] = {};
  int stage = 0;
  for (; walk.warp_row < of.rows; walk.row += walk.step, walk.warp_row += walk.step) {
    const bool real = walk.row < of.rows;
    const RowNumbers<kCentred, kFromOutput> now = next;
    next = RowNumbers<kCentred, kFromOutput>(of, walk.row + walk.step);
    copy_async_wait<kStages - 1>();
    // g = grad and u of a pack: x^, or from the output gamma * x^. Where nothing is kept both passes read them from
    // shared memory.
    const auto read = [&](int i, float (&g)[W], float (&u)[W]) {
      grad.read(stage, i, walk.row, real, walk, g);
      saved.read(stage, i, walk.row, real, walk, u);
      if constexpr (!kFromOutput) {
#pragma unroll
        for (int w = 0; w < W; ++w) u[w] = (u[w] - now.mean) * now.rstd;
      } else if constexpr (kCentred) {
        float b[W];
        Shared::read(beta, i, walk, b);
#pragma unroll
        for (int w = 0; w < W; ++w) u[w] -= b[w];
      }
    };

    // u becomes x^, s is gamma
    const auto divide = [&](int i, const float (&s)[W], float (&u)[W]) {
      if constexpr (kFromOutput) {
        float t[W];
        if constexpr (kInverseKept<Shape>) Shared::read(inverse_of_gamma, i, walk, t);
#pragma unroll
        for (int w = 0; w < W; ++w) u[w] *= kInverseKept<Shape> ? t[w] : inverse_gamma(s[w], of.eps);
      }
    };

    float kept_a[kKept ? P : 1][W], kept_x[kKept ? P : 1][W];
    float sums[1 + kCentred] = {};  // of a * x^ and, of LayerNorm, of a = grad * gamma
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float g[W], u[W], s[W];
      read(i, g, u);
      Shared::read(gamma, i, walk, s);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float gu = g[w] * u[w], a = g[w] * s[w];
        sum_gamma[i][w] += gu;
        sums[0] += kFromOutput ? gu : a * u[w];
        if constexpr (kCentred) {
          sum_beta[i][w] += g[w];
          sums[1] += a;
        }
        if constexpr (kKept) kept_a[i][w] = a;
      }
      if constexpr (kKept) {
        divide(i, s, u);
#pragma unroll
        for (int w = 0; w < W; ++w) kept_x[i][w] = u[w];
      }
      if constexpr (P == 4) asm volatile("" ::: "memory");  // a pack at a time, or registers run out
    }
    sum_of_group(sums);
    if constexpr (!kKept) asm volatile("" ::: "memory");  // or the compiler keeps them all the same
    const float along = sums[0] * inverse, mean_of_a = kCentred ? sums[kCentred] * inverse : 0;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float a[W], x[W];
      if constexpr (kKept) {
#pragma unroll
        for (int w = 0; w < W; ++w) a[w] = kept_a[i][w], x[w] = kept_x[i][w];
      } else {
        float s[W];
        read(i, a, x);
        Shared::read(gamma, i, walk, s);
        divide(i, s, x);
#pragma unroll
        for (int w = 0; w < W; ++w) a[w] *= s[w];
      }
#pragma unroll
      for (int w = 0; w < W; ++w) a[w] = now.rstd * (a[w] - mean_of_a - x[w] * along);
      if (of.grad_sum) {
        float t[W];
        grad_sum.read(stage, i, walk.row, real, walk, t);
#pragma unroll
        for (int w = 0; w < W; ++w) a[w] += t[w];
      }
      if (real && walk.has(i)) of.grad_x.store(walk.at(walk.row, i), a);
    }
    start(stage, walk.row + kStages * walk.step);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  copy_async_wait<0>();
  if (of.partials == nullptr) return;
  // This block's sums, of its groups in their order.
  float* const of_groups = reinterpret_cast<float*>(staged);  // [gamma | beta][groups, kPart]
  const int plane = groups * Shape::kPart;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < P; ++i) {
    float* const to = of_groups + walk.group * Shape::kPart + Shared::place(i, walk);
    Shared::write(to, sum_gamma[i]);
    if constexpr (kCentred) Shared::write(to + plane, sum_beta[i]);
  }
  __syncthreads();
  const unsigned part = blockIdx.x / Shape::kCluster, parts = gridDim.x / Shape::kCluster;
  for (int col = threadIdx.x; col < walk.cols; col += blockDim.x) {
    float of_gamma = 0, of_beta = 0;
    const float* from = of_groups + Shared::index(col);
#pragma unroll 4
    for (int group = 0; group < groups; ++group, from += Shape::kPart) {
      of_gamma += *from;
      if constexpr (kCentred) of_beta += from[plane];
    }
    float* const to = of.partials + walk.first + col;
    to[static_cast<int64_t>(part) * walk.pitch] = of_gamma;
    if constexpr (kCentred) to[static_cast<int64_t>(parts + part) * walk.pitch] = of_beta;
  }
}

// A row that is read from memory for every pass.
template <class Rows, bool kCentred>
struct LongRow {
  const BackwardArguments<Rows>& of;
  int64_t row;
  bool from_output;
  float mean = 0, rstd;

  __device__ LongRow(const BackwardArguments<Rows>& of, int64_t row, bool from_output)
      : of(of), row(row), from_output(from_output), rstd(of.rstd[row]) {
    if (kCentred && !from_output) mean = of.mean[row];
  }
  // g = grad and x = x^ of a pack
  __device__ void read(int col, float (&g)[Rows::kWidth], float (&x)[Rows::kWidth]) const {
    of.grad.load(row * of.cols + col, g);
    of.saved.load(row * of.cols + col, x);
#pragma unroll
    for (int w = 0; w < Rows::kWidth; ++w) {
      if (from_output)
        x[w] = (x[w] - (kCentred ? of.beta.at(col + w, 0) : 0)) *
               inverse_gamma(gamma_at(of.gamma, col + w, of.offset), of.eps);
      else
        x[w] = (x[w] - mean) * rstd;
    }
  }
};

// Rows too long for registers: grad_x, a block a row, each pass reading the row again (from L2).
template <class Rows, bool kCentred>
__global__ void __launch_bounds__(kLongThreads, 2)
    norm_backward_long(const __grid_constant__ BackwardArguments<Rows> of, bool from_output) {
  constexpr int W = Rows::kWidth;
  const float inverse = 1.0f / of.cols;
  wait_for_inputs();
  for (int64_t row = blockIdx.x; row < of.rows; row += gridDim.x) {
    const LongRow<Rows, kCentred> values(of, row, from_output);
    float along = 0, of_a = 0;
#pragma unroll 1
    for (int col = threadIdx.x * W; col < of.cols; col += kLongThreads * W) {
      float g[W], x[W];
      values.read(col, g, x);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float a = g[w] * gamma_at(of.gamma, col + w, of.offset);
        of_a += a;
        along += a * x[w];
      }
    }
    along = reduce<kLongThreads>(along, Sum()) * inverse;
    of_a = kCentred ? reduce<kLongThreads>(of_a, Sum()) * inverse : 0;
#pragma unroll 1
    for (int col = threadIdx.x * W; col < of.cols; col += kLongThreads * W) {
      float g[W], x[W], t[W] = {};
      values.read(col, g, x);
      if (of.grad_sum) of.grad_sum.load(row * of.cols + col, t);
#pragma unroll
      for (int w = 0; w < W; ++w)
        g[w] = values.rstd * (g[w] * gamma_at(of.gamma, col + w, of.offset) - of_a - x[w] * along) + t[w];
      of.grad_x.store(row * of.cols + col, g);
    }
  }
}

// The same rows' sums: a thread a pack of columns, blockIdx.y a part of the rows.
template <class Rows, bool kCentred>
__global__ void __launch_bounds__(kLongThreads, 2)
    norm_backward_columns(const __grid_constant__ BackwardArguments<Rows> of, bool from_output) {
  constexpr int W = Rows::kWidth;
  const int64_t col = (static_cast<int64_t>(blockIdx.x) * kLongThreads + threadIdx.x) * W;
  wait_for_inputs();
  if (col >= of.cols) return;
  float sum_gamma[W] = {}, sum_beta[W] = {};
  for (int64_t row = blockIdx.y; row < of.rows; row += gridDim.y) {
    const LongRow<Rows, kCentred> values(of, row, from_output);
    float g[W], x[W];
    values.read(static_cast<int>(col), g, x);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      sum_gamma[w] += g[w] * x[w];
      sum_beta[w] += g[w];
    }
  }
#pragma unroll
  for (int w = 0; w < W; ++w) {
    of.partials[static_cast<int64_t>(blockIdx.y) * of.cols + col + w] = sum_gamma[w];
    of.partials[static_cast<int64_t>(gridDim.y + blockIdx.y) * of.cols + col + w] = sum_beta[w];
  }
}

template <class Rows, bool kCentred, bool kFromOutput>
unsigned launch_backward(Context<Cuda>& context, const NormBackward& norm) {
  const BackwardArguments<Rows> arguments(norm);
  unsigned parts = 0;
  TrainingShapes<Rows::kWidth, Rows::kPlain>::first_that_holds(norm.cols, [&]<class Shape>(Shape) {
    constexpr size_t kSums = (1 + kCentred) * Shape::kPart * sizeof(float);  // of a group, where its rows were
    const size_t group = Rows::kStaged ? Shape::kGroupBytes * (norm.grad_sum ? 3 : 2) : kSums;
    static_assert(!Rows::kStaged || 2 * Shape::kGroupBytes >= kSums);
    parts = launch_over_rows<Shape>(
        context, "kernel norm_backward", norm_backward_kernel<Rows, kCentred, kFromOutput, Shape>, norm.rows, group,
        kVectorsKept<Shape, kCentred, kFromOutput> * Shape::kPart * sizeof(float), arguments);
    return parts > 0;
  });
  return parts;
}

template <class Rows, bool kCentred>
unsigned launch_backward_long(Context<Cuda>& context, const NormBackward& norm) {
  const BackwardArguments<Rows> arguments(norm);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(norm.rows, int64_t{4} * context.sm_count));
  launch_overlapped(context, "kernel norm_backward_long", norm_backward_long<Rows, kCentred>, dim3(blocks),
                    kLongThreads, 0, 1, arguments, norm.from_output);
  const auto parts = static_cast<unsigned>(norm_partials(context, norm.rows));
  const int64_t packs = norm.cols / Rows::kWidth;
  if (norm.partials)
    launch_overlapped(context, "kernel norm_backward_columns", norm_backward_columns<Rows, kCentred>,
                      dim3(static_cast<unsigned>((packs + kLongThreads - 1) / kLongThreads), parts), kLongThreads, 0, 1,
                      arguments, norm.from_output);
  return parts;
}

template <class Rows>
BackwardParts launch_backward(Context<Cuda>& context, const NormBackward& norm) {
  if (norm.from_output)
    return {norm.kind == NormKind::layer ? launch_backward<Rows, true, true>(context, norm)
                                         : launch_backward<Rows, false, true>(context, norm),
            true};
  return {norm.kind == NormKind::layer ? launch_backward<Rows, true, false>(context, norm)
                                       : launch_backward<Rows, false, false>(context, norm),
          false};
}

}  // namespace

template <class T>
BackwardParts norm_backward_plain(Context<Cuda>& context, const NormBackward& norm) {
  return launch_backward<PlainRows<native_t<T>>>(context, norm);
}

}  // namespace ftbert
