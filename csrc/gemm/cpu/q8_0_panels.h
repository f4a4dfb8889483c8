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

constexpr int64_t q8_0_panels(int64_t n) { return (n + kQ8PanelRows - 1) / kQ8PanelRows; }
constexpr int64_t q8_0_panel_bytes(int64_t n, int64_t k) { return q8_0_panels(n) * (k / kQ8Block) * kQ8BlockBytes; }

// values [n, k], scales [n, k / 32] -> panels, and back.
void pack_q8_0(const int8_t* values, const half_t* scales, int64_t n, int64_t k, void* panels);
void unpack_q8_0(const void* panels, int64_t n, int64_t k, int8_t* values, half_t* scales);

}  // namespace ftbert
