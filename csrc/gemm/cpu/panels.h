// How the CPU's products read weights of 8 bits.
#pragma once
#include <cstdint>

#include "core/format.h"

namespace ftbert {

// Weights of int8 products in panels: kInt8Width rows of [n, k] side by side, the bytes of k in fours,
// [k up to whole steps / 4][kInt8Width][4], and behind them the rows' sums, int32 [kInt8Width], which the zero points
// of the other operand need. What is no part of the weight is 0.
inline constexpr int64_t kInt8Width = 32, kInt8Step = 64;  // a tile of AMX reads 64 bytes of k

FTBERT_HOST_DEVICE constexpr int64_t int8_panel_count(int64_t n) { return (n + kInt8Width - 1) / kInt8Width; }
FTBERT_HOST_DEVICE constexpr int64_t int8_depth(int64_t k) { return (k + kInt8Step - 1) / kInt8Step * kInt8Step; }
FTBERT_HOST_DEVICE constexpr int64_t int8_bytes_of_panel(int64_t k) {
  return kInt8Width * (int8_depth(k) + static_cast<int64_t>(sizeof(int32_t)));
}
// Where byte d of a panel's row i lies.
FTBERT_HOST_DEVICE constexpr int64_t int8_place(int64_t i, int64_t d) { return (d / 4 * kInt8Width + i) * 4 + d % 4; }

// Weights in q8_0 as the CPU's products read them: panels of kQ8PanelRows rows of [n, k] side by side. Of each block of
// 32 columns a panel has the rows' scales, fp16 [kQ8PanelRows], then the numbers in fours, [8][kQ8PanelRows][4], each
// with its highest bit turned: as unsigned bytes they are 128 too large. Rows beyond n are 0.
inline constexpr int64_t kQ8PanelRows = 32;
inline constexpr int64_t kQ8BlockBytes = kQ8PanelRows * (kQ8Block + static_cast<int64_t>(sizeof(half_t)));
inline constexpr int64_t kQ8NumbersBehind = kQ8PanelRows * static_cast<int64_t>(sizeof(half_t));  // in a block

FTBERT_HOST_DEVICE constexpr int64_t q8_0_panel_count(int64_t n) { return (n + kQ8PanelRows - 1) / kQ8PanelRows; }

}  // namespace ftbert
