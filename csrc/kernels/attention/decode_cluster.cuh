// Sums over keys that the blocks of a cluster have divided among them: each sends the others the columns that they
// merge.
#pragma once
#include <cmath>

#include "device/mma.cuh"
#include "device/tma.cuh"
#include "kernels/attention/decode_shape.cuh"
#include "kernels/attention/decode_sums.cuh"

namespace ftbert {
namespace {

constexpr int kMostInCluster = 8;  // which every GPU with clusters can hold

// In the shared memory of each block. A block merges as many items as the others.
template <class Shape>
struct ClusterSums {
  using E = typename Shape::E;
  static constexpr int kFours = Shape::kFours, kItems = Shape::kItems;
  static_assert(kFours >= kMostInCluster);

  float4 items[kItems + kMostInCluster];                 // [block][share]
  float2 most_and_total[kMostInCluster][Shape::kHeads];  // of each block

  static __device__ int share(int blocks) { return (kItems + blocks - 1) / blocks; }

  // An item of this block, to the block that merges it. All blocks have begun.
  __device__ void send(int block, int blocks, int item, const FourSums& mine) {
    const int each = share(blocks), column = item % kFours;
    store_in_cluster(shared_address(items + block * each + item % each), mine.columns(), item / each);
    if (column < blocks)
      store_in_cluster(shared_address(&most_and_total[block][item / kFours]), float2{mine.largest, mine.total}, column);
  }

  // By all threads of all blocks of the cluster, once each has sent its items: into out [heads, kHeadSize].
  __device__ void merge(int block, int blocks, int heads, E* out) const {
    cluster_publish();
    cluster_arrived();
    const int each = share(blocks);
    for (int i = static_cast<int>(threadIdx.x); i < each; i += static_cast<int>(blockDim.x)) {
      const int item = block * each + i, h = item / kFours;
      if (h >= heads) return;
      FourSums all{-INFINITY};
      for (int from = 0; from < blocks; ++from) all.largest = fmaxf(all.largest, most_and_total[from][h].x);
      for (int from = 0; from < blocks; ++from) {
        const float2 theirs = most_and_total[from][h];
        all.add(decode_exp2<E>(theirs.x - all.largest), theirs.y, items[from * each + i]);
      }
      all.store(out + h * Shape::kHeadSize, item % kFours);
    }
  }
};

}  // namespace
}  // namespace ftbert
