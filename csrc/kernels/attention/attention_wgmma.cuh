// Fused attention on Hopper: warpgroup products, tiles through the tensor memory accelerator. Of whole sequences with
// heads of 32 or 64 for those of more than 128 tokens (attention_short.cuh has most of the shorter ones); for all with
// a window, with shared heads of keys or with larger heads.
//
// A warpgroup owns 64 queries. One thread asks for tiles of 64 keys and values, a ring of stages ahead, and the
// warpgroups of a block go through them each at its own pace. The products of a tile's probabilities and of the next
// tile's scores, or a step's and the next one's, are started together and waited for once; four to seven warpgroups
// share a multiprocessor, so that one's softmax runs under another's products. With fewer blocks than multiprocessors
// the time of a single block counts. Several warpgroups then own the same 64 queries, take the tiles of keys in turn,
// and add their results at the end. With a window a block goes from the first tile that one of its queries sees to the
// last.
#pragma once
#include "device/named_barrier.cuh"
#include "device/ring.cuh"
#include "device/wgmma.cuh"
#include "kernels/attention/attention_policy.cuh"

namespace ftbert {
namespace {

// Warpgroups that a multiprocessor has registers for.
constexpr int warpgroups_at_once(int head_size, int steps) {
  if (head_size <= 64) return steps == 1 ? 4 : head_size == 32 ? 7 : 5;
  return head_size > 128 ? 2 : steps == 1 ? 3 : 4;
}

// kGroups: of 64 queries; kParts: warpgroups that own the same ones. kSteps: those in which a tile's keys are gone
// through. Half as many scores and powers at once are fewer registers, 70 with heads of 32 and 86 with heads of 64, and
// so more warpgroups on a multiprocessor, but each tile has two waits for products. kApart: there is a barrier for the
// keys of a stage and one for its values, so that scores start while values are still on their way. Where a block has a
// multiprocessor of its own one for both is faster: 1x512 6.23 us, apart 6.28 (12 heads of 64, H200). With steps it was
// not tried apart.
template <int kHeadSize_, int kGroups_, int kStages_, int kParts_, int kSteps_>
struct WgmmaAttention {
  static constexpr int kHeadSize = kHeadSize_, kGroups = kGroups_, kStages = kStages_, kParts = kParts_;
  static constexpr int kSteps = kSteps_, kStepKeys = kTileKeys / kSteps;
  static constexpr int kBlocks = warpgroups_at_once(kHeadSize, kSteps) / (kGroups * kParts);
  static constexpr bool kApart = kGroups > 1;
  static_assert(kGroups == 1 || kParts == 1);
  static_assert(kStages >= 2 * kParts || kParts == 1);  // a part waits for a tile that is asked for two rounds ahead
  static constexpr int kThreads = 128 * kGroups * kParts, kQueries = 64 * kGroups;
  // A tile lies in boxes side by side, whose rows of 64 or 128 bytes the swizzle permutes. The last box may have
  // columns of another head, which no product reads.
  static constexpr int kBox = kHeadSize % 64 == 0 ? 64 : 32, kBoxes = (kHeadSize + kBox - 1) / kBox;
  static constexpr int kBoxBytes = kTileKeys * kBox * 2, kTileBytes = kBoxes * kBoxBytes;
  static constexpr int kQueryBytes = kTileKeys * 16 * kRowChunks<kHeadSize>;  // of 64 queries, or of their results
  // Of 16 rows. A product with a column of ones gives the sum of the probabilities, as they are rounded. Larger heads
  // have boxes in the way between values and ones, and time to add: products take longer than powers.
  static constexpr int kOnesBytes = kBoxes == 1 ? 16 * kHeadSize * 2 : 0;
  // Queries; keys and values of each stage; ones; barriers. 1024: the swizzle repeats every eight rows of 128 bytes,
  // counted from an address of that alignment.
  static constexpr int kBytes =
      1024 + kGroups * kQueryBytes + 2 * kStages * kTileBytes + kOnesBytes + 8 * (3 * kStages + 2);
  static_assert(kParts == 1 || kParts * sizeof(PartialRows<kHeadSize>) <= 2 * kStages * kTileBytes);
  static_assert(kSteps == 1 || kBlocks * (kBytes + 1024) <= 228 * 1024);  // all at once, and what each has besides
};

// What the parts found, one behind the other at `parts`, added and written to out; by all threads of the block. Out:
// nothing, or E4m3Rows in the place of out.
template <class E, class Shape, class... Out>
__device__ void add_parts(const PartialRows<Shape::kHeadSize>* parts, int real, E* out, int64_t width, Out... e4m3) {
  (e4m3.read_scale(), ...);
  constexpr int kParts = Shape::kParts, kColumns = 8;
  constexpr int kInRow = Shape::kHeadSize / kColumns;
  for (int i = threadIdx.x; i < min(real, 64) * kInRow; i += Shape::kThreads) {
    const int row = i / kInRow, column = i % kInRow * kColumns;
    float most = -INFINITY, total = 0, sum[kColumns] = {};
#pragma unroll
    for (int part = 0; part < kParts; ++part) most = fmaxf(most, parts[part].state[row].x);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const float2 state = parts[part].state[row];
      const float weight = fast_exp2(state.x - most);  // of a part without keys: 0
      total += weight * state.y;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sum[c] += weight * parts[part].sum[row][column + c];
    }
    const float inverse = 1.0f / total;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] *= inverse;
    if constexpr (sizeof...(Out) == 0) Packed<E, kColumns>::from_floats(sum).store(out + row * width + column);
    (put(sum, e4m3, row * width + column), ...);
  }
}

