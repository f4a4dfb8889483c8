// Attention of one query a sequence, as a text that grows has: the keys, which lie in a cache, are divided among
// blocks, for what takes time is to read them. Sums of probabilities times values are merged in float, in the order of
// the keys: the same bits every time. In four pieces:
//   decode_keys.cuh    which keys a block has
//   decode_ring.cuh    how lanes ask for them, ahead of the round that is multiplied and of the end of the kernel ahead
//   decode_scores.cuh  the running softmax of a lane, a warp and a block
//   decode_cluster.cuh, decode_memory.cuh  how the sums of a sequence's blocks become one
// In 16 bits on Hopper, up to some thousand keys, the blocks of a sequence and head are a cluster, and send each other
// the columns that each of them merges. Else they leave them in memory, and the one that arrives last merges all:
// beside a kernel behind that reads as fast as the memory goes, that took 5 us where the keys took 2.
#pragma once
#include "device/launch.cuh"
#include "kernels/attention/decode_cluster.cuh"
#include "kernels/attention/decode_memory.cuh"

namespace ftbert {
namespace {

// kCluster: the splits of a sequence and head are a cluster. A block that ends has let the kernel behind start, and
// what a variant does not use of the memory below takes none.
template <class Shape, bool kCluster>
__device__ void attend_split(const DecodeParameters<typename Shape::E>& p) {
  using E = typename Shape::E;
  using Chunk = typename Shape::Chunk;
  constexpr int kHeadSize = Shape::kHeadSize, kHeads = Shape::kHeads;
  __shared__ __align__(16) WarpSums<Shape> sums;
  __shared__ MergeRoom<Shape> merge_room;
  __shared__ __align__(16) E fresh[kHeads + 2][kHeadSize];  // of the new token: queries, key, value
  __shared__ ClusterSums<Shape> cluster;
  extern __shared__ __align__(16) char ring_memory[];

  if constexpr (kCluster) cluster_arrive();
  if (!p.early) grid_wait();
  const SplitKeys<Shape> keys(p);
  LaneRing<Shape> ring(ring_memory, p, keys);
  const int first_of_warp = keys.first_of_warp();
  // Keys are asked for before the kernel ahead has ended, unless that may still write the last of them.
  const bool ahead = p.early && p.adds();
  if (ahead && keys.queries > 0 && keys.split < keys.live) ring.fill(first_of_warp);
  if (p.early) grid_wait();
  // In a cluster all blocks come to its barriers, or none: with several live ones, blocks without keys send sums of
  // nothing. A block alone needs no barrier.
  if (keys.queries <= 0 || (keys.split >= keys.live && (!kCluster || keys.live == 1))) return;
  if (!ahead) ring.fill(first_of_warp);

  const int64_t head = static_cast<int64_t>(keys.kv_head) * p.shared + keys.first_head;
  const E* const token = p.q + (keys.query - p.first_q) * p.q_stride;  // its queries; where it is new, keys and values
  const E* const q = token + head * kHeadSize;
  E* const out = p.out + (keys.query - p.first_q) * p.out_stride + head * kHeadSize;
  if (p.adds()) {
    // Of the blocks that share the new token's key, the first stores it; a row behind the cache's end is not stored.
    // gridDim.y / blocks_a_head: heads of keys.
    const int64_t row = keys.row + keys.keys - 1;
    make_fresh<kDecodeThreads>(p.added, q, token + keys.kv_head * kHeadSize, keys.place, keys.heads, keys.newest,
                               keys.first_head == 0 && row < p.added.rows,
                               (row * (gridDim.y / p.blocks_a_head) + keys.kv_head) * kHeadSize, fresh);
    __syncthreads();
  }
  const auto fresh_chunk = [&](int which, int i) {
    return Shape::has(i) ? Chunk::load(fresh[which] + Shape::chunk(i) * Shape::kInChunk) : Chunk::zero();
  };
  LaneScores<Shape> scores(p.scale_log2, keys.heads, [&](int h, int i) {
    if (p.adds()) return fresh_chunk(h, i);
    if (!Shape::has(i)) return Chunk::zero();
    return Chunk{__ldcg(reinterpret_cast<const uint4*>(q + h * kHeadSize) + Shape::chunk(i))};
  });
  if (keys.newest && Shape::warp() == 0)
    scores.start_with([&](int part, int i) { return fresh_chunk(kHeads + part, i); });

  // What the kernel behind asks the memory for comes behind this block's last round. The first warp that gets there
  // lets go for the block.
  const auto let_go_behind = [&](int next) {
    if (next >= keys.stored_end) grid_let_go();
  };
  let_go_behind(first_of_warp + LaneRing<Shape>::kAhead);
#pragma unroll 1
  for (int first = first_of_warp; first < keys.stored_end; first += Shape::kStep) {
    const int asked = first + LaneRing<Shape>::kAhead;
    ring.wait(asked);
    let_go_behind(asked + Shape::kStep);
    scores.add(ring, first);
    ring.next();
  }
  scores.store(sums);
  __syncthreads();

  const MemorySums<Shape> memory(p, keys);
  if constexpr (kCluster)
    if (keys.live > 1) cluster_arrived();  // all blocks have begun
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < Shape::kItems; item += kDecodeThreads) {
    const FourSums mine = sums.of(item);
    if (keys.live == 1) {
      const int h = item / Shape::kFours;
      if (h < keys.heads) mine.store(out + h * kHeadSize, item % Shape::kFours);
    } else if constexpr (kCluster) {
      cluster.send(keys.split, keys.splits, item, mine);
    } else {
      memory.store(keys.split, item, mine);
    }
  }
  if (keys.live == 1) return;  // of a cluster too: with one live split it sends nothing
  if constexpr (kCluster)
    cluster.merge(keys.split, keys.splits, keys.heads, out);
  else
    memory.merge(keys.live, keys.heads, merge_room, sums, out);
}

template <class Shape, bool kCluster>
// Grid: decode_keys.cuh. 2: splits_of (attention_decode_cuda.cu) may deal out two blocks a multiprocessor.
__global__ void __launch_bounds__(kDecodeThreads, 2)
    attention_decode_kernel(const __grid_constant__ DecodeParameters<typename Shape::E> p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kCluster)
    __trap();
  else
#endif
    attend_split<Shape, kCluster>(p);
}

}  // namespace
}  // namespace ftbert
