// wgmma_tile: a product C = A B^T for up to some 4000 rows on Hopper, a block for each tile of C, and nothing of such a
// product takes long but getting started and getting done. The kernel is a template over what is done with a tile's
// sums: an Ending (gemm/gpu/endings/store.cuh).
//
// One thread asks the tensor memory accelerator for tiles of A and B, into a ring of stages (device/ring.cuh);
// warpgroups multiply (wgmma), for other rows each or in turns for the next 128 bytes of k. The thread asks for
// weights, B, while the kernel ahead still runs, and for A as soon as that has ended. Blocks with at most half of a
// multiprocessor's shared memory come in twos; those with more have one to themselves.
//
// A warpgroup instruction for few columns takes no longer than the instructions around it: the loop over k is written
// out for all stages, so that only constants differ between them, with addresses in uniform registers. Where k is
// divided, over warpgroups or blocks of a cluster, each part finishes some of the tile's columns: it is sent the other
// parts' sums of these columns, in the layout of the registers they come from, and waits for nothing else. Each part of
// k has a step at least (`supports`). A block leaves when all shares of its columns have come: no block writes to one
// that has left.
#pragma once
#include <algorithm>
#include <string_view>
#include <type_traits>

#include "device/activation.cuh"
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

constexpr int kStepBytes = 128;   // of k, a row of a stage
constexpr int kShareBytes = 512;  // of a warp: its sums of 16 rows by 8 columns

// A tile of C has 64 * kGroupsM rows and kTileN columns. kGroupsM warpgroups have 64 rows each; of each 64 rows
// kGroupsK warpgroups take steps of k (128 bytes) in turns; kSplit blocks of a cluster divide k. kKilobytes: of shared
// memory.
//
// Shared memory: stages [kStages] of [kTileM][128] bytes of A and [kTileN][128] of B, swizzled; areas [warps] for sums
// of other parts and rows on their way out; barriers; the ending's vectors [kVectors][kTileN].
template <int kTileN_, int kGroupsM_, int kGroupsK_, int kSplit_, int kKilobytes>
struct TileShape {
  static constexpr int kTileN = kTileN_, kGroupsM = kGroupsM_, kGroupsK = kGroupsK_, kSplit = kSplit_;
  static constexpr int kTileM = 64 * kGroupsM, kBytesA = kTileM * kStepBytes,
                       kStageBytes = kBytesA + kTileN * kStepBytes;
  static constexpr int kGroups = kGroupsM * kGroupsK, kMultiplying = 128 * kGroups, kThreads = kMultiplying + 32;
  static constexpr int kParts = kGroupsK * kSplit;     // of k
  static constexpr int kEights = kTileN / 8 / kParts;  // 8 columns each: those that a part finishes
  using Staging = PaddedRows<kEights>;
  static constexpr int kAreaBytes = std::max(Staging::kBytes, (kParts - 1) * kEights * kShareBytes);  // of a warp
  static constexpr int kAreasBytes = 4 * kGroups * kAreaBytes;
  // Stages that a warpgroup multiplies; it takes every kGroupsK-th.
  static constexpr int kRound = (kKilobytes * 1024 - kAreasBytes) / kStageBytes / kGroupsK;
  static constexpr int kStages = kRound * kGroupsK;
  static constexpr int kBarriersBytes = 16 * kStages + (8 * (kGroups + 1) + 15) / 16 * 16;
  static constexpr int kBytes = 1024 + kStages * kStageBytes + kAreasBytes + kBarriersBytes;
  // In the variant's name: two warpgroups share k; two blocks share a multiprocessor.
  static constexpr std::string_view kKind = kGroupsK > 1 ? "pair" : kKilobytes <= 113 ? "half" : "";
  static_assert(kTileN % (8 * kParts) == 0, "each part finishes as many columns");
  static_assert(kRound >= 2, "a stage is given back when the next one's products have begun");
  static_assert(kBytes <= 227 * 1024);
};

// The product's sizes: of A [m, k], B [n, k], sums [m, n]. A comes in boxes of 64 rows, the last one of last_rows, no
// more eights than there are: with whole boxes 77 x 4096 x 10240 in E4M3 took 16.6 us, with these 14.8 (H200).
// rows_first: blocks of the same rows of B come one behind the other, else those of the same rows of A.
struct TileWork {
  int64_t m;
  int n, k, last_rows;
  bool rows_first;
};

