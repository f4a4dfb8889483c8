// Matrix products: describe (product.h) -> choose (plans.h: a plan, made once per shape and kept) -> run. Float sums.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>

#include "core/context.h"
#include "core/norm.h"
#include "gemm/product.h"
#include "kernels/kernels.h"

namespace ftbert {

// out = epilogue(a @ weight^T), a [m, k]. `out` says where [m, n] numbers of T have room, and in which type the next
// step wishes to read the result. What comes back says where it is and in which type: the one wished for, or T where no
// product stores that; at out.data, or in memory of a library, valid until the next product into the same out.data or
// the end of the call. An activation that the library cannot apply exactly runs as add_bias_act after the product. A
// weight in E4M3 is multiplied by an operand in E4M3; the scales of both, of a result in E4M3 too, lie on the device
// and are known before the call: kernels read them while the one ahead may still be at work. With a gate the result is
// [m, n / 2], and `out` has room behind it for the [m, n] numbers of T that add_bias_gate reads where the product does
// not apply it.
template <class Device, class T>
Operand linear(Context<Device>& context, const Linear<T>& linear, const Operand& a, int64_t m, Epilogue epilogue,
               const Operand& out);

// Of Context::weight_scratch that such a product of so many rows needs: a GPU without a kernel for weights in Q8_0
// makes 16-bit ones of them first.
template <class Device, class T>
size_t weight_scratch_bytes(const Context<Device>&, const Linear<T>&, int64_t) {
  return 0;
}
template <class T>
size_t weight_scratch_bytes(const Context<Cuda>& context, const Linear<T>& linear, int64_t rows);

// An operand at `memory` as the product `next` wishes to read it: in the type that it does not convert first, with the
// scales that it knows.
template <class Device, class T>
Operand wished_by(const Linear<T>& next, T* memory);

// How many rows the next product should take where `rows` are left: fewer, or up to kGemmRowSlack more, which are
// computed from whatever lies there and never read. A CPU library that compiles a kernel per m so meets few of them; a
// GPU takes all rows at once, at an m that the tuner measures or one a little below (cuda_gemm_rows).
template <class Device>
inline constexpr int64_t kGemmRowSlack = 15;
template <>
inline constexpr int64_t kGemmRowSlack<Cuda> = 63;
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
  const int64_t step = rows <= 32 ? 8 : rows <= 128 ? 16 : rows <= 1024 || rows > 4096 ? 64 : 32;
  return (rows + step - 1) / step * step;
}

// `linear` over m rows in as many products as gemm_rows says; a and out have room for kGemmRowSlack more rows. All of
// the result lies in one piece.
template <class Device, class T>
Operand linear_all(Context<Device>& context, const Linear<T>& linear, const Operand& a, int64_t m, Epilogue epilogue,
                   const Operand& out);

// Memory in which a product's blocks tell each other of their rows' moments (own/wgmma_norm.h; nullptr: none), and how
// many products have used it in this call.
struct ExchangedMoments {
  uint64_t* data = nullptr;
  int64_t count = 0;
  int turn = 0;
};

// Whether there are products that contain a norm, of rows or of heads: beside a stream of 16 bits on a GPU.
template <class Device, class T>
inline constexpr bool kNormInsideProducts = !std::is_same_v<Device, Cpu> && !std::is_same_v<T, float>;

// x [rows, n] = norm(a @ weight^T + bias + x) in one kernel, a [m, k] with m = gemm_rows(rows): to.normed is x. With
// to.sum, x = a @ weight^T + bias + x there and its norm at to.copy. With a weight in E4M3 to.copy may be E4M3, and
// beside to.normed too. False, and nothing runs, where no kernel contains that norm or stores that copy, there is no
// memory for moments, or the plan says that a product and a norm are faster. The kernel directly ahead must not write x
// (own/wgmma_norm.h).
template <class Device, class T>
bool linear_norm(Context<Device>& context, const Linear<T>& linear, const Operand& a, int64_t m, const Norm<T>& norm,
                 int64_t rows, ExchangedMoments& moments, const Output<T>& to);

// out [rows, n] = a @ weight^T + bias, its heads of queries and keys as `rotary` leaves them, in one kernel. a and out
// have room for kGemmRowSlack more rows. False, and nothing runs, where the plan says that a product and then `rotary`
// are faster, or no product does this to such heads. The positions must be there before the kernel directly ahead
// begins. cache: where keys and values go next, which `rotary` does on its way.
template <class Device, class T>
bool linear_turned(Context<Device>& context, const Linear<T>& linear, const Operand& a, int64_t rows,
                   const Heads& heads, const HeadRules<T>& rules, const CacheRows<T>& cache, const Operand& out);

// c = a @ b for each of product.batch, without an epilogue. C is T, or float where the next step wants the sums
// unrounded (attention scores); the types of `product` are those of the arguments.
template <class Device, class T, class C>
void gemm(Context<Device>& context, const Product& product, const T* a, const T* b, C* c);

// The CPU's matrix products, handed down: by the binding (what PyTorch carries) or cblas.cpp (standalone).
// One object serves one call at a time.
struct CpuProducts {
  virtual ~CpuProducts() = default;
  virtual int64_t rows(int64_t left) const { return left; }  // gemm_rows
  // As the function of that name. in_one_piece: the result is not opaque.
  virtual Operand linear(const Linear<float>& linear, const Operand& a, int64_t m, Epilogue epilogue,
                         const Operand& out, bool in_one_piece) = 0;
  virtual void gemm(const Product& product, const float* a, const float* b, float* c) = 0;

  // How many threads can each have an object like this to themselves, and work(i, its own) for i < count at once, each
  // on one thread.
  virtual int64_t threads() const { return 1; }
  virtual void each_alone(int64_t count, const std::function<void(int64_t i, CpuProducts& own)>& work) {
    for (int64_t i = 0; i < count; ++i) work(i, *this);
  }
};

// cblas.cpp: any CBLAS chosen at build time, or a plain loop where there is none; `cblas_name` says which.
CpuProducts& cblas_products();
std::string cblas_name();

// Error where no product here multiplies operands of the stream's type by a weight stored like this, or with these
// scales: the one place that knows which storage types are computed on a device. capability: of a GPU, 10 * major +
// minor.
void check_product_exists(DeviceKind device, int capability, DType stream, const Matrix& weight,
                          const std::optional<InputScale>& input = {});
template <class Device, class T>
void check_product_exists(const Context<Device>& context, const Linear<T>& linear) {
  if constexpr (std::is_same_v<Device, Cuda>)
    check_product_exists(DeviceKind::cuda, context.capability, kDType<T>, linear.weight, linear.input);
  else
    check_product_exists(DeviceKind::cpu, 0, kDType<T>, linear.weight, linear.input);
}

}  // namespace ftbert
