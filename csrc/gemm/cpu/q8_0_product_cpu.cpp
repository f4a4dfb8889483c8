// out = act(a @ weight^T + bias), the weight in panels of q8_0 (panels.h), `a` stored as Q8_1 by each thread for
// itself: of few rows that is nothing beside the weight, which streams through once.
#include <algorithm>
#include <cstring>
#include <memory>

#include "device/parallel_cpu.h"
#include "device/q8_0_products.h"
#include "gemm/cpu/kernel.h"
#include "gemm/cpu/panel_tiles.h"
#include "gemm/cpu/panels.h"
#include "kernels/elementwise/q8_1_row.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {
namespace {

using simd::add_turned, simd::Integers, simd::load_integers;
using simd::kLanes, simd::load, simd::load_halves, simd::store, simd::Vector;

constexpr int kWidth = kQ8PanelRows, kVectors = kWidth / kLanes;
#ifdef FTBERT_VNNI
constexpr int kTall = kLanes == 16 ? 8 : 3;  // rows whose sums registers hold: 16 of 32, 12 of 16
#else
constexpr int kTall = kLanes == 16 ? 8 : 2;  // add_turned takes registers too
#endif
constexpr int64_t kRows = 256;  // whose numbers stay in the second-level cache while panels pass
constexpr int64_t kAhead = 4096;

// Rows of Q8_1: of each block its numbers, and beside them its scale and where sums begin.
class Rows {
 public:
  struct Block {
    int8_t numbers[kQ8Block];
    float scale;
    int32_t begin;
  };

  Rows(const float* a, int64_t rows, int64_t k)
      : count_(k / kQ8Block), blocks_(std::make_unique_for_overwrite<Block[]>(rows * count_)) {
    for (int64_t i = 0; i < rows * count_; ++i) {
      Block& block = blocks_[i];
      block.begin = -simd::kTurnedBy * store_q8_1_block(a + i * kQ8Block, block.numbers, &block.scale);
    }
  }
  const Block* row(int64_t i) const { return blocks_.get() + i * count_; }
  int64_t count() const { return count_; }

 private:
  int64_t count_;
  std::unique_ptr<Block[]> blocks_;
};

struct TileProduct {
  // c [R, kWidth] = rows from `first` on @ panel
  template <int R>
  static void multiply(const Rows& rows, int64_t first, const char* panel, float* c) {
    const int64_t count = rows.count();
    const Rows::Block* const a = rows.row(first);
    Vector sum[R][kVectors] = {};
    for (int64_t block = 0; block < count; ++block, panel += kQ8BlockBytes) {
      const char* const numbers = panel + kQ8NumbersBehind;
      Integers exact[R][kVectors];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) exact[r][v] = Integers{} + a[r * count + block].begin;
      }
#pragma GCC unroll 8
      for (int d = 0; d < kQ8Block; d += 4) {
        if constexpr (R == 1) {  // of more rows the panel comes fast enough by itself
          __builtin_prefetch(numbers + d * kWidth + kAhead);
          __builtin_prefetch(numbers + d * kWidth + kAhead + 64);
        }
        Integers weights[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) weights[v] = load_integers(numbers + d * kWidth + v * sizeof(Integers));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          int32_t four;
          std::memcpy(&four, a[r * count + block].numbers + d, sizeof(four));
          const Integers x = Integers{} + four;
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) exact[r][v] = add_turned(exact[r][v], weights[v], x);
        }
      }
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        const Vector scales = load_halves(panel + v * kLanes * sizeof(half_t));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          sum[r][v] += __builtin_convertvector(exact[r][v], Vector) * (a[r * count + block].scale * scales);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store(c + r * kWidth + v * kLanes, sum[r][v]);
    }
  }
};

// Rows of results of their sums [rows, kWidth], from `column` on.
template <Activation activation>
void finish_tile(const Product& p, const CpuData& data, int64_t row, int64_t rows, int64_t column, float* sums) {
  const int64_t count = std::min<int64_t>(kWidth, p.n - column);
  for (int64_t r = 0; data.bias && r < rows; ++r) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) sums[r * kWidth + i] += data.bias[column + i];
  }
  auto* const out = static_cast<float*>(data.c);
  if (p.epilogue.gate == Gate::pairs)
    return gate_rows<activation>(sums, kWidth, rows, count / 2, out + (row * p.n + column) / 2, p.n / 2);
  activate_rows<activation, kWidth>(sums, kWidth, rows);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(sums + r * kWidth, count, out + (row + r) * p.n + column);
}

void multiply_block(const Product& p, const CpuData& data, const ThreadRange& range) {
  const Rows rows(static_cast<const float*>(data.a.data) + range.row * p.k, range.row_end - range.row, p.k);
  const int64_t bytes = rows.count() * kQ8BlockBytes;
  for (int64_t j = range.panel; j < range.panel_end; ++j) {
    const char* const panel = static_cast<const char*>(data.b) + j * bytes;
    for (int64_t i = range.row; i < range.row_end; i += kTall) {
      const int64_t tall = std::min<int64_t>(kTall, range.row_end - i);
      alignas(64) float sums[kTall * kWidth];
      tile_of<TileProduct, kTall>(tall)(rows, i - range.row, panel, sums);
      with_activation(p.epilogue.activation,
                      [&](auto kind) { finish_tile<kind()>(p, data, i, tall, j * kWidth, sums); });
    }
  }
}

}  // namespace

void q8_0_product(const Product& p, const CpuData& data) {
  if (p.m == 0) return;
  // 64 multiplications take about as long as an element elsewhere, and to fetch a weight as 4.
  const bool alone = (p.m + 16) * p.n * p.k / 64 <= kSerialElements;
  divide_product(p.m, q8_0_panel_count(p.n), kTall, kRows, alone,
                 [&](const ThreadRange& range) { multiply_block(p, data, range); });
}

}  // namespace ftbert::FTBERT_ISA
