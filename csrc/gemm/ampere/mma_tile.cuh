// mma_tile: a product C = A B^T by mma.sync, of GPUs from compute capability 8.0 on that have no warpgroup
// instructions, and in int8 of those too. A block for each tile of C; the kernel is a template over what is done with a
// tile's sums: an Ending (gemm/gpu/endings/store.cuh).
//
// All threads copy rows of A and B to shared memory (cp.async), a ring of stages ahead. A warp multiplies its part of
// the tile, 32 bytes of k (a slice) at a time, and reads the next slice's operands before it multiplies. It reads
// those of the next step as soon as all warps have the last ones of this step in registers, and the stage is then
// filled anew: all stages but the one in registers are on their way or there.
//
// Where tiles are few, warps divide the slices of a step. Each then finishes some rows and columns of the warps' part
// of the tile: it adds the other warps' sums of these in the warps' order. Where they are fewer still and k is large,
// blocks divide the steps too (divided_k.cuh).
#pragma once
#include <algorithm>
#include <string_view>

#include "core/check.h"
#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "gemm/ampere/divided_k.cuh"
#include "gemm/gpu/endings/store.cuh"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/own.h"

namespace ftbert {
namespace {

// A tile of C has kTileM rows and kTileN columns; of these a warp has kWarpM and kWarpN, and of the slices of a step
// every kWarpsK-th. kStepBytes: of k, a row of a stage; kBlocks: at once on a multiprocessor; kSplit: blocks of a tile.
template <int kTileM_, int kTileN_, int kWarpM_, int kWarpN_, int kWarpsK_, int kStepBytes_, int kStages_, int kBlocks_,
          int kSplit_ = 1>
struct MmaShape {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kWarpM = kWarpM_, kWarpN = kWarpN_, kWarpsK = kWarpsK_;
  static constexpr int kStepBytes = kStepBytes_, kStages = kStages_, kBlocks = kBlocks_, kSplit = kSplit_;
  static constexpr int kWarpsM = kTileM / kWarpM, kWarpsN = kTileN / kWarpN, kWarpsOfTile = kWarpsM * kWarpsN;
  static constexpr int kThreads = 32 * kWarpsOfTile * kWarpsK;
  static constexpr int kBytesA = kTileM * kStepBytes, kStageBytes = kBytesA + kTileN * kStepBytes;
  static constexpr int kSlices = kStepBytes / 32 / kWarpsK;  // of a warp, in a step
  // In units of 16 rows and 8 columns: of a warp's sums, and of those that it finishes.
  static constexpr int kSixteens = kWarpM / 16, kAllEights = kWarpN / 8;
  static constexpr int kPartsM = std::min(kWarpsK, kSixteens), kPartsN = kWarpsK / kPartsM;
  static constexpr int kOwnSixteens = kSixteens / kPartsM, kEights = kAllEights / kPartsN;
  using Staging = PaddedRows<kEights>;
  // Behind the last step: sums on their way to other warps, [warps of the tile][to][from][16 rows][8 columns][lane]
  // four sums, and rows on their way out.
  static constexpr int kShareBytes = 32 * 16;
  static constexpr int kSharesBytes = (kWarpsK - 1) * kOwnSixteens * kEights * kShareBytes;  // of a warp
  static constexpr int kAreaBytes = kSharesBytes + Staging::kBytes;
  static constexpr int kBytes = std::max(kStages * kStageBytes, kThreads / 32 * kAreaBytes);
  static constexpr std::string_view kKind = kWarpsK > 1 ? "shared" : "";  // in the variant's name: warps share k
  static_assert(kPartsM * kPartsN == kWarpsK && kSixteens % kPartsM == 0);
  static_assert(kAllEights % kPartsN == 0 && kAllEights % 2 == 0);
  static_assert(kStepBytes % (32 * kWarpsK) == 0 && kStepBytes >= 64);
};

// Rows of kStepBytes in shared memory, chunks of 16 bytes permuted within lines of 128 bytes, so that eight rows that
// are read together lie in different banks. The permutation repeats every eight rows.
template <int kStepBytes>
__device__ uint32_t chunk_at(int row, int chunk) {
  constexpr int kChunks = kStepBytes / 16;
  return row * kStepBytes + (chunk ^ (kChunks >= 8 ? row % 8 : row / 2 % 4)) * 16;
}

// Operands by the type A of A's elements: that of the sums, and the bytes of their rows.
template <class A>
struct MmaOperands {
  using Sum = float;
  static constexpr bool kOnHopper = false;  // not beside warpgroups
  static __device__ int row_of_a(int k) { return k * static_cast<int>(sizeof(A)); }
  static __device__ int row_of_b(int k) { return row_of_a(k); }
  static __device__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add<A>(sum, a, b0, b1);
  }
};
// Byte rows by int8. Where k is no multiple of 16 a chunk of A ends with other bytes than numbers, which meet zeros.
template <>
struct MmaOperands<uint8_t> {
  using Sum = int32_t;
  static constexpr bool kOnHopper = true;
  static __device__ int row_of_a(int k) { return static_cast<int>(byte_row_bytes(k)); }
  static __device__ int row_of_b(int k) { return static_cast<int>(int8_row_bytes(k)); }
  static __device__ void multiply(int32_t (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add(sum, a, b0, b1);
  }
};

// Copies steps of k, of the tile's rows of A or B. Rows past the last are the last one again: no ending stores them.
template <class Shape, int kRows>
struct StepCopies {
  static constexpr int kChunks = Shape::kStepBytes / 16, kAtOnce = Shape::kThreads / kChunks;
  static constexpr int kCopies = kRows / kAtOnce;
  static_assert(kRows % kAtOnce == 0 && kAtOnce % 8 == 0);

