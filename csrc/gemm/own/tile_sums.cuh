// What becomes of a tile's float sums in shared memory: added over a cluster, bias, activation, to memory.
#pragma once
#include <cooperative_groups.h>

#include "device/activation.cuh"
#include "device/vector.cuh"

namespace ftbert {
namespace {

struct Operands {
  const void* a;
  const void* b;
  const void* bias;
  void* c;
  int64_t m;
  int n, k, split;  // split: blocks of a cluster, which share a tile of C and divide its k
};

// Floats from one row of a tile's sums to the next, apart from the banks.
template <int kColumns>
constexpr int kSumStride = kColumns + 4;

template <Activation kActivation, class E, int kThreads, int kColumns>
__device__ void store_activated(const Operands& o, const float* sums, int64_t row0, int column0, int first_row,
                                int last_row) {
  constexpr int kPacks = kColumns / 8;
  for (int i = threadIdx.x; i < (last_row - first_row) * kPacks; i += kThreads) {
    const int row = first_row + i / kPacks, column = i % kPacks * 8;
    if (row0 + row >= o.m || column0 + column >= o.n) continue;
    float v[8] = {};
    for (int rank = 0; rank < o.split; ++rank) {
      const float* from = sums + row * kSumStride<kColumns> + column;
#if __CUDA_ARCH__ >= 900
      if (o.split > 1) from = cooperative_groups::this_cluster().map_shared_rank(const_cast<float*>(from), rank);
#endif
      const float4 low = *reinterpret_cast<const float4*>(from), high = *reinterpret_cast<const float4*>(from + 4);
      v[0] += low.x, v[1] += low.y, v[2] += low.z, v[3] += low.w;
      v[4] += high.x, v[5] += high.y, v[6] += high.z, v[7] += high.w;
    }
    if (o.bias) {
      float bias[8];
      Packed<E, 8>::load(static_cast<const E*>(o.bias) + column0 + column).to_floats(bias);
#pragma unroll
      for (int w = 0; w < 8; ++w) v[w] += bias[w];
    }
#pragma unroll
    for (int w = 0; w < 8; ++w) v[w] = activate<kActivation, E>(v[w]);
    Packed<E, 8>::from_floats(v).store(static_cast<E*>(o.c) + (row0 + row) * o.n + column0 + column);
  }
}

// Rows [first_row, last_row) of the tile of `kColumns` columns at (row0, column0), by threads 0 to kThreads - 1: the
// cluster's sums added, always in the same order, bias, activation, 16 bytes at a time.
template <class E, int kThreads, int kColumns>
__device__ void store_sums(const Operands& o, Activation activation, const float* sums, int64_t row0, int column0,
                           int first_row, int last_row) {
  with_activation(activation, [&](auto kind) {
    store_activated<decltype(kind)::value, E, kThreads, kColumns>(o, sums, row0, column0, first_row, last_row);
  });
}

}  // namespace
}  // namespace ftbert
