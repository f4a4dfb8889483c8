// Where blocks divide the steps of k of mma_tile (mma_tile.cuh): each leaves its sums in memory, and the last to arrive
// at a tile adds all in the blocks' order.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/edge.h"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/own.h"

namespace ftbert {
namespace {

template <class Sum>
using FourOf = std::conditional_t<std::is_same_v<Sum, float>, float4, int4>;

// Of all blocks' sums.
constexpr int64_t part_bytes(const Tile& tile, int64_t m, int64_t n) {
  return over(m, tile.rows) * over(n, tile.columns) * tile.split * tile.rows * tile.columns *
         static_cast<int64_t>(sizeof(float));
}

// parts: room for the blocks' sums, [tiles][kSplit] of kTileM * kTileN. counts: the rows' moments, which have the
// tiles' counts of blocks (MmaCounts).
struct DividedK {
  void* parts = nullptr;
  RowMoments counts = {};
};

// A tile counts its blocks in a byte of a word of the moments: eight tiles of columns in the word of one of their rows.
// QKV or up, ahead of this product, clears it with the moments (endings/correct.cuh). So only products that leave
// moments divide k over blocks.
struct MmaCounts {
  static constexpr int kOfRow = 8;
  static constexpr bool has_room(int64_t m, int64_t tile_rows, int64_t tiles_across) {
    return tiles_across <= kOfRow * ((m - 1) % tile_rows + 1);  // of the last tile
  }
  // Counts this block; how many were there before. By a thread whose block has a barrier before it and behind it: a
  // block that is counted later reads, behind its barrier, the sums of all counted before.
  static __device__ unsigned count(const RowMoments& moments, int64_t row0) {
    const unsigned tile = blockIdx.x, shift = 8 * (tile % kOfRow);
    auto* const word =
        reinterpret_cast<unsigned long long*>(moments.data) + (row0 + tile / kOfRow) * kMomentWords + kCountWord;
    unsigned long long before;
    asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(word), "l"(1ull << shift)
                 : "memory");
    return static_cast<unsigned>(before >> shift) & 0xff;
  }
};

// Leaves the block's sums for the tile's last block, which gets all of them, added in the blocks' order: true.
template <class Shape, class Sum>
__device__ bool gather_blocks(const DividedK& divided, int64_t row0,
                              Sum (&own)[Shape::kOwnSixteens][Shape::kEights][4]) {
  using Four = FourOf<Sum>;
  const int64_t tile = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  Four* const parts = static_cast<Four*>(divided.parts) + tile * (Shape::kTileM * Shape::kTileN / 4 * Shape::kSplit);
  const auto at = [&](int block, int i, int j) {
    return parts + ((block * Shape::kOwnSixteens + i) * Shape::kEights + j) * Shape::kThreads + threadIdx.x;
  };
#pragma unroll
  for (int i = 0; i < Shape::kOwnSixteens; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      const Sum(&s)[4] = own[i][j];
      __stcg(at(static_cast<int>(blockIdx.z), i, j), Four{s[0], s[1], s[2], s[3]});
    }
  __syncthreads();
  const bool last = threadIdx.x == 0 && MmaCounts::count(divided.counts, row0) == Shape::kSplit - 1;
  if (!__syncthreads_or(last)) return false;
#pragma unroll
  for (int i = 0; i < Shape::kOwnSixteens; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kEights; ++j) {
      Sum(&s)[4] = own[i][j];
      s[0] = s[1] = s[2] = s[3] = 0;
#pragma unroll
      for (int block = 0; block < Shape::kSplit; ++block) {
        const Four part = __ldcg(at(block, i, j));
        s[0] += part.x, s[1] += part.y, s[2] += part.z, s[3] += part.w;
      }
    }
  return true;
}

}  // namespace
}  // namespace ftbert
