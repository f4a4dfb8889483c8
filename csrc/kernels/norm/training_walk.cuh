// How the backward pass of the norms walks over rows: a block a multiprocessor, which keeps sums of columns in
// registers, several groups of threads in it, a row a group. The next rows are on their way into shared memory while
// one is computed, so that what is in flight, 64 KB and more a multiprocessor, costs no registers; gamma and beta stay
// there too, as floats. A row for which a multiprocessor has no room is divided among the blocks of a cluster (Hopper).
#pragma once

#include "device/cluster_sum.cuh"
#include "kernels/norm/training_rows.cuh"

namespace ftbert {
namespace {

// ---- shapes --------------------------------------------------------------------------------------------------------

// kThreads share a row, or a part of it, kPacks accesses each. kCluster: blocks that share a row, a part each. kStages:
// rows of a group that are on their way or in work. kMostThreads: of a block. kKept: what the second pass over a row
// reads is kept in registers, which else hold the sums alone.
template <int kWidth_, int kThreads_, int kPacks_, int kCluster_ = 1>
struct TrainingShape {
  static constexpr int kWidth = kWidth_, kThreads = kThreads_, kPacks = kPacks_, kCluster = kCluster_;
  static constexpr int kPart = kWidth * kThreads * kPacks, kCols = kPart * kCluster;  // the longest part and row
  static constexpr bool kLongWarps = kThreads == 32 && kPacks == 3;
  static constexpr bool kKept = kPacks == 1 || kLongWarps;
  static constexpr int kStages = kPacks == 1 ? (kThreads < 128 ? 4 : 3)
                                 : kLongWarps || (kPacks == 2 && kThreads < 512) || kCluster > 1 ? 3
                                                                                                 : 2;
  static constexpr int kMostThreads = kPacks == 1 ? 768 : kLongWarps ? 320 : 512;
  static constexpr size_t kGroupBytes = 16 * kStages * kThreads * kPacks;  // of a matrix's rows in shared memory
};

// Elements of 16 bits that fill one: 128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384 and, on Hopper, 32768.
template <int W, bool kMany>
struct TrainingShapes : ShapeList<TrainingShape<W, 32, 1>, TrainingShape<W, 32, 3>, TrainingShape<W, 64, 3>,
                                  TrainingShape<W, 256, 2>, TrainingShape<W, 512, 2>, TrainingShape<W, 512, 4>> {};
template <int W>
struct TrainingShapes<W, true>
    : ShapeList<TrainingShape<W, 16, 1>, TrainingShape<W, 32, 1>, TrainingShape<W, 32, 2>, TrainingShape<W, 32, 3>,
                TrainingShape<W, 128, 1>, TrainingShape<W, 64, 3>, TrainingShape<W, 256, 1>, TrainingShape<W, 256, 2>,
                TrainingShape<W, 512, 2>, TrainingShape<W, 512, 4>, TrainingShape<W, 512, 2, 2>,
                TrainingShape<W, 512, 2, 4>> {};
template <>
struct TrainingShapes<1, false>
    : ShapeList<TrainingShape<1, 32, 4>, TrainingShape<1, 256, 4>, TrainingShape<1, 512, 8>> {};

// ---- the walk ------------------------------------------------------------------------------------------------------

// This thread's group, its number in it, the rows that it takes part in, and the columns of the block's part of a row.
template <class Shape>
struct GroupWalk {
  int group = threadIdx.x / Shape::kThreads, lane = threadIdx.x % Shape::kThreads;
  int64_t row, step, warp_row;  // warp_row: of the first group in the warp, where it holds several
  int first = 0, cols, pitch;   // the part's columns, of a row of `pitch`

  __device__ explicit GroupWalk(int row_cols) : cols(row_cols), pitch(row_cols) {
    const int groups = blockDim.x / Shape::kThreads;
    row = static_cast<int64_t>(blockIdx.x / Shape::kCluster) * groups + group;
    step = static_cast<int64_t>(gridDim.x / Shape::kCluster) * groups;
    warp_row = Shape::kThreads < 32 ? row - group % (32 / Shape::kThreads) : row;
    if constexpr (Shape::kCluster > 1) {
      constexpr int kOne = Shape::kWidth * Shape::kCluster;
      const int part = (row_cols + kOne - 1) / kOne * Shape::kWidth;
      first = static_cast<int>(blockIdx.x) % Shape::kCluster * part;
      cols = min(part, row_cols - first);
    }
  }
  __device__ int col(int pack) const { return (pack * Shape::kThreads + lane) * Shape::kWidth; }  // of the part
  __device__ bool has(int pack) const { return col(pack) < cols; }
  __device__ int64_t at(int64_t row, int pack) const { return row * pitch + first + col(pack); }
};

// Sums over a row of Shape.
template <class Shape>
struct RowSumOf {
  using type = GroupSum<Shape::kThreads, Shape::kMostThreads / Shape::kThreads>;
};
template <class Shape>
  requires(Shape::kCluster > 1)
struct RowSumOf<Shape> {
  static_assert(Shape::kThreads == Shape::kMostThreads);
  using type = ClusterSum<Shape::kThreads, Shape::kCluster>;
};
template <class Shape>
using RowSum = typename RowSumOf<Shape>::type;

// A matrix's rows on their way through shared memory. Each thread copies and reads its own packs.
template <class Rows, class Shape>
struct RowFeed {
  Rows rows;
  uint4* slots;  // [kStages, kPacks, kThreads] from this thread's on

