// wgmma_persistent: a product C = A B^T for many rows on Hopper, persistent, warp-specialised, ping-pong. The kernel is
// a template over what is done with a tile's sums: an Ending (gemm/gpu/endings/store.cuh).
//
// A block stays on its multiprocessor and computes one 128-row tile of C after another. One thread asks the tensor
// memory accelerator for tiles of A and B, a ring of stages ahead; two warpgroups multiply in turns (wgmma), each a
// whole tile: while one multiplies, the other adds the bias, applies the activation and stores. So the tensor cores
// need not wait for an epilogue, if it takes less time than a tile's products.
//
// A and B may be E4M3, whose 128 elements are a row of a stage where 64 of 16 bits are: sums begin at zero, and scales
// and bias come behind the last step.
#pragma once
#include <algorithm>
#include <string_view>
#include <type_traits>

#include "device/activation.cuh"
#include "device/fragment.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/named_barrier.cuh"
#include "device/ring.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "gemm/gpu/endings/store.cuh"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/own.h"
#include "gemm/hopper/rows_map.h"

namespace ftbert {
namespace {

constexpr int kTileM = 128, kTileN = 128, kStepBytes = 128;  // of k, a row of a stage
constexpr int kThreads = 384;                                // a warpgroup that loads, two that multiply
constexpr int kBytesA = kTileM * kStepBytes, kBytesB = kTileN * kStepBytes, kStageBytes = kBytesA + kBytesB;
constexpr int kSumBytes = SwizzledRows::kBytes;
static_assert(kTileN == 8 * SwizzledRows::kEights);

// Shared memory. Of each warp that multiplies: sums of 16 rows, rounded, on their way out, and of the tile's columns
// the bias, or where A and B are E4M3 scale and bias as floats. Only what lies in shared memory is near: beside the
// stages the L1 cache keeps next to nothing.
template <class A>
struct PersistentMemory {
  static constexpr int kWarpBytes = kSumBytes + kTileN * (sizeof(A) == 1 ? 8 : 2);
  static constexpr int kStages = (225 * 1024 - 8 * kWarpBytes) / kStageBytes;
  static constexpr int kBytes = 1024 + kStages * kStageBytes + 8 * kWarpBytes + 16 * kStages;
  static_assert(kBytes <= 227 * 1024);
};

// Tiles of C as wide as a cluster's blocks together, `columns` of them side by side. Groups of `group_columns` columns
// come after each other, each in the order of rows. The first `whole` tiles are computed whole, the rest in halves of
// 64 rows. Where the halves fill less than half of a wave, they take half the time. Of the last row of tiles of the
// last group there are only the upper halves where C ends in these.
struct PersistentWork {
  int64_t m;
  int n, k_steps, columns, group_columns, group_tiles;
  int whole, paired, items;  // items: whole tiles, then `paired` halves of tiles that have two, then single ones
  int at_once;               // items: clusters of the grid
  const void* bias;
  E4m3Scales scales;  // with A and B in E4M3
};

struct Piece {
  int row, column;  // of C
  bool is_whole;
};

// A block's own part of an item; kBlocks: of a cluster.
template <int kBlocks>
__device__ Piece piece_of(const PersistentWork& work, int item) {
  const int half = item - work.whole, single = half - work.paired;
  const int tile = half < 0 ? item : work.whole + (single < 0 ? half / 2 : work.paired / 2 + single);
  const int group = tile / work.group_tiles, in_group = tile % work.group_tiles;
  const int first = group * work.group_columns, columns = min(work.group_columns, work.columns - first);
  const int row = in_group / columns * kTileM + (half >= 0 && single < 0 ? half % 2 * (kTileM / 2) : 0);
  const int column = (first + in_group % columns) * kBlocks + static_cast<int>(blockIdx.x % kBlocks);
  return {row, column * kTileN, half < 0};
}

// kTileN elements of the bias from column0 on, to shared memory, asynchronously; zeros beyond n, and where there is no
// bias.
template <class E>
__device__ void bring_bias(const PersistentWork& work, int column0, uint32_t to) {
  const int i = threadIdx.x % 32, column = column0 + i * 8;
  if (i < kTileN / 8)
    copy_async16(to + i * 16, static_cast<const E*>(work.bias) + column, work.bias != nullptr && column < work.n);
  copy_async_commit();
}

// With A and B in E4M3, of kTileN columns from column0 on: what their sums are multiplied by, and the bias. Of two
// columns (scale, bias, scale, bias) at a time; zeros beyond n.
template <class E>
__device__ void bring_factors(const PersistentWork& work, int column0, float4* shared) {
  const int i = threadIdx.x % 32, column = column0 + i * 4;
  float scale[4] = {}, bias[4] = {};
  if (column < work.n) {
    load_scales(work.scales, column, scale);
    if (work.bias) Packed<E, 4>::load(static_cast<const E*>(work.bias) + column).to_floats(bias);
  }
#pragma unroll
  for (int w = 0; w < 4; w += 2) shared[i * 2 + w / 2] = {scale[w], bias[w], scale[w + 1], bias[w + 1]};
}

// A: of A's and B's elements. kBlocks: of a cluster, which have tiles side by side. Each loads its share of A's rows,
// for all of them: 128x128 tiles of blocks on their own ask the L2 cache for more than it gives.
template <class A, int kBlocks, class Ending>
__global__ void __launch_bounds__(kThreads, 1)
    wgmma_persistent_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_half_a,
                            const __grid_constant__ CUtensorMap map_b, const PersistentWork work,
                            const typename Ending::Arguments arguments) {
#ifdef FTBERT_WGMMA
  using E = typename Ending::Element;
  constexpr bool kScaled = sizeof(A) == 1;
  constexpr int kStep = kStepBytes / sizeof(A);
  constexpr int kStages = PersistentMemory<A>::kStages, kWarpBytes = PersistentMemory<A>::kWarpBytes;
  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  // Read once: the compiler would work it out anew in each step.
  const uint32_t base = __shfl_sync(~0u, shared_address(memory), 0);
  Ring<kStages, 4 * kBlocks> ring{base + kStages * kStageBytes + 8 * kWarpBytes};  // readers: warps of all blocks
  // As the compiler sees, the same for all lanes: what follows from it stays in uniform registers.
  const int all_warps = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0), warpgroup = all_warps / 4;
  const int first_item = static_cast<int>(blockIdx.x / kBlocks), rank = static_cast<int>(blockIdx.x % kBlocks);

