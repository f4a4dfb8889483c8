// c [m, n] = epilogue(norm(a [m, k]) @ b [n, k]^T) for m <= 8, as fast as b is read: the kernel.
//
// A block stays and takes one tile of eight of b's rows after another: with a counter the next that no other has. One
// warp asks the accelerator for b in chunks of k, into a ring of shared memory; eight warps share a chunk's columns, or
// where k is short take a tile each (kMostApartSteps). A tile of b is the narrow operand of the tensor cores' products,
// all rows of a the wide one. The ring is asked for before the kernel ahead has ended, and leaves room for the blocks
// of the kernel behind, so that the memory is busy between two of them. When a block lets those start counts, for their
// rings are filled at the expense of its own: when it has asked for all of b, or at once (kLetsGoAtOnce). To add up
// what the warps have of a tile takes a while, too: one of them does it, by turns, and the others are at the next tiles
// meanwhile. Instructions of the accelerator take 50 ns each, whatever they bring: rows of 1 KB were slower than rows
// of 2 KB.
#pragma once
#include "device/launch.cuh"
#include "device/ring.cuh"
#include "gemm/hopper/few_rows_storage.cuh"

namespace ftbert {
namespace {

constexpr int kMostStages = 16;  // of the ring
// Tiles whose sums wait to be added up, by one warp each, while the others are at the next tiles. There is room for
// those of kRoomRows rows of a: two tiles of eight rows, eight of one or two.
constexpr int kRooms = 8, kRoomRows = 16;
// Where a tile has no more steps of k, a warp has it alone, and no sums are added up: three tiles of 9 steps took 1.5
// us with all of b there, most of it for turns.
constexpr int kMostApartSteps = 20;
constexpr int kFewRowsReaders = 32 * kFewRowsWarps, kFewRowsThreads = kFewRowsReaders + 32;

// The ring of b's chunks; and of rooms, which all readers fill and the warp that adds up empties. Every lane arrives:
// behind one lane's arrival racecheck reports what the others have read as a race, and it was no faster (H100).
using ChunkRing = Ring<kMostStages, kFewRowsReaders>;
using RoomRing = Ring<kRooms, 32, kFewRowsReaders>;

template <class Storage, class E>
__device__ bool multiplies_apart(const FewRows<E>& work) {
  return work.k / Storage::kStep <= kMostApartSteps;
}

// What a block has in shared memory beside the ring and the rows of a, which lie where the kernel says.
struct FewRowsShared {
  // Barriers of a ChunkRing, of a RoomRing, and of prepared rows of a.
  uint64_t chunks[2 * kMostStages], rooms[2 * kRooms], brought;
  int tiles[kMostStages];  // whose chunk a stage of the ring has
  __align__(8) float parts[kRoomRows * kFewRowsWarps * kTileRows];
  float mean[kFewRowsWarps], squares[kFewRowsWarps];  // of rows of a

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

// Of the threads that share a row of a, `threads` (64 or more) of the block's readers, which all come here. partial
// [kFewRowsWarps]: of this sum alone.
__device__ inline float sum_of_row(float x, int threads, float* partial) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  const int warp = threadIdx.x / 32, warps = threads / 32, first = warp / warps * warps;
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
  __device__ void lay(const FewRows<E>& work, char* rows, FewRowsShared& beside) const {
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
      mean = sum_of_row(sum, threads, beside.mean) / work.k;
    }
    if (work.norm != NormKind::none) {
      float squares = 0;
      each(work, packs, [&](int i, const float (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += column(i) < work.k ? (x[j] - mean) * (x[j] - mean) : 0;
      });
      scale = rsqrtf(sum_of_row(squares, threads, beside.squares) / work.k + work.eps);
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

// Lane 4 row + i of a warp has two of a tile's sums, of columns 2 i and 2 i + 1.
template <class E>
struct SumPlace {
  int row, column;
  int64_t at;
  bool there;

  __device__ SumPlace(const FewRows<E>& work, int tile) {
    const int lane = threadIdx.x % 32;
    row = lane / 4, column = tile * kTileRows + lane % 4 * 2;
    at = static_cast<int64_t>(row) * work.n + column;
    there = row < work.m;
  }
};

// What is added to them, loaded before they are there.
template <class E>
__device__ float2 addend_of_sums(const FewRows<E>& work, int tile) {
  const SumPlace<E> place(work, tile);
  float bias[2] = {}, c[2] = {};
  if (place.there && work.bias) Packed<E, 2>::load(work.bias + place.column).to_floats(bias);
  if (place.there && work.add) Packed<E, 2>::load(work.c + place.at).to_floats(c);
  return {bias[0] + c[0], bias[1] + c[1]};
}

template <class E>
__device__ void store_sums(const FewRows<E>& work, int tile, float2 x) {
  const SumPlace<E> place(work, tile);
  const bool gated = work.gate == Gate::pairs;
  with_activation(work.activation, [&](auto kind) {
    x.x = activate<decltype(kind)::value, E>(x.x);
    if (!gated) x.y = activate<decltype(kind)::value, E>(x.y);
  });
  if (!place.there) return;
  if (gated)
    work.c[place.at / 2] = from_float<E>(x.x * x.y);
  else
    Packed<E, 2>::from_floats({x.x, x.y}).store(work.c + place.at);
}

// Lane 0 gets to know which tile the block has next, or one that there is not. A block that is slower, such as one of
// two that share a multiprocessor, has fewer: dealt evenly, 22016 x 4096 took 37 us, of which most blocks had 29.
template <class E>
__device__ int next_tile(const FewRows<E>& work, int tile) {
  const int grid = static_cast<int>(gridDim.x), tiles = work.n / kTileRows;
  if (work.count == nullptr) return tile + grid;
  // Each block asks once in vain: the last of `tiles` leaves 0.
  return threadIdx.x % 32 == 0 ? grid + static_cast<int>(atomicInc(work.count, tiles - 1)) : 0;
}

// The warp that asks for b: all chunks of the block's tiles.
template <class Storage, class E>
__device__ void ask_for_tiles(const FewRows<E>& work, FewRowsShared& beside, const char* ring) {
  const int steps = work.k / Storage::kStep, tiles = work.n / kTileRows;
  ChunkRing chunks = beside.chunk_ring(work.stages);
  // ask(stage): what comes there, of a tile.
  const auto in_turn = [&](int tile, const auto& ask) {
    chunks.wait_empty();
    if (threadIdx.x % 32 == 0) beside.tiles[chunks.stage] = tile;
    ask(chunks.stage);
    __syncwarp();
    chunks.next();
  };
  for (int tile = blockIdx.x; tile < tiles;) {
    const int next = next_tile(work, tile);
    for (int first = 0; first < steps; first += Storage::kChunkSteps)
      in_turn(tile, [&](int stage) {
        Storage::ask(work, tile, first, min(Storage::kChunkSteps, steps - first),
                     shared_address(ring + stage * Storage::kChunk), chunks.full(stage));
      });
    tile = __shfl_sync(~0u, next, 0);
  }
  grid_wait();
  grid_let_go();
  in_turn(tiles, [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(chunks.full(stage));
  });
}

// The readers: norm(a) as b's storage wishes it. behind_wait(): once all kernels ahead have ended.
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
    const LaidRows<E> laid(work);
    grid_wait();
    behind_wait();
    laid.template lay<Storage>(work, rows, beside);
    named_barrier_wait(1, kFewRowsReaders);
  }
}

// The readers: the block's tiles, each by one warp, by turns. addend: of the first tile.
template <class Storage, class E>
__device__ void multiply_tiles_apart(const FewRows<E>& work, FewRowsShared& beside, const char* ring, char* rows,
                                     float2 addend) {
  static_assert(kMostApartSteps <= Storage::kChunkSteps);
  const int warp = threadIdx.x / 32, steps = work.k / Storage::kStep;
  ChunkRing chunks = beside.chunk_ring(work.stages);
  for (int turn = 0;; ++turn, chunks.next()) {
    chunks.wait_full();  // all warps, whose chunk it is or not: a barrier tells two phases apart, not three
    const int tile = beside.tiles[chunks.stage];
    if (tile * kTileRows >= work.n) return;
    if (turn % kFewRowsWarps == warp) {
      if (turn > 0) addend = addend_of_sums(work, tile);
      const char* const from = ring + chunks.stage * Storage::kChunk;
      float sums[4] = {};
#pragma unroll 3
      for (int at = 0; at < steps; ++at) Storage::add(work, from, rows, at, at, sums);
      store_sums(work, tile, float2{addend.x + sums[0], addend.y + sums[1]});
    }
    chunks.release(chunks.stage);
  }
}

// The same, each by all warps; one of them, by turns, adds up what they have.
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
  for (int turn = 0;; ++turn) {
    const bool adds_up = turn % kFewRowsWarps == warp;
    int tile;
    float sums[4] = {};
    for (int first = 0; first < steps; first += Storage::kChunkSteps) {
      chunks.wait_full();
      if (first == 0) {
        tile = beside.tiles[chunks.stage];
        if (tile * kTileRows >= work.n) return;
        if (adds_up && turn > 0) addend = addend_of_sums(work, tile);
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

template <class E, class Storage>
__global__ void __launch_bounds__(kFewRowsThreads, 2) few_rows_kernel(const __grid_constant__ FewRows<E> work) {
#ifdef FTBERT_WGMMA
  extern __shared__ __align__(128) char shared[];
  __shared__ FewRowsShared beside;
  const bool apart = multiplies_apart<Storage>(work);
  beside.begin(work.stages);
  if (threadIdx.x / 32 == kFewRowsWarps) return ask_for_tiles<Storage>(work, beside, shared);
  char* const rows = shared + work.stages * Storage::kChunk;
  float2 addend;
  bring_rows<Storage>(work, beside, rows, [&] {
    if (Storage::kLetsGoAtOnce) grid_let_go();
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
