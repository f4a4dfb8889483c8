// An edge between two kernels: numbers in memory, the type in which they are stored, and the scales they go with.
#pragma once
#include <cstdint>

#include "core/check.h"
#include "core/format.h"
#include "core/types.h"

namespace ftbert {

// How many numbers share a scale; a number is what is stored times its scale.
enum class Granularity {
  none,    // there are no scales
  tensor,  // one scale
  row,     // [rows]
  beside,  // a scale and a zero point behind the numbers of each row (core/format.h)
};
inline Granularity granularity_of(const Format& edge) {
  if (edge.block == kNoScales) return Granularity::none;
  return edge.inside ? Granularity::beside : edge.block == kWholeMatrix ? Granularity::tensor : Granularity::row;
}

// A row-major matrix [rows, cols], read or written; who hands it on says how many rows and columns. Its type belongs to
// the edge: it may be narrower than the residual stream's.
struct Operand {
  void* data = nullptr;
  DType dtype = DType::fp32;
  const float* scale = nullptr;
  Granularity per = Granularity::none;
  const float* smooth = nullptr;  // [cols] of byte rows, or none: columns are multiplied by it before they are stored
  bool opaque = false;            // data is a handle of the products' library, which alone reads it, once

  template <class T>
  static Operand of(const T* data) {
    return {const_cast<T*>(data), kDType<T>};
  }

  // The rows as elements T without a scale; Error where they are stored in another way.
  template <class T>
  T* as() const {
    FTBERT_CHECK(dtype == kDType<T> && per == Granularity::none && !opaque, "expected an operand of plain ",
                 to_string(kDType<T>), ", got ", to_string(dtype), per == Granularity::none ? "" : " with scales",
                 opaque ? " in memory of a library" : "");
    return static_cast<T*>(data);
  }

  // The rows as E4M3 with one scale for all; Error where they are stored in another way.
  uint8_t* scaled_e4m3() const {
    FTBERT_CHECK(dtype == DType::e4m3 && per == Granularity::tensor && scale && !opaque,
                 "expected an operand in e4m3 with one scale, got ", to_string(dtype),
                 per == Granularity::none  ? " without scales"
                 : per == Granularity::row ? " with scales of rows"
                                           : "");
    return static_cast<uint8_t*>(data);
  }

  // Byte rows; Error where they are stored in another way.
  uint8_t* byte_rows() const {
    FTBERT_CHECK(dtype == DType::uint8 && per == Granularity::beside && !opaque,
                 "expected an operand of byte rows, got ", to_string(dtype));
    return static_cast<uint8_t*>(data);
  }

  int64_t row_bytes(int64_t cols) const {
    return per == Granularity::beside ? byte_row_bytes(cols) : cols * bytes_of(dtype);
  }
  // The rows from `row` on.
  Operand from(int64_t row, int64_t cols) const {
    Operand rest = *this;
    rest.data = static_cast<char*>(data) + row * row_bytes(cols);
    return rest;
  }

  // Whether numbers are divided by a scale before they are stored.
  bool scaled() const { return per != Granularity::none; }

  explicit operator bool() const { return data != nullptr; }
};

// What is left of a sum by the norm behind it.
template <class T>
struct Output {
  T* sum = nullptr;     // the sum itself: the stream, where a norm stands before the next block alone
  T* normed = nullptr;  // the norm of it: the stream, where a norm stands behind a block
  Operand copy = {};    // the norm of it as the product that reads it wishes; without data: none

  // For kernels that store the norm once, as T.
  T* only_norm() const {
    FTBERT_CHECK(!normed != !copy, "a norm is expected for the stream or for a product, not both or neither");
    return normed ? normed : copy.template as<T>();
  }
};

}  // namespace ftbert
