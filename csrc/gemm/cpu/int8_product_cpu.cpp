// out = act((a @ weight^T) * scales + bias), `a` in uint8 with a scale and a zero point for each row, the weight in
// int8 panels (panels.h). Sums are exact, so that all instruction sets make the same of them.
//
// A block of kRows rows of `a` stays in the second-level cache while all panels pass, and kDepth of a panel in the
// first while the rows of the block pass, in the second where a tile of kTall rows is tall enough for that; the sums of
// a tile stay in registers.
#include "device/int8_products.h"
#ifdef FTBERT_INT8
#include <algorithm>
#include <cstring>

#include "core/format.h"
#include "device/amx.h"
#include "device/parallel_cpu.h"
#include "device/simd_math.h"
#include "gemm/cpu/kernel.h"
#include "gemm/cpu/panel_tiles.h"
#include "gemm/cpu/panels.h"
#include "kernels/isa.h"

namespace ftbert::FTBERT_ISA {
namespace {

using simd::Integers, simd::load_integers, simd::store_integers;
using simd::kLanes, simd::load, simd::store, simd::Vector;

constexpr int kWidth = kInt8Width, kVectors = kWidth / kLanes;
constexpr int64_t kLine = 64;

// c [R, kWidth] = sum, or + c
template <int R>
inline void store_sums(const Integers (&sum)[R][kVectors], bool add, int32_t* c) {
#pragma GCC unroll 14
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      int32_t* const to = c + r * kWidth + v * kLanes;
      store_integers(to, add ? sum[r][v] + load_integers(to) : sum[r][v]);
    }
  }
}

#ifdef FTBERT_VNNI
struct TileProduct {
  // c [R, kWidth] = a [R, depth] @ panel [depth, kWidth], or + c
  template <int R>
  static void multiply(const uint8_t* a, int64_t lda, const int8_t* panel, int64_t depth, bool add, int32_t* c) {
    Integers sum[R][kVectors] = {};
    for (int64_t d = 0; d < depth; d += 4) {
      Integers weights[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) weights[v] = load_integers(panel + d * kWidth + v * sizeof(Integers));
#pragma GCC unroll 14
      for (int r = 0; r < R; ++r) {
        int32_t four;
        std::memcpy(&four, a + r * lda + d, sizeof(four));
        const Integers bytes = Integers{} + four;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = simd::add_products(sum[r][v], bytes, weights[v]);
      }
    }
    store_sums(sum, add, c);
  }
};

// Products by vectors.
struct ByVectors {
  static constexpr int kTall = kLanes == 16 ? 14 : 3;  // tiles of 28 sums of 32 registers, 12 of 16
  static constexpr int64_t kRows = kLanes == 16 ? 196 : 192, kDepth = kLanes == 16 ? 4096 : 1024, kGrain = 4;

  static int64_t tall(int64_t rows) {  // of all tiles but the last: 8 and 8 rows rather than 14 and 2
    const int64_t tiles = (rows + kTall - 1) / kTall;
    return (rows + tiles - 1) / tiles;
  }
  void multiply(int64_t rows, const uint8_t* a, int64_t lda, const int8_t* panel, int64_t depth, bool add, int32_t* c) {
    tile_of<TileProduct, kTall>(rows)(a, lda, panel, depth, add, c);
  }
};
#else
struct TileProduct {
  // c [R, kWidth] = a [R, depth] @ wide [depth, kWidth], or + c. wide: [depth / 4][2][kWidth], of a column's four bytes
  // the first and the third, then the second and the fourth, in 16 bits each.
  template <int R>
  static void multiply(const uint8_t* a, int64_t lda, const Integers* wide, int64_t depth, bool add, int32_t* c) {
    Integers sum[R][kVectors] = {};
    for (int64_t d = 0; d < depth; d += 4, wide += 2 * kVectors) {
      Integers even[R], odd[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Integers bytes = simd::four_bytes(a + r * lda + d);
        even[r] = simd::even_bytes(bytes);
        odd[r] = simd::odd_bytes(bytes);
      }
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][v] = simd::add_pairs(sum[r][v], even[r], wide[v]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][v] = simd::add_pairs(sum[r][v], odd[r], wide[kVectors + v]);
      }
    }
    store_sums(sum, add, c);
  }
};

