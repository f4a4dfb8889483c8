// The first of the largest numbers of each row; -1 where there is none, or it is no finite number. What takes time is
// to read a row: where rows are few, the blocks of a cluster share one.
#include <cooperative_groups.h>

#include <cstring>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 512;
constexpr int kMostBlocks = 8;  // of a cluster, as many as every GPU that has clusters allows
constexpr int kLoads = 4;       // of a thread in flight: with them all, 32 KB of a block

// Of a pack; NaN if one of its elements is.
template <class E, int W>
__device__ float largest_of(const Packed<E, W>& pack) {
  if constexpr (sizeof(E) == 2 && W > 1) {
    typename PairOf<E>::type pairs[W / 2];
    memcpy(pairs, &pack.bits, sizeof(pairs));
#pragma unroll
    for (int i = 1; i < W / 2; ++i) pairs[0] = __hmax2_nan(pairs[0], pairs[i]);
    const float2 two = pair_to_float(pairs[0]);
    return max_or_nan(two.x, two.y);
  } else {
    float x[W];
    pack.to_floats(x);
#pragma unroll
    for (int w = 1; w < W; ++w) x[0] = max_or_nan(x[0], x[w]);
    return x[0];
  }
}

// A number and its id as one integer: the larger for a larger number, and of equal ones for the smaller id. NaN, which
// is positive as max_or_nan makes it, is above infinity.
using Key = unsigned long long;

__device__ uint32_t ordered(float number) {
  const uint32_t bits = __float_as_uint(number == 0 ? 0.0f : number);  // -0 is 0
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ Key key_of(float number, int id) { return Key{ordered(number)} << 32 | ~static_cast<uint32_t>(id); }
__device__ int64_t id_of(Key key) {
  const auto number = static_cast<uint32_t>(key >> 32);
  return number > ordered(-INFINITY) && number < ordered(INFINITY) ? ~static_cast<uint32_t>(key) : int64_t{-1};
}

// Before a block of a cluster writes to the first, that must have begun.
__device__ void say_begun(int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) cluster_arrive();
#endif
}

// In the first block of a cluster the largest of what all have found. keys: shared memory.
__device__ Key largest_of_blocks(Key key, int block, int blocks, Key (&keys)[kMostBlocks]) {
#if __CUDA_ARCH__ >= 900
  if (blocks == 1) return key;
  const auto cluster = cooperative_groups::this_cluster();
  cluster_arrived();
  if (threadIdx.x == 0) *cluster.map_shared_rank(keys + block, 0) = key;
  cluster.sync();
  if (block == 0)
    for (int i = 1; i < blocks; ++i) key = max(key, keys[i]);
#endif
  return key;
}

// grid: rows * blocks, a cluster of `blocks` a row, whose threads stand side by side over its packs. (Unless told that
// two blocks a multiprocessor are enough, nvcc 13.0 saves registers and has two of four loads in flight.)
template <int W, class E>
__global__ void __launch_bounds__(kThreads, 2) argmax_kernel(const E* logits, int packs, int blocks, int64_t* ids) {
  __shared__ Key keys[kMostBlocks];
  say_begun(blocks);
  wait_for_inputs();
  const int64_t row = blockIdx.x / blocks;
  const int block = static_cast<int>(blockIdx.x % blocks), step = blocks * kThreads;
  const E* const from = logits + row * packs * W;

  float most = -INFINITY;
  Packed<E, W> best = Packed<E, W>::zero();  // the first pack with it
  int at = 0;
#pragma unroll 1
  for (int first = block * kThreads + threadIdx.x; first < packs; first += kLoads * step) {
    Packed<E, W> loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i)  // past the end the last one: no other can be behind it
      loaded[i] = Packed<E, W>::load(from + int64_t{min(first + i * step, packs - 1)} * W);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float largest = largest_of(loaded[i]);
      if (largest > most) best = loaded[i], at = min(first + i * step, packs - 1);
      most = max_or_nan(most, largest);
    }
  }
  float x[W];
  best.to_floats(x);
  int id = at * W;
#pragma unroll
  for (int w = W - 1; w >= 0; --w)
    if (x[w] == most) id = at * W + w;
  const Key key = largest_of_blocks(reduce<kThreads>(key_of(most, id), Max()), block, blocks, keys);
  if (block == 0 && threadIdx.x == 0) ids[row] = id_of(key);
}

}  // namespace

template <class Device, class T>
void argmax(Context<Device>& context, const T* logits, int64_t rows, int64_t cols, int64_t* ids) {
  if (rows == 0) return;
  FTBERT_CHECK(cols < (1 << 30), "argmax: a row has at most 2^30 elements, got ", cols);
  FTBERT_CHECK(rows < (1 << 30), "argmax: at most 2^30 rows, got ", rows);
  with_width<kWidth<T>>(vectorizable(kWidth<T>, cols, logits), [&]<int W>() {
    const auto packs = static_cast<int>(cols / W);
    int blocks = 1;
    while (context.capability >= 90 && blocks < kMostBlocks && packs > blocks * kThreads &&
           2 * blocks * rows <= context.sm_count)
      blocks *= 2;
    launch_overlapped(context, "kernel argmax", argmax_kernel<W, native_t<T>>, static_cast<unsigned>(rows * blocks),
                      kThreads, 0, blocks, native(logits), packs, blocks, ids);
  });
}

FTBERT_INSTANTIATE_CUDA(argmax, Cuda)

}  // namespace ftbert
