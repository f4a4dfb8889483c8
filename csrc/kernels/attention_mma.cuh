// Fused attention for 16-bit elements on tensor cores: online softmax over tiles of keys (FlashAttention, Dao 2023),
// laid out for sequences of 16 to 512 tokens.
//
// A CTA of kWarps warps takes 16 * kRowTiles * kWarps consecutive queries of one head of one sequence; each warp owns
// 16 * kRowTiles of them from scores to output. Two row tiles use every key and value fragment twice: with one, shared
// memory is the limit (147 us against 101 for 32x512, 12 heads of 64, on an H200). Key and value tiles come through two
// shared-memory stages. A CTA is as small as the longest sequence allows, warps past the end of a sequence only help
// to load, and 16-key blocks past it are not multiplied: short sequences do not pay for the tile's size.
#pragma once
#include "kernels/mma.cuh"
#include "kernels/vector.cuh"

namespace ftbert {
namespace {

constexpr int kTileKeys = 64;

// Rows of kHeadSize 16-bit elements in shared memory. 16-byte chunks are permuted within 128-byte lines, so that the
// eight rows of an 8x8 matrix lie in different banks.
template <int kHeadSize>
__device__ uint32_t swizzled(uint32_t base, int row, int chunk) {
  constexpr int kChunks = kHeadSize / 8;
  const int twist = kChunks >= 8 ? row & 7 : (row >> 1) & (kChunks - 1);
  return base + (row * kChunks + (chunk ^ twist)) * 16;
}

template <int kHeadSize, int kQueries>
constexpr int attention_shared_bytes() {
  return (kQueries + 4 * kTileKeys) * kHeadSize * 2;
}

// Rows [0, rows) of a tile, `valid` of them real and the rest zero; 16 bytes a thread, neighbours side by side.
template <class E, int kHeadSize, int kThreads>
__device__ void load_tile(uint32_t shared, const E* global, int64_t stride, int rows, int valid) {
  constexpr int kChunks = kHeadSize / 8;
  for (int i = threadIdx.x; i < rows * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool real = row < valid;
    copy_async16(swizzled<kHeadSize>(shared, row, chunk), global + (real ? row * stride + chunk * 8 : 0), real);
  }
}

// qkv [tokens, 3*hidden], out [tokens, hidden]; grid: query blocks x heads x batch, query blocks fastest.
template <class E, int kHeadSize, int kWarps, int kRowTiles>
__global__ void __launch_bounds__(32 * kWarps)
    attention_mma(const E* __restrict__ qkv, int64_t first_token, const int32_t* __restrict__ cu_seqlens, int heads,
                  int query_blocks, float scale_log2, E* __restrict__ out) {
  constexpr int kThreads = 32 * kWarps, kRows = 16 * kRowTiles, kQueries = kRows * kWarps, kChunks = kHeadSize / 8;
  constexpr int kTileBytes = kTileKeys * kHeadSize * 2;
  const int query_block = blockIdx.x % query_blocks;
  const int head = blockIdx.x / query_blocks % heads;
  const int sequence = blockIdx.x / query_blocks / heads;
  const int start = cu_seqlens[sequence], length = cu_seqlens[sequence + 1] - start;
  const int first_query = query_block * kQueries;
  if (first_query >= length) return;

  extern __shared__ __align__(128) char shared_memory[];
  const uint32_t shared_q = shared_address(shared_memory);
  const uint32_t shared_k = shared_q + kQueries * kHeadSize * 2;
  const uint32_t shared_v = shared_k + 2 * kTileBytes;
  const int64_t hidden = static_cast<int64_t>(heads) * kHeadSize, stride = 3 * hidden;
  const E* q = qkv + (start - first_token) * stride + head * kHeadSize;
  const E *k = q + hidden, *v = k + hidden;
  const int tiles = (length + kTileKeys - 1) / kTileKeys;

  const auto load_keys_values = [&](int tile) {
    if (tile < tiles) {
      const int first = tile * kTileKeys, valid = min(kTileKeys, length - first);
      const int rows = (valid + 15) & ~15;  // what the products below read
      load_tile<E, kHeadSize, kThreads>(shared_k + tile % 2 * kTileBytes, k + first * stride, stride, rows, valid);
      load_tile<E, kHeadSize, kThreads>(shared_v + tile % 2 * kTileBytes, v + first * stride, stride, rows, valid);
    }
    copy_async_commit();
  };
  load_tile<E, kHeadSize, kThreads>(shared_q, q + first_query * stride, stride, kQueries,
                                    min(kQueries, length - first_query));
  load_keys_values(0);
  load_keys_values(1);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * kRows;
  const bool active = first_query + first_row < length;
  uint32_t q_fragment[kRowTiles][kHeadSize / 16][4];
  float sum[kRowTiles][kHeadSize / 8][4] = {};
  // Of rows lane/4 and lane/4 + 8 of each row tile.
  float row_max[kRowTiles][2], row_sum[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    row_max[i][0] = row_max[i][1] = -INFINITY;
    row_sum[i][0] = row_sum[i][1] = 0.0f;
  }

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

      // scores [rows, 64]: lane holds rows lane/4 and lane/4 + 8, columns 8j + 2*(lane%4) and the next
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
      if (valid < kTileKeys) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c)
              if (j * 8 + lane % 4 * 2 + c % 2 >= valid) score[i][j][c] = -INFINITY;
      }