// A kernel's last parameter, for whole sequences.
struct NoMaps {};
// For all else; the kernel's map is then of q.
struct WindowMaps {
  CUtensorMap k, v;  // [rows, kv width]
  int64_t first_k;
  const int32_t *begin_k, *end_k;
  int shared;  // heads of queries that read one of keys and values
  int near;    // heads whose blocks take turns: their keys and values fit in L2
  Window window;
};

// The keys that a block's queries see, and where the first one lies in the maps.
template <class Maps>
struct KeysOfBlock {
  int keys;

  __device__ KeysOfBlock(const AttentionBlock& block, int, int, const Maps&) : keys(block.length) {}
};
template <>
struct KeysOfBlock<WindowMaps> : KeysInWindow {
  int row, column;

  __device__ KeysOfBlock(const AttentionBlock& block, int queries, int head_size, const WindowMaps& from)
      : KeysInWindow(block, queries, from.begin_k, from.end_k, from.window),
        row(static_cast<int>(start + before - from.first_k)),
        column(block.head / from.shared * head_size) {}
};

// Of `near` heads first the last queries, which see the most keys where the mask is causal: such blocks should not be
// the ones that all others have ended before.
__device__ inline AttentionBlock last_queries_first(const int32_t* cu_seqlens, int heads, int query_blocks, int queries,
                                                    int near) {
  const int first_pair = static_cast<int>(blockIdx.x) / (query_blocks * near) * near;  // of sequence and head
  const int beside = min(near, static_cast<int>(gridDim.x) / query_blocks - first_pair);
  const int at = static_cast<int>(blockIdx.x) - first_pair * query_blocks, pair = first_pair + at % beside;
  const int sequence = pair / heads, start = cu_seqlens[sequence];
  return AttentionBlock(sequence, pair % heads, start, cu_seqlens[sequence + 1] - start,
                        (query_blocks - 1 - at / beside) * queries);
}

