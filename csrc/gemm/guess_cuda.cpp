// A product of our own takes about as long as the waves of its blocks, and a wave as its steps of k: what a line says,
// fitted to 448 products of three models with 1056 to 16384 rows on an H200 (4 % off in the mean). Layers that run what
// these lines find the fastest took 1.008 times as long as with a table of measured choices, in the geometric mean of
// 57 sizes from 1026 to 16384 rows; BERT-large's, whose k of 4096 meets a last wave that cuBLASLt's tiles fill
// better, 1.015 times. Another Hopper has other clocks, which divide all lines alike; its multiprocessors count.
#include <limits>

#include "gemm/guess.h"
#include "gemm/own/own.h"
#include "gemm/own/wgmma.h"
#include "gemm/own/wgmma_layernorm.h"

namespace ftbert {
namespace {

constexpr int64_t kFewRows = 1024;  // up to here few_gemm_guess knows better, and layers fold their LayerNorms

// Microseconds: start + waves * (step * ceil(k / 64) + wave + gelu, if there is one) + area * m * n / 10^6.
struct Line {
  int variant;
  double start, step, wave, gelu, area;
};
constexpr int kPersistent = 20;
constexpr Line kFused[] = {
    {kPersistent, 2.80, 0.350, 0.323, 1.07, 0},  // 128x128, blocks that stay
    {49, 2.25, 0.115, 0, 0.43, 0},               // 64x64, and the following with one wave only
    {51, 2.53, 0.136, 0, 0.65, 0},               // 64x96
    {52, 2.37, 0.175, 0, 0.43, 0},               // 128x64
    {53, 2.65, 0.241, 0, 0.65, 0},               // 128x96
    {54, 2.79, 0.303, 0, 0.87, 0},               // 128x128
};
constexpr Line kNorm[] = {
    {0, 3.66, 0.461, 1.10, 0, 0.625},   // 128x192
    {1, 0.52, 0.466, 3.51, 0, 0.554},   // the same, two warpgroups at one tile
    {2, 3.01, 0.288, 0.13, 0, 0.927},   // 64x192
    {3, 3.37, 0.326, 0.28, 0, 0.899},   // 128x128
    {6, -0.32, 0.632, 3.62, 0, 0.866},  // 128x256
};
constexpr double kFollowingNorm[] = {0.79, 1.28};  // add_bias_input_layernorm: start, and for a million elements

int64_t over(int64_t of, int64_t size) { return (of + size - 1) / size; }

double microseconds(const Line& line, double waves, const GemmProblem& p) {
  const double million = 1e-6 * static_cast<double>(p.m) * static_cast<double>(p.n);
  const bool gelu = p.activation == Activation::gelu_erf || p.activation == Activation::gelu_tanh;
  return line.start + waves * (line.step * static_cast<double>(over(p.k, 64)) + line.wave + (gelu ? line.gelu : 0)) +
         line.area * million;
}

// cuBLASLt's first proposal, of which it is not known how well it fills its waves: 3 % are for that.
double cublas_microseconds(const GemmProblem& p, bool activation_follows) {
  const double million = 1e-6 * static_cast<double>(p.m) * static_cast<double>(p.n);
  return 1.03 * (4.0 + million * (2.63e-3 * static_cast<double>(p.k) + 0.38 + (activation_follows ? 0.85 : 0)));
}

}  // namespace

GemmGuess guess_gemm(int capability, int sm_count, const GemmProblem& p) {
  GemmGuess guess;
  const FusedGemm gemm{.m = p.m, .n = p.n, .k = p.k, .dtype = p.dtype, .activation = p.activation};
  if (p.m <= kFewRows && (p.layernorm || (guess.fused = few_gemm_guess(capability, sm_count, gemm)) >= 0)) return guess;

  double best = cublas_microseconds(p, p.activation != Activation::none);
  for (const Line& line : kFused) {
    if (!fused_gemm_supports(capability, std::numeric_limits<int>::max(), line.variant, gemm)) continue;
    const FusedTile tile = fused_gemm_tile(line.variant);
    const int64_t blocks = over(p.m, tile.rows) * over(p.n, tile.columns);
    if (line.variant != kPersistent && blocks > sm_count) continue;
    const double us = microseconds(line, line.variant == kPersistent ? hopper_gemm_waves(sm_count, gemm) : 1, p);
    if (us < best) best = us, guess.fused = line.variant;
  }
  if (!p.layernorm) return guess;

  guess.fused = -1;
  best += kFollowingNorm[0] + kFollowingNorm[1] * 1e-6 * static_cast<double>(p.m) * static_cast<double>(p.n);
  for (const Line& line : kNorm) {
    const NormGemm norm{.m = p.m, .n = p.n, .k = p.k, .dtype = p.dtype};
    if (!norm_gemm_supports(capability, line.variant, norm)) continue;
    const FusedTile tile = norm_gemm_tile(line.variant);
    const int64_t at_once = sm_count / (p.n / tile.columns);  // rows of tiles
    if (at_once == 0) continue;
    const double us = microseconds(line, static_cast<double>(over(over(p.m, tile.rows), at_once)), p);
    if (us < best) best = us, guess.norm = line.variant;
  }
  return guess;
}

}  // namespace ftbert
