// What the ops of single kernels share: checks of their arguments, and the way to a device and an element type.
#pragma once
#include <c10/core/DeviceGuard.h>

#include <limits>
#include <optional>

#include "binding/index_checks.h"
#include "binding/tensors.h"
#include "core/check.h"
#include "core/dispatch.h"

namespace ftbert::binding {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline void same(const char* name, const Tensor& t, const Tensor& like, at::IntArrayRef shape) {
  FTBERT_CHECK(t.sizes() == shape && t.scalar_type() == like.scalar_type() && t.device() == like.device() &&
                   t.is_contiguous() && has_data(t),
               name, ": expected contiguous ", at::toString(like.scalar_type()), " ", shape_text(shape), " on ",
               like.device().str(), ", got ", describe(t));
}

// value in [low, high]
inline void count(const char* name, int64_t value, int64_t low, int64_t high = std::numeric_limits<int32_t>::max()) {
  FTBERT_CHECK(value >= low && value <= high, name, ": expected ", low, " to ", high, ", got ", value);
}

inline void same(const char* name, const OptionalTensor& t, const Tensor& like, at::IntArrayRef shape) {
  if (t) same(name, *t, like, shape);
}

inline void integers(const char* name, const Tensor& t, const Tensor& like, at::ScalarType type, int64_t least) {
  FTBERT_CHECK(t.dim() == 1 && t.size(0) >= least && t.scalar_type() == type && t.device() == like.device() &&
                   t.is_contiguous() && has_data(t),
               name, ": expected contiguous ", at::toString(type), " of at least ", least, " on ", like.device().str(),
               ", got ", describe(t));
}

inline void rank(const char* name, const Tensor& t, int64_t rank) {
  FTBERT_CHECK(t.dim() == rank && t.is_contiguous() && has_data(t), name, ": expected a contiguous tensor of rank ",
               rank, ", got ", describe(t));
}

// What a kernel has an element type for there.
inline void elements(const char* name, const Tensor& t) {
  const at::ScalarType type = t.scalar_type();
  FTBERT_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16, name,
               ": expected float32, float16 or bfloat16, got ", describe(t));
  FTBERT_CHECK(type == at::kFloat || !t.is_cpu(), name, ": expected float32 on the CPU, got ", describe(t));
}

// A table of `cols` columns, of x's dtype and device: its rows; 0 where there is none.
inline int64_t table_rows(const char* name, const OptionalTensor& t, const Tensor& x, int64_t cols) {
  if (!t) return 0;
  rank(name, *t, 2);
  same(name, *t, x, {t->size(0), cols});
  return t->size(0);
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
