// Products for few rows on Hopper: nothing of such a product takes long but getting started. A block computes one tile
// of C of 64 rows over its share of k, one warpgroup multiplying (wgmma), one thread asking the tensor memory
// accelerator for tiles. It asks for weights while the kernel ahead still runs, and for A as soon as that has ended;
// with at most half of a multiprocessor's shared memory a block can come while one of the kernel ahead is there. The
// blocks of a cluster share a tile and add their sums through distributed shared memory.
#include <cooperative_groups.h>

#include <algorithm>

#include "core/check.h"
#include "gemm/gemm_hopper.h"
#include "gemm/tile_sums.cuh"
#include "kernels/launch.cuh"
#include "kernels/mma.cuh"
#include "kernels/tensor_map.h"
#include "kernels/tma.cuh"
#include "kernels/wgmma.cuh"

namespace ftbert {
namespace {

constexpr int kTileM = 64, kStep = 64;  // a row of a stage: 64 elements, 128 bytes
constexpr int kMultiplying = 128, kThreads = kMultiplying + 32;
constexpr int kBytesA = kTileM * kStep * 2;
constexpr int64_t kMostRows = 2048;  // from there on a larger tile reads less

template <int kTileN_>
struct FewShape {
  static constexpr int kTileN = kTileN_;
  static constexpr int kStageBytes = kBytesA + kTileN * kStep * 2;
  static constexpr int kStages = 101 * 1024 / kStageBytes;
  static constexpr int kBytes = 1024 + kStages * (kStageBytes + 16);
  static_assert(kTileM * kSumStride<kTileN> * 4 <= kStages * kStageBytes);
};

template <class E, class Shape>
__global__ void __launch_bounds__(kThreads)
    few_gemm_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                    const Operands o, const Activation activation) {
#ifdef FTBERT_WGMMA
  constexpr int kTileN = Shape::kTileN, kStages = Shape::kStages;
  extern __shared__ char unaligned_memory[];
  char* const memory = unaligned_memory + (1024 - shared_address(unaligned_memory) % 1024) % 1024;
  const uint32_t base = shared_address(memory);
  const uint32_t full = base + kStages * Shape::kStageBytes, empty = full + 8 * kStages;
  const int rank = blockIdx.x % o.split, column0 = static_cast<int>(blockIdx.x / o.split) * kTileN;
  const int row0 = static_cast<int>(blockIdx.y) * kTileM;
  const int all = (o.k + kStep - 1) / kStep, first = all * rank / o.split, steps = all * (rank + 1) / o.split - first;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const auto load_a = [&](int step) {
    const int stage = step % kStages;
    tma_load(base + stage * Shape::kStageBytes, map_a, (first + step) * kStep, row0, full + 8 * stage);
  };
  const auto load_b = [&](int step) {
    const int stage = step % kStages;
    barrier_expect(full + 8 * stage, Shape::kStageBytes);
    tma_load(base + stage * Shape::kStageBytes + kBytesA, map_b, (first + step) * kStep, column0, full + 8 * stage);
  };

  const int at_once = min(steps, kStages);
  if (threadIdx.x == kMultiplying) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kMultiplying / 32);
    }
    barrier_init_fence();
    // Weights do not change while a model runs: whoever changes them launches something else before the next product.
    for (int step = 0; step < at_once; ++step) load_b(step);
  }
  __syncthreads();

  if (warp == kMultiplying / 32) {
    if (lane != 0) return;
    wait_for_inputs();
    for (int step = 0; step < at_once; ++step) load_a(step);
    for (int step = kStages; step < steps; ++step) {
      barrier_wait(empty + 8 * (step % kStages), (step / kStages - 1) % 2);
      load_b(step);
      load_a(step);
    }
    return;
  }

  // What is written below comes after A has come, so after the wait above.
  float sum[kTileN / 8][4];
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages;
    const uint32_t a = base + stage * Shape::kStageBytes, b = a + kBytesA;
    barrier_wait(full + 8 * stage, step / kStages % 2);
    warpgroup_fence();
