// An edge between two kernels, and what its reader still owes it.
#pragma once
#include "core/norm.h"
#include "core/operand.h"

namespace ftbert {

// Of a matrix's rows: the sums of their numbers and of their squares. Blocks of all columns add to them. data [rows,
// kMomentWords]: a row uses four of its words, so that rows to which many blocks add at once lie apart. In the last of
// these a product's blocks may count each other (gemm/ampere/divided_k.cuh).
struct RowMoments {
  long long* data = nullptr;

  explicit operator bool() const { return data != nullptr; }
};
inline constexpr int kMomentWords = 16, kCountWord = 3;

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
