// out = norm(a + b + c) for one row, by a rule (norm_rule.cuh): the body that the norm kernels share. beta may be null:
// 0.
#pragma once
#include "device/byte_rows.cuh"
#include "device/e4m3_rows.cuh"
#include "device/row_shape.cuh"
#include "device/vector.cuh"
#include "kernels/norm/norm_rule.cuh"

namespace ftbert {

// This thread's packs of one row; zeros past the end and for a null row.
template <class Shape, class E>
__device__ void load_row(const E* row, int cols, int lane, Packed<E, Shape::kWidth> (&packs)[Shape::kPacks]) {
#pragma unroll
  for (int i = 0; i < Shape::kPacks; ++i) {
    const int col = (i * Shape::kThreads + lane) * Shape::kWidth;
    packs[i] =
        row != nullptr && col < cols ? Packed<E, Shape::kWidth>::load(row + col) : Packed<E, Shape::kWidth>::zero();
  }
}

// A part of the row that begins at out + at, from column col on. Copy: nothing, or E4m3Rows or ByteRows, and then out
// may be null. What stores whole rows gets none here.
template <class E, int W, class... Copy>
__device__ void put_norm(const float (&x)[W], E* out, int64_t at, int col, const Copy&... copy) {
  if (sizeof...(Copy) == 0 || out != nullptr) put(x, out + at, col);
  const auto put_copy = [&](const auto& to) {
    if constexpr (!std::decay_t<decltype(to)>::kWholeRows) put(x, to, at + col);
  };
  (put_copy(copy), ...);
}
template <class... Copy>
inline constexpr bool kCopiesWholeRows = (Copy::kWholeRows || ...);

// run(what kernels get beside a norm of T: nothing, or what stores the copy [rows, cols]).
template <class T, class Run>
void with_copy(const Operand& copy, int64_t cols, const Run& run) {
  if (copy && copy.format == &formats::byte_rows) {
    if constexpr (sizeof(T) == 2)
      return run(ByteRows(copy, cols));
    else
      throw Error("results of " + std::string(to_string(kDType<T>)) + " are not stored as byte rows on a GPU");
  }
  with_rows<T>(copy, run);
}

// The row in registers; first(i, x): a's part of pack i. Two passes for a variance: E[x^2] - mean^2 cancels where a
// row's mean is large against its spread.
template <class Shape, class First, class Rule, class E, class... Copy>
__device__ void norm_packs(const First& first, const Packed<E, Shape::kWidth> (&packs_b)[Shape::kPacks],
                           const Packed<E, Shape::kWidth> (&packs_c)[Shape::kPacks],
                           const Packed<E, Shape::kWidth> (&packs_gamma)[Shape::kPacks],
                           const Packed<E, Shape::kWidth> (&packs_beta)[Shape::kPacks], bool normalize,
                           const Rule& rule, int cols, int lane, E* sum, E* out, int64_t at, const Copy&... copy) {
  constexpr int W = Shape::kWidth, P = Shape::kPacks;
  using Pack = Packed<E, W>;
  const float inverse = 1.0f / cols;  // while the loads are under way
  float x[P][W];
  float total = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    float y[W], z[W];
    first(i, x[i]);
    packs_b[i].to_floats(y);
    packs_c[i].to_floats(z);
#pragma unroll
    for (int w = 0; w < W; ++w) {
      x[i][w] = x[i][w] + y[w] + z[w];
      total += Rule::kCentred ? x[i][w] : x[i][w] * x[i][w];
    }
    const int col = (i * Shape::kThreads + lane) * W;
    if (sum != nullptr && col < cols) Pack::from_floats(x[i]).store(sum + col);
  }

  float mean = 0, scale = 1;
  if (normalize) {
    if constexpr (Rule::kCentred) {
      mean = reduce<Shape::kThreads>(total, Sum()) * inverse;
      float squares = 0;
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if ((i * Shape::kThreads + lane) * W < cols) {
#pragma unroll
          for (int w = 0; w < W; ++w) squares += (x[i][w] - mean) * (x[i][w] - mean);
        }
      }
      scale = inverse_root_mean<Shape::kThreads>(squares, inverse, rule.eps);
    } else {
      scale = inverse_root_mean<Shape::kThreads>(total, inverse, rule.eps);
    }
  }

