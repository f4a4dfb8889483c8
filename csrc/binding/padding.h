// The kernel padding_offsets over torch's masks.
#pragma once
#include <ATen/core/Tensor.h>

#include "binding/tensors.h"
#include "kernels/kernels.h"

namespace ftbert::binding {

inline constexpr int64_t kInfoWords = sizeof(PaddingInfo) / sizeof(int64_t);
inline PaddingInfo* info_in(const at::Tensor& words) { return reinterpret_cast<PaddingInfo*>(data<int64_t>(words)); }

// The kernel padding_offsets for a mask of bool, uint8, int64 or float; an undefined one is all ones.
template <class Device>
void find_offsets(Context<Device>& context, const at::Tensor& mask, int64_t batch, int64_t seq,
                  const at::Tensor& cu_seqlens, const at::Tensor& to_padded, const at::Tensor& to_packed,
                  PaddingInfo* info) {
  const auto find = [&]<class M>(const M* ones) {
    padding_offsets<Device, M>(context, ones, batch, seq, data<int32_t>(cu_seqlens), data<int64_t>(to_padded),
                               data<int32_t>(to_packed), info);
  };
  if (!mask.defined()) return find(static_cast<const uint8_t*>(nullptr));
  if (mask.scalar_type() == at::kFloat) return find(data<const float>(mask));
  if (mask.scalar_type() == at::kLong) return find(data<const int64_t>(mask));
  find(data<const uint8_t>(mask));
}

}  // namespace ftbert::binding
