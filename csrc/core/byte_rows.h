// Rows of uint8 with a scale and a zero point each, as the CPU's int8 products read them: number = (byte - zero) *
// scale.
#pragma once
#include <cstdint>

namespace ftbert {

// From row to row: `cols` bytes, zeros up to the last 8 bytes, then the scale (float) and the zero point (int32). Rows
// are whole cache lines.
inline constexpr int64_t byte_row_bytes(int64_t cols) { return (cols + 8 + 63) / 64 * 64; }

}  // namespace ftbert
