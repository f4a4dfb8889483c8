// The only device/dtype switch: everything above is asked once, everything below is a template.
#pragma once
#include <utility>

#include "core/check.h"
#include "core/types.h"

// The (device, element type) pairs that this build has: FTBERT_BACKENDS(X) expands to X(Device, T) for each;
// FTBERT_CUDA_TYPES(X) to X(T) for those of CUDA.
#ifdef FTBERT_CUDA
#define FTBERT_DEVICES(X) X(Cpu) X(Cuda)
#define FTBERT_CUDA_TYPES(X) X(float) X(half_t) X(bfloat16_t)
#define FTBERT_BACKENDS(X) X(Cpu, float) X(Cuda, float) X(Cuda, half_t) X(Cuda, bfloat16_t)
#else
#define FTBERT_DEVICES(X) X(Cpu)
#define FTBERT_CUDA_TYPES(X)
#define FTBERT_BACKENDS(X) X(Cpu, float)
#endif

// Instantiates a function template for CUDA's types, by its declaration. name, Cuda: name<Cuda, T>; name: name<T>,
// which no overload may have.
#define FTBERT_INSTANTIATE_ONE(...) template decltype(__VA_ARGS__) __VA_ARGS__;
#define FTBERT_INSTANTIATE_CUDA(name, ...)                        \
  FTBERT_INSTANTIATE_ONE(name<__VA_ARGS__ __VA_OPT__(, ) float>)  \
  FTBERT_INSTANTIATE_ONE(name<__VA_ARGS__ __VA_OPT__(, ) half_t>) \
  FTBERT_INSTANTIATE_ONE(name<__VA_ARGS__ __VA_OPT__(, ) bfloat16_t>)

namespace ftbert {

template <class D, class E>
struct Backend {
  using Device = D;
  using T = E;
};

// dispatch(kind, dtype, f): calls f(Backend<Device, T>{}) for the pair, or throws Error saying what there is.
template <class F>
decltype(auto) dispatch(DeviceKind device, DType dtype, F&& f) {
  if (device == DeviceKind::cpu) {
    FTBERT_CHECK(dtype == DType::fp32, "on the CPU ftbert computes in fp32, and products in bf16 if asked, got ",
                 to_string(dtype), "; load the model with dtype='fp32' or 'bf16'");
    return std::forward<F>(f)(Backend<Cpu, float>{});
  }
#ifdef FTBERT_CUDA
  if (dtype == DType::fp16) return std::forward<F>(f)(Backend<Cuda, half_t>{});
  if (dtype == DType::bf16) return std::forward<F>(f)(Backend<Cuda, bfloat16_t>{});
  if (dtype == DType::fp32) return std::forward<F>(f)(Backend<Cuda, float>{});
  throw Error("on the GPU ftbert computes in fp32, fp16 or bf16, got " + std::string(to_string(dtype)));
#else
  throw Error(
      "this build of ftbert has no CUDA; install its wheel for GPUs (+cu130), rebuild with FTBERT_CUDA=ON, or use the "
      "CPU");
#endif
}

}  // namespace ftbert
