// Sums over keys that the blocks of a cluster have divided among them: each sends the others the columns that they
// merge.
#pragma once
#include <cmath>
#include <cstdint>

#include "device/cluster.cuh"
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "kernels/attention/decode_sums.cuh"

namespace ftbert {
namespace {

constexpr int kMostInCluster = 8;  // which every GPU with clusters can hold

// In the shared memory of each block. An item is four columns of a head; a block merges as many as the others.
template <class E, int kHeadSize, int kHeads>
struct ClusterSums {
  static constexpr int kFours = kHeadSize / 4, kItems = kHeads * kFours;
  static_assert(kFours >= kMostInCluster);

  float4 items[kItems + kMostInCluster];          // [block][share]
  float2 most_and_total[kMostInCluster][kHeads];  // of each block

  static __device__ int share(int blocks) { return (kItems + blocks - 1) / blocks; }

  // An item of this block, to the block that merges it. All blocks have begun.
  __device__ void send(int block, int blocks, int item, float most, float total, const float (&sum)[4]) {
    const int each = share(blocks), column = item % kFours;
    store_in_cluster(shared_address(items + block * each + item % each), float4{sum[0], sum[1], sum[2], sum[3]},
                     item / each);
    if (column < blocks)
      store_in_cluster(shared_address(&most_and_total[block][item / kFours]), float2{most, total}, column);
  }

  // Of all threads of all blocks of the cluster, once each has sent its own: into out [heads, kHeadSize].
  __device__ void merge(int block, int blocks, int heads, E* out) const {
    cluster_publish();
    cluster_arrived();
    const int each = share(blocks);
    for (int i = static_cast<int>(threadIdx.x); i < each; i += static_cast<int>(blockDim.x)) {
      const int item = block * each + i, h = item / kFours;
      if (h >= heads) return;
      float most = -INFINITY, total = 0, sum[4] = {};
      for (int from = 0; from < blocks; ++from) most = fmaxf(most, most_and_total[from][h].x);
      for (int from = 0; from < blocks; ++from) {
        const float2 theirs = most_and_total[from][h];
        const float weight = decode_exp2<E>(theirs.x - most);
        const float4 four = items[from * each + i];
        total += weight * theirs.y;
        sum[0] += weight * four.x, sum[1] += weight * four.y, sum[2] += weight * four.z, sum[3] += weight * four.w;
      }
      store_four(sum, total != 0 ? 1 / total : 0, out + h * kHeadSize, item % kFours);
    }
  }
};

}  // namespace
}  // namespace ftbert
