// Tiles of 16-bit elements on their way to shared memory, laid out so that ldmatrix meets no bank conflict.
#pragma once
#include <bit>

#include "device/mma.cuh"

namespace ftbert {
namespace {

// 16-byte chunks that a row of kColumns 16-bit elements takes in shared memory: the next power of two.
template <int kColumns>
inline constexpr int kRowChunks = std::bit_ceil(kColumns / 8u);

// Rows of kColumns 16-bit elements in shared memory. 16-byte chunks are permuted within 128-byte lines, so that the
// eight rows of an 8x8 matrix lie in different banks.
template <int kColumns>
__device__ uint32_t swizzled(uint32_t base, int row, int chunk) {
  constexpr int kChunks = kRowChunks<kColumns>;
  const int twist = kChunks >= 8 ? row & 7 : (row >> 1) & (kChunks - 1);
  return base + (row * kChunks + (chunk ^ twist)) * 16;
}

// Copies tiles of kColumns columns, 16 bytes a thread, neighbours side by side. Where in a tile a thread starts is
// worked out once: done per chunk, address arithmetic was half of all instructions (100.2 us against 89.7 for
// 32x512, 12 heads of 64, on an H200).
template <class E, int kColumns, int kThreads>
struct TileLoader {
  static constexpr int kChunks = kRowChunks<kColumns>, kRowsAtOnce = kThreads / kChunks;
  int row, chunk;
  int64_t first, step;  // elements: where this thread starts in a tile, and from one of its rows to the next
  uint32_t shared_first;

  __device__ explicit TileLoader(int64_t stride)
      : row(threadIdx.x / kChunks),
        chunk(threadIdx.x % kChunks),
        first(row * stride + chunk * 8),
        step(kRowsAtOnce * stride),
        shared_first(swizzled<kColumns>(0, row, chunk)) {}

  // kRows rows at most; `rows` of them are written, `valid` from memory and the rest as zeros.
  template <int kRows>
  __device__ void load(uint32_t shared, const E* global, int rows, int valid) const {
    const E* source = global + first;
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsAtOnce) {
      // The swizzle repeats every eight rows.
      const uint32_t offset =
          kRowsAtOnce % 8 == 0 ? shared_first + r * kChunks * 16 : swizzled<kColumns>(0, row + r, chunk);
      const bool real = row + r < valid;
      if (row + r < rows && (8 * kChunks == kColumns || 8 * chunk < kColumns))
        copy_async16(shared + offset, real ? source : global, real);
      source += step;
    }
  }
};

}  // namespace
}  // namespace ftbert
