// The one door for a layer's products: what its sums may become, and what was made of them.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/context.h"
#include "core/edge.h"
#include "gemm/product.h"
#include "kernels/kernels.h"

namespace ftbert {

// Memory in which a product's blocks tell each other of their rows' moments (gpu/contained_norm.h; nullptr: none), and
// how many products have used it in this call.
struct ExchangedMoments {
  uint64_t* data = nullptr;
  int64_t count = 0;
  int turn = 0;
};

// Who norms the rows between the products of a call (layers/prepared.h).
enum class NormedBy {
  kernels,  // norm kernels, or the product ahead whole
  reader,   // the product behind, of up to eight rows (gpu/own.h), which also adds to the residual
  moments,  // the products on both sides (gpu/deferred_norm.h)
};

// The same, of the products of one block.
struct Deferral {
  NormedBy by = NormedBy::kernels;
  RowMoments moments = {};         // of the block's sum: its first product clears them, its last adds to them
  uint32_t* tile_count = nullptr;  // by `reader`: one, 0 between products, for each of two that overlap
};

// Heads of queries and keys that are to be normed and turned, as `rotary` does. The positions are there before the
// kernel directly ahead begins. cached: keys and values go to a cache next, which `rotary` does on its way.
template <class T>
struct HeadsWish {
  Heads heads;
  HeadRules<T> rules;
  bool cached = false;
};

// The residual sum that the result belongs to, and the norm of it. The kernel directly ahead must not write to.sum or
// to.normed (gpu/contained_norm.h).
template <class T>
struct Residual {
  Edge<T> stream;                         // [rows, n] that the result is added to
  int64_t rows = 0;                       // that there are of it; the product may compute more
  Norm<T> norm = {};                      // of the sum; none: the sum is the stream
  Output<T> to = {};                      // where sum and norm go
  bool read = false;                      // by a product, which may take over the norm
  ExchangedMoments* exchanged = nullptr;  // nullptr: no product contains the norm
};

// What becomes of a product's sums.
template <class T>
struct Ending {
  bool bias = true;  // where the layer has one
  Activation activation = Activation::none;
  Gate gate = Gate::none;
  const HeadsWish<T>* heads = nullptr;
  const Residual<T>* residual = nullptr;
  Deferral deferral = {};
  bool in_one_piece = false;  // in plain memory, whatever the library, and of just as many rows as are asked for
};

// What `linear` has made. Of `heads` and `residual` it does all or nothing; without the residual the bias is left too.
template <class T>
struct Made {
  Edge<T> rows;        // the result; or, `added`, what the next product reads of the sum, where a norm is left to it
  bool heads = false;  // are normed and turned
  bool added = false;  // to the residual, and normed, or the norm is pending on `rows`
};

// out = ending(a @ weight^T), a [m, k]. `out` says where [m, n] numbers of T have room, and in which type the next step
// wishes to read the result. Returns the place and the type of the result. Its type is the wished one, or T where no
// product stores that. It is at out.data, or in memory of a library, valid until the next product into the same
// out.data or the end of the call. What no product does while it stores, kernels do behind it; heads, the residual and
// its norm are then the caller's. A weight in E4M3 is multiplied by an operand in E4M3, one in int8 by byte rows;
// scales of matrices, of an operand and of a result in E4M3 lie on the device and are known before the call: kernels
// read them while the one ahead may still be at work. With a gate the result is [m, n / 2], and `out` has room behind
// it for the [m, n] numbers of T that add_bias_gate reads where the product does not apply it. In one piece a and out
// have room for kGemmRowSlack more rows. On a GPU a always has memory for rows_in_tiles(m) rows, and so
// has the stream of a residual.
template <class Device, class T>
Made<T> linear(Context<Device>& context, const Linear<T>& linear, const Edge<T>& a, int64_t m, const Ending<T>& wish,
               const Operand& out);

// Whether one kernel of ours does all of a product by this weight, as plans choose for it.
template <class Device, class T>
bool is_one_kernel(const Context<Device>&, const Linear<T>&, const Product&) {
  return false;
}
template <class T>
bool is_one_kernel(const Context<Cuda>& context, const Linear<T>& linear, const Product& product);

// Of Context::weight_scratch that such a product of so many rows needs: a GPU without a kernel for weights in Q8_0
// makes 16-bit ones of them first.
template <class Device, class T>
size_t weight_scratch_bytes(const Context<Device>&, const Linear<T>&, int64_t) {
  return 0;
}
template <class T>
size_t weight_scratch_bytes(const Context<Cuda>& context, const Linear<T>& linear, int64_t rows);

// An operand at `memory` as the product `next` wishes to read it: in the format that it does not convert first, with
// the scales that it knows.
template <class T>
Operand wished_by(const Linear<T>& next, T* memory) {
  const Format* const format = next.weight.format->other;
  return format ? Operand{memory, format, next.input} : Operand::of(memory);
}

// How many rows the next product should take where `rows` are left: fewer, or up to kGemmRowSlack more, which are
// computed from whatever lies there and never read. A CPU library that compiles a kernel per m so meets few of them; a
// GPU takes all rows at once, at an m that the tuner measures or one a little below (cuda_gemm_rows).
template <class Device>
inline constexpr int64_t kGemmRowSlack = 15;
template <>
inline constexpr int64_t kGemmRowSlack<Cuda> = 63;
static_assert(kReadRows % (kGemmRowSlack<Cuda> + 1) == 0, "rows that are computed lie within those that are read");
template <class Device>
int64_t gemm_rows(const Context<Device>& context, int64_t rows);

// The same of the products by this weight: of few rows by one in Q8_0 just them, whose kernel has no tile to fill.
template <class Device, class T>
int64_t product_rows(const Context<Device>& context, const Linear<T>&, int64_t rows) {
  return gemm_rows(context, rows);
}
template <class T>
int64_t product_rows(const Context<Cuda>& context, const Linear<T>& linear, int64_t rows);

// Packed tokens give every m. Padding m is nearly free where tiles have 64 rows, except below 32 rows (19 that ran as
// 32 were up to 5.5 % behind) and where there are many: at most 1.6 % more of them from 1024 on.
inline int64_t cuda_gemm_rows(int64_t rows) {
  constexpr int64_t kMost = kGemmRowSlack<Cuda> + 1;
  const int64_t step = rows <= 32 ? 8 : rows <= 128 ? 16 : rows <= 1024 || rows > 4096 ? kMost : 32;
  return (rows + step - 1) / step * step;
}

// Whether there are products that contain a norm, of rows or of heads: beside a stream of 16 bits on a GPU.
template <class Device, class T>
inline constexpr bool kNormInsideProducts = !std::is_same_v<Device, Cpu> && !std::is_same_v<T, float>;

}  // namespace ftbert
