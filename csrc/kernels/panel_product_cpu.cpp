// out = act(a @ weight^T + bias) in float, on a weight that lies in panels: kWidth of its rows side by side, so that a
// step along k reads whole vectors one after the other.
//
// A block of kRows rows of `a` stays in the second-level cache while all panels pass; kDepth of a panel stays in the
// first while the rows of the block pass; a tile of kTall rows and a panel's width stays in registers meanwhile.
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/isa.h"
#include "kernels/parallel_cpu.h"
#include "kernels/simd_math.h"

namespace ftbert::FTBERT_ISA {
namespace {

using simd::kLanes, simd::load, simd::store, simd::Vector;

constexpr int kWidth = kPanelWidth;
constexpr int kTall = kLanes == 8 ? 6 : 12;  // AVX2 has 16 registers, the others 32
constexpr int64_t kRows = 192, kDepth = 256;

// c [R, kWidth] = (or +=, where `first` is nullptr) a [R, depth] @ panel [depth, kWidth], starting from `first`.
template <int R>
void multiply_tile(const float* a, int64_t lda, const float* panel, int64_t depth, const float* first, float* c,
                   int64_t ldc) {
  Vector sum[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    sum[r][0] = load(first ? first : c + r * ldc);
    sum[r][1] = load((first ? first : c + r * ldc) + kLanes);
  }
#pragma GCC unroll 4
  for (int64_t d = 0; d < depth; ++d) {
    const Vector left = load(panel + d * kWidth), right = load(panel + d * kWidth + kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const float x = a[r * lda + d];
      sum[r][0] += x * left;
      sum[r][1] += x * right;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    store(c + r * ldc, sum[r][0]);
    store(c + r * ldc + kLanes, sum[r][1]);
  }
}

using MultiplyTile = decltype(&multiply_tile<1>);

template <int R = kTall>
MultiplyTile tile_of(int64_t rows) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<R - 1>(rows);
  }
  return multiply_tile<R>;
}

template <Activation activation>
void activate_rows(float* c, int64_t ldc, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
    for (int i = 0; i < kWidth; ++i) c[r * ldc + i] = simd::activate<activation>(c[r * ldc + i]);
  }
}

void activate_tile(Activation activation, float* c, int64_t ldc, int64_t rows) {
  switch (activation) {
    case Activation::none: return;
    case Activation::gelu_erf: return activate_rows<Activation::gelu_erf>(c, ldc, rows);
    case Activation::gelu_tanh: return activate_rows<Activation::gelu_tanh>(c, ldc, rows);
    case Activation::relu: return activate_rows<Activation::relu>(c, ldc, rows);
    case Activation::silu: return activate_rows<Activation::silu>(c, ldc, rows);
    case Activation::tanh: return activate_rows<Activation::tanh>(c, ldc, rows);
  }
}

// The rows [row, row_end) and panels [panel, panel_end) of the product.
void multiply_block(const PanelProduct& p, int64_t row, int64_t row_end, int64_t panel, int64_t panel_end) {
  const int64_t cuts = (p.k + kDepth - 1) / kDepth, depth = (p.k + cuts - 1) / cuts;
  for (int64_t begin = 0; begin < p.k; begin += depth) {
    const int64_t count = std::min(depth, p.k - begin);
    const bool ends = begin + count == p.k;
    for (int64_t j = panel; j < panel_end; ++j) {
      const int64_t column = j * kWidth, columns = std::min<int64_t>(kWidth, p.n - column);
      const float* weights = p.panels + column * p.k + begin * kWidth;
      alignas(64) float bias[kWidth] = {};
      if (p.bias) std::copy(p.bias + column, p.bias + column + columns, bias);
      for (int64_t i = row; i < row_end; i += kTall) {
        const int64_t rows = std::min<int64_t>(kTall, row_end - i);
        const float* a = p.a + i * p.k + begin;
        float* c = p.out + i * p.n + column;
        const float* first = begin == 0 ? bias : nullptr;
        if (columns == kWidth) {
          rows == kTall ? multiply_tile<kTall>(a, p.k, weights, count, first, c, p.n)
                        : tile_of(rows)(a, p.k, weights, count, first, c, p.n);
          if (ends) activate_tile(p.activation, c, p.n, rows);
          continue;
        }
        // The last panel has columns beyond the matrix.
        alignas(64) float tile[kTall * kWidth];
        for (int64_t r = 0; begin > 0 && r < rows; ++r)
          std::copy(c + r * p.n, c + r * p.n + columns, tile + r * kWidth);
        tile_of(rows)(a, p.k, weights, count, first, tile, kWidth);
        if (ends) activate_tile(p.activation, tile, kWidth, rows);
        for (int64_t r = 0; r < rows; ++r) std::copy(tile + r * kWidth, tile + r * kWidth + columns, c + r * p.n);
      }
    }
  }
}

}  // namespace

void pack_panels(const float* weight, int64_t n, int64_t k, float* panels) {
#pragma omp parallel for schedule(static) if (n * k > kSerialElements)
  for (int64_t column = 0; column < n; column += kWidth)
    for (int64_t d = 0; d < k; ++d)
      for (int64_t i = 0; i < kWidth; ++i)
        panels[column * k + d * kWidth + i] = column + i < n ? weight[(column + i) * k + d] : 0.0f;
}

void panel_product(const PanelProduct& p) {
  const int64_t panels = (p.n + kWidth - 1) / kWidth, threads = omp_get_max_threads();
  // Blocks of rows first; panels are divided where these alone are too few for all threads, or do not come out even.
  const int64_t blocks = (p.m + kRows - 1) / kRows, rows = ((p.m + blocks - 1) / blocks + kTall - 1) / kTall * kTall;
  const int64_t groups = blocks % threads == 0 ? 1 : std::min(panels, threads);
  // Sixteen multiplications take about as long as an element elsewhere.
#pragma omp parallel for collapse(2) schedule(static) if (p.m * p.n * p.k / 16 > kSerialElements)
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t group = 0; group < groups; ++group)
      multiply_block(p, block * rows, std::min((block + 1) * rows, p.m), group * panels / groups,
                     (group + 1) * panels / groups);
}

}  // namespace ftbert::FTBERT_ISA
