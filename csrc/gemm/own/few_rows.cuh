// c [m, n] = epilogue(norm(a [m, k]) @ b [n, k]^T) for m <= 8, as fast as b is read: the kernel.
//
// A block stays and takes one tile of eight of b's rows after another. One warp asks the accelerator for b in chunks of
// k, into a ring of shared memory; eight warps share a chunk's columns. A tile of b is the narrow operand of the tensor
// cores' products, all rows of a the wide one. The ring is asked for before the kernel ahead has ended, and leaves room
// for the blocks of the kernel behind, so that the memory is busy between two of them. When a block lets those start
// counts: their rings are filled at the expense of this kernel's, and once they are full the memory waits for their
// rows of a. A step of Llama-2-7B in Q8_0 at context 448, one H100: at once 3.13 ms, when a block lacks 12 chunks 3.02,
// 6 chunks 3.38, none 3.52; in bf16 5.12 ms at once, 5.3 to 5.5 later. Instructions of the accelerator take 50 ns each,
// whatever they bring: rows of 1 KB were slower than rows of 2 KB.
#pragma once
#include "core/norm.h"
#include "core/q8_0.h"
#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "gemm/product.h"

namespace ftbert {
namespace {

constexpr int kMostStages = 16;  // of the ring
constexpr int kFewRowsWarps = 8, kFewRowsReaders = 32 * kFewRowsWarps, kFewRowsThreads = kFewRowsReaders + 32;
constexpr int kPrepareThreads = 512, kMostPreparedColumns = kPrepareThreads * 8 * 4;
constexpr int kTileRows = kQ8TileRows;

template <class E>
struct FewRows {
  const E* a;  // [m, k]
  const void* b;
  const E* bias;  // [n], or nullptr
  E* c;           // [m, n], with a gate [m, n / 2]
  NormKind norm;
  const E *gamma, *beta;  // [k], or nullptr
  float eps, offset;
  bool round_before_gamma;
  bool add;  // c is added to
  Activation activation;
  Gate gate;
  int m, n, k;
  int stages, row_bytes;  // of the ring; of a row of a in shared memory
  int lead;               // chunks that a block lacks when it lets the kernel behind start
  // Rows that need no more than to be brought: of `prepared_bytes` each, and behind them their scales.
  const char* prepared;
  int prepared_bytes;
};

// d [16, 8] += a [16, 32] @ b [32, 8]; a's rows from 8 on are 0.
__device__ inline void multiply_add_int8(int (&d)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

__device__ inline void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void grid_let_go() { asm volatile("griddepcontrol.launch_dependents;"); }

// How b is stored, how a is laid out beside it, and a step of k: what one access of a warp's lanes to b covers. Lane
// 4 g + t has row g of the tile.

// b [n, k] row-major. Lane 4 g + t takes columns 8 t to 8 t + 7 of the step's 32, as two products whose 16 columns lie
// in an order of their own, the same in a.
template <class E>
struct PlainRows {
  static constexpr int kStep = 32, kStepsOfWarp = 4, kChunkSteps = kFewRowsWarps * kStepsOfWarp;
  static constexpr int kSegment = kChunkSteps * kStep * static_cast<int>(sizeof(E));
  static constexpr int kSpread = kSegment + 64;  // between rows in shared memory: eight lanes then meet all banks
  static constexpr int kChunk = kTileRows * kSpread;
  static constexpr int kLead = 1 << 30;

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

// b in Q8_0, as core/q8_0.h lays it out; rows of a become Q8_1: int8, and behind them for 32 columns each a float.
template <class E>
struct Q8Tiles {
  static constexpr int kStepsOfWarp = 2, kChunkSteps = kFewRowsWarps * kStepsOfWarp;
  static constexpr int kStep = kQ8TileDepth, kNumbers = kTileRows * kStep;  // bytes of a step, and of its scales
  static constexpr int kScales = kTileRows * kStep / kQ8Block * static_cast<int>(sizeof(half_t));
  static constexpr int kChunk = kChunkSteps * (kNumbers + kScales);
  static constexpr int kLead = 12;

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

// Of the threads that share a row of a, `threads` (64 or more) of the block's readers, which all come here.
__device__ inline float sum_of_row(float x, int threads, float* partial) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  const int warp = threadIdx.x / 32, warps = threads / 32, first = warp / warps * warps;
  named_barrier_wait(1, kFewRowsReaders);  // who reads the sums before these
  if (threadIdx.x % 32 == 0) partial[warp] = x;
  named_barrier_wait(1, kFewRowsReaders);
  x = 0;
  for (int i = 0; i < warps; ++i) x += partial[first + i];
  return x;
}

// A row of a and a norm's gamma in a thread's registers.
constexpr int kMostPacks = 6, kMostLaidRows = 2;
constexpr int kMostLaidColumns = kFewRowsReaders * 8 * kMostPacks;  // of the rows that a block lays out itself

// The rows that a block lays out; before any kernel ahead has ended it reads what none writes.
template <class E>
struct LaidRows {
  using Pack = Packed<E, 8>;
  int threads, row, lane;
  Pack gamma[kMostPacks];

  __device__ explicit LaidRows(const FewRows<E>& work) {
    threads = work.m == 1 ? kFewRowsReaders : kFewRowsReaders / 2, row = threadIdx.x / threads,
    lane = threadIdx.x % threads;
#pragma unroll
    for (int i = 0; i < kMostPacks; ++i)
      gamma[i] = work.gamma && column(i) < work.k ? Pack::load(work.gamma + column(i)) : Pack::zero();
  }
  __device__ int column(int i) const { return (i * threads + lane) * 8; }

  // rows = norm(a) as b's storage wishes it. Of whole warps, whose lanes beyond a row's end have zeros.
  template <class Storage>
  __device__ void lay(const FewRows<E>& work, char* rows, float* partial) const {
    const bool there = row < work.m;
    Pack packs[kMostPacks];
#pragma unroll
    for (int i = 0; i < kMostPacks; ++i)
      packs[i] = there && column(i) < work.k ? Pack::load(work.a + static_cast<int64_t>(row) * work.k + column(i))
                                             : Pack::zero();
    float mean = 0, scale = 1;
    if (work.norm == NormKind::layer) {
      float sum = 0;
      each(work, packs, [&](int, const float (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += x[j];
      });
      mean = sum_of_row(sum, threads, partial) / work.k;
    }
    if (work.norm != NormKind::none) {
      float squares = 0;
      each(work, packs, [&](int i, const float (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += column(i) < work.k ? (x[j] - mean) * (x[j] - mean) : 0;
      });
      scale = rsqrtf(sum_of_row(squares, threads, partial) / work.k + work.eps);
    }
    if (!there) return;
    each(work, packs, [&](int i, float (&x)[8]) {
      if (work.norm != NormKind::none) {
        float g[8], beta[8] = {};
        gamma[i].to_floats(g);
        if (work.beta && column(i) < work.k) Pack::load(work.beta + column(i)).to_floats(beta);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float y = (x[j] - mean) * scale;
          if (work.round_before_gamma) y = to_float(from_float<E>(y));
          x[j] = column(i) < work.k ? y * (g[j] + work.offset) + beta[j] : 0;
        }
      }
      Storage::put(work, rows, row, column(i), x);
    });
  }

 private:
  template <class Visit>
  __device__ void each(const FewRows<E>& work, const Pack (&packs)[kMostPacks], const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kMostPacks; ++i) {
      if (i * threads * 8 >= work.k) return;
      float x[8];
      packs[i].to_floats(x);
      visit(i, x);
    }
  }
};

// Thread 8 row + column of the first 64 has one of a tile's sums.
template <class E>
__device__ void store_sum(const FewRows<E>& work, int tile, float x) {
  const int row = threadIdx.x / kTileRows, column = tile * kTileRows + threadIdx.x % kTileRows;
  if (work.bias) x += to_float(work.bias[column]);
  const bool there = row < work.m;
  const int64_t at = static_cast<int64_t>(row) * work.n + column;
  if (work.gate == Gate::pairs) {
    const float value = __shfl_down_sync(~0u, x, 1);
    with_activation(work.activation, [&](auto kind) { x = activate<decltype(kind)::value, E>(x); });
    if (there && column % 2 == 0) work.c[at / 2] = from_float<E>(x * value);
    return;
  }
  with_activation(work.activation, [&](auto kind) { x = activate<decltype(kind)::value, E>(x); });
  if (!there) return;
  if (work.add) x += to_float(work.c[at]);
  work.c[at] = from_float<E>(x);
}

template <class E, class Storage>
__global__ void __launch_bounds__(kFewRowsThreads, 2) few_rows_kernel(const __grid_constant__ FewRows<E> work) {
#ifdef FTBERT_WGMMA
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * kMostStages + 1];
  __shared__ float parts[2][kFewRowsWarps][kTileRows * 8];
  __shared__ float partial[kFewRowsWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stages = work.stages;
  const int steps = work.k / Storage::kStep, chunks = (steps + Storage::kChunkSteps - 1) / Storage::kChunkSteps;
  const int tiles = work.n / kTileRows;
  const auto full = [&](int stage) { return shared_address(barriers + stage); };
  const auto empty = [&](int stage) { return shared_address(barriers + kMostStages + stage); };
  const uint32_t brought = shared_address(barriers + 2 * kMostStages);
  char* const rows = shared + stages * Storage::kChunk;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) barrier_init(full(i), 1), barrier_init(empty(i), kFewRowsWarps);
    barrier_init(brought, 1);
    barrier_init_fence();
  }
  __syncthreads();

  int stage = 0;
  uint32_t parity = 0;
  const auto next = [&] {
    if (++stage == stages) stage = 0, parity ^= 1;
  };
  if (warp == kFewRowsWarps) {
    bool full_once = false;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      for (int first = 0; first < steps; first += Storage::kChunkSteps) {
        if (full_once) barrier_wait(empty(stage), parity ^ 1);
        Storage::ask(work, tile, first, min(Storage::kChunkSteps, steps - first),
                     shared_address(shared + stage * Storage::kChunk), full(stage));
        __syncwarp();
        next();
        full_once = full_once || stage == 0;
      }
    }
    return;
  }

