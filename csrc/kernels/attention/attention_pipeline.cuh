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
  // Of queries and, of each stage, of keys and of values; and that values behind a sequence's last are zeros.
  using KeysRing = Ring<kStages, 4 * kGroups>;
  Ring<kBuffers, 4 * kGroups> queries_ring{shared_kv + 2 * kStages * kTileBytes};
  KeysRing keys_ring{queries_ring.barriers + queries_ring.kBytes}, values_ring{keys_ring.barriers + keys_ring.kBytes};
  const uint32_t tails = values_ring.barriers + values_ring.kBytes;
  if (threadIdx.x == 0) {
    prefetch_map(map);
    prefetch_map(maps.k);
    prefetch_map(maps.v);
    queries_ring.init();
    keys_ring.init();
    values_ring.init();
    for (int s = 0; s < kStages; ++s) barrier_init(tails + 8 * s, 1);
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
  if (all_warps < 4) {
    fewer_registers<Shape::kFew>();
    if (threadIdx.x != 0) return;
    each_item([&](const AttentionBlock& block, const KeysOfBlock<WindowMaps>& seen, int tiles) {
      const int buffer = queries_ring.stage, row = static_cast<int>(block.start - first_token) + block.first_query;
      queries_ring.wait_empty();
      barrier_expect(queries_ring.full(buffer), kGroups * kQueryBytes);
      for (int g = 0; g < kGroups; ++g)
        for (int b = 0; b < kBoxes; ++b)
          tma_load(shared_q + (buffer * kGroups + g) * kQueryBytes + b * (64 * kRowBytes), map,
                   block.head * kHeadSize + b * kBox, row + g * 64, queries_ring.full(buffer));
#pragma unroll 1
      for (int tile = 0; tile < tiles; ++tile, keys_ring.next(), values_ring.next()) {
        const int stage = keys_ring.stage, from = seen.row + tile * kKeys;
        const uint32_t keys = shared_kv + 2 * stage * kTileBytes;
        keys_ring.wait_empty();
        barrier_expect(keys_ring.full(stage), kTileBytes);
        for (int b = 0; b < kBoxes; ++b)
          tma_load(keys + b * kBoxBytes, maps.k, seen.column + b * kBox, from, keys_ring.full(stage));
        values_ring.wait_empty();
        barrier_expect(values_ring.full(stage), kTileBytes);
        for (int b = 0; b < kBoxes; ++b)
          tma_load(keys + kTileBytes + b * kBoxBytes, maps.v, seen.column + b * kBox, from, values_ring.full(stage));
      }
      queries_ring.next();
    });
    return;
  }

  more_registers<Shape::kMany>();
  const int group = all_warps / 4 - 1, warp = all_warps % 4;
  const int64_t width = static_cast<int64_t>(heads) * kHeadSize;
  uint32_t tail_parity = 0;  // a bit for each stage
  const auto release = [&](auto& ring) {
    const int used = ring.stage;
    ring.next();
    if (lane == 0) ring.release(used);
  };
  each_item([&](const AttentionBlock& block, const KeysOfBlock<WindowMaps>& seen, int tiles) {
    const int query = block.first_query + group * 64, real = block.length - query;
    const uint32_t place = (queries_ring.stage * kGroups + group) * kQueryBytes;
    const int valid = seen.keys - (tiles - 1) * kKeys;  // of the last tile
    const bool has_tail = tiles > 0 && valid < kKeys;
    queries_ring.wait_full();
    if (real > 0) {
      const uint64_t queries = matrix_descriptor<kRowBytes>(shared_q + place);
      float score[kKeys / 8][4], sum[kHeadSize / 8][4] = {}, total[2] = {};
      uint32_t p[kKeys / 16][4];
      RowState state;
      const auto start_scores = [&] {
        keys_ring.wait_full();
        const uint64_t keys = matrix_descriptor<kRowBytes>(shared_kv + 2 * keys_ring.stage * kTileBytes);
        warpgroup_fence();
#pragma unroll
        for (int d = 0; d < kHeadSize / 16; ++d) {
          const int box = d / (kBox / 16), at = d % (kBox / 16) * 2;  // in units of 16 bytes
          warpgroup_multiply_nt<E>(score, queries + box * (64 * kRowBytes / 16) + at,
                                   keys + box * (kBoxBytes / 16) + at, d > 0);
        }
        warpgroup_commit();
      };
      const auto start_sums = [&](bool last) {
        const int stage = values_ring.stage;
        const uint32_t values = shared_kv + (2 * stage + 1) * kTileBytes;
        values_ring.wait_full();
        if (has_tail && last) {
          if (group == 0 && warp == 0) {
            // Past the end lies another sequence, or nothing yet: a weight of zero would make a NaN of its infinity.
            for (int b = 0; b < kBoxes; ++b)
              for (int i = valid * kRowBytes + 16 * lane; i < kBoxBytes; i += 16 * 32)
                *reinterpret_cast<uint4*>(memory + (values - shared_q) + b * kBoxBytes + i) = uint4{};
            fence_shared_for_async();
            __syncwarp();
            if (lane == 0) barrier_arrive(tails + 8 * stage);
          }
          barrier_wait(tails + 8 * stage, tail_parity >> stage & 1);
        }
        const uint64_t rows = matrix_descriptor<kRowBytes>(values, kBoxBytes);
        warpgroup_fence();
#pragma unroll
        for (int j = 0; j < kKeys / 16; ++j) warpgroup_multiply_add<E, 1>(sum, p[j], rows + j * (16 * kRowBytes / 16));
        warpgroup_commit();
      };
      const auto scores_made = [&](int tile) {
        warpgroup_keep(score);
        release(keys_ring);
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
        start_scores();
        warpgroup_wait();
        scores_made(0);
        state.template begin<false>(score, scale_log2);
        state.raise(score, total, scale_log2);
        pack();
#pragma unroll 1
        for (int tile = 1; tile < tiles; ++tile) {
          start_scores();
          start_sums(false);
          warpgroup_wait<1>();
          scores_made(tile);
          state.follow(sums_made, score, sum, total, scale_log2);
          state.raise(score, total, scale_log2);
          sums_made();
          release(values_ring);
          pack();
        }
        start_sums(true);
        sums_made();
        release(values_ring);
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
        keys_ring.wait_full();
        release(keys_ring);
        values_ring.wait_full();
        release(values_ring);
      }
    }
    release(queries_ring);
    if (has_tail) tail_parity ^= 1u << (values_ring.stage == 0 ? kStages - 1 : values_ring.stage - 1);
  });
#else
  no_warpgroups();
#endif
}

}  // namespace
}  // namespace ftbert
