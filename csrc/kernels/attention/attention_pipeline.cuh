// Fused attention on Hopper for many blocks of 64 queries with heads of 128: a block to a multiprocessor, which
// stays and computes one item after another. An item is a head's queries, 64 for each of the warpgroups that multiply.
//
// One warp of a warpgroup that does nothing else asks for queries and for tiles of keys and values, also of the next
// items: neither a launch nor the way out of an item leaves the products waiting. A warpgroup starts the next tile's
// scores and this tile's sums together, and works on the scores while the sums are still being made. Tiles have 128
// keys: an instruction that reads 64 queries from shared memory for 64 keys takes as long to read as to multiply.
#pragma once
#include "kernels/attention/attention_wgmma.cuh"

namespace ftbert {
namespace {

// kGroups: of 64 queries each.
template <int kHeadSize_, int kGroups_, int kStages_>
struct PipelinedAttention {
  static constexpr int kHeadSize = kHeadSize_, kGroups = kGroups_, kStages = kStages_;
  static constexpr int kQueries = 64 * kGroups, kKeys = 128, kThreads = 128 * (kGroups + 1);
  static constexpr int kBox = 64, kBoxes = kHeadSize / kBox, kRowBytes = 2 * kBox;
  static constexpr int kBoxBytes = kKeys * kRowBytes, kTileBytes = kBoxes * kBoxBytes;
  static constexpr int kQueryBytes = 64 * 2 * kHeadSize;  // of a warpgroup, and of its results on their way out
  static constexpr int kBuffers = 2;                      // of queries: this item's and the next one's
  // Queries; keys and values of each stage; barriers. 1024: the swizzle repeats every eight rows of 128 bytes.
  static constexpr int kBarriers = 2 * kBuffers + 5 * kStages;
  static constexpr int kBytes = 1024 + kBuffers * kGroups * kQueryBytes + 2 * kStages * kTileBytes + 8 * kBarriers;
  // Of a thread that loads and of one that multiplies; all together what the launch has.
  static constexpr int kFew = 24, kMany = 240;
  static_assert(kGroups == 2);
  static_assert(kHeadSize % kBox == 0 && kBytes <= 227 * 1024);
};

// map: of q [tokens, width]; the rest as attention_wgmma has it with WindowMaps, whose boxes here have 128 rows. pairs:
// of heads and sequences. Out: nothing, or E4m3Rows in the place of out.
template <class E, class Shape, class... Out>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_pipeline(const __grid_constant__ CUtensorMap map, int64_t first_token,
                       const int32_t* __restrict__ cu_seqlens, int pairs, int heads, int query_blocks, float scale_log2,
                       E* __restrict__ out, const __grid_constant__ WindowMaps maps, Out... e4m3) {
#ifdef FTBERT_WGMMA
  constexpr int kHeadSize = Shape::kHeadSize, kGroups = Shape::kGroups, kStages = Shape::kStages;
  constexpr int kKeys = Shape::kKeys, kBoxes = Shape::kBoxes, kBox = Shape::kBox, kRowBytes = Shape::kRowBytes;
  constexpr int kBoxBytes = Shape::kBoxBytes, kTileBytes = Shape::kTileBytes, kQueryBytes = Shape::kQueryBytes;
  constexpr int kBuffers = Shape::kBuffers;
  extern __shared__ char unaligned_memory[];
  const uint32_t unaligned = __shfl_sync(~0u, shared_address(unaligned_memory), 0);
  const uint32_t shared_q = (unaligned + 1023) / 1024 * 1024, shared_kv = shared_q + kBuffers * kGroups * kQueryBytes;
  char* const memory = unaligned_memory + (shared_q - unaligned);
  // Of each buffer: queries are there; nobody needs it any more. Of each stage the same for its keys and its values;
  // and that values behind a sequence's last are zeros.
  const uint32_t queries_in = shared_kv + 2 * kStages * kTileBytes, queries_out = queries_in + 8 * kBuffers;
  const uint32_t keys_in = queries_out + 8 * kBuffers, keys_out = keys_in + 8 * kStages;
  const uint32_t values_in = keys_out + 8 * kStages, values_out = values_in + 8 * kStages;
  const uint32_t tails = values_out + 8 * kStages;
  if (threadIdx.x == 0) {
    prefetch_map(map);
    prefetch_map(maps.k);
    prefetch_map(maps.v);
    for (int b = 0; b < kBuffers; ++b) {
      barrier_init(queries_in + 8 * b, 1);
      barrier_init(queries_out + 8 * b, 4 * kGroups);
    }
    for (int s = 0; s < kStages; ++s) {
      barrier_init(keys_in + 8 * s, 1);
      barrier_init(keys_out + 8 * s, 4 * kGroups);
      barrier_init(values_in + 8 * s, 1);
      barrier_init(values_out + 8 * s, 4 * kGroups);
      barrier_init(tails + 8 * s, 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_inputs();

  // work(block, seen, tiles) of each of this block's items that has queries: of the last queries of a head with the
  // first, so that under a causal mask all have as many keys, then the last but one with the second. Neighbours read
  // the same keys at the same time. Blocks take their turns in another order each time: else one might always have
  // those in the middle of an odd number.
  const auto each_item = [&](auto&& work) {
    const int turns = maps.window.right == Window::kAll ? 1 : 2;
    const int in_head = (query_blocks + turns - 1) / turns, units = pairs * in_head;
    const int blocks = static_cast<int>(gridDim.x);
    int at = static_cast<int>(blockIdx.x);
#pragma unroll 1
    for (int first = 0; first < units; first += blocks, at = at + 1 == blocks ? 0 : at + 1) {
      const int unit = first + at, pair = unit / in_head, from_end = unit % in_head;
      if (unit >= units) continue;
      const int sequence = pair / heads, start = cu_seqlens[sequence], length = cu_seqlens[sequence + 1] - start;
#pragma unroll 1
      for (int turn = 0; turn < turns; ++turn) {
        const int queries_at = turn == 0 ? query_blocks - 1 - from_end : from_end;
        if (turn == 1 && 2 * from_end + 1 == query_blocks) continue;
        const AttentionBlock block(sequence, pair % heads, start, length, queries_at * Shape::kQueries);
        if (block.first_query >= length) continue;
        const KeysOfBlock<WindowMaps> seen(block, Shape::kQueries, kHeadSize, maps);
        work(block, seen, max(0, (seen.keys + kKeys - 1) / kKeys));
      }
    }
  };
  // As the compiler sees, the same for all lanes: what follows from it stays in uniform registers.
  const int all_warps = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  int index = 0, count = 0;  // of items and of tiles so far

  if (all_warps < 4) {
    fewer_registers<Shape::kFew>();
    if (threadIdx.x != 0) return;
    each_item([&](const AttentionBlock& block, const KeysOfBlock<WindowMaps>& seen, int tiles) {
      const int buffer = index % kBuffers, row = static_cast<int>(block.start - first_token) + block.first_query;
      barrier_wait(queries_out + 8 * buffer, index / kBuffers % 2 ^ 1);  // a fresh buffer is free
      barrier_expect(queries_in + 8 * buffer, kGroups * kQueryBytes);
      for (int g = 0; g < kGroups; ++g)
        for (int b = 0; b < kBoxes; ++b)
          tma_load(shared_q + (buffer * kGroups + g) * kQueryBytes + b * (64 * kRowBytes), map,
                   block.head * kHeadSize + b * kBox, row + g * 64, queries_in + 8 * buffer);
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile, ++count) {
        const int stage = count % kStages, from = seen.row + tile * kKeys;
        const uint32_t parity = count / kStages % 2 ^ 1, keys = shared_kv + 2 * stage * kTileBytes;
        barrier_wait(keys_out + 8 * stage, parity);
        barrier_expect(keys_in + 8 * stage, kTileBytes);
        for (int b = 0; b < kBoxes; ++b)
          tma_load(keys + b * kBoxBytes, maps.k, seen.column + b * kBox, from, keys_in + 8 * stage);
        barrier_wait(values_out + 8 * stage, parity);
        barrier_expect(values_in + 8 * stage, kTileBytes);
        for (int b = 0; b < kBoxes; ++b)
          tma_load(keys + kTileBytes + b * kBoxBytes, maps.v, seen.column + b * kBox, from, values_in + 8 * stage);
      }
      ++index;
    });
    return;
  }

  more_registers<Shape::kMany>();
  const int group = all_warps / 4 - 1, warp = all_warps % 4;
  const int64_t width = static_cast<int64_t>(heads) * kHeadSize;
  uint32_t tail_parity = 0;  // a bit for each stage
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  each_item([&](const AttentionBlock& block, const KeysOfBlock<WindowMaps>& seen, int tiles) {
    const int buffer = index % kBuffers, query = block.first_query + group * 64, real = block.length - query;
    const uint32_t place = (buffer * kGroups + group) * kQueryBytes;
    const int last_stage = (count + tiles - 1) % kStages, valid = seen.keys - (tiles - 1) * kKeys;  // of the last tile
    const bool has_tail = tiles > 0 && valid < kKeys;
    const auto stage_of = [&](int tile) { return (count + tile) % kStages; };
    const auto parity_of = [&](int tile) { return static_cast<uint32_t>((count + tile) / kStages % 2); };
    barrier_wait(queries_in + 8 * buffer, index / kBuffers % 2);
    if (real > 0) {
      const uint64_t queries = matrix_descriptor<kRowBytes>(shared_q + place);
      float score[kKeys / 8][4], sum[kHeadSize / 8][4] = {}, total[2] = {};
      uint32_t p[kKeys / 16][4];
      RowState state;
      const auto start_scores = [&](int tile) {
        const int stage = stage_of(tile);
        barrier_wait(keys_in + 8 * stage, parity_of(tile));
        const uint64_t keys = matrix_descriptor<kRowBytes>(shared_kv + 2 * stage * kTileBytes);
        warpgroup_fence();
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d) {
          const int box = d / (kBox / 16), at = d % (kBox / 16) * 2;  // in units of 16 bytes
          warpgroup_multiply_nt<E>(score, queries + box * (64 * kRowBytes / 16) + at,
                                   keys + box * (kBoxBytes / 16) + at, d > 0);
        }
        warpgroup_commit();
      };
      const auto start_sums = [&](int tile) {
        const int stage = stage_of(tile);
        const uint32_t values = shared_kv + (2 * stage + 1) * kTileBytes;
        barrier_wait(values_in + 8 * stage, parity_of(tile));
        if (has_tail && tile == tiles - 1) {
          if (group == 0 && warp == 0) {
            // Past the end lies another sequence, or nothing yet: a weight of zero would make a NaN of its infinity.
            for (int b = 0; b < kBoxes; ++b)
              for (int i = valid * kRowBytes + 16 * lane; i < kBoxBytes; i += 16 * 32)
                *reinterpret_cast<uint4*>(memory + (values - shared_q) + b * kBoxBytes + i) = uint4{};
            fence_shared_for_async();
            __syncwarp();
            release(tails + 8 * stage);
          }
          barrier_wait(tails + 8 * stage, tail_parity >> stage & 1);
        }
        const uint64_t rows = matrix_descriptor<kRowBytes>(values, kBoxBytes);
        warpgroup_fence();
#pragma unroll
        for (int j = 0; j < kKeys / 16; ++j) warpgroup_multiply_add_nn<E>(sum, p[j], rows + j * (16 * kRowBytes / 16));
        warpgroup_commit();
      };
      const auto scores_made = [&](int tile) {
        warpgroup_keep(score);
        release(keys_out + 8 * stage_of(tile));
        seen.mask(score, query + warp * 16, tile * kKeys, lane);
      };
      const auto sums_made = [&] {
        warpgroup_wait();
        warpgroup_keep(sum);
        warpgroup_keep(p);
      };
      const auto pack = [&] {
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r) p[j / 2][j % 2 * 2 + r] = pack_pair<E>(score[j][2 * r], score[j][2 * r + 1]);
      };
      if (tiles > 0) {
        start_scores(0);
        warpgroup_wait();
        scores_made(0);
        state.template begin<false>(score, scale_log2);
        state.raise(score, total, scale_log2);
        pack();
#pragma unroll 1
        for (int tile = 1; tile < tiles; ++tile) {
          start_scores(tile);
          start_sums(tile - 1);
          warpgroup_wait<1>();
          scores_made(tile);
          state.follow(sums_made, score, sum, total, scale_log2);
          state.raise(score, total, scale_log2);
          sums_made();
          release(values_out + 8 * stage_of(tile - 1));
          pack();
        }
        start_sums(tiles - 1);
        sums_made();
        release(values_out + 8 * last_stage);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
      }
      named_barrier_wait(1 + group, 128);  // nobody reads the queries any more
      stage_rows<E, kHeadSize, false>(memory + place, warp * 16, lane, sum, total);
      __syncwarp();
      const int64_t at = (block.start - first_token + query) * width + block.head * kHeadSize;
      store_rows<E, kHeadSize, 16>(memory + place, warp * 16, lane, real - warp * 16, out + at, width,
                                   e4m3.from(at)...);
      fence_shared_for_async();
      __syncwarp();
    } else {
      for (int tile = 0; tile < tiles; ++tile) {
        barrier_wait(keys_in + 8 * stage_of(tile), parity_of(tile));
        release(keys_out + 8 * stage_of(tile));
        barrier_wait(values_in + 8 * stage_of(tile), parity_of(tile));
        release(values_out + 8 * stage_of(tile));
      }
    }
    release(queries_out + 8 * buffer);
    if (has_tail) tail_parity ^= 1u << last_stage;
    count += tiles;
    ++index;
  });
#else
  no_warpgroups();
#endif
}

}  // namespace
}  // namespace ftbert
