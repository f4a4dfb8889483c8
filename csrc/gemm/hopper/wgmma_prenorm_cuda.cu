// A product, the residual sum, which stays, and the norm before the next block in one kernel: pre-norm layers.
#include "gemm/hopper/wgmma_norm_launch.cuh"

namespace ftbert {
namespace {

// ScaledShapes has the same for E4M3. Not 128x192 single, which would spill.
using Shapes = ShapeList<NormShape<192, 64, true, 1>, NormShape<192, 64, false, 2>, NormShape<128, 128, false, 2>,
                         NormShape<256, 64, true, 1>>;

void run(const Context<Cuda>& context, int variant, const Product& p, const ProductData& data) {
  FTBERT_CHECK(data.copy && data.copy != data.c, "wgmma_prenorm: expected other memory for the norm than for the sum");
  p.a == DType::e4m3 ? run_sum_and_norm<ScaledShapes>(context, variant, p, data)
                     : run_sum_and_norm<Shapes>(context, variant, p, data);
}

bool supports(const Gpu& gpu, int variant, const Product& p) {
  return supports_norm<Shapes>(gpu, variant, p, After::norm_beside);
}

// The lines of wgmma_layernorm, whose kernels move two matrices of m * n elements where these move three: 0.3 more for
// each element. With half more, a product and a norm of its own were chosen where these took 0.90 to 0.96 of the time
// (2048x768x1152, 2048x1024x2048, 2048x1024x3072; bf16, H100).
OwnGuess guess(const Gpu& gpu, const Product& p) {
  return p.a == DType::e4m3 ? guess_scaled_norm(gpu, p, After::norm_beside)
                            : guess_norm<Shapes>(gpu, p, After::norm_beside, 1.3);
}

constexpr Parts kReads{Part::bias, Part::residual, Part::norm_beside, Part::other_norm};

}  // namespace

const OwnKernel wgmma_prenorm{"wgmma_prenorm", Shapes::kVariants, kReads, supports, guess, run};

}  // namespace ftbert
