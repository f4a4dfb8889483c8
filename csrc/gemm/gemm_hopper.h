// Matrix products of our own for many rows on Hopper, bias and activation applied to the float sums. No CUDA header.
#pragma once
#include "gemm/gemm_fused.h"

namespace ftbert {

// Ways to run one, numbered from 0.
int hopper_gemm_variants();
FusedTile hopper_gemm_tile(int variant);
bool hopper_gemm_supports(int capability, int variant, const FusedGemm& gemm);
void run_hopper_gemm(const Context<Cuda>& context, int variant, const FusedGemm& gemm);

}  // namespace ftbert
