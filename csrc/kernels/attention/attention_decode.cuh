// Attention of one query a sequence, as a text that grows has: the keys, which lie in a cache, are divided among
// blocks, for what takes time is to read them. Each lane asks for the keys and values that it will multiply some rounds
// ahead, into a ring of shared memory of its own, where it can before the kernel ahead has ended. Sums of probabilities
// times values are merged in float, in the order of the keys: the same bits every time. In 16 bits on Hopper, up to
// some thousand keys, the blocks of a sequence and head are a cluster, and send each other the columns that each of
// them merges. Else they leave them in memory, and the one that arrives last merges all: beside a kernel behind that
// reads as fast as the memory goes, that took 5 us where the keys took 2.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "kernels/attention/decode_cluster.cuh"
#include "kernels/attention/decode_sums.cuh"
#include "kernels/attention/new_tokens.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;
// Heads of queries that a block takes, at most, side by side over the same keys; with four the code of a few keys was
// slower. Blocks of further heads find the keys in L2.
constexpr int kMostDecodeHeads = 2;
constexpr int kMostSplits = 32;              // of a sequence's keys: a lane each, where one block merges them
constexpr int kMostDecodeSequences = 65535;  // a grid's third dimension
constexpr int kMostSplitBlocks = 512;        // where keys are split

// A block's sums over its keys, of each head: [head_size] sums, then the largest score, then the total.
constexpr int kBesideSums = 4;  // with room to the next 16 bytes

// Neighbouring lanes own a key, 16 bytes each (of heads of 80 and 96 some lanes have none; of 256 numbers in float each
// has twice as much).
template <class E, int kHeadSize, int kHeads>
struct DecodeShape {
  static constexpr int kInChunk = kWidth<E>, kChunks = kHeadSize / kInChunk;
  static constexpr int kLanes = std::min(32, static_cast<int>(std::bit_ceil(static_cast<unsigned>(kChunks))));
  static constexpr int kOwn = (kChunks + kLanes - 1) / kLanes;
  static constexpr int kKeysInWarp = 32 / kLanes;
  static constexpr int kAtOnce = 4 / kOwn;                            // keys of a lane in a round
  static constexpr int kStep = kDecodeWarps * kKeysInWarp * kAtOnce;  // keys of a block
  // The ring: rounds of [keys, values][kAtOnce * kOwn][threads] of 16 bytes. With four a block fits the 99 KB of the
  // GPUs with least, twice the 164 KB of an A100, and Hopper beside blocks of the kernels ahead and behind.
  static constexpr int kStages = 4;
  static constexpr int kStageBytes = 2 * kAtOnce * kOwn * 16 * kDecodeThreads;
  static constexpr size_t kRingBytes = kStages * kStageBytes;
  // Threads that share the splits of four columns, where these are few.
  static constexpr int kParts = std::clamp(4 * kDecodeThreads / (kHeads * kHeadSize), 1, kDecodeWarps);
};

template <class E>
struct DecodeParameters {
  const E *q, *k, *v;
  int64_t q_stride, k_stride, v_stride, out_stride;
  const int32_t *cu_q, *begin_k, *end_k;
  int64_t first_q, first_k;
  bool early;  // the offsets were there before the kernel ahead began
  Window window;
  float scale_log2;
  int shared;          // heads of queries that read one of keys and values
  int blocks_a_head;   // of keys: kHeads of those heads each
  float* splits;       // [sequence][head block][split][kHeads][kHeadSize + kBesideSums]
  int32_t* arrivals;   // [sequence][head block] zeros
  NewTokens<E> added;  // whose queries are at q
  E* out;              // [queries, out_stride]
};

