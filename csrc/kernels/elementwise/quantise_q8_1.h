// Q8_1, int8 with a scale for each 32 neighbours: rows as the CPU's products with matrices in q8_0 multiply them. Those
// of a GPU make it themselves, by x * (127 / largest), of halves the even one (gemm/hopper/few_rows.cuh).
#pragma once
#include <cstdint>

#include "core/context.h"

namespace ftbert {

// numbers int8 [rows, cols], scales float [rows, cols / 32] of x [rows, cols], cols a multiple of 32: a scale is the
// largest magnitude / 127, a number x / scale, rounded to the nearest, half away from zero, both 0 of zeros. Where a
// number is not finite the scale is NaN.
template <class Device, class T>
void quantise_q8_1(Context<Device>& context, const T* x, int64_t rows, int64_t cols, int8_t* numbers, float* scales);

}  // namespace ftbert