      // e^(scale * (score - max)), the sums so far brought to the new maximum
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        float scaled_max[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float most = row_max[i][r];
#pragma unroll
          for (int j = 0; j < kTileKeys / 8; ++j) most = fmaxf(most, fmaxf(score[i][j][2 * r], score[i][j][2 * r + 1]));
          most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
          most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2));
          scaled_max[r] = most * scale_log2;
          const float correction = fast_exp2(row_max[i][r] * scale_log2 - scaled_max[r]);
          row_max[i][r] = most;
          row_sum[i][r] *= correction;
#pragma unroll
          for (int d = 0; d < kHeadSize / 8; ++d) {
            sum[i][d][2 * r] *= correction;
            sum[i][d][2 * r + 1] *= correction;
          }
        }
#pragma unroll
        for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            score[i][j][c] = fast_exp2(score[i][j][c] * scale_log2 - scaled_max[c / 2]);
            row_sum[i][c / 2] += score[i][j][c];
          }
        }
      }

#pragma unroll
      for (int j = 0; j < kTileKeys / 16; ++j) {
        if (j * 16 >= valid) break;
        uint32_t p[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            p[i][c] = pack_pair<E>(score[i][2 * j + c / 2][c % 2 * 2], score[i][2 * j + c / 2][c % 2 * 2 + 1]);
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d) {
          uint32_t b[4];
          load_matrices_transposed(b, swizzled<kHeadSize>(values, j * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            multiply_add<E>(sum[i][2 * d], p[i], b[0], b[1]);
            multiply_add<E>(sum[i][2 * d + 1], p[i], b[2], b[3]);
          }
        }
      }
    }
    __syncthreads();
    load_keys_values(tile + 2);
  }
  copy_async_wait<0>();
  if (!active) return;

  // Through the warp's own query rows in shared memory, so that whole 16-byte chunks are stored.
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[i][r] += __shfl_xor_sync(0xffffffff, row_sum[i][r], 1);
      row_sum[i][r] += __shfl_xor_sync(0xffffffff, row_sum[i][r], 2);
      const float inverse = 1.0f / row_sum[i][r];
#pragma unroll
      for (int d = 0; d < kHeadSize / 8; ++d) {
        const uint32_t offset = swizzled<kHeadSize>(0, first_row + i * 16 + lane / 4 + 8 * r, d) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(shared_memory + offset) =
            pack_pair<E>(sum[i][d][2 * r] * inverse, sum[i][d][2 * r + 1] * inverse);
      }
    }
  }
  __syncwarp();
  E* o = out + (start - first_token + first_query + first_row) * hidden + head * kHeadSize;
  const int real = min(kRows, length - first_query - first_row);
  for (int i = lane; i < real * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    *reinterpret_cast<uint4*>(o + row * hidden + chunk * 8) =
        *reinterpret_cast<const uint4*>(shared_memory + swizzled<kHeadSize>(0, first_row + row, chunk));
  }
}

}  // namespace
}  // namespace ftbert
