// Rows kept in registers: how many threads share a row, and how many packed accesses each of them makes.
#pragma once
#include <algorithm>
#include <climits>
#include <cstdint>

namespace ftbert {

// kPacks == 0: the row does not fit in registers and is read again for every pass.
template <int kWidth_, int kThreads_, int kPacks_>
struct RowShape {
  static constexpr int kWidth = kWidth_;      // elements of one access
  static constexpr int kThreads = kThreads_;  // 32: a warp a row, several rows a block; else a block a row
  static constexpr int kPacks = kPacks_;
  static constexpr int kMaxThreads = kThreads == 32 ? 128 : kThreads;
};

// Calls launch(RowShape) with the first shape that holds `cols` elements, kWidth of them in an access where `wide`.
// Warps first: they reduce without a barrier. One element at a time, which is rare, gets by with fewer shapes.
template <int kWidth, class Launch>
void with_row_shape(bool wide, int64_t cols, const Launch& launch) {
  if (!wide) {
    if (cols <= 128) return launch(RowShape<1, 32, 4>());
    if (cols <= 1024) return launch(RowShape<1, 256, 4>());
    return launch(RowShape<1, 512, 0>());
  }
  const int64_t packs = cols / kWidth;
  if (packs <= 32) return launch(RowShape<kWidth, 32, 1>());
  if (packs <= 64) return launch(RowShape<kWidth, 32, 2>());
  if (packs <= 96) return launch(RowShape<kWidth, 32, 3>());
  if (packs <= 128) return launch(RowShape<kWidth, 32, 4>());
  if (packs <= 256) return launch(RowShape<kWidth, 128, 2>());
  if (packs <= 1024) return launch(RowShape<kWidth, 256, 4>());
  launch(RowShape<kWidth, 512, 0>());
}

struct RowLaunch {
  unsigned blocks, threads;
};

// One row a group of Shape::kThreads; few rows are spread over as many multiprocessors as there are.
template <class Shape>
RowLaunch row_launch(int64_t rows, int sm_count) {
  int64_t rows_per_block = Shape::kMaxThreads / Shape::kThreads;
  while (rows_per_block > 1 && rows / rows_per_block < 2 * sm_count) rows_per_block /= 2;
  const int64_t blocks = (rows + rows_per_block - 1) / rows_per_block;
  return {static_cast<unsigned>(std::min<int64_t>(blocks, INT_MAX)),
          static_cast<unsigned>(rows_per_block * Shape::kThreads)};
}

// The first row of this thread's group, the number of groups in the grid, and the thread's number in its group.
template <class Shape>
struct RowWalk {
  int64_t row, step;
  int lane;

  __device__ RowWalk() {
    if constexpr (Shape::kThreads == 32) {
      const int groups = blockDim.x / 32;
      row = static_cast<int64_t>(blockIdx.x) * groups + threadIdx.x / 32;
      step = static_cast<int64_t>(gridDim.x) * groups;
      lane = threadIdx.x % 32;
    } else {
      row = blockIdx.x;
      step = gridDim.x;
      lane = threadIdx.x;
    }
  }
};

}  // namespace ftbert
