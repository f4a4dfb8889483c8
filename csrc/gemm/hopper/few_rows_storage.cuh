// Products of few rows: what their kernels are given, how b is stored, and how a is laid out beside it.
#pragma once
#include "core/format.h"
#include "core/norm.h"
#include "device/activation.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "gemm/product.h"

namespace ftbert {
namespace {

constexpr int kFewRowsWarps = 8, kFewRowsReaders = 32 * kFewRowsWarps;
constexpr int kTileRows = kQ8TileRows;

template <class E>
struct FewRows {
  const E* a;  // [m, k]
  const void* b;
  const E* bias;  // [n], or nullptr
  E* c;           // [m, n], with a gate [m, n / 2]
  Norm<E> norm;   // of a's rows
  bool add;       // c is added to
  Activation activation;
  Gate gate;
  int m, n, k;
  int stages, row_bytes;  // of the ring; of a row of a in shared memory
  uint32_t* count;        // of the tiles that blocks have asked for, from 0; nullptr: they are dealt evenly
  // Rows of a as b's storage wishes them, of `prepared_bytes` each, and behind all rows their scales; nullptr: each
  // block lays them out.
  const char* prepared;
  int prepared_bytes;
};

// d [16, 8] += a [16, 32] @ b [32, 8]; a's rows from 8 on are 0.
__device__ inline void multiply_add_int8(int (&d)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

// How b is stored, how a is laid out beside it, and a step of k: what one access of a warp's lanes to b covers. Lane
// 4 g + t has row g of the tile. A Storage has
//   kStep, columns of a step; kChunkSteps of a chunk, kStepsOfWarp for each warp; kChunk, a chunk's bytes;
//   kLetsGoAtOnce: the kernel behind starts before all of b is asked for;
//   ask(work, tile, step, steps, to, full), by the whole asking warp: copies to a stage;
//   scale_bytes(m, k), of the scales behind the rows of a;
//   put(work, rows, row, column, x), by a whole warp: eight numbers of a to shared memory;
//   add(work, chunk, rows, step, at, sums): products of a step, in the chunk number `at`.

// b [n, k] row-major. Lane 4 g + t takes columns 8 t to 8 t + 7 of the step's 32, as two products whose 16 columns lie
// in an order of their own, the same in a.
template <class E>
struct PlainRows {
  static constexpr int kStep = 32, kStepsOfWarp = 4, kChunkSteps = kFewRowsWarps * kStepsOfWarp;
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

  FTBERT_HOST_DEVICE static int scale_bytes(int, int) { return 0; }

  __device__ static void put(const FewRows<E>& work, char* rows, int row, int column, const float (&x)[8]) {
    if (column < work.k) Packed<E, 8>::from_floats(x).store(reinterpret_cast<E*>(rows + row * work.row_bytes) + column);
  }

  __device__ static void add(const FewRows<E>& work, const char* chunk, const char* rows, int step, int at,
                             float (&sums)[4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 w = *reinterpret_cast<const uint4*>(chunk + g * kSpread + at * kStep * sizeof(E) + t * 16);
    uint4 x{};
    if (g < work.m)
      x = *reinterpret_cast<const uint4*>(rows + g * work.row_bytes + step * kStep * static_cast<int>(sizeof(E)) +
                                          t * 16);
    multiply_add<E>(sums, {x.x, 0, x.y, 0}, w.x, w.y);
    multiply_add<E>(sums, {x.z, 0, x.w, 0}, w.z, w.w);
  }
};

// b in Q8_0, as core/format.h lays it out; rows of a become Q8_1: int8, and behind them for 32 columns each a float.
template <class E>
struct Q8Tiles {
  static constexpr int kStepsOfWarp = 4, kChunkSteps = kFewRowsWarps * kStepsOfWarp;
  static constexpr int kStep = kQ8TileDepth, kNumbers = kTileRows * kStep;  // bytes of a step, and of its scales
  static constexpr int kScales = kTileRows * kStep / kQ8Block * static_cast<int>(sizeof(half_t));
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

  // Floats between two rows' scales: odd, so that eight rows meet eight banks.
  FTBERT_HOST_DEVICE static int scale_stride(int k) { return k / static_cast<int>(kQ8Block) | 1; }
  // Of m rows, a multiple of 16.
  FTBERT_HOST_DEVICE static int scale_bytes(int m, int k) { return (m * scale_stride(k) * 4 + 15) / 16 * 16; }

  __device__ static float* scales(const FewRows<E>& work, char* rows, int row) {
    return reinterpret_cast<float*>(rows + work.m * work.row_bytes) + row * scale_stride(work.k);
  }

  // x of a whole warp, beyond the row's end too. Four neighbours hold a block of 32, whose scale comes back.
  __device__ static float quantise(const float (&x)[8], uint2& packed) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max_or_nan(most, fabsf(x[i]));
    most = max_or_nan(most, __shfl_xor_sync(~0u, most, 1));
    most = max_or_nan(most, __shfl_xor_sync(~0u, most, 2));
    const float inverse = most > 0 ? 127 / most : 0;
    uint32_t four[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      four[i / 4] |= (static_cast<uint32_t>(__float2int_rn(x[i] * inverse)) & 255u) << (i % 4 * 8);
    packed = {four[0], four[1]};
    return most / 127;
  }

  __device__ static void put(const FewRows<E>& work, char* rows, int row, int column, const float (&x)[8]) {
    uint2 packed;
    const float scale = quantise(x, packed);
    if (column >= work.k) return;
    *reinterpret_cast<uint2*>(rows + row * work.row_bytes + column) = packed;
    if (column % kQ8Block == 0) scales(work, rows, row)[column / kQ8Block] = scale;
  }

  __device__ static void add(const FewRows<E>& work, const char* chunk, char* rows, int step, int at,
                             float (&sums)[4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 w = *reinterpret_cast<const uint4*>(chunk + at * kNumbers + lane * 16);
    const auto* const scale_b =
        reinterpret_cast<const __half2*>(chunk + kChunkSteps * kNumbers + at * kScales);  // [2][4]
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t x0 = 0, x1 = 0;
      float scale_a = 0;
      if (g < work.m) {
        const char* const x = rows + g * work.row_bytes + step * kStep + h * kQ8Block + t * 4;
        x0 = *reinterpret_cast<const uint32_t*>(x), x1 = *reinterpret_cast<const uint32_t*>(x + 16);
        scale_a = scales(work, rows, g)[2 * step + h];
      }
      int block[4] = {};
      multiply_add_int8(block, x0, x1, h ? w.z : w.x, h ? w.w : w.y);
      const float2 both = __half22float2(scale_b[h * 4 + t]);
      sums[0] += static_cast<float>(block[0]) * (scale_a * both.x);
      sums[1] += static_cast<float>(block[1]) * (scale_a * both.y);
    }
  }
};

}  // namespace
}  // namespace ftbert
