// few_rows: c [m, n] = epilogue(norm(a [m, k]) @ b [n, k]^T) for m <= 8 on Hopper, as fast as b is read.
//
// A block stays and takes one tile after another; with a counter it takes the next that no other block has. One warp
// asks the accelerator for b in chunks of k, into a ring in shared memory. The warps that multiply are at the next
// tiles while one of them adds up (gpu/few_rows.cuh).
//
// The ring is asked for before the kernel ahead has ended, and leaves room for the blocks of the kernel behind, so that
// the memory is busy between two of them. It counts when a block lets the blocks behind start, for their rings are
// filled at the expense of its own: when it has asked for all of b, or at once (kLetsGoAtOnce). An instruction of the
// accelerator takes 50 ns, whatever it brings: rows of 1 KB were slower than rows of 2 KB.
#pragma once
#include "device/launch.cuh"
#include "device/named_barrier.cuh"
#include "device/ring.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "gemm/gpu/few_rows_norm.cuh"
#include "gemm/hopper/few_rows_bulk.cuh"

namespace ftbert {
namespace {

constexpr int kMostStages = 16;  // of the ring, a chunk each
// Tiles whose sums wait to be added up. There is room for the sums of kRoomRows rows of a: of two tiles where a has
// eight rows, of eight where it has one or two.
constexpr int kRooms = 8, kRoomRows = 16;
constexpr int kFewRowsThreads = kFewRowsReaders + 32;

// The ring of b's chunks; and of rooms, which all readers fill and the warp that adds up empties. Every lane arrives:
// if a single lane does, racecheck reports the other lanes' reads as a race, and it was no faster (H100).
using ChunkRing = Ring<kMostStages, kFewRowsReaders>;
using RoomRing = Ring<kRooms, 32, kFewRowsReaders>;

// Shared memory of a block: this, and as much as the launch says for the ring [work.stages][Storage::kChunk] and behind
// it the rows of a.
struct FewRowsShared {
  // Barriers of a ChunkRing, of a RoomRing, and of prepared rows of a.
  uint64_t chunks[2 * kMostStages], rooms[2 * kRooms], brought;
  int tiles[kMostStages];                                           // of the chunk in each stage of the ring
  __align__(8) float parts[kRoomRows * kFewRowsWarps * kTileRows];  // [rooms][warps][m][kTileRows]
  float mean[kFewRowsWarps], squares[kFewRowsWarps];                // sum_of_row's, for a's norm

