// Matrix products of our own that contain bias and activation: for few rows on any GPU, where cuBLASLt's are all
// latency, with small tiles, the sum over k split over a cluster and any activation on the float sums; and those of
// gemm_hopper.h. No CUDA header.
#pragma once
#include <cstdint>

#include "core/context.h"
#include "core/types.h"

namespace ftbert {

// c [m, n] = activation(a [m, k] @ b [n, k]^T + bias [n]), 16-bit elements, 16-byte aligned; bias may be nullptr.
struct FusedGemm {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::fp16;
  Activation activation = Activation::none;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  void* c = nullptr;
};

struct FusedTile {
  int rows, columns, split;  // of C in a block, and over how many blocks its k is split
};

// Ways to run one, numbered from 0.
int fused_gemm_variants();
bool is_fused_gemm(int variant);  // some numbers are of products that are no more
FusedTile fused_gemm_tile(int variant);
// Whether this GPU (10 * major + minor; bytes of shared memory a block) and this build have it, for operands aligned as
// said above.
bool fused_gemm_supports(int capability, int shared_bytes, int variant, const FusedGemm& gemm);
void run_fused_gemm(const Context<Cuda>& context, int variant, const FusedGemm& gemm);

}  // namespace ftbert
