// From torch's words to the core's: devices, dtypes, streams, and checks that name what is wrong.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "binding/stream_handle.h"
#include "binding/team.h"
#include "binding/tf32.h"
#include "binding/torch_products.h"
#include "core/check.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "gemm/gemm.h"

namespace ftbert::binding {

inline std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// "Long [3, 7] on cpu"
inline std::string describe(const at::Tensor& t) {
  return std::string(at::toString(t.scalar_type())) + " " + shape_text(t.sizes()) + " on " + t.device().str();
}

// Whether its storage reaches as far as its elements: it may have been resized since.
inline bool has_data(const at::Tensor& t) {
  return t.numel() == 0 || t.storage().nbytes() >= at::detail::computeStorageNbytes(
                                                       t.sizes(), t.strides(), t.element_size(), t.storage_offset());
}

// What kernels can read where it lies: not sparse, quantised, nested, complex, or without data.
inline void plain(const char* name, const at::Tensor& t) {
  const char* kind = !t.defined()                                       ? "none"
                     : t.is_nested()                                    ? "a nested one"
                     : t.is_mkldnn()                                    ? "one in a layout of oneDNN's"
                     : t.layout() != at::kStrided                       ? "a sparse one"
                     : t.is_quantized()                                 ? "a quantized one"
                     : t.is_complex()                                   ? "a complex one"
                     : t.is_meta()                                      ? "one on meta, which has no data"
                     : t.is_neg() || t._is_zerotensor()                 ? "one that is not materialised"
                     : !t.has_storage() || !(t.is_cpu() || t.is_cuda()) ? "one of another kind"
                     : !has_data(t)                                     ? "one whose storage is too short for it"
                                                                        : nullptr;
  FTBERT_CHECK(!kind, name, ": expected a dense tensor on the CPU or a GPU, got ", kind ? kind : "");
}

inline DeviceKind device_kind(const at::Device& device) {
  FTBERT_CHECK(device.is_cpu() || device.is_cuda(), "ftbert runs on cpu and cuda, got ", device.str());
  return device.is_cpu() ? DeviceKind::cpu : DeviceKind::cuda;
}

// Whether kernels have elements of this type.
inline bool is_element(at::ScalarType type) { return type == at::kFloat || type == at::kHalf || type == at::kBFloat16; }

inline DType dtype_of(at::ScalarType type) {
  FTBERT_CHECK(is_element(type), "expected float32, float16 or bfloat16, got ", at::toString(type));
  return type == at::kFloat ? DType::fp32 : type == at::kHalf ? DType::fp16 : DType::bf16;
}

// Of a matrix that no config names a format of: numbers with scales are recognised, to be refused.
inline const Format& stored_format(at::ScalarType type) {
  return type == at::kFloat8_e4m3fn ? formats::e4m3 : type == at::kChar ? formats::int8 : plain_format(dtype_of(type));
}

inline at::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::fp32: return at::kFloat;
    case DType::fp16: return at::kHalf;
    case DType::bf16: return at::kBFloat16;
    case DType::e4m3: return at::kFloat8_e4m3fn;
    case DType::int8: return at::kChar;
    case DType::uint8: return at::kByte;
  }
  fail("no type of torch is of that number");
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

// One call's context. The CUDA stream is the caller's current one; a GPU is the thread's current device while this
// lives: the default stream is another of each, and what is launched on it goes to the current device, without an
// error.
template <class Device>
struct CallContext;

template <>
struct CallContext<Cpu> {
  // measures: Team's
  explicit CallContext(const at::Device&, bool measures = true) : team(measures) { context.products = &products; }
  Context<Cpu>& for_products(size_t = 0) { return context; }
  Team team;
  TorchProducts products;
  Context<Cpu> context;
};

template <>
struct CallContext<Cuda> {
  explicit CallContext(const at::Device& device)
      : current(device),
        context(
            cuda_context(device.index(), native_handle(c10::impl::VirtualGuardImpl(device.type()).getStream(device)))) {
    context.plans = product_plans(context.device);
    context.gemm_workspace_bytes = gemm_workspace_bytes(context.device);
    context.tf32 = allows_tf32();
  }
  // Before products: the call's own, so that threads and streams cannot meet in it; torch's allocator makes it cheap.
  // weight_scratch: bytes that this call's weights in Q8_0 need.
  Context<Cuda>& for_products(size_t weight_scratch = 0) {
    if (!workspace.defined()) {
      workspace = bytes(context.gemm_workspace_bytes);
      context.gemm_workspace = workspace.data_ptr();
    }
    if (weight_scratch > context.weight_scratch_bytes) {
      scratch = bytes(weight_scratch);
      context.weight_scratch = scratch.data_ptr(), context.weight_scratch_bytes = weight_scratch;
    }
    return context;
  }
  at::Tensor bytes(size_t count) const {
    const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(context.device));
    return at::empty({static_cast<int64_t>(count)}, at::device(device).dtype(at::kByte));
  }
  const c10::DeviceGuard current;
  at::Tensor workspace, scratch;
  Context<Cuda> context;
};

}  // namespace ftbert::binding
