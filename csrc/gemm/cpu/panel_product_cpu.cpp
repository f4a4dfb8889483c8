// out = act(a @ weight^T + bias) in float, or what a gate makes of the sums, on a weight that lies in panels: kWidth of
// its rows side by side, so that a step along k reads whole vectors one after the other.
//
// A block of kRows rows of `a` stays in the second-level cache while all panels pass; kDepth of a panel stays in the
// first while the rows of the block pass; a tile of kTall rows and a panel's width stays in registers meanwhile.
#include <algorithm>
#include <cstdint>

#include "device/parallel_cpu.h"
#include "device/simd_math.h"
#include "gemm/cpu/kernel.h"
#include "gemm/cpu/panel_tiles.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {
namespace {

using simd::kLanes, simd::load, simd::store, simd::Vector;

constexpr int kWidth = kPanelWidth;
constexpr int kTall = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 12;  // tiles of 28 sums of 32 registers, 12 of 16, 24 of 32
constexpr int64_t kRows = 196, kDepth = kLanes == 16 ? 256 : 384, kLine = 64;

struct TileProduct {
  // c [R, kWidth] = a [R, depth] @ panel [depth, kWidth] + `first` [kWidth], or + c where that is nullptr. Each cut of
  // the depth is summed by itself: that rounds less than one long sum.
  template <int R>
  static void multiply(const float* a, int64_t lda, const float* panel, int64_t depth, const float* first, float* c,
                       int64_t ldc) {
    Vector sum[R][2] = {};
#pragma GCC unroll 4
    for (int64_t d = 0; d < depth; ++d) {
      const Vector left = load(panel + d * kWidth), right = load(panel + d * kWidth + kLanes);
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        const float x = a[r * lda + d];
        sum[r][0] += x * left;
        sum[r][1] += x * right;
      }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r) {
      const float* add = first ? first : c + r * ldc;
      store(c + r * ldc, sum[r][0] + load(add));
      store(c + r * ldc + kLanes, sum[r][1] + load(add + kLanes));
    }
  }
};

void activate_tile(Activation activation, float* c, int64_t ldc, int64_t rows) {
  with_activation(activation, [&](auto kind) { activate_rows<kind(), kWidth>(c, ldc, rows); });
}

// At most kRows rows. Each tile prefetches an equal number of lines of the next panel, which comes from far.
void multiply_block(const Product& p, const CpuData& data, const ThreadRange& range) {
  const bool gated = p.epilogue.gate == Gate::pairs;
  const auto *const rows_of_a = static_cast<const float*>(data.a.data), *const panels =
                                                                            static_cast<const float*>(data.b);
  float *const result = static_cast<float*>(data.c), *const out = gated ? data.sums : result;
  const int64_t block = range.row_end - range.row, tiles = (block + kTall - 1) / kTall;
  const int64_t cuts = (p.k + kDepth - 1) / kDepth, depth = (p.k + cuts - 1) / cuts;
  const int64_t tall = (block + tiles - 1) / tiles;  // of all tiles but the last: 8 and 8 rows rather than 14 and 2
  for (int64_t begin = 0; begin < p.k; begin += depth) {
    const int64_t count = std::min(depth, p.k - begin);
    const bool ends = begin + count == p.k;
    for (int64_t j = range.panel; j < range.panel_end; ++j) {
      const int64_t column = j * kWidth, columns = std::min<int64_t>(kWidth, p.n - column);
      const float* weights = panels + column * p.k + begin * kWidth;
      const char* ahead = reinterpret_cast<const char*>(weights + p.k * kWidth);
      const int64_t lines = count * kWidth * static_cast<int64_t>(sizeof(float)) / kLine;
      const int64_t prefetched = j + 1 < range.panel_end ? (lines + tiles - 1) / tiles : 0;
      alignas(64) float bias[kWidth] = {};
      if (data.bias) std::copy(data.bias + column, data.bias + column + columns, bias);
      const float* first = begin == 0 ? bias : nullptr;
      for (int64_t i = range.row; i < range.row_end; i += tall) {
        const int64_t rows = std::min(tall, range.row_end - i);
        const float* a = rows_of_a + i * p.k + begin;
        float* c = out + i * p.n + column;
        for (int64_t line = 0; line < prefetched; ++line, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
        const auto multiply = tile_of<TileProduct, kTall>(rows);
        const auto finish = [&](float* sums, int64_t ld) {
          if (!ends) return;
          if (!gated) return activate_tile(p.epilogue.activation, sums, ld, rows);
          with_activation(p.epilogue.activation, [&](auto kind) {
            gate_rows<kind()>(sums, ld, rows, columns / 2, result + (i * p.n + column) / 2, p.n / 2);
          });
        };
        if (columns == kWidth) {
          multiply(a, p.k, weights, count, first, c, p.n);
          finish(c, p.n);
          continue;
        }
        // The last panel has columns beyond the matrix.
        alignas(64) float tile[kTall * kWidth];
        for (int64_t r = 0; !first && r < rows; ++r) std::copy(c + r * p.n, c + r * p.n + columns, tile + r * kWidth);
        multiply(a, p.k, weights, count, first, tile, kWidth);
        finish(tile, kWidth);
        for (int64_t r = 0; r < rows; ++r) std::copy(tile + r * kWidth, tile + r * kWidth + columns, c + r * p.n);
      }
    }
  }
}

}  // namespace

void panel_product(const Product& p, const CpuData& data) {
  if (p.m == 0) return;
  // Sixteen multiplications take about as long as an element elsewhere.
  const bool alone = p.m * p.n * p.k / 16 <= kSerialElements;
  divide_product(p.m, (p.n + kWidth - 1) / kWidth, kTall, kRows, alone,
                 [&](const ThreadRange& range) { multiply_block(p, data, range); });
}

}  // namespace ftbert::FTBERT_ISA
