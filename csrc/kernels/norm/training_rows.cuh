// How the norms of training walk over rows: a block a multiprocessor, several groups of threads in it, a row a group.
// The next rows are on their way into shared memory while one is computed, so that what is in flight, 64 KB and more a
// multiprocessor, costs no registers; gamma and beta stay there too, as floats.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>

#include "core/cuda_check.h"
#include "core/operand.h"
#include "device/group_sum.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "kernels/norm/training_norms.h"

namespace ftbert {
namespace {

// ---- elements ------------------------------------------------------------------------------------------------------

// Rows of one element type, whose packs of 16 bytes come through shared memory.
template <class E>
struct PlainRows {
  static constexpr int kWidth = ftbert::kWidth<E>;      // elements of an access
  static constexpr bool kPlain = true, kStaged = true;  // staged: through shared memory
  E* data;

  PlainRows(const Operand& rows) : data(static_cast<E*>(rows.data)) {}
  __device__ explicit operator bool() const { return data != nullptr; }
  __device__ void start(uint32_t slot, int64_t at, bool real) const {
    copy_async16(slot, real ? data + at : data, real);
  }
  __device__ void read(const uint4& slot, int64_t, float (&x)[kWidth]) const { Packed<E, kWidth>{slot}.to_floats(x); }
  __device__ void store(int64_t at, const float (&x)[kWidth]) const {
    Packed<E, kWidth>::from_floats(x).store(data + at);
  }
  __device__ void round(float (&x)[kWidth]) const { Packed<E, kWidth>::from_floats(x).to_floats(x); }  // as stored
};

// Rows whose type is known when the kernel runs, each matrix's for itself: four elements an access, or one where rows
// do not start on boundaries.
template <int kWidth_>
struct AnyRows {
  static constexpr int kWidth = kWidth_;
  static constexpr bool kPlain = false, kStaged = kWidth == 4;
  void* data;
  DType dtype;

  AnyRows(const Operand& rows) : data(rows.data), dtype(rows.dtype) {}
  __device__ explicit operator bool() const { return data != nullptr; }

  // run(E()) for the element type
  template <class Run>
  __device__ void typed(const Run& run) const {
    if (dtype == DType::fp32)
      run(float());
    else if (dtype == DType::fp16)
      run(__half());
    else
      run(__nv_bfloat16());
  }

  __device__ void start(uint32_t slot, int64_t at, bool real) const {
    if (dtype == DType::fp32)
      copy_async16(slot, static_cast<const float*>(data) + (real ? at : 0), real);
    else
      copy_async8(slot, static_cast<const __half*>(data) + (real ? at : 0), real);
  }
  __device__ void read(const uint4& slot, int64_t at, float (&x)[kWidth]) const {
    typed([&]<class E>(E) {
      using Pack = Packed<E, kWidth>;
      if constexpr (kStaged)
        Pack{*reinterpret_cast<const typename Pack::Bits*>(&slot)}.to_floats(x);
      else
        Pack::load(static_cast<const E*>(data) + at).to_floats(x);
    });
  }
  __device__ void load(int64_t at, float (&x)[kWidth]) const {
    typed([&]<class E>(E) { Packed<E, kWidth>::load(static_cast<const E*>(data) + at).to_floats(x); });
  }
  __device__ void store(int64_t at, const float (&x)[kWidth]) const {
    typed([&]<class E>(E) { Packed<E, kWidth>::from_floats(x).store(static_cast<E*>(data) + at); });
  }
  __device__ void round(float (&x)[kWidth]) const {
    typed([&]<class E>(E) { Packed<E, kWidth>::from_floats(x).to_floats(x); });
  }
};

// ---- shapes --------------------------------------------------------------------------------------------------------

// kThreads share a row, kPacks accesses each. kStages: rows of a group that are on their way or in work. kMostThreads
// of a block: forward, a row is in registers; backward, sums over rows are.
template <int kWidth_, int kThreads_, int kPacks_>
struct TrainingShape {
  static constexpr int kWidth = kWidth_, kThreads = kThreads_, kPacks = kPacks_;
  static constexpr int kCols = kWidth * kThreads * kPacks;  // the longest row
  static constexpr bool kLongWarps = kThreads == 32 && kPacks == 3;
  static constexpr int kStages = kPacks == 1 ? 4 : kPacks == 2 || kLongWarps ? 3 : 2;
  static constexpr int kForwardThreads = kThreads == 64 ? 896 : kPacks == 4 && kWidth == 8 ? 512 : 1024;
  static constexpr int kBackwardThreads = kPacks == 1 ? 768 : kLongWarps ? 384 : 512;
  static constexpr size_t kGroupBytes = 16 * kStages * kThreads * kPacks;  // of a matrix's rows in shared memory
};

// launch(TrainingShape) with the first that holds a row; false: there is none, or launch has no room for it.
template <int kWidth, bool kMany, class Launch>
bool with_training_shape(int64_t cols, const Launch& launch) {
  if constexpr (kWidth == 1) {
    if (cols <= 128) return launch(TrainingShape<1, 32, 4>());
    if (cols <= 1024) return launch(TrainingShape<1, 256, 4>());
    if (cols <= 4096) return launch(TrainingShape<1, 512, 8>());
    return false;
  } else {
    // Elements of 16 bits that fill one: 128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192 and 16384.
    const int64_t packs = cols / kWidth;
    if constexpr (kMany)
      if (packs <= 16) return launch(TrainingShape<kWidth, 16, 1>());
    if (packs <= 32) return launch(TrainingShape<kWidth, 32, 1>());
    if constexpr (kMany)
      if (packs <= 64) return launch(TrainingShape<kWidth, 32, 2>());
    if (packs <= 96) return launch(TrainingShape<kWidth, 32, 3>());
    if constexpr (kMany)
      if (packs <= 128) return launch(TrainingShape<kWidth, 64, 2>());
    if (packs <= 192) return launch(TrainingShape<kWidth, 64, 3>());
    if constexpr (kMany)
      if (packs <= 256) return launch(TrainingShape<kWidth, 128, 2>());
    if (packs <= 512) return launch(TrainingShape<kWidth, 256, 2>());
    if (packs <= 1024) return launch(TrainingShape<kWidth, 512, 2>());
    if (packs <= 2048) return launch(TrainingShape<kWidth, 512, 4>());
    return false;
  }
}

// ---- the walk ------------------------------------------------------------------------------------------------------

// This thread's group, its number in it, and the rows that it takes part in.
template <class Shape>
struct GroupWalk {
  int group = threadIdx.x / Shape::kThreads, lane = threadIdx.x % Shape::kThreads;
  int64_t row, step, warp_row;  // warp_row: of the first group in the warp, where it holds several

