// The kernel of wgmma_persistent_cuda.cu, a template over what is done with a tile's sums: an Ending.
#pragma once
#include <algorithm>
#include <type_traits>

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/tensor_map.h"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "gemm/own/guessed_time.h"
#include "gemm/own/own.h"

namespace ftbert {
namespace {

constexpr int kTileM = 128, kTileN = 128, kStep = 64;  // a row of a stage: 64 elements, 128 bytes
constexpr int kThreads = 384;                          // a warpgroup that loads, two that multiply
constexpr int kBytesA = kTileM * kStep * 2, kBytesB = kTileN * kStep * 2, kStageBytes = kBytesA + kBytesB;
// Of each warp that multiplies: sums of 16 rows, rounded, on their way out, and the tile's columns of the bias. Only
// what lies in shared memory is near: beside the stages the L1 cache keeps next to nothing.
constexpr int kSumBytes = 16 * kTileN * 2, kWarpBytes = kSumBytes + kTileN * 2;
constexpr int kStages = (225 * 1024 - 8 * kWarpBytes) / kStageBytes;
constexpr int kBytes = 1024 + kStages * kStageBytes + 8 * kWarpBytes + 16 * kStages;
static_assert(kBytes <= 227 * 1024);

// Tiles of C, `columns` of them side by side, in the order of rows. The first `whole` are computed one by one, those
// behind them in halves of 64 rows: where these fill less than half of a wave it takes half the time. Of the last row
// of tiles there are only the upper halves where C ends in these.
struct PersistentWork {
  int64_t m;
  int n, k_steps, columns;
  int whole, paired, items;  // items: whole tiles, then `paired` halves of tiles that have two, then single ones
  const void* bias;
  void* c;
};

struct Piece {
  int row, column;  // of C
  bool is_whole;
};

__device__ Piece piece_of(const PersistentWork& work, int item) {
  const int half = item - work.whole, single = half - work.paired;
  const int tile = half < 0 ? item : work.whole + (single < 0 ? half / 2 : work.paired / 2 + single);
  const int row = tile / work.columns * kTileM + (half >= 0 && single < 0 ? half % 2 * (kTileM / 2) : 0);
  return {row, tile % work.columns * kTileN, half < 0};
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

// What an Ending has: Work, what it needs, PersistentWork and maybe more; and as an object of a warp that has 16 rows
// of a tile, from row0 on, or 16 from row0 + 64 on too,
//   Ending(work, row0, column0), before the tile's products. The inputs are not waited for;
//   finish(sums, bias, memory, work, row, column0, half): 16 rows from `row` on, to C. In shared memory of the warp's
//   own
//     are the bias of the tile's columns and kSumBytes at `memory`.
template <class E, class Ending>
__global__ void __launch_bounds__(kThreads, 1)
    wgmma_persistent_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_half_a,
                            const __grid_constant__ CUtensorMap map_b, const typename Ending::Work work) {
#ifdef FTBERT_WGMMA
  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  const uint32_t base = shared_address(memory);
  const uint32_t full = base + kStages * kStageBytes + 8 * kWarpBytes, empty = full + 8 * kStages;
  // As the compiler sees, the same for all lanes: what follows from it stays in uniform registers.
  const int all_warps = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = all_warps / 4;
  const int step_items = static_cast<int>(gridDim.x);

  if (threadIdx.x == 0) {
    prefetch_map(map_a);
    prefetch_map(map_half_a);
    prefetch_map(map_b);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 4);  // the warps that read a stage
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    fewer_registers<24>();
    if (threadIdx.x != 0) return;
    const auto load_b = [&](int stage, const Piece& piece, int step) {
      barrier_expect(full + 8 * stage, kStageBytes - (piece.is_whole ? 0 : kBytesA / 2));
      tma_load(base + stage * kStageBytes + kBytesA, map_b, step * kStep, piece.column, full + 8 * stage);
    };
    // Weights do not change while a model runs.
    int ahead = 0;
    for (int item = blockIdx.x, step = 0; item < work.items && ahead < kStages; ++ahead) {
      load_b(ahead, piece_of(work, item), step);
      if (++step == work.k_steps) step = 0, item += step_items;
    }
    wait_for_inputs();
    int stage = 0;
    uint32_t parity = 1;  // a fresh stage is empty
    for (int item = blockIdx.x; item < work.items; item += step_items) {
      const Piece piece = piece_of(work, item);
      for (int step = 0; step < work.k_steps; ++step, --ahead) {
        if (ahead <= 0) {
          barrier_wait(empty + 8 * stage, parity);
          load_b(stage, piece, step);
        }
        tma_load(base + stage * kStageBytes, piece.is_whole ? map_a : map_half_a, step * kStep, piece.row,
                 full + 8 * stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
    return;
  }

  // What is written below comes after A has come, so after the wait above.
  more_registers<240>();
  const int group = warpgroup - 1, warp = all_warps % 4, lane = threadIdx.x % 32;
  char* const out = memory + kStages * kStageBytes + (group * 4 + warp) * kWarpBytes;
  const E* const bias = reinterpret_cast<const E*>(out + kSumBytes);
  const int turn = 1 + group, other_turn = 2 - group;  // named barriers
  if (group == 1) named_barrier_arrive(other_turn, 256);
  int index = group;  // of the item among this block's
  const auto compute = [&](auto halves, const Piece& piece) {
    constexpr int kHalves = decltype(halves)::value;
    const int64_t from = int64_t{index} * work.k_steps;
    int stage = static_cast<int>(from % kStages), before = 0;
    uint32_t parity = from / kStages % 2;
    float sum[kHalves][kTileN / 8][4];
    const auto release = [&](int s) {
      if (lane == 0) barrier_arrive(empty + 8 * s);
    };

    bring_bias<E>(work, piece.column, shared_address(bias));
    Ending ending(work, piece.row + warp * 16, piece.column);
    named_barrier_wait(turn, 256);
    for (int step = 0; step < work.k_steps; ++step) {
      barrier_wait(full + 8 * stage, parity);
      const uint32_t at = base + stage * kStageBytes;
      // A descriptor counts its address in units of 16 bytes.
      const uint64_t a = matrix_descriptor<128>(at), b = matrix_descriptor<128>(at + kBytesA);
      warpgroup_fence();
#pragma unroll
      for (int d = 0; d < kStep / 16; ++d)
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
          warpgroup_multiply_nt<E>(sum[half], a + (half * 64 * 128 + d * 32) / 16, b + d * 32 / 16, step > 0 || d > 0);
      warpgroup_commit();
      if (step > 0) {
        warpgroup_wait<1>();
        release(before);
      }
      before = stage;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    named_barrier_arrive(other_turn, 256);

    warpgroup_wait();
    release(before);
    copy_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      warpgroup_keep(sum[half]);
      ending.finish(sum[half], bias, out, work, piece.row + half * 64 + warp * 16, piece.column, half);
      __syncwarp();
    }
  };
  for (int item = blockIdx.x + group * step_items; item < work.items; index += 2, item += 2 * step_items) {
    const Piece piece = piece_of(work, item);
    if (piece.is_whole)
      compute(std::integral_constant<int, 2>{}, piece);
    else
      compute(std::integral_constant<int, 1>{}, piece);
  }
#else
  no_warpgroups();
#endif
}

PersistentWork work_of(const Product& p, const ProductData& data, int sm_count) {
  const auto tiles_of = [](int64_t size, int64_t tile) { return static_cast<int>(over(size, tile)); };
  PersistentWork work{p.m,   static_cast<int>(p.n), tiles_of(p.k, kStep), tiles_of(p.n, kTileN), 0, 0, 0, data.bias,
                      data.c};
  const int tiles = work.columns * tiles_of(p.m, kTileM), rest = tiles % sm_count;  // of the last wave
  const int single = (p.m - 1) % kTileM < kTileM / 2 ? std::min(rest, work.columns) : 0;
  const int paired = 2 * (rest - single);
  if (paired + single <= sm_count)
    work.whole = tiles - rest, work.paired = paired, work.items = work.whole + paired + single;
  else
    work.whole = work.items = tiles;
  return work;
}

template <class E, class Ending>
void launch_persistent(const Context<Cuda>& context, const char* name, const Product& p, const ProductData& data,
                       const typename Ending::Work& work) {
  launch_overlapped(context, name, wgmma_persistent_kernel<E, Ending>, std::min(work.items, context.sm_count), kThreads,
                    kBytes, 1, tensor_map(data.a, p.a, p.m, p.k, kTileM), tensor_map(data.a, p.a, p.m, p.k, kTileM / 2),
                    tensor_map(data.b, p.b, p.n, p.k, kTileN), work);
}

}  // namespace
}  // namespace ftbert
