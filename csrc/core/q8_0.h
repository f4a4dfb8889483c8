// Matrices in q8_0: int8 numbers, 32 neighbours of a row with one scale in fp16; a weight is number * scale. With Q8_0
// of llama.cpp they share numbers and scales, and differ in where those lie.
#pragma once
#include <cstdint>

#include "core/types.h"

namespace ftbert {

inline constexpr int64_t kQ8Block = 32;  // numbers of a scale

// On a GPU a matrix [n, k], n a multiple of kQ8TileRows and k of kQ8TileDepth, is one piece of memory, read 16 bytes a
// lane as the operand of mma.m16n8k32 is held:
//   int8 [n / 8][k / 64][lane 32][16]: lane = 4 g + t has of row g of the tile the bytes [h 2][j 2][b 4], which are
//     columns 32 h + 16 j + 4 t + b of the step of 64;
//   behind all of them the scales, fp16 [n / 8][k / 64][h 2][g 8].
inline constexpr int64_t kQ8TileRows = 8, kQ8TileDepth = 64;
constexpr int64_t q8_0_bytes(int64_t n, int64_t k) {
  return n * k + n * (k / kQ8Block) * static_cast<int64_t>(sizeof(half_t));
}
FTBERT_HOST_DEVICE const half_t* q8_0_scales(const void* data, int64_t n, int64_t k) {
  return reinterpret_cast<const half_t*>(static_cast<const int8_t*>(data) + n * k);
}

}  // namespace ftbert
