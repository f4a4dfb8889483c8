// From torch's words to the core's: devices, dtypes, streams, and checks that name what is wrong.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "binding/gemm_torch.h"
#include "core/check.h"
#include "core/device.h"
#include "core/dispatch.h"

namespace ftbert::binding {

template <class T>
struct ScalarTypeOf;
template <>
struct ScalarTypeOf<float> {
  static constexpr at::ScalarType value = at::kFloat;
};
template <>
struct ScalarTypeOf<half_t> {
  static constexpr at::ScalarType value = at::kHalf;
};
template <>
struct ScalarTypeOf<bfloat16_t> {
  static constexpr at::ScalarType value = at::kBFloat16;
};

inline DeviceKind device_kind(const at::Device& device) {
  check(device.is_cpu() || device.is_cuda(), "ftbert runs on cpu and cuda, got ", device.str());
  return device.is_cpu() ? DeviceKind::cpu : DeviceKind::cuda;
}

inline DType dtype_of(at::ScalarType type) {
  check(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
        "expected float32, float16 or bfloat16, got ", at::toString(type));
  return type == at::kFloat ? DType::fp32 : type == at::kHalf ? DType::fp16 : DType::bf16;
}

template <class T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(const_cast<void*>(tensor.const_data_ptr()));
}

// nullptr for an absent tensor
template <class T>
T* data(const std::optional<at::Tensor>& tensor) {
  return tensor ? data<T>(*tensor) : nullptr;
}

// One call's context. The CUDA stream is the caller's current one, found without any CUDA header of torch, so that
// this source builds against CPU and CUDA builds of torch alike.
template <class Device>
struct CallContext;

template <>
struct CallContext<Cpu> {
  explicit CallContext(const at::Device&) { context.gemm = &gemm; }
  TorchGemm gemm;
  Context<Cpu> context;
};

template <>
struct CallContext<Cuda> {
  explicit CallContext(const at::Device& device)
      : context(cuda_context(device.index(), c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle())) {}
  Context<Cuda> context;
};

}  // namespace ftbert::binding
