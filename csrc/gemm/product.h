// One matrix product, described: the key of plans and of tables, what the tuner measures, what our kernels are asked.
#pragma once
#include <cstdint>
#include <optional>

#include "core/communicator.h"
#include "core/enum_set.h"
#include "core/format.h"
#include "core/norm.h"
#include "core/operand.h"
#include "core/types.h"

namespace ftbert {

// The sums' columns that make a column of c: its own, or with a gate (SwiGLU, GeGLU) column 2i + 1 times
// activation(column 2i). c then has half as many.
enum class Gate { none, pairs };

// On a GPU kernels read rows of a up to the end of the last tile of so many rows: whatever stands there, results do not
// depend on it.
inline constexpr int64_t kReadRows = 128;
constexpr int64_t rows_in_tiles(int64_t rows) { return (rows + kReadRows - 1) / kReadRows * kReadRows; }

// What a product does with the rows of a before it multiplies them.
enum class Before {
  nothing,
  norm_rows,        // it norms them
  norm_by_moments,  // it corrects its sums for a norm of theirs, by moments of the rows (gpu/deferred_norm.h)
};

// What a product leaves of the residual sum.
enum class After {
  nothing,         // the sum
  norm,            // its norm
  norm_beside,     // the sum, and beside it its norm
  moments,         // the sum times gamma of the norm behind it, and moments of the sum's rows
  moments_beside,  // the sum, beside it the sum times gamma, and the moments
};

// Heads of queries and keys in the first columns of a product, which its epilogue norms and turns. size 0: none.
struct HeadColumns {
  int64_t size = 0, columns = 0;
  bool whole = false;  // turned whole, in pairs half a head apart, and behind RMSNorm without beta or no norm
  bool operator==(const HeadColumns&) const = default;

  constexpr explicit operator bool() const { return size > 0; }
};

// What is done to the float sums before they are stored. Members that are absent ask for nothing.
struct Epilogue {
  bool bias = false;
  Activation activation = Activation::none;  // after the bias; with a gate of that alone
  Gate gate = Gate::none;
  HeadColumns heads = {};
  bool residual = false;            // it is added
  After after = After::nothing;     // with a residual
  NormKind norm = NormKind::layer;  // of `after`
  bool operator==(const Epilogue&) const = default;

  // Of c, where the sums have n.
  int64_t columns(int64_t n) const { return gate == Gate::pairs ? n / 2 : n; }
  bool normed() const { return after == After::norm || after == After::norm_beside; }
  bool leaves_moments() const { return after == After::moments || after == After::moments_beside; }
};

// Row-major c [m, n] = epilogue(a [m, k] @ b^T), b [n, k]; or a @ b, b [k, n]; `batch` of them, each behind the other.
// With a gate c is [m, n / 2].
struct Product {
  int64_t m = 0, n = 0, k = 0;
  DType a = DType::fp32;             // its numbers; how they are stored, b->other says
  const Format* b = &formats::fp32;  // as stored
  DType c = DType::fp32;             // its numbers; E4M3 has one scale
  Before before = Before::nothing;
  Epilogue epilogue = {};
  int64_t batch = 1;
  bool b_transposed = true;  // b is [n, k]
  bool operator==(const Product&) const = default;

