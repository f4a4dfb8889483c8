// Rows' moments as the blocks of one product add them up, and what the next one reads off them.
#pragma once
#include <cstdint>

#include "device/fragment.cuh"
#include "gemm/gpu/deferred_norm.h"

namespace ftbert {

// Of the two columns that this thread has in a tile's accumulator j.
template <int kVector, class Shape>
__device__ float2 pair_of(const float* vectors, int j) {
  return *reinterpret_cast<const float2*>(vectors + kVector * Shape::kTileN + j * 8 + Fragment::column());
}

// A row's moments are integers, to which any number of blocks add theirs in any order for the same result: the sum in
// units of kSumUnit; squares in units of kFineUnit, of kFine and more the whole number apart. So the moments of rows
// with standard deviations from 1e-4 to 1e7 are right to some millionths. Where squares are kTooMany or not numbers, so
// is what LayerNorm makes of the row: 512 times as many, of rows of kMostColumns, do not wrap around.
//
// The variance is a small difference of large numbers where a row's mean is large against its spread: squares and their
// difference are double. Float sums are enough if they are those of deviations from some element of the row.
inline constexpr double kSumUnit = 1.0 / (1 << 24), kFine = 1 << 16, kFineUnit = 1.0 / (int64_t{1} << 38);
inline constexpr int64_t kTooMany = int64_t{1} << 54;

// total, squares: of the deviations of `count` elements from shift, of two rows, eight apart; the same in the four
// lanes of a row. Each lane adds one number, or large squares in two parts.
__device__ inline void add_moments(const RowMoments& moments, int64_t row, int64_t rows, int count,
                                   const float (&shift)[2], const float (&total)[2], const float (&squares)[2]) {
  const int r = static_cast<int>(threadIdx.x) % 4 / 2, squared = static_cast<int>(threadIdx.x) % 2;
  if (row + 8 * r >= rows) return;
  const double s = r == 0 ? shift[0] : shift[1], t = r == 0 ? total[0] : total[1];
  const double sum = t + count * s, square = (r == 0 ? squares[0] : squares[1]) + s * (t + sum);
  const auto add = [&](int word, double units) {
    atomicAdd(reinterpret_cast<unsigned long long*>(moments.data + (row + 8 * r) * kMomentWords + word),
              static_cast<unsigned long long>(__double2ll_rn(units)));
  };
  if (!squared || square < kFine) {
    add(squared, squared ? square / kFineUnit : sum / kSumUnit);
  } else {
    // fmin takes the number where the other is none.
    const double most = fmin(square, static_cast<double>(kTooMany)), whole = floor(most);
    add(1, (most - whole) / kFineUnit);
    add(2, whole);
  }
}

// What LayerNorm multiplies by a row's elements times gamma as they are stored, and what it then multiplies by gamma as
// it is stored: of two rows, eight apart.
struct RowScales {
  longlong2 first[2];
  long long last[2];
  float unscale;

  // Nobody waits for what is looked at before it is needed. Moments are read from the L2 cache: other kernels wrote
  // them.
  __device__ void look(const PendingNorm& norm, int64_t row, int64_t rows) {
    unscale = *norm.unscale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const long long* const from = norm.moments.data + min(row + 8 * r, rows - 1) * kMomentWords;
      first[r] = __ldcg(reinterpret_cast<const longlong2*>(from));
      last[r] = __ldcg(from + 2);
    }
  }

  __device__ void get(double inverse, float eps, float2 (&scale)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const double mean = __ll2double_rn(first[r].x) * (kSumUnit * inverse);
      const double squares = __ll2double_rn(first[r].y) * kFineUnit + __ll2double_rn(last[r]);
      const bool usable = static_cast<unsigned long long>(last[r]) < kTooMany;
      const float difference = static_cast<float>(squares * inverse - mean * mean);
      const float variance = usable ? fmaxf(difference, 0.0f) : __int_as_float(0x7fffffff);
      const float by = rsqrtf(variance + eps) * unscale;
      scale[r] = {by, -static_cast<float>(mean) * by};
    }
  }
};

}  // namespace ftbert