  // Of all threads of the block.
  __device__ void begin(int stages) {
    if (threadIdx.x == 0) {
      chunk_ring(stages).init();
      room_ring(kRooms).init();
      barrier_init(shared_address(&brought), 1);
      barrier_init_fence();
    }
    __syncthreads();
  }
  __device__ ChunkRing chunk_ring(int stages) const { return {shared_address(chunks), stages}; }
  __device__ RoomRing room_ring(int count) const { return {shared_address(rooms), count}; }
};

// The block's next tile, in lane 0; beyond the last: none. The counter is asked before the wait for the kernel ahead:
// neighbours have different ones (ProductData::tile_count). A block that is slower, such as one of two that share a
// multiprocessor, gets fewer tiles: dealt evenly, 22016 x 4096 took 37 us, and most blocks had ended after 29.
template <class E>
__device__ int next_tile(const FewRows<E>& work, int tile) {
  const int grid = static_cast<int>(gridDim.x), tiles = work.n / kTileRows;
  if (work.count == nullptr) return tile + grid;
  // Each block asks once in vain, all together `tiles` times: the last asking leaves 0.
  return threadIdx.x % 32 == 0 ? grid + static_cast<int>(atomicInc(work.count, tiles - 1)) : 0;
}

// The warp that asks for b: all chunks of the block's tiles.
template <class Storage, class E>
__device__ void ask_for_tiles(const FewRows<E>& work, FewRowsShared& beside, const char* ring) {
  const int steps = work.k / Storage::kStep, tiles = work.n / kTileRows;
  ChunkRing chunks = beside.chunk_ring(work.stages);
  // ask(stage): for the chunk of a tile.
  const auto fill = [&](int tile, const auto& ask) {
    chunks.wait_empty();
    // Published by this lane's arrival at the full stage.
    if (threadIdx.x % 32 == 0) beside.tiles[chunks.stage] = tile;
    ask(chunks.stage);
    __syncwarp();
    chunks.next();
  };
  for (int tile = blockIdx.x; tile < tiles;) {
    const int next = next_tile(work, tile);
    for (int first = 0; first < steps; first += Storage::kChunkSteps)
      fill(tile, [&](int stage) {
        Storage::ask(work, tile, first, min(Storage::kChunkSteps, steps - first),
                     shared_address(ring + stage * Storage::kChunk), chunks.full(stage));
      });
    tile = __shfl_sync(~0u, next, 0);
  }
  grid_wait();  // a warp lets go only behind its own wait
  grid_let_go();
  // A stage without data tells the readers that there is no further tile.
  fill(tiles, [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(chunks.full(stage));
  });
}

// The readers: norm(a) as b's storage wishes it, in shared memory. behind_wait() runs once all kernels ahead have
// ended.
template <class Storage, class E, class BehindWait>
__device__ void bring_rows(const FewRows<E>& work, FewRowsShared& beside, char* rows, const BehindWait& behind_wait) {
  if (work.prepared) {
    grid_wait();
    behind_wait();
    const uint32_t brought = shared_address(&beside.brought);
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
    const int threads = work.m == 1 ? kFewRowsReaders : kFewRowsReaders / 2;
    const LaidRow<E, kMostPacks> laid(work, threadIdx.x / threads, threads);
    grid_wait();
    behind_wait();
    laid.template lay<Storage, false>(work, rows, [&](float x, int which) {
      return sum_of_row(x, threads, which == 0 ? beside.mean : beside.squares);
    });
    named_barrier_wait(1, kFewRowsReaders);
  }
}

// The readers: the block's tiles, each by one warp, the next tile by the next warp. addend: of the first tile.
template <class Storage, class E>
__device__ void multiply_tiles_apart(const FewRows<E>& work, FewRowsShared& beside, const char* ring, char* rows,
                                     float2 addend) {
  static_assert(kMostApartSteps <= Storage::kChunkSteps);
  const int warp = threadIdx.x / 32, steps = work.k / Storage::kStep;
  ChunkRing chunks = beside.chunk_ring(work.stages);
  for (int index = 0;; ++index, chunks.next()) {
    chunks.wait_full();  // all warps, whose chunk it is or not: a barrier tells two phases apart, not three
    const int tile = beside.tiles[chunks.stage];
    if (tile * kTileRows >= work.n) return;
    if (index % kFewRowsWarps == warp) {
      if (index > 0) addend = addend_of_sums(work, tile);
      const char* const from = ring + chunks.stage * Storage::kChunk;
      float sums[4] = {};
#pragma unroll 3
      for (int at = 0; at < steps; ++at) Storage::add(work, from, rows, at, at, sums);
      store_sums(work, tile, float2{addend.x + sums[0], addend.y + sums[1]});
    }
    chunks.release(chunks.stage);
  }
}

// The same, each tile by all warps; one of them adds up the sums, of the next tile the next warp.
template <class Storage, class E>
__device__ void multiply_tiles(const FewRows<E>& work, FewRowsShared& beside, const char* ring, char* rows,
                               float2 addend) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = work.k / Storage::kStep;
  const bool has_sums = lane / 4 < work.m;
  ChunkRing chunks = beside.chunk_ring(work.stages);
  RoomRing room = beside.room_ring(min(kRooms, kRoomRows / work.m));
  const auto part = [&](int of_warp) {
    return reinterpret_cast<float2*>(beside.parts + (room.stage * kFewRowsWarps + of_warp) * work.m * kTileRows) + lane;
  };
  for (int index = 0;; ++index) {
    const bool adds_up = index % kFewRowsWarps == warp;
    int tile;
    float sums[4] = {};
    for (int first = 0; first < steps; first += Storage::kChunkSteps) {
      chunks.wait_full();
      if (first == 0) {
        tile = beside.tiles[chunks.stage];
        if (tile * kTileRows >= work.n) return;
        if (adds_up && index > 0) addend = addend_of_sums(work, tile);
      }
      const char* const from = ring + chunks.stage * Storage::kChunk;
      const int there = steps - first;
      const auto add = [&](int at) { Storage::add(work, from, rows, first + at, at, sums); };
      if (there >= Storage::kChunkSteps) {
#pragma unroll
        for (int i = 0; i < Storage::kStepsOfWarp; ++i) add(i * kFewRowsWarps + warp);
      } else {
#pragma unroll 1
        for (int at = warp; at < there; at += kFewRowsWarps) add(at);
      }
      chunks.release(chunks.stage);
      chunks.next();
    }
    room.wait_empty();
    if (has_sums) *part(warp) = {sums[0], sums[1]};
    barrier_arrive(room.full(room.stage));
    if (adds_up) {
      room.wait_full();
      float2 x = addend;
#pragma unroll
      for (int i = 0; i < kFewRowsWarps; ++i) {
        const float2 theirs = has_sums ? *part(i) : float2{};
        x.x += theirs.x, x.y += theirs.y;
      }
      room.release(room.stage);
      store_sums(work, tile, x);
    }
    room.next();
  }
}

// Grid: at most a block for each tile. Storage: of few_rows_bulk.cuh.
template <class E, class Storage>
__global__ void __launch_bounds__(kFewRowsThreads, 2) few_rows_kernel(const __grid_constant__ FewRows<E> work) {
#ifdef FTBERT_WGMMA  // for bulk copies and their barriers: there is no wgmma here
  extern __shared__ __align__(128) char shared[];
  __shared__ FewRowsShared beside;
  const bool apart = multiplies_apart<Storage>(work);
  beside.begin(work.stages);
  if (threadIdx.x / 32 == kFewRowsWarps) return ask_for_tiles<Storage>(work, beside, shared);
  char* const rows = shared + work.stages * Storage::kChunk;
  float2 addend;
  bring_rows<Storage>(work, beside, rows, [&] {
    if (Storage::kLetsGoAtOnce) grid_let_go();  // the first thread that does counts for the block
    addend = addend_of_sums(work, blockIdx.x);
  });
  if (apart)
    multiply_tiles_apart<Storage>(work, beside, shared, rows, addend);
  else
    multiply_tiles<Storage>(work, beside, shared, rows, addend);
#else
  no_warpgroups();
#endif
}

}  // namespace
}  // namespace ftbert
