// Weights of int8 products in panels: kInt8Width rows of [n, k] side by side, the bytes of k in fours,
// [k up to whole steps / 4][kInt8Width][4], and behind them the rows' sums, int32 [kInt8Width], which the zero points
// of the other operand need. What is no part of the weight is 0.
#pragma once
#include <cstdint>

#include "core/types.h"

namespace ftbert {

inline constexpr int64_t kInt8Width = 32, kInt8Step = 64;  // a tile of AMX reads 64 bytes of k

FTBERT_HOST_DEVICE constexpr int64_t int8_panel_count(int64_t n) { return (n + kInt8Width - 1) / kInt8Width; }
FTBERT_HOST_DEVICE constexpr int64_t int8_depth(int64_t k) { return (k + kInt8Step - 1) / kInt8Step * kInt8Step; }
FTBERT_HOST_DEVICE constexpr int64_t int8_bytes_of_panel(int64_t k) {
  return kInt8Width * (int8_depth(k) + static_cast<int64_t>(sizeof(int32_t)));
}
// Where byte d of a panel's row i lies.
FTBERT_HOST_DEVICE constexpr int64_t int8_place(int64_t i, int64_t d) { return (d / 4 * kInt8Width + i) * 4 + d % 4; }

}  // namespace ftbert
