// Fused attention for 16-bit elements on tensor cores: online softmax over tiles of keys (FlashAttention, Dao 2023),
// laid out for sequences of 16 to 512 tokens.
//
// A CTA of kWarps warps takes 16 * kWarps consecutive queries of one head of one sequence; each warp owns 16 of them
// from scores to output. Key and value tiles come through two shared-memory stages. A CTA is as small as the longest
// sequence allows, warps past the end of a sequence only help to load, and 16-key blocks past it are not multiplied:
// short sequences do not pay for the tile's size.
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

template <int kHeadSize, int kWarps>
constexpr int attention_shared_bytes() {
  return (16 * kWarps + 4 * kTileKeys) * kHeadSize * 2;
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
template <class E, int kHeadSize, int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
    attention_mma(const E* __restrict__ qkv, int64_t first_token, const int32_t* __restrict__ cu_seqlens, int heads,
                  int query_blocks, float scale_log2, E* __restrict__ out) {
  constexpr int kThreads = 32 * kWarps, kQueries = 16 * kWarps, kChunks = kHeadSize / 8;
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

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool active = first_query + warp * 16 < length;
  uint32_t q_fragment[kHeadSize / 16][4];
  float sum[kHeadSize / 8][4] = {};
  float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};

  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<1>();
    __syncthreads();
    if (active) {
      if (tile == 0) {
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d)
          load_matrices(q_fragment[d], swizzled<kHeadSize>(shared_q, warp * 16 + lane % 16, 2 * d + lane / 16));
      }
      const uint32_t keys = shared_k + tile % 2 * kTileBytes, values = shared_v + tile % 2 * kTileBytes;
      const int valid = length - tile * kTileKeys;

      // scores [16, 64]: lane holds rows lane/4 and lane/4 + 8, columns 8j + 2*(lane%4) and the next
      float score[kTileKeys / 8][4];
#pragma unroll
      for (int j = 0; j < kTileKeys / 16; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) score[2 * j][c] = score[2 * j + 1][c] = 0.0f;
        if (j * 16 < valid) {
#pragma unroll
          for (int d = 0; d < kHeadSize / 16; ++d) {
            uint32_t b[4];
            load_matrices(b, swizzled<kHeadSize>(keys, j * 16 + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
            multiply_add<E>(score[2 * j], q_fragment[d], b[0], b[1]);
            multiply_add<E>(score[2 * j + 1], q_fragment[d], b[2], b[3]);
          }
        }
      }
      if (valid < kTileKeys) {
#pragma unroll
        for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            if (j * 8 + lane % 4 * 2 + c % 2 >= valid) score[j][c] = -INFINITY;
      }

      // e^(scale * (score - max)), the sums so far brought to the new maximum
      float tile_max[2] = {row_max[0], row_max[1]};
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) tile_max[c / 2] = fmaxf(tile_max[c / 2], score[j][c]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xffffffff, tile_max[r], 1));
        tile_max[r] = fmaxf(tile_max[r], __shfl_xor_sync(0xffffffff, tile_max[r], 2));
        const float correction = exp2f((row_max[r] - tile_max[r]) * scale_log2);
        row_max[r] = tile_max[r];
        row_sum[r] *= correction;
#pragma unroll
        for (int d = 0; d < kHeadSize / 8; ++d) {
          sum[d][2 * r] *= correction;
          sum[d][2 * r + 1] *= correction;
        }
      }
#pragma unroll
      for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          score[j][c] = exp2f(score[j][c] * scale_log2 - row_max[c / 2] * scale_log2);
          row_sum[c / 2] += score[j][c];
        }
      }

#pragma unroll
      for (int j = 0; j < kTileKeys / 16; ++j) {
        if (j * 16 >= valid) break;
        const uint32_t p[4] = {
            pack_pair<E>(score[2 * j][0], score[2 * j][1]), pack_pair<E>(score[2 * j][2], score[2 * j][3]),
            pack_pair<E>(score[2 * j + 1][0], score[2 * j + 1][1]), pack_pair<E>(score[2 * j + 1][2], score[2 * j + 1][3])};
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d) {
          uint32_t b[4];
          load_matrices_transposed(b, swizzled<kHeadSize>(values, j * 16 + lane % 16, 2 * d + lane / 16));
          multiply_add<E>(sum[2 * d], p, b[0], b[1]);
          multiply_add<E>(sum[2 * d + 1], p, b[2], b[3]);
        }
      }
    }
    __syncthreads();
    load_keys_values(tile + 2);
  }
  copy_async_wait<0>();
  if (!active) return;

  // Through the warp's own query rows in shared memory, so that whole 16-byte chunks are stored.
  char* const rows = shared_memory + (shared_q - shared_address(shared_memory));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] += __shfl_xor_sync(0xffffffff, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(0xffffffff, row_sum[r], 2);
    const float inverse = 1.0f / row_sum[r];
#pragma unroll
    for (int d = 0; d < kHeadSize / 8; ++d) {
      const uint32_t offset = swizzled<kHeadSize>(0, warp * 16 + lane / 4 + 8 * r, d) + lane % 4 * 4;
      *reinterpret_cast<uint32_t*>(rows + offset) = pack_pair<E>(sum[d][2 * r] * inverse, sum[d][2 * r + 1] * inverse);
    }
  }
  __syncwarp();
  E* o = out + (start - first_token + first_query + warp * 16) * hidden + head * kHeadSize;
  const int real = min(16, length - first_query - warp * 16);
  for (int i = lane; i < real * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    *reinterpret_cast<uint4*>(o + row * hidden + chunk * 8) =
        *reinterpret_cast<const uint4*>(rows + swizzled<kHeadSize>(0, warp * 16 + row, chunk));
  }
}

}  // namespace
}  // namespace ftbert
