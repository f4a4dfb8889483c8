// Products of any number of rows by a weight in Q8_0 as it lies in memory. Hopper alone. No CUDA header.
#pragma once
#include "gemm/gpu/own.h"

namespace ftbert {

// Whether wgmma_q8_0 multiplies rows of a stream of this type by this weight.
bool wgmma_q8_0_supports(const Gpu& gpu, DType stream, const Matrix& weight);

}  // namespace ftbert