// A: the type of A's and B's elements. Grid: tiles across n times kSplit, tiles along m; or the other way round, where
// blocks of the same rows of B are to come together. The last warp asks for operands, all others multiply.
template <class A, class Shape, class Ending>
__global__ void __launch_bounds__(Shape::kThreads)
    wgmma_tile_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_last_a,
                      const __grid_constant__ CUtensorMap map_b, const TileWork work,
                      const typename Ending::Arguments arguments) {
#ifdef FTBERT_WGMMA
  constexpr int kStep = kStepBytes / sizeof(A);
  constexpr int kTileN = Shape::kTileN, kStages = Shape::kStages, kStageBytes = Shape::kStageBytes;
  constexpr int kGroupsM = Shape::kGroupsM, kGroupsK = Shape::kGroupsK, kSplit = Shape::kSplit;
  constexpr int kParts = Shape::kParts, kEights = Shape::kEights, kRound = Shape::kRound;
  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  const uint32_t base = shared_address(memory), areas = base + kStages * kStageBytes;
  // A stage's readers are the warps of the kGroupsM warpgroups whose step it is.
  Ring<kStages, 4 * kGroupsM> ring{areas + Shape::kAreasBytes};
  const uint32_t summed = ring.barriers + ring.kBytes, vectors_full = summed + 8 * Shape::kGroups;
  constexpr int kVectorsAt = kStages * kStageBytes + Shape::kAreasBytes + Shape::kBarriersBytes;
  const int rank = static_cast<int>(blockIdx.x) % kSplit;
  const int tiles[] = {static_cast<int>(blockIdx.x) / kSplit, static_cast<int>(blockIdx.y)};
  const int column0 = (work.rows_first ? tiles[1] : tiles[0]) * kTileN;
  const int row0 = (work.rows_first ? tiles[0] : tiles[1]) * Shape::kTileM;
  const int all = (work.k + kStep - 1) / kStep, first = all * rank / kSplit, steps = all * (rank + 1) / kSplit - first;
  // As the compiler sees, the same for all lanes.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;

  // Sums of whatever lies in the place of rows beyond the last are not stored.
  const int boxes = kGroupsM == 1 || row0 + 64 >= work.m ? 1 : kGroupsM;
  const bool ends = row0 + boxes * 64 >= work.m;
  const auto load_a = [&](int stage, int step) {
#pragma unroll
    for (int box = 0; box < kGroupsM; ++box)
      if (box < boxes)
        tma_load(base + stage * kStageBytes + box * 64 * kStepBytes, ends && box == boxes - 1 ? map_last_a : map_a,
                 (first + step) * kStep, row0 + box * 64, ring.full(stage));
  };
  const auto load_b = [&](int stage, int step) {
    barrier_expect(ring.full(stage), (kTileN + boxes * 64 - (ends ? 64 - work.last_rows : 0)) * kStepBytes);
    tma_load(base + stage * kStageBytes + Shape::kBytesA, map_b, (first + step) * kStep, column0, ring.full(stage));
  };
  const int at_once = min(steps, kStages);
  Ending ending(arguments, work.m, work.n);
  if (threadIdx.x == Shape::kMultiplying) {
    ring.init_full();
    for (int g = 0; kSplit > 1 && g < Shape::kGroups; ++g) barrier_init(summed + 8 * g, 1);
    if constexpr (Ending::kVectors > 0) barrier_init(vectors_full, 1);
    barrier_init_fence();
    for (int g = 0; kSplit > 1 && g < Shape::kGroups; ++g)
      barrier_expect(summed + 8 * g, 4 * (kParts - 1) * kEights * kShareBytes);
    // No kernel changes weights while a model runs: whoever changes them launches something else before the next
    // product.
    for (int step = 0; step < at_once; ++step) load_b(step, step);
    if constexpr (Ending::kVectors > 0) {
      // Beyond n lies whatever was there: endings neither store such columns nor count them.
      const int bytes = 4 * min(kTileN, work.n - column0);
      barrier_expect(vectors_full, Ending::kVectors * bytes);
#pragma unroll
      for (int i = 0; i < Ending::kVectors; ++i)
        bulk_load(base + kVectorsAt + i * 4 * kTileN, ending.vector(i) + column0, bytes, vectors_full);
    }
    ring.init_empty();  // behind the first weights, which need no empty stage
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kSplit > 1) cluster_arrive();  // the barriers are there

  if (warp == Shape::kMultiplying / 32) {
    if (lane == 0) {
      wait_for_inputs();
      for (int step = 0; step < at_once; ++step) load_a(step, step);
      for (int step = kStages; step < steps; ++step) {
        barrier_wait(ring.empty(ring.stage), ring.parity);
        load_b(ring.stage, step);
        load_a(ring.stage, step);
        ring.next();
      }
    }
    if constexpr (kSplit > 1) cluster_arrived();
    return;
  }

  // An ending writes after A has come, so after wait_for_inputs above, or after a wait of its own.
  const int group = warp / 4, group_m = group % kGroupsM, group_k = group / kGroupsM;
  const int part = rank * kGroupsK + group_k, own_column = column0 + part * kEights * 8;
  const int64_t own_row = row0 + group_m * 64 + warp % 4 * 16;
  ending.look_ahead(own_row, own_column);
  float sum[kTileN / 8][4] = {};
  const uint64_t a = matrix_descriptor<128>(base + group_k * kStageBytes + group_m * 64 * 128);
  const uint64_t b = matrix_descriptor<128>(base + group_k * kStageBytes + Shape::kBytesA);
  for (int step = group_k; step < steps; ring.parity ^= 1) {
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      if (step >= steps) break;
      const auto stage = [&](int of) { return group_k + of * kGroupsK; };
      barrier_wait(ring.full(stage(i)), ring.parity);
      warpgroup_fence();
#pragma unroll
      for (int d = 0; d < kStepBytes / 32; ++d) {
        // A descriptor counts its address in units of 16 bytes.
        const int at = (i * kGroupsK * kStageBytes + d * 32) / 16;
        warpgroup_multiply_nt<A>(sum, a + at, b + at, true);
      }
      warpgroup_commit();
      if (step > group_k) {
        warpgroup_wait<1>();  // only the products just begun are at work: the stage before is read
        if (lane == 0) ring.release(stage((i + kRound - 1) % kRound));
      }
      step += kGroupsK;
    }
  }
  // The last stage is not given back: no step follows.
  warpgroup_wait();
  warpgroup_keep(sum);

  // To each part its columns' sums: of this part they stay in registers, another part finds them as shares in the area
  // of its warp of the same rows, from the other parts in their order, kEights from each.
  const auto area = [&](int of_group) { return (of_group * 4 + warp % 4) * Shape::kAreaBytes; };
  char* const own_area = memory + kStages * kStageBytes + area(group);
  float sums[kEights][4];
  if constexpr (kSplit > 1) cluster_arrived();
