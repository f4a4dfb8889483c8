// Matrix products: describe (product.h) -> choose (plans.h: a plan, made once per shape and kept) -> run. Float sums.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>

#include "gemm/linear.h"

namespace ftbert {

// c = a @ b for each of product.batch, without an epilogue. C is T, or float where the next step wants the sums
// unrounded (attention scores); the types of `product` are those of the arguments. On a GPU a has memory for
// rows_in_tiles(m) rows where the batch is one and b is [n, k].
template <class Device, class T, class C>
void gemm(Context<Device>& context, const Product& product, const T* a, const T* b, C* c);

// What a call on the CPU needs beside the kernels of its weights (cpu/kernel.h), handed down: by the binding (what
// PyTorch carries) or cblas.cpp (standalone). One object serves one call at a time.
struct CpuProducts {
  virtual ~CpuProducts() = default;
  virtual int64_t rows(int64_t left) const { return left; }  // gemm_rows
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

// ---- on CUDA; no CUDA header: plans_cuda.cpp, or gemm_none.cpp in a build without CUDA ----------------------------

// The cuBLASLt handle and the plans of one device: process-wide, made on first use, never destroyed, locked inside.
// cuBLASLt allocates when its handle is made, so the first use must not lie inside a stream capture.
ProductPlans* product_plans(int device);

// Workspace that Context<Cuda>::gemm_workspace should have on this device, 256-byte aligned.
size_t gemm_workspace_bytes(int device);

// "cuBLASLt 13.1.1": of the library loaded, not of the headers. Tuned tables are keyed by it.
std::string gemm_library_version();

// ---- which products there are --------------------------------------------------------------------------------------

// Error where no product here multiplies rows of a stream of this type by a weight of this format, and which of device,
// stream and format is in the way. gpu: where the device is one.
void check_format_exists(DeviceKind device, const Gpu& gpu, DType stream, const Format& weight);
// The same of a weight with its size and its scales.
void check_product_exists(DeviceKind device, const Gpu& gpu, DType stream, const Matrix& weight,
                          const float* input = nullptr);
template <class Device, class T>
void check_product_exists(const Context<Device>& context, const Linear<T>& linear) {
  if constexpr (std::is_same_v<Device, Cuda>)
    check_product_exists(DeviceKind::cuda, context, kDType<T>, linear.weight, linear.input);
  else
    check_product_exists(DeviceKind::cpu, {}, kDType<T>, linear.weight, linear.input);
  FTBERT_CHECK((std::is_same_v<Device, Cuda>) || linear.weight.kernel,
               "a weight on the CPU needs the kernel that reads it");
}

}  // namespace ftbert
