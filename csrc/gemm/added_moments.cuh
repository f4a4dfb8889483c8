// Rows' moments as the blocks of one product add them up, and what the next one reads off them.
#pragma once
#include <cstdint>

#include "gemm/gemm_folded.h"

namespace ftbert {

// A row's moments are integers, to which any number of blocks add theirs in any order for the same result: the sum in
// units of kSumUnit; squares in units of kFineUnit, those of kFine and more to the nearest whole number in another. So
// the moments of rows with standard deviations from 1e-4 to 1e7 are right to some millionths. Where squares are
// kTooMany or not numbers, so is what LayerNorm makes of the row: 512 times as many, of rows of kMostColumns, do not
// wrap around.
inline constexpr float kSumUnit = 1.0f / (1 << 24), kFine = 1 << 16, kFineUnit = 1.0f / (int64_t{1} << 38);
inline constexpr int64_t kTooMany = int64_t{1} << 54;

// total, squares: this lane's of two rows, eight apart, the same in the four lanes of a row. Each lane adds one number.
__device__ inline void add_moments(const AddedMoments& moments, int64_t row, int64_t rows, const float (&total)[2],
                                   const float (&squares)[2]) {
  const int r = static_cast<int>(threadIdx.x) % 4 / 2;
  const float sum = r == 0 ? total[0] : total[1], square = r == 0 ? squares[0] : squares[1];
  const bool squared = threadIdx.x % 2 != 0, whole = squared && !(square < kFine);
  // fminf takes the number where the other is none.
  const float units = !squared ? sum / kSumUnit : whole ? fminf(square, kTooMany) : square / kFineUnit;
  const auto value = static_cast<unsigned long long>(__float2ll_rn(units));
  const int word = !squared ? 0 : whole ? 2 : 1;
  if (row + 8 * r < rows)
    atomicAdd(reinterpret_cast<unsigned long long*>(moments.data + (row + 8 * r) * kMomentWords + word), value);
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

  __device__ void get(float inverse, float eps, float2 (&scale)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float mean = __ll2float_rn(first[r].x) * kSumUnit * inverse;
      const float squares = __ll2float_rn(first[r].y) * kFineUnit + __ll2float_rn(last[r]);
      const bool usable = static_cast<unsigned long long>(last[r]) < kTooMany;
      const float variance = usable ? fmaxf(squares * inverse - mean * mean, 0.0f) : __int_as_float(0x7fffffff);
      const float by = rsqrtf(variance + eps) * unscale;
      scale[r] = {by, -mean * by};
    }
  }
};

}  // namespace ftbert
