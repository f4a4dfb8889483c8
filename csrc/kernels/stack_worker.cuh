// What the phases of layer_stack_kernel share: its arguments, a block's shared memory, and the barrier between phases.
//
// A block has one thread that asks for weights, far ahead of the others and across phases; a warp that waits for the
// other blocks; and 512 workers that do all else. What the workers of one phase write, those of the next read from the
// L2 cache: by ordinary loads, or by the accelerator.
#pragma once
#include "kernels/mma.cuh"
#include "kernels/tma.cuh"
#include "kernels/vector.cuh"
#include "kernels/wgmma.cuh"

namespace ftbert {
namespace {

constexpr int kStackCluster = 4;  // blocks of a cluster: they share rows, or the sum over k
constexpr int kStackGroups = 4, kStackWarps = 4 * kStackGroups, kWorkers = 32 * kStackWarps;
constexpr int kWeightWarp = kStackWarps, kWaitingWarp = kStackWarps + 1, kStackThreads = kWorkers + 2 * 32;
constexpr int kStep = 64;                    // a row of a stage: 64 elements, 128 bytes
constexpr int kTileColumns = 64;             // of a result: the rows of a weight that a unit reads
constexpr int kStageBytes = 64 * kStep * 2;  // 64 rows of a weight
constexpr int kMostTileRows = 64, kMostSteps = 16, kMostTileK = kMostSteps * kStep;
constexpr int kMostBoxes = 4;  // kStackCluster at least
constexpr int kMostStackLayers = 24;
constexpr int kMostKeyParts = 8;

// Floats of one row of a warp's share of an attention result; 16 rows, then their largest scores and their sums.
template <int kHeadSize>
constexpr int kShareStride = kHeadSize + 4;
template <int kHeadSize>
constexpr int kShareFloats = 16 * kShareStride<kHeadSize> + 32;

enum StackProduct { kQkv, kOut, kUp, kDown, kStackProducts };

// How a product is cut: a unit is the work of one block, at most: `rows` tokens by 64 columns over `steps` times 64 of
// k, which its four warpgroups divide once more. The units of one tile, which divide its k, come first, then those of
// the next columns, then of the next rows.
struct Tiling {
  int rows;     // 8, 16, 24, 32, 48 or 64
  int split;    // units that divide a tile's k, in one cluster
  int shared;   // blocks of a cluster that read the same rows
  int columns;  // tiles beside each other: n / 64
  int units;
  int steps;

