// Products on Hopper between which no norm kernel runs (wgmma_tile with other endings): the one before the norm leaves
// the sum that is to be normalised times gamma, and moments of the sum's rows; the one behind it multiplies that and
// corrects its result,
//   (LayerNorm(x) @ W^T + b) [row, n] = scale * (x gamma @ W^T) + shift * slope [n] + add [n],
// scale = 1 / deviation, shift = -mean * scale, slope = W gamma, add = b + W beta. RMSNorm is the same with a mean of
// 0: then the rows' sums are left at 0. gamma is no part of W: a copy of each matrix would round it a second time,
// while x has few rows. No CUDA header.
#pragma once
#include <cstdint>

#include "gemm/gemm.h"
#include "gemm/gpu/own.h"

namespace ftbert {

// Of a matrix's rows: their sums and those of their squares, to which blocks that have other columns add. data [rows,
// kMomentWords], of which three are used: rows that many add to at once lie apart.
struct DeferredMoments {
  long long* data = nullptr;
};
inline constexpr int kMomentWords = 16;
inline constexpr int64_t kMostColumns = 4096;  // more could overflow

// A norm still pending on x. Memory holds x * gamma, gamma [n] of make_sum_vectors; the norm's input is that times
// *unscale. gamma nullptr: memory holds x, and no norm is pending.
struct PendingNorm {
  const float* gamma = nullptr;
  const float* unscale = nullptr;
  DeferredMoments moments;
  float eps = 0;
};

// The variant of wgmma_tile that the plans choose for this product of a layer; -1: they choose something else.
template <class T>
int wgmma_tile_variant(const Context<Cuda>& context, const Linear<T>& linear, int64_t m, Epilogue epilogue);

// data.c = activation(corrected product), or its gates: data.a is what `run_summing` or `run_keeping` left; add, slope
// [n] of make_correction_vectors hold the bias. Rows of `cleared`, which are not those of norm, become 0.
void run_corrected(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                   const float* add, const float* slope, const PendingNorm& norm, const DeferredMoments& cleared);

// data.c = x * gamma, x = data.a @ data.b^T + add + residual; adds to moments those of x. add, gamma [n] of
// make_sum_vectors hold the bias. residual [m, n], with the LayerNorm, short of its beta, that is pending on it; it may
// be data.c. It and its moments are read before the kernel ahead has ended, so they must be there before that one.
void run_summing(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                 const float* add, const void* residual, const PendingNorm& norm, const float* gamma,
                 const DeferredMoments& moments);

// For norms before a block, whose residual is no norm's: x = data.a @ data.b^T + add + x, data.c = x * gamma; adds to
// moments those of x, for RMSNorm (not `centred`) the squares alone. x [m, n] lies apart from data.c, and like a
// residual of run_summing it must be there before the kernel ahead.
void run_keeping(const Context<Cuda>& context, int variant, const Product& product, const ProductData& data,
                 const float* add, void* x, const float* gamma, bool centred, const DeferredMoments& moments);

// add = bias + beta of the LayerNorm that is pending (nullptr: none); unless `keep`, less the mean of it: the LayerNorm
// that follows ignores a constant, and removing it reduces rounding. scaled = gamma + offset of the norm that follows,
// times the power of two with which the largest is between 1/2 and 1: x times it is stored as exactly as x would be,
// and no larger. unscale, one float, undoes that. gamma nullptr: no product reads the result; scaled = 1. Float [n].
void make_sum_vectors(const Context<Cuda>& context, DType dtype, const void* bias, const void* beta, const void* gamma,
                      float offset, bool keep, int64_t n, float* add, float* scaled, float* unscale);

// add = bias + weight beta, slope = weight gamma, float [n], of a weight [n, k]; gamma [k] is that of make_sum_vectors.
// Without beta add = bias, without gamma slope = 0 too; without bias (nullptr) that is 0.
void make_correction_vectors(const Context<Cuda>& context, DType dtype, const void* weight, const void* bias,
                             const float* gamma, const void* beta, int64_t n, int64_t k, float* add, float* slope);

}  // namespace ftbert