  const char* matrix;
  uint32_t from[kCopies];  // bytes, of which a matrix has fewer than 2^32 (has_offsets)
  uint32_t to;
  int left;  // bytes of k, from this thread's chunk on

  __device__ StepCopies(const void* matrix, int64_t row0, int64_t rows, int64_t row_bytes, int k_bytes)
      : matrix(static_cast<const char*>(matrix)) {
    const int row = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      from[i] = static_cast<uint32_t>(min(row0 + row + i * kAtOnce, rows - 1) * row_bytes + chunk * 16);
    to = chunk_at<Shape::kStepBytes>(row, chunk);
    left = k_bytes - chunk * 16;
  }
  // A step, to a stage that begins at `stage`.
  __device__ void copy(uint32_t stage, int step) const {
    const bool there = step * Shape::kStepBytes < left;
    const char* const first = matrix + (there ? step * Shape::kStepBytes : 0);
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      copy_async16(stage + to + i * kAtOnce * Shape::kStepBytes, first + from[i], there);
  }
};

// Whether kernels of this code may begin before the kernel ahead has ended (launch.cuh).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kStartsEarly = true;
#else
constexpr bool kStartsEarly = false;
#endif

// The product's sizes: of A [m, k], B [n, k], sums [m, n].
struct MmaWork {
  const void *a, *b;
  int64_t m;
  int n, k;
  DividedK divided = {};
};

// A: the type of A's and B's elements. Grid: tiles across n, tiles along m, blocks of a tile.
template <class A, class Shape, class Ending>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    mma_tile_kernel(const MmaWork work, const typename Ending::Arguments arguments) {
#ifdef FTBERT_WGMMA
  if constexpr (!MmaOperands<A>::kOnHopper) return __trap();
#endif
  using Operands = MmaOperands<A>;
  using Sum = typename Operands::Sum;
  using Four = FourOf<Sum>;
  constexpr int kStepBytes = Shape::kStepBytes, kStages = Shape::kStages, kSlices = Shape::kSlices;
  constexpr int kSixteens = Shape::kSixteens, kAllEights = Shape::kAllEights, kWarpsK = Shape::kWarpsK;
  constexpr int kOwnSixteens = Shape::kOwnSixteens, kEights = Shape::kEights, kPartsN = Shape::kPartsN;
  extern __shared__ __align__(128) char memory[];
  const uint32_t base = shared_address(memory);
  const int64_t row0 = int64_t{blockIdx.y} * Shape::kTileM;
  const int column0 = static_cast<int>(blockIdx.x) * Shape::kTileN;
  const int k_bytes = work.k * static_cast<int>(sizeof(A)), all_steps = (k_bytes + kStepBytes - 1) / kStepBytes;
  const int first_step = Shape::kSplit == 1 ? 0 : static_cast<int>(blockIdx.z) * all_steps / Shape::kSplit;
  const int steps =
      Shape::kSplit == 1 ? all_steps : static_cast<int>(blockIdx.z + 1) * all_steps / Shape::kSplit - first_step;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int of_tile = warp % Shape::kWarpsOfTile, part = warp / Shape::kWarpsOfTile;
  const int first_row = of_tile / Shape::kWarpsN * Shape::kWarpM;
  const int first_column = of_tile % Shape::kWarpsN * Shape::kWarpN;
  const int own_row = first_row + part / kPartsN * kOwnSixteens * 16;
  const int own_column = first_column + part % kPartsN * kEights * 8;

  const StepCopies<Shape, Shape::kTileN> copies_b(work.b, column0, work.n, Operands::row_of_b(work.k), k_bytes);
  const StepCopies<Shape, Shape::kTileM> copies_a(work.a, row0, work.m, Operands::row_of_a(work.k), k_bytes);
  const auto stage_at = [&](int stage) { return base + stage * Shape::kStageBytes; };
  const auto copy_b = [&](int stage, int step) { copies_b.copy(stage_at(stage) + Shape::kBytesA, first_step + step); };
  const auto copy_a = [&](int stage, int step) { copies_a.copy(stage_at(stage), first_step + step); };
  // No kernel changes weights while a model runs: they are asked for before the kernel ahead has ended.
#pragma unroll
  for (int stage = 0; kStartsEarly && stage < kStages; ++stage)
    if (stage < steps) copy_b(stage, stage);
  float* const vectors = reinterpret_cast<float*>(memory + Shape::kBytes);
  if constexpr (Ending::kVectors > 0) {
    Ending of_vectors(arguments, work.m, work.n);
    for (int i = static_cast<int>(threadIdx.x) * 4; i < Ending::kVectors * Shape::kTileN; i += 4 * Shape::kThreads) {
      const int column = column0 + i % Shape::kTileN;
      const bool there = column < work.n;
      copy_async16(shared_address(vectors + i), of_vectors.vector(i / Shape::kTileN) + (there ? column : 0), there);
    }
  }
  wait_for_inputs();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < steps) {
      if (!kStartsEarly) copy_b(stage, stage);
      copy_a(stage, stage);
    }
    copy_async_commit();
  }

