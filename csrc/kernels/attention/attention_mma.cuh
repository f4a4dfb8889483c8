// Fused attention for 16-bit elements on tensor cores: online softmax over tiles of keys (FlashAttention, Dao 2023),
// laid out for sequences of 16 to 512 tokens.
//
// A CTA of kWarps warps takes 16 * kRowTiles * kWarps consecutive queries of one head of one sequence; each warp owns
// 16 * kRowTiles of them from scores to output. Two row tiles use every key and value fragment twice, one makes twice
// as many CTAs (attention_cuda.cu chooses). Key and value tiles come through two shared-memory stages. For up to 32
// tokens a CTA has as few warps as the longest sequence needs; warps past the end of a sequence only help to load, and
// 16-key blocks past it are not multiplied.
#pragma once
#include "device/wgmma.cuh"
#include "kernels/attention/attention_bias.cuh"
#include "kernels/attention/attention_policy.cuh"

namespace ftbert {
namespace {

// Keys of a tile: of heads above 128 as many as leave room in the 99 KB that every GPU since sm_80 has. sm_75 has
// 64 KB.
FTBERT_HOST_DEVICE constexpr int mma_tile_keys(int head_size, bool ampere) {
  const int keys = head_size > 128 ? kTileKeys / 2 : kTileKeys;
  return ampere || head_size <= 64 ? keys : keys / 2;
}

// Shared memory of a block.
template <int kHeadSize>
constexpr int mma_shared_bytes(int queries, bool ampere) {
  return (queries + 4 * mma_tile_keys(kHeadSize, ampere)) * 16 * kRowChunks<kHeadSize>;
}

// Whether a GPU with warpgroup instructions is ever given the kernel (the registry in attention_cuda.cu): those
// with a bias, and whole sequences of up to 32 keys with heads of up to 64. The others have no body in code for it.
template <int kHeadSize, int kWarps, bool kBias>
constexpr bool kMmaOnHopper = kBias || (kHeadSize <= 64 && kWarps <= 2);

// qkv [tokens, 3*width], out [tokens, width]; grid: query blocks x heads x batch, query blocks fastest. Parameters:
// none, for whole sequences; or WindowParameters, and qkv is q. A bias that depends on q and k would be another
// policy's.
template <class E, int kHeadSize, int kWarps, int kRowTiles, bool kBias, class... Parameters>
__global__ void __launch_bounds__(32 * kWarps)
    attention_mma(const E* __restrict__ qkv, int64_t first_token, const int32_t* __restrict__ cu_seqlens, int heads,
                  int query_blocks, float scale_log2, BiasTables<E> bias, E* __restrict__ out,
                  Parameters... parameters) {
  using Seen = SeenKeys<E, Parameters...>;
  constexpr int kThreads = 32 * kWarps, kRows = 16 * kRowTiles, kQueries = kRows * kWarps;
  constexpr int kKeys = mma_tile_keys(kHeadSize, kAmpere), kPitch = 16 * kRowChunks<kHeadSize>,
                kTileBytes = kKeys * kPitch;
  constexpr bool kHoldsQueries = kHeadSize <= 128;  // in registers
#ifdef FTBERT_WGMMA
  if constexpr (!kMmaOnHopper<kHeadSize, kWarps, kBias>) return __trap();
#endif
  wait_for_inputs();
  const AttentionBlock block(cu_seqlens, heads, query_blocks, kQueries);
  const int length = block.length, first_query = block.first_query;
  if (first_query >= length) return;

  extern __shared__ __align__(128) char shared_memory[];
  const uint32_t shared_q = shared_address(shared_memory);
  const uint32_t shared_k = shared_q + kQueries * kPitch;
  const uint32_t shared_v = shared_k + 2 * kTileBytes;
  const int64_t width = static_cast<int64_t>(heads) * kHeadSize;
  const Seen seen(block, kQueries, kHeadSize, qkv, first_token, width, parameters...);
  const int tiles = (seen.keys + kKeys - 1) / kKeys;

  using Loader = TileLoader<E, kHeadSize, kThreads>;
  const Loader q_loader(seen.q_stride), k_loader(seen.k_stride), v_loader(seen.v_stride);
  const auto load_keys_values = [&](int tile) {
    if (tile < tiles) {
      const int first = tile * kKeys, valid = min(kKeys, seen.keys - first);
      const int rows = (valid + 15) & ~15;  // what the products below read
      const uint32_t stage = tile % 2 * kTileBytes;
      k_loader.template load<kKeys>(shared_k + stage, seen.k + first * seen.k_stride, rows, valid);
      v_loader.template load<kKeys>(shared_v + stage, seen.v + first * seen.v_stride, rows, valid);
    }
    copy_async_commit();
  };
  q_loader.template load<kQueries>(shared_q, seen.q + first_query * seen.q_stride, kQueries, length - first_query);
  load_keys_values(0);
  load_keys_values(1);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * kRows;
  const bool active = first_query + first_row < length;
  const KeyRange of_warp = seen.of(first_query + first_row, first_query + first_row + kRows - 1);
  uint32_t q_fragment[kRowTiles][kHoldsQueries ? kHeadSize / 16 : 1][4];
  const auto load_queries = [&](int i, int d) {
    load_matrices(q_fragment[i][kHoldsQueries ? d : 0],
                  swizzled<kHeadSize>(shared_q, first_row + i * 16 + lane % 16, 2 * d + lane / 16));
  };
  RowSums<kHeadSize> sum[kRowTiles] = {};
  RowState state[kRowTiles];

  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<1>();
    __syncthreads();
    if (active && (Seen::kWhole || of_warp.meets(tile * kKeys, kKeys))) {
      const bool first = tile == of_warp.begin / kKeys;
      if (kHoldsQueries && first) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int d = 0; d < kHeadSize / 16; ++d) load_queries(i, d);
      }
      const uint32_t keys = shared_k + tile % 2 * kTileBytes, values = shared_v + tile % 2 * kTileBytes;
      const int valid = of_warp.end - tile * kKeys;