#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int col = (i * Shape::kThreads + lane) * W;
    if (col >= cols) break;
    if (normalize) {
      float g[W], h[W];
      packs_gamma[i].to_floats(g);
      packs_beta[i].to_floats(h);
#pragma unroll
      for (int w = 0; w < W; ++w)
        x[i][w] = rule.template apply<E>(Rule::kCentred ? x[i][w] - mean : x[i][w], scale, g[w], h[w]);
    }
    put_norm(x[i], out, at, col, copy...);
  }
  if constexpr (kCopiesWholeRows<Copy...>) (store_byte_row<Shape>(copy, x, cols, lane), ...);
}

// A row too long for registers: the same passes, each reading the row again (from L1 or L2). Each element is
// stored by the thread that read it, after its last read, so that out and sum may alias a or c here too.
template <class Shape, class Rule, class E, class... Copy>
__device__ void norm_long(const E* a, const E* b, const E* c, const E* gamma, const E* beta, const Rule& rule, int cols,
                          int lane, E* sum, E* out, int64_t at, const Copy&... copy) {
  constexpr int W = Shape::kWidth;
  using Pack = Packed<E, W>;
  const auto value = [&](int col, float (&x)[W]) {
    Pack::load(a + col).to_floats(x);
    if (b != nullptr) Pack::load(b + col).add_to(x);
    if (c != nullptr) Pack::load(c + col).add_to(x);
  };

  float mean = 0, scale = 1;
  float x[W];
  if (gamma != nullptr) {
    const float inverse = 1.0f / cols;
    float squares = 0;
    if constexpr (Rule::kCentred) {
      float total = 0;
#pragma unroll 1
      for (int col = lane * W; col < cols; col += Shape::kThreads * W) {
        value(col, x);
#pragma unroll
        for (int w = 0; w < W; ++w) total += x[w];
      }
      mean = reduce<Shape::kThreads>(total, Sum()) * inverse;
    }
#pragma unroll 1
    for (int col = lane * W; col < cols; col += Shape::kThreads * W) {
      value(col, x);
#pragma unroll
      for (int w = 0; w < W; ++w) squares += (x[w] - mean) * (x[w] - mean);
    }
    scale = inverse_root_mean<Shape::kThreads>(squares, inverse, rule.eps);
  }
  const auto norm = [&](int col, float (&y)[W]) {
    if (gamma == nullptr) return;
    float g[W], h[W];
    Pack::load(gamma + col).to_floats(g);
    (beta != nullptr ? Pack::load(beta + col) : Pack::zero()).to_floats(h);
#pragma unroll
    for (int w = 0; w < W; ++w) y[w] = rule.template apply<E>(Rule::kCentred ? y[w] - mean : y[w], scale, g[w], h[w]);
  };
  if constexpr (kCopiesWholeRows<Copy...>) {  // before sum or out, which may be a or c, are stored
    const auto normed = [&](int col, float (&y)[W]) { value(col, y), norm(col, y); };
    (store_long_byte_row<Shape>(copy, normed, cols, lane), ...);
  }
#pragma unroll 1
  for (int col = lane * W; col < cols; col += Shape::kThreads * W) {
    value(col, x);
    if (sum != nullptr) Pack::from_floats(x).store(sum + col);
    norm(col, x);
    put_norm(x, out, at, col, copy...);
  }
}

// a, b, c: one row each, b and c may be null. gamma == nullptr: no norm. sum (may be null): a + b + c is kept.
template <class Shape, class Rule, class E, class... Copy>
__device__ void norm_row(const E* a, const E* b, const E* c, const E* gamma, const E* beta, const Rule& rule, int cols,
                         int lane, E* sum, E* out, int64_t at, const Copy&... copy) {
  if constexpr (Shape::kPacks > 0) {
    // All loads are issued before the first reduction, since with few rows the kernel's time is their latency.
    constexpr int P = Shape::kPacks;
    Packed<E, Shape::kWidth> packs_a[P], packs_b[P], packs_c[P], packs_gamma[P], packs_beta[P];
    load_row<Shape>(a, cols, lane, packs_a);
    load_row<Shape>(b, cols, lane, packs_b);
    load_row<Shape>(c, cols, lane, packs_c);
    load_row<Shape>(gamma, cols, lane, packs_gamma);
    load_row<Shape>(beta, cols, lane, packs_beta);
    const auto first = [&](int i, float (&x)[Shape::kWidth]) { packs_a[i].to_floats(x); };
    norm_packs<Shape>(first, packs_b, packs_c, packs_gamma, packs_beta, gamma != nullptr, rule, cols, lane, sum, out,
                      at, copy...);
  } else {
    norm_long<Shape>(a, b, c, gamma, beta, rule, cols, lane, sum, out, at, copy...);
  }
}

}  // namespace ftbert
