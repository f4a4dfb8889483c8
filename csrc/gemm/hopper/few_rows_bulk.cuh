// How Hopper's accelerator brings b of a product of few rows to shared memory, in chunks of steps of k.
#pragma once
#include "device/tma.cuh"
#include "gemm/gpu/few_rows_storage.cuh"

namespace ftbert {
namespace {

// Beside what a Storage has (gpu/few_rows_storage.cuh):
//   kChunkSteps of a chunk, kStepsOfWarp for each warp; kChunk, a chunk's bytes;
//   kLetsGoAtOnce: the kernel behind starts before all of b is asked for;
//   ask(work, tile, step, steps, to, full), by the whole asking warp: copies to a stage;
//   add(work, chunk, rows, step, at, sums): products of a step, in the chunk number `at`.

template <class E>
struct BulkRows : PlainRows<E> {
  using PlainRows<E>::kStep;
  static constexpr int kStepsOfWarp = 4, kChunkSteps = kFewRowsWarps * kStepsOfWarp;
  static constexpr int kSegment = kChunkSteps * kStep * static_cast<int>(sizeof(E));
  static constexpr int kSpread = kSegment + 64;  // between rows in shared memory: eight lanes then meet all banks
  static constexpr int kChunk = kTileRows * kSpread;
  // The kernel behind starts early, not when all of b is asked for.
  static constexpr bool kLetsGoAtOnce = true;

  __device__ static void ask(const FewRows<E>& work, int tile, int step, int steps, uint32_t to, uint32_t full) {
    const int lane = threadIdx.x % 32, bytes = steps * kStep * static_cast<int>(sizeof(E));
    if (lane == 0) barrier_expect(full, kTileRows * bytes);
    __syncwarp();
    if (lane < kTileRows)
      bulk_load(to + lane * kSpread,
                static_cast<const E*>(work.b) + (static_cast<int64_t>(tile) * kTileRows + lane) * work.k + step * kStep,
                bytes, full);
  }

  __device__ static void add(const FewRows<E>& work, const char* chunk, const char* rows, int step, int at,
                             float (&sums)[4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 w = *reinterpret_cast<const uint4*>(chunk + g * kSpread + at * kStep * sizeof(E) + t * 16);
    PlainRows<E>::multiply(work, w, rows, step, sums);
  }
};

template <class E>
struct BulkTiles : Q8Tiles<E, Q8Order::columns> {
  using Tiles = Q8Tiles<E, Q8Order::columns>;
  using Tiles::kNumbers, Tiles::kScales, Tiles::kStep;
  static constexpr int kStepsOfWarp = 4, kChunkSteps = kFewRowsWarps * kStepsOfWarp;
  static constexpr int kChunk = kChunkSteps * (kNumbers + kScales);
  static constexpr bool kLetsGoAtOnce = false;

  __device__ static void ask(const FewRows<E>& work, int tile, int step, int steps, uint32_t to, uint32_t full) {
    if (threadIdx.x % 32 != 0) return;
    const int64_t first = static_cast<int64_t>(tile) * (work.k / kStep) + step;
    barrier_expect(full, steps * (kNumbers + kScales));
    bulk_load(to, static_cast<const char*>(work.b) + first * kNumbers, steps * kNumbers, full);
    const auto* const scales = reinterpret_cast<const char*>(q8_0_scales(work.b, work.n, work.k));
    bulk_load(to + kChunkSteps * kNumbers, scales + first * kScales, steps * kScales, full);
  }

  __device__ static void add(const FewRows<E>& work, const char* chunk, const char* rows, int step, int at,
                             float (&sums)[4]) {
    Tiles::multiply(work, chunk + at * kNumbers, chunk + kChunkSteps * kNumbers + at * kScales, rows, step, sums);
  }
};

}  // namespace
}  // namespace ftbert