  // Where a slice of this warp's rows lies in a stage; the slices of other chunks are the exclusive or of their bytes.
  const uint32_t lane_at = chunk_at<kStepBytes>(lane % 16, lane / 16) ^ (part * 32);
  const uint32_t rows_a = first_row * kStepBytes + lane_at;
  const uint32_t rows_b = Shape::kBytesA + first_column * kStepBytes + lane_at;
  uint32_t a[2][kSixteens][4], b[2][kAllEights / 2][4];
  const auto read = [&](int to, int stage, int slice) {
    const uint32_t at = stage_at(stage);
    const uint32_t other = slice * kWarpsK * 32;
#pragma unroll
    for (int i = 0; i < kSixteens; ++i) load_matrices(a[to][i], (at + rows_a + i * 16 * kStepBytes) ^ other);
#pragma unroll
    for (int j = 0; j < kAllEights / 2; ++j) load_matrices(b[to][j], (at + rows_b + j * 16 * kStepBytes) ^ other);
  };
  Sum sum[kSixteens][kAllEights][4] = {};
  copy_async_wait<kStages - 1>();
  __syncthreads();
  read(0, 0, 0);
  int stage = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice < kSlices - 1) {
        read((slice + 1) % 2, stage, slice + 1);
      } else {
        copy_async_wait<kStages - 2>();
        __syncthreads();
        const int filled = stage;
        if (++stage == kStages) stage = 0;
        if (step + 1 < steps) read((slice + 1) % 2, stage, 0);
        if (step + kStages < steps) {
          copy_b(filled, step + kStages);
          copy_a(filled, step + kStages);
        }
        copy_async_commit();
      }
#pragma unroll
      for (int i = 0; i < kSixteens; ++i)
#pragma unroll
        for (int j = 0; j < kAllEights; ++j) {
          const auto& pair = b[slice % 2][j / 2];
          Operands::multiply(sum[i][j], a[slice % 2][i], pair[j % 2], pair[2 + j % 2]);
        }
    }
    if constexpr (kSlices % 2 == 1) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
#pragma unroll
        for (int i = 0; i < kSixteens; ++i) a[0][i][c] = a[1][i][c];
#pragma unroll
        for (int j = 0; j < kAllEights / 2; ++j) b[0][j][c] = b[1][j][c];
      }
    }
  }

  // Behind the last step's barrier nobody reads a stage.
  char* const area = memory + warp * Shape::kAreaBytes;
  Sum own[kOwnSixteens][kEights][4];
  const auto area_of = [&](int to) { return memory + (to * Shape::kWarpsOfTile + of_tile) * Shape::kAreaBytes; };
