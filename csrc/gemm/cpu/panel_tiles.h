// What the CPU's products on panels share: how threads divide them, and what follows the sums of a tile while those lie
// in the first-level cache.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "device/simd_math.h"

namespace ftbert::FTBERT_ISA {

// What one thread multiplies: rows [row, row_end) of panels [panel, panel_end).
struct ThreadRange {
  int64_t row, row_end, panel, panel_end;
};

// How many threads divide the rows; the others divide the panels. The busiest one then has the least to do.
inline int64_t row_threads(int64_t tiles, int64_t panels, int64_t threads) {
  const auto most = [&](int64_t by_rows) {
    const int64_t by_panels = threads / by_rows;
    return (tiles + by_rows - 1) / by_rows * ((panels + by_panels - 1) / by_panels);
  };
  int64_t best = 1;
  for (int64_t count = 2; count <= threads; ++count)
    if (most(count) < most(best)) best = count;
  return best;
}

// multiply(range) for all of [m] rows and `panels`, on this thread alone or on all; no range has more than `block`
// rows, and threads part at multiples of `tall`.
template <class Multiply>
void divide_product(int64_t m, int64_t panels, int64_t tall, int64_t block, bool alone, const Multiply& multiply) {
  const int64_t tiles = (m + tall - 1) / tall, threads = alone ? 1 : omp_get_max_threads();
  const int64_t by_rows = row_threads(tiles, panels, threads), by_panels = threads / by_rows;
#pragma omp parallel for schedule(static) if (threads > 1)
  for (int64_t thread = 0; thread < by_rows * by_panels; ++thread) {
    const int64_t r = thread % by_rows, c = thread / by_rows;
    const int64_t row = tiles * r / by_rows * tall, end = std::min(tiles * (r + 1) / by_rows * tall, m);
    const int64_t blocks = (end - row + block - 1) / block;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t height = (end - row + blocks - 1) / blocks;
      multiply(ThreadRange{row + b * height, std::min(row + (b + 1) * height, end), panels * c / by_panels,
                           panels * (c + 1) / by_panels});
    }
  }
}

// Product::multiply<R> for a tile of so many rows, R or fewer.
template <class Product, int R>
auto tile_of(int64_t rows) {
  if constexpr (R > 1) {
    if (rows < R) return tile_of<Product, R - 1>(rows);
  }
  return &Product::template multiply<R>;
}

template <Activation activation, int kWidth>
void activate_rows(float* c, int64_t ldc, int64_t rows) {
  if constexpr (activation == Activation::none) return;
  for (int64_t r = 0; r < rows; ++r) {
#pragma omp simd
    for (int i = 0; i < kWidth; ++i) c[r * ldc + i] = simd::activate<activation>(c[r * ldc + i]);
  }
}

// A tile's `pairs` of gate and up.
template <Activation activation>
void gate_rows(const float* c, int64_t ldc, int64_t rows, int64_t pairs, float* out, int64_t ld_out) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = c + r * ldc;
#pragma omp simd
    for (int64_t i = 0; i < pairs; ++i) out[r * ld_out + i] = simd::activate<activation>(row[2 * i]) * row[2 * i + 1];
  }
}

}  // namespace ftbert::FTBERT_ISA