  if (threadIdx.x == 0) {
    prefetch_map(map_a);
    prefetch_map(map_half_a);
    prefetch_map(map_b);
    ring.init();
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kBlocks > 1) cluster_arrive();  // the barriers are there

  if (warpgroup == 0) {
    fewer_registers<24>();
    if (threadIdx.x != 0) {
      if constexpr (kBlocks > 1) cluster_arrived();
      return;
    }
    const auto load_b = [&](int stage, const Piece& piece, int step) {
      barrier_expect(ring.full(stage), kStageBytes - (piece.is_whole ? 0 : kBytesA / 2));
      tma_load(base + stage * kStageBytes + kBytesA, map_b, step * kStep, piece.column, ring.full(stage));
    };
    const auto load_a = [&](int stage, const Piece& piece, int step) {
      const CUtensorMap& map = piece.is_whole ? map_a : map_half_a;
      const int rows = rank * (piece.is_whole ? kTileM : kTileM / 2) / kBlocks;
      const uint32_t to = base + stage * kStageBytes + rows * 128;
      if constexpr (kBlocks > 1)
        tma_load_to_all(to, map, step * kStep, piece.row + rows, ring.full(stage), kBlocks);
      else
        tma_load(to, map, step * kStep, piece.row, ring.full(stage));
    };
    // Weights do not change while a model runs.
    int ahead = 0;
    for (int item = first_item, step = 0; item < work.items && ahead < kStages; ++ahead) {
      load_b(ahead, piece_of<kBlocks>(work, item), step);
      if (++step == work.k_steps) step = 0, item += work.at_once;
    }
    wait_for_inputs();
    if constexpr (kBlocks > 1) cluster_arrived();
    ring.parity = 1;  // a fresh stage is empty
    for (int item = first_item; item < work.items; item += work.at_once) {
      const Piece piece = piece_of<kBlocks>(work, item);
      for (int step = 0; step < work.k_steps; ++step, --ahead) {
        if (ahead <= 0) {
          barrier_wait(ring.empty(ring.stage), ring.parity);
          load_b(ring.stage, piece, step);
        }
        load_a(ring.stage, piece, step);
        ring.next();
      }
    }
    return;
  }

