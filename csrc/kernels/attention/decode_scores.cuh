// The running softmax of attention_decode: a lane's over its part of its keys, then a warp's, then a block's.
#pragma once
#include "kernels/attention/decode_ring.cuh"
#include "kernels/attention/decode_sums.cuh"

namespace ftbert {
namespace {

// In shared memory: what the warps of a block have found over their keys.
template <class Shape>
struct WarpSums {
  float sums[kDecodeWarps][Shape::kHeads][Shape::kHeadSize];
  float largest[kDecodeWarps][Shape::kHeads], totals[kDecodeWarps][Shape::kHeads];

  // The block's.
  __device__ FourSums of(int item) const {
    const int h = item / Shape::kFours, column = item % Shape::kFours;
    FourSums all{largest[0][h]};
#pragma unroll
    for (int w = 1; w < kDecodeWarps; ++w) all.largest = fmaxf(all.largest, largest[w][h]);
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float weight = decode_exp2<typename Shape::E>(largest[w][h] - all.largest);
      all.add(weight, totals[w][h], reinterpret_cast<const float4*>(sums[w][h])[column]);
    }
    return all;
  }
};

// A lane's: its numbers of each head's query, and the sums over the keys that it has gone through.
template <class Shape>
struct LaneScores {
  using E = typename Shape::E;
  using Chunk = typename Shape::Chunk;
  static constexpr int kHeads = Shape::kHeads, kOwn = Shape::kOwn, kNumbers = Shape::kNumbers, kLanes = Shape::kLanes;

  float scale_log2;
  float query[kHeads][kNumbers];
  RunningSum<kNumbers> running[kHeads] = {};

  // load(h, i): chunk i of head h's query, of the heads that there are.
  template <class Load>
  __device__ LaneScores(float scale_log2, int heads, const Load& load) : scale_log2(scale_log2) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      Chunk chunks[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) chunks[i] = h < heads ? load(h, i) : Chunk::zero();
      to_floats(chunks, query[h]);
    }
  }

  // The new token's key and value, for the lanes of the warp's first key: before all others. load(part, i): of the key
  // (0), of the value (1).
  template <class Load>
  __device__ void start_with(const Load& load) {
    const bool first = Shape::key() == 0;
    Chunk chunks[kOwn];
    float numbers[kNumbers];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) chunks[i] = load(0, i);
    to_floats(chunks, numbers);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float score = dot_of_lanes<kLanes>(query[h], numbers) * scale_log2;
      running[h].largest = first ? score : running[h].largest;
      running[h].total = first ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) chunks[i] = load(1, i);
    to_floats(chunks, numbers);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) running[h].sum[i] = first ? numbers[i] : 0.0f;
  }

  // A round: the warp's keys from `first` on.
  __device__ void add(const LaneRing<Shape>& ring, int first) {
    constexpr int kAtOnce = Shape::kAtOnce;
    float score[kHeads][kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Chunk chunks[kOwn];
      float numbers[kNumbers];
      ring.read(LaneRing<Shape>::kKeys, u, chunks);
      to_floats(chunks, numbers);
      const bool real = first + u * Shape::kKeysInWarp + Shape::key() < ring.end;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float dot = dot_of_lanes<kLanes>(query[h], numbers);
        score[h][u] = real ? dot * scale_log2 : -INFINITY;
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
      ring.read(LaneRing<Shape>::kValues, u, chunks);
      to_floats(chunks, numbers);
#pragma unroll
      for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) running[h].sum[i] += score[h][u] * numbers[i];
    }
  }

  // Adds up over the warp's keys, and leaves the sums in shared memory.
  __device__ void store(WarpSums<Shape>& to) {
    const int warp = Shape::warp();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      RunningSum<kNumbers>& mine = running[h];
      float most = mine.largest;
#pragma unroll
      for (int offset = kLanes; offset < 32; offset *= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
      mine.scale(decode_exp2<E>(mine.largest - most));
#pragma unroll
      for (int offset = kLanes; offset < 32; offset *= 2) {
        mine.total += __shfl_xor_sync(0xffffffffu, mine.total, offset);
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) mine.sum[i] += __shfl_xor_sync(0xffffffffu, mine.sum[i], offset);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (Shape::key() != 0 || !Shape::has(i)) continue;
        float* const chunk = to.sums[warp][h] + Shape::chunk(i) * Shape::kInChunk;
#pragma unroll
        for (int j = 0; j < Shape::kInChunk; ++j) chunk[j] = mine.sum[i * Shape::kInChunk + j];
      }
      if (threadIdx.x % 32 == 0) to.largest[warp][h] = most, to.totals[warp][h] = mine.total;
    }
  }
};

}  // namespace
}  // namespace ftbert