  __device__ GroupWalk() {
    const int groups = blockDim.x / Shape::kThreads;
    row = static_cast<int64_t>(blockIdx.x) * groups + group;
    step = static_cast<int64_t>(gridDim.x) * groups;
    warp_row = Shape::kThreads < 32 ? row - group % (32 / Shape::kThreads) : row;
  }
  __device__ int col(int pack) const { return (pack * Shape::kThreads + lane) * Shape::kWidth; }
};

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
  __device__ void start(int stage, int64_t row, bool real, int cols, const GroupWalk<Shape>& walk) const {
    if constexpr (Rows::kStaged) {
#pragma unroll
      for (int i = 0; i < Shape::kPacks; ++i)
        rows.start(shared_address(slots + stage * slot(1, 0) + slot(0, i)), row * cols + walk.col(i),
                   real && walk.col(i) < cols);
    }
  }
  __device__ void read(int stage, int pack, int64_t row, bool real, int cols, const GroupWalk<Shape>& walk,
                       float (&x)[Shape::kWidth]) const {
    if constexpr (Rows::kStaged) {
      rows.read(slots[stage * slot(1, 0) + slot(0, pack)], 0, x);
    } else {
      x[0] = 0;
      if (real && walk.col(pack) < cols) rows.read(uint4(), row * cols + walk.col(pack), x);
    }
  }
};

// ---- vectors -------------------------------------------------------------------------------------------------------

struct Vector {
  const void* data;
  DType dtype;
  Vector(const Operand& vector) : data(vector.data), dtype(vector.dtype) {}

  __device__ float at(int col, float absent) const {
    if (data == nullptr) return absent;
    if (dtype == DType::fp32) return static_cast<const float*>(data)[col];
    if (dtype == DType::fp16) return __half2float(static_cast<const __half*>(data)[col]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[col]);
  }
};

// gamma with the offset; 1 where it is absent.
__device__ inline float gamma_at(const Vector& gamma, int col, float offset) {
  return gamma.data ? gamma.at(col, 0) + offset : 1.0f;
}

// 1 / gamma for x^ = (y - beta) / gamma, as NormBackward has it.
__device__ inline float inverse_gamma(float gamma, float eps) {
  return fast_reciprocal(gamma >= 0 ? fmaxf(gamma, eps) : fminf(gamma, -eps));
}

// kCols floats in shared memory, in groups of four that lie as a warp reads them: 16 bytes beside 16 bytes.
template <class Shape>
struct SharedVector {
  static constexpr int kQuad = Shape::kWidth < 4 ? 1 : 4, kQuads = Shape::kWidth / kQuad;  // of a pack
  static constexpr int kPlane = Shape::kCols / kQuads;

  static __device__ int index(int col) {
    const int pack = col / Shape::kWidth, within = col % Shape::kWidth;
    return within / kQuad * kPlane + pack * kQuad + within % kQuad;
  }
  // value(col) of the columns that are there, by the whole block.
  template <class Value>
  static __device__ void fill(float* to, int cols, const Value& value) {
#pragma unroll 4
    for (int col = threadIdx.x; col < Shape::kCols; col += blockDim.x) to[index(col)] = col < cols ? value(col) : 0;
  }
  static __device__ void read(const float* from, int pack, const GroupWalk<Shape>& walk, float (&x)[Shape::kWidth]) {
    const float* const mine = from + (pack * Shape::kThreads + walk.lane) * kQuad;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if constexpr (kQuad == 1)
        x[q] = mine[q * kPlane];
      else
        Packed<float, 4>::load(mine + q * kPlane).to_floats(*reinterpret_cast<float (*)[4]>(&x[4 * q]));
    }
  }
  // The other way.
  static __device__ void write(float* to, int pack, const GroupWalk<Shape>& walk, const float (&x)[Shape::kWidth]) {
    float* const mine = to + (pack * Shape::kThreads + walk.lane) * kQuad;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if constexpr (kQuad == 1)
        mine[q * kPlane] = x[q];
      else
        Packed<float, 4>::from_floats(*reinterpret_cast<const float (*)[4]>(&x[4 * q])).store(mine + q * kPlane);
    }
  }
};

