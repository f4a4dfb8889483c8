// y = norm(x + residual), with the sum, mean and 1 / deviation of each row for the backward pass. A group of threads
// has a row in its registers; enough blocks are on a multiprocessor that while rows wait for their sums others are on
// the way.
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

// kThreads share a row, kPacks accesses each; a block has kRows rows, a multiprocessor kBlocks blocks or more; three
// of four where rows have a residual, of which as much again is on the way.
template <int kWidth_, int kThreads_, int kPacks_, int kRows_, int kBlocks_>
struct ForwardShape {
  static constexpr int kWidth = kWidth_, kThreads = kThreads_, kPacks = kPacks_, kRows = kRows_, kBlocks = kBlocks_;
  static constexpr int kCols = kWidth * kThreads * kPacks;  // the longest row
  static constexpr int blocks(bool residual) { return residual && kWidth > 1 && kBlocks == 4 ? 3 : kBlocks; }
};

// The shapes of rows by W elements an access; kMany: more of them.
template <int W, bool kMany>
struct ForwardShapes
    : ShapeList<ForwardShape<W, 32, 1, 8, 6>, ForwardShape<W, 32, 3, 4, 6>, ForwardShape<W, 64, 3, 4, 3>,
                ForwardShape<W, 128, 4, 2, 3>, ForwardShape<W, 256, 4, 1, 3>, ForwardShape<W, 512, 4, 1, 2>> {};
template <int W>
struct ForwardShapes<W, true>
    : ShapeList<ForwardShape<W, 16, 1, 16, 6>, ForwardShape<W, 32, 1, 8, 6>, ForwardShape<W, 16, 3, 16, 4>,
                ForwardShape<W, 32, 2, 4, 8>, ForwardShape<W, 32, 3, 4, 6>, ForwardShape<W, 32, 4, 4, 5>,
                ForwardShape<W, 64, 3, 4, 3>, ForwardShape<W, 64, 4, 4, 4>, ForwardShape<W, 128, 4, 2, 4>,
                ForwardShape<W, 256, 4, 1, 3>, ForwardShape<W, 512, 4, 1, 2>, ForwardShape<W, 512, 8, 1, 1>> {};
template <>
struct ForwardShapes<1, false>
    : ShapeList<ForwardShape<1, 32, 4, 8, 4>, ForwardShape<1, 256, 4, 1, 4>, ForwardShape<1, 512, 8, 1, 2>> {};

// V: of gamma and beta, each of which may be absent, or void: known when the kernel runs. kCentred: LayerNorm.
template <class Rows, class V, bool kCentred, bool kResidual, class Shape>
__global__ void __launch_bounds__(Shape::kThreads* Shape::kRows, Shape::blocks(kResidual))
    norm_forward_kernel(const __grid_constant__ ForwardArguments<Rows> of) {
  constexpr int P = Shape::kPacks, W = Shape::kWidth;
  // Vectors of the rows' type are asked for with the row, where registers hold them. Where a warp has a row of
  // LayerNorm the registers hold more rows instead: bf16 of 512, 768 and 1024 columns took 0.94, 1.00 and 0.97 of the
  // time (H200).
  constexpr bool kRowsFirst = kCentred && !kResidual && Shape::kThreads == 32 && P > 1;
  constexpr bool kRoom = !kRowsFirst && (P < 4 || (Shape::kThreads == 32 && !kResidual));
  constexpr bool kEarly = kRoom && !std::is_void_v<V> && sizeof(VectorOf<V, W>) <= 16;
  // Rows past the L1 cache, so that vectors which are asked for later stay in it: a third of what comes from L2.
  // LayerNorm of 2048 to 4096 columns of bf16 took 0.82 to 0.87 of the time, RMSNorm 0.86 to 0.93, and of 6144 and 8192
  // 0.97 to 0.99; LayerNorm of these 1.08 and more (H200). Of float32 nothing was measured.
  constexpr bool kOnce = Rows::kPlain && !kRoom && !kResidual && (Shape::kThreads <= 128 || !kCentred);
  using Sum = GroupSum<Shape::kThreads, Shape::kRows>;
  __shared__ float partial[Sum::kFloats];
  const int group = threadIdx.x / Shape::kThreads, lane = threadIdx.x % Shape::kThreads, cols = of.cols;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Shape::kRows + group, at = row * cols;
  const bool real = Shape::kRows == 1 || row < of.rows;
  const float inverse = 1.0f / cols;
  Sum sum_of_group(partial, group);
  const auto col_of = [&](int i) { return (i * Shape::kThreads + lane) * W; };
  using Pack = typename Rows::Pack;
  const auto load = [&](const Rows& rows, Pack(&x)[P]) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (!real || col_of(i) >= cols)
        x[i] = Pack::zero();
      else if constexpr (kOnce)
        x[i] = rows.load_once(at + col_of(i));
      else
        x[i] = rows.load(at + col_of(i));
    }
  };
  VectorOf<V, W> gamma[kEarly ? P : 1], beta[kEarly && kCentred ? P : 1];
  const auto load_vectors = [&](int i, int col) {
    if (of.gamma.data) gamma[i].load(of.gamma, col);
    if constexpr (kCentred)
      if (of.beta.data) beta[i].load(of.beta, col);
  };

  wait_for_inputs();
  Pack x[P], residual[P];
  load(of.x, x);
  if constexpr (kResidual) load(of.residual, residual);
  if constexpr (kEarly)
