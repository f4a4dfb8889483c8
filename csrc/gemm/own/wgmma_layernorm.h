// The product before a residual LayerNorm and that LayerNorm in one kernel, on Hopper. No CUDA header.
#pragma once
#include <cstdint>

#include "core/context.h"
#include "core/types.h"
#include "gemm/own/own.h"

namespace ftbert {

// x [m, n] = LayerNorm(a [m, k] @ b [n, k]^T + bias + x) * gamma + beta, 16-bit elements, all 16-byte aligned; bias may
// be nullptr. The sum is rounded once, at the end. A row is at most 8 tiles of 128, 192 or 256 columns. Parts of x are
// read before the kernel ahead has ended, unless Context::overlap is off: like weights, x must be there before that one
// begins to work.
struct NormGemm {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::fp16;
  float eps = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  const void* gamma = nullptr;
  const void* beta = nullptr;
  void* x = nullptr;
  // What the blocks that share a row tell each other, norm_gemm_moments(m) at least. Products of one stream may share
  // it if nobody else writes there and their turns are 0, 1, 2, ... in the order in which they run.
  uint64_t* moments = nullptr;
  int64_t moment_count = 0;
  int turn = 0;
};

inline constexpr int64_t kMostNormTiles = 8;  // side by side
constexpr int64_t norm_gemm_moments(int64_t m) { return (m + 127) / 128 * 128 * kMostNormTiles; }

// Ways to run one, numbered from 0.
int norm_gemm_variants();
FusedTile norm_gemm_tile(int variant);
// Whether this GPU (10 * major + minor) and this build have it.
bool norm_gemm_supports(int capability, int variant, const NormGemm& gemm);
void run_norm_gemm(const Context<Cuda>& context, int variant, const NormGemm& gemm);

}  // namespace ftbert