#pragma unroll
    for (int d = 0; d < kStep / 16; ++d)
      warpgroup_multiply_nt<E>(sum, matrix_descriptor<128>(a + d * 32), matrix_descriptor<128>(b + d * 32),
                               step > 0 || d > 0);
    warpgroup_commit();
    if (step > 0) {
      warpgroup_wait<1>();
      if (lane == 0) barrier_arrive(empty + 8 * ((step - 1) % kStages));
    }
  }
  warpgroup_wait();
  warpgroup_keep(sum);
  named_barrier_wait(1, kMultiplying);  // nobody reads the stages any more

  float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<float2*>(sums + (warp * 16 + lane / 4 + 8 * r) * kSumStride<kTileN> + j * 8 + lane % 4 * 2) =
          make_float2(sum[j][2 * r], sum[j][2 * r + 1]);
  if (o.split > 1)
    cooperative_groups::this_cluster().sync();
  else
    named_barrier_wait(1, kMultiplying);
  store_sums<E, kMultiplying, kTileN>(o, activation, sums, row0, column0, kTileM * rank / o.split,
                                      kTileM * (rank + 1) / o.split);
  if (o.split > 1) cooperative_groups::this_cluster().sync();  // the others may still read this block's sums
#endif
}

template <class E, int kTileN>
void launch(const Context<Cuda>& context, const FusedGemm& g, int split) {
  using Shape = FewShape<kTileN>;
  const auto kernel = few_gemm_kernel<E, Shape>;
  FTBERT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes));
  const auto blocks = [](int64_t of, int64_t size) { return static_cast<unsigned>((of + size - 1) / size); };
  const dim3 grid(blocks(g.n, kTileN) * split, blocks(g.m, kTileM));
  launch_overlapped(context, "kernel few_gemm", kernel, grid, kThreads, Shape::kBytes, split,
                    tensor_map(g.a, g.dtype, g.m, g.k, kTileM), tensor_map(g.b, g.dtype, g.n, g.k, kTileN),
                    Operands{g.a, g.b, g.bias, g.c, g.m, static_cast<int>(g.n), static_cast<int>(g.k), split},
                    g.activation);
}

constexpr int kTilesN[] = {32, 48, 64, 96}, kSplits[] = {1, 2, 4};
constexpr int kSplitCount = static_cast<int>(std::size(kSplits));

template <class E>
void run(const Context<Cuda>& context, int variant, const FusedGemm& g) {
  const int split = kSplits[variant % kSplitCount];
  switch (kTilesN[variant / kSplitCount]) {
    case 32: return launch<E, 32>(context, g, split);
    case 48: return launch<E, 48>(context, g, split);
    case 64: return launch<E, 64>(context, g, split);
    case 96: return launch<E, 96>(context, g, split);
    default: fail("there is no product for few rows ", variant);
  }
}

}  // namespace

int few_gemm_variants() { return static_cast<int>(std::size(kTilesN)) * kSplitCount; }

FusedTile few_gemm_tile(int variant) {
  return {kTileM, kTilesN[variant / kSplitCount], kSplits[variant % kSplitCount]};
}

bool few_gemm_supports(int capability, int variant, const FusedGemm& g) {
  return variant >= 0 && variant < few_gemm_variants() && has_warpgroups(capability) && g.dtype != DType::fp32 &&
         g.m > 0 && g.m <= kMostRows && g.n > 0 && g.k > 0 && g.n % 8 == 0 && g.k % 8 == 0 &&
         std::max(g.n, g.k) < (1 << 24) && (g.k + kStep - 1) / kStep >= kSplits[variant % kSplitCount];
}

void run_few_gemm(const Context<Cuda>& context, int variant, const FusedGemm& g) {
  g.dtype == DType::fp16 ? run<__half>(context, variant, g) : run<__nv_bfloat16>(context, variant, g);
}

}  // namespace ftbert
