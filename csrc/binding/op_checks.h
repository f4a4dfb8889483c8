// What the ops of single kernels share: checks of their arguments, and the way to a device and an element type.
#pragma once

#include <limits>
#include <optional>
#include <type_traits>

#include "binding/tensors.h"
#include "binding/visible.h"
#include "core/check.h"
#include "core/dispatch.h"
#include "kernels/kernels.h"

namespace ftbert::binding {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline constexpr int64_t kAnyLength = std::numeric_limits<int64_t>::max();

// Of like's dtype and device, or absent.
inline void same(const char* name, const OptionalTensor& t, const Tensor& like, at::IntArrayRef shape) {
  FTBERT_CHECK(!t || (t->sizes() == shape && t->scalar_type() == like.scalar_type() && t->device() == like.device() &&
                      t->is_contiguous() && has_data(*t)),
               name, ": expected contiguous ", at::toString(like.scalar_type()), " ", shape_text(shape), " on ",
               like.device().str(), ", got ", describe(*t));
}

// value in [low, high]
inline void count(const char* name, int64_t value, int64_t low, int64_t high = std::numeric_limits<int32_t>::max()) {
  FTBERT_CHECK(value >= low && value <= high, name, ": expected ", low, " to ", high, ", got ", value);
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

// Of this rank, and of a type that a kernel has there.
inline void elements(const char* name, const Tensor& t, int64_t dims) {
  rank(name, t, dims);
  FTBERT_CHECK(is_element(t.scalar_type()), name, ": expected float32, float16 or bfloat16, got ", describe(t));
  FTBERT_CHECK(t.scalar_type() == at::kFloat || !t.is_cpu(), name, ": expected float32 on the CPU, got ", describe(t));
}

// Of a type that kernels have on GPUs, in any layout, and of like's device.
inline void element_tensor(const char* name, const Tensor& t, const Tensor& like) {
  plain(name, t);
  FTBERT_CHECK(is_element(t.scalar_type()) && t.device() == like.device(), name,
               ": expected float32, float16 or bfloat16 on ", like.device().str(), ", got ", describe(t));
}

// What index tensors hold is looked at on the CPU only: elsewhere the host would have to wait for it.

// cu_seqlens int32 [batch+1]: from 0, never falling, to at most `rows`, by at most `longest` at a time. -> batch, which
// is the one expected, if any.
FTBERT_VISIBLE int64_t check_offsets(const Tensor& cu_seqlens, const Tensor& like, int64_t rows,
                                     int64_t longest = kAnyLength, std::optional<int64_t> expected = std::nullopt);

// Elements [0, count) of an int32 or int64 vector, or those that `at` [count] names: low <= x < end.
FTBERT_VISIBLE void check_range(const char* name, const Tensor& indices, int64_t count, int64_t low, int64_t end,
                                const int64_t* at = nullptr);

// What an op stores in e4m3: out / scale, scale one float. Both or neither, of like's device.
FTBERT_VISIBLE Operand scaled_e4m3(const char* name, const OptionalTensor& out, const OptionalTensor& scale,
                                   const Tensor& like, at::IntArrayRef shape);

// f(Backend<Device, T>{}, the call's CallContext<Device>), T the element type of that DType
template <class F>
void run(const at::Device& device, DType dtype, F&& f) {
  dispatch(device_kind(device), dtype, [&]<class Device, class T>(Backend<Device, T> backend) {
    CallContext<Device> call(device);
    f(backend, call);
  });
}

// For x's device and element type.
template <class F>
void run(const Tensor& x, F&& f) {
  run(x.device(), dtype_of(x.scalar_type()), f);
}

// f(the call's Context<Cuda>, T{}), for what has kernels on GPUs alone (define_op_but_cpu).
template <class F>
void on_gpu(const Tensor& x, const F& f) {
  run(x, [&]<class Device, class T>(Backend<Device, T>, CallContext<Device>& call) {
    if constexpr (std::is_same_v<Device, Cuda>)
      f(call.context, T{});
    else
      fail("expected tensors on a GPU, got ", describe(x));
  });
}

}  // namespace ftbert::binding
