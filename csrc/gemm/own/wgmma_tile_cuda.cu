// Products for up to some 2000 rows on Hopper: one tile of C a block, and nothing of such a product takes long but
// getting started and getting done. One thread asks the tensor memory accelerator for tiles; warpgroups multiply
// (wgmma), for other rows each or in turns for the next 64 of k. The thread asks for weights while the kernel ahead
// still runs, and for A as soon as that has ended. Blocks with at most half of a multiprocessor's shared memory come in
// twos; those with more have one to themselves.
//
// A warpgroup instruction for few columns takes no longer than the instructions around it: the loop over k is written
// out for all stages, so that only constants differ between them, with addresses in uniform registers. Where k is
// divided, over warpgroups or blocks of a cluster, each part finishes some of the tile's columns: it is sent the
// others' sums of these, in the layout of the registers they come from, and nobody waits for more than that.
#include "gemm/own/wgmma_tile.cuh"

namespace ftbert {
namespace {

// Bias and activation.
template <class E, class Shape>
struct Plain {
  struct Arguments {
    const void* bias;
    void* c;
    Activation activation;
  };
  static constexpr int kVectors = 0;

  const Arguments& arguments;
  const FewWork& work;
  int64_t row0 = 0;
  int column0 = 0;
  float2 bias[Shape::kOwn];

  __device__ Plain(const Arguments& arguments, const FewWork& work) : arguments(arguments), work(work) {}

  __device__ void look_ahead(int64_t row, int first_column) {
    row0 = row, column0 = first_column;
#pragma unroll
    for (int j = 0; j < Shape::kOwn; ++j) {
      const int column = column0 + j * 8 + threadIdx.x % 4 * 2;
      float b[2] = {};
      if (arguments.bias && column < work.n)
        Packed<E, 2>::load(static_cast<const E*>(arguments.bias) + column).to_floats(b);
      bias[j] = {b[0], b[1]};
    }
  }

  __device__ void finish(const float (&own)[Shape::kOwn][4], const float*, char* area) {
    stage_rows<E, Shape>(area, [&](int j, int c) { return own[j][c] + (c % 2 ? bias[j].y : bias[j].x); });
    with_activation(arguments.activation, [&](auto kind) {
      store_rows<E, decltype(kind)::value, Shape>(area, work, arguments.c, row0, column0);
    });
  }
};

template <class E>
struct RunPlain {
  template <class Shape>
  static void with(const Context<Cuda>& context, const FusedGemm& g) {
    launch_few<E, Shape, Plain<E, Shape>>(context, "kernel few_gemm", g, {g.bias, g.c, g.activation});
  }
};

}  // namespace

int few_gemm_variants() { return static_cast<int>(FewShapes::kTiles.size()); }

FusedTile few_gemm_tile(int variant) { return FewShapes::kTiles[variant]; }

bool few_gemm_supports(int capability, int variant, const FusedGemm& g) {
  if (variant < 0 || variant >= few_gemm_variants() || !has_warpgroups(capability)) return false;
  const int64_t most_rows = 32 * FewShapes::kTiles[variant].rows;  // from there on a kernel that stays is faster
  return g.dtype != DType::fp32 && g.m > 0 && g.m <= most_rows && g.n > 0 && g.k > 0 && g.n % 8 == 0 && g.k % 8 == 0 &&
         std::max(g.n, g.k) < (1 << 24) && (g.k + kStep - 1) / kStep >= FewShapes::kParts[variant];
}

int few_gemm_guessed_place(int capability, int sm_count, const FusedGemm& g) {
  const auto fits = [&](int variant, double share) {
    const FusedTile tile = few_gemm_tile(variant);
    const int64_t blocks = (g.m + tile.rows - 1) / tile.rows * ((g.n + tile.columns - 1) / tile.columns) * tile.split;
    return few_gemm_supports(capability, variant, g) && static_cast<double>(blocks) <= share * sm_count;
  };
  if (g.m > 1024) return -1;
  const bool short_k = g.k <= 8 * kStep, long_k = g.k >= 32 * kStep;
  if (g.m <= 256 && (g.k > g.n || (long_k && g.k == g.n))) {
    const int variant = g.k < 16 * kStep ? -1
                        : !long_k        ? FewShapes::place<InTwos<64, 4>>()
                        : g.m <= 128     ? FewShapes::place<Single<96, 4>>()
                                         : FewShapes::place<Single<48, 2>>();
    if (variant >= 0 && fits(variant, 1)) return variant;
  }
  const bool in_twos = short_k && g.m <= 256;
  const int narrow[] = {
      in_twos ? FewShapes::place<InTwos<32, 1>>() : FewShapes::place<KShared<32, 1>>(),
      in_twos ? FewShapes::place<InTwos<48, 1>>() : FewShapes::place<KShared<48, 1>>(),
      in_twos ? FewShapes::place<InTwos<64, 1>>() : FewShapes::place<KShared<64, 1>>(),
      in_twos ? FewShapes::place<InTwos<96, 1>>() : FewShapes::place<KShared<96, 1>>(),
      FewShapes::place<Tall<64>>(),
      FewShapes::place<Tall<96>>(),
      FewShapes::place<Tall<128>>(),
      FewShapes::place<Tall<192>>(),
  };
  const bool with_96 = g.m <= 192 || long_k;
  const double share = long_k || g.k > g.n ? 1 : short_k ? (in_twos ? 0.75 : 0.9) : g.m <= 128 ? 0.6 : 1;
  for (const double limit : {share, 1.0})
    for (const int variant : narrow)
      if ((with_96 || variant != FewShapes::place<KShared<96, 1>>()) && fits(variant, limit)) return variant;
  return -1;
}

void run_few_gemm(const Context<Cuda>& context, int variant, const FusedGemm& g) {
  g.dtype == DType::fp16 ? FewShapes::run<RunPlain<__half>>(variant, context, g)
                         : FewShapes::run<RunPlain<__nv_bfloat16>>(variant, context, g);
}

}  // namespace ftbert
