// c [m, n] = epilogue(norm(a [m, k]) @ b [n, k]^T) for m <= 8, as fast as b is read: the kernel.
//
// A block stays and takes one tile of eight of b's rows after another. One warp asks the accelerator for b in chunks of
// k, into a ring of shared memory; eight warps share a chunk's columns. A tile of b is the narrow operand of the tensor
// cores' products, all rows of a the wide one. The ring is asked for before the kernel ahead has ended, and leaves room
// for the blocks of the kernel behind, so that the memory is busy between two of them. When a block lets those start
// counts (kLead: chunks that it lacks then): their rings are filled at the expense of its own. To add up what the
// warps have of a tile takes a while, too: pairs of warps do it by turns, and the others are at the next tiles
// meanwhile. Instructions of the accelerator take 50 ns each, whatever they bring: rows of 1 KB were slower than rows
// of 2 KB.
#pragma once
#include "device/launch.cuh"
#include "gemm/own/few_rows_storage.cuh"

namespace ftbert {
namespace {

constexpr int kMostStages = 16;  // of the ring
// Two warps add up what all have of a tile, by turns, while the others are at the next tiles: as far as there is room.
constexpr int kPairs = kFewRowsWarps / 2, kOfPair = 64, kRooms = 2;
constexpr int kFewRowsReaders = 32 * kFewRowsWarps, kFewRowsThreads = kFewRowsReaders + 32;

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
        normalise(work, mean, scale, g, beta, x);
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

// Thread 8 row + column of two warps has one of a tile's sums: what is added to it. Loaded before the sum is there.
template <class E>
__device__ float addend_of_sum(const FewRows<E>& work, int tile) {
  const int row = threadIdx.x % kOfPair / kTileRows, column = tile * kTileRows + threadIdx.x % kTileRows;
  if (row >= work.m || tile * kTileRows >= work.n) return 0;
  const float bias = work.bias ? to_float(work.bias[column]) : 0;
  return work.add ? bias + to_float(work.c[static_cast<int64_t>(row) * work.n + column]) : bias;
}

template <class E>
__device__ void store_sum(const FewRows<E>& work, int tile, float x) {
  const int row = threadIdx.x % kOfPair / kTileRows, column = tile * kTileRows + threadIdx.x % kTileRows;
  const bool there = row < work.m;
  const int64_t at = static_cast<int64_t>(row) * work.n + column;
  if (work.gate == Gate::pairs) {
    const float value = __shfl_down_sync(~0u, x, 1);
    with_activation(work.activation, [&](auto kind) { x = activate<decltype(kind)::value, E>(x); });
    if (there && column % 2 == 0) work.c[at / 2] = from_float<E>(x * value);
    return;
  }
  with_activation(work.activation, [&](auto kind) { x = activate<decltype(kind)::value, E>(x); });
  if (there) work.c[at] = from_float<E>(x);
}

template <class E, class Storage>
__global__ void __launch_bounds__(kFewRowsThreads, 2) few_rows_kernel(const __grid_constant__ FewRows<E> work) {
#ifdef FTBERT_WGMMA
  extern __shared__ __align__(128) char shared[];
  __shared__ __align__(8) uint64_t barriers[2 * kMostStages + 2 * kRooms + 1];
  __shared__ float parts[kRooms][kFewRowsWarps][kTileRows * 8];
  __shared__ float partial[kFewRowsWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stages = work.stages;
  const int steps = work.k / Storage::kStep, chunks = (steps + Storage::kChunkSteps - 1) / Storage::kChunkSteps;
  const int tiles = work.n / kTileRows;
  const auto full = [&](int stage) { return shared_address(barriers + stage); };
  const auto empty = [&](int stage) { return shared_address(barriers + kMostStages + stage); };
  const auto parted = [&](int room) { return shared_address(barriers + 2 * kMostStages + room); };
  const auto summed = [&](int room) { return shared_address(barriers + 2 * kMostStages + kRooms + room); };
  const uint32_t brought = shared_address(barriers + 2 * kMostStages + 2 * kRooms);
  char* const rows = shared + stages * Storage::kChunk;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) barrier_init(full(i), 1), barrier_init(empty(i), kFewRowsReaders);
    for (int i = 0; i < kRooms; ++i) barrier_init(parted(i), kFewRowsReaders), barrier_init(summed(i), kOfPair);
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
    for (int tile = blockIdx.x; tile < tiles; tile += static_cast<int>(gridDim.x)) {
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

  const int grid = static_cast<int>(gridDim.x);
  float addend = 0;  // of this thread's next sum
  const auto load_first_addend = [&] { addend = addend_of_sum(work, static_cast<int>(blockIdx.x) + warp / 2 * grid); };
  if (work.prepared) {
    grid_wait();
    load_first_addend();
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
    load_first_addend();
    laid.template lay<Storage>(work, rows, partial);
    named_barrier_wait(1, kFewRowsReaders);
  }
  int left = (tiles - static_cast<int>(blockIdx.x) + grid - 1) / grid * chunks;
  bool let_go = false;
  for (int tile = blockIdx.x, turn = 0; tile < tiles; tile += grid, ++turn) {
    float sums[4] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      barrier_wait(full(stage), parity);
      if (--left <= work.lead && !let_go) grid_let_go(), let_go = true;
      const char* const from = shared + stage * Storage::kChunk;
      const int there = steps - chunk * Storage::kChunkSteps;
      const auto add = [&](int at) { Storage::add(work, from, rows, chunk * Storage::kChunkSteps + at, at, sums); };
      if (there >= Storage::kChunkSteps) {
#pragma unroll
        for (int i = 0; i < Storage::kStepsOfWarp; ++i) add(i * kFewRowsWarps + warp);
      } else {
#pragma unroll 1
        for (int at = warp; at < there; at += kFewRowsWarps) add(at);
      }
      barrier_arrive(empty(stage));
      next();
    }
    const int room = turn % kRooms, parity_of_room = turn / kRooms % 2;
    if (turn >= kRooms) barrier_wait(summed(room), parity_of_room ^ 1);
    parts[room][warp][lane * 2] = sums[0];
    parts[room][warp][lane * 2 + 1] = sums[1];
    barrier_arrive(parted(room));
    if (turn % kPairs != warp / 2) continue;
    barrier_wait(parted(room), parity_of_room);
    float x = addend;
#pragma unroll
    for (int i = 0; i < kFewRowsWarps; ++i) x += parts[room][i][threadIdx.x % kOfPair];
    barrier_arrive(summed(room));
    store_sum(work, tile, x);
    addend = addend_of_sum(work, tile + kPairs * grid);
  }
#else
  no_warpgroups();
#endif
}

}  // namespace
}  // namespace ftbert