inline constexpr int kLongThreads = 512;  // of a block that has a row to itself, too long for registers

// ---- launch --------------------------------------------------------------------------------------------------------

// What a block may have beside a kernel's own shared memory, of which these kernels have less than 2 KB.
inline size_t room_in_shared_memory(const Context<Cuda>& context) {
  static std::array<std::atomic<int>, 64> known{};  // by device; 0: not asked yet
  const auto device = static_cast<size_t>(context.device);
  int most = device < known.size() ? known[device].load(std::memory_order_relaxed) : 0;
  if (most == 0) {
    FTBERT_CUDA_CHECK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, context.device));
    if (device < known.size()) known[device].store(most, std::memory_order_relaxed);
  }
  return static_cast<size_t>(most) - 2048;
}

// kernel(arguments) over rows, kernel being one of Shape; how many blocks, 0 where no group of it has room.
// group_bytes, block_bytes: of shared memory.
template <class Shape, class Arguments>
unsigned launch_over_rows(const Context<Cuda>& context, const char* name, void (*kernel)(Arguments), int most_threads,
                          int64_t rows, size_t group_bytes, size_t block_bytes, const Arguments& arguments) {
  constexpr int kAtOnce = Shape::kThreads < 32 ? 32 / Shape::kThreads : 1;  // groups of a warp
  const size_t room = room_in_shared_memory(context);
  if (block_bytes + kAtOnce * group_bytes > room) return 0;
  int64_t groups = most_threads / Shape::kThreads;
  if (group_bytes) groups = std::min<int64_t>(groups, (room - block_bytes) / group_bytes);
  groups = std::min(groups, (rows + context.sm_count - 1) / context.sm_count);  // few rows: on all multiprocessors
  groups = std::max<int64_t>(groups / kAtOnce, 1) * kAtOnce;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(context.sm_count, (rows + groups - 1) / groups));
  launch_overlapped(context, name, kernel, dim3(blocks), static_cast<unsigned>(groups * Shape::kThreads),
                    SharedBytes(block_bytes + groups * group_bytes, room), 1, arguments);
  return blocks;
}

// By the matrices' types and places plain.operator()<T>(), T their one element type, which says whether it has a
// kernel, or any.operator()<AnyRows>().
template <class Any, class Plain>
void with_rows_of(int64_t cols, std::initializer_list<Operand> matrices, const Any& any, const Plain& plain) {
  bool one_type = true, wide = true, quads = cols % 4 == 0;
  const DType first = matrices.begin()->dtype;
  for (const Operand& matrix : matrices) {
    if (!matrix) continue;
    const auto place = reinterpret_cast<uintptr_t>(matrix.data);
    one_type = one_type && matrix.dtype == first;
    wide = wide && place % 16 == 0 && cols * bytes_of(matrix.dtype) % 16 == 0;
    quads = quads && place % (4 * bytes_of(matrix.dtype)) == 0;
  }
  if (one_type && wide) {
    if (first == DType::fp32 && plain.template operator()<float>()) return;
    if (first == DType::fp16 && plain.template operator()<half_t>()) return;
    if (first == DType::bf16 && plain.template operator()<bfloat16_t>()) return;
  }
  quads ? any.template operator()<AnyRows<4>>() : any.template operator()<AnyRows<1>>();
}

}  // namespace

// with_rows_of's plain: compiled in files of their own.
template <class T>
bool norm_forward_plain(Context<Cuda>& context, const NormForward& norm);
extern template bool norm_forward_plain<float>(Context<Cuda>&, const NormForward&);
extern template bool norm_forward_plain<half_t>(Context<Cuda>&, const NormForward&);
extern template bool norm_forward_plain<bfloat16_t>(Context<Cuda>&, const NormForward&);

// How many parts of the rows have their sums in norm.partials, and whether those of gamma are of grad * (y - beta).
// parts 0: there is no kernel for such rows.
struct BackwardParts {
  unsigned parts;
  bool times_gamma;
};
template <class T>
BackwardParts norm_backward_plain(Context<Cuda>& context, const NormBackward& norm);
extern template BackwardParts norm_backward_plain<float>(Context<Cuda>&, const NormBackward&);
extern template BackwardParts norm_backward_plain<half_t>(Context<Cuda>&, const NormBackward&);
extern template BackwardParts norm_backward_plain<bfloat16_t>(Context<Cuda>&, const NormBackward&);

}  // namespace ftbert
