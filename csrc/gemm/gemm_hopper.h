// Matrix products of our own on Hopper. No CUDA header.
#pragma once
#include "gemm/gemm_fused.h"

namespace ftbert {

// In all of them the bias is added to the float sums; the activation is applied to them rounded, as after cuBLASLt.
// Ways to run one are numbered from 0.

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
// Which one to take where nothing was measured, or -1: the narrowest tile with which every block has a multiprocessor
// of its own; where k is long, first one that divides it. Of 16 products of BERT-base and large with 128 to 1024 rows,
// LayerNorm behind, it is 1 % slower on average than the best of all and 8 % at most (H200); cuBLASLt's best of eight
// proposals was 0 to 53 % slower than it.
int few_gemm_guess(int capability, int sm_count, const FusedGemm& gemm);
// Which of them a variant of gemm_fused.h is, or -1.
int few_place(int fused_variant);

}  // namespace ftbert
