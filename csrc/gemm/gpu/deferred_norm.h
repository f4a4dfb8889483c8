// Products between which no norm kernel runs: the one ahead of the norm leaves the sum that is to be normalised times
// gamma, and moments of the sum's rows; the one behind it multiplies that and corrects its result,
//   (LayerNorm(x) @ W^T + b) [row, n] = scale * (x gamma @ W^T) + shift * slope [n] + add [n],
// scale = 1 / deviation, shift = -mean * scale, slope = W gamma, add = b + W beta. RMSNorm is the same with a mean of
// 0: then the rows' sums are left at 0. gamma is no part of W: a copy of each matrix would round it a second time,
// while x has few rows. Where weights are in E4M3, a copy of x gamma in E4M3 is multiplied. E4M3 rounds relative to a
// number's size, so one scale serves rows with different deviations. No CUDA header.
#pragma once
#include <cstdint>

#include "gemm/gpu/own.h"

namespace ftbert {

inline constexpr int64_t kMostColumns = 4096;  // more could overflow

// Behind: data.c = activation(corrected product), or its gates: data.a is what the product ahead left; add, slope [n]
// of make_correction_vectors hold the bias. Rows of `moments`, which are not those of the pending norm, become 0.
// Ahead: data.c = x * gamma, x = data.a @ data.b^T + add + residual; adds to `moments` those of x, and counts in a word
// of theirs where blocks divide k. Both are 0 before it: the first product of the same attention or feed-forward (QKV,
// up) clears them. add, gamma [n] of make_sum_vectors hold the bias. After::moments: a LayerNorm, short of its beta,
// may be pending on the residual, which may be data.c. After::moments_beside: x takes the residual's place, apart from
// data.c; of RMSNorm the moments are the squares alone; with 16-bit weights only.

// add = bias + beta of the LayerNorm that is pending (nullptr: none); unless `keep`, less the mean of it: the LayerNorm
// that follows ignores a constant, and removing it reduces rounding. scaled = gamma + offset of the norm that follows,
// times the power of two with which the largest is between 1/2 and 1: x times it is stored as exactly as x would be,
// and no larger. unscale, one float, undoes that. gamma nullptr: no product reads the result; scaled = 1. Float [n].
void make_sum_vectors(const Context<Cuda>& context, DType dtype, const void* bias, const void* beta, const void* gamma,
                      float offset, bool keep, int64_t n, float* add, float* scaled, float* unscale);

// add = bias + weight beta, slope = weight gamma, float [n], of a weight [n, k] of 16 bits or in E4M3; gamma [k] is
// that of make_sum_vectors. Without beta add = bias, without gamma slope = 0 too; without bias (nullptr) that is 0.
void make_correction_vectors(const Context<Cuda>& context, DType dtype, const Matrix& weight, const void* bias,
                             const float* gamma, const void* beta, float* add, float* slope);

// scales [n] = those of the rows of a weight in E4M3 times that of its other operand, one.
void make_product_scales(const Context<Cuda>& context, const Matrix& weight, const float* input, float* scales);

// scale, one: of x gamma in E4M3, x = r @ weight^T added to rows of a LayerNorm by `gamma` and `beta` [n]. read: the
// scale of r, whose rows are taken to deviate by a sixth of their largest number, or nullptr: by 1. next: the scale of
// LayerNorm(x). There is room for rows with four times the deviation that follows from these; rows with a hundredth of
// it lose nothing.
void make_copy_scale(const Context<Cuda>& context, DType dtype, const void* gamma, const void* beta,
                     const Matrix& weight, const float* read, const float* next, const float* unscale, float* scale);

}  // namespace ftbert
