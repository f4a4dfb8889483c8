// Sums over keys that blocks have divided among them, where these are no cluster: each leaves its sums in memory, and
// the block that arrives last merges those of all.
#pragma once
#include <cstdint>

#include "kernels/attention/decode_scores.cuh"

namespace ftbert {
namespace {

// A block leaves of each head [head_size] sums, then the largest score, then the total, and room to the next 16 bytes.
constexpr int kBesideSums = 4;

// How many have arrived before. By a thread whose block has a barrier before it and behind it: what blocks have stored
// before they arrive, those that arrive later can read behind it.
__device__ inline int arrive_at(int32_t* arrivals) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  return before;
}

// What the last block works on in shared memory.
template <class Shape>
struct MergeRoom {
  float weights[Shape::kHeads][kMostSplits];
  bool last;
};

template <class Shape>
struct MemorySums {
  using E = typename Shape::E;
  static constexpr int kHeadFloats = Shape::kHeadSize + kBesideSums, kSplitFloats = Shape::kHeads * kHeadFloats;
  static constexpr int kFours = Shape::kFours, kItems = Shape::kItems;
  // Threads that share the splits of an item, where items are few.
  static constexpr int kParts = std::clamp(4 * kDecodeThreads / (Shape::kHeads * Shape::kHeadSize), 1, kDecodeWarps);

  float* splits;      // [splits][kHeads][kHeadFloats], of this sequence and head block
  int32_t* arrivals;  // of the same

  __device__ MemorySums(const DecodeParameters<E>& p, const SplitKeys<Shape>& keys) {
    const int64_t pair = static_cast<int64_t>(keys.sequence) * gridDim.y + blockIdx.y;
    splits = p.splits + pair * keys.splits * kSplitFloats;
    arrivals = p.arrivals + pair;
  }

  __device__ void store(int split, int item, const FourSums& mine) const {
    const int column = item % kFours;
    float* const to = splits + split * kSplitFloats + item / kFours * kHeadFloats;
    reinterpret_cast<float4*>(to)[column] = mine.columns();
    if (column == 0) to[Shape::kHeadSize] = mine.largest, to[Shape::kHeadSize + 1] = mine.total;
  }

  // By all threads of each of the `live` blocks, once they have stored their sums: into out [heads, head_size]. `sums`
  // are free: of the last block they become room.
  __device__ void merge(int live, int heads, MergeRoom<Shape>& room, WarpSums<Shape>& sums, E* out) const {
    __syncthreads();
    if (threadIdx.x == 0) room.last = arrive_at(arrivals) == live - 1;
    __syncthreads();
    if (!room.last) return;
    if (threadIdx.x == 0) *arrivals = 0;  // all that count have arrived
    weigh(live, room);
    __syncthreads();
    float4* const parts = reinterpret_cast<float4*>(&sums.sums[0][0][0]);  // [kParts][kItems]
    add_splits(live, room, parts);
    __syncthreads();
#pragma unroll 1
    for (int item = static_cast<int>(threadIdx.x); item < heads * kFours; item += kDecodeThreads) {
      float sum[4] = {};
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float4 four = parts[i * kItems + item];
        sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
      }
      store_four(sum, 1, out + item / kFours * Shape::kHeadSize, item % kFours);
    }
  }

 private:
  // What each split's sums are multiplied by; a warp a head, a lane a split.
  __device__ void weigh(int live, MergeRoom<Shape>& room) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int h = Shape::warp(); h < Shape::kHeads; h += kDecodeWarps) {
      const float* const of = splits + lane * kSplitFloats + h * kHeadFloats + Shape::kHeadSize;
      const float mine = lane < live ? __ldcg(of) : -1e30f, total = lane < live ? __ldcg(of + 1) : 0.0f;
      float most = mine;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
      const float weight = decode_exp2<E>(mine - most);
      float all = weight * total;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) all += __shfl_xor_sync(0xffffffffu, all, offset);
      room.weights[h][lane] = all != 0 ? weight / all : 0;
    }
  }

  // Of each item the splits first, first + kParts, ... by one thread, eight loads at a time.
  __device__ void add_splits(int live, const MergeRoom<Shape>& room, float4* parts) const {
    constexpr int kLoads = 8;
#pragma unroll 1
    for (int task = static_cast<int>(threadIdx.x); task < kParts * kItems; task += kDecodeThreads) {
      const int first = task / kItems, item = task % kItems, h = item / kFours;
      const float* const from = splits + h * kHeadFloats + item % kFours * 4;
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
          const float weight = s + i * kParts < live ? room.weights[h][s + i * kParts] : 0;
          sum.x += weight * four[i].x, sum.y += weight * four[i].y;
          sum.z += weight * four[i].z, sum.w += weight * four[i].w;
        }
      }
      parts[task] = sum;
    }
  }
};

}  // namespace
}  // namespace ftbert