  // What runs where separate kernels do the norms, the residual sum and what becomes of heads. A residual's kernel adds
  // the bias too.
  constexpr Product alone() const {
    Product plain = *this;
    plain.before = Before::nothing;
    plain.epilogue.heads = {};
    if (epilogue.residual) plain.epilogue = {};
    return plain;
  }
};

// Neither norms nor a residual nor heads.
constexpr bool is_plain(const Product& p) { return p == p.alone(); }

// What a product asks for beside its sums. A kernel names the parts that it reads, and gets no product with another.
enum class Part {
  bias,
  activation,
  gate,
  heads,
  residual,
  norm,
  norm_beside,
  moments,
  moments_beside,
  other_norm,  // of `after`: not LayerNorm
  norm_rows,
  norm_by_moments,
  batch,
  columns_of_b,  // b is [k, n]
};
using Parts = EnumSet<Part>;
inline constexpr Parts kPlainParts{Part::bias, Part::activation, Part::gate};

// A further member, and a further value of the enums below, does not compile until it is named here.
constexpr Parts parts_of(const Product& product) {
  const auto& [m, n, k, a, b, c, before, epilogue, batch, b_transposed] = product;
  const auto& [bias, activation, gate, heads, residual, after, norm] = epilogue;
  Parts parts;
  parts.add(Part::bias, bias);
  parts.add(Part::activation, activation != Activation::none);
  parts.add(Part::heads, static_cast<bool>(heads));
  parts.add(Part::residual, residual);
  parts.add(Part::other_norm, after != After::nothing && norm != NormKind::layer);
  parts.add(Part::batch, batch != 1);
  parts.add(Part::columns_of_b, !b_transposed);
  switch (gate) {
    case Gate::none: break;
    case Gate::pairs: parts.add(Part::gate);
  }
  switch (after) {
    case After::nothing: break;
    case After::norm: parts.add(Part::norm); break;
    case After::norm_beside: parts.add(Part::norm_beside); break;
    case After::moments: parts.add(Part::moments); break;
    case After::moments_beside: parts.add(Part::moments_beside);
  }
  switch (before) {
    case Before::nothing: break;
    case Before::norm_rows: parts.add(Part::norm_rows); break;
    case Before::norm_by_moments: parts.add(Part::norm_by_moments);
  }
  return parts;
}

struct CpuKernel;  // gemm/cpu/kernel.h

// A weight [n, k], stored as it is stored.
struct Matrix {
  const void* data = nullptr;  // [n, k] row-major, or tiles of q8_0; on the CPU in the layout of `kernel`
  const Format* format = &formats::fp32;
  const CpuKernel* kernel = nullptr;  // on the CPU: that of its products
  int64_t n = 0, k = 0;
  const void* scale = nullptr;  // those in memory of their own: of the matrix, or of each row [n]

  template <class S>
  const S* scales() const {
    FTBERT_CHECK(!scale || format->scales == kDType<S>, "expected scales in ", to_string(kDType<S>), ", those of ",
                 format->name, " are ", to_string(format->scales));
    return static_cast<const S*>(scale);
  }
};
// Of a matrix in q8_0 on a GPU.
inline const half_t* q8_0_scales(const Matrix& matrix) { return q8_0_scales(matrix.data, matrix.n, matrix.k); }

// What gammas, betas and biases of the norms on both sides of a product make of it, float [n] on the device: of a
// product behind a norm by moments, and of one ahead (gpu/deferred_norm.h). They are made at load (layers/prepared.h).
// With a weight in E4M3 `scale` is what the sums are multiplied by first, else nullptr.
struct CorrectionVectors {
  const float *add = nullptr, *slope = nullptr, *scale = nullptr;
};
struct SumVectors {
  const float *add = nullptr, *gamma = nullptr, *scale = nullptr;
  const float* unscale = nullptr;     // one
  const float* copy_scale = nullptr;  // one, of the copy in E4M3 that the next product reads; nullptr: it reads 16 bits
};

// A matrix and its bias; T is the residual stream's type.
template <class T>
struct Linear {
  Matrix weight;
  const T* bias = nullptr;  // [n] or nullptr
  // Of the other operand, by weight.format->other: its one scale, or what its columns are multiplied by before they are
  // stored in byte rows [k].
  const float* input = nullptr;
  Shard shard = {};  // not whole: its results are this rank's part of a sum over ranks
  CorrectionVectors behind_norm;
  SumVectors ahead_of_norm, unread;  // unread: where no product follows
};

// A layer's product over m rows of a, stored as c. The bias counts where the layer has one.
template <class T>
Product product_of(const Linear<T>& linear, int64_t m, const Operand& a, DType c, Epilogue epilogue) {
  epilogue.bias = epilogue.bias && linear.bias;
  const Matrix& b = linear.weight;
  return {.m = m, .n = b.n, .k = b.k, .a = a.dtype(), .b = b.format, .c = c, .epilogue = epilogue};
}
// The same where both edges are of the stream's type.
template <class T>
Product product_of(const Linear<T>& linear, int64_t m, Epilogue epilogue) {
  return product_of(linear, m, Operand::of<T>(nullptr), kDType<T>, epilogue);
}

}  // namespace ftbert