#pragma unroll
  for (int to = 0; to < kParts; ++to) {
    const int to_group = to % kGroupsK * kGroupsM + group_m, from = part < to ? part : part - 1;
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float (&s)[4] = sum[to * kEights + j];
      const int at = area(to_group) + (from * kEights + j) * kShareBytes + lane * 16;
      if (to == part) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[j][c] = s[c];
      } else if constexpr (kSplit > 1) {
        store_async(areas + at, {s[0], s[1], s[2], s[3]}, summed + 8 * to_group, to / kGroupsK);
      } else {
        *reinterpret_cast<float4*>(memory + kStages * kStageBytes + at) = {s[0], s[1], s[2], s[3]};
      }
    }
  }
  if constexpr (kParts > 1) {
    if constexpr (kSplit > 1)
      barrier_wait(summed + 8 * group, 0);
    else
      named_barrier_wait(1, Shape::kMultiplying);
#pragma unroll
    for (int i = 0; i < (kParts - 1) * kEights; ++i) {
      const float4 share = *reinterpret_cast<const float4*>(own_area + i * kShareBytes + lane * 16);
      float (&s)[4] = sums[i % kEights];
      s[0] += share.x, s[1] += share.y, s[2] += share.z, s[3] += share.w;
    }
    __syncwarp();
  }

  if constexpr (Ending::kVectors > 0) barrier_wait(vectors_full, 0);
  ending.finish(sums, reinterpret_cast<const float*>(memory + kVectorsAt) + part * kEights * 8, own_area);