#pragma unroll
  for (int to = 0; to < kWarpsK; ++to) {
    const int from = part < to ? part : part - 1;
#pragma unroll
    for (int i = 0; i < kOwnSixteens; ++i)
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        const Sum(&s)[4] = sum[to / kPartsN * kOwnSixteens + i][to % kPartsN * kEights + j];
        if (to == part) {
#pragma unroll
          for (int c = 0; c < 4; ++c) own[i][j][c] = s[c];
        } else {
          reinterpret_cast<Four*>(area_of(to))[((from * kOwnSixteens + i) * kEights + j) * 32 + lane] = {s[0], s[1],
                                                                                                         s[2], s[3]};
        }
      }
  }
  if constexpr (kWarpsK > 1) {
    __syncthreads();
#pragma unroll
    for (int from = 0; from < kWarpsK - 1; ++from)
#pragma unroll
      for (int i = 0; i < kOwnSixteens; ++i)
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const Four s = reinterpret_cast<const Four*>(area)[((from * kOwnSixteens + i) * kEights + j) * 32 + lane];
          own[i][j][0] += s.x, own[i][j][1] += s.y, own[i][j][2] += s.z, own[i][j][3] += s.w;
        }
  }
  if constexpr (Shape::kSplit > 1)
    if (!gather_blocks<Shape>(work.divided, row0, own)) return;
#pragma unroll
  for (int i = 0; i < kOwnSixteens; ++i) {
    Ending ending(arguments, work.m, work.n);
    ending.look_ahead(row0 + own_row + i * 16, column0 + own_column);
    ending.finish(own[i], vectors + own_column, area + Shape::kSharesBytes);
    __syncwarp();
  }
}

constexpr int kMostVectors = 3;  // of an Ending

template <class A, class Shape, class Ending>
void launch_mma_tile(const Context<Cuda>& context, const char* name, const Product& p, const ProductData& data,
                     const typename Ending::Arguments& arguments) {
  static_assert(Ending::kVectors <= kMostVectors);
  constexpr int kBytes = Shape::kBytes + Ending::kVectors * 4 * Shape::kTileN;
  constexpr bool kAddsMoments = requires { arguments.moments; };
  if constexpr (Shape::kSplit > 1 && !kAddsMoments) {
    fail(name, ": blocks divide k only of products that leave moments");
  } else {
    MmaWork work{data.a, data.b, p.m, static_cast<int>(p.n), static_cast<int>(p.k)};
    if constexpr (Shape::kSplit > 1) {
      FTBERT_CHECK(context.gemm_workspace && static_cast<int64_t>(context.gemm_workspace_bytes) >= kLeastWorkspaceBytes,
                   name, ": blocks that divide k need ", kLeastWorkspaceBytes, " bytes of Context::gemm_workspace");
      work.divided = {context.gemm_workspace, arguments.moments};
    }
    launch_overlapped(context, name, mma_tile_kernel<A, Shape, Ending>,
                      dim3(static_cast<unsigned>(over(p.n, Shape::kTileN)),
                           static_cast<unsigned>(over(p.m, Shape::kTileM)), Shape::kSplit),
                      Shape::kThreads, kBytes, 1, work, arguments);
  }
}

// Each is the fastest for some products of BERT's layers (mma_tile_cuda.cu).
using MmaShapes = ShapeList<MmaShape<16, 32, 16, 32, 4, 128, 6, 3>, MmaShape<32, 32, 32, 32, 4, 128, 6, 3>,
                            MmaShape<64, 64, 32, 64, 2, 128, 4, 2>, MmaShape<64, 96, 32, 48, 1, 128, 3, 2>,
                            MmaShape<64, 128, 32, 64, 1, 128, 3, 2>, MmaShape<96, 128, 48, 64, 1, 64, 4, 2>,
                            MmaShape<128, 128, 64, 64, 1, 64, 4, 2>, MmaShape<16, 32, 16, 32, 4, 128, 6, 3, 4>,
                            MmaShape<32, 32, 32, 32, 4, 128, 6, 3, 4>, MmaShape<64, 64, 32, 64, 2, 128, 4, 2, 4>>;

// Heads are turned where a warp finishes whole ones.
constexpr int kTurnedHead = 64;
template <class Shape>
inline constexpr bool kTurnsHeads = 8 * Shape::kEights == kTurnedHead && Shape::kSplit == 1;

// A variant of the kernel with that Ending, for A and B of 16 bits, where it has one.
template <template <class E, class Shape> class Ending, class Arguments>
void run_mma_tile(const Context<Cuda>& context, const char* name, int variant, const Product& p,
                  const ProductData& data, const Arguments& arguments) {
  MmaShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    if (p.a == DType::fp16)
      launch_mma_tile<__half, Shape, Ending<__half, Shape>>(context, name, p, data, arguments);
    else
      launch_mma_tile<__nv_bfloat16, Shape, Ending<__nv_bfloat16, Shape>>(context, name, p, data, arguments);
  });
}

}  // namespace
}  // namespace ftbert