  // The rows come in boxes of some chunks of 64 columns; the last box may have more than the unit needs. Many rows are
  // worth four boxes with a barrier each: the product starts with the first. Few come in one box from each block that
  // shares them, and all at once.
  __host__ __device__ bool by_box() const { return rows >= 48; }
  __host__ __device__ int most_boxes() const { return by_box() ? kMostBoxes : shared; }
  __host__ __device__ int chunks() const { return (steps + most_boxes() - 1) / most_boxes(); }
  __host__ __device__ int boxes() const { return (steps + chunks() - 1) / chunks(); }
  __host__ __device__ int box_bytes() const { return rows * chunks() * kStep * 2; }
  __host__ __device__ int row_bytes() const { return boxes() * box_bytes(); }
  __host__ __device__ int barriers() const { return by_box() ? boxes() : 1; }
};

template <class E>
struct StackPhase {
  Tiling tiling;
  E* out;  // [tokens, n]
  int n;
  bool residual;  // adds rows [tokens, n]; a LayerNorm follows
  Activation activation;
};

// Where a LayerNorm goes before a product, the product does not wait for its moments: what wrote the rows x also wrote
// x * gamma * kHeadroom, and (x - mean) * scale * gamma + beta times a weight is
// scale * (x * gamma times the weight) - mean * scale * slope + add.
template <class E>
struct StackVectors {
  const float* add[kStackProducts];    // [n] the bias, and beta times the weight
  const float* slope[kStackProducts];  // [n] gamma times the weight, or nullptr where no LayerNorm goes before
  const E* gamma[kStackProducts];      // [k] likewise
  const E* beta[kStackProducts];
};
constexpr float kHeadroom = 1.0f / 16;  // exact; gamma may be larger than 1, and x near the largest 16-bit number

// What the phases look up: each block keeps a copy in shared memory. Indexed in the kernel's parameters, every first
// look at a line of them would be a miss of the constant cache.
template <class E>
struct alignas(16) StackPlan {
  StackPhase<E> phases[kStackProducts];
  StackVectors<E> vectors[kMostStackLayers + 1];  // what follows the last layer: the LayerNorm of its result
};

// Sums of squares that are far from zero would cancel: a mean, and the sum of the squares of what differs from it.
struct Moments {
  float mean, squares;
};

template <class E>
struct StackArguments {
  CUtensorMap weights[kMostStackLayers][kStackProducts];  // [n, k] in boxes of [64, kStep]
  CUtensorMap inputs[kStackProducts];                     // [k / kStep, tokens, kStep], in boxes of a block's share
  CUtensorMap first;                                      // of the first product, over `rows`
  StackPlan<E> plan;
  int layer_count, tokens, hidden;
  float eps;
  int heads, sequences, query_tiles;
  int key_parts;           // warps that divide the keys of 16 queries, 16 each: a power of two
  float scale_log2;        // log2(e) / sqrt(head size)
  int work_bytes, stages;  // of the shared memory: for rows and what the workers make of them, and for weights
  const int32_t* cu_seqlens;
  E *rows, *sum, *scaled, *qkv, *context;  // rows: StackInput's hidden
  Moments* moments;                        // [hidden / 64, tokens]: of 64 columns of sum
  uint32_t* arrivals;
};

// Of a tile's 64 columns. gamma: of the LayerNorm before, or else of the one that follows.
template <class E>
struct TileVectors {
  float add[kTileColumns], slope[kTileColumns];
  E gamma[kTileColumns], beta[kTileColumns];
};

// Shared memory: what the workers work on, then stages; sums from the other units of a tile; the rows' scales and
// shifts; a tile's vectors; the plan; barriers. 1024: the swizzle repeats every eight rows of 128 bytes, counted from
// an address of that alignment.
constexpr int kReceivedBytes = kMostTileRows * kTileColumns * 4, kScalesBytes = kMostTileRows * 8;
constexpr int kMostStages = 24, kBarriers = 2 * kMostStages + kMostBoxes + 1;
constexpr int kVectorsBytes = 2 * sizeof(TileVectors<__half>), kPlanBytes = sizeof(StackPlan<__half>);
constexpr int kStackBytes = 227 * 1024;
constexpr int kSmallBytes = kScalesBytes + kVectorsBytes + kPlanBytes + kBarriers * 8;
constexpr int kArenaBytes = (kStackBytes - 1024 - kReceivedBytes - kSmallBytes) / 1024 * 1024;
constexpr int kReceivedAt = kArenaBytes, kScalesAt = kReceivedAt + kReceivedBytes;
constexpr int kVectorsAt = kScalesAt + kScalesBytes, kPlanAt = kVectorsAt + kVectorsBytes;
constexpr int kBarriersAt = kPlanAt + kPlanBytes;
static_assert(1024 + kBarriersAt + 8 * kBarriers <= kStackBytes);
constexpr int kSumStride = kTileColumns + 4;  // floats: of a row of a warpgroup's sums
constexpr int kLeastWorkBytes = kStackWarps * kShareFloats<64> * 4;

// Named barriers: of the workers, or of them and the waiting warp.
enum NamedBarrier { kMeet = 1, kStart, kEnd, kScales };
constexpr int kWithWaiting = kWorkers + 32;

// The unit of this block. Past the last, in its cluster, they have no rows.
struct Unit {
  int part, column, row0;