  // What is written below comes after A has come, so after the wait above.
  more_registers<240>();
  const int group = warpgroup - 1, warp = all_warps % 4, lane = threadIdx.x % 32;
  char* const out = memory + kStages * kStageBytes + (group * 4 + warp) * kWarpBytes;
  const E* const bias = reinterpret_cast<const E*>(out + kSumBytes);
  float4* const factors = reinterpret_cast<float4*>(out + kSumBytes);
  // Named barriers: a warpgroup multiplies when the other one has arrived at `mine`, and the first begins.
  const auto mine = [] { return static_cast<int>(thread_anew() / 128); };
  const int theirs = 3 - mine();
  if (group == 1) named_barrier_arrive(theirs, 256);
  if constexpr (kBlocks > 1) cluster_arrived();
  int index = group;  // of the item among this block's
  const auto compute = [&](auto halves, const Piece& piece) {
    constexpr int kHalves = decltype(halves)::value;
    ring.go_to(int64_t{index} * work.k_steps);
    int before = 0;
    float sum[kHalves][kTileN / 8][4];
    const auto release = [&](int s) {
      if constexpr (kBlocks == 1) {
        if (lane == 0) ring.release(s);
      } else {
        if (lane < kBlocks) ring.release(s, lane);
      }
    };

    if constexpr (kScaled)
      bring_factors<E>(work, piece.column, factors);
    else
      bring_bias<E>(work, piece.column, shared_address(bias));
    Ending ending(arguments, work.m, work.n);
    ending.look_ahead(piece.row + warp * 16, piece.column);
    copy_async_wait<0>();
    __syncwarp();
    // While it waits for its turn. Sums that began undefined would be alive through the ending, which then spills.
#pragma unroll
    for (int j = 0; j < kTileN / 8; ++j) {
      float b[2] = {};
      if constexpr (!kScaled) Packed<E, 2>::load(bias + j * 8 + lane % 4 * 2).to_floats(b);
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
        sum[half][j][0] = sum[half][j][2] = b[0], sum[half][j][1] = sum[half][j][3] = b[1];
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) warpgroup_keep(sum[half]);  // or they are made in between the products
    named_barrier_wait(mine(), 256);
    int step = 0;
    do {
      ring.wait_full();
      const uint32_t at = base + ring.stage * kStageBytes;
      // A descriptor counts its address in units of 16 bytes.
      const uint64_t a = matrix_descriptor<128>(at), b = matrix_descriptor<128>(at + kBytesA);
      warpgroup_fence();
#pragma unroll
      for (int d = 0; d < kStepBytes / 32; ++d)
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          warpgroup_multiply_nt<A>(sum[half], a + (half * 64 * 128 + d * 32) / 16, b + d * 32 / 16, true);
      warpgroup_commit();
      if (step > 0) {
        warpgroup_wait<1>();
        release(before);
      }
      before = ring.stage;
      ring.next();
    } while (++step < work.k_steps);
    named_barrier_arrive(theirs, 256);

    warpgroup_wait();
    release(before);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      warpgroup_keep(sum[half]);
      if constexpr (kScaled) apply_factors(sum[half], factors);
      ending.finish(sum[half], nullptr, out, half * 64);
      __syncwarp();
    }
  };
  for (int item = first_item + group * work.at_once; item < work.items; index += 2, item += 2 * work.at_once) {
    const Piece piece = piece_of<kBlocks>(work, item);
    if (piece.is_whole)
      compute(std::integral_constant<int, 2>{}, piece);
    else
      compute(std::integral_constant<int, 1>{}, piece);
  }
  if constexpr (kBlocks > 1) {  // nobody leaves while another block may arrive at its barriers
    cluster_arrive();
    cluster_arrived();
  }
#else
  no_warpgroups();
#endif
}

// Pairs' tiles side by side in a group: a wave's are near a square, so that they share the most of A and B.
constexpr int kPairColumns = 6;

// blocks: of a cluster.
PersistentWork work_of(const Product& p, const ProductData& data, int sm_count, int blocks) {
  const auto tiles_of = [](int64_t size, int64_t tile) { return static_cast<int>(over(size, tile)); };
  const int rows = tiles_of(p.m, kTileM), columns = tiles_of(p.n, kTileN * blocks), at_once = sm_count / blocks;
  const int group_columns = tiles_of(columns, blocks > 1 ? tiles_of(columns, kPairColumns) : 1);
  PersistentWork work{.m = p.m,
                      .n = static_cast<int>(p.n),
                      .k_steps = tiles_of(p.k * bytes_of(p.a), kStepBytes),
                      .columns = columns,
                      .group_columns = group_columns,
                      .group_tiles = group_columns * rows,
                      .bias = data.bias,
                      .scales = scales_of(p, data)};
  const int tiles = columns * rows, rest = tiles % at_once;  // of the last wave
  const int last_columns = columns - (tiles_of(columns, group_columns) - 1) * group_columns;
  const int single = (p.m - 1) % kTileM < kTileM / 2 ? std::min(rest, last_columns) : 0;
  const int paired = 2 * (rest - single);
  if (paired + single <= at_once)
    work.whole = tiles - rest, work.paired = paired, work.items = work.whole + paired + single;
  else
    work.whole = work.items = tiles;
  work.at_once = std::min(work.items, at_once);
  return work;
}

template <int kBlocks_>
struct PersistentShape {
  static constexpr int kTileM = 128, kTileN = 128, kSplit = 1, kBlocks = kBlocks_;
  static constexpr std::string_view kKind = kBlocks == 1 ? "" : "pairs";
};
struct PersistentShapes : ShapeList<PersistentShape<1>, PersistentShape<2>> {
  static constexpr int kBlocks[] = {1, 2};
};

// A: of A's and B's elements.
template <class A, class Ending>
void launch_persistent(const Context<Cuda>& context, const char* name, int variant, const Product& p,
                       const ProductData& data, const typename Ending::Arguments& arguments) {
  PersistentShapes::with(variant, [&](auto shape) {
    constexpr int kBlocks = decltype(shape)::kBlocks;
    const PersistentWork work = work_of(p, data, context.sm_count, kBlocks);
    launch_overlapped(context, name, wgmma_persistent_kernel<A, kBlocks, Ending>, work.at_once * kBlocks, kThreads,
                      PersistentMemory<A>::kBytes, kBlocks, rows_map(p, data, kTileM / kBlocks),
                      rows_map(p, data, kTileM / 2 / kBlocks), tensor_map(data.b, p.b->numbers, p.n, p.k, kTileN), work,
                      arguments);
  });
}

}  // namespace
}  // namespace ftbert
