// Which product runs where no table has a row for it. No CUDA header.
#pragma once
#include <cstdint>

#include "gemm/tuner/tuner.h"

namespace ftbert {

// At most one of them is not -1; both: cuBLASLt's first proposal.
struct GemmGuess {
  int fused = -1;  // a variant of gemm_fused.h
  int norm = -1;   // of gemm_layernorm.h
};

// For operands aligned to 16 bytes. problem.layernorm asks whether a product that contains the LayerNorm is faster than
// one that it follows; problem.activation is what a product of ours would apply itself. On other GPUs than Hopper, in
// float32 and where nothing of ours is expected to be faster: -1.
GemmGuess guess_gemm(int capability, int sm_count, const GemmProblem& problem);

}  // namespace ftbert
