// An edge between two kernels, and what its reader still owes it.
#pragma once
#include "core/norm.h"
#include "core/operand.h"

namespace ftbert {

// Of a matrix's rows: their sums and those of their squares, to which blocks that have other columns add. data [rows,
// kMomentWords], of which three are used: rows that many add to at once lie apart.
struct RowMoments {
  long long* data = nullptr;

  explicit operator bool() const { return data != nullptr; }
};
inline constexpr int kMomentWords = 16;

// Rows [rows, cols] for a product. A norm that is pending on them is the reader's to do. With moments of the rows they
// lie in memory times gamma, and what the norm reads is that times *unscale (gemm/gpu/deferred_norm.h).
template <class T>
struct Edge {
  Operand rows;
  Norm<T> pending = {};
  RowMoments moments = {};
  const float* gamma = nullptr;    // [cols]
  const float* unscale = nullptr;  // one
};

}  // namespace ftbert