// Products by vectors of 16 bits. A cut of a panel is widened once for all tiles of a block, as long as which this
// lives.
struct ByVectors {
  static constexpr int kTall = 2;  // tiles of 8 sums and 4 of their rows' numbers of 16 registers
  static constexpr int64_t kRows = 192, kDepth = 256, kGrain = 4;

  static int64_t tall(int64_t) { return kTall; }
  void multiply(int64_t rows, const uint8_t* a, int64_t lda, const int8_t* panel, int64_t depth, bool add, int32_t* c) {
    if (panel != widened) widen(panel, depth);
    tile_of<TileProduct, kTall>(rows)(a, lda, wide, depth, add, c);
  }
  void widen(const int8_t* panel, int64_t depth) {
    widened = panel;
    Integers* to = wide;
    for (int64_t d = 0; d < depth; d += 4, to += 2 * kVectors) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Integers weights = load_integers(panel + d * kWidth + v * sizeof(Integers));
        to[v] = simd::even_weights(weights);
        to[kVectors + v] = simd::odd_weights(weights);
      }
    }
  }
  const int8_t* widened = nullptr;
  alignas(64) Integers wide[kDepth / 4 * 2 * kVectors];
};
#endif

#ifdef FTBERT_AMX
// Products by tiles, two by two.
struct ByTiles {
  static constexpr int kTall = 2 * amx::kSide;
  static constexpr int64_t kRows = 256, kDepth = 1024, kGrain = kInt8Step;

  static int64_t tall(int64_t) { return kTall; }
  void multiply(int64_t rows, const uint8_t* a, int64_t lda, const int8_t* panel, int64_t depth, bool add, int32_t* c) {
    tiles.shape(rows);
    const auto by_tiles = rows > amx::kSide ? amx::multiply<2, int32_t> : amx::multiply<1, int32_t>;
    by_tiles(reinterpret_cast<const uint32_t*>(a), lda / 4, reinterpret_cast<const uint32_t*>(panel), kWidth, depth / 4,
             kWidth, c, kWidth, add);
  }
  amx::Tiles tiles;
};
#endif

// What the results of a panel's columns need.
struct Columns {
  int64_t first, count;
  const int32_t* weight_sums;
  alignas(64) float scales[kWidth] = {}, bias[kWidth] = {};

  Columns(const Product& p, const CpuData& data, int64_t panel, const int8_t* sums)
      : first(panel * kWidth),
        count(std::min<int64_t>(kWidth, p.n - first)),
        weight_sums(reinterpret_cast<const int32_t*>(sums)) {
    std::copy_n(data.b_scale + first, count, scales);
    if (data.bias) std::copy_n(data.bias + first, count, bias);
  }
};

// One row of results of its sums [kWidth].
inline void scale_row(const uint8_t* row_end, const Columns& columns, const int32_t* sums, float* out) {
  float scale;
  int32_t zero;
  std::memcpy(&scale, row_end - 8, sizeof(scale));
  std::memcpy(&zero, row_end - 4, sizeof(zero));
#pragma GCC unroll 4
  for (int i = 0; i < kWidth; i += kLanes) {
    const Integers sum = load_integers(sums + i) - zero * load_integers(columns.weight_sums + i);
    store(out + i, __builtin_convertvector(sum, Vector) * (scale * load(columns.scales + i)) + load(columns.bias + i));
  }
}

// Where a row's results of a panel go.
inline float* results(const Product& p, const CpuData& data, int64_t row, const Columns& columns) {
  const int64_t first = row * p.n + columns.first;
  return static_cast<float*>(data.c) + (p.epilogue.gate == Gate::pairs ? first / 2 : first);
}

