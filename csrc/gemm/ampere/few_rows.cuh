// few_rows_lanes: c [m, n] = epilogue(norm(a [m, k]) @ b [n, k]^T) for m <= 8, as fast as b is read, by cp.async.
//
// A block stays and takes its tiles one after another, as many as every other. Each of its warps has a ring of its own
// in shared memory, and each lane asks for the 16 bytes of b that it multiplies itself (the scales of Q8_0 apart): a
// warp waits for nobody but itself, and goes on asking for the next tiles while it waits for the others' sums. All of
// the ring is asked for before a is read.
#pragma once
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/named_barrier.cuh"
#include "device/wgmma.cuh"
#include "gemm/gpu/few_rows_norm.cuh"
#include "gemm/gpu/few_rows_storage.cuh"

namespace ftbert {
namespace {

// A stage has up to kLaneSteps steps of a warp. With four stages a multiprocessor has 48 KB of b on their way while it
// multiplies those of the fourth: at 25 bytes a nanosecond (H100; A100: 19) the memory then has 2 us to answer.
constexpr int kLaneSteps = 4, kLaneStages = 4;

// How lanes bring b. Beside what a Storage has (gpu/few_rows_storage.cuh):
//   kStage, bytes of a stage of a warp;
//   ask(work, tile, step, steps, to), by a whole warp: copies to a stage;
//   add(work, stage, rows, step, at, sums): products of a step, in the stage number `at`.

template <class E>
struct LaneRows : PlainRows<E> {
  using PlainRows<E>::kStep;
  static constexpr int kStage = kLaneSteps * 512;

  __device__ static void ask(const FewRows<E>& work, int tile, int step, int steps, uint32_t to) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const E* const from =
        static_cast<const E*>(work.b) + static_cast<int64_t>(tile * kTileRows + g) * work.k + step * kStep + t * 8;
#pragma unroll
    for (int i = 0; i < kLaneSteps; ++i)
      if (i < steps) copy_async16_once(to + i * 512 + lane * 16, from + i * kStep);
  }

  __device__ static void add(const FewRows<E>& work, const char* stage, const char* rows, int step, int at,
                             float (&sums)[4]) {
    const uint4 w = *reinterpret_cast<const uint4*>(stage + at * 512 + threadIdx.x % 32 * 16);
    PlainRows<E>::multiply(work, w, rows, step, sums);
  }
};

template <class E>
struct LaneTiles : Q8Tiles<E, Q8Order::lanes> {
  using Tiles = Q8Tiles<E, Q8Order::lanes>;
  using Tiles::kNumbers, Tiles::kScales, Tiles::kStep;
  static constexpr int kStage = kLaneSteps * (kNumbers + kScales);

  __device__ static void ask(const FewRows<E>& work, int tile, int step, int steps, uint32_t to) {
    const int lane = threadIdx.x % 32;
    const int64_t first = static_cast<int64_t>(tile) * (work.k / kStep) + step;
    const char* const numbers = static_cast<const char*>(work.b) + first * kNumbers + lane * 16;
#pragma unroll
    for (int i = 0; i < kLaneSteps; ++i)
      if (i < steps) copy_async16_once(to + i * kNumbers + lane * 16, numbers + i * kNumbers);
    const auto* const scales = reinterpret_cast<const char*>(q8_0_scales(work.b, work.n, work.k));
    if (lane * 16 < steps * kScales)
      copy_async16_once(to + kLaneSteps * kNumbers + lane * 16, scales + first * kScales + lane * 16);
  }

  __device__ static void add(const FewRows<E>& work, const char* stage, const char* rows, int step, int at,
                             float (&sums)[4]) {
    Tiles::multiply(work, stage + at * kNumbers, stage + kLaneSteps * kNumbers + at * kScales, rows, step, sums);
  }
};

template <class Bringing>
constexpr int kLaneRingBytes = kFewRowsWarps * kLaneStages * Bringing::kStage;

// Beside the ring [kFewRowsWarps][kLaneStages][kStage], and behind it the rows of a that the block lays out.
struct LaneShared {
  float2 parts[2][kFewRowsWarps][32];                 // sums of this tile and of the one before, by warps
  float mean[kFewRowsWarps], squares[kFewRowsWarps];  // sum_of_row's, for a's norm
};

// Where a warp is in its walk over b: its part of each tile's steps, a stage at a time, tile after tile.
struct WarpWalk {
  int tile, stride, first, last;  // the steps from `first` to `last` of each tile are the warp's
  int step;

  // alone: a tile has one warp.
  __device__ WarpWalk(int steps, bool alone) {
    const int warp = threadIdx.x / 32, grid = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    tile = alone ? warp * grid + block : block;
    stride = alone ? kFewRowsWarps * grid : grid;
    first = alone ? 0 : steps * warp / kFewRowsWarps;
    last = alone ? steps : steps * (warp + 1) / kFewRowsWarps;
    step = first;
  }
  __device__ int count() const { return min(kLaneSteps, last - step); }
  // The next stage's steps.
  __device__ void next() {
    step += kLaneSteps;
    if (step >= last) step = first, tile += stride;
  }
};
static_assert(kMostApartSteps >= kFewRowsWarps, "each warp that shares a tile has a step of it");

// A warp's ring. Fills go ahead of reads by kLaneStages - 1 stages.
template <class E, class Bringing>
struct LaneRing {
  const char* memory;
  WarpWalk asked;
  int stage = 0;

