// What the ops of single kernels share: checks of their arguments, and the way to a device and an element type.
#pragma once
#include <c10/core/DeviceGuard.h>

#include <optional>

#include "binding/tensors.h"
#include "core/check.h"
#include "core/dispatch.h"

namespace ftbert::binding {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline void same(const char* name, const Tensor& t, const Tensor& like, at::IntArrayRef shape) {
  FTBERT_CHECK(
      t.sizes() == shape && t.scalar_type() == like.scalar_type() && t.device() == like.device() && t.is_contiguous(),
      name, ": expected contiguous ", at::toString(like.scalar_type()), " ", shape_text(shape), " on ",
      like.device().str(), ", got ", describe(t));
}

inline void same(const char* name, const OptionalTensor& t, const Tensor& like, at::IntArrayRef shape) {
  if (t) same(name, *t, like, shape);
}

inline void integers(const char* name, const Tensor& t, const Tensor& like, at::ScalarType type, int64_t least) {
  FTBERT_CHECK(
      t.dim() == 1 && t.size(0) >= least && t.scalar_type() == type && t.device() == like.device() && t.is_contiguous(),
      name, ": expected contiguous ", at::toString(type), " of at least ", least, " on ", like.device().str(), ", got ",
      describe(t));
}

inline void rank(const char* name, const Tensor& t, int64_t rank) {
  FTBERT_CHECK(t.dim() == rank && t.is_contiguous(), name, ": expected a contiguous tensor of rank ", rank, ", got ",
               describe(t));
}

// f(context, T{}) for x's device and dtype
template <class F>
void run(const Tensor& x, F&& f) {
  const c10::DeviceGuard guard(x.device());
  dispatch(device_kind(x.device()), dtype_of(x.scalar_type()), [&](auto backend) {
    using Device = typename decltype(backend)::Device;
    CallContext<Device> call(x.device());
    f(backend, call.for_products());
  });
}

// As `run`, for kernels that have no element type of their own.
template <class F>
void run_untyped(const at::Device& device, F&& f) {
  const c10::DeviceGuard guard(device);
  dispatch(device_kind(device), DType::fp32, [&](auto backend) {
    using Device = typename decltype(backend)::Device;
    CallContext<Device> call(device);
    f(backend, call.context);
  });
}

}  // namespace ftbert::binding