  __device__ explicit Unit(const Tiling& tiling) {
    const int unit = blockIdx.x, tile = unit / tiling.split;
    part = unit % tiling.split;
    column = tile % tiling.columns;
    row0 = tile / tiling.columns * tiling.rows;
  }
};

// Registers are few: what follows from the value returned is worked out, and loaded, where it is needed, not kept.
__device__ inline int anew(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct Thread {
  int index, warp, lane;

  __device__ Thread() : index(anew(static_cast<int>(threadIdx.x))), warp(index / 32), lane(index % 32) {}
};

template <class E>
struct Block {
  const StackArguments<E>& p;
  char* const memory;
  const int rank = blockIdx.x % kStackCluster;
  int stage = 0;              // where this unit's first weights are, and
  uint32_t stage_parity = 0;  // how often, modulo 2, all stages were filled before it
  uint32_t box_parity = 0;    // a bit for each box: how often it came, modulo 2
  uint32_t units = 0;         // before this one, and
  uint32_t splits = 0;        // those of whose tile it had a part

  __device__ Block(const StackArguments<E>& arguments, char* aligned) : p(arguments), memory(aligned) {}

  __device__ char* work() const { return memory; }
  __device__ float* received() const { return reinterpret_cast<float*>(memory + kReceivedAt); }
  __device__ float2* scales() const { return reinterpret_cast<float2*>(memory + kScalesAt); }
  // Of this unit: some workers may still read those of the one before.
  __device__ TileVectors<E>& vectors() const {
    return reinterpret_cast<TileVectors<E>*>(memory + kVectorsAt)[units % 2];
  }
  __device__ StackPlan<E>& plan() const { return *reinterpret_cast<StackPlan<E>*>(memory + kPlanAt); }
  __device__ uint32_t stage_address(int s) const { return shared_address(memory) + p.work_bytes + s * kStageBytes; }
  __device__ uint32_t barrier(int i) const { return shared_address(memory) + kBarriersAt + 8 * i; }
  __device__ uint32_t full(int s) const { return barrier(s); }
  __device__ uint32_t empty(int s) const { return barrier(kMostStages + s); }
  __device__ uint32_t sums_ready() const { return barrier(2 * kMostStages); }  // received, of all parts of a tile
  __device__ uint32_t box_ready(int box) const { return barrier(2 * kMostStages + 1 + box); }

  // All blocks of a cluster have one, or none.
  __device__ bool has_unit(const Tiling& tiling) const { return static_cast<int>(blockIdx.x) - rank < tiling.units; }

  // One thread.
  __device__ void make_barriers() const {
    for (int s = 0; s < p.stages; ++s) {
      barrier_init(full(s), 1);
      barrier_init(empty(s), 4);  // the four warps that multiplied it
    }
    for (int box = 0; box < kMostBoxes; ++box) barrier_init(box_ready(box), 1);
    barrier_init(sums_ready(), 1);
    barrier_init_fence();
  }

  // All threads.
  __device__ void copy_plan() const {
    auto* from = reinterpret_cast<const uint4*>(&p.plan);
    asm volatile("" : "+l"(from));  // as global memory: the constant cache serves one address of a warp at a time
    auto* to = reinterpret_cast<uint4*>(&plan());
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(StackPlan<E>) / 16); i += kStackThreads) to[i] = from[i];
  }

  // Of the workers.
  __device__ void meet() const { named_barrier_wait(kMeet, kWorkers); }

  // Until all blocks have ended the phase before this one; what they wrote is there.
  __device__ void start_phase() const { named_barrier_wait(kStart, kWithWaiting); }
  __device__ void end_phase() const {
    fence_shared_for_async();  // the accelerator, also another block's, writes where was written
    named_barrier_arrive(kEnd, kWithWaiting);
  }

  // Of the waiting warp, the same. first() is called by one thread, as soon as can be. A relaxed load in the loop would
  // need a fence after it, or another acquiring load, which is one more way to the L2 cache and back.
  template <class First>
  __device__ void let_start(int phase, const First& first) const {
    if (Thread().lane == 0) {
      uint32_t arrived;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(p.arrivals) : "memory");
      } while (arrived < phase * gridDim.x);
      first();
    }
    __syncwarp();
    named_barrier_arrive(kStart, kWithWaiting);
  }
  __device__ void wait_for_end() const {
    named_barrier_wait(kEnd, kWithWaiting);
    if (Thread().lane == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p.arrivals) : "memory");
    __syncwarp();
  }
};

// Written by another block earlier in this kernel: from the L2 cache. Not __ldcg, which does not tell the compiler that
// it reads memory.
__device__ inline uint4 load_written(const uint4* from) {
  uint4 x;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}
__device__ inline uint2 load_written(const uint2* from) {
  uint2 x;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from) : "memory");
  return x;
}
template <int W, class E>
__device__ Packed<E, W> load_written(const E* from) {
  return {load_written(reinterpret_cast<const typename Packed<E, W>::Bits*>(from))};
}

// x over the `lanes` lanes that share it, a power of two.
template <int kLanes>
__device__ float add_lanes(float x, uint32_t who = 0xffffffffu) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(who, x, offset);
  return x;
}

}  // namespace
}  // namespace ftbert