// grid: splits, heads of keys * blocks_a_head, sequences. A sequence's keys are divided evenly among its splits, in
// steps. kCluster: the splits are a cluster.
template <class E, int kHeadSize, int kHeads, bool kCluster>
__device__ void attend_split(const DecodeParameters<E>& p) {
  using Shape = DecodeShape<E, kHeadSize, kHeads>;
  using Chunk = Packed<E, Shape::kInChunk>;
  constexpr int kAtOnce = Shape::kAtOnce, kOwn = Shape::kOwn, kLanes = Shape::kLanes, kInChunk = Shape::kInChunk;
  constexpr int kNumbers = kOwn * kInChunk, kFours = kHeadSize / 4, kItems = kHeads * kFours;
  __shared__ __align__(16) float sums[kDecodeWarps][kHeads][kHeadSize];
  __shared__ float largest[kDecodeWarps][kHeads], totals[kDecodeWarps][kHeads];
  __shared__ float weights[kHeads][kMostSplits];
  __shared__ __align__(16) E fresh[kHeads + 2][kHeadSize];  // of the new token: queries, key, value
  __shared__ bool last;
  __shared__ ClusterSums<E, kHeadSize, kHeads> cluster;
  extern __shared__ __align__(16) char ring_memory[];

  const int sequence = static_cast<int>(blockIdx.z), split = static_cast<int>(blockIdx.x);
  const int splits = static_cast<int>(gridDim.x), thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32, part = lane % kLanes, sub = lane / kLanes;
  const int kv_head = static_cast<int>(blockIdx.y) / p.blocks_a_head;
  const int first_head = static_cast<int>(blockIdx.y) % p.blocks_a_head * kHeads;  // of those that share keys
  const int heads = min(kHeads, p.shared - first_head);
  int query, queries, first_key, keys;
  const auto read_offsets = [&] {  // past this multiprocessor's cache, which may have older ones
    query = __ldcg(p.cu_q + sequence), queries = __ldcg(p.cu_q + sequence + 1) - query;
    first_key = __ldcg(p.begin_k + sequence), keys = __ldcg(p.end_k + sequence) - first_key;
  };
  if constexpr (kCluster) cluster_arrive();
  if (!p.early) grid_wait();
  read_offsets();
  const bool adds = p.added.keys != nullptr;
  const int place =
      adds && p.added.rotation.table != nullptr && queries > 0 ? __ldcg(p.added.positions + query - p.first_q) : 0;
  const int position = keys - queries;
  const int begin_seen = p.window.begin(max(position, 0)), seen = p.window.end(position, keys) - begin_seen;
  // Of the same for all blocks of the sequence and head.
  const int step_keys = ((max(seen, 1) + splits - 1) / splits + Shape::kStep - 1) / Shape::kStep * Shape::kStep;
  const int live = (max(seen, 1) + step_keys - 1) / step_keys;
  const int begin = min(split * step_keys, seen), end = min(begin + step_keys, seen);  // of those seen
  const int64_t first_row = first_key - p.first_k + begin_seen;
  const E* const k = p.k + first_row * p.k_stride + kv_head * kHeadSize;
  const E* const v = p.v + first_row * p.v_stride + kv_head * kHeadSize;
  // The block of the last keys has the new token's, and of those that share a head of keys the first stores them.
  const bool newest = adds && split == live - 1;
  const int stored_end = newest ? end - 1 : end;  // of the keys that are in the cache
  const int own_first = begin + warp * Shape::kKeysInWarp * kAtOnce;
  // In the ring this lane's 16 bytes of a round: of its keys (half 0) or values.
  const auto slot = [&](int stage, int half, int u, int i) {
    return 16 * thread + stage * Shape::kStageBytes + half * (Shape::kStageBytes / 2) +
           (u * kOwn + i) * (16 * kDecodeThreads);
  };
  const uint32_t ring = shared_address(ring_memory);
  // A round's keys and values of this lane; beyond the end zeros. Counts as asked for, empty too.
  const auto ask = [&](int first, int stage) {
#pragma unroll
    for (int u = 0; first < stored_end && u < kAtOnce; ++u) {
      const int key = first + u * Shape::kKeysInWarp + sub;
      const int64_t row = min(key, stored_end - 1);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int chunk = i * kLanes + part;
        if (kLanes * kOwn != Shape::kChunks && chunk >= Shape::kChunks) continue;
        copy_async16(ring + slot(stage, 0, u, i), k + row * p.k_stride + chunk * kInChunk, key < stored_end);
        copy_async16(ring + slot(stage, 1, u, i), v + row * p.v_stride + chunk * kInChunk, key < stored_end);
      }
    }
    copy_async_commit();
  };
  const auto ask_first = [&] {
#pragma unroll 1
    for (int stage = 0; stage < Shape::kStages - 1; ++stage) ask(own_first + stage * Shape::kStep, stage);
  };
  if (p.early) {
    if (adds && queries > 0 && split < live) ask_first();  // else the kernel ahead may still write the last of them
    grid_wait();
  }
  // In a cluster all come to its barriers, or none.
  if (queries <= 0 || (split >= live && (!kCluster || live == 1))) return;
  if (!p.early || !adds) ask_first();

  const int64_t head = static_cast<int64_t>(kv_head) * p.shared + first_head;
  const E* const q = p.q + (query - p.first_q) * p.q_stride + head * kHeadSize;
  E* const out = p.out + (query - p.first_q) * p.out_stride + head * kHeadSize;
  const auto load = [&](const E* row, int own) {
    const int chunk = own * kLanes + part;
    if (kLanes * kOwn != Shape::kChunks && chunk >= Shape::kChunks) return Chunk::zero();
    return Chunk{__ldcg(reinterpret_cast<const uint4*>(row) + chunk)};
  };
  const auto load_fresh = [&](int which, int own) {
    const int chunk = own * kLanes + part;
    if (kLanes * kOwn != Shape::kChunks && chunk >= Shape::kChunks) return Chunk::zero();
    return Chunk::load(fresh[which] + chunk * kInChunk);
  };
  if (adds) {
    const int64_t row = first_key - p.first_k + keys - 1;
    make_fresh<kDecodeThreads>(p.added, q, p.q + (query - p.first_q) * p.q_stride + kv_head * kHeadSize, place, heads,
                               newest, first_head == 0 && row < p.added.rows,
                               (row * (gridDim.y / p.blocks_a_head) + kv_head) * kHeadSize, fresh);
    __syncthreads();
  }
  float query_of[kHeads][kNumbers];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    Chunk chunks[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      chunks[i] = h >= heads ? Chunk::zero() : adds ? load_fresh(h, i) : load(q + h * kHeadSize, i);
    to_floats(chunks, query_of[h]);
  }

  RunningSum<kNumbers> running[kHeads];
  if (newest && warp == 0) {
    Chunk chunks[kOwn];
    float numbers[kNumbers];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) chunks[i] = load_fresh(kHeads, i);
    to_floats(chunks, numbers);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float score = dot_of_lanes<kLanes>(query_of[h], numbers) * p.scale_log2;
      running[h].largest = sub == 0 ? score : running[h].largest;
      running[h].total = sub == 0 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) chunks[i] = load_fresh(kHeads + 1, i);
    to_floats(chunks, numbers);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) running[h].sum[i] = sub == 0 ? numbers[i] : 0.0f;
  }
  int stage = 0;
  // What the kernel behind asks the memory for comes behind this block's last round.
  const auto let_go_behind = [&](int next) {
    if (next >= stored_end) grid_let_go();
  };
  let_go_behind(own_first + (Shape::kStages - 1) * Shape::kStep);
