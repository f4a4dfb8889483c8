// The kernel of wgmma_tile_cuda.cu, a template over what is done with a tile's sums: an Ending.
#pragma once
#include <algorithm>
#include <string_view>
#include <type_traits>

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/ring.cuh"
#include "device/tensor_map.h"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "gemm/gpu/own.h"

namespace ftbert {

// A variant of wgmma_tile with A and B in E4M3.
void run_tile_e4m3(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data);

namespace {

constexpr int kStepBytes = 128;   // of k, a row of a stage
constexpr int kShareBytes = 512;  // of a warp: its sums of 16 rows by 8 columns

// kGroupsM warpgroups have 64 rows each, kGroupsK share these rows and take steps of k in turns; kSplit blocks of a
// cluster divide k. kKilobytes: of shared memory.
template <int kTileN_, int kGroupsM_, int kGroupsK_, int kSplit_, int kKilobytes>
struct TileShape {
  static constexpr int kTileN = kTileN_, kGroupsM = kGroupsM_, kGroupsK = kGroupsK_, kSplit = kSplit_;
  static constexpr int kTileM = 64 * kGroupsM, kBytesA = kTileM * kStepBytes,
                       kStageBytes = kBytesA + kTileN * kStepBytes;
  static constexpr int kGroups = kGroupsM * kGroupsK, kMultiplying = 128 * kGroups, kThreads = kMultiplying + 32;
  static constexpr int kParts = kGroupsK * kSplit;      // of k
  static constexpr int kEights = kTileN / 8 / kParts;   // 8 columns each: those that a part finishes
  static constexpr int kRowBytes = 16 * (kEights | 1);  // of such columns, apart from the banks
  static constexpr int kAreaBytes = std::max(16 * kRowBytes, (kParts - 1) * kEights * kShareBytes);  // of a warp
  static constexpr int kAreasBytes = 4 * kGroups * kAreaBytes;
  static constexpr int kRound = (kKilobytes * 1024 - kAreasBytes) / kStageBytes / kGroupsK;  // a warpgroup's stages
  static constexpr int kStages = kRound * kGroupsK;
  static constexpr int kBarriersBytes = 16 * kStages + (8 * (kGroups + 1) + 15) / 16 * 16;
  static constexpr int kBytes = 1024 + kStages * kStageBytes + kAreasBytes + kBarriersBytes;
  // In the variant's name: two warpgroups share k; two blocks share a multiprocessor.
  static constexpr std::string_view kKind = kGroupsK > 1 ? "pair" : kKilobytes <= 113 ? "half" : "";
  static_assert(kTileN % (8 * kParts) == 0, "each part finishes as many columns");
  static_assert(kRound >= 2, "a stage is given back when the next one's products have begun");
  static_assert(kBytes <= 227 * 1024);
};

// C [m, n] and what it is made of, where the kernel itself looks.
struct TileWork {
  int64_t m;
  int n, k;
};

// 16 rows of a warp, from the registers, rounded, to shared memory, so that they go to memory 16 bytes at a time.
// value(j, c): what is in place of the warpgroup's accumulator.
template <class E, class Shape, class Value>
__device__ void stage_rows(char* shared, const Value& value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < Shape::kEights; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<uint32_t*>(shared + (lane / 4 + 8 * r) * Shape::kRowBytes + j * 16 + lane % 4 * 4) =
          pack_pair<E>(value(j, 2 * r), value(j, 2 * r + 1));
}

template <class E, Activation kActivation, class Shape>
__device__ void store_rows(const char* shared, const TileWork& work, void* c, int64_t row0, int column0) {
  constexpr int kEights = Shape::kEights;
  __syncwarp();
#pragma unroll 2
  for (int i = threadIdx.x % 32; i < 16 * kEights; i += 32) {
    const int row = i / kEights, column = column0 + i % kEights * 8;
    const auto pack = activate_pack<kActivation>(
        Packed<E, 8>::load(reinterpret_cast<const E*>(shared + row * Shape::kRowBytes + i % kEights * 16)));
    if (row0 + row < work.m && column < work.n) pack.store(static_cast<E*>(c) + (row0 + row) * work.n + column);
  }
}

// Of a row that stage_rows has staged, what follows its element `first`.
template <class E, class Shape, int kCount>
__device__ void load_staged(const char* shared, int row, int first, float (&v)[kCount]) {
  Packed<E, 8> packs[kCount / 8];
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i)
    packs[i] = Packed<E, 8>::load(reinterpret_cast<const E*>(shared + row * Shape::kRowBytes) + first + i * 8);
  to_floats(packs, v);
}

// Half as many columns as store_rows stores: of two packs of sums 16 bytes, or 8 of one where a warp has an odd number.
template <class E, Activation kActivation, class Shape>
__device__ void store_gated_rows(const char* shared, const TileWork& work, void* c, int64_t row0, int column0) {
  constexpr int kSums = Shape::kEights % 2 == 0 ? 16 : 8, kAcross = Shape::kEights * 8 / kSums;
  __syncwarp();
#pragma unroll 2
  for (int i = threadIdx.x % 32; i < 16 * kAcross; i += 32) {
    const int row = i / kAcross, first = i % kAcross * kSums, column = column0 + first;  // of the sums
    float v[kSums];
    load_staged<E, Shape>(shared, row, first, v);
    const auto gated = gate_pairs<kActivation, E, kSums / 2>(v);
    if (row0 + row < work.m && column < work.n)
      gated.store(static_cast<E*>(c) + (row0 + row) * (work.n / 2) + column / 2);
  }
}

// What an Ending has: Arguments, what it needs; kVectors, how many vectors [n] of floats; and as an object of a block's
// threads
//   vector(i): the vectors. They do not change while a model runs, and a tile's columns of them come to shared memory;
//   look_ahead(row0, column0), of the warps that multiply, before they do: 16 rows and Shape::kEights * 8 columns are a
//     warp's own. The inputs are not waited for;
//   finish(sums, vectors, area), of these: the sums of its own; the vectors, Shape::kTileN after each other, from its
//     own columns on; and shared memory of the warp's own for stage_rows.
//
// A: of A's and B's elements.
template <class A, class Shape, class Ending>
__global__ void __launch_bounds__(Shape::kThreads)
    wgmma_tile_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                      const TileWork work, const typename Ending::Arguments arguments) {
#ifdef FTBERT_WGMMA
  constexpr int kStep = kStepBytes / sizeof(A);
  constexpr int kTileN = Shape::kTileN, kStages = Shape::kStages, kStageBytes = Shape::kStageBytes;
  constexpr int kGroupsM = Shape::kGroupsM, kGroupsK = Shape::kGroupsK, kSplit = Shape::kSplit;
  constexpr int kParts = Shape::kParts, kEights = Shape::kEights, kRound = Shape::kRound;
  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  const uint32_t base = shared_address(memory), areas = base + kStages * kStageBytes;
  Ring<kStages, 4 * kGroupsM> ring{areas + Shape::kAreasBytes};
  const uint32_t summed = ring.barriers + ring.kBytes, vectors_full = summed + 8 * Shape::kGroups;
  constexpr int kVectors = kStages * kStageBytes + Shape::kAreasBytes + Shape::kBarriersBytes;  // where they are
  const int rank = static_cast<int>(blockIdx.x) % kSplit, column0 = static_cast<int>(blockIdx.x) / kSplit * kTileN;
  const int row0 = static_cast<int>(blockIdx.y) * Shape::kTileM;
  const int all = (work.k + kStep - 1) / kStep, first = all * rank / kSplit, steps = all * (rank + 1) / kSplit - first;
  // As the compiler sees, the same for all lanes.
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;

  const auto ask_a = [&](int stage, const StepsOfTile& at) {
    tma_load(base + stage * kStageBytes, map_a, (first + at.step) * kStep, row0, ring.full(stage));
  };
  const auto ask_b = [&](int stage, const StepsOfTile& at) {
    barrier_expect(ring.full(stage), kStageBytes);
    tma_load(base + stage * kStageBytes + Shape::kBytesA, map_b, (first + at.step) * kStep, column0, ring.full(stage));
  };
  Ending ending(arguments, work);
  if (threadIdx.x == Shape::kMultiplying) {
    ring.init_full();
    for (int g = 0; kSplit > 1 && g < Shape::kGroups; ++g) barrier_init(summed + 8 * g, 1);
    if constexpr (Ending::kVectors > 0) barrier_init(vectors_full, 1);
    barrier_init_fence();
    for (int g = 0; kSplit > 1 && g < Shape::kGroups; ++g)
      barrier_expect(summed + 8 * g, 4 * (kParts - 1) * kEights * kShareBytes);
    // Whoever changes weights launches something else before the next product.
    feed_weights(ring, StepsOfTile{steps}, ask_b);
    if constexpr (Ending::kVectors > 0) {
      const int bytes = 4 * min(kTileN, work.n - column0);
      barrier_expect(vectors_full, Ending::kVectors * bytes);
#pragma unroll
      for (int i = 0; i < Ending::kVectors; ++i)
        bulk_load(base + kVectors + i * 4 * kTileN, ending.vector(i) + column0, bytes, vectors_full);
    }
    ring.init_empty();
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (kSplit > 1) cluster_arrive();  // the barriers are there

  if (warp == Shape::kMultiplying / 32) {
    if (lane == 0) {
      wait_for_inputs();
      feed(ring, StepsOfTile{steps}, min(steps, kStages), ask_b, ask_a);
    }
    if constexpr (kSplit > 1) cluster_arrived();
    return;
  }

  // What an ending writes comes after A has come, so after the wait above, or after a wait of its own.
  const int group = warp / 4, group_m = group % kGroupsM, group_k = group / kGroupsM;
  const int part = rank * kGroupsK + group_k, own_column = column0 + part * kEights * 8;
  const int64_t own_row = row0 + group_m * 64 + warp % 4 * 16;
  ending.look_ahead(own_row, own_column);
  float sum[kTileN / 8][4] = {};
  const uint64_t a = matrix_descriptor<128>(base + group_k * kStageBytes + group_m * 64 * 128);
  const uint64_t b = matrix_descriptor<128>(base + group_k * kStageBytes + Shape::kBytesA);
  for (int step = group_k; step < steps; ring.parity ^= 1) {
#pragma unroll
    for (int turn = 0; turn < kRound; ++turn) {
      if (step >= steps) break;
      const auto stage = [&](int of) { return group_k + of * kGroupsK; };
      barrier_wait(ring.full(stage(turn)), ring.parity);
      warpgroup_fence();
#pragma unroll
      for (int d = 0; d < kStepBytes / 32; ++d) {
        // A descriptor counts its address in units of 16 bytes.
        const int at = (turn * kGroupsK * kStageBytes + d * 32) / 16;
        warpgroup_multiply_nt<A>(sum, a + at, b + at, true);
      }
      warpgroup_commit();
      if (step > group_k) {
        warpgroup_wait<1>();
        if (lane == 0) ring.release(stage((turn + kRound - 1) % kRound));
      }
      step += kGroupsK;
    }
  }
  warpgroup_wait();
  warpgroup_keep(sum);

  // An area's shares: from the other parts, in their order, kEights from each.
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
  ending.finish(sums, reinterpret_cast<const float*>(memory + kVectors) + part * kEights * 8, own_area);
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
  const dim3 grid(blocks(p.n, Shape::kTileN) * Shape::kSplit, blocks(p.m, Shape::kTileM));
  launch_overlapped(context, name, wgmma_tile_kernel<A, Shape, Ending>, grid, Shape::kThreads, kBytes, Shape::kSplit,
                    tensor_map(data.a, p.a, p.m, p.k, Shape::kTileM), tensor_map(data.b, p.b, p.n, p.k, Shape::kTileN),
                    TileWork{p.m, static_cast<int>(p.n), static_cast<int>(p.k)}, arguments);
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
using TileShapes = List<InTwos<32, 1>, InTwos<32, 4>, InTwos<48, 1>, InTwos<64, 1>, InTwos<64, 4>, InTwos<96, 1>,
                        Single<48, 2>, Single<96, 2>, Single<96, 4>, KShared<32>, KShared<48>, KShared<64>, KShared<96>,
                        Tall<64>, Tall<96>, Tall<128>, Tall<192>>;

// A variant of the kernel with that Ending, for A and B of 16 bits.
template <template <class E, class Shape> class Ending, class Arguments>
void run_tile(const Context<Cuda>& context, const char* name, int variant, const Product& p, const ProductData& data,
              const Arguments& arguments) {
  TileShapes::with(variant, [&](auto shape) {
    using Shape = decltype(shape);
    if (p.a == DType::fp16)
      launch_tile<__half, Shape, Ending<__half, Shape>>(context, name, p, data, arguments);
    else
      launch_tile<__nv_bfloat16, Shape, Ending<__nv_bfloat16, Shape>>(context, name, p, data, arguments);
  });
}

}  // namespace
}  // namespace ftbert
