// Matrix products of our own on Hopper. No CUDA header.
#pragma once
#include "gemm/own/own.h"

namespace ftbert {

// In all of them the bias is added to the float sums; the activation is applied to them rounded, as after cuBLASLt.
// Ways to run one are numbered from 0.

// For many rows; no activation but erf GELU.
FusedTile hopper_gemm_tile();
bool hopper_gemm_supports(int capability, const FusedGemm& gemm);
// In how many waves a GPU computes it; half of one counts.
double hopper_gemm_waves(int sm_count, const FusedGemm& gemm);
void run_hopper_gemm(const Context<Cuda>& context, const FusedGemm& gemm);

// For up to some 2000 rows.
int few_gemm_variants();
FusedTile few_gemm_tile(int variant);
bool few_gemm_supports(int capability, int variant, const FusedGemm& gemm);
void run_few_gemm(const Context<Cuda>& context, int variant, const FusedGemm& gemm);
// Which one to take up to 1024 rows where nothing was measured, or -1: the narrowest tile with which every block has a
// multiprocessor of its own, and up to 128 rows leaves some free, on which the next kernel begins; where k is long,
// first one that divides it. On an H200 layers of BERT-base, BERT-large and MiniLM-L6 in fp16 took 0.96 to 1.07 times
// as long as with products that were chosen in layers for each size, 1.013 times in the mean of 57 sizes.
int few_gemm_guessed_place(int capability, int sm_count, const FusedGemm& gemm);
// The same as a variant of gemm_fused.h.
int few_gemm_guess(int capability, int sm_count, const FusedGemm& gemm);
// Which of them a variant of gemm_fused.h is, or -1.
int few_place(int fused_variant);

}  // namespace ftbert
