// Sums over the threads of a cluster, each block of which is one group (GroupSum): a block's sums go to all blocks
// behind a barrier that counts their bytes, so that nobody waits for what else a thread has stored.
#pragma once
#include "device/mma.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"

namespace ftbert {

// Every thread gets the same bits: the blocks' sums are added in the blocks' order. All threads of all blocks make the
// same calls. From 9.0 on; in code for older GPUs there is nothing of it.
template <int kThreads, int kBlocks>
class ClusterSum {
  using OfBlock = GroupSum<kThreads, 1>;
  static constexpr int kSlots = 4 * kBlocks;  // floats of a round, four of each block

 public:
  static constexpr int kFloats = OfBlock::kFloats + 2 * kSlots + 4;
  static_assert(OfBlock::kFloats % 4 == 0);

  // shared: float[kFloats], aligned to 16 bytes. Waits until all blocks of the cluster are there.
  __device__ ClusterSum(float* shared, int /*group*/)
      : of_block_(shared, 0), slots_(shared + OfBlock::kFloats), barriers_(shared_address(slots_ + 2 * kSlots)) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      barrier_init(barriers_, 1);
      barrier_init(barriers_ + 8, 1);
      barrier_init_fence();
    }
    cluster_arrive();
    cluster_arrived();
#endif
  }

  template <int kValues>
  __device__ void operator()(float (&x)[kValues]) {
    static_assert(kValues <= 2);
    of_block_(x);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Two rounds in turns: a block sends its sums of one when all its threads have read those of the round before, and
    // all other blocks' sums of that have come.
    const uint32_t barrier = barriers_ + 8 * round_;
    const float4* const slots = reinterpret_cast<const float4*>(slots_) + kBlocks * round_;
    if (threadIdx.x == 0) {
      const float4 mine{x[0], kValues > 1 ? x[kValues > 1] : 0, 0, 0};
      barrier_expect(barrier, kBlocks * sizeof(float4));
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        store_async(shared_address(slots + blockIdx.x % kBlocks), mine, barrier, block);
    }
    barrier_wait(barrier, parity_);
#pragma unroll
    for (int v = 0; v < kValues; ++v) x[v] = 0;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float4 theirs = slots[block];
      x[0] += theirs.x;
      if constexpr (kValues > 1) x[1] += theirs.y;
    }
    parity_ ^= round_;
    round_ ^= 1;
#endif
  }

 private:
  OfBlock of_block_;
  float* slots_;
  uint32_t barriers_, round_ = 0, parity_ = 0;
};

}  // namespace ftbert
