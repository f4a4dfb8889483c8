// Fused attention for 16-bit elements by mma.sync, for GPUs without warpgroup instructions, and on all for a relative
// bias: online softmax over tiles of keys (FlashAttention, Dao 2023).
//
// A CTA of kWarps warps takes 16 * kRowTiles * kWarps consecutive queries of one head of one sequence; each warp owns
// 16 * kRowTiles of them from scores to output. Two row tiles use every key and value fragment twice, one makes twice
// as many CTAs (attention_cuda.cu chooses). For up to 32 tokens a CTA has as few warps as the longest sequence needs;
// warps past the end of a sequence only help to load.
//
// A tile of keys is multiplied whole or by its first half: the last tile may have no more. Both are loops of constant
// length, so the compiler moves loads of fragments ahead of products. Scores are made a slice of the head's dimension
// after another, for all of the tile's keys: neighbouring products then have sums of their own and wait for none.
// Queries are read again for each tile, since registers are better spent on more warps.
#pragma once
#include "device/wgmma.cuh"
#include "kernels/attention/attention_bias.cuh"
#include "kernels/attention/attention_policy.cuh"

namespace ftbert {
namespace {

template <int kHeadSize, int kWarps, int kRowTiles>
struct MmaShape {
  static constexpr int kRows = 16 * kRowTiles, kQueries = kRows * kWarps;
  static constexpr int kKeys = kHeadSize > 128 || kWarps < 4 ? 32 : 64;  // of a tile
  // Tiles of keys and of values in shared memory. Two of each: the next ones come while these are multiplied. One of
  // each: the next keys come while the values are multiplied, and the next values while the keys are. All then fits
  // into 64 KB, the shared memory of sm_75.
  static constexpr int kStages = kHeadSize <= 64 ? 2 : 1;
  static constexpr int kPitch = 16 * kRowChunks<kHeadSize>, kTileBytes = kKeys * kPitch;
  static constexpr int kBytes = kQueries * kPitch + 2 * kStages * kTileBytes;
  static_assert(kBytes <= 64 << 10);
};

// Blocks that a multiprocessor's registers have room for.
constexpr int mma_blocks(int head_size, int row_tiles, bool bias) {
  if (row_tiles > 1) return head_size == 32 ? 3 : 2;
  return (head_size <= 64 ? 4 : head_size <= 128 ? 3 : 2) - (bias && head_size <= 128);
}

// Whether a GPU with warpgroup instructions is ever given the kernel (the registry in attention_cuda.cu): those
// with a bias, and whole sequences of up to 32 keys with heads of up to 64. The others have no body in code for it.
template <int kHeadSize, int kWarps, bool kBias>
constexpr bool kMmaOnHopper = kBias || (kHeadSize <= 64 && kWarps <= 2);

// qkv [tokens, 3*width], out [tokens, width]; grid: query blocks x heads x batch, query blocks fastest. Parameters:
// none, for whole sequences; or WindowParameters, and qkv is q. A bias that depends on q and k would be another
// policy's.
template <class E, int kHeadSize, int kWarps, int kRowTiles, bool kBias, class... Parameters>
__global__ void __launch_bounds__(32 * kWarps, mma_blocks(kHeadSize, kRowTiles, kBias))
    attention_mma(const E* __restrict__ qkv, int64_t first_token, const int32_t* __restrict__ cu_seqlens, int heads,
                  int query_blocks, float scale_log2, BiasTables<E> bias, E* __restrict__ out,
                  Parameters... parameters) {
  using Seen = SeenKeys<E, Parameters...>;
  using Shape = MmaShape<kHeadSize, kWarps, kRowTiles>;
  constexpr int kThreads = 32 * kWarps, kRows = Shape::kRows, kQueries = Shape::kQueries, kKeys = Shape::kKeys;
  constexpr int kStages = Shape::kStages, kTileBytes = Shape::kTileBytes;
#ifdef FTBERT_WGMMA
  if constexpr (!kMmaOnHopper<kHeadSize, kWarps, kBias>) return __trap();
#endif
  wait_for_inputs();
  AttentionBlock block(cu_seqlens, heads, query_blocks, kQueries);
  // Under a causal mask the last queries have the most keys: they begin first.
  if (!Seen::kWhole) block.first_query = (query_blocks - 1) * kQueries - block.first_query;
  const int length = block.length, first_query = block.first_query;
  if (first_query >= length) return;

  extern __shared__ __align__(512) char shared_memory[];
  const uint32_t shared_q = shared_address(shared_memory);
  const uint32_t shared_k = shared_q + kQueries * Shape::kPitch;
  const uint32_t shared_v = shared_k + kStages * kTileBytes;
  const int64_t width = static_cast<int64_t>(heads) * kHeadSize;
  const Seen seen(block, kQueries, kHeadSize, qkv, first_token, width, parameters...);
  const int tiles = (seen.keys + kKeys - 1) / kKeys;

  using Loader = TileLoader<E, kHeadSize, kThreads>;
  const Loader q_loader(seen.q_stride), k_loader(seen.k_stride), v_loader(seen.v_stride);
  const auto load = [&](const Loader& loader, uint32_t to, const E* from, int64_t stride, int tile) {
    if (tile >= tiles) return;
    const int first = tile * kKeys, valid = min(kKeys, seen.keys - first);
    const int rows = valid > kKeys / 2 ? kKeys : kKeys / 2;  // that are multiplied
    loader.template load<kKeys>(to + tile % kStages * kTileBytes, from + first * stride, rows, valid);
  };
  const auto load_keys = [&](int tile) { load(k_loader, shared_k, seen.k, seen.k_stride, tile); };
  const auto load_values = [&](int tile) { load(v_loader, shared_v, seen.v, seen.v_stride, tile); };
  q_loader.template load<kQueries>(shared_q, seen.q + first_query * seen.q_stride, kQueries, length - first_query);
  load_keys(0);
  if (kStages > 1) load_values(0);
  copy_async_commit();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * kRows;
  const bool active = first_query + first_row < length;
  const KeyRange of_warp = seen.of(first_query + first_row, first_query + first_row + kRows - 1);
  // Where this lane's rows of fragments begin; 16 columns d further is `at ^ 32 * d`, and 16 rows of the tile further
  // the swizzle is the same.
  constexpr int kNext = 16 * Shape::kPitch;
  const uint32_t q_at = swizzled<kHeadSize>(shared_q, first_row + lane % 16, lane / 16);
  const uint32_t k_at = swizzled<kHeadSize>(shared_k, lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const uint32_t v_at = swizzled<kHeadSize>(shared_v, lane % 16, lane / 16);
  float sum[kRowTiles][kHeadSize / 8][4] = {}, total[kRowTiles][2] = {};
  RowState state[kRowTiles];

#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<0>();
    __syncthreads();
    if (kStages > 1) load_keys(tile + 1);
    load_values(kStages > 1 ? tile + 1 : tile);
    copy_async_commit();
    const bool works = active && (Seen::kWhole || of_warp.meets(tile * kKeys, kKeys));
    const bool all = of_warp.end - tile * kKeys > kKeys / 2;
    uint32_t p[kRowTiles][kKeys / 16][4];

    // p: of the first `keys` of the tile.
    const auto weigh = [&](auto keys) {
      constexpr int kUsed = decltype(keys)::value;
      const uint32_t at = k_at + tile % kStages * kTileBytes;
      float score[kRowTiles][kUsed / 8][4] = {};
#pragma unroll
      for (int d = 0; d < kHeadSize / 16; ++d) {
        uint32_t q[kRowTiles][4];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) load_matrices(q[i], (q_at ^ 32 * d) + i * kNext);
#pragma unroll
        for (int j = 0; j < kUsed / 16; ++j) {
          uint32_t k[4];
          load_matrices(k, (at ^ 32 * d) + j * kNext);
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            multiply_add<E>(score[i][2 * j], q[i], k[0], k[1]);
            multiply_add<E>(score[i][2 * j + 1], q[i], k[2], k[3]);
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
            const int column = head_bias.column(seen.place(first_query + first_row + i * 16 + lane / 4 + 8 * r));
#pragma unroll
            for (int j = 0; j < kUsed / 8; ++j)
#pragma unroll
              for (int c = 0; c < 2; ++c)
                score[i][j][2 * r + c] += unscaled * head_bias(tile * kKeys + j * 8 + lane % 4 * 2 + c, column);
          }
      }
      uint32_t of_used[kUsed / 16][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        seen.mask(score[i], first_query + first_row + i * 16, tile * kKeys, lane);
        if (tile == of_warp.begin / kKeys) state[i].template begin<Seen::kWhole>(score[i], scale_log2);
        state[i].template probabilities<E>(score[i], of_used, sum[i], scale_log2, total[i]);
#pragma unroll
        for (int j = 0; j < kUsed / 16; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c) p[i][j][c] = of_used[j][c];
      }
    };
    const auto add_values = [&](auto keys) {
      constexpr int kUsed = decltype(keys)::value;
      const uint32_t at = v_at + tile % kStages * kTileBytes;
#pragma unroll
      for (int j = 0; j < kUsed / 16; ++j)
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d) {
          uint32_t v[4];
          load_matrices_transposed(v, (at ^ 32 * d) + j * kNext);
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            multiply_add<E>(sum[i][2 * d], p[i][j], v[0], v[1]);
            multiply_add<E>(sum[i][2 * d + 1], p[i][j], v[2], v[3]);
          }
        }
    };
    const auto used = [&](const auto& work) {
      if (!works) return;
      if (all)
        work(std::integral_constant<int, kKeys>());
      else
        work(std::integral_constant<int, kKeys / 2>());
    };
    used(weigh);
    if constexpr (kStages == 1) {
      copy_async_wait<0>();
      __syncthreads();
      load_keys(tile + 1);
      copy_async_commit();
    }
    used(add_values);
  }
  copy_async_wait<0>();
  if (!Seen::kWhole && tiles <= 0) __syncthreads();  // else the first tile has waited for all queries
  if (!active) return;

#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[i][r] += __shfl_xor_sync(~0u, total[i][r], 1);
      total[i][r] += __shfl_xor_sync(~0u, total[i][r], 2);
    }
    stage_rows<E, kHeadSize, Seen::kWhole>(shared_memory, first_row + i * 16, lane, sum[i], total[i]);
  }
  __syncwarp();
  store_rows<E, kHeadSize, kRows>(shared_memory, first_row, lane, length - first_query - first_row,
                                  out + (block.start - first_token + first_query) * width + block.head * kHeadSize,
                                  width);
}

}  // namespace
}  // namespace ftbert
