// What a kernel reads: numbers in memory and the type in which they are stored.
#pragma once
#include <cstdint>

#include "core/check.h"
#include "core/types.h"

namespace ftbert {

// A row-major matrix [rows, cols]; who hands it on says how many. Its type belongs to the edge between two kernels: it
// may be narrower than the residual stream's.
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::fp32;
  // Rows [i * chunk_rows, (i + 1) * chunk_rows) lie at chunks[i], as threads left them, and are read once;
  // nullptr: all at data.
  const void* const* chunks = nullptr;
  int64_t chunk_rows = 0, chunk_count = 0;

  template <class T>
  static Operand of(const T* data) {
    return {data, kDType<T>};
  }

  // All rows at one place in elements T; Error where it is stored in another way.
  template <class T>
  const T* as() const {
    FTBERT_CHECK(dtype == kDType<T> && !chunks, "expected an operand in one piece of ", to_string(kDType<T>), ", got ",
                 to_string(dtype), chunks ? " in chunks" : "");
    return static_cast<const T*>(data);
  }
};

}  // namespace ftbert