#pragma unroll 1
  for (int first = own_first; first < stored_end; first += Shape::kStep) {
    copy_async_wait<Shape::kStages - 2>();
    // Into the memory of the round before, which is multiplied.
    const int asked = first + (Shape::kStages - 1) * Shape::kStep;
    ask(asked, stage == 0 ? Shape::kStages - 1 : stage - 1);
    let_go_behind(asked + Shape::kStep);
    const auto read = [&](int half, int u, Chunk(&chunks)[kOwn]) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (kLanes * kOwn != Shape::kChunks && i * kLanes + part >= Shape::kChunks)
          chunks[i] = Chunk::zero();
        else
          chunks[i] = Chunk{*reinterpret_cast<const uint4*>(ring_memory + slot(stage, half, u, i))};
      }
    };
    float score[kHeads][kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Chunk chunks[kOwn];
      float numbers[kNumbers];
      read(0, u, chunks);
      to_floats(chunks, numbers);
      const bool real = first + u * Shape::kKeysInWarp + sub < stored_end;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float dot = dot_of_lanes<kLanes>(query_of[h], numbers);
        score[h][u] = real ? dot * p.scale_log2 : -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float most = running[h].largest;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) most = fmaxf(most, score[h][u]);
      running[h].scale(decode_exp2<E>(running[h].largest - most));
      running[h].largest = most;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        score[h][u] = decode_exp2<E>(score[h][u] - most);
        running[h].total += score[h][u];
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Chunk chunks[kOwn];
      float numbers[kNumbers];
      read(1, u, chunks);
      to_floats(chunks, numbers);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) running[h].sum[i] += score[h][u] * numbers[i];
    }
    if (++stage == Shape::kStages) stage = 0;
  }

  // The keys of a warp, then the warps of a block.
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    RunningSum<kNumbers>& mine = running[h];
    float most = mine.largest;
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    mine.scale(decode_exp2<E>(mine.largest - most));
#pragma unroll
    for (int offset = kLanes; offset < 32; offset *= 2) {
      mine.total += __shfl_xor_sync(0xffffffffu, mine.total, offset);
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) mine.sum[i] += __shfl_xor_sync(0xffffffffu, mine.sum[i], offset);
    }
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      const int column = (i / kInChunk * kLanes + part) * kInChunk + i % kInChunk;
      if (sub == 0 && column < kHeadSize) sums[warp][h][column] = mine.sum[i];
    }
    if (lane == 0) largest[warp][h] = most, totals[warp][h] = mine.total;
  }
  __syncthreads();

  const int64_t pair = static_cast<int64_t>(sequence) * gridDim.y + blockIdx.y;
  constexpr int kHeadFloats = kHeadSize + kBesideSums, kSplitFloats = kHeads * kHeadFloats;
  float* const all_splits = p.splits + pair * splits * kSplitFloats;
  if constexpr (kCluster)
    if (live > 1) cluster_arrived();  // all blocks have begun
