// Fused attention for 16-bit elements on tensor cores: online softmax over tiles of keys (FlashAttention, Dao 2023),
// laid out for sequences of 16 to 512 tokens.
//
// A CTA of kWarps warps takes 16 * kRowTiles * kWarps consecutive queries of one head of one sequence; each warp owns
// 16 * kRowTiles of them from scores to output. Two row tiles use every key and value fragment twice: with one, shared
// memory is the limit (147 us against 127 for 32x512, 12 heads of 64, on an H200). Key and value tiles come through two
// shared-memory stages. A CTA is as small as the longest sequence allows, warps past the end of a sequence only help
// to load, and 16-key blocks past it are not multiplied: short sequences do not pay for the tile's size.
#pragma once
#include "kernels/attention/attention_bias.cuh"
#include "kernels/attention/attention_tile.cuh"

namespace ftbert {
namespace {

template <int kHeadSize, int kQueries>
constexpr int attention_shared_bytes() {
  return (kQueries + 4 * kTileKeys) * kHeadSize * 2;
}

// qkv [tokens, 3*hidden], out [tokens, hidden]; grid: query blocks x heads x batch, query blocks fastest.
template <class E, int kHeadSize, int kWarps, int kRowTiles, bool kBias>
__global__ void __launch_bounds__(32 * kWarps)
    attention_mma(const E* __restrict__ qkv, int64_t first_token, const int32_t* __restrict__ cu_seqlens, int heads,
                  int query_blocks, float scale_log2, BiasTables<E> bias, E* __restrict__ out) {
  constexpr int kThreads = 32 * kWarps, kRows = 16 * kRowTiles, kQueries = kRows * kWarps;
  constexpr int kTileBytes = kTileKeys * kHeadSize * 2;
  wait_for_inputs();
  const AttentionBlock block(cu_seqlens, heads, query_blocks, kQueries);
  const int length = block.length, first_query = block.first_query;
  if (first_query >= length) return;

  extern __shared__ __align__(128) char shared_memory[];
  const uint32_t shared_q = shared_address(shared_memory);
  const uint32_t shared_k = shared_q + kQueries * kHeadSize * 2;
  const uint32_t shared_v = shared_k + 2 * kTileBytes;
  const int64_t hidden = static_cast<int64_t>(heads) * kHeadSize, stride = 3 * hidden;
  const E* q = qkv + (block.start - first_token) * stride + block.head * kHeadSize;
  const E *k = q + hidden, *v = k + hidden;
  const int tiles = (length + kTileKeys - 1) / kTileKeys;

  const TileLoader<E, kHeadSize, kThreads> loader(stride);
  const auto load_keys_values = [&](int tile) {
    if (tile < tiles) {
      const int first = tile * kTileKeys, valid = min(kTileKeys, length - first);
      const int rows = (valid + 15) & ~15;  // what the products below read
      const uint32_t stage = tile % 2 * kTileBytes;
      loader.template load<kTileKeys>(shared_k + stage, k + first * stride, rows, valid);
      loader.template load<kTileKeys>(shared_v + stage, v + first * stride, rows, valid);
    }
    copy_async_commit();
  };
  loader.template load<kQueries>(shared_q, q + first_query * stride, kQueries, length - first_query);
  load_keys_values(0);
  load_keys_values(1);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * kRows;
  const bool active = first_query + first_row < length;
  uint32_t q_fragment[kRowTiles][kHeadSize / 16][4];
  RowSums<kHeadSize> sum[kRowTiles] = {};
  RowState state[kRowTiles];

  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<1>();
    __syncthreads();
    if (active) {
      if (tile == 0) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int d = 0; d < kHeadSize / 16; ++d)
            load_matrices(q_fragment[i][d],
                          swizzled<kHeadSize>(shared_q, first_row + i * 16 + lane % 16, 2 * d + lane / 16));
      }
      const uint32_t keys = shared_k + tile % 2 * kTileBytes, values = shared_v + tile % 2 * kTileBytes;
      const int valid = length - tile * kTileKeys;

      float score[kRowTiles][kTileKeys / 8][4] = {};
#pragma unroll
      for (int j = 0; j < kTileKeys / 16; ++j) {
        if (j * 16 >= valid) break;
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d) {
          uint32_t b[4];
          load_matrices(b, swizzled<kHeadSize>(keys, j * 16 + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            multiply_add<E>(score[i][2 * j], q_fragment[i][d], b[0], b[1]);
            multiply_add<E>(score[i][2 * j + 1], q_fragment[i][d], b[2], b[3]);
          }
        }
      }
      if constexpr (kBias) {
        const HeadBias<E> head_bias(bias, block.head, block.start, length);
        const float unscaled = kLog2E / scale_log2;  // the softmax multiplies by the scale
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int column = head_bias.column(first_query + first_row + i * 16 + lane / 4 + 8 * r);
#pragma unroll
            for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
              for (int c = 0; c < 2; ++c)
                score[i][j][2 * r + c] += unscaled * head_bias(tile * kTileKeys + j * 8 + lane % 4 * 2 + c, column);
          }
      }
      uint32_t p[kRowTiles][kTileKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mask_scores(score[i], valid, lane);
        if (tile == 0) state[i].begin(score[i], scale_log2);
        state[i].template probabilities<E>(score[i], p[i], sum[i], scale_log2);
      }

#pragma unroll
      for (int j = 0; j < kTileKeys / 16; ++j) {
        if (j * 16 >= valid) break;
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d) {
          uint32_t b[4];
          load_matrices_transposed(b, swizzled<kHeadSize>(values, j * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            multiply_add<E>(sum[i][2 * d], p[i][j], b[0], b[1]);
            multiply_add<E>(sum[i][2 * d + 1], p[i][j], b[2], b[3]);
          }
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) multiply_add<E>(sum[i][kHeadSize / 8], p[i][j], kOnes<E>, kOnes<E>);
      }
    }
    __syncthreads();
    load_keys_values(tile + 2);
  }
  copy_async_wait<0>();
  if (!active) return;

#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) stage_rows<E, kHeadSize>(shared_memory, first_row + i * 16, lane, sum[i]);
  __syncwarp();
  store_rows<E, kHeadSize, kRows>(shared_memory, first_row, lane, length - first_query - first_row,
                                  out + (block.start - first_token + first_query) * hidden + block.head * kHeadSize,
                                  hidden);
}

}  // namespace
}  // namespace ftbert
