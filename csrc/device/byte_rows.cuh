// Byte rows (core/format.h) of rows whose threads have all of it: what kernels get of such an Operand, and how they
// store a row. The numbers are those of kernels/elementwise/byte_row.h but for how a product and a sum are rounded.
#pragma once
#include <cfloat>
#include <cstdint>

#include "core/operand.h"
#include "device/vector.cuh"

namespace ftbert {

// From the least number of a row, at most 0, to the largest, at least 0, or NaN.
struct ByteRange {
  float least = 0, most = 0;

  __device__ void take(float x) { least = fminf(least, x), most = max_or_nan(most, x); }
  // Over the threads that share the row.
  template <int kThreads>
  __device__ void reduce_over() {
    least = reduce<kThreads>(least, [](float a, float b) { return fminf(a, b); });
    most = reduce<kThreads>(most, [](float a, float b) { return max_or_nan(a, b); });
  }
};

// How numbers of a row become bytes. Where one is not finite the scale is NaN.
struct ByteScale {
  float scale, inverse;
  int zero;

  // Added to a small number it leaves the nearest whole one in the low bits.
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  static constexpr int kRoundBits = 0x4b400000;

  __device__ explicit ByteScale(const ByteRange& range) {
    const float step = range.most / 255.0f - range.least / 255.0f;
    const bool finite = step <= FLT_MAX;
    scale = !finite ? NAN : step >= FLT_MIN ? step : 0;  // 0 of zeros
    inverse = scale > 0 ? 1.0f / scale : 0.0f;
    zero = finite ? __float_as_int(kRound - range.least * inverse) - kRoundBits : 0;
  }
  __device__ uint32_t byte(float x) const {
    const float near = fminf(fmaxf(x * inverse, static_cast<float>(-zero)), static_cast<float>(255 - zero));
    return static_cast<uint32_t>(__float_as_int(near + kRound) + zero) & 0xff;
  }
};

struct ByteRows {
  static constexpr bool kWholeRows = true;

  uint8_t* data;
  const float* smooth;  // [cols] on the device, or nullptr
  int64_t row_bytes;
  uint8_t* bytes = nullptr;  // of the row at which the kernel is

  ByteRows(const Operand& out, int64_t cols)
      : data(out.byte_rows()), smooth(out.scale), row_bytes(byte_row_bytes(cols)) {}
  __device__ void read_scale() const {}
  __device__ void begin_row(int64_t row) { bytes = data + row * row_bytes; }

  // x, numbers of columns from col on, as the range and the bytes are made of them.
  template <int W>
  __device__ void smoothen(float (&x)[W], int col) const {
    if (smooth == nullptr) return;
    float s[W];
    if constexpr (W == 8) {
      Packed<float, 4>::load(smooth + col).to_floats(*reinterpret_cast<float (*)[4]>(s));
      Packed<float, 4>::load(smooth + col + 4).to_floats(*reinterpret_cast<float (*)[4]>(s + 4));
    } else {
#pragma unroll
      for (int w = 0; w < W; ++w) s[w] = smooth[col + w];
    }
#pragma unroll
    for (int w = 0; w < W; ++w) x[w] *= s[w];
  }
  template <int W>
  __device__ void put(const float (&x)[W], const ByteScale& scale, int col) const {
    if constexpr (W == 8) {
      uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        words[i] = scale.byte(x[4 * i]) | scale.byte(x[4 * i + 1]) << 8 | scale.byte(x[4 * i + 2]) << 16 |
                   scale.byte(x[4 * i + 3]) << 24;
      *reinterpret_cast<uint2*>(bytes + col) = {words[0], words[1]};
    } else {
#pragma unroll
      for (int w = 0; w < W; ++w) bytes[col + w] = static_cast<uint8_t>(scale.byte(x[w]));
    }
  }
  // What stands behind the bytes of a row; by all of its threads.
  __device__ void end_row(const ByteScale& scale, int cols, int lane, int threads) const {
    for (int64_t at = cols + lane; at < row_bytes - 8; at += threads) bytes[at] = 0;
    if (lane == 0) *reinterpret_cast<int2*>(bytes + row_bytes - 8) = {__float_as_int(scale.scale), scale.zero};
  }
  // A row that is no numbers.
  __device__ void spoil_row(int cols, int lane, int threads) const {
    for (int at = lane; at < cols; at += threads) bytes[at] = 0;
    end_row(ByteScale({.most = NAN}), cols, lane, threads);
  }
};

// Whether threads can store a copy with scales eight numbers at a time, where its source can be read so.
inline bool is_wide(const Operand& copy) {
  return reinterpret_cast<uintptr_t>(copy.data) % 8 == 0 &&
         (copy.format != &formats::byte_rows || reinterpret_cast<uintptr_t>(copy.scale) % 16 == 0);
}

// A row of packs that lie as in RowShape, which may be changed.
template <class Shape>
__device__ void store_byte_row(const ByteRows& to, float (&x)[Shape::kPacks][Shape::kWidth], int cols, int lane) {
  constexpr int W = Shape::kWidth, P = Shape::kPacks;
  ByteRange range;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int col = (i * Shape::kThreads + lane) * W;
    if (col >= cols) break;
    to.smoothen(x[i], col);
#pragma unroll
    for (int w = 0; w < W; ++w) range.take(x[i][w]);
  }
  range.template reduce_over<Shape::kThreads>();
  const ByteScale scale(range);
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const int col = (i * Shape::kThreads + lane) * W;
    if (col >= cols) break;
    to.put(x[i], scale, col);
  }
  to.end_row(scale, cols, lane, Shape::kThreads);
}

// The same of a row too long for registers; value(col, x): W numbers from col on, read or worked out each time.
template <class Shape, class Value>
__device__ void store_long_byte_row(const ByteRows& to, const Value& value, int cols, int lane) {
  constexpr int W = Shape::kWidth;
  float x[W];
  ByteRange range;
#pragma unroll 1
  for (int col = lane * W; col < cols; col += Shape::kThreads * W) {
    value(col, x);
    to.smoothen(x, col);
#pragma unroll
    for (int w = 0; w < W; ++w) range.take(x[w]);
  }
  range.template reduce_over<Shape::kThreads>();
  const ByteScale scale(range);
#pragma unroll 1
  for (int col = lane * W; col < cols; col += Shape::kThreads * W) {
    value(col, x);
    to.smoothen(x, col);
    to.put(x, scale, col);
  }
  to.end_row(scale, cols, lane, Shape::kThreads);
}

}  // namespace ftbert
