// Weights in q8_0 as the CPU's products read them: panels of kQ8PanelRows rows of [n, k] side by side. Of each block of
// 32 columns a panel has the rows' scales, fp16 [kQ8PanelRows], then the numbers in fours, [8][kQ8PanelRows][4], each
// with its highest bit turned: as unsigned bytes they are 128 too large. Rows beyond n are 0.
#pragma once
#include <cstdint>

#include "core/format.h"

namespace ftbert {

inline constexpr int64_t kQ8PanelRows = 32;
inline constexpr int64_t kQ8BlockBytes = kQ8PanelRows * (kQ8Block + static_cast<int64_t>(sizeof(half_t)));
inline constexpr int64_t kQ8NumbersBehind = kQ8PanelRows * static_cast<int64_t>(sizeof(half_t));  // in a block

FTBERT_HOST_DEVICE constexpr int64_t q8_0_panel_count(int64_t n) { return (n + kQ8PanelRows - 1) / kQ8PanelRows; }

}  // namespace ftbert
