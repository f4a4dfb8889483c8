// How b of a product of few rows is stored, and how a is laid out beside it.
#pragma once
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "gemm/gpu/few_rows.cuh"

namespace ftbert {

// How a row of Q8_1 lies: by its columns; or a lane's 16 bytes of a step side by side, which are one access then. By
// columns eight rows in shared memory meet different banks.
enum class Q8Order { columns, lanes };

namespace {

// d [16, 8] += a [16, 32] @ b [32, 8]; a's rows from 8 on are 0.
__device__ inline void multiply_add_int8(int (&d)[4], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

// A step of k is what one access of a warp's lanes to b covers, 16 bytes a lane. Lane 4 g + t has row g of the tile. A
// Storage has
//   kStep, columns of a step;
//   scale_bytes(m, k), of the scales behind the rows of a;
//   put(work, rows, row, column, x), by a whole warp: eight numbers of a to where rows are read from;
//   multiply(work, ..., rows, step, sums): products of a step of b.

// b [n, k] row-major. Lane 4 g + t takes columns 8 t to 8 t + 7 of the step's 32, as two products whose 16 columns lie
// in an order of their own, the same in a.
template <class E>
struct PlainRows {
  static constexpr int kStep = 32;

  FTBERT_HOST_DEVICE static int scale_bytes(int, int) { return 0; }

  __device__ static void put(const FewRows<E>& work, char* rows, int row, int column, const float (&x)[8]) {
    if (column < work.k) Packed<E, 8>::from_floats(x).store(reinterpret_cast<E*>(rows + row * work.row_bytes) + column);
  }

  __device__ static void multiply(const FewRows<E>& work, uint4 w, const char* rows, int step, float (&sums)[4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint4 x{};
    if (g < work.m)
      x = *reinterpret_cast<const uint4*>(rows + g * work.row_bytes + step * kStep * static_cast<int>(sizeof(E)) +
                                          t * 16);
    multiply_add<E>(sums, {x.x, 0, x.y, 0}, w.x, w.y);
    multiply_add<E>(sums, {x.z, 0, x.w, 0}, w.z, w.w);
  }
};

// b in Q8_0, as core/format.h lays it out; rows of a become Q8_1: int8, and behind them for 32 columns each a float.
template <class E, Q8Order kOrder>
struct Q8Tiles {
  static constexpr int kStep = kQ8TileDepth, kNumbers = kTileRows * kStep;  // bytes of a step, and of its scales
  static constexpr int kScales = kTileRows * kStep / kQ8Block * static_cast<int>(sizeof(half_t));

  static constexpr int kOdd = kOrder == Q8Order::columns ? 1 : 0;
  // Floats between two rows' scales: odd, so that eight rows meet eight banks; or even, for pairs.
  FTBERT_HOST_DEVICE static int scale_stride(int k) { return k / static_cast<int>(kQ8Block) | kOdd; }
  // Of m rows, a multiple of 16.
  FTBERT_HOST_DEVICE static int scale_bytes(int m, int k) { return (m * scale_stride(k) * 4 + 15) / 16 * 16; }

  // Of a row, behind all rows.
  __device__ static const float* scales(const FewRows<E>& work, const char* rows, int row) {
    return reinterpret_cast<const float*>(rows + work.m * work.row_bytes) + row * scale_stride(work.k);
  }
  // Where four bytes of a row lie, from `column` on.
  __device__ static int place(int column) {
    if (kOrder == Q8Order::columns) return column;
    return column / kStep * kStep + column % 16 / 4 * 16 + column % kStep / 32 * 8 + column % 32 / 16 * 4;
  }

  // x of a whole warp, beyond the row's end too. Four neighbours hold a block of 32, whose scale comes back.
  __device__ static float quantise(const float (&x)[8], uint2& packed) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max_or_nan(most, fabsf(x[i]));
    most = max_or_nan(most, __shfl_xor_sync(~0u, most, 1));
    most = max_or_nan(most, __shfl_xor_sync(~0u, most, 2));
    const float inverse = most > 0 ? 127 / most : 0;
    uint32_t four[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      four[i / 4] |= (static_cast<uint32_t>(__float2int_rn(x[i] * inverse)) & 255u) << (i % 4 * 8);
    packed = {four[0], four[1]};
    return most / 127;
  }

  __device__ static void put(const FewRows<E>& work, char* rows, int row, int column, const float (&x)[8]) {
    uint2 packed;
    const float scale = quantise(x, packed);
    if (column >= work.k) return;
    char* const to = rows + row * work.row_bytes;
    if constexpr (kOrder == Q8Order::columns) {
      *reinterpret_cast<uint2*>(to + column) = packed;
    } else {
      *reinterpret_cast<uint32_t*>(to + place(column)) = packed.x;
      *reinterpret_cast<uint32_t*>(to + place(column + 4)) = packed.y;
    }
    if (column % kQ8Block == 0) const_cast<float*>(scales(work, rows, row))[column / kQ8Block] = scale;
  }

  // numbers [32][16 bytes], scales_b [2][4] pairs.
  __device__ static void multiply(const FewRows<E>& work, const char* numbers, const char* scales_b, const char* rows,
                                  int step, float (&sums)[4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint4 w = *reinterpret_cast<const uint4*>(numbers + lane * 16);
    const auto* const scale_b = reinterpret_cast<const __half2*>(scales_b);
    uint4 of_lane{};
    float2 scales_of_lane{};
    if (kOrder == Q8Order::lanes && g < work.m) {
      of_lane = *reinterpret_cast<const uint4*>(rows + g * work.row_bytes + step * kStep + t * 16);
      scales_of_lane = reinterpret_cast<const float2*>(scales(work, rows, g))[step];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t x0 = 0, x1 = 0;
      float scale_a = 0;
      if (kOrder == Q8Order::lanes) {
        x0 = h ? of_lane.z : of_lane.x, x1 = h ? of_lane.w : of_lane.y;
        scale_a = h ? scales_of_lane.y : scales_of_lane.x;
      } else if (g < work.m) {
        const char* const x = rows + g * work.row_bytes + step * kStep + h * kQ8Block + t * 4;
        x0 = *reinterpret_cast<const uint32_t*>(x), x1 = *reinterpret_cast<const uint32_t*>(x + 16);
        scale_a = scales(work, rows, g)[2 * step + h];
      }
      int block[4] = {};
      multiply_add_int8(block, x0, x1, h ? w.z : w.x, h ? w.w : w.y);
      const float2 both = __half22float2(scale_b[h * 4 + t]);
      sums[0] += static_cast<float>(block[0]) * (scale_a * both.x);
      sums[1] += static_cast<float>(block[1]) * (scale_a * both.y);
    }
  }
};

}  // namespace
}  // namespace ftbert