  __device__ LaneRing(const char* shared, const FewRows<E>& work, const WarpWalk& walk)
      : memory(shared + threadIdx.x / 32 * (kLaneStages * Bringing::kStage)), asked(walk) {
#pragma unroll 1
    for (int ahead = 0; ahead < kLaneStages - 1; ++ahead) ask(work, ahead);
  }
  // The next stage, when it is there. What it asks for takes the place of the one before, which no lane reads any more.
  __device__ const char* wait(const FewRows<E>& work) {
    copy_async_wait<kLaneStages - 2>();
    __syncwarp();
    ask(work, stage == 0 ? kLaneStages - 1 : stage - 1);
    const char* const full = memory + stage * Bringing::kStage;
    if (++stage == kLaneStages) stage = 0;
    return full;
  }

 private:
  // Counts as asked for where there is no further tile, too.
  __device__ void ask(const FewRows<E>& work, int to) {
    if (asked.tile < work.n / kTileRows) {
      Bringing::ask(work, asked.tile, asked.step, asked.count(), shared_address(memory + to * Bringing::kStage));
      asked.next();
    }
    copy_async_commit();
  }
};

// The block's tiles. addend: of a warp's first tile.
template <class E, class Bringing>
__device__ void multiply_lane_tiles(const FewRows<E>& work, LaneShared& beside, LaneRing<E, Bringing>& ring,
                                    WarpWalk walk, bool alone, const char* rows, float2 addend) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool has_sums = lane / 4 < work.m;
  for (int index = 0; walk.tile < work.n / kTileRows; ++index) {
    const int tile = walk.tile;
    const bool stores = alone || index % kFewRowsWarps == warp;
    if (stores && index > 0) addend = addend_of_sums(work, tile);
    float sums[4] = {};
    do {
      const char* const stage = ring.wait(work);
      const int count = walk.count();
      const auto add = [&](int at) { Bringing::add(work, stage, rows, walk.step + at, at, sums); };
      if (count == kLaneSteps) {
#pragma unroll
        for (int at = 0; at < kLaneSteps; ++at) add(at);
      } else {
#pragma unroll 1
        for (int at = 0; at < count; ++at) add(at);
      }
      walk.next();
    } while (walk.tile == tile);
    float2 x = addend;
    if (alone) {
      x.x += sums[0], x.y += sums[1];
    } else {
      float2(&parts)[kFewRowsWarps][32] = beside.parts[index % 2];
      if (has_sums) parts[warp][lane] = {sums[0], sums[1]};
      __syncthreads();  // who adds up has read the other half before it comes here again
      if (stores && has_sums) {
#pragma unroll
        for (int i = 0; i < kFewRowsWarps; ++i) x.x += parts[i][lane].x, x.y += parts[i][lane].y;
      }
    }
    if (stores) store_sums(work, tile, x);
  }
}

// Grid: any. kLays: the block lays rows of a out behind the ring; else they are read as `prepared` has them, which the
// caches hold: eight rows of 16 bits would leave 99 KB of shared memory no room for a ring.
template <class E, class Bringing, bool kLays>
__global__ void __launch_bounds__(kFewRowsReaders, 2) few_rows_lanes_kernel(const __grid_constant__ FewRows<E> work) {
#if defined(FTBERT_WGMMA) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800)
  __trap();  // where few_rows runs, or there is no cp.async
#else
  extern __shared__ __align__(128) char shared[];
  __shared__ LaneShared beside;
  const int steps = work.k / Bringing::kStep;
  const bool alone = multiplies_apart<Bringing>(work);
  const WarpWalk walk(steps, alone);
  LaneRing<E, Bringing> ring(shared, work, walk);
  const auto addend = [&] {
    return walk.tile < work.n / kTileRows && (alone || threadIdx.x < 32) ? addend_of_sums(work, walk.tile) : float2{};
  };
  if constexpr (kLays) {
    char* const rows = shared + kLaneRingBytes<Bringing>;
    const int threads = work.m == 1 ? kFewRowsReaders : kFewRowsReaders / 2;
    const LaidRow<E, kMostPacks> laid(work, threadIdx.x / threads, threads);
    wait_for_inputs();
    const float2 first = addend();
    laid.template lay<Bringing, false>(work, rows, [&](float x, int which) {
      return sum_of_row(x, threads, which == 0 ? beside.mean : beside.squares);
    });
    __syncthreads();
    multiply_lane_tiles<E, Bringing>(work, beside, ring, walk, alone, rows, first);
  } else {
    wait_for_inputs();
    multiply_lane_tiles<E, Bringing>(work, beside, ring, walk, alone, work.prepared, addend());
  }
#endif
}

}  // namespace
}  // namespace ftbert
