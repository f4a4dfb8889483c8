// Fused attention on Hopper for sequences of at most 128 tokens with heads of 32 or 64: all of a query's scores are in
// registers at once, so their maximum is known before the first power and nothing is ever brought to another. A block
// is one warpgroup with 64 queries. The kernel is mostly waiting, for its sequence's offsets, then for its tiles: what
// counts is how many blocks a multiprocessor has room for.
#pragma once
#include "device/tma.cuh"
#include "device/wgmma.cuh"
#include "kernels/attention/attention_tile.cuh"

namespace ftbert {
namespace {

// kTiles: of 64 keys, of the longest sequence.
template <int kHeadSize_, int kTiles_>
struct ShortAttention {
  static constexpr int kHeadSize = kHeadSize_, kBox = kHeadSize, kTiles = kTiles_, kThreads = 128, kQueries = 64;
  static constexpr int kBlocks = kTiles == 1 ? 6 : 5;           // that registers and shared memory have room for
  static constexpr int kTileBytes = kTileKeys * kHeadSize * 2;  // as many for 64 queries
  static constexpr int kOnesBytes = 16 * kHeadSize * 2;         // of 16 rows
  // Queries, keys, values, ones, barriers. 1024: the swizzle repeats every eight rows of 128 bytes, counted from an
  // address of that alignment.
  static constexpr int kBytes = 1024 + (1 + 2 * kTiles) * kTileBytes + kOnesBytes + 16;
  static_assert(kTiles <= 2 && kOnesBytes <= 16 * kThreads);
};

// map: of qkv [tokens, 3*width] in boxes of [64, head size]; out [tokens, width]; grid: query blocks x heads x batch,
// query blocks fastest.
// Out: nothing, or E4m3Rows in the place of out.
template <class E, class Shape, class... Out>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_short(const __grid_constant__ CUtensorMap map, int64_t first_token,
                    const int32_t* __restrict__ cu_seqlens, OffsetReads offset_reads, int heads, int query_blocks,
                    float scale_log2, E* __restrict__ out, Out... e4m3) {
#ifdef FTBERT_WGMMA
  constexpr int kHeadSize = Shape::kHeadSize, kRowBytes = kHeadSize * 2, kTileBytes = Shape::kTileBytes;
  constexpr int kKeys = Shape::kTiles * kTileKeys;
  extern __shared__ char unaligned_memory[];
  const uint32_t unaligned = shared_address(unaligned_memory);
  const uint32_t shared_q = (unaligned + 1023) / 1024 * 1024, shared_k = shared_q + kTileBytes;
  const uint32_t shared_v = shared_k + Shape::kTiles * kTileBytes, shared_ones = shared_v + Shape::kTiles * kTileBytes;
  const uint32_t scores_in = shared_ones + Shape::kOnesBytes, values_in = scores_in + 8;
  char* const memory = unaligned_memory + (shared_q - unaligned);
  if (threadIdx.x == 0) {
    prefetch_map(map);
    barrier_init(scores_in, 1);
    barrier_init(values_in, 1);
    barrier_init_fence();
  }
  if (threadIdx.x < Shape::kOnesBytes / 16)
    reinterpret_cast<uint4*>(memory + (shared_ones - shared_q))[threadIdx.x] = {kOnes<E>, kOnes<E>, kOnes<E>, kOnes<E>};
  fence_shared_for_async();
  const auto block = AttentionBlock::after_wait(cu_seqlens, offset_reads, heads, query_blocks, Shape::kQueries);
  if (block.first_query >= block.length) return;

  const int64_t width = static_cast<int64_t>(heads) * kHeadSize;
  const int tiles = Shape::kTiles == 2 && block.length > kTileKeys ? 2 : 1;
  if (threadIdx.x == 0) {
    const int row = static_cast<int>(block.start - first_token), column = block.head * kHeadSize;
    const auto load = [&](uint32_t to, int which, int from, uint32_t barrier) {
      tma_load(to, map, column + which * static_cast<int>(width), from, barrier);
    };
    barrier_expect(scores_in, (1 + tiles) * kTileBytes);
    load(shared_q, 0, row + block.first_query, scores_in);
    load(shared_k, 1, row, scores_in);
    if (tiles == 2) load(shared_k + kTileBytes, 1, row + kTileKeys, scores_in);
    barrier_expect(values_in, tiles * kTileBytes);
    load(shared_v, 2, row, values_in);
    if (tiles == 2) load(shared_v + kTileBytes, 2, row + kTileKeys, values_in);
  }
  __syncthreads();

  const uint64_t queries = matrix_descriptor<kRowBytes>(shared_q), keys = matrix_descriptor<kRowBytes>(shared_k);
  float score[kKeys / 8][4];
  barrier_wait(scores_in, 0);
  warpgroup_fence();
#pragma unroll
  for (int d = 0; d < kHeadSize / 16; ++d)  // also with keys that are not there: those scores are masked
    warpgroup_multiply_nt<E>(score, queries + d * 2, keys + d * 2, d > 0);
  warpgroup_commit();
  warpgroup_wait();
  warpgroup_keep(score);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  mask_scores(score, block.length, lane);
  RowState state;
  uint32_t p[kKeys / 16][4];
  state.begin(score, scale_log2);
  state.template powers<E>(score, p, scale_log2);

  barrier_wait(values_in, 0);
  if (block.length < tiles * kTileKeys) {
    // Past the end lies another sequence, or nothing yet: a weight of zero would make a NaN of its infinity.
#pragma unroll 1
    for (int i = block.length * kRowBytes + 16 * threadIdx.x; i < tiles * kTileBytes; i += 16 * Shape::kThreads)
      *reinterpret_cast<uint4*>(memory + (shared_v - shared_q) + i) = uint4{};
    fence_shared_for_async();
  }
  __syncthreads();
  RowSums<kHeadSize> sum = {};
  const auto add_values = [&](auto tile) {
    constexpr int kFirst = decltype(tile)::value * kTileKeys / 16;
    warpgroup_fence();
#pragma unroll
    for (int j = kFirst; j < kFirst + kTileKeys / 16; ++j) {  // 16 keys
      const uint32_t values = shared_v + 16 * j * kRowBytes;
      warpgroup_multiply_add<E, 1>(sum, p[j], matrix_descriptor<kRowBytes>(values, shared_ones - values));
    }
    warpgroup_commit();
  };
  add_values(std::integral_constant<int, 0>());
  if constexpr (Shape::kTiles == 2)
    if (tiles == 2) add_values(std::integral_constant<int, 1>());
  warpgroup_wait();
  warpgroup_keep(sum);

  // All warps have passed the barrier above since they waited for their scores: nobody reads the queries any more.
  const int real = block.length - block.first_query;
  const int64_t first = (block.start - first_token + block.first_query) * width + block.head * kHeadSize;
  out += first;
  stage_rows<E, kHeadSize>(memory, warp * 16, lane, sum);
  __syncwarp();
  store_rows<E, kHeadSize, 16>(memory, warp * 16, lane, real - warp * 16, out, width, e4m3.from(first)...);
#else
  no_warpgroups();
#endif
}

}  // namespace
}  // namespace ftbert