#pragma unroll 1
  for (int item = thread; item < kItems; item += kDecodeThreads) {
    const int h = item / kFours, column = item % kFours;
    float most = largest[0][h], total = 0, sum[4] = {};
#pragma unroll
    for (int w = 1; w < kDecodeWarps; ++w) most = fmaxf(most, largest[w][h]);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float weight = decode_exp2<E>(largest[w][h] - most);
      const float4 four = reinterpret_cast<const float4*>(sums[w][h])[column];
      total += weight * totals[w][h];
      sum[0] += weight * four.x, sum[1] += weight * four.y, sum[2] += weight * four.z, sum[3] += weight * four.w;
    }
    if (live == 1) {
      if (h < heads) store_four(sum, total != 0 ? 1 / total : 0, out + h * kHeadSize, column);
    } else if constexpr (kCluster) {
      cluster.send(split, splits, item, most, total, sum);
    } else {
      float* const to = all_splits + split * kSplitFloats + h * kHeadFloats;
      reinterpret_cast<float4*>(to)[column] = float4{sum[0], sum[1], sum[2], sum[3]};
      if (column == 0) to[kHeadSize] = most, to[kHeadSize + 1] = total;
    }
  }
  if (live == 1) return;
  if constexpr (kCluster) return cluster.merge(split, splits, heads, out);

  __syncthreads();
  if (thread == 0) last = arrive_at(p.arrivals + pair) == live - 1;
  __syncthreads();
  if (!last) return;
  if (thread == 0) p.arrivals[pair] = 0;  // all that count have
#pragma unroll 1
  for (int h = warp; h < kHeads; h += kDecodeWarps) {
    const float* const of = all_splits + lane * kSplitFloats + h * kHeadFloats + kHeadSize;
    const float mine = lane < live ? __ldcg(of) : -1e30f, total = lane < live ? __ldcg(of + 1) : 0.0f;
    float most = mine;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    const float weight = decode_exp2<E>(mine - most);
    float all = weight * total;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) all += __shfl_xor_sync(0xffffffffu, all, offset);
    weights[h][lane] = all != 0 ? weight / all : 0;
  }
  __syncthreads();  // and `sums` are free
  constexpr int kParts = Shape::kParts, kLoads = 8;
  float4* const parts = reinterpret_cast<float4*>(&sums[0][0][0]);  // [kParts][kItems]
#pragma unroll 1
  for (int task = thread; task < kParts * kItems; task += kDecodeThreads) {
    const int first = task / kItems, item = task % kItems, h = item / kFours;
    const float* const from = all_splits + h * kHeadFloats + item % kFours * 4;
    float4 sum{};
#pragma unroll 1
    for (int s = first; s < live; s += kParts * kLoads) {
      float4 four[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        four[i] = s + i * kParts < live
                      ? __ldcg(reinterpret_cast<const float4*>(from + (s + i * kParts) * int64_t{kSplitFloats}))
                      : float4{};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const float weight = s + i * kParts < live ? weights[h][s + i * kParts] : 0;
        sum.x += weight * four[i].x, sum.y += weight * four[i].y;
        sum.z += weight * four[i].z, sum.w += weight * four[i].w;
      }
    }
    parts[task] = sum;
  }
  __syncthreads();
#pragma unroll 1
  for (int item = thread; item < heads * kFours; item += kDecodeThreads) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float4 four = parts[i * kItems + item];
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
    store_four(sum, 1, out + item / kFours * kHeadSize, item % kFours);
  }
}

template <class E, int kHeadSize, int kHeads, bool kCluster>
__global__ void __launch_bounds__(kDecodeThreads, 2)
    attention_decode_kernel(const __grid_constant__ DecodeParameters<E> p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kCluster)
    __trap();
  else
#endif
    attend_split<E, kHeadSize, kHeads, kCluster>(p);
}

}  // namespace
}  // namespace ftbert