  if (work.prepared) {
    grid_wait();
    if (threadIdx.x == 0) {
      const int scales = Storage::scale_bytes(work.m, work.k);
      barrier_expect(brought, work.m * work.prepared_bytes + scales);
      for (int row = 0; row < work.m; ++row)
        bulk_load(shared_address(rows + row * work.row_bytes), work.prepared + row * work.prepared_bytes,
                  work.prepared_bytes, brought);
      if (scales > 0)
        bulk_load(shared_address(rows + work.m * work.row_bytes), work.prepared + work.m * work.prepared_bytes, scales,
                  brought);
    }
    barrier_wait(brought, 0);
  } else {
    const LaidRows<E> laid(work);
    grid_wait();
    laid.template lay<Storage>(work, rows, partial);
    named_barrier_wait(1, kFewRowsReaders);
  }
  int turn = 0, left = (tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                       static_cast<int>(gridDim.x) * chunks;
  bool let_go = false;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float sums[4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      barrier_wait(full(stage), parity);
      if (--left <= work.lead && !let_go) grid_let_go(), let_go = true;
      const char* const from = shared + stage * Storage::kChunk;
#pragma unroll
      for (int i = 0; i < Storage::kStepsOfWarp; ++i) {
        const int at = warp * Storage::kStepsOfWarp + i, step = chunk * Storage::kChunkSteps + at;
        if (step < steps) Storage::add(work, from, rows, step, at, sums);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty(stage));
      next();
    }
    parts[turn][warp][lane * 2] = sums[0];
    parts[turn][warp][lane * 2 + 1] = sums[1];
    named_barrier_wait(1, kFewRowsReaders);
    if (threadIdx.x < kTileRows * 8) {
      float x = 0;
#pragma unroll
      for (int i = 0; i < kFewRowsWarps; ++i) x += parts[turn][i][threadIdx.x];
      store_sum(work, tile, x);
    }
    turn ^= 1;
  }
#else
  no_warpgroups();
#endif
}

// Rows of a in Q8_1 where many blocks read them: a block a row -> int8 [m, k], and behind all of them float scales. It
// is told as work.prepared where they go.
template <class E>
__global__ void __launch_bounds__(kPrepareThreads) prepare_q8_kernel(const __grid_constant__ FewRows<E> work) {
  using Pack = Packed<E, 8>;
  constexpr int kPacks = 4;
  const int row = blockIdx.x;
  const E* const a = work.a + static_cast<int64_t>(row) * work.k;
  char* const to = const_cast<char*>(work.prepared);
  auto* const scales = reinterpret_cast<float*>(to + work.m * work.k) + row * Q8Tiles<E>::scale_stride(work.k);
  const auto column = [&](int i) { return (i * kPrepareThreads + static_cast<int>(threadIdx.x)) * 8; };
  wait_for_inputs();
  Pack packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) packs[i] = column(i) < work.k ? Pack::load(a + column(i)) : Pack::zero();
  float mean = 0, scale = 1;
  const auto sum = [&](const auto& of) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float x[8];
      packs[i].to_floats(x);
#pragma unroll
      for (int j = 0; j < 8; ++j) total += column(i) < work.k ? of(x[j]) : 0;
    }
    return reduce<kPrepareThreads>(total, Sum()) / work.k;
  };
  if (work.norm == NormKind::layer) mean = sum([](float x) { return x; });
  if (work.norm != NormKind::none) scale = rsqrtf(sum([&](float x) { return (x - mean) * (x - mean); }) + work.eps);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    float x[8];
    packs[i].to_floats(x);
    if (work.norm != NormKind::none && column(i) < work.k) {
      float gamma[8], beta[8] = {};
      Pack::load(work.gamma + column(i)).to_floats(gamma);
      if (work.beta) Pack::load(work.beta + column(i)).to_floats(beta);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float y = (x[j] - mean) * scale;
        if (work.round_before_gamma) y = to_float(from_float<E>(y));
        x[j] = y * (gamma[j] + work.offset) + beta[j];
      }
    }
    uint2 packed;
    const float block = Q8Tiles<E>::quantise(x, packed);
    if (column(i) >= work.k) continue;
    *reinterpret_cast<uint2*>(to + static_cast<int64_t>(row) * work.k + column(i)) = packed;
    if (column(i) % kQ8Block == 0) scales[column(i) / kQ8Block] = block;
  }
}

}  // namespace
}  // namespace ftbert
