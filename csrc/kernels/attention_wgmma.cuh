// Fused attention on Hopper's warpgroup instructions, for sequences of more than 32 tokens and heads of 32 or 64.
//
// The same algorithm and shared-memory layout as attention_mma.cuh, but a warpgroup owns 64 queries: scores and
// output take 32 registers each instead of 128, nothing passes through ldmatrix, and four warpgroups share a
// multiprocessor, so that one's softmax runs under another's products.
#pragma once
#include "kernels/attention_tile.cuh"
#include "kernels/wgmma.cuh"

namespace ftbert {
namespace {

// 1024: the swizzle pattern repeats every eight rows of 128 bytes, counted from an address of that alignment.
template <int kHeadSize, int kGroups>
constexpr int attention_wgmma_shared_bytes() {
  return (64 * kGroups + 4 * kTileKeys) * kHeadSize * 2 + 1024;
}

// qkv [tokens, 3*hidden], out [tokens, hidden]; grid: query blocks x heads x batch, query blocks fastest.
template <class E, int kHeadSize, int kGroups>
__global__ void __launch_bounds__(128 * kGroups, 4 / kGroups)
    attention_wgmma(const E* __restrict__ qkv, int64_t first_token, const int32_t* __restrict__ cu_seqlens, int heads,
                    int query_blocks, float scale_log2, E* __restrict__ out) {
#ifdef FTBERT_WGMMA
  constexpr int kThreads = 128 * kGroups, kQueries = 64 * kGroups, kRowBytes = kHeadSize * 2;
  constexpr int kTileBytes = kTileKeys * kRowBytes;
  wait_for_inputs();
  const AttentionBlock block(cu_seqlens, heads, query_blocks, kQueries);
  if (block.first_query >= block.length) return;

  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  const uint32_t shared_q = shared_address(memory);
  const uint32_t shared_k = shared_q + kQueries * kRowBytes;
  const uint32_t shared_v = shared_k + 2 * kTileBytes;
  const int64_t hidden = static_cast<int64_t>(heads) * kHeadSize, stride = 3 * hidden;
  const E* q = qkv + (block.start - first_token) * stride + block.head * kHeadSize;
  const E *k = q + hidden, *v = k + hidden;
  const int tiles = (block.length + kTileKeys - 1) / kTileKeys;

  const TileLoader<E, kHeadSize, kThreads> loader(stride);
  const auto load_keys_values = [&](int tile) {
    if (tile < tiles) {
      const int first = tile * kTileKeys, valid = min(kTileKeys, block.length - first);
      const uint32_t stage = tile % 2 * kTileBytes;
      loader.template load<kTileKeys>(shared_k + stage, k + first * stride, kTileKeys, valid);
      loader.template load<kTileKeys>(shared_v + stage, v + first * stride, kTileKeys, valid);
    }
    copy_async_commit();
  };
  loader.template load<kQueries>(shared_q, q + block.first_query * stride, kQueries, block.length - block.first_query);
  load_keys_values(0);
  load_keys_values(1);

  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool active = block.first_query + group * 64 < block.length;
  float sum[kHeadSize / 8][4] = {};
  RowState state;

  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<1>();
    fence_shared_for_async();
    __syncthreads();
    if (active) {
      const uint32_t keys = shared_k + tile % 2 * kTileBytes, values = shared_v + tile % 2 * kTileBytes;
      float score[kTileKeys / 8][4];
      warpgroup_fence();
#pragma unroll
      for (int d = 0; d < kHeadSize / 16; ++d)
        warpgroup_multiply_nt<E>(score, matrix_descriptor<kRowBytes>(shared_q + group * 64 * kRowBytes + d * 32),
                                 matrix_descriptor<kRowBytes>(keys + d * 32), d > 0);
      warpgroup_commit();
      warpgroup_wait();

      mask_scores(score, block.length - tile * kTileKeys, lane);
      state.update(score, sum, scale_log2);

      uint32_t p[kTileKeys / 16][4];
#pragma unroll
      for (int j = 0; j < kTileKeys / 16; ++j) pack_probabilities<E>(score, j, p[j]);
      warpgroup_fence();
#pragma unroll
      for (int j = 0; j < kTileKeys / 16; ++j)
        warpgroup_multiply_add_nn<E>(sum, p[j], matrix_descriptor<kRowBytes>(values + j * 16 * kRowBytes));
      warpgroup_commit();
      warpgroup_wait();
    }
    __syncthreads();
    load_keys_values(tile + 2);
  }
  copy_async_wait<0>();
  if (!active) return;

  stage_rows<E, kHeadSize>(memory, warp * 16, lane, sum, state);
  __syncwarp();
  store_rows<E, kHeadSize, 16>(memory, warp * 16, lane, block.length - block.first_query - warp * 16,
                               out + (block.start - first_token + block.first_query) * hidden + block.head * kHeadSize,
                               hidden);
#endif
}

}  // namespace
}  // namespace ftbert
