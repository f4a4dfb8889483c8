// Products of up to eight rows, whose time is that of reading the weight: a step of generation. Hopper alone; 16-bit
// operands, or a weight in Q8_0, whose other operand becomes Q8_1 first. No CUDA header.
#pragma once
#include <cstdint>

#include "gemm/gpu/own.h"

namespace ftbert {

inline constexpr int kMostFewRows = 8;  // of a: the narrow side of a tensor core's tile

// Its kernel computes c = epilogue(norm(a) @ b^T + bias); with a residual, which excludes activation and gate, + c. c
// and a lie apart. The weight, bias and vectors of the norm are read before the kernel ahead has ended. tile_count: 0
// before and after; products that may run at the same time need different ones, two by turns are enough for a stream of
// kernels that overlap. With it, blocks take tiles of b's rows as they get to them; with nullptr all have as many.

// dequantise_q8_0_cuda.cu. out [n, k] of fp16 or bf16, row-major. The weight is read before the kernel ahead has ended;
// a product that is launched behind this must not read `out` earlier (Context::overlap off).
void dequantise_q8_0(const Context<Cuda>& context, const Matrix& weight, DType dtype, void* out);

}  // namespace ftbert
