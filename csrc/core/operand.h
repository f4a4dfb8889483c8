// An edge between two kernels: numbers in memory, their format, and the scales they go with.
#pragma once
#include <cstdint>

#include "core/check.h"
#include "core/format.h"
#include "core/types.h"

namespace ftbert {

// A row-major matrix [rows, cols], read or written; who hands it on says how many rows and columns. Its format belongs
// to the edge: its numbers may be narrower than the residual stream's.
struct Operand {
  void* data = nullptr;
  const Format* format = &formats::fp32;
  // One scale, or [rows] of them, as the format says. Of byte rows: factors [cols] of the columns before these are
  // stored; nullptr: 1.
  const float* scale = nullptr;
  bool opaque = false;  // data is a handle of the products' library, which alone reads it, once

  template <class T>
  static Operand of(const T* data) {
    return {const_cast<T*>(data), kFormat<T>};
  }

  DType dtype() const { return format->numbers; }
  // Whether numbers are divided by a scale before they are stored.
  bool scaled() const { return format->block != kNoScales; }

  // The rows as elements T without a scale; Error where they are stored in another way.
  template <class T>
  T* as() const {
    FTBERT_CHECK(format == kFormat<T> && !opaque, "expected an operand of plain ", to_string(kDType<T>), ", got ",
                 to_string(dtype()), scaled() ? " with scales" : "", opaque ? " in memory of a library" : "");
    return static_cast<T*>(data);
  }

  // The rows as E4M3 with one scale for all; Error where they are stored in another way.
  uint8_t* scaled_e4m3() const {
    FTBERT_CHECK(format == &formats::e4m3_tensor && scale && !opaque,
                 "expected an operand in e4m3 with one scale, got ", to_string(dtype()),
                 !scaled()                    ? " without scales"
                 : format->block == kWholeRow ? " with scales of rows"
                                              : "");
    return static_cast<uint8_t*>(data);
  }

  // Byte rows; Error where they are stored in another way.
  uint8_t* byte_rows() const {
    FTBERT_CHECK(format == &formats::byte_rows && !opaque, "expected an operand of byte rows, got ",
                 to_string(dtype()));
    return static_cast<uint8_t*>(data);
  }

  // The rows from `row` on.
  Operand from(int64_t row, int64_t cols) const {
    Operand rest = *this;
    rest.data = static_cast<char*>(data) + format->bytes(row, cols);
    return rest;
  }

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
