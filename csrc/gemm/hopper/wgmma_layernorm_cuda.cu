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
  return p.a == DType::e4m3 ? guess_scaled_norm(gpu, p, After::norm) : guess_norm<Shapes>(gpu, p, After::norm);
}

constexpr Parts kReads{Part::bias, Part::residual, Part::norm};

}  // namespace

const OwnKernel wgmma_layernorm{"wgmma_layernorm", Shapes::kVariants, kReads, supports, guess, run};

}  // namespace ftbert