#else
  no_warpgroups();
#endif
}

template <class A, class Shape, class Ending>
void launch_tile(const Context<Cuda>& context, const char* name, const Product& p, const ProductData& data,
                 const typename Ending::Arguments& arguments) {
  constexpr int kBytes = Shape::kBytes + Ending::kVectors * 4 * Shape::kTileN;
  static_assert(kBytes <= 227 * 1024);
  const auto blocks = [](int64_t of, int64_t size) { return static_cast<unsigned>((of + size - 1) / size); };
  const unsigned rows = blocks(p.m, Shape::kTileM), columns = blocks(p.n, Shape::kTileN);
  // Each row of B is then read by blocks that run side by side. With 200 rows of 768 to 1280 columns and k that took
  // 0.79 to 0.96 of the time, with 1024 rows 0.90 to 0.99 where k is no longer than n, else 0.96 to 1.07, with more
  // rows up to 1.20; where blocks divide k 0.94 to 1.08 (H200).
  const bool rows_first = Shape::kSplit == 1 && columns < 65536 && (p.m <= 768 || (p.m <= kFewRows && p.k <= p.n));
  const dim3 grid((rows_first ? rows : columns) * Shape::kSplit, rows_first ? columns : rows);
  const int last_rows = static_cast<int>(((p.m - 1) % 64 + 8) / 8 * 8);
  launch_overlapped(context, name, wgmma_tile_kernel<A, Shape, Ending>, grid, Shape::kThreads, kBytes, Shape::kSplit,
                    rows_map(p, data, 64), rows_map(p, data, last_rows),
                    tensor_map(data.b, p.b->numbers, p.n, p.k, Shape::kTileN),
                    TileWork{p.m, static_cast<int>(p.n), static_cast<int>(p.k), last_rows, rows_first}, arguments);
}

template <int kTileN, int kSplit>
using InTwos = TileShape<kTileN, 1, 1, kSplit, 101>;
template <int kTileN, int kSplit>
using Single = TileShape<kTileN, 1, 1, kSplit, 200>;
template <int kTileN>
using KShared = TileShape<kTileN, 1, 2, 1, 200>;
template <int kTileN>
using Tall = TileShape<kTileN, 2, 1, 1, 224>;

template <class... Shapes>
struct List : ShapeList<Shapes...> {
  static constexpr int kParts[] = {Shapes::kParts...};

  template <class Shape>
  static constexpr int variant_of() {
    int at = 0;
    bool found = false;
    ((found = found || std::is_same_v<Shape, Shapes>, at += !found), ...);
    return at;
  }
};
template <class First, class... More>
struct Longer;
template <class... First, class... More>
struct Longer<List<First...>, More...> {
  using type = List<First..., More...>;
};
// A variant has one number in all lists. For E4M3: those that the guess chooses.
using ScaledTileShapes = List<InTwos<32, 1>, InTwos<32, 4>, InTwos<96, 1>, KShared<32>, KShared<48>>;
// For every Ending.
using NarrowTileShapes =
    Longer<ScaledTileShapes, InTwos<48, 1>, InTwos<64, 1>, InTwos<64, 4>, Single<48, 2>, Single<96, 2>, Single<96, 4>,
           KShared<64>, KShared<96>, Tall<64>, Tall<96>, Tall<128>, Tall<192>>::type;
// For Correct alone: sums of 256 columns leave others too few registers.
using TileShapes = Longer<NarrowTileShapes, Tall<256>>::type;

// A variant of the kernel with that Ending, for A and B of 16 bits.
template <template <class E, class Shape> class Ending, class Shapes = NarrowTileShapes, class Arguments>
void run_tile(const Context<Cuda>& context, const char* name, int variant, const Product& p, const ProductData& data,
              const Arguments& arguments) {
  Shapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    if (p.a == DType::fp16)
      launch_tile<__half, Shape, Ending<__half, Shape>>(context, name, p, data, arguments);
    else
      launch_tile<__nv_bfloat16, Shape, Ending<__nv_bfloat16, Shape>>(context, name, p, data, arguments);
  });
}

}  // namespace
}  // namespace ftbert
