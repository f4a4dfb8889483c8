// Matrix products of our own on Hopper. No CUDA header.
#pragma once
#include "gemm/gemm_fused.h"

namespace ftbert {

// In all of them the bias is added to the float sums; the activation is applied to them rounded, as after cuBLASLt. Ways
// to run one are numbered from 0.

// For many rows; no activation but erf GELU.
int hopper_gemm_variants();
FusedTile hopper_gemm_tile(int variant);
bool hopper_gemm_supports(int capability, int variant, const FusedGemm& gemm);
void run_hopper_gemm(const Context<Cuda>& context, int variant, const FusedGemm& gemm);

// For up to some 2000 rows.
int few_gemm_variants();
FusedTile few_gemm_tile(int variant);
bool few_gemm_supports(int capability, int variant, const FusedGemm& gemm);
void run_few_gemm(const Context<Cuda>& context, int variant, const FusedGemm& gemm);

}  // namespace ftbert
