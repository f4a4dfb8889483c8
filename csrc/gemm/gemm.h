// Matrix products: describe -> choose (a plan, made once per shape and kept) -> run. FP32 accumulation everywhere.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "core/context.h"
#include "core/types.h"
#include "model/weights.h"

namespace ftbert {

// What is done to A @ W^T before it is stored.
struct Epilogue {
  bool bias = false;
  Activation activation = Activation::none;  // after the bias
  bool for_product = false;                  // the next product reads it, and nothing else does
  bool for_attention = false;                // the fused attention reads it next: linear_in_pieces
};

// out = epilogue(a @ weight^T), a [m, k], out [m, n]. Returns where the result is: `out`, or memory of a library
// that insists on its own, valid until the next product into the same `out` or the end of the call. With
// epilogue.for_product the library may keep it elsewhere: only a product can read what is returned, once.
// An activation that the library cannot fuse exactly runs as add_bias_act after the product.
template <class Device, class T>
const T* linear(Context<Device>& context, const Linear<T>& weights, const T* a, int64_t m, Epilogue epilogue, T* out);

// How many rows the next product should take where `rows` are left: fewer, or up to kGemmRowSlack more, which are
// computed from whatever lies there and never read. A CPU library that compiles a kernel per m so meets few of them; a
// GPU takes all rows at once, at an m that the tuner measures or one a little below (cuda_gemm_rows).
template <class Device>
inline constexpr int64_t kGemmRowSlack = 15;
template <>
inline constexpr int64_t kGemmRowSlack<Cuda> = 63;
template <class Device>
int64_t gemm_rows(const Context<Device>& context, int64_t rows);

// Packed tokens give every m; a GPU's tiles have 64 rows or more, of which the last is seldom full anyhow. But rows
// that nobody needs take time where there are few (19 that ran as 32 were up to 5.5 % behind), and power where there
// are many: 1.6 % more of them at most from 1024 on.
inline int64_t cuda_gemm_rows(int64_t rows) {
  const int64_t step = rows <= 32 ? 8 : rows <= 128 ? 16 : rows <= 1024 || rows > 4096 ? 64 : 32;
  return (rows + step - 1) / step * step;
}

// `linear` in as many products as gemm_rows says; a and out have room for kGemmRowSlack more rows. With
// epilogue.for_attention the CPU's result may lie at `out` in bf16 (CpuGemm::bf16_at): only attention can read it.
template <class Device, class T>
const T* linear_in_pieces(Context<Device>& context, const Linear<T>& weights, const T* a, int64_t m, Epilogue epilogue,
                          T* out);

// Memory in which a product's blocks tell each other of their rows (gemm_layernorm.h), and how many products have used
// it in this call.
struct NormMoments {
  uint64_t* data = nullptr;
  int64_t count = 0;
  int turn = 0;
};

// What the LayerNorm behind a product has to know.
template <class T>
struct ResidualNorm {
  const T* gamma = nullptr;  // [n]
  const T* beta = nullptr;   // [n]
  float eps = 0;
  NormMoments* moments = nullptr;  // of this call's products, on a GPU; nullptr: two kernels
};

// x [rows, n] = LayerNorm(a @ weight^T + bias + x) * gamma + beta, a [m, k] with m = gemm_rows(rows). One kernel where
// a tuned table says that it is faster than a product and a LayerNorm; `product` [m, n] is memory for what lies between
// these. The kernel directly ahead must not write x (NormGemm).
template <class Device, class T>
void linear_layernorm(Context<Device>& context, const Linear<T>& weights, const T* a, int64_t m,
                      const ResidualNorm<T>& norm, int64_t rows, T* product, T* x);

// c[i] = a[i] @ b[i] (or b[i]^T) for i < batch, contiguous: a [m, k], b [k, n] (or [n, k]), c [m, n].
struct GemmShape {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  bool b_transposed = true;
};

// C is T, or float where the next step wants the accumulator unrounded (attention scores).
template <class Device, class T, class C>
void gemm(Context<Device>& context, const GemmShape& shape, const T* a, const T* b, C* c);

// The CPU's matrix products, handed down: by the binding (what PyTorch carries) or gemm_cblas.cpp (standalone).
// One object serves one call at a time.
struct CpuGemm {
  virtual ~CpuGemm() = default;
  virtual int64_t rows(int64_t left) const { return left; }  // gemm_rows
  virtual const float* linear(const Linear<float>& weights, const float* a, int64_t m, Epilogue epilogue,
                              float* out) = 0;
  // Whether `linear` can leave what it makes in bf16 (m * n of them at `out`), with epilogue.for_attention.
  virtual bool leaves_bf16(const Linear<float>&) const { return false; }
  const float* bf16_at = nullptr;  // where it did, until attention has read it

  // How many threads can each have an object like this to themselves, and work(i, its own) for i < count at once, each
  // on one thread.
  virtual int64_t threads() const { return 1; }
  virtual void each_alone(int64_t count, const std::function<void(int64_t i, CpuGemm& own)>& work) {
    for (int64_t i = 0; i < count; ++i) work(i, *this);
  }
  virtual void gemm(const GemmShape& shape, const float* a, const float* b, float* c) = 0;
};

// gemm_cblas.cpp: any CBLAS chosen at build time, or a plain loop where there is none; `cblas_name` says which.
CpuGemm& cblas_gemm();
std::string cblas_name();

}  // namespace ftbert
