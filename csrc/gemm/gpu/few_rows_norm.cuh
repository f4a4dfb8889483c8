// Rows of a, normed, as b's storage wishes them: by the blocks that multiply, where one or two of them fit their
// registers, or else by a kernel ahead.
#pragma once
#include "device/named_barrier.cuh"
#include "gemm/gpu/few_rows_storage.cuh"
#include "kernels/norm/norm_rule.cuh"

namespace ftbert {
namespace {

// Packs of a row that a thread has.
constexpr int kMostPacks = 6, kMostLaidRows = 2;
constexpr int kMostLaidColumns = kFewRowsReaders * 8 * kMostPacks;  // of the rows that a block lays out itself
constexpr int kPrepareThreads = 512, kPreparePacks = 4, kMostPreparedColumns = kPrepareThreads * 8 * kPreparePacks;

// Of the threads that share a row of a, `threads` (64 or more) of the block's readers, which all come here. partial
// [kFewRowsWarps]: of this sum alone.
__device__ inline float sum_of_row(float x, int threads, float* partial) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  const int warp = threadIdx.x / 32, warps = threads / 32, first = warp / warps * warps;
  if (threadIdx.x % 32 == 0) partial[warp] = x;
  named_barrier_wait(1, kFewRowsReaders);
  x = 0;
  for (int i = 0; i < warps; ++i) x += partial[first + i];
  return x;
}

// A row that `threads` threads share, whole warps. Before any kernel ahead has ended it reads gamma, which none writes.
template <class E, int kPacks>
struct LaidRow {
  using Pack = Packed<E, 8>;
  int row, threads, lane;
  Pack gamma[kPacks];

  __device__ LaidRow(const FewRows<E>& work, int row, int threads)
      : row(row), threads(threads), lane(static_cast<int>(threadIdx.x) % threads) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      gamma[i] = work.norm.gamma && column(i) < work.k ? Pack::load(work.norm.gamma + column(i)) : Pack::zero();
  }
  __device__ int column(int i) const { return (i * threads + lane) * 8; }

  // rows = norm(a); lanes beyond the row's end have zeros. sum(x, which): of all threads of the row, first of numbers
  // (0), where the norm has a mean, then of squares (1). kRounded: squares of all packs but the first are rounded
  // before they are added, so that a kernel's results do not depend on what the compiler makes of a product and a sum.
  template <class Storage, bool kRounded, class SumOfRow>
  __device__ void lay(const FewRows<E>& work, char* rows, const SumOfRow& sum) const {
    const bool there = row < work.m;
    Pack packs[kPacks];
#pragma unroll
    for (int i = 0; i < kPacks; ++i)
      packs[i] = there && column(i) < work.k ? Pack::load(work.a + static_cast<int64_t>(row) * work.k + column(i))
                                             : Pack::zero();
    float mean = 0, scale = 1;
    if (work.norm.kind == NormKind::layer) {
      float total = 0;
      each(work, packs, [&](int, const float (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) total += x[j];
      });
      mean = sum(total, 0) / work.k;
    }
    if (work.norm.kind != NormKind::none) {
      float squares = 0;
      each(work, packs, [&](int i, const float (&x)[8]) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float d = x[j] - mean;
          squares += column(i) >= work.k ? 0 : kRounded && i > 0 ? __fmul_rn(d, d) : d * d;
        }
      });
      scale = rsqrtf(sum(squares, 1) / work.k + work.norm.eps);
    }
    if (!there) return;
    each(work, packs, [&](int i, float (&x)[8]) {
      if (work.norm.kind != NormKind::none) {
        float g[8], beta[8] = {};
        gamma[i].to_floats(g);
        if (work.norm.beta && column(i) < work.k) Pack::load(work.norm.beta + column(i)).to_floats(beta);
#pragma unroll
        for (int j = 0; j < 8; ++j)
          x[j] = normed<E>({work.norm.eps, work.norm.offset}, work.norm.rounding == NormRounding::before_gamma,
                           x[j] - mean, scale, g[j], beta[j]);
      }
      Storage::put(work, rows, row, column(i), x);
    });
  }

 private:
  template <class Visit>
  __device__ void each(const FewRows<E>& work, const Pack (&packs)[kPacks], const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (i * threads * 8 >= work.k) return;
      float x[8];
      packs[i].to_floats(x);
      visit(i, x);
    }
  }
};

}  // namespace
}  // namespace ftbert