  // memory: of all groups, [groups] times kGroupBytes
  __device__ RowFeed(const Rows& rows, uint4* memory, const GroupWalk<Shape>& walk)
      : rows(rows), slots(Rows::kStaged ? memory + walk.group * (Shape::kGroupBytes / 16) + walk.lane : nullptr) {}

  static __device__ int slot(int stage, int pack) { return (stage * Shape::kPacks + pack) * Shape::kThreads; }

  // Zeros past the end of a row and for a row that is not.
  __device__ void start(int stage, int64_t row, bool real, const GroupWalk<Shape>& walk) const {
    if constexpr (Rows::kStaged) {
#pragma unroll
      for (int i = 0; i < Shape::kPacks; ++i)
        rows.start(shared_address(slots + stage * slot(1, 0) + slot(0, i)), walk.at(row, i), real && walk.has(i));
    }
  }
  __device__ void read(int stage, int pack, int64_t row, bool real, const GroupWalk<Shape>& walk,
                       float (&x)[Shape::kWidth]) const {
    if constexpr (Rows::kStaged) {
      rows.read(slots[stage * slot(1, 0) + slot(0, pack)], 0, x);
    } else {
      x[0] = 0;
      if (real && walk.has(pack)) rows.read(uint4(), walk.at(row, pack), x);
    }
  }
};

// ---- vectors in shared memory ---------------------------------------------------------------------------------------

// kPart floats in shared memory, in groups of four that lie as a warp reads them: 16 bytes beside 16 bytes.
template <class Shape>
struct SharedVector {
  static constexpr int kQuad = Shape::kWidth < 4 ? 1 : 4, kQuads = Shape::kWidth / kQuad;  // of a pack
  static constexpr int kPlane = Shape::kPart / kQuads;

  static __device__ int index(int col) {
    const int pack = col / Shape::kWidth, within = col % Shape::kWidth;
    return within / kQuad * kPlane + pack * kQuad + within % kQuad;
  }
  // value(x) of the vector's numbers in the block's part, and 0 behind them, by the whole block.
  template <class Value>
  static __device__ void fill(float* to, const Vector& vector, const GroupWalk<Shape>& walk, const Value& value) {
#pragma unroll 2
    for (int pack = threadIdx.x; pack < Shape::kPart / Shape::kWidth; pack += blockDim.x) {
      const int col = pack * Shape::kWidth;
      float x[Shape::kWidth] = {};
      if (col < walk.cols) {
        vector.read(walk.first + col, x);
#pragma unroll
        for (int w = 0; w < Shape::kWidth; ++w) x[w] = value(x[w]);
      }
      write(to + pack * kQuad, x);
    }
  }
  // Where this thread's pack lies.
  static __device__ int place(int pack, const GroupWalk<Shape>& walk) {
    return (pack * Shape::kThreads + walk.lane) * kQuad;
  }
  static __device__ void read(const float* from, int pack, const GroupWalk<Shape>& walk, float (&x)[Shape::kWidth]) {
    const float* const mine = from + place(pack, walk);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if constexpr (kQuad == 1)
        x[q] = mine[q * kPlane];
      else
        Packed<float, 4>::load(mine + q * kPlane).to_floats(*reinterpret_cast<float (*)[4]>(&x[4 * q]));
    }
  }
  // The other way; to: where the pack's first number lies.
  static __device__ void write(float* to, const float (&x)[Shape::kWidth]) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if constexpr (kQuad == 1)
        to[q * kPlane] = x[q];
      else
        Packed<float, 4>::from_floats(*reinterpret_cast<const float (*)[4]>(&x[4 * q])).store(to + q * kPlane);
    }
  }
};

// ---- launch --------------------------------------------------------------------------------------------------------

// What a block may have beside a kernel's own shared memory, of which these kernels have less than 2 KB.
inline size_t room_in_shared_memory(const Context<Cuda>& context) {
  return static_cast<size_t>(context.shared_bytes) - 2048;
}

// kernel(arguments) over rows, kernel being one of Shape; among how many blocks or clusters the rows are divided, 0
// where no group of it has room.
// group_bytes, block_bytes: of shared memory.
template <class Shape, class Arguments>
unsigned launch_over_rows(const Context<Cuda>& context, const char* name, void (*kernel)(Arguments), int64_t rows,
                          size_t group_bytes, size_t block_bytes, const Arguments& arguments) {
  constexpr int kAtOnce = Shape::kThreads < 32 ? 32 / Shape::kThreads : 1;  // groups of a warp
  const size_t room = room_in_shared_memory(context);
  if (Shape::kCluster > 1 && context.capability < 90) return 0;
  if (block_bytes + kAtOnce * group_bytes > room) return 0;
  int64_t most = context.sm_count;
  if constexpr (Shape::kCluster > 1)
    most = std::min<int64_t>(clusters_at_once(name, kernel, Shape::kMostThreads, room, Shape::kCluster), most);
  if (most == 0) return 0;
  int64_t groups = Shape::kMostThreads / Shape::kThreads;
  if (group_bytes) groups = std::min<int64_t>(groups, (room - block_bytes) / group_bytes);
  groups = std::min(groups, (rows + most - 1) / most);  // few rows: on all multiprocessors
  groups = std::max<int64_t>(groups / kAtOnce, 1) * kAtOnce;
  const auto parts = static_cast<unsigned>(std::min<int64_t>(most, (rows + groups - 1) / groups));
  launch_overlapped(context, name, kernel, dim3(parts * Shape::kCluster),
                    static_cast<unsigned>(groups * Shape::kThreads),
                    SharedBytes(block_bytes + groups * group_bytes, room), Shape::kCluster, arguments);
  return parts;
}

}  // namespace
}  // namespace ftbert
