// The bias of a product's sums, and the scales that sums of E4M3 operands are multiplied by first.
#pragma once
#include <type_traits>

#include "core/types.h"
#include "device/e4m3.cuh"
#include "device/fragment.cuh"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "gemm/gpu/own.h"

namespace ftbert {
namespace {

// They lie on the device and are read, as the bias, before the kernel ahead has ended.
struct E4m3Scales {
  const float* a_scale;  // one
  const float* b_scale;  // one, or one for each of B's rows
  bool b_by_rows;
};

inline E4m3Scales scales_of(const Product& p, const ProductData& data) {
  return {data.a_scale, data.b_scale, p.b->block == kWholeRow};
}

// run.operator()<E, C>() of a product of E4M3: the bias's type and the result's, E or E4M3.
template <class Run>
void with_scaled_types(const Product& p, const ProductData& data, const Run& run) {
  const auto of_bias = [&]<class E>() {
    p.c == DType::e4m3 ? run.template operator()<E, e4m3_t>() : run.template operator()<E, E>();
  };
  data.stream == DType::fp16 ? of_bias.template operator()<__half>() : of_bias.template operator()<__nv_bfloat16>();
}

// What the sums of W columns from `column` on are multiplied by before they get the bias.
template <int W>
__device__ void load_scales(const E4m3Scales& scales, int column, float (&scale)[W]) {
  const float a = *scales.a_scale;
  if (scales.b_by_rows) {
    Packed<float, W>::load(scales.b_scale + column).to_floats(scale);
  } else {
    const float b = *scales.b_scale;
#pragma unroll
    for (int w = 0; w < W; ++w) scale[w] = b;
  }
#pragma unroll
  for (int w = 0; w < W; ++w) scale[w] *= a;
}

// The sums of E4M3 operands with their scales and the bias; factors: of two columns scale, bias, scale, bias.
template <int kEights>
__device__ void apply_factors(float (&sum)[kEights][4], const float4* factors) {
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const float4 of = factors[j * 4 + threadIdx.x % 4];
    sum[j][0] = sum[j][0] * of.x + of.y, sum[j][1] = sum[j][1] * of.z + of.w;
    sum[j][2] = sum[j][2] * of.x + of.y, sum[j][3] = sum[j][3] * of.z + of.w;
  }
}

// The bias of a warp's columns, which its lanes keep from look_ahead on.

// The main loop's sums begin with it, or get it from apply_factors.
struct NoBias {
  struct Arguments {};
  __device__ void look_ahead(const Arguments&, int, int) {}
  template <int kEights>
  __device__ void add(float (&)[kEights][4]) const {}
};

// Held: Packed<E, 2> where registers are short, else float2.
template <class E, int kEights, class Held = float2>
struct Bias {
  using Arguments = const void*;  // E [n], or nullptr

  Held bias[kEights];

  __device__ void look_ahead(const void* from, int column0, int n) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int column = column0 + j * 8 + Fragment::column();
      const auto pair =
          from && column < n ? Packed<E, 2>::load(static_cast<const E*>(from) + column) : Packed<E, 2>::zero();
      if constexpr (std::is_same_v<Held, float2>) {
        float b[2];
        pair.to_floats(b);
        bias[j] = {b[0], b[1]};
      } else {
        bias[j] = pair;
      }
    }
  }

  __device__ float2 pair(int j) const {
    if constexpr (std::is_same_v<Held, float2>) {
      return bias[j];
    } else {
      float b[2];
      bias[j].to_floats(b);
      return {b[0], b[1]};
    }
  }
  __device__ void add(float (&sums)[kEights][4]) const {
    Fragment::each_pair(sums, [&](int j, int, float& x, float& y) {
      const float2 b = pair(j);
      x += b.x, y += b.y;
    });
  }
};

// What sums of byte rows by a matrix in int8 (core/format.h) become results by.
struct Int8Scales {
  const uint8_t* a;  // byte rows
  int64_t row_bytes;
  const float* b_scale;   // [n]
  const int32_t* b_sums;  // [n]
  const void* bias;       // [n], or nullptr
};

// Of these the zero points, the scales, then the bias. Row scales are read when the kernel ahead has ended.
template <class E, int kEights>
struct ByteRowBias {
  using Arguments = Int8Scales;

  float scale[kEights][2], of_row[2];
  int32_t total[kEights][2], zero[2];
  Bias<E, kEights, Packed<E, 2>> bias;

  __device__ void look_ahead(const Arguments& from, int column0, int n) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int column = column0 + j * 8 + Fragment::column();
      const bool there = column < n;
      const float2 s = there ? *reinterpret_cast<const float2*>(from.b_scale + column) : float2{};
      const int2 t = there ? *reinterpret_cast<const int2*>(from.b_sums + column) : int2{};
      scale[j][0] = s.x, scale[j][1] = s.y, total[j][0] = t.x, total[j][1] = t.y;
    }
    bias.look_ahead(from.bias, column0, n);
  }
  __device__ void look_at_rows(const Arguments& from, int64_t row0, int64_t m) {
    wait_for_inputs();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint8_t* const end = from.a + (min(row0 + Fragment::row() + 8 * r, m - 1) + 1) * from.row_bytes;
      const int2 behind = *reinterpret_cast<const int2*>(end - 8);
      of_row[r] = __int_as_float(behind.x), zero[r] = behind.y;
    }
  }

  // Exact up to the first float.
  __device__ void add(const int32_t (&sums)[kEights][4], float (&values)[kEights][4]) const {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const float2 b = bias.pair(j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, c = i % 2;
        const auto sum = static_cast<float>(sums[j][i] - zero[r] * total[j][c]);
        values[j][i] = sum * (of_row[r] * scale[j][c]) + (c == 0 ? b.x : b.y);
      }
    }
  }
};

struct ScalesAndBias : E4m3Scales {
  const void* bias;  // [n], or nullptr
};

// Of E4M3 operands the scales, then the bias.
template <class E, int kEights>
struct ScaledBias {
  using Arguments = ScalesAndBias;

  float2 scale[kEights];
  Bias<E, kEights, Packed<E, 2>> bias;

  __device__ void look_ahead(const Arguments& from, int column0, int n) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
      const int column = column0 + j * 8 + Fragment::column();
      float s[2] = {};
      if (column < n) load_scales(from, column, s);
      scale[j] = {s[0], s[1]};
    }
    bias.look_ahead(from.bias, column0, n);
  }

  __device__ void add(float (&sums)[kEights][4]) const {
    Fragment::each_pair(sums, [&](int j, int, float& x, float& y) {
      const float2 b = bias.pair(j);
      x = x * scale[j].x + b.x, y = y * scale[j].y + b.y;
    });
  }
};

}  // namespace
}  // namespace ftbert