      float score[kRowTiles][kKeys / 8][4] = {};
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        if (j * 16 >= valid) break;
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d) {
          uint32_t b[4];
          load_matrices(b, swizzled<kHeadSize>(keys, j * 16 + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            if (!kHoldsQueries) load_queries(i, d);
            const auto& q = q_fragment[i][kHoldsQueries ? d : 0];
            multiply_add<E>(score[i][2 * j], q, b[0], b[1]);
            multiply_add<E>(score[i][2 * j + 1], q, b[2], b[3]);
          }
        }
      }
      if (kBias && (Seen::kWhole || bias.table != nullptr)) {
        const HeadBias<E> head_bias(bias, block.head, seen.first_key, seen.tokens());
        const float unscaled = kLog2E / scale_log2;  // the softmax multiplies by the scale
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            // Through WholeSequence::place nvcc makes other code of the same sum.
            int place = first_query + first_row + i * 16 + lane / 4 + 8 * r;
            if constexpr (!Seen::kWhole) place = seen.place(place);
            const int column = head_bias.column(place);
#pragma unroll
            for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
              for (int c = 0; c < 2; ++c)
                score[i][j][2 * r + c] += unscaled * head_bias(tile * kKeys + j * 8 + lane % 4 * 2 + c, column);
          }
      }
      uint32_t p[kRowTiles][kKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        seen.mask(score[i], first_query + first_row + i * 16, tile * kKeys, lane);
        if (first) state[i].template begin<Seen::kWhole>(score[i], scale_log2);
        state[i].template probabilities<E>(score[i], p[i], sum[i], scale_log2);
      }

#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
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
  if (!Seen::kWhole && tiles <= 0) __syncthreads();  // else the first tile has waited for all queries
  if (!active) return;

#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
    stage_rows<E, kHeadSize, Seen::kWhole>(shared_memory, first_row + i * 16, lane, sum[i]);
  __syncwarp();
  store_rows<E, kHeadSize, kRows>(shared_memory, first_row, lane, length - first_query - first_row,
                                  out + (block.start - first_token + first_query) * width + block.head * kHeadSize,
                                  width);
}

}  // namespace
}  // namespace ftbert