// map: of qkv [tokens, 3*width] in boxes of [64, head size]; out [tokens, width]; grid: query blocks x heads x batch,
// query blocks fastest. Maps: NoMaps, for whole sequences; or WindowMaps, and then map is of q [tokens, width].
// Out: nothing, or E4m3Rows in the place of out.
template <class E, class Shape, class Maps, class... Out>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_wgmma(const __grid_constant__ CUtensorMap map, int64_t first_token,
                    const int32_t* __restrict__ cu_seqlens, OffsetReads offset_reads, int heads, int query_blocks,
                    float scale_log2, E* __restrict__ out, const __grid_constant__ Maps maps, Out... e4m3) {
#ifdef FTBERT_WGMMA
  constexpr bool kWhole = std::is_same_v<Maps, NoMaps>;
  static_assert(kWhole || Shape::kParts == 1);  // a part may see no key of a row
  constexpr int kHeadSize = Shape::kHeadSize, kStages = Shape::kStages;
  constexpr int kTileBytes = Shape::kTileBytes, kQueryBytes = Shape::kQueryBytes;
  constexpr int kBox = Shape::kBox, kBoxes = Shape::kBoxes, kBoxBytes = Shape::kBoxBytes, kRowBytes = kBox * 2;
  constexpr int kParts = Shape::kParts, kLag = kParts == 1 && kStages > 2 ? 2 : 1;
  constexpr bool kOnesColumn = Shape::kOnesBytes > 0;
  extern __shared__ char unaligned_memory[];
  // As the compiler sees, the same for all lanes: what follows from it stays in uniform registers. And as it does not
  // see where it comes from, it is not worked out again for every tile.
  const uint32_t unaligned = __shfl_sync(~0u, shared_address(unaligned_memory), 0);
  const uint32_t shared_q = (unaligned + 1023) / 1024 * 1024, shared_kv = shared_q + Shape::kGroups * kQueryBytes;
  char* const memory = unaligned_memory + (shared_q - unaligned);
  const uint32_t shared_ones = shared_kv + 2 * kStages * kTileBytes;
  // A stage is full when its keys are there, and empty when nobody reads its keys or values any more. Of each stage:
  // values are there. Then the last values end in zeros; queries are there, for which all parts wait, and not all for
  // the first keys.
  Ring<kStages, 4 * Shape::kGroups> ring{shared_ones + Shape::kOnesBytes};
  const uint32_t values_in = Shape::kApart ? ring.barriers + ring.kBytes : ring.barriers;
  const uint32_t tail = ring.barriers + ring.kBytes + 8 * kStages, queries_in = kParts > 1 ? tail + 8 : ring.barriers;
  const auto init_barriers = [&](int groups) {
    ring.init_full();
    for (int s = 0; Shape::kApart && s < kStages; ++s) barrier_init(values_in + 8 * s, 1);
    ring.init_empty(4 * groups);  // of several parts one reads a stage
    barrier_init(tail, 1);
    if (kParts > 1) barrier_init(queries_in, 1);
    barrier_init_fence();
  };
  if (threadIdx.x == 0) {
    prefetch_map(map);
    if constexpr (!kWhole) {
      prefetch_map(maps.k);
      prefetch_map(maps.v);
    }
    if (Shape::kGroups == 1) init_barriers(1);
  }
  if (static_cast<int>(threadIdx.x) < Shape::kOnesBytes / 16)
    reinterpret_cast<uint4*>(memory + (shared_ones - shared_q))[threadIdx.x] = {kOnes<E>, kOnes<E>, kOnes<E>, kOnes<E>};
  fence_shared_for_async();
  const auto block = [&] {
    if constexpr (kWhole) {
      return AttentionBlock::after_wait(cu_seqlens, Shape::kGroups == 1 ? offset_reads : OffsetReads::kCached, heads,
                                        query_blocks, Shape::kQueries);
    } else {
      wait_for_inputs();
      return last_queries_first(cu_seqlens, heads, query_blocks, Shape::kQueries, maps.near);
    }
  }();
  if (block.first_query >= block.length) return;

  const int64_t width = static_cast<int64_t>(heads) * kHeadSize;
  const int groups = min(Shape::kGroups, (block.length - block.first_query + 63) / 64);  // those that have queries
  const KeysOfBlock<Maps> seen(block, Shape::kQueries, kHeadSize, maps);
  // Of one stage one tile, however long sequences are that were said to be short.
  const int all_tiles = (seen.keys + kTileKeys - 1) / kTileKeys, tiles = kStages == 1 ? min(all_tiles, 1) : all_tiles;
  const int row0 = static_cast<int>(block.start - first_token);

  const auto load = [](uint32_t to, const CUtensorMap& from, int column, int row, uint32_t barrier) {
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) tma_load(to + b * kBoxBytes, from, column + b * kBox, row, barrier);
  };
  const auto load_keys_values = [&](int tile) {
    const int stage = tile % kStages, column = block.head * kHeadSize;
    uint32_t to = shared_kv + stage * 2 * kTileBytes;
    const int with_keys = (Shape::kApart ? 1 : 2) + (kParts == 1 && tile == 0 ? groups : 0);
    barrier_expect(ring.full(stage), with_keys * kTileBytes);
    if (Shape::kApart) barrier_expect(values_in + 8 * stage, kTileBytes);
    if constexpr (kWhole)
      load(to, map, column + static_cast<int>(width), row0 + tile * kTileKeys, ring.full(stage));
    else
      load(to, maps.k, seen.column, seen.row + tile * kTileKeys, ring.full(stage));
    if (tile == 0)
      for (int g = 0; g < groups; ++g)
        load(shared_q + g * kQueryBytes, map, column, row0 + block.first_query + g * 64, queries_in);
    to += kTileBytes;
    if constexpr (kWhole)
      load(to, map, column + 2 * static_cast<int>(width), row0 + tile * kTileKeys, values_in + 8 * stage);
    else
      load(to, maps.v, seen.column, seen.row + tile * kTileKeys, values_in + 8 * stage);
  };
  if (threadIdx.x == 0) {
    if (Shape::kGroups > 1) init_barriers(groups);
    if (kParts > 1) barrier_expect(queries_in, kTileBytes);
    for (int tile = 0; tile < min(tiles, kStages); ++tile) load_keys_values(tile);
  }
  __syncthreads();

  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const int group = Shape::kGroups > 1 ? warp / 4 : 0, part = kParts > 1 ? warp / 4 : 0;
  if (group >= groups) return;
  const uint64_t queries = matrix_descriptor<kRowBytes>(shared_q + group * kQueryBytes);
  constexpr int kStepKeys = Shape::kStepKeys, kSteps = Shape::kSteps;
  float score[kStepKeys / 8][4];
  float sum[kHeadSize / 8 + kOnesColumn][4] = {}, total[2] = {};
  RowState state;

  // Of several groups each goes through the tiles that one of its queries sees, and lets the others pass.
  constexpr bool kPasses = !kWhole && Shape::kGroups > 1;
  int first = part, end = tiles;
  if constexpr (kPasses) {
    const int query = block.first_query + group * 64;
    const KeyRange of_group = seen.of(query, min(query + 64, block.length) - 1);
    // Behind the last key a group's first tile is none of the block's.
    first = min(of_group.begin / kTileKeys, tiles);
    end = max(first, (of_group.end + kTileKeys - 1) / kTileKeys);
  }

  ring.stage = part;
  const auto start_scores = [&](int step) {
    if (step == 0) ring.wait_full();
    const uint64_t keys =
        matrix_descriptor<kRowBytes>(shared_kv + ring.stage * 2 * kTileBytes) + step * (kStepKeys * kRowBytes / 16);
    warpgroup_fence();
#pragma unroll
    for (int d = 0; d < kHeadSize / 16; ++d) {
      const int at = d / (kBox / 16) * (kBoxBytes / 16) + d % (kBox / 16) * 2;
      warpgroup_multiply_nt<E>(score, queries + at, keys + at, d > 0);
    }
    warpgroup_commit();
  };
  const auto clear_tail = [&](int valid) {
    if (valid < kTileKeys && (kParts > 1 ? warp % 4 : warp) == 0) {
      // Past the end lies another sequence, or nothing yet: a weight of zero would make a NaN of its infinity.
      int keys = valid;
      asm volatile("" : "+r"(keys));  // nothing of this is worked out for the tiles before
      if (Shape::kApart) barrier_wait(values_in + 8 * ring.stage, ring.parity);
      const uint32_t values = shared_kv + (ring.stage * 2 + 1) * kTileBytes;
      for (int b = 0; b < kBoxes; ++b)
        for (int i = keys * kRowBytes + 16 * lane; i < kBoxBytes; i += 16 * 32)
          *reinterpret_cast<uint4*>(memory + (values - shared_q) + b * kBoxBytes + i) = uint4{};
      fence_shared_for_async();
      __syncwarp();
      if (lane == 0) barrier_arrive(tail);
    }
  };
  const auto load_ahead = [&](int tile) {
    // The next tiles into stages that their readers have most likely left; another part may still be at its last.
    const int left = tile - kLag * kParts;
    if (threadIdx.x == 0 && left >= 0)
      for (int from = left; from < left + kParts && from + kStages < tiles; ++from) {
        barrier_wait(ring.empty(from % kStages), from / kStages % 2);
        load_keys_values(from + kStages);
      }
  };
  const auto pass = [&] {
    ring.wait_full();
    if (lane == 0) ring.release(ring.stage);
    ring.next(kParts);
  };
  if (kParts > 1) barrier_wait(queries_in, 0);
  if constexpr (kPasses)
    for (int tile = 0; tile < first; ++tile) pass();
  if (first < end) start_scores(0);
  warpgroup_wait();
  warpgroup_keep(score);

  for (int tile = first; tile < end; tile += kParts) {
    const uint32_t values = shared_kv + (ring.stage * 2 + 1) * kTileBytes;
    const int valid = seen.keys - tile * kTileKeys, used = ring.stage;
    clear_tail(valid);
    const uint64_t value_rows = matrix_descriptor<kRowBytes>(values, kOnesColumn ? shared_ones - values : kBoxBytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step > 0 && valid <= step * kStepKeys) break;
      const bool last = step + 1 == kSteps || valid <= (step + 1) * kStepKeys;
      if constexpr (!kWhole) {
        seen.mask(score, block.first_query + warp * 16, tile * kTileKeys + step * kStepKeys, lane);
      } else if (valid < (step + 1) * kStepKeys) {
        int keys = valid - step * kStepKeys;
        asm volatile("" : "+r"(keys));
        mask_scores(score, keys, lane);
      }
      uint32_t p[kStepKeys / 16][4];
      if (tile == first && step == 0) state.template begin<kWhole>(score, scale_log2);
      if constexpr (kOnesColumn)
        state.template probabilities<E>(score, p, sum, scale_log2);
      else
        state.template probabilities<E>(score, p, sum, scale_log2, total);
      if (Shape::kApart && step == 0) barrier_wait(values_in + 8 * ring.stage, ring.parity);
      if (valid < kTileKeys) barrier_wait(tail, 0);
      warpgroup_fence();
#pragma unroll
      for (int j = 0; j < kStepKeys / 16; ++j) {
        // 16 rows, in units of 16 bytes; the ones stay where they are.
        const int rows = (step * (kStepKeys / 16) + j) * kRowBytes;
        warpgroup_multiply_add<E, 1>(sum, p[j],
                                     value_rows + rows - (kOnesColumn ? static_cast<uint64_t>(rows) << 16 : 0));
      }
      warpgroup_commit();
      if (step == 0) {
        load_ahead(tile);
        __syncwarp();
      }
      if (!last) {
        start_scores(step + 1);
      } else if (tile + kParts < end) {
        ring.next(kParts);
        start_scores(0);
      }
      warpgroup_wait();
      warpgroup_keep(sum);
      warpgroup_keep(score);
    }
    if (lane == 0) ring.release(used);
  }
  if constexpr (kPasses) {
    if (first < end) ring.next(kParts);
    for (int tile = end; tile < tiles; ++tile) {
      clear_tail(seen.keys - tile * kTileKeys);
      load_ahead(tile);
      pass();
    }
  }

  const int real = block.length - block.first_query;
  const int64_t at = (block.start - first_token + block.first_query) * width + block.head * kHeadSize;
  out += at;
  if constexpr (kParts > 1) {
    auto* const parts = reinterpret_cast<PartialRows<kHeadSize>*>(memory + Shape::kGroups * kQueryBytes);
    __syncthreads();  // nobody reads keys or values any more
    parts[part].put(warp % 4 * 16, lane, sum, state);
    __syncthreads();
    add_parts<E, Shape>(parts, real, out, width, e4m3.from(at)...);
  } else {
    named_barrier_wait(1 + group, 128);  // nobody reads the queries any more
    if constexpr (kOnesColumn) {
      stage_rows<E, kHeadSize, kWhole>(memory, warp * 16, lane, sum);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
      }
      stage_rows<E, kHeadSize, kWhole>(memory, warp * 16, lane, sum, total);
    }
    __syncwarp();
    store_rows<E, kHeadSize, 16>(memory, warp * 16, lane, real - warp * 16, out, width, e4m3.from(at)...);
  }
#else
  no_warpgroups();
#endif
}

}  // namespace
}  // namespace ftbert
