// Results in E4M3 with one scale for all of them: what kernels get of such an Operand, and how they store it.
#pragma once
#include <cstdint>
#include <string>

#include "core/operand.h"
#include "device/e4m3.cuh"
#include "device/vector.cuh"

namespace ftbert {

struct E4m3Rows {
  static constexpr bool kWholeRows = false;  // numbers are stored as they come

  uint8_t* data;
  const float* scale;  // on the device
  float inverse = 0;   // of the scale; what numbers are multiplied by before they are rounded

  explicit E4m3Rows(const Operand& out) : data(out.scaled_e4m3()), scale(out.scale) {}
  // Before numbers are stored, after wait_for_inputs.
  __device__ void read_scale() { inverse = 1.0f / *scale; }
  __device__ void begin_row(int64_t) const {}
  __device__ void spoil_row(int, int, int) const {}
  __device__ E4m3Rows from(int64_t at) const {
    E4m3Rows rows = *this;
    rows.data += at;
    return rows;
  }
};

// W numbers side by side, in one access; `to` begins at a multiple of W.
template <int W>
__device__ void store_e4m3(const float (&x)[W], float inverse, uint8_t* to) {
  static_assert(W == 1 || W % 4 == 0);
  if constexpr (W == 1) {
    *to = static_cast<uint8_t>(to_e4m3(x[0] * inverse, 0.0f));
  } else {
    uint32_t words[W / 4];
#pragma unroll
    for (int i = 0; i < W / 4; ++i)
      words[i] = to_e4m3(x[4 * i] * inverse, x[4 * i + 1] * inverse, x[4 * i + 2] * inverse, x[4 * i + 3] * inverse);
    if constexpr (W == 4)
      *reinterpret_cast<uint32_t*>(to) = words[0];
    else if constexpr (W == 8)
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    else
      *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  }
}

// x at `at` of out, as E or in E4M3.
template <class E, int W, class Index>
__device__ void put(const float (&x)[W], E* out, Index at) {
  Packed<E, W>::from_floats(x).store(out + at);
}
template <int W>
__device__ void put(const float (&x)[W], const E4m3Rows& out, int64_t at) {
  store_e4m3(x, out.inverse, out.data + at);
}

// run(what a kernel gets beside its results of T: nothing, or the E4m3Rows that `rows` describes).
template <class T, class Run>
void with_rows(const Operand& rows, const Run& run) {
  if (!rows) return run();
  if constexpr (sizeof(T) == 2)
    run(E4m3Rows(rows));
  else
    throw Error("results of " + std::string(to_string(kDType<T>)) + " are not stored in e4m3");
}

}  // namespace ftbert
