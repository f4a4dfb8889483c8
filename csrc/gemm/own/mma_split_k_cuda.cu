// Products for few rows. A block computes one tile of C over its share of k: tiles of A and B come through a ring of
// shared-memory stages (cp.async), tensor cores multiply (mma.sync: with this little work the instruction's rate does
// not count, its latency does). The blocks of a cluster share a tile and add their sums through distributed shared
// memory, always in the same order. While the kernel ahead still runs, a block asks for its part of B in the L2 cache.
#include <cooperative_groups.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

#include "core/check.h"
#include "device/launch.cuh"
#include "device/tile_loader.cuh"
#include "device/vector.cuh"
#include "gemm/own/own.h"
#include "gemm/own/tile_sums.cuh"
#include "gemm/own/wgmma.h"

namespace ftbert {
namespace {

constexpr int kStep = 64;  // columns of A and B in a stage: rows of 128 bytes

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
__global__ void __launch_bounds__(Shape::kThreads) fused_gemm_kernel(Operands o, Activation activation) {
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
  store_sums<E, Shape::kThreads, Shape::kTileN>(o, activation, sums, row0, column0, from, to);
#if __CUDA_ARCH__ >= 900
  if (o.split > 1) cooperative_groups::this_cluster().sync();  // the others may still read this block's sums
#endif
}

template <class E, class Shape>
void launch(const Context<Cuda>& context, const FusedGemm& g, int split) {
  const auto kernel = fused_gemm_kernel<E, Shape>;
  if constexpr (Shape::kBytes > 48 * 1024)
    FTBERT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes));
  const dim3 grid(static_cast<unsigned>(g.n / Shape::kTileN * split),
                  static_cast<unsigned>((g.m + Shape::kTileM - 1) / Shape::kTileM));
  launch_overlapped(context, "kernel fused_gemm", kernel, grid, Shape::kThreads, Shape::kBytes, split,
                    Operands{g.a, g.b, g.bias, g.c, g.m, static_cast<int>(g.n), static_cast<int>(g.k), split},
                    g.activation);
}

constexpr int kSplits[] = {1, 2, 4, 8};
constexpr int kSplitCount = 4;
struct Size {
  int m, n, bytes;  // bytes: of shared memory
};
template <class... Shapes>
struct List {
  static constexpr Size kSizes[] = {{Shapes::kTileM, Shapes::kTileN, Shapes::kBytes}...};
  template <int kPlace>
  using At = std::tuple_element_t<kPlace, std::tuple<Shapes...>>;
};
using Shapes = List<TileShape<16, 64, 1, 4, 8>, TileShape<32, 64, 2, 2, 8>, TileShape<64, 64, 2, 2, 6>,
                    TileShape<128, 64, 4, 2, 4>, TileShape<128, 128, 2, 4, 4>>;
constexpr auto& kSizes = Shapes::kSizes;
constexpr int kSmallVariants = kSplitCount * static_cast<int>(std::size(kSizes));
// Tables store the numbers. That of gemm_hopper.h follows, 21 to 33 were products that are no more.
constexpr int kHopper = kSmallVariants, kFirstFew = 34;
static_assert(kHopper == 20);

template <class E>
void run(const Context<Cuda>& context, int variant, const FusedGemm& gemm) {
  const int split = kSplits[variant % kSplitCount];
  switch (variant / kSplitCount) {
    case 0: return launch<E, Shapes::At<0>>(context, gemm, split);
    case 1: return launch<E, Shapes::At<1>>(context, gemm, split);
    case 2: return launch<E, Shapes::At<2>>(context, gemm, split);
    case 3: return launch<E, Shapes::At<3>>(context, gemm, split);
    case 4: return launch<E, Shapes::At<4>>(context, gemm, split);
    default: fail("there is no fused product ", variant);
  }
}

}  // namespace

int few_gemm_guess(int capability, int sm_count, const FusedGemm& gemm) {
  const int place = few_gemm_guessed_place(capability, sm_count, gemm);
  return place < 0 ? -1 : kFirstFew + place;
}

int few_place(int fused_variant) { return fused_variant >= kFirstFew ? fused_variant - kFirstFew : -1; }

int fused_gemm_variants() { return kFirstFew + few_gemm_variants(); }

bool is_fused_gemm(int variant) {
  return variant >= 0 && variant < fused_gemm_variants() && (variant <= kHopper || variant >= kFirstFew);
}

FusedTile fused_gemm_tile(int variant) {
  if (variant < kSmallVariants)
    return {kSizes[variant / kSplitCount].m, kSizes[variant / kSplitCount].n, kSplits[variant % kSplitCount]};
  return variant < kFirstFew ? hopper_gemm_tile() : few_gemm_tile(variant - kFirstFew);
}

bool fused_gemm_supports(int capability, int shared_bytes, int variant, const FusedGemm& gemm) {
  if (!is_fused_gemm(variant) || gemm.dtype == DType::fp32) return false;
  if (variant >= kFirstFew) return few_gemm_supports(capability, variant - kFirstFew, gemm);
  if (variant == kHopper) return hopper_gemm_supports(capability, gemm);
  const Size size = kSizes[variant / kSplitCount];
  const int split = kSplits[variant % kSplitCount];
  const int64_t blocks = (gemm.m + size.m - 1) / size.m;
  return gemm.m > 0 && gemm.n > 0 && gemm.k > 0 && gemm.n % size.n == 0 && gemm.k % kStep == 0 &&
         gemm.k / kStep >= split && std::max(gemm.n, gemm.k) < (1 << 24) && blocks <= 65535 &&
         (split == 1 || capability >= 90) && size.bytes <= shared_bytes;
}

void run_fused_gemm(const Context<Cuda>& context, int variant, const FusedGemm& gemm) {
  FTBERT_CHECK(fused_gemm_supports(context.capability, context.shared_bytes, variant, gemm), "the fused product ",
               variant, " cannot do m=", gemm.m, " n=", gemm.n, " k=", gemm.k, " and ", to_string(gemm.activation));
  for (const void* p : {gemm.a, gemm.b, gemm.bias, static_cast<const void*>(gemm.c)})
    FTBERT_CHECK(reinterpret_cast<uintptr_t>(p) % 16 == 0, "a fused product needs operands aligned to 16 bytes");
  if (variant >= kFirstFew) return run_few_gemm(context, variant - kFirstFew, gemm);
  if (variant == kHopper) return run_hopper_gemm(context, gemm);
  gemm.dtype == DType::fp16 ? run<__half>(context, variant, gemm) : run<__nv_bfloat16>(context, variant, gemm);
}

}  // namespace ftbert