template <Activation activation>
void finish_tile(const Product& p, const CpuData& data, int64_t row, int64_t rows, const Columns& columns,
                 const int32_t* sums) {
  const bool gated = p.epilogue.gate == Gate::pairs, rounded = p.c == DType::bf16;
  const int64_t stride = byte_row_bytes(p.k);
  for (int64_t i = 0; i < rows; ++i) {
    const uint8_t* const end = static_cast<const uint8_t*>(data.a.data) + (row + i + 1) * stride;
    if (rounded) {
      alignas(64) float line[kWidth];
      scale_row(end, columns, sums + i * kWidth, line);
      activate_rows<activation, kWidth>(line, kWidth, 1);
      bfloat16_t* const to = static_cast<bfloat16_t*>(data.c) + (row + i) * p.n + columns.first;
#pragma omp simd
      for (int64_t c = 0; c < columns.count; ++c) to[c].bits = simd::bf16_bits(line[c]);
      continue;
    }
    float* const to = results(p, data, row + i, columns);
    if (!gated && columns.count == kWidth) {
      scale_row(end, columns, sums + i * kWidth, to);
      activate_rows<activation, kWidth>(to, kWidth, 1);
      continue;
    }
    alignas(64) float line[kWidth];
    scale_row(end, columns, sums + i * kWidth, line);
    if (gated) {
      gate_rows<activation>(line, kWidth, 1, columns.count / 2, to, 0);
    } else {
      activate_rows<activation, kWidth>(line, kWidth, 1);
      std::copy_n(line, columns.count, to);
    }
  }
}

// At most kRows rows. Each tile asks for the lines that its results go to. Panels come in the order of memory, by
// themselves: to ask for those too took longer.
template <class By>
void multiply_block(const Product& p, const CpuData& data, const ThreadRange& range) {
  const auto* const a = static_cast<const uint8_t*>(data.a.data);
  const bool rounded = p.c == DType::bf16;
  By by;
  alignas(64) int32_t sums[By::kRows * kWidth];  // of a panel's columns, where its depth is cut
  const int64_t block = range.row_end - range.row, tall = By::tall(block);
  const int64_t stride = byte_row_bytes(p.k), bytes = int8_bytes_of_panel(p.k);
  const int64_t depth = (p.k + By::kGrain - 1) / By::kGrain * By::kGrain, cuts = (depth + By::kDepth - 1) / By::kDepth;
  const int64_t cut = int8_depth((depth + cuts - 1) / cuts);
  for (int64_t j = range.panel; j < range.panel_end; ++j) {
    const int8_t* const panel = static_cast<const int8_t*>(data.b) + j * bytes;
    const Columns columns(p, data, j, panel + kWidth * int8_depth(p.k));
    for (int64_t begin = 0; begin < depth; begin += cut) {
      const int64_t count = std::min(cut, depth - begin);
      const bool ends = begin + count == depth;
      for (int64_t i = range.row; i < range.row_end; i += tall) {
        const int64_t rows = std::min(tall, range.row_end - i);
        int32_t* const c = sums + (cuts > 1 ? (i - range.row) * kWidth : 0);
        for (int64_t r = 0; ends && !rounded && r < rows; ++r) {  // else the stores wait for their lines
          const float* const to = results(p, data, i + r, columns);
          __builtin_prefetch(to, 1);
          __builtin_prefetch(to + kLine / sizeof(float), 1);
        }
        by.multiply(rows, a + i * stride + begin, stride, panel + begin * kWidth, count, begin > 0, c);
        if (!ends) continue;
        with_activation(p.epilogue.activation, [&](auto kind) { finish_tile<kind()>(p, data, i, rows, columns, c); });
      }
    }
  }
}

template <class By>
void multiply_all(const Product& p, const CpuData& data) {
  if (p.m == 0) return;
  // 64 multiplications take about as long as an element elsewhere.
  const bool alone = p.m * p.n * p.k / 64 <= kSerialElements;
  divide_product(p.m, int8_panel_count(p.n), By::kTall, By::kRows, alone,
                 [&](const ThreadRange& range) { multiply_block<By>(p, data, range); });
}

}  // namespace

void int8_product(const Product& p, const CpuData& data) { multiply_all<ByVectors>(p, data); }
#ifdef FTBERT_AMX
void int8_product_by_tiles(const Product& p, const CpuData& data) { multiply_all<ByTiles>(p, data); }
#endif

}  // namespace ftbert::FTBERT_ISA
#endif
