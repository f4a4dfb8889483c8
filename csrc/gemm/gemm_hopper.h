// Matrix products of our own for many rows on Hopper. The bias is added to the float sums; the activation, none or erf
// GELU, is applied to them rounded, as after cuBLASLt. No CUDA header.
#pragma once
#include "gemm/gemm_fused.h"

namespace ftbert {

// Ways to run one, numbered from 0.
int hopper_gemm_variants();
FusedTile hopper_gemm_tile(int variant);
bool hopper_gemm_supports(int capability, int variant, const FusedGemm& gemm);
void run_hopper_gemm(const Context<Cuda>& context, int variant, const FusedGemm& gemm);

}  // namespace ftbert