#pragma unroll
    for (int i = 0; i < P; ++i)
      if (col_of(i) < cols) load_vectors(i, col_of(i));

  // A row stays as it is stored, and its sum with the residual as that is. Of a long one floats are made anew for each
  // pass: in registers they take twice as many as 16 bits do.
  const auto held = [&](int i, float (&v)[W]) {
    if constexpr (Rows::kPlain && P > 4) x[i].hide();
    x[i].to_floats(v);
  };
  float total = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    float v[W];
    held(i, v);
    if constexpr (kResidual) {
      float r[W];
      residual[i].to_floats(r);
#pragma unroll
      for (int w = 0; w < W; ++w) v[w] += r[w];
      x[i] = of.sum.rounded(v);
      x[i].to_floats(v);
      if (real && col_of(i) < cols) of.sum.store(at + col_of(i), v);
    }
#pragma unroll
    for (int w = 0; w < W; ++w) total += kCentred ? v[w] : v[w] * v[w];
  }

  // Two passes for a variance: E[x^2] - mean^2 cancels where a row's mean is large against its spread.
  total = sum_of_group(total);
  float mean = 0, squares = total;
  if constexpr (kCentred) {
    mean = total * inverse;
    squares = 0;
#pragma unroll
    for (int i = 0; i < P; ++i) {
      if (col_of(i) < cols) {
        float v[W];
        held(i, v);
#pragma unroll
        for (int w = 0; w < W; ++w) squares += (v[w] - mean) * (v[w] - mean);
      }
    }
    squares = sum_of_group(squares);
  }
  if (!real) return;
  const float rstd = rsqrtf(squares * inverse + of.eps);
  if (lane == 0) {
    if constexpr (kCentred) of.mean[row] = mean;
    of.rstd[row] = rstd;
  }
#pragma unroll
  for (int i = 0; i < P; ++i) {
    if (col_of(i) >= cols) break;
    constexpr bool kLate = !kEarly;
    if constexpr (kLate) load_vectors(0, col_of(i));
    float g[W], b[W] = {}, v[W];
    held(i, v);
    if (of.gamma.data) {
      gamma[kLate ? 0 : i].to_floats(g);
#pragma unroll
      for (int w = 0; w < W; ++w) g[w] += of.offset;
    } else {
#pragma unroll
      for (int w = 0; w < W; ++w) g[w] = 1;
    }
    if constexpr (kCentred)
      if (of.beta.data) beta[kLate ? 0 : i].to_floats(b);
#pragma unroll
    for (int w = 0; w < W; ++w) v[w] = (v[w] - mean) * rstd * g[w] + b[w];
    if constexpr (kOnce)
      of.out.store_once(at + col_of(i), v);
    else
      of.out.store(at + col_of(i), v);
  }
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
        of.sum.rounded(v).to_floats(v);
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
template <class Rows, class V, bool kCentred>
bool launch_forward(Context<Cuda>& context, const NormForward& norm) {
  const ForwardArguments<Rows> arguments(norm);
  return ForwardShapes<Rows::kWidth, Rows::kPlain>::first_that_holds(norm.cols, [&]<class Shape>(Shape) {
    const auto blocks = static_cast<unsigned>((norm.rows + Shape::kRows - 1) / Shape::kRows);
    const auto launch = [&](auto* kernel) {
      launch_overlapped(context, "kernel norm_forward", kernel, dim3(blocks), Shape::kThreads * Shape::kRows, 0,
                        Presence::streaming(), arguments);
    };
    norm.residual ? launch(norm_forward_kernel<Rows, V, kCentred, true, Shape>)
                  : launch(norm_forward_kernel<Rows, V, kCentred, false, Shape>);
    return true;
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
  using E = native_t<T>;
  const auto with_vectors = [&]<class V>(V) {
    return norm.kind == NormKind::layer ? launch_forward<PlainRows<E>, V, true>(context, norm)
                                        : launch_forward<PlainRows<E>, V, false>(context, norm);
  };
  if (vectors_are(kDType<T>, norm)) return with_vectors(E());
  if constexpr (!std::is_same_v<T, float>)
    if (vectors_are(DType::fp32, norm)) return with_vectors(float());
  return false;
}

}  // namespace ftbert
