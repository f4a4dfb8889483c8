// A product with the residual LayerNorm behind it in one kernel, whose result takes the residual's place: post-norm
// layers.
#include "gemm/hopper/wgmma_norm_launch.cuh"

namespace ftbert {
namespace {

// The first ones are there for E4M3 too: ScaledShapes.
using Shapes = ShapeList<NormShape<192, 64, true, 1>, NormShape<192, 64, false, 2>, NormShape<128, 128, false, 2>,
                         NormShape<256, 64, true, 1>, NormShape<192, 128, false, 1>, NormShape<128, 128, false, 1>,
                         NormShape<128, 64, false, 2>>;

void run(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  const auto launch = [&]<class E, class Shape>() { launch_norm<E, Shape, LayerRule, ResultMaps>(context, p, data); };
  if (p.a != DType::e4m3) return run_norm<Shapes>(variant, p, data, launch);
  FTBERT_CHECK(!data.copy || (data.copy_scale && data.copy != data.c),
               "wgmma_layernorm: expected a copy in e4m3 with a scale, in other memory than the result");
  run_norm<ScaledShapes>(variant, p, data, launch);
}

bool supports(const Gpu& gpu, int variant, const Product& p) {
  return (p.a != DType::e4m3 || variant < ScaledShapes::kCount) && supports_norm<Shapes>(gpu, variant, p, After::norm);
}

OwnGuess guess(const Gpu& gpu, const Product& p) {
  if (p.a == DType::e4m3) return guess_scaled_norm(gpu, p, After::norm);
  // The last two were fitted to 6 weights by 16 numbers of rows from 1056 to 33024 (H200, 4 % off in the mean). With
  // them the variant guessed takes 1.003 times as long as the fastest of these 96 products, without them 1.019 times.
  static constexpr TimeLine kLines[] = {
      {4, 3.66, 0.461, 1.10, 0, 0.625},   // 128x192 single
      {0, 0.52, 0.466, 3.51, 0, 0.554},   // 128x192 together
      {1, 3.01, 0.288, 0.13, 0, 0.927},   // 64x192
      {2, 3.37, 0.326, 0.28, 0, 0.899},   // 128x128
      {3, -0.32, 0.632, 3.62, 0, 0.866},  // 128x256 together
      {5, 3.01, 0.332, 0.674, 0, 0.881},  // 128x128 single
      {6, 2.62, 0.269, 0.284, 0, 0.656},  // 64x128
  };
  return guess_norm<Shapes>(gpu, p, After::norm, kLines);
}

}  // namespace

const OwnKernel wgmma_layernorm{"wgmma_layernorm", Shapes::kVariants, supports, guess, run};

}  // namespace ftbert
