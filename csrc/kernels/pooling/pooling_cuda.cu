// One vector a sequence from its packed tokens, in float, all sequences in one launch; optionally to unit length.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 512;
constexpr float kUnitEps = 1e-12f;  // torch.nn.functional.normalize

// W pooled floats, 16 bytes at a time where W allows.
template <int W>
__device__ void store_floats(const float (&x)[W], float* to) {
  constexpr int kStep = W < 4 ? 1 : 4;
#pragma unroll
  for (int w = 0; w < W; w += kStep) {
    float part[kStep];
#pragma unroll
    for (int i = 0; i < kStep; ++i) part[i] = x[w + i];
    Packed<float, kStep>::from_floats(part).store(to + w);
  }
}

// A block a sequence. `tile` threads stand side by side over the columns; kThreads / tile groups of them share the
// tokens out, each summing every groups-th, and then join in a fixed order: results do not change from run to run.
template <bool kMax, int W, class E>
__global__ void __launch_bounds__(kThreads)
    pooling_kernel(const E* __restrict__ hidden, const int32_t* __restrict__ cu_seqlens, int64_t batch, int packs,
                   PoolingMode mode, bool normalize, float* out) {
  __shared__ float joined[W][kThreads];
  const int tile = min(packs, kThreads), groups = kThreads / tile;
  const int group = threadIdx.x / tile, lane = threadIdx.x % tile;
  const int64_t cols = int64_t{packs} * W;

  for (int64_t sequence = blockIdx.x; sequence < batch; sequence += gridDim.x) {
    int64_t begin = sequence, end = sequence + 1;
    if (cu_seqlens) begin = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
    const bool empty = begin >= end;
    if (!empty && mode == PoolingMode::cls) end = begin + 1;
    if (!empty && mode == PoolingMode::last) begin = end - 1;
    const float tokens = static_cast<float>(end - begin);
    const float scale = mode == PoolingMode::mean            ? 1.0f / tokens
                        : mode == PoolingMode::mean_sqrt_len ? 1.0f / sqrtf(tokens)
                                                             : 1.0f;
    // NaN wins in max as it does in torch.
    const auto join = [](float a, float b) { return !kMax ? a + b : a > b || a != a ? a : b; };
    float squares = 0;
    for (int first = 0; first < packs; first += tile) {
      const int pack = first + lane;
      float x[W];
#pragma unroll
      for (int w = 0; w < W; ++w) x[w] = kMax ? -INFINITY : 0.0f;
      if (group < groups && pack < packs) {
#pragma unroll 4
        for (int64_t token = begin + group; token < end; token += groups) {
          float y[W];
          Packed<E, W>::load(hidden + token * cols + int64_t{pack} * W).to_floats(y);
#pragma unroll
          for (int w = 0; w < W; ++w) x[w] = join(x[w], y[w]);
        }
      }
#pragma unroll
      for (int w = 0; w < W; ++w) joined[w][threadIdx.x] = x[w];
      __syncthreads();
      if (group == 0 && pack < packs) {
#pragma unroll
        for (int w = 0; w < W; ++w) {
          for (int g = 1; g < groups; ++g) x[w] = join(x[w], joined[w][g * tile + lane]);
          x[w] = empty ? 0.0f : x[w] * scale;
          squares += x[w] * x[w];
        }
        store_floats(x, out + sequence * cols + int64_t{pack} * W);
      }
      __syncthreads();
    }
    if (!normalize) continue;
    const float to_unit = 1.0f / fmaxf(sqrtf(reduce<kThreads>(squares, Sum())), kUnitEps);
    // Each thread reads back only what it stored itself.
    if (group == 0) {
      for (int pack = lane; pack < packs; pack += tile) {
        float* row = out + sequence * cols + int64_t{pack} * W;
#pragma unroll
        for (int w = 0; w < W; ++w) row[w] *= to_unit;
      }
    }
  }
}

}  // namespace

template <class Device, class T>
void pooling(Context<Device>& context, const T* hidden, const int32_t* cu_seqlens, int64_t batch, int64_t cols,
             PoolingMode mode, bool normalize, float* out) {
  if (batch == 0 || cols == 0) return;
  FTBERT_CHECK(cols < (1 << 30), "pooling: a row has at most 2^30 elements, got ", cols);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(batch, 1 << 30));
  const auto launch = [&]<int W>() {
    using E = native_t<T>;
    const auto kernel = mode == PoolingMode::max ? pooling_kernel<true, W, E> : pooling_kernel<false, W, E>;
    launch_kernel(context, "kernel pooling", kernel, blocks, kThreads, native(hidden), cu_seqlens, batch, cols / W,
                  mode, normalize, out);
  };
  with_width<kWidth<T>>(vectorizable(kWidth<T>, cols, hidden) && vectorizable(kWidth<float>, cols, out), launch);
}

FTBERT_INSTANTIATE_CUDA(pooling, Cuda)

}  // namespace ftbert
