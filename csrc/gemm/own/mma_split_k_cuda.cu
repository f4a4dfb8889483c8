// Products for few rows on any GPU, with any activation on the float sums. A block computes one tile of C over its
// share of k: tiles of A and B come through a ring of shared-memory stages (cp.async), tensor cores multiply (mma.sync:
// with this little work the instruction's rate does not count, its latency does). The blocks of a cluster share a tile
// and add their sums through distributed shared memory, always in the same order. While the kernel ahead still runs, a
// block asks for its part of B in the L2 cache.
#include <cooperative_groups.h>

#include <algorithm>
#include <array>
#include <utility>

#include "device/activation.cuh"
#include "device/launch.cuh"
#include "device/tile_loader.cuh"
#include "device/vector.cuh"
#include "gemm/own/own.h"

namespace ftbert {
namespace {

constexpr int kStep = 64;  // columns of A and B in a stage: rows of 128 bytes

struct Work {
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

// Rows [first_row, last_row) of the tile of `kColumns` columns at (row0, column0), by threads 0 to kThreads - 1: the
// cluster's sums added, always in the same order, bias, activation, 16 bytes at a time.
template <Activation kActivation, class E, int kThreads, int kColumns>
__device__ void store_sums(const Work& o, const float* sums, int64_t row0, int column0, int first_row, int last_row) {
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

template <int kTileM_, int kTileN_, int kWarpsM_, int kWarpsN_, int kStages_>
struct TileShape {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kStages = kStages_;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kRows = kTileM / kWarpsM, kColumns = kTileN / kWarpsN;  // of a warp
  static constexpr int kBytesA = kTileM * kStep * 2, kBytesB = kTileN * kStep * 2;
  static constexpr int kBytes = std::max(kStages * (kBytesA + kBytesB), kTileM* kSumStride<kTileN> * 4);
  static_assert(kRows % 16 == 0 && kColumns % 16 == 0);
};

template <class E, class Shape>
__global__ void __launch_bounds__(Shape::kThreads) mma_split_k_kernel(Work o, Activation activation) {
  extern __shared__ __align__(128) char memory[];
  const int rank = blockIdx.x % o.split, column0 = static_cast<int>(blockIdx.x / o.split) * Shape::kTileN;
  const int64_t row0 = int64_t{blockIdx.y} * Shape::kTileM;
  const int all = o.k / kStep, first = all * rank / o.split, steps = all * (rank + 1) / o.split - first;
  const E* a = static_cast<const E*>(o.a) + row0 * o.k + first * kStep;
  const E* b = static_cast<const E*>(o.b) + static_cast<int64_t>(column0) * o.k + first * kStep;

#if __CUDA_ARCH__ >= 900
  // Before the wait: weights do not change while a model runs, and where one has just now (in a test) this fills the
  // L2 cache alone, which is coherent.
  for (int i = threadIdx.x; i < Shape::kTileN * steps; i += Shape::kThreads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(b + static_cast<int64_t>(i / steps) * o.k + i % steps * kStep));
#endif
  wait_for_inputs();

  const uint32_t shared = shared_address(memory);
  const TileLoader<E, kStep, Shape::kThreads> loader(o.k);
  const int valid = static_cast<int>(min(int64_t{Shape::kTileM}, o.m - row0));
  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t stage = shared + step % Shape::kStages * (Shape::kBytesA + Shape::kBytesB);
      loader.template load<Shape::kTileM>(stage, a + step * kStep, Shape::kTileM, valid);
      loader.template load<Shape::kTileN>(stage + Shape::kBytesA, b + step * kStep, Shape::kTileN, Shape::kTileN);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int s = 0; s + 1 < Shape::kStages; ++s) load(s);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp / Shape::kWarpsN * Shape::kRows, first_column = warp % Shape::kWarpsN * Shape::kColumns;
  float sum[Shape::kRows / 16][Shape::kColumns / 8][4] = {};
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<Shape::kStages - 2>();
    __syncthreads();
    load(step + Shape::kStages - 1);  // into the stage that everybody has left
    const uint32_t stage = shared + step % Shape::kStages * (Shape::kBytesA + Shape::kBytesB);
#pragma unroll
    for (int d = 0; d < kStep / 16; ++d) {
      uint32_t rows[Shape::kRows / 16][4];
#pragma unroll
      for (int i = 0; i < Shape::kRows / 16; ++i)
        load_matrices(rows[i], swizzled<kStep>(stage, first_row + i * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
      for (int j = 0; j < Shape::kColumns / 16; ++j) {
        uint32_t columns[4];
        load_matrices(columns, swizzled<kStep>(stage + Shape::kBytesA, first_column + j * 16 + lane / 16 * 8 + lane % 8,
                                               2 * d + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < Shape::kRows / 16; ++i) {
          multiply_add<E>(sum[i][2 * j], rows[i], columns[0], columns[1]);
          multiply_add<E>(sum[i][2 * j + 1], rows[i], columns[2], columns[3]);
        }
      }
    }
  }
  copy_async_wait<0>();
  __syncthreads();

  float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int i = 0; i < Shape::kRows / 16; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kColumns / 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + i * 16 + lane / 4 + 8 * r, column = first_column + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(sums + row * kSumStride<Shape::kTileN> + column) =
            make_float2(sum[i][j][2 * r], sum[i][j][2 * r + 1]);
      }
#if __CUDA_ARCH__ >= 900
  if (o.split > 1)
    cooperative_groups::this_cluster().sync();
  else
#else
  if (o.split > 1) __trap();  // there are no clusters
#endif
    __syncthreads();

  const int from = Shape::kTileM * rank / o.split, to = Shape::kTileM * (rank + 1) / o.split;
  with_activation(activation, [&](auto kind) {
    store_sums<decltype(kind)::value, E, Shape::kThreads, Shape::kTileN>(o, sums, row0, column0, from, to);
  });
#if __CUDA_ARCH__ >= 900
  if (o.split > 1) cooperative_groups::this_cluster().sync();  // the others may still read this block's sums
#endif
}

template <class E, class Shape>
void launch(const Context<Cuda>& context, const Product& p, const ProductData& d, int split) {
  const dim3 grid(static_cast<unsigned>(p.n / Shape::kTileN * split),
                  static_cast<unsigned>((p.m + Shape::kTileM - 1) / Shape::kTileM));
  launch_overlapped(context, "kernel mma_split_k", mma_split_k_kernel<E, Shape>, grid, Shape::kThreads, Shape::kBytes,
                    split, Work{d.a, d.b, d.bias, d.c, p.m, static_cast<int>(p.n), static_cast<int>(p.k), split},
                    p.epilogue.activation);
}

constexpr int kSplits[] = {1, 2, 4, 8};
struct Size {
  int m, n, bytes;  // bytes: of shared memory
};
template <class... Shapes>
struct List {
  static constexpr Size kSizes[] = {{Shapes::kTileM, Shapes::kTileN, Shapes::kBytes}...};
  template <class E>
  static constexpr std::array kLaunches{launch<E, Shapes>...};
};
using Shapes = List<TileShape<16, 64, 1, 4, 8>, TileShape<32, 64, 2, 2, 8>, TileShape<64, 64, 2, 2, 6>,
                    TileShape<128, 64, 4, 2, 4>, TileShape<128, 128, 2, 4, 4>>;

// Each shape with each split.
constexpr int kSplitCount = static_cast<int>(std::size(kSplits));
constexpr auto kVariants = []<size_t... kIndices>(std::index_sequence<kIndices...>) {
  return std::array{OwnVariant({Shapes::kSizes[kIndices / kSplitCount].m, Shapes::kSizes[kIndices / kSplitCount].n,
                                kSplits[kIndices % kSplitCount]})...};
}(std::make_index_sequence<kSplitCount * std::size(Shapes::kSizes)>());

void run(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data) {
  const auto& launches = product.a == DType::fp16 ? Shapes::kLaunches<__half> : Shapes::kLaunches<__nv_bfloat16>;
  launches[variant / kSplitCount](context, product, data, kSplits[variant % kSplitCount]);
}

bool supports(const Gpu& gpu, int variant, const Product& p) {
  const Size size = Shapes::kSizes[variant / kSplitCount];
  const int split = kVariants[variant].tile.split;
  const int64_t blocks = (p.m + size.m - 1) / size.m;
  return is_16_bit_linear(p) && !p.epilogue.residual_norm && p.n % size.n == 0 && p.k % kStep == 0 &&
         p.k / kStep >= split && std::max(p.n, p.k) < (1 << 24) && blocks <= 65535 &&
         (split == 1 || gpu.capability >= 90) && size.bytes <= gpu.shared_bytes;
}

OwnGuess guess(const Gpu&, const Product&) { return {}; }

}  // namespace

const OwnKernel mma_split_k{"mma_split_k", kVariants, supports, guess, run};

}  // namespace ftbert
